/* A program of the first header: forward, plan, gradients, cache, states, threads of its own, errors. It knows nothing
 * that later headers added, and links with the library of today. Prints what is wrong. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "first_fovea.h"

enum { kRows = 6, kHeads = 2, kDim = 4, kRow = kHeads * kDim, kCount = kRows * kRow };

static int num_wrong = 0;

static void expect(int condition, const char* what) {
  if (condition) return;
  printf("wrong: %s\n", what);
  ++num_wrong;
}

/* The call succeeded; else says why. */
static int ran(int kind, fovea_error** error, const char* what) {
  if (kind == FOVEA_OK) return 1;
  printf("wrong: %s: %s\n", what, fovea_error_message(*error));
  fovea_error_free(*error);
  *error = NULL;
  ++num_wrong;
  return 0;
}

static void expect_refused(int kind, fovea_error** error, const char* message, const char* what) {
  expect(kind == FOVEA_INVALID_ARGUMENT && fovea_error_kind(*error) == kind &&
             strstr(fovea_error_message(*error), message) != NULL,
         what);
  fovea_error_free(*error);
  *error = NULL;
}

static float q[kCount], k[kCount], v[kCount], out[kCount], dout[kCount], dq[kCount], dk[kCount],
    dv[kCount];
static float lse[kHeads * kRows];
static int64_t shape[4] = {1, kRows, kHeads, kDim}, lse_shape[3] = {1, kHeads, kRows};

static DLTensor tensor_of(float* data, int64_t* extents, int32_t ndim) {
  return (DLTensor){data, {kDLCPU, 0}, ndim, {kDLFloat, 32, 1}, extents, NULL, 0};
}

static DLTensor ints_of(int32_t* data, int64_t* extents, int32_t ndim) {
  return (DLTensor){data, {kDLCPU, 0}, ndim, {kDLInt, 32, 1}, extents, NULL, 0};
}

static DLTensor tq, tk, tv, tout, tlse;

static fovea_attention_forward_args forward_args(void) {
  fovea_attention_forward_args args = {FOVEA_STRUCT(fovea_attention_forward_args)};
  args.q = &tq, args.k = &tk, args.v = &tv, args.out = &tout;
  return args;
}

/* The value of row `key`, and the mean of rows [0, end). */
static int is_value(int row, int key) {
  return memcmp(out + row * kRow, v + key * kRow, kRow * sizeof(float)) == 0;
}
static int is_mean(int row, int end) {
  for (int i = 0; i < kRow; ++i) {
    float sum = 0;
    for (int key = 0; key < end; ++key) sum += v[key * kRow + i];
    if (fabsf(out[row * kRow + i] - sum / (float)end) > 1e-5f) return 0;
  }
  return 1;
}

static int32_t one_thread(void* context) {
  ++*(int*)context;
  return 1;
}
static void run_tasks(void* context, int64_t count, fovea_task task, void* task_context) {
  ++*(int*)context;
  for (int64_t i = 0; i < count; ++i) task(task_context, 0, i);
}

