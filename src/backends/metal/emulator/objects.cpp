#include "backends/metal/emulator/objects.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

struct objc_selector {
  std::string name;
  std::atomic<const char*> signature{nullptr};  // of those who send it
};

namespace mlxtape::emulator {

Selector register_selector(const char* name);
void register_foundation();  // foundation.cpp
void register_metal();       // metal.cpp
void load_control();         // control.cpp: what the environment says of classes

namespace {

// Never destroyed: objects live and die while the program ends.
struct Runtime {
  std::mutex mutex;
  std::map<std::string, objc_selector*> selectors;
  std::map<std::string, Class*> classes;
  std::set<std::string> hidden;
  std::map<std::string, long> live;
  std::deque<Object*> gone;  // objects that ended, the last ones
};
constexpr std::size_t kGoneKept = 100'000;

Runtime& runtime() {
  static auto* runtime = new Runtime;
  return *runtime;
}

thread_local std::vector<std::vector<Object*>> pools;

void note_live(const char* name, long change) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  r.live[name] += change;
}

bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

}  // namespace

void violation(const std::string& what) {
  std::fprintf(stderr, "metal emulator: %s\n", what.c_str());
  std::fflush(stderr);
  std::abort();
}

// ---- classes and selectors ----

Class::Class(const char* name, Id (*make)(), void (*finish)(Object*))
    : objc_object{this}, name_(name), make_(make), finish_(finish) {
  on(
      "retain", +[](Object* self, Selector) -> Id {
        emulator::retain(self);
        return self;
      });
  on("release", +[](Object* self, Selector) -> void { emulator::release(self); });
  on("init", +[](Object* self, Selector) -> Id { return self; });
  on_class(
      "alloc", +[](Class* self, Selector) -> Id {
        const Id made = self->make();
        if (made == nullptr) violation(std::string(self->name()) + " is not made by alloc");
        return made;
      });
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  r.classes[name] = this;
}

void Class::add(Methods& methods, const char* selector, Method method) {
  methods[register_selector(selector)] = method;
}

const Method* Class::find(Selector selector, bool of_class) const {
  const Methods& methods = of_class ? classes_ : objects_;
  const auto found = methods.find(selector);
  return found == methods.end() ? nullptr : &found->second;
}

Selector register_selector(const char* name) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  objc_selector*& selector = r.selectors[name];
  if (selector == nullptr) {
    selector = new objc_selector;
    selector->name = name;
  }
  return selector;
}

Class* find_class(const std::string& name) {
  static const bool registered = [] {
    load_control();
    register_foundation();
    register_metal();
    return true;
  }();
  static_cast<void>(registered);
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  const auto found = r.classes.find(name);
  return found == r.classes.end() || r.hidden.count(name) != 0 ? nullptr : found->second;
}

void set_class_hidden(const std::string& name, bool is_hidden) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  if (is_hidden) {
    r.hidden.insert(name);
  } else {
    r.hidden.erase(name);
  }
}

// ---- references ----

Object::Object(const char* of_class) : objc_object{find_class(of_class)} { note_live(of_class, 1); }

void retain(Object* object) { object->references.fetch_add(1); }

void release(Object* object) {
  const long left = object->references.fetch_sub(1) - 1;
  if (left > 0) return;
  if (left < 0) violation("a " + std::string(object->isa->name()) + " is released once too often");
  const Class* of_class = object->isa;
  of_class->finish(object);
  object->isa = const_cast<Class*>(of_class);
  object->references.store(0);
  note_live(of_class->name(), -1);
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  r.gone.push_back(object);
  if (r.gone.size() > kGoneKept) {
    ::operator delete(r.gone.front());
    r.gone.pop_front();
  }
}

Id autorelease(Object* object) {
  if (pools.empty()) {
    violation("a " + std::string(object->isa->name()) +
              " is returned unretained, and this thread has no autorelease pool");
  }
  pools.back().push_back(object);
  return object;
}

std::map<std::string, long> count_objects() {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  std::map<std::string, long> live;
  for (const auto& [name, count] : r.live) {
    if (count != 0) live[name] = count;
  }
  return live;
}

}  // namespace mlxtape::emulator

