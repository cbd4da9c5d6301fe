// What the emulated ptx layer calls: one function per kind of instruction, acting for the thread whose fiber runs.
// Twins of src/cuda/device/ptx/*.cuh stand in device/ptx/ and are thin. Read machine.hpp for the state behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/site.hpp"

namespace fovea::cuda::emulator {

struct Instruction {
  const char* name = "";
  Site site;
};

/// A finding where the launch is for a GPU before this compute capability (80 for 8.0), which lacks the instruction.
void require(int compute_capability, Instruction what);

// ---- where a thread is ----
Dim3 thread_idx();
Dim3 block_idx();
Dim3 block_dim();
Dim3 grid_dim();
std::uint32_t lane_idx();
std::uint32_t warp_idx();
std::uint32_t dynamic_shared();
void set_role(const char* role);
[[noreturn]] void trap(Site site);

// ---- memory ----
void load_global(const void* from, void* to, std::uint32_t bytes, Instruction what);
void load_global_nc(const void* from, void* to, std::uint32_t bytes, Instruction what);
void store_global(void* to, const void* from, std::uint32_t bytes, Instruction what);
void load_shared(std::uint32_t from, void* to, std::uint32_t bytes, Instruction what);
void store_shared(std::uint32_t to, const void* from, std::uint32_t bytes, Instruction what);
void prefetch(const void* from, Instruction what);

enum class Order : std::uint8_t { relaxed, acq_rel };
std::int32_t atomic_add(std::int32_t* to, std::int32_t value, Order order, Instruction what);
std::uint32_t exchange_shared(std::uint32_t to, std::uint32_t value, Instruction what);
/// `count` floats; each sum is atomic by itself.
void reduce_add(float* to, const float* values, std::uint32_t count, Instruction what);
void reduce_add(std::uint64_t* to, std::uint64_t value, Instruction what);
void reduce_or(std::uint32_t* to, std::uint32_t bits, Instruction what);
void reduce_max(std::uint32_t* to, std::uint32_t value, Instruction what);
void reduce_add_shared(std::uint32_t to, std::uint32_t value, Instruction what);
/// `count` pairs of bf16.
void reduce_add_bf16(void* to, const std::uint32_t* pairs, std::uint32_t count, Instruction what);
void fence_acq_rel(Instruction what);
/// What the grid before has done comes before what the thread does from now on.
void wait_for_grid_before();

// ---- the warp ----
std::uint32_t shuffle(std::uint32_t value, std::uint32_t from_lane, Instruction what);
std::uint64_t ballot(bool is_true, Instruction what);
/// One lane of the converged warp, always the same one.
bool elect(Instruction what);
void sync_warp(Instruction what);

// ---- barriers of the CTA ----
/// threads 0: all of the CTA.
void bar_sync(std::int32_t id, std::int32_t threads, Instruction what);
void bar_arrive(std::int32_t id, std::int32_t threads, Instruction what);
/// All of the CTA come. It orders what they did before a fence that releases, for those behind one that acquires.
void barrier_alone(Instruction what);
void fence_release_workgroup(Instruction what);
void fence_acquire_workgroup(Instruction what);

// ---- asynchronous copies ----
void cp_async(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t src_bytes,
              Instruction what);
void cp_async_commit(Instruction what);
void cp_async_wait(std::uint32_t pending, Instruction what);

/// A copy of AMD's warps: each lane's bytes land at `to`, one address for all of them, plus its number times `bytes`.
/// Null: zeros.
void copy_to_shared(std::uint32_t to, const void* from, std::uint32_t bytes, Instruction what);

// ---- products of a warp ----
void ldmatrix(std::uint32_t row, std::uint32_t matrices, bool is_transposed, std::uint32_t* to,
              Instruction what);
void stmatrix(std::uint32_t row, std::uint32_t matrices, bool is_transposed,
              const std::uint32_t* from, Instruction what);

enum class Format : std::uint8_t { f32, tf32, f16, bf16, e4m3, e5m2, s8, u8 };
/// m16n8, sums in f32, or of s8 and u8 in integers, as bits in d; k follows from the format (32 of 8 bits, 16 of 16, 8
/// of tf32).
void mma(Format format, float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1,
         Instruction what);
/// The first half of a product of f16.
void mma_k8_f16(float* d, std::uint32_t a0, std::uint32_t a1, std::uint32_t b, Instruction what);

/// One lane of m16n8k64 of e2m1, sums in f32; scales of 16 numbers are e4m3 without sign, of 32 powers of two.
struct ScaledProduct {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
  std::uint32_t a_scales, b_scales;
  std::uint32_t a_thread, b_thread;  // whose scales count, of each four lanes
  std::uint32_t group;
};
void mma_scaled(const ScaledProduct& own, Instruction what);

/// 32 x 32 x `depth` by 64 lanes, f16 or bf16, sums in f32.
void mfma(Format format, std::uint32_t depth, float* d, const std::uint32_t* a,
          const std::uint32_t* b, Instruction what);
/// Of 16 lanes each names 8 bytes, a quarter of one of four rows, and gets a column of elements of 16 bits.
void ds_read_tr_b16(std::uint32_t from, std::uint32_t* to, Instruction what);

// ---- mbarriers ----
void mbarrier_init(std::uint32_t address, std::uint32_t count, Instruction what);
void mbarrier_inval(std::uint32_t address, Instruction what);
/// Own or remote; count 0: bytes alone.
void mbarrier_arrive(std::uint32_t address, std::uint32_t count, std::uint32_t expected_bytes,
                     Instruction what);
bool mbarrier_test_wait(std::uint32_t address, std::uint32_t parity, Instruction what);
/// Sleeps until the phase is complete, or says no after a while, as the seed says.
bool mbarrier_try_wait(std::uint32_t address, std::uint32_t parity, Instruction what);
void mbarrier_wait(std::uint32_t address, std::uint32_t parity, Instruction what);
void cp_async_mbarrier_arrive(std::uint32_t address, Instruction what);

// ---- the async proxy ----
void fence_proxy_async(bool is_shared, bool is_global, Instruction what);
void fence_mbarrier_init(Instruction what);

/// cta_mask 0: to this CTA alone.
void tma_load(std::uint32_t to, const void* map, std::span<const std::int32_t> coordinates,
              std::uint32_t barrier, std::uint32_t cta_mask, Instruction what);
void tma_store(const void* map, std::span<const std::int32_t> coordinates, std::uint32_t from,
               bool is_sum, Instruction what);
void check_tensor_map(const void* map, Instruction what);
void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier,
               Instruction what);
