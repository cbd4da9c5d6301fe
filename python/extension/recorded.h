/* Calls that PyTorch records: a node of its graph whose two halves are here. */
#ifndef FOVEA_PYTHON_RECORDED_H_
#define FOVEA_PYTHON_RECORDED_H_

#include "extension.h"
#include "forward_call.h"

/* Whether there is a gradient by the input at an index. */
bool has_gradient(const Settings* settings, int index);

/* What `attend` returns of a call with these arguments: the recorder's node makes it, or NotImplemented. */
PyObject* record(const ForwardCall* call, PyObject* const* args);

/* attend_recorded(ctx, call, *inputs) */
PyObject* attend_recorded(PyObject* module, PyObject* const* args, Py_ssize_t count);

/* differentiate(call, needed, dout, dlse, *saved) */
PyObject* differentiate(PyObject* module, PyObject* const* args, Py_ssize_t count);

/* set_up_recorded(backward) */
PyObject* set_up_recorded(PyObject* module, PyObject* backward);

/* set_recorder(record, attend_in_python) */
PyObject* set_recorder(PyObject* module, PyObject* args);

extern const char attend_recorded_doc[], differentiate_doc[], set_up_recorded_doc[],
    set_recorder_doc[];

#endif /* FOVEA_PYTHON_RECORDED_H_ */
