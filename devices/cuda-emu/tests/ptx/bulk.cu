// Bulk copies and mbarriers.
#include "base.h"

DEVICE u32 shared_address(const void *p) {
    u64 a;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(a) : "l"(p));
    return (u32)a;
}

// The first warp copies chunks of 1 KiB into two stages; the others add them up.
KERNEL ring(u32 *y, const u32 *a, u32 chunks) {
    SHARED __attribute__((aligned(16))) u32 stage[2][256];
    SHARED u64 full[2];
    SHARED u64 empty[2];
    u32 i = tid();
    if (i == 0) {
        for (u32 s = 0; s < 2; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + s)) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;" ::"r"(shared_address(empty + s)) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    barrier();
    u32 sum = 0;
    for (u32 c = 0; c < chunks; c++) {
        u32 s = c & 1, phase = c >> 1 & 1;
        if (i < 32) {
            if (i == 0) {
                if (c >= 2)
                    asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L; }" ::"r"(shared_address(empty + s)), "r"(phase ^ 1) : "memory");
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(shared_address(full + s)) : "memory");
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(shared_address(stage[s])), "l"(a + c * 256), "r"(shared_address(full + s)) : "memory");
            }
        } else {
            asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(shared_address(full + s)), "r"(phase) : "memory");
            for (u32 k = 0; k < 4; k++) sum += stage[s][i - 32 + 64 * k];
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(empty + s)) : "memory");
        }
    }
    if (i >= 32) y[i - 32] = sum;
}
