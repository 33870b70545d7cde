// Attention on tensor cores, of tiles of 64 rows. Included once for each HEAD, the maximum size of
// queries and values.
//
// A row is a query of one head, as in `flash_attn.h`. A group goes along the keys, 64 at a time.
// Each of its four warps has 16 rows. The logits that it computes are its operand of the product
// with the values.

#define flash_attn_mma PASTE(flash_attn_mma_, HEAD)
#define add_products PASTE(add_products_, HEAD)
#define add_values PASTE(add_values_, HEAD)
#define load_queries PASTE(load_queries_, HEAD)
#define add_some_values PASTE(add_some_values_, HEAD)
// Halves between keys in shared memory, so that lanes read from different banks.
#define KEY_ROW (HEAD + 8)
#define HEAD_GROUPS (HEAD / GROUP)

// Loads the queries of rows from `first` on, times the scale, by way of shared memory.
INLINE void load_queries(const GLOBAL u8 *q, const Params *p, u32 first, u32 kv_head, u32 sharing,
                         u32 batch, LOCAL u16 *tile, u32 (*queries)[4]) {
    u32 lane = thread_id() & 31, warp = thread_id() >> 5, rows = p->t[1].shape[1] * sharing;
    barrier_local();
#pragma unroll 1
    for (u32 r = warp; r < ROW_TILE; r += 4) {
        u32 row = first + r, head = kv_head * sharing + row % sharing;
        const GLOBAL u8 *from = q + AT(p->t[1], 0, row / sharing, head, batch);
#pragma unroll 1
        for (u32 d = 2 * lane; d < HEAD; d += 64) {
            float x[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                x[i] = row < rows && d + i < p->t[1].shape[0]
                           ? ((const GLOBAL float *)from)[d + i] * p->floats[0]
                           : 0.0f;
            *(LOCAL u32 *)(tile + r * KEY_ROW + d) = halves_of(x[0], x[1]);
        }
    }
    barrier_local();
#pragma unroll
    for (u32 d = 0; d < HEAD / 16; d++) {
        const LOCAL u16 *at =
            tile + (warp * 16 + (lane >> 2)) * KEY_ROW + d * 16 + (lane & 3) * 2;
        queries[d][0] = *(const LOCAL u32 *)at;
        queries[d][1] = *(const LOCAL u32 *)(at + 8 * KEY_ROW);
        queries[d][2] = *(const LOCAL u32 *)(at + 8);
        queries[d][3] = *(const LOCAL u32 *)(at + 8 * KEY_ROW + 8);
    }
}

// Adds weighted values to the sums, but reads no value whose weight is 0. The weights get to all
// lanes of a row by way of shared memory.
INLINE void add_some_values(const LOCAL u16 *values, LOCAL u16 *tile, u32 (*weights)[2],
                            float (*sums)[4]) {
    u32 lane = thread_id() & 31, lane_pair = (lane & 3) * 2;
    u32 first = (thread_id() >> 5) * 16 + (lane >> 2);
    barrier_local();
#pragma unroll
    for (u32 j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (u32 r = 0; r < 2; r++)
            *(LOCAL u32 *)(tile + (first + r * 8) * VALUE_ROW + lane_pair + j * 8) = weights[j][r];
    barrier_local();
#pragma unroll 1
    for (u32 key = 0; key < KEYS; key++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float weight = half_float(tile[(first + i / 2 * 8) * VALUE_ROW + key]);
            if (weight == 0) continue;
#pragma unroll
            for (u32 d = 0; d < HEAD / 8; d++) {
                u32 element = d * 8 + lane_pair + (i & 1);
                sums[d][i] += weight * half_float(values[element * VALUE_ROW + key]);
            }
        }
    }
}

// Replaces the masks of a lane's logits by logits. Hidden keys stay hidden.
INLINE void add_products(u32 (*queries)[4], const LOCAL u16 *keys, const float *slopes,
                         float (*logits)[4]) {
    u32 lane = thread_id() & 31;
    keys += (lane >> 2) * KEY_ROW + (lane & 3) * 2;
#pragma unroll
    for (u32 j = 0; j < KEYS / 8; j++) {
        float products[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 d = 0; d < HEAD / 16; d++) {
            const LOCAL u16 *at = keys + j * 8 * KEY_ROW + d * 16;
            u32 x[2] = {*(const LOCAL u32 *)at, *(const LOCAL u32 *)(at + 8)};
            multiply_add(products, queries[d], x);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float masked = logits[j][i];
            if (masked != LOWEST) logits[j][i] = products[i] + slopes[i / 2] * masked;
        }
    }
}

// Adds weighted values to the sums.
INLINE void add_values(const LOCAL u16 *values, u32 (*weights)[2], float (*sums)[4]) {
    u32 lane = thread_id() & 31;
    values += (lane >> 2) * VALUE_ROW + (lane & 3) * 2;
#pragma unroll
    for (u32 j = 0; j < KEYS / 16; j++) {
        u32 w[4] = {weights[2 * j][0], weights[2 * j][1], weights[2 * j + 1][0],
                    weights[2 * j + 1][1]};
#pragma unroll
        for (u32 d = 0; d < HEAD / 8; d++) {
            const LOCAL u16 *at = values + d * 8 * VALUE_ROW + j * 16;
            u32 x[2] = {*(const LOCAL u32 *)at, *(const LOCAL u32 *)(at + 8)};
            multiply_add(sums[d], w, x);
        }
    }
}

KERNEL THREADS(128) flash_attn_mma(GLOBAL u8 *y, const GLOBAL u8 *q, const GLOBAL u8 *k,
                                   const GLOBAL u8 *v, const GLOBAL u8 *mask,
                                   const GLOBAL u8 *sinks, GLOBAL u8 *partials, COMMON) {
    // Queries at first, then keys, then weights if values are not finite.
    SHARED u16 tile_k[ROW_TILE * KEY_ROW] __attribute__((aligned(16)));
    SHARED u16 tile_v[HEAD * VALUE_ROW] __attribute__((aligned(16)));
    // 1 if a row of a warp sees a key of the tile, and if a value that it loads is not finite.
    SHARED u32 live[4], spoilt[4];
    u32 thread = thread_id(), lane = thread & 31, warp = thread >> 5;
    // The place of a lane in 8 rows of 4 pairs.
    u32 lane_row = lane >> 2, lane_pair = (lane & 3) * 2;
    u32 tokens = p.t[1].shape[1], heads = p.t[1].shape[2], keys = p.t[2].shape[1];
    u32 kv_heads = p.t[2].shape[2], sharing = heads / kv_heads, rows = tokens * sharing;
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
        u32 queries[HEAD / 16][4];
        load_queries(q, &p, first_row, kv_head, sharing, batch, tile_k, queries);
        // A lane has elements of two rows.
        float largest[2], total[2], slopes[2];
        const GLOBAL u8 *masks[2];
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            u32 row = min_u32(first_row + warp * 16 + lane_row + 8 * r, rows - 1);
            u32 head = kv_head * sharing + row % sharing;
            largest[r] = LOWEST;
            total[r] = 0;
            slopes[r] = alibi_slope(head, p.ints[0], p.floats[1]);
            masks[r] = mask;
            if (mask)
                masks[r] += AT(p.t[4], 0, row / sharing, head % p.t[4].shape[2],
                               batch % p.t[4].shape[3]);
        }
        float sums[HEAD / 8][4];
#pragma unroll
        for (u32 d = 0; d < HEAD / 8; d++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[d][i] = 0;
#pragma unroll 1
        for (u32 first = begin; first < end; first += KEYS) {
            barrier_local();
            // Masks become logits.
            float logits[KEYS / 8][4];
            u32 sees = any_warp(load_masks(masks, first, end, logits));
            if (lane == 0) live[warp] = sees;
            barrier_local();
            if (!(live[0] | live[1] | live[2] | live[3])) continue;
            load_keys(first_key, p.t[2].strides[1], first, end, p.t[2].shape[0], HEAD_GROUPS,
                      KEY_ROW, tile_k, tables);
            u32 is_spoilt = load_values(first_value, p.t[3].strides[1], first, end,
                                        p.t[3].shape[0], HEAD_GROUPS, tile_v, tables);
            is_spoilt = any_warp(is_spoilt);
            if (lane == 0) spoilt[warp] = is_spoilt;
            barrier_local();
            add_products(queries, tile_k, slopes, logits);
            float rescales[2];
            next_weights(logits, largest, total, rescales);
#pragma unroll
            for (u32 d = 0; d < HEAD / 8; d++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[d][i] *= rescales[i / 2];
            u32 weights[KEYS / 8][2];
#pragma unroll
            for (u32 j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (u32 r = 0; r < 2; r++)
                    weights[j][r] = halves_of(logits[j][2 * r], logits[j][2 * r + 1]);
            if (spoilt[0] | spoilt[1] | spoilt[2] | spoilt[3]) {
                // Cells that a row does not see may hold anything, even NaN.
                add_some_values(tile_v, tile_k, weights, sums);
                continue;
            }
            add_values(tile_v, weights, sums);
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            total[r] += shuffle_xor(total[r], 1);
            total[r] += shuffle_xor(total[r], 2);
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            u32 row = first_row + warp * 16 + lane_row + 8 * r;
            if (row >= rows) continue;
            u32 head = kv_head * sharing + row % sharing;
            u64 place = AT(p.t[0], 0, head, row / sharing, batch);
            float factor = 1;
            if (partials) {
                GLOBAL float *to = partial(partials, p.t[0].shape, head, row / sharing, batch,
                                           shares, share);
                if ((lane & 3) == 0) to[0] = largest[r], to[1] = total[r];
                place = (u64)((GLOBAL u8 *)(to + 2) - partials);
            } else {
                factor = final_factor(largest[r], total[r], sink_of(sinks, head));
            }
            GLOBAL float *to = (GLOBAL float *)(results + place);
#pragma unroll
            for (u32 d = 0; d < HEAD / 8; d++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 element = d * 8 + lane_pair + i;
                    if (element < p.t[3].shape[0]) to[element] = sums[d][2 * r + i] * factor;
                }
        }
    }
}

#undef flash_attn_mma
#undef KEY_ROW
#undef add_some_values
#undef add_products
#undef add_values
#undef load_queries
#undef HEAD_GROUPS
#undef HEAD
