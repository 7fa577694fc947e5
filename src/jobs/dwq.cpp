#include "mlxtape/jobs/dwq.h"

#include <cmath>
#include <memory>

#include "head.h"
#include "head_kl.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "staging.h"

namespace mlxtape::jobs {

namespace {

[[noreturn]] void wrong(const std::string& what) { throw Error(Errc::kArgument, "dwq: " + what); }

// Calls function(name, tensor) with each of the weights that learns.
// weights: to be changed or not.
template <class W, class Function>
void each_learning(W& weights, const models::Config& config, bool others,
                   const Function& function) {
  for (const auto& slot : models::slots(weights, config)) {
    if (!slot.is_weight) {
      if (others) function(slot.name, *slot.tensor);
    } else if (slot.weight->is_quantized() && slot.weight->quantized.format.bits < 8) {
      function(slot.name + ".scales", slot.weight->quantized.scales);
      function(slot.name + ".biases", slot.weight->quantized.biases);
    }
  }
}

// What a batch has on the device.
struct Given {
  Tensor tokens;         // [rows, length]
  Tensor weights;        // [rows·length]: 1 where a target counts, else 0
  BatchTargets targets;  // stored ones, where there is no teacher's model
};

class Distiller {
 public:
  Distiller(CommandEncoder& encoder, models::Model& student, const DwqTeacher& teacher,
            const Batches& train, const std::vector<Batch>& valid, const DwqOptions& options)
      : encoder_(encoder),
        student_(student),
        teacher_(teacher),
        staging_(encoder),
        train_(train),
        valid_(valid),
        others_(options.others) {
    hidden_.checkpoint = options.checkpoint;
    kl_.temperature = static_cast<float>(options.temperature);
    kl_.chunk_rows = chunk_of(encoder, student, options.chunk_rows);
    each_learning(student.weights, student.config, others_,
                  [&](const std::string& name, Tensor& t) {
                    t = own(t);
                    trainables_.push_back({name, t, false});
                  });
  }

  const std::vector<Trainable>& trainables() const { return trainables_; }

  Staged stage(std::int64_t number) {
    const Batch batch = train_.at(number);
    check_batch("dwq", student_, batch);
    const Shape shape{batch.rows, batch.length};
    given_.tokens = staging_.put("tokens", shape, DType::kI32, std::span(batch.tokens));
    const std::vector<float> counts = counts_of(batch);
    given_.weights = staging_.put("weights", {std::ssize(counts)}, DType::kF32, std::span(counts));
    if (teacher_.targets != nullptr) {
      const BatchTargets stored = teacher_.targets->load(encoder_, true, number, batch);
      const auto keep = [&](const char* name, const Tensor& t) {
        const Tensor to = staging_.tensor(name, t.shape(), t.dtype());
        encoder_.copy(t, to);
        return to;
      };
      given_.targets = {keep("values", stored.values), keep("indices", stored.indices)};
    }
    return {staging_.text_of(shape), batch.counted};
  }

  Recorded record(Tape& tape) {
    const auto watched = std::make_shared<models::Model>(student_);
    Recorded recorded;
    each_learning(watched->weights, watched->config, others_, [&](const std::string&, Tensor& t) {
      t = tape.watch(t, DType::kF32);
      recorded.watched.push_back(t);
    });
    recorded.loss = loss(tape, *watched, given_);
    recorded.kept = watched;  // a checkpoint reads it again in the backward pass
    return recorded;
  }

  double validate() {
    double sum = 0, tokens = 0;
    for (std::size_t i = 0; i < valid_.size(); ++i) {
      const Batch& batch = valid_[i];
      check_batch("dwq", student_, batch);
      Tape tape(encoder_);
      const Tensor mean = loss(tape, student_, given_for_validation(i, batch));
      float value = 0;
      encoder_.download(mean, &value, sizeof value);
      sum += static_cast<double>(value) * static_cast<double>(batch.counted);
      tokens += static_cast<double>(batch.counted);
    }
    if (tokens == 0) wrong("the validation set must have a token to score, got none");
    return sum / tokens;
  }

 private:
  Tensor own(const Tensor& t) {
    const Tensor copy = encoder_.empty(t.shape(), t.dtype());
    encoder_.copy(t, copy);
    return copy;
  }

  static std::vector<float> counts_of(const Batch& batch) {
    std::vector<float> counts;
    counts.reserve(batch.targets.size());
    for (const std::int32_t target : batch.targets) counts.push_back(target < 0 ? 0.0F : 1.0F);
    return counts;
  }

  Given given_for_validation(std::size_t number, const Batch& batch) {
    Given given{upload_tokens(encoder_, batch), {}, {}};
    const std::vector<float> counts = counts_of(batch);
    given.weights = encoder_.empty({std::ssize(counts)}, DType::kF32);
    encoder_.upload(counts.data(), given.weights.bytes(), given.weights);
    if (teacher_.targets != nullptr) {
      given.targets =
          teacher_.targets->load(encoder_, false, static_cast<std::int64_t>(number), batch);
    }
    return given;
  }

  HeadTeacher head_teacher(const Given& given) {
    if (teacher_.targets != nullptr) return {{}, given.targets.values, given.targets.indices};
    const Tensor h = hidden_rows(encoder_, *teacher_.model, given.tokens);
    return {[this, h](std::int64_t start, std::int64_t stop) {
              return head_logits(encoder_, *teacher_.model, h.slice(0, start, stop));
            },
            {},
            {}};
  }

