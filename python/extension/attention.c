#include "attention.h"

#include "calls.h"
#include "recorded.h"
#include "torch.h"

static struct {
  uintptr_t forward, plan_run; /* libfovea's functions */
  PyObject* flags_name;
  PyObject* writeable_name;
} shared;

PyObject* one_or_both(PyObject* out, PyObject* lse) {
  if (lse != NULL) return PyTuple_Pack(2, out, lse);
  Py_INCREF(out);
  return out;
}

static bool has_usual_ranks(const ForwardCall* call) {
  const int32_t rank = call->slots[kInputQ].tensor.ndim;
  if (call->slots[kInputV].tensor.ndim != rank) return false;
  return rank == 4 || (rank == 3 && !call->settings.is_swapped);
}

/* Whether gradients are recorded. */
static Verdict ask_torch(ForwardCall* call, bool* is_recorded) {
  const int num_plain_inputs = count_plain_inputs(&call->settings);
  bool is_all_torch = true;
  const int is_observing = torch_is_observing();
  const int is_grad_enabled = is_observing == 0 ? torch_is_grad_enabled() : -1;
  if (is_grad_enabled < 0) return leave_to_python();
  for (int i = 0; i < call->num_inputs; ++i) {
    PyObject* input = call->inputs[i];
    if (!maker_of(input)->is_torch) {
      is_all_torch = false;
      continue;
    }
    const bool is_resolved = i >= num_plain_inputs; /* since its program was made */
    if (!is_resolved && torch_is_negative(input) != 0) return leave_to_python();
    const int requires_grad = is_grad_enabled ? torch_requires_grad(input) : 0;
    if (requires_grad < 0 || (requires_grad && !has_gradient(&call->settings, i)))
      return leave_to_python();
    *is_recorded |= requires_grad != 0;
  }
  if (call->settings.args.allows_nondeterminism) {
    const int is_deterministic = torch_is_deterministic();
    if (is_deterministic < 0) return leave_to_python();
    call->settings.args.allows_nondeterminism = !is_deterministic;
  }
  return *is_recorded && !is_all_torch ? kUnusual : kUsual;
}

/* Of an output that the caller gave; PyTorch's neither part of a graph nor read with another sign. */
static bool is_writable(PyObject* array) {
  const Maker* maker = maker_of(array);
  if (maker == NULL) return false;
  if (maker->is_torch) {
    const bool is_plain = torch_requires_grad(array) == 0 && torch_is_negative(array) == 0;
    PyErr_Clear();
    return is_plain;
  }
  PyObject* flags = PyObject_GetAttr(array, shared.flags_name);
  PyObject* writeable = flags == NULL ? NULL : PyObject_GetAttr(flags, shared.writeable_name);
  const bool is_true = writeable == Py_True;
  Py_XDECREF(writeable);
  Py_XDECREF(flags);
  PyErr_Clear();
  return is_true;
}

Verdict attend_into(ForwardCall* call, const Maker* maker, uintptr_t plan, bool wants_lse,
                    PyObject** out, PyObject** lse) {
  PyObject *given_out = *out, *given_lse = *lse;
  *out = *lse = NULL;
  if (!has_usual_ranks(call)) return kUnusual;
  Verdict verdict = find_stream(call);
  if (verdict == kUsual) verdict = bind_out(call, maker, given_out, out);
  if (verdict == kUsual && wants_lse) verdict = bind_lse(call, maker, given_lse, lse);
  if (verdict != kUsual) return verdict;
  return run(plan == 0 ? shared.forward : shared.plan_run, plan, &call->settings.args) == 0
             ? kUsual
             : kFailed;
}

static Verdict read_workspace(PyObject* const* args, ForwardCall* call) {
  call->settings.args.workspace = (void*)(uintptr_t)PyLong_AsUnsignedLongLong(args[kWorkspace]);
  call->settings.args.workspace_bytes = (size_t)PyLong_AsUnsignedLongLong(args[kWorkspaceBytes]);
  return PyErr_Occurred() ? kFailed : kUsual;
}

/* `out` and `lse` are what the caller gave, or NULL. */
static PyObject* attend_unrecorded(ForwardCall* call, const Maker* maker, PyObject* const* args,
                                   uintptr_t plan, PyObject* out, PyObject* lse) {
  Verdict verdict = bind_inputs(call);
  if (verdict == kUsual) verdict = read_workspace(args, call);
  if (verdict != kUsual) return no_result(verdict);
  const bool wants_lse = lse != NULL || call->settings.returns_lse;
  verdict = attend_into(call, maker, plan, wants_lse, &out, &lse);
  PyObject* result = verdict == kUsual ? one_or_both(out, call->settings.returns_lse ? lse : NULL)
                                       : no_result(verdict);
  Py_XDECREF(out);
  Py_XDECREF(lse);
  return result;
}

const char attend_doc[] =
    "attend(plan, workspace, workspace_bytes, return_lse, out, lse, row_max, q, k, v, "
    "*features)\n--\n\n"
    "What fovea.attention returns, or Plan.run where the handle of a plan is not 0; "
    "NotImplemented, and nothing written, "
    "where it is for Python to do or to refuse.";

PyObject* attend(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  (void)module;
  if (count != kNumArguments) {
    PyErr_Format(PyExc_TypeError, "attend takes %d arguments", kNumArguments);
    return NULL;
  }
  const Maker* maker = maker_of(args[kQ]);
  const uintptr_t plan = (uintptr_t)PyLong_AsUnsignedLongLong(args[kPlan]);
  if (PyErr_Occurred()) return NULL;
  PyObject* out = args[kOut] == Py_None ? NULL : args[kOut];
  PyObject* lse = args[kLse] == Py_None ? NULL : args[kLse];
  if (maker == NULL || args[kRowMax] != Py_None || (out != NULL && !is_writable(out)) ||
      (lse != NULL && !is_writable(lse))) {
    return no_result(kUnusual);
  }
  ForwardCall call;
  bool is_recorded = false;
  Verdict verdict = read_arguments(&call, args);
  if (verdict == kUsual && !has_usual_types(&call)) verdict = kUnusual;
  if (verdict == kUsual && maker->is_torch) verdict = ask_torch(&call, &is_recorded);
  if (verdict != kUsual) return no_result(verdict);
  if (is_recorded) {
    if (plan != 0 || out != NULL || lse != NULL) return no_result(kUnusual);
    return record(&call, args);
  }
  return attend_unrecorded(&call, maker, args, plan, out, lse);
}

const char set_up_attention_doc[] =
    "set_up_attention(forward, plan_run, layout, align, compute_dtype, cpu_target, program_type, "
    "dropout_type, introduce)\n--\n\n"
    "What `attend` needs: addresses of libfovea's functions, dicts of words to numbers, classes, "
    "and what\nmakes arrays of a type.";

PyObject* set_up_attention(PyObject* module, PyObject* args) {
  (void)module;
  unsigned long long forward, plan_run;
  ForwardWords words;
  PyObject* introduce;
  const Name names[] = {{&shared.flags_name, "flags"}, {&shared.writeable_name, "writeable"}};
  if (!PyArg_ParseTuple(args, "KKOOOOOOO", &forward, &plan_run, &words.layout, &words.align,
                        &words.compute_dtype, &words.cpu_target, &words.program_type,
                        &words.dropout_type, &introduce) ||
      intern_names(names, sizeof names / sizeof *names) != 0 || set_up_forward_call(words) != 0) {
    return NULL;
  }
  set_up_making(introduce);
  shared.forward = (uintptr_t)forward;
  shared.plan_run = (uintptr_t)plan_run;
  Py_RETURN_NONE;
}
