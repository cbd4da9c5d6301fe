// Marks what a shared libfovea exports; everything else is hidden (tests/package checks the list).
#pragma once

#if defined(_WIN32)
#define FOVEA_EXPORT __declspec(dllexport)
#else
#define FOVEA_EXPORT __attribute__((visibility("default")))
#endif
