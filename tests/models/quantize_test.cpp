#include "mlxtape/models/quantize.h"

#include "mlxtape/base/files.h"
#include "mlxtape/models/size.h"
#include "small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using formats::Json;
using models::WeightFormat;

// A weight as a model has it, with the role that its name stands for.
models::Part part(const std::string& path, const Shape& shape) {
  using models::Role;
  models::Part part;
  part.name = path;
  part.shape = shape;
  part.is_weight = true;
  const std::size_t layers = path.find("layers.");
  if (layers != std::string::npos) part.layer = std::stoll(path.substr(layers + 7));
  const std::pair<const char*, Role> roles[] = {{"v_proj", Role::kValue},
                                                {"down_proj", Role::kDown},
                                                {"shared_expert_gate", Role::kSharedGate},
                                                {"mlp.gate", Role::kRouter},
                                                {"lm_head", Role::kHead},
                                                {"embed_tokens", Role::kEmbedding}};
  for (const auto& [end, role] : roles) {
    if (path.ends_with(end)) part.role = role;
  }
  return part;
}

// The choices of mlx-lm itself (make_recipes_golden.py).
TEST(ModelFormat, RecipesAsMlxLm) {
  const Json golden =
      Json::parse(read_whole(MLXTAPE_GOLDEN_RECIPES, "test"), MLXTAPE_GOLDEN_RECIPES);
  const Shape shape{8, 64};
  models::ModelPlan plan;
  for (const auto& [count, matters] : golden.find("layers that matter")->object()) {
    plan.layers.resize(std::stoull(count));
    const auto rule = models::mixed_format("mixed_3_6", 64, plan);
    for (std::int64_t l = 0; l < plan.layer_count(); ++l) {
      const int want = matters.string()[static_cast<std::size_t>(l)] == '1' ? 6 : 3;
      for (const char* prefix : {"model.layers.", "language_model.model.layers."}) {
        EXPECT_EQ(rule(part(prefix + std::to_string(l) + ".mlp.down_proj", shape)).bits, want)
            << l << " of " << count;
      }
    }
  }
  plan.layers.resize(8);
  std::vector<std::string> names;
  for (const auto& [name, paths] : golden.find("bits of 8 layers")->object()) {
    names.push_back(name);
    const auto rule = models::mixed_format(name, 32, plan);
    for (const auto& [path, bits] : paths.object()) {
      EXPECT_EQ(rule(part(path, shape)).bits, bits.integer()) << name << " " << path;
      EXPECT_EQ(rule(part(path, shape)).group_size, 32);
    }
    EXPECT_EQ(rule(part("model.layers.0.mlp.gate", shape)).bits, 8);  // not as mlx-lm
    EXPECT_EQ(rule(part("model.layers.0.mlp.shared_expert_gate", shape)).bits, 8);
    EXPECT_EQ(rule(part("model.layers.0.self_attn.k_proj", {8, 48})).bits, 0);
  }
  EXPECT_EQ(names, models::mixed_recipes());
}

TEST(ModelFormat, Patterns) {
  EXPECT_TRUE(models::path_fits("a.b.c", "a.b.c"));
  EXPECT_TRUE(models::path_fits("a.b.c", "*.c"));
  EXPECT_TRUE(models::path_fits("a.b.c", "a*c*"));
  EXPECT_TRUE(models::path_fits("a.bb.b", "a.*b"));
  EXPECT_TRUE(models::path_fits("layers.11.x", "layers.1?.*"));
  EXPECT_TRUE(models::path_fits("", "*"));
  EXPECT_FALSE(models::path_fits("a.b.c", "a.b"));
  EXPECT_FALSE(models::path_fits("a.b", "a.b.c"));
  EXPECT_FALSE(models::path_fits("layers.1.x", "layers.1?.*"));
  EXPECT_FALSE(models::path_fits("a", ""));

  const auto rule = models::format_with(
      models::usual_format({4, 64}), {{"*_proj", {3, 32}}, {"*.v_proj", {}}, {"*gate", {2, 64}}});
  const Shape shape{8, 64};
  EXPECT_EQ(rule(part("lm_head", shape)).bits, 4);
  EXPECT_EQ(rule(part("x.k_proj", shape)).bits, 3);
  EXPECT_EQ(rule(part("x.k_proj", shape)).group_size, 32);
  EXPECT_EQ(rule(part("x.v_proj", shape)).bits, 0);    // the last that fits
  EXPECT_EQ(rule(part("x.mlp.gate", shape)).bits, 2);  // who asks gets it, routers too
  EXPECT_EQ(rule(part("lm_head", {8, 96})).bits, 0);
}

