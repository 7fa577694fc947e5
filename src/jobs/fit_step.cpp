#include "fit_step.h"

#include "mlxtape/ops/elementwise.h"

namespace mlxtape::jobs {

namespace {

Error wrong(Errc code, const std::string& what) { return {code, "fit: " + what}; }

}  // namespace

FitStep::FitStep(CommandEncoder& encoder, const Objective& objective, const FitOptions& options,
                 std::vector<OptimiserSlot>& slots)
    : encoder_(encoder),
      objective_(objective),
      options_(options),
      slots_(slots),
      graphs_(encoder, options.capture.value_or(encoder.device().traits().captures_steps)) {}

void FitStep::begin(std::int64_t steps_done) {
  rate_ = encoder_.zeros({1}, DType::kF32);
  t_ = encoder_.zeros({1}, DType::kI32);
  fault_ = encoder_.zeros({1}, DType::kF32);
  loss_sum_ = encoder_.empty({1}, DType::kF32);
  norm_ = encoder_.empty({1}, DType::kF32);
  const auto done = static_cast<std::int32_t>(steps_done);
  encoder_.upload(&done, sizeof done, t_);
}

void FitStep::release() {
  graphs_.clear();
  totals_.clear();
}

std::int64_t FitStep::queue(std::int64_t steps_done) {
  const auto rate = static_cast<float>(learning_rate_at(options_, steps_done + 1));
  encoder_.upload(&rate, sizeof rate, rate_);
  std::int64_t tokens = 0;
  std::vector<GradientSum> sums;
  for (std::int64_t batch = 0; batch < options_.accumulation; ++batch) {
    const Staged staged = objective_.stage(options_.accumulation * steps_done + batch);
    tokens += staged.tokens;
    if (options_.accumulation == 1) {
      graphs_.run(staged.shape, [this] {
        clear_loss();
        update(batch_gradients());
      });
      return tokens;
    }
    if (graphs_.captures() && !by_rows_) by_rows_ = has_row_gradients();
    if (graphs_.captures() && !*by_rows_) {
      queue_batch(batch == 0, staged.shape);
      continue;
    }
    if (batch == 0) clear_loss();
    add_batch(sums);
  }
  if (!sums.empty()) {
    update(sums);
  } else {
    graphs_.run("update", [this] { update(totals_); });
  }
  return tokens;
}

// Captured by the batch's own shape: the shapes of all batches of a step together seldom repeat. The sums stay in place.
void FitStep::queue_batch(bool is_first, const std::string& shape) {
  if (totals_.empty()) {
    for (const OptimiserSlot& slot : slots_) {
      totals_.push_back({encoder_.empty(slot.w.shape(), DType::kF32), {}});
    }
  }
  graphs_.run((is_first ? "first " : "next ") + shape, [this, is_first] {
    if (is_first) clear_loss();
    const std::vector<GradientSum> gradients = batch_gradients();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (is_first) {
        encoder_.copy(gradients[i].dense, totals_[i].dense);
      } else {
        encoder_.add_into(totals_[i].dense, gradients[i].dense);
      }
    }
  });
}

void FitStep::add_batch(std::vector<GradientSum>& sums) {
  const std::vector<GradientSum> gradients = batch_gradients();
  if (sums.empty()) {
    sums = gradients;
    return;
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    sums[i].add(encoder_, gradients[i], slots_[i].w.shape());
  }
}

void FitStep::clear_loss() { encoder_.copy(encoder_.zeros({1}, DType::kF32), loss_sum_); }

// The gradients of the batch staged last; adds its loss. Each batch has a tape of its own: its gradients and their sum are
// small beside what a tape of several batches would hold.
std::vector<GradientSum> FitStep::batch_gradients() {
  std::vector<GradientSum> gradients(slots_.size());
  Tape tape(encoder_);
  const Recorded recorded = objective_.record(tape);
  check_recorded(recorded);
  for (const Tensor& x : recorded.watched) tape.watch(x, DType::kF32);
  const Tensor& loss = recorded.loss;
  const double share = 1 / static_cast<double>(options_.accumulation);
  tape.backward(loss, encoder_.full(loss.shape(), loss.dtype(), share));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Tensor& x = recorded.watched[i];
    const bool by_rows = options_.lazy_rows && options_.optimiser->takes_rows(slots_[i].of);
    if (by_rows && tape.has_row_grad(x)) {
      gradients[i].rows = tape.row_grad(x);
    } else {
      gradients[i].dense = encoder_.contiguous(tape.grad(x));
    }
  }
  encoder_.add_into(loss_sum_, loss.detach().reshape({1}));
  return gradients;
}

// For the batch staged last. Launches nothing and takes no memory.
bool FitStep::has_row_gradients() {
  bool has_rows = false;
  Arena arena(encoder_.device().memory());
  encoder_.rehearse([&] {
    arena.rehearse([&] {
      for (const GradientSum& gradient : batch_gradients()) has_rows |= gradient.is_rows();
    });
  });
  return has_rows;
}

void FitStep::check_recorded(const Recorded& recorded) const {
  if (recorded.loss.size() != 1) {
    throw wrong(Errc::kShape,
                "the loss must be one number, got " + to_string(recorded.loss.shape()));
  }
  if (recorded.watched.size() != slots_.size()) {
    throw wrong(Errc::kArgument, "the objective must watch all " + std::to_string(slots_.size()) +
                                     " trained parameters, got " +
                                     std::to_string(recorded.watched.size()));
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Tensor& w = slots_[i].w;
    const Tensor& x = recorded.watched[i];
    if (x.data() != w.data() || !(x.shape() == w.shape()) || x.dtype() != w.dtype()) {
      throw wrong(Errc::kArgument,
                  "the objective must watch the trained parameters in their order, got another "
                  "tensor in place of \"" +
                      slots_[i].of.name + "\"");
    }
  }
}

// The optimiser's step, by the gradients of the whole step.
void FitStep::update(const std::vector<GradientSum>& sums) {
  std::vector<Tensor> gradients;
  gradients.reserve(sums.size());
  for (const GradientSum& sum : sums) gradients.push_back(sum.values());
  const ops::GradNorm norm = ops::grad_norm(
      encoder_, gradients, options_.clip > 0 ? static_cast<float>(options_.clip) : 1);
  encoder_.copy(norm.norm.reshape({1}), norm_);
  const Tensor scale = options_.clip > 0 ? norm.scale : encoder_.full({1}, DType::kF32, 1);
  const Tensor finite_scale = guarded(scale);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].grad = sums[i].values();
    slots_[i].ids = sums[i].rows.ids;
  }
  ops::advance(encoder_, t_);
  options_.optimiser->step(encoder_, slots_, {rate_, t_, finite_scale});
  for (OptimiserSlot& slot : slots_) slot.grad = slot.ids = {};
}

// The scale, or NaN, which makes no step: 0 times what is not finite is NaN, and stays so in what it is added to.
Tensor FitStep::guarded(const Tensor& scale) {
  encoder_.add_into(fault_, ops::multiply(encoder_, loss_sum_, 0.0));
  encoder_.add_into(fault_, ops::multiply(encoder_, norm_, 0.0));
  return ops::add(encoder_, scale.reshape({1}), fault_);
}

}  // namespace mlxtape::jobs
