#include "mlxtape/formats/gguf_model.h"

#include <gtest/gtest.h>

#include <cmath>

#include "formats/gguf_support.h"
#include "formats/support.h"
#include "mlxtape/formats/gguf_write.h"

namespace mlxtape::formats {
namespace {

using Keys = std::vector<GgufKey>;

// A file put together tensor by tensor; the numbers of each are 0, 1, 2, ... times a step.
struct Made {
  Keys keys;
  std::vector<GgufTensorToWrite> tensors;
  TempFolder folder;

  Made& tensor(const std::string& name, const Shape& shape, GgufType type = GgufType::kF32,
               float first = 0, float step = 1) {
    std::vector<float> numbers(static_cast<std::size_t>(*element_count(shape)));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = first + step * static_cast<float>(i);
    }
    std::vector<std::byte> bytes(numbers.size() / static_cast<std::size_t>(info_of(type).block) *
                                 static_cast<std::size_t>(info_of(type).bytes));
    quantize(type, numbers, bytes);
    tensors.push_back({name, shape, type, [bytes](const auto& put) {
                         put(bytes);
                       }});
    return *this;
  }
  Made& key(const std::string& name, auto value) {
    keys.push_back({name, value});
    return *this;
  }
  Made& u32(const std::string& name, std::uint32_t value) { return key(name, value); }
  Made& without(const std::string& name) {
    std::erase_if(keys, [&](const GgufKey& one) { return one.key == name; });
    std::erase_if(tensors, [&](const GgufTensorToWrite& one) { return one.name == name; });
    return *this;
  }
  std::string write() const {
    write_gguf(folder / "m.gguf", keys, tensors);
    return folder / "m.gguf";
  }
  std::string refusal() const {
    const std::string path = write();
    return message_of([&] { GgufModel model(path); }, Errc::kIo, folder / "");
  }
};

// One layer: width 32, two heads of 16 with one key head, network 64, 8 tokens.
std::unique_ptr<Made> llama(GgufType matrices = GgufType::kF16) {
  auto made = std::make_unique<Made>();
  made->key("general.architecture", std::string("llama"));
  made->u32("llama.block_count", 1).u32("llama.embedding_length", 32);
  made->u32("llama.context_length", 512).u32("llama.feed_forward_length", 64);
  made->u32("llama.attention.head_count", 2).u32("llama.attention.head_count_kv", 1);
  made->key("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  made->key("llama.rope.freq_base", 5e5F);
  made->tensor("token_embd.weight", {8, 32}, matrices);
  made->tensor("blk.0.attn_norm.weight", {32}).tensor("blk.0.ffn_norm.weight", {32});
  made->tensor("blk.0.attn_q.weight", {32, 32}, matrices);
  made->tensor("blk.0.attn_k.weight", {16, 32}, matrices);
  made->tensor("blk.0.attn_v.weight", {16, 32}, matrices);
  made->tensor("blk.0.attn_output.weight", {32, 32}, matrices);
  made->tensor("blk.0.ffn_gate.weight", {64, 32}, matrices);
  made->tensor("blk.0.ffn_up.weight", {64, 32}, matrices);
  made->tensor("blk.0.ffn_down.weight", {32, 64}, matrices);
  made->tensor("output_norm.weight", {32});
  return made;
}

const std::string kQ = "model.layers.0.self_attn.q_proj";

std::vector<float> floats(const Tensor& t) {
  std::vector<float> values(static_cast<std::size_t>(t.size()));
  convert(t.data(), t.dtype(), values.data(), DType::kF32, values.size());
  return values;
}

// ---- config.json ----

TEST(GgufModel, KeysBecomeAConfig) {
  const auto made = llama();
  made->key("tokenizer.ggml.eos_token_id", std::uint32_t{2});
  const GgufModel model(made->write());
  EXPECT_EQ(model.config().dump(-1, true),
            R"({"eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, )"
            R"("intermediate_size": 64, "max_position_embeddings": 512, "model_type": "llama", )"
            R"("num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1, )"
            R"("rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": true, )"
            R"("vocab_size": 8})");
}

