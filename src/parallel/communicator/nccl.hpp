// NCCL, opened at run time: present or not, with the reason in words; its functions as a table of pointers. Meanings:
// NCCL's user guide. Read nccl_communicator.cpp next.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "fovea/communicator.hpp"

#include "cuda/driver/types.hpp"

namespace fovea::parallel {

using NcclComm = struct NcclCommTag*;  // ncclComm_t

/// ncclResult_t, ncclDataType_t and ncclRedOp_t: what is used of them.
inline constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
inline constexpr int kNcclBytes = 0, kNcclF32 = 7;  // ncclInt8, ncclFloat32
inline constexpr int kNcclSum = 0;

/// One row for each function: member, exported symbol, arguments. All return an ncclResult_t.
// clang-format off
#define FOVEA_NCCL_FUNCTIONS(X)                                                                                    \
  X(unique_id, "ncclGetUniqueId", (NcclId* id))                                                                    \
  X(init_rank, "ncclCommInitRank", (NcclComm* comm, int world_size, NcclId id, int rank))                          \
  X(destroy, "ncclCommDestroy", (NcclComm comm))                                                                   \
  X(abort, "ncclCommAbort", (NcclComm comm))                                                                       \
  X(async_error, "ncclCommGetAsyncError", (NcclComm comm, int* error))                                             \
  X(count, "ncclCommCount", (NcclComm comm, int* count))                                                           \
  X(cuda_device, "ncclCommCuDevice", (NcclComm comm, int* index))                                                  \
  X(user_rank, "ncclCommUserRank", (NcclComm comm, int* rank))                                                     \
  X(group_start, "ncclGroupStart", ())                                                                             \
  X(group_end, "ncclGroupEnd", ())                                                                                 \
  X(all_gather, "ncclAllGather",                                                                                   \
    (const void* sent, void* received, std::size_t count, int dtype, NcclComm comm,                                \
     cuda::driver::StreamHandle stream))                                                                           \
  X(reduce_scatter, "ncclReduceScatter",                                                                           \
    (const void* sent, void* received, std::size_t count, int dtype, int op, NcclComm comm,                        \
     cuda::driver::StreamHandle stream))                                                                           \
  X(send, "ncclSend",                                                                                              \
    (const void* sent, std::size_t count, int dtype, int peer, NcclComm comm, cuda::driver::StreamHandle stream))  \
  X(receive, "ncclRecv",                                                                                           \
    (void* received, std::size_t count, int dtype, int peer, NcclComm comm, cuda::driver::StreamHandle stream))
// clang-format on

struct NcclApi {
#define FOVEA_NCCL_MEMBER(member, symbol, arguments) int(*member) arguments = nullptr;
  FOVEA_NCCL_FUNCTIONS(FOVEA_NCCL_MEMBER)
#undef FOVEA_NCCL_MEMBER
  const char* (*error_string)(int result) = nullptr;  // ncclGetErrorString
};

class Nccl {
 public:
  static constexpr std::string_view kLibrary = "libnccl.so.2";

  /// `named`: a library, or the folder that holds one; no other is tried. Throws nothing: what is missing is
  /// why_absent().
  explicit Nccl(const std::optional<std::string>& named);
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  bool is_present() const { return why_absent_.empty(); }
  /// One line: where it was searched, or the function that what was found lacks.
  const std::string& why_absent() const { return why_absent_; }
  /// Throws Unsupported with why_absent().
  const NcclApi& api() const;

  /// "remote process exited or there was a network error (6)".
  std::string words(int result) const;

 private:
  std::string start(const std::optional<std::string>& named);

  NcclApi api_{};
  std::string why_absent_;
};

/// FOVEA_NCCL's, or what the process has or can find; opened at the first call and never closed.
const Nccl& process_nccl();

}  // namespace fovea::parallel
