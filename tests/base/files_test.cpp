#include "mlxtape/base/files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/base/temporary.h"

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
  // What fn throws says.
  template <class Fn>
  static std::string said(Fn fn) {
    try {
      fn();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::kIo);
      return e.what();
    }
    return "no error";
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
  for (const std::size_t piece : {std::size_t{1} << 12U, std::size_t{1} << 18U}) {
    for (const std::size_t size : {piece - 1, piece, piece + 1, 2 * piece}) {
      const std::string long_one = std::string(size - 1, 'x') + "y";
      write_whole(path, long_one, "test");
      EXPECT_EQ(read_whole(path, "test"), long_one) << size;
    }
  }
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

TEST_F(Files, LinksAreReplacedWhereThatIsAsked) {
  write_whole(folder / "outside", "old", "test");
  fs::create_directory(folder / "out");
  const fs::path link = folder / "out" / "result";
  for (const char* target : {"../outside", "../nowhere"}) {
    fs::remove(link);
    fs::create_symlink(target, link);
    write_whole(link, "new", "test", WholeFile::Links::kReplace);
    EXPECT_FALSE(fs::is_symlink(link));
    EXPECT_EQ(read_whole(link, "test"), "new");
    EXPECT_EQ(read_whole(folder / "outside", "test"), "old");
    EXPECT_FALSE(fs::exists(folder / "nowhere"));
  }
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
  EXPECT_THROW(FileLines(folder / "none", "test"), Error);
}

// None of these has an end, or a beginning before somebody writes.
TEST_F(Files, OnlyRegularOnesAreRead) {
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", folder / "link");
  const std::pair<std::string, const char*> table[] = {{folder, "a folder"},
                                                       {pipe, "a pipe"},
                                                       {"/dev/zero", "a device"},
                                                       {folder / "link", "a device"}};
  for (const auto& [path, kind] : table) {
    const std::string says = "test: " + path + " must be a file, got " + kind;
    EXPECT_EQ(said([&] { read_whole(path, "test"); }), says);
    EXPECT_EQ(said([&] { FileLines(path, "test"); }), says);
    EXPECT_EQ(said([&] { MappedFile(path, "test"); }), says);
  }
}

TEST_F(Files, AreReadUpToALimit) {
  const std::string path = folder / "a";
  write_whole(path, "12345", "test");
  EXPECT_EQ(read_whole(path, "test", 5), "12345");
  EXPECT_EQ(said([&] { read_whole(path, "test", 4); }),
            "test: " + path + " must have at most 4 bytes, got 5 or more");
  // Larger than the memory, and taking no room on the disk.
  fs::resize_file(path, std::uintmax_t{1} << 42U);
  EXPECT_EQ(said([&] { read_whole(path, "test"); }),
            "test: " + path + " must have at most 536870912 bytes, got 4398046511104 or more");
  if (fs::exists("/proc/self/maps")) {  // a file whose size is said to be 0
    EXPECT_GT(read_whole("/proc/self/maps", "test").size(), 100U);
    EXPECT_THROW(read_whole("/proc/self/maps", "test", 100), Error);
  }
}

TEST_F(Files, AreReadLineByLine) {
  const std::string path = folder / "a";
  const std::string large(1'000'000, 'x');  // several pieces long
  const auto lines_of = [&](const std::string& bytes) {
    write_whole(path, bytes, "test");
    std::vector<std::string> all;
    FileLines lines(path, "test");
    for (std::string line; lines.next(line); all.push_back(line)) {
      EXPECT_EQ(lines.number(), static_cast<std::int64_t>(all.size()) + 1);
    }
    std::string none = "as it was";
    EXPECT_FALSE(lines.next(none));
    EXPECT_EQ(none, "as it was");
    return all;
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(lines_of(""), Lines{});
  EXPECT_EQ(lines_of("\n"), Lines{""});
  EXPECT_EQ(lines_of("a"), Lines{"a"});
  EXPECT_EQ(lines_of("a\n\nb\r\n"), (Lines{"a", "", "b\r"}));
  EXPECT_EQ(lines_of("a\n" + large + "\nb\n" + large), (Lines{"a", large, "b", large}));
  std::string many;
  for (int i = 0; i < 100'000; ++i) many += std::to_string(i) + "\n";
  const Lines all = lines_of(many);
  ASSERT_EQ(all.size(), 100'000U);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], std::to_string(i));
  fs::resize_file(path, std::uintmax_t{1} << 42U);  // zeros behind the last line
  FileLines endless(path, "test");
  std::string line;
  for (int i = 0; i < 100'000; ++i) endless.next(line);
  EXPECT_EQ(said([&] { endless.next(line); }),
            "test: " + path + ": line 100001 must have at most 268435456 bytes");
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
}

TEST(Temporary, IsKnownByItsName) {
  const std::string one = temporary_path("a/model.safetensors"), two = temporary_path("a/b");
  EXPECT_NE(one.substr(one.rfind('.')), two.substr(two.rfind('.')));
  const auto ours = temporary_named(fs::path(one).filename().string());
  ASSERT_TRUE(ours);
  EXPECT_EQ(ours->of, "model.safetensors");
  const auto of_none = temporary_named("x.tmp12");
  ASSERT_TRUE(of_none);
  EXPECT_EQ(of_none->of, "x");
  EXPECT_EQ(temporary_named("x.tmp.tmp1.2")->of, "x.tmp");
  for (const char* name : {"x", "x.tmp", "x.tmpl", "x.tmp1a", ".tmp1.2", "x.tmp1.2.old", ""}) {
    EXPECT_FALSE(temporary_named(name)) << name;
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
