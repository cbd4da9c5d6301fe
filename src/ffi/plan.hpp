// The plan of any operation behind one opaque type of C.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/fovea.h"
#include "fovea/jvp.hpp"
#include "fovea/kv_cache.hpp"
#include "fovea/state.hpp"

#include "core/check.hpp"
#include "ffi/arguments.hpp"

struct fovea_plan {
  std::variant<fovea::Plan, fovea::BackwardPlan, fovea::JvpPlan, fovea::DecodePlan,
               fovea::AppendPlan, fovea::MergeStatesPlan>
      plan;
  mutable fovea::ffi::ProgramCache programs{};  // of its runs
};

namespace fovea::ffi {

inline const char* operation_of(const fovea_plan& plan) {
  static constexpr const char* kNames[] = {"attention_forward", "attention_backward",
                                           "attention_jvp",     "attention_decode",
                                           "append_to_cache",   "merge_states"};
  return kNames[plan.plan.index()];
}

/// The plan of this operation. Throws InvalidArgument for none, and for another's.
template <typename P>
const P& plan_of(const fovea_plan* plan, const std::string& where) {
  if (plan == nullptr) invalid(where, "plan is NULL; expected an address");
  const P* const found = std::get_if<P>(&plan->plan);
  if (found == nullptr)
    invalid(where, std::string("the plan is one of ") + operation_of(*plan) +
                       "; expected one that this function's fovea_plan_create made");
  return *found;
}

/// Writes NULL first, so that a caller whose plan was refused frees nothing.
template <typename Make>
void create_plan(fovea_plan** plan, const std::string& where, const Make& make) {
  if (plan == nullptr) invalid(where, "plan is NULL; expected an address");
  *plan = nullptr;
  *plan = new fovea_plan{make()};
}

}  // namespace fovea::ffi
