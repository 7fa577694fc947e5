// FunctionRef: a callable passed down for the length of one call; owns nothing, allocates nothing.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace mlxtape {

template <class Signature>
class FunctionRef;

template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <class Fn, class = std::enable_if_t<!std::is_same_v<std::decay_t<Fn>, FunctionRef>>>
  FunctionRef(Fn&& fn)  // implicit on purpose: lambdas are passed in place
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(fn)))),
        call_([](void* object, Args... args) -> Result {
          return (*static_cast<std::remove_reference_t<Fn>*>(object))(std::forward<Args>(args)...);
        }) {}

  Result operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  Result (*call_)(void*, Args...);
};

}  // namespace mlxtape
