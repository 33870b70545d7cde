// Rows of packed weights: the kernel of `blocks.cu` with the decoding of `packed.h`.
#include "packed.h"
#define decode32 decode32_packed
#define ONLY_GET_ROWS
#include "blocks.cu"
