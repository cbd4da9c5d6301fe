/* The C ABI, plain C11: the entry point of every language but C++. Names and meanings are those of
 * attention.hpp; read docs/guides/c_abi.md for a tour and examples/attention.c for a program.
 *
 * Rules
 *
 * - Structs start with struct_size and version, which FOVEA_STRUCT(type) fills. Fields are only ever added at the end,
 *   and all-zero means default, so `{FOVEA_STRUCT(fovea_attention_forward_args), .q = &q, ...}` stays right. A caller
 *   built against an older header passes a smaller size: what it does not know takes the default. A caller built
 *   against a newer header is refused only if it sets a field that this library does not know. Fields named reserved_
 *   fill what would be padding: nobody reads them, and no later header gives them a meaning.
 * - Errors: functions return 0 or a fovea_kind. Where `error` is not NULL, *error becomes NULL or an object that the
 *   caller frees with fovea_error_free. Nothing is thrown or aborted, nor printed unless the environment has
 *   FOVEA_VERBOSE=1.
 * - Tensors are DLTensor: borrowed for the call, last dimension contiguous is fast, strides NULL means row-major,
 *   lanes 1. Booleans are 0 or 1.
 * - Threads: every function may be called from many threads at once; a plan and a runtime may be shared.
 */
#ifndef FOVEA_FOVEA_H_
#define FOVEA_FOVEA_H_

#include <stddef.h>
#include <stdint.h>

#include "fovea/version.h"

#if defined(_WIN32)
#define FOVEA_API __declspec(dllexport)
#else
#define FOVEA_API __attribute__((visibility("default")))
#endif

/* DLPack's tensor, layout as in its ABI version 1. A program that also needs <dlpack/dlpack.h>
 * includes it first. */
