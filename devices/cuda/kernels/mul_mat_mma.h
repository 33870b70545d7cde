// Products with tensor cores. Included once for each size of tiles: ROW_TILE rows of weights,
// COLUMN_TILE columns, and DEPTH elements of their length at a time. The eight warps of a group
// stand in WARPS_M rows.

#define mma_tile PASTE(mma_tile_, COLUMN_TILE)
#define mul_mat_mma PASTE(mul_mat_mma_, COLUMN_TILE)
#define mul_mat_id_mma PASTE(mul_mat_id_mma_, COLUMN_TILE)
// Halves between rows in shared memory, so that lanes read from different banks.
#define HALF_ROW (DEPTH + 8)
#define M_FRAGMENTS (ROW_TILE / 16 / WARPS_M)
#define N_FRAGMENTS (COLUMN_TILE / 8 / (8 / WARPS_M))
#define STAGE_A (ROW_TILE * HALF_ROW)
#define STAGE_B (COLUMN_TILE * HALF_ROW)

// Loads a step of the operands: half of the threads decode weights, the others load columns.
INLINE void PASTE(load_step_, COLUMN_TILE)(const Matrix *a, const GLOBAL u8 *row,
                                           const GLOBAL u16 *columns, const LOCAL u64 *column_x,
                                           u32 start, LOCAL u16 *tile_a, LOCAL u16 *tile_b,
                                           const GLOBAL u8 *tables) {
    u32 thread = thread_id();
    if (thread < 128) {
        u32 group = thread / ROW_TILE;
        LOCAL u32x4 *to = (LOCAL u32x4 *)(tile_a + thread % ROW_TILE * HALF_ROW + group * GROUP);
        u32 k = start + group * GROUP;
        float w[GROUP];
        if (k < a->length) {
            decode32(row, a->stride, k / GROUP, a->length, w, tables);
        } else {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) w[i] = 0;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i += 8) {
            u32x4 four = {halves_of(w[i], w[i + 1]), halves_of(w[i + 2], w[i + 3]),
                          halves_of(w[i + 4], w[i + 5]), halves_of(w[i + 6], w[i + 7])};
            to[i / 8] = four;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < COLUMN_TILE * DEPTH / 8 / 128; i++) {
            u32 n = i * 128 + thread - 128, column = n / (DEPTH / 8), k = n % (DEPTH / 8) * 8;
            *(LOCAL u32x4 *)(tile_b + column * HALF_ROW + k) =
                *(const GLOBAL u32x4 *)(columns + column_x[column] + start + k);
        }
    }
}

