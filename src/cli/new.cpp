// new: a folder to begin with: a small model's config, its tokenizer, and data to train it on.
#include <CLI/CLI.hpp>

#include <filesystem>
#include <limits>
#include <memory>

#include "command.h"
#include "demo/demo_model.h"
#include "demo/tasks.h"
#include "mlxtape/base/files.h"
#include "mlxtape/models/size.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

namespace fs = std::filesystem;
using formats::Json;

struct Flags {
  std::string folder;
  std::int64_t samples = 20000;
  std::uint64_t seed = 0;
};

constexpr std::int64_t kHeldOut = 500;  // samples of valid, and of test

// Cases from `first` on, a line each.
std::string lines(demo::TaskSide side, std::uint64_t seed, std::int64_t first, std::int64_t count) {
  std::string all;
  const std::vector<demo::TaskCase> cases = demo::task_cases(side, seed, first + count);
  for (std::size_t i = static_cast<std::size_t>(first); i < cases.size(); ++i) {
    all += Json(Json::Object{{"prompt", cases[i].prompt}, {"completion", cases[i].answer}}).dump() +
           "\n";
  }
  return all;
}

void write_files(const std::string& folder, const models::Config& config, const Flags& flags) {
  const char* const who = "new";
  const auto samples = [&](const char* name, demo::TaskSide side, std::int64_t first,
                           std::int64_t count) {
    write_whole(folder + "/data/" + name, lines(side, flags.seed, first, count), who);
  };
  fs::create_directories(folder + "/data");
  samples("train.jsonl", demo::TaskSide::kTraining, 0, flags.samples);
  samples("valid.jsonl", demo::TaskSide::kHeldOut, 0, kHeldOut);
  samples("test.jsonl", demo::TaskSide::kHeldOut, kHeldOut, kHeldOut);
  demo::write_byte_tokenizer(folder, who);
  write_whole(folder + "/config.json", config.json.dump(2) + "\n", who);
}

// What a call that failed has written, so that the next one finds the folder as it was.
void remove_files(const std::string& folder, bool was_there) {
  std::error_code ignored;
  for (const char* name : {"data/train.jsonl", "data/valid.jsonl", "data/test.jsonl", "data",
                           "tokenizer.json", "tokenizer_config.json", "config.json"}) {
    fs::remove(fs::path(folder) / name, ignored);
  }
  if (!was_there) fs::remove(folder, ignored);
}

void make(const Globals& globals, const Flags& flags) {
  const std::string& folder = flags.folder;
  std::error_code reason;
  const bool is_there = fs::exists(fs::symlink_status(folder, reason));
  if (is_there && !(fs::is_directory(folder, reason) && fs::is_empty(folder, reason))) {
    throw Error(Errc::kIo, folder + ": already exists; use a new or an empty folder");
  }
  const models::Config config = demo::demo_config();
  try {
    write_files(folder, config, flags);
  } catch (const fs::filesystem_error& e) {
    throw Error(Errc::kIo, folder + ": cannot write to this folder: " + e.code().message());
  } catch (...) {
    remove_files(folder, is_there);
    throw;
  }
  const std::string model = shell_word(folder + "/model");
  const std::string train = "mlxtape train --config " + shell_word(folder + "/config.json") +
                            " --from-scratch --data " + shell_word(folder + "/data") + " --out " +
                            model +
                            " --mask-prompt --iters 1000 --batch-size 64 --learning-rate 3e-3 "
                            "--schedule cosine --warmup 50";
  const std::string generate = "mlxtape generate --model " + model + " -p 'plus 17+25>'";
  if (globals.json) {
    return print_json(Json::Object{{"folder", folder},
                                   {"parameters", models::parameter_count(config)},
                                   {"samples", flags.samples},
                                   {"train", train},
                                   {"generate", generate}});
  }
  print_result(folder + ": a byte-level Qwen3-Next with " +
               human_count(static_cast<double>(models::parameter_count(config))) +
               " parameters, and " + std::to_string(flags.samples) +
               " samples to train it on. Next:\n  " + train + "\n  " + generate + "\n");
}

}  // namespace

void add_new(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "new",
      "create a folder with a small model's config.json, a tokenizer and training data: everything "
      "that train needs.",
      "Examples:\n"
      "  mlxtape new starter\n"
      "  mlxtape new starter --samples 50000 --seed 7");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  command->add_option("DIR", flags->folder, "the folder to create")->required()->type_name("DIR");
  command->add_option("--samples", flags->samples, "number of training samples")
      ->check(whole_number(1, std::uint64_t{1} << 24U))
      ->type_name("N");
  command->add_option("--seed", flags->seed, "random seed of the samples")
      ->check(whole_number(0, std::numeric_limits<std::uint32_t>::max()))
      ->type_name("N");
  command->callback([&globals, flags] { make(globals, *flags); });
}

}  // namespace mlxtape::cli
