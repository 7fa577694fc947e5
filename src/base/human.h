// Numbers as people read them.
#pragma once

#include <string>

namespace mlxtape {

std::string human_bytes(double bytes);   // "17.5 MiB"
std::string human_count(double count);   // "1.25 M", "80.0 B"
std::string human_time(double seconds);  // "1:02:03", "4:05", "0.8 s"
std::string fixed(double value, int digits);

}  // namespace mlxtape
