#include "cuda/emulator/fiber.hpp"

#include <sys/mman.h>

#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <new>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#define FOVEA_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FOVEA_EMULATOR_ASAN 1
#endif
#endif

#if defined(FOVEA_EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace fovea::cuda::emulator {
namespace {

constexpr std::size_t kGuardBytes = 4096;

/// Pages under a guard page, so that a kernel with too large frames faults instead of corrupting its neighbour.
class Stack {
 public:
  explicit Stack(std::size_t bytes) : bytes_(bytes + kGuardBytes) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(base_, kGuardBytes, PROT_NONE);
#if defined(FOVEA_EMULATOR_ASAN)
    // Frames of a fiber that ended on a stack mapped here before never returned.
    __asan_unpoison_memory_region(base_, bytes_);
#endif
  }
  ~Stack() { munmap(base_, bytes_); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* bottom() const { return static_cast<char*>(base_) + kGuardBytes; }
  std::size_t bytes() const { return bytes_ - kGuardBytes; }

 private:
  std::size_t bytes_;
  void* base_;
};

/// The stack outlives the fiber, which therefore frees nothing.
struct BorrowedStack {
  boost::context::stack_context allocate() { return {}; }
  void deallocate(boost::context::stack_context&) {}
};

void start_switch([[maybe_unused]] void** fake_stack, [[maybe_unused]] const void* bottom,
                  [[maybe_unused]] std::size_t bytes) {
#if defined(FOVEA_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
#endif
}

void finish_switch([[maybe_unused]] void* fake_stack, [[maybe_unused]] const void** bottom,
                   [[maybe_unused]] std::size_t* bytes) {
#if defined(FOVEA_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack, bottom, bytes);
#endif
}

}  // namespace

struct Fiber::State {
  explicit State(std::size_t stack_bytes) : stack(stack_bytes) {}

  boost::context::fiber loop(boost::context::fiber&& resumer) {
    caller = std::move(resumer);
    finish_switch(nullptr, &caller_bottom, &caller_bytes);
    while (!is_ending) {
      body(argument);
      body = nullptr;
      to_caller();
    }
    start_switch(nullptr, caller_bottom, caller_bytes);
    return std::move(caller);
  }

  void to_caller() {
    void* fake_stack = nullptr;
    start_switch(&fake_stack, caller_bottom, caller_bytes);
    caller = std::move(caller).resume();
    finish_switch(fake_stack, &caller_bottom, &caller_bytes);
  }

  void to_fiber() {
    void* fake_stack = nullptr;
    start_switch(&fake_stack, stack.bottom(), stack.bytes());
    fiber = std::move(fiber).resume();
    finish_switch(fake_stack, nullptr, nullptr);
  }

  Stack stack;
  boost::context::fiber fiber, caller;
  const void* caller_bottom = nullptr;
  std::size_t caller_bytes = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  bool is_ending = false;
};

Fiber::Fiber(std::size_t stack_bytes) : state_(std::make_unique<State>(stack_bytes)) {
  State* state = state_.get();
  boost::context::stack_context context;
  context.size = state->stack.bytes();
  context.sp = state->stack.bottom() + context.size;
  state->fiber = boost::context::fiber(
      std::allocator_arg, boost::context::preallocated(context.sp, context.size, context),
      BorrowedStack{},
      [state](boost::context::fiber&& resumer) { return state->loop(std::move(resumer)); });
}

Fiber::~Fiber() {
  // An idle loop ends by itself: unwinding it from here would confuse ASan about whose stack it is.
  state_->is_ending = true;
  if (state_->fiber) state_->to_fiber();
}

void Fiber::start(void (*body)(void*), void* argument) {
  state_->body = body;
  state_->argument = argument;
}

void Fiber::resume() { state_->to_fiber(); }

void Fiber::suspend() { state_->to_caller(); }

bool Fiber::is_idle() const { return state_->body == nullptr; }

std::unique_ptr<Fiber> FiberPool::take() {
  if (idle_.empty()) return std::make_unique<Fiber>(stack_bytes_);
  std::unique_ptr<Fiber> fiber = std::move(idle_.back());
  idle_.pop_back();
  return fiber;
}

void FiberPool::give_back(std::unique_ptr<Fiber> fiber) { idle_.push_back(std::move(fiber)); }

}  // namespace fovea::cuda::emulator
