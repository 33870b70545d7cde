// Products with weights of one type on tensor cores, in halves with f32 sums.
#include "matrix.h"
#include "mma.h"

#define ROW_TILE 128
#define COLUMN_TILE 128
#define DEPTH 32
#define WARPS_M 2
#include "mul_mat_mma.h"
#define ROW_TILE 64
#define COLUMN_TILE 32
#define DEPTH 64
#define WARPS_M 4
#include "mul_mat_mma.h"
