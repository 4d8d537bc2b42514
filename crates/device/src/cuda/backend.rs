//! The [`Backend`] for NVIDIA GPUs.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use formats::{Error, Result};
use tile::Kernel;
use tile::launch::Numbers;
use tile::passes::Target;

use super::{
    BoundProduct, CublasLt, CudaBuffer, CudaPipeline, Event, Gpu, Graph, GraphWork, Sums, nccl,
    roof,
};
use crate::cache::{self, Cache, Key};
use crate::gpu::group::HostGroup;
use crate::gpu::{Backend, Facts, GpuDevice, ProductShape, StagingBuffer};
use crate::ranks::{Candidate, Joined};
use crate::{About, Usage};

/// An NVIDIA GPU, with cuBLASLt if it is installed.
pub struct Cuda {
    gpu: Gpu,
    cublaslt: Option<CublasLt>,
    /// Plans by shape: making one takes longer than running it.
    products: Mutex<HashMap<ProductShape, BoundProduct>>,
    /// Where it is kept what was found out about the library's products.
    kept: Option<Cache>,
    /// The group of GPUs that it belongs to, and its rank.
    rank: Option<(Arc<Sums>, usize)>,
}

impl Cuda {
    /// Uses a GPU.
    pub fn new(gpu: Gpu) -> Cuda {
        // Without the library our own products are used; DELFT_NO_CUBLAS disables it.
        let wanted = std::env::var_os("DELFT_NO_CUBLAS").is_none();
        let cublaslt = wanted.then(|| gpu.cublaslt().ok()).flatten();
        Cuda { gpu, cublaslt, products: Mutex::default(), kept: Cache::of_user(), rank: None }
    }

    /// The vendor's library.
    fn cublaslt(&self) -> Result<&CublasLt> {
        self.cublaslt.as_ref().ok_or_else(|| Error::new("cuda", "cuBLASLt", "none"))
    }

    /// The key under which it is kept what was found out about the library's products.
    fn key(&self, name: &str) -> Option<Key> {
        let (facts, version) = (self.gpu.facts(), self.cublaslt().ok()?.version().to_string());
        Some(cache::key(&[name, &facts.name, &facts.driver, &version]))
    }

    /// Opens the GPUs with these numbers as the ranks of one group.
    ///
    /// # Errors
    /// A GPU that does not exist or is named twice, or NCCL missing or failing.
    pub(crate) fn ranks(numbers: &[u32]) -> Result<(Vec<Cuda>, Arc<Sums>)> {
        if let Some(i) = (1..numbers.len()).find(|i| numbers[..*i].contains(&numbers[*i])) {
            return Err(Error::new(
                "cuda",
                "GPUs each named once",
                format!("{} again", numbers[i]),
            ));
        }
        let gpus = numbers.iter().map(|number| Gpu::open_primary(*number));
        let gpus = gpus.collect::<Result<Vec<_>>>()?;
        let sums = Sums::new(gpus.clone())?;
        let rank = |(rank, gpu)| Cuda { rank: Some((Arc::clone(&sums), rank)), ..Cuda::new(gpu) };
        Ok((gpus.into_iter().enumerate().map(rank).collect(), sums))
    }
}

/// A GPU that is opened in its primary context.
impl Candidate for Gpu {
    fn group(&self) -> Result<Vec<u8>> {
        nccl::group()
    }

    fn join(
        self: Box<Self>,
        group: &[u8],
        rank: usize,
        ranks: usize,
        _: Arc<dyn HostGroup>,
    ) -> Result<Joined> {
        let sums = Sums::join(Gpu::clone(&self), group, rank, ranks)?;
        let cuda = Cuda { rank: Some((Arc::clone(&sums), rank)), ..Cuda::new(*self) };
        Ok((Box::new(GpuDevice::new(cuda)), Some(Arc::new(sums))))
    }
}

