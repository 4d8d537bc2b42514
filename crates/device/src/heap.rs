//! The process's own heap.

/// Gives the system back what was freed between things still in use: reading a large vocabulary leaves tens of MiB of it,
/// which would stay beside the weights.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it concerns memory that nobody holds (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
