// Cases of cp.async, TMA, bulk copies and clusters.
#include <array>
#include <cstring>
#include <optional>

#include "conformance/cases.hpp"
#include "conformance/noise.hpp"

namespace fovea::cuda::conformance {
namespace {

using driver::TensorMapElement;
using driver::TensorMapSpec;
using driver::TensorMapSwizzle;

constexpr int kBarrierBytes = 16;
constexpr int kBoxOffset = 1024;
constexpr std::byte kUntouched{0xEE};

Bytes draw(std::size_t count, Noise& noise) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(noise.bits());
  return bytes;
}

/// Whole numbers as f32 (or, of two bytes, bf16), whose sums are exact.
Bytes draw_wholes(std::size_t count, std::size_t element_bytes, Noise& noise) {
  Bytes bytes(count);
  for (std::size_t at = 0; at + element_bytes <= count; at += element_bytes) {
    const auto value = static_cast<float>(noise.whole(-9, 9));
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    std::memcpy(&bytes[at], raw + 4 - element_bytes, element_bytes);  // bf16: the upper half
  }
  return bytes;
}

std::size_t bytes_of(TensorMapElement element) {
  switch (element) {
    case TensorMapElement::u8:
      return 1;
    case TensorMapElement::u16:
    case TensorMapElement::f16:
    case TensorMapElement::bf16:
      return 2;
    default:
      return 4;
  }
}

/// A tensor, a box in it, and where the box lies in shared memory.
struct Transfer {
  TensorMapSpec map;
  std::array<int, 5> coordinates{};

  std::size_t element() const { return bytes_of(map.element); }
  std::size_t box_bytes() const {
    std::size_t bytes = element();
    for (int i = 0; i < map.rank; ++i) bytes *= map.box[static_cast<std::size_t>(i)];
    return bytes;
  }
  std::size_t tensor_bytes() const {
    const auto last = static_cast<std::size_t>(map.rank - 1);
    return map.rank == 1 ? stored_inner() * element() : map.shape[last] * map.stride_bytes[last];
  }
  /// Rows of a swizzled box begin a span apart, however narrow they are; what lies between is not touched.
  std::size_t row_bytes() const { return map.box[0] * element(); }
  std::size_t pitch() const {
    return map.swizzle == TensorMapSwizzle::none ? row_bytes()
                                                 : std::size_t{16} << static_cast<int>(map.swizzle);
  }
  std::size_t shared_bytes() const { return box_bytes() / row_bytes() * pitch(); }
  std::size_t swizzled(std::size_t offset) const {
    const std::size_t mask = (std::size_t{1} << static_cast<int>(map.swizzle)) - 1;
    return offset ^ ((offset >> 7U & mask) << 4U);
  }

  /// Elements along the contiguous dimension that a store writes: it knows the tensor's end to 16 bytes only.
  std::uint64_t stored_inner() const {
    const std::uint64_t per_chunk = 16 / element();
    return (map.shape[0] + per_chunk - 1) / per_chunk * per_chunk;
  }

