// The functions of fovea.h around a program handle.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "fovea/expr.hpp"
#include "fovea/fovea.h"

#include "core/check.hpp"
#include "expr/node.hpp"
#include "expr/passes.hpp"
#include "ffi/error.hpp"
#include "ffi/explanation.hpp"
#include "ffi/programs.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace {

using fovea::ffi::guarded;
using fovea::ffi::ParsedProgram;

constexpr std::size_t kLeastSize = offsetof(fovea_program_args, tensors);

std::string element(const std::string& where, const char* array, std::size_t i) {
  return where + ": " + array + "[" + std::to_string(i) + "]";
}

fovea::CapturedTensor to_slot(const fovea_tensor_slot& slot, const std::string& at) {
  if (slot.name == nullptr) fovea::invalid(at, "name is NULL; expected a name");
  if (slot.rank < 0 || slot.rank > fovea::kMaxRank) {
    fovea::invalid(at, "rank is " + std::to_string(slot.rank) + "; expected 0 to " +
                           std::to_string(fovea::kMaxRank));
  }
  return fovea::tensor_slot(slot.name, fovea::ffi::to_dtype(slot.dtype, at), slot.rank);
}

fovea::CapturedScalar to_slot(const fovea_scalar_slot& slot, const std::string& at) {
  if (slot.name == nullptr) fovea::invalid(at, "name is NULL; expected a name");
  if (slot.type != FOVEA_SCALAR_INT && slot.type != FOVEA_SCALAR_FLOAT) {
    fovea::invalid(at, "type is " + std::to_string(slot.type) +
                           "; expected FOVEA_SCALAR_INT or FOVEA_SCALAR_FLOAT");
  }
  const bool is_float = slot.type == FOVEA_SCALAR_FLOAT;
  return {slot.name, is_float ? fovea::ExprType::floating : fovea::ExprType::integer, 0};
}

fovea::Captures to_signature(const fovea_program_args& args, const std::string& where) {
  if (args.num_tensors > 0 && args.tensors == nullptr)
    fovea::invalid(where, "tensors is NULL; expected num_tensors slots");
  if (args.num_scalars > 0 && args.scalars == nullptr)
    fovea::invalid(where, "scalars is NULL; expected num_scalars slots");
  fovea::Captures signature;
  for (std::size_t i = 0; i < args.num_tensors; ++i)
    signature.tensors.push_back(to_slot(args.tensors[i], element(where, "tensors", i)));
  for (std::size_t i = 0; i < args.num_scalars; ++i)
    signature.scalars.push_back(to_slot(args.scalars[i], element(where, "scalars", i)));
  return signature;
}

ParsedProgram to_program(const fovea_program_args& args, const std::string& where) {
  if (args.text == nullptr) fovea::invalid(where, "text is NULL; expected a formula");
  if (args.kind != FOVEA_SCORE_MOD && args.kind != FOVEA_MASK_MOD) {
    fovea::invalid(where, "kind is " + std::to_string(args.kind) +
                              "; expected FOVEA_SCORE_MOD or FOVEA_MASK_MOD");
  }
  ParsedProgram program{.kind = static_cast<fovea_mod>(args.kind),
                        .signature = to_signature(args, where)};
  if (program.kind == FOVEA_SCORE_MOD) {
    program.score = fovea::parse_score_mod(args.text, program.signature);
  } else {
    program.mask = fovea::parse_mask_mod(args.text, program.signature);
  }
  fovea::expr::verify(program.program().formula().node(), "parsing");
  return program;
}

template <typename Captured>
const char* name_of(const std::vector<Captured>& captured, std::size_t index) {
  return index < captured.size() ? captured[index].name.c_str() : nullptr;
}

}  // namespace

extern "C" {

int fovea_program_create(const fovea_program_args* args, fovea_program** program,
                         fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_program_create";
    if (program == nullptr) fovea::invalid(where, "program is NULL; expected an address");
    *program = nullptr;
    const auto c = fovea::ffi::read_struct(args, kLeastSize, where);
    *program = new fovea_program{std::make_shared<const ParsedProgram>(to_program(c, where))};
  });
}

void fovea_program_destroy(fovea_program* program) { delete program; }

int fovea_program_text(const fovea_program* program, char** text, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_program_text";
    fovea::ffi::require_text(text, kWhere);
    if (program == nullptr) fovea::invalid(kWhere, "program is NULL; expected a program");
    *text = fovea::ffi::copy_text(program->parsed->program().to_string());
  });
}

int fovea_program_kind(const fovea_program* program) {
  return program == nullptr ? -1 : static_cast<int>(program->parsed->kind);
}

size_t fovea_program_num_tensors(const fovea_program* program) {
  return program == nullptr ? 0 : program->parsed->signature.tensors.size();
}

const char* fovea_program_tensor_name(const fovea_program* program, size_t index) {
  return program == nullptr ? nullptr : name_of(program->parsed->signature.tensors, index);
}

size_t fovea_program_num_scalars(const fovea_program* program) {
  return program == nullptr ? 0 : program->parsed->signature.scalars.size();
}

const char* fovea_program_scalar_name(const fovea_program* program, size_t index) {
  return program == nullptr ? nullptr : name_of(program->parsed->signature.scalars, index);
}

}  // extern "C"