// ---- what programs call ----

using namespace mlxtape::emulator;

extern "C" {

Selector sel_registerName(const char* name) { return register_selector(name); }
Id objc_getClass(const char* name) { return find_class(name); }

void mlxtape_objc_signature(Selector selector, const char* signature) {
  const char* before = nullptr;
  if (!selector->signature.compare_exchange_strong(before, signature) && !same(before, signature)) {
    violation("two places send " + selector->name + " with different types: " + before + " and " +
              signature);
  }
}

void* objc_autoreleasePoolPush() {
  pools.emplace_back();
  return reinterpret_cast<void*>(pools.size());
}

void objc_autoreleasePoolPop(void* pool) {
  if (pools.empty() || reinterpret_cast<void*>(pools.size()) != pool) {
    violation("an autorelease pool ends that is not this thread's innermost");
  }
  const std::vector<Object*> objects = std::move(pools.back());
  pools.pop_back();
  for (Object* object : objects) release(object);
}

// Called by objc_msgSend, which then goes there with every argument in its register.
void* mlxtape_find_method(Id receiver, Selector selector) {
  Class* of_class = receiver->isa;
  const bool to_class = of_class->is_class(receiver);
  const auto refuse = [&](const std::string& why) {
    violation(std::string(to_class ? "+[" : "-[") + of_class->name() + " " + selector->name +
              "]: " + why);
  };
  if (!to_class && static_cast<Object*>(receiver)->references.load() <= 0)
    refuse("the object is gone");
  const Method* method = of_class->find(selector, to_class);
  if (method == nullptr) refuse("unrecognized selector");
  const char* sent = selector->signature.load();
  if (sent == nullptr) refuse("sent by a place that did not say its types");
  if (!same(sent, method->signature)) {
    refuse(std::string("sent with types ") + sent + ", declared with " + method->signature);
  }
  return reinterpret_cast<void*>(method->function);
}

}  // extern "C"

// A message to nil returns zero, in the registers of integers and of floats.
#if defined(__x86_64__)
asm(R"(
.text
.globl objc_msgSend
.type objc_msgSend, @function
objc_msgSend:
  test %rdi, %rdi
  je 1f
  push %rbp
  mov %rsp, %rbp
  push %rdi
  push %rsi
  push %rdx
  push %rcx
  push %r8
  push %r9
  sub $64, %rsp
  movsd %xmm0, 0(%rsp)
  movsd %xmm1, 8(%rsp)
  movsd %xmm2, 16(%rsp)
  movsd %xmm3, 24(%rsp)
  call mlxtape_find_method
  movsd 0(%rsp), %xmm0
  movsd 8(%rsp), %xmm1
  movsd 16(%rsp), %xmm2
  movsd 24(%rsp), %xmm3
  add $64, %rsp
  pop %r9
  pop %r8
  pop %rcx
  pop %rdx
  pop %rsi
  pop %rdi
  pop %rbp
  jmp *%rax
1:
  xor %eax, %eax
  xor %edx, %edx
  pxor %xmm0, %xmm0
  pxor %xmm1, %xmm1
  ret
.size objc_msgSend, . - objc_msgSend
)");
#else
asm(R"(
.text
.globl objc_msgSend
.type objc_msgSend, %function
objc_msgSend:
  cbz x0, 1f
  stp x29, x30, [sp, #-144]!
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  str x8, [sp, #80]
  stp d0, d1, [sp, #96]
  stp d2, d3, [sp, #112]
  bl mlxtape_find_method
  mov x16, x0
  ldp x0, x1, [sp, #16]
  ldp x2, x3, [sp, #32]
  ldp x4, x5, [sp, #48]
  ldp x6, x7, [sp, #64]
  ldr x8, [sp, #80]
  ldp d0, d1, [sp, #96]
  ldp d2, d3, [sp, #112]
  ldp x29, x30, [sp], #144
  br x16
1:
  mov x0, #0
  mov x1, #0
  movi d0, #0
  movi d1, #0
  ret
.size objc_msgSend, . - objc_msgSend
)");
#endif
