// What can run on a GPU: one table, best first. It feeds selection, workspace, explain and the text of a
// refusal. Nothing here needs a GPU: a device is a few numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention.hpp"

#include "cuda/device_traits.hpp"
#include "cuda/forward/spec.hpp"
#include "cuda/jit/architecture.hpp"
#include "problem/cache.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

struct Refusal {
  std::string reason;
};

struct ForwardPlan;

struct Candidate {
  using Refuses = std::optional<Refusal> (*)(const ForwardProblem& problem,
                                             const DeviceTraits& device);

  std::string_view name;        // "cuda/sm80/attention_forward"
  std::string_view header;      // "sm80/attention_forward.cuh"
  std::string_view entry;       // "sm80::attention_forward"
  std::string_view params;      // what the entry takes: "ForwardParams"
  bool multiplies_by_wgmma;     // its unit includes their bodies
  bool is_chained;              // what joins its splits starts beside it, and waits
  bool reads_numbers_of_codes;  // that KernelRole::numbers makes of a cache's
  Refuses refuses;
  AnyForwardSpec (*choose)(const ForwardProblem& problem, const DeviceTraits& device);
  /// Tiles that the kernel can have for this problem, choose's among them or not: what a GPU decides between
  /// (choices.hpp).
  std::vector<AnyForwardSpec> (*alternatives)(const ForwardProblem& problem,
                                              const DeviceTraits& device);
  /// Whether it can read the tensors of a call: TMA's start at multiples of 16 bytes, which a problem does not know.
  /// Null: it reads all. Of a problem that it does not refuse.
  bool (*reads)(const AttentionForward& args, const GrownCache* cache);
  std::size_t (*shared_bytes)(const AnyForwardSpec& spec);
  std::size_t (*scratch_bytes)(const AnyForwardSpec& spec,
                               const ForwardProblem& problem);  // workspace, range tables apart
  /// Enqueues a call: cuda::attention_forward says what the arguments are.
  void (*launch)(const ForwardProblem& problem, const ForwardPlan& plan,
                 const AttentionForward& args, void* workspace, void* stream,
                 const GrownCache* cache);
};

/// Of a sequence, queries or keys: kernels count them in 32 bits, rounded up to tiles and to splits of equal length.
inline constexpr std::int64_t kMostOfSequence = (std::int64_t{1} << 31) - (std::int64_t{1} << 16);

std::span<const Candidate> forward_candidates();

/// The row of the table that has this name.
const Candidate& candidate_named(std::string_view name);

// ---- what several kernels ask of a problem ----

/// Whose GPUs a kernel is written for.
enum class Machines : std::uint8_t { nvidia, amd, nvidia_and_amd };
/// Devices before the first that has a kernel's instructions.
std::optional<Refusal> refuses_before(jit::Architecture first, const DeviceTraits& device);
/// Of copies that land by themselves, products of 16 elements of depth, products of codes.
inline constexpr jit::Architecture kFirstOfSm80{.major = 8, .minor = 0};

/// What none of them takes; those on tensor cores; and those of them whose registers hold a row of O.
std::optional<Refusal> refuses_any(const ForwardProblem& problem, const DeviceTraits& device,
                                   Machines machines = Machines::nvidia);
/// The same, but for keys and values that are not of the queries' dtype.
std::optional<Refusal> refuses_numbers_or_codes(const ForwardProblem& problem,
                                                const DeviceTraits& device,
                                                Machines machines = Machines::nvidia);
std::optional<Refusal> refuses_16_bit(const ForwardProblem& problem, const DeviceTraits& device,
                                      Machines machines = Machines::nvidia);
std::optional<Refusal> refuses_tensor_cores(const ForwardProblem& problem,
                                            const DeviceTraits& device);

/// Head dims above `most`; the most that products on tensor cores are written for.
std::optional<Refusal> refuses_head_dims(const ForwardProblem& problem, std::int64_t most);
inline constexpr std::int64_t kMaxTensorCoreHeadDim = 256;

/// Tiles that do not fit.
std::optional<Refusal> refuses_shared_bytes(std::size_t bytes, const DeviceTraits& device);

/// Of kernels whose CTAs are as many as their tiles: SMs to be left free.
std::optional<Refusal> refuses_margin(const ForwardProblem& problem);
/// Of kernels with a CTA for each SM: those that are not left free. Of a problem that refuses_any does not refuse.
int usable_sms(const ForwardProblem& problem, const DeviceTraits& device);

/// Rows of a kv tile are loaded in boxes that lie in one page each, of whole blocks of 8 rows, as the swizzle has them.
inline constexpr std::int64_t kFewestRowsOfBox = 8;
/// What TMA cannot read of a cache by such boxes; `part`: what a kernel calls the keys that it loads together.
std::optional<Refusal> refuses_boxes(const ForwardProblem& problem, std::string_view part);

bool has_mask(const ForwardProblem& problem);

/// Rows of a tile that streams keys.
inline constexpr std::int64_t kFewRows = 64;
/// All rows that share a kv head fit it: memory is the bound, not the tensor cores.
bool has_few_rows(const ForwardProblem& problem);

/// Are tiles of rows counted over all packed sequences? Few queries of a cache have a tile of each sequence, so that
/// their keys can be split.
bool has_packed_tiles(const ForwardProblem& problem);

/// The largest number of q heads of a group whose rows fit `rows` together.
std::int32_t packed_heads(const ForwardProblem& problem, std::int64_t rows);

/// What follows from the problem whatever the kernel and its tile: dtypes, padded head dims, features.
ForwardSpec common_spec(const ForwardProblem& problem);

/// Bytes of the partial states of a split problem; 0 where it is not split.
std::size_t partial_bytes(const ForwardSpec& spec, const ForwardProblem& problem);

/// Most splits that one sequence of this problem can have; 1 where it is not split.
int max_splits(const ForwardSpec& spec, const ForwardProblem& problem);

}  // namespace fovea::cuda
