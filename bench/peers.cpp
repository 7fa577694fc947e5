#include "peers.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "mlxtape/base/error.h"

namespace mlxtape::bench {

Peers::Peers(const std::string& python, const std::string& script) {
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
  waitpid(child_, nullptr, 0);
}

Samples Peers::measure(const std::string& request) {
  std::fprintf(to_, "%s\n", request.c_str());
  std::fflush(to_);
  char* line = nullptr;
  std::size_t room = 0;
  const ssize_t length = getline(&line, &room, from_);
  const std::string answer = length > 0 ? std::string(line, static_cast<std::size_t>(length)) : "";
  std::free(line);
  const auto json = nlohmann::json::parse(answer, nullptr, false);
  if (!json.is_object()) {
    throw Error(Errc::kIo, "peers: one line of JSON per request, got '" + answer +
                               "'; run the peers script alone to see its own error");
  }
  Samples samples;
  for (const auto& [name, values] : json.items()) {
    samples[name] = values.get<std::vector<double>>();
  }
  return samples;
}

}  // namespace mlxtape::bench
