// Chunks of work to groups: equally many each, and even sums. Pure arithmetic, no masks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fovea::parallel {

struct Chunks {
  std::span<const std::int64_t> works;  // of each chunk; as many chunks as a multiple of the groups
  std::span<const std::int64_t> base;   // what each group has to do besides
  double tolerance =
      0;  // the busiest group may have so much more than the mean: less is not sought
  // Of each chunk the chunks whose keys its rows see, ascending: evening out then chooses exchanges after which groups
  // see few chunks of others. Empty: those that are most even.
  std::span<const std::vector<std::size_t>> seen{};
};

/// The group of each chunk: neighbours together.
std::vector<int> deal_contiguous(const Chunks& chunks);

/// The heaviest chunks first, in rounds of one for each group: the heaviest of a round to the group that has least
/// so far (longest processing time first, with equal counts). Then evened out.
std::vector<int> deal_balanced(const Chunks& chunks);

/// The same but for exchanges, one chunk for one, while they relieve the busiest group and it is above the tolerance.
std::vector<int> even_out(const Chunks& chunks, std::span<const int> group_of);

/// What the busiest group has above the mean, as a share of it.
double unevenness(const Chunks& chunks, std::span<const int> group_of);

/// Chunks g and 2 · num_groups - 1 - g: the closed form for one causal sequence in 2 · num_groups chunks.
std::vector<int> deal_zigzag(int num_groups);

}  // namespace fovea::parallel
