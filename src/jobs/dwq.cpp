#include "mlxtape/jobs/dwq.h"

#include <cmath>

#include "head.h"
#include "head_kl.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"

namespace mlxtape::jobs {

namespace {

[[noreturn]] void wrong(const std::string& what) { throw Error(Errc::kArgument, "dwq: " + what); }

// Calls function(name, tensor) with each of the weights that learns.
template <class Function>
void each_learning(models::Weights& weights, const models::Config& config, bool others,
                   const Function& function) {
  for (const models::Slot& slot : models::slots(weights, config)) {
    if (!slot.is_weight) {
      if (others) function(slot.name, *slot.tensor);
    } else if (slot.weight->is_packed() && slot.weight->packed.bits < 8) {
      function(slot.name + ".scales", slot.weight->packed.scales);
      function(slot.name + ".biases", slot.weight->packed.biases);
    }
  }
}

// Of a teacher's model or stored targets, for one batch.
class Teacher {
 public:
  Teacher(CommandEncoder& encoder, const DwqTeacher& given) : encoder_(encoder), given_(given) {}

  // Good until the next one is asked for.
  HeadTeacher of(bool train, std::int64_t number, const Batch& batch, const Tensor& tokens) {
    HeadTeacher result;
    if (given_.targets != nullptr) {
      BatchTargets stored = given_.targets->load(encoder_, train, number, batch);
      result.values = std::move(stored.values);
      result.indices = std::move(stored.indices);
      return result;
    }
    result.logits = [this, h = hidden_rows(encoder_, *given_.model, tokens)](std::int64_t start,
                                                                             std::int64_t stop) {
      return head_logits(encoder_, *given_.model, h.slice(0, start, stop));
    };
    return result;
  }

 private:
  CommandEncoder& encoder_;
  const DwqTeacher& given_;
};

class Distiller {
 public:
  Distiller(CommandEncoder& encoder, models::Model& student, const DwqTeacher& teacher,
            const Batches& train, const std::vector<Batch>& valid, const DwqOptions& options)
      : encoder_(encoder),
        student_(student),
        teacher_(encoder, teacher),
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

  Recorded loss(Tape& tape, std::int64_t number) {
    Recorded recorded;
    watched_ = student_;  // a checkpoint reads it again on the way back
    each_learning(watched_.weights, watched_.config, others_, [&](const std::string&, Tensor& t) {
      t = tape.watch(t, DType::kF32);
      recorded.watched.push_back(t);
    });
    const Batch batch = train_.at(number);
    check_batch("dwq", student_, batch);
    recorded.tokens = batch.counted;
    recorded.loss = batch_loss(tape, watched_, true, number, batch);
    return recorded;
  }

  double validate() {
    double sum = 0, tokens = 0;
    for (std::size_t i = 0; i < valid_.size(); ++i) {
      const Batch& batch = valid_[i];
      check_batch("dwq", student_, batch);
      Tape tape(encoder_);
      const Tensor mean = batch_loss(tape, student_, false, static_cast<std::int64_t>(i), batch);
      float value = 0;
      encoder_.download(mean, &value, sizeof value);
      sum += static_cast<double>(value) * static_cast<double>(batch.counted);
      tokens += static_cast<double>(batch.counted);
    }
    if (tokens == 0) wrong("the validation must have a target that counts, got none");
    return sum / tokens;
  }

 private:
  Tensor own(const Tensor& t) {
    const Tensor copy = encoder_.empty(t.shape(), t.dtype());
    encoder_.copy(t, copy);
    return copy;
  }

  Tensor batch_loss(Tape& tape, const models::Model& model, bool train, std::int64_t number,
                    const Batch& batch) {
    const Tensor tokens = upload_tokens(encoder_, batch);
    const HeadTeacher teacher = teacher_.of(train, number, batch, tokens);
    std::vector<float> counts;
    counts.reserve(batch.targets.size());
    for (const std::int32_t target : batch.targets) counts.push_back(target < 0 ? 0.0F : 1.0F);
    const Tensor weights = encoder_.empty({tokens.size()}, DType::kF32);
    encoder_.upload(counts.data(), weights.bytes(), weights);
    const Tensor h = ops::reshape(tape, models::hidden(tape, model, tokens, hidden_),
                                  {tokens.size(), model.config.plan.width});
    return head_kl(tape, h, model.head(), teacher, weights, kl_);
  }

  CommandEncoder& encoder_;
  models::Model& student_;
  models::Model watched_;
  Teacher teacher_;
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
    wrong("there must be either a teacher's model or its targets");
  }
  if (dwq_trainables(student).empty()) {
    wrong("the student must have weights packed in less than 8 bits, got none");
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
  return "the loss over the validation set ended at " + std::to_string(r.final) +
         ", above where it began, at " + std::to_string(r.initial) +
         ": the student has the values of step " + std::to_string(r.fit.held_step) + ", with " +
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
  models::Weights weights = student.weights;
  each_learning(weights, student.config, others, [&](const std::string& name, const Tensor& t) {
    result.push_back({name, t, false});
  });
  return result;
}

DwqResult dwq(CommandEncoder& encoder, models::Model& student, const DwqTeacher& teacher,
              const Batches& train, const std::vector<Batch>& valid, const DwqOptions& options,
              const FitHooks& hooks) {
  check(student, teacher, train, options);
  Distiller distiller(encoder, student, teacher, train, valid, options);
  FitTask task;
  task.trainables = distiller.trainables();
  task.objective = [&](Tape& tape, std::int64_t number) {
    return distiller.loss(tape, number);
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
