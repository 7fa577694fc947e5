#include "mlxtape/models/quantize.h"

namespace mlxtape::models {

namespace {

formats::Json block(Packing packing) {
  return formats::Json::Object{{"group_size", packing.group_size}, {"bits", packing.bits}};
}

}  // namespace

PackingRule usual_packing(Packing all) {
  const bool bits = all.bits == 2 || all.bits == 3 || all.bits == 4 || all.bits == 5 ||
                    all.bits == 6 || all.bits == 8;
  if (!bits || (all.group_size != 32 && all.group_size != 64 && all.group_size != 128)) {
    throw Error(Errc::kArgument,
                "quantize_model: bits must be 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or 128, got " +
                    std::to_string(all.bits) + " in groups of " + std::to_string(all.group_size));
  }
  return [all](const std::string& path, const Shape& shape) {
    const bool decides = path.ends_with("mlp.gate") || path.ends_with("shared_expert_gate");
    const Packing packing = decides ? Packing{8, 64} : all;
    return shape.back() % packing.group_size == 0 ? packing : Packing{};
  };
}

Model quantize_model(CommandEncoder& encoder, const Model& model, const PackingRule& rule,
                     ops::QuantizeRule rounding) {
  Model result = model;
  Quantization& all = result.config.quantization;
  formats::Json::Object listed;
  for (const Slot& slot : slots(result.weights, result.config)) {
    if (slot.weight == nullptr) continue;
    if (!slot.weight->is_packed()) {
      const Packing packing = rule(slot.name, slot.shape);
      if (packing.bits == 0) {
        all.of[slot.name] = {};
        continue;
      }
      const nn::Adapter adapter = slot.weight->adapter;
      *slot.weight =
          ops::quantize(encoder, slot.weight->plain, {packing.bits, packing.group_size}, rounding);
      slot.weight->adapter = adapter;
    }
    const Packing packing{slot.weight->packed.bits, slot.weight->packed.group_size};
    if (all.usual.bits == 0) all.usual = packing;  // the embedding's, which is the first
    all.of[slot.name] = packing;
    if (packing.bits != all.usual.bits || packing.group_size != all.usual.group_size) {
      listed.emplace_back(slot.name, block(packing));
    }
  }
  if (all.usual.bits == 0) return result;
  formats::Json said = block(all.usual);
  said.set("mode", "affine");
  for (auto& [path, packing] : listed) said.set(path, std::move(packing));
  result.config.json.set("quantization", said);
  result.config.json.set("quantization_config", said);
  return result;
}

}  // namespace mlxtape::models
