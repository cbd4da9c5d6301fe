// The kernels of forward_cases.hpp, compiled by the host compiler, by name.
#pragma once

#include <string_view>

#include "cuda/device/shared/clear_counter.h"
#include "cuda/device/shared/clear_rows.h"
#include "cuda/device/shared/combine.h"
#include "cuda/device/shared/forward_params.h"
#include "cuda/device/shared/forward_params_coded.h"
#include "cuda/device/shared/forward_params_sm80.h"
#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/device/shared/forward_spec.h"
#include "cuda/device/shared/lost_rows.h"
#include "cuda/device/shared/numbers_of_codes.h"
#include "cuda/device/shared/quantize_kv.h"
#include "cuda/device/shared/range_table.h"

namespace fovea::cuda {

using ForwardFunction = void (*)(const ForwardParams& params);
using CombineFunction = void (*)(const CombineParams& params);

struct EmulatedForward {
  std::string_view name;
  ForwardFunction run;
};

using DecodeFunction = void (*)(const Sm90DecodeParams& params);

struct EmulatedDecode {
  std::string_view name;
  DecodeFunction run;
};

using LatentFunction = void (*)(const Sm90LatentParams& params);

struct EmulatedLatent {
  std::string_view name;
  LatentFunction run;
};

using CodedFunction = void (*)(const CodedParams& params);

struct EmulatedCoded {
  std::string_view name;
  CodedFunction run;
};

using HopperShortFunction = void (*)(const Sm90ShortParams& params);

struct EmulatedHopperShort {
  std::string_view name;
  HopperShortFunction run;
};

/// A kernel of sm_90.
struct EmulatedHopper {
  std::string_view name;
  void (*run)(const Sm90ForwardParams& params);
};

using NumbersFunction = void (*)(const NumbersOfCodesParams& params);

struct EmulatedNumbers {
  std::string_view name;
  NumbersFunction run;
};

/// Means of keys of a cache, then codes.
struct EmulatedCacheRounding {
  std::string_view name;
  void (*mean)(const QuantizeCacheParams& params);
  void (*round)(const QuantizeCacheParams& params);
};

/// What computes rows again that kernels of codes have lost.
struct EmulatedLostRows {
  std::string_view name;
  void (*run)(const LostRowsParams& params);
};

using Sm80QuantizedFunction = void (*)(const Sm80QuantizedParams& params);

/// Of sm80/attention_quantized.
struct EmulatedSm80Quantized {
  std::string_view name;
  Sm80QuantizedFunction run;
};

Sm80QuantizedFunction sm80_quantized_named(std::string_view name);
const EmulatedHopper& hopper_named(std::string_view name);
/// Of sm90/attention_coded and sm90/attention_converted, and the kernel before that.
const EmulatedHopper& chunk_over_codes_named(std::string_view name);
NumbersFunction numbers_of_codes_named(std::string_view name);
/// Of sm90/attention_quantized, and the kernels before it.
const EmulatedHopper& quantized_named(std::string_view name);
const EmulatedCacheRounding& cache_rounding_named(std::string_view name);
const EmulatedLostRows& lost_rows_named(std::string_view name);
void run_mean_of_keys(const QuantizeKvSpec& spec, const QuantizeKvParams& params);
void run_quantize_kv(const QuantizeKvSpec& spec, const QuantizeKvParams& params);
ForwardFunction forward_named(std::string_view name);
CodedFunction coded_named(std::string_view name);
DecodeFunction decode_named(std::string_view name);
DecodeFunction decode_coded_named(std::string_view name);
LatentFunction latent_named(std::string_view name);
HopperShortFunction hopper_short_named(std::string_view name);
CombineFunction combine_of(const CombineSpec& spec, int splits_at_once);
void run_clear_counter(const ClearCounterParams& params);
void run_clear_rows(const ClearRowsParams& params);
void run_range_tables(const RangeTableParams& params);

}  // namespace fovea::cuda
