//! Devices: each loads a Program's weights once, compiles the Program once per shape class, and
//! replays it.

#![cfg_attr(
    not(any(feature = "cuda", feature = "sim", all(feature = "metal", target_vendor = "apple"))),
    allow(dead_code, reason = "a build for processors alone drives no GPU")
)]

mod cache;
mod choose;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod finite;
pub mod gpu;
mod heap;
mod metal;
mod offload;
mod place;
mod plan;
#[cfg(any(feature = "cuda", feature = "sim"))]
mod ranks;
mod split;
mod survey;
#[cfg(test)]
mod tests;
mod train;
mod work;

use std::any::Any;
use std::fmt;
use std::sync::atomic::AtomicBool;

pub use cache::folder_of_user;
pub use choose::{Outcome, Refusal};
pub use cpu::free_memory;
pub use formats::CacheType;
use formats::{Encoding, Error, ErrorKind, Result, Tensors};
pub use gpu::Dispatch;
pub use heap::{give_back, share_heaps};
pub use offload::Offload;
use ops::{Op, Rows};
pub use place::{Place, Several, Simulator, SplitMode, gpus};
pub use plan::Plan;
use program::{Adapter, Program, Step};
pub use split::Split;
pub use survey::{Gpus, Library, Processor, Survey, survey};
pub use train::{Divided, Kept, PackedRows, Precision, TrainOptions, Trainer};

/// Slots of an executor, in which sequences carry something from step to step: a slot takes no
/// memory before it is used.
pub const SLOTS: usize = 4096;

/// What a device is told when it loads a Program.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Element type of the cache.
    pub cache_type: CacheType,
    /// The most rows that one replay will have, and the most of them with logits.
    pub rows: (usize, usize),
    /// The most sequences that one replay will have; 0 is one.
    pub sequences: usize,
    /// Blocks of each cache group; see [`Program::groups`]. They take memory only once something is
    /// written to them.
    pub blocks: Vec<usize>,
    /// Blocks of each group that one session takes with a whole context.
    pub context: Vec<usize>,
    /// Room for adapters.
    pub seats: Seats,
    /// How a GPU is given its work.
    pub dispatch: Dispatch,
    /// Computes each row as steps of many rows do, so that on a GPU, too, its bits do not depend on
    /// how many there are; where it is for more than a few sequences, one row alone is then slower.
    /// The CPU always does.
    pub batched: bool,
    /// Loads weights that are NaN or infinite as they are; else they are refused.
    pub allow_nan: bool,
}

/// Room for adapters, which are numbered from 1 on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seats {
    /// How many there can be at the same time.
    pub count: usize,
    /// The greatest rank that one may have.
    pub rank: usize,
}

impl LoadOptions {
    /// What a replay of a Program may be given.
    pub(crate) fn limits(&self, program: &Program) -> program::Limits {
        let (tokens, outputs) = (self.rows.0.max(1), self.rows.1.max(1));
        let first = program.results.first().map(|v| program.shape(*v));
        program::Limits {
            tokens,
            outputs,
            sequences: self.sequences.max(1),
            slots: SLOTS,
            seats: self.seats.count,
            blocks: self.blocks.clone(),
            windows: program.groups().iter().map(|group| group.window).collect(),
            input: program.input.map_or(0, |v| program.shape(v).width),
            positions: program.learned_positions(),
            vocab: first.filter(|shape| shape.rows == Rows::Outputs).map(|shape| shape.width),
        }
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
    /// Bytes of keys and values that it reads besides for each cached position; layers with a
    /// window stop there.
    pub position_bytes: usize,
    /// Bytes per second at which the device reads them and does nothing else.
    pub bytes_per_second: f64,
}

impl Roof {
    /// That of several that work one after the other: the rate is that at which all read what is
    /// theirs.
    pub(crate) fn in_turns(all: impl Iterator<Item = Roof>) -> Roof {
        let mut whole = Roof { token_bytes: 0, position_bytes: 0, bytes_per_second: 0.0 };
        let mut seconds = 0.0;
        for roof in all {
            whole.token_bytes += roof.token_bytes;
            whole.position_bytes += roof.position_bytes;
            seconds += roof.token_bytes as f64 / roof.bytes_per_second.max(1.0);
        }
        whole.bytes_per_second = whole.token_bytes as f64 / f64::max(seconds, 1e-12);
        whole
    }
}

/// The least that an operation has to read and compute, as follows from the Program and its packed
/// weights. A multiplication and an addition are two operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes read: each matrix once, the cached keys and values that are seen once; where there is
    /// neither, activations.
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
    /// The operation: [`ops::Operation::name`], or `head` for the one that makes the logits.
    pub name: &'static str,
    /// How its matrices are encoded; none where it has none, or they differ.
    pub format: Option<Encoding>,
    /// What it had to do.
    pub work: Work,
    /// Seconds from the first thread's start to the last one's end.
    pub seconds: f64,
    /// Seconds that a thread computed, on average: less than `seconds` where threads waited for
    /// each other.
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

/// Operations per second of all threads together, measured in loops that do nothing else; 0 where
/// there is no such unit.
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
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct About {
    /// Its kind: `cpu`.
    pub name: &'static str,
    /// Threads that compute.
    pub threads: usize,
    /// The instruction set it was found to have.
    pub isa: String,
    /// The version of its driver; empty where there is none.
    pub driver: String,
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

    /// What loading `program` and using it with a whole context will take of the device's memory;
    /// of each device's where they are several, in their order.
    ///
    /// # Errors
    /// A Program or weights that the device cannot load.
    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &LoadOptions,
    ) -> Result<Vec<Plan>>;

