// Any bytes as a .safetensors file: tensors inside the file, or one refusal.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tools/failure.hpp"
#include "tools/safetensors.hpp"

namespace {

void read_all(const fovea::tools::Safetensors& tensors, const std::string& name) {
  const fovea::tools::Array array = tensors.tensor(name);
  const auto bytes =
      static_cast<std::size_t>(array.spec.num_elements()) * fovea::size_bytes(array.spec.dtype);
  volatile unsigned sum = 0;
  for (std::size_t i = 0; i < bytes; ++i) sum = sum + std::to_integer<unsigned>(array.data[i]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fovea::tools;
  // The length in front of the header is supplied: bytes are spent on the header, not on guessing its length.
  if (size < 2) return 0;
  const std::size_t header = (data[0] | static_cast<std::size_t>(data[1]) << 8U) % size;
  auto file = std::make_shared<const Buffer>(Buffer::zeroed(size - 2 + 8));
  for (std::size_t i = 0; i < 8; ++i) file->data()[i] = static_cast<std::byte>(header >> (8 * i));
  std::memcpy(file->data() + 8, data + 2, size - 2);
  try {
    const Safetensors tensors(file, "x.safetensors");
    for (const auto& entry : tensors.entries()) {
      try {
        read_all(tensors, entry.name);
      } catch (
          const Failure&) {  // a dtype that is not Fovea's; the others still have to be readable
      }
    }
  } catch (const Failure& failure) {
    if (std::strchr(failure.what(), '\n') != nullptr) std::abort();
  }
  return 0;
}
