#include "programs/library_words.hpp"

#include <fmt/format.h>

#include <array>

#include "fovea/mask.hpp"

#include "expr/print_cuda.hpp"

namespace fovea::testing {
namespace {

/// Shapes and strides alone matter here: nothing reads the elements.
TensorView tensor(Dtype dtype, const std::vector<std::int64_t>& shape) {
  static const std::array<std::byte, 1> nothing{};
  TensorSpec spec;
  spec.dtype = dtype;
  spec.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int dim = spec.rank - 1; dim >= 0; --dim) {
    const auto d = static_cast<std::size_t>(dim);
    spec.shape[d] = shape[d];
    spec.strides[d] = stride;
    stride *= shape[d];
  }
  return {nothing.data(), spec};
}

std::string slots_text(const expr::CudaProgram& program) {
  std::string text;
  for (std::size_t i = 0; i < program.tensors.size(); ++i) {
    const expr::CudaTensorSlot& slot = program.tensors[i];
    const bool has_table = slot.range_dim != expr::kNoRangeTable;
    text += fmt::format("tensor {}: {}, rank {}{}\n", i, slot.name, slot.rank,
                        has_table ? fmt::format(", ranges along {}", slot.range_dim) : "");
  }
  for (std::size_t i = 0; i < program.scalars.size(); ++i) {
    text += fmt::format("scalar {}: {}\n", i, program.scalars[i].name);
  }
  return text;
}

}  // namespace

const std::vector<LibraryWord>& library_words() {
  static const std::vector<LibraryWord> words = {
      {"causal", {}, causal()},
      {"window", {}, window(100, 0)},
      {"alibi", alibi(tensor(Dtype::f32, {8})), {}},
      {"softcap", softcap(30), causal()},
      {"documents", {}, documents(tensor(Dtype::i32, {2, 4096})) && causal()},
      {"prefix", {}, prefix_lm(tensor(Dtype::i64, {2}))},
      {"dilated", {}, dilated(3)},
      {"tree", {}, tree(tensor(Dtype::i32, {2, 40, 2}))},
      {"bias", bias(tensor(Dtype::bf16, {1, 8, 64, 64})), {}},
      {"streaming", {}, streaming(4, 1024)},
      {"packed_bits",
       {},
       parse_mask_mod(
           "(bits[q_idx, kv_idx // 64, kv_idx // 32 % 2] >> kv_idx % 32 & 1) != 0",
           {.tensors = {{"bits", as_words32(tensor(Dtype::i64, {4096, 64}))}}, .scalars = {}})},
  };
  return words;
}

std::string golden_text(const LibraryWord& word) {
  const expr::CudaProgram program =
      expr::print_cuda(word.score, word.mask, expr::SlotNames::written);
  return fmt::format("{}\n{}", program.mods, slots_text(program));
}

}  // namespace fovea::testing
