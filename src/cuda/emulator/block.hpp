// A piece of memory that kernels may touch: the shared memory of a CTA, or a registered global buffer. Its bytes are a
// heap block of their own; beside each word stands who touched it, which bytes were ever written, and which writes the
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
  struct Cell {
    History history;
    // 1 + index into split_, where bytes of the word have separate histories
    std::uint32_t split = 0;
    std::uint32_t fence_time = 0;  // of the fence that published the last write, 0: none
    AgentId fence_agent = 0;
    std::uint8_t defined = 0, unfenced = 0;  // a bit per byte
  };
  static constexpr std::uint64_t kCellBytes = 4, kPageCells = 1024;
  using Page = std::array<Cell, kPageCells>;

  template <class Visit>
  void for_cells(const ByteRange& range, Visit visit);
  Cell& cell(std::uint64_t index);
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
  std::deque<std::array<History, kCellBytes>> split_;
  ReaderLists readers_;
};

}  // namespace fovea::cuda::emulator
