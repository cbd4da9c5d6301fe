// Tensor memory to registers and back (TensorCore 5th Generation Family Instructions: tcgen05.ld, st, wait; sm_100a,
// sm_103a). A whole converged warp w runs each function, with one address in all lanes, whose lane is 32 (w % 4), for
// shapes of 16 lanes also 16 more. Cells by lane t of the warp, relative to the address, r[i] being the registers:
//
//   32x32b      r[i]          -> lane t, column i                        a thread has a row
//   16x64b      r[i]          -> lane 8 (t % 2) + t / 4, column t / 2 % 2 + 2 i
//   16x128b     r[2i + h]     -> lane t / 4 + 8 h, column t % 4 + 4 i
//   16x256b     r[4i + 2h + e]-> lane t / 4 + 8 h, column 2 (t % 4) + e + 8 i, the fragment of d of mma.sync
//   16x32bx2    r[i]          -> lane t % 16, column i, for t >= 16 column split + i
//
// Registers are float or std::uint32_t; how many decides .x1 to .x128. Both directions are asynchronous: read
// tcgen05.cuh first.
#pragma once

#include "ptx/generated/tcgen05_registers.cuh"
#include "ptx/tcgen05.cuh"

namespace fovea::cuda::ptx {

/// kRegisters: of one repeat.
struct Tmem32x32b {
  static constexpr char kText[] = "32x32b";
  static constexpr int kRegisters = 1;
};
struct Tmem16x64b {
  static constexpr char kText[] = "16x64b";
  static constexpr int kRegisters = 1;
};
struct Tmem16x128b {
  static constexpr char kText[] = "16x128b";
  static constexpr int kRegisters = 2;
};
struct Tmem16x256b {
  static constexpr char kText[] = "16x256b";
  static constexpr int kRegisters = 4;
};
struct Tmem16x32bx2 {
  static constexpr char kText[] = "16x32bx2";
  static constexpr int kRegisters = 1;
};

/// tcgen05.ld: r may be used after tcgen05_wait_ld(r) alone.
template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_32x32b(Value (&r)[count], TmemAddress from) {
  Tcgen05Registers<count>::template ld<Tmem32x32b>(r, from.bits);
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x64b(Value (&r)[count], TmemAddress from) {
  Tcgen05Registers<count>::template ld<Tmem16x64b>(r, from.bits);
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x128b(Value (&r)[count], TmemAddress from) {
  Tcgen05Registers<count>::template ld<Tmem16x128b>(r, from.bits);
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x256b(Value (&r)[count], TmemAddress from) {
  Tcgen05Registers<count>::template ld<Tmem16x256b>(r, from.bits);
}
template <int split, class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x32bx2(Value (&r)[count], TmemAddress from) {
  Tcgen05Registers<count>::template ld_split<Tmem16x32bx2, split>(r, from.bits);
}

/// tcgen05.ld.red.max.f32, sm_103a: also the greatest of this thread's r. Name both in the wait.
template <int count>
FOVEA_DEVICE void tcgen05_ld_max_32x32b(float (&r)[count], float& greatest, TmemAddress from) {
#if !defined(__CUDA_ARCH_FEAT_SM103_ALL)
  static_assert(count < 0,
                "tcgen05.ld.red exists on sm_103a, not on sm_100a: take the maximum of what "
                "tcgen05_ld_32x32b loads");
#endif
  Tcgen05Registers<count>::ld_max(r, greatest, from.bits);
}

/// tcgen05.st: takes r at once; the cells have it after tcgen05_wait_st.
template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_32x32b(TmemAddress to, const Value (&r)[count]) {
  Tcgen05Registers<count>::template st<Tmem32x32b>(to.bits, r);
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x64b(TmemAddress to, const Value (&r)[count]) {
  Tcgen05Registers<count>::template st<Tmem16x64b>(to.bits, r);
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x128b(TmemAddress to, const Value (&r)[count]) {
  Tcgen05Registers<count>::template st<Tmem16x128b>(to.bits, r);
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x256b(TmemAddress to, const Value (&r)[count]) {
  Tcgen05Registers<count>::template st<Tmem16x256b>(to.bits, r);
}
template <int split, class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x32bx2(TmemAddress to, const Value (&r)[count]) {
  Tcgen05Registers<count>::template st_split<Tmem16x32bx2, split>(to.bits, r);
}

/// Registers of a load that tcgen05_wait_ld has waited for without naming them: the compiler moves no use of them
/// before this.
template <int count>
FOVEA_DEVICE void known_from_here(float (&r)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(r[i]));
}
template <int count>
FOVEA_DEVICE void known_from_here(std::uint32_t (&r)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(r[i]));
}
FOVEA_DEVICE void known_from_here(float& r) { asm volatile("" : "+f"(r)); }

/// tcgen05.wait::ld: all loads of this thread are complete. It names the registers that were loaded, of one load or of
/// two; those of more go to known_from_here after it.
template <class Registers>
FOVEA_DEVICE void tcgen05_wait_ld(Registers& loaded) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  known_from_here(loaded);
}
template <class Registers, class Others>
FOVEA_DEVICE void tcgen05_wait_ld(Registers& loaded, Others& others) {
  tcgen05_wait_ld(loaded);
  known_from_here(others);
}

/// tcgen05.wait::st: all stores of this thread are complete.
FOVEA_DEVICE void tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

}  // namespace fovea::cuda::ptx
