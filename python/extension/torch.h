/* What PyTorch does beside a call: transforms, modes, casts, gradients. */
#ifndef FOVEA_PYTHON_TORCH_H_
#define FOVEA_PYTHON_TORCH_H_

#include "extension.h"

/* Whether transforms, modes or casts look at calls; -1 and an exception where PyTorch does not say. */
int torch_is_observing(void);

int torch_is_grad_enabled(void);

/* Whether it is told to be deterministic. */
int torch_is_deterministic(void);

/* Whether a tensor's sign is a flag that DLPack does not carry. */
int torch_is_negative(PyObject* tensor);

int torch_requires_grad(PyObject* tensor);

/* set_up_torch(observers, forward_mode, is_grad_enabled, is_deterministic): functions without arguments, those of the
 * tuple `observers` true or above 0 where something looks; the module whose _current_level is below 0 outside of
 * forward mode. */
PyObject* set_up_torch(PyObject* module, PyObject* args);

#endif /* FOVEA_PYTHON_TORCH_H_ */
