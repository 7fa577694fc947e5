// demo: the whole job on one small model: training from scratch, quantisation, distillation, a table and a page that tell how
// well each went.
#include <CLI/CLI.hpp>

#include <filesystem>
#include <memory>

#include "command.h"
#include "demo_run.h"
#include "interrupt.h"
#include "mlxtape/base/files.h"
#include "mlxtape/formats/model_directory.h"
#include "output.h"
#include "output_paths.h"

namespace mlxtape::cli {

namespace {

namespace fs = std::filesystem;
using formats::Json;

// {} is what a demo begins with.
bool is_demo(const std::string& file) {
  try {
    const Json json = Json::parse(read_whole(file, "demo"), file);
    return json.is_object() && (json.object().empty() || json.find("held_out_cases") != nullptr);
  } catch (const Error&) {
    return false;
  }
}

// A folder that is there must be a demo's: models in it are replaced.
void expect_place(const Globals& globals, const DemoFlags& flags) {
  const std::string& out = flags.out;
  expect_directory_or_none(out);
  const bool goes_on = has_demo_state(out);
  if (goes_on && !flags.resume) {
    throw Error(Errc::kIo, out +
                               "/state: contains an unfinished demo; use --resume, or delete it to "
                               "start over");
  }
  if (!goes_on && flags.resume && !globals.quiet)
    remark(out + "/state: contains no unfinished demo; starting a new one");
  std::error_code reason;
  if (!fs::exists(out, reason)) return;
  const bool is_empty = fs::is_directory(out, reason) && fs::is_empty(out, reason);
  if (!is_empty && !is_demo(out + "/demo.json")) {
    throw Error(Errc::kIo, out + ": already exists and was not written by demo; use another --out");
  }
  for (const char* name : kDemoModels) {
    const std::string folder = out + "/" + name, fault = formats::replace_fault(folder);
    if (fault.empty()) continue;
    throw Error(Errc::kIo, folder + ": " + fault + ", so it is not overwritten; use another --out");
  }
}

void print_tables(const demo::DemoResult& result) {
  Table table({"model", "size", "bits/weight", "accuracy", "perplexity", "KL to full"},
              {false, true, true, true, true, true});
  for (const demo::DemoModel& one : result.models) {
    table.add({one.name, human_bytes(static_cast<double>(one.bytes)), fixed(one.bits_per_weight, 2),
               fixed(100 * one.scores.all().share(), 1) + " %",
               fixed(one.evaluation.perplexity.value, 4), fixed(one.evaluation.kl.value, 4)});
  }
  print("\n" + table.text());
  print("\nDWQ removed " + fixed(100 * result.removed(), 1) +
        " % of the 2-bit model's KL divergence\n\n");
  std::vector<std::string> header{"prompt", "answer"};
  for (const demo::DemoModel& one : result.models) header.push_back(one.name);
  Table answers(header);
  for (std::size_t q = 0; q < result.questions.size(); ++q) {
    const demo::TaskCase& asked = result.questions[q];
    std::vector<std::string> row{asked.prompt, asked.answer.substr(0, asked.answer.size() - 1)};
    for (const demo::DemoModel& one : result.models) row.push_back(demo::printable(one.answers[q]));
    answers.add(row);
  }
  print(answers.text());
}

void demo(const Globals& globals, const DemoFlags& flags) {
  expect_place(globals, flags);
  const Interrupts interrupts("stopping after this step");
  const demo::DemoResult result = run_demo(globals, flags);
  if (globals.json) return print_json(demo::to_json(result));
  print_tables(result);
  print_result("\n" + human_time(result.seconds) + " in all; the report is " + flags.out +
               "/report.html.\nThe models are directories in MLX format, for example:\n" +
               "  mlxtape generate --model " + shell_word(flags.out + "/4bit") +
               " --prompt 'plus 17+25>'\n");
}

}  // namespace

void add_demo(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "demo",
      "train, quantise, distil and measure a small model, in about two minutes on two cores: a "
      "Qwen3-Next learns five tasks from scratch, is quantised to 4 and 2 bits, and the 2-bit "
      "model "
      "is distilled (DWQ).",
      "Examples:\n"
      "  mlxtape demo\n"
      "  mlxtape demo --seconds 30 --out quick --seed 7\n"
      "\n"
      "After Ctrl-C, a full disk or a crash, the same command with --resume continues.");
  command->group("Models");
  const auto flags = std::make_shared<DemoFlags>();
  command->add_option("--out", flags->out, "folder for the models, report.html and demo.json")
      ->type_name("DIR");
  command->add_option("--iters", flags->iterations, "number of training steps")
      ->check(whole_number(1, 1U << 20U))
      ->type_name("N");
  command
      ->add_option("--seconds", flags->seconds,
                   "take fewer steps, so that the demo runs for about this long; 0: no limit")
      ->check(number(0, 1e6))
      ->type_name("S");
  command
      ->add_option("--cases", flags->cases, "number of held-out questions to measure accuracy on")
      ->check(whole_number(std::int64_t{demo::kTasks}, 1U << 20U))
      ->type_name("N");
  command->add_option("--seed", flags->seed, "random seed (weights, questions and their order)")
      ->check(whole_number(0, std::uint64_t{1} << 32U))
      ->type_name("N");
  command->add_flag("--resume", flags->resume,
                    "resume the unfinished demo in --out, with the same bits as if it had never "
                    "stopped; starts one if there is none");
  command->callback([&globals, flags] { demo(globals, *flags); });
}

}  // namespace mlxtape::cli
