#include "output.h"

#include <algorithm>
#include <array>
#include <cmath>

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

std::string scaled(double value, double step, const char* const* units, std::size_t count) {
  std::size_t unit = 0;
  while (unit + 1 < count && std::abs(value) >= step) {
    value /= step;
    ++unit;
  }
  const bool whole = unit == 0;
  const int digits = std::abs(value) < 10 ? 2 : 1;
  return fixed(value, whole ? 0 : digits) + units[unit];
}

}  // namespace

std::string fixed(double value, int digits) {
  std::array<char, 400> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string human_bytes(double bytes) {
  static constexpr const char* kUnits[] = {" bytes", " KiB", " MiB", " GiB", " TiB", " PiB"};
  return scaled(bytes, 1024, kUnits, std::size(kUnits));
}

std::string human_count(double count) {
  static constexpr const char* kUnits[] = {"", " K", " M", " B", " T"};
  return scaled(count, 1000, kUnits, std::size(kUnits));
}

std::string human_time(double seconds) {
  if (seconds < 10) return fixed(std::max(0.0, seconds), 1) + " s";
  const auto all = static_cast<std::int64_t>(std::min(std::round(seconds), 1e9));
  std::array<char, 64> text{};
  if (all < 3600) {
    std::snprintf(text.data(), text.size(), "%d:%02d", static_cast<int>(all / 60),
                  static_cast<int>(all % 60));
  } else {
    std::snprintf(text.data(), text.size(), "%d:%02d:%02d", static_cast<int>(all / 3600),
                  static_cast<int>(all / 60 % 60), static_cast<int>(all % 60));
  }
  return text.data();
}

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