impl Backend for Cuda {
    type Buffer = CudaBuffer;
    type Pipeline = CudaPipeline;
    type Launch = GraphWork;
    type Recording = Graph;
    type Event = Event;

    fn about(&self) -> About {
        let facts = self.gpu.facts();
        About {
            name: "cuda",
            threads: facts.multiprocessors as usize,
            isa: facts.name.clone(),
            driver: facts.driver.clone(),
        }
    }

    fn facts(&self) -> Facts {
        let facts = self.gpu.facts();
        let tuned = facts.tuned();
        Facts {
            target: Target::Cuda,
            processors: facts.multiprocessors,
            shared: facts.shared,
            wgmma: facts.has_wgmma(),
            products: self.cublaslt.as_ref().map(|_| tuned.thresholds.unpack),
            tuned,
        }
    }

    fn buffer(&self, bytes: usize) -> Result<CudaBuffer> {
        let buffer = self.gpu.buffer(bytes)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    fn page(&self) -> Option<usize> {
        self.gpu.facts().page
    }

    fn reserve(&self, bytes: usize) -> Result<CudaBuffer> {
        self.gpu.reserve(bytes)
    }

    fn extend(&self, reserved: &CudaBuffer, bytes: usize) -> Result<()> {
        reserved.extend(bytes)
    }

    fn stages(&self, bytes: usize) -> Result<Vec<Box<dyn StagingBuffer<CudaBuffer> + '_>>> {
        // Two: one is copied while the other is filled.
        let stage = |_| Ok(Box::new(self.gpu.pinned(bytes)?) as Box<dyn StagingBuffer<CudaBuffer>>);
        (0..2).map(stage).collect()
    }

    fn pinned(&self, words: usize) -> Result<CudaBuffer> {
        self.gpu.host_buffer(4 * words)
    }

    fn read_pinned(&self, pinned: &CudaBuffer, word: usize) -> Result<Option<[u32; 2]>> {
        let look = || pinned.look(word).map(|found| Some(found).filter(|f| f[0] != u32::MAX));
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        if !self.gpu.idle()? {
            return Ok(None);
        }
        // All writes of finished work are visible now.
        let missing = || Error::new("cuda pinned words", "a note", "none");
        look()?.map(Some).ok_or_else(missing)
    }

    fn write_pinned(&self, pinned: &CudaBuffer, word: usize, bytes: &[u8]) -> Result<()> {
        pinned.put(word, bytes)
    }

    fn event(&self) -> Result<Event> {
        self.gpu.event()
    }

    fn record_event(&self, event: &Event) -> Result<()> {
        event.record()
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        event.wait()
    }

    fn part(&self, of: &CudaBuffer, range: Range<usize>) -> Result<CudaBuffer> {
        of.part(range)
    }

    fn write(&self, to: &CudaBuffer, bytes: &[u8]) -> Result<()> {
        to.part(0..bytes.len())?.write(bytes)
    }

    fn read(&self, from: &CudaBuffer, to: &mut [u8]) -> Result<()> {
        from.part(0..to.len())?.read(to)
    }

    fn copy(&self, from: &CudaBuffer, to: &CudaBuffer) -> Result<()> {
        to.part(0..from.len())?.copy_from(from)
    }

    fn has_peer(&self, other: &Cuda) -> bool {
        self.gpu.has_peer(&other.gpu)
    }

    fn peer_copy(&self, _: &Cuda, source: &CudaBuffer, to: &CudaBuffer) -> Result<()> {
        to.part(0..source.len())?.peer_copy(source)
    }

    fn ahead(&self, kernels: &[&Kernel]) {
        // A kernel that cannot be printed is reported when it is loaded.
        let text = |kernel: &&Kernel| Gpu::source(kernel, &Numbers::new()).ok();
        self.gpu.compiler().ahead(kernels, |kernel| text(kernel).into_iter().collect());
    }

    fn load(&self, kernel: &Arc<Kernel>) -> Result<CudaPipeline> {
        self.gpu.load(kernel, &Numbers::new())
    }

