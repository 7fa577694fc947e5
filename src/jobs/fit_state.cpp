#include "fit_state.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "checked_file.h"
#include "digits.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::jobs {

namespace {

using formats::Json;
using formats::NamedTensor;
using formats::SafetensorsFile;

constexpr const char* kOptimizer = "optimizer";  // the setting
constexpr const char* kFormat = "mlxtape fit 2";

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw Error(Errc::kIo, "fit: " + file + ": " + what);
}

Settings settings_of(const FitOptions& o, bool validates) {
  Settings s{{"accumulation", std::to_string(o.accumulation)},
             {"learning_rate", digits(o.learning_rate)},
             {"warmup", std::to_string(o.warmup)},
             {"cosine", o.cosine ? "on" : "off"},
             {"clip", digits(o.clip)},
             {"lazy_rows", o.lazy_rows ? "on" : "off"}};
  s.merge(o.optimiser->settings());
  s.try_emplace(kOptimizer, o.optimiser->name());
  if (o.cosine) {
    s["iterations"] = std::to_string(o.iterations);
    s["final_share"] = digits(o.final_share);
  }
  if (!o.schedule.name.empty()) s["schedule"] = to_string(o.schedule);
  if (validates) s["validate_every"] = std::to_string(o.validate_every);
  return s;
}

std::string text_of(const Settings& settings) {
  Json object = Json::Object{};
  for (const auto& [key, value] : settings) object.set(key, Json(value));
  return object.dump();
}

Json points_json(const std::vector<FitPoint>& points) {
  Json::Array array;
  for (const FitPoint& p : points) {
    array.push_back(Json::Array{Json(p.step), Json(p.loss), Json(p.rate), Json(p.norm),
                                Json(p.tokens_per_second)});
  }
  return array;
}

std::string text_of(const FitProgress& p) {
  return Json(Json::Object{{"step", Json(p.step)},
                           {"best_step", Json(p.best_step)},
                           {"best_loss", Json(p.best_loss)},
                           {"loss", Json(p.loss)},
                           {"seconds", Json(p.seconds)},
                           {"steps", Json(p.steps)},
                           {"tokens", Json(p.tokens)},
                           {"reports", points_json(p.reports)},
                           {"validations", points_json(p.validations)}})
      .dump();
}

// The metadata of a state, read with every value that must be there.
class Metadata {
 public:
  explicit Metadata(const SafetensorsFile& file) : file_(file) {
    const auto found = file.metadata().find("format");
    if (found == file.metadata().end() || found->second != kFormat) {
      fail(file.path(), std::string("must be a checkpoint (\"format\": \"") + kFormat +
                            "\"), got " +
                            (found == file.metadata().end() ? "none" : shown(found->second)));
    }
  }
  Json json(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) fail(file_.path(), "must have \"" + key + "\", got none");
    return Json::parse(found->second, file_.path() + ": " + key);
  }
  const Json& at(const Json& object, const std::string& key) const {
    const Json* value = object.find(key);
    if (value == nullptr) fail(file_.path(), "must have \"" + key + "\", got none");
    return *value;
  }
  std::vector<FitPoint> points(const Json& array) const {
    std::vector<FitPoint> points;
    for (const Json& each : array.array()) {
      const Json::Array& n = each.array();
      if (n.size() != 5) {
        fail(file_.path(), "a point must have 5 numbers, got " + std::to_string(n.size()));
      }
      points.push_back(
          {n[0].integer(), n[1].number(), n[2].number(), n[3].number(), n[4].number()});
    }
    return points;
  }

 private:
  const SafetensorsFile& file_;
};

// All that is written later counts on from these.
void check_progress(const std::string& file, const FitProgress& p) {
  const auto in_order = [&](const std::vector<FitPoint>& points) {
    std::int64_t before = 0;
    return std::all_of(points.begin(), points.end(), [&](const FitPoint& point) {
      return point.step >= std::exchange(before, point.step) && point.step <= p.step;
    });
  };
  if (p.step < 0 || p.best_step < -1 || p.best_step > p.step || p.steps < 0 || p.steps > p.step ||
      p.tokens < 0 || p.seconds < 0 || !in_order(p.reports) || !in_order(p.validations)) {
    fail(file, "must contain the progress of a run, got inconsistent values at step " +
                   std::to_string(p.step));
  }
}

// Values of a file into a tensor of any float type.
void load(CommandEncoder& encoder, const SafetensorsFile& file, const std::string& name,
          const Tensor& to) {
  if (!file.has(name)) fail(file.path(), "must contain \"" + name + "\", got none");
  const Tensor from = file.tensor(name);
  if (!(from.shape() == to.shape()) || !is_float(from.dtype())) {
    fail(file.path(), "\"" + name + "\" must be " + to_string(to.shape()) + " of a float, got " +
                          to_string(from.shape()) + " " + name_of(from.dtype()));
  }
  if (from.dtype() == to.dtype()) {
    encoder.upload(from.data(), from.bytes(), to);
    return;
  }
  std::vector<std::byte> converted(to.bytes());
  convert(from.data(), from.dtype(), converted.data(), to.dtype(),
          static_cast<std::size_t>(to.size()));
  encoder.upload(converted.data(), converted.size(), to);
}

}  // namespace

FitState::FitState(const FitOptions& options, bool validates)
    : folder_(options.folder),
      optimiser_(options.optimiser),
      options_(settings_of(options, validates)),
      fingerprint_(options.fingerprint) {}