#ifndef DLPACK_DLPACK_H_
#ifdef __cplusplus
extern "C" {
typedef enum : int32_t {
#else
typedef enum {
#endif
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,
  kDLROCM = 10,
  kDLROCMHost = 11,
} DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef enum {
  kDLInt = 0U,
  kDLUInt = 1U,
  kDLFloat = 2U,
  kDLBfloat = 4U,
  kDLBool = 6U,
  kDLFloat8_e4m3fn = 10U,
} DLDataTypeCode;

typedef struct {
  uint8_t code; /* DLDataTypeCode */
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: row-major */
  uint64_t byte_offset;
} DLTensor;
#ifdef __cplusplus
}
#endif
#endif /* DLPACK_DLPACK_H_ */

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a field changes its meaning; adding fields does not. */
#define FOVEA_ABI_VERSION 1u

/* Fills the first two members: fovea_plan_options options = {FOVEA_STRUCT(fovea_plan_options)}; */
#define FOVEA_STRUCT(type) .struct_size = sizeof(type), .version = FOVEA_ABI_VERSION

/* ---- Errors ---- */

typedef enum fovea_kind {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1, /* the caller's values are wrong: argument, got, expected, hint */
  FOVEA_UNSUPPORTED = 2,   /* a right problem that nothing here can run: every candidate's reason */
  FOVEA_COMPILE_ERROR = 3, /* a kernel did not compile */
  FOVEA_DEVICE_ERROR = 4,  /* a driver call failed */
  FOVEA_INTERNAL = 5,      /* our own mistake, or no memory */
} fovea_kind;

typedef struct fovea_error fovea_error;

/* A fovea_kind; FOVEA_OK for NULL. */
FOVEA_API int fovea_error_kind(const fovea_error* error);
/* "" for NULL; lives as long as the error. */
FOVEA_API const char* fovea_error_message(const fovea_error* error);
/* Where the text of a formula was refused: the 1-based column, in bytes, of the offending token; 0 for every other
 * error. */
FOVEA_API size_t fovea_error_column(const fovea_error* error);
FOVEA_API void fovea_error_free(fovea_error* error); /* NULL is fine */

/* Frees a text that Fovea returned; NULL is fine. */
FOVEA_API void fovea_string_free(char* text);

/* Of the library that runs: "0.1.0", and the FOVEA_ABI_VERSION that it was built with. FOVEA_VERSION is that of this
 * header. */
FOVEA_API const char* fovea_version(void);
FOVEA_API uint32_t fovea_abi_version(void);

/* ---- Programs ---- */

/* What a program text may read by name. These two structs never grow, and their padding never gets a meaning. */
typedef struct fovea_named_tensor {
  const char* name;
  /* f32, f16, bf16, bool, u8, i8, i32 or i64; of rank 0: `name` alone reads it */
  const DLTensor* tensor;
} fovea_named_tensor;

typedef enum fovea_scalar_type { FOVEA_SCALAR_INT = 0, FOVEA_SCALAR_FLOAT = 1 } fovea_scalar_type;

typedef struct fovea_named_scalar {
  const char* name;
  int32_t type; /* fovea_scalar_type */
  double value; /* a whole number that fits 32 bits where type is FOVEA_SCALAR_INT */
} fovea_named_scalar;

typedef enum fovea_mod { FOVEA_SCORE_MOD = 0, FOVEA_MASK_MOD = 1 } fovea_mod;

/* What a program reads by name, before there is any: these two never grow either, and their padding never gets a
 * meaning. */
typedef struct fovea_tensor_slot {
  const char* name;
  DLDataType dtype; /* f32, f16, bf16, bool, u8, i8, i32 or i64; lanes 1 */
  int32_t rank;     /* 0: one element, read where the call runs; to 6 on GPUs, to 8 on CPUs */
} fovea_tensor_slot;

typedef struct fovea_scalar_slot {
  const char* name;
  int32_t type; /* fovea_scalar_type */
} fovea_scalar_slot;

typedef struct fovea_program_args {
  size_t struct_size;
  uint32_t version;
  int32_t kind; /* fovea_mod */
  /* "score + slopes[q_head] * (kv_idx - q_idx)"; nests at most 200 deep and has at most 10,000 parts: names, numbers,
   * operators */
  const char* text;
  const fovea_tensor_slot* tensors; /* what it may read, in the order in which calls give it */
  size_t num_tensors;
  const fovea_scalar_slot* scalars;
  size_t num_scalars;
} fovea_program_args;

/* A score or mask program, parsed and verified once, for calls that give it their tensors and numbers by position.
 * Immutable: any number of calls and threads may use one. It is alive until the calls that were given it have
 * returned; plans keep what they need of it. */
typedef struct fovea_program fovea_program;

/* A text that is refused gives an error with a column. */
FOVEA_API int fovea_program_create(const fovea_program_args* args, fovea_program** program,
                                   fovea_error** error);
FOVEA_API void fovea_program_destroy(fovea_program* program); /* NULL is fine */

/* The formula as Fovea writes it, at most 1 MiB; equal formulas have equal texts. fovea_string_free frees *text. */
FOVEA_API int fovea_program_text(const fovea_program* program, char** text, fovea_error** error);
/* A fovea_mod; -1 for NULL. */
FOVEA_API int fovea_program_kind(const fovea_program* program);
/* What it was made with, in that order; a name is NULL beyond the last one, and lives as long as the program. What the
 * formula does not read counts too: its tensor may be NULL in calls. */
FOVEA_API size_t fovea_program_num_tensors(const fovea_program* program);
FOVEA_API const char* fovea_program_tensor_name(const fovea_program* program, size_t index);
FOVEA_API size_t fovea_program_num_scalars(const fovea_program* program);
FOVEA_API const char* fovea_program_scalar_name(const fovea_program* program, size_t index);

/* ---- Threads ---- */

/* A persistent pool of threads and the plans that were made: what lives longer than a call. */
typedef struct fovea_runtime fovea_runtime;

/* num_threads 0: as many as the affinity mask, the cgroup quota and FOVEA_NUM_THREADS allow. */
FOVEA_API int fovea_runtime_create(int32_t num_threads, fovea_runtime** runtime,
                                   fovea_error** error);
FOVEA_API void fovea_runtime_destroy(fovea_runtime* runtime); /* NULL is fine */

/* Where calls of a runtime take the workspace that they were not given: see Allocator in runtime.hpp. Both are called
 * once for a call, from any thread; on a kDLCUDA device the work is enqueued on stream and not done when deallocate
 * comes. */
typedef struct fovea_allocator {
  size_t struct_size;
  uint32_t version;
  int32_t device_type; /* kDLCPU, kDLCUDA or kDLROCM: for calls on such devices; 0: for all */
  void* context;
  /* bytes > 0, alignment a power of two; NULL: there is no memory, and the call is refused. */
  void* (*allocate)(void* context, size_t bytes, size_t alignment, DLDevice device, void* stream);
  void (*deallocate)(void* context, void* data, size_t bytes, DLDevice device, void* stream);
} fovea_allocator;

/* For calls that begin after it. runtime NULL: that of calls without one. allocator NULL, or without both functions,
 * restores the default: the heap, on a GPU the driver's pool. */
FOVEA_API int fovea_runtime_set_allocator(fovea_runtime* runtime, const fovea_allocator* allocator,
                                          fovea_error** error);

/* Calls itself once per index: task(task_context, worker, index), worker unique among concurrent
 * calls, < concurrency. */
typedef void (*fovea_task)(void* task_context, int32_t worker, int64_t index);

/* The host's own threads. run() calls the task once for each index in [0, count), any order, any
 * thread, and returns when all are done; it does not throw. Results do not depend on it. */
typedef struct fovea_executor {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  void* context;
  int32_t (*concurrency)(void* context);
  void (*run)(void* context, int64_t count, fovea_task task, void* task_context);
} fovea_executor;

/* ---- Forward ---- */

typedef enum fovea_align { FOVEA_BOTTOM_RIGHT = 0, FOVEA_TOP_LEFT = 1 } fovea_align;

typedef enum fovea_compute_dtype {
  FOVEA_COMPUTE_AUTOMATIC = 0,
  FOVEA_COMPUTE_F32 = 1,
  FOVEA_COMPUTE_BF16 = 2,
} fovea_compute_dtype;

typedef enum fovea_cpu_target {
  FOVEA_CPU_AUTOMATIC = 0,
  FOVEA_CPU_SCALAR = 1,
  FOVEA_CPU_AVX2 = 2,
  FOVEA_CPU_AVX512 = 3,
  FOVEA_CPU_AVX512_BF16 = 4,
  FOVEA_CPU_AMX_BF16 = 5,
  FOVEA_CPU_NEON = 6,
  FOVEA_CPU_AVX512_VNNI = 7, /* recipes alone, as the next */
  FOVEA_CPU_AVX_VNNI = 8,
} fovea_cpu_target;

/* Lies inside a struct, so it never grows; its padding never gets a meaning. */
typedef struct fovea_dropout {
  float p; /* in [0, 1]; kept keys are scaled by 1 / (1 - p) */
  uint64_t seed;
  uint64_t offset;
} fovea_dropout;

/* Everything that a forward call takes; only q, k, v and out are needed.
 *
 * Score features act in the order scale, softcap, bias, alibi, score_mod. A key is visible where
 * mask, window, causal, segments and mask_mod all say so. */
typedef struct fovea_attention_forward_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;

  /* Shapes of packed sequences have total_q or total_kv in place of batch and seqlen. */
  const DLTensor* q; /* [batch, seqlen_q, num_heads_q, head_dim_qk] f32, f16, bf16; or see quant */
  const DLTensor* k; /* [batch, seqlen_kv, num_heads_kv, head_dim_qk] dtype of q */
  const DLTensor* v; /* [batch, seqlen_kv, num_heads_kv, head_dim_v]  dtype of q */
  const DLTensor* out;     /* [batch, seqlen_q,  num_heads_q,  head_dim_v]  f32, f16 or bf16 */
  const DLTensor* lse;     /* [batch, num_heads_q, seqlen_q] f32; packed: [num_heads_q, total_q] */
  const DLTensor* row_max; /* shape of lse, f32: the row's largest score, -inf where it sees none */

  int32_t has_softmax_scale; /* 0: 1 / sqrt(head_dim_qk) */
  float softmax_scale;
  float softcap; /* 0: none; c: c * tanh(score / c) */
  uint32_t reserved_1;
  const DLTensor* bias;  /* [q, kv], [heads, q, kv] or [batch, heads, q, kv]; 1 broadcasts,
                            q and kv may be more */
  const DLTensor* alibi; /* slopes [num_heads_q] or [batch, num_heads_q] */
  const char* score_mod; /* "score + slopes[q_head] * (kv_idx - q_idx)"; NULL: none */

  int32_t causal;          /* boolean */
  int32_t align;           /* fovea_align of causal, window and alibi when seqlen_q != seqlen_kv */
  int32_t has_window_left; /* boolean; 0: unbounded */
  int32_t has_window_right;
  int64_t window_left; /* inclusive, >= 0 */
  int64_t window_right;
  const DLTensor* mask;       /* bool or u8, true: visible; shapes as bias */
  const DLTensor* segments_q; /* [batch, seqlen] i32 or i64, -1: padding; one serves both. Packed:
                                 [total_q] and [total_kv], an id for each row */
  const DLTensor* segments_kv;
  const char* mask_mod; /* "q_idx >= kv_idx && kv_idx % 2 == 0"; NULL: none */

  const fovea_named_tensor* tensors; /* what score_mod and mask_mod read */
  size_t num_tensors;
  const fovea_named_scalar* scalars;
  size_t num_scalars;

  const DLTensor* sinks; /* [num_heads_q] f32: a logit that joins each row's denominator */
  fovea_dropout dropout;
  const DLTensor* cu_seqlens_q; /* [num_sequences + 1] i32 or i64: makes q, out, lse packed */
  const DLTensor* cu_seqlens_kv;

  int32_t compute_dtype;         /* fovea_compute_dtype */
  int32_t cpu_target;            /* fovea_cpu_target */
  int32_t allows_nondeterminism; /* boolean */
  uint32_t reserved_2;

  void* workspace; /* optional, but for fovea_plan_run where fovea_plan_workspace_bytes > 0 */
  size_t workspace_bytes;
  fovea_runtime* runtime;         /* NULL: the process's own */
  const fovea_executor* executor; /* NULL: the runtime's threads; wins over runtime */
  void* stream; /* tensors on a kDLCUDA device: the CUstream that the call is enqueued on; NULL: the
                   default stream */

  /* Programs made once, in place of score_mod and mask_mod; a text beside a handle of its kind is refused. Each has
   * names of its own, and is given all that it was made with, by position. */
  const fovea_program* score_program;
  const DLTensor* const* score_tensors; /* [num_score_tensors] */
  size_t num_score_tensors;
  const double* score_scalars; /* whole, of 32 bits, where the type is FOVEA_SCALAR_INT */
  size_t num_score_scalars;
  const fovea_program* mask_program;
  const DLTensor* const* mask_tensors;
  size_t num_mask_tensors;
  const double* mask_scalars;
  size_t num_mask_scalars;

  int32_t
      sm_margin; /* kDLCUDA: SMs left free for what runs beside the call; see Problem in problem.hpp */
  uint32_t reserved_3;

  /* One i64 each, of rank 0 or [1], optional, both or neither: added to dropout.seed and dropout.offset when the call
   * runs, where it runs. A captured graph draws anew when they have changed. */
  const DLTensor* dropout_seed;
  const DLTensor* dropout_offset;

  /* What q, k, probabilities and v are rounded to: "accurate", "int8,hadamard=yes"; see quant.hpp; forward and
   * gradients. Forward: "accuracy=0.02": the plan chooses a recipe by the error of out that is
   * allowed, or none. NULL: nothing. The scales [batch, num_heads_kv] f32 (packed: [num_sequences, num_heads_kv])
   * where the recipe has scales=given, as "fp8_static" has; beside it q, k and v may be kDLFloat8_e4m3fn: codes of
   * numbers that are these times their scales. */
  const char* quant;
  const DLTensor* q_scale;
  const DLTensor* k_scale;
  const DLTensor* v_scale;

  /* [batch + num_heads_q + seqlen_q + seqlen_kv] i32, contiguous, optional; not for packed sequences. Where batch
   * entries, query heads, queries and keys of this call, one list behind the other, stand in the whole that dropout
   * draws for; see AttentionForward in attention.hpp. */
  const DLTensor* dropout_places;
} fovea_attention_forward_args;

