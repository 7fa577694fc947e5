#include "cli/output.h"

#include <gtest/gtest.h>

namespace mlxtape::test {
namespace {

TEST(CliOutput, Sizes) {
  EXPECT_EQ(cli::human_bytes(0), "0 bytes");
  EXPECT_EQ(cli::human_bytes(1023), "1023 bytes");
  EXPECT_EQ(cli::human_bytes(1024), "1.00 KiB");
  EXPECT_EQ(cli::human_bytes(17.5 * 1024 * 1024), "17.5 MiB");
  EXPECT_EQ(cli::human_bytes(0x1p61), "2048.0 PiB");
  EXPECT_EQ(cli::human_count(999), "999");
  EXPECT_EQ(cli::human_count(1250000), "1.25 M");
  EXPECT_EQ(cli::human_count(79.7e9), "79.7 B");
  EXPECT_EQ(cli::human_time(-1), "0.0 s");
  EXPECT_EQ(cli::human_time(9.94), "9.9 s");
  EXPECT_EQ(cli::human_time(59.6), "1:00");
  EXPECT_EQ(cli::human_time(3723), "1:02:03");
}

TEST(CliOutput, Tables) {
  cli::Table table({"name", "size"}, {false, true});
  table.add({"α", "1"});
  table.add({"longer", "10"});
  table.add({"short"});
  EXPECT_EQ(table.text(),
            "name    size\n"
            "α          1\n"
            "longer    10\n"
            "short\n");
  cli::Facts facts;
  facts.add("a", "1");
  facts.add("bcd", "2");
  EXPECT_EQ(facts.text(), "a    1\nbcd  2\n");
}

}  // namespace
}  // namespace mlxtape::test
