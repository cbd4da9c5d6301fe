// A kernel of forward_cases.hpp under the emulator, launched as the host launches it on a device.
#pragma once

#include <string>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "kernels/choice_cases.hpp"
#include "kernels/emulated_device.hpp"
#include "kernels/forward_cases.hpp"
#include "kernels/run.hpp"

namespace fovea::testing {

/// The kernels of sm_80, sm90/decode, sm90/decode_latent, sm90/attention_forward; then what joins splits, either form.
void run_emulated(const Run& run, Emulation& emulation);
/// Short sequences on Hopper, packed ones planned for the longest: by sm_80's kernel, by Hopper's own.
void run_short(const Run& run, Emulation& emulation);
void run_hopper_short(const Run& run, Emulation& emulation);
void run_decode(const Run& run, Emulation& emulation);
void run_decode_coded(const Run& run, Emulation& emulation);
void run_chunk_over_codes(const Run& run, Emulation& emulation);
void run_latent(const Run& run, Emulation& emulation);
void run_hopper(const Run& run, Emulation& emulation);
/// What rounds K, V and Q into workspace; attention behind it.
void run_quantizers(const cuda::QuantizeKvLaunch& launch, Emulation& emulation);
void run_quantized(const Run& run, Emulation& emulation);
void run_sm80_quantized(const Run& run, Emulation& emulation);

/// Two CTAs at once, so that row tiles are claimed from each other; an L2 cache so small that heads come in several
/// sections.
cuda::DeviceTraits sectioned_hopper();

}  // namespace fovea::testing