    fn bind(
        &self,
        pipeline: &CudaPipeline,
        numbers: &Numbers,
        buffers: &[CudaBuffer],
    ) -> Result<GraphWork> {
        Ok(GraphWork::Launch(pipeline.bind(numbers, buffers)?.overlapping()))
    }

    fn product(
        &self,
        shape: &ProductShape,
        x: &CudaBuffer,
        w: &CudaBuffer,
        add: Option<&CudaBuffer>,
        y: &CudaBuffer,
    ) -> Result<GraphWork> {
        let library = self.cublaslt()?;
        let mut known = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(product) = known.get(shape) {
            return Ok(GraphWork::Product(product.to(x, w, add, y)?));
        }
        let product = library.matmul(shape)?.bind_first(x, w, add, y)?;
        known.insert(*shape, product.clone());
        Ok(GraphWork::Product(product))
    }

    fn tune(
        &self,
        shape: &ProductShape,
        x: &CudaBuffer,
        ws: &[CudaBuffer],
        add: Option<&CudaBuffer>,
        y: &CudaBuffer,
        expected: [&[u8]; 2],
    ) -> Result<bool> {
        let name = format!("the fastest proposal for {shape:?} of {} matrices", ws.len());
        let kept = self.recall(&name).and_then(|kept| kept.first().copied());
        let matmul = self.cublaslt()?.matmul(shape)?;
        let found = matmul.bind_fastest(x, ws, add, y, expected, kept)?;
        let Some((number, product)) = found else { return Ok(false) };
        if kept != Some(number) {
            self.remember(&name, &[number]);
        }
        let mut known = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(*shape, product);
        Ok(true)
    }

    fn recall(&self, name: &str) -> Option<Vec<u8>> {
        self.kept.as_ref()?.get(&self.key(name)?)
    }

    fn remember(&self, name: &str, found: &[u8]) {
        if let (Some(kept), Some(key)) = (&self.kept, self.key(name)) {
            kept.put(&key, found);
        }
    }

    fn all_reduce(&self, x: &CudaBuffer, y: &CudaBuffer, count: usize) -> Result<GraphWork> {
        let alone = || Error::new("all_reduce", "one of several GPUs", "one alone");
        let (sums, rank) = self.rank.as_ref().ok_or_else(alone)?;
        Ok(GraphWork::Collective(sums.all_reduce(*rank, x, y, count)?.overlapping()))
    }

    fn all_gather(&self, x: &CudaBuffer, y: &CudaBuffer, counts: &[usize]) -> Result<GraphWork> {
        let alone = || Error::new("all_gather", "one of several GPUs", "one alone");
        let (sums, rank) = self.rank.as_ref().ok_or_else(alone)?;
        Ok(GraphWork::Collective(sums.all_gather(*rank, x, y, counts)?))
    }

    fn submit(&self, launches: &[GraphWork]) -> Result<()> {
        launches.iter().try_for_each(GraphWork::enqueue)
    }

    fn time(&self, launches: &[GraphWork]) -> Result<Option<Vec<f64>>> {
        self.gpu.time_each(launches.to_vec()).map(Some)
    }

    fn record(&self, launches: &[GraphWork]) -> Result<Graph> {
        self.gpu.graph(nccl::joined(launches.to_vec())?)
    }

    fn replay(&self, recording: &mut Graph) -> Result<()> {
        recording.replay()
    }

    fn prewarms(&self) -> bool {
        true
    }

    fn lost(&self) -> bool {
        self.gpu.lost()
    }

    fn usage(&self) -> Option<Usage> {
        Some(self.gpu.usage())
    }

    fn free(&self) -> Result<Option<usize>> {
        self.gpu.free().map(Some)
    }

    fn read_rate(&self) -> f64 {
        roof::read_rate(&self.gpu).unwrap_or(0.0)
    }
}
