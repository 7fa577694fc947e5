// What the work of a chat template costs, and texts that are put together and searched within that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace mlxtape::formats::jinja {

constexpr std::size_t kMaxText = std::size_t{64} << 20;  // bytes of any text that a template makes

// What is wrong; whoever knows the line puts it in front.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Steps that one rendering may take. Whatever makes a value or walks through one pays for it there, before it takes memory:
// nobody who calls it can forget to. The steps are those of the rendering that this thread is at; what is done without one (a
// template is parsed) is paid by nobody.
//
// A step is about 50 ns, and 32 bytes at the most: the steps bound time and memory together.
class Budget {
 public:
  explicit Budget(std::int64_t steps);  // this thread's, until it goes
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;
  ~Budget();

 private:
  friend void spend(std::size_t steps);
  std::int64_t left_;
  Budget* before_;
};
void spend(std::size_t steps);  // throws Fault when none are left

// Steps for bytes that are copied or compared as a block, and for those that are looked at one by one.
constexpr std::size_t copied(std::size_t bytes) { return bytes / 32; }
constexpr std::size_t walked(std::size_t bytes) { return bytes / 4; }

void check_length(std::size_t bytes);  // throws Fault beyond kMaxText

// A text in the making. It grows in place; that it may is checked and paid for first.
class TextBuilder {
 public:
  void append(std::string_view text) {
    grow(text.size());
    text_.append(text);
  }
  void append(std::size_t count, char c) {
    grow(count);
    text_.append(count, c);
  }
  std::string take() { return std::move(text_); }

 private:
  void grow(std::size_t bytes);
  std::string text_;
};

// The first place of part from `from` on, or its last place; npos. Of two texts that nearly match everywhere (a's, and a's
// with a b behind them) the steps end before the search does.
std::size_t find_first(std::string_view text, std::string_view part, std::size_t from = 0);
std::size_t find_last(std::string_view text, std::string_view part);

}  // namespace mlxtape::formats::jinja
