//! What all GPU devices share: which kernels a Program becomes, how its weights and cache lie, what
//! a step is given.
//!
//! A device adds a [`Backend`]: it allocates, loads kernels, binds them and submits. `sim` is the
//! one that needs no GPU, in builds with the feature of that name: it runs every kernel on the
//! interpreter, or as emitted text on this CPU.
//!
//! Activations are f32, but for queries, keys, values and what attention gives, which have the
//! cache's type. Products of a few rows read weights as they are packed, once; products of many
//! rows round both operands to 16 bits and add in f32. With an f32 cache nothing is rounded: that
//! is for comparing with references.

mod adapters;
mod alike;
mod arena;
mod bridge;
mod exchange;
mod executor;
mod kv;
#[cfg(feature = "sim")]
mod launches;
mod lower;
mod many;
#[cfg(feature = "sim")]
pub(crate) mod meeting;
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
use program::Program;
use tile::Kernel;
use tile::launch::Numbers;
use tile::passes::Target;
use tile::types::Scalar;

use crate::{About, Device, Executor, LoadOptions, Plan, TrainOptions, Trainer, Usage};

pub use stage::Stage;

/// What kernels are chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Whose instructions kernels are lowered to.
    pub target: Target,
    /// Multiprocessors, or cores: what works at the same time.
    pub processors: u32,
    /// Bytes of shared memory that a threadgroup can have.
    pub shared: u32,
    /// Whether four simdgroups can multiply together: see [`ops::linear::gemm::Machine`].
    pub wgmma: bool,
    /// Rows from which on a packed matrix is worth unpacking for [`Backend::product`]; none if
    /// there is no such thing.
    pub products: Option<usize>,
}

impl Facts {
    /// Whether threadgroups can have as much shared memory as the large schedules take.
    pub fn roomy(&self) -> bool {
        self.shared >= ops::attention::decode::LARGE
    }

    /// Whether one instruction multiplies four pairs of bytes: `dp4a`. Apple's GPUs have none, and
    /// their products of whole numbers are slower than those of floats.
    pub fn dot4(&self) -> bool {
        self.target != Target::Metal
    }

    /// Whether latency is hidden by many small threadgroups: see
    /// [`ops::linear::Task::small_groups`].
    pub fn small_groups(&self) -> bool {
        self.target == Target::Metal
    }

    /// What schedules of matrix products are picked for.
    pub fn machine(&self) -> Machine {
        let Facts { shared, processors: parallel, wgmma, .. } = *self;
        Machine { shared, parallel, wgmma, small_groups: self.small_groups() }
    }
}

/// The fewest rows of a product of the vendor's library where rows must not depend on how many
/// there are: it has other ways with fewer, which are not even faster.
const LIBRARY_ROWS: usize = 32;

/// A matrix product of the vendor's library: `y = x w^T`, or that plus a matrix of `y`'s shape and
/// type.
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
    /// The type of `y`: that of the operands, or f32.
    pub result: Scalar,
    /// Whether something is added.
    pub adds: bool,
    /// Whether `x` lies as its transpose, `[width, rows]`.
    pub x_turned: bool,
    /// Whether `w` lies as its transpose, `[width, out]`.
    pub w_turned: bool,
    /// Whether a row must have the same bits as in a product of any other number of rows.
    pub alike: bool,
    /// Whether it is done so often that the fastest way is looked for: see [`Backend::tune`].
    pub tuned: bool,
}

impl ProductShape {
    /// Of `rows`, `out` and `width`, to which nothing is added, of matrices that lie as they are.
    pub fn plain([rows, out, width]: [u32; 3], operand: Scalar, result: Scalar) -> ProductShape {
        let (x_turned, w_turned) = (false, false);
        let (adds, alike, tuned) = (false, false, false);
        ProductShape { rows, out, width, operand, result, adds, x_turned, w_turned, alike, tuned }
    }
}

