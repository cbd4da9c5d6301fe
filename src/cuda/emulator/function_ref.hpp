// A callable that somebody else keeps alive: what std::function would copy to the heap at every instruction.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace fovea::cuda::emulator {

template <class Signature>
class FunctionRef;

template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class Callable>
  requires(!std::is_same_v<std::remove_cvref_t<Callable>, FunctionRef>) FunctionRef(
      Callable&& callable)  // NOLINT(google-explicit-constructor): stands for the callable
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Arguments... arguments) -> Result {
          return (*static_cast<std::remove_reference_t<Callable>*>(object))(
              std::forward<Arguments>(arguments)...);
        }) {}

  Result operator()(Arguments... arguments) const {
    return call_(object_, std::forward<Arguments>(arguments)...);
  }

 private:
  void* object_;
  Result (*call_)(void*, Arguments...);
};

}  // namespace fovea::cuda::emulator
