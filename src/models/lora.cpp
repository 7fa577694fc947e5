#include "mlxtape/models/lora.h"

#include <algorithm>
#include <cmath>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/random.h"

namespace mlxtape::models {

namespace {

bool ends_path(const std::string& path, const std::string& key) {
  if (!path.ends_with(key)) return false;
  return path.size() == key.size() || path[path.size() - key.size() - 1] == '.';
}

bool takes_adapter(const Part& part) { return part.is_weight && part.role != Role::kEmbedding; }

// weights: to be changed or not.
template <class W>
auto adapted_slots(W& weights, const Config& config) {
  auto all = slots(weights, config);
  std::erase_if(
      all, [](const auto& slot) { return !slot.is_weight || !slot.weight->adapter.defined(); });
  return all;
}

// w + scale·(a·b)ᵀ, in f32.
Tensor sum_of(CommandEncoder& encoder, const nn::Weight& w) {
  const Tensor numbers = w.is_quantized() ? ops::dequantize(encoder, w.quantized, DType::kF32)
                                          : ops::cast(encoder, w.plain, DType::kF32);
  const auto [a, b, scale, dropout, key] = w.adapter;
  const auto wide = [&](const Tensor& t) {
    return ops::cast(encoder, t, DType::kF32);
  };
  ops::MatmulOptions options;
  options.residual = numbers;
  const Tensor scaled = ops::multiply(encoder, wide(b), scale);
  if (a.rank() == 3) return ops::matmul(encoder, scaled, wide(a), options);
  return ops::matmul(encoder, ops::transpose(encoder, scaled, {1, 0}),
                     ops::transpose(encoder, wide(a), {1, 0}), options);
}

}  // namespace

std::vector<std::string> lora_modules(const Model& model, const LoraOptions& options) {
  const Config& c = model.config;
  const std::int64_t first = options.num_layers < 1 ? 0 : c.plan.layer_count() - options.num_layers;
  std::vector<std::string> chosen;
  std::vector<bool> used(options.keys.size());
  for (const Part& part : parts(c)) {
    if (!takes_adapter(part)) continue;
    bool wanted = options.keys.empty() && part.layer >= 0;
    for (std::size_t k = 0; k < options.keys.size(); ++k) {
      if (part.name != options.keys[k] && !ends_path(part.path, options.keys[k])) continue;
      used[k] = true;
      wanted = true;
      // A path from the root means that one, whichever layers the others are in.
      if (part.name == options.keys[k] && part.layer < first) chosen.push_back(part.name);
    }
    if (wanted && (part.layer >= first || part.layer < 0)) chosen.push_back(part.name);
  }
  for (std::size_t k = 0; k < used.size(); ++k) {
    if (used[k]) continue;
    throw Error(Errc::kArgument,
                "lora: keys must be ends of paths of the model's linear layers, "
                "such as self_attn.q_proj, got " +
                    options.keys[k]);
  }
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

Check lora_check(const Model& model, const LoraOptions& options) {
  if (options.rank < 1) {
    return Error(Errc::kArgument,
                 "lora: rank must be at least 1, got " + std::to_string(options.rank));
  }
  if (!std::isfinite(options.scale)) {
    return Error(Errc::kArgument,
                 "lora: scale must be a number, got " + std::to_string(options.scale));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    return Error(Errc::kArgument,
                 "lora: dropout must be from 0 to below 1, got " + std::to_string(options.dropout));
  }
  if (options.dropout == 0) return std::nullopt;
  const std::vector<std::string> chosen = lora_modules(model, options);
  for (const Part& part : parts(model.config)) {
    if (part.experts == 0 || std::find(chosen.begin(), chosen.end(), part.name) == chosen.end()) {
      continue;
    }
    return Error(Errc::kArgument, "lora: dropout must be 0 where experts have adapters, got " +
                                      std::to_string(options.dropout) + " and " + part.name +
                                      ": choose other modules by keys");
  }
  return std::nullopt;
}

void add_lora(CommandEncoder& encoder, Model& model, const LoraOptions& options,
              std::uint64_t seed) {
  require(lora_check(model, options));
  if (has_lora(model))
    throw Error(Errc::kArgument, "lora: the model must not already have adapters");
  const std::vector<std::string> chosen = lora_modules(model, options);
  ops::KeySequence keys(encoder, seed);
  for (const Slot& slot : slots(model.weights, model.config)) {
    if (std::find(chosen.begin(), chosen.end(), slot.name) == chosen.end()) continue;
    const std::int64_t in = slot.shape.back(), out = slot.shape[slot.shape.rank() - 2];
    const std::int64_t r = options.rank;
    const Shape a = slot.experts > 0 ? Shape{slot.experts, r, in} : Shape{in, r};
    const Shape b = slot.experts > 0 ? Shape{slot.experts, out, r} : Shape{r, out};
    const double most = 1 / std::sqrt(static_cast<double>(in));
    slot.weight->adapter = {
        ops::random_uniform(encoder, keys.next(encoder), a, DType::kF32, -most, most),
        encoder.zeros(b, DType::kF32), static_cast<float>(options.scale)};
  }
}

void remove_lora(Model& model) {
  for (const Slot& slot : adapted_slots(model.weights, model.config)) slot.weight->adapter = {};
}

bool has_lora(const Model& model) { return !adapted_slots(model.weights, model.config).empty(); }

std::vector<Parameter> lora_parameters(const Model& model) {
  std::vector<Parameter> result;
  for (const ConstSlot& slot : adapted_slots(model.weights, model.config)) {
    const nn::Adapter& adapter = slot.weight->adapter;
    result.push_back({slot.name + ".lora_a", adapter.a, adapter.a.shape()});
    result.push_back({slot.name + ".lora_b", adapter.b, adapter.b.shape()});
  }
  return result;
}

Tensor lora_dropout_key(CommandEncoder& encoder, std::uint64_t seed, std::int64_t batch) {
  // Two batches, or two seeds, that are neighbours begin from keys that have nothing in common.
  const Tensor of_seed = ops::random_key(encoder, seed);
  const Tensor of_batch = ops::random_key(encoder, static_cast<std::uint64_t>(batch));
  const Tensor both = ops::random_bits(encoder, of_seed, {2}, DType::kU32);
  return ops::add(encoder, both, of_batch);
}

Model watch_lora(Tape& tape, const Model& model, const LoraDropout& dropout) {
  Model watched = model;
  const std::vector<Slot> all = adapted_slots(watched.weights, watched.config);
  Tensor keys;
  if (dropout.part > 0) {
    keys = ops::split_key(tape.encoder(), dropout.key, static_cast<std::int64_t>(all.size()));
  }
  std::int64_t at = 0;
  for (const Slot& slot : all) {
    nn::Adapter& adapter = slot.weight->adapter;
    adapter.a = tape.watch(adapter.a);
    adapter.b = tape.watch(adapter.b);
    if (dropout.part > 0) {
      adapter.dropout = dropout.part;
      adapter.key = keys.select(0, at++);
    }
  }
  return watched;
}

Model fuse_lora(CommandEncoder& encoder, const Model& model, const FuseOptions& options) {
  Model fused = model;
  for (const Slot& slot : slots(fused.weights, fused.config)) {
    if (!slot.is_weight) continue;
    nn::Weight& w = *slot.weight;
    const bool adapted = w.adapter.defined();
    if (!adapted && !(options.dequantize && w.is_quantized())) continue;
    const DType dtype = w.dtype();
    const Tensor numbers = adapted ? ops::cast(encoder, sum_of(encoder, w), dtype)
                                   : ops::dequantize(encoder, w.quantized);
    if (w.is_quantized() && !options.dequantize) {
      w = ops::quantize(encoder, numbers, w.quantized.format, options.rounding);
    } else {
      w = numbers;
    }
  }
  if (options.dequantize) {
    fused.config.quantization = {};
    fused.config.json.erase("quantization");
    fused.config.json.erase("quantization_config");
  }
  return fused;
}

}  // namespace mlxtape::models
