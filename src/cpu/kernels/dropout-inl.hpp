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

/// One vector's rows, as they are drawn for.
struct DrawnRows {
  const std::int32_t* q_idx;   // [kVectorLanes]
  const std::int32_t* q_head;  // [kVectorLanes]
  std::uint32_t batch;
};

#if HWY_TARGET == HWY_SCALAR
inline void random_words(const philox::Key& key, const DrawnRows& rows, std::uint32_t key_group,
                         std::uint32_t* words) {
  const philox::Counter counter = {key_group, static_cast<std::uint32_t>(rows.q_idx[0]),
                                   static_cast<std::uint32_t>(rows.q_head[0]), rows.batch};
  const philox::Counter result = philox::philox4x32(counter, key);
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
HWY_ATTR inline void random_words(const philox::Key& key, const DrawnRows& rows,
                                  std::uint32_t key_group, std::uint32_t* HWY_RESTRICT words) {
  const hn::ScalableTag<std::uint32_t> d;
  using Word = hn::Vec<decltype(d)>;
  Word c0 = hn::Set(d, key_group);
  Word c1 = hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(rows.q_idx));
  Word c2 = hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(rows.q_head));
  Word c3 = hn::Set(d, rows.batch);
  std::uint32_t k0 = key[0], k1 = key[1];
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
  DropoutColumn(const PanelDropout& dropout, int vector) : dropout_(dropout), vector_(vector) {
    if (is_placed()) place_rows();
  }

  HWY_ATTR HWY_INLINE hn::Mask<FloatTag> keeps(std::int64_t key) {
    const hn::ScalableTag<std::uint32_t> du;
    const FloatTag d;
    const std::int64_t kv_idx = philox::Places::of(dropout_.places.kv, dropout_.kv_begin + key);
    if (kv_idx / 4 != group_) {
      group_ = kv_idx / 4;
      random_words({dropout_.key[0], dropout_.key[1]}, rows(), static_cast<std::uint32_t>(group_),
                   words_);
    }
    const auto last_dropped = hn::Set(du, static_cast<std::uint32_t>(dropout_.threshold - 1));
    const auto word = hn::Load(du, words_ + (kv_idx % 4) * kVectorLanes);
    return hn::RebindMask(d, hn::Gt(word, last_dropped));
  }

 private:
  bool is_placed() const { return dropout_.places.batch != nullptr; }

  DrawnRows rows_of_call() const {
    return {dropout_.q_idx + vector_ * kVectorLanes, dropout_.q_head + vector_ * kVectorLanes,
            dropout_.batch};
  }
  DrawnRows rows() const {
    if (!is_placed()) return rows_of_call();
    return {q_idx_, q_head_, static_cast<std::uint32_t>(dropout_.places.batch[dropout_.batch])};
  }

  void place_rows() {
    const DrawnRows here = rows_of_call();
    for (int lane = 0; lane < kVectorLanes; ++lane) {
      q_idx_[lane] = dropout_.places.q[here.q_idx[lane]];
      q_head_[lane] = dropout_.places.q_head[here.q_head[lane]];
    }
  }

  const PanelDropout& dropout_;
  int vector_;
  std::int32_t q_idx_[kVectorLanes], q_head_[kVectorLanes];  // is_placed: of this vector's rows
  std::int64_t group_ = -1;
  HWY_ALIGN std::uint32_t words_[4 * kVectorLanes] = {};
};

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
