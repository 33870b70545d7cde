// Matrices of weights, and the tiles of experts.
#pragma once
#include "blocks.h"

#define NO_COLUMN 0xffffffffffffffffull

// A matrix of weights.
typedef struct {
    const GLOBAL u8 *first;
    u64 stride, row_stride;
    u32 rows, length;
} Matrix;
#define MATRIX(a, i2, i3)                                                                          \
    {(a) + (i2) * p.t[1].strides[2] + (i3) * p.t[1].strides[3], p.t[1].strides[0],                 \
     p.t[1].strides[1], p.t[1].shape[1], p.t[1].shape[0]}

// A tile of the columns that an expert multiplies: its number among the expert's tiles, and the
// number of the expert's columns.
typedef struct {
    u32 expert, number, count;
} ExpertTile;

// Finds tile `number` of all experts. Its expert is `experts` if there is none.
INLINE ExpertTile expert_tile(const GLOBAL u32 *counts, u32 experts, u32 number, u32 size) {
    ExpertTile tile = {0, number, 0};
#pragma unroll 1
    for (; tile.expert < experts; tile.expert++) {
        tile.count = counts[tile.expert];
        u32 tiles = (tile.count + size - 1) / size;
        if (tile.number < tiles) break;
        tile.number -= tiles;
    }
    return tile;
}