static void check_forward(void) {
  fovea_error* error = NULL;
  fovea_attention_forward_args args = forward_args();
  args.lse = &tlse;
  args.causal = 1;
  args.has_softmax_scale = 1, args.softmax_scale = 0; /* every visible key weighs the same */
  if (ran(fovea_attention_forward(&args, &error), &error, "forward")) {
    expect(is_value(0, 0) && is_mean(5, 6), "causal rows are means of what they see");
    expect(fabsf(lse[5] - logf(6)) < 1e-5f, "lse is the logarithm of the number of keys");
  }
  args.has_window_left = 1, args.window_left = 0;
  if (ran(fovea_attention_forward(&args, &error), &error, "window"))
    expect(is_value(3, 3), "a window of one key");
  args = forward_args();
  args.mask_mod = "kv_idx == chosen";
  args.scalars = &(fovea_named_scalar){"chosen", FOVEA_SCALAR_INT, 2}, args.num_scalars = 1;
  if (ran(fovea_attention_forward(&args, &error), &error, "mask_mod"))
    expect(is_value(0, 2) && is_value(5, 2), "a formula and its scalar");
  args.dropout.p = 1;
  if (ran(fovea_attention_forward(&args, &error), &error, "dropout"))
    expect(out[0] == 0 && out[kCount - 1] == 0, "dropout of everything");

  int64_t packed[3] = {kRows, kHeads, kDim}, three[1] = {3};
  int32_t begins[3] = {0, 1, kRows};
  DLTensor rows[4] = {tensor_of(q, packed, 3), tensor_of(k, packed, 3), tensor_of(v, packed, 3),
                      tensor_of(out, packed, 3)};
  DLTensor cu_seqlens = ints_of(begins, three, 1);
  int num_calls = 0;
  fovea_executor executor = {FOVEA_STRUCT(fovea_executor), .context = &num_calls,
                             .concurrency = one_thread, .run = run_tasks};
  args = forward_args();
  args.q = &rows[0], args.k = &rows[1], args.v = &rows[2], args.out = &rows[3];
  args.cu_seqlens_q = args.cu_seqlens_kv = &cu_seqlens;
  args.cpu_target = FOVEA_CPU_SCALAR;
  args.executor = &executor;
  if (ran(fovea_attention_forward(&args, &error), &error, "packed")) {
    expect(is_value(0, 0), "a packed sequence of one key");
    expect(num_calls >= 2, "the caller's threads");
  }
}

static void check_plan(void) {
  fovea_error* error = NULL;
  fovea_plan* plan = NULL;
  char* text = NULL;
  fovea_attention_forward_args args = forward_args();
  args.causal = 1;
  fovea_runtime* runtime = NULL;
  if (!ran(fovea_runtime_create(2, &runtime, &error), &error, "runtime")) return;
  args.runtime = runtime;
  fovea_plan_options options = {FOVEA_STRUCT(fovea_plan_options)};
  options.max_seqlen_q = options.max_seqlen_kv = 64;
  options.num_threads = 2;
  if (!ran(fovea_plan_create(&args, &options, &plan, &error), &error, "plan")) return;
  if (ran(fovea_plan_explain(plan, FOVEA_JSON, &text, &error), &error, "explain"))
    expect(strstr(text, "seqlen_kv <=64") != NULL, "the bound is in the explanation");
  fovea_string_free(text);
  args.workspace_bytes = fovea_plan_workspace_bytes(plan);
  args.workspace = malloc(args.workspace_bytes);
  if (ran(fovea_plan_run(plan, &args, &error), &error, "plan_run"))
    expect(is_value(0, 0), "the first row of a planned run");
  args.workspace_bytes -= 1;
  expect_refused(fovea_plan_run(plan, &args, &error), &error, "workspace has",
                 "a workspace too small");
  free(args.workspace);
  fovea_plan_destroy(plan);
  fovea_runtime_destroy(runtime);
}

static void check_backward(void) {
  fovea_error* error = NULL;
  fovea_attention_forward_args args = forward_args();
  args.lse = &tlse;
  args.causal = 1;
  if (!ran(fovea_attention_forward(&args, &error), &error, "forward of backward")) return;
  for (int i = 0; i < kCount; ++i) dout[i] = 1;
  DLTensor tdout = tensor_of(dout, shape, 4), tdq = tensor_of(dq, shape, 4),
           tdk = tensor_of(dk, shape, 4), tdv = tensor_of(dv, shape, 4);
  fovea_attention_backward_args backward = {FOVEA_STRUCT(fovea_attention_backward_args)};
  backward.forward = &args;
  backward.dout = &tdout, backward.dq = &tdq, backward.dk = &tdk, backward.dv = &tdv;
  dq[0] = 7;
  if (!ran(fovea_attention_backward(&backward, &error), &error, "backward")) return;
  float sum = 0;
  for (int row = 0; row < kRows; ++row) sum += dv[row * kRow];
  expect(fabsf(sum - kRows) < 1e-4f, "each row hands all of dout to the values it sees");
  expect(dq[0] == 0, "a row of one key has no choice, so no gradient");
}