std::string FitState::last() const {
  if (!folder_.is_used()) return "no checkpoint was written";
  if (saved_ < 0) return "there is no earlier checkpoint";
  const std::string step = "the checkpoint of step " + std::to_string(saved_);
  const std::string fault = folder_.fault();
  return fault.empty() ? step + " is saved in " + folder_.state() : step + " is lost: " + fault;
}

std::vector<NamedTensor> FitState::tensors_of(const OptimiserSlot& slot) const {
  std::vector<NamedTensor> tensors{{slot.of.name, slot.value()}};
  const std::vector<std::string> states = optimiser_->states(slot.of);
  for (std::size_t i = 0; i < states.size(); ++i) {
    tensors.push_back({state_name(states[i], slot.of.name), slot.states[i]});
  }
  return tensors;
}

void FitState::write(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
                     const FitProgress& progress) {
  encoder.commit_and_wait();
  std::vector<NamedTensor> tensors;
  for (const OptimiserSlot& slot : slots) {
    for (NamedTensor& each : tensors_of(slot)) tensors.push_back(std::move(each));
  }
  try {
    formats::write_checked_safetensors(folder_.state(), tensors,
                                       {{"format", kFormat},
                                        {"progress", text_of(progress)},
                                        {"options", text_of(options_)},
                                        {"fingerprint", text_of(fingerprint_)}});
  } catch (const Error& e) {
    throw Error(e.code(), "fit: the checkpoint of step " + std::to_string(progress.step) +
                              " could not be written: " + e.what() + "; " + last());
  }
  saved_ = progress.step;
}

void FitState::write_best(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
                          const FitProgress& progress) const {
  encoder.commit_and_wait();
  std::vector<NamedTensor> tensors;
  for (const OptimiserSlot& slot : slots) tensors.push_back({slot.of.name, slot.w});
  try {
    formats::write_checked_safetensors(
        folder_.best(), tensors,
        {{"step", std::to_string(progress.best_step)}, {"loss", digits(progress.best_loss)}});
  } catch (const Error& e) {
    throw Error(e.code(), "fit: the best weights so far, of step " +
                              std::to_string(progress.best_step) +
                              ", could not be written: " + e.what() + "; " + last());
  }
}

bool FitState::has_best(std::int64_t step) const {
  std::error_code none;
  if (!std::filesystem::exists(folder_.best(), none)) return false;
  const SafetensorsFile file = open_checked(folder_.best());
  const auto found = file.metadata().find("step");
  return found != file.metadata().end() && found->second == std::to_string(step);
}

void FitState::check_settings(const SafetensorsFile& file) const {
  const Metadata metadata(file);
  for (const auto& [key, now] : {std::pair("options", &options_), {"fingerprint", &fingerprint_}}) {
    Settings before;
    const Json object = metadata.json(key);
    for (const auto& [name, value] : object.object()) before[name] = value.string();
    // States from before there was a choice do not name it.
    if (now == &options_) before.try_emplace(kOptimizer, "adamw");
    const auto differs = [&](const std::string& name, const std::string& was,
                             const std::string& is) {
      throw Error(Errc::kArgument,
                  "fit: " + file.path() + " is the checkpoint of another run: " + shown(name) +
                      " must be " + shown(was) + " to resume it, got " + shown(is));
    };
    // First of all, as others follow from it.
    if (now == &options_ && now->at(kOptimizer) != before[kOptimizer]) {
      differs(kOptimizer, before[kOptimizer], now->at(kOptimizer));
    }
    for (const auto& [name, was] : before) {
      const auto found = now->find(name);
      if (found == now->end()) differs(name, was, "none");
      if (found->second != was) differs(name, was, found->second);
    }
    for (const auto& [name, is] : *now) {
      if (before.find(name) == before.end()) differs(name, "absent", is);
    }
  }
}

FitProgress FitState::read(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots) {
  const SafetensorsFile file = open_checked(folder_.state());
  check_settings(file);
  const std::size_t tensors = file.names().size() - 1;  // without the checksum
  std::size_t wanted = 0;
  for (const OptimiserSlot& slot : slots) wanted += 1 + slot.states.size();
  if (tensors != wanted) {
    fail(file.path(), "must contain " + std::to_string(wanted) + " tensors for the " +
                          std::to_string(slots.size()) + " trained parameters, got " +
                          std::to_string(tensors));
  }
  const Metadata metadata(file);
  const Json json = metadata.json("progress");
  FitProgress p;
  p.step = metadata.at(json, "step").integer();
  p.best_step = metadata.at(json, "best_step").integer();
  p.best_loss = metadata.at(json, "best_loss").number();
  p.loss = metadata.at(json, "loss").number();
  p.seconds = metadata.at(json, "seconds").number();
  p.steps = metadata.at(json, "steps").integer();
  p.tokens = metadata.at(json, "tokens").integer();
  p.reports = metadata.points(metadata.at(json, "reports"));
  p.validations = metadata.points(metadata.at(json, "validations"));
  check_progress(file.path(), p);
  for (const OptimiserSlot& slot : slots) {
    for (const NamedTensor& each : tensors_of(slot)) load(encoder, file, each.name, each.tensor);
    if (slot.master.defined()) load(encoder, file, slot.of.name, slot.w);
  }
  saved_ = p.step;
  return p;
}

void load_trainables(CommandEncoder& encoder, const std::string& file,
                     const std::vector<Trainable>& trainables) {
  const SafetensorsFile from = open_checked(file);
  for (const Trainable& each : trainables) load(encoder, from, each.name, each.tensor);
}

}  // namespace mlxtape::jobs
