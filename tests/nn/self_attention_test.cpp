#include "mlxtape/nn/self_attention.h"

#include <bit>
#include <cmath>

#include "block.h"

namespace mlxtape::test {
namespace {

enum Biased : std::uint8_t { kNone = 0, kOfQ = 1, kOfK = 2, kOfV = 4, kOfO = 8, kAll = 15 };
struct Case {
  std::int64_t batch, tokens, width, heads, key_heads, dim, turned;
  bool gated = true;
  unsigned biases = kNone;  // of which projections
  bool normed = true;
  std::int64_t window = 0;
  double scale = 0;
  bool sinks = false;
};
enum { kX, kQ, kK, kV, kO, kQNorm, kKNorm };
constexpr double kBase = 50, kEps = 1e-3;

std::size_t place(std::int64_t i) { return static_cast<std::size_t>(i); }

// Where a bias is among the inputs, those that are not there having no place; behind all of them the sinks.
std::size_t place_of(const Case& c, unsigned bias) {
  const int before = std::popcount(c.biases & (bias - 1));
  return place((c.normed ? kKNorm : kO) + 1 + before);
}
std::size_t place_of_sinks(const Case& c) { return place_of(c, kAll + 1); }

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
  const auto linear = [&](const Values& x, int weight, unsigned bias, std::int64_t width) {
    const auto out = static_cast<std::int64_t>(in[place(weight)].size()) / width;
    Values y = product(x, in[place(weight)], rows, width, out, blur);
    for (std::size_t i = 0; (c.biases & bias) != 0 && i < y.size(); ++i) {
      y[i] = blur(y[i] + in[place_of(c, bias)][i % place(out)]);
    }
    return y;
  };
  const Values both = linear(in[kX], kQ, kOfQ, c.width);
  Values q = both;
  if (c.gated) {
    q.clear();
    for (std::int64_t h = 0; h < rows * c.heads; ++h) {
      q.insert(q.end(), both.begin() + h * 2 * c.dim, both.begin() + (h * 2 + 1) * c.dim);
    }
  }
  Values k = linear(in[kX], kK, kOfK, c.width);
  if (c.normed) {
    q = normed(q, in[kQNorm], kEps, blur);
    k = normed(k, in[kKNorm], kEps, blur);
  }
  turn(q, c, c.heads, blur);
  turn(k, c, c.key_heads, blur);
  const Values v = linear(in[kX], kV, kOfV, c.width);

  Values seen;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t of_sequence = row / c.tokens * c.tokens;
    const std::int64_t first =
        c.window == 0 ? of_sequence : std::max(of_sequence, row - c.window + 1);
    for (std::int64_t h = 0; h < c.heads; ++h) {
      double all = c.sinks ? blur(std::exp(in[place_of_sinks(c)][place(h)])) : 0;
      Values mean(place(c.dim));
      for (std::int64_t key = first; key <= row; ++key) {
        double score = 0;
        const std::int64_t at = (key * c.key_heads + h / group) * c.dim;
        for (std::int64_t j = 0; j < c.dim; ++j) {
          score += q[place((row * c.heads + h) * c.dim + j)] * k[place(at + j)];
        }
        const double scale = c.scale == 0 ? 1 / std::sqrt(static_cast<double>(c.dim)) : c.scale;
        const double weight = blur(std::exp(blur(score * scale)));
        all += weight;
        for (std::int64_t j = 0; j < c.dim; ++j) mean[place(j)] += weight * v[place(at + j)];
      }
      for (std::int64_t j = 0; j < c.dim; ++j) {
        const double value = blur(mean[place(j)] / all);
        seen.push_back(
            c.gated
                ? blur(value * blur(sigma(both[place(((row * c.heads + h) * 2 + 1) * c.dim + j)])))
                : value);
      }
    }
  }
  return {linear(seen, kO, kOfO, c.heads * c.dim)};
}

nn::SelfAttentionWeights weights_of(const Case& c, const std::vector<Tensor>& in) {
  nn::SelfAttentionWeights w{in[kQ], in[kK], in[kV], in[kO], {}, {}};
  if (c.normed) {
    w.q_norm = in[kQNorm];
    w.k_norm = in[kKNorm];
  }
  const auto bias = [&](unsigned of) {
    return (c.biases & of) != 0 ? in[place_of(c, of)] : Tensor();
  };
  w.q_bias = bias(kOfQ);
  w.k_bias = bias(kOfK);
  w.v_bias = bias(kOfV);
  w.o_bias = bias(kOfO);
  if (c.sinks) w.sinks = in[place_of_sinks(c)];
  return w;
}

