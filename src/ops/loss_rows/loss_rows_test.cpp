#include "mlxtape/ops/loss_rows.h"

#include <cmath>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

TEST(LossRowsCheck, SaysWhatIsWrong) {
  const auto rows = [](const Tensor& mask, const Tensor& targets) {
    ops::LossRowsOptions options;
    options.mask = mask;
    options.targets = targets;
    return ops::loss_rows_check(4, Backend::kCpu, options);
  };
  const auto targets = Tensor::meta({4}, DType::kI32);
  const ops::LossRows four{Tensor::meta({4}), targets, Tensor::meta({})};
  const auto reduce = [&](const Tensor& losses) {
    return ops::loss_rows_reduce_check(losses, four);
  };
  expect_refused({
      {"a mask of integers", rows(Tensor::meta({4}, DType::kI32), targets), Errc::kDType,
       "mask must be bool, f32, f16 or bf16, got i32"},
      {"a mask too short", rows(Tensor::meta({3}), targets), Errc::kShape, "a row, 4, got [3]"},
      {"a mask elsewhere", rows(Tensor::meta({4}, DType::kF32, Backend::kMetal), targets),
       Errc::kDevice, "mask must be on cpu, got metal"},
      {"targets of floats", rows({}, Tensor::meta({4})), Errc::kDType,
       "targets must be i32, u32 or i64, got f32"},
      {"targets of bytes", rows({}, Tensor::meta({4}, DType::kU8)), Errc::kDType, "got u8"},
      {"too many targets", rows({}, Tensor::meta({2, 3}, DType::kU32)), Errc::kShape, "got [2, 3]"},
      {"targets elsewhere", rows({}, Tensor::meta({4}, DType::kI64, Backend::kCuda)), Errc::kDevice,
       "targets must be on cpu, got cuda"},
      {"losses of 16 bits", reduce(Tensor::meta({4}, DType::kF16)), Errc::kDType, "got f16"},
      {"losses too long", reduce(Tensor::meta({5})), Errc::kShape, "a row, 4, got [5]"},
      {"losses elsewhere", reduce(Tensor::meta({4}, DType::kF32, Backend::kMetal)), Errc::kDevice,
       "losses must be on cpu, got metal"},
  });
  EXPECT_FALSE(rows(Tensor::meta({2, 2}, DType::kBool), Tensor::meta({4, 1}, DType::kI64)));
  EXPECT_FALSE(rows({}, {}));
}

class LossRows : public OnDevice {
 protected:
  struct Got {
    std::vector<double> weight, index;
    double scale;
  };
  Got run(std::int64_t rows, const ops::LossRowsOptions& options) {
    const ops::LossRows out = ops::loss_rows(encoder(), rows, options);
    return {download(out.weight), options.targets.defined() ? download(out.index) : Weights(),
            download(out.scale)[0]};
  }
  using Weights = std::vector<double>;
};

TEST_P(LossRows, CountWhatTheyShould) {
  for (const DType type : {DType::kI32, DType::kU32, DType::kI64}) {
    ops::LossRowsOptions options;
    options.targets = upload({3, 0, 7, 9, 8, 2}, {6}, type);
    options.classes = 8;
    options.ignore_index = 9;
    options.reduction = ops::Reduction::kMean;
    Got got = run(6, options);
    EXPECT_EQ(got.index, (Weights{3, 0, 7, -1, -1, 2}));
    EXPECT_EQ((Weights{got.weight.begin(), got.weight.begin() + 4}), (Weights{1, 1, 1, 0}));
    EXPECT_TRUE(std::isnan(got.weight[4])) << "a target outside";
    EXPECT_EQ(got.weight[5], 1);
    EXPECT_EQ(got.scale, round_to(DType::kF32, 1.0 / 5));

    options.mask = upload({1, 0, 1, 1, 0, 1}, {2, 3}, DType::kBool);
    got = run(6, options);
    EXPECT_EQ(got.weight, (Weights{1, 0, 1, 0, 0, 1})) << "a row that does not count is never NaN";
    EXPECT_EQ(got.scale, round_to(DType::kF32, 1.0 / 3));
    options.reduction = ops::Reduction::kSum;
    EXPECT_EQ(run(6, options).scale, 1);
    options.ignore_index = std::nullopt;
    EXPECT_TRUE(std::isnan(run(6, options).weight[3]));
    options.mask = {};
    EXPECT_EQ(run(6, options).weight[1], 1) << "target 0, and nothing to ignore";
  }
  ops::LossRowsOptions negative;
  negative.targets = upload({-100, -1, 1}, {3}, DType::kI32);
  negative.classes = 2;
  negative.ignore_index = -100;
  const Got got = run(3, negative);
  EXPECT_EQ(got.weight[0], 0);
  EXPECT_TRUE(std::isnan(got.weight[1]));
  EXPECT_EQ(got.weight[2], 1);
  EXPECT_EQ(got.index, (Weights{-1, -1, 1}));
}

