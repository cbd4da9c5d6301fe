/* The C ABI, plain C11: the door for every language but C++. Names and meanings are those of
 * attention.hpp; read docs/guides/c_abi.md for a tour and examples/attention.c for a program.
 *
 * Rules
 *   Structs    start with struct_size and version, which FOVEA_STRUCT(type) fills. Fields are only
 * ever added at the end, and all-zero means default, so
 * `{FOVEA_STRUCT(fovea_attention_forward_args), .q = &q, ...}` stays right. A caller built against
 * an older header passes a smaller size: what it does not know takes the default. A caller built
 * against a newer header is refused only if it sets a field that this library does not know. Errors
 * functions return 0 or a fovea_kind. Where `error` is not NULL, *error becomes NULL or an
 * object that the caller frees with fovea_error_free. Nothing is thrown, printed or aborted.
 *   Tensors    are DLTensor: borrowed for the call, last dimension contiguous is fast, strides NULL
 * means row-major, lanes 1. Booleans are 0 or 1. Threads    every function may be called from many
 * threads at once; a plan and a runtime may be shared.
 */
#ifndef FOVEA_FOVEA_H_
#define FOVEA_FOVEA_H_

#include <stddef.h>
#include <stdint.h>

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
FOVEA_API void fovea_error_free(fovea_error* error); /* NULL is fine */

/* Frees a text that Fovea returned; NULL is fine. */
FOVEA_API void fovea_string_free(char* text);

/* "0.1.0", and the FOVEA_ABI_VERSION that the library was built with. */
FOVEA_API const char* fovea_version(void);
FOVEA_API uint32_t fovea_abi_version(void);

/* ---- Programs ---- */

/* What a program text may read by name. These two structs never grow. */
typedef struct fovea_named_tensor {
  const char* name;
  const DLTensor* tensor; /* f32, f16, bf16, bool, u8, i8, i32 or i64 */
} fovea_named_tensor;

typedef enum fovea_scalar_type { FOVEA_SCALAR_INT = 0, FOVEA_SCALAR_FLOAT = 1 } fovea_scalar_type;

typedef struct fovea_named_scalar {
  const char* name;
  int32_t type; /* fovea_scalar_type */
  double value; /* a whole number that fits 32 bits where type is FOVEA_SCALAR_INT */
} fovea_named_scalar;

/* ---- Threads ---- */

/* A persistent pool of threads and the plans that were made: what lives longer than a call. */
typedef struct fovea_runtime fovea_runtime;

/* num_threads 0: as many as the affinity mask, the cgroup quota and FOVEA_NUM_THREADS allow. */
FOVEA_API int fovea_runtime_create(int32_t num_threads, fovea_runtime** runtime,
                                   fovea_error** error);
FOVEA_API void fovea_runtime_destroy(fovea_runtime* runtime); /* NULL is fine */

/* Calls itself once per index: task(task_context, worker, index), worker unique among concurrent
 * calls, < concurrency. */
typedef void (*fovea_task)(void* task_context, int32_t worker, int64_t index);

/* The host's own threads. run() calls the task once for each index in [0, count), any order, any
 * thread, and returns when all are done; it does not throw. Results do not depend on it. */
