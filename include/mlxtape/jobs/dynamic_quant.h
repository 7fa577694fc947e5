// dynamic_quant: gives more bits to the weights where they matter most, measured by gradients, for a given size. As in mlx-lm.
//
// Formula    w_low, w_high: w quantised to few and to more bits, then dequantised. L: the mean divergence KL(model ‖ model with
//            every w_low), over the tokens of a batch that have a target; g = 1/n·Σ over n batches of ∂L/∂w at w_low.
//            sensitivity(w) = Σ g∘(w_low − w_high) / (elements/10⁶): how much is lost per million elements, to first order,
//            by not giving w more bits.
//            The sum is linear in g: it is computed batch by batch, as the derivative by t of L at w_low + t·(w_low − w_high),
//            t = 0, so that no gradient of the size of w outlives its step. It is summed in double.
//            bits: high if sensitivity > threshold, else low; the lowest threshold whose size is within the target.
//            bits per weight = 8·bytes of all tensors / parameters; scales and biases count as bytes only
// File       [["model.layers.0.mlp.up_proj", 0.0012], …], the format that mlx-lm writes and reads
// Memory     the model and the w_low of all layers; with checkpoint those of one layer at a time
// Routers    and shared-expert gates always have 8 bits (usual_format), or, with keep_routers off, are treated like all other
//            weights, as in mlx-lm.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/jobs/dataset.h"
#include "mlxtape/jobs/not_finite.h"
#include "mlxtape/models/quantize.h"

namespace mlxtape::jobs {

// By module path.
using Sensitivities = std::vector<std::pair<std::string, double>>;

struct DynamicQuantOptions {
  models::WeightFormat low{4, 64}, high{5, 64};
  bool keep_routers = true;
  ops::QuantizeRule rounding = ops::QuantizeRule::kGpu;
};

struct SensitivityOptions {
  DynamicQuantOptions formats;
  bool checkpoint = false;      // activation checkpointing: recompute layers
  std::int64_t chunk_rows = 0;  // of logits at a time; 0: chosen for speed
  std::function<void(std::int64_t done, std::int64_t all)> progress;  // batches
  std::function<bool()> stop;  // called after each: true stops with a result of those so far
};

// All samples joined and cut into rows of length tokens, all of which count; a remainder is dropped. most: rows; 0: all.
std::vector<Batch> calibration_rows(const std::vector<Sample>& samples, std::int64_t length = 512,
                                    std::int64_t batch_size = 4, std::int64_t most = 0);

// For every weight whose rows are a multiple of both group sizes. The model must not be quantised. NotFinite if one is not.
Sensitivities sensitivities(CommandEncoder& encoder, const models::Model& model,
                            const std::vector<Batch>& batches,
                            const SensitivityOptions& options = {});

void write_sensitivities(const std::string& path, const Sensitivities& values);
Sensitivities read_sensitivities(const std::string& path);

// Of the model once it is quantised by the rule; weights that are quantised already stay as they are.
double bits_per_weight(const models::Model& model, const models::FormatRule& rule);

// Throws kArgument if the target is not finite, or below the size of the model with low alone.
void require_target(const models::Model& model, double target_bits,
                    const DynamicQuantOptions& options = {});

struct DynamicFormats {
  models::FormatRule rule;
  double threshold = 0, bits_per_weight = 0;
  std::vector<std::string> high;  // modules that get the high bits, in the model's order
};

// Throws kArgument if a weight has no sensitivity or a path is not a weight of the model, and as require_target.
DynamicFormats choose_formats(const models::Model& model, const Sensitivities& values,
                              double target_bits, const DynamicQuantOptions& options = {});

}  // namespace mlxtape::jobs