TEST(ModelFormat, SaysWhatIsWrong) {
  expect_error(Errc::kArgument, "got 4 in groups of 0", [] { models::usual_format({4}); });
  expect_error(Errc::kArgument, "got 7 in groups of 64", [] { models::usual_format({7, 64}); });
  expect_error(Errc::kArgument, "got 1 in groups of 64", [] { models::usual_format({1, 64}); });
  expect_error(Errc::kArgument, "a recipe must be mixed_2_6",
               [] { models::mixed_format("mixed_1_2", 64, {}); });
  expect_error(Errc::kArgument, "got 3 in groups of 16",
               [] { models::mixed_format("mixed_3_6", 16, {}); });
  expect_error(Errc::kArgument, "got 9 in groups of 64",
               [] { models::format_with(models::usual_format({4, 64}), {{"*", {9, 64}}}); });
  const auto rule = models::format_with(models::usual_format({4, 64}), {{"*.x", {4, 64}}});
  expect_error(Errc::kArgument, "a.x has rows of 96 values, no multiple of the group size 64",
               [&] { rule(part("a.x", {8, 96})); });
}

class ModelQuantize : public OnDevice {
 protected:
  // Every number of a model, by name.
  std::map<std::string, std::vector<unsigned char>> bits(const models::Model& model) {
    std::map<std::string, std::vector<unsigned char>> all;
    for (const auto& p : models::parameters(model)) {
      all[p.name + " " + name_of(p.tensor.dtype())] = bits_of(encoder(), p.tensor);
    }
    return all;
  }
};

TEST_P(ModelQuantize, Dequantized) {
  const models::Model model = small_model(encoder(), "qwen3_next");
  const models::Model quantized =
      models::quantize_model(encoder(), model, models::usual_format({4, 32}));
  const models::Model again = models::dequantize_model(encoder(), quantized);
  EXPECT_EQ(again.config.quantization.usual.bits, 0);
  EXPECT_TRUE(again.config.quantization.of.empty());
  EXPECT_EQ(again.config.json, model.config.json);
  EXPECT_EQ(models::bits_per_weight(again), 32);
  const nn::Weight& before = quantized.weights.layers[0].moe.router;
  EXPECT_EQ(bits_of(encoder(), again.weights.layers[0].moe.router.plain),
            bits_of(encoder(), ops::dequantize(encoder(), before.quantized)));
  EXPECT_EQ(bits_of(encoder(), again.weights.norm), bits_of(encoder(), model.weights.norm));
}

TEST_P(ModelQuantize, Cast) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    models::Model model = small_model(encoder(), type);
    model.config.json.set("torch_dtype", "float32");
    const models::Model half = models::cast_model(encoder(), model, DType::kBF16);
    EXPECT_EQ(half.dtype(), DType::kBF16);
    EXPECT_EQ(half.config.json.find("torch_dtype")->string(), "bfloat16");
    std::size_t wide = 0;
    for (const auto& p : models::parameters(half)) {
      if (p.tensor.dtype() == DType::kBF16) continue;
      ++wide;
      EXPECT_TRUE(p.name.ends_with("A_log")) << p.name;
    }
    EXPECT_EQ(wide > 0, type.starts_with("qwen3_5"));
    // Up again changes nothing but the type; what is of the type already is not touched.
    const models::Model up = models::cast_model(encoder(), half, DType::kF32);
    EXPECT_EQ(bits(models::cast_model(encoder(), up, DType::kBF16)), bits(half));
    EXPECT_EQ(bits(models::cast_model(encoder(), model, DType::kF32)), bits(model));

    const models::Model quantized =
        models::quantize_model(encoder(), model, models::usual_format({4, 32}));
    const models::Model cast = models::cast_model(encoder(), quantized, DType::kF16);
    EXPECT_EQ(cast.weights.embedding.quantized.scales.dtype(), DType::kF16);
    EXPECT_EQ(cast.weights.embedding.quantized.biases.dtype(), DType::kF16);
    EXPECT_EQ(bits_of(encoder(), cast.weights.embedding.quantized.codes),
              bits_of(encoder(), quantized.weights.embedding.quantized.codes));
  }
  const models::Model model = small_model(encoder(), "qwen3");
  expect_error(Errc::kDType, "must be f32, f16 or bf16, got f64",
               [&] { models::cast_model(encoder(), model, DType::kF64); });
}

MT_ON_EVERY_BACKEND(ModelQuantize);

}  // namespace
}  // namespace mlxtape::test
