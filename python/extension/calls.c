#include "calls.h"

#include "arrays.h"

static struct {
  PyObject* error_of;
  const char* (*message)(const fovea_error*);
  size_t (*column)(const fovea_error*);
  void (*release)(fovea_error*);
} errors;

void set_up_calls(PyObject* error_of, uintptr_t message, uintptr_t column,
                  uintptr_t free_function) {
  keep(&errors.error_of, error_of);
  errors.message = (const char* (*)(const fovea_error*))message;
  errors.column = (size_t(*)(const fovea_error*))column;
  errors.release = (void (*)(fovea_error*))free_function;
}

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
  PyObject* exception = PyObject_CallFunction(errors.error_of, "isn", kind, errors.message(error),
                                              (Py_ssize_t)errors.column(error));
  errors.release(error);
  if (exception == NULL) return;
  PyErr_SetObject((PyObject*)Py_TYPE(exception), exception);
  Py_DECREF(exception);
}

int run(uintptr_t function, uintptr_t plan, const void* args) {
  fovea_error* error = NULL;
  int kind;
  Py_BEGIN_ALLOW_THREADS;
  kind = plan == 0 ? ((CallFunction)function)(args, &error)
                   : ((PlanFunction)function)((const void*)plan, args, &error);
  Py_END_ALLOW_THREADS;
  if (kind == FOVEA_OK) return 0;
  raise(error, kind);
  return -1;
}

PyObject* invoke(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  (void)module;
  if (count != 8 || !PyTuple_Check(args[6]) || !PyTuple_Check(args[7])) {
    PyErr_SetString(PyExc_TypeError, "invoke takes 8 arguments, the last two of them tuples");
    return NULL;
  }
  if (errors.error_of == NULL) {
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
