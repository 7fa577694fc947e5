#include "mlxtape/models/quantize.h"

#include <algorithm>

#include "mlxtape/ops/elementwise.h"
#include "rope.h"

namespace mlxtape::models {

namespace {

using formats::Json;

Json block(WeightFormat format) {
  return Json::Object{{"group_size", format.group_size}, {"bits", format.bits}};
}

void expect_format(const WeightFormat& p) {
  const bool bits = p.bits >= 2 && p.bits <= 8 && p.bits != 7;
  if (!bits || (p.group_size != 32 && p.group_size != 64 && p.group_size != 128)) {
    throw Error(Errc::kArgument,
                "quantize_model: bits must be 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or 128, got " +
                    std::to_string(p.bits) + " in groups of " + std::to_string(p.group_size));
  }
}

// Few numbers on which all others depend.
bool decides(const Part& part) {
  return part.role == Role::kRouter || part.role == Role::kSharedGate;
}

WeightFormat if_divided(WeightFormat format, const Shape& shape) {
  return shape.back() % format.group_size == 0 ? format : WeightFormat{};
}

struct Recipe {
  std::string name;
  int low, high;
};
const std::vector<Recipe>& recipes() {
  static const std::vector<Recipe> all = {
      {"mixed_2_6", 2, 6}, {"mixed_3_4", 3, 4}, {"mixed_3_6", 3, 6}, {"mixed_4_6", 4, 6}};
  return all;
}

// "torch_dtype" and "dtype" where they are, here and under "text_config".
void name_type(Json& json, const char* name) {
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (json.find(key) != nullptr) json.set(key, name);
  }
  if (const Json* inner = json.find("text_config")) {
    Json changed = *inner;
    if (!changed.is_object()) return;
    name_type(changed, name);
    json.set("text_config", std::move(changed));
  }
}

}  // namespace

FormatRule usual_format(WeightFormat all) {
  expect_format(all);
  return [all](const Part& part) {
    return if_divided(decides(part) ? WeightFormat{8, 64} : all, part.shape);
  };
}

const std::vector<std::string>& mixed_recipes() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Recipe& recipe : recipes()) list.push_back(recipe.name);
    return list;
  }();
  return names;
}

FormatRule mixed_format(const std::string& recipe, int group_size, const ModelPlan& plan) {
  const auto found = std::find_if(recipes().begin(), recipes().end(),
                                  [&](const Recipe& r) { return r.name == recipe; });
  if (found == recipes().end()) {
    throw Error(Errc::kArgument,
                "quantize_model: a recipe must be mixed_2_6, mixed_3_4, mixed_3_6 or mixed_4_6, "
                "got " +
                    recipe);
  }
  const WeightFormat low{found->low, group_size}, high{found->high, group_size};
  expect_format(low);
  return [low, high, n = plan.layer_count()](const Part& part) {
    if (decides(part)) return if_divided({8, 64}, part.shape);
    const std::int64_t i = std::max<std::int64_t>(part.layer, 0);
    const bool matters = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
    const bool sensitive = part.role == Role::kValue || part.role == Role::kDown;
    const bool is_high = part.role == Role::kHead || (sensitive && matters);
    return if_divided(is_high ? high : low, part.shape);
  };
}

bool path_fits(std::string_view path, std::string_view pattern) {
  std::size_t at = 0, in = 0, star = std::string_view::npos, after = 0;
  while (at < path.size()) {
    if (in < pattern.size() && (pattern[in] == path[at] || pattern[in] == '?')) {
      ++at;
      ++in;
    } else if (in < pattern.size() && pattern[in] == '*') {
      star = in++;
      after = at;
    } else if (star != std::string_view::npos) {
      in = star + 1;
      at = ++after;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', in) == std::string_view::npos;
}

FormatRule format_with(FormatRule rule, std::vector<FormatException> exceptions) {
  for (const FormatException& one : exceptions) {
    if (one.format.bits != 0) expect_format(one.format);
  }
  return [rule = std::move(rule), exceptions = std::move(exceptions)](const Part& part) {
    for (auto one = exceptions.rbegin(); one != exceptions.rend(); ++one) {
      if (!path_fits(part.name, one->pattern)) continue;
      const std::int64_t row = part.shape.back();
      if (one->format.bits != 0 && row % one->format.group_size != 0) {
        throw Error(Errc::kArgument, "quantize_model: " + part.name + " has rows of " +
                                         std::to_string(row) +
                                         " values, no multiple of the group size " +
                                         std::to_string(one->format.group_size));
      }
      return one->format;
    }
    return rule(part);
  };
}

Model quantize_model(CommandEncoder& encoder, const Model& model, const FormatRule& rule,
                     ops::QuantizeRule rounding) {
  Model result = model;
  Quantization& all = result.config.quantization;
  Json::Object listed;
  for (const Slot& slot : slots(result.weights, result.config)) {
    if (!slot.is_weight) continue;
    if (!slot.weight->is_quantized()) {
      const WeightFormat format = rule(slot);
      if (format.bits == 0) {
        all.of[slot.name] = {};
        continue;
      }
      const nn::Adapter adapter = slot.weight->adapter;
      *slot.weight =
          ops::quantize(encoder, slot.weight->plain, {format.bits, format.group_size}, rounding);
      slot.weight->adapter = adapter;
    }
    const WeightFormat format{slot.weight->quantized.format.bits,
                              slot.weight->quantized.format.group_size};
    if (all.usual.bits == 0) all.usual = format;  // the embedding's, which is the first
    all.of[slot.name] = format;
    if (format.bits != all.usual.bits || format.group_size != all.usual.group_size) {
      listed.emplace_back(slot.name, block(format));
    }
  }
  if (all.usual.bits == 0) return result;
  Json said = block(all.usual);
  said.set("mode", "affine");
  for (auto& [path, format] : listed) said.set(path, std::move(format));
  result.config.json.set("quantization", said);
  result.config.json.set("quantization_config", said);
  return result;
}

Model dequantize_model(CommandEncoder& encoder, const Model& model) {
  Model result = model;
  for (const Slot& slot : slots(result.weights, result.config)) {
    if (!slot.is_weight || !slot.weight->is_quantized()) continue;
    *slot.weight = ops::dequantize(encoder, slot.weight->quantized);
  }
  result.config.quantization = {};
  result.config.json.erase("quantization");
  result.config.json.erase("quantization_config");
  return result;
}

Model cast_model(CommandEncoder& encoder, const Model& model, DType dtype) {
  if (!is_kernel_float(dtype)) {
    throw Error(Errc::kDType, std::string("cast_model: the type must be f32, f16 or bf16, got ") +
                                  name_of(dtype));
  }
  Model result = model;
  const auto cast = [&](Tensor& t) {
    t = ops::cast(encoder, t, dtype);
  };
  for (const Slot& slot : slots(result.weights, result.config)) {
    if (!slot.is_weight) {
      const bool stays = model.config.plan.wide_decay && slot.role == Role::kDecay;
      if (!stays) cast(*slot.tensor);
    } else if (slot.weight->is_quantized()) {
      cast(slot.weight->quantized.scales);
      cast(slot.weight->quantized.biases);
    } else {
      cast(slot.weight->plain);
    }
  }
  name_type(result.config.json, dtype == DType::kF32   ? "float32"
                                : dtype == DType::kF16 ? "float16"
                                                       : "bfloat16");
  result.ropes = make_ropes(result.config.plan, encoder, dtype);
  return result;
}

}  // namespace mlxtape::models
