// What an instruction descriptor and the shared memory descriptors of tcgen05 say, taken apart and checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/emulator/instructions.hpp"

namespace fovea::cuda::emulator {

enum class TensorElement : std::uint8_t {
  f16,
  bf16,
  tf32,
  e4m3,
  e5m2,
  e2m3,
  e3m2,
  e2m1,
  u8,
  s8,
};

enum class TensorSum : std::uint8_t { f16, f32, s32 };

struct TensorForm {
  TensorElement a, b;
  TensorSum sum;
  std::uint32_t m, n, k;  // of both CTAs of a pair
  bool a_is_mn_major, b_is_mn_major;
  bool negates_a, negates_b;
  bool is_packed;                 // two elements of 4 bits to a byte
  std::uint32_t scales = 0;       // of a row, 0: none
  bool has_ue8m0_scales = false;  // else ue4m3
  std::uint32_t a_scale_byte = 0, b_scale_byte = 0;
};

/// What is wrong with the instruction, or nothing and the form.
struct DecodedForm {
  std::string complaint;
  TensorForm form{};
};
DecodedForm decode_instruction(TensorKind kind, int cta_group, std::uint32_t bits);

/// What is wrong with a shared memory descriptor of tcgen05; empty: nothing.
std::string complaint_of_descriptor(std::uint64_t descriptor);

/// Bits that an element takes in 16 bytes of shared memory, of which it may leave the end empty.
std::uint32_t element_bits(TensorElement element);
/// Elements in 16 bytes of shared memory.
std::uint32_t elements_of_chunk(TensorElement element, bool is_packed);
double decode(TensorElement element, std::uint32_t bits);
/// Element i of bytes as shared or tensor memory holds them.
double element_at(TensorElement element, const std::byte* bytes, std::uint32_t i);
double decode_scale(std::uint32_t bits, bool is_ue8m0);

}  // namespace fovea::cuda::emulator