nn::SelfAttentionShape shape_of(const Case& c) {
  return {c.heads, c.key_heads, c.dim, c.gated, {c.turned, kBase}, kEps, c.scale, c.window};
}

Block block_of(const Case& c) {
  const double size = 1.5 / std::sqrt(static_cast<double>(c.width));
  const Shape x{c.batch, c.tokens, c.width};
  const std::int64_t queries = c.heads * c.dim, keys = c.key_heads * c.dim;
  const std::int64_t asked = c.gated ? 2 * queries : queries;
  Block block{"self_attention",
              {{"x", x},
               {"q", {asked, c.width}, size},
               {"k", {keys, c.width}, size},
               {"v", {keys, c.width}, size},
               {"o", {c.width, queries}, 1.5 / std::sqrt(static_cast<double>(queries))}},
              {x},
              [c](const Arrays& in, const Blur& blur) { return attention_in_double(c, in, blur); },
              [c](Tape& tape, const std::vector<Tensor>& in) {
                return std::vector<Tensor>{
                    nn::self_attention(tape, in[kX], weights_of(c, in), shape_of(c))};
              }};
  if (c.normed) {
    block.inputs.insert(block.inputs.end(),
                        {{"q_norm", {c.dim}, 0.5, 1}, {"k_norm", {c.dim}, 0.5, 1}});
  }
  const auto bias = [&](unsigned of, const char* name, std::int64_t size) {
    if ((c.biases & of) != 0) block.inputs.push_back({name, {size}, 0.5});
  };
  bias(kOfQ, "q_bias", asked);
  bias(kOfK, "k_bias", keys);
  bias(kOfV, "v_bias", keys);
  bias(kOfO, "o_bias", c.width);
  if (c.sinks) block.inputs.push_back({"sinks", {c.heads}, 1});
  return block;
}

class SelfAttention : public Blocks {
 protected:
  void in_pieces(const Case& c, bool ring);
  Tensor places(std::int64_t rows, std::int64_t capacity) {
    std::vector<std::int32_t> numbers(place(capacity));
    for (std::int64_t p = 0; p < capacity; ++p)
      numbers[place(p)] = static_cast<std::int32_t>(p % rows);
    const Tensor t = encoder().empty({capacity}, DType::kI32);
    encoder().upload(numbers.data(), t.bytes(), t);
    return t;
  }
};

TEST_P(SelfAttention, EveryNumbersGradient) {
  check_every_number(block_of({2, 5, 6, 4, 2, 6, 4}));
  check_every_number(block_of({1, 3, 5, 3, 1, 4, 4}));
  check_every_number(block_of({1, 3, 4, 2, 2, 4, 0}));  // without positions
  check_every_number(block_of({1, 4, 5, 2, 1, 4, 4, false}));
  check_every_number(block_of({1, 3, 5, 2, 1, 4, 2, true, kAll}));
  check_every_number(block_of({1, 3, 5, 2, 1, 4, 4, false, kOfQ | kOfK | kOfV, false}));
  check_every_number(block_of({1, 3, 5, 2, 1, 4, 4, false, kOfO}));
  check_every_number(block_of({1, 4, 5, 2, 1, 4, 4, false, kOfV, true, 2, 0, true}));  // sinks
  check_every_number(block_of({1, 4, 5, 2, 1, 4, 4, false, kNone, false}));        // without norms
  check_every_number(block_of({2, 5, 5, 2, 1, 4, 4, true, kNone, true, 2, 0.3}));  // of a window
}

TEST_P(SelfAttention, WideHeads) {
  const Case wide{1, 66, 16, 4, 2, 256, 64};
  check_directions(block_of(wide), DType::kF32);
  check_directions(block_of(wide), DType::kBF16);
}

MT_ON_EVERY_BACKEND(SelfAttention);

