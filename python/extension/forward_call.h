/* A forward call in C: what Python was called with, as the struct of the C ABI. */
#ifndef FOVEA_PYTHON_FORWARD_CALL_H_
#define FOVEA_PYTHON_FORWARD_CALL_H_

#include "arrays.h"
#include "extension.h"

/* In the order in which Python passes them on: first what is each call's own, then fovea._quick.FEATURES. */
typedef enum {
  kPlan,
  kWorkspace,
  kWorkspaceBytes,
  kReturnLse,
  kOut,
  kLse,
  kRowMax,
  kQ,
  kK,
  kV,
  kCausal,
  kAlign,
  kWindow,
  kScale,
  kSoftcap,
  kBias,
  kAlibi,
  kScoreMod,
  kMask,
  kMaskMod,
  kSegmentIds,
  kCuSeqlens,
  kSinks,
  kDropout,
  kLayout,
  kComputeDtype,
  kCpuTarget,
  kDeterministic,
  kSmMargin,
  kNumArguments,
  kFirstFeature = kCausal,
} Argument;

/* Arrays that a call reads, in the order of fovea._forward.FIELDS; behind them those that its programs capture. */
typedef enum {
  kInputQ,
  kInputK,
  kInputV,
  kInputBias,
  kInputAlibi,
  kInputMask,
  kInputSegmentsQ,
  kInputSegmentsKv,
  kInputSinks,
  kInputCuSeqlensQ,
  kInputCuSeqlensKv,
  kInputDropoutSeed,
  kInputDropoutOffset,
  kInputDropoutPlaces,
  kNumPlainInputs,
} Input;

/* Of a program; a call with more is Python's. */
enum { kMaxCaptures = 16, kMaxInputs = kNumPlainInputs + 2 * kMaxCaptures };

/* All of a call but its arrays: plain bytes, which a gradient keeps. Its pointers are set by bind_inputs. */
typedef struct {
  fovea_attention_forward_args args;
  uint32_t present; /* bit i: Input i is given */
  bool is_swapped;  /* "bhsd" */
  bool returns_lse;
  double score_scalars[kMaxCaptures];
  double mask_scalars[kMaxCaptures];
} Settings;

typedef struct {
  Settings settings;
  PyObject* inputs[kMaxInputs]; /* borrowed */
  int num_inputs;
  bool is_row_major[kMaxInputs]; /* as the caller sees it */
  Slot slots[kMaxInputs];
  const DLTensor* score_tensors[kMaxCaptures];
  const DLTensor* mask_tensors[kMaxCaptures];
  Slot out, lse, row_max;
} ForwardCall;

/* Arguments as settings and inputs. */
Verdict read_arguments(ForwardCall* call, PyObject* const* args);

/* Reads the inputs, and points the struct at them. */
Verdict bind_inputs(ForwardCall* call);

/* On a GPU the current stream of q's library; after bind_inputs. */
Verdict find_stream(ForwardCall* call);

/* Whether all inputs are of types that the extension makes arrays of. */
bool has_usual_types(const ForwardCall* call);

/* Points the struct at an output, or makes it so; *made is a new reference to `given` or to what was made. */
Verdict bind_out(ForwardCall* call, const Maker* maker, PyObject* given, PyObject** made);
Verdict bind_lse(ForwardCall* call, const Maker* maker, PyObject* given, PyObject** made);

int count_plain_inputs(const Settings* settings);

/* Which Input the input at an index is; kNumPlainInputs for what programs capture. */
int plain_input(const Settings* settings, int index);

typedef struct {
  PyObject* layout; /* dicts of words to numbers */
  PyObject* align;
  PyObject* compute_dtype;
  PyObject* cpu_target;
  PyObject* program_type;
  PyObject* dropout_type;
} ForwardWords;

int set_up_forward_call(ForwardWords words);

#endif /* FOVEA_PYTHON_FORWARD_CALL_H_ */
