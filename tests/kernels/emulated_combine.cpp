#include <stdexcept>

#include "common/combine.cuh"
#include "kernels/emulated_forward.hpp"

namespace fovea::cuda {
namespace {

template <CombineSpec spec, int kAtOnce>
void run_combine(const CombineParams& p) {
  combine<spec, kAtOnce>(p);
}

/// Chained, all of them: where no grid is ahead there is none to wait for.
template <Element element, bool wants_row_max, int most_splits>
inline constexpr CombineSpec kCombineSpec{.out_element = element,
                                          .wants_row_max = wants_row_max,
                                          .is_chained = true,
                                          .most_splits = most_splits};

template <Element element, bool wants_row_max, int kAtOnce>
CombineFunction combine_of_splits(int most_splits) {
  if (most_splits == 8) return run_combine<kCombineSpec<element, wants_row_max, 8>, kAtOnce>;
  if (most_splits == 16) return run_combine<kCombineSpec<element, wants_row_max, 16>, kAtOnce>;
  if (most_splits == 32) return run_combine<kCombineSpec<element, wants_row_max, 32>, kAtOnce>;
  return run_combine<kCombineSpec<element, wants_row_max, kMostSplits>, kAtOnce>;
}

/// Of packed queries nobody asks for row maxima.
template <Element element, int most_splits>
inline constexpr CombineSpec kPackedSpec{
    .out_element = element, .is_chained = true, .has_packed_q = true, .most_splits = most_splits};

template <Element element, int kAtOnce>
CombineFunction combine_of_packed(int most_splits) {
  if (most_splits == 16) return run_combine<kPackedSpec<element, 16>, kAtOnce>;
  if (most_splits == 32) return run_combine<kPackedSpec<element, 32>, kAtOnce>;
  return run_combine<kPackedSpec<element, kMostSplits>, kAtOnce>;
}

template <Element element, int kAtOnce>
CombineFunction combine_to(const ForwardSpec& spec) {
  if (spec.has_packed_q) return combine_of_packed<element, kAtOnce>(spec.most_splits);
  return spec.wants_row_max ? combine_of_splits<element, true, kAtOnce>(spec.most_splits)
                            : combine_of_splits<element, false, kAtOnce>(spec.most_splits);
}

template <int kAtOnce>
CombineFunction combine_at_once(const ForwardSpec& spec) {
  if (spec.out_element == Element::f32) return combine_to<Element::f32, kAtOnce>(spec);
  if (spec.out_element == Element::f16) return combine_to<Element::f16, kAtOnce>(spec);
  return combine_to<Element::bf16, kAtOnce>(spec);
}

}  // namespace

CombineFunction combine_of(const ForwardSpec& spec, int splits_at_once) {
  if (splits_at_once == 8) return combine_at_once<8>(spec);
  if (splits_at_once == 16) return combine_at_once<16>(spec);
  throw std::out_of_range("splits_at_once");
}

}  // namespace fovea::cuda
