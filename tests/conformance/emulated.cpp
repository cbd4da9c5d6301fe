#include <cstring>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "conformance/backend.hpp"
#include "conformance/copy_kernels.cuh"
#include "conformance/tcgen05_kernels.cuh"
#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/tensor_map.hpp"

namespace fovea::cuda::conformance {
namespace {

using Function = void (*)(const Params&);
using Table = std::unordered_map<std::string, Function>;
using ptx::Major;
using ptx::WgmmaType;

constexpr const char* kTypeNames[] = {"bf16", "f16", "e4m3", "e5m2", "s8", "u8"};

template <WgmmaType a, WgmmaType b, int n>
void add_forms(Table& table) {
  if constexpr (ptx::is_wgmma_form(a, b, n)) {
    const std::string types = std::string(kTypeNames[static_cast<int>(a)]) + "_" +
                              kTypeNames[static_cast<int>(b)] + "_" + std::to_string(n);
    table["wgmma_rs_" + types + "_k"] = wgmma_rs<a, b, n, Major::k>;
    table["wgmma_ss_" + types + "_k_k"] = wgmma_ss<a, b, n, Major::k, Major::k>;
    if constexpr (ptx::is_16_bit(a)) {
      table["wgmma_rs_" + types + "_mn"] = wgmma_rs<a, b, n, Major::mn>;
      table["wgmma_ss_" + types + "_k_mn"] = wgmma_ss<a, b, n, Major::k, Major::mn>;
      table["wgmma_ss_" + types + "_mn_k"] = wgmma_ss<a, b, n, Major::mn, Major::k>;
      table["wgmma_ss_" + types + "_mn_mn"] = wgmma_ss<a, b, n, Major::mn, Major::mn>;
    }
  }
}

template <WgmmaType a, WgmmaType b, int... idx>
void add_columns(Table& table, std::integer_sequence<int, idx...>) {
  (add_forms<a, b, 8 * (idx + 1)>(table), ...);
}

template <int... pairs>
void add_types(Table& table, std::integer_sequence<int, pairs...>) {
  (add_columns<static_cast<WgmmaType>(pairs / 6), static_cast<WgmmaType>(pairs % 6)>(
       table, std::make_integer_sequence<int, 32>()),
   ...);
}

template <int... idx>
void add_ranks(Table& table, std::integer_sequence<int, idx...>) {
  ((table["tma_load_" + std::to_string(idx + 1)] = tma_load<idx + 1>), ...);
  ((table["tma_store_" + std::to_string(idx + 1)] = tma_store<idx + 1, false>), ...);
  ((table["tma_reduce_" + std::to_string(idx + 1)] = tma_store<idx + 1, true>), ...);
}

template <auto kind>
void add_tensor_kind(Table& table, const std::string& name) {
  table["tcgen05_ss_" + name] = tcgen05_product<kind, 1, false>;
  table["tcgen05_pair_ss_" + name] = tcgen05_product<kind, 2, false>;
  if constexpr (!has_scales(kind)) {
    table["tcgen05_ts_" + name] = tcgen05_product<kind, 1, true>;
    table["tcgen05_pair_ts_" + name] = tcgen05_product<kind, 2, true>;
  }
}

void add_tensor_core(Table& table) {
  using ptx::Tcgen05Kind;
  using ptx::Tcgen05ScaledKind;
  using ptx::TmemCopy;
  add_tensor_kind<Tcgen05Kind::f16>(table, "f16");
  add_tensor_kind<Tcgen05Kind::tf32>(table, "tf32");
  add_tensor_kind<Tcgen05Kind::f8f6f4>(table, "f8f6f4");
  add_tensor_kind<Tcgen05Kind::i8>(table, "i8");
  add_tensor_kind<Tcgen05ScaledKind::mxf8f6f4_block32>(table, "mxf8f6f4_block32");
  add_tensor_kind<Tcgen05ScaledKind::mxf4_block32>(table, "mxf4_block32");
  add_tensor_kind<Tcgen05ScaledKind::mxf4nvf4_block32>(table, "mxf4nvf4_block32");
  add_tensor_kind<Tcgen05ScaledKind::mxf4nvf4_block16>(table, "mxf4nvf4_block16");
  table["f32x2"] = f32x2;
  table["tcgen05_moves_16x64b"] = tcgen05_moves<Move::l16x64b>;
  table["tcgen05_moves_16x128b"] = tcgen05_moves<Move::l16x128b>;
  table["tcgen05_moves_16x256b"] = tcgen05_moves<Move::l16x256b>;
  table["tcgen05_moves_16x32bx2"] = tcgen05_moves<Move::l16x32bx2>;
  table["tcgen05_copy_rows128x256b"] = tcgen05_copy<TmemCopy::rows128x256b>;
  table["tcgen05_copy_rows128x128b"] = tcgen05_copy<TmemCopy::rows128x128b>;
  table["tcgen05_copy_rows64x128b_warpx2_02_13"] = tcgen05_copy<TmemCopy::rows64x128b_warpx2_02_13>;
  table["tcgen05_copy_rows64x128b_warpx2_01_23"] = tcgen05_copy<TmemCopy::rows64x128b_warpx2_01_23>;
  table["tcgen05_copy_rows32x128b_warpx4"] = tcgen05_copy<TmemCopy::rows32x128b_warpx4>;
}

template <int... idx>
void add_scaled(Table& table, std::integer_sequence<int, idx...>) {
  using ptx::GroupScales;
  table["codes_of_four_bits"] = codes_of_four_bits;
  ((table["mma_ue4m3_" + std::to_string(idx)] =
        mma_scaled<GroupScales::ue4m3_of_16, idx / 4, idx % 4>),
   ...);
  ((table["mma_ue8m0_" + std::to_string(idx)] =
        mma_scaled<GroupScales::ue8m0_of_32, idx / 4, idx % 4>),
   ...);
}

Table make_table() {
  Table table{{"matrices", matrices},           {"mma_bf16", mma<Product::bf16>},
              {"mma_f16", mma<Product::f16>},   {"mma_f16_halves", mma<Product::f16_halves>},
              {"mma_tf32", mma<Product::tf32>}, {"mma_e4m3", mma<Product::e4m3>},
              {"arithmetic", arithmetic},       {"copies", copies},
              {"bulk_copies", bulk_copies},     {"cluster_copies", cluster_copies},
              {"tma_multicast", tma_multicast}};
  add_ranks(table, std::make_integer_sequence<int, 5>());
  add_scaled(table, std::make_integer_sequence<int, 8>());
  add_types(table, std::make_integer_sequence<int, 36>());
  add_tensor_core(table);
  return table;
}

class Emulator : public Backend {
 public:
  std::string name() const override { return "emulator"; }

