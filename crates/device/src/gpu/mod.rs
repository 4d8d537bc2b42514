//! The part that all GPU devices share: which kernels a Program lowers to, how weights and cache
//! are laid out, and how a step's inputs reach the device.
//!
//! A device adds a [`Backend`], which allocates, loads kernels, binds them and submits. The backend
//! `sim`, in builds with that feature, needs no GPU: it runs every kernel on the interpreter, or as
//! emitted source on the CPU.
//!
//! Activations are f32, except for queries, keys, values and attention outputs, which have the
//! cache's type. Products of a few rows read the packed weights directly, once. Products of many
//! rows round both operands to 16 bits and accumulate in f32. With an f32 cache nothing is rounded,
//! which is for comparisons with references.

mod adapters;
mod alike;
mod arena;
mod bridge;
mod exchange;
mod executor;
pub(crate) mod group;
mod kernels;
mod kv;
#[cfg(feature = "sim")]
mod launches;
mod lower;
mod many;
pub(crate) mod meter;
mod peaks;
mod profile;
pub(crate) mod read;
mod ring;
mod run;
#[cfg(feature = "sim")]
pub mod sim;
mod sizes;
mod stage;
#[cfg(all(test, feature = "sim"))]
mod tests;
mod train;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use formats::{Error, Hint, Result, Setting, Tensors};
use ops::Op;
use ops::delta_net::MAX_KEY_DIM;
use ops::linear::gemm::Machine;
use ops::rope::MOST_PAIRS;
use ops::selective_scan::MAX_STATE;
use ops::tuned::CardNumbers;
use program::Program;
use tile::Kernel;
use tile::launch::Numbers;
use tile::passes::Target;
use tile::types::Scalar;

use crate::{
    About, CachesLatents, Device, Executor, ExecutorOptions, LONGEST_HEAD, Plan, TrainOptions,
    Trainer, Usage,
};

pub use stage::StagingBuffer;
pub(crate) use weights::column_block;

/// Device properties that the choice of kernels depends on.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// The instruction set that kernels are lowered to.
    pub target: Target,
    /// Streaming multiprocessors, or GPU cores.
    pub processors: u32,
    /// Bytes of shared memory available to a threadgroup.
    pub shared: u32,
    /// Whether warpgroup matrix instructions exist; see [`ops::linear::gemm::Machine`].
    pub wgmma: bool,
    /// Rows from which unpacking a packed matrix for [`Backend::product`] pays off; `None` without
    /// a vendor library.
    pub products: Option<usize>,
    /// The numbers measured on such a device.
    pub tuned: &'static CardNumbers,
}

impl Facts {
    /// Whether a 4-way int8 dot product instruction (`dp4a`) exists. Apple's GPUs have none, and
    /// their integer products are slower than float ones.
    pub fn dot4(&self) -> bool {
        self.target != Target::Metal
    }

    /// Whether latency is hidden by many small threadgroups; see [`CardNumbers::small_groups`].
    pub fn small_groups(&self) -> bool {
        self.tuned.small_groups.is_some()
    }

    /// The properties from which schedules of matrix products are picked.
    pub fn machine(&self) -> Machine {
        let Facts { shared, processors: parallel, wgmma, tuned, .. } = *self;
        Machine { shared, parallel, wgmma, tuned }
    }
}

/// The fewest rows of a vendor-library product when a row's bits must not depend on the number of
/// rows. With fewer rows the library takes other kernels, which are no faster.
const LIBRARY_ROWS: usize = 32;

/// A matrix product of the vendor's library: `y = x w^T`, optionally plus a matrix of `y`'s shape
/// and type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProductShape {
    /// Rows of `x` and `y`.
    pub rows: u32,
    /// Rows of `w`.
    pub out: u32,
    /// Columns of `x` and `w`.
    pub width: u32,
    /// The type of `x` and `w`: f16 or bf16.
    pub operand: Scalar,
    /// The type of `y`: the operands' type, or f32.
    pub result: Scalar,
    /// Whether a matrix is added.
    pub adds: bool,
    /// Whether `x` is stored transposed, `[width, rows]`.
    pub x_turned: bool,
    /// Whether `w` is stored transposed, `[width, out]`.
    pub w_turned: bool,
    /// Whether the bits of a row must not depend on the number of rows.
    pub alike: bool,
    /// Whether it is done so often that the fastest way is looked for: see [`Backend::tune`].
    pub tuned: bool,
}

