// The text of a tuning:
//
//   fovea tuning 1
//   kernels 0f3c...                                    SHA-256 of the device text, 64 digits
//   device 9.0 132                                     compute capability, SMs; its winners follow, in the order of
//                                                      their classes
//   winner CANDIDATE tile_q=128 ... | 10.200 us, 11.900 us | CLASS
//   winner CANDIDATE tile_q=64 ... + tile_q=128 ... | ...   where several kernels share the work
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/check.hpp"
#include "cuda/forward/tuning.hpp"

namespace fovea::cuda {
namespace {

constexpr std::string_view kFirstLine = "fovea tuning 1";
constexpr std::size_t kDigestDigits = 64;

/// Whole numbers and nothing else.
template <typename T>
bool parse_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

/// What stands before `mark`, which is taken off with it; all of the text where there is no mark.
std::string_view take_until(std::string_view& text, std::string_view mark) {
  const std::size_t at = text.find(mark);
  const std::string_view taken = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + mark.size());
  return taken;
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

/// Every member once, in the order of print_tile.
bool parse_tile(std::string_view text, TileChoice& tile) {
  for (const TileMember& member : tile_members()) {
    std::string_view word = take_until(text, " ");
    if (take_until(word, "=") != member.name || !parse_number(word, tile.*member.value))
      return false;
  }
  return text.empty();
}

/// That of the first kernel, and those of the others.
bool parse_tiles(std::string_view text, Winner& winner) {
  if (!parse_tile(take_until(text, " + "), winner.tile)) return false;
  while (!text.empty()) {
    if (!parse_tile(take_until(text, " + "), winner.more_tiles.emplace_back())) return false;
  }
  return true;
}

bool parse_us(std::string_view text, double& us) {
  return text.ends_with(" us") && parse_number(text.substr(0, text.size() - 3), us) &&
         std::isfinite(us) && us > 0;
}

bool parse_device(std::string_view text, TunedDevice& device) {
  return parse_number(take_until(text, "."), device.major) &&
         parse_number(take_until(text, " "), device.minor) && parse_number(text, device.num_sms);
}

struct ClassWinner {
  std::string problem_class;
  Winner winner;
};

bool parse_winner(std::string_view text, ClassWinner& result) {
  std::string_view choice = take_until(text, " | ");
  std::string_view times = take_until(text, " | ");
  Winner& winner = result.winner;
  winner.candidate = take_until(choice, " ");
  result.problem_class = text;
  return !winner.candidate.empty() && !text.empty() && parse_tiles(choice, winner) &&
         parse_us(take_until(times, ", "), winner.us) && parse_us(times, winner.table_us);
}

class TuningReader {
 public:
  TuningReader(std::string_view text, std::string_view where) : rest_(text), where_(where) {}

  /// The digest of kernels; winners are put into `winners`.
  std::string read(Tuning::Winners& winners) {
    expect(next() == kFirstLine, fmt::format("'{}'", kFirstLine));
    std::string_view digest = next();
    expect(take_prefix(digest, "kernels ") && digest.size() == kDigestDigits,
           "'kernels' and 64 digits");
    std::string kernels(digest);
    while (!rest_.empty()) read_line(winners);
    return kernels;
  }

 private:
  std::string_view next() {
    ++number_;
    line_ = take_until(rest_, "\n");
    return line_;
  }

  void expect(bool is_right, std::string_view expected) const {
    if (is_right) return;
    constexpr std::size_t kShown = 80;
    invalid(std::string(where_), fmt::format("line {} is '{}'; expected {}", number_,
                                             line_.substr(0, kShown), expected));
  }

  void read_line(Tuning::Winners& winners) {
    std::string_view words = next();
    if (take_prefix(words, "device ")) {
      TunedDevice device;
      expect(parse_device(words, device) && !winners.contains(device),
             "'device 9.0 132' (compute capability, SMs), each device once");
      of_device_ = &winners[device];
      return;
    }
    ClassWinner entry;
    expect(of_device_ != nullptr && take_prefix(words, "winner ") && parse_winner(words, entry),
           "a device, or 'winner KERNEL tile_q=... | 10.2 us, 11.9 us | CLASS' behind one");
    const bool is_new =
        of_device_->try_emplace(std::move(entry.problem_class), std::move(entry.winner)).second;
    expect(is_new, "each class once");
  }

  std::string_view rest_, where_, line_;
  int number_ = 0;
  std::map<std::string, Winner>* of_device_ = nullptr;
};

}  // namespace

Tuning Tuning::parse(std::string_view text, std::string_view where) {
  Tuning tuning;
  tuning.kernels_ = TuningReader(text, where).read(tuning.winners_);
  return tuning;
}

std::string Tuning::print() const {
  std::string text = fmt::format("{}\nkernels {}\n", kFirstLine, kernels_);
  for (const auto& [device, winners] : winners_) {
    text += fmt::format("device {}.{} {}\n", device.major, device.minor, device.num_sms);
    for (const auto& [problem_class, winner] : winners) {
      text += fmt::format("winner {} | {:.3f} us, {:.3f} us | {}\n", print_choice(winner),
                          winner.us, winner.table_us, problem_class);
    }
  }
  return text;
}

}  // namespace fovea::cuda