typedef struct fovea_executor {
  size_t struct_size;
  uint32_t version;
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
} fovea_cpu_target;

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

  /* Shapes of packed sequences have total_q or total_kv in place of batch and seqlen. */
  const DLTensor* q;       /* [batch, seqlen_q,  num_heads_q,  head_dim_qk] f32, f16 or bf16 */
  const DLTensor* k;       /* [batch, seqlen_kv, num_heads_kv, head_dim_qk] dtype of q */
  const DLTensor* v;       /* [batch, seqlen_kv, num_heads_kv, head_dim_v]  dtype of q */
  const DLTensor* out;     /* [batch, seqlen_q,  num_heads_q,  head_dim_v]  f32, f16 or bf16 */
  const DLTensor* lse;     /* [batch, num_heads_q, seqlen_q] f32; packed: [num_heads_q, total_q] */
  const DLTensor* row_max; /* shape of lse, f32: the row's largest score, -inf where it sees none */

  int32_t has_softmax_scale; /* 0: 1 / sqrt(head_dim_qk) */
  float softmax_scale;
  float softcap;         /* 0: none; c: c * tanh(score / c) */
  const DLTensor* bias;  /* [q, kv], [heads, q, kv] or [batch, heads, q, kv]; 1 broadcasts */
  const DLTensor* alibi; /* slopes [num_heads_q] or [batch, num_heads_q] */
  const char* score_mod; /* "score + slopes[q_head] * (kv_idx - q_idx)"; NULL: none */

  int32_t causal;          /* boolean */
  int32_t align;           /* fovea_align of causal, window and alibi when seqlen_q != seqlen_kv */
  int32_t has_window_left; /* boolean; 0: unbounded */
  int32_t has_window_right;
  int64_t window_left; /* inclusive, >= 0 */
  int64_t window_right;
  const DLTensor* mask;       /* bool or u8, true: visible; shapes as bias */
  const DLTensor* segments_q; /* [batch, seqlen] i32 or i64, -1: padding; one serves both */
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

  void* workspace; /* optional, but for fovea_plan_run where fovea_plan_workspace_bytes > 0 */
  size_t workspace_bytes;
  fovea_runtime* runtime;         /* NULL: the process's own */
  const fovea_executor* executor; /* NULL: the runtime's threads; wins over runtime */
  void* stream; /* tensors on a kDLCUDA device: the CUstream that the call is enqueued on; NULL: the
                   default stream */
} fovea_attention_forward_args;

/* Exact attention: out = softmax(mask(score(scale * q kT))) v, lse = log sum exp(score). See
 * attention_forward in attention.hpp for accuracy, determinism and rows that see no key. Nothing is
 * written unless the arguments are valid. */
FOVEA_API int fovea_attention_forward(const fovea_attention_forward_args* args,
                                      fovea_error** error);

/* ---- Plan once, run often ---- */

/* A validated problem, its kernel and its exact workspace; immutable. */
typedef struct fovea_plan fovea_plan;

