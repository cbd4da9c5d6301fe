#include "cuda/forward/sm90_converted.hpp"

#include <fmt/format.h>

#include "fovea/mask.hpp"

#include "core/ceil_div.hpp"
#include "cuda/forward/sm90_coded.hpp"

namespace fovea::cuda {
namespace {

/// What a call may want of workspace for a chunk of a prompt. It is that of all sequences, however long they may be.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

/// As the kernel sees it: a contiguous cache of q's dtype.
ForwardProblem problem_of_numbers(ForwardProblem f) {
  f.problem.k.dtype = f.problem.v.dtype = f.problem.q.dtype;
  f.is_paged = false;
  f.cache.page_size = 0;
  return f;
}

std::size_t numbers_at(const Sm90ForwardSpec& spec, const ForwardProblem& f) {
  const std::size_t bytes = Sm90Forward::scratch_bytes(spec, problem_of_numbers(f));
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(bytes), kNumbersAlignment));
}

}  // namespace

std::optional<Refusal> Sm90ForwardConverted::refuses(const ForwardProblem& f,
                                                     const DeviceTraits& device) {
  if (auto refusal = Sm90ForwardCoded::refuses(f, device)) return refusal;
  const MaskMod& mask = f.problem.mask;
  if (!mask.is_all_visible() && mask != causal()) {
    return Refusal{
        "the mask may hide most keys, of which numbers would be made all the same; expected none, "
        "or causal"};
  }
  if (f.cache.has_left_padding)
    return Refusal{"left_padding is given; numbers of a sequence begin where its memory does"};
  if (numbers_bytes(f) > kMostBytes) {
    return Refusal{
        fmt::format("numbers of all codes take {} bytes of workspace, as long as sequences may be; "
                    "expected at most {}",
                    numbers_bytes(f), kMostBytes)};
  }
  if (num_numbers_ctas(f) > std::int64_t{0x7fffffff}) return Refusal{"more than 2^31 tiles"};
  return std::nullopt;
}

Sm90ForwardSpec Sm90ForwardConverted::choose(const ForwardProblem& f, const DeviceTraits& device) {
  return Sm90Forward::choose(problem_of_numbers(f), device);
}

std::vector<Sm90ForwardSpec> Sm90ForwardConverted::alternatives(const ForwardProblem& f,
                                                                const DeviceTraits& device) {
  return Sm90Forward::alternatives(problem_of_numbers(f), device);
}

bool Sm90ForwardConverted::reads(const AttentionForward& args, const GrownCache* cache) {
  return Sm90ForwardCoded::reads(args, cache);
}

std::size_t Sm90ForwardConverted::scratch_bytes(const Sm90ForwardSpec& spec,
                                                const ForwardProblem& f) {
  return numbers_at(spec, f) + numbers_bytes(f);
}

Sm90Launch Sm90ForwardConverted::prepare(const ForwardProblem& f, const ForwardPlan& plan,
                                         const AttentionForward& args, const GrownCache* cache,
                                         void* workspace, const TensorMapEncoder& encode) {
  const auto& spec = plan.spec.as<Sm90ForwardSpec>();
  const KvCache& codes = cache->cache;
  const NumbersOfCodesLaunch numbers =
      numbers_of_codes_launch(f, call_params(f, args, cache), codes,
                              static_cast<std::byte*>(workspace) + numbers_at(spec, f));
  const KvCache converted = cache_of_numbers(f, codes, numbers);
  const GrownCache grown{
      .cache = converted, .new_tokens = cache->new_tokens, .total_new = cache->total_new};
  Sm90Launch launch =
      Sm90Forward::prepare(problem_of_numbers(f), plan, args, &grown, workspace, encode);
  if (launch.num_ctas > 0) launch.numbers = numbers;
  return launch;
}

}  // namespace fovea::cuda
