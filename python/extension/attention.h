/* fovea.attention and Plan.run where nothing about the call is unusual. */
#ifndef FOVEA_PYTHON_ATTENTION_H_
#define FOVEA_PYTHON_ATTENTION_H_

#include "extension.h"
#include "forward_call.h"

/* Runs a call whose inputs are bound. *out and *lse are what the caller gave, or NULL; they become new references to
 * what was written. */
Verdict attend_into(ForwardCall* call, const Maker* maker, uintptr_t plan, bool wants_lse,
                    PyObject** out, PyObject** lse);

/* out, or both where there is an lse: a new reference. */
PyObject* one_or_both(PyObject* out, PyObject* lse);

/* attend(plan, workspace, workspace_bytes, return_lse, out, lse, row_max, q, k, v, *features) */
PyObject* attend(PyObject* module, PyObject* const* args, Py_ssize_t count);

/* set_up_attention(forward, plan_run, layout, align, compute_dtype, cpu_target, program_type, dropout_type,
 * introduce) */
PyObject* set_up_attention(PyObject* module, PyObject* args);

extern const char attend_doc[], set_up_attention_doc[];

#endif /* FOVEA_PYTHON_ATTENTION_H_ */
