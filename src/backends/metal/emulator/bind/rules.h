// Rules of Metal's language that neither C++ nor the pass over address spaces knows. Each throws Error.
#pragma once

#include <cstddef>

#include "backends/metal/emulator/bind/tokens.h"

namespace mlxtape::metal_bind {

bool is_address_space(const std::string& word);
// The language lacks what the word stands for.
void check_word(const Tokens& tokens, std::size_t word);
// Parameters between ( and ): pointers and references say where they point.
void check_parameters(const Tokens& tokens, std::size_t open);
// The same of a declaration, if a statement is one: it begins with [const] type [<...>] * name, which no expression does.
void check_declaration(const Tokens& tokens, std::size_t statement);

}  // namespace mlxtape::metal_bind
