// What a GPU measured as faster than the table's choice: a small file of text, one winner a line
// (docs/guides/tuning.md). fovea tune writes it, plans read it. Read choices.hpp first.
#pragma once

#include <compare>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/forward/choices.hpp"
#include "cuda/jit/kernel_pack.hpp"

namespace fovea::cuda {

/// What a choice is measured for: problems of one class get one kernel and tile. A line of text: what shapes the
/// kernel, the formulas, heads of a group, and lengths and rows rounded up to powers of two. Contents are none of it.
std::string problem_class(const ForwardProblem& problem);

/// GPUs that are taken for alike.
struct TunedDevice {
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;

  auto operator<=>(const TunedDevice&) const = default;
};
TunedDevice tuned_device(const DeviceTraits& device);

struct Winner {
  std::string candidate;  // its name in the table
  TileChoice tile;
  std::vector<TileChoice> more_tiles{};  // of gradients, which several kernels share
  double us = 0, table_us = 0;           // medians of one run: its own, the table's choice's

  bool operator==(const Winner&) const = default;
};

/// "cuda/sm80/attention_backward tile_q=64 ... + tile_q=128 ...": all but the times.
std::string print_choice(const Winner& winner);

/// The name and tile of a choice, as files and people know it: no times.
Winner winner_of(const Choice& choice);

class Tuning {
 public:
  using Winners = std::map<TunedDevice, std::map<std::string, Winner>>;  // by device and class

  /// For the kernels of this library, without winners.
  Tuning();
  /// Throws InvalidArgument: "<where>: line 3 is '...'; expected ...".
  static Tuning parse(std::string_view text, std::string_view where);
  /// Equal winners give equal texts.
  std::string print() const;

  /// Measured with other kernels than those of this library: worth nothing.
  bool is_stale() const;

  const Winner* find(const DeviceTraits& device, const std::string& problem_class) const;
  void set(const DeviceTraits& device, const std::string& problem_class, Winner winner);
  /// The table's choice stands.
  void forget(const DeviceTraits& device, const std::string& problem_class);
  const Winners& winners() const { return winners_; }

  bool operator==(const Tuning&) const = default;

 private:
  std::string kernels_;  // digest of the device text
  Winners winners_;
};

/// A tuning as plans find it.
struct TuningFile {
  std::string where;             // empty: there is none
  std::optional<Tuning> tuning;  // that serves
  std::string why_not;           // where there is one and it does not
};

/// The file of this name; without one, what rides in the pack (null: no pack). Never throws: a library must run without
/// it.
TuningFile open_tuning(const std::optional<std::string>& path, const jit::KernelPack* pack);

/// FOVEA_TUNING, else the pack's; read at the first call.
const TuningFile& process_tuning();

/// What a file that there is has for a class on a device: the winner, or why one that might have had it does not serve.
struct FoundWinner {
  const Winner* winner = nullptr;
  std::string why_not{};
};
FoundWinner find_winner(const std::string& problem_class, const DeviceTraits& device,
                        const TuningFile& file);
/// What explain says of a winner that is taken, and of one that the problem cannot have.
std::string describe_taken(const Winner& winner, const TuningFile& file);
std::string describe_missing(const Winner& winner, const TuningFile& file);

/// The measured choice for a problem; empty: the table's. `words` say so, or why a file that might have had one
/// does not serve.
struct TunedChoice {
  std::optional<Choice> choice;
  std::string words;
};
TunedChoice tuned_choice(const ForwardProblem& problem, const DeviceTraits& device,
                         const TuningFile& file);

}  // namespace fovea::cuda
