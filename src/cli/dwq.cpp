// dwq: distilled weight quantisation.
#include <CLI/CLI.hpp>

#include <limits>
#include <optional>

#include "command.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/jobs/dwq.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "output_paths.h"
#include "train_flags.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

struct Flags {
  std::string model, student, to = "mlx_model", data, targets;
  int bits = 4, group_size = 64;
  jobs::DwqData from;
  jobs::DwqOptions job;
  bool targets_only = false, force = false;
  FiniteFlag finite;
  StateFlags state;
};

void expect_flags(const Flags& flags) {
  if (flags.data.empty()) {
    called_wrongly("--data-path is required: mlxtape downloads nothing");
  }
  if (flags.targets_only && flags.targets.empty()) {
    called_wrongly("--targets-only needs --target-dir");
  }
  expect_model(flags.model);
  if (!flags.student.empty()) expect_model(flags.student);
}

// What the run learns from, the same for the same flags.
struct Texts {
  jobs::DataSet data;
  jobs::BatchOptions options;
  std::unique_ptr<jobs::Batches> train;
  std::vector<jobs::Batch> valid;

  Texts(const Flags& flags, const formats::Tokenizer& tokenizer) {
    jobs::DataSet all =
        jobs::read_data(flags.data, tokenizer, {flags.from.batches.max_tokens, false});
    if (all.valid.empty()) {
      data = jobs::pick_samples(all.train, flags.from.samples, flags.from.valid_samples,
                                flags.from.batches.seed);
    } else {
      const auto some = [](std::vector<jobs::Sample> samples, std::int64_t most) {
        if (most < static_cast<std::int64_t>(samples.size())) {
          samples.resize(static_cast<std::size_t>(most));
        }
        return samples;
      };
      data = {some(std::move(all.train), flags.from.samples),
              some(std::move(all.valid), flags.from.valid_samples),
              {}};
    }
    options = flags.from.batches;
    train = std::make_unique<jobs::Batches>(jobs::Batches::of(data.train, options));
    valid = jobs::validation_batches(data.valid, options, -1);
  }
};

bool is_complete(const Flags& flags, const jobs::TargetsPlan& plan, std::int64_t vocabulary) {
  try {
    static_cast<void>(jobs::Targets(flags.targets, plan, vocabulary));
    return true;
  } catch (const Error& e) {
    if (e.code() != Errc::kIo) throw;  // of something else
    return false;
  }
}

// The teacher is there only while this runs.
void write_targets(const Globals& globals, const Flags& flags, const jobs::TargetsPlan& plan,
                   CommandEncoder& encoder) {
  const models::Model teacher = load_model(flags.model, encoder, globals);
  flags.finite.expect(encoder, teacher, flags.model);
  const Interrupts interrupts("stopping after this batch");
  std::unique_ptr<Progress> progress;
  jobs::WriteTargetsHooks hooks;
  hooks.progress = [&](std::int64_t done, std::int64_t all) {
    if (progress == nullptr) progress = std::make_unique<Progress>("targets", all, globals);
    progress->at(done);
  };
  hooks.stop = [] {
    return Interrupts::asked();
  };
  const jobs::WroteTargets wrote =
      jobs::write_targets(encoder, teacher, plan, flags.targets, hooks);
  progress.reset();
  if (!wrote.stopped) return;
  remark("stopped; the targets of " + std::to_string(wrote.written + wrote.found) +
         " batches have been saved in " + flags.targets + ", resume with:\n  " +
         globals.again_with("--resume"));
  throw Exit{kInterrupted};
}

bool is_quantized(const models::Model& model) {
  for (const models::ConstSlot& slot : models::slots(model)) {
    if (slot.is_weight && slot.weight->is_quantized()) return true;
  }
  return false;
}

models::Model make_student(CommandEncoder& encoder, const models::Model& teacher,
                           const Flags& flags) {
  if (is_quantized(teacher)) {
    called_wrongly(flags.model +
                   ": is already quantised; give the student made from it as --quantized-model");
  }
  return models::quantize_model(encoder, teacher,
                                models::usual_format({flags.bits, flags.group_size}));
}

jobs::DwqOptions options_of(const Flags& flags) {
  jobs::DwqOptions o = flags.job;
  o.fit.folder = flags.state.folder;
  o.fit.resume = flags.state.resume;
  o.fit.fingerprint["teacher"] = jobs::model_fingerprint(flags.model);
  o.fit.fingerprint["student"] =
      flags.student.empty()
          ? std::to_string(flags.bits) + " bits in groups of " + std::to_string(flags.group_size)
          : jobs::model_fingerprint(flags.student);
  return o;
}