/// What a GPU device does itself. Everything is done in the order in which it is asked for.
pub trait Backend: Send + Sync + 'static {
    /// Bytes on the device; clones are the same bytes.
    type Buffer: Clone + Send;
    /// A kernel that can be launched.
    type Pipeline: Clone + Send;
    /// A kernel bound to buffers and numbers.
    type Launch: Send;
    /// Launches that are submitted as one.
    type Recording: Send;
    /// A point in the order of all work: see [`Backend::mark`].
    type Mark: Send;

    /// What it is.
    fn about(&self) -> About;

    /// What kernels are chosen by.
    fn facts(&self) -> Facts;

    /// So many bytes of zeros, aligned to 256.
    ///
    /// # Errors
    /// If there is not as much memory left.
    fn buffer(&self, bytes: usize) -> Result<Self::Buffer>;

    /// A buffer that holds these bytes.
    ///
    /// # Errors
    /// As [`buffer`](Backend::buffer) and [`write`](Backend::write).
    fn upload(&self, bytes: &[u8]) -> Result<Self::Buffer> {
        let buffer = self.buffer(bytes.len())?;
        self.write(&buffer, bytes)?;
        Ok(buffer)
    }

    /// Portions of the host's memory, of so many bytes each, to be filled in turn with what buffers
    /// are to hold: while one is copied, the next is filled.
    ///
    /// # Errors
    /// If there is not as much memory left.
    fn stages(&self, bytes: usize) -> Result<Vec<Box<dyn Stage<Self::Buffer> + '_>>>
    where
        Self: Sized,
    {
        Ok(vec![Box::new(stage::Heap::new(self, bytes)?)])
    }

    /// So many words that the host can see and set while kernels run: see [`Backend::peek`].
    ///
    /// # Errors
    /// If there is not as much memory left.
    fn mailbox(&self, words: usize) -> Result<Self::Buffer>;

    /// Two words of a mailbox from an even one on, which kernels write at once; None while the
    /// first is [`u32::MAX`].
    ///
    /// # Errors
    /// If nobody is left who would write them, or that work has failed.
    fn peek(&self, mailbox: &Self::Buffer, word: usize) -> Result<Option<[u32; 2]>>;

    /// Sets words of a mailbox from one on, before any work that is not yet submitted and without
    /// waiting for what is.
    ///
    /// # Errors
    /// If they are not all inside, or not whole.
    fn poke(&self, mailbox: &Self::Buffer, word: usize, bytes: &[u8]) -> Result<()>;

    /// A mark before all work.
    ///
    /// # Errors
    /// If the device has no more.
    fn marker(&self) -> Result<Self::Mark>;

    /// Moves a mark to the end of all work that is submitted.
    ///
    /// # Errors
    /// If the device refuses.
    fn mark(&self, mark: &Self::Mark) -> Result<()>;

    /// Waits until all work before a mark is done.
    ///
    /// # Errors
    /// If some of it failed.
    fn reach(&self, mark: &Self::Mark) -> Result<()>;

    /// Some of a buffer's bytes.
    ///
    /// # Errors
    /// If they are not all inside.
    fn part(&self, of: &Self::Buffer, range: Range<usize>) -> Result<Self::Buffer>;

    /// Replaces the first bytes of a buffer.
    ///
    /// # Errors
    /// If they do not fit, or earlier work failed.
    fn write(&self, to: &Self::Buffer, bytes: &[u8]) -> Result<()>;

    /// Reads the first bytes of a buffer, once all earlier work is done.
    ///
    /// # Errors
    /// If there are not as many, or earlier work failed.
    fn read(&self, from: &Self::Buffer, to: &mut [u8]) -> Result<()>;

    /// Copies a buffer, which may be (part of) a mailbox, to the first bytes of another.
    ///
    /// # Errors
    /// If it is longer.
    fn copy(&self, from: &Self::Buffer, to: &Self::Buffer) -> Result<()>;

    /// Whether [`fetch`](Backend::fetch) fetches from this other device.
    fn reaches(&self, other: &Self) -> bool {
        let _ = other;
        false
    }

    /// Copies a buffer of another device to the first bytes of one of this, after what has been
    /// submitted there and before what is submitted here or there from now on.
    ///
    /// # Errors
    /// If it is longer, or there is no way between the two.
    fn fetch(&self, from: &Self, source: &Self::Buffer, to: &Self::Buffer) -> Result<()> {
        let _ = (source, to);
        let expected = format!("a device that reaches {}", from.about().name);
        Err(Error::new(self.about().name, expected, "one that does not"))
    }

    /// Gets ready to load these kernels, all of which are loaded soon.
    fn ahead(&self, kernels: &[&Kernel]) {
        let _ = kernels;
    }

    /// A kernel that was compiled ahead: `kernel` has its constants, whose values `numbers` has.
    /// None if there is none that is exactly this.
    fn built(&self, kernel: &Kernel, numbers: &Numbers) -> Option<Self::Pipeline> {
        let _ = (kernel, numbers);
        None
    }

    /// A kernel that is lowered for [`Facts::target`] and has no constants left.
    ///
    /// # Errors
    /// If the device cannot run it.
    fn load(&self, kernel: &Kernel) -> Result<Self::Pipeline>;

    /// Binds buffers, in the kernel's order, and numbers.
    ///
    /// # Errors
    /// The rule of the launch contract that does not hold.
    fn bind(
        &self,
        pipeline: &Self::Pipeline,
        numbers: &Numbers,
        buffers: &[Self::Buffer],
    ) -> Result<Self::Launch>;

    /// Binds a product of [`ProductShape`]; `add` may be the same bytes as `y`.
    ///
    /// # Errors
    /// If a buffer is too short, or the library refuses.
    fn product(
        &self,
        shape: &ProductShape,
        x: &Self::Buffer,
        w: &Self::Buffer,
        add: Option<&Self::Buffer>,
        y: &Self::Buffer,
    ) -> Result<Self::Launch>;

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

    /// Binds the sum over all ranks of what each has in `x`, so many floats, to every rank's `y`;
    /// both may be the same bytes.
    ///
    /// # Errors
    /// If a buffer is too short, or the device is no rank.
    fn all_reduce(&self, x: &Self::Buffer, y: &Self::Buffer, count: usize) -> Result<Self::Launch> {
        let _ = (x, y, count);
        let found = self.about().name;
        Err(Error::new("all_reduce", "one of several GPUs that share each layer", found))
    }

    /// Binds what all ranks have in `x`, as many floats each as `counts` says, one rank after the
    /// other, to every rank's `y`.
    ///
    /// # Errors
    /// If a buffer is too short, or the device is no rank.
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

    /// Launches in order, each after the one before.
    ///
    /// # Errors
    /// If the device refuses one.
    fn submit(&self, launches: &[Self::Launch]) -> Result<()>;

    /// Launches in order, each once the one before is done, and the seconds that each took; none,
    /// with nothing launched, where the device has no clock for it.
    ///
    /// # Errors
    /// If the device refuses one, or it fails.
    fn time(&self, launches: &[Self::Launch]) -> Result<Option<Vec<f64>>> {
        let _ = launches;
        Ok(None)
    }

    /// Makes one of many launches.
    ///
    /// # Errors
    /// If the device refuses.
    fn record(&self, launches: &[Self::Launch]) -> Result<Self::Recording>;

    /// Does what was recorded.
    ///
    /// # Errors
    /// If the device refuses.
    fn replay(&self, recording: &mut Self::Recording) -> Result<()>;

    /// Whether loading a kernel for the first time takes so long that it is done before anything is
    /// asked for.
    fn prewarms(&self) -> bool {
        false
    }

    /// Whether something has broken the device, so that nothing works on it any more.
    fn lost(&self) -> bool {
        false
    }

    /// Bytes that this process's buffers take of its memory; none where nobody counts.
    fn usage(&self) -> Option<Usage> {
        None
    }

    /// Bytes of its memory that are left; none where that cannot be told.
    ///
    /// # Errors
    /// If the device does not answer.
    fn free(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Bytes per second at which its memory is read, measured.
    fn read_rate(&self) -> f64;
}

