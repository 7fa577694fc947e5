#include "formats/gguf_pieces.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "mlxtape/base/checked.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

namespace {

// Tensors that hold nothing a model here needs: what predicts several tokens, and ropes that gguf_rope.cpp reads.
constexpr const char* kLeftOut[] = {"rope_freqs.weight"};
constexpr const char* kLeftOutOfBlocks[] = {"attn_rot_embd.weight", "nextn."};

// Sizes multiplied, and compared with what is there before anything is made of them.
void expect(std::initializer_list<std::int64_t> factors, std::int64_t got, const char* of,
            const std::string& what) {
  std::optional<std::int64_t> want = 1;
  for (const std::int64_t factor : factors) {
    if (want) want = checked_mul(*want, factor);
  }
  if (want && *want == got) return;
  throw Error(Errc::kIo, what + " must have " + (want ? std::to_string(*want) : "fewer") + " " +
                             of + " by the model's sizes, got " + std::to_string(got));
}

std::vector<std::int64_t> paired_rows(std::int64_t heads, std::int64_t head_dim) {
  std::vector<std::int64_t> rows;
  const std::int64_t half = head_dim / 2;
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t a = 0; a < 2; ++a) {
      for (std::int64_t j = 0; j < half; ++j) rows.push_back(head * head_dim + 2 * j + a);
    }
  }
  return rows;
}

std::vector<std::int64_t> half_of_experts(std::int64_t experts, std::int64_t both, bool second) {
  std::vector<std::int64_t> rows;
  const std::int64_t half = both / 2;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t i = 0; i < half; ++i) rows.push_back(e * both + (second ? half : 0) + i);
  }
  return rows;
}

// Where each value head lies in the file.
std::vector<std::int64_t> value_heads(const GgufSizes& s) {
  const std::int64_t each = s.delta_value_heads / s.delta_key_heads;
  std::vector<std::int64_t> heads;
  for (std::int64_t h = 0; h < s.delta_key_heads; ++h) {
    for (std::int64_t j = 0; j < each; ++j) heads.push_back(j * s.delta_key_heads + h);
  }
  return heads;
}

// Rows `first` to first + heads·size, whose heads are in the file's order.
void add_heads(std::vector<std::int64_t>& rows, std::int64_t first, std::int64_t size,
               const std::vector<std::int64_t>& heads) {
  for (const std::int64_t head : heads) {
    for (std::int64_t i = 0; i < size; ++i) rows.push_back(first + head * size + i);
  }
}

// q | k | v, then z, all by kind, for each key head together.
std::vector<std::int64_t> rows_by_key_head(const GgufSizes& s) {
  const std::int64_t each = s.delta_value_heads / s.delta_key_heads;
  const std::int64_t keys = s.delta_key_heads * s.delta_key_dim;
  const std::int64_t values = s.delta_value_heads * s.delta_value_dim;
  std::vector<std::int64_t> rows;
  const auto add = [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) rows.push_back(first + i);
  };
  for (std::int64_t h = 0; h < s.delta_key_heads; ++h) {
    const std::int64_t of_head = each * s.delta_value_dim;
    add(h * s.delta_key_dim, s.delta_key_dim);
    add(keys + h * s.delta_key_dim, s.delta_key_dim);
    add(2 * keys + h * of_head, of_head);
    add(2 * keys + values + h * of_head, of_head);
  }
  return rows;
}

void expect_even(std::int64_t value, std::int64_t by, const std::string& what) {
  if (value % by == 0) return;
  throw Error(Errc::kIo, what + " cannot be put in order: " + std::to_string(value) +
                             " is no multiple of " + std::to_string(by));
}

