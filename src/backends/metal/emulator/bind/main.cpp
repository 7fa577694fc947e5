// metal_bind: the build's tool for .metal files.
//
//   metal_bind text STEM FILE ROOT INCLUDE[,INCLUDE...] OUT.metal OUT.cpp OUT.d
//       OUT.metal: the text without files of ours. OUT.cpp: the same as bytes in C++. OUT.d: what it was made from.
//   metal_bind kernels STEM PREPROCESSED FLAT.metal OUT.cpp
//       OUT.cpp: the kernels in C++, for the emulator.
//   metal_bind strict PREPROCESSED OUT.clcpp
//       OUT.clcpp: the same for scripts/metal_strict.sh.
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>

#include "backends/metal/emulator/bind/kernels.h"
#include "backends/metal/emulator/bind/text.h"
#include "backends/metal/emulator/bind/tokens.h"
#include "backends/metal/emulator/text_hash.h"

namespace {

using namespace mlxtape::metal_bind;

void make_text(char** argv) {
  TextPlaces places{argv[4], {}};
  std::istringstream folders(argv[5]);
  for (std::string folder; std::getline(folders, folder, ',');) places.includes.push_back(folder);
  const FlatText flat = flatten(argv[3], places);
  write_file(argv[6], flat.text);
  write_file(argv[7], embedded(argv[2], flat.text));
  std::string rule = std::string(argv[7]) + ":";
  for (const std::string& file : flat.files) rule += " \\\n  " + file;
  write_file(argv[8], rule + "\n");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "text" && argc == 9) {
      make_text(argv);
    } else if (what == "kernels" && argc == 6) {
      write_file(argv[5], bind_kernels(argv[2], read_file(argv[3]),
                                       mlxtape::emulator::text_hash(read_file(argv[4]))));
    } else if (what == "strict" && argc == 4) {
      write_file(argv[3], bind_strictly(read_file(argv[2])));
    } else {
      std::fputs(
          "usage: metal_bind text STEM FILE ROOT INCLUDES OUT.metal OUT.cpp OUT.d\n"
          "       metal_bind kernels STEM PREPROCESSED FLAT.metal OUT.cpp\n"
          "       metal_bind strict PREPROCESSED OUT.clcpp\n",
          stderr);
      return 2;
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
