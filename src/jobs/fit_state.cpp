#include "fit_state.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include <unistd.h>

#include "mlxtape/base/quote.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::jobs {

namespace {

using formats::Json;
using formats::NamedTensor;
using formats::SafetensorsFile;
using Settings = std::map<std::string, std::string>;

constexpr const char* kFormat = "mlxtape fit 2";
constexpr const char* kWithoutChecksum = "mlxtape fit 1";
constexpr const char *kState = "/state.safetensors", *kBest = "/best.safetensors";
constexpr const char* kFirstMoments = "adamw.m:";
constexpr const char* kSecondMoments = "adamw.v:";

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw Error(Errc::kIo, "fit: " + file + ": " + what);
}

bool is_without_checksum(const SafetensorsFile& file) {
  const auto format = file.metadata().find("format");
  return format != file.metadata().end() && format->second == kWithoutChecksum;
}

// A file that fit wrote, every byte as it was then.
SafetensorsFile open_checked(const std::string& path) {
  std::error_code none;
  if (!std::filesystem::exists(path, none)) fail(path, "is missing");
  std::optional<SafetensorsFile> file;
  std::string wrong;
  try {
    file.emplace(path);
    if (!is_without_checksum(*file)) file->verify();
  } catch (const Error& e) {
    wrong = e.what();
  }
  if (!wrong.empty()) {
    fail(path, "is damaged (" + wrong + "); restore it from a copy, or delete it to start over");
  }
  if (is_without_checksum(*file)) {
    fail(path,
         "was written by an older version, without a checksum; finish the run with that version, "
         "or delete this file to start over");
  }
  return *std::move(file);
}

// As many digits as tell any two numbers apart.
std::string digits(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.17g", value);
  return text.data();
}

Settings settings_of(const FitOptions& o, bool validates) {
  Settings s{{"accumulation", std::to_string(o.accumulation)},
             {"learning_rate", digits(o.learning_rate)},
             {"warmup", std::to_string(o.warmup)},
             {"cosine", o.cosine ? "on" : "off"},
             {"clip", digits(o.clip)},
             {"beta1", digits(o.adamw.beta1)},
             {"beta2", digits(o.adamw.beta2)},
             {"eps", digits(static_cast<double>(o.adamw.eps))},
             {"weight_decay", digits(static_cast<double>(o.adamw.weight_decay))},
             {"bias_correction", o.adamw.bias_correction ? "on" : "off"},
             {"lazy_rows", o.lazy_rows ? "on" : "off"}};
  if (o.cosine) {
    s["iterations"] = std::to_string(o.iterations);
    s["final_share"] = digits(o.final_share);
  }
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
      fail(file.path(), std::string("must be a state (\"format\": \"") + kFormat + "\"), got " +
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
    fail(file, "must hold the progress of a run, got one that contradicts itself at step " +
                   std::to_string(p.step));
  }
}

// Values of a file into a tensor of any float type.
void load(CommandEncoder& encoder, const SafetensorsFile& file, const std::string& name,
          const Tensor& to) {
  if (!file.has(name)) fail(file.path(), "must hold \"" + name + "\", got none");
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

// name.tmp<process>.<number>, as WholeFile names what it has not finished.
bool is_left_over(const std::string& name) {
  for (const std::string middle : {".safetensors.tmp", ".json.tmp"}) {
    const std::size_t at = name.rfind(middle);
    if (at == std::string::npos || at == 0) continue;
    const std::string rest = name.substr(at + middle.size());
    return !rest.empty() && std::all_of(rest.begin(), rest.end(), [](unsigned char c) {
      return std::isdigit(c) != 0 || c == '.';
    });
  }
  return false;
}

// Of a process that was killed while it wrote.
void remove_left_over(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (!is_left_over(entry.path().filename().string())) continue;
    std::error_code failed;
    std::filesystem::remove(entry.path(), failed);
  }
}

}  // namespace

FitFolder::FitFolder(const FitOptions& options, bool validates)
    : path_(options.folder),
      options_(settings_of(options, validates)),
      fingerprint_(options.fingerprint) {}

bool FitFolder::has_state() const {
  std::error_code none;
  return is_used() && std::filesystem::exists(state(), none);
}

void FitFolder::prepare() {
  if (!is_used()) return;
  std::error_code wrong;
  std::filesystem::create_directories(path_, wrong);
  if (wrong) fail(path_, "must be a folder, got " + wrong.message());
  lock_.emplace(path_);
  remove_left_over(path_);
}

