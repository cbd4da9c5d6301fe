#include "support/launch_memory.hpp"

#include <algorithm>

namespace fovea::testing {

TensorBytes tensor_bytes(const std::string& name, const TensorView& view, bool is_output) {
  TensorBytes bytes{.name = name, .is_output = is_output};
  if (view.data() == nullptr || view.spec().num_elements() == 0) return bytes;
  std::int64_t first = 0;
  std::int64_t last = 0;
  for (int dim = 0; dim < view.rank(); ++dim) {
    const std::int64_t reach = (view.size(dim) - 1) * view.stride(dim);
    first += std::min<std::int64_t>(reach, 0);
    last += std::max<std::int64_t>(reach, 0);
  }
  const auto element = static_cast<std::int64_t>(size_bytes(view.dtype()));
  auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data()));
  bytes.begin = data + first * element;
  bytes.size = static_cast<std::size_t>((last - first + 1) * element);
  return bytes;
}

std::vector<TensorBytes> tensors_of_call(const AttentionForward& args) {
  std::vector<TensorBytes> tensors = {tensor_bytes("q", args.q, false),
                                      tensor_bytes("k", args.k, false),
                                      tensor_bytes("v", args.v, false),
                                      tensor_bytes("sinks", args.sinks, false),
                                      tensor_bytes("cu_seqlens_q", args.cu_seqlens_q, false),
                                      tensor_bytes("cu_seqlens_kv", args.cu_seqlens_kv, false),
                                      tensor_bytes("dropout_seed", args.dropout_seed, false),
                                      tensor_bytes("dropout_offset", args.dropout_offset, false),
                                      tensor_bytes("dropout_places", args.dropout_places, false),
                                      tensor_bytes("q_scale", args.q_scale, false),
                                      tensor_bytes("k_scale", args.k_scale, false),
                                      tensor_bytes("v_scale", args.v_scale, false),
                                      tensor_bytes("out", args.out, true),
                                      tensor_bytes("lse", args.lse, true),
                                      tensor_bytes("row_max", args.row_max, true)};
  for (const Program* program :
       {static_cast<const Program*>(&args.score), static_cast<const Program*>(&args.mask)}) {
    for (const CapturedTensor& captured : program->captures().tensors)
      tensors.push_back(tensor_bytes(captured.name, captured.view, false));
  }
  std::erase_if(tensors, [](const TensorBytes& each) { return each.size == 0; });
  return tensors;
}

std::vector<TensorBytes> tensors_of_gradients(const AttentionBackward& args) {
  std::vector<TensorBytes> tensors = tensors_of_call(args.forward);
  for (TensorBytes& tensor : tensors) tensor.is_output = false;
  const auto add = [&](const std::string& name, const TensorView& view, bool is_output) {
    tensors.push_back(tensor_bytes(name, view, is_output));
  };
  add("dout", args.dout, false);
  add("dlse", args.dlse, false);
  add("dq", args.dq, true);
  add("dk", args.dk, true);
  add("dv", args.dv, true);
  add("dsinks", args.dsinks, true);
  for (const CapturedTensor& each : args.dcaptured) add("d" + each.name, each.view, true);
  std::erase_if(tensors, [](const TensorBytes& each) { return each.size == 0; });
  return tensors;
}

std::vector<TensorBytes> tensors_of_tangents(const AttentionJvp& args) {
  std::vector<TensorBytes> tensors = tensors_of_call(args.forward);
  const auto add = [&](const std::string& name, const TensorView& view, bool is_output) {
    tensors.push_back(tensor_bytes(name, view, is_output));
  };
  add("q_tangent", args.q_tangent, false);
  add("k_tangent", args.k_tangent, false);
  add("v_tangent", args.v_tangent, false);
  add("sinks_tangent", args.sinks_tangent, false);
  for (const CapturedTensor& each : args.captured_tangents)
    add(each.name + "_tangent", each.view, false);
  add("out_tangent", args.out_tangent, true);
  add("lse_tangent", args.lse_tangent, true);
  std::erase_if(tensors, [](const TensorBytes& each) { return each.size == 0; });
  return tensors;
}

