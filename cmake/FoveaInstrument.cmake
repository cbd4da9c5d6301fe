# Builds for tests and measurement: sanitizers, coverage, fuzzing. Nothing of it reaches an installed library.

if(FOVEA_SANITIZE)
  add_compile_options(-fsanitize=${FOVEA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${FOVEA_SANITIZE})
endif()

if(FOVEA_COVERAGE)
  add_compile_options(--coverage)
  add_link_options(--coverage)
endif()

if(FOVEA_BUILD_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "FOVEA_BUILD_FUZZERS needs clang++ (libFuzzer); CMAKE_CXX_COMPILER is ${CMAKE_CXX_COMPILER}")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
