#include "formats/gguf_rope.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numbers>

#include "formats/real.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

namespace {

constexpr const char* kFactors = "rope_freqs.weight";

struct Llama3 {
  double factor = 8, low = 1, high = 4, original = 8192;
};

// What llama3's rule multiplies each period with.
std::vector<float> factors_by(const Llama3& rule, double base, std::int64_t dims) {
  std::vector<float> factors;
  for (std::int64_t j = 0; j < dims / 2; ++j) {
    const double exponent = static_cast<double>(2 * j) / static_cast<double>(dims);
    const double wavelength = 2 * std::numbers::pi * std::pow(base, exponent);
    double factor = 1;
    if (wavelength > rule.original / rule.low) {
      factor = rule.factor;
    } else if (wavelength >= rule.original / rule.high) {
      const double smooth = (rule.original / wavelength - rule.low) / (rule.high - rule.low);
      factor = 1 / ((1 - smooth) / rule.factor + smooth);
    }
    factors.push_back(static_cast<float>(factor));
  }
  return factors;
}

// Files hold the factors alone. Those of every model with such a rope come from one rule with the same three numbers, and with
// another factor, which the longest period has.
Json llama3_of_factors(const GgufFile& file, double base, std::int64_t dims) {
  const GgufTensor& tensor = file.tensor(kFactors);
  const auto count = *element_count(tensor.shape);
  std::vector<float> factors(static_cast<std::size_t>(count));
  dequantize(tensor.type, file.bytes(tensor), factors);
  if (count != dims / 2) {
    file.fail("tensor \"rope_freqs.weight\" must have " + std::to_string(dims / 2) +
              " factors, got " + std::to_string(count));
  }
  Llama3 rule;
  rule.factor = static_cast<double>(factors.back());
  const std::vector<float> want = factors_by(rule, base, dims);
  const bool same = std::equal(want.begin(), want.end(), factors.begin(), [](float a, float b) {
    return std::abs(a - b) <= 1e-4F * std::abs(a);
  });
  if (!same) {
    file.fail(
        "tensor \"rope_freqs.weight\" holds factors that are not those of a rope of type llama3, "
        "which is not supported: convert the original model");
  }
  return Json::Object{
      {"rope_type", "llama3"},
      {"factor", rule.factor},
      {"low_freq_factor", rule.low},
      {"high_freq_factor", rule.high},
      {"original_max_position_embeddings", static_cast<std::int64_t>(rule.original)}};
}

Json scaling_of(const GgufFile& file, const std::string& prefix, double base, std::int64_t dims) {
  if (file.has(kFactors)) return llama3_of_factors(file, base, dims);
  const std::string type(file.text(prefix + "type").value_or("none"));
  if (type == "none") return {};
  if (type != "linear" && type != "yarn") {
    file.fail("key \"" + shown(prefix) + "type\" must be none, linear or yarn, got \"" +
              shown(type) + "\"");
  }
  const std::optional<double> factor = file.number(prefix + "factor");
  if (!factor) file.fail_key(prefix + "factor", "must be a number");
  Json scaling =
      Json::Object{{"rope_type", type}, {"factor", shortest(static_cast<float>(*factor))}};
  if (type == "linear") return scaling;
  if (const auto original = file.whole(prefix + "original_context_length")) {
    scaling.set("original_max_position_embeddings", *original);
  }
  for (const auto& [key, ours] :
       {std::pair("yarn_beta_fast", "beta_fast"), std::pair("yarn_beta_slow", "beta_slow")}) {
    if (const auto beta = file.number(prefix + key)) scaling.set(ours, *beta);
  }
  const double multiplier = file.number(prefix + "yarn_log_multiplier").value_or(0);
  if (multiplier != 0) file.fail_key(prefix + "yarn_log_multiplier", "must be 0 or missing");
  return scaling;
}

// The share of a head's channels that are rotated: as many as `dims` once it is multiplied again and cut to a whole number.
double share_of(std::int64_t dims, std::int64_t head_dim) {
  double share = static_cast<double>(dims) / static_cast<double>(head_dim);
  while (static_cast<std::int64_t>(static_cast<double>(head_dim) * share) < dims) {
    share = std::nextafter(share, 2.0);
  }
  return share;
}

const Json* object_in(const Json& sizes, const char* key) {
  const Json* found = sizes.find(key);
  return found != nullptr && found->is_object() ? found : nullptr;
}

double number_in(const Json* object, const char* key, double otherwise) {
  const Json* found = object == nullptr ? nullptr : object->find(key);
  return found != nullptr && found->is_number() ? found->number() : otherwise;
}

// What config.json says of the rope, in either of its forms.
struct Said {
  double base = 10000, share = 1;
  const Json* scaling = nullptr;
  std::string type = "default";
};

Said said_in(const Json& sizes) {
  Said said;
  const Json* parameters = object_in(sizes, "rope_parameters");
  said.scaling = object_in(sizes, "rope_scaling");
  if (said.scaling == nullptr) said.scaling = parameters;
  said.base = number_in(&sizes, "rope_theta", number_in(parameters, "rope_theta", 10000));
  said.share =
      number_in(&sizes, "partial_rotary_factor", number_in(parameters, "partial_rotary_factor", 1));
  if (said.scaling == nullptr) return said;
  for (const char* key : {"rope_type", "type"}) {
    const Json* type = said.scaling->find(key);
    if (type != nullptr && type->is_string()) said.type = type->string();
  }
  return said;
}

}  // namespace

