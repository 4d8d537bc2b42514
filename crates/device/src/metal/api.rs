//! The operations that the driver needs from Metal: one method for each Objective-C call, or for a
//! few that belong together.
//!
//! `apple` implements it with Metal, `fake` with a C++ compiler. Implementations make no decisions.

use std::ops::Range;
use std::path::Path;

use formats::Result;
use tile::Kernel;
use tile::types::Scalar;

use super::failure::Failure;

/// Most buffers and arguments of a kernel on any Apple GPU.
pub(crate) const BINDINGS: usize = 31;

/// Most commands of an indirect command buffer.
pub(crate) const COMMANDS: usize = 16_384;

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Its name: `Apple M2 Pro`.
    pub(crate) name: String,
    /// The version of the operating system, which includes the compiler.
    pub(crate) system: String,
    /// Most bytes of one buffer.
    pub(crate) longest: usize,
    /// Recommended working set in bytes.
    pub(crate) memory: usize,
    /// Most threadgroup memory in bytes.
    pub(crate) shared: u32,
    /// Whether the encoder has to use pipelines that only indirect commands refer to. GPUs before
    /// Apple family 9 (M3, A17) do not make those resident, and a step that uses one faults.
    pub(crate) touches: bool,
}

/// A library function from which a pipeline is made.
pub(crate) struct Function<'a> {
    /// Its name, its parameters, and its threads per threadgroup.
    pub(crate) kernel: &'a Kernel,
    /// The names, types and bits of its function constants.
    pub(crate) constants: Vec<(String, Scalar, u32)>,
}

/// Metal on one device with one queue. Objects can be used from any thread; only one thread at a
/// time encodes commands.
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

    /// Properties of the GPU.
    fn facts(&self) -> &Facts;

    /// Allocates zeroed memory, at least one byte.
    fn memory(&self, bytes: usize) -> Result<Self::Memory>;

    /// Copies bytes into memory that no GPU work is using.
    fn write(&self, to: &Self::Memory, at: usize, bytes: &[u8]) -> Result<()>;

    /// Copies bytes out of memory that no GPU work is writing.
    fn read(&self, from: &Self::Memory, at: usize, bytes: &mut [u8]) -> Result<()>;

    /// Reads two 32-bit words and nothing else: the GPU may be using neighbouring bytes.
    fn look(&self, from: &Self::Memory, at: usize) -> Result<[u32; 2]>;

    /// Writes one such word, for work that is committed later.
    fn put(&self, to: &Self::Memory, at: usize, word: u32) -> Result<()>;

    /// Keeps memory resident until [`depart`](Api::depart).
    fn reside(&self, memory: &Self::Memory);

    /// Ends residency.
    fn depart(&self, memory: &Self::Memory);

    /// Renews residency: the system releases a program's memory about a second after its last work.
    fn keep(&self);

    /// GPU memory of this process in bytes, as the system counts it.
    fn allocated(&self) -> usize;

    /// Compiles source for a version of the Metal language.
    fn compile(&self, text: &str, version: (u32, u32)) -> Result<Self::Library>;

    /// Opens a metallib file.
    fn open(&self, path: &Path) -> Result<Self::Library>;

    /// Makes a pipeline that indirect commands can use, from the archive or by compiling and adding
    /// it there. Returns true if it was not in the archive.
    fn pipeline(
        &self,
        library: &Self::Library,
        function: &Function<'_>,
        archive: Option<&Self::Archive>,
    ) -> Result<(Self::Pipeline, bool)>;

    /// Opens the archive in a file, which must outlive it; or creates an empty one.
    fn archive(&self, file: Option<&Path>) -> Result<Self::Archive>;

    /// Writes an archive to a file.
    fn save(&self, archive: &Self::Archive, to: &Path) -> Result<()>;

    /// Creates an indirect command buffer.
    fn indirect(&self, commands: usize, bindings: usize) -> Result<Self::Indirect>;

    /// One of its commands, to be filled in.
    fn slot<'a>(&self, indirect: &'a Self::Indirect, index: usize) -> Self::Slot<'a>;

    /// Creates a command buffer whose encoder starts after all work committed before, and whose
    /// dispatches may overlap.
    fn encoder(&self) -> Result<Self::Encoder<'_>>;

    /// Waits until the oldest command buffer not yet waited for is done or has failed, and returns
    /// the seconds that the GPU worked on it. `None` if there was none.
    fn advance(&self) -> Option<f64>;

    /// Runs `work` in an autorelease pool.
    fn pooled<R>(&self, work: impl FnOnce() -> R) -> R {
        work()
    }

    /// The first failure of finished work since the last call.
    fn failure(&self) -> Option<Failure>;
}

/// One launch: a pipeline, its bindings, then the dispatch.
pub(crate) trait Commands<A: Api> {
    /// Sets the pipeline.
    fn pipeline(&mut self, pipeline: &A::Pipeline);

    /// Binds memory from the start of a range. The kernel stays inside the range.
    fn buffer(&mut self, index: usize, memory: &A::Memory, range: Range<usize>);

    /// Makes later commands wait for earlier ones.
    fn barrier(&mut self);

    /// Dispatches threadgroups with the current bindings.
    fn dispatch(&mut self, grid: [u32; 3], threads: u32);
}

/// A command buffer that is being encoded.
pub(crate) trait Encoder<A: Api>: Commands<A> {
    /// Binds a 32-bit argument.
    fn word(&mut self, index: usize, word: u32);

    /// Makes a pipeline of indirect commands resident without running it: see [`Facts::touches`].
    fn touch(&mut self, pipeline: &A::Pipeline);

    /// Runs a range of indirect commands.
    fn execute(&mut self, indirect: &A::Indirect, commands: Range<usize>);

    /// Ends the encoder and commits the command buffer.
    fn commit(self) -> Result<()>;
}