  Tensor loss(Tape& tape, const models::Model& model, const Given& given) {
    const HeadTeacher teacher = head_teacher(given);
    const Tensor h = ops::reshape(tape, models::hidden(tape, model, given.tokens, hidden_),
                                  {given.tokens.size(), model.config.plan.width});
    return head_kl(tape, h, model.head(), teacher, given.weights, kl_);
  }

  CommandEncoder& encoder_;
  models::Model& student_;
  const DwqTeacher& teacher_;
  Staging staging_;
  Given given_;  // the batch staged last
  const Batches& train_;
  const std::vector<Batch>& valid_;
  models::HiddenOptions hidden_;
  HeadKlOptions kl_;
  bool others_;
  std::vector<Trainable> trainables_;
};

void check(const models::Model& student, const DwqTeacher& teacher, const Batches& train,
           const DwqOptions& options) {
  if ((teacher.model == nullptr) == (teacher.targets == nullptr)) {
    wrong("the teacher must be either a model or stored targets");
  }
  if (dwq_trainables(student).empty()) {
    wrong("the student must have weights quantised to fewer than 8 bits, got none");
  }
  if (teacher.model != nullptr &&
      teacher.model->config.plan.vocabulary != student.config.plan.vocabulary) {
    wrong("the teacher must have the student's vocabulary of " +
          std::to_string(student.config.plan.vocabulary) + ", got " +
          std::to_string(teacher.model->config.plan.vocabulary));
  }
  if (!(options.temperature > 0) || !std::isfinite(options.temperature)) {
    wrong("temperature must be above 0, got " + std::to_string(options.temperature));
  }
  if (options.fit.iterations < 0 || options.chunk_rows < 0) {
    wrong("iterations and chunk_rows must be at least 0, got " +
          std::to_string(options.fit.iterations) + " and " + std::to_string(options.chunk_rows));
  }
  const std::int64_t needed =
      options.fit.iterations > 0 ? options.fit.iterations : train.per_epoch();
  if (teacher.targets != nullptr && teacher.targets->train_batches() < needed) {
    wrong("there must be targets for all " + std::to_string(needed) + " batches, got " +
          std::to_string(teacher.targets->train_batches()));
  }
}

FitOptions fit_options(const models::Model& student, const DwqTeacher& teacher,
                       const Batches& train, const std::vector<Batch>& valid,
                       const DwqOptions& options) {
  FitOptions f = options.fit;
  if (f.iterations == 0) f.iterations = train.per_epoch();
  f.fingerprint["dwq data"] = train.fingerprint() + " " + jobs::fingerprint(valid);
  f.fingerprint["dwq temperature"] = formats::Json(options.temperature).dump();
  f.fingerprint["dwq rows of logits"] = std::to_string(options.chunk_rows);
  f.fingerprint["dwq student"] = student.config.json.dump(-1, true);
  f.fingerprint["dwq teacher"] = teacher.targets != nullptr
                                     ? teacher.targets->identity()
                                     : teacher.model->config.json.dump(-1, true);
  return f;
}

std::string line_of(const DwqResult& r) {
  return "the final validation loss, " + std::to_string(r.final) +
         ", is higher than the initial one, " + std::to_string(r.initial) +
         ": the student has the weights of step " + std::to_string(r.fit.held_step) + ", with " +
         std::to_string(r.kept);
}

}  // namespace

FitOptions dwq_fit() {
  FitOptions fit;
  fit.iterations = 0;
  fit.learning_rate = 1e-6;
  fit.optimiser = make_optimiser("adam", {{"bias_correction", 1}});
  fit.lazy_rows = false;
  fit.report_every = 20;
  return fit;
}

std::vector<Trainable> dwq_trainables(const models::Model& student, bool others) {
  std::vector<Trainable> result;
  each_learning(
      student.weights, student.config, others,
      [&](const std::string& name, const Tensor& t) { result.push_back({name, t, false}); });
  return result;
}

DwqResult dwq(CommandEncoder& encoder, models::Model& student, const DwqTeacher& teacher,
              const Batches& train, const std::vector<Batch>& valid, const DwqOptions& options,
              const FitHooks& hooks) {
  check(student, teacher, train, options);
  Distiller distiller(encoder, student, teacher, train, valid, options);
  FitTask task;
  task.trainables = distiller.trainables();
  task.objective.stage = [&](std::int64_t number) {
    return distiller.stage(number);
  };
  task.objective.record = [&](Tape& tape) {
    return distiller.record(tape);
  };
  task.validate = [&] {
    return distiller.validate();
  };
  task.end_with = EndWith::kBestIfWorse;
  DwqResult result;
  for (const Trainable& t : task.trainables) result.trained += t.tensor.size();
  result.fit = fit(encoder, task, fit_options(student, teacher, train, valid, options), hooks);
  if (result.fit.stopped || result.fit.validations.empty()) return result;
  result.initial = result.fit.validations.front().loss;
  result.final = result.kept = result.fit.validations.back().loss;
  result.worse = result.final > result.initial;
  if (!result.worse) return result;
  result.kept = result.fit.best_loss;
  result.warning = line_of(result);
  return result;
}

}  // namespace mlxtape::jobs
