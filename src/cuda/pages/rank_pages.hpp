// What a rank has of caches whose pages are dealt over ranks, found on an NVIDIA GPU before it appends and attends.
// Read device/common/rank_pages.cuh for the kernel.
#pragma once

#include <cstdint>
#include <memory>

#include "fovea/tensor.hpp"

#include "cuda/device/shared/rank_pages_params.h"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// One kernel for all layouts, loaded into a device.
struct RankPagesPlan {
  std::shared_ptr<const KernelSet> kernels;
};

jit::KernelText rank_pages_text();

/// Throws Unsupported where nothing can run on this device.
RankPagesPlan plan_rank_pages(Device device);

struct RankPagesSource {
  int rank = 0, num_ranks = 1;
  std::int64_t page_size = 1;
  std::int64_t num_new = 0, seqlen_q = 0;  // of every sequence
  TensorView seqlens{};     // [batch] i32 or i64: of whole sequences, before new tokens
  TensorView page_table{};  // [batch, columns] i32 or i64: the rank's
};

/// i32 and row-major, written where they are given.
struct RankPages {
  TensorView seqlens{};      // [batch] of whole sequences, new tokens among them
  TensorView own_seqlens{};  // [batch] of the rank's pages alone
  TensorView
      append_seqlens{};       // [batch], with append_pages: a cache that new tokens are appended to
  TensorView append_pages{};  // [batch, num_append_pages(source)]; -1 for pages of other ranks
  TensorView positions_new{};  // [batch, num_new]
  TensorView positions_q{};    // [batch, seqlen_q], below 0 in front of the first key
};

/// Pages that new tokens of a sequence may lie in.
std::int64_t num_append_pages(const RankPagesSource& source);

/// A call's parameters and grid; where they run is not known here.
struct RankPagesLaunch {
  RankPagesParams params;
  driver::Extent grid;
  unsigned num_threads = 0;

  KernelLaunches launches() const;
};
RankPagesLaunch rank_pages_launch(const RankPagesSource& source, const RankPages& pages);

/// Enqueued on the stream. Tensors lie in the memory of the plan's device.
void write_rank_pages(const RankPagesPlan& plan, const RankPagesSource& source,
                      const RankPages& pages, driver::Stream stream);

}  // namespace fovea::cuda
