/* Functions of libfovea called with the interpreter's lock released, and their errors as exceptions. */
#ifndef FOVEA_PYTHON_CALLS_H_
#define FOVEA_PYTHON_CALLS_H_

#include "extension.h"

/* The function at an address, of `plan` and a struct of arguments, or where `plan` is 0 of the struct alone; -1 and the
 * exception that it reports. */
int run(uintptr_t function, uintptr_t plan, const void* args);

/* error_of: (kind, message, column) -> exception; the others are addresses of libfovea's functions of errors. */
void set_up_calls(PyObject* error_of, uintptr_t message, uintptr_t column, uintptr_t free_function);

/* invoke(function, plan, template, pointers, places, word_places, tensors, words) */
PyObject* invoke(PyObject* module, PyObject* const* args, Py_ssize_t count);

#endif /* FOVEA_PYTHON_CALLS_H_ */
