#include "cuda/print_spec.hpp"

#include <fmt/format.h>

#include <string_view>

namespace fovea::cuda {
namespace {

std::string_view enumerator(Element element) {
  switch (element) {
    case Element::f32:
      return "f32";
    case Element::f16:
      return "f16";
    case Element::bf16:
      return "bf16";
  }
  return "";
}

/// Collects ".member = value" in the order of declaration, which designated initialisers ask for.
class Literal {
 public:
  explicit Literal(std::string_view type) : text_(fmt::format("{}{{", type)) {}

  Literal& add(std::string_view member, Element value) {
    return add_text(member, fmt::format("Element::{}", enumerator(value)));
  }
  Literal& add(std::string_view member, std::int32_t value) {
    return add_text(member, fmt::format("{}", value));
  }
  Literal& add(std::string_view member, bool value) {
    return add_text(member, value ? "true" : "false");
  }
  std::string finish() const { return text_ + "}"; }

 private:
  Literal& add_text(std::string_view member, const std::string& value) {
    text_ += fmt::format("{}.{} = {}", is_first_ ? "" : ", ", member, value);
    is_first_ = false;
    return *this;
  }

  std::string text_;
  bool is_first_ = true;
};

}  // namespace

std::string print_spec(const ForwardSpec& spec) {
  return Literal("ForwardSpec")
      .add("element", spec.element)
      .add("out_element", spec.out_element)
      .add("head_dim_qk", spec.head_dim_qk)
      .add("head_dim_v", spec.head_dim_v)
      .add("tile_q", spec.tile_q)
      .add("tile_kv", spec.tile_kv)
      .add("num_warps", spec.num_warps)
      .add("stages", spec.stages)
      .add("ctas_per_sm", spec.ctas_per_sm)
      .add("heads_per_tile", spec.heads_per_tile)
      .add("is_varlen", spec.is_varlen)
      .add("is_paged", spec.is_paged)
      .add("is_split", spec.is_split)
      .add("has_padded_head_dim", spec.has_padded_head_dim)
      .add("is_prescaled", spec.is_prescaled)
      .add("has_dropout", spec.has_dropout)
      .add("wants_row_max", spec.wants_row_max)
      .add("q_stages", spec.q_stages)
      .add("is_dynamic", spec.is_dynamic)
      .add("keeps_queries", spec.keeps_queries)
      .add("has_panels", spec.has_panels)
      .add("is_chained", spec.is_chained)
      .add("most_splits", spec.most_splits)
      .finish();
}

std::string print_spec(const CombineSpec& spec) {
  return Literal("CombineSpec")
      .add("out_element", spec.out_element)
      .add("wants_row_max", spec.wants_row_max)
      .add("is_chained", spec.is_chained)
      .add("most_splits", spec.most_splits)
      .finish();
}

std::string describe_spec(const ForwardSpec& spec) {
  std::string text = fmt::format("{} d{}", enumerator(spec.element), spec.head_dim_qk);
  if (spec.head_dim_v != spec.head_dim_qk) text += fmt::format("/{}", spec.head_dim_v);
  text += fmt::format(" tile {}x{}", spec.tile_q, spec.tile_kv);
  if (spec.heads_per_tile > 1) text += fmt::format(" heads {}", spec.heads_per_tile);
  if (spec.is_varlen) text += " packed";
  if (spec.is_paged) text += " paged";
  if (spec.is_split) text += " split";
  if (spec.has_dropout) text += " dropout";
  return text;
}

}  // namespace fovea::cuda
