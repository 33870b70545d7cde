// Copies, conversions, repetition and concatenation. A thread moves an element, or a part of a
// block.
#include "prelude.h"

INLINE void move_unit(GLOBAL u8 *to, const GLOBAL u8 *from, u32 bytes) {
    if (bytes == 8) *(GLOBAL u64 *)to = *(const GLOBAL u64 *)from;
    else if (bytes == 4) *(GLOBAL u32 *)to = *(const GLOBAL u32 *)from;
    else if (bytes == 2) *(GLOBAL u16 *)to = *(const GLOBAL u16 *)from;
    else *to = *from;
}

// y = the elements of `a` in logical order. ints[0]: bytes of an element.
KERNEL THREADS(256) copy(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        INDICES(n, p.t[1].shape, j0, j1, j2, j3);
        move_unit(y + AT(p.t[0], i0, i1, i2, i3), a + AT(p.t[1], j0, j1, j2, j3), p.ints[0]);
    }
}

// y = `a` repeated. ints[0]: bytes of a unit.
KERNEL THREADS(256) repeat(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    const u32 *shape = p.t[1].shape;
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        u64 from = AT(p.t[1], i0 % shape[0], i1 % shape[1], i2 % shape[2], i3 % shape[3]);
        move_unit(y + AT(p.t[0], i0, i1, i2, i3), a + from, p.ints[0]);
    }
}

// y = `a`, then `b`, along dimension ints[1]. ints[0]: bytes of a unit.
KERNEL THREADS(256) concat(GLOBAL u8 *y, const GLOBAL u8 *a, const GLOBAL u8 *b, COMMON) {
    u32 dim = p.ints[1];
    u32 extent = dim == 0 ? p.t[1].shape[0] : dim == 1 ? p.t[1].shape[1]
               : dim == 2 ? p.t[1].shape[2] : p.t[1].shape[3];
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        u32 at = dim == 0 ? i0 : dim == 1 ? i1 : dim == 2 ? i2 : i3;
        const GLOBAL u8 *from;
        if (at < extent) {
            from = a + AT(p.t[1], i0, i1, i2, i3);
        } else {
            u32 rest = at - extent;
            from = b + AT(p.t[2], dim == 0 ? rest : i0, dim == 1 ? rest : i1, dim == 2 ? rest : i2,
                          dim == 3 ? rest : i3);
        }
        move_unit(y + AT(p.t[0], i0, i1, i2, i3), from, p.ints[0]);
    }
}

INLINE u32 is_integer(u32 type) { return type == I8 || type == I16 || type == I32 || type == I64; }

INLINE i64 get_integer(const GLOBAL u8 *at, u32 type) {
    if (type == I64) return *(const GLOBAL i64 *)at;
    if (type == I32) return *(const GLOBAL i32 *)at;
    if (type == I16) return *(const GLOBAL i16 *)at;
    return *(const GLOBAL i8 *)at;
}
INLINE void set_integer(GLOBAL u8 *at, u32 type, i64 v) {
    if (type == I64) *(GLOBAL i64 *)at = v;
    else if (type == I32) *(GLOBAL i32 *)at = (i32)v;
    else if (type == I16) *(GLOBAL i16 *)at = (i16)v;
    else *(GLOBAL i8 *)at = (i8)v;
}

// The largest and smallest number of an integer type, as floats that convert to it.
INLINE i64 integer_from_float(float x, u32 type) {
    if (x != x) return 0;
    i64 high = type == I64   ? 0x7fffffffffffffffll
               : type == I32 ? 0x7fffffff
               : type == I16 ? 32767
                             : 127;
    if (x >= (float)high) return high;
    if (x <= -(float)high - 1) return -high - 1;
    return (i64)x;
}

// y = the elements of `a` in logical order, in another type.
KERNEL THREADS(256) convert(GLOBAL u8 *y, const GLOBAL u8 *a, COMMON) {
    u32 from = p.t[1].type, to = p.t[0].type;
#pragma unroll 1
    for (u64 n = global_id(); n < ELEMENTS(p.t[0]); n += global_count()) {
        INDICES(n, p.t[0].shape, i0, i1, i2, i3);
        INDICES(n, p.t[1].shape, j0, j1, j2, j3);
        GLOBAL u8 *target = y + AT(p.t[0], i0, i1, i2, i3);
        const GLOBAL u8 *source = a + AT(p.t[1], j0, j1, j2, j3);
        if (is_integer(from)) {
            i64 v = get_integer(source, from);
            if (is_integer(to)) set_integer(target, to, v);
            else set_float(target, to, (float)v);
        } else {
            float v = get_float(source, from);
            if (is_integer(to)) set_integer(target, to, integer_from_float(v, to));
            else set_float(target, to, v);
        }
    }
}
