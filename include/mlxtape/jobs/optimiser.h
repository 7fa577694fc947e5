// optimiser: what changes weights by their gradients, as the training loop, its states on the disk and the program's flags see it.
//
//   FitOptions options;
//   options.optimiser = make_optimiser("lion", {{"weight_decay", 0.1}});
//   options.optimiser = std::make_shared<Sgd>(ops::SgdOptions{.momentum = 0.9F});   // the same by its type
//
// Formulas   mlxtape/ops/optimiser.h, with the options and defaults of mlx.optimizers. Adam is AdamW without decay.
// Muon       is for matrices of products: a Trainable that is_matrix and has two axes or more, of which a stack's are stepped
//            one by one. Whatever else there is, embeddings, heads, norms, filters, scales, is stepped by AdamW with bias correction
//            and the same weight_decay, at adamw_share of the learning rate: 0.015 is the usual 3e-4 beside 0.02.
// States     f32, of the parameter's shape, zeros at first. In a file "<state>:<parameter>": "adamw.m:model.norm.weight".
// Your own   derive from Optimiser: settings, states and step. What step is given is checked already.
//
// Threads    An Optimiser never changes: any.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "mlxtape/ops/optimiser.h"

namespace mlxtape::jobs {

struct Trainable {
  std::string name;
  Tensor
      tensor;  // contiguous, f32 or 16 bits (a master copy in f32 is kept then); written in place
  bool is_matrix = true;  // with two axes or more; not: embeddings, heads, filters, scales of codes
};

// A parameter, what is kept of it between steps, and its gradient of this step.
struct OptimiserSlot {
  Trainable of;
  Tensor w, master;            // master: f32, where w has 16 bits
  std::vector<Tensor> states;  // as Optimiser::states names them
  Tensor grad = {};
  Tensor ids = {};  // where grad has rows alone (mlxtape/tape/rows.h)

  const Tensor& value() const { return master.defined() ? master : w; }
};

using Settings = std::map<std::string, std::string>;

class Optimiser {
 public:
  virtual ~Optimiser() = default;

  virtual std::string name() const = 0;
  // What must be the same for a run to go on from a state; its name too, where they do not say it as "optimizer".
  virtual Settings settings() const = 0;
  virtual Check check() const { return std::nullopt; }  // of the options
  virtual std::vector<std::string> states(const Trainable& of) const = 0;
  virtual bool takes_rows(const Trainable& /*of*/) const { return true; }  // off: grad is dense
  // numbers.t has counted this step already.
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
  std::string name() const override { return "adam"; }  // in settings adamw, which it is
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
  ops::AdamWOptions adamw{.bias_correction = true};  // its weight_decay is that of options

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
  std::string name;        // as in mlx.optimizers; of its betas "beta1" and "beta2"
  double value = 0;        // the default
  bool is_switch = false;  // 1: on, 0: off
};
using OptimiserNumbers = std::map<std::string, double>;
// usual: defaults in place of its own, where it has such settings. kArgument for a name that is none.
std::vector<OptimiserSetting> optimiser_settings(const std::string& name,
                                                 const OptimiserNumbers& usual = {});
// kArgument for a setting that it does not have, or a value that it does not take.
OptimiserPtr make_optimiser(const std::string& name, const OptimiserNumbers& given = {},
                            const OptimiserNumbers& usual = {});

// What it steps, with masters and states as they are before the first step.
std::vector<OptimiserSlot> make_slots(CommandEncoder& encoder, const Optimiser& optimiser,
                                      const std::vector<Trainable>& trainables);

}  // namespace mlxtape::jobs
