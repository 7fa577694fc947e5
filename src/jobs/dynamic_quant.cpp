#include "mlxtape/jobs/dynamic_quant.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "dynamic_formats.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::jobs {

namespace {

[[noreturn]] void wrong(const std::string& what) {
  throw Error(Errc::kArgument, "dynamic_quant: " + what);
}

std::size_t quantized_bytes(std::int64_t elements, models::WeightFormat p, DType dtype) {
  const auto n = static_cast<std::size_t>(elements);
  if (p.bits == 0) return n * size_of(dtype);
  return n * static_cast<std::size_t>(p.bits) / 8 +
         2 * (n / static_cast<std::size_t>(p.group_size)) * size_of(dtype);
}

// What decides where a token goes.
bool is_router(const models::Part& part) {
  return part.role == models::Role::kRouter || part.role == models::Role::kSharedGate;
}

double bits_of(models::WeightFormat p, DType dtype) {
  return p.bits + 16.0 * static_cast<double>(size_of(dtype)) / p.group_size;
}

}  // namespace

void check_formats(const DynamicQuantOptions& options, DType dtype) {
  models::usual_format(options.low);
  models::usual_format(options.high);
  if (bits_of(options.high, dtype) > bits_of(options.low, dtype)) return;
  const auto text = [](models::WeightFormat p) {
    return std::to_string(p.bits) + " bits in groups of " + std::to_string(p.group_size);
  };
  wrong("high must be larger than low, " + text(options.low) + ", got " + text(options.high));
}

bool is_measured(const models::Part& part, const DynamicQuantOptions& options) {
  if (options.keep_routers && is_router(part)) return false;
  const std::int64_t row = part.shape.back();
  return row % options.low.group_size == 0 && row % options.high.group_size == 0;
}

models::WeightFormat format_of(const models::Part& part, const DynamicQuantOptions& options,
                               bool high) {
  if (is_measured(part, options)) return high ? options.high : options.low;
  const bool router = options.keep_routers && is_router(part);
  return router ? models::usual_format(options.low)(part) : models::WeightFormat{};
}

void write_sensitivities(const std::string& path, const Sensitivities& values) {
  formats::Json list = formats::Json::Array{};
  for (const auto& [module, value] : values) {
    list.array().push_back(formats::Json::Array{module, value});
  }
  write_whole(path, list.dump() + "\n", "sensitivities", WholeFile::Links::kReplace);
}

Sensitivities read_sensitivities(const std::string& path) {
  const formats::Json list = formats::Json::parse(read_whole(path, "sensitivities"), path);
  const auto fail = [&](const std::string& got) {
    throw Error(Errc::kIo, path + ": must be a list of [path, number], got " + shown(got));
  };
  if (!list.is_array()) fail(list.dump());
  Sensitivities values;
  std::set<std::string> seen;
  for (const formats::Json& row : list.array()) {
    if (!row.is_array() || row.array().size() != 2 || !row.array()[0].is_string() ||
        !row.array()[1].is_number()) {
      fail(row.dump());
    }
    values.emplace_back(row.array()[0].string(), row.array()[1].number());
    if (!seen.insert(values.back().first).second) fail(values.back().first + " twice");
  }
  return values;
}

double bits_per_weight(const models::Model& model, const models::FormatRule& rule) {
  std::size_t bytes = 0;
  std::int64_t elements = 0;
  for (const models::ConstSlot& slot : models::slots(model)) {
    const std::int64_t n = *element_count(slot.shape);
    elements += n;
    if (!slot.is_weight) {
      bytes += slot.tensor->bytes();
    } else if (slot.weight->is_quantized()) {
      const ops::QuantizedWeight& w = slot.weight->quantized;
      bytes += w.codes.bytes() + w.scales.bytes() + w.biases.bytes();
    } else {
      bytes += quantized_bytes(n, rule(slot), slot.weight->dtype());
    }
  }
  return 8 * static_cast<double>(bytes) / static_cast<double>(elements);
}

void require_target(const models::Model& model, double target_bits,
                    const DynamicQuantOptions& options) {
  check_formats(options, model.dtype());
  if (!std::isfinite(target_bits)) {
    wrong("the target must be a finite number, got " + std::to_string(target_bits));
  }
  const double least = bits_per_weight(
      model, [&](const models::Part& part) { return format_of(part, options, false); });
  if (least > target_bits) {
    wrong("the target must be at least " + std::to_string(least) +
          " bits per weight, the model's size with low alone, got " + std::to_string(target_bits));
  }
}

DynamicFormats choose_formats(const models::Model& model, const Sensitivities& values,
                              double target_bits, const DynamicQuantOptions& options) {
  require_target(model, target_bits, options);
  const std::map<std::string, double> of(values.begin(), values.end());
  std::set<std::string> known;
  std::vector<std::pair<std::string, double>> measured;  // in the model's order
  for (const models::Part& part : models::parts(model.config)) {
    if (!part.is_weight) continue;
    known.insert(part.name);
    if (!is_measured(part, options)) continue;
    const auto found = of.find(part.name);
    if (found == of.end()) wrong("there must be a sensitivity for " + part.name + ", got none");
    if (!std::isfinite(found->second)) {
      wrong("the sensitivity of " + part.name + " must be finite, got " +
            text_of_nonfinite(found->second));
    }
    measured.emplace_back(part.name, found->second);
  }
  for (const auto& [path, value] : values) {
    if (known.count(path) == 0) wrong(path + " has a sensitivity but is not a weight of the model");
  }

  const auto formats_at = [&](double threshold) {
    DynamicFormats p;
    p.threshold = threshold;
    auto high = std::make_shared<std::set<std::string>>();
    for (const auto& [path, value] : measured) {
      if (value <= threshold) continue;
      p.high.push_back(path);
      high->insert(path);
    }
    p.rule = [high, options](const models::Part& part) {
      return format_of(part, options, high->count(part.name) != 0);
    };
    p.bits_per_weight = bits_per_weight(model, p.rule);
    return p;
  };
  // A lower threshold never makes a model smaller, so the first one that fits is found by halving.
  std::set<double> levels{-std::numeric_limits<double>::infinity()};
  for (const auto& [path, value] : measured) levels.insert(value);
  const std::vector<double> all(levels.begin(), levels.end());
  std::size_t first = 0, last = all.size() - 1;
  DynamicFormats best = formats_at(all[last]);
  while (first < last) {
    const std::size_t middle = (first + last) / 2;
    DynamicFormats p = formats_at(all[middle]);
    if (p.bits_per_weight > target_bits) {
      first = middle + 1;
    } else {
      last = middle;
      best = std::move(p);
    }
  }
  return best;
}

}  // namespace mlxtape::jobs