  /// Calls visit(offset in shared memory, offset in the tensor, or nothing outside it) for each element of the box.
  template <class Visit>
  void for_elements(bool is_store, const Visit& visit) const {
    std::array<std::uint32_t, 5> idx{};
    for (std::size_t linear = 0; linear < box_bytes() / element(); ++linear) {
      std::size_t rest = linear, offset = 0;
      bool is_inside = true;
      for (int d = 0; d < map.rank; ++d) {
        const auto i = static_cast<std::size_t>(d);
        idx[i] = static_cast<std::uint32_t>(rest % map.box[i]);
        rest /= map.box[i];
        const std::int64_t at = coordinates[i] + static_cast<std::int64_t>(idx[i]);
        is_inside =
            is_inside && at >= 0 &&
            at < static_cast<std::int64_t>(is_store && d == 0 ? stored_inner() : map.shape[i]);
        offset += static_cast<std::size_t>(at) * (d == 0 ? element() : map.stride_bytes[i]);
      }
      visit(swizzled(kBoxOffset + linear / map.box[0] * pitch() + linear % map.box[0] * element()),
            is_inside ? std::optional(offset) : std::nullopt);
    }
  }
};

struct Shape {
  const char* name;
  TensorMapElement element;
  TensorMapSwizzle swizzle;
  std::uint32_t inner;     // elements of the box along the contiguous dimension
  std::uint32_t more = 0;  // elements that the tensor has beyond them; 0: 16 bytes
};

// Each swizzle with boxes as wide as its span, in types of one, two and four bytes, and narrower; none with narrow and
// wide boxes. Ragged: the tensor ends within 16 bytes.
constexpr Shape kShapes[] = {
    {"plain u8 x16", TensorMapElement::u8, TensorMapSwizzle::none, 16},
    {"plain bf16 x40", TensorMapElement::bf16, TensorMapSwizzle::none, 40},
    {"plain f32 x64", TensorMapElement::f32, TensorMapSwizzle::none, 64},
    {"32 B u8", TensorMapElement::u8, TensorMapSwizzle::bytes_32, 32},
    {"32 B bf16", TensorMapElement::bf16, TensorMapSwizzle::bytes_32, 16},
    {"64 B bf16", TensorMapElement::bf16, TensorMapSwizzle::bytes_64, 32},
    {"64 B f32", TensorMapElement::f32, TensorMapSwizzle::bytes_64, 16},
    {"128 B u8", TensorMapElement::u8, TensorMapSwizzle::bytes_128, 128},
    {"128 B f16", TensorMapElement::f16, TensorMapSwizzle::bytes_128, 64},
    {"128 B f32", TensorMapElement::f32, TensorMapSwizzle::bytes_128, 32},
    {"ragged u8 x16", TensorMapElement::u8, TensorMapSwizzle::none, 16, 7},
    {"ragged 64 B bf16", TensorMapElement::bf16, TensorMapSwizzle::bytes_64, 32, 7},
    {"ragged 128 B f32", TensorMapElement::f32, TensorMapSwizzle::bytes_128, 32, 5},
    {"32 B bf16, half a row", TensorMapElement::bf16, TensorMapSwizzle::bytes_32, 8},
    {"64 B bf16, a quarter of a row", TensorMapElement::bf16, TensorMapSwizzle::bytes_64, 8},
    {"128 B bf16, three quarters of a row", TensorMapElement::bf16, TensorMapSwizzle::bytes_128,
     48},
};

// Inside; before the beginning in some dimensions; past the end; wholly outside. The first coordinate counts 16 bytes:
// TMA takes no other.
constexpr std::array<std::array<int, 5>, 4> kPlaces{
    {{1, 1, 1, 0, 1}, {-1, -2, 0, -1, 0}, {2, 9, 4, 2, 1}, {0, 40, 0, 0, 0}}};

constexpr std::size_t kNegativePlace = 1;

Transfer make_transfer(const Shape& shape, int rank, const std::array<int, 5>& place) {
  // Boxes of 8 or more rows show the whole pattern of a swizzle; the tensor is a little larger than the box.
  constexpr std::array<std::uint32_t, 5> kBox{0, 11, 3, 2, 2};
  constexpr std::array<std::uint64_t, 5> kTensor{0, 13, 5, 3, 2};
  Transfer transfer;
  transfer.map.element = shape.element;
  transfer.map.rank = rank;
  transfer.map.swizzle = shape.swizzle;
  std::uint64_t stride = 0;
  for (std::size_t d = 0; d < static_cast<std::size_t>(rank); ++d) {
    transfer.map.box[d] = d == 0 ? shape.inner : kBox[d];
    transfer.map.shape[d] =
        d == 0
            ? shape.inner + (shape.more != 0 ? shape.more
                                             : 16 / static_cast<std::uint32_t>(transfer.element()))
            : kTensor[d];
    if (d == 1)
      stride =
          (transfer.map.shape[0] * transfer.element() + 31) / 16 * 16;  // a gap of 16 bytes or more
    if (d > 1) stride *= transfer.map.shape[d - 1];
    transfer.map.stride_bytes[d] = d == 0 ? transfer.element() : stride;
    transfer.coordinates[d] =
        d == 0 ? place[d] * 16 / static_cast<int>(transfer.element()) : place[d];
  }
  // Where the first place would leave the tensor, far outside must stay outside in a dimension that exists.
  if (rank == 1 && place[1] == 40) transfer.coordinates[0] = 1024;
  return transfer;
}

Case make_tma(const std::string& name, const Transfer& transfer) {
  Case one{.name = name, .kernel = ""};
  const auto image =
      static_cast<std::int32_t>((kBoxOffset + transfer.shared_bytes() + 1023) / 1024 * 1024);
  one.shared_bytes = image + kBarrierBytes;
  one.map = transfer.map;
  one.params.n[0] = image;
  one.params.n[1] = static_cast<std::int32_t>(transfer.box_bytes());
  one.params.n[2] = kBoxOffset;
  for (int d = 0; d < transfer.map.rank; ++d)
    one.params.n[3 + d] = transfer.coordinates[static_cast<std::size_t>(d)];
  return one;
}

Case make_load(const std::string& name, const Transfer& transfer, Noise& noise) {
  Case one = make_tma("load " + name, transfer);
  one.kernel = "tma_load_" + std::to_string(transfer.map.rank);
  one.map_of = MapOf::in;
  one.in = draw(transfer.tensor_bytes(), noise);
  one.expected.assign(static_cast<std::size_t>(one.params.n[0]), kUntouched);
  one.out_before = one.expected;
  transfer.for_elements(false, [&](std::size_t shared, std::optional<std::size_t> global) {
    for (std::size_t i = 0; i < transfer.element(); ++i) {
      one.expected[shared + i] = global ? one.in[*global + i] : std::byte{0};
    }
  });
  return one;
}

Case make_store(const std::string& name, const Transfer& transfer, Noise& noise) {
  Case one = make_tma("store " + name, transfer);
  one.kernel = "tma_store_" + std::to_string(transfer.map.rank);
  one.map_of = MapOf::out;
  one.in = draw(static_cast<std::size_t>(one.params.n[0]), noise);
  one.out_before.assign(transfer.tensor_bytes(), kUntouched);
  one.expected = one.out_before;
  transfer.for_elements(true, [&](std::size_t shared, std::optional<std::size_t> global) {
    for (std::size_t i = 0; global && i < transfer.element(); ++i)
      one.expected[*global + i] = one.in[shared + i];
  });
  return one;
}

Case make_reduction(const std::string& name, const Transfer& transfer, Noise& noise) {
  Case one = make_tma("reduce add " + name, transfer);
  const std::size_t element = transfer.element();
  one.kernel = "tma_reduce_" + std::to_string(transfer.map.rank);
  one.map_of = MapOf::out;
  one.in = draw_wholes(static_cast<std::size_t>(one.params.n[0]), element, noise);
  one.out_before = draw_wholes(transfer.tensor_bytes(), element, noise);
  one.expected = one.out_before;
  transfer.for_elements(true, [&](std::size_t shared, std::optional<std::size_t> global) {
    if (!global) return;
    float sum = 0;
    for (const std::byte* from : {&one.in[shared], &one.out_before[*global]}) {
      float value = 0;
      std::memcpy(reinterpret_cast<std::byte*>(&value) + 4 - element, from, element);
      sum += value;
    }
    std::memcpy(&one.expected[*global], reinterpret_cast<std::byte*>(&sum) + 4 - element, element);
  });
  return one;
}

std::vector<Case> tma_cases() {
  Noise noise(7);
  std::vector<Case> cases;
  for (const Shape& shape : kShapes) {
    for (int rank = 1; rank <= 5; ++rank) {
      for (std::size_t place = 0; place < kPlaces.size(); ++place) {
        const Transfer transfer = make_transfer(shape, rank, kPlaces[place]);
        const std::string name =
            std::to_string(rank) + "d " + shape.name + ", place " + std::to_string(place);
        cases.push_back(make_load(name, transfer, noise));
        if (place == kNegativePlace) continue;  // of a store, an illegal instruction (H200)
        cases.push_back(make_store(name, transfer, noise));
        if (shape.element == TensorMapElement::f32 || shape.element == TensorMapElement::bf16) {
          cases.push_back(make_reduction(name, transfer, noise));
        }
      }
    }
  }
  return cases;
}

Case make_multicast() {
  Noise noise(11);
  constexpr std::uint32_t kHalfRows = 8;
  Transfer transfer = make_transfer(kShapes[8], 2, {0, 1, 0, 0, 0});
  transfer.map.shape[1] = 40;
  transfer.map.box[1] = kHalfRows;
  Case one = make_tma("load multicast, 2 CTAs", transfer);
  one.kernel = "tma_multicast";
  one.num_ctas = one.cluster = 2;
  const auto half_bytes = static_cast<std::int32_t>(transfer.box_bytes());
  one.params.n[0] = kBoxOffset + 2 * half_bytes;
  one.params.n[5] = kHalfRows;
  one.shared_bytes = one.params.n[0] + kBarrierBytes;
  one.map_of = MapOf::in;
  one.in = draw(transfer.tensor_bytes(), noise);
  Bytes image(static_cast<std::size_t>(one.params.n[0]), kUntouched);
  Transfer whole = transfer;
  whole.map.box[1] = 2 * kHalfRows;
  whole.for_elements(false, [&](std::size_t shared, std::optional<std::size_t> global) {
    for (std::size_t i = 0; i < whole.element(); ++i)
      image[shared + i] = global ? one.in[*global + i] : std::byte{0};
  });
  one.expected = image;
  one.expected.insert(one.expected.end(), image.begin(), image.end());
  one.out_before.assign(one.expected.size(), kUntouched);
  return one;
}

Case make_bulk() {
  Noise noise(13);
  Case one{.name = "bulk load, store, reduce add", .kernel = "bulk_copies", .num_threads = 32};
  one.shared_bytes = 4096 + kBarrierBytes;
  one.in = draw_wholes(4096, 4, noise);
  one.out_before = draw_wholes(8192, 4, noise);
  one.expected = one.out_before;
  for (std::size_t i = 0; i < 4096; i += 4) {
    float value, sum;
    std::memcpy(&value, &one.in[i], 4);
    std::memcpy(&sum, &one.out_before[4096 + i], 4);
    sum += value;
    std::memcpy(&one.expected[i], &value, 4);
    std::memcpy(&one.expected[4096 + i], &sum, 4);
  }
  return one;
}

Case make_cluster() {
  constexpr std::size_t kImage = 8192, kSent = 4096, kBulk = 2048, kThreads = 128;
  Noise noise(17);
  Case one{.name = "cluster: bulk copy, st.async, st and ld shared::cluster",
           .kernel = "cluster_copies"};
  one.num_ctas = one.cluster = 2;
  one.shared_bytes = static_cast<int>(kImage) + kBarrierBytes;
  one.in = draw(2 * kBulk, noise);
  one.expected.assign(2 * kImage + 2 * 4 * kThreads, kUntouched);
  one.out_before = one.expected;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const std::size_t other = 1 - rank;
    std::byte* image = &one.expected[rank * kImage];
    std::memcpy(image + kSent, &one.in[rank * kBulk], kBulk);
    std::memcpy(image, &one.in[other * kBulk], kBulk);
    for (std::size_t thread = 0; thread < kThreads; ++thread) {
      const auto word = static_cast<std::uint32_t>(1000 * other + thread);
      const std::uint32_t sent[4] = {word, word + 1, word + 2, word + 3}, stored = word + 7;
      std::memcpy(image + kBulk + 16 * thread, sent, 16);
      std::memcpy(image + 7168 + 4 * thread, &stored, 4);
      // The sender reads back what it stored.
      std::memcpy(&one.expected[2 * kImage + 4 * (kThreads * other + thread)], &stored, 4);
    }
  }
  return one;
}