std::string FitFolder::last_state() const {
  if (!is_used()) return "no state was written";
  if (saved_ < 0) return "there is no state before it";
  const std::string step = "the state of step " + std::to_string(saved_);
  const std::string fault = state_fault(path_);
  return fault.empty() ? step + " is saved in " + state() : step + " is lost: " + fault;
}

void FitFolder::write_state(CommandEncoder& encoder, const std::vector<FitSlot>& slots,
                            const FitProgress& progress) {
  encoder.commit_and_wait();
  std::vector<NamedTensor> tensors;
  for (const FitSlot& slot : slots) {
    tensors.push_back({slot.name, slot.value()});
    tensors.push_back({kFirstMoments + slot.name, slot.m});
    tensors.push_back({kSecondMoments + slot.name, slot.v});
  }
  try {
    formats::write_checked_safetensors(state(), tensors,
                                       {{"format", kFormat},
                                        {"progress", text_of(progress)},
                                        {"options", text_of(options_)},
                                        {"fingerprint", text_of(fingerprint_)}});
  } catch (const Error& e) {
    throw Error(e.code(), "fit: the state of step " + std::to_string(progress.step) +
                              " could not be written: " + e.what() + "; " + last_state());
  }
  saved_ = progress.step;
}

void FitFolder::write_best(CommandEncoder& encoder, const std::vector<FitSlot>& slots,
                           const FitProgress& progress) const {
  encoder.commit_and_wait();
  std::vector<NamedTensor> tensors;
  for (const FitSlot& slot : slots) tensors.push_back({slot.name, slot.w});
  try {
    formats::write_checked_safetensors(
        best(), tensors,
        {{"step", std::to_string(progress.best_step)}, {"loss", digits(progress.best_loss)}});
  } catch (const Error& e) {
    throw Error(e.code(), "fit: the best so far, of step " + std::to_string(progress.best_step) +
                              ", could not be written: " + e.what() + "; " + last_state());
  }
}

bool FitFolder::has_best(std::int64_t step) const {
  std::error_code none;
  if (!std::filesystem::exists(best(), none)) return false;
  const SafetensorsFile file = open_checked(best());
  const auto found = file.metadata().find("step");
  return found != file.metadata().end() && found->second == std::to_string(step);
}

void FitFolder::check_settings(const SafetensorsFile& file) const {
  const Metadata metadata(file);
  for (const auto& [key, now] : {std::pair("options", &options_), {"fingerprint", &fingerprint_}}) {
    Settings before;
    const Json object = metadata.json(key);
    for (const auto& [name, value] : object.object()) before[name] = value.string();
    const auto differs = [&](const std::string& name, const std::string& was,
                             const std::string& is) {
      throw Error(Errc::kArgument,
                  "fit: " + file.path() + " is the state of another run: " + shown(name) +
                      " must be " + shown(was) + " to go on from it, got " + shown(is));
    };
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

FitProgress FitFolder::read_state(CommandEncoder& encoder, const std::vector<FitSlot>& slots) {
  const SafetensorsFile file = open_checked(state());
  check_settings(file);
  const std::size_t tensors = file.names().size() - 1;  // without the checksum
  if (tensors != 3 * slots.size()) {
    fail(file.path(), "must hold 3 tensors for each of " + std::to_string(slots.size()) +
                          " that are trained, got " + std::to_string(tensors));
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
  for (const FitSlot& slot : slots) {
    load(encoder, file, slot.name, slot.value());
    if (slot.master.defined()) load(encoder, file, slot.name, slot.w);
    load(encoder, file, kFirstMoments + slot.name, slot.m);
    load(encoder, file, kSecondMoments + slot.name, slot.v);
  }
  saved_ = p.step;
  return p;
}

bool has_state(const std::string& folder) {
  std::error_code none;
  return std::filesystem::exists(folder + kState, none);
}

std::string state_fault(const std::string& folder) {
  std::error_code none;
  try {
    static_cast<void>(open_checked(folder + kState));
    if (std::filesystem::exists(folder + kBest, none)) {
      static_cast<void>(open_checked(folder + kBest));
    }
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

void remove_state(const std::string& folder) {
  // The state first: a best without one is nothing to go on from.
  for (const char* name : {kState, kBest}) {
    std::error_code failed;
    std::filesystem::remove(folder + name, failed);
    if (failed) fail(folder + name, "cannot be removed: " + failed.message());
  }
  remove_left_over(folder);
  std::error_code not_empty;
  std::filesystem::remove(folder, not_empty);
}

void load_trainables(CommandEncoder& encoder, const std::string& file,
                     const std::vector<Trainable>& trainables) {
  const SafetensorsFile from = open_checked(file);
  for (const Trainable& each : trainables) load(encoder, from, each.name, each.tensor);
}

}  // namespace mlxtape::jobs
