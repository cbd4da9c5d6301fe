#include "torch.h"

static struct {
  PyObject* observers;
  PyObject* forward_mode;
  PyObject* is_grad_enabled;
  PyObject* is_deterministic;
  PyObject* current_level_name;
  PyObject* is_neg_name;
  PyObject* requires_grad_name;
} torch;

/* 0, 1, or -1 and an exception; takes the reference. */
static int truth(PyObject* answer) {
  if (answer == NULL) return -1;
  const int is_true = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return is_true;
}

static int is_in_forward_mode(void) {
  PyObject* level = PyObject_GetAttr(torch.forward_mode, torch.current_level_name);
  if (level == NULL) return -1;
  const long number = PyLong_AsLong(level);
  Py_DECREF(level);
  if (number == -1 && PyErr_Occurred()) return -1;
  return number >= 0;
}

int torch_is_observing(void) {
  const Py_ssize_t count = PyTuple_Size(torch.observers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int answer = truth(PyObject_CallNoArgs(PyTuple_GetItem(torch.observers, i)));
    if (answer != 0) return answer;
  }
  return is_in_forward_mode();
}

int torch_is_grad_enabled(void) { return truth(PyObject_CallNoArgs(torch.is_grad_enabled)); }

int torch_is_deterministic(void) { return truth(PyObject_CallNoArgs(torch.is_deterministic)); }

int torch_is_negative(PyObject* tensor) {
  return truth(PyObject_CallMethodObjArgs(tensor, torch.is_neg_name, NULL));
}

int torch_requires_grad(PyObject* tensor) {
  return truth(PyObject_GetAttr(tensor, torch.requires_grad_name));
}

PyObject* set_up_torch(PyObject* module, PyObject* args) {
  (void)module;
  PyObject *observers, *forward_mode, *is_grad_enabled, *is_deterministic;
  if (!PyArg_ParseTuple(args, "O!OOO", &PyTuple_Type, &observers, &forward_mode, &is_grad_enabled,
                        &is_deterministic)) {
    return NULL;
  }
  const Name names[] = {{&torch.current_level_name, "_current_level"},
                        {&torch.is_neg_name, "is_neg"},
                        {&torch.requires_grad_name, "requires_grad"}};
  if (intern_names(names, sizeof names / sizeof *names) != 0) return NULL;
  keep(&torch.observers, observers);
  keep(&torch.forward_mode, forward_mode);
  keep(&torch.is_grad_enabled, is_grad_enabled);
  keep(&torch.is_deterministic, is_deterministic);
  Py_RETURN_NONE;
}
