// Names of what is in the making: <name>.tmp<process>.<number>, beside <name>. Who is killed leaves it there; whoever comes
// later knows it by its name.
//
// Threads    Functions: any.
#pragma once

#include <optional>
#include <string>

namespace mlxtape {

// Another one at every call of this process.
std::string temporary_path(const std::string& path);

struct Temporary {
  std::string of;  // <name>
};
// Of a file's name without its folders; none: it is not temporary.
std::optional<Temporary> temporary_named(const std::string& name);

}  // namespace mlxtape