TEST(GgufModel, HeadsMayBeGivenByLayer) {
  const auto made = llama();
  made->without("llama.attention.head_count_kv");
  made->key("llama.attention.head_count_kv", std::vector<std::uint32_t>{0, 1, 1});
  EXPECT_EQ(GgufModel(made->write()).config().find("num_key_value_heads")->integer(), 1);
  made->without("llama.attention.head_count_kv");
  made->key("llama.attention.head_count_kv", std::vector<std::uint32_t>{2, 1});
  EXPECT_EQ(made->refusal(),
            "gguf: m.gguf: key \"llama.attention.head_count_kv\" must be the same in every layer, "
            "got several");
}

TEST(GgufModel, RopesBecomeThoseOfConfigJson) {
  const auto scaling = [](const Keys& keys) {
    const auto made = llama();
    for (const GgufKey& key : keys) made->keys.push_back(key);
    return GgufModel(made->write()).config().find("rope_scaling")->dump();
  };
  EXPECT_EQ(scaling({{"llama.rope.scaling.type", std::string("linear")},
                     {"llama.rope.scaling.factor", 2.5F}}),
            R"({"rope_type": "linear", "factor": 2.5})");
  EXPECT_EQ(scaling({{"llama.rope.scaling.type", std::string("yarn")},
                     {"llama.rope.scaling.factor", 4.0F},
                     {"llama.rope.scaling.original_context_length", std::uint32_t{32768}}}),
            R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})");
}

// Llama 3's factors, computed here from the rule: 1 up to a wavelength, 32 beyond another.
std::vector<float> factors(double factor, std::int64_t dims, double base) {
  std::vector<float> result;
  for (std::int64_t j = 0; j < dims / 2; ++j) {
    const double turns =
        8192 / (2 * 3.14159265358979323846 *
                std::pow(base, static_cast<double>(2 * j) / static_cast<double>(dims)));
    const double share = std::min(1.0, std::max(0.0, (turns - 1) / 3));
    result.push_back(static_cast<float>(1 / (share + (1 - share) / factor)));
  }
  return result;
}

TEST(GgufModel, FactorsOfLlama3AreKnown) {
  const auto made = llama();
  const auto set = [&](std::vector<float> values) {
    made->without("rope_freqs.weight");
    std::vector<std::byte> bytes(values.size() * 4);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    made->tensors.push_back({"rope_freqs.weight",
                             {static_cast<std::int64_t>(values.size())},
                             GgufType::kF32,
                             [bytes](const auto& put) {
                               put(bytes);
                             }});
  };
  set(factors(32, 16, 5e5));
  EXPECT_EQ(GgufModel(made->write()).config().find("rope_scaling")->dump(),
            R"({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, )"
            R"("high_freq_factor": 4.0, "original_max_position_embeddings": 8192})");
  std::vector<float> other = factors(32, 16, 5e5);
  other[5] *= 1.01F;
  set(other);
  EXPECT_EQ(made->refusal(),
            "gguf: m.gguf: tensor \"rope_freqs.weight\" holds factors that are not those of a rope "
            "of type llama3, which is not supported: convert the original model");
  set({1, 1});
  EXPECT_EQ(made->refusal(),
            "gguf: m.gguf: tensor \"rope_freqs.weight\" must have 8 factors, got 2");
}

// ---- weights ----

TEST(GgufModel, PlainWeightsLieInPlace) {
  const auto made = llama();
  const GgufModel model(made->write());
  const Tensor v = model.tensor("model.layers.0.self_attn.v_proj.weight");
  EXPECT_EQ(v.dtype(), DType::kF16);
  EXPECT_EQ(v.shape(), (Shape{16, 32}));
  EXPECT_TRUE(v.buffer().is_foreign());
  EXPECT_EQ(floats(v)[77], 77);
  EXPECT_TRUE(model.tensor("model.norm.weight").buffer().is_foreign());
  EXPECT_EQ(model.info("model.norm.weight").type, "F32");
  EXPECT_FALSE(model.has("lm_head.weight"));
  EXPECT_EQ(model.config().find("quantization"), nullptr);
}

TEST(GgufModel, RowsOfQueriesAndKeysArePutInOrder) {
  for (const GgufType type : {GgufType::kF16, GgufType::kF32}) {
    const auto made = llama(type);
    const GgufModel model(made->write());
    const std::vector<float> q = floats(model.tensor(kQ + ".weight"));
    for (std::size_t head = 0; head < 2; ++head) {
      for (std::size_t row = 0; row < 16; ++row) {
        const std::size_t there = head * 16 + 2 * (row % 8) + row / 8;
        EXPECT_EQ(q[(head * 16 + row) * 32], static_cast<float>(there * 32));
      }
    }
    EXPECT_EQ(floats(model.tensor("model.layers.0.self_attn.k_proj.weight"))[32], 2 * 32);
  }
}

