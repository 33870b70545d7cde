// Products with packed weights on tensor cores: the kernels of `mul_mat_mma.cu` with the decoding
// of `packed.h`.
#include "packed.h"
#define decode32 decode32_packed
#include "mul_mat_mma.cu"
