/* fovea._fovea: the one step of a call that has to be quick. A template of C structs is copied, the arrays of the call
 * become DLTensors in it, and a function of libfovea runs with the interpreter's lock released. Everything else, and
 * the same step where this extension is missing, is Python: fovea/_calls.py.
 *
 * Limited API of Python 3.10: one file serves every later CPython that has a lock. Nothing of libfovea is linked; its
 * functions come as addresses, so that the package alone decides which library runs. */
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "fovea/fovea.h"

/* ---- DLPack: what fovea.h does not declare ---- */

typedef struct {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;

typedef struct {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(void* self);
} DLManagedTensor;

typedef struct {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(void* self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct ExchangeHeader {
  DLPackVersion version;
  struct ExchangeHeader* prev_api;
} ExchangeHeader;

typedef struct {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object,
                                         DLTensor* out); /* borrows from the object; may be NULL */
  void* current_work_stream;
} ExchangeApi;

/* ---- What fovea._calls.setup gave ---- */

static struct {
  PyObject*
      describe; /* object -> (address, shape, strides or None, code, bits, device_type, device_id) */
  PyObject* dlpack_name;
  PyObject* newest_version; /* {"max_version": (1, 3)} as names and values of a call */
  PyObject* error_of;       /* (kind, message, column) -> exception */
  const char* (*error_message)(const fovea_error*);
  size_t (*error_column)(const fovea_error*);
  void (*error_free)(fovea_error*);
} shared;

/* ---- Arrays ---- */

enum { kMaxRank = 8 };

/* A tensor and what its pointers point at, if that is ours. */
typedef struct {
  DLTensor tensor;
  int64_t shape[kMaxRank];
  int64_t strides[kMaxRank];
} Slot;

/* Types whose arrays are tensors at the price of a function call; strong references, so that no address comes again. */
enum { kNumKnownTypes = 8 };
static struct {
  PyTypeObject* type;
  const ExchangeApi* api; /* NULL: the type has none */
} known_types[kNumKnownTypes];
static int num_known_types = 0;

static const ExchangeApi* read_exchange_api(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString((PyObject*)type, "__dlpack_c_exchange_api__");
  const ExchangeHeader* header = NULL;
  if (capsule != NULL && PyCapsule_CheckExact(capsule)) {
    header = (const ExchangeHeader*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  }
  PyErr_Clear();
  Py_XDECREF(capsule); /* the table belongs to the type and outlives it, says DLPack */
  while (header != NULL && header->version.major != 1) header = header->prev_api;
  const ExchangeApi* api = (const ExchangeApi*)header;
  return api != NULL && api->dltensor_from_py_object_no_sync != NULL ? api : NULL;
}

static const ExchangeApi* exchange_api_of(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  for (int i = 0; i < num_known_types; ++i) {
    if (known_types[i].type == type) return known_types[i].api;
  }
  const ExchangeApi* api = read_exchange_api(type);
  if (num_known_types < kNumKnownTypes) {
    Py_INCREF(type);
    known_types[num_known_types].type = type;
    known_types[num_known_types].api = api;
    ++num_known_types;
  }
  return api;
}

static int copy_extents(Slot* slot, const DLTensor* from) {
  if (from->ndim < 0 || from->ndim > kMaxRank) {
    PyErr_Format(PyExc_ValueError, "an array of rank %d; expected at most %d", (int)from->ndim,
                 kMaxRank);
    return -1;
  }
  slot->tensor = *from;
  const size_t bytes = (size_t)from->ndim * sizeof(int64_t);
  if (bytes > 0) memcpy(slot->shape, from->shape, bytes);
  slot->tensor.shape = slot->shape;
  if (from->strides != NULL) {
    if (bytes > 0) memcpy(slot->strides, from->strides, bytes);
    slot->tensor.strides = slot->strides;
  }
  return 0;
}

static int64_t item_as_int64(PyObject* tuple, Py_ssize_t index) {
  PyObject* item = PyTuple_GetItem(tuple, index);
  return item == NULL ? -1 : (int64_t)PyLong_AsLongLong(item);
}

static int read_extents(PyObject* tuple, int64_t* extents, int32_t ndim) {
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != ndim) {
    PyErr_SetString(PyExc_TypeError, "a description's shape and strides are tuples of one length");
    return -1;
  }
  for (int32_t i = 0; i < ndim; ++i) extents[i] = item_as_int64(tuple, i);
  return PyErr_Occurred() ? -1 : 0;
}

/* The slow way, in Python: old NumPy, dtypes that DLPack has no word for, specs without data, and refusals. */
static int describe(PyObject* object, Slot* slot) {
  PyObject* described = PyObject_CallFunctionObjArgs(shared.describe, object, NULL);
  if (described == NULL) return -1;
  int status = -1;
  PyObject *shape, *strides;
  unsigned long long address;
  int code, bits, device_type, device_id;
  if (PyArg_ParseTuple(described, "KOOiiii", &address, &shape, &strides, &code, &bits, &device_type,
                       &device_id)) {
    const Py_ssize_t rank = PyTuple_Check(shape) ? PyTuple_Size(shape) : -1;
    if (rank < 0 || rank > kMaxRank) {
      PyErr_Format(PyExc_ValueError, "an array of rank %zd; expected at most %d", rank, kMaxRank);
    } else {
      slot->tensor = (DLTensor){(void*)(uintptr_t)address,
                                {(DLDeviceType)device_type, device_id},
                                (int32_t)rank,
                                {(uint8_t)code, (uint8_t)bits, 1},
                                slot->shape,
                                strides == Py_None ? NULL : slot->strides,
                                0};
      status = read_extents(shape, slot->shape, (int32_t)rank);
      if (status == 0 && strides != Py_None)
        status = read_extents(strides, slot->strides, (int32_t)rank);
    }
  }
  Py_DECREF(described);
  return status;
}

static PyObject* call_dlpack(PyObject* object) {
  PyObject* method = PyObject_GetAttr(object, shared.dlpack_name);
  if (method == NULL) return NULL;
  PyObject* nothing = PyTuple_New(0);
  PyObject* capsule =
      nothing == NULL ? NULL : PyObject_Call(method, nothing, shared.newest_version);
  if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) { /* before DLPack 1.0 */
    PyErr_Clear();
    capsule = PyObject_CallFunctionObjArgs(method, NULL);
  }
  Py_XDECREF(nothing);
  Py_DECREF(method);
  return capsule;
}

/* A capsule that nobody consumes frees its tensor when it goes; the memory is the array's, which the caller holds. */
static int read_capsule(PyObject* capsule, Slot* slot) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    const DLManagedTensorVersioned* managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (managed->version.major == 1) return copy_extents(slot, &managed->dl_tensor);
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    const DLManagedTensor* managed = PyCapsule_GetPointer(capsule, "dltensor");
    return copy_extents(slot, &managed->dl_tensor);
  }
  PyErr_SetString(PyExc_BufferError, "__dlpack__ gave no tensor of DLPack 1");
  return -1;
}

