// Matrix products with packed weights, decoded to f32: the kernels of `mul_mat.cu` with the
// decoding of `packed.h`.
#include "packed.h"
#define decode32 decode32_packed
#include "mul_mat.cu"