void SelfAttention::in_pieces(const Case& c, bool ring) {
  const Block block = block_of(c);
  Noise noise(7);
  std::vector<Tensor> in;
  for (const Input& input : block.inputs) {
    std::vector<double> values =
        random_values(noise, *element_count(input.shape), DType::kF32, input.size);
    for (double& v : values) v += input.around;
    in.push_back(upload(values, input.shape, DType::kF32));
  }
  const nn::SelfAttentionWeights w = weights_of(c, in);
  const nn::SelfAttentionShape shape = shape_of(c);
  Tape tape(encoder());
  const std::vector<double> whole = download(nn::self_attention(tape, in[kX], w, shape));

  const Shape room{c.batch, 20, c.key_heads, c.dim};
  nn::SelfAttentionPast cache{nn::Mode::kPrefill, encoder().empty(room, DType::kF32),
                              encoder().empty(room, DType::kF32)};
  if (ring) {
    cache.ring = true;
    cache.keys = encoder().empty({c.batch, c.window, c.key_heads, c.dim}, DType::kF32);
    cache.values = encoder().empty_like(cache.keys);
    if (c.window > 1) cache.places = places(c.window - 1, 20);
  }
  std::vector<double> pieces(whole.size());
  const auto feed = [&](std::int64_t from, std::int64_t to) {
    const Tensor part = encoder().contiguous(in[kX].slice(1, from, to));
    const std::vector<double> y = download(nn::self_attention(tape, part, w, shape, cache));
    for (std::size_t i = 0; i < y.size(); ++i) {
      const std::size_t row = i / place(c.width), count = place(to - from);
      const std::size_t token = row / count * place(c.tokens) + place(from) + row % count;
      pieces[token * place(c.width) + i % place(c.width)] = y[i];
    }
  };
  feed(0, 5);
  cache.start = 5;
  feed(5, 11);
  cache.mode = nn::Mode::kStep;
  cache.start = 0;
  cache.lengths = encoder().full({2}, DType::kI32, 11);
  feed(11, 12);
  cache.lengths = encoder().full({2}, DType::kI32, 12);
  feed(12, 13);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    ASSERT_NEAR(pieces[i], whole[i], 1e-5 * (1 + std::abs(whole[i]))) << i;
  }

  const Tensor watched = tape.watch(in[kX].slice(1, 0, 1));
  expect_error(Errc::kNoGradient, "NoGrad",
               [&] { nn::self_attention(tape, watched, w, shape, cache); });
}

// Tokens that come in pieces, through a cache, are as good as all at once.
TEST_P(SelfAttention, TokensInPieces) {
  for (const Case& c : {Case{2, 13, 16, 4, 2, 8, 4, true, kAll},
                        Case{2, 13, 16, 4, 2, 8, 4, false, kNone, false, 3, 0.5}}) {
    in_pieces(c, false);
  }
  for (const std::int64_t window : {1, 2, 3, 5, 8, 12, 13}) {  // rings, around once and more
    const Case c{2, 13, 16, 4, 2, 8, 4, true, kOfK, true, window, 0, window % 2 == 0};
    in_pieces(c, false);
    in_pieces(c, true);
  }
}

