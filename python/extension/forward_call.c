#include "forward_call.h"

#include <math.h>
#include <stddef.h>

#include "torch.h"

static struct {
  ForwardWords words;
  PyObject* handle_name;
  PyObject* address_name;
  PyObject* tensors_name;
  PyObject* scalars_name;
  PyObject* f32;
} shared;

#define FIELD(name) offsetof(fovea_attention_forward_args, name)

/* By Input. */
static const size_t kFieldOfInput[kNumPlainInputs] = {FIELD(q),
                                                      FIELD(k),
                                                      FIELD(v),
                                                      FIELD(bias),
                                                      FIELD(alibi),
                                                      FIELD(mask),
                                                      FIELD(segments_q),
                                                      FIELD(segments_kv),
                                                      FIELD(sinks),
                                                      FIELD(cu_seqlens_q),
                                                      FIELD(cu_seqlens_kv),
                                                      FIELD(dropout_seed),
                                                      FIELD(dropout_offset),
                                                      FIELD(dropout_places)};

/* ---- Values: false, and nothing set, where Python has to look at one ---- */

static bool read_flag(PyObject* value, bool* flag) {
  *flag = value == Py_True;
  return value == Py_True || value == Py_False;
}

static bool read_word(PyObject* words, PyObject* word, int32_t* number) {
  if (!PyUnicode_CheckExact(word)) return false;
  PyObject* found = PyDict_GetItemWithError(words, word);
  if (found == NULL) {
    PyErr_Clear();
    return false;
  }
  *number = (int32_t)PyLong_AsLong(found);
  return true;
}

static bool read_number(PyObject* value, float* number) {
  if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value)) return false;
  const double given = PyFloat_AsDouble(value);
  if (given == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  *number = (float)given;
  return isfinite(*number);
}