    /// Reads the weights of `program` out of `tensors` into the form in which this device
    /// multiplies them. `progress` is told bytes done and bytes in all.
    ///
    /// # Errors
    /// What does not fit by its plan, before anything is allocated; weights that are missing,
    /// damaged or, unless [`LoadOptions::allow_nan`] says otherwise, not finite.
    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>>;

    /// Loads Programs to be trained.
    ///
    /// # Errors
    /// A device that does not train, an operation that it has not in training, and what
    /// [`Device::load`] refuses.
    fn train(&self, tensors: &Tensors, options: TrainOptions) -> Result<Box<dyn Trainer>> {
        let _ = (tensors, options);
        let found = self.about().name;
        Err(Error::new("train", "a device that trains", found).of(ErrorKind::Unsupported))
    }
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
    /// Told on the caller's thread, between operations, how much of the replay is done: 0 to 1. It
    /// holds up all threads that compute, and the executor is not its to use.
    pub progress: &'a (dyn Fn(f64) + Sync),
}

impl Watch<'_> {
    /// Nobody watches.
    pub const NONE: Watch<'static> = {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Watch { stop: &NEVER, progress: &|_| {} }
    };
}

/// A step that was submitted: later ones are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

impl Ticket {
    /// The next of an executor's tickets, whose last one's number is kept in `last`.
    pub(crate) fn next(last: &mut u64) -> Ticket {
        *last += 1;
        Ticket(*last)
    }

    /// Its number.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// The error of one that nothing is known of any more.
    pub(crate) fn unknown(self) -> Error {
        let expected = "a step that was submitted, and not waited for before later ones";
        Error::new("wait", expected, format!("step {}", self.0)).of(ErrorKind::Internal)
    }
}

/// The error of a device whose cache is not given out.
fn keeps_cache() -> Error {
    let expected = "a device that holds whole key and value heads of every layer";
    Error::new("cache", expected, "ranks that share them").of(ErrorKind::Unsupported)
}

/// The error of a device that computes Programs whole.
fn exchanges_nothing() -> Error {
    let expected = "a device that computes a part of a Program at a time";
    Error::new("exchange", expected, "another").of(ErrorKind::Unsupported)
}

/// The error of a block, or a layer, that there is not.
pub(crate) fn no_block(layer: usize, block: u32) -> Error {
    Error::new("cache", "a block of a layer", format!("block {block} of layer {layer}"))
}

/// Checks the bytes that a block of a cache layer is to be made of.
///
/// # Errors
/// Another number than it has.
pub(crate) fn check_block(expected: usize, bytes: &[u8]) -> Result<()> {
    if bytes.len() == expected {
        return Ok(());
    }
    Err(Error::new("cache", format!("{expected} bytes of a block"), bytes.len()))
}

/// Steps of a slot that may be submitted before the first of them is waited for.
pub const IN_FLIGHT: usize = 2;

/// Latest steps of which it is known what they chose.
pub const REMEMBERED: usize = 64;

/// A loaded Program with its weights and its pool of cache blocks.
///
/// Steps take effect in the order in which they were submitted. What a step has written to the
/// cache beyond the last token that anybody wants is overwritten by whoever comes to that position.
pub trait Executor: Send {
    /// Replays the Program: enqueues it, or computes at once on a device that is the host. A shape
    /// class seen before allocates nothing. At most [`IN_FLIGHT`] steps of a slot are on their way
    /// at a time.
    ///
    /// A sequence that chooses does so from the logits of its last row: the token that
    /// [`Sampler`](ops::sample::Sampler) chooses at the index after that row's, whatever else is in
    /// the step.
    ///
    /// # Errors
    /// A step that does not [check](Step::check), and whatever fails. What was chosen ahead is
    /// forgotten then; what there is in the cache stays.
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket> {
        let stopped = || Error::new("step", "a step that ends", "one that was stopped");
        self.submit_watched(step, &Watch::NONE)?.ok_or_else(stopped)
    }

    /// As [`Executor::submit`], with somebody who watches. None if the replay was stopped: it has
    /// no ticket, and what the cache has at its positions is overwritten by whoever comes to them.
    /// A device that cannot look up between operations, because all of them are handed over at
    /// once, finishes.
    ///
    /// # Errors
    /// As [`Executor::submit`].
    fn submit_watched(&mut self, step: &Step<'_>, watch: &Watch<'_>) -> Result<Option<Ticket>>;

