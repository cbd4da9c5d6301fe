// Tensors and calls as a C program would make them. Used by the tests of this folder.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/fovea.h"

namespace fovea::testing {

/// Row-major f32 values and the DLTensor that describes them.
struct FloatTensor {
  explicit FloatTensor(std::vector<std::int64_t> extents, float value = 0)
      : shape(std::move(extents)) {
    std::int64_t count = 1;
    for (const auto extent : shape) count *= extent;
    values.assign(static_cast<std::size_t>(count), value);
    tensor.data = values.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<std::int32_t>(shape.size());
    tensor.dtype = {kDLFloat, 32, 1};
    tensor.shape = shape.data();
  }
  FloatTensor(const FloatTensor&) = delete;
  FloatTensor& operator=(const FloatTensor&) = delete;
  ~FloatTensor() = default;

  std::vector<std::int64_t> shape;
  std::vector<float> values;
  DLTensor tensor{};
};

/// Values of an i32 tensor and the DLTensor that describes them.
struct IndexTensor {
  IndexTensor(std::vector<std::int64_t> extents, std::vector<std::int32_t> indices)
      : shape(std::move(extents)), values(std::move(indices)) {
    tensor.data = values.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<std::int32_t>(shape.size());
    tensor.dtype = {kDLInt, 32, 1};
    tensor.shape = shape.data();
  }
  IndexTensor(const IndexTensor&) = delete;
  IndexTensor& operator=(const IndexTensor&) = delete;
  ~IndexTensor() = default;

  TensorView view() const {
    return {static_cast<const void*>(values.data()), make_spec(Dtype::i32, shape)};
  }
  std::vector<std::int64_t> shape;
  std::vector<std::int32_t> values;
  DLTensor tensor{};
};

/// A small right problem: [1, 5, 2, 8], every value of v its own, so that rows differ.
struct SmallCall {
  SmallCall() {
    for (std::size_t i = 0; i < q.values.size(); ++i) {
      q.values[i] = 0.25F * static_cast<float>(i % 7) - 0.5F;
      k.values[i] = 0.25F * static_cast<float>(i % 5) - 0.5F;
      v.values[i] = static_cast<float>(i);
    }
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.q = &q.tensor;
    args.k = &k.tensor;
    args.v = &v.tensor;
    args.out = &out.tensor;
  }

  FloatTensor q{{1, 5, 2, 8}}, k{{1, 5, 2, 8}}, v{{1, 5, 2, 8}}, out{{1, 5, 2, 8}, -7.0F};
  fovea_attention_forward_args args{};
};

/// Kind and message of a call that may fail; frees the error.
struct Outcome {
  int kind = FOVEA_OK;
  std::string message;
};

template <typename Function, typename... Args>
Outcome outcome_of(Function function, Args... args) {
  fovea_error* error = nullptr;
  Outcome outcome;
  outcome.kind = function(args..., &error);
  outcome.message = fovea_error_message(error);
  if (fovea_error_kind(error) != outcome.kind) outcome.message = "kind of the error object differs";
  fovea_error_free(error);
  return outcome;
}

/// A C++ call said in C: views become DLTensors, programs become their text and what they capture.
class CCall {
 public:
  explicit CCall(const AttentionForward& source) {
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.q = tensor(source.q);
    args.k = tensor(source.k);
    args.v = tensor(source.v);
    args.out = tensor(source.out);
    args.lse = tensor(source.lse);
    args.row_max = tensor(source.row_max);
    args.sinks = tensor(source.sinks);
    args.cu_seqlens_q = tensor(source.cu_seqlens_q);
    args.cu_seqlens_kv = tensor(source.cu_seqlens_kv);
    args.has_softmax_scale = source.softmax_scale.has_value() ? 1 : 0;
    args.softmax_scale = source.softmax_scale.value_or(0);
    args.dropout = {source.dropout.p, source.dropout.seed, source.dropout.offset};
    args.compute_dtype = static_cast<int>(source.compute_dtype);
    args.cpu_target = static_cast<int>(source.cpu_target);
    args.allows_nondeterminism = source.is_deterministic ? 0 : 1;
    args.sm_margin = source.sm_margin;
    args.dropout_seed = tensor(source.dropout_seed);
    args.dropout_offset = tensor(source.dropout_offset);
    args.dropout_places = tensor(source.dropout_places);
    if (!source.quant.is_none()) args.quant = text(print(source.quant));
    args.q_scale = tensor(source.q_scale);
    args.k_scale = tensor(source.k_scale);
    args.v_scale = tensor(source.v_scale);
    args.workspace = source.workspace.data();
    args.workspace_bytes = source.workspace.size();
    if (!source.score.is_identity()) args.score_mod = text(source.score.to_string());
    if (!source.mask.is_all_visible()) args.mask_mod = text(source.mask.to_string());
    capture(source.score.captures());
    capture(source.mask.captures());
    args.tensors = tensors_.data();
    args.num_tensors = tensors_.size();
    args.scalars = scalars_.data();
    args.num_scalars = scalars_.size();
  }
  CCall(const CCall&) = delete;
  CCall& operator=(const CCall&) = delete;
  ~CCall() = default;

  fovea_attention_forward_args args{};

 private:
  static DLDataType to_dlpack(Dtype dtype) {
    constexpr DLDataType kTypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1},
                                     {kDLBool, 8, 1},   {kDLUInt, 8, 1},   {kDLInt, 8, 1},
                                     {kDLInt, 32, 1},   {kDLInt, 64, 1}};
    return kTypes[static_cast<std::size_t>(dtype)];
  }
  const DLTensor* tensor(const TensorView& view) {
    if (!view) return nullptr;
    TensorSpec& spec = specs_.emplace_back(view.spec());
    return &dlpack_.emplace_back(DLTensor{const_cast<void*>(view.data()),
                                          {kDLCPU, 0},
                                          spec.rank,
                                          to_dlpack(spec.dtype),
                                          spec.shape.data(),
                                          spec.strides.data(),
                                          0});
  }
  const char* text(std::string formula) { return texts_.emplace_back(std::move(formula)).c_str(); }
  void capture(const Captures& captures) {
    for (const auto& captured : captures.tensors) {
      tensors_.push_back({text(captured.name), tensor(captured.view)});
    }
    for (const auto& captured : captures.scalars) {
      const bool is_int = captured.type == ExprType::integer;
      scalars_.push_back(
          {text(captured.name), is_int ? FOVEA_SCALAR_INT : FOVEA_SCALAR_FLOAT, captured.value});
    }
  }

  std::list<TensorSpec> specs_;  // lists: addresses stay
  std::list<DLTensor> dlpack_;
  std::list<std::string> texts_;
  std::vector<fovea_named_tensor> tensors_;
  std::vector<fovea_named_scalar> scalars_;
};

}  // namespace fovea::testing
