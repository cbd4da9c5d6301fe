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

constexpr std::size_t kBufferBytes = std::size_t{16} << 20U;

struct Unit {
  std::string text;
  std::vector<std::string> kernels;
};

/// With the wanted kernels.
std::map<std::string, Unit> units(const std::set<std::string>& wanted) {
  std::map<std::string, Unit> all;
  for (const auto& kernels :
       {wgmma_kernels(), matrix_kernels(), copy_kernels(), tcgen05_kernels()}) {
    for (const Kernel& kernel : kernels) {
      if (!wanted.contains(kernel.name)) continue;
      Unit& unit = all[kernel.unit];
      if (unit.text.empty()) {
        if (kernel.unit.starts_with("wgmma_")) {
          unit.text =
              "#include \"ptx/generated/" + kernel.unit + ".cuh\"\n#include \"kernels.cuh\"\n";
        } else if (kernel.unit.starts_with("tcgen05")) {
          unit.text = "#include \"tcgen05_kernels.cuh\"\n";
        } else {
          unit.text = "#include \"copy_kernels.cuh\"\n";
        }
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

/// Has the GPU of this compute capability the instructions of the case? Products of integers are on sm_100 but not on
/// sm_103.
bool has_instructions(const Case& one, jit::Architecture architecture) {
  const bool is_integer_tcgen05 = one.kernel.starts_with("tcgen05_") && one.kernel.ends_with("_i8");
  if (is_integer_tcgen05 && architecture.minor != 0) return false;
  return one.compute_capability_major == 0 || one.compute_capability_major == architecture.major;
}

/// The kernels of the cases, by unit.
std::map<std::string, jit::Cubin> compile(const std::map<std::string, Unit>& units,
                                          jit::Architecture architecture) {
  jit::Compiler compiler(jit::default_search(jit::CompilerKind::nvrtc), all_text());
  std::map<std::string, std::future<jit::Cubin>> cubins;
  for (const auto& [name, unit] : units) {
    cubins[name] = std::async(std::launch::async, [&, name = name, &text = unit.text] {
      return compiler.compile({.unit = text, .label = "conformance " + name}, architecture);
    });
  }
  std::map<std::string, jit::Cubin> done;
  for (auto& [name, cubin] : cubins) done.emplace(name, cubin.get());
  return done;
}

std::map<std::string, Unit> units_of(const std::vector<Case>& cases) {
  std::set<std::string> wanted;
  for (const Case& one : cases) wanted.insert(one.kernel);
  return units(wanted);
}

class Hardware : public Backend {
 public:
  Hardware()
      : context_(driver::process_context(Device::cuda())),
        scope_(context_),
        stream_(context_),
        in_(context_, kBufferBytes),
        out_(context_, kBufferBytes) {
    if (architecture().major != 9 && architecture().major != 10 && architecture().major != 12)
      throw Unsupported("conformance: the first GPU is no sm_90, sm_100, sm_103 or sm_120");
  }

  bool has_instructions_of(const Case& one) const override {
    return has_instructions(one, architecture());
  }

  std::string name() const override { return context_.info().name; }

  void prepare(const std::vector<Case>& cases) override {
    const std::map<std::string, Unit> all = units_of(cases);
    for (const auto& [name, cubin] : compile(all, architecture())) {
      modules_.push_back(std::make_unique<driver::Module>(context_, cubin.image, name));
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
  jit::Architecture architecture() const {
    return {context_.info().compute_capability_major, context_.info().compute_capability_minor};
  }

  driver::DeviceContext& context_;
  driver::ContextScope scope_;
  driver::OwnedStream stream_;
  driver::DeviceMemory in_, out_;
  std::vector<std::unique_ptr<driver::Module>> modules_;
  std::map<std::string, driver::Function> functions_;
};

}  // namespace

std::unique_ptr<Backend> hardware() { return std::make_unique<Hardware>(); }

std::size_t compile_for(const std::vector<Case>& cases, jit::Architecture architecture) {
  std::vector<Case> wanted;
  for (const Case& one : cases) {
    if (has_instructions(one, architecture)) wanted.push_back(one);
  }
  const std::map<std::string, Unit> all = units_of(wanted);
  compile(all, architecture);
  std::size_t num_kernels = 0;
  for (const auto& [name, unit] : all) num_kernels += unit.kernels.size();
  return num_kernels;
}

}  // namespace fovea::cuda::conformance
