// convert, quantize: a model's directory in MLX format from another: quantised, dequantised, of another type.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>

#include "command.h"
#include "interrupt.h"
#include "mlxtape/formats/gguf.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "output_paths.h"
#include "progress.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

struct Flags {
  std::string from, to = "mlx_model";
  bool quantize = false, dequantize = false, force = false;
  int bits = 0, group_size = 0;
  std::string recipe, dtype, rounding = "gpu", gguf_type;
  std::vector<std::string> exceptions;
  FiniteFlag finite;
};

constexpr std::pair<const char*, formats::GgufType> kGgufTypes[] = {
    {"f32", formats::GgufType::kF32},   {"f16", formats::GgufType::kF16},
    {"bf16", formats::GgufType::kBf16}, {"q4_0", formats::GgufType::kQ40},
    {"q4_1", formats::GgufType::kQ41},  {"q5_0", formats::GgufType::kQ50},
    {"q5_1", formats::GgufType::kQ51},  {"q8_0", formats::GgufType::kQ80}};

void expect_flags(const Flags& flags) {
  if (!flags.gguf_type.empty() && !formats::is_gguf_path(flags.to)) {
    called_wrongly("--gguf-type needs a --mlx-path that ends in .gguf");
  }
  if (flags.quantize && flags.dequantize) {
    called_wrongly("use either --quantize or --dequantize, not both");
  }
  const bool asks = flags.bits != 0 || flags.group_size != 0 || !flags.recipe.empty() ||
                    !flags.exceptions.empty();
  if (asks && !flags.quantize) {
    called_wrongly("--q-bits, --q-group-size, --quant-predicate and --q-module need --quantize");
  }
  if (flags.bits != 0 && !flags.recipe.empty()) {
    called_wrongly(
        "--q-bits and --quant-predicate cannot be combined: a recipe sets the bits itself");
  }
}

// PATTERN=BITS[:GROUP]; BITS 0: not quantised.
models::FormatException parse_exception(const std::string& text, int group_size) {
  const std::size_t equals = text.rfind('=');
  const auto number = [&](const std::string& digits) {
    if (digits.empty() || digits.size() > 3 ||
        digits.find_first_not_of("0123456789") != std::string::npos) {
      called_wrongly("--q-module must be PATTERN=BITS or PATTERN=BITS:GROUP, got '" + text + "'");
    }
    return std::stoi(digits);
  };
  if (equals == std::string::npos || equals == 0) number("");
  const std::string right = text.substr(equals + 1);
  const std::size_t colon = right.find(':');
  models::FormatException result{text.substr(0, equals), {number(right.substr(0, colon)), 0}};
  result.format.group_size =
      colon == std::string::npos ? group_size : number(right.substr(colon + 1));
  return result;
}

models::FormatRule rule_of(const Flags& flags, const models::Config& config) {
  const int group_size = flags.group_size == 0 ? 64 : flags.group_size;
  std::vector<models::FormatException> exceptions;
  const std::vector<models::Part> parts = models::parts(config);
  for (const std::string& text : flags.exceptions) {
    exceptions.push_back(parse_exception(text, group_size));
    const bool fits = std::any_of(parts.begin(), parts.end(), [&](const models::Part& part) {
      return part.is_weight && models::path_fits(part.name, exceptions.back().pattern);
    });
    if (!fits) called_wrongly("--q-module: no module matches '" + exceptions.back().pattern + "'");
  }
  const models::FormatRule all =
      flags.recipe.empty() ? models::usual_format({flags.bits == 0 ? 4 : flags.bits, group_size})
                           : models::mixed_format(flags.recipe, group_size, config.plan);
  return models::format_with(all, exceptions);
}

// --dtype, else what config.json says, as mlx-lm; nothing: as the weights are.
std::optional<DType> type_of(const Flags& flags, const models::Config& config) {
  std::string name = flags.dtype;
  const auto said = [](const Json* json, const char* key) {
    const Json* value = json == nullptr ? nullptr : json->find(key);
    return value != nullptr && value->is_string() ? value->string() : std::string();
  };
  if (name.empty()) name = said(&config.json, "torch_dtype");
  if (name.empty()) name = said(config.json.find("text_config"), "dtype");
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  return std::nullopt;
}

