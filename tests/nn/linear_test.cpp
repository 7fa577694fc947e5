#include "mlxtape/nn/linear.h"

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

class Linear : public OnDevice {};

TEST_P(Linear, LeadingAxesStay) {
  Tape tape(encoder());
  const Tensor x = upload({1, 2, 3, 4, 5, 6}, {3, 1, 2}, DType::kF32);
  const Tensor w = upload({1, 0, 0, 1, 1, 1, 2, -1}, {4, 2}, DType::kF32);
  const Tensor y = nn::linear(tape, x, w);
  EXPECT_EQ(to_string(y.shape()), "[3, 1, 4]");
  EXPECT_EQ(download(y), (std::vector<double>{1, 2, 3, 0, 3, 4, 7, 2, 5, 6, 11, 4}));
}

TEST_P(Linear, NothingAndWidthZero) {
  Tape tape(encoder());
  const Tensor none =
      nn::linear(tape, upload({}, {2, 0, 3}, DType::kF32), upload({1, 2, 3}, {1, 3}, DType::kF32));
  EXPECT_EQ(to_string(none.shape()), "[2, 0, 1]");
  const Tensor zeros =
      nn::linear(tape, upload({}, {2, 0}, DType::kF32), upload({}, {3, 0}, DType::kF32));
  EXPECT_EQ(download(zeros), std::vector<double>(6, 0));
}

MT_ON_EVERY_BACKEND(Linear);

TEST(SwigluNetworkCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({3, 8}), gate = Tensor::meta({5, 8}), down = Tensor::meta({8, 5});
  EXPECT_FALSE(nn::swiglu_network_check(x, {gate, gate, down}));
  expect_refused({
      {"scalar", nn::swiglu_network_check(Tensor::meta({}), {gate, gate, down}), Errc::kShape, "x"},
      {"gate", nn::swiglu_network_check(x, {down, gate, down}), Errc::kShape,
       "gate must be [any, 8]"},
      {"up", nn::swiglu_network_check(x, {gate, {}, down}), Errc::kArgument, "up must be given"},
      {"down", nn::swiglu_network_check(x, {gate, gate, gate}), Errc::kShape,
       "down must be [8, 5]"},
  });
}

TEST(LinearCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({3, 8});
  expect_refused({
      {"width", nn::linear_check(x, Tensor::meta({8, 3})), Errc::kShape, "got [8, 3] and [3, 8]"},
      {"rank", nn::linear_check(x, Tensor::meta({8})), Errc::kShape, "[out, in]"},
      {"scalar", nn::linear_check(Tensor::meta({}), Tensor::meta({1, 1})), Errc::kShape,
       "[out, in]"},
  });
}

}  // namespace
}  // namespace mlxtape::test
