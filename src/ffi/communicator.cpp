#include "ffi/communicator.hpp"

#include <cstddef>
#include <cstring>
#include <vector>

#include "core/check.hpp"
#include "ffi/error.hpp"
#include "ffi/sized_struct.hpp"

struct fovea_nccl_ranks {
  std::shared_ptr<fovea::Communicator> ranks;
};

namespace fovea::ffi {
namespace {

/// A rank, its group and the functions: what every caller has.
constexpr std::size_t kLeastSize = offsetof(fovea_communicator, nccl);

/// A Communicator made of C function pointers.
class CallbackCommunicator final : public Communicator {
 public:
  explicit CallbackCommunicator(const fovea_communicator& callbacks) : callbacks_(callbacks) {}

  int rank() const override { return callbacks_.rank; }
  int world_size() const override { return callbacks_.world_size; }

  Exchange begin_all_gather(const void* sent, void* received, std::size_t bytes,
                            void* stream) override {
    Exchange exchange;
    require("begin_all_gather", callbacks_.begin_all_gather(callbacks_.context, sent, received,
                                                            bytes, stream, &exchange.number));
    return exchange;
  }

  Exchange begin_reduce_scatter(const float* sent, float* received, std::size_t count,
                                void* stream) override {
    Exchange exchange;
    require("begin_reduce_scatter",
            callbacks_.begin_reduce_scatter(callbacks_.context, sent, received, count, stream,
                                            &exchange.number));
    return exchange;
  }

  Exchange begin_messages(std::span<const OutgoingMessage> sent,
                          std::span<const IncomingMessage> received, void* stream) override {
    std::vector<fovea_outgoing_message> outgoing;
    for (const OutgoingMessage& message : sent)
      outgoing.push_back({message.data, message.bytes, message.to});
    std::vector<fovea_incoming_message> incoming;
    for (const IncomingMessage& message : received)
      incoming.push_back({message.data, message.bytes, message.from});
    Exchange exchange;
    require("begin_messages",
            callbacks_.begin_messages(callbacks_.context, outgoing.data(), outgoing.size(),
                                      incoming.data(), incoming.size(), stream, &exchange.number));
    return exchange;
  }

  void wait(Exchange exchange, void* stream) override {
    require("wait", callbacks_.wait(callbacks_.context, exchange.number, stream));
  }

 private:
  void require(const std::string& function, int result) const {
    if (result == 0) return;
    throw DeviceError("communicator: " + function + " returned " + std::to_string(result) +
                      " on rank " + std::to_string(callbacks_.rank) +
                      "; has another rank ended or raised an error?");
  }

  fovea_communicator callbacks_;
};

/// What a group is made from is one of two.
std::shared_ptr<Communicator> to_nccl_ranks(const fovea_nccl_args& args, const std::string& where) {
  if ((args.id == nullptr) == (args.comm == nullptr))
    invalid(where, "id and comm are both given or both NULL; expected one of them");
  if (args.comm != nullptr) return use_nccl_ranks(args.comm, args.stream);
  if (args.stream != nullptr)
    invalid(where, "stream is given beside id; expected it with comm alone");
  NcclId id;
  std::memcpy(id.bytes.data(), args.id->bytes, sizeof(args.id->bytes));
  return join_nccl_ranks(id, args.rank, args.world_size, Device::cuda(args.device_id));
}

}  // namespace

std::shared_ptr<Communicator> to_communicator(const fovea_communicator* source,
                                              const std::string& where) {
  const auto c = read_struct(source, kLeastSize, where);
  if (c.nccl != nullptr) return c.nccl->ranks;
  const bool is_whole = c.begin_all_gather != nullptr && c.begin_reduce_scatter != nullptr &&
                        c.begin_messages != nullptr && c.wait != nullptr;
  if (!is_whole) invalid(where, "a function is NULL; expected all four");
  if (c.rank < 0 || c.rank >= c.world_size) {
    invalid(where, "rank is " + std::to_string(c.rank) + " and world_size " +
                       std::to_string(c.world_size) +
                       "; expected a rank from 0 up, below world_size");
  }
  return std::make_shared<CallbackCommunicator>(c);
}

}  // namespace fovea::ffi

extern "C" {

int fovea_nccl_id_make(fovea_nccl_id* id, fovea_error** error) {
  return fovea::ffi::guarded(error, [&] {
    if (id == nullptr) fovea::invalid("fovea_nccl_id_make", "id is NULL; expected an address");
    const fovea::NcclId made = fovea::make_nccl_id();
    static_assert(sizeof(id->bytes) == sizeof(made.bytes));
    std::memcpy(id->bytes, made.bytes.data(), sizeof(id->bytes));
  });
}

int fovea_nccl_ranks_create(const fovea_nccl_args* args, fovea_nccl_ranks** ranks,
                            fovea_error** error) {
  return fovea::ffi::guarded(error, [&] {
    const std::string where = "fovea_nccl_ranks_create";
    if (ranks == nullptr) fovea::invalid(where, "ranks is NULL; expected an address");
    *ranks = nullptr;
    const auto given = fovea::ffi::read_struct(args, sizeof(fovea_nccl_args), where);
    *ranks = new fovea_nccl_ranks{fovea::ffi::to_nccl_ranks(given, where)};
  });
}

void fovea_nccl_ranks_destroy(fovea_nccl_ranks* ranks) { delete ranks; }

}  // extern "C"
