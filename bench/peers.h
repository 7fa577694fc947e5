// Other libraries, timed by a child process between our own runs. One line of JSON goes out,
// {"op", "form", "pass", "shape", "dtype", "seconds", "threads"}; one comes back, {"name": [us, ...], ...}
// with the samples of every library that has the op, or {} when none has.
#pragma once

#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace mlxtape::bench {

using Samples = std::map<std::string, std::vector<double>>;

class Peers {
 public:
  // Starts the child; throws kIo when it cannot be started.
  Peers(const std::string& python, const std::string& script);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Throws kIo when the child is gone, answers with something else, or not for ten minutes.
  Samples measure(const std::string& request);

 private:
  std::string answer();

  int child_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

}  // namespace mlxtape::bench
