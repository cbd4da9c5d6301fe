// A place in an XLA program that calls Fovea: what its text says, read once; XLA hands the same text over at every run.
//
// The text has a `name=value` in each line: the operation, what each operand and each result is, programs with the
// arrays that they read, a recipe, and the numbers of the C ABI's structs that are not 0. fovea/jax/_calls.py writes
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fovea/fovea.h"

namespace fovea::ffi::xla {

/// The structs of every operation, so that a place in one of them is one number.
struct ArgumentSet {
  fovea_attention_forward_args forward;
  fovea_attention_backward_args backward;
  fovea_attention_jvp_args jvp;
  fovea_attention_double_backward_args double_backward;
  fovea_attention_decode_args decode;
};

/// Where an operand or a result goes. A result in the place of an operand is the same memory: a cache that the call
/// writes.
struct Place {
  enum class Kind {
    field,  // a `const DLTensor*` at byte `at` of the ArgumentSet
    score,  // element `at` of score_tensors
    mask,   // element `at` of mask_tensors
    named,  // element `at` of the call's list of named tensors
  };
  Kind kind = Kind::field;
  std::size_t at = 0;
  bool is_swapped = false;  // XLA has [batch, heads, seqlen, dim]
};

/// A list of named tensors: "bias", "alibi" and what score programs read.
struct NamedList {
  std::size_t list_at = 0, count_at = 0;  // bytes of the ArgumentSet
  std::size_t begin = 0, end = 0;         // of the site's named tensors
};

struct ProgramDeleter {
  void operator()(fovea_program* program) const { fovea_program_destroy(program); }
};
using ProgramHandle = std::unique_ptr<fovea_program, ProgramDeleter>;

struct CallSite {
  /// Throws InvalidArgument for a text that is not one of fovea.jax.
  explicit CallSite(std::string_view text);

  int (*run)(const ArgumentSet&, fovea_error**) = nullptr;
  ArgumentSet arguments{};  // all but tensors
  std::vector<Place> operands, results;
  std::vector<std::string> names;  // of named tensors
  std::string quant;  // what arguments.forward.quant points to, where there is a recipe
  std::vector<NamedList> lists;
  std::size_t num_score_tensors = 0, num_mask_tensors = 0;
  ProgramHandle score, mask;
};

/// The sites of a process. Thread safe.
class CallSites {
 public:
  std::shared_ptr<const CallSite> find(std::string_view text);

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  std::shared_mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const CallSite>, Hash, std::equal_to<>> sites_;
};

}  // namespace fovea::ffi::xla