TEST_P(LossRows, MasksOfEveryType) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    ops::LossRowsOptions options;
    options.mask = upload_strided({0.5, 0, 2, 0.25}, {4}, type);
    options.reduction = ops::Reduction::kMean;
    const Got got = run(4, options);
    EXPECT_EQ(got.weight, (Weights{0.5, 0, 2, 0.25}));
    EXPECT_EQ(got.scale, round_to(DType::kF32, 1 / 2.75));
    options.mask = upload({0, 0, 0, 0}, {4}, type);
    EXPECT_EQ(run(4, options).scale, 0) << "no row counts";
  }
  ops::LossRowsOptions none;
  EXPECT_EQ(run(3, none).weight, (Weights{1, 1, 1}));
  none.reduction = ops::Reduction::kMean;
  EXPECT_EQ(run(0, none).scale, 0);
}

TEST_P(LossRows, ReduceMatchesOracle) {
  for (const std::int64_t rows : {0, 1, 2, 31, 257, 1023, 1024, 1025, 5000}) {
    Noise noise(static_cast<std::uint64_t>(rows) + 1);
    const auto values = random_values(noise, rows, DType::kF32);
    const auto mask = random_values(noise, rows, DType::kF32);
    ops::LossRowsOptions options;
    options.mask = upload(mask, {rows}, DType::kF32);
    double sum = 0, sum_abs = 0, counts = 0, counts_abs = 0;
    for (const double v : values) sum += v, sum_abs += std::abs(v);
    for (const double w : mask) counts += w, counts_abs += std::abs(w);
    const Tensor losses = upload(values, {rows}, DType::kF32);
    const auto reduced = [&](ops::Reduction reduction) {
      options.reduction = reduction;
      return ops::loss_rows_reduce(encoder(), losses, ops::loss_rows(encoder(), rows, options),
                                   reduction);
    };
    const std::string at = std::to_string(rows) + " rows";
    EXPECT_EQ(download(reduced(ops::Reduction::kNone)), values);
    const Tensor total = reduced(ops::Reduction::kSum);
    EXPECT_EQ(total.rank(), 0);
    expect_close("sum of " + at, download(total), {{sum, sum_abs}}, DType::kF32, rows);
    const double mean = rows == 0 ? 0 : sum / counts;
    const double scale =
        rows == 0 ? 0 : sum_abs / std::abs(counts) + std::abs(mean) * counts_abs / std::abs(counts);
    expect_close("mean of " + at, download(reduced(ops::Reduction::kMean)), {{mean, scale}},
                 DType::kF32, rows);
  }
}

TEST_P(LossRows, SameBitsOnEveryRun) {
  Noise noise(5);
  const std::int64_t rows = 10000;
  ops::LossRowsOptions options;
  options.mask = upload(random_values(noise, rows, DType::kF32), {rows}, DType::kF32);
  options.reduction = ops::Reduction::kMean;
  const Tensor losses = upload(random_values(noise, rows, DType::kF32), {rows}, DType::kF32);
  expect_repeatable(encoder(), [&] {
    const ops::LossRows out = ops::loss_rows(encoder(), rows, options);
    return std::vector<Tensor>{
        out.scale, ops::loss_rows_reduce(encoder(), losses, out, ops::Reduction::kMean)};
  });
}

MT_ON_EVERY_BACKEND(LossRows);

}  // namespace
}  // namespace mlxtape::test
