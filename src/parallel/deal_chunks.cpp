#include "parallel/deal_chunks.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <optional>

#include "core/check.hpp"

namespace fovea::parallel {
namespace {

struct Exchange {
  std::size_t given = 0, taken = 0;  // places among the members of the two groups
  std::int64_t moved = 0;            // work that changes sides
};

/// Chunks of a group whose members are counted: more are exchanged as if nothing was received.
constexpr std::size_t kMostCounted = std::numeric_limits<std::uint16_t>::max();

/// Who sees keys of others.
class Received {
 public:
  Received(const Chunks& chunks, std::span<const int> group_of)
      : seen_(chunks.seen),
        group_of_(group_of.begin(), group_of.end()),
        counts_(chunks.base.size() * chunks.works.size()) {
    for (std::size_t chunk = 0; chunk < group_of.size(); ++chunk) count(chunk, group_of[chunk], 1);
  }

  /// By how many received chunks more there are in the two groups where these chunks change places.
  std::int64_t change(std::size_t given, std::size_t taken) {
    const std::int64_t before = received(given, taken);
    exchange(given, taken);
    const std::int64_t after = received(given, taken);
    exchange(given, taken);
    return after - before;
  }

  void exchange(std::size_t a, std::size_t b) {
    const int group_a = group_of_[a], group_b = group_of_[b];
    move(a, group_a, group_b);
    move(b, group_b, group_a);
  }

 private:
  /// Members of a group that see each chunk.
  std::uint16_t* counts_of(int group) {
    return counts_.data() + static_cast<std::size_t>(group) * seen_.size();
  }

  void count(std::size_t chunk, int group, int times) {
    std::uint16_t* const counts = counts_of(group);
    for (const std::size_t other : seen_[chunk])
      counts[other] = static_cast<std::uint16_t>(counts[other] + times);
  }

  void move(std::size_t chunk, int from, int to) {
    count(chunk, from, -1);
    count(chunk, to, 1);
    group_of_[chunk] = to;
  }

  /// Of the chunks that an exchange of these two is about.
  std::int64_t received(std::size_t a, std::size_t b) {
    std::int64_t sum = 0;
    const int group_a = group_of_[a], group_b = group_of_[b];
    const std::uint16_t *const by_a = counts_of(group_a), *const by_b = counts_of(group_b);
    const auto add = [&](std::size_t chunk) {
      const int group = group_of_[chunk];
      sum += by_a[chunk] > 0 && group != group_a ? 1 : 0;
      sum += by_b[chunk] > 0 && group != group_b ? 1 : 0;
    };
    for (const std::size_t chunk : seen_[a]) add(chunk);
    for (const std::size_t chunk : seen_[b])
      if (!std::ranges::binary_search(seen_[a], chunk)) add(chunk);
    for (const std::size_t chunk : {a, b}) {
      if (!std::ranges::binary_search(seen_[a], chunk) &&
          !std::ranges::binary_search(seen_[b], chunk)) {
        add(chunk);
      }
    }
    return sum;
  }

  std::span<const std::vector<std::size_t>> seen_;
  std::vector<int> group_of_;
  std::vector<std::uint16_t> counts_;  // [group][chunk] members that see it
};

/// Groups of chunks whose sums are to become even by exchanges of one chunk for one.
class Groups {
 public:
  Groups(const Chunks& chunks, std::span<const int> group_of)
      : works_(chunks.works),
        members_(chunks.base.size()),
        sums_(chunks.base.begin(), chunks.base.end()) {
    for (std::size_t chunk = 0; chunk < works_.size(); ++chunk) {
      const auto group = static_cast<std::size_t>(group_of[chunk]);
      members_[group].push_back(chunk);
      sums_[group] += works_[chunk];
    }
    for (Members& members : members_) {
      std::ranges::sort(members, {}, [this](std::size_t chunk) { return rank(chunk); });
    }
    const bool can_count = chunks.works.size() / chunks.base.size() <= kMostCounted;
    if (!chunks.seen.empty() && can_count) received_.emplace(chunks, group_of);
  }

