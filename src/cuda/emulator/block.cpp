#include "cuda/emulator/block.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr unsigned kAllBytes = 0xffff, kWordMask = 0xf;

bool is_before(const Machine& machine, const Stamp& earlier, const Actor& actor) {
  if (earlier.time == 0) return true;
  if (machine.is_of_grid_before(earlier.wave)) return machine.knows_grid_before(*actor.seen);
  if (earlier.wave != actor.wave) return machine.has_acquired_wave(earlier.wave);
  return (earlier.agent == actor.agent && !actor.is_async) ||
         actor.seen->of(earlier.agent) >= earlier.time;
}

}  // namespace

void Readers::note(const Stamp& reader) {
  auto at = stamps_.begin() + static_cast<std::ptrdiff_t>(next_);
  if (at == stamps_.end() || at->agent != reader.agent)
    at = std::ranges::lower_bound(stamps_, reader.agent, {}, &Stamp::agent);
  if (at != stamps_.end() && at->agent == reader.agent) {
    *at = reader;
  } else {
    at = stamps_.insert(at, reader);
  }
  next_ = static_cast<std::size_t>(at - stamps_.begin()) + 1;
}

void Readers::clear() {
  stamps_.clear();
  next_ = 0;
}

std::uint32_t ReaderLists::make() {
  if (free_.empty()) {
    lists_.emplace_back();
    return static_cast<std::uint32_t>(lists_.size());
  }
  const std::uint32_t list = free_.back();
  free_.pop_back();
  return list;
}

void ReaderLists::free(std::uint32_t list) {
  at(list).clear();
  free_.push_back(list);
}

Block::Block(Spec spec)
    : spec_(std::move(spec)),
      pages_((spec_.bytes + kCellBytes * kPageCells - 1) / (kCellBytes * kPageCells)) {
  if (spec_.is_shared) async_view_.assign(spec_.data, spec_.data + spec_.bytes);
}

Block::Cell& Block::cell(std::uint64_t index) {
  std::unique_ptr<Page>& page = pages_[index / kPageCells];
  if (!page) {
    page = std::make_unique<Page>();
    if (spec_.is_defined) {
      for (Cell& fresh : *page) fresh.defined = kAllBytes;
    }
  }
  return (*page)[index % kPageCells];
}

History& Block::history_of(Cell& cell, unsigned byte) {
  if (cell.split == 0) return cell.history;
  Word& word = words_[cell.split - 1][byte / kWordBytes];
  return word.split == 0 ? word.history : bytes_[word.split - 1][byte % kWordBytes];
}

template <class Visit>
void Block::for_cells(const ByteRange& range, Visit visit) {
  const std::uint64_t end = range.begin + range.bytes;
  for (std::uint64_t at = range.begin; at < end;) {
    const std::uint64_t index = at / kCellBytes;
    const std::uint64_t next = std::min(end, (index + 1) * kCellBytes);
    const unsigned mask = (kAllBytes >> (kCellBytes - (next - at))) << (at % kCellBytes);
    visit(cell(index), mask);
    at = next;
  }
}

template <class Visit>
void Block::for_histories(Cell& cell, unsigned mask, Visit visit) {
  if (cell.split == 0) {
    if (mask == kAllBytes) return visit(cell.history, mask);
    split(cell);
  }
  for (unsigned begin = 0; begin < kCellBytes; begin += kWordBytes) {
    const unsigned of_word = mask & kWordMask << begin;
    if (of_word == 0) continue;
    Word& word = words_[cell.split - 1][begin / kWordBytes];
    if (word.split == 0) {
      if (of_word == kWordMask << begin) {
        visit(word.history, of_word);
        continue;
      }
      split(word);
    }
    for (unsigned byte = 0; byte < kWordBytes; ++byte) {
      const unsigned bit = 1U << (begin + byte);
      if ((of_word & bit) != 0) visit(bytes_[word.split - 1][byte], bit);
    }
  }
}

/// Each part goes on from the one reader that the whole knows, and from a list of its own.
template <class Parts>
void Block::share_readers(const History& whole, Parts& parts) {
  if (whole.more_readers == 0) return;
  for (History* const part : parts) {
    part->more_readers = readers_.make();
    readers_.at(part->more_readers) = readers_.at(whole.more_readers);
  }
  readers_.free(whole.more_readers);
}

void Block::split(Cell& cell) {
  auto& words = words_.emplace_back();
  words.fill({.history = cell.history});
  std::array parts{&words[0].history, &words[1].history, &words[2].history, &words[3].history};
  share_readers(cell.history, parts);
  cell.split = static_cast<std::uint32_t>(words_.size());
}