std::vector<float> dequantized(const GgufModel& model, const std::string& name, unsigned bits) {
  const Tensor codes = model.tensor(name + ".weight");
  const std::vector<float> s = floats(model.tensor(name + ".scales"));
  const std::vector<float> b = floats(model.tensor(name + ".biases"));
  const auto words = codes.host<std::uint32_t>();
  std::vector<float> numbers(s.size() * 32);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    std::uint64_t pair = words[i * bits / 32];
    if (i * bits / 32 + 1 < words.size()) pair |= std::uint64_t{words[i * bits / 32 + 1]} << 32U;
    const auto q = static_cast<float>(pair >> i * bits % 32 & ((1U << bits) - 1));
    const float product = s[i / 32] * q;
    numbers[i] = product + b[i / 32];
  }
  return numbers;
}

// What a file's own blocks say, in MLX's order of rows.
TEST(GgufModel, PackedRowsMoveWithTheirScales) {
  const std::pair<GgufType, unsigned> kinds[] = {{GgufType::kQ40, 4U},
                                                 {GgufType::kQ41, 4U},
                                                 {GgufType::kQ50, 5U},
                                                 {GgufType::kQ51, 5U},
                                                 {GgufType::kQ80, 8U}};
  for (const auto& [type, bits] : kinds) {
    const auto made = llama(type);
    const GgufModel model(made->write());
    EXPECT_EQ(model.tensor(kQ + ".scales").dtype(), DType::kF16);
    EXPECT_EQ(model.tensor(kQ + ".weight").shape(), (Shape{32, static_cast<std::int64_t>(bits)}));
    const GgufTensor& q = model.file().tensor("blk.0.attn_q.weight");
    std::vector<float> there(1024);
    dequantize(q.type, model.file().bytes(q), there);
    const std::vector<float> here = dequantized(model, kQ, bits);
    for (std::size_t row = 0; row < 32; ++row) {
      const std::size_t from = row / 16 * 16 + 2 * (row % 8) + row % 16 / 8;
      for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(here[row * 32 + i], there[from * 32 + i]);
    }
    EXPECT_EQ(model.config().find("quantization")->dump(),
              "{\"group_size\": 32, \"bits\": " + std::to_string(bits) + ", \"mode\": \"affine\"}");
  }
}

TEST(GgufModel, OtherPackingsAreListed) {
  const auto made = llama(GgufType::kQ41);
  made->without("token_embd.weight").tensor("token_embd.weight", {8, 32}, GgufType::kQ80);
  const GgufModel model(made->write());
  EXPECT_EQ(model.config().find("quantization")->dump(),
            R"({"group_size": 32, "bits": 4, "mode": "affine", "model.embed_tokens": )"
            R"({"group_size": 32, "bits": 8}})");
  EXPECT_EQ(model.info("model.embed_tokens.weight").type, "Q8_0");
}

TEST(GgufModel, ThePlainTypeHoldsEveryWeight) {
  const auto type_with = [](GgufType most, GgufType one) {
    const auto made = llama(most);
    made->without("blk.0.attn_v.weight").tensor("blk.0.attn_v.weight", {16, 32}, one);
    const GgufModel model(made->write());
    const DType type = *model.info("model.norm.weight").dtype;
    EXPECT_EQ(type, DType::kF32);
    return *model
                .info(model.has("model.embed_tokens.scales") ? "model.embed_tokens.scales"
                                                             : "model.embed_tokens.weight")
                .dtype;
  };
  EXPECT_EQ(type_with(GgufType::kF16, GgufType::kF16), DType::kF16);
  EXPECT_EQ(type_with(GgufType::kBf16, GgufType::kBf16), DType::kBF16);
  EXPECT_EQ(type_with(GgufType::kF16, GgufType::kBf16), DType::kF32);
  EXPECT_EQ(type_with(GgufType::kF16, GgufType::kF32), DType::kF32);
  EXPECT_EQ(type_with(GgufType::kQ40, GgufType::kF16), DType::kF16);
  EXPECT_EQ(type_with(GgufType::kQ80, GgufType::kBf16), DType::kF32);
}

// ---- hybrids ----

