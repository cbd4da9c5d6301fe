#include "cuda/forward/sm90_decode_coded.hpp"

#include "cuda/forward/sm80_coded.hpp"

namespace fovea::cuda {

std::optional<Refusal> Sm90DecodeCoded::refuses(const ForwardProblem& f,
                                                const DeviceTraits& device) {
  if (auto refusal = refuses_codes(f, device)) return refusal;
  if (auto refusal = refuses_rows_of_codes(f)) return refusal;
  return refuses_stream(f, device);
}

}  // namespace fovea::cuda