void tell(const Globals& globals, const Flags& flags, const models::Model& student,
          const jobs::DwqResult& result) {
  Device& device = student.device();
  const double bits = models::bits_per_weight(student);
  if (globals.json) {
    Json::Object object{{"model", flags.model},
                        {"mlx_path", flags.to},
                        {"bits_per_weight", bits},
                        {"trained_numbers", result.trained},
                        {"temperature", flags.job.temperature},
                        {"kl_before", result.initial},
                        {"kl_after", result.kept},
                        {"step_of_weights", result.fit.held_step},
                        {"worse", result.worse}};
    for (auto& each : fit_json(result.fit, device)) object.push_back(std::move(each));
    return print_json(object);
  }
  Facts facts;
  facts.add("KL to the teacher",
            fixed(result.initial, 5) + " before, " + fixed(result.kept, 5) + " after, " +
                fixed(result.initial > 0 ? 100 * (1 - result.kept / result.initial) : 0, 1) +
                " % lower (temperature " + fixed(flags.job.temperature, 1) + ", validation)");
  facts.add("trained", human_count(static_cast<double>(result.trained)) + " scales and biases, " +
                           std::to_string(result.fit.steps) + " steps in " +
                           human_time(result.fit.seconds));
  facts.add("peak memory",
            human_bytes(static_cast<double>(peak_memory(device, result.fit.peak_bytes))));
  print_result(facts.text() + flags.to + ": " + fixed(bits, 3) + " bits per weight, " +
               human_bytes(static_cast<double>(models::weight_bytes(student))) + "\n");
}

void distil(const Globals& globals, const Flags& flags, const Texts& texts,
            const jobs::TargetsPlan& plan, CommandEncoder& encoder) {
  const models::Config config =
      models::Config::parse(formats::read_model_config(flags.model), flags.model);
  std::optional<jobs::Targets> targets;
  if (!flags.targets.empty()) targets.emplace(flags.targets, plan, config.plan.vocabulary);
  models::Model teacher, student;
  if (!targets || flags.student.empty()) {
    teacher = load_model(flags.model, encoder, globals);
    flags.finite.expect(encoder, teacher, flags.model);
  }
  student = flags.student.empty() ? make_student(encoder, teacher, flags)
                                  : load_model(flags.student, encoder, globals);
  encoder.commit_and_wait();
  if (!flags.student.empty()) flags.finite.expect(encoder, student, flags.student);
  if (targets) teacher = {};
  const jobs::DwqTeacher from{targets ? nullptr : &teacher, targets ? &*targets : nullptr};
  jobs::DwqResult result;
  with_state(flags.state, globals, [&] {
    Watch watch("dwq", texts.train->per_epoch(), globals);
    result = jobs::dwq(encoder, student, from, *texts.train, texts.valid, options_of(flags),
                       watch.hooks());
  });
  if (result.fit.stopped) {
    end_interrupted(result.fit, texts.train->per_epoch(), flags.state, encoder.device(), globals);
  }
  with_state(flags.state, globals, [&] {
    save_result(student, flags.to, flags.student.empty() ? flags.model : flags.student,
                flags.force);
  });
  if (!flags.state.keep) flags.state.run().remove();
  if (!result.warning.empty()) remark("mlxtape: " + result.warning);
  tell(globals, flags, student, result);
}

void dwq(const Globals& globals, Flags flags) {
  expect_flags(flags);
  std::vector<Place> inputs = {
      {"--model", flags.model}, {"--quantized-model", flags.student}, {"--data-path", flags.data}};
  if (!flags.targets.empty()) {
    expect_apart({"--target-dir", flags.targets}, inputs);
    expect_directory_or_none(flags.targets);
  }
  if (!flags.targets_only) {
    inputs.push_back({"--target-dir", flags.targets});
    expect_apart({"--mlx-path", flags.to}, inputs);
    expect_place(flags.to, flags.force, "--mlx-path",
                 flags.student.empty() ? flags.model : flags.student);
    flags.state.expect({"--mlx-path", flags.to}, inputs, globals);
  }
  const auto tokenizer = formats::Tokenizer::from_directory(flags.model);
  const Texts texts(flags, tokenizer);
  const auto encoder = globals.device().make_encoder();
  jobs::TargetsPlan plan;
  if (!flags.targets.empty()) {
    plan.train = texts.train.get();
    plan.valid = &texts.valid;
    plan.options = texts.options;
    plan.tokenizer = jobs::tokenizer_fingerprint(flags.model);
    plan.teacher = jobs::model_fingerprint(flags.model);
    const models::Config config =
        models::Config::parse(formats::read_model_config(flags.model), flags.model);
    if (!is_complete(flags, plan, config.plan.vocabulary)) {
      write_targets(globals, flags, plan, *encoder);
    }
  }
  if (!flags.targets_only) return distil(globals, flags, texts, plan, *encoder);
  const std::int64_t batches =
      texts.train->per_epoch() + static_cast<std::int64_t>(texts.valid.size());
  if (globals.json) {
    return print_json(Json::Object{{"target_dir", flags.targets}, {"batches", batches}});
  }
  print_result(flags.targets + ": targets of " + std::to_string(batches) + " batches\n");
}