// Two key heads of 4, four value heads of 8, width 32.
std::unique_ptr<Made> hybrid(const std::string& name, GgufType type = GgufType::kF32,
                             std::int64_t value_dim = 8) {
  auto made = std::make_unique<Made>();
  const std::string a = name + ".";
  made->key("general.architecture", name);
  made->u32(a + "block_count", 1).u32(a + "embedding_length", 32).u32(a + "context_length", 512);
  made->u32(a + "feed_forward_length", 64).u32(a + "attention.head_count", 2);
  made->u32(a + "attention.head_count_kv", 1).u32(a + "attention.key_length", 16);
  made->key(a + "attention.layer_norm_rms_epsilon", 1e-6F);
  made->u32(a + "rope.dimension_count", 4);
  made->u32(a + "ssm.conv_kernel", 4).u32(a + "ssm.state_size", 4).u32(a + "ssm.group_count", 2);
  made->u32(a + "ssm.time_step_rank", 4);
  made->u32(a + "ssm.inner_size", static_cast<std::uint32_t>(4 * value_dim));
  made->u32(a + "full_attention_interval", 2);
  if (name == "qwen3next") {
    made->u32(a + "expert_count", 2).u32(a + "expert_used_count", 1);
    made->u32(a + "expert_feed_forward_length", 32);
    made->u32(a + "expert_shared_feed_forward_length", 32);
    made->tensor("blk.0.ffn_gate_inp.weight", {2, 32});
    made->tensor("blk.0.ffn_gate_inp_shexp.weight", {32});
    made->tensor("blk.0.ffn_gate_up_exps.weight", {2, 64, 32}, type);
    made->tensor("blk.0.ffn_down_exps.weight", {2, 32, 32}, type);
  }
  made->tensor("token_embd.weight", {8, 32}, type).tensor("output_norm.weight", {32});
  made->tensor("blk.0.attn_qkv.weight", {16 + 4 * value_dim, 32}, type);
  made->tensor("blk.0.attn_gate.weight", {4 * value_dim, 32}, type, 100000);
  made->tensor("blk.0.ssm_conv1d.weight", {16 + 4 * value_dim, 4});
  made->tensor("blk.0.ssm_a", {4}, GgufType::kF32, -4);
  made->tensor("blk.0.ssm_dt.bias", {4});
  made->tensor("blk.0.ssm_out.weight", {32, 4 * value_dim}, type);
  return made;
}

TEST(GgufModel, RowsOfKindsAreJoinedByKeyHead) {
  const auto made = hybrid("qwen3next");
  const GgufModel model(made->write());
  const std::vector<float> w =
      floats(model.tensor("model.layers.0.linear_attn.in_proj_qkvz.weight"));
  EXPECT_EQ(w.size(), 80U * 32);
  std::size_t row = 0;
  for (std::size_t h = 0; h < 2; ++h) {
    for (std::size_t i = 0; i < 4; ++i)
      EXPECT_EQ(w[row++ * 32], static_cast<float>((4 * h + i) * 32));
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(w[row++ * 32], static_cast<float>((8 + 4 * h + i) * 32));
    }
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(w[row++ * 32], static_cast<float>((16 + 16 * h + i) * 32));
    }
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(w[row++ * 32], 100000 + static_cast<float>((16 * h + i) * 32));
    }
  }
  const std::vector<float> decay = floats(model.tensor("model.layers.0.linear_attn.A_log"));
  EXPECT_FLOAT_EQ(decay[0], std::log(4.0F));
  EXPECT_FLOAT_EQ(decay[3], std::log(1.0F));
  EXPECT_EQ(model.info("model.layers.0.linear_attn.conv1d.weight").shape, (Shape{48, 4, 1}));
  EXPECT_EQ(model.info("model.layers.0.mlp.shared_expert_gate.weight").shape, (Shape{1, 32}));
  // Experts' gates and ups, which lie one behind the other.
  const std::vector<float> gate =
      floats(model.tensor("model.layers.0.mlp.switch_mlp.gate_proj.weight"));
  const std::vector<float> up =
      floats(model.tensor("model.layers.0.mlp.switch_mlp.up_proj.weight"));
  EXPECT_EQ(model.info("model.layers.0.mlp.switch_mlp.up_proj.weight").shape, (Shape{2, 32, 32}));
  EXPECT_EQ(gate[32 * 32], 64 * 32);
  EXPECT_EQ(up[0], 32 * 32);
  EXPECT_EQ(up[32 * 32], 96 * 32);
  const Json& c = model.config();
  EXPECT_EQ(c.find("linear_value_head_dim")->integer(), 8);
  EXPECT_EQ(c.find("partial_rotary_factor")->number(), 0.25);
  EXPECT_EQ(c.find("mlp_only_layers")->array().size(), 0U);
  EXPECT_TRUE(c.find("norm_topk_prob")->boolean());
}