/* Exact attention: out = softmax(mask(score(scale * q kT))) v, lse = log sum exp(score). See
 * attention_forward in attention.hpp for accuracy, determinism and rows that see no key. Nothing is
 * written unless the arguments are valid. */
FOVEA_API int fovea_attention_forward(const fovea_attention_forward_args* args,
                                      fovea_error** error);

/* ---- Plan once, run often ---- */

/* A validated problem, its kernel and its exact workspace; immutable but for the kernel of FOVEA_COMPILE_STAGED. */
typedef struct fovea_plan fovea_plan;

/* When a plan on a kDLCUDA device whose kernels have to be compiled is ready: when they are, or in stages: as soon as a
 * kernel is that compiles in a fraction of the time, which runs the plan's calls until they are. The two round
 * differently. AUTOMATIC: the variable FOVEA_COMPILE, else complete. See CompileMode in problem.hpp. */
typedef enum fovea_compile_mode {
  FOVEA_COMPILE_AUTOMATIC = 0,
  FOVEA_COMPILE_COMPLETE = 1,
  FOVEA_COMPILE_STAGED = 2,
} fovea_compile_mode;

typedef struct fovea_plan_options {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  int64_t max_seqlen_q; /* 0: exactly the lengths given; n: the plan serves every length up to n */
  int64_t max_seqlen_kv;
  int32_t num_threads; /* workers the workspace is for; 0: those of args' executor or runtime */
  uint32_t reserved_1;
  int32_t compile_mode; /* fovea_compile_mode */
  uint32_t reserved_2;
} fovea_plan_options;

typedef enum fovea_format { FOVEA_TEXT = 0, FOVEA_JSON = 1 } fovea_format;

/* Tensors need no data here (a mask that reads tensors is then mapped at the run). options may be
 * NULL. */
