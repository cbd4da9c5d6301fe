#include "recorded.h"

#include "attention.h"
#include "calls.h"
#include "torch.h"

static struct {
  uintptr_t backward;         /* libfovea's function */
  PyObject* record;           /* (call, *inputs) -> results, as a node of PyTorch's graph */
  PyObject* attend_in_python; /* (call, *inputs) -> (out, lse), of what is unusual about arrays */
  PyObject* tensor_names_name;
  PyObject* recorded_name;
  PyObject* materialize_grads_name;
  PyObject* to_save_name;
} shared;

/* ---- Recording ---- */

bool has_gradient(const Settings* settings, int index) {
  const int input = plain_input(settings, index);
  if (input != kNumPlainInputs) return input <= kInputAlibi || input == kInputSinks;
  return (size_t)(index - count_plain_inputs(settings)) < settings->args.num_score_tensors;
}

/* Gradients are asked for by name, and those of bias and alibi have these. */
static bool has_name_of_a_field(PyObject* score_program) {
  PyObject* names = PyObject_GetAttr(score_program, shared.tensor_names_name);
  bool is_found = names == NULL || !PyTuple_Check(names);
  for (Py_ssize_t i = 0; !is_found && i < PyTuple_Size(names); ++i) {
    PyObject* name = PyTuple_GetItem(names, i);
    is_found = PyUnicode_CompareWithASCIIString(name, "bias") == 0 ||
               PyUnicode_CompareWithASCIIString(name, "alibi") == 0;
  }
  Py_XDECREF(names);
  PyErr_Clear();
  return is_found;
}

/* Of a recorded call. */
enum { kSettings, kPresent, kFeatures, kReturnsLse, kNumParts };

/* What a gradient needs of the call beyond its tensors: (settings, inputs that are present, features without arrays,
 * return_lse). */
static PyObject* recorded_call(const ForwardCall* call, PyObject* const* args) {
  PyObject* features = PyTuple_New(kNumArguments - kFirstFeature);
  if (features == NULL) return NULL;
  for (int i = kFirstFeature; i < kNumArguments; ++i) {
    const bool is_array = i == kBias || i == kAlibi || i == kSegmentIds || i == kCuSeqlens ||
                          i == kSinks ||
                          (i == kMask && (call->settings.present >> kInputMask & 1) != 0);
    PyObject* feature = is_array ? Py_None : args[i];
    Py_INCREF(feature);
    PyTuple_SetItem(features, i - kFirstFeature, feature); /* takes the reference */
  }
  PyObject* settings =
      PyBytes_FromStringAndSize((const char*)&call->settings, (Py_ssize_t)sizeof call->settings);
  PyObject* present = PyLong_FromUnsignedLong(call->settings.present);
  PyObject* recorded = settings == NULL || present == NULL
                           ? NULL
                           : PyTuple_Pack(kNumParts, settings, present, features, args[kReturnLse]);
  Py_XDECREF(settings);
  Py_XDECREF(present);
  Py_DECREF(features);
  return recorded;
}

PyObject* record(const ForwardCall* call, PyObject* const* args) {
  const bool has_fields = (call->settings.present & (1u << kInputBias | 1u << kInputAlibi)) != 0;
  if (has_fields && args[kScoreMod] != Py_None && has_name_of_a_field(args[kScoreMod])) {
    return no_result(kUnusual); /* refused there */
  }
  PyObject* given = PyTuple_New(1 + call->num_inputs);
  PyObject* recorded = given == NULL ? NULL : recorded_call(call, args);
  PyObject* results = NULL;
  if (recorded != NULL) {
    PyTuple_SetItem(given, 0, recorded); /* takes the reference */
    for (int i = 0; i < call->num_inputs; ++i) {
      Py_INCREF(call->inputs[i]);
      PyTuple_SetItem(given, 1 + i, call->inputs[i]);
    }
    results = PyObject_Call(shared.record, given, NULL);
  }
  Py_XDECREF(given);
  return results;
}

/* ---- Forward ---- */

