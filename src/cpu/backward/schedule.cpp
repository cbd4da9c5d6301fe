#include "cpu/backward/schedule.hpp"

#include <algorithm>

namespace fovea::cpu {
namespace {

constexpr std::int64_t kPanelsPerBlock = 4;

BackwardItem item_at(const BackwardCall& call, std::int64_t sequence, std::int64_t kv_head,
                     std::int64_t chunk) {
  const Sequence s = call.sequence(sequence);
  const std::int64_t keys = chunk_keys(call.spec, s.seqlen_kv);
  return {s, kv_head, chunk, std::min(s.seqlen_kv, chunk * keys),
          std::min(s.seqlen_kv, (chunk + 1) * keys)};
}

struct IndexRange {
  std::int64_t begin, end;
};

/// The items of a group in order; what does not tell groups apart runs over all its values.
void for_each_item_of_group(const BackwardCall& call, std::int64_t group,
                            const std::function<void(const BackwardItem&)>& visit) {
  const auto take = [&group](bool is_fixed, std::int64_t count) {
    if (!is_fixed) return IndexRange{0, count};
    const std::int64_t index = group % count;
    group /= count;
    return IndexRange{index, index + 1};
  };
  const BackwardSchedule& schedule = call.schedule;
  const IndexRange chunks = take(schedule.by_chunk, schedule.max_chunks);
  const IndexRange heads = take(schedule.by_head, call.f.num_heads_kv);
  const IndexRange sequences = take(schedule.by_sequence, call.f.num_sequences);
  for (std::int64_t s = sequences.begin; s < sequences.end; ++s) {
    for (std::int64_t head = heads.begin; head < heads.end; ++head) {
      for (std::int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk)
        visit(item_at(call, s, head, chunk));
    }
  }
}

}  // namespace

std::int64_t num_chunks(const BackwardCall& call, const Sequence& s) {
  return ceil_div(s.seqlen_kv, chunk_keys(call.spec, s.seqlen_kv));
}

void for_each_item(const BackwardCall& call, std::int64_t task,
                   const std::function<void(const BackwardItem&)>& visit) {
  const BackwardSchedule& schedule = call.schedule;
  for (std::int64_t group = task; group < schedule.num_groups; group += schedule.num_tasks)
    for_each_item_of_group(call, group, visit);
}

RowBlocks::RowBlocks(const BackwardCall& call)
    : call_(call), first_block_(call.memory.first_block) {
  first_block_[0] = 0;
  for (std::int64_t i = 0; i < call.f.num_sequences; ++i) {
    const std::int64_t blocks = ceil_div(call.num_rows(call.sequence(i)), block_rows());
    first_block_[i + 1] = first_block_[i] + blocks * call.f.num_heads_kv;
  }
}

std::int64_t RowBlocks::block_rows() const { return kPanelsPerBlock * call_.spec.lanes; }

RowRange RowBlocks::operator[](std::int64_t index) const {
  const std::int64_t* end = first_block_ + call_.f.num_sequences + 1;
  const std::int64_t* found = std::upper_bound<const std::int64_t*>(first_block_, end, index) - 1;
  const Sequence s = call_.sequence(found - first_block_);
  const std::int64_t blocks = ceil_div(call_.num_rows(s), block_rows());
  const std::int64_t rest = index - *found;
  const std::int64_t begin = rest % blocks * block_rows();
  return {s, rest / blocks, begin, std::min(call_.num_rows(s), begin + block_rows())};
}

}  // namespace fovea::cpu
