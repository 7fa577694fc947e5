// Fields: the keys of a config.json, each read with its required type and range.
// Errors     kIo, with the file, the key, what it must be and what it is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "mlxtape/formats/json.h"

namespace mlxtape::models {

class Fields {
 public:
  // json must outlive it.
  Fields(const formats::Json& json, std::string source) : json_(json), source_(std::move(source)) {}

  // Null if the key is missing or null.
  const formats::Json* find(const char* key) const;
  const formats::Json* object(const char* key) const;

  // Without `otherwise` a missing key is an error.
  std::int64_t whole(const char* key, std::optional<std::int64_t> otherwise = {},
                     std::int64_t least = 1) const;
  double number(const char* key, std::optional<double> otherwise = {}) const;  // above 0
  std::string text(const char* key, const std::optional<std::string>& otherwise = {}) const;
  bool truth(const char* key, bool otherwise) const;

  const std::string& source() const { return source_; }
  [[noreturn]] void fail(const std::string& key, const std::string& must,
                         const formats::Json& got) const;
  [[noreturn]] void fail(const std::string& what) const;

 private:
  const formats::Json& json_;
  std::string source_;
};

}  // namespace mlxtape::models
