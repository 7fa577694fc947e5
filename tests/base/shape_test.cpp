#include "mlxtape/base/shape.h"

#include <gtest/gtest.h>

#include <limits>

namespace mlxtape {
namespace {

constexpr std::int64_t kBig = std::int64_t{1} << 32;

TEST(Shape, CountsWithoutOverflow) {
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({3, 4}), 12);
  EXPECT_EQ(element_count({kBig, kBig / 2 - 1}), kBig * (kBig / 2 - 1));
  EXPECT_FALSE(element_count({kBig, kBig / 2}));
  EXPECT_FALSE(element_count({kBig, kBig, kBig}));
  EXPECT_EQ(element_count({kBig, kBig, 0}), 0);
  EXPECT_EQ(element_count({0, kBig, kBig}), 0);
  EXPECT_FALSE(element_count({2, -1}));
  EXPECT_FALSE(element_count({0, -1}));
}

TEST(Shape, HoldsEightDimensionsAndRefusesNine) {
  const Shape eight{1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_EQ(eight.rank(), 8);
  EXPECT_EQ(to_string(eight), "[1, 2, 3, 4, 5, 6, 7, 8]");
  EXPECT_THROW((Shape{1, 2, 3, 4, 5, 6, 7, 8, 9}), Error);
}

TEST(Shape, Strides) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Strides{12, 4, 1}));
  EXPECT_EQ(contiguous_strides({2, 0, 4}), (Strides{4, 4, 1}));
  EXPECT_EQ(contiguous_strides({}), Strides{});
}

TEST(Shape, Axes) {
  EXPECT_EQ(normal_axis(-1, 3), 2);
  EXPECT_EQ(normal_axis(0, 1), 0);
  EXPECT_FALSE(normal_axis(3, 3));
  EXPECT_FALSE(normal_axis(-4, 3));
  EXPECT_FALSE(normal_axis(0, 0));
}

TEST(Shape, Broadcast) {
  EXPECT_EQ(broadcast_shapes({3, 1}, {4}), (Shape{3, 4}));
  EXPECT_EQ(broadcast_shapes({}, {2, 2}), (Shape{2, 2}));
  EXPECT_EQ(broadcast_shapes({1, 5}, {0, 5}), (Shape{0, 5}));
  EXPECT_FALSE(broadcast_shapes({3}, {4}));
  EXPECT_FALSE(broadcast_shapes({0}, {2}));
}

}  // namespace
}  // namespace mlxtape