void Block::split(Word& word) {
  auto& bytes = bytes_.emplace_back();
  bytes.fill(word.history);
  std::array parts{&bytes[0], &bytes[1], &bytes[2], &bytes[3]};
  share_readers(word.history, parts);
  word.split = static_cast<std::uint32_t>(bytes_.size());
}

void Block::check_read(Machine& machine, const Actor& actor, const ByteRange& range,
                       History& history) {
  if (!is_before(machine, history.write, actor)) {
    machine.report_race(actor, AccessKind::read, *this, range, history.write, AccessKind::write);
  }
  Stamp& last = history.read;
  if (last.time != 0 && last.wave != actor.wave) {
    history.last_wave_of_others = last.wave;
    if (history.more_readers != 0) readers_.at(history.more_readers).clear();
    last = stamp(actor);
    return;
  }
  const bool is_alone = history.more_readers == 0 || readers_.at(history.more_readers).is_empty();
  if (is_alone && is_before(machine, last, actor)) {
    last = stamp(actor);
    return;
  }
  if (last.agent == actor.agent) {
    last = stamp(actor);
    return;
  }
  if (history.more_readers == 0) history.more_readers = readers_.make();
  readers_.at(history.more_readers).note(stamp(actor));
}

void Block::check_write(Machine& machine, const Actor& actor, AccessKind kind,
                        const ByteRange& range, History& history) {
  const bool both_atomic = kind == AccessKind::atomic && history.write_is_atomic;
  if (!both_atomic && !is_before(machine, history.write, actor)) {
    machine.report_race(actor, kind, *this, range, history.write, AccessKind::write);
  }
  if (!is_before(machine, history.read, actor)) {
    machine.report_race(actor, kind, *this, range, history.read, AccessKind::read);
  }
  if (history.more_readers != 0) {
    for (const Stamp& reader : readers_.at(history.more_readers).stamps()) {
      if (is_before(machine, reader, actor)) continue;
      machine.report_race(actor, kind, *this, range, reader, AccessKind::read);
      break;
    }
    readers_.free(std::exchange(history.more_readers, 0));
  }
  if (const std::uint32_t wave = history.last_wave_of_others; wave != 0) {
    const bool is_over = machine.is_of_grid_before(wave) ? machine.knows_grid_before(*actor.seen)
                                                         : machine.has_acquired_any_wave();
    if (!is_over) machine.report_race_between_ctas(actor, kind, *this, range);
  }
  history = {};
  history.write = stamp(actor);
  history.write_is_atomic = kind == AccessKind::atomic;
}

void Block::check_history(Machine& machine, const Actor& actor, AccessKind kind,
                          const ByteRange& range, History& history) {
  if (kind == AccessKind::read) {
    check_read(machine, actor, range, history);
  } else {
    check_write(machine, actor, kind, range, history);
  }
}

void Block::check(Machine& machine, const Actor& actor, AccessKind kind, const ByteRange& range,
                  Cell& cell, unsigned mask) {
  for_histories(cell, mask, [&](History& history, unsigned) {
    check_history(machine, actor, kind, range, history);
  });
  if (kind == AccessKind::write) {
    cell.defined = static_cast<std::uint16_t>(cell.defined | mask);
  } else if ((cell.defined & mask) != mask) {
    machine.report_uninitialised(actor, *this, range);
    cell.defined = static_cast<std::uint16_t>(cell.defined | mask);
  }
}

void Block::read(Machine& machine, const Actor& actor, const ByteRange& range, void* to) {
  for_cells(range, [&](Cell& cell, unsigned mask) {
    check(machine, actor, AccessKind::read, range, cell, mask);
  });
  std::memcpy(to, spec_.data + range.begin, range.bytes);
}

void Block::read_non_coherent(Machine& machine, const Actor& actor, const ByteRange& range,
                              void* to) {
  for_cells(range, [&](Cell& cell, unsigned mask) {
    bool is_reported = false;
    for_histories(cell, mask, [&](const History& history, unsigned) {
      const bool is_before_grid = machine.is_of_grid_before(history.write.wave);
      if (is_reported || history.write.time == 0 || is_before_grid) return;
      machine.report_non_coherent(actor, *this, range, history.write);
      is_reported = true;
    });
  });
  read(machine, actor, range, to);
}

