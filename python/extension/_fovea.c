/* fovea._fovea: what of a call has to be quick.
 *
 * `attend` (attention.c) is all of a usual call, from the arguments of fovea.attention to what it returns; recorded.c
 * is the same where PyTorch records it, and its gradient. `invoke` (calls.c) serves all other calls and functions: a
 * template of C structs is copied, the arrays of the call become DLTensors in it, and a function of libfovea runs with
 * the interpreter's lock released. Everything else, and the same where this extension is missing, is Python:
 * fovea/_calls.py, fovea/_quick.py. */
#include "arrays.h"
#include "attention.h"
#include "calls.h"
#include "extension.h"
#include "recorded.h"
#include "torch.h"

PyDoc_STRVAR(
    invoke_doc,
    "invoke(function, plan, template, pointers, places, word_places, tensors, words)\n--\n\n"
    "Copies the template; writes at each of `pointers` (at, to) the address of the copy's byte "
    "`to`, at each of "
    "`places` (at, swap)\nthat of a tensor, at each of `word_places` a number of 64 bits; calls "
    "the function at "
    "address `function`, with\n`plan` before its struct unless that is 0. Raises what the function "
    "reports.");

PyDoc_STRVAR(setup_doc,
             "setup(describe, error_of, message, column, free)\n--\n\n"
             "What the other functions need: a description of an array in Python, an exception of "
             "(kind, message, "
             "column), and the\naddresses of libfovea's functions of errors.");

static PyObject* setup(PyObject* module, PyObject* args) {
  (void)module;
  PyObject *describe, *error_of;
  unsigned long long message, column, free_function;
  if (!PyArg_ParseTuple(args, "OOKKK", &describe, &error_of, &message, &column, &free_function) ||
      set_up_reading(describe) != 0) {
    return NULL;
  }
  set_up_calls(error_of, (uintptr_t)message, (uintptr_t)column, (uintptr_t)free_function);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_up_torch_doc,
             "set_up_torch(observers, forward_mode, is_grad_enabled, is_deterministic)\n--\n\n"
             "Where PyTorch says what it does beside a call.");

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, setup_doc},
    {"invoke", FAST(invoke), METH_FASTCALL, invoke_doc},
    {"set_up_attention", set_up_attention, METH_VARARGS, set_up_attention_doc},
    {"set_up_torch", set_up_torch, METH_VARARGS, set_up_torch_doc},
    {"set_up_recorded", set_up_recorded, METH_O, set_up_recorded_doc},
    {"set_recorder", set_recorder, METH_VARARGS, set_recorder_doc},
    {"attend", FAST(attend), METH_FASTCALL, attend_doc},
    {"attend_recorded", FAST(attend_recorded), METH_FASTCALL, attend_recorded_doc},
    {"differentiate", FAST(differentiate), METH_FASTCALL, differentiate_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_fovea",
    "Calls of libfovea; see fovea/_calls.py and fovea/_quick.py.",
    -1,
    methods,
    NULL,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__fovea(void) { return PyModule_Create(&definition); }
