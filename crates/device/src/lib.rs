//! Devices: each loads a Program's weights once, compiles the Program once per shape class, and replays it.

mod cache;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod finite;
pub mod gpu;
mod heap;
mod metal;
mod place;
mod plan;
mod ranks;
mod split;
mod survey;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt;
use std::sync::atomic::AtomicBool;

pub use formats::CacheType;
use formats::{Encoding, Error, Result, Tensors};
pub use gpu::Dispatch;
pub use heap::give_back;
use ops::Op;
use ops::sample::{Choice, Options};
pub use place::{Place, Several, SplitMode, gpus};
pub use plan::Plan;
use program::{Arguments, Program};
pub use split::Split;
pub use survey::{Gpus, Library, Processor, Survey, survey};

/// What a device is told when it loads a Program.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Element type of the cache.
    pub cache_type: CacheType,
    /// The most rows that one replay will have, and the most of them with logits.
    pub rows: (usize, usize),
    /// Blocks of each cache group; see [`Program::groups`]. They take memory only once something is written to them.
    pub blocks: Vec<usize>,
    /// Blocks of each group that one session takes with a whole context.
    pub context: Vec<usize>,
    /// How a GPU is given its work.
    pub dispatch: Dispatch,
    /// Loads weights that are NaN or infinite as they are; else they are refused.
    pub allow_nan: bool,
}

impl LoadOptions {
    /// What a replay of a Program may be given.
    pub(crate) fn limits(&self, program: &Program) -> program::Limits {
        let (tokens, outputs) = (self.rows.0.max(1), self.rows.1.max(1));
        let input = program.input.map_or(0, |v| program.shape(v).width);
        let positions = program.learned_positions();
        program::Limits { tokens, outputs, blocks: self.blocks.clone(), input, positions }
    }
}

/// Bytes that an executor holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Weights, as packed for this device.
    pub weights: usize,
    /// Cache blocks written so far.
    pub cache: usize,
    /// Activations and scratch.
    pub arena: usize,
    /// Of a device with memory of its own.
    pub device: Option<Usage>,
}

/// Bytes of a device's own memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// What it has.
    pub limit: usize,
    /// What this process's buffers take.
    pub active: usize,
    /// The most that they took at a time.
    pub peak: usize,
}

impl Memory {
    /// What several executors hold together.
    pub(crate) fn sum(parts: impl Iterator<Item = Memory>) -> Memory {
        parts.fold(Memory::default(), |a, b| Memory {
            weights: a.weights + b.weights,
            cache: a.cache + b.cache,
            arena: a.arena + b.arena,
            device: match (a.device, b.device) {
                (Some(a), Some(b)) => Some(Usage {
                    limit: a.limit.saturating_add(b.limit),
                    active: a.active + b.active,
                    peak: a.peak + b.peak,
                }),
                (one, other) => one.or(other),
            },
        })
    }
}

/// What bounds decoding: the weights that every token reads, and how fast they can be read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roof {
    /// Bytes of weights that a step of one token reads.
    pub token_bytes: usize,
    /// Bytes of keys and values that it reads besides for each cached position; layers with a window stop there.
    pub position_bytes: usize,
    /// Bytes per second at which the device reads them and does nothing else.
    pub bytes_per_second: f64,
}

/// The least that an operation has to read and compute, as follows from the Program and its packed weights. A
/// multiplication and an addition are two operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes read: each matrix once, the cached keys and values that are seen once; where there is neither, activations.
    pub bytes: u64,
    /// Operations in dot products of bytes.
    pub bytes_dot: u64,
    /// The same with codes of fewer than eight bits, where those take fewer instructions.
    pub narrow_dot: u64,
    /// Operations on the tile unit.
    pub tiles: u64,
    /// Operations in f32.
    pub floats: u64,
}

impl Work {
    /// Operations on all units.
    pub fn operations(&self) -> u64 {
        self.bytes_dot + self.narrow_dot + self.tiles + self.floats
    }
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        self.bytes += other.bytes;
        self.bytes_dot += other.bytes_dot;
        self.narrow_dot += other.narrow_dot;
        self.tiles += other.tiles;
        self.floats += other.floats;
    }
}

/// One operation of a timed replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// The operation: [`ops::Op::name`], or `head` for the one that makes the logits.
    pub name: &'static str,
    /// How its matrices are encoded; none where it has none, or they differ.
    pub format: Option<Encoding>,
    /// What it had to do.
    pub work: Work,
    /// Seconds from the first thread's start to the last one's end.
    pub seconds: f64,
    /// Seconds that a thread computed, on average: less than `seconds` where threads waited for each other.
    pub busy: f64,
}

/// A replay and where its time went.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// The operations that ran, in order.
    pub operations: Vec<Timing>,
    /// Seconds between operations: every thread was done with one and none had begun the next.
    pub barriers: f64,
    /// Seconds of the whole replay.
    pub seconds: f64,
}

/// Operations per second of all threads together, measured in loops that do nothing else; 0 where there is no such unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// The instruction set: `avx2`.
    pub isa: &'static str,
    /// Dot products of bytes.
    pub bytes_dot: f64,
    /// The same with codes of four bits, where those take fewer instructions.
    pub narrow_dot: f64,
    /// The tile unit, in bf16.
    pub tiles: f64,
    /// Multiply-adds in f32.
    pub floats: f64,
}

impl Peaks {
    /// That of the best unit.
    pub fn greatest(&self) -> f64 {
        self.bytes_dot.max(self.narrow_dot).max(self.tiles).max(self.floats)
    }
}

