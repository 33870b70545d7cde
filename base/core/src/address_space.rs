//! The limit of this process's address space (`ulimit -v`).

/// Returns the bytes of address space that this process may still map, or `None` without a limit
/// or on systems that do not report one.
pub fn free_address_space() -> Option<u64> {
    let limit = system::limit()?;
    Some(limit.saturating_sub(system::used().unwrap_or(0)))
}

/// Makes all threads allocate from one heap if address space is limited.
///
/// glibc reserves 64 MiB of addresses for the heap of each thread. Where the limit refuses them,
/// each allocation of the thread maps pages of its own, so that a few thousand small ones use up
/// tens of MiB. Call this before the program starts threads.
pub fn share_heap_if_limited() {
    if system::limit().is_some() {
        system::share_heap();
    }
}

#[cfg(target_os = "linux")]
mod system {
    /// Returns the limit in bytes, if there is one.
    pub fn limit() -> Option<u64> {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `getrlimit` writes one `rlimit` to the address, and nothing else.
        let result = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
        (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    }

    /// Returns the mapped bytes, if the system reports them.
    pub fn used() -> Option<u64> {
        let text = std::fs::read_to_string("/proc/self/statm").ok()?;
        let pages: u64 = text.split_whitespace().next()?.parse().ok()?;
        pages.checked_mul(crate::page_bytes() as u64)
    }

    #[cfg(target_env = "gnu")]
    pub fn share_heap() {
        // SAFETY: `mallopt` changes an allocator setting under the allocator's lock.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }

    /// Other allocators reserve no address space for each thread.
    #[cfg(not(target_env = "gnu"))]
    pub fn share_heap() {}
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub fn limit() -> Option<u64> {
        None
    }

    pub fn used() -> Option<u64> {
        None
    }

    pub fn share_heap() {}
}