// Computes the tile of rows from `first` on, of elements `begin` to `end` of their length, which
// are multiples of DEPTH or the end of rows. `columns` are halves, `column_x` has the numbers of
// the first halves of the tile's columns, `scales` their factors. Columns with `NO_COLUMN` in
// `column_y` are not stored.
INLINE void mma_tile(const Matrix *a, u32 first, u32 begin, u32 end, const GLOBAL u16 *columns,
                     GLOBAL u8 *y, const LOCAL u64 *column_x, const LOCAL u64 *column_y,
                     const LOCAL float *scales, LOCAL u16 *tile_a, LOCAL u16 *tile_b,
                     const GLOBAL u8 *tables) {
    u32 lane = thread_id() & 31, warp = thread_id() >> 5;
    u32 m = warp % WARPS_M * (M_FRAGMENTS * 16), n = warp / WARPS_M * (N_FRAGMENTS * 8);
    const GLOBAL u8 *row =
        a->first + min_u32(first + thread_id() % ROW_TILE, a->rows - 1) * a->row_stride;
    float sums[M_FRAGMENTS][N_FRAGMENTS][4];
#pragma unroll
    for (u32 i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
        for (u32 j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
            for (u32 r = 0; r < 4; r++) sums[i][j][r] = 0;
    barrier_local();
    if (begin < end)
        PASTE(load_step_, COLUMN_TILE)(a, row, columns, column_x, begin, tile_a, tile_b, tables);
    barrier_local();
    u32 stage = 0;
#pragma unroll 1
    for (u32 start = begin; start < end; start += DEPTH) {
        // The next step arrives in the other half of shared memory.
        if (start + DEPTH < end)
            PASTE(load_step_, COLUMN_TILE)(a, row, columns, column_x, start + DEPTH,
                                           tile_a + (stage ^ 1) * STAGE_A,
                                           tile_b + (stage ^ 1) * STAGE_B, tables);
        // Rows of eight lanes each, two halves per lane.
        u32 place = (lane >> 2) * HALF_ROW + (lane & 3) * 2;
        const LOCAL u16 *from_a = tile_a + stage * STAGE_A + m * HALF_ROW + place;
        const LOCAL u16 *from_b = tile_b + stage * STAGE_B + n * HALF_ROW + place;
#pragma unroll
        for (u32 k = 0; k < DEPTH; k += 16) {
            u32 w[M_FRAGMENTS][4], x[N_FRAGMENTS][2];
#pragma unroll
            for (u32 i = 0; i < M_FRAGMENTS; i++) {
                const LOCAL u16 *at = from_a + i * 16 * HALF_ROW + k;
                w[i][0] = *(const LOCAL u32 *)at;
                w[i][1] = *(const LOCAL u32 *)(at + 8 * HALF_ROW);
                w[i][2] = *(const LOCAL u32 *)(at + 8);
                w[i][3] = *(const LOCAL u32 *)(at + 8 * HALF_ROW + 8);
            }
#pragma unroll
            for (u32 j = 0; j < N_FRAGMENTS; j++) {
                const LOCAL u16 *at = from_b + j * 8 * HALF_ROW + k;
                x[j][0] = *(const LOCAL u32 *)at;
                x[j][1] = *(const LOCAL u32 *)(at + 8);
            }
#pragma unroll
            for (u32 i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
                for (u32 j = 0; j < N_FRAGMENTS; j++) multiply_add(sums[i][j], w[i], x[j]);
        }
        stage ^= 1;
        barrier_local();
    }
#pragma unroll
    for (u32 j = 0; j < N_FRAGMENTS; j++) {
#pragma unroll
        for (u32 c = 0; c < 2; c++) {
            u32 column = n + j * 8 + (lane & 3) * 2 + c;
            if (column_y[column] == NO_COLUMN) continue;
            GLOBAL float *to = (GLOBAL float *)(y + column_y[column]);
            u32 at = first + m + (lane >> 2);
#pragma unroll
            for (u32 i = 0; i < M_FRAGMENTS; i++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++)
                    if (at + i * 16 + r * 8 < a->rows)
                        to[at + i * 16 + r * 8] = sums[i][j][2 * r + c] * scales[column];
            }
        }
    }
    barrier_warp();
    barrier_local();
}

// y = products of the rows of `a` with the columns of `x`, which `halves` has. The first ints: see
// `halves.cu`. Several groups share the length of rows: ints[3] is their number, ints[4] the
// elements of each. If there is more than one, they write to `parts`.
KERNEL THREADS(256) mul_mat_mma(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x,
                                const GLOBAL u8 *halves, GLOBAL u8 *parts, COMMON) {
    SHARED u16 tile_a[2 * STAGE_A] __attribute__((aligned(16)));
    SHARED u16 tile_b[2 * STAGE_B] __attribute__((aligned(16)));
    SHARED u64 column_x[COLUMN_TILE], column_y[COLUMN_TILE];
    SHARED float scales[COLUMN_TILE];
    u32 tiles_m = (p.t[1].shape[1] + ROW_TILE - 1) / ROW_TILE, count = p.t[2].shape[1];
    u32 tiles_n = (count + COLUMN_TILE - 1) / COLUMN_TILE, shares = p.ints[3];
    u32 items = shares * tiles_m * tiles_n * p.t[2].shape[2] * p.t[2].shape[3];
    const GLOBAL u16 *columns = (const GLOBAL u16 *)(halves + p.ints[1]);
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        u32 share = item % shares, tile = item / shares, batch = tile / (tiles_m * tiles_n);
        u32 i2 = batch % p.t[2].shape[2], i3 = batch / p.t[2].shape[2];
        Matrix matrix = MATRIX(a, i2 / (p.t[2].shape[2] / p.t[1].shape[2]),
                               i3 / (p.t[2].shape[3] / p.t[1].shape[3]));
        if (thread_id() < COLUMN_TILE) {
            u32 column = tile / tiles_m % tiles_n * COLUMN_TILE + thread_id();
            u32 number = batch * count + min_u32(column, count - 1);
            u64 place = AT(p.t[0], 0, column, i2, i3);
            if (parts) place = (share * ROWS(p.t[2]) + (u64)number) * 4 * p.t[0].shape[0];
            column_x[thread_id()] = (u64)number * p.ints[0];
            column_y[thread_id()] = column < count ? place : NO_COLUMN;
            scales[thread_id()] = ((const GLOBAL float *)halves)[number];
        }
        u32 begin = share * p.ints[4], end = min_u32(begin + p.ints[4], matrix.length);
        mma_tile(&matrix, tile % tiles_m * ROW_TILE, begin, end, columns, parts ? parts : y,
                 column_x, column_y, scales, tile_a, tile_b, tables);
    }
}

// y = products of each token with the experts that `ids` names. `lists`: see `experts.cu`.
KERNEL THREADS(256) mul_mat_id_mma(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *x,
                                   const GLOBAL u8 *ids, const GLOBAL u8 *lists,
                                   const GLOBAL u8 *halves, COMMON) {
    SHARED u16 tile_a[2 * STAGE_A] __attribute__((aligned(16)));
    SHARED u16 tile_b[2 * STAGE_B] __attribute__((aligned(16)));
    SHARED u64 column_x[COLUMN_TILE], column_y[COLUMN_TILE];
    SHARED float scales[COLUMN_TILE];
    const GLOBAL u32 *counts = (const GLOBAL u32 *)lists;
    u32 experts = p.t[1].shape[2], used = p.t[3].shape[0], choices = used * p.t[3].shape[1];
    u32 tiles_m = (p.t[1].shape[1] + ROW_TILE - 1) / ROW_TILE;
    // The last tile of each expert may be partial.
    u32 items = tiles_m * ((choices + COLUMN_TILE - 1) / COLUMN_TILE + experts);
    const GLOBAL u16 *columns = (const GLOBAL u16 *)(halves + p.ints[1]);
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        ExpertTile tile = expert_tile(counts, experts, item / tiles_m, COLUMN_TILE);
        if (tile.expert == experts) return;
        Matrix matrix = MATRIX(a, tile.expert, 0);
        if (thread_id() < COLUMN_TILE) {
            u32 n = tile.number * COLUMN_TILE + thread_id();
            const GLOBAL u32 *list = counts + experts + (u64)tile.expert * choices;
            u32 choice = list[min_u32(n, tile.count - 1)];
            u32 slot = choice % used, token = choice / used;
            u32 number = slot % p.t[2].shape[1] + p.t[2].shape[1] * token;
            column_x[thread_id()] = (u64)number * p.ints[0];
            column_y[thread_id()] = n < tile.count ? AT(p.t[0], 0, slot, token, 0) : NO_COLUMN;
            scales[thread_id()] = ((const GLOBAL float *)halves)[number];
        }
        mma_tile(&matrix, item % tiles_m * ROW_TILE, 0, matrix.length, columns, y, column_x,
                 column_y, scales, tile_a, tile_b, tables);
    }
}

#undef mma_tile
#undef mul_mat_mma
#undef mul_mat_id_mma
#undef HALF_ROW
#undef M_FRAGMENTS
#undef N_FRAGMENTS
#undef STAGE_A
#undef STAGE_B
#undef ROW_TILE
#undef COLUMN_TILE
#undef DEPTH
#undef WARPS_M
