// Whole blocks of Qwen3-Next-80B-A3B, forward and with every gradient: time and the memory they need at once.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <ostream>

#include "bench.h"
#include "cases/random.h"
#include "measure.h"
#include "mlxtape/nn/delta_net.h"
#include "mlxtape/nn/moe.h"
#include "mlxtape/nn/self_attention.h"

namespace mlxtape::bench {

namespace {

constexpr std::int64_t kWidth = 2048;

// Weights with an identity, as large as training has them.
class Maker {
 public:
  Maker(Tape& tape, DType dtype) : tape_(tape), dtype_(dtype) {}

  Tensor operator()(const Shape& shape) {
    const double deviation = 1 / std::sqrt(static_cast<double>(shape.back()));
    Tensor t = tape_.watch(random_tensor(tape_.encoder(), shape, dtype_, ++seed_, deviation));
    bytes += static_cast<std::int64_t>(t.size() * static_cast<std::int64_t>(size_of(dtype_)));
    return t;
  }
  std::int64_t bytes = 0;

 private:
  Tape& tape_;
  DType dtype_;
  std::uint64_t seed_ = 0;
};

using Layer = std::function<Tensor(const Tensor& x)>;

Layer delta_net(Tape& tape, Maker& make) {
  nn::DeltaNetWeights w;
  const nn::DeltaNetShape shape{16, 32, 128, 128};
  const std::int64_t keys = 16 * 128, values = 32 * 128;
  w.qkvz = make({2 * keys + 2 * values, kWidth});
  w.ba = make({2 * 32, kWidth});
  w.conv = make({2 * keys + values, 4});
  w.a_log = make({32});
  w.dt_bias = make({32});
  w.norm = make({128});
  w.out = make({kWidth, values});
  return [=, &tape](const Tensor& x) {
    return nn::delta_net(tape, x, w, shape).y;
  };
}

Layer self_attention(Tape& tape, Maker& make) {
  const nn::SelfAttentionShape shape{16, 2, 256, true, {64, 1e7}};
  const nn::SelfAttentionWeights w{make({16 * 2 * 256, kWidth}),
                                   make({2 * 256, kWidth}),
                                   make({2 * 256, kWidth}),
                                   make({kWidth, 16 * 256}),
                                   make({256}),
                                   make({256})};
  return [=, &tape](const Tensor& x) {
    return nn::self_attention(tape, x, w, shape);
  };
}

Layer moe(Tape& tape, Maker& make, std::int64_t experts) {
  const std::int64_t inner = 512;
  const nn::MoeWeights w{make({experts, kWidth}),
                         {make({experts, inner, kWidth}), make({experts, inner, kWidth}),
                          make({experts, kWidth, inner})},
                         {make({inner, kWidth}), make({inner, kWidth}), make({kWidth, inner})},
                         make({1, kWidth})};
  const std::int64_t chosen = std::min<std::int64_t>(10, experts);
  return [=, &tape](const Tensor& x) {
    return nn::moe(tape, x, w, {chosen, true});
  };
}

}  // namespace

void run_layers(Device& device, const BenchConfig& config, const LayersConfig& layers,
                std::ostream& out) {
  const auto encoder = device.make_encoder();
  char line[200];
  std::snprintf(line, sizeof line, "%s: %lld tokens in %s", device.name().c_str(),
                static_cast<long long>(layers.tokens), name_of(layers.dtype));
  out << line << "\n";
  std::snprintf(line, sizeof line, "%-16s %12s %12s %12s %12s %12s", "layer", "fwd ms",
                "fwd+bwd ms", "tokens/s", "weights MiB", "peak MiB");
  out << line << std::endl;
  Report report(device, config);
  report.set("tokens", layers.tokens);
  report.set("dtype", name_of(layers.dtype));
  const Shape shape{1, layers.tokens, kWidth};
  const auto show = [&](const std::string& name, const std::function<Layer(Tape&, Maker&)>& build) {
    Tape tape(*encoder);
    Maker make(tape, layers.dtype);
    const Layer layer = build(tape, make);
    const Tensor x = tape.watch(random_tensor(*encoder, shape, layers.dtype, 101));
    const Tensor dy = random_tensor(*encoder, shape, layers.dtype, 102);
    const auto forward = [&] {
      const Tape::NoGrad off(tape);
      static_cast<void>(layer(x));
      encoder->commit_and_wait();
    };
    const auto both = [&] {
      tape.backward(layer(x), dy);
      tape.clear_grads();
      encoder->commit_and_wait();
    };
    forward();
    both();
    device.memory().reset_peak();
    both();
    const std::size_t peak = device.memory().stats().peak;
    std::vector<double> once, twice;
    sample(forward, config.seconds, once);
    sample(both, config.seconds, twice);
    const double us = median(twice);
    std::snprintf(line, sizeof line, "%-16s %12.3f %12.3f %12.0f %12.1f %12.1f", name.c_str(),
                  median(once) / 1e3, us / 1e3, static_cast<double>(layers.tokens) / us * 1e6,
                  static_cast<double>(make.bytes) / (1 << 20),
                  static_cast<double>(peak) / (1 << 20));
    out << line << std::endl;
    report.add(Json::Object{{"layer", name},
                            {"fwd_us", median(once)},
                            {"fwd_bwd_us", us},
                            {"weight_bytes", make.bytes},
                            {"peak_bytes", count(peak)}});
  };
  show("delta_net", delta_net);
  show("self_attention", self_attention);
  show("moe", [&](Tape& tape, Maker& make) { return moe(tape, make, layers.experts); });
}

}  // namespace mlxtape::bench
