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
#[cfg_attr(
    not(any(feature = "cuda", feature = "sim")),
    allow(dead_code, reason = "a build without GPUs that can be ranks")
)]
mod ranks;
mod resident;
mod split;
mod store;
mod survey;
#[cfg(test)]
mod tests;
mod train;
mod work;

use std::any::Any;
use std::fmt;
use std::sync::atomic::AtomicBool;

pub use cache::folder_of_user;
pub use choose::{Outcome, Refusal, find_likeliest};
pub use cpu::free_memory;
pub use formats::CacheType;
use formats::{Encoding, Error, ErrorKind, Result, Tensors};
pub use gpu::Dispatch;
pub use heap::{give_back, share_heaps};
pub use offload::Offload;
use ops::{Op, Rows};
pub use place::{DeviceList, DeviceSpec, Simulator, SplitMode, gpus};
pub use plan::Plan;
use program::{AdapterFactors, Choose, Program, Step};
pub use ranks::{Absence, Processes, RankLaunch, follow};
pub use resident::peak_rss_bytes;
pub use split::Split;
pub use survey::{Gpus, Processor, RuntimeLibrary, Survey, survey};
pub use train::{Divided, Kept, PackedRows, Precision, TrainOptions, Trainer};

/// Elements of the longest head that any device attends with: latents of 512 and 64 that turn.
pub const LONGEST_HEAD: usize = cpu_kernels::attention::MAX_HEAD_DIM;

/// Number of slots of an executor. A slot holds what one sequence carries from step to step, and
/// takes no memory before its first use.
pub const SLOTS: usize = 4096;

/// Options for loading a Program on a device.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct ExecutorOptions {
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Most rows of one replay, and most of those that have logits.
    pub rows: (usize, usize),
    /// Most sequences in one replay; 0 counts as 1.
    pub sequences: usize,
    /// Number of blocks of each cache group; see [`Program::groups`]. A block takes memory only
    /// once something is written to it.
    pub blocks: Vec<usize>,
    /// Number of blocks of each group that one session with a full context takes.
    pub context: Vec<usize>,
    /// Room for adapters.
    pub seats: Seats,
    /// How work is submitted to a GPU.
    pub dispatch: Dispatch,
    /// Computes a single row with the same kernels as steps of many rows, so that on a GPU, too, a
    /// row's bits do not depend on the number of rows in its step. Single-row steps are then
    /// slower. The CPU always works so.
    pub batched: bool,
    /// Keeps unpacked copies of packed matrices for prompts, where they take a small part of the
    /// memory that is left.
    pub copies: bool,
    /// Loads weights that are NaN or infinite unchanged; otherwise they are refused.
    pub allow_nan: bool,
}

/// Room for adapters. Seats are numbered from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Seats {
    /// Most adapters loaded at a time.
    pub count: usize,
    /// The greatest rank of an adapter.
    pub rank: usize,
}

impl ExecutorOptions {
    /// The limits within which a step of `program` must stay.
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

/// Bytes held by an executor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Memory {
    /// Weights, as packed for this device.
    pub weights: usize,
    /// Cache blocks written so far.
    pub cache: usize,
    /// Activations and scratch.
    pub arena: usize,
    /// The device's own memory, if it has any.
    pub device: Option<Usage>,
}

/// Bytes of a device's own memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Usage {
    /// Total device memory.
    pub limit: usize,
    /// Memory allocated by this process's buffers.
    pub active: usize,
    /// The highest value that `active` has had.
    pub peak: usize,
}

impl Memory {
    /// The sum over several executors.
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

/// The memory bandwidth bound of decoding: bytes read for each token, and the measured read
/// bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Roof {
    /// Bytes of weights that a step of one token reads.
    pub token_bytes: usize,
    /// Bytes of keys and values read in addition for each cached position. Layers with a window
    /// read at most the window.
    pub position_bytes: usize,
    /// The device's measured read bandwidth, in bytes per second.
    pub bytes_per_second: f64,
}

