/* The C ABI, from C11 and linked like any other C library: one key is visible, so its value comes out. */
#include <fovea/fovea.h>
#include <stdio.h>

int main(void) {
  float q[4] = {1, 1, 1, 1}, v[4] = {1, 2, 3, 4}, out[4] = {0};
  int64_t shape[4] = {1, 1, 1, 4};
  DLTensor tensor = {.device = {kDLCPU, 0}, .ndim = 4, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  DLTensor q_tensor = tensor, v_tensor = tensor, out_tensor = tensor;
  q_tensor.data = q;
  v_tensor.data = v;
  out_tensor.data = out;
  fovea_attention_forward_args args = {FOVEA_STRUCT(fovea_attention_forward_args), .q = &q_tensor,
                                       .k = &q_tensor, .v = &v_tensor, .out = &out_tensor};
  fovea_error* error = NULL;
  if (fovea_attention_forward(&args, &error) != FOVEA_OK) {
    printf("fovea %s: %s\n", fovea_version(), fovea_error_message(error));
    fovea_error_free(error);
    return 1;
  }
  for (int i = 0; i < 4; ++i) {
    if (out[i] != v[i]) return 1;
  }
  return 0;
}
