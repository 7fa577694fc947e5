// The demo's model and its tokenizer: nothing of the source tree is needed at run time.
#pragma once

#include <string>

#include "mlxtape/models/config.h"

namespace mlxtape::demo {

// A Qwen3-Next of 2 M parameters whose tokens are bytes, the line's end the end of text.
models::Config demo_config();
// tokenizer.json and tokenizer_config.json; errors begin with who.
void write_byte_tokenizer(const std::string& folder, const char* who = "demo");

}  // namespace mlxtape::demo