/* A recorded call again, with its inputs. */
static Verdict reopen(ForwardCall* call, PyObject* recorded, PyObject* const* inputs,
                      Py_ssize_t num_inputs) {
  char* bytes;
  Py_ssize_t size;
  const bool is_recorded = PyTuple_Check(recorded) && PyTuple_Size(recorded) == kNumParts &&
                           PyTuple_Check(PyTuple_GetItem(recorded, kFeatures));
  if (!is_recorded ||
      PyBytes_AsStringAndSize(PyTuple_GetItem(recorded, kSettings), &bytes, &size) != 0 ||
      size != (Py_ssize_t)sizeof call->settings || num_inputs > kMaxInputs) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "no recorded call");
    return kFailed;
  }
  memcpy(&call->settings, bytes, sizeof call->settings);
  call->num_inputs = (int)num_inputs;
  for (Py_ssize_t i = 0; i < num_inputs; ++i) call->inputs[i] = inputs[i];
  const fovea_attention_forward_args* args = &call->settings.args;
  const size_t expected = (size_t)count_plain_inputs(&call->settings) + args->num_score_tensors +
                          args->num_mask_tensors;
  if ((size_t)num_inputs != expected) {
    PyErr_Format(PyExc_TypeError, "%zd inputs of a recorded call; expected %zu", num_inputs,
                 expected);
    return kFailed;
  }
  return has_usual_types(call) ? bind_inputs(call) : kUnusual;
}

const char attend_recorded_doc[] =
    "attend_recorded(ctx, call, *inputs)\n--\n\n"
    "The forward function of the recorder's node: what `attend` returns of a call that it "
    "recorded.";

/* What set_materialize_grads and save_for_backward set, at the price of a Python call each. */
static int write_context(PyObject* context, PyObject* recorded, PyObject* const* inputs,
                         Py_ssize_t num_inputs, PyObject* out, PyObject* lse) {
  PyObject* saved = PyTuple_New(num_inputs + 2);
  if (saved == NULL) return -1;
  for (Py_ssize_t i = 0; i < num_inputs + 2; ++i) {
    PyObject* tensor = i < num_inputs ? inputs[i] : i == num_inputs ? out : lse;
    Py_INCREF(tensor);
    PyTuple_SetItem(saved, i, tensor); /* takes the reference */
  }
  const int failed = PyObject_SetAttr(context, shared.recorded_name, recorded) != 0 ||
                     PyObject_SetAttr(context, shared.materialize_grads_name, Py_False) != 0 ||
                     PyObject_SetAttr(context, shared.to_save_name, saved) != 0;
  Py_DECREF(saved);
  return failed ? -1 : 0;
}

/* By Python: (out, lse), new references. */
static Verdict attend_in_python(PyObject* recorded, PyObject* const* inputs, Py_ssize_t num_inputs,
                                PyObject** out, PyObject** lse) {
  PyObject* given = PyTuple_New(1 + num_inputs);
  if (given == NULL) return kFailed;
  for (Py_ssize_t i = 0; i < 1 + num_inputs; ++i) {
    PyObject* argument = i == 0 ? recorded : inputs[i - 1];
    Py_INCREF(argument);
    PyTuple_SetItem(given, i, argument);
  }
  PyObject* both = PyObject_Call(shared.attend_in_python, given, NULL);
  Py_DECREF(given);
  const bool is_right = both != NULL && PyArg_ParseTuple(both, "OO", out, lse);
  if (is_right) {
    Py_INCREF(*out);
    Py_INCREF(*lse);
  }
  Py_XDECREF(both);
  return is_right ? kUsual : kFailed;
}

PyObject* attend_recorded(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  (void)module;
  if (count < 2) {
    PyErr_SetString(PyExc_TypeError, "attend_recorded takes a context, a call and its inputs");
    return NULL;
  }
  PyObject *recorded = args[1], *out = NULL, *lse = NULL, *result = NULL;
  const Py_ssize_t num_inputs = count - 2;
  ForwardCall call;
  Verdict verdict = reopen(&call, recorded, args + 2, num_inputs);
  if (verdict == kUsual) verdict = attend_into(&call, maker_of(args[2]), 0, true, &out, &lse);
  if (verdict == kUnusual) {
    Py_CLEAR(out);
    Py_CLEAR(lse);
    verdict = attend_in_python(recorded, args + 2, num_inputs, &out, &lse);
  }
  if (verdict == kUsual && write_context(args[0], recorded, args + 2, num_inputs, out, lse) == 0) {
    result = one_or_both(out, call.settings.returns_lse ? lse : NULL);
  }
  Py_XDECREF(out);
  Py_XDECREF(lse);
  return result;
}

/* ---- Backward ---- */

