#include "mlxtape/models/config.h"

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using formats::Json;
using models::Config;

Json flat(const char* type) {
  return Json::parse(
      std::string(R"({"model_type": ")") + type + R"(", "hidden_size": 64, "num_hidden_layers": 8,
      "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
      "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "partial_rotary_factor": 0.25,
      "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
      "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
      "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": true,
      "tie_word_embeddings": true, "attention_bias": true, "something_else": [1, 2]})",
      "config.json");
}

TEST(ModelConfig, Qwen3Next) {
  const Config c = Config::parse(flat("qwen3_next"), "config.json");
  EXPECT_EQ(c.prefix, "");
  EXPECT_EQ(c.plan.width, 64);
  EXPECT_EQ(c.plan.vocabulary, 128);
  EXPECT_EQ(c.plan.eps, 1e-5F);
  EXPECT_EQ(c.plan.ropes[0].dims, 4);
  EXPECT_EQ(c.plan.ropes[0].base, 5000);
  EXPECT_EQ(c.plan.layer(0).delta()->value_dim, 12);
  EXPECT_EQ(c.plan.layer(0).delta()->rows, models::DeltaPlan::Rows::kByHead);
  const models::AttentionPlan& mixer = *c.plan.layer(3).attention();
  EXPECT_TRUE(c.plan.tied && mixer.bias.o && mixer.gated && mixer.qk_norm);
  EXPECT_TRUE(c.plan.moe()->renormalise);
  const bool attention[] = {false, false, false, true, false, false, false, true};
  const bool experts[] = {false, true, false, false, false, true, false, true};
  for (std::int64_t l = 0; l < 8; ++l) {
    EXPECT_EQ(c.plan.layer(l).attention() != nullptr, attention[l]) << l;
    EXPECT_EQ(c.plan.layer(l).moe() != nullptr, experts[l]) << l;
  }
}

TEST(ModelConfig, Qwen35FlatAndNested) {
  Json text = flat("qwen3_5_moe_text");
  text.set("rope_parameters",
           Json::parse(R"({"rope_type": "default", "rope_theta": 7000, "mrope_section": [1, 1, 2],
      "partial_rotary_factor": 0.5})",
                       "rope"));
  const Config flat_one = Config::parse(text, "config.json");
  Json nested = Json::Object{};
  nested.set("model_type", "qwen3_5_moe");
  nested.set("text_config", text);
  nested.set("vision_config", Json::Object{});
  const Config inner = Config::parse(nested, "config.json");
  for (const Config& c : {flat_one, inner}) {
    EXPECT_EQ(c.prefix, "language_model.");
    EXPECT_EQ(c.plan.ropes[0].base, 7000);
    EXPECT_EQ(c.plan.ropes[0].dims, 8);
    EXPECT_EQ(c.plan.moe()->experts, 8);
    // In every layer, whatever the others say.
    EXPECT_TRUE(c.plan.layer(0).moe() != nullptr && c.plan.layer(3).moe() != nullptr);
  }
  text.erase("num_experts");
  text.erase("head_dim");
  text.erase("rope_parameters");
  const Config dense = Config::parse(text, "config.json");
  EXPECT_EQ(dense.plan.moe(), nullptr);
  EXPECT_EQ(dense.plan.layer(3).attention()->head_dim, 16);
  EXPECT_EQ(dense.plan.ropes[0].base, 100000);
}

TEST(ModelConfig, Qwen3AndRopes) {
  Json json = flat("qwen3");
  Config c = Config::parse(json, "config.json");
  EXPECT_TRUE(c.plan.layer(0).attention() != nullptr && c.plan.layer(5).attention() != nullptr);
  EXPECT_EQ(c.plan.layer(1).moe(), nullptr);
  EXPECT_EQ(c.plan.ropes[0].dims, 16);
  json.set("rope_scaling", Json::parse(R"({"type": "linear", "factor": 4})", "rope"));
  EXPECT_EQ(Config::parse(json, "config.json").plan.ropes[0].scale, 0.25);
  json.set("rope_scaling", Json::parse(R"({"rope_type": "yarn", "factor": 4})", "rope"));
  c = Config::parse(json, "config.json");
  EXPECT_EQ(c.plan.ropes[0].kind, models::RopeConfig::Kind::kYarn);
  EXPECT_EQ(c.plan.ropes[0].original_positions, 4096);
  json.erase("rope_theta");
  json.erase("rope_scaling");
  json.set("rope_parameters",
           Json::parse(R"({"rope_type": "default", "rope_theta": 9000})", "rope"));
  EXPECT_EQ(Config::parse(json, "config.json").plan.ropes[0].base, 9000);
}

