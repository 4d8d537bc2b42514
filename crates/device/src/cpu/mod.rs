//! The CPU device: replays Programs with the kernels of `cpu_kernels` for the instruction set
//! chosen at start, on a team of pinned threads, with one copy of the weights in memory.

mod attend;
mod blocks;
mod carried;
mod class;
mod executor;
mod experts;
mod low_rank;
mod memory;
mod pace;
mod plan;
mod products;
mod profile;
mod replay;
mod rows;
mod state;
#[cfg(test)]
mod tests;
mod weights;

use cpu_kernels::isa::Isa;
use cpu_kernels::team::{self, Team};

use crate::{About, CachesLatents, Device, Executor, ExecutorOptions, Plan};
use cpu_kernels::attention::MAX_HEAD_DIM;
use cpu_kernels::delta::MAX_KEY_DIM;
use formats::{Result, Tensors};
use ops::Op;
use pace::Pace;
use program::Program;
use std::sync::Arc;

/// The CPU of this machine.
pub struct Cpu {
    team: Arc<Team>,
    /// Teams of half as many workers, a quarter, down to one, which decode where other programs
    /// use processors; none if the number of threads was asked for.
    smaller: Arc<[Team]>,
    isa: Isa,
    store: weights::Store,
}

impl Cpu {
    /// Starts a team of `threads`; `None` means one for each physical core that this process may
    /// use, and that decoding takes fewer where other programs use some.
    ///
    /// # Errors
    /// Zero threads, more than the system allows, or an unknown instruction set in `DELFT_ISA`.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        let count = threads.unwrap_or_else(team::default_threads);
        let team = Arc::new(Team::new(count)?);
        let most = if threads.is_none() { count / 2 } else { 0 };
        let (smaller, isa) = (halves(most), Isa::detect()?);
        Ok(Cpu { team, smaller, isa, store: weights::Store::default() })
    }
}

impl Cpu {
    /// As [`Device::load`], with this bound on the workers of steps that decode.
    fn load_at(
        &self,
        pace: Pace,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        self.check(&program)?;
        let load = executor::CpuExecutor::load(self, pace, program, tensors, options, progress);
        Ok(Box::new(load?))
    }
}

/// Teams of `most` workers, of half as many, and so on down to one. They sleep until they are
/// needed; if the system refuses threads, there are fewer teams.
fn halves(most: usize) -> Arc<[Team]> {
    let counts = std::iter::successors(Some(most), |count| Some(count / 2));
    let counts = counts.take_while(|count| *count > 0);
    counts.map_while(|count| Team::new(count).ok()).collect()
}

/// Bytes of memory that this process may still take; `None` if unknown.
pub fn free_memory() -> Option<usize> {
    memory::free().memory
}

impl Device for Cpu {
    fn about(&self) -> About {
        let (threads, isa) = (self.team.count(), self.isa.to_string());
        About { name: "cpu", threads, isa, driver: String::new() }
    }

    fn caches_latents(&self) -> CachesLatents {
        CachesLatents::Always
    }

    fn check(&self, program: &Program) -> Result<()> {
        crate::check("cpu", program, |op| match op {
            Op::AllReduce(_) => Some("a sum over ranks".to_owned()),
            Op::AllGather(_) | Op::JoinColumns(_) => Some("columns of several ranks".to_owned()),
            Op::Gradient(_) => Some("a gradient".to_owned()),
            Op::LowRank(_) => Some("an adapter apart from its product".to_owned()),
            Op::DeltaNet(net) if net.key_dim > MAX_KEY_DIM => {
                let found = net.key_dim;
                Some(format!("keys of {found} elements, more than {MAX_KEY_DIM}"))
            }
            Op::Attention(attention) if attention.head_dim > MAX_HEAD_DIM => {
                let found = attention.head_dim;
                Some(format!("heads of {found} elements, more than {MAX_HEAD_DIM}"))
            }
            _ => None,
        })
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Plan>> {
        self.check(program)?;
        let wanted = self.store.of(tensors, options.allow_nan);
        Ok(vec![plan::plan(program, tensors, options, self.team.count(), &wanted)?])
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        let pace = Pace::new(self.team.count(), !self.smaller.is_empty());
        self.load_at(pace, program, tensors, options, progress)
    }

    fn shared(&self) -> usize {
        self.store.shared()
    }
}
