#include "mlxtape/jobs/lora.h"

#include "fingerprint.h"
#include "mlxtape/jobs/run_folder.h"

namespace mlxtape::jobs {

namespace {

std::vector<Trainable> adapters_of(const models::Model& model) {
  std::vector<Trainable> trainables;
  for (const models::Parameter& p : models::lora_parameters(model)) {
    trainables.push_back({p.name, p.tensor});
  }
  return trainables;
}

void add_fingerprint(CommandEncoder& encoder, const models::Model& model,
                     const LoraJobOptions& options, FitOptions& fit) {
  auto& print = fit.fingerprint;
  const models::LoraOptions& lora = options.lora;
  print["base"] = base_fingerprint(encoder, model);
  print["lora rank"] = std::to_string(lora.rank);
  print["lora scale"] = std::to_string(lora.scale);
  print["lora dropout"] = std::to_string(lora.dropout);
  std::string modules;
  for (const std::string& name : models::lora_modules(model, lora)) {
    modules += (modules.empty() ? "" : " ") + name;
  }
  print["lora modules"] = modules;
  print["lora seed"] = std::to_string(options.seed);
}

}  // namespace

TrainOptions lora_training() {
  TrainOptions training;
  training.fit.optimiser = make_optimiser("adam");
  training.fit.clip = 0;
  return training;
}

TrainResult lora(CommandEncoder& encoder, models::Model& model, const DataSet& data,
                 const LoraJobOptions& options, const FitHooks& hooks) {
  require(models::lora_check(model, options.lora));
  models::Model adapted = model;  // the caller's stays as it was where the run cannot begin
  if (models::has_lora(model)) {
    require(models::adapters_check(model, options.lora));
  } else {
    models::add_lora(encoder, adapted, options.lora, options.seed);
  }
  TrainOptions how = options.train;
  add_fingerprint(encoder, adapted, options, how.fit);

  TrainedPart part;
  part.trainables = adapters_of(adapted);
  models::LoraDropout dropout{options.lora.dropout, {}};
  if (dropout.part > 0) {
    dropout.key = encoder.empty({2}, DType::kU32);
    part.stage = [&](std::int64_t batch) {
      encoder.copy(models::lora_dropout_key(encoder, options.seed, batch), dropout.key);
    };
  }
  part.watch = [&](Tape& tape) {
    return models::watch_lora(tape, adapted, dropout);
  };
  part.watched = [](const models::Model& watched) {
    std::vector<Tensor> tensors;
    for (const models::Parameter& p : models::lora_parameters(watched)) {
      tensors.push_back(p.tensor);
    }
    return tensors;
  };

  const RunFolder folder(how.fit.folder);
  part.with_state = [&](std::int64_t step) {
    if (step == 0) return;
    models::save_adapters(adapted, folder.path(), options.lora);
    const std::int64_t every = how.fit.save_every;
    if (options.keep_saves && every > 0 && step % every == 0) {
      models::save_adapter_weights(adapted, folder.adapters(step));
    }
  };
  const TrainResult result = train_part(encoder, adapted, part, data, how, hooks);
  // A run that was stopped has its last ones there, which it goes on from; the best may be those of step 0.
  if (folder.is_used() && !result.fit.stopped) {
    models::save_adapters(adapted, folder.path(), options.lora);
  }
  model = std::move(adapted);
  return result;
}

}  // namespace mlxtape::jobs
