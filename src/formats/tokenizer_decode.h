// The way back: tokens, one after the other, to text.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "formats/regex.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

struct DecodeReplace {
  std::string text;  // what is looked for; "": the pattern is
  Regex pattern;
  std::string content;
};
struct
    DecodeSpaces {  // a character stands for a space; at the beginning of the text for none, if so said
  std::string replacement;
  bool drops_first;
};
struct DecodeStrip {  // so many of a character at most, from both ends of each token
  std::string content;
  std::size_t start, stop;
};
// Neighbouring tokens <0xNN> are bytes of UTF-8. Where they are not, each of them counts as U+FFFD; if one by one, only
// those that belong to no character.
struct DecodeByteTokens {
  bool one_by_one;
};
struct DecodeFuse {};     // the tokens so far are one
struct DecodeLetters {};  // letters that stand for bytes; fuses as well
struct DecodeApart {};    // spaces between the tokens
using DecodeStep = std::variant<DecodeReplace, DecodeSpaces, DecodeStrip, DecodeByteTokens,
                                DecodeFuse, DecodeLetters, DecodeApart>;

std::vector<DecodeStep> read_decoder(const Json& json, const std::string& who);

// Text comes as soon as no later token can change it. Keeps a reference to the steps.
class Decoding {
 public:
  explicit Decoding(const std::vector<DecodeStep>& steps);
  // Appends what is complete now, and at the end the rest.
  void put(std::string_view token, std::string& out);
  void end(std::string& out);  // then it begins anew

 private:
  void pass(std::size_t step, std::string token);
  void end_bytes(std::size_t step);
  void end_of_tokens();
  void give(std::string& out, bool last);
  void give_stripped(std::string& out, bool last);

  const std::vector<DecodeStep>* steps_;
  std::size_t fuse_ =
      0;  // the step that makes one of all tokens; the number of steps if there is none
  bool by_strip_ = false;      // what follows that step is one DecodeStrip, or nothing
  std::string run_;            // bytes of neighbouring byte tokens
  std::string held_;           // text that a later token may change
  bool begun_ = false;         // a token went through all steps before the fuse
  bool spaces_begun_ = false;  // and through DecodeSpaces
  std::size_t stripped_ = 0;   // characters taken from the beginning
  bool start_is_over_ = false;
};

}  // namespace mlxtape::formats