FOVEA_API int fovea_plan_create(const fovea_attention_forward_args* args,
                                const fovea_plan_options* options, fovea_plan** plan,
                                fovea_error** error);
FOVEA_API void fovea_plan_destroy(fovea_plan* plan); /* NULL is fine */
FOVEA_API size_t fovea_plan_workspace_bytes(const fovea_plan* plan);

/* args fit the plan: same dtypes, heads, head dims and programs, lengths equal or within its
 * bounds. */
FOVEA_API int fovea_plan_run(const fovea_plan* plan, const fovea_attention_forward_args* args,
                             fovea_error** error);

/* Does every run from now on use the same kernels? *is_final is 1 for plans of every operation but those that were
 * made with FOVEA_COMPILE_STAGED, while their kernels are compiled. Reports why they cannot be had, as runs do then. */
FOVEA_API int fovea_plan_is_final(const fovea_plan* plan, int32_t* is_final, fovea_error** error);
/* Returns when it is: before times are taken, bits compared or runs captured by a graph. */
FOVEA_API int fovea_plan_wait(const fovea_plan* plan, fovea_error** error);

/* What was decided and why: a page, or one JSON object. *text is freed by fovea_string_free. Tensors were lent to
 * fovea_plan_create for the call: tiles of a mask that reads some are not counted here. */
FOVEA_API int fovea_plan_explain(const fovea_plan* plan, int32_t format, char** text,
                                 fovea_error** error);

/* The same without a plan; a problem that nothing can run is explained instead of refused, and tiles are counted where
 * the mask's tensors have data. */
FOVEA_API int fovea_explain(const fovea_attention_forward_args* args,
                            const fovea_plan_options* options, int32_t format, char** text,
                            fovea_error** error);

/* ---- Gradients, tangents, states ---- */

/* Gradients are computed on kDLCPU and on kDLCUDA devices, dcaptured too. Tangents and gradients of gradients are
 * computed on kDLCPU: tensors on a kDLCUDA device are refused with FOVEA_UNSUPPORTED, before anything is read or
 * written. */

/* Gradients of a forward call. What is NULL among dq, dk, dv, dsinks and dcaptured is not computed. */
typedef struct fovea_attention_backward_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const fovea_attention_forward_args* forward; /* out and lse as it wrote them: inputs here; its
                                                  runtime, executor and stream are this call's */
  const DLTensor* dout;                        /* as out; f32, f16 or bf16 */
  const DLTensor* dlse;                        /* as lse, f32; optional */
  const DLTensor* dq;                          /* as q, written; f32, f16 or bf16 */
  const DLTensor* dk;                          /* as k */
  const DLTensor* dv;                          /* as v */
  const DLTensor* dsinks;                      /* [num_heads_q] f32 */
  const fovea_named_tensor* dcaptured; /* written: "bias", "alibi", or a name that score_mod or
                                          score_program reads: a tensor's (as that tensor) or a
                                          scalar's (one element) */
  size_t num_dcaptured;
  void* workspace; /* optional */
  size_t workspace_bytes;
} fovea_attention_backward_args;

/* See attention_backward in backward.hpp. Nothing is written unless the arguments are valid. */
FOVEA_API int fovea_attention_backward(const fovea_attention_backward_args* args,
                                       fovea_error** error);
/* What would run and why; as fovea_explain. */
FOVEA_API int fovea_explain_backward(const fovea_attention_backward_args* args, int32_t format,
                                     char** text, fovea_error** error);

/* Gradients of <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddsinks, dsinks> + the same of what is captured, where dq and the
 * others are what fovea_attention_backward computes. What is NULL among dd... is 0, among grad_... not computed. */
typedef struct fovea_attention_double_backward_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const fovea_attention_forward_args* forward; /* out and lse are not read, lse is optional */
  const DLTensor* dout;                        /* as out; f32, f16 or bf16 */
  const DLTensor* dlse;                        /* as lse, f32; optional */
  const DLTensor* ddq;                         /* as q; f32, f16 or bf16 */
  const DLTensor* ddk;                         /* as k */
  const DLTensor* ddv;                         /* as v */
  const DLTensor* ddsinks;                     /* [num_heads_q] f32 */
  const fovea_named_tensor* ddcaptured;        /* names as in fovea_attention_backward_args */
  size_t num_ddcaptured;
  const DLTensor* grad_dout; /* as dout, written; f32, f16 or bf16 */
  const DLTensor* grad_dlse; /* as lse, f32 */
  const DLTensor* grad_q;
  const DLTensor* grad_k;
  const DLTensor* grad_v;
  const DLTensor* grad_sinks;              /* [num_heads_q] f32 */
  const fovea_named_tensor* grad_captured; /* written; names as in ddcaptured */
  size_t num_grad_captured;
} fovea_attention_double_backward_args;

/* See attention_double_backward in backward.hpp: the plain formula in fp64, on the cpu. Nothing is written unless the
 * arguments are valid. */
FOVEA_API int fovea_attention_double_backward(const fovea_attention_double_backward_args* args,
                                              fovea_error** error);
/* What would run and why; as fovea_explain. */
FOVEA_API int fovea_explain_double_backward(const fovea_attention_double_backward_args* args,
                                            int32_t format, char** text, fovea_error** error);

/* A forward call and its derivative along one direction. A tangent that is NULL is 0. */
typedef struct fovea_attention_jvp_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const fovea_attention_forward_args* forward; /* out and lse are written too */
  const DLTensor* q_tangent;                   /* as q; f32, f16 or bf16 */
  const DLTensor* k_tangent;
  const DLTensor* v_tangent;
  const DLTensor* sinks_tangent;
  const fovea_named_tensor* captured_tangents; /* names as in fovea_attention_backward_args */
  size_t num_captured_tangents;
  const DLTensor* out_tangent; /* as out, written */
  const DLTensor* lse_tangent; /* as lse, written; optional */
  void* workspace;             /* optional, but for fovea_plan_run_jvp; forward's is not used */
  size_t workspace_bytes;
} fovea_attention_jvp_args;

