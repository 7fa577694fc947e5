#include "output.h"

#include <algorithm>

#include "mlxtape/base/quote.h"

namespace mlxtape::cli {

namespace {

// Characters as a terminal shows them, all one column wide: the bytes of UTF-8 that begin one.
std::size_t columns(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

std::string padded(const std::string& text, std::size_t width, bool to_the_right) {
  const std::size_t used = columns(text);
  const std::string space(width > used ? width - used : 0, ' ');
  return to_the_right ? space + text : text + space;
}

}  // namespace

Table::Table(std::vector<std::string> header, std::vector<bool> is_number)
    : is_number_(std::move(is_number)) {
  is_number_.resize(header.size());
  rows_.push_back(std::move(header));
}

void Table::add(std::vector<std::string> row) {
  row.resize(is_number_.size());
  rows_.push_back(std::move(row));
}

std::string Table::text() const {
  std::vector<std::size_t> widths(is_number_.size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], columns(row[i]));
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += (i == 0 ? "" : "  ") + padded(row[i], widths[i], is_number_[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

void Facts::add(std::string name, std::string value) {
  facts_.emplace_back(std::move(name), std::move(value));
}

std::string Facts::text() const {
  std::size_t width = 0;
  for (const auto& [name, value] : facts_) width = std::max(width, columns(name));
  std::string out;
  for (const auto& [name, value] : facts_) out += padded(name, width + 2, false) + value + "\n";
  return out;
}

void print(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void print_result(const std::string& text) { print(escaped(text, "\n\t")); }

void print_json(const formats::Json& json) { print(json.dump(2) + "\n"); }

void remark(const std::string& text) {
  std::fprintf(stderr, "%s\n", escaped(text, "\n\t").c_str());
}

}  // namespace mlxtape::cli