Case make_cp_async() {
  constexpr std::size_t kThreads = 256;
  Noise noise(19);
  Case one{.name = "cp.async", .kernel = "copies", .num_threads = static_cast<int>(kThreads)};
  one.shared_bytes = 64 * static_cast<int>(kThreads);
  one.in = draw(16 * kThreads, noise);
  one.out_before.assign(64 * kThreads, kUntouched);
  one.expected.assign(64 * kThreads, std::byte{0xFF});
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    const struct {
      std::size_t bytes, read;
    } copies[] = {{16, thread % 17},
                  {16, thread % 3 == 0 ? std::size_t{16} : 0},
                  {8, thread % 9},
                  {4, thread % 2 * 4}};
    for (std::size_t i = 0; i < 4; ++i) {
      std::byte* to = &one.expected[64 * thread + 16 * i];
      std::memset(to, 0, copies[i].bytes);
      std::memcpy(to, &one.in[16 * thread], copies[i].read);
    }
  }
  return one;
}

}  // namespace

std::vector<Case> copy_cases() {
  std::vector<Case> cases = tma_cases();
  cases.push_back(make_multicast());
  cases.push_back(make_bulk());
  cases.push_back(make_cluster());
  cases.push_back(make_cp_async());
  return cases;
}

std::vector<Kernel> copy_kernels() {
  std::vector<Kernel> all;
  for (const char* name :
       {"arithmetic", "copies", "bulk_copies", "cluster_copies", "tma_multicast"}) {
    all.push_back({name, name, "others"});
  }
  for (int rank = 1; rank <= 5; ++rank) {
    const std::string r = std::to_string(rank);
    all.push_back({"tma_load_" + r, "tma_load<" + r + ">", "others"});
    all.push_back({"tma_store_" + r, "tma_store<" + r + ", false>", "others"});
    all.push_back({"tma_reduce_" + r, "tma_store<" + r + ", true>", "others"});
  }
  return all;
}

}  // namespace fovea::cuda::conformance
