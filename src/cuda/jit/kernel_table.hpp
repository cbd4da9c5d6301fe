// Kernels by what shapes them, before any text: a plan's way to its kernel.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/jit/loader.hpp"

namespace fovea::cuda::jit {

/// Key is a plain struct with a defaulted ==: the spec and the digests of the programs. A process has
/// few kernels, so the search is a walk over them; a Plan keeps what it found and does not come back.
template <class Key>
class KernelTable {
 public:
  /// `make_text` is called only where this key is new on this device.
  template <class MakeText>
  std::shared_ptr<const LoadedKernel> find_or_load(const Key& key,
                                                   const driver::DeviceContext& context,
                                                   Loader& loader, const MakeText& make_text) {
    {
      const std::lock_guard lock(mutex_);
      for (const Row& row : rows_) {
        if (row.context == context.handle() && row.loader == &loader && row.key == key)
          return row.kernel;
      }
    }
    auto kernel = loader.load(make_text(), context);
    const std::lock_guard lock(mutex_);
    rows_.push_back({key, context.handle(), &loader, kernel});
    return kernel;
  }

 private:
  struct Row {
    Key key;
    driver::ContextHandle context;
    const Loader* loader;
    std::shared_ptr<const LoadedKernel> kernel;
  };
  std::mutex mutex_;
  std::vector<Row> rows_;
};

}  // namespace fovea::cuda::jit
