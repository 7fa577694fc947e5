// Routes random tokens through a router of Qwen3-Next's size (512 experts, 10 for each token), forward
// and backward: shows a few scores, checks the gradient against double precision, and tells the time
// and the bandwidth reached.
#include <mlxtape/mlxtape.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

namespace {

using namespace mlxtape;

constexpr std::int64_t kTokens = 16384;
constexpr std::int64_t kExperts = 512;
constexpr std::int64_t kChosen = 10;

Tensor normal(CommandEncoder& encoder, Shape shape, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> numbers;
  const Tensor t = encoder.empty(shape, DType::kF32);
  for (float& v : t.host<float>()) v = numbers(bits);
  return t;
}

// The weights that a token's chosen logits give, in double: softmax over the chosen ones.
std::vector<double> scores_in_double(std::span<const float> logits,
                                     std::span<const std::uint32_t> chosen) {
  double sum = 0;
  std::vector<double> scores;
  for (const std::uint32_t e : chosen) sum += std::exp(static_cast<double>(logits[e]));
  for (const std::uint32_t e : chosen) {
    scores.push_back(std::exp(static_cast<double>(logits[e])) / sum);
  }
  return scores;
}

// The largest error of dlogits over some tokens, relative to the size of the terms; a NaN or a
// number where a zero belongs counts as infinite.
double gradient_error(const Tensor& logits, const ops::MoeRoute& route, const Tensor& dscores,
                      const Tensor& dlogits) {
  double worst = 0;
  for (std::int64_t t = 0; t < kTokens; t += 97) {
    const auto row = logits.select(0, t).host<float>();
    const auto chosen = route.indices.select(0, t).host<std::uint32_t>();
    const auto ds = dscores.select(0, t).host<float>();
    const auto s = scores_in_double(row, chosen);
    double mean = 0, size = 0;
    for (std::size_t j = 0; j < s.size(); ++j) mean += s[j] * ds[j];
    for (std::size_t j = 0; j < s.size(); ++j) size += std::abs(s[j] * ds[j]);
    std::vector<double> want(kExperts, 0.0);
    for (std::size_t j = 0; j < s.size(); ++j) want[chosen[j]] = s[j] * (ds[j] - mean);
    const auto got = dlogits.select(0, t).host<float>();
    for (std::size_t e = 0; e < want.size(); ++e) {
      const double error = std::abs(got[e] - want[e]) / size;
      worst = error <= worst ? worst : std::isnan(error) ? INFINITY : error;
    }
  }
  return worst;
}

double median_us(const std::function<void()>& call) {
  std::vector<double> samples;
  for (int i = 0; i < 21; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const auto end = std::chrono::steady_clock::now();
    samples.push_back(std::chrono::duration<double, std::micro>(end - start).count());
  }
  std::nth_element(samples.begin(), samples.begin() + 10, samples.end());
  return samples[10];
}

int demo() {
  Device& device = Device::cpu();
  const auto encoder = device.make_encoder();
  std::printf("%s, %d threads\n", device.name().c_str(), threads());
  std::printf("routing %lld tokens to %lld of %lld experts each, f32\n\n",
              static_cast<long long>(kTokens), static_cast<long long>(kChosen),
              static_cast<long long>(kExperts));
  const Tensor logits = normal(*encoder, {kTokens, kExperts}, 1);
  const Tensor dscores = normal(*encoder, {kTokens, kChosen}, 2);

  const ops::MoeRoute route = ops::moe_route(*encoder, logits, kChosen);
  const ops::MoeRouteSaved saved{logits, route.indices, route.scores, route.lse};
  const Tensor dlogits = ops::moe_route_backward(*encoder, saved, dscores);
  encoder->commit_and_wait();

  for (std::int64_t t = 0; t < 3; ++t) {
    std::printf("token %lld:", static_cast<long long>(t));
    const auto chosen = route.indices.select(0, t).host<std::uint32_t>();
    const auto scores = route.scores.select(0, t).host<float>();
    for (std::size_t j = 0; j < 5; ++j) std::printf("  expert %3u %.3f", chosen[j], scores[j]);
    std::printf("  ...\n");
  }
  const auto counts = route.counts.host<std::uint32_t>();
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  std::printf("tokens per expert: %u to %u\n\n", *least, *most);

  const double error = gradient_error(logits, route, dscores, dlogits);
  const bool right = error < 1e-6;
  std::printf("gradient against double precision: error %.1e of the terms' size, %s\n", error,
              right ? "right" : "WRONG");

  const double forward = median_us([&] { ops::moe_route(*encoder, logits, kChosen); });
  const double backward = median_us([&] { ops::moe_route_backward(*encoder, saved, dscores); });
  const double logit_bytes = 4.0 * kTokens * kExperts;
  const double choice_bytes = 4.0 * kTokens * kChosen;
  std::printf("forward  %8.0f us, %5.1f GB/s\n", forward,
              (logit_bytes + 2 * choice_bytes) / forward / 1e3);
  std::printf("backward %8.0f us, %5.1f GB/s\n", backward,
              (logit_bytes + 3 * choice_bytes) / backward / 1e3);
  return right ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return demo();
  } catch (const Error& e) {
    std::fprintf(stderr, "route_tokens: %s\n", e.what());
    return 1;
  }
}