  void prepare(const std::vector<Case>&) override {}

  Bytes run(const Case& one) override {
    emulator::Device device;
    Bytes in = one.in, out = one.out_before;
    device.register_buffer("in", in.data(), in.size());
    device.register_buffer("out", out.data(), out.size());
    Params params = one.params;
    params.in = in.data();
    params.out = out.data();
    if (one.map_of != MapOf::none) {
      const void* tensor = one.map_of == MapOf::in ? in.data() : out.data();
      const emulator::TensorMapFields map = emulator::encode_fields(one.map, tensor);
      std::memcpy(params.map, &map, sizeof params.map);
    }
    const Function kernel = table_.at(one.kernel);
    const emulator::LaunchConfig config{
        .grid = {one.num_ctas, 1, 1},
        .block = {one.num_threads, 1, 1},
        .cluster = {one.cluster, 1, 1},
        .shared_bytes = static_cast<std::uint32_t>(one.shared_bytes)};
    const emulator::Report report = device.launch(config, {.seed = 1}, [&] { kernel(params); });
    if (!report.text().empty()) throw std::runtime_error(report.text());
    return out;
  }

 private:
  Table table_ = make_table();
};

}  // namespace

std::unique_ptr<Backend> emulator() { return std::make_unique<Emulator>(); }

}  // namespace fovea::cuda::conformance