  void even_out(double tolerance) {
    const std::int64_t total = std::reduce(sums_.begin(), sums_.end(), std::int64_t{0});
    const double most =
        (1 + tolerance) * static_cast<double>(total) / static_cast<double>(sums_.size());
    // Sums of squares fall with each exchange, so this ends by itself; the limit is for time.
    for (std::size_t i = 0; i < 4 * works_.size(); ++i) {
      const auto busiest =
          static_cast<std::size_t>(std::ranges::max_element(sums_) - sums_.begin());
      if (static_cast<double>(sums_[busiest]) <= most || !relieve(busiest)) return;
    }
  }

  std::vector<int> group_of() const {
    std::vector<int> result(works_.size());
    for (std::size_t group = 0; group < members_.size(); ++group) {
      for (const std::size_t chunk : members_[group]) result[chunk] = static_cast<int>(group);
    }
    return result;
  }

 private:
  using Members = std::vector<std::size_t>;  // by work, equal ones by place

  std::pair<std::int64_t, std::size_t> rank(std::size_t chunk) const {
    return {works_[chunk], chunk};
  }

  /// One exchange of the group with the least busy one that has what it wants: nearly always the least busy of all.
  bool relieve(std::size_t busiest) {
    const auto idlest = static_cast<std::size_t>(std::ranges::min_element(sums_) - sums_.begin());
    if (exchange_with(idlest, busiest)) return true;
    std::vector<std::size_t> others(sums_.size());
    std::iota(others.begin(), others.end(), std::size_t{0});
    std::ranges::stable_sort(others, {}, [this](std::size_t group) { return sums_[group]; });
    return std::ranges::any_of(others,
                               [&](std::size_t other) { return exchange_with(other, busiest); });
  }

  bool exchange_with(std::size_t idle, std::size_t busy) {
    const auto exchange = received_ ? cheapest_exchange(busy, idle) : best_exchange(busy, idle);
    if (exchange) apply(*exchange, busy, idle);
    return exchange.has_value();
  }

  /// Brings both nearest to their mean; empty where none brings them nearer.
  std::optional<Exchange> best_exchange(std::size_t busy, std::size_t idle) const {
    const std::int64_t surplus = sums_[busy] - sums_[idle];
    const auto distance = [&](std::int64_t moved) { return std::abs(surplus - 2 * moved); };
    std::optional<Exchange> best;
    const auto offer = [&](const Exchange& exchange) {
      const bool helps = exchange.moved > 0 && exchange.moved < surplus;
      if (helps && (!best || distance(exchange.moved) < distance(best->moved))) best = exchange;
    };
    const Members &givers = members_[busy], &takers = members_[idle];
    for (std::size_t given = 0; given < givers.size(); ++given) {
      const std::int64_t work = works_[givers[given]];
      const auto after = std::ranges::lower_bound(takers, work - surplus / 2, {},
                                                  [this](std::size_t c) { return works_[c]; });
      const auto taken = static_cast<std::size_t>(after - takers.begin());
      if (taken < takers.size()) offer({given, taken, work - works_[takers[taken]]});
      if (taken > 0) offer({given, taken - 1, work - works_[takers[taken - 1]]});
    }
    return best;
  }

  /// Of all that halve what the two differ by, the one after which they receive least; the most even where none does.
  std::optional<Exchange> cheapest_exchange(std::size_t busy, std::size_t idle) {
    const std::int64_t surplus = sums_[busy] - sums_[idle];
    const Members &givers = members_[busy], &takers = members_[idle];
    std::optional<Exchange> best;
    std::pair<std::int64_t, std::int64_t> least;  // chunks received, difference left
    for (std::size_t given = 0; given < givers.size(); ++given) {
      for (std::size_t taken = 0; taken < takers.size(); ++taken) {
        const std::int64_t moved = works_[givers[given]] - works_[takers[taken]];
        const std::int64_t left = std::abs(surplus - 2 * moved);
        if (2 * left > surplus) continue;
        const std::pair cost{received_->change(givers[given], takers[taken]), left};
        if (best && cost >= least) continue;
        best = {given, taken, moved};
        least = cost;
      }
    }
    return best ? best : best_exchange(busy, idle);
  }