typedef struct {
  fovea_attention_backward_args args;
  Slot dout, dlse, out, lse;
  Slot gradients[kMaxInputs];
  fovea_named_tensor captured[kMaxInputs];
  PyObject* tensor_names; /* of the score program; NULL without */
} BackwardCall;

static bool bind_seed(PyObject* array, Slot* slot, bool is_swapped, const DLTensor** place) {
  const Maker* maker = maker_of(array);
  if (maker == NULL || !maker->is_torch || torch_is_negative(array) != 0 ||
      read_array(array, slot) != 0)
    return false;
  if (slot->tensor.data == NULL) return false; /* zeros that nobody wrote down, or nothing at all */
  if (is_swapped) swap_axes_1_and_2(slot);
  *place = &slot->tensor;
  return true;
}

/* Where the gradient by an input goes; NULL where it is asked for by name. */
static const DLTensor** place_of(fovea_attention_backward_args* args, int input) {
  switch (input) {
    case kInputQ:
      return &args->dq;
    case kInputK:
      return &args->dk;
    case kInputV:
      return &args->dv;
    case kInputSinks:
      return &args->dsinks;
    default:
      return NULL;
  }
}

static const char* name_of(const BackwardCall* backward, const Settings* settings, int index,
                           int input) {
  if (input == kInputBias) return "bias";
  if (input == kInputAlibi) return "alibi";
  const int captured = index - count_plain_inputs(settings);
  PyObject* name =
      backward->tensor_names == NULL ? NULL : PyTuple_GetItem(backward->tensor_names, captured);
  return name == NULL ? NULL
                      : PyUnicode_AsUTF8AndSize(name, NULL); /* lives as long as the program */
}

static Verdict add_gradient(BackwardCall* backward, const ForwardCall* call, int index,
                            PyObject* gradient) {
  Slot* slot = &backward->gradients[index];
  if (gradient == NULL || read_array(gradient, slot) != 0) return kFailed;
  const int input = plain_input(&call->settings, index);
  if (input <= kInputV && call->settings.is_swapped) swap_axes_1_and_2(slot);
  const DLTensor** place = place_of(&backward->args, input);
  if (place != NULL) {
    *place = &slot->tensor;
    return kUsual;
  }
  const char* name = name_of(backward, &call->settings, index, input);
  if (name == NULL) return kFailed;
  backward->captured[backward->args.num_dcaptured++] = (fovea_named_tensor){name, &slot->tensor};
  return kUsual;
}

/* Row-major, as the gradients of the Python functions. */
static PyObject* make_gradient(const ForwardCall* call, int index) {
  PyObject* input = call->inputs[index];
  const Maker* maker = maker_of(input);
  if (call->is_row_major[index])
    return PyObject_CallFunctionObjArgs(maker->empty_like, input, NULL);
  const DLTensor* tensor = &call->slots[index].tensor;
  int64_t shape[kMaxRank];
  memcpy(shape, tensor->shape, (size_t)tensor->ndim * sizeof *shape);
  if (call->settings.is_swapped && plain_input(&call->settings, index) <= kInputV &&
      tensor->ndim == 4) {
    shape[1] = tensor->shape[2];
    shape[2] = tensor->shape[1];
  }
  return new_array(maker, input, shape, tensor->ndim, Py_None);
}

/* A gradient or None for each argument of the recorder. */
static Verdict make_gradients(BackwardCall* backward, const ForwardCall* call, PyObject* needed,
                              PyObject* results) {
  Py_INCREF(Py_None);
  PyTuple_SetItem(results, 0, Py_None);
  for (int i = 0; i < call->num_inputs; ++i) {
    PyObject* is_needed = PyTuple_GetItem(needed, 1 + i);
    PyObject* gradient = Py_None;
    if (is_needed == Py_True) {
      gradient = make_gradient(call, i);
      const Verdict verdict = add_gradient(backward, call, i, gradient);
      if (verdict != kUsual) {
        Py_XDECREF(gradient);
        return verdict;
      }
    } else {
      Py_INCREF(gradient);
    }
    PyTuple_SetItem(results, 1 + i, gradient);
  }
  return kUsual;
}