// Value head h·2 + j of key head h lies at j·2 + h.
constexpr std::size_t kThere[] = {0, 2, 1, 3};

TEST(GgufModel, ValueHeadsArePutInOrder) {
  const auto made = hybrid("qwen35");
  const GgufModel model(made->write());
  const std::string layer = "language_model.model.layers.0.linear_attn.";
  const std::vector<float> qkv = floats(model.tensor(layer + "in_proj_qkv.weight"));
  const std::vector<float> z = floats(model.tensor(layer + "in_proj_z.weight"));
  const std::vector<float> conv = floats(model.tensor(layer + "conv1d.weight"));
  const std::vector<float> out = floats(model.tensor(layer + "out_proj.weight"));
  const std::vector<float> dt = floats(model.tensor(layer + "dt_bias"));
  const std::vector<float> decay = floats(model.tensor(layer + "A_log"));
  for (std::size_t row = 0; row < 16; ++row) EXPECT_EQ(qkv[row * 32], static_cast<float>(row * 32));
  for (std::size_t head = 0; head < 4; ++head) {
    EXPECT_EQ(dt[head], static_cast<float>(kThere[head]));
    EXPECT_FLOAT_EQ(decay[head], std::log(4 - static_cast<float>(kThere[head])));
    for (std::size_t i = 0; i < 8; ++i) {
      const std::size_t row = 8 * head + i, there = 8 * kThere[head] + i;
      EXPECT_EQ(qkv[(16 + row) * 32], static_cast<float>((16 + there) * 32));
      EXPECT_EQ(z[row * 32], 100000 + static_cast<float>(there * 32));
      EXPECT_EQ(conv[(16 + row) * 4 + 1], static_cast<float>((16 + there) * 4 + 1));
      EXPECT_EQ(out[32 + row], static_cast<float>(32 + there));
    }
  }
  const Json& text = *model.config().find("text_config");
  EXPECT_EQ(text.find("rope_parameters")->find("partial_rotary_factor")->number(), 0.25);
  EXPECT_EQ(model.config().find("model_type")->string(), "qwen3_5");
}

TEST(GgufModel, PackedColumnsMoveInWholeGroups) {
  const auto made = hybrid("qwen35", GgufType::kQ51, 32);
  const GgufModel model(made->write());
  const std::string name = "language_model.model.layers.0.linear_attn.out_proj";
  const GgufTensor& tensor = model.file().tensor("blk.0.ssm_out.weight");
  std::vector<float> there(32 * 128);
  dequantize(tensor.type, model.file().bytes(tensor), there);
  const std::vector<float> here = dequantized(model, name, 5);
  for (std::size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(here[7 * 128 + i], there[7 * 128 + 32 * kThere[i / 32] + i % 32]);
  }
  // Groups that would be cut: plain numbers.
  const auto narrow = hybrid("qwen35", GgufType::kQ51, 8);
  EXPECT_FALSE(GgufModel(narrow->write()).has(name + ".scales"));
}

// ---- what is refused ----

