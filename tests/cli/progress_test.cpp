#include "cli/progress.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <limits>
#include <string>
#include <thread>

namespace mlxtape::test {
namespace {

using cli::Progress;

// What is written to a file that is no terminal, or as if it were one.
std::string written(bool as_terminal, int columns, bool quiet, double first_after = 0.1,
                    double plain_first = 0.1, double plain_every = 0.1) {
  std::FILE* file = std::tmpfile();
  if (file == nullptr) return "no temporary file";
  cli::Globals globals;
  globals.quiet = quiet;
  Progress::Options options;
  options.to = file;
  options.as_terminal = as_terminal;
  options.columns = columns;
  options.first_after = first_after;
  options.plain_first = plain_first;
  options.plain_every = plain_every;
  {
    Progress progress("train", 100, globals, options);
    progress.at(1, "loss 9");  // too early to show
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    progress.at(50, "loss 1.5");
    progress.at(51, "loss 1.4");  // too early again
    progress.line("saved");
  }
  std::string text(4096, '\0');
  std::rewind(file);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST(CliProgress, PlainLines) {
  const std::string text = written(false, 0, false);
  EXPECT_EQ(text.find("train  50/100  "), 0U) << text;
  EXPECT_NE(text.find("/s, "), std::string::npos) << text;
  EXPECT_NE(text.find(" left, loss 1.5\nsaved\n"), std::string::npos) << text;
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find("loss 9"), std::string::npos);
}

TEST(CliProgress, ABar) {
  const std::string text = written(true, 80, false);
  EXPECT_EQ(text.find("\rtrain  50/100 [====="), 0U) << text;
  // Taken away for the line, drawn again below it, taken away at the end.
  const std::size_t line = text.find("\r\033[Ksaved\n\rtrain  51/100 [");
  EXPECT_NE(line, std::string::npos) << text;
  EXPECT_EQ(text.substr(text.size() - 4), "\r\033[K");
  // Half of it is full, and no line is longer than the terminal.
  const std::size_t open = text.find('['), close = text.find(']');
  const std::string bar = text.substr(open + 1, close - open - 1);
  EXPECT_EQ(bar.find('>'), bar.size() / 2) << bar;
  EXPECT_LE(text.find("\033[K"), 80U);  // the first character is no column
}

TEST(CliProgress, NarrowAndQuiet) {
  const std::string text = written(true, 20, false);
  EXPECT_EQ(text.find('='), std::string::npos) << text;
  EXPECT_LE(text.find("\033[K"), 20U) << text;
  EXPECT_EQ(written(true, 80, true), "saved\n");
  EXPECT_EQ(written(false, 80, true), "saved\n");
}

TEST(CliProgress, NothingOfWhatIsDoneSoon) {
  EXPECT_EQ(written(true, 80, false, 60), "saved\n");
  // Where there is no terminal the first bar is no matter, and an endless wait means none.
  EXPECT_NE(written(false, 80, false, 60), "saved\n");
  constexpr double kNever = std::numeric_limits<double>::infinity();
  EXPECT_EQ(written(false, 80, false, 0.1, kNever), "saved\n");
  EXPECT_NE(written(false, 80, false, 0.1, 0.1, kNever), "saved\n");
}

}  // namespace
}  // namespace mlxtape::test
