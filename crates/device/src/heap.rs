//! The process's own heap.

/// Gives the system back what was freed between things still in use: reading a large vocabulary
/// leaves tens of MiB of it, which would stay beside the weights.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it concerns memory that nobody holds (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has all threads share two heaps, where the system's allocator would give each a heap of its own,
/// whose free parts others cannot use. For programs of many threads that come and go; before the
/// first of them.
pub fn share_heaps() {
    // SAFETY: it sets a number that the allocator reads when a thread first asks for memory
    // (mallopt(3)).
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}