void bulk_store(void* to, std::uint32_t from, std::uint32_t bytes, bool is_sum, Instruction what);
void bulk_commit(Instruction what);
void bulk_wait(std::uint32_t pending, bool reads_only, Instruction what);

// ---- clusters ----
std::uint32_t cluster_rank();
std::uint32_t cluster_size();
std::uint32_t mapa(std::uint32_t address, std::uint32_t rank);
void cluster_arrive(bool is_release, Instruction what);
void cluster_wait(Instruction what);
void st_async(std::uint32_t to, const void* value, std::uint32_t bytes, std::uint32_t barrier,
              Instruction what);
void bulk_copy_to_cluster(std::uint32_t to, std::uint32_t from, std::uint32_t bytes,
                          std::uint32_t barrier, Instruction what);

// ---- warpgroups ----
void setmaxnreg(std::uint32_t registers, bool is_inc, Instruction what);

/// One wgmma: m64, `columns`, 32 bytes of depth.
struct Wgmma {
  Format a_format, b_format;
  std::uint32_t columns;
  bool is_integer, is_accumulating;
  bool a_is_in_registers, a_is_k_major, b_is_k_major;
  std::uint64_t a, b;                // descriptors
  const std::uint32_t* a_registers;  // four
  std::uint32_t* sums;               // columns / 2
};
void wgmma(Wgmma form, Instruction what);
void wgmma_fence(Instruction what);
void wgmma_commit(Instruction what);
void wgmma_wait(std::uint32_t pending, Instruction what);

// ---- tensor memory ----
/// Shapes of tcgen05.ld and st, by registers of one repeat.
enum class TensorShape : std::uint8_t { l32x32b, l16x64b, l16x128b, l16x256b, l16x32bx2 };
enum class TensorCopyShape : std::uint8_t {
  rows128x256b,
  rows128x128b,
  rows64x128b_warpx2_02_13,
  rows64x128b_warpx2_01_23,
  rows32x128b_warpx4,
};

void tensor_alloc(std::uint32_t to, std::uint32_t columns, int cta_group, Instruction what);
void tensor_dealloc(std::uint32_t from, std::uint32_t columns, int cta_group, Instruction what);
void tensor_relinquish(int cta_group, Instruction what);
void tensor_fence_before(Instruction what);
void tensor_fence_after(Instruction what);
/// cta_mask 0: on the barrier named alone.
void tensor_commit(std::uint32_t barrier, std::uint32_t cta_mask, int cta_group, Instruction what);

/// One tcgen05.ld: `count` registers of each lane, which hold NaNs until the wait.
struct TensorMove {
  TensorShape shape;
  std::uint32_t address;
  std::uint32_t split;  // of l16x32bx2
  std::uint32_t count;
  std::uint32_t* registers;
  std::uint32_t* greatest;  // of tcgen05.ld.red; else null
};
void tensor_load(TensorMove move, Instruction what);
void tensor_store(TensorMove move, Instruction what);
/// Every load of this thread is complete. Its registers have their values once they were named, too: until then the
/// compiler may move a use of them before the wait.
void tensor_wait_load(Instruction what);
void tensor_name_loaded(std::uint32_t* registers, Instruction what);
void tensor_wait_store(Instruction what);

enum class TensorKind : std::uint8_t {
  f16,
  tf32,
  f8f6f4,
  i8,
  mxf8f6f4_block32,
  mxf4_block32,
  mxf4nvf4_block32,
  mxf4nvf4_block16,
};
/// One tcgen05.mma, as the thread issues it.
struct TensorMma {
  TensorKind kind;
  int cta_group;
  std::uint32_t d;
  bool a_is_in_tensor_memory;
  std::uint64_t a, b;  // descriptors; a may be an address of tensor memory
  std::uint32_t instruction;
  std::uint32_t a_scales, b_scales;
  std::span<const std::uint32_t> disabled_lanes;
  bool is_accumulating;
};
void tensor_mma(TensorMma form, Instruction what);
void tensor_copy(TensorCopyShape shape, std::uint32_t to, std::uint64_t from, int cta_group,
                 Instruction what);

// ---- registers of a wgmma in flight ----
/// What accumulators in flight hold: a signalling NaN, so that arithmetic in place changes it too (by the quiet bit).
inline constexpr std::uint32_t kInFlight = 0x7fad'a000U, kQuietBit = 0x0040'0000U;
/// A fault in warps that have issued a wgmma: in others a value may look so, half of an address for one.
void report_in_flight(Instruction what);

inline bool is_in_flight(std::uint32_t bits) { return (bits & ~kQuietBit) == kInFlight; }

inline void check_registers(const void* registers, std::uint32_t bytes, Instruction what) {
  for (std::uint32_t i = 0; i + 4 <= bytes; i += 4) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, static_cast<const std::byte*>(registers) + i, 4);
    if (is_in_flight(bits)) report_in_flight(what);
  }
}

}  // namespace fovea::cuda::emulator