std::vector<TensorBytes> tensors_of_cache(const KvCache& cache) {
  std::vector<TensorBytes> tensors = {tensor_bytes("cache.k", cache.k, false),
                                      tensor_bytes("cache.v", cache.v, false),
                                      tensor_bytes("cache.k_scale", cache.k_scale, false),
                                      tensor_bytes("cache.v_scale", cache.v_scale, false),
                                      tensor_bytes("page_table", cache.page_table, false),
                                      tensor_bytes("page_indptr", cache.page_indptr, false),
                                      tensor_bytes("page_indices", cache.page_indices, false),
                                      tensor_bytes("seqlens", cache.seqlens, false),
                                      tensor_bytes("batch_idx", cache.batch_idx, false),
                                      tensor_bytes("left_padding", cache.left_padding, false)};
  std::erase_if(tensors, [](const TensorBytes& each) { return each.size == 0; });
  return tensors;
}

std::vector<TensorBytes> tensors_of_tokens(const NewTokens& tokens) {
  std::vector<TensorBytes> tensors = tensors_of_cache(tokens.cache);
  const auto add = [&](const std::string& name, const TensorView& view) {
    tensors.push_back(tensor_bytes(name, view, false));
  };
  add("append.k", tokens.append.k);
  add("append.v", tokens.append.v);
  add("append.cu_seqlens", tokens.append.cu_seqlens);
  if (tokens.cu_seqlens_q.data() != tokens.append.cu_seqlens.data())
    add("cu_seqlens_q", tokens.cu_seqlens_q);
  add("q", tokens.q);
  add("rotated_q", tokens.rotated_q);
  if (tokens.rotary != nullptr) {
    add("rotary.cos", tokens.rotary->cos);
    add("rotary.sin", tokens.rotary->sin);
    add("rotary.positions", tokens.rotary->positions);
    add("rotary.positions_q", tokens.rotary->positions_q);
  }
  std::erase_if(tensors, [](const TensorBytes& each) { return each.size == 0; });
  return tensors;
}

std::vector<TensorBytes> tensors_of_merge(const MergeStates& args) {
  std::vector<TensorBytes> tensors;
  const auto add = [&](const std::string& name, const TensorView& view, bool is_output) {
    const TensorBytes bytes = tensor_bytes(name, view, is_output);
    const bool is_there =
        std::ranges::any_of(tensors, [&](const auto& each) { return each.begin == bytes.begin; });
    if (bytes.size > 0 && !is_there) tensors.push_back(bytes);
  };
  add("out", args.out, true);
  add("lse", args.lse, true);
  for (std::size_t i = 0; i < args.outs.size(); ++i) {
    add("outs[" + std::to_string(i) + "]", args.outs[i], false);
    add("lses[" + std::to_string(i) + "]", args.lses[i], false);
  }
  return tensors;
}

void move_tensors(cuda::ForwardLaunch& launch,
                  const std::function<const void*(const void*)>& moved) {
  const auto move = [&](auto*& pointer) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    if (pointer == nullptr) return;
    pointer = static_cast<Pointer>(const_cast<void*>(moved(pointer)));
  };
  cuda::ForwardParams& p = launch.params;
  move(p.q.data);
  move(p.k.data);
  move(p.v.data);
  move(p.out.data);
  move(p.lse);
  move(p.row_max);
  move(p.sinks);
  move(p.cu_seqlens_q.data);
  move(p.cu_seqlens_kv.data);
  move(p.seqlens_kv.data);
  move(p.left_padding.data);
  move(p.slots.data);
  move(p.page_table.data);
  move(p.dropout_seed_at);
  move(p.dropout_offset_at);
  move(p.dropout_places);
  for (cuda::CapturedTensorParam& tensor : p.captures.tensors) move(tensor.data);
  cuda::CombineParams& c = launch.combine_params;
  move(c.out.data);
  move(c.lse);
  move(c.row_max);
  move(c.sinks);
  move(c.seqlens_kv.data);
  move(c.left_padding.data);
}

}  // namespace fovea::testing
