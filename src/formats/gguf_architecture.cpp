#include "formats/gguf_architecture.h"

#include <array>

namespace mlxtape::formats {

namespace {

using Field = GgufField;
using Kind = GgufField::Kind;
using Name = GgufName;
using Move = GgufMove;

constexpr Field kFieldEnd{nullptr, nullptr};
constexpr Name kNameEnd{nullptr, nullptr};

// ---- keys ----
// What needs more than a name (layers, vocabulary, head_dim, ropes, tied heads) is in gguf_config.cpp.

constexpr Field kSizes[] = {
    {"embedding_length", "hidden_size", Kind::kWhole, true},
    {"context_length", "max_position_embeddings", Kind::kWhole, true},
    {"attention.head_count", "num_attention_heads", Kind::kWhole, true},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps", Kind::kNumber, true},
    kFieldEnd};
constexpr Field kDense[] = {{"feed_forward_length", "intermediate_size", Kind::kWhole, true},
                            kFieldEnd};
constexpr Field kMaybeDense[] = {{"feed_forward_length", "intermediate_size"}, kFieldEnd};
constexpr Field kExperts[] = {
    {"expert_count", "num_experts", Kind::kWhole, true},
    {"expert_used_count", "num_experts_per_tok", Kind::kWhole, true},
    {"expert_feed_forward_length", "moe_intermediate_size", Kind::kWhole, true},
    {"expert_weights_norm", "norm_topk_prob", Kind::kTruth},
    kFieldEnd};
constexpr Field kSharedExpert[] = {
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size", Kind::kWhole, true},
    kFieldEnd};
constexpr Field kDelta[] = {{"ssm.conv_kernel", "linear_conv_kernel_dim", Kind::kWhole, true},
                            {"ssm.state_size", "linear_key_head_dim", Kind::kWhole, true},
                            {"ssm.group_count", "linear_num_key_heads", Kind::kWhole, true},
                            {"ssm.time_step_rank", "linear_num_value_heads", Kind::kWhole, true},
                            {"full_attention_interval", "full_attention_interval"},
                            kFieldEnd};

constexpr std::array<const Field*, 2> kDenseFields{kSizes, kDense};
constexpr std::array<const Field*, 3> kMoeFields{kSizes, kMaybeDense, kExperts};
constexpr std::array<const Field*, 3> kDenseHybridFields{kSizes, kDense, kDelta};
constexpr std::array<const Field*, 5> kMoeHybridFields{kSizes, kMaybeDense, kExperts, kSharedExpert,
                                                       kDelta};

constexpr GgufNeutral kNeutral[] = {{"attention.scale", 0},
                                    {"attention.sliding_window", 0},
                                    {"attention.clamp_kqv", 0},
                                    {"attention.max_alibi_bias", 0},
                                    {"attn_logit_softcapping", 0},
                                    {"final_logit_softcapping", 0},
                                    {"embedding_scale", 1},
                                    {"residual_scale", 1},
                                    {"logit_scale", 1},
                                    {"rope.scaling.attn_factor", 1},
                                    {"expert_gating_func", 1},
                                    {"expert_group_count", 1},
                                    {"expert_weights_scale", 1}};

// ---- tensors ----

constexpr Name kOuter[] = {{"model.embed_tokens", "token_embd.weight", true},
                           {"model.norm.weight", "output_norm.weight"},
                           {"lm_head", "output.weight", true}};

constexpr Name kAttention[] = {{"self_attn.q_proj", "attn_q.weight", true},
                               {"self_attn.k_proj", "attn_k.weight", true},
                               {"self_attn.v_proj", "attn_v.weight", true},
                               {"self_attn.o_proj", "attn_output.weight", true},
                               {"self_attn.q_proj.bias", "attn_q.bias"},
                               {"self_attn.k_proj.bias", "attn_k.bias"},
                               {"self_attn.v_proj.bias", "attn_v.bias"},
                               {"self_attn.o_proj.bias", "attn_output.bias"},
                               kNameEnd};
// llama.cpp turns neighbours of these architectures, and its files have their rows in that order.
constexpr Name kPairedAttention[] = {
    {"self_attn.q_proj", "attn_q.weight", true, Move::kQueryPairs},
    {"self_attn.k_proj", "attn_k.weight", true, Move::kKeyPairs},
    {"self_attn.v_proj", "attn_v.weight", true},
    {"self_attn.o_proj", "attn_output.weight", true},
    {"self_attn.q_proj.bias", "attn_q.bias", false, Move::kQueryPairs},
    {"self_attn.k_proj.bias", "attn_k.bias", false, Move::kKeyPairs},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.bias", "attn_output.bias"},
    kNameEnd};
constexpr Name kHeadNorms[] = {{"self_attn.q_norm.weight", "attn_q_norm.weight"},
                               {"self_attn.k_norm.weight", "attn_k_norm.weight"},
                               kNameEnd};
constexpr Name kNorms[] = {{"input_layernorm.weight", "attn_norm.weight"},
                           {"post_attention_layernorm.weight", "ffn_norm.weight"},
                           kNameEnd};
constexpr Name kHybridNorms[] = {{"input_layernorm.weight", "attn_norm.weight"},
                                 {"post_attention_layernorm.weight", "post_attention_norm.weight"},
                                 kNameEnd};
constexpr Name kMlp[] = {{"mlp.gate_proj", "ffn_gate.weight", true},
                         {"mlp.up_proj", "ffn_up.weight", true},
                         {"mlp.down_proj", "ffn_down.weight", true},
                         kNameEnd};
constexpr Name kMlpBiases[] = {{"mlp.gate_proj.bias", "ffn_gate.bias"},
                               {"mlp.up_proj.bias", "ffn_up.bias"},
                               {"mlp.down_proj.bias", "ffn_down.bias"},
                               kNameEnd};
constexpr Name kMoe[] = {
    {"mlp.gate", "ffn_gate_inp.weight", true, Move::kNone, false, true},
    {"mlp.switch_mlp.gate_proj", "ffn_gate_exps.weight", true},
    {"mlp.switch_mlp.up_proj", "ffn_up_exps.weight", true},
    {"mlp.switch_mlp.down_proj", "ffn_down_exps.weight", true},
    {"mlp.switch_mlp.gate_proj", "ffn_gate_up_exps.weight", true, Move::kFirstHalf, true},
    {"mlp.switch_mlp.up_proj", "ffn_gate_up_exps.weight", true, Move::kSecondHalf, true},
    kNameEnd};
constexpr Name kShared[] = {
    {"mlp.shared_expert.gate_proj", "ffn_gate_shexp.weight", true},
    {"mlp.shared_expert.up_proj", "ffn_up_shexp.weight", true},
    {"mlp.shared_expert.down_proj", "ffn_down_shexp.weight", true},
    {"mlp.shared_expert_gate", "ffn_gate_inp_shexp.weight", true, Move::kVector, false, true},
    kNameEnd};
constexpr Name kDeltaByHead[] = {
    {"linear_attn.in_proj_qkvz", "attn_qkv.weight+attn_gate.weight", true, Move::kByKeyHead},
    {"linear_attn.in_proj_qkvz", "ssm_in.weight", true, Move::kNone, true},
    {"linear_attn.in_proj_ba", "ssm_ba.weight", true},
    {"linear_attn.conv1d.weight", "ssm_conv1d.weight", false, Move::kFilter},
    {"linear_attn.A_log", "ssm_a", false, Move::kDecay},
    {"linear_attn.dt_bias", "ssm_dt.bias"},
    {"linear_attn.norm.weight", "ssm_norm.weight"},
    {"linear_attn.out_proj", "ssm_out.weight", true},
    kNameEnd};
constexpr Name kDeltaByKind[] = {
    {"linear_attn.in_proj_qkv", "attn_qkv.weight", true, Move::kValueRowsQkv},
    {"linear_attn.in_proj_z", "attn_gate.weight", true, Move::kValueRows},
    {"linear_attn.in_proj_b", "ssm_beta.weight", true, Move::kValueHeads},
    {"linear_attn.in_proj_a", "ssm_alpha.weight", true, Move::kValueHeads},
    {"linear_attn.conv1d.weight", "ssm_conv1d.weight", false, Move::kFilterQkv},
    {"linear_attn.A_log", "ssm_a", false, Move::kDecayHeads},
    {"linear_attn.dt_bias", "ssm_dt.bias", false, Move::kValueHeads},
    {"linear_attn.norm.weight", "ssm_norm.weight"},
    {"linear_attn.out_proj", "ssm_out.weight", true, Move::kValueColumns},
    kNameEnd};

constexpr std::array<const Name*, 4> kLlamaNames{kPairedAttention, kNorms, kMlp, kMlpBiases};
constexpr std::array<const Name*, 3> kQwen2Names{kAttention, kNorms, kMlp};
constexpr std::array<const Name*, 4> kQwen3Names{kAttention, kHeadNorms, kNorms, kMlp};
constexpr std::array<const Name*, 5> kQwen3MoeNames{kAttention, kHeadNorms, kNorms, kMlp, kMoe};
constexpr std::array<const Name*, 7> kQwen3NextNames{kAttention, kHeadNorms, kHybridNorms, kMlp,
                                                     kMoe,       kShared,    kDeltaByHead};
constexpr std::array<const Name*, 7> kQwen35Names{kAttention, kHeadNorms, kHybridNorms, kMlp,
                                                  kMoe,       kShared,    kDeltaByKind};

constexpr GgufArchitecture kArchitectures[] = {
    {"llama", "llama", "", "", "", false, false, false, kDenseFields, kLlamaNames},
    {"qwen2", "qwen2", "", "", "", false, false, false, kDenseFields, kQwen2Names},
    {"qwen3", "qwen3", "", "", "", false, false, false, kDenseFields, kQwen3Names},
    {"qwen3moe", "qwen3_moe", "", "", "", false, false, false, kMoeFields, kQwen3MoeNames},
    {"qwen3next", "qwen3_next", "", "", "", true, false, true, kMoeHybridFields, kQwen3NextNames},
    {"qwen35", "qwen3_5", "language_model.", "text_config", "qwen3_5_text", true, true, true,
     kDenseHybridFields, kQwen35Names},
    {"qwen35moe", "qwen3_5_moe", "language_model.", "text_config", "qwen3_5_moe_text", true, true,
     true, kMoeHybridFields, kQwen35Names},
};

}  // namespace

const GgufArchitecture* gguf_architecture(std::string_view name) {
  for (const GgufArchitecture& one : kArchitectures) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

const GgufArchitecture* gguf_architecture_of(std::string_view model_type) {
  for (const GgufArchitecture& one : kArchitectures) {
    if (model_type == one.model_type || model_type == one.nested_type) return &one;
  }
  return nullptr;
}

std::string gguf_architecture_names() {
  std::string names;
  for (const GgufArchitecture& one : kArchitectures) {
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  return names;
}

std::span<const GgufNeutral> gguf_neutral_keys() { return kNeutral; }

std::span<const GgufName> gguf_outer_names() { return kOuter; }

}  // namespace mlxtape::formats
