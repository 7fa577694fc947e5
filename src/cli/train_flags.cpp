#include "train_flags.h"

#include <CLI/CLI.hpp>

#include <limits>

#include "model_flags.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

const auto kCount = whole_number(1, std::uint64_t{1} << 30U);
const auto kPositive = number_above(0, std::numeric_limits<float>::max());
const auto kFinite = number(0, std::numeric_limits<float>::max());
const auto kCountOrNone = whole_number(0, std::uint64_t{1} << 30U);

std::string digits(double value, const char* form) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), form, value);
  return text.data();
}

std::string loss_text(double loss) { return digits(loss, "%.4f"); }

}  // namespace

CLI::Option* LoopFlags::add_to(CLI::App& command) {
  const auto add = [&](const char* group, const char* name, auto& value, const char* what) {
    return command.add_option(name, value, what)->type_name("N")->group(group);
  };
  const char* const of_data = "Data";
  const char* const of_steps = "Training";
  const char* const of_saves = "Validation and checkpoints";
  command
      .add_option(
          "--data", data,
          "a folder with train, valid and test, each .jsonl or .txt, or a single file, "
          "which is used for training only. Lines: {\"text\"}, {\"prompt\", \"completion\"} "
          "or {\"messages\"}")
      ->type_name("FILE")
      ->group(of_data);
  add(of_data, "--batch-size", job.batches.batch_size, "samples per batch")->check(kCount);
  add(of_data, "--max-seq-length", job.batches.max_tokens,
      "maximum tokens per sample; longer ones are cut")
      ->check(whole_number(2, 1U << 30U));
  command.add_flag("--mask-prompt", mask_prompt, "compute the loss on completions only")
      ->group(of_data);
  add(of_data, "--seed", job.batches.seed, "random seed (batch order, initialisation, dropout)")
      ->check(whole_number(0, std::numeric_limits<std::uint32_t>::max()));
  add(of_steps, "--iters", job.fit.iterations,
      "optimiser steps, each of --grad-accumulation-steps batches (mlx-lm counts batches)")
      ->check(kCount);
  CLI::Option* const learning_rate = add(of_steps, "--learning-rate", job.fit.learning_rate,
                                         "learning rate; with a schedule its maximum")
                                         ->check(kPositive)
                                         ->type_name("X");
  command
      .add_option("--schedule", schedule,
                  "learning rate schedule after the warm-up; cosine decays to --final-share")
      ->check(CLI::IsMember({"constant", "cosine"}))
      ->type_name("NAME")
      ->group(of_steps);
  add(of_steps, "--warmup", job.fit.warmup, "steps over which the learning rate rises from 0")
      ->check(kCountOrNone);
  add(of_steps, "--final-share", job.fit.final_share,
      "final learning rate of cosine, as a share of --learning-rate")
      ->check(number(0, 1))
      ->type_name("X");
  optimiser.add_to(command, of_steps);
  add(of_steps, "--clip", job.fit.clip, "clip gradients to this norm; 0: no clipping")
      ->check(kFinite)
      ->type_name("X");
  add(of_steps, "--grad-accumulation-steps", job.fit.accumulation, "batches per step")
      ->check(kCount);
  command
      .add_flag(
          "--grad-checkpoint", job.checkpoint,
          "gradient checkpointing: recompute layers in the backward pass; less memory, more time")
      ->group(of_steps);
  add(of_saves, "--val-batches", job.validation_batches,
      "batches per validation, spread over all lengths; -1: all, 0: no validation")
      ->check(whole_number(-1, 1U << 30U));
  add(of_saves, "--steps-per-report", job.fit.report_every,
      "steps between reports of the loss; 0: only at the end")
      ->check(kCountOrNone);
  add(of_saves, "--steps-per-eval", job.fit.validate_every, "steps between validations")
      ->check(kCountOrNone);
  add(of_saves, "--save-every", job.fit.save_every,
      "steps between checkpoints of the run; 0: only at the end")
      ->check(kCountOrNone);
  return learning_rate;
}

jobs::TrainOptions LoopFlags::options() const {
  if (data.empty()) called_wrongly("--data is required");
  jobs::TrainOptions o = job;
  o.fit.cosine = schedule == "cosine";
  o.fit.optimiser = optimiser.made();
  o.batches.learn_prompt = !mask_prompt;
  require(jobs::batch_check(o.batches));
  return o;
}

jobs::DataSet LoopFlags::read(const formats::Tokenizer& tokenizer) const {
  return jobs::read_data(data, tokenizer, {job.batches.max_tokens, mask_prompt});
}

void StateFlags::add_to(CLI::App& command, const std::string& without) {
  const char* const group = "Validation and checkpoints";
  beside = without.empty();
  if (beside) {
    command
        .add_option(
            "--state", folder,
            "folder for the checkpoint of the unfinished run [the output's name with .state]")
        ->type_name("DIR")
        ->default_str("")
        ->group(group);
  }
  const std::string where = without.empty() ? "--state" : without;
  command
      .add_flag("--resume", resume,
                "resume the run in " + where +
                    ", with the same bits as if it had never stopped; starts one if there is none")
      ->group(group);
  command.add_flag("--keep-state", keep, "keep the checkpoint after the run finishes")
      ->group(group);
}

