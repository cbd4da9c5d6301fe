// The kernel that makes numbers of a cache's codes before attention: its place in workspace, its launch. Read
// device/common/numbers_of_codes.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>

#include "cuda/device/shared/numbers_of_codes.h"
#include "cuda/kernel_set.hpp"
#include "cuda/spec_text.hpp"
#include "problem/cache.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

template <>
struct SpecText<NumbersOfCodesSpec> {
  static constexpr std::string_view kName = "NumbersOfCodesSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(NumbersOfCodesSpec, element),
                                       FOVEA_SPEC_MEMBER(NumbersOfCodesSpec, k_codes),
                                       FOVEA_SPEC_MEMBER(NumbersOfCodesSpec, v_codes),
                                       FOVEA_SPEC_MEMBER(NumbersOfCodesSpec, is_paged),
                                       FOVEA_SPEC_MEMBER(NumbersOfCodesSpec, has_packed_q)};
};

NumbersOfCodesSpec numbers_of_codes_spec(const ForwardProblem& problem);
jit::KernelText numbers_of_codes_text(const NumbersOfCodesSpec& spec);

/// Of workspace that they are put at, in bytes.
inline constexpr std::int64_t kNumbersAlignment = 256;

/// Of K and V of all sequences, as long as they may be.
std::size_t numbers_bytes(const ForwardProblem& problem);
std::int64_t num_numbers_ctas(const ForwardProblem& problem);

struct NumbersOfCodesLaunch {
  NumbersOfCodesParams params{};
  unsigned num_ctas = 0;  // 0: attention multiplies what it is given

  void add_to(KernelLaunches& all) const;
};

/// `call`: the parameters of a call over the codes; `to` has numbers_bytes.
NumbersOfCodesLaunch numbers_of_codes_launch(const ForwardProblem& problem,
                                             const ForwardParams& call, const KvCache& codes,
                                             void* to);
/// The cache whose rows are those numbers.
KvCache cache_of_numbers(const ForwardProblem& problem, const KvCache& codes,
                         const NumbersOfCodesLaunch& launch);

}  // namespace fovea::cuda
