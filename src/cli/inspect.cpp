// inspect: what a model's directory holds and what it takes to run and to train it. Reads headers, and of the weights
// whether they are finite.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>

#include "command.h"
#include "mlxtape/formats/gguf_tokenizer.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/formats/tokenizer.h"
#include "mlxtape/models/finite.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/size.h"
#include "mlxtape/models/state.h"
#include "model_flags.h"
#include "output.h"
#include "progress.h"

namespace mlxtape::cli {

namespace {

using formats::Json;
using models::Config;

struct Flags {
  std::string directory;
  std::int64_t context = 4096;
  bool tensors = false, headers_only = false;
};

std::int64_t whole(std::size_t bytes) { return static_cast<std::int64_t>(bytes); }

// One row for each class of modules and each way they are quantised.
struct ClassSize {
  std::int64_t modules = 0, parameters = 0;
  std::size_t bytes = 0;
};
using ClassKey = std::pair<std::string, std::string>;  // class, quantisation

std::vector<std::pair<ClassKey, ClassSize>> classes(const models::Model& model) {
  std::vector<std::pair<ClassKey, ClassSize>> result;
  std::map<ClassKey, std::size_t> places;
  std::map<std::string, std::size_t>
      order;  // by the class alone: all ways it is quantised together
  constexpr std::size_t kLast = std::numeric_limits<std::size_t>::max();
  for (const models::ConstSlot& slot : models::slots(model)) {
    ClassKey key{"norms, filters and other small tensors", ""};
    std::size_t bytes = 0;
    if (!slot.is_weight) {
      key.second = name_of(slot.tensor->dtype());
      bytes = slot.tensor->bytes();
    } else {
      key.first = slot.path.substr(slot.layer < 0 ? slot.path.rfind('.') + 1 : 0);
      const nn::Weight& w = *slot.weight;
      key.second = w.is_quantized()
                       ? std::to_string(w.quantized.format.bits) + " bits, groups of " +
                             std::to_string(w.quantized.format.group_size)
                       : name_of(w.dtype());
      bytes = w.is_quantized() ? w.quantized.codes.bytes() + w.quantized.scales.bytes() +
                                     w.quantized.biases.bytes()
                               : w.plain.bytes();
    }
    const auto [at, is_new] = places.emplace(key, result.size());
    if (is_new) result.emplace_back(key, ClassSize{});
    ClassSize& size = result[at->second].second;
    order.emplace(key.first, !slot.is_weight ? kLast : order.size());
    ++size.modules;
    size.parameters += *element_count(slot.shape);
    size.bytes += bytes;
  }
  std::stable_sort(result.begin(), result.end(), [&](const auto& a, const auto& b) {
    return order.at(a.first.first) < order.at(b.first.first);
  });
  return result;
}

Json layers_of(const Config& c) {
  std::int64_t attention = 0, experts = 0;
  for (const models::LayerPlan& layer : c.plan.layers) {
    attention += layer.attention() != nullptr ? 1 : 0;
    experts += layer.moe() != nullptr ? 1 : 0;
  }
  return Json::Object{{"all", c.plan.layer_count()},
                      {"attention", attention},
                      {"delta_net", c.plan.layer_count() - attention},
                      {"with_experts", experts}};
}

Json tokenizer_of(const std::string& directory) {
  if (formats::Tokenizer::file_in(directory).empty()) return {};
  const bool is_gguf = formats::is_gguf_path(directory);
  if (is_gguf && !formats::read_gguf_tokenizer(formats::GgufFile(directory))) return {};
  const auto tokenizer = formats::Tokenizer::from_directory(directory);
  Json::Array ends;
  for (const formats::TokenId id : tokenizer.eos_ids()) {
    // A model's config may name an id that its tokenizer has no token for.
    ends.emplace_back(id < tokenizer.vocabulary_size() ? Json(tokenizer.token_of(id)) : Json(id));
  }
  return Json::Object{{"vocabulary", tokenizer.vocabulary_size()},
                      {"bos", tokenizer.bos_token()},
                      {"eos", std::move(ends)},
                      {"chat_template", tokenizer.chat_template() != nullptr}};
}

Json modules_of(const models::Model& model) {
  Json::Array rows;
  for (const auto& [key, size] : classes(model)) {
    rows.emplace_back(Json::Object{{"class", key.first},
                                   {"format", key.second},
                                   {"modules", size.modules},
                                   {"parameters", size.parameters},
                                   {"bytes", whole(size.bytes)}});
  }
  return rows;
}

Json tensors_of(const formats::ModelFiles& files) {
  Json::Array rows;
  for (const std::string& name : files.names()) {
    const formats::TensorInfo& info = files.info(name);
    Json::Array shape;
    for (const std::int64_t dim : info.shape) shape.emplace_back(dim);
    rows.emplace_back(Json::Object{{"name", name},
                                   {"type", info.type},
                                   {"shape", std::move(shape)},
                                   {"bytes", whole(info.bytes)},
                                   {"file", info.file}});
  }
  return rows;
}

// null: nobody has looked; else how many tensors have numbers that are NaN or infinite, and of the first which and how many.
Json nonfinite_of(const formats::ModelFiles& files, const Flags& flags, const Globals& globals) {
  if (flags.headers_only) return {};
  Progress::Options options;
  options.unit = Progress::Unit::kBytes;
  Progress progress("checking weights", whole(files.total_bytes()), globals, options);
  const models::NonFinite found =
      models::find_nonfinite(files, [&](std::size_t done) { progress.at(whole(done)); });
  Json result = Json::Object{{"tensors", found.tensors}};
  if (found.any()) {
    result.set("first", found.first);
    result.set("numbers", found.numbers);
  }
  return result;
}

Json everything(const Flags& flags, const Globals& globals) {
  expect_model(flags.directory);
  const models::Model model = models::load_shapes(flags.directory);
  const formats::ModelFiles files(flags.directory);
  const Config& c = model.config;
  const models::MoePlan* moe = c.plan.moe();
  const std::size_t state = models::State::bytes_of(c.plan, model.dtype(), 1, flags.context);
  const models::TrainingBytes training = models::training_bytes(model);
  const std::size_t weights = models::weight_bytes(model);
  Json result = Json::Object{
      {"directory", flags.directory},
      {"architecture", c.model_type},
      {"dtype", name_of(model.dtype())},
      {"layers", layers_of(c)},
      {"width", c.plan.width},
      {"vocabulary", c.plan.vocabulary},
      {"max_positions", c.plan.max_positions},
      {"tied_head", c.plan.tied},
      {"experts", moe == nullptr ? 0 : moe->experts},
      {"experts_per_token", moe == nullptr ? 0 : moe->chosen},
      {"parameters", models::parameter_count(c)},
      {"active_parameters", models::active_parameter_count(c)},
      {"bits_per_weight", models::bits_per_weight(model)},
      {"files", static_cast<std::int64_t>(files.files().size())},
      {"weight_bytes", whole(weights)},
      {"context", flags.context},
      {"state_bytes", whole(state)},
      {"run_bytes", whole(weights + state)},
      {"train_bytes_estimate", Json::Object{{"weights", whole(training.weights)},
                                            {"gradients", whole(training.gradients)},
                                            {"optimiser", whole(training.optimiser)},
                                            {"all_without_activations", whole(training.all())}}},
      {"modules", modules_of(model)},
      {"tokenizer", tokenizer_of(flags.directory)},
      {"nonfinite", nonfinite_of(files, flags, globals)}};
  if (flags.tensors) result.set("tensors", tensors_of(files));
  return result;
}

std::string text(const Json& value) {
  if (value.is_string()) return value.string();
  if (!value.is_array()) return value.dump();
  std::string all;
  for (const Json& one : value.array()) all += (all.empty() ? "" : " ") + text(one);
  return all;
}

std::string tokenizer_text(const Json& facts) {
  if (facts.is_null()) return "none";
  const std::string ends = text(*facts.find("eos"));
  return text(*facts.find("vocabulary")) +
         " tokens, end-of-text tokens: " + (ends.empty() ? "none" : ends) +
         (facts.find("chat_template")->boolean() ? ", with a chat template"
                                                 : ", without a chat template");
}

std::string summary(const Json& all) {
  const auto get = [&](const char* key) -> const Json& {
    return *all.find(key);
  };
  const auto bytes = [](const Json& value) {
    return human_bytes(value.number());
  };
  const auto count = [](const Json& value) {
    return human_count(value.number());
  };
  const Json& layers = get("layers");
  std::string kinds = text(*layers.find("all"));
  if (layers.find("delta_net")->integer() > 0) {
    kinds += " (" + text(*layers.find("attention")) + " with attention, " +
             text(*layers.find("delta_net")) + " with delta nets)";
  }
  Facts facts;
  facts.add("architecture", text(get("architecture")) + ", " + text(get("dtype")));
  facts.add("layers", kinds);
  facts.add("width", text(get("width")));
  if (get("experts").integer() > 0) {
    facts.add("experts", text(get("experts")) + ", " + text(get("experts_per_token")) +
                             " per token, in " + text(*layers.find("with_experts")) + " layers");
  }
  facts.add("vocabulary",
            text(get("vocabulary")) + (get("tied_head").boolean() ? ", tied embeddings" : ""));
  facts.add("context length", text(get("max_positions")));
  facts.add("parameters", count(get("parameters")) + ", " + count(get("active_parameters")) +
                              " active per token");
  facts.add("bits per weight", fixed(get("bits_per_weight").number(), 3));
  facts.add("weights", bytes(get("weight_bytes")) + " in " + text(get("files")) +
                           (get("files").integer() == 1 ? " file" : " files"));
  facts.add("tokenizer", tokenizer_text(get("tokenizer")));
  facts.add("to run", bytes(get("run_bytes")) + ": weights, plus " + bytes(get("state_bytes")) +
                          " of cache for " + text(get("context")) + " tokens");
  const Json& train = get("train_bytes_estimate");
  facts.add("to train", "about " + bytes(*train.find("all_without_activations")) + ": weights, " +
                            bytes(*train.find("gradients")) + " of gradients, " +
                            bytes(*train.find("optimiser")) + " of AdamW state; plus activations");
  const Json& bad = get("nonfinite");
  if (!bad.is_null() && bad.find("first") != nullptr) {
    facts.add("warning", models::NonFinite{text(*bad.find("first")), bad.find("numbers")->integer(),
                                           bad.find("tensors")->integer()}
                             .text());
  }
  return facts.text();
}

void inspect(const Globals& globals, const Flags& flags) {
  const Json all = everything(flags, globals);
  if (globals.json) return print_json(all);
  print_result(summary(all));
  Table modules({"modules", "count", "parameters", "format", "size"},
                {false, true, true, false, true});
  for (const Json& row : all.find("modules")->array()) {
    modules.add({text(*row.find("class")), text(*row.find("modules")),
                 human_count(row.find("parameters")->number()), text(*row.find("format")),
                 human_bytes(row.find("bytes")->number())});
  }
  print_result("\n" + modules.text());
  if (!flags.tensors) return;
  Table tensors({"tensor", "type", "shape", "size"}, {false, false, false, true});
  for (const Json& row : all.find("tensors")->array()) {
    tensors.add({text(*row.find("name")), text(*row.find("type")), row.find("shape")->dump(),
                 human_bytes(row.find("bytes")->number())});
  }
  print_result("\n" + tensors.text());
}

}  // namespace

void add_inspect(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "inspect",
      "show architecture, parameters, quantisation, and memory needed to run and to train a model.",
      "Examples:\n"
      "  mlxtape inspect my-model --context 32768\n"
      "  mlxtape inspect my-model --json | jq .bits_per_weight");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  command->add_option("DIR", flags->directory, "the model's directory, or a .gguf file")
      ->required()
      ->type_name("DIR");
  command
      ->add_option("--context", flags->context, "context length to compute memory for, in tokens")
      ->check(whole_number(1, std::uint64_t{1} << 31U))
      ->type_name("N")
      ->group("Output");
  command->add_flag("--tensors", flags->tensors, "also list every tensor")->group("Output");
  command
      ->add_flag("--headers-only", flags->headers_only,
                 "do not read the weights to look for NaN and infinity")
      ->group("Output");
  command->callback([&globals, flags] { inspect(globals, *flags); });
}

}  // namespace mlxtape::cli
