// Adapters from and to mlx-lm's files.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/models/lora.h"
#include "mlxtape/ops/elementwise.h"

namespace mlxtape::models {

namespace {

using formats::Json;

std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

// Keys as mlx-lm matches them: paths within a layer in full, or from the root.
Json::Array full_keys(const Model& model, const LoraOptions& options) {
  const std::vector<std::string> chosen = lora_modules(model, options);
  const auto holds = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::set<std::string> paths;
  for (const Part& part : parts(model.config)) {
    if (!holds(chosen, part.name)) continue;
    paths.insert(holds(options.keys, part.name) ? part.name : part.path);
  }
  return {paths.begin(), paths.end()};
}

// What the file says, or an error that names it and the key.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& path)
      : path_(path), json_(Json::read_file(path, "load_adapters")) {}

  LoraOptions options() const {
    if (!json_.is_object()) fail("must be an object");
    const Json* kind = json_.find("fine_tune_type");
    if (kind != nullptr && (!kind->is_string() || kind->string() != "lora")) {
      fail("fine_tune_type must be \"lora\", got " + shown(kind->dump()));
    }
    const Json* lora = json_.find("lora_parameters");
    if (lora == nullptr || !lora->is_object()) fail("lora_parameters must be an object");
    LoraOptions options;
    options.num_layers = integer(json_, "num_layers");
    options.rank = integer(*lora, "rank");
    options.scale = number(*lora, "scale");
    if (lora->find("dropout") != nullptr) options.dropout = number(*lora, "dropout");
    if (options.rank < 1 || options.rank > 1 << 20) {
      fail("rank must be at least 1, got " + std::to_string(options.rank));
    }
    const Json* keys = lora->find("keys");
    if (keys == nullptr || keys->is_null()) return options;
    if (!keys->is_array() || keys->array().empty()) {
      fail("keys must be a list of names, got " + shown(keys->dump()));
    }
    for (const Json& key : keys->array()) {
      if (!key.is_string()) fail("keys must be a list of names, got " + shown(keys->dump()));
      options.keys.push_back(key.string());
    }
    return options;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Errc::kIo, path_ + ": " + what);
  }

 private:
  const Json& at(const Json& object, const char* key) const {
    const Json* value = object.find(key);
    if (value == nullptr) fail(std::string(key) + " is missing");
    return *value;
  }
  std::int64_t integer(const Json& object, const char* key) const {
    const Json& value = at(object, key);
    if (!value.is_integer())
      fail(std::string(key) + " must be an integer, got " + shown(value.dump()));
    return value.integer();
  }
  double number(const Json& object, const char* key) const {
    const Json& value = at(object, key);
    if (!value.is_number())
      fail(std::string(key) + " must be a number, got " + shown(value.dump()));
    return value.number();
  }

  std::string path_;
  Json json_;
};

// mlx-lm passes over keys that the model has no module for.
void keep_known_keys(const Model& model, LoraOptions& options, const ConfigFile& config) {
  if (options.keys.empty()) return;
  std::erase_if(options.keys, [&](const std::string& key) {
    LoraOptions one = options;
    one.keys = {key};
    try {
      static_cast<void>(lora_modules(model, one));
      return false;
    } catch (const Error&) {
      return true;
    }
  });
  if (options.keys.empty()) config.fail("keys must name modules of the model, got none that does");
}

Tensor read_adapter(CommandEncoder& encoder, const formats::SafetensorsFile& file,
                    const std::string& name, const Shape& shape) {
  const formats::TensorInfo& info = file.info(name);
  if (!(info.shape == shape) || !info.dtype || !is_kernel_float(*info.dtype)) {
    throw Error(Errc::kIo, file.path() + ": the tensor " + shown(name) + " must be " +
                               to_string(shape) +
                               " of f32, f16 or bf16 for this model and rank, got " +
                               to_string(info.shape) + " " + info.type);
  }
  const Tensor t = file.tensor(name);
  // A copy of its own: it is to be trained, and the file may be written meanwhile.
  const Tensor there = encoder.empty(shape, t.dtype());
  encoder.upload(t.data(), t.bytes(), there);
  return ops::cast(encoder, there, DType::kF32);
}

}  // namespace

