// Attention of a tile of rows. Included once for each size of tiles, with ROW_TILE and CHUNKS.
//
// A row is a query of one head. The heads that share keys and values are neighbours in a tile, so
// that these are loaded once. A group goes along the keys, 32 at a time: each of its four warps
// computes the logits of a quarter of the rows, a key per lane. Then each thread adds up an element
// of every 128 of the values, for all rows. Sums are rescaled when a larger logit comes.

#define flash_attn PASTE3(flash_attn_, ROW_TILE, CHUNKS)
#define WARP_ROWS (ROW_TILE / 4)
#define QUERY_ROW (CHUNKS * CHUNK)
#define load_masks PASTE3(load_masks_, ROW_TILE, CHUNKS)
#define store_rows PASTE3(store_rows_, ROW_TILE, CHUNKS)
#define load_queries PASTE3(load_queries_, ROW_TILE, CHUNKS)
#define add_logits PASTE3(add_logits_, ROW_TILE, CHUNKS)
#define add_values PASTE3(add_values_, ROW_TILE, CHUNKS)
#define add_some_values PASTE3(add_some_values_, ROW_TILE, CHUNKS)

// Loads the queries of rows from `first` on, up to `count` elements, with 0 past the end.
INLINE void load_queries(const GLOBAL u8 *q, const Params *p, u32 first, u32 kv_head, u32 sharing,
                         u32 batch, u32 count, LOCAL float *queries) {
    u32 lane = thread_id() & 31, rows = p->t[1].shape[1] * sharing;
#pragma unroll 1
    for (u32 r = thread_id() >> 5; r < ROW_TILE; r += 4) {
        u32 row = first + r, head = kv_head * sharing + row % sharing;
        const GLOBAL u8 *from = q + AT(p->t[1], 0, row / sharing, head, batch);
#pragma unroll 1
        for (u32 d = lane; d < count; d += 32)
            queries[r * QUERY_ROW + d] =
                row < rows && d < p->t[1].shape[0] ? ((const GLOBAL float *)from)[d] : 0.0f;
    }
}

// Loads the masks of a key for a warp's rows: minus infinity for rows and keys that do not exist.
// Returns 1 if a row sees the key.
INLINE u32 load_masks(const GLOBAL u8 *const *masks, u32 key, u32 end, u32 rows, u32 first,
                      float *masked) {
    u32 sees = 0;
#pragma unroll
    for (u32 j = 0; j < WARP_ROWS; j++) {
        masked[j] = LOWEST;
        if (key < end && first + (thread_id() >> 5) * WARP_ROWS + j < rows)
            masked[j] = masks[j] ? load_half(masks[j] + 2 * (u64)key) : 0.0f;
        sees |= masked[j] != LOWEST;
    }
    return sees;
}

// Adds to the logits of a warp's rows the products of `groups` groups with this lane's key.
INLINE void add_logits(const LOCAL float *queries, const LOCAL float *tile, u32 groups,
                       float *logits) {
#pragma unroll 1
    for (u32 g = 0; g < groups; g++) {
        const LOCAL f32x4 *keys4 =
            (const LOCAL f32x4 *)(tile + (thread_id() & 31) * KEY_ROW + g * PADDED);
        const LOCAL f32x4 *queries4 = (const LOCAL f32x4 *)(queries + g * GROUP);
#pragma unroll
        for (u32 i = 0; i < GROUP / 4; i++) {
            f32x4 x = keys4[i];
#pragma unroll
            for (u32 j = 0; j < WARP_ROWS; j++) {
                f32x4 z = queries4[j * (QUERY_ROW / 4) + i];
                logits[j] += x.x * z.x;
                logits[j] += x.y * z.y;
                logits[j] += x.z * z.z;
                logits[j] += x.w * z.w;
            }
        }
    }
}

// Adds an element of each value, times its weights, to the sums of all rows.
INLINE void add_values(const LOCAL float *values, const LOCAL float *weights, float *sums) {
#pragma unroll 1
    for (u32 i = 0; i < KEYS; i += 4) {
        float x[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) x[j] = values[(i + j) * KEY_ROW];
#pragma unroll
        for (u32 r = 0; r < ROW_TILE; r++) {
            f32x4 z = *(const LOCAL f32x4 *)(weights + r * WEIGHT_ROW + i);
            sums[r] += z.x * x[0];
            sums[r] += z.y * x[1];
            sums[r] += z.z * x[2];
            sums[r] += z.w * x[3];
        }
    }
}