  void apply(const Exchange& exchange, std::size_t busy, std::size_t idle) {
    const std::size_t given = members_[busy][exchange.given];
    const std::size_t taken = members_[idle][exchange.taken];
    replace(members_[busy], exchange.given, taken);
    replace(members_[idle], exchange.taken, given);
    if (received_) received_->exchange(given, taken);
    sums_[busy] -= exchange.moved;
    sums_[idle] += exchange.moved;
  }

  void replace(Members& members, std::size_t place, std::size_t chunk) {
    members.erase(members.begin() + static_cast<std::ptrdiff_t>(place));
    const auto at = std::ranges::lower_bound(members, rank(chunk), {},
                                             [this](std::size_t c) { return rank(c); });
    members.insert(at, chunk);
  }

  std::span<const std::int64_t> works_;
  std::vector<Members> members_;
  std::vector<std::int64_t> sums_;
  std::optional<Received> received_{};
};

void check(const Chunks& chunks) {
  FOVEA_ASSERT(!chunks.base.empty() && chunks.works.size() % chunks.base.size() == 0);
}

}  // namespace

std::vector<int> deal_balanced(const Chunks& chunks) {
  check(chunks);
  const std::span works = chunks.works;
  std::vector<std::size_t> heaviest_first(works.size());
  std::iota(heaviest_first.begin(), heaviest_first.end(), std::size_t{0});
  std::ranges::stable_sort(heaviest_first, std::ranges::greater{},
                           [&](std::size_t chunk) { return works[chunk]; });

  std::vector<std::int64_t> sums(chunks.base.begin(), chunks.base.end());
  std::vector<std::size_t> idlest_first(sums.size());
  std::iota(idlest_first.begin(), idlest_first.end(), std::size_t{0});
  std::vector<int> group_of(works.size());
  for (std::size_t first = 0; first < works.size(); first += sums.size()) {
    std::ranges::stable_sort(idlest_first, {}, [&](std::size_t group) { return sums[group]; });
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const std::size_t chunk = heaviest_first[first + i];
      group_of[chunk] = static_cast<int>(idlest_first[i]);
      sums[idlest_first[i]] += works[chunk];
    }
  }
  return even_out(chunks, group_of);
}

std::vector<int> deal_contiguous(const Chunks& chunks) {
  check(chunks);
  const std::size_t chunks_per_group = chunks.works.size() / chunks.base.size();
  std::vector<int> group_of(chunks.works.size());
  for (std::size_t chunk = 0; chunk < group_of.size(); ++chunk)
    group_of[chunk] = static_cast<int>(chunk / chunks_per_group);
  return group_of;
}

std::vector<int> even_out(const Chunks& chunks, std::span<const int> group_of) {
  Groups groups(chunks, group_of);
  groups.even_out(chunks.tolerance);
  return groups.group_of();
}

double unevenness(const Chunks& chunks, std::span<const int> group_of) {
  std::vector<std::int64_t> sums(chunks.base.begin(), chunks.base.end());
  for (std::size_t chunk = 0; chunk < group_of.size(); ++chunk)
    sums[static_cast<std::size_t>(group_of[chunk])] += chunks.works[chunk];
  const auto total = static_cast<double>(std::reduce(sums.begin(), sums.end(), std::int64_t{0}));
  if (total == 0) return 0;
  const auto most = static_cast<double>(std::ranges::max(sums));
  return most * static_cast<double>(sums.size()) / total - 1;
}

std::vector<int> deal_zigzag(int num_groups) {
  std::vector<int> group_of(2 * static_cast<std::size_t>(num_groups));
  for (int group = 0; group < num_groups; ++group) {
    group_of[static_cast<std::size_t>(group)] = group;
    group_of[group_of.size() - 1 - static_cast<std::size_t>(group)] = group;
  }
  return group_of;
}

}  // namespace fovea::parallel
