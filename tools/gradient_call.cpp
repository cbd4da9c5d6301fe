#include "gradient_call.hpp"

#include "core/shape.hpp"

namespace fovea::tools {
namespace {

Array array_like(const TensorView& view, const Gpu* gpu) {
  const Array host = make_array(view.dtype(), shape_of(view.spec()));
  return gpu == nullptr ? host : gpu->copy(host);
}

}  // namespace

GradientCall::GradientCall(const AttentionForward& forward, const Gpu* gpu)
    : dq(array_like(forward.q, gpu)),
      dk(array_like(forward.k, gpu)),
      dv(array_like(forward.v, gpu)) {
  args = {.dout = forward.out,
          .forward = forward,
          .dq = dq.mutable_view(),
          .dk = dk.mutable_view(),
          .dv = dv.mutable_view(),
          .executor = forward.executor,
          .stream = forward.stream};
  if (!forward.sinks) return;
  dsinks = array_like(forward.sinks, gpu);
  args.dsinks = dsinks.mutable_view();
}

}  // namespace fovea::tools