// Does what `add_values` does, but reads no value whose weight is 0.
INLINE void add_some_values(const LOCAL float *values, const LOCAL float *weights, float *sums) {
#pragma unroll 1
    for (u32 i = 0; i < KEYS; i++) {
        float x = values[i * KEY_ROW];
#pragma unroll
        for (u32 r = 0; r < ROW_TILE; r++) {
            float weight = weights[r * WEIGHT_ROW + i];
            if (weight != 0) sums[r] += weight * x;
        }
    }
}

// Stores the sums of `count` rows, times the factors.
INLINE void store_rows(GLOBAL u8 *results, const LOCAL u64 *places, const LOCAL float *factors,
                       u32 count, u32 size, float (*sums)[ROW_TILE]) {
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
        u32 d = c * CHUNK + thread_id();
        if (d >= size) break;
#pragma unroll
        for (u32 r = 0; r < ROW_TILE; r++)
            if (r < count) ((GLOBAL float *)(results + places[r]))[d] = sums[c][r] * factors[r];
    }
}

KERNEL THREADS(128) flash_attn(GLOBAL u8 *y, const GLOBAL u8 *q, const GLOBAL u8 *k,
                               const GLOBAL u8 *v, const GLOBAL u8 *mask, const GLOBAL u8 *sinks,
                               GLOBAL u8 *partials, COMMON) {
    wait_for_earlier();
    SHARED float tile[KEYS * KEY_ROW] __attribute__((aligned(16)));
    SHARED float queries[ROW_TILE * QUERY_ROW] __attribute__((aligned(16)));
    SHARED float weights[ROW_TILE * WEIGHT_ROW] __attribute__((aligned(16)));
    // Factors of the sums of each row.
    SHARED float rescales[ROW_TILE];
    // The byte of each row's result.
    SHARED u64 places[ROW_TILE];
    // 1 if a row of a warp sees a key of the tile, and if a value that it loads is not finite.
    SHARED u32 live[4], spoilt[4];
    u32 thread = thread_id(), lane = thread & 31, warp = thread >> 5;
    u32 tokens = p.t[1].shape[1], heads = p.t[1].shape[2], keys = p.t[2].shape[1];
    u32 kv_heads = p.t[2].shape[2], sharing = heads / kv_heads, rows = tokens * sharing;
    u32 query_groups = (p.t[1].shape[0] + GROUP - 1) / GROUP;
    u32 value_groups = (p.t[3].shape[0] + GROUP - 1) / GROUP;
    u32 tiles = (rows + ROW_TILE - 1) / ROW_TILE, shares = p.ints[1];
    u32 items = tiles * kv_heads * p.t[1].shape[3] * shares;
    GLOBAL u8 *results = partials ? partials : y;
#pragma unroll 1
    for (u32 item = group_id(); item < items; item += group_count()) {
        u32 share = item % shares, first_row = item / shares % tiles * ROW_TILE;
        u32 kv_head = item / (shares * tiles) % kv_heads;
        u32 batch = item / (shares * tiles * kv_heads);
        u32 begin = share * p.ints[2], end = min_u32(begin + p.ints[2], keys);
        const GLOBAL u8 *first_key = k + AT(p.t[2], 0, 0, kv_head, batch);
        const GLOBAL u8 *first_value = v + AT(p.t[3], 0, 0, kv_head, batch);
        barrier_local();
        load_queries(q, &p, first_row, kv_head, sharing, batch, query_groups * GROUP, queries);
        float largest[WARP_ROWS], total[WARP_ROWS], slopes[WARP_ROWS];
        const GLOBAL u8 *masks[WARP_ROWS];
#pragma unroll
        for (u32 j = 0; j < WARP_ROWS; j++) {
            u32 row = min_u32(first_row + warp * WARP_ROWS + j, rows - 1);
            u32 head = kv_head * sharing + row % sharing;
            largest[j] = LOWEST;
            total[j] = 0;
            slopes[j] = alibi_slope(head, p.ints[0], p.floats[1]);
            masks[j] = mask;
            if (mask)
                masks[j] += AT(p.t[4], 0, row / sharing, head % p.t[4].shape[2],
                               batch % p.t[4].shape[3]);
        }
        float sums[CHUNKS][ROW_TILE];
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++)
#pragma unroll
            for (u32 r = 0; r < ROW_TILE; r++) sums[c][r] = 0;
#pragma unroll 1
        for (u32 first = begin; first < end; first += KEYS) {
            barrier_local();
            float masked[WARP_ROWS];
            u32 sees = load_masks(masks, first + lane, end, rows, first_row, masked);
            sees = any_warp(sees);
            if (lane == 0) live[warp] = sees;
            barrier_local();
            if (!(live[0] | live[1] | live[2] | live[3])) continue;
            float logits[WARP_ROWS];
#pragma unroll
            for (u32 j = 0; j < WARP_ROWS; j++) logits[j] = 0;
#pragma unroll 1
            for (u32 start = 0; start < query_groups; start += CHUNK_GROUPS) {
                if (start) barrier_local();
                load_tile(first_key, p.t[2].strides[1], first, end, start, p.t[2].shape[0], tile,
                          tables);
                barrier_local();
                u32 here = min_u32(CHUNK_GROUPS, query_groups - start);
                add_logits(queries + warp * WARP_ROWS * QUERY_ROW + start * GROUP, tile, here,
                           logits);
            }
#pragma unroll
            for (u32 j = 0; j < WARP_ROWS; j++) {
                u32 r = warp * WARP_ROWS + j;
                float x = capped(logits[j] * p.floats[0], p.floats[2]) + slopes[j] * masked[j];
                if (masked[j] == LOWEST) x = LOWEST;
                float rescale = next_weight(&x, &largest[j], &total[j]);
                weights[r * WEIGHT_ROW + lane] = x;
                if (lane == 0) rescales[r] = rescale;
            }
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                if (c * CHUNK_GROUPS >= value_groups) break;
                barrier_local();
                u32 is_spoilt = load_tile(first_value, p.t[3].strides[1], first, end,
                                          c * CHUNK_GROUPS, p.t[3].shape[0], tile, tables);
                is_spoilt = any_warp(is_spoilt);
                if (lane == 0) spoilt[warp] = is_spoilt;
                barrier_local();
                // A warp has a group of the chunk.
                if (c * CHUNK_GROUPS + warp >= value_groups) continue;
#pragma unroll
                for (u32 r = 0; r < ROW_TILE; r++) sums[c][r] *= rescales[r];
                // Cells that a row does not see may hold anything, even NaN.
                if (spoilt[0] | spoilt[1] | spoilt[2] | spoilt[3])
                    add_some_values(tile + warp * PADDED + lane, weights, sums[c]);
                else
                    add_values(tile + warp * PADDED + lane, weights, sums[c]);
            }
        }
        barrier_local();
#pragma unroll
        for (u32 j = 0; j < WARP_ROWS; j++) {
            u32 r = warp * WARP_ROWS + j, row = min_u32(first_row + r, rows - 1);
            u32 head = kv_head * sharing + row % sharing;
            float sum = warp_sum(total[j]);
            if (partials) {
                GLOBAL float *to = partial(partials, p.t[0].shape, head, row / sharing, batch,
                                           shares, share);
                if (lane == 0 && first_row + r < rows) to[0] = largest[j], to[1] = sum;
                rescales[r] = 1;
                places[r] = (u64)((GLOBAL u8 *)(to + 2) - partials);
            } else {
                rescales[r] = final_factor(largest[j], sum, sink_of(sinks, head));
                places[r] = AT(p.t[0], 0, head, row / sharing, batch);
            }
        }
        barrier_local();
        store_rows(results, places, rescales, rows - first_row, p.t[3].shape[0], sums);
    }
}

#undef flash_attn
#undef WARP_ROWS
#undef load_masks
#undef store_rows
#undef load_queries
#undef add_logits
#undef add_values
#undef add_some_values
#undef QUERY_ROW
#undef ROW_TILE
#undef CHUNKS
