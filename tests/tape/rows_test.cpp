// Gradients by rows on the tape: whatever order they come in and whatever else comes, the sum is the one that
// dense gradients give.
#include "mlxtape/tape/rows.h"

#include <functional>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/embedding.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/reduce.h"
#include "mlxtape/ops/sum_rows.h"
#include "mlxtape/tape/functions.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::EmbeddingGrad;
using Values = std::vector<double>;

class RowsOnTape : public OnDevice {
 protected:
  static constexpr std::int64_t kRows = 6;
  Tensor table(DType dtype = DType::kF32) {
    return upload({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {kRows, 2}, dtype);
  }
  Tensor ids(const Values& v) {
    return upload(v, {static_cast<std::int64_t>(v.size())}, DType::kI32);
  }
  // Walks back from the rows that ids name with a gradient of ones.
  void walk(Tape& tape, const Tensor& w, const Values& v,
            EmbeddingGrad how = EmbeddingGrad::kRows) {
    const Tensor y = ops::embedding(tape, w, ids(v), how);
    tape.backward(y, encoder().full(y.shape(), y.dtype(), 1));
  }
  void expect_rows(const RowGrad& grad, const Values& want_ids, const Values& want_rows) {
    EXPECT_EQ(download(grad.ids), want_ids);
    EXPECT_EQ(download(grad.rows), want_rows);
  }
  std::size_t in_use() { return encoder().device().memory().stats().current; }
};

TEST_P(RowsOnTape, RowsStayRowsUntilADenseOneIsAskedFor) {
  Tape tape(encoder());
  const Tensor w = tape.watch(table());
  EXPECT_FALSE(tape.has_row_grad(w));
  walk(tape, w, {4, 1, 4});
  ASSERT_TRUE(tape.has_row_grad(w));
  EXPECT_TRUE(tape.has_grad(w));
  expect_rows(tape.row_grad(w), {1, 4, -1}, {1, 1, 2, 2, 0, 0});
  const Values dense{0, 0, 1, 1, 0, 0, 0, 0, 2, 2, 0, 0};
  EXPECT_EQ(download(tape.grad(w)), dense);
  EXPECT_TRUE(tape.has_row_grad(w));  // both can be had
  EXPECT_EQ(tape.grad(w).buffer().address(), tape.grad(w).buffer().address());
  expect_rows(tape.row_grad(w), {1, 4, -1}, {1, 1, 2, 2, 0, 0});
}

TEST_P(RowsOnTape, UsesAndWalksAddUp) {
  Tape tape(encoder());
  const Tensor w = tape.watch(table());
  const Tensor a = ops::embedding(tape, w, ids({0, 3})), b = ops::embedding(tape, w, ids({3, 5}));
  const Tensor ones = encoder().full({2, 2}, DType::kF32, 1);
  tape.backward({{a, ones}, {b, ones}});
  expect_rows(tape.row_grad(w), {0, 3, 5, -1}, {1, 1, 2, 2, 1, 1, 0, 0});
  const RowGrad held = tape.row_grad(w);
  const Tensor dense = tape.grad(w);
  for (int i = 0; i < 4; ++i) walk(tape, w, {5, 2});
  // No more rows than the table has.
  expect_rows(tape.row_grad(w), {0, 2, 3, 5, -1, -1}, {1, 1, 4, 4, 2, 2, 5, 5, 0, 0, 0, 0});
  EXPECT_EQ(download(tape.grad(w)), (Values{1, 1, 0, 0, 4, 4, 2, 2, 0, 0, 5, 5}));
  expect_rows(held, {0, 3, 5, -1}, {1, 1, 2, 2, 1, 1, 0, 0});  // not under its owner
  EXPECT_EQ(download(dense), (Values{1, 1, 0, 0, 0, 0, 2, 2, 0, 0, 1, 1}));
  tape.clear_grads();
  EXPECT_FALSE(tape.has_row_grad(w));
  EXPECT_FALSE(tape.has_grad(w));
  EXPECT_EQ(download(tape.grad(w)), Values(12, 0.0));
  walk(tape, w, {0});
  expect_rows(tape.row_grad(w), {0}, {1, 1});
}

TEST_P(RowsOnTape, ADenseOneMakesThemDense) {
  const Values want{1, 1, 0, 0, 2, 2, 0, 0, 0, 0, 1, 1};
  for (int order = 0; order < 8; ++order) {
    Tape tape(encoder());
    const Tensor w = tape.watch(table());
    const auto how = [&](int i) {
      return order >> i & 1 ? EmbeddingGrad::kDense : EmbeddingGrad::kRows;
    };
    walk(tape, w, {0, 2}, how(0));
    const Tensor held = order >= 4 ? tape.grad(w) : upload({0}, {1}, DType::kF32);
    const Values before = download(held);
    walk(tape, w, {5, 2}, how(1));
    EXPECT_EQ(tape.has_row_grad(w), (order & 3) == 0);
    EXPECT_EQ(download(tape.grad(w)), want) << order;
    EXPECT_EQ(download(held), before);
  }
}

// A head that shares its weights with the table: logits = table[ids] · tableᵀ.
TEST_P(RowsOnTape, TiedEmbeddings) {
  Values grads[2];
  for (const EmbeddingGrad how : {EmbeddingGrad::kRows, EmbeddingGrad::kDense}) {
    Tape tape(encoder());
    const Tensor w = tape.watch(table());
    const Tensor h = ops::embedding(tape, w, ids({1, 4, 1}), how);
    const Tensor y = ops::matmul(tape, h, ops::transpose(tape, w));
    tape.backward(ops::sum(tape, y));
    EXPECT_FALSE(tape.has_row_grad(w));
    grads[how == EmbeddingGrad::kRows ? 0 : 1] = download(tape.grad(w));
  }
  EXPECT_EQ(grads[0], grads[1]);
}

// What was computed gets a dense one, for its own backward function.
TEST_P(RowsOnTape, OfSomethingComputed) {
  Tape tape(encoder());
  const Tensor w = tape.watch(table());
  const Tensor half = tape.watch(ops::multiply(tape, w, encoder().full({1}, DType::kF32, 0.5)));
  const Tensor a = ops::embedding(tape, half, ids({1, 1})),
               b = ops::embedding(tape, half, ids({5}));
  tape.backward(ops::add(tape, ops::sum(tape, a), ops::sum(tape, b)));
  EXPECT_FALSE(tape.has_row_grad(w));
  EXPECT_FALSE(tape.has_row_grad(half));
  EXPECT_EQ(download(tape.grad(half)), (Values{0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(download(tape.grad(w)), (Values{0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0.5, 0.5}));
}

TEST_P(RowsOnTape, SumsInTheTypeThatIsWatched) {
  for (const auto& [sum, again] : {std::pair(DType::kF32, false), std::pair(DType::kBF16, false),
                                   std::pair(DType::kF32, true), std::pair(DType::kBF16, true)}) {
    Tape tape(encoder());
    const Tensor w = tape.watch(table(DType::kBF16), sum);
    const auto look = [&](Tape& inner, const std::vector<Tensor>& in) {
      return std::vector<Tensor>{ops::embedding(inner, in[0], ids({2, 2, 2}))};
    };
    const Tensor y = again ? checkpoint(tape, look, {w})[0] : look(tape, {w})[0];
    // 256 + 1 + 1: bf16 has no 257.
    tape.backward(y, upload({256, 256, 1, 1, 1, 1}, {3, 2}, DType::kBF16));
    walk(tape, w, {2});
    EXPECT_EQ(tape.row_grad(w).rows.dtype(), sum);
    EXPECT_EQ(tape.grad(w).dtype(), sum);
    EXPECT_EQ(download(tape.row_grad(w).rows)[0], sum == DType::kF32 ? 259 : 260);
    expect_error(Errc::kArgument, "chosen before a walk", [&] { tape.watch(w, DType::kF16); });
    tape.clear_grads();
    EXPECT_NO_THROW(tape.watch(w, DType::kF16));
  }
}

TEST_P(RowsOnTape, RetainedAndCheckpointed) {
  Tape tape(encoder());
  const Tensor w = tape.watch(table(), DType::kF32);
  const Tensor y = ops::sum(tape, ops::embedding(tape, w, ids({3, 0})));
  tape.backward(y, {.retain = true});
  tape.backward(y);
  expect_rows(tape.row_grad(w), {0, 3, -1, -1}, {2, 2, 2, 2, 0, 0, 0, 0});
  tape.clear_grads();

  const Tensor named = ids({3, 0, 3});
  const auto look = [&](Tape& inner, const std::vector<Tensor>& in) {
    return std::vector<Tensor>{ops::embedding(inner, in[0], named)};
  };
  const Tensor z = checkpoint(tape, look, {w})[0];
  tape.backward(ops::sum(tape, ops::multiply(tape, z, z)));
  ASSERT_TRUE(tape.has_row_grad(w));
  expect_rows(tape.row_grad(w), {0, 3, -1}, {2, 4, 28, 32, 0, 0});
  // Of something computed outside, by a function that only captures it.
  tape.clear_grads();
  const Tensor twice = ops::add(tape, w, w);
  const auto captured = [&](Tape& inner, const std::vector<Tensor>&) {
    return std::vector<Tensor>{ops::embedding(inner, twice, named)};
  };
  tape.backward(ops::sum(tape, checkpoint(tape, captured, {w})[0]));
  EXPECT_FALSE(tape.has_row_grad(w));
  EXPECT_EQ(download(tape.grad(w)), (Values{2, 2, 0, 0, 0, 0, 4, 4, 0, 0, 0, 0}));

  // A 16-bit table whose outer sum is f32.
  const Tensor v = tape.watch(table(DType::kBF16), DType::kF32);
  tape.backward(ops::sum(tape, checkpoint(tape, look, {v})[0]));
  EXPECT_EQ(tape.row_grad(v).rows.dtype(), DType::kF32);
  expect_rows(tape.row_grad(v), {0, 3, -1}, {1, 1, 2, 2, 0, 0});
}

TEST_P(RowsOnTape, ValueAndGradGivesDenseOnes) {
  const auto fn = [&](Tape& tape, const std::vector<Tensor>& in) {
    return ops::sum(tape, ops::embedding(tape, in[0], ids({1, 1})));
  };
  const auto [value, grads] = value_and_grad(fn)(encoder(), {table()});
  EXPECT_EQ(download(value), Values{14});
  EXPECT_EQ(download(grads[0]), (Values{0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0}));
}

// Nothing of the table's size is held, and the report counts what is.
TEST_P(RowsOnTape, MemoryIsThatOfTheRows) {
  const Tensor big = encoder().zeros({100000, 16}, DType::kF32);
  const std::size_t before = in_use();
  {
    Tape tape(encoder());
    const Tensor w = tape.watch(big);
    walk(tape, w, {7, 99999});
    EXPECT_LT(in_use() - before, 100000U);
    const std::size_t held = tape.report().grad_bytes;
    EXPECT_GE(held, tape.row_grad(w).rows.bytes() + tape.row_grad(w).ids.bytes());
    EXPECT_LT(held, 100000U);
    tape.grad(w);
    EXPECT_GE(tape.report().grad_bytes, held + big.bytes());
    tape.clear_grads();
    EXPECT_EQ(tape.report().grad_bytes, 0U);
  }
  EXPECT_EQ(in_use(), before);
}

// Uses in any order, of any kind, over several walks, against dense gradients alone.
TEST_P(RowsOnTape, RandomUses) {
  Noise noise(11);
  for (int round = 0; round < 60; ++round) {
    Tape by_rows(encoder()), dense(encoder());
    const Tensor start = table();
    const Tensor a = by_rows.watch(start), b = dense.watch(start);
    bool all_rows = true, any = false;
    for (int walks = 0; walks < 3; ++walks) {
      std::vector<std::pair<Tensor, Tensor>> seeds_a, seeds_b;
      for (std::int64_t use = noise.below(4); use >= 0; --use) {
        Values v;
        for (std::int64_t n = noise.below(6); n >= 0; --n) {
          v.push_back(static_cast<double>(noise.below(kRows + 2) - 1));
        }
        const bool rows = noise.below(4) != 0;
        all_rows &= rows;
        any = true;
        const bool wrapped = noise.below(4) == 0;
        const Tensor named = ids(v);
        const auto look = [=](Tape& inner, const std::vector<Tensor>& in) {
          return std::vector<Tensor>{ops::embedding(
              inner, in[0], named, rows ? EmbeddingGrad::kRows : EmbeddingGrad::kDense)};
        };
        const Tensor y = wrapped ? checkpoint(by_rows, look, {a})[0] : look(by_rows, {a})[0];
        const Tensor z = ops::embedding(dense, b, named, EmbeddingGrad::kDense);
        Values dy;
        for (std::int64_t i = 0; i < y.size(); ++i)
          dy.push_back(static_cast<double>(noise.below(9)));
        seeds_a.emplace_back(y, upload(dy, y.shape(), DType::kF32));
        seeds_b.emplace_back(z, upload(dy, z.shape(), DType::kF32));
      }
      by_rows.backward(seeds_a);
      dense.backward(seeds_b);
      if (noise.below(2) == 0) {
        EXPECT_EQ(download(by_rows.grad(a)), download(dense.grad(b)));
      }
      if (noise.below(5) == 0) {
        by_rows.clear_grads();
        dense.clear_grads();
        all_rows = true;
        any = false;
      }
    }
    EXPECT_EQ(by_rows.has_row_grad(a), all_rows && any);
    EXPECT_EQ(download(by_rows.grad(a)), download(dense.grad(b)));
  }
}

// An op whose backward function gives whatever it was told to.
RowGrad given;
void given_backward(Pullback& pullback) { pullback.give_rows(0, given); }

// An op need not ask for the type of the sum: the tape keeps the first rows in it as well.
TEST_P(RowsOnTape, RowsOfAnotherTypeBecomeThatOfTheSum) {
  for (const DType sum : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType came : {DType::kF32, DType::kF16, DType::kBF16}) {
      given = {ids({1, 4}), upload({1, 2, 3, 4}, {2, 2}, came), ops::add_row_grad,
               ops::merge_row_grads};
      Tape tape(encoder());
      const Tensor w = tape.watch(table(DType::kBF16), sum);
      Tensor y = encoder().zeros({1}, DType::kF32);
      tape.record("given", given_backward, {w}, {&y}, {});
      tape.backward(y);
      EXPECT_EQ(tape.row_grad(w).rows.dtype(), sum) << name_of(came);
      EXPECT_EQ(tape.grad(w).dtype(), sum) << name_of(came);
      expect_rows(tape.row_grad(w), {1, 4}, {1, 2, 3, 4});
      EXPECT_EQ(download(tape.grad(w)), (Values{0, 0, 1, 2, 0, 0, 0, 0, 3, 4, 0, 0}));
    }
  }
  given = {};
}

// ---- misuse ----

void twice_backward(Pullback& pullback) {
  pullback.give_rows(0, given);
  pullback.give_rows(0, given);
}

TEST_P(RowsOnTape, SaysWhatIsWrong) {
  Tape tape(encoder());
  const Tensor w = tape.watch(table());
  expect_error(Errc::kArgument, "got none for [6, 2]", [&] { tape.row_grad(w); });
  walk(tape, w, {1}, EmbeddingGrad::kDense);
  expect_error(Errc::kArgument, "got a dense one for [6, 2]", [&] { tape.row_grad(w); });
  expect_error(Errc::kArgument, "is not kept", [&] { tape.row_grad(table()); });
  EXPECT_FALSE(tape.has_row_grad(table()));

  const auto give = [&](const Tensor& id, const Tensor& rows, const Tensor& to,
                        BackwardFn fn = given_backward) {
    given = {id, rows, ops::add_row_grad, ops::merge_row_grads};
    Tape other(encoder());
    const Tensor x = other.watch(to);
    Tensor y = encoder().zeros({1}, DType::kF32);
    other.record("bad", fn, {x}, {&y}, {});
    other.backward(y);
  };
  const Tensor two = ids({1, 2}), rows = encoder().zeros({2, 2}, DType::kF32);
  EXPECT_NO_THROW(give(two, rows, table()));
  expect_error(Errc::kShape, "ids [n] i32, got [2, 1]",
               [&] { give(two.reshape({2, 1}), rows, table()); });
  expect_error(Errc::kDType, "ids [n] i32, got [2] u32",
               [&] { give(encoder().zeros({2}, DType::kU32), rows, table()); });
  expect_error(Errc::kShape, "of its shape [6, 2] for [2] ids, got [2, 3]",
               [&] { give(two, encoder().zeros({2, 3}, DType::kF32), table()); });
  expect_error(Errc::kShape, "of its shape [] for [2] ids",
               [&] { give(two, rows, encoder().zeros({}, DType::kF32)); });
  expect_error(Errc::kDType, "f32, f16 or bf16, got i32",
               [&] { give(two, encoder().zeros({2, 2}, DType::kI32), table()); });
  expect_error(Errc::kDevice, "must be on", [&] { give(two, Tensor::meta({2, 2}), table()); });
  expect_error(Errc::kArgument, "got input 0 twice",
               [&] { give(two, rows, table(), twice_backward); });
  given = {two, rows};
  expect_error(Errc::kArgument, "got one without how", [&] {
    Tape other(encoder());
    const Tensor x = other.watch(table());
    Tensor y = encoder().zeros({1}, DType::kF32);
    other.record("bad", given_backward, {x}, {&y}, {});
    other.backward(y);
  });
  given = {};
}

MT_ON_EVERY_BACKEND(RowsOnTape);

}  // namespace
}  // namespace mlxtape::test
