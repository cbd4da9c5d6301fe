#include <algorithm>
#include <cstring>
#include <future>
#include <map>
#include <set>
#include <stdexcept>

#include "fovea/error.hpp"

#include "conformance/backend.hpp"
#include "conformance/device_text.hpp"
#include "cuda/driver/context.hpp"
#include "cuda/driver/launch.hpp"
#include "cuda/driver/module.hpp"
#include "cuda/driver/resources.hpp"
#include "cuda/driver/tensor_map.hpp"
#include "cuda/jit/compiler.hpp"

namespace fovea::cuda::conformance {
namespace {

constexpr jit::Architecture kArchitecture{9, 0};
constexpr std::size_t kBufferBytes = std::size_t{16} << 20U;

struct Unit {
  std::string text;
  std::vector<std::string> kernels;
};

/// With the wanted kernels.
std::map<std::string, Unit> units(const std::set<std::string>& wanted) {
  std::map<std::string, Unit> all;
  for (const auto& kernels : {wgmma_kernels(), matrix_kernels(), copy_kernels()}) {
    for (const Kernel& kernel : kernels) {
      if (!wanted.contains(kernel.name)) continue;
      Unit& unit = all[kernel.unit];
      if (unit.text.empty()) {
        const bool is_wgmma = kernel.unit.rfind("wgmma_", 0) == 0;
        unit.text = is_wgmma ? "#include \"ptx/generated/" + kernel.unit +
                                   ".cuh\"\n#include \"kernels.cuh\"\n"
                             : "#include \"copy_kernels.cuh\"\n";
        unit.text += "using namespace fovea::cuda;\nusing namespace fovea::cuda::conformance;\n";
      }
      unit.text += "extern \"C\" __global__ void __launch_bounds__(256, 1) kernel_" + kernel.name +
                   "(const __grid_constant__ Params p) { " + kernel.call + "(p); }\n";
      unit.kernels.push_back(kernel.name);
    }
  }
  return all;
}

jit::DeviceText all_text() {
  static const std::vector<jit::SourceFile> files = [] {
    const auto library = jit::embedded_device_text().files;
    std::vector<jit::SourceFile> all(library.begin(), library.end());
    for (const jit::SourceFile& file : device_text()) all.push_back(file);
    return all;
  }();
  return jit::make_device_text(files);
}

class Hardware : public Backend {
 public:
  Hardware()
      : context_(driver::process_context(0)),
        scope_(context_),
        stream_(context_),
        in_(context_, kBufferBytes),
        out_(context_, kBufferBytes) {
    if (context_.info().compute_capability_major != 9)
      throw Unsupported("conformance: the first GPU is no sm_90");
  }

  std::string name() const override { return context_.info().name; }

  void prepare(const std::vector<Case>& cases) override {
    std::set<std::string> wanted;
    for (const Case& one : cases) wanted.insert(one.kernel);
    jit::Compiler compiler(jit::default_nvrtc_search(), all_text());
    std::map<std::string, std::future<jit::Cubin>> cubins;
    const std::map<std::string, Unit> all = units(wanted);
    for (const auto& [name, unit] : all) {
      cubins[name] = std::async(std::launch::async, [&compiler, name = name, &unit = unit] {
        return compiler.compile({.unit = unit.text, .label = "conformance " + name}, kArchitecture);
      });
    }
    for (auto& [name, cubin] : cubins) {
      const jit::Cubin done = cubin.get();
      modules_.push_back(std::make_unique<driver::Module>(context_, done.image, name));
      for (const std::string& kernel : all.at(name).kernels) {
        functions_.emplace(kernel, modules_.back()->function("kernel_" + kernel));
      }
    }
  }

  Bytes run(const Case& one) override {
    in_.copy_from(one.in, stream_.get());
    out_.copy_from(one.out_before, stream_.get());
    Params params = one.params;
    params.in = in_.data();
    params.out = out_.data();
    if (one.map_of != MapOf::none) {
      void* tensor = one.map_of == MapOf::in ? in_.data() : out_.data();
      const driver::TensorMap map = driver::encode_tiled(context_, one.map, tensor);
      std::memcpy(params.map, map.opaque, sizeof params.map);
    }
    const driver::LaunchConfig config{.grid = {static_cast<unsigned>(one.num_ctas), 1, 1},
                                      .block = {static_cast<unsigned>(one.num_threads), 1, 1},
                                      .shared_bytes = static_cast<unsigned>(one.shared_bytes),
                                      .stream = stream_.get(),
                                      .cluster = {static_cast<unsigned>(one.cluster), 1, 1}};
    driver::launch(config, functions_.at(one.kernel), params);
    Bytes out(one.out_before.size());
    out_.copy_to(out, stream_.get());
    stream_.synchronize();
    return out;
  }

 private:
  driver::DeviceContext& context_;
  driver::ContextScope scope_;
  driver::OwnedStream stream_;
  driver::DeviceMemory in_, out_;
  std::vector<std::unique_ptr<driver::Module>> modules_;
  std::map<std::string, driver::Function> functions_;
};

}  // namespace

std::unique_ptr<Backend> hardware() { return std::make_unique<Hardware>(); }

}  // namespace fovea::cuda::conformance