/* See attention_jvp in jvp.hpp. Nothing is written unless the arguments are valid. */
FOVEA_API int fovea_attention_jvp(const fovea_attention_jvp_args* args, fovea_error** error);
/* What would run and why; as fovea_explain. */
FOVEA_API int fovea_explain_jvp(const fovea_attention_jvp_args* args, int32_t format, char** text,
                                fovea_error** error);

/* Partial results of attention over parts of the keys, joined in the order given. */
typedef struct fovea_merge_states_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const DLTensor* const* outs; /* [num_states] */
  const DLTensor* const* lses; /* [num_states] f32 */
  size_t num_states;
  const DLTensor* out; /* written; may be outs[0] */
  const DLTensor* lse; /* written, optional; may be lses[0] */
  fovea_runtime* runtime;
  const fovea_executor* executor;
  /* tensors on a kDLCUDA device: the CUstream of the call; NULL: the default stream */
  void* stream;
  void* workspace; /* optional, but for fovea_plan_run_merge_states on the cpu */
  size_t workspace_bytes;
} fovea_merge_states_args;

/* See merge_states in state.hpp. */
FOVEA_API int fovea_merge_states(const fovea_merge_states_args* args, fovea_error** error);
/* What would run; tensors need no data. */
FOVEA_API int fovea_explain_merge_states(const fovea_merge_states_args* args, int32_t format,
                                         char** text, fovea_error** error);

/* ---- Rotary position embedding ---- */

/* Of rows by themselves; calls over a cache turn theirs. */
typedef struct fovea_rotary_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const DLTensor* x;   /* [batch, seqlen, num_heads, head_dim], packed [total, num_heads, head_dim];
                          f32, f16 or bf16 */
  const DLTensor* out; /* written; as x, of any of these dtypes; may be x itself */
  const DLTensor* cos; /* [max_positions, rotary_dim / 2] f32, f16 or bf16 */
  const DLTensor* sin;
  const DLTensor* positions;  /* [batch, seqlen], packed [total]; i32 or i64, optional */
  const DLTensor* offsets;    /* [batch] i32 or i64, optional: the position of each first row */
  const DLTensor* cu_seqlens; /* [batch + 1] i32 or i64: makes x and out packed */
  int32_t is_interleaved;     /* boolean; 1: pairs (2j, 2j + 1), 0: (j, j + rotary_dim / 2) */
  int32_t is_conjugate;       /* boolean; 1: turns back, as gradients do */
  fovea_runtime* runtime;
  const fovea_executor* executor;
  /* tensors on a kDLCUDA device: the CUstream of the call; NULL: the default stream */
  void* stream;
} fovea_rotary_args;

/* See rotary in rotary.hpp. */
FOVEA_API int fovea_rotary(const fovea_rotary_args* args, fovea_error** error);

/* ---- The KV cache ---- */

/* Attention over keys and values in a cache, after new ones are appended to it. */
typedef struct fovea_attention_decode_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const fovea_attention_forward_args* forward; /* k and v are the cache: [slots, capacity,
                                                  num_heads_kv, head_dim], or with a page_table
                                                  [num_pages, page_size, num_heads_kv, head_dim];
                                                  f32, f16 or bf16 each, or codes: i8 or
                                                  kDLFloat8_e4m3fn, with k_scale and v_scale; quant is applied to the
                                                  numbers of q's dtype that they are. No row_max, dropout,
                                                  cu_seqlens_kv, scales of quant. cu_seqlens_q makes q, out and lse
                                                  packed: each sequence has queries of its own */
  const DLTensor* seqlens;      /* [batch] i32 or i64: rows in use before this call */
  const DLTensor* page_table;   /* [batch, max_pages] i32 or i64; NULL: contiguous */
  const DLTensor* batch_idx;    /* [batch]: the slot of each sequence; contiguous alone, optional */
  const DLTensor* left_padding; /* [batch]: rows at the start that are no keys; optional */
  const DLTensor* append_k;     /* [batch, seqlen_new, num_heads_kv, head_dim_qk], or packed
                                   [total_new, num_heads_kv, head_dim_qk]; optional: written into
                                   the cache behind seqlens */
  const DLTensor* append_v;     /* as append_k with head_dim_v; NULL where v is the first columns of
                                   k in its memory, which are written with append_k */
  const DLTensor* rotary_cos;   /* [max_positions, rotary_dim / 2] f32, f16 or bf16; optional: turns
                                   q and append_k */
  const DLTensor* rotary_sin;
  const DLTensor* rotary_positions; /* [batch, seqlen_q], packed [total_q]; optional: the place in
                                       the sequence */
  int32_t is_interleaved;           /* boolean; 1: pairs (2j, 2j + 1), 0: (j, j + rotary_dim / 2) */
  int32_t sees_all_keys;            /* boolean; 0: causal where forward poses no mask at all */
  const DLTensor* page_indptr; /* [batch + 1] i32 or i64, with page_indices, in place of page_table:
                                   page n of sequence b is page_indices[page_indptr[b] + n] */
  const DLTensor* page_indices;      /* [num_indices] i32 or i64 */
  const DLTensor* append_cu_seqlens; /* [batch + 1] i32 or i64, of packed append_k and append_v;
                                        NULL: forward->cu_seqlens_q */
  /* with cu_seqlens_q: queries of the longest sequence, or more; 0: total_q */
  int64_t max_seqlen_q;
  /* The first keys of every sequence, shared: attended to once, where the first sequence of a group has them; at most
   * the keys before a sequence's first query. 0: none. See SharedPrefix in kv_cache.hpp. */
  int64_t shared_prefix;
  /* [num_groups + 1] i32 or i64, optional: sequences from one to the next are a group; NULL: all are one */
  const DLTensor* shared_cu_sequences;
  /* [batch, seqlen_q], packed [total_q]; optional: positions of queries, where rotary_positions are those of append_k
   * alone */
  const DLTensor* rotary_positions_q;
  /* Of codes, f32: [slots, capacity, num_heads_kv], paged [num_pages, page_size, num_heads_kv], one for each row and
   * head, written where tokens are appended; of e4m3 alone also one that is given, [batch, num_heads_kv] or [1] */
  const DLTensor* k_scale;
  const DLTensor* v_scale;
} fovea_attention_decode_args;

