#include "mlxtape/models/config.h"

#include <algorithm>
#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::models {

namespace {

using formats::Json;

WeightFormat format(const Fields& fields, const std::string& path) {
  const std::string mode = fields.text("mode", "affine");
  if (mode != "affine") {
    throw Error(Errc::kIo, fields.source() + ": quantization of " + shown(path) +
                               " has the mode \"" + shown(mode) +
                               "\"; only \"affine\" is supported");
  }
  const auto bits = static_cast<int>(fields.whole("bits", 4));
  const auto group = static_cast<int>(fields.whole("group_size", 64));
  if (std::string(" 2 3 4 5 6 8 ").find(" " + std::to_string(bits) + " ") == std::string::npos) {
    throw Error(Errc::kIo, fields.source() + ": quantization of " + shown(path) +
                               " must have bits 2, 3, 4, 5, 6 or 8, got " + std::to_string(bits));
  }
  if (group != 32 && group != 64 && group != 128) {
    throw Error(Errc::kIo, fields.source() + ": quantization of " + shown(path) +
                               " must have a group_size of 32, 64 or 128, got " +
                               std::to_string(group));
  }
  return {bits, group};
}

Quantization parse_quantization(const Json& json, const std::string& source) {
  Quantization result;
  const Fields fields(json, source);
  const Json* block = fields.object("quantization");
  if (block == nullptr) {
    if (const Json* other = fields.object("quantization_config")) {
      if (other->find("quant_method") != nullptr) {
        throw Error(Errc::kIo, source + ": weights quantised by \"" +
                                   shown(Fields(*other, source).text("quant_method")) +
                                   "\" are not supported: convert the unquantised model");
      }
      block = other;
    }
  }
  if (block == nullptr) return result;
  result.usual = format(Fields(*block, source), "the model");
  for (const auto& [path, value] : block->object()) {
    if (value.is_object()) {
      result.of[path] = format(Fields(value, source), path);
    } else if (value.is_bool() && !value.boolean()) {
      result.of[path] = {};
    }
  }
  return result;
}

const Architecture& architecture_of(const std::string& type, const Architecture* own,
                                    const Fields& fields) {
  const auto fits = [&](const Architecture& one) {
    return std::find(one.types.begin(), one.types.end(), type) != one.types.end();
  };
  if (own != nullptr && fits(*own)) return *own;
  for (const Architecture& one : architectures()) {
    if (fits(one)) return one;
  }
  fields.fail("models of type \"" + shown(type) + "\" are not supported, only " +
              architecture_names());
}

}  // namespace

WeightFormat Quantization::of_module(const std::string& path) const {
  const auto found = of.find(path);
  return found == of.end() ? usual : found->second;
}

std::string architecture_names() {
  std::string names;
  for (const Architecture& one : architectures()) {
    for (const std::string& type : one.types) names += (names.empty() ? "" : ", ") + type;
  }
  return names;
}

Config Config::parse(const Json& json, const std::string& source, const Architecture* own) {
  const Fields top(json, source);
  Config c;
  c.model_type = top.text("model_type");
  const Architecture& architecture = architecture_of(c.model_type, own, top);
  const Json* nested =
      architecture.nested.empty() ? nullptr : top.object(architecture.nested.c_str());
  c.prefix = architecture.prefix;
  c.own_names = architecture.own_names;
  c.foreign = architecture.foreign;
  c.plan.tied = top.truth("tie_word_embeddings", false);
  architecture.read(Fields(nested == nullptr ? json : *nested, source), c.plan);
  if (const Check check = plan_check(c.plan)) {
    throw Error(Errc::kIo, source + ": " + std::string(check->what()));
  }
  c.quantization = parse_quantization(json, source);
  c.json = json;
  return c;
}

}  // namespace mlxtape::models
