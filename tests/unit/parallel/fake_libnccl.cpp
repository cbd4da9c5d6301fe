// The fake itself: see fake_libnccl.hpp.
#include "unit/parallel/fake_libnccl.hpp"

#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "parallel/communicator/nccl.hpp"

using fovea::NcclId;
using fovea::cuda::driver::StreamHandle;
using fovea::parallel::FakeNccl;
using fovea::parallel::kNcclF32;
using fovea::parallel::kNcclSuccess;

namespace {

constexpr int kRemoteError = 6, kInvalidArgument = 4;

FakeNccl state;
std::mutex state_mutex;
int num_ids = 0;

/// Letters between ranks of one group, numbered in the order of exchanges.
struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  int world_size = 0, num_ranks = 0;
  std::set<int> ended;
  std::map<std::tuple<int, int, int>, std::vector<char>> letters;  // from, to, number
};

struct Comm {
  std::shared_ptr<Group> group;
  int rank = 0;
  std::map<int, int> num_sent{}, num_awaited{};
};

std::map<int, std::shared_ptr<Group>>& groups() {
  static std::map<int, std::shared_ptr<Group>> all;
  return all;
}

/// What a collective reads and writes, and on which stream.
struct Work {
  StreamHandle stream = nullptr;
  const void* read = nullptr;
  void* written = nullptr;
};

int called(const char* name, int rank = -1, std::size_t count = 0, const Work& work = {}) {
  const std::lock_guard lock(state_mutex);
  state.calls.push_back({name, rank, count});
  if (work.stream != nullptr && state.enqueue != nullptr) {
    state.enqueue({.name = name,
                   .stream = work.stream,
                   .memory = reinterpret_cast<std::uintptr_t>(work.read),
                   .written = reinterpret_cast<std::uintptr_t>(work.written)});
  }
  return state.failing_call == name ? state.failing_result : kNcclSuccess;
}

void post(Comm& comm, int to, const void* data, std::size_t bytes) {
  const auto* const from = static_cast<const char*>(data);
  const std::lock_guard lock(comm.group->mutex);
  comm.group->letters[{comm.rank, to, comm.num_sent[to]++}] = {from, from + bytes};
  comm.group->changed.notify_all();
}

/// The next letter of a rank; nothing where it has ended.
bool take(Comm& comm, int from, std::vector<char>& letter) {
  Group& group = *comm.group;
  const std::tuple key{from, comm.rank, comm.num_awaited[from]++};
  std::unique_lock lock(group.mutex);
  group.changed.wait(lock,
                     [&] { return group.letters.contains(key) || group.ended.contains(from); });
  const auto found = group.letters.extract(key);
  if (found.empty()) return false;
  letter = found.mapped();
  return true;
}

/// Sends and receives of an open group, which go out together when it is closed.
thread_local std::vector<std::function<int()>> sends, receives;
thread_local bool is_grouping = false;

int receive_now(Comm& comm, void* to, std::size_t bytes, int from) {
  std::vector<char> letter;
  if (!take(comm, from, letter)) return kRemoteError;
  if (letter.size() != bytes) return kInvalidArgument;
  if (bytes != 0) std::memcpy(to, letter.data(), bytes);
  return kNcclSuccess;
}

std::size_t bytes_of(int dtype) { return dtype == kNcclF32 ? sizeof(float) : 1; }

}  // namespace

#define FAKE(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