impl Roof {
    /// The roof of devices that work one after the other. Its rate is their total bytes divided by
    /// the sum of their read times.
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

/// The least that an operation has to read and compute, derived from the Program and its packed
/// weights. A multiply-add counts as two operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes read: every matrix once, and every cached key and value that is attended to once. For
    /// an operation with neither, its activations.
    pub bytes: u64,
    /// Operations in int8 dot products.
    pub bytes_dot: u64,
    /// Operations in dot products on codes of fewer than eight bits, on hardware where those take
    /// fewer instructions.
    pub narrow_dot: u64,
    /// Operations on the matrix (tile) unit.
    pub tiles: u64,
    /// Operations in f32.
    pub floats: u64,
}

impl Work {
    /// Operations on all units together.
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
    /// [`ops::Operation::name`], or `head` for the operation that computes the logits.
    pub name: &'static str,
    /// The encoding of the operation's matrices; `None` if it has none, or if they differ.
    pub format: Option<Encoding>,
    /// The work it had to do.
    pub work: Work,
    /// Seconds from the first thread's start to the last thread's end.
    pub seconds: f64,
    /// Mean seconds that a thread computed; less than `seconds` if threads waited for each other.
    pub busy: f64,
}

/// A replay with the time of each operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// The operations that ran, in order.
    pub operations: Vec<Timing>,
    /// Seconds between operations, when every thread had finished one and none had begun the next.
    pub barriers: f64,
    /// Seconds of the whole replay.
    pub seconds: f64,
}

/// Peak throughput of all threads together, in operations per second, measured in loops that do
/// nothing else. 0 means the unit does not exist.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// The instruction set: `avx2`.
    pub isa: &'static str,
    /// Int8 dot products.
    pub bytes_dot: f64,
    /// Dot products on 4-bit codes, on hardware where those take fewer instructions.
    pub narrow_dot: f64,
    /// The matrix (tile) unit: in bf16, or in f32 by Accelerate.
    pub tiles: f64,
    /// Multiply-adds in f32.
    pub floats: f64,
}

impl Peaks {
    /// The peak of the fastest unit.
    pub fn greatest(&self) -> f64 {
        self.bytes_dot.max(self.narrow_dot).max(self.tiles).max(self.floats)
    }

    /// The peaks of this many devices together.
    pub(crate) fn times(self, devices: f64) -> Peaks {
        Peaks {
            bytes_dot: devices * self.bytes_dot,
            narrow_dot: devices * self.narrow_dot,
            tiles: devices * self.tiles,
            floats: devices * self.floats,
            ..self
        }
    }
}

/// Measured compute limits of the machine, to compare with what a run achieves.
#[derive(Debug, Clone, PartialEq)]
pub struct ComputePeaks {
    /// Physical cores that this process may use.
    pub cores: usize,
    /// Peaks with the instruction set in use.
    pub used: Peaks,
    /// Peaks with the best instruction set of the processor; equal to `used` unless a lesser one
    /// was chosen.
    pub best: Peaks,
}

/// A description of a device. Displays as `cpu, 2 threads, avx512`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct About {
    /// Its kind: `cpu`.
    pub name: &'static str,
    /// Threads that compute.
    pub threads: usize,
    /// The detected instruction set or GPU.
    pub isa: String,
    /// The driver's version; empty if there is none.
    pub driver: String,
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.threads == 1 { "" } else { "s" };
        write!(f, "{}, {} thread{plural}, {}", self.name, self.threads, self.isa)
    }
}

/// When a device has latents in its cache rather than each head's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CachesLatents {
    /// It has no kernels for them.
    Never,
    /// Where many sequences are computed together, whose cache is most of what is read, or where
    /// each head's keys and values have no room.
    Crowded,
    /// Always.
    Always,
}

/// A machine that runs Programs.
pub trait Device: Send + Sync {
    /// Describes the device.
    fn about(&self) -> About;

