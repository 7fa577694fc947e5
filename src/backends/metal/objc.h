// Messages to Objective-C objects from C++. The runtime's five functions are declared here and no header of Apple's is
// read: on macOS they are the system's, in tests on other systems the emulator's.
#pragma once

#include <utility>
#ifdef MLXTAPE_METAL_EMULATED
#include <typeinfo>
#endif

extern "C" {
struct objc_object;
struct objc_selector;
objc_object* objc_getClass(const char* name);
objc_selector* sel_registerName(const char* name);
void objc_msgSend();
void* objc_autoreleasePoolPush();
void objc_autoreleasePoolPop(void* pool);
#ifdef MLXTAPE_METAL_EMULATED
// Told once for each place that sends a message, so that a wrong type of an argument is found.
void mlxtape_objc_signature(objc_selector* selector, const char* signature);
#endif
}

namespace mlxtape::metal {

using Id = objc_object*;

// A selector with the types of its method. A wrong type compiles and is passed in a wrong register: so each selector is
// written down once, in calls.h, and the emulator compares.
template <class Signature>
class Message;
template <class R, class... A>
class Message<R(A...)> {
 public:
  explicit Message(const char* selector) : selector_(sel_registerName(selector)) {
#ifdef MLXTAPE_METAL_EMULATED
    mlxtape_objc_signature(selector_, typeid(R(A...)).name());
#endif
  }
  R operator()(Id object, A... arguments) const {
    using Method = R (*)(Id, objc_selector*, A...);
    return reinterpret_cast<Method>(&objc_msgSend)(object, selector_, arguments...);
  }

 private:
  objc_selector* selector_;
};

inline Id retain(Id object) {
  static const Message<Id()> call("retain");
  return object == nullptr ? nullptr : call(object);
}
inline void release(Id object) {
  static const Message<void()> call("release");
  if (object != nullptr) call(object);
}

// One reference to an object. What a `new...` or `Copy...` returns is adopted; what others return belongs to the
// autorelease pool and is shared.
class Retained {
 public:
  Retained() = default;
  static Retained adopt(Id object) { return Retained(object); }
  static Retained share(Id object) { return Retained(retain(object)); }
  Retained(const Retained& other) : object_(retain(other.object_)) {}
  Retained(Retained&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Retained& operator=(Retained other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Retained() { release(object_); }
  Id get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Retained(Id object) : object_(object) {}
  Id object_ = nullptr;
};

// Objects that methods return unretained live until its end. Every function that sends such messages has one: threads of
// C++ have none of their own.
class AutoreleasePool {
 public:
  AutoreleasePool() : pool_(objc_autoreleasePoolPush()) {}
  ~AutoreleasePool() { objc_autoreleasePoolPop(pool_); }
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  void* pool_;
};

}  // namespace mlxtape::metal
