// Non-owning tensors: a pointer, a dtype, a shape and 64-bit strides in elements. Read expr.hpp or attention.hpp next.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "fovea/dtype.hpp"
#include "fovea/export.hpp"

namespace fovea {

inline constexpr int kMaxRank = 8;

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda, rocm };  // rocm: GPUs of AMD
  Kind kind = Kind::cpu;
  int index = 0;

  static constexpr Device cpu() { return {Kind::cpu, 0}; }
  static constexpr Device cuda(int index = 0) { return {Kind::cuda, index}; }
  static constexpr Device rocm(int index = 0) { return {Kind::rocm, index}; }
  bool operator==(const Device&) const = default;
};

/// "cpu", "cuda:0", "rocm:0".
FOVEA_EXPORT std::string to_string(Device device);

/// All of a tensor but its address: what a plan is made from.
struct TensorSpec {
  Dtype dtype = Dtype::f32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  // in elements; 0 and negative are legal for inputs
  Device device{};

  bool operator==(const TensorSpec&) const = default;
  std::int64_t num_elements() const {
    std::int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= shape[static_cast<std::size_t>(i)];
    return count;
  }
};

/// Shape and row-major strides (or the given ones). Throws InvalidArgument on a rank above kMaxRank, a negative extent,
/// or strides of another rank.
[[nodiscard]] FOVEA_EXPORT TensorSpec make_spec(Dtype dtype, std::span<const std::int64_t> shape,
                                                std::span<const std::int64_t> strides = {});

/// Row-major, over memory of num_elements: throws InvalidArgument where the shape has more of them, too.
[[nodiscard]] FOVEA_EXPORT TensorSpec make_spec_within(std::size_t num_elements, Dtype dtype,
                                                       std::span<const std::int64_t> shape);

/// "bf16 [2, 128, 8, 64]", with strides where they are not row-major.
FOVEA_EXPORT std::string to_string(const TensorSpec& spec);

/// A tensor somebody else owns. data may be null only where the tensor has no elements or no data is needed (planning).
class FOVEA_EXPORT TensorView {
 public:
  TensorView() = default;
  /// Throws InvalidArgument where a spec made by hand has a rank beyond kMaxRank, or a negative one.
  TensorView(void* data, const TensorSpec& spec)
      : data_(data), spec_(checked(spec)), is_mutable_(true) {}
  TensorView(const void* data, const TensorSpec& spec)
      : data_(const_cast<void*>(data)), spec_(checked(spec)) {}

  /// False for a default-constructed view: an optional tensor that was not given.
  explicit operator bool() const { return spec_.rank != 0; }

  const void* data() const { return data_; }
  void* mutable_data() const { return is_mutable_ ? data_ : nullptr; }
  bool is_mutable() const { return is_mutable_; }
  const TensorSpec& spec() const { return spec_; }
  Dtype dtype() const { return spec_.dtype; }
  int rank() const { return spec_.rank; }
  std::int64_t size(int dim) const { return spec_.shape[static_cast<std::size_t>(dim)]; }
  std::int64_t stride(int dim) const { return spec_.strides[static_cast<std::size_t>(dim)]; }

  /// The same elements with dimensions reordered: bhsd data seen as bshd is view.permuted({0, 2, 1, 3}).
  [[nodiscard]] TensorView permuted(std::initializer_list<int> order) const;

  bool operator==(const TensorView&) const = default;

 private:
  static const TensorSpec& checked(const TensorSpec& spec) {
    if (spec.rank < 0 || spec.rank > kMaxRank) refuse_rank(spec.rank);
    return spec;
  }
  [[noreturn]] static void refuse_rank(int rank);

  void* data_ = nullptr;
  TensorSpec spec_{};
  bool is_mutable_ = false;
};

namespace detail {

/// The dtype of T, or a sentence for the caller of `view` who has another.
template <typename T>
constexpr Dtype element_dtype() {
  static_assert(Element<std::remove_const_t<T>>,
                "fovea::view: no tensor holds elements of this type; expected float, "
                "fovea::float16, fovea::bfloat16, fovea::float8_e4m3, "
                "bool, std::uint8_t, std::int8_t, std::int32_t or std::int64_t (convert double to "
                "float first)");
  if constexpr (Element<std::remove_const_t<T>>) return dtype_of<std::remove_const_t<T>>;
  return Dtype::f32;
}

}  // namespace detail

/// A TensorView whose elements the compiler knows: what `view` makes of pointers, spans and mdspans. It is a TensorView
/// wherever one is asked for.
template <typename T>
class ElementView : public TensorView {
 public:
  ElementView(T* data, const TensorSpec& spec) : TensorView(data, spec) {}
  [[nodiscard]] ElementView permuted(std::initializer_list<int> order) const {
    return ElementView(TensorView::permuted(order));
  }