    /// When Programs whose attention is by latents are better recorded with one row of latents in
    /// the cache for all heads, which is less memory and more arithmetic, than with each head's
    /// keys and values. Such a row has at most [`LONGEST_HEAD`] elements.
    fn caches_latents(&self) -> CachesLatents {
        CachesLatents::Never
    }

    /// Checks that the device has every operation of `program` in the form that the Program asks
    /// for. Called before anything is planned or loaded.
    ///
    /// # Errors
    /// Names the first operation or form that is missing.
    fn check(&self, program: &Program) -> Result<()>;

    /// Predicts the memory that `program` takes with a full context, without the weights that the
    /// device holds already for another Program: one plan for each device, in
    /// order.
    ///
    /// # Errors
    /// A Program or weights that the device cannot load.
    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Plan>>;

    /// Reads the weights of `program` from `tensors` and packs them for this device. Weights of the
    /// same files that another Program on the device uses are shared with it instead. `progress` is
    /// called with bytes done and bytes in total.
    ///
    /// # Errors
    /// A plan that does not fit, before anything is allocated; weights that are missing, damaged
    /// or, unless [`ExecutorOptions::allow_nan`] is set, not finite.
    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>>;

    /// Bytes of weights that several executors of this device share, once for each executor beyond
    /// the first: the sum of their [`Executor::memory`] minus this is what they hold together.
    fn shared(&self) -> usize;

    /// Loads Programs for training.
    ///
    /// # Errors
    /// A device that cannot train, an operation without a training kernel, and everything that
    /// [`Device::load`] refuses.
    fn train(&self, tensors: &Tensors, options: TrainOptions) -> Result<Box<dyn Trainer>> {
        let _ = (tensors, options);
        let found = self.about().name;
        Err(Error::new("train", "a device that trains", found).of(ErrorKind::Unsupported))
    }
}

/// Refuses the first operation for which `lack` names something that the device does not have.
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

/// Reports the progress of a replay and can stop it.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// Set it, from any thread, to end the replay early.
    pub stop: &'a AtomicBool,
    /// Called on the caller's thread between operations with the fraction done, 0 to 1. All compute
    /// threads wait for it, and it must not use the executor.
    pub progress: &'a (dyn Fn(f64) + Sync),
}

impl Watch<'_> {
    /// Reports nothing and never stops.
    pub const NONE: Watch<'static> = {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Watch { stop: &NEVER, progress: &|_| {} }
    };
}

/// Identifies a submitted step. Later steps have greater tickets.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct Ticket(u64);

impl Ticket {
    /// The next ticket of an executor; `last` holds the number of its latest one.
    pub(crate) fn next(last: &mut u64) -> Ticket {
        *last += 1;
        Ticket(*last)
    }

    /// The ticket's number.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// The error for a ticket whose step is no longer remembered.
    pub(crate) fn unknown(self) -> Error {
        let expected = "a step that was submitted, and not waited for before later ones";
        Error::new("wait", expected, format!("step {}", self.0)).of(ErrorKind::Internal)
    }
}

/// The error of a device that cannot export its cache.
fn keeps_cache() -> Error {
    let expected = "a device that holds whole key and value heads of every layer";
    Error::new("cache", expected, "ranks that share them").of(ErrorKind::Unsupported)
}

/// The error of a device that can only compute whole Programs.
fn exchanges_nothing() -> Error {
    let expected = "a device that computes a part of a Program at a time";
    Error::new("exchange", expected, "another").of(ErrorKind::Unsupported)
}

/// The error of a device that computes a step and chooses its tokens at once.
pub(crate) fn defers_nothing() -> Error {
    let expected = "a device that chooses tokens apart from computing logits";
    Error::new("step", expected, "another").of(ErrorKind::Unsupported)
}

/// The error for a layer or block that does not exist.
pub(crate) fn no_block(layer: usize, block: u32) -> Error {
    Error::new("cache", "a block of a layer", format!("block {block} of layer {layer}"))
}