models::Model quantized(CommandEncoder& encoder, const models::Model& model, const Flags& flags,
                        const Globals& globals) {
  std::int64_t all = 0, done = 0;
  for (const models::ConstSlot& slot : models::slots(model)) {
    if (slot.is_weight && !slot.weight->is_quantized()) all += *element_count(slot.shape);
  }
  if (all == 0) {
    called_wrongly(
        flags.from +
        ": all weights are already quantised; dequantise them first (convert --dequantize)");
  }
  const models::FormatRule rule = rule_of(flags, model.config);
  Progress progress("quantizing", all, globals);
  std::int64_t quantized = 0, left = 0;
  models::Model result = models::quantize_model(
      encoder, model,
      [&](const models::Part& part) {
        if (Interrupts::asked()) throw Exit{kInterrupted};
        progress.at(done);
        done += *element_count(part.shape);
        const models::WeightFormat format = rule(part);
        ++(format.bits > 0 ? quantized : left);
        return format;
      },
      flags.rounding == "cpu" ? ops::QuantizeRule::kCpu : ops::QuantizeRule::kGpu);
  if (quantized == 0) {
    called_wrongly(
        "no weight can be quantised: no row length is a multiple of the group size, or --q-module "
        "excludes the module; try --q-group-size 32");
  }
  if (left > 0 && !globals.quiet) {
    progress.line(std::to_string(left) + " modules are not quantised: their row length is no " +
                  "multiple of the group size, or --q-module excludes them");
  }
  return result;
}

// "q8_0" of --gguf-type.
std::optional<formats::GgufType> matrices_of(const Flags& flags) {
  for (const auto& [name, type] : kGgufTypes) {
    if (flags.gguf_type == name) return type;
  }
  return std::nullopt;
}

void save_as_gguf(const models::Model& model, const Flags& flags, const Globals& globals) {
  models::SaveGgufOptions options;
  options.files_from = flags.from;
  options.name = last_part(flags.from);
  options.matrices = matrices_of(flags);
  const formats::GgufExported done = models::save_gguf(model, flags.to, options);
  if (done.rounded > 0 && !globals.quiet) {
    remark(std::to_string(done.rounded) +
           " quantised weights have no exact form in GGUF and were " + "written as F16; " +
           std::to_string(done.exact) + " are exact");
  }
}

void convert(const Globals& globals, const Flags& flags) {
  expect_flags(flags);
  expect_model(flags.from);
  expect_apart({"--mlx-path", flags.to}, {{"--model", flags.from}});
  const bool to_gguf = formats::is_gguf_path(flags.to);
  if (to_gguf) {
    expect_file_place(flags.to, flags.force, "--mlx-path");
  } else {
    expect_place(flags.to, flags.force, "--mlx-path", flags.from);
  }
  const auto encoder = globals.device_or_cpu().make_encoder();
  const Interrupts interrupts("stopping, nothing will be written");
  models::Model model = load_model(flags.from, *encoder, globals);
  const std::size_t before = models::weight_bytes(model);
  const bool was_finite = flags.finite.expect(*encoder, model, flags.from);
  if (const auto type = type_of(flags, model.config)) {
    model = models::cast_model(*encoder, model, *type);
    // A number may be too large for a narrower type.
    if (was_finite) {
      flags.finite.expect(*encoder, model, flags.from + ", converted to " + name_of(*type),
                          "they are out of its range; use --dtype float32");
    }
  }
  if (flags.quantize) model = quantized(*encoder, model, flags, globals);
  if (flags.dequantize) model = models::dequantize_model(*encoder, model);
  encoder->commit_and_wait();
  if (Interrupts::asked()) throw Exit{kInterrupted};
  if (to_gguf) {
    save_as_gguf(model, flags, globals);
  } else {
    save_result(model, flags.to, flags.from, flags.force);
  }

  const std::size_t after = models::weight_bytes(model);
  const double bits = models::bits_per_weight(model);
  if (globals.json) {
    return print_json(Json::Object{{"from", flags.from},
                                   {"to", flags.to},
                                   {"parameters", models::parameter_count(model.config)},
                                   {"bits_per_weight", bits},
                                   {"bytes_before", static_cast<std::int64_t>(before)},
                                   {"bytes", static_cast<std::int64_t>(after)}});
  }
  print_result(flags.to + ": " + fixed(bits, 3) + " bits per weight, " +
               human_bytes(static_cast<double>(after)) + " (was " +
               human_bytes(static_cast<double>(before)) + ")\n");
}

