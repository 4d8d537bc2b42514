//! The CPU device: SIMD kernels chosen once at start, a pinned thread team, one copy of the weights in memory.

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
mod class;
mod executor;
pub mod isa;
pub mod math;
pub mod matmul;
mod memory;
mod profile;
mod replay;
pub mod roof;
pub mod team;

use crate::{About, Device, Executor, LoadOptions, Plan};
use formats::{Result, Tensors};
use isa::Isa;
use program::Program;
use std::sync::Arc;
use team::Team;

/// The processor that the program runs on.
pub struct Cpu {
    team: Arc<Team>,
    isa: Isa,
}

impl Cpu {
    /// A team of `threads`; `None`: one for each physical core that this process may use.
    ///
    /// # Errors
    /// No threads, more than the system gives, or an unknown instruction set asked for by `DELFT_ISA`.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        let threads = threads.unwrap_or_else(team::default_threads);
        Ok(Cpu { team: Arc::new(Team::new(threads)?), isa: Isa::detect()? })
    }
}

/// Bytes of memory that this process may still take; `None` where the system does not tell.
pub(crate) fn free_memory() -> Option<usize> {
    memory::free().memory
}

impl Device for Cpu {
    fn about(&self) -> About {
        About { name: "cpu", threads: self.team.count(), isa: self.isa.to_string() }
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &LoadOptions,
    ) -> Result<Vec<Plan>> {
        Ok(vec![executor::plan(program, tensors, options, self.team.count())?])
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        Ok(Box::new(executor::CpuExecutor::load(
            self.team.clone(),
            self.isa,
            program,
            tensors,
            options,
            progress,
        )?))
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for a cache line; any address is allowed.
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
