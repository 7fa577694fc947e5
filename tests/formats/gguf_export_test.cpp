#include "mlxtape/formats/gguf_export.h"

#include <gtest/gtest.h>

#include <cmath>

#include "formats/support.h"
#include "mlxtape/core/device.h"
#include "mlxtape/formats/gguf_model.h"

namespace mlxtape::formats {
namespace {

Tensor filled(const Shape& shape, DType dtype, float step, float first = 0) {
  Tensor t = Device::cpu().zeros(shape, dtype);
  visit(dtype, [&](auto zero) {
    using T = decltype(zero);
    auto values = t.host<T>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<T>(first + step * static_cast<float>(i % 97));
    }
  });
  return t;
}

void add_quantized(GgufExport& model, const std::string& module, const Shape& shape, int bits,
                   int group, DType scales, float scale = 0.25F) {
  Shape codes = shape, groups = shape;
  codes[codes.rank() - 1] = shape.back() * bits / 32;
  groups[groups.rank() - 1] = shape.back() / group;
  Tensor words = Device::cpu().zeros(codes, DType::kU32);
  std::uint32_t word = 1;
  for (std::uint32_t& one : words.host<std::uint32_t>()) one = word = word * 1664525 + 1013904223;
  model.tensors.push_back({module + ".weight", words});
  model.tensors.push_back({module + ".scales", filled(groups, scales, scale, scale)});
  model.tensors.push_back({module + ".biases", filled(groups, scales, -scale, 1)});
}

// A llama of one layer: width 64, heads of 32, two of queries and one of keys, 8 tokens.
GgufExport llama(bool with_attention = true) {
  GgufExport model;
  model.config = Json::Object{{"model_type", "llama"},
                              {"hidden_size", 64},
                              {"num_hidden_layers", 1},
                              {"num_attention_heads", 2},
                              {"num_key_value_heads", 1},
                              {"intermediate_size", 64},
                              {"max_position_embeddings", 99},
                              {"rms_norm_eps", 1e-5},
                              {"rope_theta", 5e5},
                              {"vocab_size", 8},
                              {"head_dim", 32},
                              {"tie_word_embeddings", true}};
  const std::string layer = "model.layers.0.";
  model.tensors = {{"model.embed_tokens.weight", filled({8, 64}, DType::kF16, 1)},
                   {"model.norm.weight", filled({64}, DType::kF32, 1)},
                   {layer + "input_layernorm.weight", filled({64}, DType::kBF16, 0.5F)},
                   {layer + "mlp.down_proj.weight", filled({64, 64}, DType::kF16, 0.25F)}};
  if (with_attention) {
    model.tensors.push_back({layer + "self_attn.q_proj.weight", filled({64, 64}, DType::kF16, 1)});
    model.tensors.push_back({layer + "self_attn.k_proj.weight", filled({32, 64}, DType::kF16, 1)});
  }
  return model;
}

std::vector<float> floats(const Tensor& t) {
  std::vector<float> values(static_cast<std::size_t>(t.size()));
  convert(t.data(), t.dtype(), values.data(), DType::kF32, values.size());
  return values;
}

std::string bytes_of(const Tensor& t) { return {static_cast<const char*>(t.data()), t.bytes()}; }

TEST(GgufExport, WhatIsWrittenIsReadAsTheSameModel) {
  const TempFolder folder;
  GgufExport model = llama();
  model.name = "small";
  const GgufExported done = export_gguf(folder / "m.gguf", model);
  EXPECT_EQ(done.paths, std::vector<std::string>{folder / "m.gguf"});
  const GgufModel again(folder / "m.gguf");
  EXPECT_EQ(again.file().text("general.name"), "small");
  EXPECT_EQ(again.file().whole("general.file_type"), 1);
  EXPECT_EQ(again.names().size(), model.tensors.size());
  EXPECT_EQ(done.bytes, again.file().total_bytes());
  for (const NamedTensor& item : model.tensors) {
    EXPECT_EQ(floats(again.tensor(item.name)), floats(item.tensor)) << item.name;
  }
  Json config = again.config();
  config.erase("hidden_act");
  EXPECT_EQ(config.dump(-1, true), model.config.dump(-1, true));
  // Vectors are f32 whatever they were, and rows of queries lie in pairs.
  EXPECT_EQ(again.file().tensor("blk.0.attn_norm.weight").type, GgufType::kF32);
  std::vector<float> q(64 * 64);
  const GgufTensor& there = again.file().tensor("blk.0.attn_q.weight");
  dequantize(there.type, again.file().bytes(there), q);
  EXPECT_EQ(q[64], floats(model.tensors[4].tensor)[16 * 64]);
}

TEST(GgufExport, GroupsOf4And5BitsAreTheSameNumbers) {
  for (const int bits : {4, 5}) {
    for (const int group : {32, 64}) {
      const TempFolder folder;
      GgufExport model = llama(false);
      for (const char* name : {"q_proj", "v_proj"}) {
        const bool is_q = name[0] == 'q';
        add_quantized(model, std::string("model.layers.0.self_attn.") + name, {is_q ? 64 : 32, 64},
                      bits, group, DType::kBF16);
      }
      model.config.set("quantization", Json::Object{{"bits", bits}, {"group_size", group}});
      const GgufExported done = export_gguf(folder / "m.gguf", model);
      EXPECT_EQ(done.exact, 2);
      EXPECT_EQ(done.rounded, 0);
      const GgufModel again(folder / "m.gguf");
      for (const NamedTensor& item : model.tensors) {
        if (!item.name.ends_with("_proj.weight") || item.tensor.dtype() != DType::kU32) continue;
        EXPECT_EQ(bytes_of(again.tensor(item.name)), bytes_of(item.tensor)) << item.name;
        const std::string scales = item.name.substr(0, item.name.size() - 6) + "scales";
        const std::vector<float> s = floats(again.tensor(scales));
        for (const NamedTensor& other : model.tensors) {
          if (other.name != scales) continue;
          const std::vector<float> want = floats(other.tensor);
          for (std::size_t i = 0; i < s.size(); ++i) {
            EXPECT_EQ(s[i], want[i / static_cast<std::size_t>(group / 32)]);
          }
        }
      }
    }
  }
}

TEST(GgufExport, WhatHasNoExactTypeIsUnpackedAndCounted) {
  const auto type_of = [](int bits, float scale, std::optional<GgufType> matrices = {}) {
    const TempFolder folder;
    GgufExport model = llama();
    add_quantized(model, "model.layers.0.self_attn.v_proj", {32, 64}, bits, 64, DType::kF32, scale);
    model.config.set("quantization", Json::Object{{"bits", bits}, {"group_size", 64}});
    model.matrices = matrices;
    const GgufExported done = export_gguf(folder / "m.gguf", model);
    EXPECT_EQ(done.exact + done.rounded, 1);
    const GgufFile file(folder / "m.gguf");
    const GgufType type = file.tensor("blk.0.attn_v.weight").type;
    EXPECT_EQ(done.rounded, type == GgufType::kF16 ? 1 : 0);
    EXPECT_EQ(file.tensor("token_embd.weight").type, matrices.value_or(GgufType::kF16));
    return type;
  };
  EXPECT_EQ(type_of(4, 0.25F), GgufType::kQ41);
  EXPECT_EQ(type_of(4, 1.0F / 3), GgufType::kF16);  // a scale that is no f16 value
  EXPECT_EQ(type_of(8, 0.25F), GgufType::kF16);     // an offset, which Q8_0 has not
  EXPECT_EQ(type_of(6, 0.25F), GgufType::kF16);
  EXPECT_EQ(type_of(4, 0.25F, GgufType::kQ80), GgufType::kQ41);
  EXPECT_EQ(type_of(4, 0.25F, GgufType::kBf16), GgufType::kQ41);
}

TEST(GgufExport, PlainWeightsKeepTheirType) {
  const TempFolder folder;
  GgufExport model = llama();
  model.tensors[3].tensor = filled({64, 64}, DType::kBF16, 0.25F);
  model.tensors[0].tensor = filled({8, 64}, DType::kF32, 0.1F);
  export_gguf(folder / "m.gguf", model);
  const GgufFile file(folder / "m.gguf");
  EXPECT_EQ(file.tensor("token_embd.weight").type, GgufType::kF32);
  EXPECT_EQ(file.tensor("blk.0.ffn_down.weight").type, GgufType::kBf16);
  EXPECT_EQ(file.tensor("blk.0.attn_q.weight").type, GgufType::kF16);
}

TEST(GgufExport, RopesBecomeKeysOrFactors) {
  const auto read = [](const Json& scaling) {
    const TempFolder folder;
    GgufExport model = llama();
    model.config.set("rope_scaling", scaling);
    export_gguf(folder / "m.gguf", model);
    return GgufModel(folder / "m.gguf").config().find("rope_scaling")->dump();
  };
  for (const Json& scaling : {Json(Json::Object{{"rope_type", "linear"}, {"factor", 2.5}}),
                              Json(Json::Object{{"rope_type", "yarn"},
                                                {"factor", 4.0},
                                                {"original_max_position_embeddings", 32768},
                                                {"beta_fast", 16.0}}),
                              Json(Json::Object{{"rope_type", "llama3"},
                                                {"factor", 32.0},
                                                {"low_freq_factor", 1.0},
                                                {"high_freq_factor", 4.0},
                                                {"original_max_position_embeddings", 8192}})}) {
    EXPECT_EQ(read(scaling), scaling.dump());
  }
}

// A delta net whose value heads have another order in the file.
TEST(GgufExport, DeltaNetsAreReadAsTheSame) {
  const TempFolder folder;
  GgufExport model;
  Json sizes = Json::Object{{"model_type", "qwen3_5_text"},
                            {"hidden_size", 32},
                            {"num_hidden_layers", 1},
                            {"num_attention_heads", 2},
                            {"num_key_value_heads", 1},
                            {"intermediate_size", 64},
                            {"max_position_embeddings", 99},
                            {"rms_norm_eps", 1e-6},
                            {"vocab_size", 8},
                            {"head_dim", 16},
                            {"linear_num_key_heads", 2},
                            {"linear_num_value_heads", 4},
                            {"linear_key_head_dim", 4},
                            {"linear_value_head_dim", 32},
                            {"linear_conv_kernel_dim", 4}};
  sizes.set(
      "rope_parameters",
      Json::Object{{"rope_type", "default"}, {"rope_theta", 1e6}, {"partial_rotary_factor", 0.25}});
  model.config = Json::Object{{"model_type", "qwen3_5"}, {"tie_word_embeddings", true}};
  model.config.set("text_config", std::move(sizes));
  const std::string layer = "language_model.model.layers.0.linear_attn.";
  model.tensors = {{"language_model.model.embed_tokens.weight", filled({8, 32}, DType::kF16, 1)},
                   {layer + "in_proj_qkv.weight", filled({144, 32}, DType::kF16, 1)},
                   {layer + "in_proj_z.weight", filled({128, 32}, DType::kF16, 1)},
                   {layer + "in_proj_b.weight", filled({4, 32}, DType::kF16, 1)},
                   {layer + "conv1d.weight", filled({144, 4, 1}, DType::kF32, 1)},
                   {layer + "A_log", filled({4}, DType::kF32, 0.5F)},
                   {layer + "dt_bias", filled({4}, DType::kF32, 1)}};
  add_quantized(model, layer + "out_proj", {32, 128}, 4, 64, DType::kF16);
  model.config.set("quantization", Json::Object{{"bits", 4}, {"group_size", 64}});
  EXPECT_EQ(export_gguf(folder / "m.gguf", model).exact, 1);
  const GgufModel again(folder / "m.gguf");
  for (const NamedTensor& item : model.tensors) {
    if (item.name.ends_with(".scales") || item.name.ends_with(".biases")) continue;
    if (item.name.ends_with("A_log")) {  // through exp and log
      const std::vector<float> a = floats(again.tensor(item.name)), b = floats(item.tensor);
      for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-6);
      continue;
    }
    EXPECT_EQ(again.info(item.name).shape, item.tensor.shape()) << item.name;
    EXPECT_EQ(bytes_of(again.tensor(item.name)), bytes_of(item.tensor)) << item.name;
  }
  const GgufFile& file = again.file();
  EXPECT_EQ(file.wholes("qwen35.rope.dimension_sections"), (std::vector<std::int64_t>{1, 1, 0, 0}));
  EXPECT_EQ(file.whole("qwen35.ssm.inner_size"), 128);
  EXPECT_EQ(
      again.config().find("text_config")->find("rope_parameters")->find("rope_theta")->number(),
      1e6);
}