impl ProductShape {
    /// A product without addition, of matrices that are not transposed.
    pub fn plain([rows, out, width]: [u32; 3], operand: Scalar, result: Scalar) -> ProductShape {
        let (x_turned, w_turned) = (false, false);
        let (adds, alike, tuned) = (false, false, false);
        ProductShape { rows, out, width, operand, result, adds, x_turned, w_turned, alike, tuned }
    }
}

/// The operations that a GPU backend implements. All work takes effect in the order of the calls.
pub trait Backend: Send + Sync + 'static {
    /// Device memory; clones refer to the same bytes.
    type Buffer: Clone + Send;
    /// A kernel that can be launched.
    type Pipeline: Clone + Send;
    /// A kernel bound to buffers and constants.
    type Launch: Send;
    /// Launches that are submitted together, such as a CUDA graph.
    type Recording: Send;
    /// An event in the order of submitted work; see [`Backend::record_event`].
    type Event: Send;

    /// Describes the device.
    fn about(&self) -> About;

    /// Properties that the choice of kernels depends on.
    fn facts(&self) -> Facts;

    /// Allocates zeroed device memory, aligned to 256 bytes.
    ///
    /// # Errors
    /// Too little memory.
    fn buffer(&self, bytes: usize) -> Result<Self::Buffer>;

    /// The bytes in which reserved addresses get memory, or `None` if addresses cannot be reserved.
    fn page(&self) -> Option<usize> {
        None
    }

    /// Reserves addresses for `bytes`, a multiple of [`page`](Backend::page), without any memory.
    ///
    /// # Errors
    /// A device that cannot, or too few addresses.
    fn reserve(&self, bytes: usize) -> Result<Self::Buffer> {
        Err(Error::new(
            self.about().name,
            "addresses to reserve",
            format!("none for {bytes} bytes"),
        ))
    }

    /// Gives the first `bytes` of a reserved buffer memory, a multiple of [`page`](Backend::page).
    /// Existing contents are kept, and new memory is zero. Addresses do not change,
    /// so launches that are bound to the buffer stay valid.
    ///
    /// # Errors
    /// Too little memory; the buffer is then as it was.
    fn extend(&self, reserved: &Self::Buffer, bytes: usize) -> Result<()> {
        let _ = reserved;
        Err(Error::new(self.about().name, "a reserved buffer", format!("{bytes} bytes of another")))
    }

    /// Allocates a buffer with these bytes.
    ///
    /// # Errors
    /// As [`buffer`](Backend::buffer) and [`write`](Backend::write).
    fn upload(&self, bytes: &[u8]) -> Result<Self::Buffer> {
        let buffer = self.buffer(bytes.len())?;
        self.write(&buffer, bytes)?;
        Ok(buffer)
    }

    /// Staging buffers in host memory, of `bytes` each, to fill in turn for uploads: while one is
    /// copied, the next is filled.
    ///
    /// # Errors
    /// Too little memory.
    fn stages(&self, bytes: usize) -> Result<Vec<Box<dyn StagingBuffer<Self::Buffer> + '_>>>
    where
        Self: Sized,
    {
        Ok(vec![Box::new(stage::Heap::new(self, bytes)?)])
    }

    /// Allocates pinned words that the host can read and write while kernels run; see
    /// [`Backend::read_pinned`].
    ///
    /// # Errors
    /// Too little memory.
    fn pinned(&self, words: usize) -> Result<Self::Buffer>;

    /// Reads two pinned words, from an even index, that kernels write in one store. `None` while
    /// the first is [`u32::MAX`].
    ///
    /// # Errors
    /// The submitted work has failed, or no submitted work is left to write them.
    fn read_pinned(&self, pinned: &Self::Buffer, word: usize) -> Result<Option<[u32; 2]>>;

    /// Writes pinned words without waiting for submitted work, and before any work that is
    /// submitted later.
    ///
    /// # Errors
    /// A range outside the buffer, or not whole words.
    fn write_pinned(&self, pinned: &Self::Buffer, word: usize, bytes: &[u8]) -> Result<()>;

    /// Creates an event that is complete from the start.
    ///
    /// # Errors
    /// The device has no events left.
    fn event(&self) -> Result<Self::Event>;

    /// Records the event after all work submitted so far.
    ///
    /// # Errors
    /// The device refuses.
    fn record_event(&self, event: &Self::Event) -> Result<()>;

    /// Waits for all work before the event.
    ///
    /// # Errors
    /// Some of that work failed.
    fn wait_event(&self, event: &Self::Event) -> Result<()>;

    /// A sub-range of a buffer.
    ///
    /// # Errors
    /// A range outside the buffer.
    fn part(&self, of: &Self::Buffer, range: Range<usize>) -> Result<Self::Buffer>;

    /// Overwrites the first bytes of a buffer.
    ///
    /// # Errors
    /// Too many bytes, or earlier work that failed.
    fn write(&self, to: &Self::Buffer, bytes: &[u8]) -> Result<()>;

    /// Reads the first bytes of a buffer, after all earlier work.
    ///
    /// # Errors
    /// A buffer that is too short, or earlier work that failed.
    fn read(&self, from: &Self::Buffer, to: &mut [u8]) -> Result<()>;

    /// Copies a buffer, which may be (part of) a pinned one, to the first bytes of another.
    ///
    /// # Errors
    /// A source longer than the destination.
    fn copy(&self, from: &Self::Buffer, to: &Self::Buffer) -> Result<()>;

    /// Whether [`peer_copy`](Backend::peer_copy) can copy from this other device.
    fn has_peer(&self, other: &Self) -> bool {
        let _ = other;
        false
    }

    /// Copies a buffer of another device to the first bytes of one of this device. The copy runs
    /// after all work submitted to the other device and before any work submitted later to either.
    ///
    /// # Errors
    /// A source longer than the destination, or no path between the devices.
    fn peer_copy(&self, from: &Self, source: &Self::Buffer, to: &Self::Buffer) -> Result<()> {
        let _ = (source, to);
        let expected = format!("a peer of {}", from.about().name);
        Err(Error::new(self.about().name, expected, "one that does not"))
    }

    /// Prepares to load these kernels, all of which are loaded soon; a backend may compile them in
    /// parallel.
    fn ahead(&self, kernels: &[&Kernel]) {
        let _ = kernels;
    }

    /// The precompiled pipeline of a kernel, specialised to the values in `numbers`; `None` if
    /// there is no exact match.
    fn built(&self, kernel: &Kernel, numbers: &Numbers) -> Option<Self::Pipeline> {
        let _ = (kernel, numbers);
        None
    }

    /// Loads a kernel that is lowered for [`Facts::target`] and has no constants left.
    ///
    /// # Errors
    /// The device cannot run it.
    fn load(&self, kernel: &Arc<Kernel>) -> Result<Self::Pipeline>;

    /// Binds buffers, in the kernel's order, and constants.
    ///
    /// # Errors
    /// The rule of the launch contract that is violated.
    fn bind(
        &self,
        pipeline: &Self::Pipeline,
        numbers: &Numbers,
        buffers: &[Self::Buffer],
    ) -> Result<Self::Launch>;

    /// Binds a product of this shape. `add` may alias `y`.
    ///
    /// # Errors
    /// A buffer that is too short, or an error of the library.
    fn product(
        &self,
        shape: &ProductShape,
        x: &Self::Buffer,
        w: &Self::Buffer,
        add: Option<&Self::Buffer>,
        y: &Self::Buffer,
    ) -> Result<Self::Launch>;

    /// A finding about the vendor's library on this device, kept under a name by this process or an
    /// earlier one; `None` if there is none.
    fn recall(&self, name: &str) -> Option<Vec<u8>> {
        let _ = name;
        None
    }

    /// Keeps a finding for [`recall`](Backend::recall), where the backend can.
    fn remember(&self, name: &str, found: &[u8]) {
        let _ = (name, found);
    }

    /// Looks for the fastest way to do a product, among those whose results begin and end with the
    /// bytes of `expected`; products of this shape are done in this way from then on. `ws` are
    /// several matrices, so that none is in a cache because it was read just now. False if no way
    /// has such results.
    ///
    /// # Errors
    /// If a buffer is too short, or the library refuses.
    fn tune(
        &self,
        shape: &ProductShape,
        x: &Self::Buffer,
        ws: &[Self::Buffer],
        add: Option<&Self::Buffer>,
        y: &Self::Buffer,
        expected: [&[u8]; 2],
    ) -> Result<bool> {
        let _ = (shape, x, ws, add, y, expected);
        Ok(true)
    }

    /// Binds an all-reduce: the sum over all ranks of their `x`, `count` floats, goes to every
    /// rank's `y`. `x` and `y` may alias.
    ///
    /// # Errors
    /// A buffer that is too short, or a device that is not a rank.
    fn all_reduce(&self, x: &Self::Buffer, y: &Self::Buffer, count: usize) -> Result<Self::Launch> {
        let _ = (x, y, count);
        let found = self.about().name;
        Err(Error::new("all_reduce", "one of several GPUs that share each layer", found))
    }

    /// Binds an all-gather: every rank's `x`, of `counts[rank]` floats, concatenated in rank order,
    /// goes to every rank's `y`.
    ///
    /// # Errors
    /// A buffer that is too short, or a device that is not a rank.
    fn all_gather(
        &self,
        x: &Self::Buffer,
        y: &Self::Buffer,
        counts: &[usize],
    ) -> Result<Self::Launch> {
        let _ = (x, y, counts);
        let found = self.about().name;
        Err(Error::new("all_gather", "one of several GPUs that share each layer", found))
    }

    /// Submits launches in order, each after the one before.
    ///
    /// # Errors
    /// The device refuses a launch.
    fn submit(&self, launches: &[Self::Launch]) -> Result<()>;

    /// Runs launches one at a time and measures the seconds that each takes; `None`, with nothing
    /// launched, on a device that cannot time them.
    ///
    /// # Errors
    /// The device refuses a launch, or fails.
    fn time(&self, launches: &[Self::Launch]) -> Result<Option<Vec<f64>>> {
        let _ = launches;
        Ok(None)
    }

    /// Records launches for [`replay`](Backend::replay).
    ///
    /// # Errors
    /// The device refuses.
    fn record(&self, launches: &[Self::Launch]) -> Result<Self::Recording>;

    /// Submits recorded launches.
    ///
    /// # Errors
    /// The device refuses.
    fn replay(&self, recording: &mut Self::Recording) -> Result<()>;

    /// Whether loading kernels takes so long that it is done before the first request.
    fn prewarms(&self) -> bool {
        false
    }

    /// Whether an error has made the device unusable.
    fn lost(&self) -> bool {
        false
    }

    /// Device memory allocated by this process's buffers; `None` if it is not tracked.
    fn usage(&self) -> Option<Usage> {
        None
    }

    /// Free bytes of device memory; `None` if unknown.
    ///
    /// # Errors
    /// The device does not answer.
    fn free(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Measured read bandwidth of its memory, in bytes per second.
    fn read_rate(&self) -> f64;
}