void StateFlags::expect(const Place& out, const std::vector<Place>& inputs,
                        const Globals& globals) {
  if (folder.empty()) folder = jobs::RunFolder::beside(without_slash(out.path)).path();
  if (beside) {
    expect_apart({"--state", folder}, {out});
    expect_apart(out, {{"--state", folder}});
    expect_apart({"--state", folder}, inputs);
  }
  expect_directory_or_none(folder);
  const bool there = run().has_state();
  const std::string file = run().state();
  const std::string fault = there && !jobs::RunFolder::is_state_file(file)
                                ? file + ": already exists and is not the checkpoint of a run"
                            : beside ? run().new_run_fault()
                                     : "";
  if (!fault.empty() && !(there && resume)) {  // a damaged one is told of by who reads it
    throw Error(Errc::kIo,
                fault + "; use another " + (beside ? "--state" : out.flag) + ", or move it away");
  }
  if (there && !resume) {
    throw Error(Errc::kIo, folder + ": contains an unfinished run; use --resume, or delete " +
                               jobs::RunFolder::names_of_state() + " there to start over");
  }
  if (!there && resume && !globals.quiet)
    remark(folder + ": contains no unfinished run; starting a new one");
}

Watch::Watch(std::string title, std::int64_t iterations, const Globals& globals)
    : title_(std::move(title)),
      iterations_(iterations),
      globals_(globals),
      interrupts_("stopping after this step") {}

Watch::~Watch() = default;

Progress& Watch::progress() {
  if (progress_ == nullptr) {
    Progress::Options options;
    options.start = start_;
    progress_ = std::make_unique<Progress>(title_, iterations_, globals_, options);
  }
  return *progress_;
}

void Watch::say(const std::string& text) {
  if (!globals_.quiet) progress().line(text);
}

jobs::FitHooks Watch::hooks() {
  jobs::FitHooks hooks;
  hooks.on_resumed = [this](std::int64_t step) {
    start_ = step;
    say("resumed after step " + std::to_string(step));
  };
  hooks.on_step = [this](std::int64_t step) {
    progress().at(step, extra_);
  };
  hooks.on_report = [this](const jobs::FitPoint& p) {
    extra_ = "loss " + loss_text(p.loss);
    say("step " + std::to_string(p.step) + ": loss " + loss_text(p.loss) + ", lr " +
        digits(p.rate, "%.3g") + ", gradient norm " + digits(p.norm, "%.3g") + ", " +
        fixed(p.tokens_per_second, 0) + " tokens/s");
  };
  hooks.on_validated = [this](const jobs::FitPoint& p) {
    say("step " + std::to_string(p.step) + ": validation loss " + loss_text(p.loss));
  };
  hooks.stop = [] {
    return Interrupts::asked();
  };
  return hooks;
}

Json points_json(const std::vector<jobs::FitPoint>& points) {
  Json::Array array;
  for (const jobs::FitPoint& p : points) {
    array.emplace_back(Json::Object{{"step", p.step},
                                    {"loss", p.loss},
                                    {"learning_rate", p.rate},
                                    {"norm", p.norm},
                                    {"tokens_per_second", p.tokens_per_second}});
  }
  return array;
}

Json::Object fit_json(const jobs::FitResult& fit, Device& device) {
  Json::Object object{{"steps", fit.steps},
                      {"interrupted", fit.stopped},
                      {"reports", points_json(fit.reports)},
                      {"validations", points_json(fit.validations)}};
  if (fit.best_step >= 0) {
    object.emplace_back("best_step", fit.best_step);
    object.emplace_back("best_validation_loss", fit.best_loss);
  }
  object.emplace_back("seconds", fit.seconds);
  object.emplace_back("peak_memory_bytes",
                      static_cast<std::int64_t>(peak_memory(device, fit.peak_bytes)));
  return object;
}

std::string fit_text(const jobs::FitResult& fit, Device& device) {
  Facts facts;
  facts.add("steps", std::to_string(fit.steps) + " in " + human_time(fit.seconds));
  if (!fit.reports.empty()) {
    facts.add("training loss", loss_text(fit.reports.front().loss) + " first, " +
                                   loss_text(fit.reports.back().loss) + " last");
  }
  if (!fit.validations.empty()) {
    facts.add("validation loss", loss_text(fit.validations.front().loss) + " first, " +
                                     loss_text(fit.best_loss) + " best, after step " +
                                     std::to_string(fit.best_step));
  }
  facts.add("peak memory", human_bytes(static_cast<double>(peak_memory(device, fit.peak_bytes))));
  return facts.text();
}

void end_interrupted(const jobs::FitResult& fit, std::int64_t iterations, const StateFlags& state,
                     Device& device, const Globals& globals) {
  const std::string step =
      "stopped after step " + std::to_string(fit.steps) + " of " + std::to_string(iterations);
  const std::string fault = state.run().fault();
  if (!fault.empty()) throw Error(Errc::kIo, step + "; progress has not been saved: " + fault);
  const std::string command = globals.again_with("--resume");
  if (globals.json) {
    Json::Object object = fit_json(fit, device);
    object.emplace_back("state", state.folder);
    object.emplace_back("resume", command);
    print_json(object);
  }
  remark(step + "; progress has been saved in " + state.folder + ", resume with:\n  " + command);
  throw Exit{kInterrupted};
}

void rethrow_with_advice(const StateFlags& state, const Globals& globals) {
  try {
    throw;
  } catch (const jobs::NotFinite& e) {
    throw jobs::NotFinite(std::string(e.what()) +
                          (state.run().has_state()
                               ? "; to start over with other settings, delete " + state.folder
                               : ""));
  } catch (const Error& e) {
    const bool goes_on =
        (e.code() == Errc::kIo || e.code() == Errc::kOutOfMemory || e.code() == Errc::kBackend) &&
        state.run().fault().empty();
    if (!goes_on) throw;
    throw Error(e.code(), std::string(e.what()) + "; after fixing this, resume with: " +
                              globals.again_with("--resume"));
  }
}

}  // namespace mlxtape::cli
