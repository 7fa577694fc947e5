// Which architectures of GGUF files are models of ours, and how: names of keys and tensors as tables of data. A new one is a
// row in gguf_architecture.cpp; nothing else asks for an architecture by name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

// A number or a word that both sides have: `key` behind "<architecture>.", `config` in config.json.
struct GgufField {
  enum class Kind : std::uint8_t { kWhole, kNumber, kTruth };
  const char* key;
  const char* config;
  Kind kind = Kind::kWhole;
  bool required = false;
};

// How a tensor's numbers lie in GGUF, seen from MLX.
enum class GgufMove : std::uint8_t {
  kNone,
  kVector,  // [1, H] lies as [H]
  kFilter,  // [C, K, 1] lies as [C, K]
  kQueryPairs,  // rows of each head in pairs that are rotated together: row 2j + a is row a·D/2 + j here
  kKeyPairs,      // the same with as many heads as keys have
  kFirstHalf,     // the first half of each expert's rows
  kSecondHalf,    // the second half
  kByKeyHead,     // rows of two tensors, q | k | v and z, are together for each key head here
  kDecay,         // −exp of what is here
  kDecayHeads,    // the same, and heads as in kValueHeads
  kValueHeads,    // a row for each value head: head h·r + j of key head h is number j·key_heads + h
  kValueRows,     // rows of value heads
  kValueRowsQkv,  // the same behind the rows of queries and keys
  kFilterQkv,     // kFilter and kValueRowsQkv
  kValueColumns,  // columns of value heads
};

struct GgufName {
  const char* mlx;  // within the layer or the model; of a weight the module: "self_attn.q_proj"
  const char*
      gguf;  // within the block or the file: "attn_q.weight", or two: "attn_qkv.weight+attn_gate.weight"
  bool weight = false;  // a matrix that may be quantised
  GgufMove move = GgufMove::kNone;
  bool only_read = false;  // another form of tensors that is not written
  bool wide = false;       // a matrix that llama.cpp wants in f32
};

struct GgufArchitecture {
  const char* name;         // general.architecture
  const char* model_type;   // config.json
  const char* prefix;       // of every tensor in MLX: "language_model."
  const char* nested;       // the object of config.json that holds the sizes; empty: none
  const char* nested_type;  // its model_type
  bool partial_rope;        // "partial_rotary_factor" is read
  bool rope_in_parameters;  // "rope_parameters" holds what is said of the rope
  bool delta;               // layers with delta nets
  std::span<const GgufField* const> fields;  // lists that end with an empty row
  std::span<const GgufName* const> names;    // of a layer, likewise
};

// By general.architecture and by config.json's model_type; null where there is none.
const GgufArchitecture* gguf_architecture(std::string_view name);
const GgufArchitecture* gguf_architecture_of(std::string_view model_type);
// Every name: "llama, qwen2, ..."
std::string gguf_architecture_names();

// Keys behind "<architecture>." that change what a model computes and that no model of ours has: each must be missing or have
// its neutral value.
struct GgufNeutral {
  const char* key;
  double neutral;
};
std::span<const GgufNeutral> gguf_neutral_keys();

// Of the whole model: embedding, last norm, head.
std::span<const GgufName> gguf_outer_names();

// Calls fn for every row of a layer's lists.
template <class Fn>
void each_name(const GgufArchitecture& a, const Fn& fn) {
  for (const GgufName* list : a.names) {
    for (; list->mlx != nullptr; ++list) fn(*list);
  }
}
template <class Fn>
void each_field(const GgufArchitecture& a, const Fn& fn) {
  for (const GgufField* list : a.fields) {
    for (; list->key != nullptr; ++list) fn(*list);
  }
}

}  // namespace mlxtape::formats
