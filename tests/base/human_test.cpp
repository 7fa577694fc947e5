#include "base/human.h"

#include <gtest/gtest.h>

namespace mlxtape::test {
namespace {

TEST(Human, Numbers) {
  EXPECT_EQ(human_bytes(0), "0 bytes");
  EXPECT_EQ(human_bytes(1023), "1023 bytes");
  EXPECT_EQ(human_bytes(1024), "1.00 KiB");
  EXPECT_EQ(human_bytes(17.5 * 1024 * 1024), "17.5 MiB");
  EXPECT_EQ(human_bytes(0x1p61), "2048.0 PiB");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(1250000), "1.25 M");
  EXPECT_EQ(human_count(79.7e9), "79.7 B");
  EXPECT_EQ(human_time(-1), "0.0 s");
  EXPECT_EQ(human_time(9.94), "9.9 s");
  EXPECT_EQ(human_time(59.6), "1:00");
  EXPECT_EQ(human_time(3723), "1:02:03");
}

}  // namespace
}  // namespace mlxtape::test
