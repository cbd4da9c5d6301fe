#include "ffi/tensor.hpp"

#include <array>
#include <cstddef>
#include <optional>
#include <span>

#include "core/check.hpp"

namespace fovea::ffi {
namespace {

struct DtypeCode {
  unsigned code;
  unsigned bits;
  Dtype dtype;
};

constexpr std::array<DtypeCode, 9> kDtypes = {{
    {kDLFloat, 32, Dtype::f32},
    {kDLFloat, 16, Dtype::f16},
    {kDLBfloat, 16, Dtype::bf16},
    {kDLBool, 8, Dtype::boolean},
    {kDLUInt, 8, Dtype::u8},
    {kDLInt, 8, Dtype::i8},
    {kDLInt, 32, Dtype::i32},
    {kDLInt, 64, Dtype::i64},
    {kDLFloat8_e4m3fn, 8, Dtype::e4m3},
}};

/// As the dtypes that tensors may have are written: f64, u16, complex64; other families by their code of DLPack.
std::string spelled(const DLDataType& dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case kDLInt:
      return "i" + bits;
    case kDLUInt:
      return "u" + bits;
    case kDLFloat:
      return "f" + bits;
    case 5:  // kDLComplex
      return "complex" + bits;
    default:
      return "of code " + std::to_string(dtype.code) + " and " + bits + " bits";
  }
}

Device to_device(const DLDevice& device, const std::string& name) {
  switch (static_cast<int>(device.device_type)) {
    case kDLCPU:
    case kDLCUDAHost:  // pinned memory of the host
    case kDLROCMHost:
      return Device::cpu();
    case kDLCUDA:
      return Device::cuda(device.device_id);
    case kDLROCM:
      return Device::rocm(device.device_id);
    default:
      invalid(name, "device type is " + std::to_string(static_cast<int>(device.device_type)) +
                        "; expected kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDA or kDLROCM");
  }
}

}  // namespace

Dtype to_dtype(const DLDataType& dtype, const std::string& name) {
  if (dtype.lanes != 1) {
    invalid(name, "dtype has " + std::to_string(dtype.lanes) + " lanes; expected 1");
  }
  for (const DtypeCode& known : kDtypes) {
    if (known.code == dtype.code && known.bits == dtype.bits) return known.dtype;
  }
  const bool is_double = dtype.code == kDLFloat && dtype.bits == 64;
  invalid(name, "dtype is " + spelled(dtype) +
                    "; expected f32, f16, bf16, bool, u8, i8, i32, i64 or e4m3" +
                    (is_double ? ": cast it to f32" : ""));
}

TensorView to_view(const DLTensor* tensor, Access access, const std::string& name, Rank least) {
  if (tensor == nullptr) return {};
  const int least_rank = least == Rank::from_zero ? 0 : 1;
  if (tensor->ndim < least_rank || tensor->ndim > kMaxRank) {
    invalid(name, "rank is " + std::to_string(tensor->ndim) + "; expected " +
                      std::to_string(least_rank) + " to " + std::to_string(kMaxRank));
  }
  if (tensor->ndim > 0 && tensor->shape == nullptr)
    invalid(name, "shape is NULL; expected ndim extents");
  const Dtype dtype = to_dtype(tensor->dtype, name);
  const Device device = to_device(tensor->device, name);
  if (tensor->byte_offset % size_bytes(dtype) != 0) {
    invalid(name, "byte_offset is " + std::to_string(tensor->byte_offset) +
                      "; expected a multiple of the element's " +
                      std::to_string(size_bytes(dtype)) + " bytes");
  }
  const auto rank = static_cast<std::size_t>(tensor->ndim);
  const std::span<const std::int64_t> shape(tensor->shape, rank);
  for (std::size_t i = 0; i < rank; ++i) {
    if (shape[i] < 0) {
      invalid(name, "shape[" + std::to_string(i) + "] is " + std::to_string(shape[i]) +
                        "; expected >= 0");
    }
  }
  std::span<const std::int64_t> strides;
  if (tensor->strides != nullptr) strides = {tensor->strides, rank};
  TensorSpec spec = make_spec(dtype, shape, strides);
  spec.device = device;
  void* data = tensor->data;
  if (data != nullptr) data = static_cast<std::byte*>(data) + tensor->byte_offset;
  if (access == Access::write) return {data, spec};
  return {static_cast<const void*>(data), spec};
}

TensorView to_elements_view(const DLTensor* tensor, Access access, const std::string& name) {
  if (tensor == nullptr || tensor->ndim != 0) return to_view(tensor, access, name);
  std::int64_t one = 1;
  DLTensor element = *tensor;
  element.ndim = 1;
  element.shape = &one;
  element.strides = nullptr;
  return to_view(&element, access, name);
}

}  // namespace fovea::ffi