static int read_array(PyObject* object, Slot* slot) {
  const ExchangeApi* api = exchange_api_of(object);
  if (api != NULL) {
    DLTensor borrowed;
    if (api->dltensor_from_py_object_no_sync(object, &borrowed) == 0)
      return copy_extents(slot, &borrowed);
    PyErr_Clear();
    return describe(object, slot);
  }
  PyObject* capsule = call_dlpack(object);
  if (capsule == NULL) {
    PyErr_Clear();
    return describe(object, slot);
  }
  const int status = read_capsule(capsule, slot);
  Py_DECREF(capsule);
  return status;
}

/* [batch, heads, seqlen, head_dim] in the caller's words, [batch, seqlen, heads, head_dim] in ours. */
static void swap_axes_1_and_2(Slot* slot) {
  DLTensor* tensor = &slot->tensor;
  if (tensor->ndim != 4) return; /* refused by the library, which names the rank */
  if (tensor->strides == NULL) {
    int64_t step = 1;
    for (int axis = 3; axis >= 0; --axis) {
      slot->strides[axis] = step;
      step *= slot->shape[axis];
    }
    tensor->strides = slot->strides;
  }
  const int64_t extent = slot->shape[1], stride = slot->strides[1];
  slot->shape[1] = slot->shape[2], slot->strides[1] = slot->strides[2];
  slot->shape[2] = extent, slot->strides[2] = stride;
}

/* ---- Calls ---- */

typedef int (*CallFunction)(const void* args, fovea_error** error);
typedef int (*PlanFunction)(const void* plan, const void* args, fovea_error** error);

/* Pairs or single numbers of 32 bits, in a bytes object that Python made. */
typedef struct {
  const int32_t* values;
  Py_ssize_t count;
} Numbers;

static int read_numbers(PyObject* bytes, Numbers* numbers) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) != 0) return -1;
  numbers->values = (const int32_t*)data;
  numbers->count = size / (Py_ssize_t)sizeof(int32_t);
  return 0;
}

static void write_address(char* memory, int32_t at, const void* address) {
  memcpy(memory + at, &address, sizeof address);
}

static int place_tensors(char* memory, Slot* slots, Numbers places, PyObject* tensors) {
  for (Py_ssize_t i = 0; 2 * i < places.count; ++i) {
    PyObject* object = PyTuple_GetItem(tensors, i);
    if (object == NULL || read_array(object, &slots[i]) != 0) return -1;
    if (places.values[2 * i + 1]) swap_axes_1_and_2(&slots[i]);
    write_address(memory, places.values[2 * i], &slots[i].tensor);
  }
  return 0;
}

static int place_words(char* memory, Numbers places, PyObject* words) {
  for (Py_ssize_t i = 0; i < places.count; ++i) {
    PyObject* word = PyTuple_GetItem(words, i);
    if (word == NULL) return -1;
    const unsigned long long value = PyLong_AsUnsignedLongLongMask(word);
    if (PyErr_Occurred()) return -1;
    memcpy(memory + places.values[i], &value, sizeof value);
  }
  return 0;
}