extern "C" __attribute__((visibility("default"))) FakeNccl* fake_nccl_state() { return &state; }
extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited" : "as the test asked";
}
FAKE(ncclGetUniqueId, NcclId* id) {
  const int result = called("ncclGetUniqueId");
  const std::lock_guard lock(state_mutex);
  const int number = ++num_ids;
  std::memcpy(id->bytes.data(), &number, sizeof(number));
  return result;
}
FAKE(ncclCommInitRank, Comm** comm, int world_size, NcclId id, int rank) {
  if (const int result = called("ncclCommInitRank", rank); result != kNcclSuccess) return result;
  int number = 0;
  std::memcpy(&number, id.bytes.data(), sizeof(number));
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(state_mutex);
    auto& found = groups()[number];
    if (found == nullptr) found = std::make_shared<Group>();
    group = found;
  }
  std::unique_lock lock(group->mutex);
  group->world_size = world_size;
  ++group->num_ranks;
  group->changed.notify_all();
  group->changed.wait(lock, [&] { return group->num_ranks == world_size; });
  *comm = new Comm{.group = group, .rank = rank};
  return kNcclSuccess;
}
namespace {
void end(Comm* comm) {
  {
    const std::lock_guard lock(comm->group->mutex);
    comm->group->ended.insert(comm->rank);
    comm->group->changed.notify_all();
  }
  delete comm;
}
}  // namespace
FAKE(ncclCommDestroy, Comm* comm) {
  const int result = called("ncclCommDestroy", comm->rank);
  end(comm);
  return result;
}
FAKE(ncclCommAbort, Comm* comm) {
  const int result = called("ncclCommAbort", comm->rank);
  end(comm);
  return result;
}
FAKE(ncclCommGetAsyncError, Comm* comm, int* error) {
  constexpr int kInProgress = 7;
  const std::lock_guard lock(state_mutex);
  *error = state.num_in_progress > 0 ? kInProgress : state.async_errors[comm->rank];
  if (state.num_in_progress > 0) --state.num_in_progress;
  return kNcclSuccess;
}
FAKE(ncclCommCount, Comm* comm, int* count) {
  *count = comm->group->world_size;
  return called("ncclCommCount", comm->rank);
}
FAKE(ncclCommCuDevice, Comm* comm, int* index) {
  *index = 0;
  return called("ncclCommCuDevice", comm->rank);
}
FAKE(ncclCommUserRank, Comm* comm, int* rank) {
  *rank = comm->rank;
  return called("ncclCommUserRank", comm->rank);
}
FAKE(ncclGroupStart) {
  is_grouping = true;
  return called("ncclGroupStart");
}
FAKE(ncclGroupEnd) {
  is_grouping = false;
  int result = called("ncclGroupEnd");
  for (const auto& send : sends) send();
  for (const auto& receive : receives) {
    if (result == kNcclSuccess) result = receive();
  }
  sends.clear();
  receives.clear();
  return result;
}
FAKE(ncclAllGather, const void* sent, void* received, std::size_t count, int dtype, Comm* comm,
     StreamHandle stream) {
  int result = called("ncclAllGather", comm->rank, count, {stream, sent, received});
  if (result != kNcclSuccess) return result;
  const std::size_t bytes = count * bytes_of(dtype);
  for (int peer = 0; peer < comm->group->world_size; ++peer) post(*comm, peer, sent, bytes);
  for (int peer = 0; peer < comm->group->world_size && result == kNcclSuccess; ++peer) {
    result = receive_now(
        *comm, static_cast<char*>(received) + static_cast<std::size_t>(peer) * bytes, bytes, peer);
  }
  return result;
}
FAKE(ncclReduceScatter, const void* sent, void* received, std::size_t count, int dtype, int op,
     Comm* comm, StreamHandle stream) {
  int result = called("ncclReduceScatter", comm->rank, count, {stream, sent, received});
  if (result != kNcclSuccess) return result;
  if (dtype != kNcclF32 || op != fovea::parallel::kNcclSum) return kInvalidArgument;
  const auto* const parts = static_cast<const float*>(sent);
  for (int peer = 0; peer < comm->group->world_size; ++peer)
    post(*comm, peer, parts + static_cast<std::size_t>(peer) * count, count * sizeof(float));
  std::vector<float> sums(count), part(count);
  for (int peer = 0; peer < comm->group->world_size; ++peer) {
    result = receive_now(*comm, part.data(), count * sizeof(float), peer);
    if (result != kNcclSuccess) return result;
    for (std::size_t i = 0; i < count; ++i) sums[i] += part[i];
  }
  if (count != 0) std::memcpy(received, sums.data(), count * sizeof(float));
  return result;
}
FAKE(ncclSend, const void* sent, std::size_t count, int dtype, int peer, Comm* comm,
     StreamHandle stream) {
  const int result = called("ncclSend", comm->rank, count, {stream, sent});
  if (!is_grouping) return kInvalidArgument;
  if (result == kNcclSuccess) {
    sends.emplace_back([=] {
      post(*comm, peer, sent, count * bytes_of(dtype));
      return kNcclSuccess;
    });
  }
  return result;
}
FAKE(ncclRecv, void* received, std::size_t count, int dtype, int peer, Comm* comm,
     StreamHandle stream) {
  const int result = called("ncclRecv", comm->rank, count, {stream, nullptr, received});
  if (!is_grouping) return kInvalidArgument;
  if (result == kNcclSuccess) {
    receives.emplace_back(
        [=] { return receive_now(*comm, received, count * bytes_of(dtype), peer); });
  }
  return result;
}
