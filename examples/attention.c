/* From C: causal attention with ALiBi written as a formula, planned once and run without allocating. */
#include <fovea/fovea.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kSeqlen = 64, kHeads = 4, kDim = 32, kCount = kSeqlen * kHeads * kDim };

static float q[kCount], k[kCount], v[kCount], out[kCount];
static float slopes[kHeads] = {0.5f, 0.25f, 0.125f, 0.0625f};

static DLTensor f32_tensor(float* data, int64_t* shape, int32_t ndim) {
  return (DLTensor){data, {kDLCPU, 0}, ndim, {kDLFloat, 32, 1}, shape, NULL, 0};
}

static void check(int kind, fovea_error** error) {
  if (kind == FOVEA_OK) return;
  fprintf(stderr, "fovea: %s\n", fovea_error_message(*error));
  fovea_error_free(*error);
  exit(1);
}

int main(void) {
  for (int i = 0; i < kCount; ++i) {
    q[i] = sinf((float)i), k[i] = cosf((float)i), v[i] = (float)(i % kDim);
  }
  int64_t shape[4] = {1, kSeqlen, kHeads, kDim}, heads[1] = {kHeads};
  DLTensor tq = f32_tensor(q, shape, 4), tk = f32_tensor(k, shape, 4);
  DLTensor tv = f32_tensor(v, shape, 4), tout = f32_tensor(out, shape, 4);
  DLTensor tslopes = f32_tensor(slopes, heads, 1);
  fovea_named_tensor captured[1] = {{"slopes", &tslopes}};

  fovea_attention_forward_args args = {FOVEA_STRUCT(fovea_attention_forward_args)};
  args.q = &tq, args.k = &tk, args.v = &tv, args.out = &tout;
  args.score_mod = "score + slopes[q_head] * (kv_idx - q_idx)";
  args.tensors = captured, args.num_tensors = 1;
  args.causal = 1;

  fovea_error* error = NULL;
  fovea_plan* plan = NULL;
  char* page = NULL;
  check(fovea_plan_create(&args, NULL, &plan, &error), &error);
  check(fovea_plan_explain(plan, FOVEA_TEXT, &page, &error), &error);
  puts(page);
  args.workspace_bytes = fovea_plan_workspace_bytes(plan);
  args.workspace = args.workspace_bytes > 0 ? malloc(args.workspace_bytes) : NULL;
  check(fovea_plan_run(plan, &args, &error), &error);
  free(args.workspace);
  fovea_string_free(page);
  fovea_plan_destroy(plan);

  /* The first query sees the first key alone, so its output is that key's value: 0, 1, 2, ... */
  printf("fovea %s: out[0, 0, 0, :3] = %g %g %g\n", fovea_version(), out[0], out[1], out[2]);
  return out[1] == 1.0f ? 0 : 1;
}
