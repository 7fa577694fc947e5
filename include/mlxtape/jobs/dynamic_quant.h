// dynamic_quant: which weights of a model deserve more bits: measured by gradients, chosen for a size. As mlx-lm's.
//
// Formula    w_low, w_high: w packed in few and in more bits, and unpacked. L: the mean divergence KL(model ‖ model with
//            every w_low), over a batch's tokens that have a target; g = 1/n·Σ over n batches of ∂L/∂w at w_low.
//            sensitivity(w) = Σ g∘(w_low − w_high) / (elements/10⁶): how much is lost a million elements, to first order,
//            by not giving w more bits.
//            The sum is linear in g: it is taken batch by batch, as the derivative by t of L at w_low + t·(w_low − w_high),
//            t = 0, so that no gradient of the size of w outlives the step that made it. In double it is the same number.
//            packing: high where sensitivity > threshold, else low; the lowest threshold whose size is within target.
//            bits per weight = 8·bytes of all tensors / parameters, scales and biases as bytes alone
// File       [["model.layers.0.mlp.up_proj", 0.0012], …], which mlx-lm writes and reads too
// Memory     the model and the w_low of all layers; with checkpoint of one layer at a time
// Routers    and gates of shared experts are in 8 bits throughout (usual_packing), or, with keep_routers off, like all others,
//            as mlx-lm has them.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/jobs/dataset.h"
#include "mlxtape/jobs/not_finite.h"
#include "mlxtape/models/quantize.h"

namespace mlxtape::jobs {

// By the modules' paths.
using Sensitivities = std::vector<std::pair<std::string, double>>;

struct DynamicQuantOptions {
  models::Packing low{4, 64}, high{5, 64};
  bool keep_routers = true;
  ops::QuantizeRule rounding = ops::QuantizeRule::kGpu;
};

struct SensitivityOptions {
  DynamicQuantOptions packing;
  bool checkpoint = false;                                            // layers are computed again
  std::int64_t chunk_rows = 0;                                        // of logits at a time
  std::function<void(std::int64_t done, std::int64_t all)> progress;  // batches
  std::function<bool()> stop;  // asked after each: true ends with a result of those before
};

// Samples after one another in rows of length tokens, all of which count; what is left over is not used. most: rows, 0 for all.
std::vector<Batch> calibration_rows(const std::vector<Sample>& samples, std::int64_t length = 512,
                                    std::int64_t batch_size = 4, std::int64_t most = 0);

// Of every weight whose rows both groups divide. The model must not be packed. NotFinite where one is not.
Sensitivities sensitivities(CommandEncoder& encoder, const models::Model& model,
                            const std::vector<Batch>& batches,
                            const SensitivityOptions& options = {});

void write_sensitivities(const std::string& path, const Sensitivities& values);
Sensitivities read_sensitivities(const std::string& path);

// Of the model once it is packed by the rule; what is packed already stays.
double bits_per_weight(const models::Model& model, const models::PackingRule& rule);

// Throws kArgument where the target is no number, or below what the model has with low alone.
void require_target(const models::Model& model, double target_bits,
                    const DynamicQuantOptions& options = {});

struct DynamicPacking {
  models::PackingRule rule;
  double threshold = 0, bits_per_weight = 0;
  std::vector<std::string> high;  // modules that get more, in the model's order
};

// Throws kArgument where a weight has no sensitivity or a path is no weight of the model, and as require_target.
DynamicPacking choose_packing(const models::Model& model, const Sensitivities& values,
                              double target_bits, const DynamicQuantOptions& options = {});

}  // namespace mlxtape::jobs
