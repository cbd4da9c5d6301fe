// The random words of dropout for a vector of queries: philox.hpp, four neighbouring keys at a time.

#if defined(FOVEA_CPU_KERNELS_DROPOUT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_DROPOUT_INL_HPP_
#undef FOVEA_CPU_KERNELS_DROPOUT_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_DROPOUT_INL_HPP_
#endif

#include <cstdint>
#include <cstring>

#include "core/philox.hpp"
#include "cpu/kernels/panel.hpp"
#include "hwy/highway.h"
// after highway.h: per-target headers
#include "cpu/kernels/panel_rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR
inline void random_words(const PanelDropout& dropout, std::uint32_t key_group, int vector,
                         std::uint32_t* words) {
  const philox::Counter counter = {key_group, static_cast<std::uint32_t>(dropout.q_idx[vector]),
                                   static_cast<std::uint32_t>(dropout.q_head[vector]),
                                   dropout.batch};
  const philox::Counter result = philox::philox4x32(counter, {dropout.key[0], dropout.key[1]});
  std::memcpy(words, result.data(), sizeof(result));
}
#else
/// High and low halves of 32 x 32 bit products, for every lane.
template <class D, class V = hn::Vec<D> >
HWY_ATTR HWY_INLINE void multiply_wide(D d, V a, V b, V& high, V& low) {
  const hn::RepartitionToWide<D> wide;
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, a))),
                               hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, b))));
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
}

/// philox.hpp for a vector of queries: the words of four neighbouring keys.
HWY_ATTR inline void random_words(const PanelDropout& dropout, std::uint32_t key_group, int vector,
                                  std::uint32_t* HWY_RESTRICT words) {
  const hn::ScalableTag<std::uint32_t> d;
  using Word = hn::Vec<decltype(d)>;
  const auto* q_idx = reinterpret_cast<const std::uint32_t*>(dropout.q_idx) + vector * kVectorLanes;
  const auto* q_head =
      reinterpret_cast<const std::uint32_t*>(dropout.q_head) + vector * kVectorLanes;
  Word c0 = hn::Set(d, key_group);
  Word c1 = hn::LoadU(d, q_idx);
  Word c2 = hn::LoadU(d, q_head);
  Word c3 = hn::Set(d, dropout.batch);
  std::uint32_t k0 = dropout.key[0], k1 = dropout.key[1];
  for (int round = 0; round < philox::kRounds; ++round) {
    Word high0 = c0, low0 = c0, high1 = c0, low1 = c0;
    multiply_wide(d, c0, hn::Set(d, philox::kMultiplier0), high0, low0);
    multiply_wide(d, c2, hn::Set(d, philox::kMultiplier1), high1, low1);
    c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(d, k0));
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(d, k1));
    c1 = low1;
    c3 = low0;
    k0 += philox::kWeyl0;
    k1 += philox::kWeyl1;
  }
  hn::StoreU(c0, d, words);
  hn::StoreU(c1, d, words + kVectorLanes);
  hn::StoreU(c2, d, words + 2 * kVectorLanes);
  hn::StoreU(c3, d, words + 3 * kVectorLanes);
}
#endif

/// Which of one vector's decisions of dropout keep, key after key.
class DropoutColumn {
 public:
  DropoutColumn(const PanelDropout& dropout, int vector) : dropout_(dropout), vector_(vector) {}

  HWY_ATTR HWY_INLINE hn::Mask<FloatTag> keeps(std::int64_t key) {
    const hn::ScalableTag<std::uint32_t> du;
    const FloatTag d;
    const std::int64_t kv_idx = dropout_.kv_begin + key;
    if (kv_idx / 4 != group_) {
      group_ = kv_idx / 4;
      random_words(dropout_, static_cast<std::uint32_t>(group_), vector_, words_);
    }
    const auto last_dropped = hn::Set(du, static_cast<std::uint32_t>(dropout_.threshold - 1));
    const auto word = hn::Load(du, words_ + (kv_idx % 4) * kVectorLanes);
    return hn::RebindMask(d, hn::Gt(word, last_dropped));
  }

 private:
  const PanelDropout& dropout_;
  int vector_;
  std::int64_t group_ = -1;
  HWY_ALIGN std::uint32_t words_[4 * kVectorLanes] = {};
};

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