static bool read_whole(PyObject* value, int64_t least, int64_t most, int64_t* number) {
  if (!PyLong_CheckExact(value)) return false;
  *number = PyLong_AsLongLong(value);
  if (*number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return *number >= least && *number <= most;
}

static bool read_window_side(PyObject* value, int32_t* has_side, int64_t* side) {
  *has_side = value != Py_None;
  return value == Py_None || read_whole(value, 0, INT64_MAX, side);
}

static bool read_window(PyObject* value, fovea_attention_forward_args* args) {
  if (value == Py_None) return true;
  return PyTuple_CheckExact(value) && PyTuple_Size(value) == 2 &&
         read_window_side(PyTuple_GetItem(value, 0), &args->has_window_left, &args->window_left) &&
         read_window_side(PyTuple_GetItem(value, 1), &args->has_window_right, &args->window_right);
}

/* 64 bits of a number, signed or not; one of more bits is for Python to refuse. */
static bool read_bits(PyObject* number, uint64_t* bits) {
  int overflow = 0;
  *bits = (uint64_t)PyLong_AsLongLongAndOverflow(number, &overflow);
  if (overflow <= 0) return overflow == 0;
  *bits = PyLong_AsUnsignedLongLong(number);
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

/* Numbers are the struct's; arrays of them are inputs. */
static bool read_seeds(PyObject* seed, PyObject* offset, fovea_dropout* dropout,
                       PyObject** inputs) {
  const bool are_numbers = PyLong_CheckExact(seed) && (offset == NULL || PyLong_CheckExact(offset));
  if (are_numbers) {
    return read_bits(seed, &dropout->seed) &&
           (offset == NULL || read_bits(offset, &dropout->offset));
  }
  inputs[kInputDropoutSeed] = seed;
  inputs[kInputDropoutOffset] = offset;
  return offset != NULL && !PyLong_CheckExact(seed) && !PyLong_CheckExact(offset);
}

/* (p, seed), (p, seed, offset) or (p, seed, offset, places), by name or not. */
static bool read_dropout(PyObject* value, fovea_dropout* dropout, PyObject** inputs) {
  if (value == Py_None) return true;
  if (!PyTuple_CheckExact(value) && (PyObject*)Py_TYPE(value) != shared.words.dropout_type)
    return false;
  const Py_ssize_t size = PyTuple_Size(value);
  if (size < 2 || size > 4 || !read_number(PyTuple_GetItem(value, 0), &dropout->p)) return false;
  PyObject* const places = size == 4 ? PyTuple_GetItem(value, 3) : Py_None;
  if (places != Py_None) inputs[kInputDropoutPlaces] = places;
  return read_seeds(PyTuple_GetItem(value, 1), size > 2 ? PyTuple_GetItem(value, 2) : NULL, dropout,
                    inputs);
}

static bool read_features(Settings* settings, PyObject* const* given, PyObject** inputs) {
  fovea_attention_forward_args* args = &settings->args;
  bool is_causal, is_deterministic;
  int32_t is_swapped;
  int64_t sm_margin;
  if (!read_flag(given[kReturnLse], &settings->returns_lse) ||
      !read_flag(given[kCausal], &is_causal) ||
      !read_flag(given[kDeterministic], &is_deterministic) ||
      !read_word(shared.words.align, given[kAlign], &args->align) ||
      !read_word(shared.words.compute_dtype, given[kComputeDtype], &args->compute_dtype) ||
      !read_word(shared.words.cpu_target, given[kCpuTarget], &args->cpu_target) ||
      !read_window(given[kWindow], args) ||
      !read_word(shared.words.layout, given[kLayout], &is_swapped) ||
      !read_whole(given[kSmMargin], 0, INT32_MAX, &sm_margin) ||
      !read_dropout(given[kDropout], &args->dropout, inputs)) {
    return false;
  }
  settings->is_swapped = is_swapped != 0;
  args->causal = is_causal;
  args->allows_nondeterminism = !is_deterministic;
  args->sm_margin = (int32_t)sm_margin;
  args->has_softmax_scale = given[kScale] != Py_None;
  if (args->has_softmax_scale && !read_number(given[kScale], &args->softmax_scale)) return false;
  return given[kSoftcap] == Py_None ||
         (read_number(given[kSoftcap], &args->softcap) && args->softcap > 0);
}

/* ---- Arrays and programs ---- */

/* One array, or one for each side; one serves both sides where `is_shared`. */
static bool read_pair(PyObject* value, bool is_shared, PyObject** sides) {
  if (value == Py_None) return true;
  if (!PyTuple_CheckExact(value)) {
    sides[0] = value;
    sides[1] = is_shared ? value : NULL;
    return true;
  }
  if (PyTuple_Size(value) != 2) return false;
  for (int i = 0; i < 2; ++i) {
    PyObject* side = PyTuple_GetItem(value, i);
    sides[i] = side == Py_None ? NULL : side;
  }
  return true;
}

static bool is_program(PyObject* value) {
  return (PyObject*)Py_TYPE(value) == shared.words.program_type;
}

static Verdict read_scalars(PyObject* numbers, double* scalars, size_t* count) {
  const Py_ssize_t size = PyTuple_Check(numbers) ? PyTuple_Size(numbers) : kMaxCaptures + 1;
  if (size > kMaxCaptures) return kUnusual;
  for (Py_ssize_t i = 0; i < size; ++i) scalars[i] = PyFloat_AsDouble(PyTuple_GetItem(numbers, i));
  *count = (size_t)size;
  return PyErr_Occurred() ? leave_to_python() : kUsual;
}

static Verdict read_captures(ForwardCall* call, PyObject* tensors, size_t* count) {
  const Py_ssize_t size = PyTuple_Check(tensors) ? PyTuple_Size(tensors) : kMaxCaptures + 1;
  if (size > kMaxCaptures) return kUnusual;
  for (Py_ssize_t i = 0; i < size; ++i)
    call->inputs[call->num_inputs++] = PyTuple_GetItem(tensors, i);
  *count = (size_t)size;
  return kUsual;
}

static const fovea_program* read_handle(PyObject* program) {
  PyObject* handle = PyObject_GetAttr(program, shared.handle_name);
  PyObject* address = handle == NULL ? NULL : PyObject_GetAttr(handle, shared.address_name);
  const uintptr_t number = address == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(address);
  Py_XDECREF(address);
  Py_XDECREF(handle); /* the program has one, too */
  return (const fovea_program*)number;
}

static Verdict read_program(ForwardCall* call, PyObject* program, const fovea_program** handle,
                            size_t* num_tensors, double* scalars, size_t* num_scalars) {
  if (program == Py_None) return kUsual;
  if (!is_program(program)) return kUnusual;
  *handle = read_handle(program);
  PyObject* tensors = PyObject_GetAttr(program, shared.tensors_name);
  PyObject* numbers = PyObject_GetAttr(program, shared.scalars_name);
  Verdict verdict = kUnusual;
  if (*handle != NULL && tensors != NULL && numbers != NULL) {
    verdict = read_captures(call, tensors, num_tensors);
    if (verdict == kUsual) verdict = read_scalars(numbers, scalars, num_scalars);
  }
  Py_XDECREF(tensors); /* the program has both, and the caller the program */
  Py_XDECREF(numbers);
  return verdict == kUsual ? kUsual : leave_to_python();
}

Verdict read_arguments(ForwardCall* call, PyObject* const* given) {
  memset(&call->settings, 0, sizeof call->settings);
  Settings* settings = &call->settings;
  fovea_attention_forward_args* args = &settings->args;
  args->struct_size = sizeof *args;
  args->version = FOVEA_ABI_VERSION;
  call->num_inputs = 0;

  PyObject* inputs[kNumPlainInputs] = {
      [kInputQ] = given[kQ], [kInputK] = given[kK], [kInputV] = given[kV]};
  if (!read_features(settings, given, inputs) ||
      !read_pair(given[kSegmentIds], false, &inputs[kInputSegmentsQ]) ||
      !read_pair(given[kCuSeqlens], true, &inputs[kInputCuSeqlensQ])) {
    return kUnusual;
  }
  PyObject* mask_program = given[kMaskMod];
  if (is_program(given[kMask])) {
    if (mask_program != Py_None) return kUnusual; /* joined there */
    mask_program = given[kMask];
  } else if (given[kMask] != Py_None) {
    inputs[kInputMask] = given[kMask];
  }
  if (given[kBias] != Py_None) inputs[kInputBias] = given[kBias];
  if (given[kAlibi] != Py_None) inputs[kInputAlibi] = given[kAlibi];
  if (given[kSinks] != Py_None) inputs[kInputSinks] = given[kSinks];
  for (int i = 0; i < kNumPlainInputs; ++i) {
    if (inputs[i] == NULL) continue;
    settings->present |= 1u << i;
    call->inputs[call->num_inputs++] = inputs[i];
  }
  const Verdict verdict =
      read_program(call, given[kScoreMod], &args->score_program, &args->num_score_tensors,
                   settings->score_scalars, &args->num_score_scalars);
  if (verdict != kUsual) return verdict;
  return read_program(call, mask_program, &args->mask_program, &args->num_mask_tensors,
                      settings->mask_scalars, &args->num_mask_scalars);
}

/* ---- Tensors ---- */

static void point_at(fovea_attention_forward_args* args, size_t field, const DLTensor* tensor) {
  memcpy((char*)args + field, &tensor, sizeof tensor);
}

static bool bind_input(ForwardCall* call, int index) {
  Slot* slot = &call->slots[index];
  if (read_array(call->inputs[index], slot) != 0) return false;
  call->is_row_major[index] = is_row_major(&slot->tensor);
  return true;
}

Verdict bind_inputs(ForwardCall* call) {
  Settings* settings = &call->settings;
  fovea_attention_forward_args* args = &settings->args;
  int index = 0;
  for (int i = 0; i < kNumPlainInputs; ++i) {
    if ((settings->present >> i & 1) == 0) continue;
    if (!bind_input(call, index)) return leave_to_python();
    if (settings->is_swapped && i <= kInputV) swap_axes_1_and_2(&call->slots[index]);
    point_at(args, kFieldOfInput[i], &call->slots[index++].tensor);
  }
  for (size_t i = 0; i < args->num_score_tensors; ++i) {
    if (!bind_input(call, index)) return leave_to_python();
    call->score_tensors[i] = &call->slots[index++].tensor;
  }
  for (size_t i = 0; i < args->num_mask_tensors; ++i) {
    if (!bind_input(call, index)) return leave_to_python();
    call->mask_tensors[i] = &call->slots[index++].tensor;
  }
  args->score_tensors = call->score_tensors;
  args->score_scalars = settings->score_scalars;
  args->mask_tensors = call->mask_tensors;
  args->mask_scalars = settings->mask_scalars;
  return kUsual;
}

bool has_usual_types(const ForwardCall* call) {
  for (int i = 0; i < call->num_inputs; ++i) {
    if (maker_of(call->inputs[i]) == NULL) return false;
  }
  return true;
}

int count_plain_inputs(const Settings* settings) { return __builtin_popcount(settings->present); }

int plain_input(const Settings* settings, int index) {
  for (int i = 0; i < kNumPlainInputs; ++i) {
    if ((settings->present >> i & 1) != 0 && index-- == 0) return i;
  }
  return kNumPlainInputs;
}

Verdict find_stream(ForwardCall* call) {
  const DLTensor* q = &call->slots[kInputQ].tensor;
  if (q->device.device_type == kDLCPU) return kUsual;
  return current_stream(call->inputs[kInputQ], q->device, &call->settings.args.stream) == 0
             ? kUsual
             : kUnusual;
}

static PyObject* make_out(const ForwardCall* call, const Maker* maker) {
  const DLTensor *q = &call->slots[kInputQ].tensor, *v = &call->slots[kInputV].tensor;
  const int64_t head_dim_v = v->shape[v->ndim - 1];
  if (call->is_row_major[kInputQ] && q->shape[q->ndim - 1] == head_dim_v) {
    return PyObject_CallFunctionObjArgs(maker->empty_like, call->inputs[kInputQ], NULL);
  }
  int64_t shape[kMaxRank];
  memcpy(shape, q->shape, (size_t)q->ndim * sizeof *shape);
  if (call->settings.is_swapped) {
    shape[1] = q->shape[2];
    shape[2] = q->shape[1];
  }
  shape[q->ndim - 1] = head_dim_v;
  return new_array(maker, call->inputs[kInputQ], shape, q->ndim, Py_None);
}

/* [batch, num_heads_q, seqlen_q]; packed: [num_heads_q, total_q]. */
static PyObject* make_lse(const ForwardCall* call, const Maker* maker) {
  PyObject* like = call->inputs[kInputQ];
  const DLTensor* q = &call->slots[kInputQ].tensor;
  int64_t shape[] = {q->shape[0], q->shape[2], q->shape[1]};
  if (q->ndim == 3) {
    shape[0] = q->shape[1];
    shape[1] = q->shape[0];
  }
  const DLTensor prototype = {
      .device = q->device, .ndim = q->ndim - 1, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  /* Of what new_scratch takes away, callers on the host lose the resizing of an lse. */
  const bool is_scratch = !call->settings.returns_lse || q->device.device_type == kDLCPU;
  PyObject* scratch = is_scratch ? new_scratch(like, prototype) : NULL;
  return scratch != NULL ? scratch : new_array(maker, like, shape, q->ndim - 1, shared.f32);
}

/* What was given or made becomes a tensor. */
static Verdict bind_output(PyObject* array, Slot* slot, bool is_swapped) {
  if (array == NULL) return kFailed;
  if (read_array(array, slot) != 0) return leave_to_python();
  if (is_swapped) swap_axes_1_and_2(slot);
  return kUsual;
}

Verdict bind_out(ForwardCall* call, const Maker* maker, PyObject* given, PyObject** made) {
  Py_XINCREF(given);
  *made = given != NULL ? given : make_out(call, maker);
  call->settings.args.out = &call->out.tensor;
  return bind_output(*made, &call->out, call->settings.is_swapped);
}

Verdict bind_lse(ForwardCall* call, const Maker* maker, PyObject* given, PyObject** made) {
  Py_XINCREF(given);
  *made = given != NULL ? given : make_lse(call, maker);
  call->settings.args.lse = &call->lse.tensor;
  return bind_output(*made, &call->lse, false);
}

int set_up_forward_call(ForwardWords words) {
  const Name names[] = {{&shared.handle_name, "_handle"},
                        {&shared.address_name, "address"},
                        {&shared.tensors_name, "tensors"},
                        {&shared.scalars_name, "scalars"},
                        {&shared.f32, "f32"}};
  if (intern_names(names, sizeof names / sizeof *names) != 0) return -1;
  keep(&shared.words.layout, words.layout);
  keep(&shared.words.align, words.align);
  keep(&shared.words.compute_dtype, words.compute_dtype);
  keep(&shared.words.cpu_target, words.cpu_target);
  keep(&shared.words.program_type, words.program_type);
  keep(&shared.words.dropout_type, words.dropout_type);
  return 0;
}
