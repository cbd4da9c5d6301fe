// Error kinds. Stable: the C ABI and other languages map them to their own exceptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "fovea/export.hpp"

namespace fovea {

enum class ErrorKind : std::uint8_t {
  invalid_argument = 1,  // the caller's values are wrong: argument, got, expected, hint
  unsupported = 2,       // a right problem that nothing here can run: every candidate's reason
  compile_error = 3,     // a kernel did not compile
  device_error = 4,      // a driver call failed
  internal = 5,          // our own mistake
};

class FOVEA_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

class FOVEA_EXPORT InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const std::string& message)
      : Error(ErrorKind::invalid_argument, message) {}
};

/// A formula's text that is none, or means nothing: the message begins with the column, too.
class FOVEA_EXPORT ParseError : public InvalidArgument {
 public:
  ParseError(const std::string& message, std::size_t column)
      : InvalidArgument(message), column_(column) {}
  /// Of the offending token: 1-based, in bytes.
  std::size_t column() const noexcept { return column_; }

 private:
  std::size_t column_;
};

class FOVEA_EXPORT Unsupported : public Error {
 public:
  explicit Unsupported(const std::string& message) : Error(ErrorKind::unsupported, message) {}
};

/// A kernel's text did not compile: the place in the text, the line there, and the compiler's whole log.
class FOVEA_EXPORT CompileError : public Error {
 public:
  explicit CompileError(const std::string& message) : Error(ErrorKind::compile_error, message) {}
};

/// A call of the GPU driver failed: the call, the driver's name of the error and its words for it.
class FOVEA_EXPORT DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& message) : Error(ErrorKind::device_error, message) {}
};

class FOVEA_EXPORT InternalError : public Error {
 public:
  explicit InternalError(const std::string& message) : Error(ErrorKind::internal, message) {}
};

}  // namespace fovea
