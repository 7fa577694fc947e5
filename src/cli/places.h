// Where commands write: what would go wrong after a long time is said at once.
#pragma once

#include <string>

namespace mlxtape::cli {

// Of a model's directory that is to be made; what was left over there is taken away. Throws kIo where something is there
// and force is off, or it is no model, or nothing can be written there. flag: the one that named it.
void expect_place(const std::string& path, bool force, const std::string& flag);

// Takes away what processes that live no more have left of this path: <path>.tmp<process>.<number>. One that was killed
// while it replaced the path may have left the old one beside it: that is brought back.
void remove_left_over(const std::string& path);

// "my-model" of "models/my-model/".
std::string last_part(const std::string& path);
// The path without slashes at its end.
std::string without_slash(std::string path);

}  // namespace mlxtape::cli