/// Checks the length of the bytes to be written to a block of a cache layer.
///
/// # Errors
/// A length other than the block's.
pub(crate) fn check_block(expected: usize, bytes: &[u8]) -> Result<()> {
    if bytes.len() == expected {
        return Ok(());
    }
    Err(Error::new("cache", format!("{expected} bytes of a block"), bytes.len()))
}

/// Most steps of a slot that may be in flight at a time.
pub const IN_FLIGHT: usize = 2;

/// Number of latest steps whose chosen tokens are remembered.
pub const REMEMBERED: usize = 64;

/// A loaded Program with its weights and its pool of cache blocks.
///
/// Steps take effect in the order of submission. Cache entries that a step wrote beyond the last
/// token that is kept are overwritten by the next step at those positions.
pub trait Executor: Send {
    /// Replays the Program: enqueues it on a GPU, computes it at once on the CPU. In a shape class
    /// seen before, it allocates nothing. At most [`IN_FLIGHT`] steps of a slot may be in flight.
    ///
    /// A sequence that samples does so from the logits of its last row. It gets the token that
    /// [`Sampler`](ops::sample::Sampler) chooses at the index after that row, whatever else the
    /// step contains.
    ///
    /// # Errors
    /// A step that fails [`Step::check`], and device failures. Tokens chosen ahead are then
    /// forgotten; the cache keeps its contents.
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket> {
        let stopped = || Error::new("step", "a step that ends", "one that was stopped");
        self.submit_watched(step, &Watch::NONE)?.ok_or_else(stopped)
    }

    /// As [`Executor::submit`], reporting to `watch`. `None` if the replay was stopped: it has no
    /// ticket, and later steps overwrite what it wrote to the cache. A device that enqueues all
    /// operations at once cannot stop early and runs to the end.
    ///
    /// # Errors
    /// As [`Executor::submit`].
    fn submit_watched(&mut self, step: &Step<'_>, watch: &Watch<'_>) -> Result<Option<Ticket>>;

    /// Whether a step can be submitted in two parts, by [`Executor::forward`] and
    /// [`Executor::choose`], which compute what [`Executor::submit`] does: so the device computes
    /// logits while the host finds out which tokens may be chosen from them.
    fn defers(&self) -> bool {
        false
    }

    /// Submits a step but for its choices, which [`Executor::choose`] is to add. Masks are ignored
    /// here. The choices of an earlier such step that are not added yet are forgotten, as they are
    /// if any other step is submitted first; [`Executor::keeps`] tells.
    ///
    /// # Errors
    /// As [`Executor::submit`]; a device that cannot.
    fn forward(&mut self, step: &Step<'_>) -> Result<Ticket> {
        let _ = step;
        Err(defers_nothing())
    }

