// Products of packed weights with up to eight columns of 8-bit numbers, which `quantize.cu` makes.
// ints[0]: bytes before the scales of the columns.
#include "packed.h"

typedef float f32x2 __attribute__((ext_vector_type(2)));

#define COLUMNS 1
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 2
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 3
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 4
#define ROWS_PER_WARP 2
#include "mul_mat_int8.h"
#define COLUMNS 5
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"
#define COLUMNS 6
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"
#define COLUMNS 7
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"
#define COLUMNS 8
#define ROWS_PER_WARP 1
#include "mul_mat_int8.h"