/// The [`Device`] of a [`Backend`].
pub struct GpuDevice<B: Backend> {
    backend: Arc<B>,
    store: weights::Store<B>,
}

/// How steps are submitted to a GPU. In every mode the kernels of a shape class and their constants
/// are determined once. The inputs that differ between steps (tokens, positions, block tables,
/// sampler state) are words in device memory that kernels read. Steps whose tokens the device
/// chooses write these words for the next step themselves.
///
/// On Metal memory is shared with the CPU and copies are not ordered with kernels, so
/// [`Arguments`](Dispatch::Arguments) waits there for the step before, as the other two do.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub enum Dispatch {
    /// For debugging: every kernel is bound to its buffers and launched anew in every step, and
    /// words are written once the device is idle.
    Eager,
    /// Launches are bound once per class, so that a step looks nothing up and allocates nothing.
    /// Words rotate through three slots, so that nothing waits for the step before; see `ring`.
    /// Launches are submitted one by one, and each may let the next one start early.
    Arguments,
    /// Launches are bound once, and launches of few rows are recorded as one submission (a CUDA
    /// graph). Words are written once the device is idle. It mostly is: either the host has waited
    /// for the last step's logits, or the device chooses tokens and writes the next words itself.
    #[default]
    Graph,
}

impl Dispatch {
    /// All modes.
    pub const ALL: [Dispatch; 3] = [Dispatch::Eager, Dispatch::Arguments, Dispatch::Graph];
}