void Block::write(Machine& machine, const Actor& actor, const ByteRange& range, const void* from) {
  for_cells(range, [&](Cell& cell, unsigned mask) {
    check(machine, actor, AccessKind::write, range, cell, mask);
    cell.unfenced = static_cast<std::uint16_t>(cell.unfenced | mask);
  });
  std::memcpy(spec_.data + range.begin, from, range.bytes);
}

void Block::touch_atomically(Machine& machine, const Actor& actor, const ByteRange& range) {
  for_cells(range, [&](Cell& cell, unsigned mask) {
    check(machine, actor, AccessKind::atomic, range, cell, mask);
    cell.unfenced = static_cast<std::uint16_t>(cell.unfenced | mask);
  });
}

void Block::read_async(Machine& machine, const Actor& actor, const ByteRange& range, void* to) {
  for_cells(range, [&](Cell& cell, unsigned mask) {
    check(machine, actor, AccessKind::read, range, cell, mask);
    bool is_reported = false;
    for_histories(cell, mask, [&](const History& history, unsigned bytes) {
      const Stamp& written = history.write;
      const bool has_no_fence =
          (cell.unfenced & bytes) != 0 && !machine.is_of_grid_before(written.wave);
      const bool has_fence_unseen = history.fence_time != 0 && written.time != 0 &&
                                    written.wave == actor.wave &&
                                    actor.seen->of(history.fence_agent) < history.fence_time;
      if (is_reported || !(has_no_fence || has_fence_unseen)) return;
      machine.report_unfenced(actor, *this, range, written);
      is_reported = true;
    });
  });
  const std::byte* view = spec_.is_shared ? async_view_.data() : spec_.data;
  std::memcpy(to, view + range.begin, range.bytes);
}

void Block::write_async(Machine& machine, const Actor& actor, const ByteRange& range,
                        const void* from) {
  for_cells(range, [&](Cell& cell, unsigned mask) {
    const unsigned unfenced = cell.unfenced & mask;
    const auto first = unfenced == 0 ? 0 : static_cast<unsigned>(std::countr_zero(unfenced));
    const Stamp written = history_of(cell, first).write;
    check(machine, actor, AccessKind::write, range, cell, mask);
    if (unfenced != 0) machine.report_unfenced(actor, *this, range, written);
    cell.unfenced = static_cast<std::uint16_t>(cell.unfenced & ~mask);
  });
  std::memcpy(spec_.data + range.begin, from, range.bytes);
  if (spec_.is_shared) std::memcpy(async_view_.data() + range.begin, from, range.bytes);
}

void Block::publish(AgentId writer, const Actor& fence, const ByteRange& range) {
  std::uint64_t at = range.begin;
  for_cells(range, [&](Cell& cell, unsigned mask) {
    const std::uint64_t begin = at / kCellBytes * kCellBytes;
    for (unsigned byte = 0; byte < kCellBytes; ++byte) {
      if (((mask & cell.unfenced) >> byte & 1U) == 0) continue;
      History& history = history_of(cell, byte);
      if (history.write.agent != writer) continue;
      cell.unfenced = static_cast<std::uint16_t>(cell.unfenced & ~(1U << byte));
      history.fence_time = fence.time;
      history.fence_agent = fence.agent;
      if (spec_.is_shared) async_view_[begin + byte] = spec_.data[begin + byte];
    }
    at = begin + kCellBytes;
  });
}

void Block::define(const ByteRange& range) {
  for_cells(range, [](Cell& cell, unsigned mask) {
    cell.defined = static_cast<std::uint16_t>(cell.defined | mask);
    cell.unfenced = static_cast<std::uint16_t>(cell.unfenced & ~mask);
  });
}

void Block::renew(const Actor& actor, const ByteRange& range) {
  for_cells(range, [&](Cell& cell, unsigned mask) {
    for_histories(cell, mask, [&](History& history, unsigned) {
      if (history.more_readers != 0) readers_.free(history.more_readers);
      history = {.write = stamp(actor)};
    });
    cell.defined = static_cast<std::uint16_t>(cell.defined & ~mask);
    cell.unfenced = static_cast<std::uint16_t>(cell.unfenced & ~mask);
  });
  std::memset(spec_.data + range.begin, 0xff, range.bytes);
}

void Block::forget_accesses() {
  for (const std::unique_ptr<Page>& page : pages_) {
    if (!page) continue;
    for (Cell& cell : *page) {
      const std::uint16_t defined = cell.defined;
      cell = {};
      cell.defined = defined;
    }
  }
  words_.clear();
  bytes_.clear();
  readers_ = {};
}

}  // namespace fovea::cuda::emulator