typedef struct fovea_plan_options {
  size_t struct_size;
  uint32_t version;
  int64_t max_seqlen_q; /* 0: exactly the lengths given; n: the plan serves every length up to n */
  int64_t max_seqlen_kv;
  int32_t num_threads; /* workers the workspace is for; 0: those of args' executor or runtime */
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

/* What was decided and why: a page, or one JSON object. *text is freed by fovea_string_free. */
FOVEA_API int fovea_plan_explain(const fovea_plan* plan, int32_t format, char** text,
                                 fovea_error** error);

/* The same without a plan; a problem that nothing can run is explained instead of refused. */
FOVEA_API int fovea_explain(const fovea_attention_forward_args* args,
                            const fovea_plan_options* options, int32_t format, char** text,
                            fovea_error** error);

/* ---- Gradients, tangents, states ---- */

/* Gradients of a forward call. What is NULL among dq, dk, dv, dsinks and dcaptured is not computed. */
typedef struct fovea_attention_backward_args {
  size_t struct_size;
  uint32_t version;
  const fovea_attention_forward_args* forward; /* out and lse as it wrote them: inputs here; its
                                                  runtime and executor run this call */
  const DLTensor* dout;                        /* as out; f32, f16 or bf16 */
  const DLTensor* dlse;                        /* as lse, f32; optional */
  const DLTensor* dq;                          /* as q, written; f32, f16 or bf16 */
  const DLTensor* dk;                          /* as k */
  const DLTensor* dv;                          /* as v */
  const DLTensor* dsinks;                      /* [num_heads_q] f32 */
  const fovea_named_tensor* dcaptured; /* written: "bias", "alibi", or a name in forward's tensors
                                          (as that tensor) or scalars (one element) */
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

/* A forward call and its derivative along one direction. A tangent that is NULL is 0. */
typedef struct fovea_attention_jvp_args {
  size_t struct_size;
  uint32_t version;
  const fovea_attention_forward_args* forward; /* out and lse are written too */
  const DLTensor* q_tangent;                   /* as q; f32, f16 or bf16 */
  const DLTensor* k_tangent;
  const DLTensor* v_tangent;
  const DLTensor* sinks_tangent;
  const fovea_named_tensor* captured_tangents; /* names as in fovea_attention_backward_args */
  size_t num_captured_tangents;
  const DLTensor* out_tangent; /* as out, written */
  const DLTensor* lse_tangent; /* as lse, written; optional */
} fovea_attention_jvp_args;

/* See attention_jvp in jvp.hpp. */
FOVEA_API int fovea_attention_jvp(const fovea_attention_jvp_args* args, fovea_error** error);

/* Partial results of attention over parts of the keys, joined in the order given. */
typedef struct fovea_merge_states_args {
  size_t struct_size;
  uint32_t version;
  const DLTensor* const* outs; /* [num_states] */
  const DLTensor* const* lses; /* [num_states] f32 */
  size_t num_states;
  const DLTensor* out; /* written; may be outs[0] */
  const DLTensor* lse; /* written, optional; may be lses[0] */
  fovea_runtime* runtime;
  const fovea_executor* executor;
} fovea_merge_states_args;

/* See merge_states in state.hpp. */
FOVEA_API int fovea_merge_states(const fovea_merge_states_args* args, fovea_error** error);

/* ---- The KV cache ---- */

/* Attention over keys and values in a cache, after new ones are appended to it. */
typedef struct fovea_attention_decode_args {
  size_t struct_size;
  uint32_t version;
  const fovea_attention_forward_args* forward; /* k and v are the cache: [slots, capacity,
                                                  num_heads_kv, head_dim], or with a page_table
                                                  [num_pages, page_size, num_heads_kv, head_dim];
                                                  f32, f16 or bf16 each. No row_max, dropout,
                                                  cu_seqlens */
  const DLTensor* seqlens;      /* [batch] i32 or i64: rows in use before this call */
  const DLTensor* page_table;   /* [batch, max_pages] i32 or i64; NULL: contiguous */
  const DLTensor* batch_idx;    /* [batch]: the slot of each sequence; contiguous alone, optional */
  const DLTensor* left_padding; /* [batch]: rows at the start that are no keys; optional */
  const DLTensor* append_k;     /* [batch, seqlen_new, num_heads_kv, head_dim_qk]; optional: written
                                   into the cache behind seqlens */
  const DLTensor* append_v;     /* as append_k with head_dim_v */
  const DLTensor* rotary_cos;   /* [max_positions, rotary_dim / 2] f32, f16 or bf16; optional: turns
                                   q and append_k */
  const DLTensor* rotary_sin;
  const DLTensor* rotary_positions; /* [batch, seqlen_q]; optional: the place in the sequence */
  int32_t is_interleaved;           /* boolean; 1: pairs (2j, 2j + 1), 0: (j, j + rotary_dim / 2) */
  int32_t sees_all_keys;            /* boolean; 0: causal where forward poses no mask at all */
} fovea_attention_decode_args;

/* See attention_decode in kv_cache.hpp; tensors on a kDLCUDA device are taken there, on
 * forward->stream. Nothing is written unless the arguments are valid. */
FOVEA_API int fovea_attention_decode(const fovea_attention_decode_args* args, fovea_error** error);
/* What it does with append_k and append_v alone: of forward, k, v (the cache) and stream are read. */
FOVEA_API int fovea_append_to_cache(const fovea_attention_decode_args* args, fovea_error** error);
/* The workspace of such calls with up to max_seqlen_kv keys a sequence. */
FOVEA_API int fovea_decode_workspace_bytes(const fovea_attention_decode_args* args,
                                           int64_t max_seqlen_kv, size_t* bytes,
                                           fovea_error** error);

#ifdef __cplusplus
}
#endif

#endif /* FOVEA_FOVEA_H_ */