static void check_decode(void) {
  fovea_error* error = NULL;
  /* One sequence in pages of two rows: three keys in pages 2 and 0, one appended. */
  int64_t pages[4] = {3, 2, kHeads, kDim}, query[4] = {1, 1, kHeads, kDim}, one[1] = {1},
          row[2] = {1, 2};
  int32_t length[1] = {3}, table[2] = {2, 0};
  float cache_k[kCount] = {0}, cache_v[kCount] = {0}, new_k[kRow] = {0}, new_v[kRow];
  for (int i = 0; i < kRow; ++i) new_v[i] = 9;
  DLTensor tquery = tensor_of(q, query, 4), tresult = tensor_of(out, query, 4);
  DLTensor tcache_k = tensor_of(cache_k, pages, 4), tcache_v = tensor_of(cache_v, pages, 4);
  DLTensor tnew_k = tensor_of(new_k, query, 4), tnew_v = tensor_of(new_v, query, 4);
  DLTensor tlength = ints_of(length, one, 1), ttable = ints_of(table, row, 2);
  fovea_attention_forward_args forward = {FOVEA_STRUCT(fovea_attention_forward_args)};
  forward.q = &tquery, forward.k = &tcache_k, forward.v = &tcache_v, forward.out = &tresult;
  fovea_attention_decode_args decode = {FOVEA_STRUCT(fovea_attention_decode_args)};
  decode.forward = &forward;
  decode.seqlens = &tlength, decode.page_table = &ttable;
  decode.append_k = &tnew_k, decode.append_v = &tnew_v;
  if (ran(fovea_attention_decode(&decode, &error), &error, "decode")) {
    expect(fabsf(out[0] - 9.0f / 4) < 1e-5f, "a query sees three zeros and the appended key");
    expect(cache_v[kRow] == 9 && cache_v[0] == 0, "the new row stands behind the third, in page 0");
  }
  size_t bytes = 0;
  ran(fovea_decode_workspace_bytes(&decode, 4, &bytes, &error), &error, "decode_workspace_bytes");
  table[1] = 3;
  expect_refused(fovea_attention_decode(&decode, &error), &error, "page_table[0, 1] is 3",
                 "a page out of range");
}

static void check_states(void) {
  fovea_error* error = NULL;
  const DLTensor* outs[2] = {&tv, &tv};
  const DLTensor* lses[2] = {&tlse, &tlse};
  for (int i = 0; i < kHeads * kRows; ++i) lse[i] = 0.5f;
  fovea_merge_states_args merge = {FOVEA_STRUCT(fovea_merge_states_args)};
  merge.outs = outs, merge.lses = lses, merge.num_states = 2;
  merge.out = &tout;
  if (ran(fovea_merge_states(&merge, &error), &error, "merge_states"))
    expect(is_mean(0, 1), "two states of one value are that value");
}

static void check_refusals(void) {
  fovea_error* error = NULL;
  fovea_attention_forward_args args = forward_args();
  args.score_mod = "score + nonsense";
  expect_refused(fovea_attention_forward(&args, &error), &error, "nonsense", "an unknown name");
  args = forward_args();
  args.has_window_left = 1, args.window_left = -3;
  expect_refused(fovea_attention_forward(&args, &error), &error, "-3", "a negative window");
  args = forward_args();
  args.struct_size = 1;
  expect_refused(fovea_attention_forward(&args, &error), &error, "struct_size is 1",
                 "a size that no header had");
  expect(fovea_abi_version() == FOVEA_ABI_VERSION, "the version of the first header");
}

int main(void) {
  for (int i = 0; i < kCount; ++i) {
    q[i] = sinf((float)i), k[i] = cosf((float)i), v[i] = (float)(i + 1);
  }
  tq = tensor_of(q, shape, 4), tk = tensor_of(k, shape, 4), tv = tensor_of(v, shape, 4);
  tout = tensor_of(out, shape, 4), tlse = tensor_of(lse, lse_shape, 3);
  check_forward();
  check_plan();
  check_backward();
  check_decode();
  check_states();
  check_refusals();
  return num_wrong == 0 ? 0 : 1;
}
