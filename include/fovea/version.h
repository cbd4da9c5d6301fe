/* The version of these headers, in C and C++. CMake reads it from here; fovea_version() and fovea::version() name that
 * of the library which a program runs with. */
#ifndef FOVEA_VERSION_H_
#define FOVEA_VERSION_H_

#define FOVEA_VERSION_MAJOR 0
#define FOVEA_VERSION_MINOR 1
#define FOVEA_VERSION_PATCH 0

/* One number to compare with: #if FOVEA_VERSION >= FOVEA_MAKE_VERSION(0, 2, 0) */
#define FOVEA_MAKE_VERSION(major, minor, patch) ((major)*1000000 + (minor)*1000 + (patch))
#define FOVEA_VERSION \
  FOVEA_MAKE_VERSION(FOVEA_VERSION_MAJOR, FOVEA_VERSION_MINOR, FOVEA_VERSION_PATCH)

#endif /* FOVEA_VERSION_H_ */
