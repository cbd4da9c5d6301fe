// What this processor can do, as a table of CPU targets.
#pragma once

#include <string>
#include <string_view>

#include "fovea/problem.hpp"

namespace fovea::cpu {

/// Empty when the target runs here, else the reason in words ("the processor lacks AMX-BF16").
std::string_view missing_for(CpuTarget target);

/// The same where the target multiplies codes of eight bits: avx512_bf16 and amx_bf16 need more for it.
std::string_view missing_for_codes(CpuTarget target);

/// The best target that runs here for f32 products (avx512, avx2, neon or scalar).
CpuTarget best_f32_target();

/// The target whose bf16 products beat f32 ones on this processor, or `automatic` when none does.
/// amx_bf16 wherever it exists. avx512_bf16 on AMD only: Zen 4 and 5 multiply bf16 at twice the f32 rate, while on
/// Intel cores without AMX vdpbf16ps was measured at half the f32 rate (docs/kernels/attention_forward_cpu.md).
CpuTarget best_bf16_target();

/// "AMD EPYC 9655 96-Core Processor", as the processor names itself.
std::string processor_name();

/// Asks the system once for permission to use AMX tiles; false where it refuses.
bool request_amx();

}  // namespace fovea::cpu