impl<B: Backend> GpuDevice<B> {
    /// A device that runs on this backend.
    pub fn new(backend: B) -> Self {
        GpuDevice { backend: Arc::new(backend), store: weights::Store::<B>::default() }
    }
}

impl<B: Backend> Device for GpuDevice<B> {
    fn about(&self) -> About {
        self.backend.about()
    }

    fn caches_latents(&self) -> CachesLatents {
        // Groups that work together for such rows hold a block of them in shared memory.
        let Facts { shared, tuned, .. } = self.backend.facts();
        match ops::attention::takes_latents(LONGEST_HEAD as u32, shared, &tuned.attention) {
            true => CachesLatents::Crowded,
            false => CachesLatents::Never,
        }
    }

    fn check(&self, program: &Program) -> Result<()> {
        let most = MOST_PAIRS as usize;
        let found = crate::check(self.backend.about().name, program, |op| {
            if let Op::DeltaNet(net) = op
                && net.key_dim > MAX_KEY_DIM
            {
                let found = format!("keys of {} elements, more than {MAX_KEY_DIM}", net.key_dim);
                return Some(found);
            }
            if let Op::SelectiveScan(scan) = op
                && scan.state > MAX_STATE
            {
                let found = format!("states of {} elements, more than {MAX_STATE}", scan.state);
                return Some(found);
            }
            if matches!(op, Op::Experts(experts) if experts.weighs_inputs && experts.routing.used > 1)
            {
                let found =
                    "several experts that read weighed rows, which the CPU alone has so far";
                return Some(found.into());
            }
            let pairs = op.rope().map_or(0, |rope| rope.frequencies.len());
            (pairs > most).then(|| format!("a rotation of {pairs} pairs, more than {most}"))
        });
        found.map_err(|why| why.hint(Hint::set(Setting::Place, "cpu")))
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Plan>> {
        self.check(program)?;
        let formats = weights::formats(program, tensors, &[])?;
        let (program, facts) = (program.clone(), self.backend.facts());
        let lowering = lower::Lowering::new(program, facts, options, formats)?;
        let wanted = self.store.of(tensors, options.allow_nan);
        Ok(vec![sizes::plan(&*self.backend, &lowering, options, &wanted)?])
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        self.check(&program)?;
        let backend = Arc::clone(&self.backend);
        let loaded =
            executor::GpuExecutor::load(backend, program, tensors, options, &self.store, progress)?;
        Ok(Box::new(loaded))
    }

    fn shared(&self) -> usize {
        self.store.shared()
    }

    fn train(&self, tensors: &Tensors, options: TrainOptions) -> Result<Box<dyn Trainer>> {
        let backend = Arc::clone(&self.backend);
        Ok(Box::new(train::GpuTrainer::load(backend, tensors, options)?))
    }
}
