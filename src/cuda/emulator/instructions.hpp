// What the emulated ptx layer calls: one function per kind of instruction, acting for the thread whose fiber runs. Twins of
// src/cuda/device/ptx/*.cuh stand in device/ptx/ and are thin. Read machine.hpp for the state behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/site.hpp"

namespace fovea::cuda::emulator {

struct Instruction {
  const char* name = "";
  Site site;
};

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
void store_global(void* to, const void* from, std::uint32_t bytes, Instruction what);
void load_shared(std::uint32_t from, void* to, std::uint32_t bytes, Instruction what);
void store_shared(std::uint32_t to, const void* from, std::uint32_t bytes, Instruction what);
void prefetch(const void* from, Instruction what);

enum class Order : std::uint8_t { relaxed, acq_rel };
std::int32_t atomic_add(std::int32_t* to, std::int32_t value, Order order, Instruction what);
/// `count` floats; each sum is atomic by itself.
void reduce_add(float* to, const float* values, std::uint32_t count, Instruction what);
void fence_acq_rel(Instruction what);

// ---- the warp ----
std::uint32_t shuffle(std::uint32_t value, std::uint32_t from_lane, Instruction what);
std::uint32_t ballot(bool is_true, Instruction what);
/// One lane of the converged warp.
bool elect(Instruction what);
void sync_warp(Instruction what);

// ---- barriers of the CTA ----
/// threads 0: all of the CTA.
void bar_sync(std::int32_t id, std::int32_t threads, Instruction what);
void bar_arrive(std::int32_t id, std::int32_t threads, Instruction what);

// ---- asynchronous copies ----
void cp_async(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t src_bytes,
              Instruction what);
void cp_async_commit(Instruction what);
void cp_async_wait(std::uint32_t pending, Instruction what);

// ---- products of a warp ----
void ldmatrix(std::uint32_t row, std::uint32_t matrices, bool is_transposed, std::uint32_t* to,
              Instruction what);
void stmatrix(std::uint32_t row, std::uint32_t matrices, bool is_transposed,
              const std::uint32_t* from, Instruction what);

enum class Format : std::uint8_t { f32, tf32, f16, bf16, e4m3, e5m2, s8, u8 };
/// m16n8, sums in f32; k follows from the format (16 of 16 bits, 8 of tf32).
void mma(Format format, float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1,
         Instruction what);

// ---- registers of a wgmma in flight ----
/// Accumulators in flight hold NaNs of this kind; the low bits are not used.
inline constexpr std::uint32_t kInFlight = 0x7fed'a000U, kInFlightMask = 0xffff'f000U;
void report_in_flight(Instruction what);

inline bool is_in_flight(std::uint32_t bits) { return (bits & kInFlightMask) == kInFlight; }

inline void check_registers(const void* registers, std::uint32_t bytes, Instruction what) {
  for (std::uint32_t i = 0; i + 4 <= bytes; i += 4) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, static_cast<const std::byte*>(registers) + i, 4);
    if (is_in_flight(bits)) report_in_flight(what);
  }
}

}  // namespace fovea::cuda::emulator
