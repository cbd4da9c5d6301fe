// From a choice to loaded kernels, in the same steps for every operation: what was measured as faster, else the table's
// choice; its kernels, from where they are nearest; where a measured choice cannot be had, the table's after all.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/error.hpp"

#include "cuda/availability.hpp"
#include "cuda/device_traits.hpp"
#include "cuda/driver/context.hpp"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// What the plan of any operation says of its kernel.
struct KernelPlan {
  std::string candidate;                      // empty: nothing can run
  std::vector<Explanation::Refused> refused;  // better candidates, with their reasons
  bool is_tuned = false;                      // measured, not the table's
  std::string tuning;                         // what measurements said of this choice, if anything
  std::string kernel_source;                  // where its kernels come from; empty: nobody asked
  DeviceTraits device;
  std::size_t shared_bytes = 0;              // dynamic shared memory of a CTA of the main kernel
  std::size_t workspace_bytes = 0;           // on the device
  std::shared_ptr<const KernelSet> kernels;  // null for plans that were made without a device
};

/// Operation names its Problem and its Plan, a KernelPlan, and has
///   Plan choose(const Problem&, const DeviceTraits&)            of the table
///   Plan choose_measured(const Problem&, const DeviceTraits&)   or of this process's tuning
///   PlannedKernels planned_kernels(const Plan&)
///   Plan refused_by_all(const std::string& reason)
/// and where its plans run one of another operation, which is loaded with them,
///   PlannedKernels planned_inner_kernels(const Plan&)
///   void load_inner(jit::Loader&, const driver::DeviceContext&, Plan&)
template <typename Operation>
struct PlanLadder {
  using Problem = typename Operation::Problem;
  using Plan = typename Operation::Plan;

  /// Loads what the plan was chosen to run.
  static void load(jit::Loader& loader, const driver::DeviceContext& context, Plan& plan) {
    plan.kernels =
        std::make_shared<const KernelSet>(loader, context, Operation::planned_kernels(plan));
    plan.kernel_source =
        loader.describe(plan.kernels->source(), jit::architecture_of(context.info()));
    if constexpr (requires { Operation::load_inner(loader, context, plan); })
      Operation::load_inner(loader, context, plan);
  }

  /// The same; what was measured is no reason to fail: where its kernel cannot be had, the table's choice is taken, and
  /// plan.tuning says so.
  static void load_or_fall_back(jit::Loader& loader, const driver::DeviceContext& context,
                                const Problem& problem, Plan& plan) {
    if (plan.is_tuned) {
      try {
        return load(loader, context, plan);
      } catch (const Unsupported& error) {
        give_way(problem, error.what(), plan);
      } catch (const CompileError& error) {
        give_way(problem, error.what(), plan);
      } catch (const driver::ImageRefused& error) {
        give_way(problem, error.what(), plan);
      }
    }
    load(loader, context, plan);
  }

  /// What load_or_fall_back would leave of a plan as long as kernels compile, without compiling or loading any;
  /// candidate is empty where it would throw Unsupported.
  static void check(jit::Loader& loader, jit::Architecture architecture, const Problem& problem,
                    Plan& plan) {
    const auto look = [&] {
      PlannedKernels kernels = Operation::planned_kernels(plan);
      if constexpr (requires { Operation::planned_inner_kernels(plan); })
        std::ranges::move(Operation::planned_inner_kernels(plan), std::back_inserter(kernels));
      return look_for(loader, architecture, kernels);
    };
    jit::Availability found = look();
    if (!found.why_missing.empty() && plan.is_tuned) {
      give_way(problem, found.why_missing, plan);
      found = look();
    }
    if (found.why_missing.empty()) {
      plan.kernel_source = loader.describe(found.source, architecture);
      return;
    }
    plan.refused.push_back({plan.candidate, std::move(found.why_missing)});
    plan.candidate.clear();
  }

  /// What plan_on would choose, without compiling or loading it. Where nothing can run (no driver, no such device, no
  /// compiler that knows it, refusals) candidate is empty and refused holds every reason.
  static Plan try_plan_on(const Problem& problem, Device device) {
    Plan plan = choose_here(problem, device);
    if (!plan.candidate.empty()) {
      const driver::DeviceInfo& info = driver::process_driver(device.kind).device(device.index);
      check(jit::process_loader(), jit::architecture_of(info), problem, plan);
    }
    return plan;
  }

  /// Asks each candidate in order and loads what it chose into device.index. Throws Unsupported with every reason.
  static Plan plan_on(const Problem& problem, Device device) {
    Plan plan = choose_on(problem, device);
    load_or_fall_back(jit::process_loader(), driver::process_context(device), problem, plan);
    return plan;
  }

  /// The choice alone.
  static Plan choose_on(const Problem& problem, Device device) {
    Plan plan = choose_here(problem, device);
    if (!plan.candidate.empty()) return plan;
    std::string message = fmt::format("plan: no kernel for this problem on {}:", to_string(device));
    for (const auto& refused : plan.refused)
      message += fmt::format("\n  {}  {}", refused.candidate, refused.reason);
    throw Unsupported(message);
  }

 private:
  /// The table's choice in the place of a measured one that cannot be had.
  static void give_way(const Problem& problem, std::string_view why, Plan& plan) {
    std::string tuning =
        fmt::format("{}; not taken: {}", plan.tuning, why.substr(0, why.find('\n')));
    plan = Operation::choose(problem, plan.device);
    plan.tuning = std::move(tuning);
  }

  /// The choice for a device of this process; nothing where no kernel can run there.
  static Plan choose_here(const Problem& problem, Device device) {
    if (const std::string reason = why_unavailable(device); !reason.empty())
      return Operation::refused_by_all(reason);
    const driver::DeviceInfo& info = driver::process_driver(device.kind).device(device.index);
    return Operation::choose_measured(problem, traits_of(info));
  }
};

}  // namespace fovea::cuda
