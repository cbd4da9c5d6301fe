// Ranks that are threads: a letter box for each pair of them.
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>

#include "fovea/communicator.hpp"

#include "core/check.hpp"

namespace fovea {
namespace {

using Letter = std::vector<std::byte>;

/// Letters between two ranks are numbered in the order of exchanges, so that they can be waited for in any.
struct Address {
  int from = 0, to = 0;
  std::uint64_t number = 0;
  auto operator<=>(const Address&) const = default;
};

class LetterBoxes {
 public:
  explicit LetterBoxes(int world_size) : has_ended_(static_cast<std::size_t>(world_size)) {}

  int world_size() const { return static_cast<int>(has_ended_.size()); }

  void post(const Address& address, Letter letter) {
    const std::lock_guard lock(mutex_);
    letters_.emplace(address, std::move(letter));
    changed_.notify_all();
  }

  Letter take(const Address& address) {
    std::unique_lock lock(mutex_);
    const auto has_ended = [&] { return has_ended_[static_cast<std::size_t>(address.from)]; };
    changed_.wait(lock, [&] { return letters_.contains(address) || has_ended(); });
    auto letter = letters_.extract(address);
    if (letter.empty()) {
      throw DeviceError(
          fmt::format("communicator: rank {} waits for rank {}, which has ended; did it raise an "
                      "error?",
                      address.to, address.from));
    }
    return std::move(letter.mapped());
  }

  void end(int rank) {
    const std::lock_guard lock(mutex_);
    has_ended_[static_cast<std::size_t>(rank)] = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Address, Letter> letters_;
  std::vector<bool> has_ended_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<LetterBoxes> boxes, int rank)
      : boxes_(std::move(boxes)),
        rank_(rank),
        num_sent_(static_cast<std::size_t>(boxes_->world_size())),
        num_awaited_(num_sent_) {}
  ~ThreadCommunicator() override { boxes_->end(rank_); }
  ThreadCommunicator(const ThreadCommunicator&) = delete;
  ThreadCommunicator& operator=(const ThreadCommunicator&) = delete;

  int rank() const override { return rank_; }
  int world_size() const override { return boxes_->world_size(); }

  Exchange begin_all_gather(const void* sent, void* received, std::size_t bytes,
                            void* /*stream*/) override {
    auto* const to = static_cast<std::byte*>(received);
    Awaited awaited;
    for (int peer = 0; peer < world_size(); ++peer) {
      send({.to = peer, .data = sent, .bytes = bytes});
      await(awaited,
            {.from = peer, .data = to + static_cast<std::size_t>(peer) * bytes, .bytes = bytes});
    }
    return begun(std::move(awaited));
  }

  Exchange begin_reduce_scatter(const float* sent, float* received, std::size_t count,
                                void* /*stream*/) override {
    Awaited awaited{.sums = {received, count}};
    const std::size_t bytes = count * sizeof(float);
    for (int peer = 0; peer < world_size(); ++peer) {
      send({.to = peer, .data = sent + static_cast<std::size_t>(peer) * count, .bytes = bytes});
      await(awaited, {.from = peer, .bytes = bytes});
    }
    return begun(std::move(awaited));
  }

  Exchange begin_messages(std::span<const OutgoingMessage> sent,
                          std::span<const IncomingMessage> received, void* /*stream*/) override {
    Awaited awaited;
    for (const OutgoingMessage& message : sent) send(message);
    for (const IncomingMessage& message : received) await(awaited, message);
    return begun(std::move(awaited));
  }

  void wait(Exchange exchange, void* /*stream*/) override {
    const auto found = exchanges_.extract(exchange.number);
    if (found.empty()) {
      invalid("communicator", fmt::format("exchange {} is waited for, which is not under way; "
                                          "expected what begin_... returned, once",
                                          exchange.number));
    }
    const Awaited& awaited = found.mapped();
    std::ranges::fill(awaited.sums, 0.0F);
    for (const auto& [message, number] : awaited.messages) {
      const Letter letter = boxes_->take({message.from, rank_, number});
      check_bytes(message, letter);
      if (awaited.sums.empty()) {
        if (!letter.empty()) std::memcpy(message.data, letter.data(), letter.size());
      } else {
        add(letter, awaited.sums);
      }
    }
  }

 private:
  struct Awaited {
    std::vector<std::pair<IncomingMessage, std::uint64_t>> messages{};
    std::span<float> sums{};  // of a reduce-scatter: of all messages, in the order of ranks
  };

  void send(const OutgoingMessage& message) {
    const auto* const data = static_cast<const std::byte*>(message.data);
    boxes_->post({rank_, message.to, num_sent_[static_cast<std::size_t>(message.to)]++},
                 Letter(data, data + message.bytes));
  }
  void await(Awaited& awaited, const IncomingMessage& message) {
    awaited.messages.emplace_back(message, num_awaited_[static_cast<std::size_t>(message.from)]++);
  }
  Exchange begun(Awaited awaited) {
    exchanges_.emplace(++num_exchanges_, std::move(awaited));
    return {num_exchanges_};
  }

  void check_bytes(const IncomingMessage& message, const Letter& letter) const {
    if (letter.size() == message.bytes) return;
    throw DeviceError(fmt::format(
        "communicator: rank {} sent {} bytes where rank {} expects {}; are both in the same call?",
        message.from, letter.size(), rank_, message.bytes));
  }
  static void add(const Letter& letter, std::span<float> sums) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      float value = 0;
      std::memcpy(&value, letter.data() + i * sizeof(float), sizeof(float));
      sums[i] += value;
    }
  }

  std::shared_ptr<LetterBoxes> boxes_;
  int rank_;
  std::vector<std::uint64_t> num_sent_, num_awaited_;  // by rank
  std::map<std::uint64_t, Awaited> exchanges_;
  std::uint64_t num_exchanges_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int world_size) {
  if (world_size < 1) {
    invalid("make_thread_communicators",
            fmt::format("world_size is {}; expected at least 1", world_size));
  }
  const auto boxes = std::make_shared<LetterBoxes>(world_size);
  std::vector<std::unique_ptr<Communicator>> result;
  for (int rank = 0; rank < world_size; ++rank)
    result.push_back(std::make_unique<ThreadCommunicator>(boxes, rank));
  return result;
}

}  // namespace fovea
