// A whole model: a training step's forward and backward pass, reading a prompt, and tokens one by one.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <ostream>

#include "bench.h"
#include "measure.h"
#include "mlxtape/base/files.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/jobs/engine.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/state.h"

namespace mlxtape::bench {

namespace {

// Shapes to measure, as their config.json.
const std::vector<std::pair<std::string, const char*>>& shapes() {
  static const std::vector<std::pair<std::string, const char*>> all = {
      // Four layers of Qwen3-Next-80B-A3B, with its embedding and head: one period of its 48, 7.2 B parameters.
      {"qwen3-next-80b-period",
       R"({"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4,
       "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
       "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
       "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
       "decoder_sparse_step": 1, "shared_expert_intermediate_size": 512, "mlp_only_layers": [],
       "moe_intermediate_size": 512, "rms_norm_eps": 1e-6, "vocab_size": 151936, "rope_theta": 10000000.0,
       "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "norm_topk_prob": true,
       "tie_word_embeddings": false})"},
      // With the sizes of Qwen3-0.6B.
      {"qwen3-0.6b",
       R"({"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072,
       "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
       "vocab_size": 151936, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
       "tie_word_embeddings": true})"},
      // 0.3 B parameters: a size that is tried on a laptop.
      {"qwen3-next-0.3b",
       R"({"model_type": "qwen3_next", "hidden_size": 1024, "num_hidden_layers": 12,
       "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
       "linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 128,
       "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 16, "num_experts_per_tok": 4,
       "decoder_sparse_step": 1, "shared_expert_intermediate_size": 256, "mlp_only_layers": [],
       "moe_intermediate_size": 256, "rms_norm_eps": 1e-6, "vocab_size": 32768, "rope_theta": 10000000.0,
       "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "norm_topk_prob": true,
       "tie_word_embeddings": true})"}};
  return all;
}

models::Model make(CommandEncoder& encoder, const ModelConfig& how) {
  for (const auto& [name, config] : shapes()) {
    if (name != how.model) continue;
    const formats::Json parsed = formats::Json::parse(config, name);
    return models::random_model(models::Config::parse(parsed, name), encoder, how.dtype, 1);
  }
  if (std::filesystem::is_directory(how.model)) return models::load_model(how.model, encoder);
  std::string names;
  for (const auto& [name, config] : shapes()) names += ", " + name;
  throw Error(Errc::kArgument,
              "bench model: " + how.model + " is neither a directory nor one of" + names.substr(1));
}

// The bytes of a directory's files, read into a small buffer: what loading them cannot be faster than by much.
void read_files(const std::vector<std::string>& paths, std::vector<char>& room) {
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    while (file) file.read(room.data(), static_cast<std::streamsize>(room.size()));
    if (!file.eof()) throw Error(Errc::kIo, "bench model: " + path + ": cannot be read");
  }
}

// Loading a directory, and reading its files alone, in turns; the files are in the page cache from the first turn on.
void measure_loading(CommandEncoder& encoder, const BenchConfig& config, const std::string& path,
                     Report& report, std::ostream& out) {
  std::vector<std::string> files;
  std::size_t bytes = 0;
  {
    const formats::ModelFiles all(path);
    files = all.files();
    bytes = all.total_bytes();
  }
  std::vector<char> room(std::size_t{4} << 20U);
  const auto load = [&] {
    static_cast<void>(models::load_model(path, encoder));
    encoder.commit_and_wait();
  };
  const auto read = [&] {
    read_files(files, room);
  };
  read();
  load();
  encoder.device().memory().reset_peak();
  load();
  const std::size_t peak = encoder.device().memory().stats().peak;
  std::vector<double> load_times, read_times;
  for (int turn = 0; turn < 3; ++turn) {
    sample(load, config.seconds / 3, load_times);
    sample(read, config.seconds / 3, read_times);
  }
  const double us = median(load_times), read_us = median(read_times);
  const auto rate = [&](double time) {
    return static_cast<double>(bytes) / time / 1e3;
  };
  char line[200];
  std::snprintf(line, sizeof line,
                "loading %.2f GB: %.1f ms, %.1f GB/s; reading its files: %.1f ms, %.1f GB/s",
                static_cast<double>(bytes) / 1e9, us / 1e3, rate(us), read_us / 1e3, rate(read_us));
  out << line << std::endl;
  report.add(Json::Object{{"what", "load"},
                          {"bytes", count(bytes)},
                          {"us", us},
                          {"read_us", read_us},
                          {"peak_bytes", count(peak)}});
}

