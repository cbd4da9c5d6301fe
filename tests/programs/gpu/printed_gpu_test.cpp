// The same programs, compiled by NVRTC and run on a GPU: what the host compiler cannot show. Skipped by name without
// one.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/availability.hpp"
#include "cuda/driver/launch.hpp"
#include "cuda/driver/resources.hpp"
#include "cuda/jit/loader.hpp"
#include "programs/program_checks.hpp"

namespace fovea::cuda {
namespace {

using fovea::testing::Case;
using fovea::testing::Draw;
using fovea::testing::Place;
using fovea::testing::ProgramData;
using fovea::testing::TestProgram;

constexpr int kNumPlaces = 512;

// Units of so many programs compile in a second or two each.
constexpr std::size_t kProgramsPerUnit = 16;

struct Result {
  float score;
  std::int32_t is_visible;
};

struct Params {
  const Captures* captures;
  const Place* places;
  Result* results;
  std::int32_t program;
};

/// Thread i evaluates the program that is asked for at place i.
jit::KernelText unit_of(std::span<const Case> cases) {
  std::string programs;
  std::string choice;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    programs += fmt::format(
        "namespace fovea::cuda::case_{0} {{\nnamespace program {{\nusing namespace "
        "::fovea::cuda::program;\n}}\n{1}}}\n",
        i, cases[i].text.mods);
    choice += fmt::format("  if (p.program == {0}) evaluate<fovea::cuda::case_{0}::Mods>(p);\n", i);
  }
  return {.unit = fmt::format(R"(#include "common/captured_range.cuh"
{}
namespace fovea::cuda {{
struct Place {{
  float score;
  Position at;
}};
struct Result {{
  float score;
  std::int32_t is_visible;
}};
struct Params {{
  const Captures* captures;
  const Place* places;
  Result* results;
  std::int32_t program;
}};
}}
template <class Mods>
static __device__ void evaluate(const fovea::cuda::Params& p) {{
  const auto i = threadIdx.x;
  const fovea::cuda::Place place = p.places[i];
  p.results[i] = {{Mods::score(place.score, place.at, *p.captures), Mods::mask(place.at, *p.captures)}};
}}
extern "C" __global__ void __launch_bounds__({}) fovea_kernel(const __grid_constant__ fovea::cuda::Params p) {{
{}}}
)",
                              programs, kNumPlaces, choice),
          .label = "test programs"};
}

class GpuPrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    const driver::Driver& driver = driver::process_driver();
    if (!driver.is_present()) GTEST_SKIP() << "needs a GPU: " << driver.why_absent();
    if (const std::string why = why_unavailable(driver, jit::process_loader(), 0); !why.empty())
      GTEST_SKIP() << why;
    context = &driver::process_context(Device::cuda());
  }

  template <class T>
  driver::DeviceMemory on_device(const T* data, std::size_t count) const {
    driver::DeviceMemory memory(*context, count * sizeof(T));
    memory.copy_from(std::as_bytes(std::span(data, count)), driver::Stream(nullptr));
    return memory;
  }

  /// All captured tensors lie in one object, of which the device has a copy.
  static Captures moved(Captures captures, std::size_t num_tensors, const ProgramData& host,
                        const driver::DeviceMemory& device) {
    for (std::size_t i = 0; i < num_tensors; ++i) {
      const auto offset = static_cast<const std::byte*>(captures.tensors[i].data) -
                          reinterpret_cast<const std::byte*>(&host);
      captures.tensors[i].data = static_cast<const std::byte*>(device.data()) + offset;
    }
    return captures;
  }

  std::vector<Result> run(const driver::Function& function, int program, const Captures& captures,
                          const std::vector<Place>& places) const {
    const driver::OwnedStream stream(*context);
    const driver::DeviceMemory captures_memory = on_device(&captures, 1);
    const driver::DeviceMemory places_memory = on_device(places.data(), places.size());
    const driver::DeviceMemory results_memory(*context, places.size() * sizeof(Result));
    driver::launch({.grid = {1}, .block = {kNumPlaces}, .stream = stream.get()}, function,
                   Params{static_cast<const Captures*>(captures_memory.data()),
                          static_cast<const Place*>(places_memory.data()),
                          static_cast<Result*>(results_memory.data()), program});
    std::vector<Result> results(places.size());
    results_memory.copy_to(std::as_writable_bytes(std::span(results)), stream.get());
    stream.synchronize();
    return results;
  }

  const driver::DeviceContext* context = nullptr;
};

TEST_F(GpuPrograms, MeanWhatTheOracleMeans) {
  const ProgramData data;
  const driver::DeviceMemory device_data = on_device(&data, 1);
  std::vector<Case> cases;
  for (const TestProgram& program : fovea::testing::test_programs(data.captures())) {
    cases.emplace_back(cases.size(), program);
  }
  for (std::size_t first = 0; first < cases.size(); first += kProgramsPerUnit) {
    const auto unit =
        std::span(cases).subspan(first, std::min(kProgramsPerUnit, cases.size() - first));
    const auto kernel = jit::process_loader().load(unit_of(unit), *context);
    for (std::size_t i = 0; i < unit.size(); ++i) {
      SCOPED_TRACE(first + i);
      const Case& each = unit[i];
      Draw draw(each.seed + 21);
      std::vector<Place> places;
      for (int k = 0; k < kNumPlaces; ++k) places.push_back(draw.place());
      const Captures captures = moved(each.captures, each.text.tensors.size(), data, device_data);
      const std::vector<Result> results =
          run(kernel->function, static_cast<int>(i), captures, places);
      fovea::testing::ScoreCheck is_right_score(each);
      fovea::testing::MaskCheck is_right_mask(each);
      for (std::size_t k = 0; k < places.size(); ++k) {
        EXPECT_TRUE(is_right_score(places[k], results[k].score));
        EXPECT_TRUE(is_right_mask(places[k], results[k].is_visible != 0));
      }
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace fovea::cuda
