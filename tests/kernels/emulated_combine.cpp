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
template <Element element, bool wants_row_max>
inline constexpr CombineSpec kPlainSpec{
    .out_element = element, .wants_row_max = wants_row_max, .is_chained = true};

/// Of packed queries nobody asks for row maxima.
template <Element element>
inline constexpr CombineSpec kPackedSpec{
    .out_element = element, .is_chained = true, .has_packed_q = true};

template <CombineSpec base, int most_splits, bool has_groups = false, bool takes_groups = false>
inline constexpr CombineSpec kWithSplits = [] {
  CombineSpec spec = base;
  spec.most_splits = most_splits;
  spec.has_groups = has_groups;
  spec.takes_groups = takes_groups;
  return spec;
}();

template <CombineSpec base, int kAtOnce>
CombineFunction combine_of_splits(const CombineSpec& wanted) {
  CombineFunction found = nullptr;
  const auto offer = [&]<CombineSpec spec>() {
    if (wanted.most_splits == spec.most_splits && wanted.has_groups == spec.has_groups &&
        wanted.takes_groups == spec.takes_groups)
      found = run_combine<spec, kAtOnce>;
  };
  offer.template operator()<kWithSplits<base, 8>>();
  offer.template operator()<kWithSplits<base, 16>>();
  offer.template operator()<kWithSplits<base, 16, true>>();
  offer.template operator()<kWithSplits<base, 16, true, true>>();
  offer.template operator()<kWithSplits<base, 32>>();
  offer.template operator()<kWithSplits<base, 32, true>>();
  offer.template operator()<kWithSplits<base, 32, true, true>>();
  offer.template operator()<kWithSplits<base, kMostSplits>>();
  if (found == nullptr) throw std::out_of_range("most_splits");
  return found;
}

template <Element element, int kAtOnce>
CombineFunction combine_to(const CombineSpec& spec) {
  if (spec.has_packed_q) return combine_of_splits<kPackedSpec<element>, kAtOnce>(spec);
  return spec.wants_row_max ? combine_of_splits<kPlainSpec<element, true>, kAtOnce>(spec)
                            : combine_of_splits<kPlainSpec<element, false>, kAtOnce>(spec);
}

template <int kAtOnce>
CombineFunction combine_at_once(const CombineSpec& spec) {
  if (spec.out_element == Element::f32) return combine_to<Element::f32, kAtOnce>(spec);
  if (spec.out_element == Element::f16) return combine_to<Element::f16, kAtOnce>(spec);
  return combine_to<Element::bf16, kAtOnce>(spec);
}

}  // namespace

CombineFunction combine_of(const CombineSpec& spec, int splits_at_once) {
  if (splits_at_once == 4) return combine_at_once<4>(spec);
  if (splits_at_once == 8) return combine_at_once<8>(spec);
  if (splits_at_once == 16) return combine_at_once<16>(spec);
  throw std::out_of_range("splits_at_once");
}

}  // namespace fovea::cuda