/* See attention_decode in kv_cache.hpp; tensors on a kDLCUDA device are taken there, on
 * forward->stream. Nothing is written unless the arguments are valid. */
FOVEA_API int fovea_attention_decode(const fovea_attention_decode_args* args, fovea_error** error);
/* What it does with append_k and append_v alone: of forward, k, v (the cache), runtime, executor and stream are
 * read; packed tokens want append_cu_seqlens. */
FOVEA_API int fovea_append_to_cache(const fovea_attention_decode_args* args, fovea_error** error);
/* The workspace of such calls with up to max_seqlen_kv keys a sequence. */
FOVEA_API int fovea_decode_workspace_bytes(const fovea_attention_decode_args* args,
                                           int64_t max_seqlen_kv, size_t* bytes,
                                           fovea_error** error);

/* ---- Plans of the other operations ---- */

/* A fovea_plan of any operation is destroyed, explained and asked for its workspace by the functions above; each is run
 * by its own function, which refuses a plan of another operation by name. Tensors need no data where a plan is made; a
 * run takes tensors like those of the plan, in the places of now, and the workspace of its own args (decode, forward:
 * those of args->forward). */
FOVEA_API int fovea_plan_create_backward(const fovea_attention_backward_args* args,
                                         fovea_plan** plan, fovea_error** error);
FOVEA_API int fovea_plan_run_backward(const fovea_plan* plan,
                                      const fovea_attention_backward_args* args,
                                      fovea_error** error);
FOVEA_API int fovea_plan_create_jvp(const fovea_attention_jvp_args* args, fovea_plan** plan,
                                    fovea_error** error);
FOVEA_API int fovea_plan_run_jvp(const fovea_plan* plan, const fovea_attention_jvp_args* args,
                                 fovea_error** error);
/* For sequences of up to max_seqlen_kv keys, those of append_k among them; of them up to shared_prefix shared. */
FOVEA_API int fovea_plan_create_decode(const fovea_attention_decode_args* args,
                                       int64_t max_seqlen_kv, fovea_plan** plan,
                                       fovea_error** error);
FOVEA_API int fovea_plan_run_decode(const fovea_plan* plan, const fovea_attention_decode_args* args,
                                    fovea_error** error);
FOVEA_API int fovea_plan_create_append(const fovea_attention_decode_args* args, fovea_plan** plan,
                                       fovea_error** error);
FOVEA_API int fovea_plan_run_append(const fovea_plan* plan, const fovea_attention_decode_args* args,
                                    fovea_error** error);
FOVEA_API int fovea_plan_create_merge_states(const fovea_merge_states_args* args, fovea_plan** plan,
                                             fovea_error** error);
FOVEA_API int fovea_plan_run_merge_states(const fovea_plan* plan,
                                          const fovea_merge_states_args* args, fovea_error** error);

/* ---- What a mask leaves ---- */

/* Whose mask, and how its scores are cut into tiles. */
typedef struct fovea_block_map_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  /* q and k (shapes alone), cu_seqlens, and all that masks: mask, window, causal, segments, mask_mod with its tensors
   * and scalars, on the host. Nothing else is read; v and out may be NULL. */
  const fovea_attention_forward_args* forward;
  int64_t tile_q; /* queries of a tile; 0: 64 */
  int64_t tile_kv;
  int32_t has_sequence; /* boolean; 1: of this sequence alone, 0: of all */
  int32_t has_q_head;   /* boolean; 1: of this query head alone, 0: of all */
  int64_t sequence;
  int64_t q_head;
} fovea_block_map_args;

typedef enum fovea_tile_kind {
  FOVEA_TILE_EMPTY = 0, /* no key is visible: proven */
  FOVEA_TILE_PARTIAL = 1,
  FOVEA_TILE_FULL = 2, /* every key is: proven */
} fovea_tile_kind;

/* A fovea_tile_kind for each tile: kinds [sequences, heads, q_tiles, kv_tiles], row-major. shape[4] receives these
 * extents (of packed sequences the longest's; what lies behind the end of another is empty). kinds NULL: the shape
 * alone, nothing is mapped. num_kinds is what kinds has room for: refused where it is not the shape's product. */
FOVEA_API int fovea_mask_tiles(const fovea_block_map_args* args, uint8_t* kinds, size_t num_kinds,
                               int64_t* shape, fovea_error** error);

/* The same as runs of tiles that are not empty, O(runs) memory: runs [num_runs, 3] holds begin, end (of keys' tiles,
 * half-open) and kind, those of a row (sequence, head, q_tile) from row_begin[row] to row_begin[row + 1]. counts[2]
 * receives the number of rows and of runs. row_begin and runs may both be NULL: counts alone. Refused where
 * num_row_begin is not rows + 1, or num_runs not the number of runs. */
FOVEA_API int fovea_mask_runs(const fovea_block_map_args* args, int64_t* row_begin,
                              size_t num_row_begin, int32_t* runs, size_t num_runs, int64_t* counts,
                              fovea_error** error);

/* The mask element by element, from query q_begin and key kv_begin on: visible [sequences, heads, rows, columns] bool
 * or u8, written; behind a sequence's end 0. See materialize_mask in block_map.hpp. */
FOVEA_API int fovea_mask_elements(const fovea_block_map_args* args, int64_t q_begin,
                                  int64_t kv_begin, const DLTensor* visible, fovea_error** error);

/* A picture in text of the first of its sequences and heads, of at most so many characters (0: 96 x 48); freed by
 * fovea_string_free. */
FOVEA_API int fovea_mask_print(const fovea_block_map_args* args, int32_t max_width,
                               int32_t max_height, char** text, fovea_error** error);

/* The same in pixels, 8-bit RGB, row-major: size[2] receives height and width, each at most max_size (0: 1024). rgb
 * NULL: the size alone. Refused where num_bytes is not 3 * height * width. */
FOVEA_API int fovea_mask_draw(const fovea_block_map_args* args, int32_t max_size, uint8_t* rgb,
                              size_t num_bytes, int32_t* size, fovea_error** error);

/* ---- Visible tiles as lists ---- */

