// Programs as CUDA C++: the `struct Mods` that a kernel is compiled with. What the text calls is in
// cuda/device/common: program.cuh (values), range.cuh and captured_range.cuh (what they are over a tile); NVRTC and the
// host compiler both read it.
//
//   struct Mods {
//     static constexpr bool has_score, has_score_slope, has_score_bend, has_softcap, has_score_parts;
//     static constexpr bool has_mask, mask_reads_tensors, has_kv_limits, has_mask_parts;
//     static float score(float score, const Position&, const Captures&);     // after the scale
//     static constexpr bool has_score_derivative;                            // of gradients alone; else it is 1
//     static float score_derivative(float score, const Position&,            // by the scaled score
//                                   const Captures&);
//     static constexpr bool has_score_tangent;                               // of forward mode alone; else it is 0
//     static float score_tangent(float score, const Position&,               // what tangents of captured data add
//                                const Captures&);
//     static float score_slope(const Position&, const Captures&);            // where has_score_slope: the score is
//                                                                            // score + score(0, first) + slope *
//                                                                            (kv_idx - first)
//     static Int score_bend(const Position&, const Captures&);               // where has_score_bend: so it is up to
//     static float score_slope_behind(const Position&, const Captures&);     // this key, and with this slope behind it
//     static float softcap(const Captures&);                                 // where has_softcap: the score is
//                                                                            // softcap * tanh(score / softcap)
//     static bool mask(const Position&, const Captures&);                    // true: visible
//     static Int kv_first(const Position&, const Captures&);                 // where has_kv_limits: the mask is
//     static Int kv_last(const Position&, const Captures&);                  // kv_first <= kv_idx <= kv_last
//     struct MaskKey, MaskRow;                                               // where has_mask_parts (likewise Score):
//     static MaskKey mask_key(const Position&, const Captures&);             // what a key alone decides, and a row
//                                                                            alone,
//     static MaskRow mask_row(const Position&, const Captures&);             // words to be computed ahead
//     static bool mask_by_parts(const Position&, const MaskKey&, const MaskRow&, const Captures&);
//     static TileKind tile_kind(const TileSpan&, const Captures&);           // interval.hpp as code
//     static constexpr int num_sites;                                        // of gradients of captured data: places
//     static constexpr std::int32_t site_gradient[];                         // that read it; whose each is, and along
//     static constexpr PairOrder site_order[];                               // what neighbours read one element
//     static std::int64_t site_element(SiteIdx<i>, float score,              // which it reads, in row-major order
//                                      const Position&, const Captures&);
//     static float site_slope(SiteIdx<i>, float score, const Position&,      // d score / d that element
//                             const Captures&);
//   };
//
// The text follows from the formulas alone: contents, addresses, strides, lengths and scalars are parameters. Parts
// that are shared are computed once; loads are unconditional and read-only, so that a compiler moves those of a row out
// of a loop over keys. tile_kind claims empty and full only when IntervalProgram would, on the tile as one box. A
// program that may yield -inf is no mask: its tiles stay full, as on CPUs, and the softmax hides the key.
#pragma once

#include <string>
#include <vector>

#include "fovea/expr.hpp"

#include "expr/node.hpp"

namespace fovea::expr {

/// Whose capture: the two programs of a problem may use one name for two things.
enum class ProgramRole : std::uint8_t { score, mask };

inline constexpr int kNoRangeTable = -1;

/// Captures.tensors[i] of the text is the i-th of these.
struct CudaTensorSlot {
  ProgramRole role = ProgramRole::score;
  std::string name;
  Dtype dtype = Dtype::f32;
  int rank = 1;
  /// The dimension that positions run along in a mask: tile_kind reads a table of its ranges, where there is one.
  int range_dim = kNoRangeTable;
};

/// Captures.scalars[i] of the text is the i-th of these.
struct CudaScalarSlot {
  ProgramRole role = ProgramRole::score;
  std::string name;
  ExprType type = ExprType::floating;
};

struct CudaProgram {
  std::string include;  // of device text, which declares what mods calls: "common/range.cuh"
  std::string mods;     // inside namespace fovea::cuda
  std::vector<CudaTensorSlot> tensors;
  std::vector<CudaScalarSlot> scalars;
};

/// How comments call the slots: by number, so that programs which differ in names alone have one text and share a
/// kernel; or as the formulas do, for people.
enum class SlotNames : std::uint8_t { numbered, written };

CudaProgram print_cuda(const ScoreMod& score, const MaskMod& mask,
                       SlotNames names = SlotNames::numbered);

/// The same with the score's derivative (differentiate.hpp): what gradients are computed with.
CudaProgram print_cuda_gradient(const ScoreMod& score, const MaskMod& mask,
                                SlotNames names = SlotNames::numbered);

/// The same with what tangents of captured data add to the score's: forward mode. Slots of tangents are the score's, by
/// the names of tangent_slots (differentiate.hpp).
CudaProgram print_cuda_tangent(const ScoreMod& score, const MaskMod& mask,
                               const std::vector<CapturedTensor>& tangents,
                               SlotNames names = SlotNames::numbered);

/// The same as print_cuda with the places that read any of these tensors and scalars of the score program, for the sums
/// of their gradients: site_gradient counts in the order given.
CudaProgram print_cuda_captured(const ScoreMod& score, const MaskMod& mask,
                                const std::vector<std::string>& gradients,
                                SlotNames names = SlotNames::numbered);

}  // namespace fovea::expr
