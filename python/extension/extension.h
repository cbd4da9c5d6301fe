/* What the files of fovea._fovea share: Python's limited API of 3.10, so that one file serves every later CPython that
 * has a lock, and the C ABI. Nothing of libfovea is linked; its functions come as addresses, so that the package alone
 * decides which library runs. */
#ifndef FOVEA_PYTHON_EXTENSION_H_
#define FOVEA_PYTHON_EXTENSION_H_

#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <string.h>

#include "fovea/fovea.h"

/* What became of a call that the extension tried. */
typedef enum {
  kFailed = -1, /* an exception is set */
  kUsual = 0,
  kUnusual = 1, /* nothing is set: Python does it, or finds the words to refuse it */
} Verdict;

/* Whatever went wrong, Python will meet it again and name it. */
static inline Verdict leave_to_python(void) {
  PyErr_Clear();
  return kUnusual;
}

/* What a function that tried a call returns where there is no result. */
static inline PyObject* no_result(Verdict verdict) {
  if (verdict == kFailed) return NULL;
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

/* A strong reference in place of another. */
static inline void keep(PyObject** place, PyObject* object) {
  PyObject* before = *place;
  Py_XINCREF(object);
  *place = object;
  Py_XDECREF(before);
}

/* Of an attribute, made once. */
typedef struct {
  PyObject** place;
  const char* text;
} Name;

static inline int intern_names(const Name* names, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    PyObject* name = PyUnicode_InternFromString(names[i].text);
    if (name == NULL) return -1;
    keep(names[i].place, name);
    Py_DECREF(name);
  }
  return 0;
}

#endif /* FOVEA_PYTHON_EXTENSION_H_ */