struct Row {
  std::string what;
  double us;
  std::int64_t tokens;
  std::size_t peak;
};

class Measured {
 public:
  Measured(CommandEncoder& encoder, const models::Model& model, double seconds)
      : encoder_(encoder), model_(model), seconds_(seconds) {}

  // The median of a call's time and the most memory that it needs; the weights are among it.
  Row row(const std::string& what, std::int64_t tokens, const std::function<void()>& call) {
    call();
    encoder_.device().memory().reset_peak();
    call();
    const std::size_t peak = encoder_.device().memory().stats().peak;
    std::vector<double> times;
    sample(call, seconds_, times);
    return {what, median(times), tokens, peak};
  }

  Row train(std::int64_t tokens, bool checkpoint) {
    const Tensor ids = ids_of(tokens + 1);
    const Tensor in = encoder_.contiguous(ids.slice(1, 0, tokens));
    const Tensor targets = encoder_.contiguous(ids.slice(1, 1, tokens + 1));
    return row(checkpoint ? "train, layers again" : "train", tokens, [&] {
      Tape tape(encoder_);
      const models::Model watched = models::watch(tape, model_);
      models::HiddenOptions options;
      options.checkpoint = checkpoint;
      tape.backward(models::loss(tape, watched, in, targets, options));
      encoder_.commit_and_wait();
    });
  }

  Row forward(std::int64_t tokens) {
    const Tensor ids = ids_of(tokens);
    return row("forward", tokens, [&] {
      Tape tape(encoder_);
      static_cast<void>(models::loss(tape, model_, ids, ids));
      encoder_.commit_and_wait();
    });
  }

  Row prefill(std::int64_t tokens, std::int64_t chunk) {
    models::State state(model_, 1, tokens);
    const std::vector<std::int32_t> ids = host_ids(tokens);
    return row("prefill", tokens, [&] {
      state.trim(encoder_, 0, 0);
      static_cast<void>(models::prefill(encoder_, model_, state, 0, ids, chunk));
      encoder_.commit_and_wait();
    });
  }

  // Tokens for each of batch sequences, after a context of that many: as a user's program gets them, chosen by these settings.
  Row decode(std::int64_t batch, std::int64_t context, const std::string& how,
             const std::vector<jobs::SamplingOptions>& settings) {
    jobs::EngineOptions options;
    options.slots = batch;
    options.context = context + kSteps + 2;
    options.first_room = kSteps + 2;
    options.prompts_first = true;
    jobs::Engine engine(encoder_, model_, options);
    const std::string name =
        "decode, " + std::to_string(batch) + " after " + std::to_string(context) + ", " + how;
    return row(name, batch * (kSteps + 1), [&] {
      for (std::int64_t b = 0; b < batch; ++b) {
        // From the second time on all but the last token of the context is in the slot's past.
        engine.admit({host_ids(context), settings[static_cast<std::size_t>(b) % settings.size()],
                      context - 1});
      }
      while (engine.is_reading()) static_cast<void>(engine.step());
      for (std::int64_t step = 0; step < kSteps; ++step) static_cast<void>(engine.step());
      for (std::int64_t b = 0; b < batch; ++b) engine.cancel(b);
    });
  }

 private:
  static constexpr std::int64_t kSteps = 32;  // what going back to the context costs is then little

