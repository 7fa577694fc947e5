// main of the test programs, and so of mlxtape-selftest: GoogleTest's flags, --threads=N and
// --cpu-target=NAME, which runs the CPU kernels with no better instruction set than NAME: "best" does
// not limit it, "baseline" is the least one. Exit 77: not on this machine; 2: called wrongly, also with
// a filter that no test matches. A test that takes longer than MLXTAPE_TEST_SECONDS (600) is taken to
// hang, which a wrong GPU kernel does: the program ends with its name and exit 3.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "backends/cpu/targets.h"
#include "mlxtape/core/threads.h"

namespace {

class Watchdog : public testing::EmptyTestEventListener {
 public:
  explicit Watchdog(double seconds) : limit_(seconds), thread_([this] { watch(); }) {}
  ~Watchdog() override {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  void OnTestStart(const testing::TestInfo& info) override {
    set(std::string(info.test_suite_name()) + "." + info.name());
  }
  void OnTestEnd(const testing::TestInfo&) override { set(""); }

  void set(std::string name) {
    const std::lock_guard lock(mutex_);
    running_ = std::move(name);
    ++turn_;
    changed_.notify_all();
  }
  void watch() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      const int turn = turn_;
      const bool moved = changed_.wait_for(lock, limit_, [&] { return over_ || turn_ != turn; });
      if (moved || running_.empty()) continue;
      std::fprintf(stderr, "%s hangs: no end after %.0f s\n", running_.c_str(), limit_.count());
      std::_Exit(3);
    }
  }

  std::chrono::duration<double> limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string running_;
  int turn_ = 0;
  bool over_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto is = [&](const char* flag) {
      return arg.rfind(flag, 0) == 0;
    };
    const std::string value = arg.substr(arg.find('=') + 1);
    if (is("--threads=")) {
      mlxtape::set_threads(std::atoi(value.c_str()));
    } else if (!is("--cpu-target=")) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    } else if (value != "best") {
      const auto names = mlxtape::cpu::available_targets();
      const std::string target = value == "baseline" ? names.back() : value;
      if (std::find(names.begin(), names.end(), target) == names.end()) {
        std::printf("skipped: this machine or build has no %s\n", target.c_str());
        return 77;
      }
      mlxtape::cpu::limit_target(target);
    }
  }
  const char* seconds = std::getenv("MLXTAPE_TEST_SECONDS");
  testing::UnitTest::GetInstance()->listeners().Append(
      new Watchdog(seconds != nullptr ? std::atof(seconds) : 600));
  const int status = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::fprintf(stderr, "the filter must match a test, got '%s'\n",
                 testing::GTEST_FLAG(filter).c_str());
    return 2;
  }
  return status;
}
