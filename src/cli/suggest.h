// What somebody meant who typed a word that the program does not know.
#pragma once

#include <string>
#include <vector>

namespace mlxtape::cli {

// What could have been typed in its place.
struct Known {
  std::vector<std::string> flags;  // "--temp"
  std::vector<std::string> commands;
};

// "Did you mean --temp?", or where what other programs have is otherwise here: what to do. Empty: nothing is like it.
std::string suggestion(const std::string& word, const Known& known);

}  // namespace mlxtape::cli
