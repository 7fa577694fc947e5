#include "peers.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "mlxtape/base/error.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::bench {

namespace {

constexpr int kPatienceSeconds =
    600;  // MLX takes half a minute for one call of a large convolution

}  // namespace

Peers::Peers(const std::string& python, const std::string& script) {
  if (access(script.c_str(), R_OK) != 0) {
    throw Error(Errc::kIo, "peers: the script must be readable, got " + script);
  }
  int down[2];
  int up[2];
  if (pipe(down) != 0 || pipe(up) != 0) {
    throw Error(Errc::kIo, std::string("peers: a pipe must open, got ") + std::strerror(errno));
  }
  std::signal(SIGPIPE, SIG_IGN);  // a child that died is an error message, not our end
  child_ = fork();
  if (child_ < 0) {
    throw Error(Errc::kIo, std::string("peers: a child must start, got ") + std::strerror(errno));
  }
  if (child_ == 0) {
    dup2(down[0], STDIN_FILENO);
    dup2(up[1], STDOUT_FILENO);
    for (const int fd : {down[0], down[1], up[0], up[1]}) close(fd);
    execlp(python.c_str(), python.c_str(), script.c_str(), static_cast<char*>(nullptr));
    std::fprintf(stderr, "peers: cannot run %s: %s\n", python.c_str(), std::strerror(errno));
    std::_Exit(127);
  }
  close(down[0]);
  close(up[1]);
  to_ = fdopen(down[1], "w");
  from_ = fdopen(up[0], "r");
}

Peers::~Peers() {
  std::fclose(to_);  // the child sees the end of its input and leaves
  std::fclose(from_);
  for (int i = 0; i < 50; ++i) {
    if (waitpid(child_, nullptr, WNOHANG) != 0) return;
    usleep(100'000);
  }
  kill(child_, SIGKILL);  // it does not
  waitpid(child_, nullptr, 0);
}

// One line of the child's output, without buffering: poll must see what is there.
std::string Peers::answer() {
  std::string line;
  for (char c = 0;;) {
    pollfd ready{fileno(from_), POLLIN, 0};
    if (poll(&ready, 1, kPatienceSeconds * 1000) == 0) {
      kill(child_, SIGKILL);
      throw Error(Errc::kIo, "peers: an answer within " + std::to_string(kPatienceSeconds) +
                                 " s, got none; run the peers script alone to see why");
    }
    if (read(fileno(from_), &c, 1) != 1) return line;
    if (c == '\n') return line;
    line += c;
  }
}

Samples Peers::measure(const std::string& request) {
  std::fprintf(to_, "%s\n", request.c_str());
  std::fflush(to_);
  const std::string line = answer();
  const auto wrong = [&] {
    return Error(Errc::kIo, "peers: a line {\"name\": [microseconds, ...]} per request, got '" +
                                line + "'; run the peers script alone to see its own error");
  };
  try {
    Samples samples;
    const formats::Json all = formats::Json::parse(line, "peers");
    for (const auto& [name, times] : all.object()) {
      for (const formats::Json& time : times.array()) samples[name].push_back(time.number());
    }
    return samples;
  } catch (const Error&) {
    throw wrong();
  }
}

}  // namespace mlxtape::bench
