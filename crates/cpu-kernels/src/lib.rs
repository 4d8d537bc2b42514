//! SIMD kernels for CPUs, and the team of threads that runs them. They know bytes and shapes but no
//! Program; the CPU device of `delft-device` replays Programs with them.
//!
//! - [`isa`]: which instruction sets there are, and which is used.
//! - [`team`]: pinned threads that work on one job at a time.
//! - [`matmul`]: packed matrices and their products; [`attention`]: the key/value cache and
//!   attention over it; [`delta`]: matrices that gated delta nets carry; [`low_rank`]: the factors
//!   of adapters; [`math`]: norms, activations, softmax, rotary embedding.
//! - [`roof`]: how fast memory can be read.

/// Runs an expression for each index below a small constant, in kernels of which there are
/// hundreds: an iterator over a range does the same, but has five times as much code, which the
/// compiler takes away again in each of them.
macro_rules! each {
    ($i:ident < $n:expr, $body:expr) => {{
        let mut $i = 0;
        while $i < $n {
            $body;
            $i += 1;
        }
    }};
}

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
pub mod delta;
pub mod isa;
pub mod low_rank;
pub mod math;
pub mod matmul;
pub mod roof;
pub mod scan;
pub mod team;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches a cache line; any address is allowed.
#[inline(always)]
fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64 and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction is part of every aarch64 and never faults.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}
