// How results look: tables for people, JSON for scripts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "mlxtape/formats/json.h"

namespace mlxtape::cli {

std::string human_bytes(double bytes);   // "17.5 MiB"
std::string human_count(double count);   // "1.25 M", "80.0 B"
std::string human_time(double seconds);  // "1:02:03", "4:05", "0.8 s"
std::string fixed(double value, int digits);

// Columns as wide as their longest cell; those of numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header, std::vector<bool> is_number = {});
  void add(std::vector<std::string> row);
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> is_number_;
};

// "name   value" lines, the values below each other.
class Facts {
 public:
  void add(std::string name, std::string value);
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
};

// To stdout, checked when the program ends.
void print(const std::string& text);
// The same of text with names of files in it, which are given no control characters: see remark.
void print_result(const std::string& text);
void print_json(const formats::Json& json);
// A remark or an error to stderr, its line complete. Names of files and tensors can hold anything: a terminal is given
// no control characters of theirs to obey.
void remark(const std::string& text);

}  // namespace mlxtape::cli