    /// Waits for what a step chose. Steps are waited for in the order in which they were submitted;
    /// the one last waited for may be asked again, and one of which nobody wants to know need not
    /// be waited for.
    ///
    /// # Errors
    /// A ticket of which nothing is known any more, and whatever fails.
    fn wait(&mut self, ticket: Ticket) -> Result<Outcome<'_>>;

    /// Whether it is known, or will be, what a step chose: those before the last [`REMEMBERED`] are
    /// forgotten.
    fn keeps(&self, ticket: Ticket) -> bool;

    /// Waits for result `index` of the last step that was submitted, `[rows, width]`.
    ///
    /// # Errors
    /// A ticket of an earlier step, and whatever fails.
    fn read(&mut self, ticket: Ticket, index: usize) -> Result<&[f32]>;

    /// How many more steps it pays to submit before one is waited for, their tokens being
    /// [`CHOSEN`](program::CHOSEN): those of a device that computes while the host does something
    /// else. Where it is 0, tokens may have to be known.
    fn ahead(&self) -> usize {
        1
    }

    /// Copies blocks of a cache group, each `(from, to)` in turn, for all layers: for a sequence
    /// that goes on from a part of a block that others have too.
    ///
    /// # Errors
    /// Blocks that there are none of, and whatever fails.
    fn copy_blocks(&mut self, group: usize, blocks: &[(u32, u32)]) -> Result<()>;

    /// Appends a block of a cache layer to `bytes`: its keys `[BLOCK_TOKENS, kv_heads, head_dim]`
    /// as elements of the cache's type, then its values. Of q8_0 these are the keys' codes, their
    /// scales, the values' codes and theirs. Every device that has the type gives the same form.
    ///
    /// # Errors
    /// A layer or block that there is not, a device that does not give its cache out, and whatever
    /// fails.
    fn read_block(&mut self, layer: usize, block: u32, bytes: &mut Vec<u8>) -> Result<()> {
        let _ = (layer, block, bytes);
        Err(keeps_cache())
    }

    /// Makes a block of a cache layer what [`Executor::read_block`] gave.
    ///
    /// # Errors
    /// As for reading, and another number of bytes than a block has.
    fn write_block(&mut self, layer: usize, block: u32, bytes: &[u8]) -> Result<()> {
        let _ = (layer, block, bytes);
        Err(keeps_cache())
    }

    /// Puts an adapter on a seat, from 1 on, in the place of the one that is there, or leaves the
    /// seat empty. Steps that were submitted before are computed with what was there.
    ///
    /// # Errors
    /// A seat that there is not, an adapter that does not fit the Program's sites or the rank that
    /// there is room for, and too little memory. The seat is as it was then.
    fn seat(&mut self, seat: u32, _: Option<&Adapter>) -> Result<()> {
        let found = format!("seat {seat}");
        Err(Error::new("adapter", "a device that takes adapters", found).of(ErrorKind::Unsupported))
    }

    /// From now on takes its Program's input from where `before` computes it, whose replays then
    /// leave their one result there: neither gives nor is given it by way of the host. False, and
    /// nothing has changed, where that cannot be.
    fn follow(&mut self, before: &mut dyn Executor) -> bool {
        let _ = before;
        false
    }

    /// From now on has `partner` compute what its Program's exchanges bring: the away side of a
    /// Program of which some operations were [moved](Program::offload).
    ///
    /// # Errors
    /// A device whose replays cannot stop in between.
    fn join(&mut self, partner: Box<dyn Executor>) -> Result<()> {
        drop(partner);
        Err(exchanges_nothing())
    }

    /// As the away side: takes what exchange `number` brings, value by value, computes up to the
    /// next one, and makes `gives` what that gives. The step's tokens may be any.
    ///
    /// # Errors
    /// Values of other sizes, a Program without that exchange, and whatever fails.
    fn exchange(
        &mut self,
        step: &Step<'_>,
        number: usize,
        brings: &[Vec<f32>],
        gives: &mut Vec<Vec<f32>>,
    ) -> Result<()> {
        let _ = (step, number, brings, gives);
        Err(exchanges_nothing())
    }

    /// Itself, for one of its kind that is to [`follow`](Executor::follow) it.
    fn any(&mut self) -> Option<&mut dyn Any> {
        None
    }

    /// What it holds.
    fn memory(&self) -> Memory;

    /// Shape classes compiled so far.
    fn compiled(&self) -> usize;

    /// Measures how fast the weights can be read; takes some passes over them.
    fn roof(&self) -> Roof;

    /// As [`Executor::submit`], noting what every operation took; `None`, with nothing replayed, on
    /// a device that cannot tell.
    ///
    /// # Errors
    /// As [`Executor::submit`].
    fn submit_timed(&mut self, _: &Step<'_>) -> Result<Option<(Ticket, Profile)>> {
        Ok(None)
    }

    /// Measures what bounds computation, in a tenth of a second or so; `None` on a device that
    /// cannot tell.
    fn limits(&self) -> Option<Limits> {
        None
    }
}
