/* Arrays of any DLPack library as tensors of the C ABI, and new arrays of the libraries that are met most. */
#ifndef FOVEA_PYTHON_ARRAYS_H_
#define FOVEA_PYTHON_ARRAYS_H_

#include "extension.h"

enum { kMaxRank = 8 };

/* A tensor and what its pointers point at, if that is ours. */
typedef struct {
  DLTensor tensor;
  int64_t shape[kMaxRank];
  int64_t strides[kMaxRank];
} Slot;

/* -1 and an exception where the object is no array. */
int read_array(PyObject* object, Slot* slot);

/* [batch, heads, seqlen, head_dim] in the caller's words, [batch, seqlen, heads, head_dim] in ours. */
void swap_axes_1_and_2(Slot* slot);

bool is_row_major(const DLTensor* tensor);

/* How arrays of a type are made. */
typedef struct {
  PyObject* empty_like; /* (like) -> array */
  PyObject* empty;      /* (like, shape, name of a dtype or None) -> array */
  bool is_torch;
} Maker;

/* NULL where calls with arrays of this type are left to Python. */
const Maker* maker_of(PyObject* array);

/* Row-major, beside `like`, of the dtype of that name of Fovea's, or of like's where it is None. */
PyObject* new_array(const Maker* maker, PyObject* like, const int64_t* shape, int32_t rank,
                    PyObject* dtype);

/* The same of a library that allocates through DLPack, in half the time: it cannot be resized, nor told of
 * other streams. NULL, and nothing set, where the library does not. */
PyObject* new_scratch(PyObject* like, DLTensor prototype);

/* The current stream of the library of an array that lies on a GPU; -1, and no exception, where it does not say. */
int current_stream(PyObject* array, DLDevice device, void** stream);

/* object -> (address, shape, strides or None, code, bits, device_type, device_id) */
int set_up_reading(PyObject* describe);

/* type -> (empty_like, empty, is_torch) or None */
void set_up_making(PyObject* introduce);

#endif /* FOVEA_PYTHON_ARRAYS_H_ */