GgufOrder delta_order(GgufMove move, const GgufSizes& s, std::int64_t rows, std::int64_t numbers,
                      const std::string& what) {
  GgufOrder order;
  expect_even(s.delta_value_heads, s.delta_key_heads, what);
  const bool same = s.delta_value_heads == s.delta_key_heads;  // no head moves
  const std::int64_t heads = s.delta_value_heads, dim = s.delta_value_dim;
  switch (move) {
    case GgufMove::kByKeyHead:
      expect({2 * s.delta_key_heads, s.delta_key_dim},
             rows - 2 * std::max<std::int64_t>(0, checked_mul(heads, dim).value_or(0)), "rows",
             what);
      order.rows = rows_by_key_head(s);
      break;
    case GgufMove::kDecayHeads:
    case GgufMove::kValueHeads:
      expect({heads}, rows, "rows", what);
      if (!same) order.rows = value_heads(s);
      break;
    case GgufMove::kValueRows:
      expect({heads, dim}, rows, "rows", what);
      if (!same) add_heads(order.rows, 0, dim, value_heads(s));
      break;
    case GgufMove::kFilterQkv:
    case GgufMove::kValueRowsQkv: {
      const std::int64_t keys = 2 * s.delta_key_heads * s.delta_key_dim;
      expect({heads, dim}, rows - keys, "rows for values", what);
      if (same) break;
      order.rows.resize(static_cast<std::size_t>(keys));
      std::iota(order.rows.begin(), order.rows.end(), 0);
      add_heads(order.rows, keys, dim, value_heads(s));
      break;
    }
    case GgufMove::kValueColumns:
      expect({heads, dim}, numbers, "columns", what);
      if (same) break;
      order.columns = value_heads(s);
      order.run = dim;
      break;
    default: break;
  }
  return order;
}

// ---- pieces ----

Shape shape_of(const GgufName& name, const GgufFile& file,
               const std::vector<std::string>& sources) {
  Shape shape = file.tensor(sources[0]).shape;
  const std::string what = "gguf: " + file.path() + ": tensor \"" + shown(sources[0]) + "\"";
  if (sources.size() == 2) {
    const Shape other = file.tensor(sources[1]).shape;
    if (shape.rank() != 2 || other.rank() != 2 || shape[1] != other[1]) {
      file.fail("tensors \"" + shown(sources[0]) + "\" and \"" + shown(sources[1]) +
                "\" must be matrices with rows of the same length, got " + to_string(shape) +
                " and " + to_string(other));
    }
    shape[0] += other[0];
  }
  switch (name.move) {
    case GgufMove::kVector: return shape.rank() == 1 ? Shape{1, shape[0]} : shape;
    case GgufMove::kFilter:
    case GgufMove::kFilterQkv: return shape.rank() == 2 ? Shape{shape[0], shape[1], 1} : shape;
    case GgufMove::kFirstHalf:
    case GgufMove::kSecondHalf:
      if (shape.rank() != 3 || shape[1] % 2 != 0) {
        throw Error(Errc::kIo,
                    what + " must hold two halves for each expert, got " + to_string(shape));
      }
      return Shape{shape[0], shape[1] / 2, shape[2]};
    // A vector of heads may lie as [1, heads].
    case GgufMove::kDecay:
    case GgufMove::kDecayHeads: return shape.rank() == 2 && shape[0] == 1 ? Shape{shape[1]} : shape;
    default: return shape;
  }
}

GgufPiece piece_of(const GgufName& name, const GgufFile& file, const GgufArchitecture& architecture,
                   const GgufSizes& sizes, std::int64_t layer) {
  GgufPiece piece;
  piece.name = mlx_name(name, architecture, layer);
  piece.sources = gguf_names(name, layer);
  piece.of = &name;
  piece.shape = shape_of(name, file, piece.sources);
  // Vectors are rows of one number: what is done to rows of matrices is done to them.
  const Shape first = file.tensor(piece.sources[0]).shape;
  std::int64_t rows = 0;
  for (const std::string& source : piece.sources) {
    const Shape& shape = file.tensor(source).shape;
    rows += *element_count(shape) / (shape.rank() == 1 ? 1 : shape.back());
  }
  const bool is_vector = piece.shape.rank() == 1;
  if (is_vector) rows = piece.shape[0];
  const GgufTypeInfo& type = info_of(file.tensor(piece.sources[0]).type);
  if (is_vector && !type.dtype) {
    file.fail("tensor \"" + shown(piece.sources[0]) + "\" must be plain numbers, got " + type.name);
  }
  piece.order =
      order_of(name, sizes, rows, is_vector ? 1 : first.back(), first.rank() == 3 ? first[0] : 1,
               "gguf: " + file.path() + ": tensor \"" + shown(piece.sources[0]) + "\"");
  return piece;
}

