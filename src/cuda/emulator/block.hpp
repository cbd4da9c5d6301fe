// A piece of memory that kernels may touch: the shared memory of a CTA, or a registered global buffer. Its bytes are a
// heap block of their own; beside them stands who touched it, which bytes were ever written, and which writes the
// async proxy cannot see yet. Read machine.hpp next.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cuda/emulator/history.hpp"

namespace fovea::cuda::emulator {

class Machine;

struct ByteRange {
  std::uint64_t begin, bytes;
};

class Block {
 public:
  struct Spec {
    std::string name;
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    bool is_defined = false;  // at the start
    bool is_shared = false;   // has a view of the async proxy
    bool is_tensor = false;   // lanes and columns of tensor memory
  };

  explicit Block(Spec spec);

  const std::string& name() const { return spec_.name; }
  std::byte* data() const { return spec_.data; }
  std::uint64_t bytes() const { return spec_.bytes; }
  bool is_shared() const { return spec_.is_shared; }
  bool is_tensor() const { return spec_.is_tensor; }

  void read(Machine& machine, const Actor& actor, const ByteRange& range, void* to);
  /// The read-only path may give what stood there before the launch.
  void read_non_coherent(Machine& machine, const Actor& actor, const ByteRange& range, void* to);
  void write(Machine& machine, const Actor& actor, const ByteRange& range, const void* from);
  /// The check of a read-modify-write; the caller changes the bytes.
  void touch_atomically(Machine& machine, const Actor& actor, const ByteRange& range);

  /// By TMA and wgmma: sees only what was fenced, and is seen by everyone.
  void read_async(Machine& machine, const Actor& actor, const ByteRange& range, void* to);
  void write_async(Machine& machine, const Actor& actor, const ByteRange& range, const void* from);

  /// fence.proxy.async: what `writer` wrote in `range` becomes visible to asynchronous operations that know of the
  /// fence.
  void publish(AgentId writer, const Actor& fence, const ByteRange& range);

  /// Marks bytes that came from outside the kernel.
  void define(const ByteRange& range);
  /// Words that somebody was given: undefined, written last by who gave them, without a past.
  void renew(const Actor& actor, const ByteRange& range);
  /// Forgets every access; the bytes stay.
  void forget_accesses();

 private:
  static constexpr std::uint64_t kCellBytes = 16, kWordBytes = 4, kPageCells = 256;

  /// 16 bytes, which matrices and copies mostly touch at once: one history while all of them are, one for each word
  /// from the first access to some of them on, for each byte of a word from the first one to some of its bytes on.
  struct Cell {
    History history;
    std::uint32_t split = 0;                  // 1 + index into words_
    std::uint16_t defined = 0, unfenced = 0;  // a bit per byte
  };
  struct Word {
    History history;
    std::uint32_t split = 0;  // 1 + index into bytes_
  };
  using Page = std::array<Cell, kPageCells>;

  template <class Visit>
  void for_cells(const ByteRange& range, Visit visit);
  /// Calls visit(history, bytes) for those of the bytes of `mask`, and of no others: splits the cell where it must.
  template <class Visit>
  void for_histories(Cell& cell, unsigned mask, Visit visit);
  Cell& cell(std::uint64_t index);
  History& history_of(Cell& cell, unsigned byte);
  template <class Parts>
  void share_readers(const History& whole, Parts& parts);
  void split(Cell& cell);
  void split(Word& word);
  void check(Machine& machine, const Actor& actor, AccessKind kind, const ByteRange& range,
             Cell& cell, unsigned mask);
  void check_history(Machine& machine, const Actor& actor, AccessKind kind, const ByteRange& range,
                     History& history);
  void check_read(Machine& machine, const Actor& actor, const ByteRange& range, History& history);
  void check_write(Machine& machine, const Actor& actor, AccessKind kind, const ByteRange& range,
                   History& history);

  Spec spec_;
  std::vector<std::byte> async_view_;
  std::vector<std::unique_ptr<Page>> pages_;
  std::deque<std::array<Word, kCellBytes / kWordBytes>> words_;
  std::deque<std::array<History, kWordBytes>> bytes_;
  ReaderLists readers_;
};

}  // namespace fovea::cuda::emulator
