// Any bytes as a .npy file: an array inside the file, or one refusal.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tools/failure.hpp"
#include "tools/npy.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fovea::tools;
  if (size == 0) return 0;
  const Uint16 uint16 = data[0] % 2 == 0 ? Uint16::refused : Uint16::is_bf16;
  auto file = std::make_shared<const Buffer>(Buffer::uninitialized(size - 1));
  if (size > 1) std::memcpy(file->data(), data + 1, size - 1);
  try {
    const Array array = parse_npy(file, "x.npy", uint16);
    const auto bytes =
        static_cast<std::size_t>(array.spec.num_elements()) * fovea::size_bytes(array.spec.dtype);
    volatile unsigned sum = 0;
    for (std::size_t i = 0; i < bytes; ++i) sum = sum + std::to_integer<unsigned>(array.data[i]);
  } catch (const Failure& failure) {
    if (std::strchr(failure.what(), '\n') != nullptr) std::abort();
  }
  return 0;
}
