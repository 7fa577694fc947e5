#include "mlxtape/jobs/train.h"

#include <memory>

#include "fingerprint.h"
#include "staging.h"

namespace mlxtape::jobs {

namespace {

std::vector<Trainable> floats_of(const models::Model& model) {
  std::vector<Trainable> trainables;
  for (const models::ConstSlot& slot : models::slots(model)) {
    // Weights of products; rows of embedding and head are tokens of their own.
    const bool is_matrix = slot.is_weight && !slot.weight->is_quantized() &&
                           slot.role != models::Role::kEmbedding &&
                           slot.role != models::Role::kHead;
    models::each_tensor_of(slot, [&](const std::string& name, const Tensor& t) {
      if (is_float(t.dtype())) trainables.push_back({name, t, is_matrix});
    });
  }
  return trainables;
}

Objective objective_of(CommandEncoder& encoder, const TrainedPart& part, const Batches& batches,
                       bool checkpoint) {
  struct State {
    Staging staging;
    DeviceBatch given;  // the batch staged last
  };
  const auto state = std::make_shared<State>(State{Staging(encoder), {}});
  Objective objective;
  objective.stage = [&part, &batches, state](std::int64_t number) {
    const Batch batch = batches.at(number);
    const Shape shape{batch.rows, batch.length};
    const auto put = [&](const char* name, const std::vector<std::int32_t>& ids) {
      return state->staging.put(name, shape, DType::kI32, std::span(ids));
    };
    state->given = {put("tokens", batch.tokens), put("targets", batch.targets)};
    if (part.stage) part.stage(number);
    return Staged{state->staging.text_of(shape), batch.counted};
  };
  objective.record = [&part, checkpoint, state](Tape& tape) {
    const DeviceBatch& given = state->given;
    const auto watched = std::make_shared<const models::Model>(part.watch(tape));
    Recorded recorded;
    recorded.loss = models::loss(tape, *watched, given.tokens, given.targets, {checkpoint, {}});
    recorded.watched = part.watched(*watched);
    recorded.kept = watched;  // with checkpoints a model must live as long as its tape
    return recorded;
  };
  return objective;
}

void check(const models::Model& model, const DataSet& data, const TrainOptions& options) {
  if (data.train.empty()) {
    throw Error(Errc::kArgument, "train: there must be samples to train on, got none");
  }
  if (options.validation_batches < -1) {
    throw Error(Errc::kArgument, "train: validation_batches must be at least -1, got " +
                                     std::to_string(options.validation_batches));
  }
  check_tokens(data.train, model.config.plan.vocabulary);
  if (options.validation_batches != 0) check_tokens(data.valid, model.config.plan.vocabulary);
}

}  // namespace

OptimiserNumbers train_usual() { return {{"bias_correction", 1}}; }

FitOptions train_fit() {
  FitOptions fit;
  fit.optimiser = make_optimiser("adamw", {}, train_usual());
  fit.clip = 1;
  return fit;
}

DeviceBatch to_device(CommandEncoder& encoder, const Batch& batch) {
  const Shape shape{batch.rows, batch.length};
  DeviceBatch result{encoder.empty(shape, DType::kI32), encoder.empty(shape, DType::kI32)};
  encoder.upload(batch.tokens.data(), result.tokens.bytes(), result.tokens);
  encoder.upload(batch.targets.data(), result.targets.bytes(), result.targets);
  return result;
}

void check_tokens(const std::vector<Sample>& samples, std::int64_t vocabulary) {
  for (const Sample& sample : samples) {
    for (const std::int32_t token : sample.tokens) {
      if (token >= 0 && token < vocabulary) continue;
      throw Error(Errc::kIo, "data: tokens must be in the model's vocabulary of " +
                                 std::to_string(vocabulary) + ", got " + std::to_string(token) +
                                 "; does the tokenizer belong to this model?");
    }
  }
}

std::vector<Batch> validation_batches(const std::vector<Sample>& samples,
                                      const BatchOptions& options, std::int64_t most) {
  std::vector<Batch> all = every_batch(samples, options);
  std::erase_if(all, [](const Batch& batch) { return batch.counted == 0; });
  const auto n = static_cast<std::int64_t>(all.size());
  if (most < 0 || n <= most) return all;
  std::vector<Batch> chosen;
  for (std::int64_t i = 0; i < most; ++i) {
    chosen.push_back(std::move(all[static_cast<std::size_t>((2 * i + 1) * n / (2 * most))]));
  }
  return chosen;
}

double mean_loss(CommandEncoder& encoder, const models::Model& model,
                 const std::vector<Batch>& batches) {
  double sum = 0;
  std::int64_t counted = 0;
  for (const Batch& batch : batches) {
    if (batch.counted == 0) continue;
    Tape tape(encoder);
    const DeviceBatch given = to_device(encoder, batch);
    float mean = 0;
    encoder.download(models::loss(tape, model, given.tokens, given.targets), &mean, sizeof mean);
    sum += static_cast<double>(mean) * static_cast<double>(batch.counted);
    counted += batch.counted;
  }
  if (counted == 0) {
    throw Error(Errc::kArgument, "mean_loss: there must be a token to score, got none");
  }
  return sum / static_cast<double>(counted);
}

TrainResult train_part(CommandEncoder& encoder, const models::Model& model, const TrainedPart& part,
                       const DataSet& data, const TrainOptions& options, const FitHooks& hooks) {
  check(model, data, options);
  const Batches batches = Batches::of(data.train, options.batches);
  const std::vector<Batch> valid =
      validation_batches(data.valid, options.batches, options.validation_batches);

  FitOptions how = options.fit;
  how.fingerprint["training data"] = batches.fingerprint();
  how.fingerprint["validation data"] = fingerprint(valid);
  how.fingerprint["model"] = model.config.json.dump(-1, true);
  how.fingerprint["dtype"] = name_of(model.dtype());
  how.fingerprint["checkpoint"] = options.checkpoint ? "on" : "off";

  FitTask task;
  task.trainables = part.trainables;
  task.objective = objective_of(encoder, part, batches, options.checkpoint);
  task.validate = options.validate;
  if (!task.validate && !valid.empty()) {
    task.validate = [&] {
      return mean_loss(encoder, model, valid);
    };
  }
  task.with_state = part.with_state;
  task.end_with = EndWith::kBest;
  TrainResult result{fit(encoder, task, how, hooks)};
  encoder.commit_and_wait();
  return result;
}

TrainResult train(CommandEncoder& encoder, const models::Model& model, const DataSet& data,
                  const TrainOptions& options, const FitHooks& hooks) {
  TrainedPart all;
  all.trainables = floats_of(model);
  all.watch = [&](Tape& tape) {
    return models::watch(tape, model);
  };
  all.watched = [](const models::Model& watched) {
    std::vector<Tensor> tensors;
    for (const models::Parameter& p : models::parameters(watched)) {
      if (is_float(p.tensor.dtype())) tensors.push_back(p.tensor);
    }
    return tensors;
  };
  TrainOptions how = options;
  how.fit.fingerprint["weights"] = base_fingerprint(encoder, model);
  return train_part(encoder, model, all, data, how, hooks);
}

}  // namespace mlxtape::jobs
