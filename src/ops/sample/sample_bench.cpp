#include "mlxtape/ops/sample.h"

#include <span>
#include <vector>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

constexpr std::int64_t kVocabulary = 151936;
constexpr std::int64_t kRoom = 4096;  // of history, half of it full

struct Kind {
  const char* form;
  ops::SampleRow row;
  ops::SampleOptions options;
};

std::vector<Kind> kinds() {
  ops::SampleRow drawn, nucleus, few, penalties;
  drawn.temperature = nucleus.temperature = few.temperature = 1;
  nucleus.top_p = 0.9;
  few.top_k = 50;
  penalties = nucleus;
  penalties.repetition_penalty = 1.1;
  penalties.presence_penalty = penalties.frequency_penalty = 0.1;
  penalties.start = kRoom / 4;
  return {{"greedy", {}, {}},
          {"greedy, logprobs", {}, {true, false, false}},
          {"drawn", drawn, {}},
          {"top_p", nucleus, {}},
          {"top_k", few, {}},
          {"penalties", penalties, {}},
          {"top 20", nucleus, {true, true, false}}};
}

ops::SampleRows rows_of(CommandEncoder& encoder, const ops::SampleRow& row, std::int64_t count) {
  std::vector<float> numbers(static_cast<std::size_t>(count * ops::kSampleNumbers));
  std::vector<std::int32_t> whole(static_cast<std::size_t>(count * ops::kSampleWhole));
  ops::SampleRow own = row;
  for (std::int64_t b = 0; b < count; ++b, ++own.seed) {
    ops::put_sample_row(own,
                        std::span<float, ops::kSampleNumbers>(
                            numbers.data() + b * ops::kSampleNumbers, ops::kSampleNumbers),
                        std::span<std::int32_t, ops::kSampleWhole>(
                            whole.data() + b * ops::kSampleWhole, ops::kSampleWhole));
  }
  ops::SampleRows rows{encoder.empty({count, ops::kSampleNumbers}, DType::kF32),
                       encoder.empty({count, ops::kSampleWhole}, DType::kI32),
                       random_ids(encoder, {count, kRoom}, kVocabulary),
                       encoder.full({count}, DType::kI32, static_cast<double>(kRoom) / 2)};
  encoder.upload(numbers.data(), rows.numbers.bytes(), rows.numbers);
  encoder.upload(whole.data(), rows.whole.bytes(), rows.whole);
  return rows;
}

}  // namespace

// Flat logits: of deviation 1 top_p = 0.9 keeps half of the tokens.
std::vector<BenchCase> sample_bench_cases() {
  std::vector<BenchCase> cases;
  for (const std::int64_t count : {1, 8, 64}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Kind& kind : kinds()) {
        const std::int64_t bytes = count * kVocabulary * static_cast<std::int64_t>(size_of(dtype));
        cases.push_back(
            {kind.form, "fwd", std::to_string(count) + "x" + std::to_string(kVocabulary), dtype,
             bytes, 0, 1, 0, [=](CommandEncoder& encoder) {
               const Tensor logits = random_tensor(encoder, {count, kVocabulary}, dtype, 1);
               const ops::SampleRows rows = rows_of(encoder, kind.row, count);
               return [=, &encoder] {
                 ops::sample(encoder, logits, rows, kind.options);
               };
             }});
      }
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
