//! What the driver asks of Metal: one method for each thing that is an Objective-C call, or a few
//! that belong together.
//!
//! `apple` implements it with Metal, `fake` with a C++ compiler. Nothing is decided behind it.

use std::ops::Range;
use std::path::Path;

use formats::Result;
use tile::Kernel;
use tile::types::Scalar;

use super::failure::Failure;

/// The most buffers and numbers that a kernel can be bound to on any Apple GPU.
pub(crate) const BINDINGS: usize = 31;

/// The most commands of an indirect command buffer.
pub(crate) const COMMANDS: usize = 16_384;

/// What a GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Its name: `Apple M2 Pro`.
    pub(crate) name: String,
    /// The version of the system, whose part the compiler is.
    pub(crate) system: String,
    /// The most bytes of one buffer.
    pub(crate) longest: usize,
    /// Bytes that the GPU can use at a time without slowing down.
    pub(crate) memory: usize,
    /// Bytes of threadgroup memory that a threadgroup can have.
    pub(crate) shared: u32,
    /// Whether pipelines that only indirect commands name have to be named by the encoder too. GPUs
    /// before Apple's family 9 (M3, A17) do not keep them where the GPU can reach them, and a step
    /// that meets one that is not there faults.
    pub(crate) touches: bool,
}

/// A function of a library, as a pipeline is made of it.
pub(crate) struct Function<'a> {
    /// Its name, its parameters, and how many threads a threadgroup has.
    pub(crate) kernel: &'a Kernel,
    /// The names, types and bits of its function constants.
    pub(crate) constants: Vec<(String, Scalar, u32)>,
}

/// Metal, on one device with one queue. Objects may be used from any thread; commands are given by
/// one at a time.
pub(crate) trait Api: Send + Sync + Sized + 'static {
    /// `MTLBuffer`, shared with the CPU.
    type Memory: Send + Sync;
    /// `MTLLibrary`.
    type Library: Send + Sync;
    /// `MTLComputePipelineState`.
    type Pipeline: Send + Sync;
    /// `MTLBinaryArchive`.
    type Archive: Send + Sync;
    /// `MTLIndirectCommandBuffer`.
    type Indirect: Send;
    /// A command buffer with its one compute encoder.
    type Encoder<'a>: Encoder<Self>;
    /// `MTLIndirectComputeCommand`.
    type Slot<'a>: Commands<Self>;

    /// What the GPU is.
    fn facts(&self) -> &Facts;

    /// So many bytes of zeros, at least one.
    fn memory(&self, bytes: usize) -> Result<Self::Memory>;

    /// Copies bytes into memory. Nothing that the GPU does may be using them.
    fn write(&self, to: &Self::Memory, at: usize, bytes: &[u8]) -> Result<()>;

    /// Copies bytes out of memory. Nothing that the GPU does may be writing them.
    fn read(&self, from: &Self::Memory, at: usize, bytes: &mut [u8]) -> Result<()>;

    /// Two 32-bit words from a byte on, and no more than that is touched: the GPU may be using what
    /// is beside them.
    fn look(&self, from: &Self::Memory, at: usize) -> Result<[u32; 2]>;

    /// Sets one such word, for work that is committed later.
    fn put(&self, to: &Self::Memory, at: usize, word: u32) -> Result<()>;

    /// Keeps memory where the GPU can reach it, by whatever names it, until
    /// [`depart`](Api::depart).
    fn reside(&self, memory: &Self::Memory);

    /// Ends what [`reside`](Api::reside) began.
    fn depart(&self, memory: &Self::Memory);

    /// Asks the system again to keep what resides: it lets go of a program's memory about a second
    /// after the last work.
    fn keep(&self);

    /// Bytes that this process has of the GPU's memory, as the system counts them.
    fn allocated(&self) -> usize;

    /// Compiles a text in a version of the language.
    fn compile(&self, text: &str, version: (u32, u32)) -> Result<Self::Library>;

    /// Opens a metallib file.
    fn open(&self, path: &Path) -> Result<Self::Library>;

    /// A pipeline that indirect commands can use, taken from the archive or compiled and added to
    /// it. True: it was not in it.
    fn pipeline(
        &self,
        library: &Self::Library,
        function: &Function<'_>,
        archive: Option<&Self::Archive>,
    ) -> Result<(Self::Pipeline, bool)>;

    /// The archive in a file, which must stay while the archive does; or an empty one.
    fn archive(&self, file: Option<&Path>) -> Result<Self::Archive>;

    /// Writes an archive to a file.
    fn save(&self, archive: &Self::Archive, to: &Path) -> Result<()>;

    /// Room for so many indirect commands of at most so many bindings.
    fn indirect(&self, commands: usize, bindings: usize) -> Result<Self::Indirect>;

    /// One of them, to be filled in.
    fn slot<'a>(&self, indirect: &'a Self::Indirect, index: usize) -> Self::Slot<'a>;

    /// A new command buffer, whose encoder starts after all work committed before, and whose
    /// dispatches may overlap.
    fn encoder(&self) -> Result<Self::Encoder<'_>>;

    /// Waits until the first of what is committed and not waited for is done or has failed, and
    /// tells the seconds that the GPU worked on it. None: there was none.
    fn advance(&self) -> Option<f64>;

    /// Does something that makes many of the system's objects, which are given back at its end.
    fn pooled<R>(&self, work: impl FnOnce() -> R) -> R {
        work()
    }

    /// What failed first since this was asked last, of what is finished.
    fn failure(&self) -> Option<Failure>;
}

/// One launch: a pipeline, its bindings, and then the dispatch.
pub(crate) trait Commands<A: Api> {
    /// What runs.
    fn pipeline(&mut self, pipeline: &A::Pipeline);

    /// Binds memory from the start of a range. The kernel stays inside the range.
    fn buffer(&mut self, index: usize, memory: &A::Memory, range: Range<usize>);

    /// What follows waits for what came before.
    fn barrier(&mut self);

    /// Runs threadgroups. Bindings hold for this dispatch.
    fn dispatch(&mut self, grid: [u32; 3], threads: u32);
}

/// Launches on the way to the GPU.
pub(crate) trait Encoder<A: Api>: Commands<A> {
    /// Binds a number.
    fn word(&mut self, index: usize, word: u32);

    /// Names a pipeline that indirect commands run, without running it: see [`Facts::touches`].
    fn touch(&mut self, pipeline: &A::Pipeline);

    /// Runs these of the indirect commands.
    fn execute(&mut self, indirect: &A::Indirect, commands: Range<usize>);

    /// Ends the encoder and hands everything to the GPU.
    fn commit(self) -> Result<()>;
}