bool is_left_out(const std::string& name, const GgufSizes& sizes) {
  if (std::find(std::begin(kLeftOut), std::end(kLeftOut), name) != std::end(kLeftOut)) return true;
  if (!name.starts_with("blk.")) return false;
  const std::size_t dot = name.find('.', 4);
  const std::string number = name.substr(4, dot == std::string::npos ? dot : dot - 4);
  const bool is_number = !number.empty() && number.size() < 9 &&
                         number.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number || dot == std::string::npos) return false;
  if (std::stol(number) >= sizes.layers) return true;  // of layers that predict several tokens
  const std::string rest = name.substr(dot + 1);
  return std::any_of(std::begin(kLeftOutOfBlocks), std::end(kLeftOutOfBlocks),
                     [&](const char* one) { return rest.starts_with(one); });
}

}  // namespace

std::vector<std::string> gguf_names(const GgufName& name, std::int64_t layer) {
  const std::string block = layer < 0 ? "" : "blk." + std::to_string(layer) + ".";
  const std::string both = name.gguf;
  const std::size_t plus = both.find('+');
  if (plus == std::string::npos) return {block + both};
  return {block + both.substr(0, plus), block + both.substr(plus + 1)};
}

std::string mlx_name(const GgufName& name, const GgufArchitecture& architecture,
                     std::int64_t layer) {
  const std::string within = layer < 0 ? "" : "model.layers." + std::to_string(layer) + ".";
  return architecture.prefix + within + name.mlx;
}

GgufOrder order_of(const GgufName& name, const GgufSizes& sizes, std::int64_t rows,
                   std::int64_t numbers, std::int64_t experts, const std::string& what) {
  switch (name.move) {
    case GgufMove::kNone:
    case GgufMove::kVector:
    case GgufMove::kFilter:
    case GgufMove::kDecay: return {};
    case GgufMove::kQueryPairs:
    case GgufMove::kKeyPairs: {
      const std::int64_t heads = name.move == GgufMove::kQueryPairs ? sizes.heads : sizes.key_heads;
      expect({heads, sizes.head_dim}, rows, "rows", what);
      expect_even(sizes.head_dim, 2, what);
      return {paired_rows(heads, sizes.head_dim), {}, 0};
    }
    case GgufMove::kFirstHalf:
    case GgufMove::kSecondHalf:
      return {half_of_experts(experts, rows / experts, name.move == GgufMove::kSecondHalf), {}, 0};
    default: return delta_order(name.move, sizes, rows, numbers, what);
  }
}

std::vector<GgufPiece> pieces_of(const GgufFile& file, const GgufArchitecture& architecture,
                                 const GgufSizes& sizes) {
  std::vector<GgufPiece> pieces;
  std::set<std::string> used, named;
  const auto add = [&](const GgufName& name, std::int64_t layer) {
    const std::vector<std::string> sources = gguf_names(name, layer);
    const bool all = std::all_of(sources.begin(), sources.end(),
                                 [&](const std::string& source) { return file.has(source); });
    if (!all) return;
    pieces.push_back(piece_of(name, file, architecture, sizes, layer));
    used.insert(sources.begin(), sources.end());
    if (named.insert(pieces.back().name).second) return;
    file.fail("tensor \"" + shown(sources[0]) + "\" is there in another form too");
  };
  for (const GgufName& name : gguf_outer_names()) add(name, -1);
  for (std::int64_t l = 0; l < sizes.layers; ++l) {
    each_name(architecture, [&](const GgufName& name) { add(name, l); });
  }
  for (const auto& [name, tensor] : file.tensors()) {
    if (used.count(name) != 0 || is_left_out(name, sizes)) continue;
    file.fail("tensor \"" + shown(name) + "\" is no part of a model of architecture " +
              architecture.name);
  }
  return pieces;
}

}  // namespace mlxtape::formats