double shortest(float value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  double result = 0;
  const std::string_view digits(text.data(), static_cast<std::size_t>(end - text.data()));
  return std::isfinite(value) && to_real(digits, result) ? result : static_cast<double>(value);
}

void read_gguf_rope(const GgufFile& file, const GgufArchitecture& architecture,
                    std::int64_t head_dim, Json& sizes) {
  const std::string prefix = std::string(architecture.name) + ".rope.";
  const double base = file.number(prefix + "freq_base").value_or(10000);
  const std::int64_t dims = file.whole(prefix + "dimension_count").value_or(head_dim);
  if (dims < 2 || dims > head_dim || (dims != head_dim && !architecture.partial_rope)) {
    file.fail("key \"" + prefix + "dimension_count\" must be " +
              (architecture.partial_rope ? "from 2 to the " : "the ") + std::to_string(head_dim) +
              " channels of a head, got " + std::to_string(dims));
  }
  const Json scaling = scaling_of(file, prefix + "scaling.", base, dims);
  const double theta = shortest(static_cast<float>(base)), share = share_of(dims, head_dim);
  if (architecture.rope_in_parameters) {
    Json parameters = Json::Object{
        {"rope_type", "default"}, {"rope_theta", theta}, {"partial_rotary_factor", share}};
    if (scaling.is_object()) {
      for (const auto& [key, value] : scaling.object()) parameters.set(key, value);
    }
    sizes.set("rope_parameters", std::move(parameters));
    return;
  }
  sizes.set("rope_theta", theta);
  if (architecture.partial_rope) sizes.set("partial_rotary_factor", share);
  if (scaling.is_object()) sizes.set("rope_scaling", scaling);
}

void write_gguf_rope(const Json& sizes, const GgufArchitecture& architecture, std::int64_t head_dim,
                     std::vector<GgufKey>& keys) {
  const std::string prefix = std::string(architecture.name) + ".rope.";
  const Said said = said_in(sizes);
  const auto dims =
      static_cast<std::int64_t>(static_cast<double>(head_dim) * std::clamp(said.share, 0.0, 1.0));
  keys.push_back({prefix + "freq_base", static_cast<float>(said.base)});
  keys.push_back({prefix + "dimension_count", static_cast<std::uint32_t>(dims)});
  if (architecture.rope_in_parameters) {
    // Pairs of channels by axis of a picture, which take turns. All axes of a text have the same position, but llama.cpp does not
    // rotate what belongs to none.
    const auto pairs = static_cast<std::int32_t>(dims / 2);
    keys.push_back({prefix + "dimension_sections",
                    std::vector<std::int32_t>{(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3, 0}});
  }
  if (said.type == "default" || said.type == "mrope" || said.type == "llama3") return;
  if (said.type != "linear" && said.type != "yarn") {
    throw Error(Errc::kArgument, "gguf: a rope of type \"" + shown(said.type) +
                                     "\" is not supported; default, linear, yarn and llama3 are");
  }
  keys.push_back({prefix + "scaling.type", said.type});
  keys.push_back(
      {prefix + "scaling.factor", static_cast<float>(number_in(said.scaling, "factor", 1))});
  if (said.type == "linear") return;
  const double original = number_in(said.scaling, "original_max_position_embeddings", 4096);
  keys.push_back(
      {prefix + "scaling.original_context_length", static_cast<std::uint32_t>(original)});
  for (const auto& [key, ours, usual] : {std::tuple("yarn_beta_fast", "beta_fast", 32.0),
                                         std::tuple("yarn_beta_slow", "beta_slow", 1.0)}) {
    const double beta = number_in(said.scaling, ours, usual);
    if (beta != usual) {
      keys.push_back({prefix + "scaling." + key, static_cast<float>(beta)});
    }
  }
  if (number_in(said.scaling, "mscale", 1) != 1 ||
      number_in(said.scaling, "mscale_all_dim", 0) != 0) {
    throw Error(Errc::kArgument,
                "gguf: a yarn rope with \"mscale\" or \"mscale_all_dim\" is not supported");
  }
}

std::vector<float> llama3_factors(const Json& sizes, std::int64_t head_dim) {
  const Said said = said_in(sizes);
  if (said.type != "llama3") return {};
  Llama3 rule;
  rule.factor = number_in(said.scaling, "factor", rule.factor);
  rule.low = number_in(said.scaling, "low_freq_factor", rule.low);
  rule.high = number_in(said.scaling, "high_freq_factor", rule.high);
  rule.original = number_in(said.scaling, "original_max_position_embeddings", rule.original);
  return factors_by(rule, said.base, head_dim);
}

}  // namespace mlxtape::formats
