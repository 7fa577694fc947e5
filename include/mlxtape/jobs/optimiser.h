// optimiser: updates weights by their gradients, as seen by the training loop, its checkpoints and the program's flags.
//
//   FitOptions options;
//   options.optimiser = make_optimiser("lion", {{"weight_decay", 0.1}});
//   options.optimiser = std::make_shared<Sgd>(ops::SgdOptions{.momentum = 0.9F});   // the same by its type
//
// Formulas   mlxtape/ops/optimiser.h, with the options and defaults of mlx.optimizers. Adam is AdamW without decay.
// Muon       is for the weights of matrix products: a Trainable that is_matrix and has two axes or more; each matrix of a stack
//            is updated by itself. Everything else (embeddings, heads, norms, filters, scales) is updated by AdamW with bias
//            correction and the same weight_decay, at adamw_share times the learning rate: 0.015 gives the usual 3e-4 for 0.02.
// States     f32, of the parameter's shape, zeros at first. In a file "<state>:<parameter>": "adamw.m:model.norm.weight".
// Your own   derive from Optimiser: settings, states and step. The arguments of step have already been checked.
//
// Threads    any: an Optimiser never changes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "mlxtape/ops/optimiser.h"

namespace mlxtape::jobs {

struct Trainable {
  std::string name;
  Tensor tensor;  // contiguous, f32, or 16 bits with a master copy in f32; updated in place
  bool is_matrix =
      true;  // if it has two axes or more; false for embeddings, heads, filters, quantisation scales
};

// A parameter, its optimiser states, and its gradient in this step.
struct OptimiserSlot {
  Trainable of;
  Tensor w, master;            // master: f32, where w has 16 bits
  std::vector<Tensor> states;  // as Optimiser::states names them
  Tensor grad = {};
  Tensor ids = {};  // if grad is row-sparse (mlxtape/tape/rows.h)

  const Tensor& value() const { return master.defined() ? master : w; }
};

using Settings = std::map<std::string, std::string>;

class Optimiser {
 public:
  virtual ~Optimiser() = default;

  virtual std::string name() const = 0;
  // What must be the same for a checkpoint to be resumed; also the name, unless they have it as "optimizer".
  virtual Settings settings() const = 0;
  virtual Check check() const { return std::nullopt; }  // of the options
  virtual std::vector<std::string> states(const Trainable& of) const = 0;
  virtual bool takes_rows(const Trainable& /*of*/) const { return true; }  // off: grad is dense
  // numbers.t already counts this step.
  virtual void step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
                    const ops::StepNumbers& numbers) const = 0;
};
using OptimiserPtr = std::shared_ptr<const Optimiser>;

struct AdamW : Optimiser {
  ops::AdamWOptions options;

  explicit AdamW(const ops::AdamWOptions& o = {}) : options(o) {}
  std::string name() const override { return "adamw"; }
  Settings settings() const override;
  Check check() const override;
  std::vector<std::string> states(const Trainable& of) const override;
  void step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
            const ops::StepNumbers& numbers) const override;
};

struct Adam final : AdamW {
  explicit Adam(const ops::AdamWOptions& o = {}) : AdamW(o) { options.weight_decay = 0; }
  std::string name() const override {
    return "adam";
  }  // "adamw" in settings, which is the same update
};

struct Sgd final : Optimiser {
  ops::SgdOptions options;

  explicit Sgd(const ops::SgdOptions& o = {}) : options(o) {}
  std::string name() const override { return "sgd"; }
  Settings settings() const override;
  Check check() const override;
  std::vector<std::string> states(const Trainable& of) const override;
  void step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
            const ops::StepNumbers& numbers) const override;
};

struct Lion final : Optimiser {
  ops::LionOptions options;

  explicit Lion(const ops::LionOptions& o = {}) : options(o) {}
  std::string name() const override { return "lion"; }
  Settings settings() const override;
  Check check() const override;
  std::vector<std::string> states(const Trainable& of) const override;
  void step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
            const ops::StepNumbers& numbers) const override;
};

struct Muon final : Optimiser {
  ops::MuonOptions options;
  double adamw_share = 0.015;
  ops::AdamWOptions adamw{.bias_correction = true};  // weight_decay is taken from options

  explicit Muon(const ops::MuonOptions& o = {}) : options(o) {}
  std::string name() const override { return "muon"; }
  Settings settings() const override;
  Check check() const override;
  std::vector<std::string> states(const Trainable& of) const override;
  bool takes_rows(const Trainable& of) const override;
  void step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
            const ops::StepNumbers& numbers) const override;
};

// ---- by name ----

std::vector<std::string> optimiser_names();  // "adamw", "adam", "sgd", "muon", "lion"

struct OptimiserSetting {
  std::string name;        // as in mlx.optimizers; betas are "beta1" and "beta2"
  double value = 0;        // the default
  bool is_switch = false;  // 1: on, 0: off
};
using OptimiserNumbers = std::map<std::string, double>;
// usual: defaults that replace its own, if it has such settings. kArgument for an unknown name.
std::vector<OptimiserSetting> optimiser_settings(const std::string& name,
                                                 const OptimiserNumbers& usual = {});
// kArgument for a setting that it does not have, or a value that is not allowed.
OptimiserPtr make_optimiser(const std::string& name, const OptimiserNumbers& given = {},
                            const OptimiserNumbers& usual = {});

// The parameters with masters and states as they are before the first step.
std::vector<OptimiserSlot> make_slots(CommandEncoder& encoder, const Optimiser& optimiser,
                                      const std::vector<Trainable>& trainables);

}  // namespace mlxtape::jobs
