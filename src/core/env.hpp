// The environment, read in one place and once per question: the only code of Fovea that knows a
// variable's name. docs/env.md documents every variable; tests/lint compares the two.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fovea {

struct Environment {
  std::optional<int> num_threads;  // FOVEA_NUM_THREADS; empty where unset or 0 (automatic)
  // OMP_NUM_THREADS, first level: a hint that FOVEA_NUM_THREADS overrides
  std::optional<int> omp_num_threads;
  // FOVEA_CPU_TARGET as written; the cpu module knows which names exist
  std::optional<std::string> cpu_target;
  // FOVEA_COMPILE as written: auto, complete or staged
  std::optional<std::string> compile;
  std::optional<int> verbose;            // FOVEA_VERBOSE; 1: a line for each call
  std::optional<std::string> nvrtc;      // FOVEA_NVRTC: a library, or the folder that holds it
  std::optional<std::string> hiprtc;     // FOVEA_HIPRTC: a library, or the folder that holds it
  std::optional<std::string> hip;        // FOVEA_HIP: the library of AMD's driver
  std::optional<std::string> nccl;       // FOVEA_NCCL: a library, or the folder that holds it
  std::optional<std::string> pack;       // FOVEA_PACK: the kernel pack's file
  std::optional<std::string> tuning;     // FOVEA_TUNING: the file that fovea tune wrote
  std::optional<std::string> cache_dir;  // FOVEA_CACHE_DIR
  std::optional<std::int64_t> cache_max_mib;  // FOVEA_CACHE_MAX_MIB; 0: nothing is kept
  // Other people's variables, as they are set.
  std::optional<std::string> home;             // HOME
  std::optional<std::string> user_cache_home;  // XDG_CACHE_HOME
  std::optional<std::string> virtual_env;      // VIRTUAL_ENV
  std::optional<std::string> cuda_home;        // CUDA_HOME, else CUDA_PATH
  std::optional<std::string> rocm_path;        // ROCM_PATH
  std::optional<std::string> library_path;     // LD_LIBRARY_PATH
};

/// A variable's value, or null where it is not set.
using EnvironmentLookup = const char* (*)(const char* name);

/// Reads the process's environment. An empty value counts as unset. Throws InvalidArgument where
/// FOVEA_NUM_THREADS is not an integer from 0 to 4096, FOVEA_VERBOSE neither 0 nor 1, or
/// FOVEA_CACHE_MAX_MIB none from 0 to 1048576; an OMP_NUM_THREADS that we cannot read is
/// somebody else's dialect and is ignored.
Environment read_environment();

/// The same over another source of variables.
Environment read_environment(EnvironmentLookup lookup);

/// Whether FOVEA_VERBOSE is 1, whatever else is set; throws nothing.
bool read_verbose();

}  // namespace fovea
