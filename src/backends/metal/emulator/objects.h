// A small Objective-C runtime: classes with tables of methods, objects that count their references, selectors that know
// the types with which they are sent. What a program does wrong with it ends the program and is named: a selector that
// there is not, a wrong type, a message to an object that is gone, an object that nobody owns.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <typeinfo>

struct objc_selector;

namespace mlxtape::emulator {
class Class;
}

struct objc_object {  // NOLINT(readability-identifier-naming): the Objective-C runtime's name
  mlxtape::emulator::Class* isa;
};

namespace mlxtape::emulator {

using Id = objc_object*;
using Selector = objc_selector*;

// Says what the program did wrong, and ends it.
[[noreturn]] void violation(const std::string& what);

struct Object : objc_object {
  explicit Object(const char* of_class);
  std::atomic<long> references{1};
};

struct Method {
  void (*function)() = nullptr;
  const char* signature = nullptr;
};

class Class : public objc_object {
 public:
  // make: what alloc does; finish: frees what an object holds. Its own few bytes stay, so that a late message is found.
  Class(const char* name, Id (*make)(), void (*finish)(Object*));

  // A method of objects, or of the class itself: R (*)(T* self, Selector, A...).
  template <class R, class T, class... A>
  Class& on(const char* selector, R (*method)(T*, Selector, A...)) {
    add(objects_, selector, {reinterpret_cast<void (*)()>(method), typeid(R(A...)).name()});
    return *this;
  }
  template <class R, class T, class... A>
  Class& on_class(const char* selector, R (*method)(T*, Selector, A...)) {
    add(classes_, selector, {reinterpret_cast<void (*)()>(method), typeid(R(A...)).name()});
    return *this;
  }

  const char* name() const { return name_; }
  void finish(Object* object) const { finish_(object); }
  Id make() const { return make_ == nullptr ? nullptr : make_(); }
  const Method* find(Selector selector, bool of_class) const;
  bool is_class(const objc_object* object) const { return object == this; }

 private:
  using Methods = std::map<Selector, Method>;
  static void add(Methods& methods, const char* selector, Method method);

  const char* name_;
  Id (*make_)();
  void (*finish_)(Object*);
  Methods objects_, classes_;
};

// finish of a class whose objects hold nothing but C++ members: T is destroyed and its memory kept.
template <class T>
void destroy(Object* object) {
  static_cast<T*>(object)->~T();
}

Class* find_class(const std::string& name);  // null where there is none
void set_class_hidden(const std::string& name, bool is_hidden);

void retain(Object* object);
void release(Object* object);
Id autorelease(Object* object);  // it lives until the thread's innermost pool ends

// Holds a reference.
template <class T>
class Reference {
 public:
  Reference() = default;
  explicit Reference(T* object) : object_(object) {
    if (object_ != nullptr) retain(object_);
  }
  Reference(const Reference& o) : Reference(o.object_) {}
  Reference(Reference&& o) noexcept : object_(o.object_) { o.object_ = nullptr; }
  Reference& operator=(Reference o) noexcept {
    std::swap(object_, o.object_);
    return *this;
  }
  ~Reference() {
    if (object_ != nullptr) release(object_);
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

std::map<std::string, long> count_objects();  // live ones, by class

}  // namespace mlxtape::emulator