TEST(ModelConfig, Llama) {
  Json json = flat("llama");
  for (const char* key :
       {"head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_theta", "attention_bias"}) {
    json.erase(key);
  }
  json.set("sliding_window", 7);  // which alone does nothing
  Config c = Config::parse(json, "config.json");
  const models::AttentionPlan* mixer = c.plan.layer(0).attention();
  EXPECT_TRUE(c.plan.tied);
  EXPECT_EQ(mixer->key_heads, 4);
  EXPECT_EQ(mixer->head_dim, 16);
  EXPECT_EQ(mixer->window, 0);
  EXPECT_FALSE(mixer->qk_norm || mixer->gated || mixer->bias.q || mixer->bias.o);
  EXPECT_FALSE(c.plan.layer(0).swiglu()->bias.gate);
  EXPECT_EQ(c.plan.ropes[0].base, 10000);
  EXPECT_EQ(c.plan.ropes[0].dims, 16);
  EXPECT_FALSE(c.plan.ropes[0].traditional);

  json.set("attention_bias", true);
  json.set("mlp_bias", true);
  json.set("rope_traditional", true);
  json.set("rope_parameters", Json::parse(R"({"rope_type": "llama3", "rope_theta": 500000,
      "factor": 8, "original_max_position_embeddings": 64})",
                                          "rope"));
  const auto types = [&](const std::string& last) {
    Json::Array words(7, Json("sliding_attention"));
    words.emplace_back(last);
    json.set("layer_types", words);
  };
  types("full_attention");
  c = Config::parse(json, "config.json");
  mixer = c.plan.layer(0).attention();
  EXPECT_TRUE(mixer->bias.q && mixer->bias.k && mixer->bias.v && mixer->bias.o);
  const models::NetworkBiases& bias = c.plan.layer(0).swiglu()->bias;
  EXPECT_TRUE(bias.gate && bias.up && bias.down);
  EXPECT_EQ(mixer->window, 7);
  EXPECT_EQ(c.plan.layer(7).attention()->window, 0);
  EXPECT_EQ(c.plan.ropes[0].kind, models::RopeConfig::Kind::kLlama3);
  EXPECT_EQ(c.plan.ropes[0].base, 500000);
  EXPECT_TRUE(c.plan.ropes[0].traditional);

  types("chunked_attention");
  expect_error(Errc::kIo, R"("layer_types" must be "full_attention" or)",
               [&] { Config::parse(json, "c"); });
  json.set("layer_types", Json::Array{});
  expect_error(Errc::kIo, "a word for each layer", [&] { Config::parse(json, "c"); });
  types("full_attention");
  json.erase("sliding_window");
  expect_error(Errc::kIo, "\"sliding_window\" is missing", [&] { Config::parse(json, "c"); });
}

TEST(ModelConfig, SmolLm3) {
  Json json = flat("smollm3");
  Config c = Config::parse(json, "config.json");
  const auto dims = [&](std::int64_t layer) {
    return c.plan.ropes[c.plan.layer(layer).attention()->rope].dims;
  };
  for (std::int64_t l = 0; l < 8; ++l) EXPECT_EQ(dims(l), l % 4 == 3 ? 0 : 16) << l;
  json.set("no_rope_layers", Json::parse("[0, 1, 1, 1, 1, 1, 1, 1]", "layers"));
  c = Config::parse(json, "config.json");
  for (std::int64_t l = 0; l < 8; ++l) EXPECT_EQ(dims(l), l == 0 ? 0 : 16) << l;
  json.set("no_rope_layers", Json::parse("[0, 1]", "layers"));
  expect_error(Errc::kIo, "a number for each layer", [&] { Config::parse(json, "c"); });
  json.set("no_rope_layers", Json::parse("[0, 1, 1, 1, 1, 1, 1, true]", "layers"));
  expect_error(Errc::kIo, "0 or 1 for each layer", [&] { Config::parse(json, "c"); });
}

TEST(ModelConfig, Qwen2AndQwen3Moe) {
  Json json = flat("qwen2");
  json.erase("rope_theta");
  json.erase("tie_word_embeddings");
  json.erase("max_position_embeddings");
  const Config dense = Config::parse(json, "config.json");
  const models::AttentionPlan& mixer = *dense.plan.layer(0).attention();
  EXPECT_TRUE(dense.plan.tied && mixer.bias.q && mixer.bias.k && mixer.bias.v);
  EXPECT_FALSE(mixer.bias.o || mixer.qk_norm);
  EXPECT_EQ(dense.plan.ropes[0].base, 1000000);
  EXPECT_EQ(dense.plan.max_positions, 32768);

  json = flat("qwen3_moe");
  json.erase("shared_expert_intermediate_size");
  const Config c = Config::parse(json, "config.json");
  EXPECT_TRUE(c.plan.layer(0).attention()->qk_norm);
  EXPECT_EQ(c.plan.moe()->shared_width, 0);
  const bool experts[] = {false, true, false, false, false, true, false, true};
  for (std::int64_t l = 0; l < 8; ++l) {
    EXPECT_EQ(c.plan.layer(l).moe() != nullptr, experts[l]) << l;
  }
}

