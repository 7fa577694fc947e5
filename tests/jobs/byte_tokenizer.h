// A tokenizer whose tokens are the 256 bytes, and special ones from 256 on.
#pragma once

#include <string>
#include <vector>

#include "mlxtape/formats/json.h"

namespace mlxtape::test {

inline std::string byte_tokenizer_json(const std::vector<std::string>& special = {}) {
  using formats::Json;
  Json vocabulary = Json::Object{};
  int next = 0;
  for (int byte = 0; byte < 256; ++byte) {
    // The letters that stand for bytes in such files: printable ones for themselves, others from U+0100 on.
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int code = printable ? byte : 256 + next++;
    std::string letter;
    if (code > 127) letter += static_cast<char>(0xC0 | code >> 6);
    letter += static_cast<char>(code > 127 ? 0x80 | (code & 63) : code);
    vocabulary.set(letter, byte);
  }
  Json::Array added;
  for (std::size_t i = 0; i < special.size(); ++i) {
    added.push_back(Json::Object{{"id", Json(static_cast<std::int64_t>(256 + i))},
                                 {"content", Json(special[i])},
                                 {"single_word", Json(false)},
                                 {"lstrip", Json(false)},
                                 {"rstrip", Json(false)},
                                 {"normalized", Json(false)},
                                 {"special", Json(true)}});
  }
  const std::string bytes =
      R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})";
  return R"({"version": "1.0", "added_tokens": )" + Json(added).dump() +
         R"(, "normalizer": null, "pre_tokenizer": )" + bytes +
         R"(, "post_processor": null, "decoder": )" + bytes +
         R"(, "model": {"type": "BPE", "merges": [], "vocab": )" + vocabulary.dump() + "}}";
}

}  // namespace mlxtape::test