void add_learning(CLI::App& command, Flags& flags) {
  const char* const of_steps = "Training";
  const char* const of_saves = "Validation and checkpoints";
  const auto add = [&](const char* group, const char* name, auto& value, const char* what) {
    return command.add_option(name, value, what)->type_name("N")->group(group);
  };
  const auto positive = number_above(0, std::numeric_limits<float>::max());
  const auto count = whole_number(1, 1U << 30U);
  const auto count_or_none = whole_number(0, 1U << 30U);
  command
      .add_option("--data-path,--data", flags.data,
                  "a .jsonl or .txt file, or a folder with train and valid (required: nothing is "
                  "downloaded)")
      ->type_name("FILE")
      ->group("Data");
  add("Data", "--num-samples", flags.from.samples,
      "number of training samples, each used once; drawn at random if there is no valid")
      ->check(count);
  add("Data", "--num-valid-samples", flags.from.valid_samples, "number of validation samples")
      ->check(count);
  add("Data", "--max-seq-length", flags.from.batches.max_tokens,
      "maximum tokens per sample; longer ones are cut")
      ->check(whole_number(2, 1U << 30U));
  add("Data", "--batch-size", flags.from.batches.batch_size, "samples per step")->check(count);
  add("Data", "--seed", flags.from.batches.seed, "random seed (choice and order of samples)")
      ->check(whole_number(0, std::numeric_limits<std::uint32_t>::max()));
  add(of_steps, "--learning-rate", flags.job.fit.learning_rate,
      "learning rate of Adam; small models need a higher one")
      ->check(positive)
      ->type_name("X");
  add(of_steps, "--temperature", flags.job.temperature, "temperature of both distributions")
      ->check(positive)
      ->type_name("X");
  command
      .add_flag(
          "--grad-checkpoint", flags.job.checkpoint,
          "gradient checkpointing: recompute layers in the backward pass; less memory, more time")
      ->group(of_steps);
  command
      .add_option("--target-dir", flags.targets,
                  "store the teacher's 1024 most likely tokens at each position in this folder and "
                  "train on them, without the teacher in memory; existing targets are checked and "
                  "reused")
      ->type_name("DIR")
      ->group(of_steps);
  command.add_flag("--targets-only", flags.targets_only, "write --target-dir, then stop")
      ->group(of_steps);
  add(of_saves, "--steps-per-report", flags.job.fit.report_every,
      "steps between reports of the loss; 0: only at the end")
      ->check(count_or_none);
  add(of_saves, "--steps-per-eval", flags.job.fit.validate_every, "steps between validations")
      ->check(count_or_none);
  add(of_saves, "--save-every", flags.job.fit.save_every,
      "steps between checkpoints of the run; 0: only at the end")
      ->check(count_or_none);
  flags.state.add_to(command);
}

}  // namespace

void add_dwq(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "dwq",
      "distilled weight quantisation (DWQ): tune the scales and biases of weights with fewer than "
      "8 "
      "bits against the full-precision model; the integer codes do not change. If the final "
      "validation loss is higher than the initial one, the best weights are written.",
      "Examples:\n"
      "  mlxtape dwq --model my-model --bits 2 --data-path texts.jsonl --mlx-path small\n"
      "  mlxtape dwq --model my-model --quantized-model small --target-dir targets \\\n"
      "      --data-path texts.jsonl --mlx-path better");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  const char* const group = "Model";
  command->add_option("-m,--model", flags->model, "the teacher's directory, in MLX format")
      ->required()
      ->type_name("DIR")
      ->group(group);
  command
      ->add_option("--quantized-model", flags->student,
                   "the student [the teacher, quantised with --bits and --group-size]")
      ->type_name("DIR")
      ->group(group);
  command->add_option("--mlx-path", flags->to, "the directory to write")
      ->type_name("DIR")
      ->group(group);
  command
      ->add_flag("--force", flags->force,
                 "overwrite the model at --mlx-path, once the new one is complete")
      ->group(group);
  command->add_option("--bits", flags->bits, "bits per weight")
      ->check(CLI::IsMember({2, 3, 4, 5, 6}))
      ->type_name("N")
      ->group(group);
  command->add_option("--group-size", flags->group_size, "weights that share one scale and bias")
      ->check(CLI::IsMember({32, 64, 128}))
      ->type_name("N")
      ->group(group);
  flags->finite.add_to(*command, group);
  add_learning(*command, *flags);
  command->callback([&globals, flags] { dwq(globals, *flags); });
}

}  // namespace mlxtape::cli
