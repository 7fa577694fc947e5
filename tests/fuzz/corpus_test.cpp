// Every input that is kept, seeds and past findings, through its target: without libFuzzer, in every build.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "fuzz/targets.h"
#include "mlxtape/base/files.h"

namespace mlxtape::fuzz {
namespace {

struct Target {
  const char* name;
  bool (*run)(std::string_view input);
};
const Target kTargets[] = {MLXTAPE_FUZZ_TARGETS};

class FuzzCorpus : public testing::TestWithParam<Target> {};

TEST_P(FuzzCorpus, NothingIsFound) {
  const auto folder = std::filesystem::path(MLXTAPE_FUZZ_CORPUS) / GetParam().name;
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  EXPECT_GE(files.size(), 5U) << folder;
  int taken = 0;
  for (const std::string& file : files) {
    const std::string bytes = read_whole(file, "fuzz");
    EXPECT_NO_THROW(taken += GetParam().run(bytes) ? 1 : 0) << file;
  }
  EXPECT_GE(taken, 2) << "seeds that are all refused lead no fuzzer anywhere";
}

INSTANTIATE_TEST_SUITE_P(All, FuzzCorpus, testing::ValuesIn(kTargets),
                         [](const auto& info) { return std::string(info.param.name); });

// A check that cannot fail is none.
TEST(FuzzTargets, FindWhatIsBroken) {
  EXPECT_THROW(check(false, "always"), Finding);
  EXPECT_THROW(accepts([] { throw std::out_of_range("no Error"); }), std::out_of_range);
  EXPECT_THROW(accepts([] { throw Error(Errc::kIo, "\xFF is no text"); }), Finding);
  EXPECT_THROW(accepts([] { throw Error(Errc::kIo, ""); }), Finding);
  EXPECT_THROW(accepts([] { throw Error(Errc::kIo, "two\nlines"); }), Finding);
  EXPECT_THROW(accepts([] { throw Error(Errc::kIo, std::string(5000, 'a')); }), Finding);
  EXPECT_THROW(accepts([] { throw Error(Errc::kBackend, "of the device"); }), Finding);
  EXPECT_FALSE(accepts([] { throw Error(Errc::kIo, "refused"); }));
  EXPECT_TRUE(accepts([] {}));
}

}  // namespace
}  // namespace mlxtape::fuzz