  std::vector<std::int32_t> host_ids(std::int64_t n) const {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
    std::uint32_t state = 12345;
    for (std::int32_t& id : ids) {
      state = state * 1664525U + 1013904223U;
      id = static_cast<std::int32_t>((state >> 8U) %
                                     static_cast<std::uint32_t>(model_.config.plan.vocabulary));
    }
    return ids;
  }
  Tensor ids_of(std::int64_t n) {
    const std::vector<std::int32_t> ids = host_ids(n);
    const Tensor t = encoder_.empty({1, n}, DType::kI32);
    encoder_.upload(ids.data(), ids.size() * sizeof(std::int32_t), t);
    return t;
  }

  CommandEncoder& encoder_;
  const models::Model& model_;
  double seconds_;
};

}  // namespace

void run_model(Device& device, const BenchConfig& config, const ModelConfig& how,
               std::ostream& out) {
  const auto encoder = device.make_encoder();
  Report report(device, config);
  if (std::filesystem::is_directory(how.model)) {
    measure_loading(*encoder, config, how.model, report, out);
  }
  models::Model model = make(*encoder, how);
  if (how.bits > 0) {
    model = models::quantize_model(*encoder, model, models::usual_format({how.bits, 64}));
  }
  encoder->commit_and_wait();
  if (!how.save.empty()) models::save_model(model, how.save);
  std::size_t bytes = 0;
  std::int64_t numbers = 0;
  for (const auto& [name, tensor, shape] : models::parameters(model)) bytes += tensor.bytes();
  for (const models::Part& part : models::parts(model.config)) {
    numbers += *element_count(part.shape);
  }
  char line[200];
  std::snprintf(line, sizeof line, "%s: %s, %.2f B parameters in %s%s, %.2f GiB",
                device.name().c_str(), how.model.c_str(), static_cast<double>(numbers) / 1e9,
                name_of(model.dtype()),
                how.bits > 0 ? (", " + std::to_string(how.bits) + " bits").c_str() : "",
                static_cast<double>(bytes) / (1 << 30));
  out << line << "\n";
  std::snprintf(line, sizeof line, "%-24s %10s %12s %14s %12s", "what", "tokens", "ms", "tokens/s",
                "peak GiB");
  out << line << std::endl;
  report.set("model", how.model);
  report.set("dtype", name_of(model.dtype()));
  report.set("bits", how.bits);
  report.set("parameters", numbers);
  report.set("weight_bytes", count(bytes));
  const auto show = [&](const Row& row) {
    std::snprintf(line, sizeof line, "%-24s %10lld %12.2f %14.1f %12.2f", row.what.c_str(),
                  static_cast<long long>(row.tokens), row.us / 1e3,
                  static_cast<double>(row.tokens) / row.us * 1e6,
                  static_cast<double>(row.peak) / (1 << 30));
    out << line << std::endl;
    report.add(Json::Object{{"what", row.what},
                            {"tokens", row.tokens},
                            {"us", row.us},
                            {"peak_bytes", count(row.peak)}});
  };
  Measured measured(*encoder, model, config.seconds);
  if (how.train) {
    show(measured.train(how.tokens, false));
    show(measured.train(how.tokens, true));
  }
  show(measured.forward(how.tokens));
  show(measured.prefill(how.tokens, how.chunk));
  jobs::SamplingOptions
      drawn;  // flat logits, as random weights give them, are the hardest to draw from
  drawn.temperature = 0.7;
  drawn.top_p = 0.9;
  jobs::SamplingOptions penalised;
  penalised.temperature = 1;
  penalised.top_k = 50;
  penalised.repetition_penalty = 1.1;
  penalised.presence_penalty = 0.5;
  jobs::SamplingOptions likely;
  likely.temperature = 1;
  likely.min_p = 0.05;
  show(measured.decode(1, how.context, "greedy", {{}}));
  show(measured.decode(1, how.context, "temp 0.7 top-p 0.9", {drawn}));
  if (how.batch < 2) return;
  show(measured.decode(how.batch, how.context, "greedy", {{}}));
  show(measured.decode(how.batch, how.context, "mixed", {drawn, {}, penalised, likely}));
}

}  // namespace mlxtape::bench
