#pragma once

#include <string>
#include <vector>

namespace mlxtape::metal_bind {

struct TextPlaces {
  std::string root;                   // names in messages are relative to it
  std::vector<std::string> includes;  // folders
};
struct FlatText {
  std::string text;
  std::vector<std::string> files;  // that it was made from
};
FlatText flatten(const std::string& path, const TextPlaces& places);

// C++ that defines mlxtape::metal::texts::<stem>.
std::string embedded(const std::string& stem, const std::string& text);

}  // namespace mlxtape::metal_bind
