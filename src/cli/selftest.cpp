// selftest: the ops' own tests, on the user's machine.
#include <gtest/gtest.h>
#include <CLI/CLI.hpp>

#include <memory>

#include "command.h"

namespace mlxtape::cli {

namespace {

void selftest(const std::string& filter) {
  testing::InitGoogleTest();
  testing::GTEST_FLAG(filter) = filter;
  const int status = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    called_wrongly("selftest: the filter must match a test, got '" + filter + "'");
  }
  if (status != 0) throw Exit{kFailed};
}

}  // namespace

void add_selftest(CLI::App& app, const Globals&) {
  CLI::App* command =
      add_command(app, "selftest",
                  "check every kernel on this machine against its formula in double precision.",
                  "Example:\n  mlxtape selftest --filter '*Softmax*'");
  command->group("This machine");
  const auto filter = std::make_shared<std::string>("*");
  command->add_option("--filter", *filter, "only these tests, e.g. '*Softmax*'")
      ->type_name("PATTERN");
  command->callback([filter] { selftest(*filter); });
}

}  // namespace mlxtape::cli