/* Row r of the table sees tiles indices[indptr[r]] to indices[indptr[r + 1] - 1] (BSR). On the host. */
typedef struct fovea_tile_lists_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const DLTensor* indptr;  /* [rows + 1] i32 or i64, rows being those of the table in its order */
  const DLTensor* indices; /* [number of visible tiles] i32 or i64, rising in each row */
  const DLTensor* table;   /* [q_tiles, kv_tiles], heads and batch before; bool or u8, written */
} fovea_tile_lists_args;

/* Checks lists, and writes the table that a mask reads: "table[q_head, q_idx // 64, kv_idx // 64]". See tile_table in
 * mask.hpp. */
FOVEA_API int fovea_tile_table(const fovea_tile_lists_args* args, fovea_error** error);

/* ---- Context parallelism ---- */

typedef enum fovea_parallel_scheme { /* see ParallelScheme in parallel.hpp */
                                     FOVEA_ALL_GATHER = 0,
                                     FOVEA_HEAD_GROUP_ALL_GATHER = 1,
                                     FOVEA_RING = 2,
                                     FOVEA_ULYSSES = 3,
                                     FOVEA_HYBRID = 4,
                                     FOVEA_NEEDED_ONLY = 5,
} fovea_parallel_scheme;

/* A problem whose tokens go to several ranks. */
typedef struct fovea_shard_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  /* Shapes of q, k and v (NULL: as k), and all that masks, on the host; nothing else is read. */
  const fovea_attention_forward_args* forward;
  int32_t world_size;
  int32_t scheme;     /* a fovea_parallel_scheme */
  int64_t tile_q;     /* in which work and needs are counted; 0: 128 */
  int64_t tile_kv;    /* 0: 128 */
  int64_t chunk;      /* tokens that stay together; 0: chosen */
  int64_t head_parts; /* of FOVEA_HEAD_GROUP_ALL_GATHER; 0: chosen */
  int32_t head_ranks; /* of FOVEA_HYBRID; 0: chosen */
  uint32_t reserved_1;
} fovea_shard_args;

/* Who holds, computes and receives what. Immutable: any number of threads may read one. */
typedef struct fovea_shard_plan fovea_shard_plan;

typedef enum fovea_shard_ranges_kind {
  FOVEA_SHARD_TOKENS = 0, /* whose q, k, v and out the rank holds */
  FOVEA_SHARD_ROWS = 1,   /* whose outputs it computes */
  FOVEA_SHARD_NEEDED = 2, /* keys that these rows see, in whole tiles */
} fovea_shard_ranges_kind;

typedef enum fovea_transfer_tensor {
  FOVEA_TRANSFER_Q = 0,
  FOVEA_TRANSFER_KV = 1,
  FOVEA_TRANSFER_OUT = 2,
} fovea_transfer_tensor;

/* One tensor's part that a rank receives in a forward pass; ranges are half-open. */
typedef struct fovea_transfer {
  int32_t step; /* transfers of one step go at once */
  int32_t from;
  int64_t tensor; /* a fovea_transfer_tensor; keys and values travel together */
  int64_t token_begin;
  int64_t token_end;
  int64_t head_begin; /* kv heads for keys and values, query heads else */
  int64_t head_end;
} fovea_transfer;

/* A pure function of its arguments: every rank makes the same plan. See context_parallel_plan in parallel.hpp. */
FOVEA_API int fovea_shard_plan_create(const fovea_shard_args* args, fovea_shard_plan** plan,
                                      fovea_error** error);
FOVEA_API void fovea_shard_plan_destroy(fovea_shard_plan* plan);

/* Ranges of tokens [num_ranges, 2], begin and end, ascending. ranges NULL: their number alone, in *count. Refused where
 * num_ranges is not their number. */
FOVEA_API int fovea_shard_plan_ranges(const fovea_shard_plan* plan, int32_t rank, int32_t kind,
                                      int64_t* ranges, size_t num_ranges, size_t* count,
                                      fovea_error** error);
/* What a rank receives in a forward pass, by step; sizes as above. */
FOVEA_API int fovea_shard_plan_transfers(const fovea_shard_plan* plan, int32_t rank,
                                         fovea_transfer* transfers, size_t num_transfers,
                                         size_t* count, fovea_error** error);
/* The token at each place when ranks' tokens stand one after the other; num_tokens is the sequence's length. */
FOVEA_API int fovea_shard_plan_permutation(const fovea_shard_plan* plan, int64_t* tokens,
                                           size_t num_tokens, fovea_error** error);

/* A page, or a JSON object with each rank's tokens, heads, tiles and bytes; freed by fovea_string_free. */
FOVEA_API int fovea_shard_plan_explain(const fovea_shard_plan* plan, int32_t format, char** text,
                                       fovea_error** error);
/* Who computes what, as a picture in text of at most so many characters (0: 96 x 48). */
FOVEA_API int fovea_shard_plan_print_ranks(const fovea_shard_plan* plan, int64_t sequence,
                                           int64_t q_head, int32_t max_width, int32_t max_height,
                                           char** text, fovea_error** error);

/* Bytes, balance and predicted times of every scheme, as a table or a JSON list; args->scheme is not read. flops and
 * bytes: what a rank computes and receives in a second; 0: those of an H200 on NVLink. */
FOVEA_API int fovea_forecast_context_parallel(const fovea_shard_args* args, double flops,
                                              double bytes, int32_t format, char** text,
                                              fovea_error** error);

/* ---- Context parallelism ---- */

/* Bytes for a rank, or from it. */
typedef struct fovea_outgoing_message {
  const void* data;
  size_t bytes;
  int64_t to;
} fovea_outgoing_message;
typedef struct fovea_incoming_message {
  void* data;
  size_t bytes;
  int64_t from;
} fovea_incoming_message;

/* Ranks over NCCL, which is opened at run time: see join_nccl_ranks and use_nccl_ranks in communicator.hpp. */
typedef struct fovea_nccl_ranks fovea_nccl_ranks;

