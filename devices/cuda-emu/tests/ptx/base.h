// Names that the snippets use.
#pragma once
#define KERNEL extern "C" __attribute__((global)) void
#define SHARED __attribute__((shared))
#define DEVICE __attribute__((device, always_inline)) static inline
#define NOINLINE __attribute__((device, noinline)) static
#define CONSTANT __attribute__((constant))
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define SPECIAL(name, register)                                                                    \
    DEVICE u32 name(void) { u32 r; asm("mov.u32 %0, " register ";" : "=r"(r)); return r; }
SPECIAL(tid, "%%tid.x")
SPECIAL(bid, "%%ctaid.x")
SPECIAL(block_size, "%%ntid.x")
SPECIAL(blocks, "%%nctaid.x")
DEVICE void barrier(void) { asm volatile("bar.sync 0;" ::: "memory"); }
DEVICE void fence(void) { asm volatile("membar.gl;" ::: "memory"); }
DEVICE u32 add_atomic(u32 *to, u32 v) {
    u32 r;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(to), "r"(v) : "memory");
    return r;
}