static Verdict bind_backward(BackwardCall* backward, ForwardCall* call, PyObject* dout,
                             PyObject* dlse, PyObject* out, PyObject* lse) {
  const bool is_swapped = call->settings.is_swapped;
  memset(&backward->args, 0, sizeof backward->args);
  backward->args.struct_size = sizeof backward->args;
  backward->args.version = FOVEA_ABI_VERSION;
  backward->args.forward = &call->settings.args;
  backward->args.dcaptured = backward->captured;
  if (dout == Py_None || !bind_seed(dout, &backward->dout, is_swapped, &backward->args.dout) ||
      (dlse != Py_None && !bind_seed(dlse, &backward->dlse, false, &backward->args.dlse)) ||
      !bind_seed(out, &backward->out, is_swapped, &call->settings.args.out) ||
      !bind_seed(lse, &backward->lse, false, &call->settings.args.lse)) {
    return leave_to_python();
  }
  return kUsual;
}

/* A new reference; NULL, and nothing set, without a score program. */
static PyObject* names_of_score(PyObject* recorded) {
  PyObject* features = PyTuple_GetItem(recorded, kFeatures);
  PyObject* program = PyTuple_GetItem(features, kScoreMod - kFirstFeature);
  if (program == NULL || program == Py_None) return NULL;
  return PyObject_GetAttr(program, shared.tensor_names_name);
}

const char differentiate_doc[] =
    "differentiate(call, needed, dout, dlse, *saved)\n--\n\n"
    "What the backward function of the recorder's node returns: None for the call, then a gradient "
    "or None for each input,\nas `needed` says of all of them; `saved` has the inputs, out and "
    "lse. "
    "NotImplemented where it is for Python to do.";

PyObject* differentiate(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  (void)module;
  enum { kCall, kNeeded, kDout, kDlse, kSaved, kNumOutputs = 2 };
  const Py_ssize_t num_inputs = count - kSaved - kNumOutputs;
  if (num_inputs < 0 || !PyTuple_Check(args[kNeeded]) ||
      PyTuple_Size(args[kNeeded]) != 1 + num_inputs) {
    PyErr_SetString(PyExc_TypeError, "differentiate takes a call, bools, dout, dlse and tensors");
    return NULL;
  }
  PyObject* const* inputs = args + kSaved;
  ForwardCall call;
  BackwardCall backward;
  Verdict verdict = reopen(&call, args[kCall], inputs, num_inputs);
  if (verdict == kUsual) verdict = find_stream(&call);
  if (verdict == kUsual) {
    verdict = bind_backward(&backward, &call, args[kDout], args[kDlse], inputs[num_inputs],
                            inputs[num_inputs + 1]);
  }
  if (verdict != kUsual) return no_result(verdict);
  PyObject* results = PyTuple_New(1 + num_inputs);
  if (results == NULL) return NULL;
  backward.tensor_names = names_of_score(args[kCall]);
  verdict = PyErr_Occurred() ? kFailed : make_gradients(&backward, &call, args[kNeeded], results);
  if (verdict == kUsual && run(shared.backward, 0, &backward.args) != 0) verdict = kFailed;
  Py_XDECREF(backward.tensor_names);
  if (verdict == kUsual) return results;
  Py_DECREF(results);
  return no_result(verdict);
}

/* ---- What Python gives ---- */

const char set_up_recorded_doc[] =
    "set_up_recorded(backward)\n--\n\n"
    "The address of libfovea's function of gradients.";

PyObject* set_up_recorded(PyObject* module, PyObject* backward) {
  (void)module;
  const Name names[] = {{&shared.tensor_names_name, "tensor_names"},
                        {&shared.recorded_name, "recorded"},
                        {&shared.materialize_grads_name, "materialize_grads"},
                        {&shared.to_save_name, "to_save"}};
  shared.backward = (uintptr_t)PyLong_AsUnsignedLongLong(backward);
  if (PyErr_Occurred() || intern_names(names, sizeof names / sizeof *names) != 0) return NULL;
  Py_RETURN_NONE;
}

const char set_recorder_doc[] =
    "set_recorder(record, attend_in_python)\n--\n\n"
    "record(call, *inputs) makes a call a node of PyTorch's graph: `attend_recorded` is its "
    "forward function, and what it returns is "
    "what `attend` returns. attend_in_python(call, *inputs) gives (out, lse) of a call whose "
    "arrays are for Python to read.";

PyObject* set_recorder(PyObject* module, PyObject* args) {
  (void)module;
  PyObject *record_function, *attend_function;
  if (!PyArg_ParseTuple(args, "OO", &record_function, &attend_function)) return NULL;
  keep(&shared.record, record_function);
  keep(&shared.attend_in_python, attend_function);
  Py_RETURN_NONE;
}
