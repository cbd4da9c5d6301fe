// rotary on a GPU through the public function, against the CPU. Without a driver or a device everything is skipped.
#include "fovea/rotary.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_copy.hpp"
#include "support/compare.hpp"
#include "support/rotary_case.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

class GpuRotary : public Gpu {};

TEST_F(GpuRotary, EqualsTheCpu) {
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{}, std::vector<std::int64_t>{9, 0, 1, 12}}) {
    for (const int options : {0, 1, 2, 3, 4, 5, 6, 7}) {
      RotaryCase c{.lengths = lengths, .num_pairs = options == 6 ? 3 : 10};
      c.is_interleaved = (options & 1) != 0;
      c.is_conjugate = (options & 2) != 0;
      c.is_in_place = (options & 4) != 0;
      c.dtype = options % 2 == 0 ? Dtype::bf16 : Dtype::f32;
      c.out_dtype = c.dtype;
      c.has_positions = options % 3 == 1;
      c.has_offsets = options % 3 == 2;
      SCOPED_TRACE("options " + std::to_string(options));
      RotaryMemory on_cpu(c), on_gpu(c);
      rotary(on_cpu.args);
      DeviceCopies copies;
      ApplyRotary args = on_gpu.args;
      std::vector<TensorBytes> tensors;
      const auto add = [&](const char* name, const TensorView& view, bool is_output = false) {
        if (view) tensors.push_back(tensor_bytes(name, view, is_output));
      };
      add("x", args.x, c.is_in_place);
      if (!c.is_in_place) add("out", args.out, true);
      add("cos", args.cos);
      add("sin", args.sin);
      add("cu_seqlens", args.cu_seqlens);
      add("positions", args.positions);
      add("offsets", args.offsets);
      copies.add(tensors);
      for (TensorView* view :
           std::initializer_list<TensorView*>{&args.x, &args.out, &args.cos, &args.sin,
                                              &args.cu_seqlens, &args.positions, &args.offsets})
        *view = copies.view(*view);
      rotary(args);
      copies.copy_back();
      const std::vector<double> a = values_of(on_gpu.args.out);
      const std::vector<double> b = values_of(on_cpu.args.out);
      for (std::size_t i = 0; i < a.size(); ++i)
        ASSERT_NEAR(a[i], b[i], 2 * rounding(c.out_dtype, b[i]) + 0x1p-22) << i;
    }
  }
}

}  // namespace
}  // namespace fovea::testing
