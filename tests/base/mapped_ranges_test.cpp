#include "mlxtape/base/mapped_ranges.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"

namespace mlxtape {
namespace {

namespace fs = std::filesystem;

struct MappedRanges : testing::Test {
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "mlxtape-mapped-XXXXXX").string();
    folder = mkdtemp(pattern.data());
  }
  void TearDown() override { fs::remove_all(folder); }

  std::string file(const std::string& name, std::size_t bytes) const {
    write_whole(folder / name, std::string(bytes, 'x'), "test");
    return folder / name;
  }
  fs::path folder;
};

TEST_F(MappedRanges, KnowWhoseAnAddressIs) {
  const std::string a = file("a", 5000), b = file("b", 100);
  const std::byte* gone = nullptr;
  {
    const MappedFile first(a, "test");
    const auto second = std::make_unique<MappedFile>(b, "test");
    EXPECT_STREQ(mapped_file_at(first.bytes().data()), a.c_str());
    EXPECT_STREQ(mapped_file_at(&first.bytes().back()), a.c_str());
    EXPECT_STREQ(mapped_file_at(second->bytes().data() + 50), b.c_str());
    EXPECT_EQ(mapped_file_at(&gone), nullptr);
    EXPECT_EQ(mapped_file_at(nullptr), nullptr);
    gone = first.bytes().data();
  }
  EXPECT_EQ(mapped_file_at(gone), nullptr);
  const MappedFile again(b, "test");  // its place is used again
  EXPECT_STREQ(mapped_file_at(again.bytes().data()), b.c_str());
}

// What is past the end is given by no touch of it alone: a write of it to a file is told too.
TEST_F(MappedRanges, AFileThatBecameShorterIsNamedByAWrite) {
  const std::string path = file("model", 3 << 16);
  const MappedFile mapped(path, "test");
  fs::resize_file(path, 1 << 16);
  try {
    WholeFile copy(folder / "copy", "test");
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes as text
    copy.write({reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()});
    FAIL() << "what is not there was written";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), "test: " + path + " became shorter while it was in use");
  }
  EXPECT_FALSE(fs::exists(folder / "copy"));
}

TEST_F(MappedRanges, FromManyThreads) {
  const std::string path = file("a", 4096);
  std::vector<std::thread> threads;
  std::array<int, 4> wrong{};
  for (int& count : wrong) {
    threads.emplace_back([&path, &count] {
      for (int i = 0; i < 500; ++i) {
        const MappedFile mapped(path, "test");
        const char* found = mapped_file_at(mapped.bytes().data());
        if (found == nullptr || found != path) ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) EXPECT_EQ(count, 0);
}

}  // namespace
}  // namespace mlxtape