TEST(GgufModel, RefusesWhatIsNoModelItKnows) {
  const auto said = [](const auto& change) {
    const auto made = llama();
    change(*made);
    return made->refusal();
  };
  const std::string f = "gguf: m.gguf: ";
  EXPECT_EQ(said([](Made& m) {
              m.without("general.architecture").key("general.architecture", std::string("bert"));
            }),
            f + "models of architecture \"bert\" are not supported, only llama, qwen2, qwen3, "
                "qwen3moe, qwen3next, qwen35, qwen35moe");
  EXPECT_EQ(
      said([](Made& m) { m.without("general.architecture"); }),
      f + "models of architecture \"\" are not supported, only llama, qwen2, qwen3, qwen3moe, "
          "qwen3next, qwen35, qwen35moe");
  EXPECT_EQ(said([](Made& m) { m.without("llama.embedding_length"); }),
            f + "key \"llama.embedding_length\" must be a whole number, and is missing");
  EXPECT_EQ(said([](Made& m) {
              m.without("llama.attention.head_count").u32("llama.attention.head_count", 0);
            }),
            f + "key \"llama.attention.head_count\" must be at least 1, got 0");
  EXPECT_EQ(said([](Made& m) { m.without("llama.block_count").u32("llama.block_count", 4097); }),
            f + "it must have tensors for each of 4097 layers, got 11");
  EXPECT_EQ(said([](Made& m) { m.u32("llama.nextn_predict_layers", 1); }),
            f + "it must have 1 to 4096 layers, got 1, of which 1 predict several tokens");
  EXPECT_EQ(said([](Made& m) { m.key("llama.attention.sliding_window", std::uint32_t{64}); }),
            f + "key \"llama.attention.sliding_window\" is 64.0, which is not supported for this "
                "architecture");
  EXPECT_EQ(said([](Made& m) { m.u32("llama.expert_count", 8); }),
            f + "a llama with experts is not supported, got expert_count above 0");
  EXPECT_EQ(said([](Made& m) { m.u32("llama.rope.dimension_count", 8); }),
            f + "key \"llama.rope.dimension_count\" must be the 16 channels of a head, got 8");
  EXPECT_EQ(said([](Made& m) { m.key("llama.rope.scaling.type", std::string("longrope")); }),
            f + "key \"llama.rope.scaling.type\" must be none, linear or yarn, got \"longrope\"");
  EXPECT_EQ(said([](Made& m) { m.u32("llama.attention.value_length", 8); }),
            f + "values must have as many channels as keys, 16, got 8");
  EXPECT_EQ(said([](Made& m) { m.tensor("blk.0.odd.weight", {1}); }),
            f + "tensor \"blk.0.odd.weight\" is no part of a model of architecture llama");
  EXPECT_EQ(said([](Made& m) { m.without("token_embd.weight"); }),
            f + "tensor \"token_embd.weight\" must be in the file");
  EXPECT_EQ(said([](Made& m) {
              m.without("blk.0.attn_q.weight").tensor("blk.0.attn_q.weight", {30, 32});
            }),
            f + "tensor \"blk.0.attn_q.weight\" must have 32 rows by the model's sizes, got 30");
  EXPECT_EQ(said([](Made& m) { m.u32("llama.attention.key_length", 1U << 31U); }),
            f + "\"head_dim\" must be a whole number from 1 to 1048576, got 2147483648");
}

TEST(GgufModel, RefusesHybridsWhoseSizesDoNotFit) {
  const auto said = [](const std::string& name, const auto& change) {
    const auto made = hybrid(name);
    change(*made);
    return made->refusal();
  };
  const auto sized = [&](const std::string& name, const std::string& key, std::uint32_t value) {
    return said(name, [&](Made& m) { m.without(name + "." + key).u32(name + "." + key, value); });
  };
  EXPECT_EQ(sized("qwen35", "ssm.time_step_rank", 3),
            "gguf: m.gguf: ssm.inner_size must be a multiple of ssm.time_step_rank, got 32 and 3");
  EXPECT_EQ(sized("qwen35", "ssm.group_count", 3),
            "gguf: m.gguf: tensor \"blk.0.attn_qkv.weight\" cannot be put in order: 4 is no "
            "multiple of 3");
  EXPECT_EQ(sized("qwen35", "ssm.inner_size", 64),
            "gguf: m.gguf: tensor \"blk.0.attn_qkv.weight\" must have 64 rows for values by the "
            "model's sizes, got 32");
  EXPECT_EQ(
      sized("qwen3next", "ssm.state_size", 8),
      "gguf: m.gguf: tensor \"blk.0.attn_qkv.weight\" must have 32 rows by the model's sizes, "
      "got 16");
  EXPECT_EQ(said("qwen3next", [](Made& m) { m.tensor("blk.0.ffn_gate_exps.weight", {2, 32, 32}); }),
            "gguf: m.gguf: tensor \"blk.0.ffn_gate_up_exps.weight\" is there in another form too");
  EXPECT_EQ(said("qwen35",
                 [](Made& m) {
                   m.without("blk.0.ssm_dt.bias").tensor("blk.0.ssm_dt.bias", {32}, GgufType::kQ80);
                 }),
            "gguf: m.gguf: tensor \"blk.0.ssm_dt.bias\" must be plain numbers, got Q8_0");
}

}  // namespace
}  // namespace mlxtape::formats
