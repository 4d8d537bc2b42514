//! Tuning of the process's heap.

/// Returns freed heap memory to the system. Reading a large vocabulary leaves tens of MiB of freed
/// chunks between live ones.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim(3) touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Limits malloc to two arenas for all threads. By default each thread may get its own, whose free
/// chunks other threads cannot use. For programs whose many threads come and go; call it before the
/// first of them starts.
pub fn share_heaps() {
    // SAFETY: mallopt(3) sets a number that the allocator reads when a thread first allocates.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}
