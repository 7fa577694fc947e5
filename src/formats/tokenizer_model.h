// A word's way to its ids. Which one a file has, it says itself.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_vocabulary.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

class Model {
 public:
  Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  virtual ~Model() = default;

  // Once the vocabulary is whole. byte_level: words come as bytes, and tokens spell them in letters; else both are text.
  virtual void prepare(bool byte_level) = 0;
  virtual bool takes_bytes() const { return false; }
  // Appends the ids of a word.
  virtual void encode(std::string_view word, std::vector<TokenId>& out) const = 0;
  // Where the first part of a word ends whose ids do not depend on what follows, nor those of what follows on it.
  virtual std::size_t part_end(std::string_view word) const { return word.size(); }
};

// The object "model" of tokenizer.json. The model keeps a reference to the vocabulary, which it fills.
std::unique_ptr<Model> read_model(JsonReader& reader, Vocabulary& vocabulary);

// In tokenizer.json each byte is a letter: those that can be printed are themselves, the others U+0100 and on.
std::string letters_of(std::string_view bytes);
// The bytes of a token; its own UTF-8 where one of its letters stands for none.
void append_bytes(std::string& out, std::string_view letters);

// "<0x0A>": how a token spells a byte that is no character of the vocabulary.
std::string byte_token(unsigned char byte);
int byte_of(std::string_view token);  // -1: it spells none

}  // namespace mlxtape::formats
