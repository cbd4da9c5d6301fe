#include "parallel/engine/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <thread>

#include "core/check.hpp"
#include "core/device.hpp"
#include "cuda/driver/resources.hpp"
#include "cuda/driver/stream_memory.hpp"

namespace fovea::parallel {
namespace {

/// [problem, name, value, name, value, ...], each behind its length.
std::vector<char> encoded(const Facts& facts, const std::string& problem) {
  std::vector<char> result;
  const auto put = [&](const std::string& text) {
    const auto size = static_cast<std::uint64_t>(text.size());
    const auto* const bytes = reinterpret_cast<const char*>(&size);
    result.insert(result.end(), bytes, bytes + sizeof(size));
    result.insert(result.end(), text.begin(), text.end());
  };
  put(problem);
  for (const auto& [name, value] : facts) {
    put(name);
    put(value);
  }
  return result;
}

struct Said {
  std::string problem{};
  Facts facts{};
};

Said decoded(const char* at, const char* end) {
  const auto take = [&] {
    std::uint64_t size = 0;
    std::memcpy(&size, at, sizeof(size));
    at += sizeof(size);
    std::string text(at, at + size);
    at += size;
    return text;
  };
  Said said{.problem = take()};
  while (at != end) {
    std::string name = take();
    said.facts.emplace_back(std::move(name), take());
  }
  return said;
}

/// The host waits for the device, and asks meanwhile whether the exchange has failed: else a rank that has ended would
/// be waited for without end.
void wait_for_device(Communicator& ranks, const cuda::driver::Event& done) {
  constexpr std::chrono::microseconds kPollInterval{20};
  while (!done.is_reached()) {
    ranks.check();
    std::this_thread::sleep_for(kPollInterval);
  }
}

/// By way of the communicator's device.
void all_gather_on_device(Communicator& ranks, std::span<const std::byte> sent,
                          std::span<std::byte> received) {
  const Device device = ranks.device();
  const auto& context = cuda::driver::process_context(device);
  const cuda::driver::OwnedStream stream(context);
  void* const handle = stream.get().handle();
  // Given back in the order of the stream: to free memory at once is to wait for all that the device does.
  cuda::driver::StreamMemory from(device, sent.size(), handle), to(device, received.size(), handle);
  cuda::driver::Event done(context, cuda::driver::Event::Timing::off);
  from.copy_from(sent);
  ranks.wait(ranks.begin_all_gather(from.data(), to.data(), sent.size(), handle), handle);
  done.record(stream.get());
  wait_for_device(ranks, done);
  to.copy_to(received);
  stream.synchronize();
}

void all_gather(Communicator& ranks, std::span<const std::byte> sent,
                std::span<std::byte> received) {
  if (!is_cpu(ranks.device())) return all_gather_on_device(ranks, sent, received);
  ranks.wait(ranks.begin_all_gather(sent.data(), received.data(), sent.size(), nullptr), nullptr);
}

std::vector<Said> told(Communicator& ranks, const std::vector<char>& own) {
  const auto num_ranks = static_cast<std::size_t>(ranks.world_size());
  const std::array<std::uint64_t, 1> size{own.size()};
  std::vector<std::uint64_t> sizes(num_ranks);
  all_gather(ranks, std::as_bytes(std::span(size)), std::as_writable_bytes(std::span(sizes)));
  const std::uint64_t room = std::ranges::max(sizes);
  std::vector<char> padded(own), all(num_ranks * room);
  padded.resize(room);
  all_gather(ranks, std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
  std::vector<Said> result;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const char* const begin = all.data() + rank * room;
    result.push_back(decoded(begin, begin + sizes[rank]));
  }
  return result;
}

void compare(std::string_view where, const Facts& first, const Facts& own, std::size_t rank) {
  for (std::size_t i = 0; i < std::min(first.size(), own.size()); ++i) {
    if (first[i] == own[i]) continue;
    invalid(std::string(where),
            fmt::format("{} is {} on rank {} but {} on rank 0; expected one problem on all ranks",
                        own[i].first, own[i].second, rank, first[i].second));
  }
}

}  // namespace

void Agreement::reach(Communicator& ranks, std::string_view where, const Facts& facts,
                      const std::string& problem) {
  if (problem.empty() && agreed_.contains(facts)) return;
  const std::vector<Said> all = told(ranks, encoded(facts, problem));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].problem.empty())
      invalid(std::string(where), fmt::format("rank {}: {}", rank, all[rank].problem));
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    compare(where, all[0].facts, all[rank].facts, rank);
  agreed_.insert(facts);
}

}  // namespace fovea::parallel
