// Of Apple's Foundation what the backend asks for: strings, arrays, errors, file names.
#pragma once

#include <string>
#include <vector>

#include "backends/metal/emulator/objects.h"

namespace mlxtape::emulator {

struct String : Object {
  explicit String(std::string s) : Object("NSString"), text(std::move(s)) {}
  std::string text;
};
struct Array : Object {
  explicit Array(std::vector<Reference<Object>> o) : Object("NSArray"), objects(std::move(o)) {}
  std::vector<Reference<Object>> objects;
};
struct ErrorObject : Object {
  ErrorObject(std::string d, long c, std::string what)
      : Object("NSError"), domain(std::move(d)), code(c), description(std::move(what)) {}
  std::string domain;
  long code;
  std::string description;
};
struct Url : Object {
  explicit Url(std::string p) : Object("NSURL"), path(std::move(p)) {}
  std::string path;
};

// object as a T; anything else is a violation. what: the message that got it.
template <class T>
T* as(Id object, const char* of_class, const char* what) {
  if (object == nullptr) violation(std::string(what) + ": nil where a " + of_class + " must be");
  if (std::string(object->isa->name()) != of_class || object->isa->is_class(object)) {
    violation(std::string(what) + ": a " + object->isa->name() + " where a " + of_class +
              " must be");
  }
  if (static_cast<Object*>(object)->references.load() <= 0) {
    violation(std::string(what) + ": the " + of_class + " is gone");
  }
  return static_cast<T*>(object);
}

// Sets *out to an error that the pool owns, if out is given.
void give_error(Id* out, const std::string& domain, long code, const std::string& what);

}  // namespace mlxtape::emulator
