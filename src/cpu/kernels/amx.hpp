// What kernels of AMX tile instructions share: the configuration of the tiles, and a fence for the compiler.
// Read gradient_amx_bf16.cpp next.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <atomic>
#include <cstdint>

// Intrinsics rather than Highway, which knows no tiles.
#define FOVEA_AMX \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#define FOVEA_AMX_INLINE FOVEA_AMX __attribute__((always_inline)) inline

namespace fovea::cpu::amx {

inline constexpr std::int64_t kTileRows = 16;   // rows of a tile, and fp32 columns in one
inline constexpr std::int64_t kTileBytes = 64;  // of a tile's row
inline constexpr std::int64_t kTileDepth = 32;  // bf16 elements of a tile's row

/// Intel SDM vol. 1, 18.3: eight tiles of 16 rows x 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Once per work item: a configuration and its release take as long as 10 tile products, and tiles left configured slow
/// context switches.
///
/// Note: the compilers' tile intrinsics do not say what memory they touch: GCC 12 took the stores into a configuration
/// on the stack for dead. Hence a constant, and CompilerFence around all tile instructions.
FOVEA_AMX inline void start() {
  static constexpr TileConfig kConfig{};
  _tile_loadconfig(&kConfig);
}
FOVEA_AMX inline void stop() { _tile_release(); }

/// What was written before is in memory for the tile instructions of this scope, and what they write for the code
/// behind it.
class CompilerFence {
 public:
  CompilerFence() { std::atomic_signal_fence(std::memory_order_seq_cst); }
  ~CompilerFence() { std::atomic_signal_fence(std::memory_order_seq_cst); }
  CompilerFence(const CompilerFence&) = delete;
  CompilerFence& operator=(const CompilerFence&) = delete;
};

}  // namespace fovea::cpu::amx

#endif