TEST(ModelConfig, Formats) {
  Json json = flat("qwen3_next");
  EXPECT_EQ(Config::parse(json, "c").quantization.usual.bits, 0);
  json.set("quantization", Json::parse(R"({"group_size": 32, "bits": 3, "mode": "affine",
      "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}, "model.embed_tokens": false})",
                                       "q"));
  const models::Quantization q = Config::parse(json, "c").quantization;
  EXPECT_EQ(q.of_module("model.layers.1.mlp.gate").bits, 3);
  EXPECT_EQ(q.of_module("model.layers.0.mlp.gate").bits, 8);
  EXPECT_EQ(q.of_module("model.layers.0.mlp.gate").group_size, 64);
  EXPECT_EQ(q.of_module("model.embed_tokens").bits, 0);
}

TEST(ModelConfig, SaysWhatIsWrong) {
  const auto refused = [](const std::string& says, const std::function<void(Json&)>& set) {
    Json json = flat("qwen3_next");
    set(json);
    expect_error(Errc::kIo, says, [&] { Config::parse(json, "dir/config.json"); });
  };
  const auto put = [&](const char* key, const char* value, const std::string& says) {
    refused(says, [&](Json& json) { json.set(key, Json::parse(value, "value")); });
  };
  put("model_type", R"("gpt_oss")", R"(dir/config.json: models of type "gpt_oss")");
  put("hidden_size", "0", R"("hidden_size" must be a whole number from 1 to 2^31 - 1, got 0)");
  put("hidden_size", "64.5", "got 64.5");
  put("hidden_size", R"("64")", R"(got "64")");
  put("hidden_size", "4611686018427387904", "2^31");
  put("num_hidden_layers", "3000000",
      R"("num_hidden_layers" above 4096 is not supported, got 3000000)");
  put("head_dim", "320", R"("head_dim" above 256)");
  put("linear_conv_kernel_dim", "17", R"("linear_conv_kernel_dim" above 16)");
  put("num_experts", "1025", R"("num_experts" above 1024)");
  put("hidden_act", R"("gelu")", R"("hidden_act" must be "silu", got "gelu")");
  put("use_sliding_window", "true", "windows are not supported");
  put("mlp_only_layers", R"(["a"])", R"("mlp_only_layers" must be numbers of layers, got "a")");
  put("rms_norm_eps", "-1", R"("rms_norm_eps" must be a number above 0)");
  put("rms_norm_eps", "1e300", R"("rms_norm_eps" must be a number above 0 that a float can hold)");
  put("rms_norm_eps", "1e-300", R"("rms_norm_eps" must be a number above 0 that a float can hold)");
  put("model_type", R"("\u001b[31mEVIL\u0007")", R"(models of type "\x1b[31mEVIL\x07" are)");
  put("tie_word_embeddings", "1", R"("tie_word_embeddings" must be true or false)");
  put("num_key_value_heads", "3", "must be a multiple of");
  put("linear_num_key_heads", "3", R"("linear_num_value_heads" must be a multiple)");
  put("num_experts_per_tok", "9", "there are 8 experts");
  put("partial_rotary_factor", "0.2", "must be an even number of channels, got 3");
  put("partial_rotary_factor", "2", "got 32");
  put("partial_rotary_factor", "1e30",
      "1e+30 of \"head_dim\" 16 must be an even number of channels, got 32 or more");
  put("rope_scaling", R"({"type": "longrope", "factor": 2})", R"(rope of type "longrope")");
  put("rope_scaling", R"({"type": "yarn"})", R"("factor" is missing)");
  put("rope_scaling", "3", R"("rope_scaling" must be an object)");
  put("mlp_only_layers", "3", R"("mlp_only_layers" must be an array)");
  put("quantization", R"({"bits": 7})", "must have bits 2, 3, 4, 5, 6 or 8, got 7");
  put("quantization", R"({"bits": 4, "group_size": 16})",
      "must have a group_size of 32, 64 or 128, got 16");
  put("quantization", R"({"bits": 4, "group_size": 32, "mode": "mxfp4"})", R"(the mode "mxfp4")");
  put("quantization", R"({"bits": 4, "a.b": {"bits": 1}})", "quantization of a.b");
  put("quantization_config", R"({"quant_method": "awq"})", R"(quantised by "awq")");
  for (const char* key : {"model_type", "hidden_size", "vocab_size", "num_experts", "rope_theta"}) {
    refused(std::string("\"") + key + "\" is missing", [&](Json& json) { json.erase(key); });
  }
}

// A plan made by hand, with what no file says.
TEST(ModelPlan, SaysWhatIsWrong) {
  models::ModelPlan good;
  good.vocabulary = 64;
  good.width = 32;
  good.max_positions = 128;
  good.ropes = {{}};
  good.ropes[0].dims = 8;
  models::AttentionPlan attention;
  attention.heads = 4;
  attention.key_heads = 2;
  attention.head_dim = 8;
  const models::DeltaPlan delta{2, 4, 8, 8, 4, models::DeltaPlan::Rows::kByKind};
  good.layers = {{attention, models::SwigluPlan{48}}, {delta, models::MoePlan{8, 2, 16, 0, true}}};
  EXPECT_FALSE(models::plan_check(good));
  const auto refused = [&](const std::string& says, const auto& change) {
    models::ModelPlan plan = good;
    change(plan);
    const Check check = models::plan_check(plan);
    ASSERT_TRUE(check) << says;
    EXPECT_EQ(check->code(), Errc::kArgument);
    EXPECT_NE(std::string(check->what()).find(says), std::string::npos) << check->what();
  };
  const auto mixer = [](models::ModelPlan& p) -> models::AttentionPlan& {
    return std::get<models::AttentionPlan>(p.layers[0].mixer);
  };
  const auto net = [](models::ModelPlan& p) -> models::DeltaPlan& {
    return std::get<models::DeltaPlan>(p.layers[1].mixer);
  };
  const auto moe = [](models::ModelPlan& p) -> models::MoePlan& {
    return std::get<models::MoePlan>(p.layers[1].network);
  };
  using models::ModelPlan;
  refused("vocabulary must be at least 1, got 0", [](ModelPlan& p) { p.vocabulary = 0; });
  refused("width must be at least 1, got -1", [](ModelPlan& p) { p.width = -1; });
  refused("max_positions must be at least 1", [](ModelPlan& p) { p.max_positions = 0; });
  refused("layers must be at least 1", [](ModelPlan& p) { p.layers.clear(); });
  refused("heads must be a multiple of key_heads 3", [&](ModelPlan& p) { mixer(p).key_heads = 3; });
  refused("head_dim must be from 1 to 256", [&](ModelPlan& p) { mixer(p).head_dim = 257; });
  refused("window must be at least 0", [&](ModelPlan& p) { mixer(p).window = -1; });
  refused("rope must be one of the plan's 1, got 1", [&](ModelPlan& p) { mixer(p).rope = 1; });
  refused("a rope's dims must be even", [](ModelPlan& p) { p.ropes[0].dims = 10; });
  refused("value_heads must be a multiple", [&](ModelPlan& p) { net(p).value_heads = 3; });
  refused("key_dim and value_dim", [&](ModelPlan& p) { net(p).value_dim = 0; });
  refused("kernel must be from 1 to 16", [&](ModelPlan& p) { net(p).kernel = 17; });
  refused("experts must be from 1 to 1024", [&](ModelPlan& p) { moe(p).experts = 0; });
  refused("at most experts 8, got 9", [&](ModelPlan& p) { moe(p).chosen = 9; });
  refused("width of an expert", [&](ModelPlan& p) { moe(p).width = 0; });
  refused("shared_width", [&](ModelPlan& p) { moe(p).shared_width = -1; });
  // What no op can do yet.
  refused("a softcap of attention's scores is not supported",
          [&](ModelPlan& p) { mixer(p).softcap = 50; });
  refused("a softcap of logits is not supported", [](ModelPlan& p) { p.logit_softcap = 30; });
  refused("clamped silu is not supported", [](ModelPlan& p) {
    p.layers[0].network = models::SwigluPlan{48, models::Activation::kClampedSilu};
  });
  refused("embedding_scale and logit_scale must be numbers above 0, got 0",
          [](ModelPlan& p) { p.embedding_scale = 0; });
  refused("logit_scale must be numbers above 0, got -1", [](ModelPlan& p) { p.logit_scale = -1; });
  refused("residual must be a number above 0", [](ModelPlan& p) { p.layers[1].residual = 0; });
  refused("scale must be a number above 0, or 0", [&](ModelPlan& p) { mixer(p).scale = -1; });
  refused("width of a network", [](ModelPlan& p) { p.layers[0].network = models::SwigluPlan{0}; });
}

}  // namespace
}  // namespace mlxtape::test