/// What the machine could do, for comparison with what it does.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Physical cores that this process may use.
    pub cores: usize,
    /// With the instruction set in use.
    pub used: Peaks,
    /// With the best one of the processor: the same, unless a lesser one was asked for.
    pub best: Peaks,
}

/// What a device is. Displays as `cpu, 2 threads, avx512`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// Its kind: `cpu`.
    pub name: &'static str,
    /// Threads that compute.
    pub threads: usize,
    /// The instruction set it was found to have.
    pub isa: String,
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.threads == 1 { "" } else { "s" };
        write!(f, "{}, {} thread{plural}, {}", self.name, self.threads, self.isa)
    }
}

/// A machine that runs Programs.
pub trait Device: Send + Sync {
    /// What it is.
    fn about(&self) -> About;

    /// Whether it has every operation of `program`, in the form that the Program wants; asked
    /// before anything is planned or loaded.
    ///
    /// # Errors
    /// The first operation or form that it lacks, by name.
    fn check(&self, program: &Program) -> Result<()>;

    /// What loading `program` and using it with a whole context will take of the device's memory; of each device's where they are
    /// several, in their order.
    ///
    /// # Errors
    /// A Program or weights that the device cannot load.
    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &LoadOptions,
    ) -> Result<Vec<Plan>>;

    /// Reads the weights of `program` out of `tensors` into the form in which this device multiplies them.
    /// `progress` is told bytes done and bytes in all.
    ///
    /// # Errors
    /// What does not fit by its plan, before anything is allocated; weights that are missing, damaged or, unless
    /// [`LoadOptions::allow_nan`] says otherwise, not finite.
    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>>;
}

/// Refuses the first operation of which `lack` says what the device has not.
pub(crate) fn check(
    device: &str,
    program: &Program,
    lack: impl Fn(&Op) -> Option<String>,
) -> Result<()> {
    let found = program.nodes.iter().find_map(|node| Some((node.op.name(), lack(&node.op)?)));
    match found {
        None => Ok(()),
        Some((name, found)) => {
            Err(Error::new(format!("{device}: {name}"), "an operation that this device has", found))
        }
    }
}

/// What a caller wants to know of a replay while it goes on, and how to end it.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// Set, at any time and from any thread, to end the replay early.
    pub stop: &'a AtomicBool,
    /// Told on the caller's thread, between operations, how much of the replay is done: 0 to 1. It holds up all threads that
    /// compute, and the executor is not its to use.
    pub progress: &'a (dyn Fn(f64) + Sync),
}

impl Watch<'_> {
    /// Nobody watches.
    pub const NONE: Watch<'static> = {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Watch { stop: &NEVER, progress: &|_| {} }
    };
}

/// A loaded Program with its weights and its pool of cache blocks.
pub trait Executor: Send {
    /// Replays the Program. A shape class seen before allocates nothing.
    fn run(&mut self, arguments: &Arguments<'_>) -> Result<()>;

    /// As [`Executor::run`], with somebody who watches. False if the replay was stopped: there is no result, and what the cache
    /// has at its positions is overwritten by whoever comes to them. A device that cannot look up between
    /// operations, because all of them are handed over at once, finishes.
    ///
    /// # Errors
    /// As [`Executor::run`].
    fn run_watched(&mut self, arguments: &Arguments<'_>, _: &Watch<'_>) -> Result<bool> {
        self.run(arguments).map(|()| true)
    }

    /// Replays the Program for one token and chooses the next, on the device: the token that
    /// [`Sampler`](ops::sample::Sampler) chooses from these logits, given the `history` up to and with this token. None if the
    /// device leaves choosing to the caller.
    ///
    /// The device may go on with the tokens it has chosen as far as the tables reach, so that the next call finds its answer
    /// there. What it has written beyond the last token that was asked for is overwritten by whoever comes to that position.
    fn choose(
        &mut self,
        arguments: &Arguments<'_>,
        options: &Options,
        history: &[u32],
    ) -> Option<Result<Choice>> {
        let _ = (arguments, options, history);
        None
    }

    /// Whether [`choose`](Executor::choose) chooses.
    fn chooses(&self) -> bool {
        false
    }

    /// Ends whatever [`choose`](Executor::choose) has going on ahead of its caller.
    fn forget(&mut self) {}

    /// From now on takes its Program's input from where `before` computes it, whose replays then leave their one result there:
    /// neither gives nor is given it by way of the host. False, and nothing has changed, where that cannot be.
    fn follow(&mut self, before: &mut dyn Executor) -> bool {
        let _ = before;
        false
    }

    /// Itself, for one of its kind that is to [`follow`](Executor::follow) it.
    fn any(&mut self) -> Option<&mut dyn Any> {
        None
    }

    /// Result `index` of the last replay, `[rows, width]`.
    fn result(&self, index: usize) -> &[f32];

    /// What it holds.
    fn memory(&self) -> Memory;

    /// Shape classes compiled so far.
    fn compiled(&self) -> usize;

    /// Measures how fast the weights can be read; takes some passes over them.
    fn roof(&self) -> Roof;

    /// As [`Executor::run`], noting what every operation took; `None`, with nothing replayed, on a device that cannot
    /// tell.
    ///
    /// # Errors
    /// As [`Executor::run`].
    fn run_timed(&mut self, _: &Arguments<'_>) -> Result<Option<Profile>> {
        Ok(None)
    }

    /// Measures what bounds computation, in a tenth of a second or so; `None` on a device that cannot tell.
    fn limits(&self) -> Option<Limits> {
        None
    }
}
