// How results look: tables for people, JSON for scripts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/human.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::cli {

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
