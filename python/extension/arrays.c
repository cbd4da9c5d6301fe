#include "arrays.h"

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

typedef void (*SetError)(void* context, const char* kind, const char* message);

typedef struct {
  ExchangeHeader header;
  /* beside a prototype without data; may be NULL, as may all that follow */
  int (*managed_tensor_allocator)(DLTensor* prototype, DLManagedTensorVersioned** out,
                                  void* context, SetError set_error);
  void* managed_tensor_from_py_object_no_sync;
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** py_object);
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out); /* borrows from it */
  int (*current_work_stream)(DLDeviceType device_type, int32_t device_id, void** stream);
} ExchangeApi;

/* ---- Types ---- */

static struct {
  PyObject* describe;
  PyObject* introduce;
  PyObject* dlpack_name;
  PyObject* newest_version; /* {"max_version": (1, 3)} as names and values of a call */
} shared;

/* What is known of an array by its type. */
typedef struct {
  PyTypeObject* type;
  const ExchangeApi*
      api; /* NULL: the type has none; else its arrays are read at the price of a function call */
  Maker maker;
  bool has_maker;
} KnownType;

/* The first that are met; strong references, so that no address comes again. */
enum { kNumKnownTypes = 8 };
static KnownType known_types[kNumKnownTypes];
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

static bool read_maker(PyTypeObject* type, Maker* maker) {
  if (shared.introduce == NULL) return false;
  PyObject* introduced = PyObject_CallFunctionObjArgs(shared.introduce, (PyObject*)type, NULL);
  PyObject *empty_like, *empty;
  int is_torch;
  const bool is_known = introduced != NULL && introduced != Py_None &&
                        PyArg_ParseTuple(introduced, "OOp", &empty_like, &empty, &is_torch);
  if (is_known) {
    Py_INCREF(empty_like);
    Py_INCREF(empty);
    *maker = (Maker){empty_like, empty, is_torch != 0};
  }
  Py_XDECREF(introduced);
  PyErr_Clear();
  return is_known;
}

/* NULL where there are too many: such an array is read as one of a type without a table. */
static const KnownType* known_type_of(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  for (int i = 0; i < num_known_types; ++i) {
    if (known_types[i].type == type) return &known_types[i];
  }
  KnownType met = {.type = type, .api = read_exchange_api(type)};
  met.has_maker = read_maker(type, &met.maker);
  if (num_known_types == kNumKnownTypes) {
    Py_XDECREF(met.maker.empty_like);
    Py_XDECREF(met.maker.empty);
    return NULL;
  }
  Py_INCREF(type);
  known_types[num_known_types] = met;
  return &known_types[num_known_types++];
}

const Maker* maker_of(PyObject* array) {
  const KnownType* known = known_type_of(array);
  return known != NULL && known->has_maker ? &known->maker : NULL;
}

int current_stream(PyObject* array, DLDevice device, void** stream) {
  const KnownType* known = known_type_of(array);
  if (known == NULL || known->api == NULL || known->api->current_work_stream == NULL) return -1;
  if (known->api->current_work_stream(device.device_type, device.device_id, stream) == 0) return 0;
  PyErr_Clear();
  return -1;
}

/* ---- Reading ---- */

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

int read_array(PyObject* object, Slot* slot) {
  const KnownType* known = known_type_of(object);
  if (known != NULL && known->api != NULL) {
    DLTensor borrowed;
    if (known->api->dltensor_from_py_object_no_sync(object, &borrowed) == 0)
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

/* Strides of a row-major tensor. */
static void write_strides(const DLTensor* tensor, int64_t* strides) {
  int64_t step = 1;
  for (int32_t axis = tensor->ndim - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= tensor->shape[axis];
  }
}

bool is_row_major(const DLTensor* tensor) {
  if (tensor->strides == NULL) return true;
  int64_t step = 1;
  for (int32_t axis = tensor->ndim - 1; axis >= 0; --axis) {
    if (tensor->shape[axis] != 1 && tensor->strides[axis] != step) return false;
    step *= tensor->shape[axis];
  }
  return true;
}

void swap_axes_1_and_2(Slot* slot) {
  DLTensor* tensor = &slot->tensor;
  if (tensor->ndim != 4) return; /* refused by the library, which names the rank */
  if (tensor->strides == NULL) {
    write_strides(tensor, slot->strides);
    tensor->strides = slot->strides;
  }
  const int64_t extent = slot->shape[1], stride = slot->strides[1];
  slot->shape[1] = slot->shape[2], slot->strides[1] = slot->strides[2];
  slot->shape[2] = extent, slot->strides[2] = stride;
}

/* ---- Making ---- */

PyObject* new_array(const Maker* maker, PyObject* like, const int64_t* shape, int32_t rank,
                    PyObject* dtype) {
  PyObject* extents = PyTuple_New(rank);
  if (extents == NULL) return NULL;
  for (int32_t axis = 0; axis < rank; ++axis) {
    PyObject* extent = PyLong_FromLongLong(shape[axis]);
    if (extent == NULL || PyTuple_SetItem(extents, axis, extent) != 0) { /* takes the reference */
      Py_DECREF(extents);
      return NULL;
    }
  }
  PyObject* made = PyObject_CallFunctionObjArgs(maker->empty, like, extents, dtype, NULL);
  Py_DECREF(extents);
  return made;
}

static void ignore_error(void* context, const char* kind, const char* message) {
  (void)context, (void)kind, (void)message;
}

PyObject* new_scratch(PyObject* like, DLTensor prototype) {
  const KnownType* known = known_type_of(like);
  const ExchangeApi* api = known == NULL ? NULL : known->api;
  if (api == NULL || api->managed_tensor_allocator == NULL ||
      api->managed_tensor_to_py_object_no_sync == NULL) {
    return NULL;
  }
  DLManagedTensorVersioned* managed = NULL;
  void* made = NULL;
  if (api->managed_tensor_allocator(&prototype, &managed, NULL, ignore_error) != 0 ||
      api->managed_tensor_to_py_object_no_sync(managed, &made) != 0) {
    PyErr_Clear();
    return NULL;
  }
  return made;
}

void set_up_making(PyObject* introduce) { keep(&shared.introduce, introduce); }

int set_up_reading(PyObject* describe_function) {
  PyObject* version = Py_BuildValue("{s(ii)}", "max_version", 1, 3);
  PyObject* name = PyUnicode_InternFromString("__dlpack__");
  const bool is_complete = version != NULL && name != NULL;
  if (is_complete) {
    keep(&shared.describe, describe_function);
    keep(&shared.newest_version, version);
    keep(&shared.dlpack_name, name);
  }
  Py_XDECREF(version);
  Py_XDECREF(name);
  return is_complete ? 0 : -1;
}
