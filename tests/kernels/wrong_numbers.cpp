#include "kernels/wrong_numbers.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <limits>

#include "support/guarded_tensor.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

std::int64_t number(const Random& random, std::int64_t at, std::int64_t most) {
  constexpr std::int64_t kTwo31 = std::int64_t{1} << 31;
  const std::array<std::int64_t, 13> numbers = {0,
                                                1,
                                                most,
                                                most + 1,
                                                -1,
                                                kTwo31 - 1,
                                                kTwo31,
                                                -kTwo31,
                                                std::numeric_limits<std::int64_t>::max(),
                                                std::numeric_limits<std::int64_t>::min(),
                                                random.below(most + 1, at),
                                                random.below(most + 1, ~at),
                                                static_cast<std::int64_t>(random.bits(at))};
  return numbers[static_cast<std::size_t>(
      random.below(static_cast<std::int64_t>(numbers.size()), at ^ 0x5A5A))];
}

void set(const TensorView& numbers, std::int64_t offset, std::int64_t value) {
  auto* const data = const_cast<void*>(numbers.data());
  if (numbers.dtype() == Dtype::i64) {
    static_cast<std::int64_t*>(data)[offset] = value;
  } else {
    static_cast<std::int32_t*>(data)[offset] = static_cast<std::int32_t>(value);
  }
}

}  // namespace

void spoil_numbers(const TensorView& numbers, std::int64_t most, std::uint64_t draw) {
  if (!numbers) return;
  const Random random(draw, 17);
  const std::int64_t one_in = 1 + random.below(4, -1);
  const std::int64_t row = numbers.size(numbers.rank() - 1);
  for (std::int64_t i = 0; i < numbers.spec().num_elements(); ++i) {
    if (random.below(one_in, 1000 + i) != 0) continue;
    const std::int64_t offset = numbers.rank() == 1
                                    ? i * numbers.stride(0)
                                    : i / row * numbers.stride(0) + i % row * numbers.stride(1);
    set(numbers, offset, number(random, 1'000'000 + i, most));
  }
}

void spoil_elements(const TensorView& tensor, std::uint64_t draw) {
  const Random random(draw, 18);
  const bool is_float =
      tensor.dtype() == Dtype::f32 || tensor.dtype() == Dtype::f16 || tensor.dtype() == Dtype::bf16;
  const std::int64_t one_in = 1 + random.below(4, -1);
  const std::size_t size = size_bytes(tensor.dtype());
  std::int64_t i = 0;
  for_each_offset(tensor.spec(), [&](std::int64_t offset) {
    if (random.below(one_in, 1000 + ++i) != 0) return;
    const std::int64_t at = 1'000'000 + i;
    std::int64_t value = number(random, at, 1000);
    if (is_float) {
      constexpr std::array<std::int64_t, 6> kWords = {0x7fc07fc0, 0x7f800000, 0xff800000,
                                                      0x7c007c00, 0x4f000000, -1};
      const std::int64_t which = random.below(kWords.size() + 2, at);
      value = which < std::ssize(kWords) ? kWords[static_cast<std::size_t>(which)]
                                         : static_cast<std::int64_t>(random.bits(at));
    }
    auto* const element = static_cast<std::byte*>(const_cast<void*>(tensor.data())) +
                          offset * static_cast<std::int64_t>(size);
    std::memcpy(element, &value, size);
  });
}

bool is_order_alone(const cuda::emulator::Finding& finding) {
  using cuda::emulator::Fault;
  return finding.fault == Fault::race || finding.fault == Fault::proxy_fence_missing;
}

}  // namespace fovea::testing