/* ncclUniqueId: made by one rank, told to all. */
typedef struct fovea_nccl_id {
  char bytes[128];
} fovea_nccl_id;
FOVEA_API int fovea_nccl_id_make(fovea_nccl_id* id, fovea_error** error);

/* Either an id, with rank, world_size and device_id, for a group that is about to meet; or comm, a program's own
 * ncclComm_t, which outlives the ranks, and the stream of exchanges, NULL for one of their own. */
typedef struct fovea_nccl_args {
  size_t struct_size;
  uint32_t version;
  int32_t rank;
  int32_t world_size;
  int32_t device_id;
  const fovea_nccl_id* id;
  void* comm;
  void* stream;
} fovea_nccl_args;

/* By id it returns when all ranks have come. What was made over the ranks keeps them: they may be destroyed before. */
FOVEA_API int fovea_nccl_ranks_create(const fovea_nccl_args* args, fovea_nccl_ranks** ranks,
                                      fovea_error** error);
FOVEA_API void fovea_nccl_ranks_destroy(fovea_nccl_ranks* ranks);

/* One rank's end of a group of ranks, over any transport: see Communicator in communicator.hpp for what each function
 * does, and when. They return 0, or anything else where the transport fails or a rank has ended: the call then ends
 * with FOVEA_DEVICE_ERROR. begin_... set *exchange to a number of their own, which wait is given once. */
typedef struct fovea_communicator {
  size_t struct_size;
  uint32_t version;
  int32_t rank;
  int32_t world_size;
  uint32_t reserved_0;
  void* context;
  int (*begin_all_gather)(void* context, const void* sent, void* received, size_t bytes,
                          void* stream, uint64_t* exchange);
  int (*begin_reduce_scatter)(void* context, const float* sent, float* received, size_t count,
                              void* stream, uint64_t* exchange);
  int (*begin_messages)(void* context, const fovea_outgoing_message* sent, size_t num_sent,
                        const fovea_incoming_message* received, size_t num_received, void* stream,
                        uint64_t* exchange);
  int (*wait)(void* context, uint64_t exchange, void* stream);
  const fovea_nccl_ranks* nccl; /* NULL, or ranks over NCCL: no other field is looked at then */
} fovea_communicator;

/* Attention of a sequence whose tokens lie on several ranks. A rank has one call at a time. */
typedef struct fovea_context_parallel fovea_context_parallel;

/* See ContextParallel in context_parallel.hpp. The communicator is copied, and its functions are called until the
 * object is destroyed; the plan may be destroyed before. */
FOVEA_API int fovea_context_parallel_create(const fovea_shard_plan* plan,
                                            const fovea_communicator* communicator,
                                            fovea_context_parallel** context_parallel,
                                            fovea_error** error);
FOVEA_API void fovea_context_parallel_destroy(fovea_context_parallel* context_parallel);

/* Of this rank's tokens, on the cpu, or on the device of ranks over NCCL, on the struct's stream; masks are those that
 * the plan was made with. The struct's runtime and workspace are not looked at. */
FOVEA_API int fovea_context_parallel_forward(fovea_context_parallel* context_parallel,
                                             const fovea_attention_forward_args* args,
                                             fovea_error** error);
FOVEA_API int fovea_context_parallel_backward(fovea_context_parallel* context_parallel,
                                              const fovea_attention_backward_args* args,
                                              fovea_error** error);

/* Decoding over caches whose pages are dealt over ranks: see ContextParallelDecode in context_parallel.hpp. A rank has
 * one call at a time; args->forward's runtime and workspace are not looked at. */
typedef struct fovea_context_parallel_decode fovea_context_parallel_decode;

FOVEA_API int fovea_context_parallel_decode_create(const fovea_communicator* communicator,
                                                   fovea_context_parallel_decode** context_parallel,
                                                   fovea_error** error);
FOVEA_API void fovea_context_parallel_decode_destroy(
    fovea_context_parallel_decode* context_parallel);
FOVEA_API int fovea_context_parallel_decode_run(fovea_context_parallel_decode* context_parallel,
                                                const fovea_attention_decode_args* args,
                                                fovea_error** error);

/* ---- Probabilities ---- */

/* Whose probabilities, and where they go. */
typedef struct fovea_attention_probabilities_args {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved_0;
  const fovea_attention_forward_args* forward; /* v, out, lse and row_max are not looked at and may
                                                  be NULL */
  const DLTensor* probabilities; /* [batch, num_heads_q, seqlen_q, seqlen_kv] f32, f16 or bf16,
                                    written; packed: [num_sequences, num_heads_q, rows, columns] */
} fovea_attention_probabilities_args;

/* exp(score - lse) of each query and key by the plain formula, negative where dropout drops it: see
 * attention_probabilities in probabilities.hpp. Tensors on a kDLCUDA device are refused with FOVEA_UNSUPPORTED. Nothing
 * is written unless the arguments are valid. */
FOVEA_API int fovea_attention_probabilities(const fovea_attention_probabilities_args* args,
                                            fovea_error** error);

/* ---- XLA ---- */

/* A handler of XLA's typed foreign function interface, XLA_FFI_Error* (*)(XLA_FFI_CallFrame*), for a program's device:
 * kDLCPU, kDLCUDA or kDLROCM; NULL for others. Its attribute "call" is a text that says which function of this header
 * is called and what each operand and result is; fovea.jax writes it, and no other caller may rely on its words. On a
 * GPU the call is enqueued on XLA's stream and takes its workspace from XLA. Errors arrive as INVALID_ARGUMENT,
 * UNIMPLEMENTED (FOVEA_UNSUPPORTED), FAILED_PRECONDITION (FOVEA_COMPILE_ERROR), UNAVAILABLE (FOVEA_DEVICE_ERROR) and
 * INTERNAL, with their message. */
FOVEA_API void* fovea_xla_handler(int32_t device_type);

/* ---- What there is ---- */

/* This machine and this library as one JSON object: targets, GPUs, where kernels come from, what each operation takes,
 * limits. See describe.hpp; *text is freed by fovea_string_free. */
FOVEA_API int fovea_describe(char** text, fovea_error** error);

#ifdef __cplusplus
}
#endif

#endif /* FOVEA_FOVEA_H_ */
