#include "cuda/emulator/emulator.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>
#include <new>

#include "fovea/error.hpp"

#include "cuda/emulator/device_state.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::size_t kBufferAlignment = 1024;

void add(Device::State& state, std::string name, void* data, std::uint64_t bytes,
         std::shared_ptr<void> memory, bool is_defined) {
  auto block = std::make_unique<Block>(Block::Spec{.name = std::move(name),
                                                   .data = static_cast<std::byte*>(data),
                                                   .bytes = bytes,
                                                   .is_defined = is_defined});
  state.buffers[reinterpret_cast<std::uintptr_t>(data)] = {std::move(memory), std::move(block)};
}

constexpr std::int32_t kMostThreads = 1024;
constexpr std::uint32_t kMostSharedBytes = 232448, kRegistersOfSm = 65536;

void require(bool holds, const std::string& text) {
  if (!holds) throw InvalidArgument("Device::launch: " + text);
}

std::int64_t volume(Dim3 dim) { return std::int64_t{dim.x} * dim.y * dim.z; }

/// What the driver would refuse.
void check(const LaunchConfig& config) {
  const std::int64_t threads = volume(config.block);
  require(threads >= 1 && threads <= kMostThreads,
          fmt::format("block has {} threads; expected 1 to {}", threads, kMostThreads));
  require(config.warp_lanes == 32 || config.warp_lanes == 64,
          fmt::format("warp_lanes is {}; expected 32 or 64", config.warp_lanes));
  require(config.shared_bytes <= kMostSharedBytes,
          fmt::format("shared_bytes is {}; expected at most {}", config.shared_bytes,
                      kMostSharedBytes));
  require(threads * config.registers_per_thread <= kRegistersOfSm,
          fmt::format("{} threads of {} registers exceed {}", threads, config.registers_per_thread,
                      kRegistersOfSm));
  const Dim3 grid = config.grid, cluster = config.cluster;
  require(cluster.x > 0 && cluster.y > 0 && cluster.z > 0 && volume(cluster) <= 16,
          "cluster has no CTA, or more than 16");
  require(grid.x % cluster.x == 0 && grid.y % cluster.y == 0 && grid.z % cluster.z == 0,
          "grid does not consist of whole clusters");
}

}  // namespace

Device::Device(std::size_t stack_bytes) : state_(std::make_unique<State>(stack_bytes)) {}

Device::~Device() = default;

void* Device::allocate(std::string name, std::size_t bytes) {
  const auto alignment = std::align_val_t{kBufferAlignment};
  const std::shared_ptr<void> memory(::operator new(bytes, alignment),
                                     [=](void* p) { ::operator delete(p, alignment); });
  std::memset(memory.get(), 0xff, bytes);
  add(*state_, std::move(name), memory.get(), bytes, memory, false);
  return memory.get();
}

void* Device::sparse_buffer(std::string name, std::uint64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  const std::shared_ptr<void> memory(data, [=](void* p) { munmap(p, bytes); });
  add(*state_, std::move(name), data, bytes, memory, false);
  return data;
}

void Device::register_buffer(std::string name, void* data, std::uint64_t bytes) {
  add(*state_, std::move(name), data, bytes, nullptr, true);
}

void Device::define(const void* data, std::uint64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto after = state_->buffers.upper_bound(address);
  if (after == state_->buffers.begin()) return;
  Block& block = *std::prev(after)->second.block;
  const std::uint64_t begin = address - std::prev(after)->first;
  if (begin + bytes <= block.bytes()) block.define({begin, bytes});
}

Report Device::launch(const LaunchConfig& config, const Options& options,
                      const std::function<void()>& kernel) {
  check(config);
  return Machine(*state_, config, options, kernel).run();
}

Report sweep(int seeds, const std::function<Report(const Options&)>& launch) {
  for (const Landing landing : {Landing::earliest, Landing::latest}) {
    Report report = launch({.seed = 0, .landing = landing});
    if (!report.is_clean()) return report;
  }
  Report report;
  for (int seed = 0; seed < seeds && report.is_clean(); ++seed) {
    report = launch({.seed = static_cast<std::uint64_t>(seed)});
  }
  return report;
}

}  // namespace fovea::cuda::emulator
