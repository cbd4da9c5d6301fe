#include "cuda/forward/tuning.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "fovea/error.hpp"

#include "core/env.hpp"
#include "cuda/jit/device_text.hpp"
#include "cuda/jit/files.hpp"
#include "cuda/jit/loader.hpp"
#include "expr/print.hpp"
#include "problem/decode.hpp"

namespace fovea::cuda {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{16} << 20U;  // some 50,000 winners

/// A kernel does not change its mind within a factor of two of a length.
std::uint64_t length_class(std::int64_t length) {
  return std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(0, length)));
}

std::string kernels_here() { return jit::to_hex(jit::embedded_device_text().digest); }

std::string name_of(const TunedDevice& device) {
  return fmt::format("compute capability {}.{} with {} SMs", device.major, device.minor,
                     device.num_sms);
}

std::optional<Choice> find_choice(const Winner& winner, const ForwardProblem& problem,
                                  const DeviceTraits& device) {
  for (const Choice& choice : choices_of(problem, device)) {
    if (choice.candidate->name == winner.candidate && tile_of(choice.spec) == winner.tile)
      return choice;
  }
  return std::nullopt;
}

TuningFile read_tuning(std::string where, std::string_view text) {
  TuningFile file{.where = std::move(where), .tuning = std::nullopt, .why_not = ""};
  try {
    file.tuning = Tuning::parse(text, file.where);
  } catch (const InvalidArgument& error) {
    file.why_not = error.what();
    return file;
  }
  if (!file.tuning->is_stale()) return file;
  file.tuning.reset();
  file.why_not = fmt::format(
      "{} was measured with the kernels of another version; run fovea tune again", file.where);
  return file;
}

}  // namespace

std::string problem_class(const ForwardProblem& f) {
  const Problem& p = f.problem;
  const std::int64_t seqlen_kv =
      f.is_cached ? std::max(kLeastPlannedKeys, f.seqlen_kv) : f.seqlen_kv;
  const bool has_odd_scale = p.score.is_identity() && common_spec(f).is_prescaled;
  std::string text = fmt::format(
      "{} to {} head_dim {}/{} group {} seqlen_q {} seqlen_kv {} rows {}", name(p.q.dtype),
      name(p.out.dtype), f.head_dim_qk, f.head_dim_v, f.group, length_class(f.seqlen_q),
      length_class(seqlen_kv), length_class(f.total_q * f.num_heads_q));
  for (const auto& [is_so, word] : {std::pair{f.is_varlen, " packed"},
                                    {f.is_paged, " paged"},
                                    {f.is_cached && !f.is_paged, " cached"},
                                    {has_odd_scale, " odd scale"},
                                    {p.dropout.p > 0, " dropout"},
                                    {p.wants_row_max, " row_max"}}) {
    if (is_so) text += word;
  }
  if (!p.quant.is_none()) text += " quant " + print(p.quant);
  constexpr std::size_t kMostShown =
      4096;  // bytes of a formula: what differs behind shares a choice
  if (!p.mask.is_all_visible())
    text += " mask " + expr::print_up_to(p.mask.expr().node(), kMostShown);
  if (!p.score.is_identity())
    text += " score " + expr::print_up_to(p.score.expr().node(), kMostShown);
  return text;
}

TunedDevice tuned_device(const DeviceTraits& device) {
  return {device.major, device.minor, device.num_sms};
}

Tuning::Tuning() : kernels_(kernels_here()) {}

bool Tuning::is_stale() const { return kernels_ != kernels_here(); }

const Winner* Tuning::find(const DeviceTraits& device, const std::string& problem_class) const {
  const auto winners = winners_.find(tuned_device(device));
  if (winners == winners_.end()) return nullptr;
  const auto winner = winners->second.find(problem_class);
  return winner == winners->second.end() ? nullptr : &winner->second;
}

void Tuning::set(const DeviceTraits& device, const std::string& problem_class, Winner winner) {
  winners_[tuned_device(device)].insert_or_assign(problem_class, std::move(winner));
}

void Tuning::forget(const DeviceTraits& device, const std::string& problem_class) {
  const auto winners = winners_.find(tuned_device(device));
  if (winners == winners_.end()) return;
  winners->second.erase(problem_class);
  if (winners->second.empty()) winners_.erase(winners);
}

TuningFile open_tuning(const std::optional<std::string>& path, const jit::KernelPack* pack) {
  if (path) {
    const auto bytes = jit::read_whole_file(*path, kMaxBytes);
    if (!bytes) {
      return {.where = *path,
              .tuning = std::nullopt,
              .why_not = fmt::format("{} cannot be read", *path)};
    }
    return read_tuning(*path, {reinterpret_cast<const char*>(bytes->data()), bytes->size()});
  }
  if (pack == nullptr || pack->tuning().empty()) return {};
  return read_tuning(pack->path(), pack->tuning());
}

const TuningFile& process_tuning() {
  // Never destroyed, as the process's loader is not.
  static const TuningFile* const file =
      new TuningFile(open_tuning(read_environment().tuning, jit::process_loader().pack()));
  return *file;
}

Winner winner_of(const Choice& choice) {
  return {.candidate = std::string(choice.candidate->name), .tile = tile_of(choice.spec)};
}

std::string print_choice(const Winner& winner) {
  std::string text = fmt::format("{} {}", winner.candidate, print_tile(winner.tile));
  for (const TileChoice& tile : winner.more_tiles) text += " + " + print_tile(tile);
  return text;
}

FoundWinner find_winner(const std::string& problem_class, const DeviceTraits& device,
                        const TuningFile& file) {
  if (!file.tuning) return {nullptr, file.why_not};
  if (!file.tuning->winners().contains(tuned_device(device))) {
    return {nullptr,
            fmt::format("{} has no measurements of {}", file.where, name_of(tuned_device(device)))};
  }
  return {file.tuning->find(device, problem_class)};
}

std::string describe_taken(const Winner& winner, const TuningFile& file) {
  return fmt::format("by {}: {:.1f} us measured there, {:.1f} us without", file.where, winner.us,
                     winner.table_us);
}

std::string describe_missing(const Winner& winner, const TuningFile& file) {
  return fmt::format("{} names {}, which this problem cannot have", file.where,
                     print_choice(winner));
}

TunedChoice tuned_choice(const ForwardProblem& problem, const DeviceTraits& device,
                         const TuningFile& file) {
  if (file.where.empty()) return {};  // the class is text, which takes longer than all else
  FoundWinner found = find_winner(problem_class(problem), device, file);
  if (found.winner == nullptr) return {std::nullopt, std::move(found.why_not)};
  std::optional<Choice> choice = find_choice(*found.winner, problem, device);
  if (!choice) return {std::nullopt, describe_missing(*found.winner, file)};
  return {choice, describe_taken(*found.winner, file)};
}

}  // namespace fovea::cuda