void add_format(CLI::App& command, Flags& flags) {
  const char* group = "Quantisation";
  command.add_option("--q-bits", flags.bits, "bits per weight")
      ->check(CLI::IsMember({2, 3, 4, 5, 6, 8}))
      ->type_name("N")
      ->default_str("4")
      ->group(group);
  command.add_option("--q-group-size", flags.group_size, "weights that share one scale and bias")
      ->check(CLI::IsMember({32, 64, 128}))
      ->type_name("N")
      ->default_str("64")
      ->group(group);
  command
      .add_option("--quant-predicate", flags.recipe,
                  "mixed-precision recipe: low bits for most modules, high bits for the head and "
                  "for v_proj "
                  "and down_proj of the layers that matter most; routers always get 8 bits")
      ->check(CLI::IsMember(models::mixed_recipes()))
      ->type_name("RECIPE")
      ->group(group);
  command
      .add_option(
          "--q-module", flags.exceptions,
          "PATTERN=BITS[:GROUP]: other settings for modules whose path matches (* matches any "
          "text); 0 bits: not quantised; the last match counts")
      ->allow_extra_args(false)
      ->type_name("RULE")
      ->group(group);
  command
      .add_option("--q-rounding", flags.rounding,
                  "round as MLX does on a GPU (as for published files) or on a CPU")
      ->check(CLI::IsMember({"gpu", "cpu"}))
      ->type_name("RULE")
      ->group(group);
  add_hidden_names(command, "--q-bits", "--bits");
  add_hidden_names(command, "--q-group-size", "--group-size");
}

void add(CLI::App& app, const Globals& globals, const char* name, bool quantize,
         const char* sentence, const char* examples) {
  CLI::App* command = add_command(app, name, sentence, examples);
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  flags->quantize = quantize;
  command
      ->add_option("--hf-path,--model", flags->from,
                   "the model to read: a directory in MLX or Hugging Face format, or a .gguf file")
      ->required()
      ->type_name("DIR")
      ->group("Model");
  command
      ->add_option("--mlx-path", flags->to,
                   "the directory to write in MLX format, or a .gguf file for llama.cpp")
      ->type_name("DIR")
      ->group("Model");
  command
      ->add_flag("--force", flags->force,
                 "overwrite the model at --mlx-path, once the new one is complete")
      ->group("Model");
  command
      ->add_option(
          "--dtype", flags->dtype,
          "dtype of unquantised weights [the one in config.json, or else that of the weights]")
      ->check(CLI::IsMember({"float16", "bfloat16", "float32"}))
      ->type_name("TYPE")
      ->group("Model");
  command
      ->add_option("--gguf-type", flags->gguf_type,
                   "type of weights that are not quantised in a .gguf file; without it their dtype")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}))
      ->type_name("TYPE")
      ->group("Model");
  flags->finite.add_to(*command, "Model");
  if (!quantize) {
    command->add_flag("-q,--quantize", flags->quantize, "quantise the weights")
        ->group("Quantisation");
    command->add_flag("-d,--dequantize", flags->dequantize, "dequantise the weights")
        ->group("Quantisation");
  }
  add_format(*command, *flags);
  command->callback([&globals, flags] { convert(globals, *flags); });
}

}  // namespace

void add_convert(CLI::App& app, const Globals& globals) {
  add(app, globals, "convert", false,
      "convert a model directory to MLX format: quantise with -q, dequantise with -d, or change "
      "the dtype. Here --device auto means the CPU.",
      "Examples:\n"
      "  mlxtape convert --hf-path Qwen3-0.6B --mlx-path my-model -q --q-bits 4\n"
      "  mlxtape convert --model my-model --mlx-path wide -d --dtype float32\n"
      "  mlxtape convert --model model.Q4_0.gguf --mlx-path my-model\n"
      "  mlxtape convert --model my-model --mlx-path my-model.gguf");
  add(app, globals, "quantize", true, "quantise a model's weights; same as convert -q.",
      "Examples:\n"
      "  mlxtape quantize --model my-model --mlx-path small --quant-predicate mixed_3_6\n"
      "  mlxtape quantize --model my-model --mlx-path small --q-bits 3 --q-module "
      "'*.down_proj=4:32'");
}

}  // namespace mlxtape::cli
