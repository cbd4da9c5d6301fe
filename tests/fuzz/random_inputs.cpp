// Runs a fuzzer on random bytes, where there is no libFuzzer: with every build's compiler, flags and sanitizers. Of an
// input that ends the process, the number is printed.
//
//   fuzz_c_abi [COUNT [FIRST]]      COUNT inputs (default 20,000), from number FIRST on (default 0)
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t kMostBytes = 512;
std::uint64_t current = 0;  // the number of the input that runs

void say_which() {
  std::fprintf(stderr, "input %llu failed\n", static_cast<unsigned long long>(current));
}

void say_which_and_end(int signal) {
  say_which();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

/// Of the bytes behind the first eight some, half, most or all are 0, which our fuzzers take for "as usual".
std::vector<std::uint8_t> input(std::uint64_t number) {
  std::mt19937_64 random(number);
  std::vector<std::uint8_t> bytes(random() % kMostBytes);
  const std::uint64_t share = random() % 4;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint64_t word = random();
    if (i < 8 || word % 4 < share) bytes[i] = static_cast<std::uint8_t>(word >> 32U);
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(say_which);
  } else {
    for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT})
      std::signal(signal, say_which_and_end);
  }
  for (current = first; current < first + count; ++current) {
    const std::vector<std::uint8_t> bytes = input(current);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%llu inputs\n", static_cast<unsigned long long>(count));
  return 0;
}