void save_adapter_weights(const Model& model, const std::string& file) {
  std::vector<formats::NamedTensor> tensors;
  for (const Parameter& p : lora_parameters(model)) tensors.push_back({p.name, p.tensor.detach()});
  if (tensors.empty()) throw Error(Errc::kArgument, "save_adapters: the model has no adapters");
  formats::write_safetensors(file, tensors, {{"format", "mlx"}});
}

Check adapters_check(const Model& model, const LoraOptions& options) {
  if (const Check check = lora_check(model, options)) return check;
  const std::vector<std::string> chosen = lora_modules(model, options);
  for (const ConstSlot& slot : slots(model)) {
    if (slot.weight == nullptr || !slot.weight->adapter.defined()) continue;
    const nn::Adapter& adapter = slot.weight->adapter;
    const std::int64_t rank = adapter.a.shape()[1];
    const bool listed = std::find(chosen.begin(), chosen.end(), slot.name) != chosen.end();
    if (listed && rank == options.rank && adapter.scale == static_cast<float>(options.scale)) {
      continue;
    }
    return Error(Errc::kArgument,
                 "lora: the adapter of " + slot.name +
                     " must be one that the options choose, of their rank and scale, got rank " +
                     std::to_string(rank) + " and scale " + std::to_string(adapter.scale));
  }
  return std::nullopt;
}

void save_adapters(const Model& model, const std::string& folder, const LoraOptions& options) {
  require(adapters_check(model, options));
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) {
    throw Error(Errc::kIo, folder + ": cannot create this folder: " + failed.message());
  }
  save_adapter_weights(model, folder + "/" + kAdapterWeights);
  Json lora =
      Json::Object{{"rank", options.rank}, {"dropout", options.dropout}, {"scale", options.scale}};
  if (!options.keys.empty()) lora.set("keys", full_keys(model, options));
  const Json config = Json::Object{
      {"fine_tune_type", "lora"}, {"num_layers", options.num_layers}, {"lora_parameters", lora}};
  write_whole(folder + "/" + kAdapterConfig, config.dump(4) + "\n", "save_adapters",
              WholeFile::Links::kReplace);
}

LoraOptions load_adapters(CommandEncoder& encoder, Model& model, const std::string& folder) {
  if (has_lora(model)) {
    throw Error(Errc::kArgument, "load_adapters: the model must not already have adapters");
  }
  const ConfigFile config(folder + "/" + kAdapterConfig);
  LoraOptions options = config.options();
  keep_known_keys(model, options, config);
  if (const Check wrong = lora_check(model, options)) config.fail(wrong->what());
  load_adapter_weights(encoder, model, folder + "/" + kAdapterWeights, options);
  return options;
}

void load_adapter_weights(CommandEncoder& encoder, Model& model, const std::string& path,
                          const LoraOptions& options) {
  if (has_lora(model)) {
    throw Error(Errc::kArgument, "load_adapter_weights: the model must not already have adapters");
  }
  require(lora_check(model, options));
  const std::vector<std::string> chosen = lora_modules(model, options);
  const formats::SafetensorsFile file(path);
  for (const std::string& name : file.names()) {
    const bool adapter = name.ends_with(".lora_a") || name.ends_with(".lora_b");
    if (adapter && std::find(chosen.begin(), chosen.end(), module_of(name)) != chosen.end()) {
      continue;
    }
    throw Error(Errc::kIo, file.path() + ": the tensor " + shown(name) +
                               " is not an adapter of this model for these layers and keys");
  }
  if (file.names().empty()) throw Error(Errc::kIo, file.path() + ": contains no adapters");
  Model adapted = model;
  for (const Slot& slot : slots(adapted.weights, adapted.config)) {
    const std::string a = slot.name + ".lora_a", b = slot.name + ".lora_b";
    if (!file.has(a) && !file.has(b)) continue;
    if (!file.has(a) || !file.has(b)) {
      throw Error(Errc::kIo, file.path() + ": the tensor " + (file.has(a) ? b : a) +
                                 " is missing, but the other half of the pair is present");
    }
    const Shape& w = slot.shape;
    const std::int64_t r = options.rank;
    const bool experts = w.rank() == 3;
    slot.weight->adapter = {
        read_adapter(encoder, file, a, experts ? Shape{w[0], r, w[2]} : Shape{w[1], r}),
        read_adapter(encoder, file, b, experts ? Shape{w[0], w[1], r} : Shape{r, w[0]}),
        static_cast<float>(options.scale)};
  }
  encoder.commit_and_wait();
  model = std::move(adapted);
}

}  // namespace mlxtape::models
