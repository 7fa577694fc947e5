#include "mlxtape/core/tensor.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>
#include <thread>
#include <vector>

#include "mlxtape/core/encoder.h"

namespace mlxtape {
namespace {

Tensor counting(const Shape& shape) {
  const Tensor t = Device::cpu().empty(shape, DType::kI32);
  const auto values = t.host<std::int32_t>();
  std::iota(values.begin(), values.end(), 0);
  return t;
}

Errc code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.code();
  }
  ADD_FAILURE() << "was allowed";
  return Errc::kIo;
}

TEST(Tensor, ViewsReadTheRightElements) {
  const Tensor t = counting({3, 4});
  EXPECT_EQ(t.select(0, 2).host<std::int32_t>()[1], 9);
  EXPECT_EQ(*static_cast<std::int32_t*>(t.slice(1, 1, 4, 2).select(0, 1).data()), 5);
  EXPECT_EQ(t.transpose({1, 0}).strides(), (Strides{1, 4}));
  EXPECT_EQ(t.reshape({2, 6}).select(0, 1).host<std::int32_t>()[0], 6);
  const Tensor wide = t.slice(0, 1, 2).broadcast_to({5, 4});
  EXPECT_EQ(wide.strides(), (Strides{0, 1}));
  EXPECT_EQ(t.slice(1, 0, 3, 2).shape(), (Shape{3, 2}));  // the step does not divide it
  EXPECT_EQ(t.slice(0, 1, 1).size(), 0);
  EXPECT_EQ(t.slice(0, 3, 3).data(), nullptr);
}

TEST(Tensor, AViewOfAViewKeepsItsOffset) {
  const Tensor t = counting({6, 4});
  const Tensor inner = t.slice(0, 2, 6).slice(0, 1, 3).select(0, 1);
  EXPECT_EQ(inner.host<std::int32_t>()[0], 16);
}

TEST(Tensor, NoViewReachesOutside) {
  const Buffer b = Device::cpu().allocate(40);  // 10 floats
  const auto make = [&](Shape shape, Strides strides, std::int64_t offset) {
    return [=] {
      Tensor(b, DType::kF32, shape, strides, offset);
    };
  };
  EXPECT_NO_THROW(make({10}, {1}, 0)());
  EXPECT_NO_THROW(make({4}, {-3}, 9)());
  EXPECT_EQ(code_of(make({11}, {1}, 0)), Errc::kShape);
  EXPECT_EQ(code_of(make({10}, {1}, 1)), Errc::kShape);
  EXPECT_EQ(code_of(make({4}, {-3}, 8)), Errc::kShape);
  EXPECT_EQ(code_of(make({2, 2}, {1}, 0)), Errc::kShape);
  EXPECT_EQ(code_of(make({std::int64_t{1} << 40, std::int64_t{1} << 40}, {0, 0}, 0)), Errc::kShape);
  EXPECT_EQ(code_of(make({3}, {std::int64_t{1} << 62}, 0)), Errc::kShape);
  EXPECT_EQ(code_of(make({-1}, {1}, 0)), Errc::kShape);
  EXPECT_NO_THROW(make({0, 100}, {100, 1}, 5)());
}

TEST(Tensor, MisuseIsAClearError) {
  const Tensor t = counting({3, 4});
  EXPECT_EQ(code_of([&] { t.host<float>(); }), Errc::kDType);
  EXPECT_EQ(code_of([&] { t.transpose({1, 0}).host<std::int32_t>(); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.reshape({5}); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.transpose({1, 0}).reshape({12}); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.transpose({0, 0}); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.transpose({0}); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.slice(0, 2, 1); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.slice(0, 0, 4); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.slice(0, 0, 3, 0); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.slice(2, 0, 1); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.select(1, 4); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { t.broadcast_to({3, 5}); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { Tensor::meta({2}).host<float>(); }), Errc::kShape);
  EXPECT_EQ(code_of([&] { Device::cpu().zeros({std::int64_t{1} << 61, 4}, DType::kF64); }),
            Errc::kShape);
  EXPECT_EQ(code_of([&] { Device::cpu().zeros({std::int64_t{1} << 55}, DType::kF32); }),
            Errc::kOutOfMemory);
  EXPECT_NO_THROW(Device::cpu().zeros({4}, DType::kF32));  // and the device goes on
}

TEST(Tensor, ContiguousCopiesAnyView) {
  const auto encoder = Device::cpu().make_encoder();
  EXPECT_TRUE(rc::check("contiguous keeps every element", [&] {
    Shape shape;
    const int rank = *rc::gen::inRange(1, 5);
    for (int i = 0; i < rank; ++i) shape.push_back(*rc::gen::inRange(1, 6));
    Tensor view = counting(shape);
    const auto axis = *rc::gen::inRange<std::int64_t>(0, rank);
    const auto start = *rc::gen::inRange<std::int64_t>(0, shape[axis]);
    const auto stop = *rc::gen::inRange<std::int64_t>(start, shape[axis] + 1);
    view = view.slice(axis, start, stop, *rc::gen::inRange(1, 3));
    if (rank == 3 && *rc::gen::arbitrary<bool>()) view = view.transpose({2, 0, 1});
    const Tensor copy = encoder->contiguous(view);
    RC_ASSERT(copy.is_contiguous());
    RC_ASSERT(copy.shape() == view.shape());
    const auto got = copy.host<std::int32_t>();
    for (std::int64_t i = 0; i < copy.size(); ++i) {
      std::int64_t rest = i, at = view.offset();
      for (std::int64_t a = view.rank() - 1; a >= 0; --a) {
        at += rest % view.dim(a) * view.strides()[a];
        rest /= view.dim(a);
      }
      RC_ASSERT(got[static_cast<std::size_t>(i)] == at);  // counting() holds each element's place
    }
  }));
}

// More than one task copies.
TEST(Tensor, ContiguousCopiesLargeViews) {
  const auto encoder = Device::cpu().make_encoder();
  const Tensor copy = encoder->contiguous(counting({700, 50}).transpose({1, 0}));
  const auto got = copy.host<std::int32_t>();
  for (std::int32_t i = 0; i < 35000; ++i) {
    ASSERT_EQ(got[static_cast<std::size_t>(i)], i % 700 * 50 + i / 700) << i;
  }
}

TEST(Tensor, ContiguousForEveryElementSize) {
  const auto encoder = Device::cpu().make_encoder();
  for (const DType dtype : {DType::kU8, DType::kF16, DType::kF32, DType::kF64}) {
    const Tensor t = Device::cpu().zeros({5, 7}, dtype);
    visit(dtype, [&](auto zero) {
      using T = decltype(zero);
      const auto values = t.host<T>();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = T(static_cast<float>(i));
      const Tensor turned = encoder->contiguous(t.transpose({1, 0}));
      EXPECT_EQ(static_cast<double>(turned.host<T>()[5 * 3 + 2]), 2 * 7 + 3) << name_of(dtype);
    });
  }
}

TEST(Tensor, CopiesOnManyThreads) {
  const Tensor t = counting({64});
  std::vector<std::thread> users;
  for (int i = 0; i < 4; ++i) {
    users.emplace_back([t] {
      for (int j = 0; j < 1000; ++j) {
        const Tensor part = Tensor(t).slice(0, 1, 60).reshape({59, 1});
        ASSERT_EQ(part.host<std::int32_t>()[3], 4);
      }
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_EQ(t.buffer().owners(), 1);
}

}  // namespace
}  // namespace mlxtape
