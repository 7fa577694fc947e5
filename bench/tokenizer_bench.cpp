// How fast a tokenizer is read, and how fast it encodes and decodes a text: tokenizer_bench FILE TEXT...
//
// FILE is what Tokenizer::from_file reads; make parity leaves real ones in build/parity/tokenizers. One thread. Times are
// those that the processor worked, the median of 7: what else runs on the machine counts little.
#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <exception>

#include "mlxtape/base/files.h"
#include "mlxtape/formats/tokenizer.h"

namespace {

using mlxtape::formats::TokenId;
using mlxtape::formats::Tokenizer;

double processor_seconds() {
  return static_cast<double>(std::clock()) / static_cast<double>(CLOCKS_PER_SEC);
}

template <class Fn>
double median_seconds(Fn&& fn) {
  std::array<double, 7> times{};
  for (double& time : times) {
    const double begun = processor_seconds();
    fn();
    time = processor_seconds() - begun;
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const char* file, const std::vector<std::string>& texts) {
  const std::string bytes = mlxtape::read_whole(file, "tokenizer_bench");
  const double load = median_seconds([&] { Tokenizer::from_bytes(bytes, file); });
  const Tokenizer tokenizer = Tokenizer::from_bytes(bytes, file);
  std::printf("%s: %d tokens, read in %.3f s\n", file, tokenizer.vocabulary_size(), load);
  for (const std::string& path : texts) {
    const std::string text = mlxtape::read_whole(path, "tokenizer_bench");
    std::vector<TokenId> ids;
    const double encode = median_seconds([&] { ids = tokenizer.encode(text, false); });
    const double decode = median_seconds([&] { tokenizer.decode(ids); });
    const auto megabytes = static_cast<double>(text.size()) / 1e6;
    std::printf("  %s: %.1f MB, %zu tokens, encoded at %.1f MB/s, decoded at %.1f MB/s\n",
                path.c_str(), megabytes, ids.size(), megabytes / encode, megabytes / decode);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fputs("usage: tokenizer_bench FILE TEXT...\n", stderr);
    return 2;
  }
  try {
    measure(arguments[1], {arguments + 2, arguments + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tokenizer_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