TEST(GgufExport, SaysWhatGgufHasNoPlaceFor) {
  const TempFolder folder;
  const auto said = [&](const auto& change) {
    GgufExport model = llama();
    change(model);
    std::string text = "no error";
    try {
      export_gguf(folder / "m.gguf", model);
    } catch (const Error& e) {
      text = e.what();
    }
    return text;
  };
  EXPECT_EQ(
      said([](GgufExport& m) { m.config.set("model_type", "mamba"); }),
      "gguf: models of type \"mamba\" cannot be written as GGUF; those that GGUF calls llama, "
      "qwen2, qwen3, qwen3moe, qwen3next, qwen35, qwen35moe can");
  EXPECT_EQ(said([](GgufExport& m) { m.tensors.push_back({"odd", filled({1}, DType::kF32, 1)}); }),
            "gguf: tensor odd has no name in a GGUF file of architecture llama");
  EXPECT_EQ(said([](GgufExport& m) { m.tensors.push_back(m.tensors[0]); }),
            "gguf: tensor model.embed_tokens.weight must come once");
  EXPECT_EQ(said([](GgufExport& m) { m.config.erase("vocab_size"); }),
            "gguf: config.json: \"vocab_size\" must be a whole number from 1 to 2147483648, and is "
            "missing");
  EXPECT_EQ(said([](GgufExport& m) { m.config.set("head_dim", 24); }),
            "gguf: model.layers.0.self_attn.q_proj must have 48 rows by the model's sizes, got 64");
  EXPECT_EQ(
      said([](GgufExport& m) { m.config.set("rope_scaling", Json::Object{{"type", "longrope"}}); }),
      "gguf: a rope of type \"longrope\" is not supported; default, linear, yarn and llama3 are");
  EXPECT_EQ(said([](GgufExport& m) { m.otherwise = GgufType::kQ4K; }),
            "gguf: weights can be written as F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0");
  EXPECT_EQ(said([](GgufExport& m) {
              add_quantized(m, "model.layers.0.self_attn.v_proj", {32, 64}, 4, 64, DType::kF16);
            }),
            "gguf: config.json must say how model.layers.0.self_attn.v_proj is quantised");
  EXPECT_EQ(folder.files(), 0U);
}

}  // namespace
}  // namespace mlxtape::formats
