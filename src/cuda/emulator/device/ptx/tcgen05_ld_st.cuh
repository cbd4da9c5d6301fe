// The emulated twin of src/cuda/device/ptx/tcgen05_ld_st.cuh. Registers are read and written as late as the wait: they
// must be lvalues that live until then.
#pragma once

#include "ptx/tcgen05.cuh"

namespace fovea::cuda::ptx {

template <emulator::TensorShape shape, class Value, int count>
inline emulator::TensorMove tensor_move(Value (&r)[count], TmemAddress address, int split = 0) {
  static_assert(sizeof(Value) == 4, "registers have 32 bits");
  using Word = std::uint32_t;
  return {.shape = shape,
          .address = address.bits,
          .split = static_cast<std::uint32_t>(split),
          .count = count,
          .registers = const_cast<Word*>(reinterpret_cast<const Word*>(r)),
          .greatest = nullptr};
}

template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_32x32b(Value (&r)[count], TmemAddress from, Site site = Site::here()) {
  emulator::tensor_load(tensor_move<emulator::TensorShape::l32x32b>(r, from), {"tcgen05.ld", site});
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x64b(Value (&r)[count], TmemAddress from, Site site = Site::here()) {
  emulator::tensor_load(tensor_move<emulator::TensorShape::l16x64b>(r, from), {"tcgen05.ld", site});
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x128b(Value (&r)[count], TmemAddress from,
                                     Site site = Site::here()) {
  emulator::tensor_load(tensor_move<emulator::TensorShape::l16x128b>(r, from),
                        {"tcgen05.ld", site});
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x256b(Value (&r)[count], TmemAddress from,
                                     Site site = Site::here()) {
  emulator::tensor_load(tensor_move<emulator::TensorShape::l16x256b>(r, from),
                        {"tcgen05.ld", site});
}
template <int split, class Value, int count>
FOVEA_DEVICE void tcgen05_ld_16x32bx2(Value (&r)[count], TmemAddress from,
                                      Site site = Site::here()) {
  emulator::tensor_load(tensor_move<emulator::TensorShape::l16x32bx2>(r, from, split),
                        {"tcgen05.ld", site});
}

template <int count>
FOVEA_DEVICE void tcgen05_ld_max_32x32b(float (&r)[count], float& greatest, TmemAddress from,
                                        Site site = Site::here()) {
  emulator::TensorMove move = tensor_move<emulator::TensorShape::l32x32b>(r, from);
  move.greatest = reinterpret_cast<std::uint32_t*>(&greatest);
  emulator::tensor_load(move, {"tcgen05.ld.red", site});
}

template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_32x32b(TmemAddress to, const Value (&r)[count],
                                    Site site = Site::here()) {
  emulator::tensor_store(tensor_move<emulator::TensorShape::l32x32b>(r, to), {"tcgen05.st", site});
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x64b(TmemAddress to, const Value (&r)[count],
                                    Site site = Site::here()) {
  emulator::tensor_store(tensor_move<emulator::TensorShape::l16x64b>(r, to), {"tcgen05.st", site});
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x128b(TmemAddress to, const Value (&r)[count],
                                     Site site = Site::here()) {
  emulator::tensor_store(tensor_move<emulator::TensorShape::l16x128b>(r, to), {"tcgen05.st", site});
}
template <class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x256b(TmemAddress to, const Value (&r)[count],
                                     Site site = Site::here()) {
  emulator::tensor_store(tensor_move<emulator::TensorShape::l16x256b>(r, to), {"tcgen05.st", site});
}
template <int split, class Value, int count>
FOVEA_DEVICE void tcgen05_st_16x32bx2(TmemAddress to, const Value (&r)[count],
                                      Site site = Site::here()) {
  emulator::tensor_store(tensor_move<emulator::TensorShape::l16x32bx2>(r, to, split),
                         {"tcgen05.st", site});
}

template <int count>
FOVEA_DEVICE void known_from_here(float (&r)[count], Site site = Site::here()) {
  emulator::tensor_name_loaded(reinterpret_cast<std::uint32_t*>(r), {"known_from_here", site});
}
template <int count>
FOVEA_DEVICE void known_from_here(std::uint32_t (&r)[count], Site site = Site::here()) {
  emulator::tensor_name_loaded(r, {"known_from_here", site});
}
FOVEA_DEVICE void known_from_here(float& r, Site site = Site::here()) {
  emulator::tensor_name_loaded(reinterpret_cast<std::uint32_t*>(&r), {"known_from_here", site});
}

template <class Registers>
FOVEA_DEVICE void tcgen05_wait_ld(Registers& loaded, Site site = Site::here()) {
  emulator::tensor_wait_load({"tcgen05.wait::ld", site});
  known_from_here(loaded, site);
}
template <class Registers, class Others>
FOVEA_DEVICE void tcgen05_wait_ld(Registers& loaded, Others& others, Site site = Site::here()) {
  emulator::tensor_wait_load({"tcgen05.wait::ld", site});
  known_from_here(loaded, site);
  known_from_here(others, site);
}

FOVEA_DEVICE void tcgen05_wait_st(Site site = Site::here()) {
  emulator::tensor_wait_store({"tcgen05.wait::st", site});
}

}  // namespace fovea::cuda::ptx
