#include "mlxtape/base/files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "mlxtape/base/error.h"

namespace mlxtape {
namespace {

namespace fs = std::filesystem;

struct Files : testing::Test {
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "mlxtape-files-XXXXXX").string();
    folder = mkdtemp(pattern.data());
  }
  void TearDown() override { fs::remove_all(folder); }

  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
  }
  fs::path folder;
};

TEST_F(Files, AreReadAsTheyWereWritten) {
  const std::string path = folder / "a";
  const std::string bytes("one\0two\n", 8);
  write_whole(path, "something longer that was there before", "test");
  write_whole(path, bytes, "test");
  EXPECT_EQ(read_whole(path, "test"), bytes);
  EXPECT_EQ(files(), 1U);
  write_whole(path, "", "test");
  EXPECT_EQ(read_whole(path, "test"), "");
}

TEST_F(Files, LinksAndRightsStay) {
  const std::string path = folder / "a";
  write_whole(path, "old", "test");
  fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("a", folder / "link");
  write_whole(folder / "link", "new", "test");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_whole(path, "test"), "new");
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(Files, AFailedWriteLeavesWhatWasThere) {
  const std::string path = folder / "none" / "a";
  EXPECT_THROW(write_whole(path, "x", "test"), Error);
  fs::create_directory(folder / "b");
  try {
    write_whole(folder / "b", "x", "test");  // a folder cannot be replaced by a file
    FAIL() << "a folder was written to";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kIo);
    EXPECT_EQ(std::string(e.what()).find("test: "), 0U) << e.what();
  }
  EXPECT_TRUE(fs::is_directory(folder / "b"));
  EXPECT_EQ(files(), 1U);
}

TEST_F(Files, RunningOutOfRoomLeavesTheOldBytesAndNothingElse) {
  const std::string path = folder / "a";
  write_whole(path, "old", "test");
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;  // bytes that a file may have
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(write_whole(path, std::string(5000, 'x'), "test"), Error);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_EQ(read_whole(path, "test"), "old");
  EXPECT_EQ(files(), 1U);
}

TEST_F(Files, ADiskThatIsFullIsAnError) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  EXPECT_THROW(write_whole("/dev/full", "x", "test"), Error);
}

TEST_F(Files, ADeviceIsWrittenToAndStays) {
  write_whole("/dev/null", "x", "test");
  struct stat there{};
  ASSERT_EQ(stat("/dev/null", &there), 0);
  EXPECT_TRUE(S_ISCHR(there.st_mode));
}

TEST_F(Files, AFileThatIsNotThereIsAnError) {
  EXPECT_THROW(read_whole(folder / "none", "test"), Error);
  EXPECT_THROW(read_whole(folder, "test"), Error);
}

TEST_F(Files, ArePutTogetherFromPieces) {
  const std::string path = folder / "a";
  write_whole(path, "old", "test");
  {
    WholeFile file(path, "test");
    file.write("one ");
    file.write("two");
    EXPECT_EQ(read_whole(path, "test"), "old");
    file.commit();
  }
  EXPECT_EQ(read_whole(path, "test"), "one two");
  {
    WholeFile(path, "test").write("never finished");
  }
  EXPECT_EQ(read_whole(path, "test"), "one two");
  EXPECT_EQ(files(), 1U);
}

// The name is taken by a folder while the file is being written.
TEST_F(Files, APlaceThatIsTakenIsAnError) {
  WholeFile file(folder / "a", "test");
  file.write("x");
  fs::create_directories(folder / "a" / "b");
  EXPECT_THROW(file.commit(), Error);
  EXPECT_EQ(files(), 1U);
}

TEST_F(Files, AreMappedAndStayAsTheyAre) {
  const std::string path = folder / "a";
  write_whole(path, "some bytes", "test");
  const MappedFile mapped(path, "test");
  ASSERT_EQ(mapped.bytes().size(), 10U);
  EXPECT_EQ(static_cast<char>(mapped.bytes()[5]), 'b');
  mapped.bytes()[5] = std::byte{'B'};
  EXPECT_EQ(static_cast<char>(mapped.bytes()[5]), 'B');
  EXPECT_EQ(read_whole(path, "test"), "some bytes");
  write_whole(path, "", "test");
  EXPECT_TRUE(MappedFile(path, "test").bytes().empty());
  EXPECT_THROW(MappedFile(folder / "none", "test"), Error);
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(MappedFile(pipe, "test"), Error);  // and does not wait for a writer
  try {
    const MappedFile wrong(folder, "test");
    FAIL() << "a folder was mapped";
  } catch (const Error& e) {
    EXPECT_EQ(e.what(), "test: " + folder.string() + " must be readable, got Is a directory");
  }
}

TEST_F(Files, OneAtATimeHasAFolder) {
  {
    const FolderLock mine(folder);
    try {
      const FolderLock other(folder);
      FAIL() << "two have the folder";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::kIo);
      EXPECT_EQ(std::string(e.what()).find(folder.string() + ": is in use: "), 0U) << e.what();
    }
  }
  const FolderLock next(folder);
  const FolderLock nowhere(folder / "none");  // nothing to keep anybody out of
}

}  // namespace
}  // namespace mlxtape