TEST(SelfAttentionCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({1, 3, 8});
  const nn::SelfAttentionWeights good{Tensor::meta({32, 8}), Tensor::meta({8, 8}),
                                      Tensor::meta({8, 8}),  Tensor::meta({8, 16}),
                                      Tensor::meta({4}),     Tensor::meta({4})};
  const nn::SelfAttentionShape shape{4, 2, 4, true, {2}};
  EXPECT_FALSE(nn::self_attention_check(x, good, shape));
  const auto with = [&](auto set) {
    nn::SelfAttentionWeights w = good;
    set(w);
    return nn::self_attention_check(x, w, shape);
  };
  expect_refused({
      {"rank", nn::self_attention_check(Tensor::meta({8}), good, shape), Errc::kShape, "x must be"},
      {"heads", nn::self_attention_check(x, good, {4, 3, 4, true, {2}}), Errc::kArgument,
       "got 4 and 3"},
      {"odd", nn::self_attention_check(x, good, {4, 2, 4, true, {3}}), Errc::kArgument,
       "rope.dims"},
      {"wide", nn::self_attention_check(x, good, {4, 2, 4, true, {6}}), Errc::kArgument,
       "0 to head_dim 4"},
      {"q", with([](auto& w) { w.q = Tensor::meta({16, 8}); }), Errc::kShape, "q must be [32, 8]"},
      {"v", with([](auto& w) { w.v = {}; }), Errc::kArgument, "v must be given"},
      {"norm", with([](auto& w) { w.k_norm = Tensor::meta({8}); }), Errc::kShape,
       "k_norm must be [4]"},
      {"one norm", with([](auto& w) { w.q_norm = {}; }), Errc::kArgument,
       "k_norm must not be given without q_norm"},
      {"window", nn::self_attention_check(x, good, {4, 2, 4, true, {2}, 1e-6F, 0, -1}),
       Errc::kArgument, "window must be at least 0, got -1"},
      {"type", with([](auto& w) { w.o = Tensor::meta({8, 16}, DType::kBF16); }), Errc::kDType,
       "o must be f32"},
      {"sinks", with([](auto& w) { w.sinks = Tensor::meta({3}); }), Errc::kShape,
       "sinks must be [4]"},
      {"bias", with([](auto& w) { w.q_bias = Tensor::meta({31}); }), Errc::kShape,
       "q_bias must be [32]"},
  });
  nn::SelfAttentionShape gained = shape;
  gained.rope.gain = Tensor::meta({3});
  const auto cached = [&](auto set, nn::Mode mode = nn::Mode::kPrefill,
                          const nn::SelfAttentionShape& of = {4, 2, 4, true, {2}}) {
    nn::SelfAttentionPast cache{mode, Tensor::meta({1, 5, 2, 4}), Tensor::meta({1, 5, 2, 4})};
    set(cache);
    return nn::self_attention_check(x, good, of, cache);
  };
  EXPECT_FALSE(cached([](auto& cache) { cache.start = 2; }));
  const auto step = nn::Mode::kStep;
  const auto lengths = Tensor::meta({1}, DType::kI32);
  expect_refused({
      {"gain", nn::self_attention_check(x, good, gained), Errc::kShape, "rope.gain must be [4]"},
      {"train", cached([](auto&) {}, nn::Mode::kTrain), Errc::kArgument,
       "the cache's keys must not be given in training"},
      {"keys", cached([](auto& cache) { cache.keys = Tensor::meta({2, 5, 2, 4}); }), Errc::kShape,
       "the cache's keys must be [1, any, 2, 4]"},
      {"values", cached([](auto& cache) { cache.values = Tensor::meta({1, 6, 2, 4}); }),
       Errc::kShape, "the cache's values must be [1, 5, 2, 4]"},
      {"full", cached([](auto& cache) { cache.start = 3; }), Errc::kArgument,
       "no room for 3 after 3"},
      {"before", cached([](auto& cache) { cache.start = -1; }), Errc::kArgument, "after -1"},
      {"start", cached([](auto& cache) { cache.start = 1; }, step), Errc::kArgument,
       "a step has lengths and no start"},
      {"both", cached([&](auto& cache) { cache.lengths = lengths; }), Errc::kArgument,
       "a prefill has a start and no lengths"},
      {"no lengths", cached([](auto&) {}, step), Errc::kArgument, "lengths must be given"},
      {"lengths", cached([](auto& cache) { cache.lengths = Tensor::meta({1}); }, step),
       Errc::kDType, "the cache's lengths must be i32"},
  });
  const nn::SelfAttentionShape near{4, 2, 4, true, {2}, 1e-6F, 0, 5};
  const auto places = Tensor::meta({9}, DType::kI32);
  const auto ring = [&](auto set, nn::Mode mode = nn::Mode::kPrefill, std::int64_t window = 5) {
    nn::SelfAttentionShape of = near;
    of.window = window;
    return cached(
        [&](auto& cache) {
          cache.ring = true;
          cache.places = places;
          set(cache);
        },
        mode, of);
  };
  EXPECT_FALSE(ring([](auto& cache) { cache.start = 7; }));
  expect_refused({
      {"no window", ring([](auto&) {}, nn::Mode::kPrefill, 0), Errc::kArgument,
       "at most as many rows as the window 0, got 5"},
      {"small window", ring([](auto&) {}, nn::Mode::kPrefill, 4), Errc::kArgument,
       "as the window 4, got 5"},
      {"tokens", ring([&](auto& cache) { cache.lengths = lengths; }, step), Errc::kArgument,
       "one token a step, got 3"},
      {"no places", ring([](auto& cache) { cache.places = {}; }), Errc::kArgument,
       "places must be given"},
      {"their type", ring([](auto& cache) { cache.places = Tensor::meta({9}); }), Errc::kDType,
       "the ring's places must be i32"},
      {"room",
       ring(
           [](auto& cache) {
             cache.places = {};
             cache.start = 3;
           },
           nn::Mode::kPrefill, 9),
       Errc::kArgument, "no room for 3 after 3"},
  });
}

}  // namespace
}  // namespace mlxtape::test