/// A device made of a [`Backend`].
pub struct GpuDevice<B> {
    backend: Arc<B>,
}

/// How steps are given to a GPU. In each way the kernels of a shape class and their constants are
/// found once, and what one step of it has that another has not (tokens, positions, tables, the
/// sampler's state) is words in memory that kernels read. Steps whose tokens the device chooses
/// write these words themselves, one for the next.
///
/// On Metal a step is one command buffer either way. Memory is the CPU's too and has no copies in
/// the order of the work, so that [`Arguments`](Dispatch::Arguments) waits there for the step
/// before, as the other two do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Dispatch {
    /// Nothing else is kept: each kernel is bound to its buffers and launched in every step, and
    /// words are written once the device is idle. For looking into things.
    Eager,
    /// Launches are bound once for each class: every parameter is in place, and a step looks
    /// nothing up and allocates nothing. Words go through three slots, so that nobody waits for the
    /// step before: see `ring`. Launches go one after another, each of which may let the next one
    /// start early.
    Arguments,
    /// Launches are bound once, and those of few rows recorded as one submission. Words are written
    /// once the device is idle, which it mostly is: such a step's logits were waited for, or it
    /// chooses and writes the next one's words.
    #[default]
    Graph,
}

impl Dispatch {
    /// All of them.
    pub const ALL: [Dispatch; 3] = [Dispatch::Eager, Dispatch::Arguments, Dispatch::Graph];
}

impl<B: Backend> GpuDevice<B> {
    /// Of a backend.
    pub fn new(backend: B) -> Self {
        GpuDevice { backend: Arc::new(backend) }
    }
}

impl<B: Backend> Device for GpuDevice<B> {
    fn about(&self) -> About {
        self.backend.about()
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
            if matches!(op, Op::Experts(experts) if experts.weighs_inputs && experts.routing.used > 1)
            {
                let found =
                    "several experts that read weighed rows, which the CPU alone has so far";
                return Some(found.into());
            }
            if matches!(op, Op::Experts(experts) if experts.inner) {
                return Some("what lies between experts' matrices, which the CPU alone has".into());
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
        options: &LoadOptions,
    ) -> Result<Vec<Plan>> {
        self.check(program)?;
        let formats = weights::formats(program, tensors, &[])?;
        let (program, facts) = (program.clone(), self.backend.facts());
        let lowering = lower::Lowering::new(program, facts, options, formats)?;
        Ok(vec![sizes::plan(&*self.backend, &lowering, options)?])
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        self.check(&program)?;
        let backend = Arc::clone(&self.backend);
        let loaded = executor::GpuExecutor::load(backend, program, tensors, options, progress)?;
        Ok(Box::new(loaded))
    }

    fn train(&self, tensors: &Tensors, options: TrainOptions) -> Result<Box<dyn Trainer>> {
        let backend = Arc::clone(&self.backend);
        Ok(Box::new(train::GpuTrainer::load(backend, tensors, options)?))
    }
}