 private:
  explicit ElementView(const TensorView& view) : TensorView(view) {}
};

/// The tensor of an argument that holds these dtypes. An ElementView of another does not compile, with a message that
/// says so; any other TensorView is taken, and checked when the call is made.
template <Dtype... allowed>
class TensorOf : public TensorView {
 public:
  using TensorView::TensorView;
  TensorOf() = default;
  TensorOf(const TensorView& view) : TensorView(view) {}
  template <typename T>
  TensorOf(const ElementView<T>& view) : TensorView(view) {
    static_assert(((detail::element_dtype<T>() == allowed) || ...),
                  "fovea: this argument does not hold elements of the view's type; its declaration "
                  "names those that it does");
  }
};
using FloatView = TensorOf<Dtype::f32, Dtype::f16, Dtype::bf16>;
/// Numbers, or codes of them by scales that the call gives.
using InputView = TensorOf<Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::e4m3>;
/// Numbers, or codes that scales belong to.
using CacheView = TensorOf<Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::i8, Dtype::e4m3>;
using Float32View = TensorOf<Dtype::f32>;
using IndexView = TensorOf<Dtype::i32, Dtype::i64>;
using Int32View = TensorOf<Dtype::i32>;
using Int64View = TensorOf<Dtype::i64>;

/// T* and a shape (bshd unless said otherwise), optional strides in elements; the dtype follows from T. A type that no
/// tensor holds (double, wide unsigned integers, structs) does not compile, with a message that says so.
template <typename T>
[[nodiscard]] ElementView<T> view(T* data, std::initializer_list<std::int64_t> shape,
                                  std::initializer_list<std::int64_t> strides = {}) {
  const TensorSpec spec = make_spec(detail::element_dtype<T>(), {shape.begin(), shape.size()},
                                    {strides.begin(), strides.size()});
  return {data, spec};
}

/// A span as a tensor of one dimension; or of this row-major shape, which throws InvalidArgument where it has more
/// elements than the span.
template <typename T, std::size_t Extent>
[[nodiscard]] ElementView<T> view(std::span<T, Extent> data) {
  return view(data.data(), {static_cast<std::int64_t>(data.size())});
}
template <typename T, std::size_t Extent>
[[nodiscard]] ElementView<T> view(std::span<T, Extent> data,
                                  std::initializer_list<std::int64_t> shape) {
  return {data.data(),
          make_spec_within(data.size(), detail::element_dtype<T>(), {shape.begin(), shape.size()})};
}

/// Shaped like std::mdspan of C++23, as Kokkos's is: plain memory, extents, strides in elements.
template <typename T>
concept MdspanLike = requires(const T& m) {
  { *m.data_handle() } -> std::same_as<std::remove_pointer_t<decltype(m.data_handle())>&>;
  { std::remove_cvref_t<decltype(m.extents())>::rank() } -> std::convertible_to<std::size_t>;
  { m.extents().extent(0) } -> std::convertible_to<std::int64_t>;
  { m.stride(0) } -> std::convertible_to<std::int64_t>;
};

/// Its shape and strides as they are, on the cpu.
template <MdspanLike T>
[[nodiscard]] auto view(const T& tensor) {
  using Element = std::remove_pointer_t<decltype(tensor.data_handle())>;
  TensorSpec spec{.dtype = detail::element_dtype<Element>()};
  constexpr std::size_t kRank = std::remove_cvref_t<decltype(tensor.extents())>::rank();
  static_assert(kRank >= 1 && kRank <= std::size_t{kMaxRank},
                "fovea::view: a tensor has 1 to 8 dimensions");
  spec.rank = static_cast<int>(kRank);
  for (std::size_t dim = 0; dim < kRank; ++dim) {
    spec.shape[dim] = static_cast<std::int64_t>(tensor.extents().extent(dim));
    spec.strides[dim] = static_cast<std::int64_t>(tensor.stride(dim));
  }
  return ElementView<Element>(tensor.data_handle(), spec);
}

/// The 32-bit words of an i64 tensor, the low one first: i64 [..., n] as i32 [..., n, 2] over the same memory. Integers
/// of programs have 32 bits, so this is how a program reads 64-bit patterns:
///
///   capture("bits", as_words32(bits))  // bits: i64 [seqlen_q, seqlen_kv / 64]
///   (bits[q_idx, kv_idx // 64, kv_idx // 32 % 2] >> kv_idx % 32 & 1) != 0
///
/// Throws InvalidArgument for another dtype, or for rank 0 or kMaxRank.
[[nodiscard]] FOVEA_EXPORT TensorView as_words32(const TensorView& words);

}  // namespace fovea