static void raise(fovea_error* error, int kind) {
  PyObject* exception =
      PyObject_CallFunction(shared.error_of, "isn", kind, shared.error_message(error),
                            (Py_ssize_t)shared.error_column(error));
  shared.error_free(error);
  if (exception == NULL) return;
  PyErr_SetObject((PyObject*)Py_TYPE(exception), exception);
  Py_DECREF(exception);
}

static int run(uintptr_t function, uintptr_t plan, const char* memory) {
  fovea_error* error = NULL;
  int kind;
  Py_BEGIN_ALLOW_THREADS;
  kind = plan == 0 ? ((CallFunction)function)(memory, &error)
                   : ((PlanFunction)function)((const void*)plan, memory, &error);
  Py_END_ALLOW_THREADS;
  if (kind == FOVEA_OK) return 0;
  raise(error, kind);
  return -1;
}

PyDoc_STRVAR(
    invoke_doc,
    "invoke(function, plan, template, pointers, places, word_places, tensors, words)\n--\n\n"
    "Copies the template; writes at each of `pointers` (at, to) the address of the copy's byte "
    "`to`, at each of "
    "`places` (at, swap)\nthat of a tensor, at each of `word_places` a number of 64 bits; calls "
    "the function at "
    "address `function`, with\n`plan` before its struct unless that is 0. Raises what the function "
    "reports.");

static PyObject* invoke(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  (void)module;
  if (count != 8 || !PyTuple_Check(args[6]) || !PyTuple_Check(args[7])) {
    PyErr_SetString(PyExc_TypeError, "invoke takes 8 arguments, the last two of them tuples");
    return NULL;
  }
  if (shared.describe == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "setup was not called");
    return NULL;
  }
  const uintptr_t function = (uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
  const uintptr_t plan = (uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
  char* template_bytes;
  Py_ssize_t size;
  Numbers pointers, places, word_places;
  if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[2], &template_bytes, &size) != 0 ||
      read_numbers(args[3], &pointers) != 0 || read_numbers(args[4], &places) != 0 ||
      read_numbers(args[5], &word_places) != 0) {
    return NULL;
  }
  if (2 * PyTuple_Size(args[6]) != places.count || PyTuple_Size(args[7]) != word_places.count) {
    PyErr_SetString(PyExc_TypeError, "as many tensors and words as places");
    return NULL;
  }
  /* Small calls, nearly all, stay on the stack. */
  enum { kStackBytes = 8192 };
  union {
    char bytes[kStackBytes];
    Slot alignment;
  } stack;
  const size_t template_size = ((size_t)size + 15) / 16 * 16;
  const size_t bytes = template_size + (size_t)(places.count / 2) * sizeof(Slot);
  char* memory = bytes <= kStackBytes ? stack.bytes : PyMem_Malloc(bytes);
  if (memory == NULL) return PyErr_NoMemory();
  memcpy(memory, template_bytes, (size_t)size);
  for (Py_ssize_t i = 0; i + 1 < pointers.count; i += 2) {
    write_address(memory, pointers.values[i], memory + pointers.values[i + 1]);
  }
  const int failed = place_tensors(memory, (Slot*)(memory + template_size), places, args[6]) != 0 ||
                     place_words(memory, word_places, args[7]) != 0 ||
                     run(function, plan, memory) != 0;
  if (memory != stack.bytes) PyMem_Free(memory);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(setup_doc,
             "setup(describe, error_of, message, column, free)\n--\n\n"
             "What the other functions need: a description of an array in Python, an exception of "
             "(kind, message, "
             "column), and the\naddresses of libfovea's functions of errors.");

static PyObject* setup(PyObject* module, PyObject* args) {
  (void)module;
  PyObject *describe_function, *error_of;
  unsigned long long message, column, free_function;
  if (!PyArg_ParseTuple(args, "OOKKK", &describe_function, &error_of, &message, &column,
                        &free_function)) {
    return NULL;
  }
  PyObject* version = Py_BuildValue("{s(ii)}", "max_version", 1, 3);
  PyObject* name = PyUnicode_InternFromString("__dlpack__");
  if (version == NULL || name == NULL) {
    Py_XDECREF(version);
    Py_XDECREF(name);
    return NULL;
  }
  Py_INCREF(describe_function);
  Py_INCREF(error_of);
  Py_XDECREF(shared.describe);
  Py_XDECREF(shared.error_of);
  Py_XDECREF(shared.newest_version);
  Py_XDECREF(shared.dlpack_name);
  shared.describe = describe_function;
  shared.error_of = error_of;
  shared.newest_version = version;
  shared.dlpack_name = name;
  shared.error_message = (const char* (*)(const fovea_error*))(uintptr_t)message;
  shared.error_column = (size_t(*)(const fovea_error*))(uintptr_t)column;
  shared.error_free = (void (*)(fovea_error*))(uintptr_t)free_function;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, setup_doc},
    {"invoke", (PyCFunction)(void (*)(void))invoke, METH_FASTCALL, invoke_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_fovea",
    "Calls of libfovea; see fovea/_calls.py.",
    -1,
    methods,
    NULL,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__fovea(void) { return PyModule_Create(&definition); }