    /// Submits the choices of the step that [`Executor::forward`] submitted: for each of its
    /// sequences, in their order, how it chooses; `None` chooses nothing. The history of a sequence
    /// counts as it does in a step.
    ///
    /// # Errors
    /// As [`Executor::submit`]; a step whose choices were added or forgotten already; a device that
    /// cannot.
    fn choose(&mut self, ticket: Ticket, choices: &[Option<Choose<'_>>]) -> Result<()> {
        let _ = (ticket, choices);
        Err(defers_nothing())
    }

    /// Waits for the tokens that a step chose. Wait for steps in the order of submission. The step
    /// last waited for may be asked again; steps whose tokens are not needed may be skipped.
    ///
    /// # Errors
    /// A ticket that is no longer remembered, and device failures.
    fn wait(&mut self, ticket: Ticket) -> Result<Outcome<'_>>;

    /// Whether the tokens chosen by a step are known or will be. Only the last [`REMEMBERED`] steps
    /// are kept.
    fn keeps(&self, ticket: Ticket) -> bool;

    /// Waits for result `index` of the last submitted step, `[rows, width]`.
    ///
    /// # Errors
    /// A ticket of an earlier step, and device failures.
    fn read(&mut self, ticket: Ticket, index: usize) -> Result<&[f32]>;

    /// How many further steps are worth submitting before waiting for one, with
    /// [`CHOSEN`](program::CHOSEN) as their tokens. More than 0 on a device that computes while the
    /// host does something else. Where it is 0, such tokens may be refused.
    fn ahead(&self) -> usize {
        1
    }

    /// Copies blocks of a cache group in all its layers, each `(from, to)` in order. Used when a
    /// sequence continues from the middle of a block that it shares with others.
    ///
    /// # Errors
    /// Blocks that do not exist, and device failures.
    fn copy_blocks(&mut self, group: usize, blocks: &[(u32, u32)]) -> Result<()>;

    /// Appends one block of a cache layer to `bytes`: its keys `[BLOCK_TOKENS, kv_heads, head_dim]`
    /// in the cache's element type, then its values. For q8_0: the keys' codes, their scales, the
    /// values' codes, their scales. All devices that support the type use this layout.
    ///
    /// # Errors
    /// A layer or block that does not exist, a device that cannot export its cache, and device
    /// failures.
    fn read_block(&mut self, layer: usize, block: u32, bytes: &mut Vec<u8>) -> Result<()> {
        let _ = (layer, block, bytes);
        Err(keeps_cache())
    }

    /// Overwrites a block of a cache layer with bytes from [`Executor::read_block`].
    ///
    /// # Errors
    /// As for reading, and a length other than the block's.
    fn write_block(&mut self, layer: usize, block: u32, bytes: &[u8]) -> Result<()> {
        let _ = (layer, block, bytes);
        Err(keeps_cache())
    }

    /// Puts an adapter on a seat (from 1), replacing the one there; `None` empties the seat. Steps
    /// that were already submitted use the previous adapter.
    ///
    /// # Errors
    /// A seat that does not exist, an adapter that does not fit the Program's sites or exceeds the
    /// greatest rank, and too little memory. The seat is then unchanged.
    fn seat(&mut self, seat: u32, _: Option<&AdapterFactors>) -> Result<()> {
        let found = format!("seat {seat}");
        Err(Error::new("adapter", "a device that takes adapters", found).of(ErrorKind::Unsupported))
    }

    /// From now on reads its Program's input directly from the memory in which `before` leaves its
    /// result; neither goes through the host. Returns false, and changes nothing, if these two
    /// devices cannot share memory.
    fn follow(&mut self, before: &mut dyn Executor) -> bool {
        let _ = before;
        false
    }

    /// From now on `partner` computes the operations that were [moved](Program::offload) to the
    /// away side of the Program.
    ///
    /// # Errors
    /// A device whose replays cannot pause between operations.
    fn join(&mut self, partner: Box<dyn Executor>) -> Result<()> {
        drop(partner);
        Err(exchanges_nothing())
    }

    /// As the away side: takes the values that exchange `number` brings, computes up to the next
    /// exchange, and writes that exchange's inputs to `gives`. The step's tokens are ignored.
    ///
    /// # Errors
    /// Values of the wrong size, a Program without that exchange, and device failures.
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

    /// Downcast, so that an executor of the same backend can [`follow`](Executor::follow) this one.
    fn any(&mut self) -> Option<&mut dyn Any> {
        None
    }

    /// The memory it holds.
    fn memory(&self) -> Memory;

    /// Whether its device is broken for good: nothing works on it any more, and the model must be
    /// loaded on a device that is opened anew.
    fn lost(&self) -> bool {
        false
    }

    /// Number of shape classes compiled so far.
    fn compiled(&self) -> usize;

    /// Measures the read bandwidth of the weights; takes several passes over them.
    fn roof(&self) -> Roof;

    /// As [`Executor::submit`], timing every operation. `None`, with nothing replayed, on a device
    /// that cannot time them.
    ///
    /// # Errors
    /// As [`Executor::submit`].
    fn submit_timed(&mut self, _: &Step<'_>) -> Result<Option<(Ticket, Profile)>> {
        Ok(None)
    }

    /// Measures peak compute throughput, in about a tenth of a second; `None` on a device that
    /// cannot.
    fn limits(&self) -> Option<ComputePeaks> {
        None
    }
}
