#include "mlxtape/models/fields.h"

#include <cmath>

#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::models {

namespace {

using formats::Json;

constexpr std::int64_t kMost = 2147483647;

template <class T>
T given(const Fields& fields, const char* key, const std::optional<T>& otherwise) {
  if (!otherwise) fields.fail("\"" + std::string(key) + "\" is missing");
  return *otherwise;
}

}  // namespace

const Json* Fields::find(const char* key) const {
  const Json* value = json_.find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

const Json* Fields::object(const char* key) const {
  const Json* value = find(key);
  if (value != nullptr && !value->is_object()) fail(key, "an object", *value);
  return value;
}

std::int64_t Fields::whole(const char* key, std::optional<std::int64_t> otherwise,
                           std::int64_t least) const {
  const Json* value = find(key);
  if (value == nullptr) return given(*this, key, otherwise);
  if (!value->is_integer() || value->integer() < least || value->integer() > kMost) {
    fail(key, "a whole number from " + std::to_string(least) + " to 2^31 - 1", *value);
  }
  return value->integer();
}

double Fields::number(const char* key, std::optional<double> otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return given(*this, key, otherwise);
  // Kernels take them as floats, to which the smallest are 0 and the largest infinite.
  const float as_float = value->is_number() ? static_cast<float>(value->number()) : 0;
  if (!(as_float > 0) || !std::isfinite(as_float)) {
    fail(key, "a number above 0 that a float can hold", *value);
  }
  return value->number();
}

std::string Fields::text(const char* key, const std::optional<std::string>& otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return given(*this, key, otherwise);
  if (!value->is_string()) fail(key, "a string", *value);
  return value->string();
}

bool Fields::truth(const char* key, bool otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_bool()) fail(key, "true or false", *value);
  return value->boolean();
}

void Fields::fail(const std::string& key, const std::string& must, const Json& got) const {
  fail("\"" + key + "\" must be " + must + ", got " + shown(got.dump()));
}

void Fields::fail(const std::string& what) const { throw Error(Errc::kIo, source_ + ": " + what); }

}  // namespace mlxtape::models
