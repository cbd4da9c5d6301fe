// NVRTC takes the printed text, for the oldest architecture and for Hopper, and finds registers for all of it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "compile/cuda/compiler.hpp"
#include "cuda/params/range_tables.hpp"
#include "expr/print_cuda.hpp"
#include "programs/library_words.hpp"
#include "programs/test_programs.hpp"

namespace fovea::cuda {
namespace {

/// A kernel that is nothing but its programs, and a walk over the tiles of 128 rows.
std::string unit_of(const expr::CudaProgram& program) {
  return fmt::format(R"(#include "{}"
#include "common/tile_walk.cuh"
namespace fovea::cuda {{
{}
struct Params {{
  Captures captures;
  TileSpan rows;
  float* scores;
}};
}}
extern "C" __global__ void fovea_kernel(const __grid_constant__ fovea::cuda::Params p) {{
  using namespace fovea::cuda;
  TileWalk<Mods> walk(p.rows, {{0, (p.rows.seqlen_kv + 63) / 64, 64}}, p.captures);
  for (VisitedTile tile{{}}; walk.next(tile);) {{
    const int key = tile.idx * 64 + ptx::lane_idx();
    const Position at{{p.rows.batch, p.rows.q_head_begin, p.rows.kv_head, p.rows.q_begin, key,
                      p.rows.seqlen_q, p.rows.seqlen_kv}};
    const float score = Mods::score(ptx::ld_global(p.scores + key), at, p.captures);
    if (tile.is_full || Mods::mask(at, p.captures)) ptx::st_global(p.scores + key, score);
  }}
}}
)",
                     program.include, program.mods);
}

void expect_compiles(const jit::KernelText& text) {
  for (const jit::Architecture architecture : {jit::Architecture{8, 0}, jit::Architecture{9, 0}}) {
    const jit::Cubin cubin = compiled(text, architecture);
    EXPECT_EQ(cubin.report.local_bytes, 0) << text.label << "\n" << cubin.report.log;
    EXPECT_LE(cubin.report.registers, 64) << text.label;
  }
}

TEST(PrintedText, OfLibraryWordsIsCompiledWithoutLocalMemory) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  for (const testing::LibraryWord& word : testing::library_words()) {
    expect_compiles({unit_of(expr::print_cuda(word.score, word.mask)), word.name});
  }
}

TEST(PrintedText, OfRandomProgramsIsCompiled) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  const testing::ProgramData data;
  // The largest: more would take seconds each and say the same.
  for (const int number : {testing::kNumRandomPrograms - 2, testing::kNumRandomPrograms - 1}) {
    const testing::TestProgram program = testing::random_program(data.captures(), number);
    const jit::KernelText text{unit_of(expr::print_cuda(program.score, program.mask)), "random"};
    EXPECT_NO_THROW(compiled(text, {8, 0})) << text.unit;
  }
}

TEST(RangeTables, AreBuiltByAKernelThatCompilesWithoutLocalMemory) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  expect_compiles(range_tables_text());
}

}  // namespace
}  // namespace fovea::cuda
