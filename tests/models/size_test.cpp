#include "mlxtape/models/size.h"

#include <filesystem>

#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/quantize.h"
#include "small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

// Counted by hand from small_config's sizes.
TEST(ModelSize, Counts) {
  models::Config c = models::Config::parse(small_config("qwen3_next"), "c");
  const std::int64_t all = models::parameter_count(c);
  const std::int64_t active = models::active_parameter_count(c);
  std::int64_t layers = 0;
  for (const models::LayerPlan& layer : c.plan.layers) layers += layer.moe() != nullptr ? 1 : 0;
  ASSERT_GT(layers, 0);
  const models::MoePlan& moe = *c.plan.moe();
  EXPECT_EQ(all - active, layers * (moe.experts - moe.chosen) * 3 * c.plan.width * moe.width);
  c = models::Config::parse(small_config("qwen3"), "c");
  EXPECT_EQ(models::active_parameter_count(c), models::parameter_count(c));
  const models::ModelPlan& plan = c.plan;
  const models::AttentionPlan& a = *plan.layer(0).attention();
  const std::int64_t queries = a.heads * a.head_dim, keys = a.key_heads * a.head_dim;
  std::int64_t of_layer = 2 * plan.width + 2 * a.head_dim + 2 * plan.width * (queries + keys) +
                          3 * plan.width * plan.layer(0).swiglu()->width;
  of_layer += (a.bias.q ? queries : 0) + (a.bias.k ? keys : 0) + (a.bias.v ? keys : 0) +
              (a.bias.o ? plan.width : 0);
  EXPECT_EQ(models::parameter_count(c), (plan.tied ? 1 : 2) * plan.vocabulary * plan.width +
                                            plan.width + plan.layer_count() * of_layer);
}

class ModelSizes : public OnDevice {};

TEST_P(ModelSizes, Bytes) {
  models::Model model = small_model(encoder(), "qwen3");
  const auto numbers = static_cast<std::size_t>(models::parameter_count(model.config));
  EXPECT_EQ(models::weight_bytes(model), 4 * numbers);
  EXPECT_EQ(models::bits_per_weight(model), 32);
  models::TrainingBytes training = models::training_bytes(model);
  EXPECT_EQ(training.all(), 16 * numbers);  // weights, gradients, two moments
  model = models::cast_model(encoder(), model, DType::kBF16);
  training = models::training_bytes(model);
  EXPECT_EQ(training.all(), 16 * numbers);  // two and two bytes, a master, two moments

  // 4 bits and of each group of 32 a scale and a bias in 16.
  const models::Model quantized =
      models::quantize_model(encoder(), model, models::usual_format({4, 32}));
  const auto& w = quantized.weights.embedding.quantized;
  EXPECT_EQ(8 * (w.codes.bytes() + w.scales.bytes() + w.biases.bytes()),
            5 * static_cast<std::size_t>(*element_count(quantized.weights.embedding.shape())));
  EXPECT_GT(models::bits_per_weight(quantized), 5);  // norms are not quantised
  EXPECT_LT(models::bits_per_weight(quantized), 6);
  std::size_t codes = 0;
  for (const auto& p : models::parameters(quantized)) {
    if (p.tensor.dtype() == DType::kU32) codes += p.tensor.bytes();
  }
  EXPECT_EQ(models::training_bytes(quantized).gradients, models::weight_bytes(quantized) - codes);
  EXPECT_EQ(models::training_bytes(quantized).optimiser,
            6 * (models::weight_bytes(quantized) - codes));
}

MT_ON_EVERY_BACKEND(ModelSizes);

// Without a number, a model has every name, type and shape of one that was loaded.
TEST(ModelShapes, AsLoaded) {
  const auto encoder = Device::cpu().make_encoder();
  for (const auto& entry : std::filesystem::directory_iterator(MLXTAPE_GOLDEN_MODELS)) {
    SCOPED_TRACE(entry.path().string());
    const models::Model model = models::load_model(entry.path().string(), *encoder);
    const models::Model bare = models::load_shapes(entry.path().string());
    const auto want = models::parameters(model), got = models::parameters(bare);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].name, want[i].name);
      EXPECT_EQ(got[i].tensor.shape(), want[i].tensor.shape()) << want[i].name;
      EXPECT_EQ(got[i].tensor.dtype(), want[i].tensor.dtype()) << want[i].name;
      EXPECT_FALSE(got[i].tensor.has_memory());
    }
    EXPECT_EQ(models::bits_per_weight(bare), models::bits_per_weight(model));
  }
  expect_error(Errc::kIo, "nowhere", [] { models::load_shapes("/nowhere"); });
}

}  // namespace
}  // namespace mlxtape::test
