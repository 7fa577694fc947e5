#include "mlxtape/nn/gated_attention.h"

#include <cmath>

#include "block.h"

namespace mlxtape::test {
namespace {

struct Case {
  std::int64_t batch, tokens, width, heads, key_heads, dim, turned;
};
enum { kX, kQ, kK, kV, kO, kQNorm, kKNorm };
constexpr double kBase = 50, kEps = 1e-3;

std::size_t place(std::int64_t i) { return static_cast<std::size_t>(i); }

// heads of each token, channels j and j + turned/2 turned by t·base^(−2j/turned).
void turn(Values& x, const Case& c, std::int64_t heads, const Blur& blur) {
  const std::int64_t half = c.turned / 2;
  for (std::int64_t r = 0; r < c.batch * c.tokens * heads; ++r) {
    const auto t = static_cast<double>(r / heads % c.tokens);
    for (std::int64_t j = 0; j < half; ++j) {
      const double angle = t * std::pow(kBase, -static_cast<double>(j) / static_cast<double>(half));
      double& p = x[place(r * c.dim + j)];
      double& q = x[place(r * c.dim + j + half)];
      const double first = p * std::cos(angle) - q * std::sin(angle);
      q = blur(p * std::sin(angle) + q * std::cos(angle));
      p = blur(first);
    }
  }
}

Arrays attention_in_double(const Case& c, const Arrays& in, const Blur& blur) {
  const std::int64_t rows = c.batch * c.tokens, group = c.heads / c.key_heads;
  const Values both = product(in[kX], in[kQ], rows, c.width, c.heads * 2 * c.dim, blur);
  Values q;
  for (std::int64_t h = 0; h < rows * c.heads; ++h) {
    q.insert(q.end(), both.begin() + h * 2 * c.dim, both.begin() + (h * 2 + 1) * c.dim);
  }
  q = normed(q, in[kQNorm], kEps, blur);
  Values k = normed(product(in[kX], in[kK], rows, c.width, c.key_heads * c.dim, blur), in[kKNorm],
                    kEps, blur);
  turn(q, c, c.heads, blur);
  turn(k, c, c.key_heads, blur);
  const Values v = product(in[kX], in[kV], rows, c.width, c.key_heads * c.dim, blur);

  Values seen;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t first = row / c.tokens * c.tokens;  // of its sequence
    for (std::int64_t h = 0; h < c.heads; ++h) {
      double all = 0;
      Values mean(place(c.dim));
      for (std::int64_t key = first; key <= row; ++key) {
        double score = 0;
        const std::int64_t at = (key * c.key_heads + h / group) * c.dim;
        for (std::int64_t j = 0; j < c.dim; ++j) {
          score += q[place((row * c.heads + h) * c.dim + j)] * k[place(at + j)];
        }
        const double weight = blur(std::exp(blur(score / std::sqrt(static_cast<double>(c.dim)))));
        all += weight;
        for (std::int64_t j = 0; j < c.dim; ++j) mean[place(j)] += weight * v[place(at + j)];
      }
      for (std::int64_t j = 0; j < c.dim; ++j) {
        const double gate = both[place(((row * c.heads + h) * 2 + 1) * c.dim + j)];
        seen.push_back(blur(blur(mean[place(j)] / all) * blur(sigma(gate))));
      }
    }
  }
  return {product(seen, in[kO], rows, c.heads * c.dim, c.width, blur)};
}

Block block_of(const Case& c) {
  const double size = 1.5 / std::sqrt(static_cast<double>(c.width));
  const Shape x{c.batch, c.tokens, c.width};
  return {"gated_attention",
          {{"x", x},
           {"q", {c.heads * 2 * c.dim, c.width}, size},
           {"k", {c.key_heads * c.dim, c.width}, size},
           {"v", {c.key_heads * c.dim, c.width}, size},
           {"o", {c.width, c.heads * c.dim}, 1.5 / std::sqrt(static_cast<double>(c.heads * c.dim))},
           {"q_norm", {c.dim}, 0.5, 1},
           {"k_norm", {c.dim}, 0.5, 1}},
          {x},
          [c](const Arrays& in, const Blur& blur) { return attention_in_double(c, in, blur); },
          [c](Tape& tape, const std::vector<Tensor>& in) {
            const nn::GatedAttentionWeights w{in[kQ], in[kK],     in[kV],
                                              in[kO], in[kQNorm], in[kKNorm]};
            return std::vector<Tensor>{nn::gated_attention(
                tape, in[kX], w, {c.heads, c.key_heads, c.dim, c.turned, kBase, kEps})};
          }};
}

class GatedAttention : public Blocks {};

TEST_P(GatedAttention, EveryNumbersGradient) {
  check_every_number(block_of({2, 5, 6, 4, 2, 6, 4}));
  check_every_number(block_of({1, 3, 5, 3, 1, 4, 4}));
  check_every_number(block_of({1, 3, 4, 2, 2, 4, 0}));  // without positions
}

TEST_P(GatedAttention, WideHeads) {
  const Case wide{1, 66, 16, 4, 2, 256, 64};
  check_directions(block_of(wide), DType::kF32);
  check_directions(block_of(wide), DType::kBF16);
}

MT_ON_EVERY_BACKEND(GatedAttention);

TEST(GatedAttentionCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({1, 3, 8});
  const nn::GatedAttentionWeights good{Tensor::meta({32, 8}), Tensor::meta({8, 8}),
                                       Tensor::meta({8, 8}),  Tensor::meta({8, 16}),
                                       Tensor::meta({4}),     Tensor::meta({4})};
  const nn::GatedAttentionShape shape{4, 2, 4, 2};
  EXPECT_FALSE(nn::gated_attention_check(x, good, shape));
  const auto with = [&](auto set) {
    nn::GatedAttentionWeights w = good;
    set(w);
    return nn::gated_attention_check(x, w, shape);
  };
  expect_refused({
      {"rank", nn::gated_attention_check(Tensor::meta({8}), good, shape), Errc::kShape,
       "x must be"},
      {"heads", nn::gated_attention_check(x, good, {4, 3, 4, 2}), Errc::kArgument, "got 4 and 3"},
      {"odd", nn::gated_attention_check(x, good, {4, 2, 4, 3}), Errc::kArgument, "rope_dims"},
      {"wide", nn::gated_attention_check(x, good, {4, 2, 4, 6}), Errc::kArgument,
       "0 to head_dim 4"},
      {"q", with([](auto& w) { w.q = Tensor::meta({16, 8}); }), Errc::kShape, "q must be [32, 8]"},
      {"v", with([](auto& w) { w.v = {}; }), Errc::kArgument, "v must be given"},
      {"norm", with([](auto& w) { w.k_norm = Tensor::meta({8}); }), Errc::kShape,
       "k_norm must be [4]"},
      {"type", with([](auto& w) { w.o = Tensor::meta({8, 16}, DType::kBF16); }), Errc::kDType,
       "o must be f32"},
  });
}

}  // namespace
}  // namespace mlxtape::test
