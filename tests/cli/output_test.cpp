#include "cli/output.h"

#include <gtest/gtest.h>

namespace mlxtape::test {
namespace {

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
