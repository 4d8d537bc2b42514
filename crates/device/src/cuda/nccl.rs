//! All-reduce and all-gather between GPUs of one process, or of several, by NCCL; small sums by
//! [`peer_sum`] where GPUs reach each other's memory. Each operation runs in its GPU's stream, so
//! that it can be a node of a graph.
//!
//! The library is loaded when several GPUs are to share a model's layers, under its installed name
//! `libnccl.so.2`; cudarc's bindings ask for `libnccl.so`, which only the development package has.
//! The functions used here have been unchanged since version 2.4.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use formats::{Error, Hint, Result, Setting};

use super::peer_sum::{self, Exchange, HANDLE, PeerSums, Place};
use super::{CudaBuffer, Gpu, GraphWork, library};
use crate::ranks::Group;

/// A rank's NCCL communicator.
type Comm = *mut c_void;

/// Time for the other ranks to finish a step after one has failed: they may have failed in the same
/// way and not be waiting.
const PATIENCE: Duration = Duration::from_secs(2);

/// `ncclFloat32` and `ncclSum`.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// NCCL's identifier of a group (`ncclUniqueId`), the same for all its ranks.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

/// The NCCL functions that are used.
struct Nccl {
    init_all: unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> c_int,
    all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> c_int,
    broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    said: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// Looks for the library.
///
/// # Errors
/// It was not found.
pub(super) fn present() -> Result<()> {
    Nccl::get().map(|_| ())
}

impl Nccl {
    /// The library, loaded once.
    fn get() -> Result<&'static Nccl> {
        static LOADED: OnceLock<Option<Nccl>> = OnceLock::new();
        let missing = || {
            let hint = Hint::text(
                "install NCCL (libnccl2), or name the folder that holds libnccl.so.2 in LD_LIBRARY_PATH; ",
            );
            let hint = hint.with_value(Setting::SplitMode, "layer").and(" needs none");
            Error::new("cuda", "libnccl.so.2", "none").hint(hint)
        };
        LOADED.get_or_init(Nccl::load).as_ref().ok_or_else(missing)
    }

    fn load() -> Option<Nccl> {
        // NVLink multicast stays off: a process that ends while it holds multicast objects can
        // leave the host's switches in a state in which other processes' GPUs fail, and sums as
        // small as these gain nothing by it. Connections are made at once rather than at the first
        // sum, which may be captured in a graph.
        for (name, value) in [("NCCL_NVLS_ENABLE", "0"), ("NCCL_RUNTIME_CONNECT", "0")] {
            // SAFETY: readers in Rust take std's lock, and the only reader in C is the library
            // loaded below.
            unsafe { std::env::set_var(name, value) };
        }
        let loaded = library::open("libnccl.so", &["2"])?;
        // SAFETY: the library's header declares each with this signature.
        unsafe {
            Some(Nccl {
                init_all: loaded.symbol(c"ncclCommInitAll")?,
                unique_id: loaded.symbol(c"ncclGetUniqueId")?,
                init_rank: loaded.symbol(c"ncclCommInitRank")?,
                all_reduce: loaded.symbol(c"ncclAllReduce")?,
                all_gather: loaded.symbol(c"ncclAllGather")?,
                broadcast: loaded.symbol(c"ncclBroadcast")?,
                group_start: loaded.symbol(c"ncclGroupStart")?,
                group_end: loaded.symbol(c"ncclGroupEnd")?,
                destroy: loaded.symbol(c"ncclCommDestroy")?,
                abort: loaded.symbol(c"ncclCommAbort")?,
                said: loaded.symbol(c"ncclGetErrorString")?,
            })
        }
    }

    fn check(&self, doing: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: takes any number and returns a text that stays.
        let said = unsafe { CStr::from_ptr((self.said)(code)) };
        Err(Error::new(format!("nccl: {doing}"), "", said.to_string_lossy()))
    }
}

/// Makes the identity of a group whose ranks are in several processes.
///
/// # Errors
/// NCCL is missing, or finds no network interface.
pub(super) fn group() -> Result<Vec<u8>> {
    let nccl = Nccl::get()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: writes one identity.
    nccl.check("a group", unsafe { (nccl.unique_id)(&mut id) })?;
    Ok(id.0.to_vec())
}

/// A group of GPUs with collective operations.
pub struct Sums {
    nccl: &'static Nccl,
    comms: Vec<Comm>,
    /// For small sums, where all ranks reach each other's memory.
    peers: Option<PeerSums>,
    /// Those of this process, of successive ranks. Keeps the contexts alive longer than NCCL's
    /// objects in them.
    gpus: Vec<Gpu>,
    /// The rank of the first of these.
    first: usize,
    /// Number of ranks, in whichever process.
    ranks: usize,
    /// Number of steps begun so far.
    steps: AtomicU64,
    /// Whether a rank has failed and left others waiting; locked while an operation is enqueued.
    broken: RwLock<bool>,
}

// SAFETY: a communicator may be used by one thread at a time. Each rank's is used by that rank's
// thread, or by `abort` once no thread is inside the library and none enters it any more.
unsafe impl Send for Sums {}
// SAFETY: as above.
unsafe impl Sync for Sums {}

impl Sums {
    /// Joins GPUs, in rank order. They must be opened by [`Gpu::open_primary`], since NCCL works in
    /// primary contexts.
    ///
    /// # Errors
    /// NCCL is missing, or refuses these GPUs.
    pub fn new(gpus: Vec<Gpu>) -> Result<Arc<Sums>> {
        let nccl = Nccl::get()?;
        let numbers: Vec<c_int> = gpus.iter().map(|gpu| gpu.0.device).collect();
        let count = c_int::try_from(numbers.len()).unwrap_or(c_int::MAX);
        let mut comms = vec![std::ptr::null_mut(); numbers.len()];
        // SAFETY: there is room for as many handles as there are numbers.
        let joined = unsafe { (nccl.init_all)(comms.as_mut_ptr(), count, numbers.as_ptr()) };
        nccl.check("joining GPUs", joined)?;
        let (steps, broken) = Default::default();
        let (peers, ranks) = (PeerSums::new(&gpus)?, gpus.len());
        let sums = Arc::new(Sums { nccl, comms, peers, gpus, first: 0, ranks, steps, broken });
        sums.try_some()?;
        Ok(sums)
    }

    /// Makes this process's GPU rank `rank` of the `ranks` of a [`group`], and waits until every
    /// rank has joined.
    ///
    /// # Errors
    /// As [`Sums::new`].
    pub(super) fn join(gpu: Gpu, group: &[u8], rank: usize, ranks: usize) -> Result<Arc<Sums>> {
        let nccl = Nccl::get()?;
        let wrong = || Error::new("nccl", "an identity of 128 bytes", group.len());
        let id = UniqueId(group.try_into().map_err(|_| wrong())?);
        let [own, count] = [rank, ranks].map(|n| c_int::try_from(n).unwrap_or(c_int::MAX));
        gpu.0.enter()?;
        let mut comm = std::ptr::null_mut();
        // SAFETY: writes one handle; the GPU's context, which is current, outlives it.
        let joined = unsafe { (nccl.init_rank)(&mut comm, count, id, own) };
        nccl.check("joining GPUs of several processes", joined)?;
        let (steps, broken) = Default::default();
        let (comms, gpus) = (vec![comm], vec![gpu.clone()]);
        let joined = Sums { nccl, comms, peers: None, gpus, first: rank, ranks, steps, broken };
        let mut sums = Arc::new(joined);
        let peers = PeerSums::across(&gpu, rank, ranks, &sums)?;
        if let Some(sums) = Arc::get_mut(&mut sums) {
            sums.peers = peers;
        }
        sums.try_some()?;
        Ok(sums)
    }

    /// Checks that all ranks communicate, by sums of few values and of more than [`PeerSums`] adds.
    fn try_some(self: &Arc<Self>) -> Result<()> {
        for count in [1, 1000, peer_sum::MOST + 1] {
            self.try_one(count)?;
        }
        Ok(())
    }

    /// Runs one sum, to which each rank gives its number and one more.
    fn try_one(self: &Arc<Self>, count: usize) -> Result<()> {
        let one = |(rank, gpu): (usize, &Gpu)| {
            gpu.upload(&((rank + 1) as f32).to_le_bytes().repeat(count))
        };
        let buffers = (self.first..).zip(&self.gpus).map(one).collect::<Result<Vec<_>>>()?;
        let sums = (self.first..).zip(&buffers);
        let bind = |(rank, x)| self.all_reduce(rank, x, x, count);
        let sums: Vec<_> = sums.map(bind).collect::<Result<_>>()?;
        // One thread enqueues for all ranks: without a group, it would wait in the first call.
        // SAFETY: begins a group on this thread, which `group_end` ends.
        self.nccl.check("a first sum", unsafe { (self.nccl.group_start)() })?;
        let enqueued = sums.iter().try_for_each(Collective::enqueue);
        // SAFETY: as above.
        let ended = self.nccl.check("a first sum", unsafe { (self.nccl.group_end)() });
        enqueued.and(ended)?;
        let expected = (self.ranks * (self.ranks + 1) / 2) as f32;
        for buffer in buffers {
            let mut sum = vec![0; 4 * count];
            buffer.read(&mut sum)?;
            let (found, _) = sum.as_chunks::<4>();
            let found = found.iter().map(|bytes| f32::from_le_bytes(*bytes));
            if let Some(wrong) = found.into_iter().find(|found| *found != expected) {
                return Err(Error::new("cuda: a first sum", expected.to_string(), wrong));
            }
        }
        Ok(())
    }

    /// Binds an all-reduce: the sum of all ranks' `x`, `count` floats, goes to every rank's `y`.
    /// `x` and `y` may alias.
    ///
    /// # Errors
    /// A buffer that is too short or not the rank's.
    pub fn all_reduce(
        self: &Arc<Self>,
        rank: usize,
        x: &CudaBuffer,
        y: &CudaBuffer,
        count: usize,
    ) -> Result<Collective> {
        let (x, y) = (x.part(0..4 * count)?, y.part(0..4 * count)?);
        self.bind("all_reduce", rank, x, y, Combine::Sum(count))
    }

    /// Binds an all-gather: all ranks' `x`, of `counts[rank]` floats, concatenated in rank order,
    /// go to every rank's `y`, which must not overlap `x`.
    ///
    /// # Errors
    /// A buffer that is too short or not the rank's, or `counts` without an entry for each rank.
    pub fn all_gather(
        self: &Arc<Self>,
        rank: usize,
        x: &CudaBuffer,
        y: &CudaBuffer,
        counts: &[usize],
    ) -> Result<Collective> {
        let own = counts.get(rank).filter(|_| counts.len() == self.ranks);
        let wrong = || Error::new("all_gather", "a share of each rank", counts.len());
        let own = *own.ok_or_else(wrong)?;
        let (x, y) = (x.part(0..4 * own)?, y.part(0..4 * counts.iter().sum::<usize>())?);
        self.bind("all_gather", rank, x, y, Combine::Gather(counts.into()))
    }

    fn bind(
        self: &Arc<Self>,
        name: &str,
        rank: usize,
        x: CudaBuffer,
        y: CudaBuffer,
        combine: Combine,
    ) -> Result<Collective> {
        let here = rank.checked_sub(self.first).and_then(|here| Some((here, self.gpus.get(here)?)));
        let own = here
            .filter(|(_, gpu)| [&x, &y].iter().all(|buffer| Arc::ptr_eq(buffer.context(), &gpu.0)));
        let Some((here, _)) = own else {
            let expected = format!("buffers of rank {rank} of {}", self.ranks);
            return Err(Error::new(name, expected, "others"));
        };
        let (sums, place) = (Arc::clone(self), Place::ALONE);
        Ok(Collective { sums, here, x, y, combine, place, overlap: false })
    }
}

impl Sums {
    fn broken(&self) -> bool {
        *self.broken.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Aborts operations that wait, unless the step is over.
    fn abort(self: &Arc<Self>, step: u64) {
        // With the write lock held, no thread is inside the library, and any that enters later sees
        // that the group is broken.
        let mut broken = self.broken.write().unwrap_or_else(PoisonError::into_inner);
        if *broken || self.steps.load(Ordering::SeqCst) != step {
            return;
        }
        *broken = true;
        drop(broken);
        self.peers.iter().for_each(PeerSums::stop);
        for here in 0..self.comms.len() {
            let sums = Arc::clone(self);
            // Aborting ends waiting kernels at once, but returns only when no graph holds an
            // operation of the rank. SAFETY: no thread is inside the library with this
            // communicator, and `drop` does not touch it from now on.
            let abort = move || unsafe { (sums.nccl.abort)(sums.comms[here]) };
            // Without a thread the kernels wait for ever, as they would have.
            drop(std::thread::Builder::new().spawn(abort));
        }
    }
}

impl Exchange for Arc<Sums> {
    fn gather(&self, own: &[u8; HANDLE]) -> Result<Vec<[u8; HANDLE]>> {
        let gpu = &self.gpus[0];
        let (x, y) = (gpu.upload(own)?, gpu.buffer(HANDLE * self.ranks)?);
        self.all_gather(self.first, &x, &y, &vec![HANDLE / 4; self.ranks])?.enqueue()?;
        let mut all = vec![0; HANDLE * self.ranks];
        y.read(&mut all)?;
        Ok(all.as_chunks().0.to_vec())
    }

    fn agree(&self, own: bool) -> Result<bool> {
        let x = self.gpus[0].upload(&f32::from(u8::from(own)).to_le_bytes())?;
        self.all_reduce(self.first, &x, &x, 1)?.enqueue()?;
        let mut sum = [0; 4];
        x.read(&mut sum)?;
        Ok(f32::from_le_bytes(sum) == self.ranks as f32)
    }
}

impl Group for Arc<Sums> {
    fn break_up(&self) {
        let (sums, step) = (Arc::clone(self), self.steps.load(Ordering::SeqCst));
        let look = move || {
            std::thread::sleep(PATIENCE);
            sums.abort(step);
        };
        drop(std::thread::Builder::new().spawn(look));
    }

    fn mend(&self) -> Result<()> {
        let broken = self.broken.read().unwrap_or_else(PoisonError::into_inner);
        self.steps.fetch_add(1, Ordering::SeqCst);
        if !*broken {
            return Ok(());
        }
        let error = Error::new("cuda", "GPUs that all work", "one that failed");
        Err(error.hint("load the model again"))
    }
}

impl Drop for Sums {
    fn drop(&mut self) {
        // No rank writes into another's mailbox any more.
        self.gpus.iter().for_each(|gpu| drop(gpu.synchronize()));
        if self.broken() {
            return;
        }
        for comm in &self.comms {
            // SAFETY: made by `init_all` or `init_rank`, destroyed only here; nothing that is bound
            // to it is left, since that holds `self`.
            unsafe { (self.nccl.destroy)(*comm) };
        }
    }
}

/// A collective operation bound to one rank's buffers.
#[derive(Clone)]
pub struct Collective {
    sums: Arc<Sums>,
    /// Which of this process's ranks.
    here: usize,
    x: CudaBuffer,
    y: CudaBuffer,
    combine: Combine,
    /// Where it stands among the small sums of a graph.
    place: Place,
    overlap: bool,
}

/// How the contributions of all ranks are combined.
#[derive(Clone)]
enum Combine {
    /// The sum of this many floats.
    Sum(usize),
    /// Concatenation of this many floats of each rank.
    Gather(Arc<[usize]>),
}

impl Collective {
    /// The ranks' mailboxes and the number of values, if they are few enough for these.
    fn small(&self) -> Option<(&PeerSums, usize)> {
        match (&self.sums.peers, &self.combine) {
            (Some(peers), Combine::Sum(count)) if *count <= peer_sum::MOST => Some((peers, *count)),
            _ => None,
        }
    }

    /// Lets it start while the work before it finishes, if it is a kernel that waits by itself.
    pub fn overlapping(mut self) -> Collective {
        self.overlap = true;
        self
    }

    /// Makes it start only when the work before it is done.
    pub fn apart(mut self) -> Collective {
        self.overlap = false;
        self
    }

    /// Enqueues it after all earlier work of this rank. It completes when all ranks have reached
    /// theirs.
    ///
    /// # Errors
    /// NCCL refuses, or another rank has failed.
    pub fn enqueue(&self) -> Result<()> {
        let sums = &self.sums;
        let broken = sums.broken.read().unwrap_or_else(PoisonError::into_inner);
        if *broken {
            return Err(Error::new(crate::ranks::PLACE, "all ranks", "one that failed"));
        }
        if let Some((peers, count)) = self.small() {
            return peers.enqueue(self.here, &self.x, &self.y, count, self.place, self.overlap);
        }
        let context = self.x.context();
        context.enter()?;
        let (x, y) = (self.x.address() as *const c_void, self.y.address() as *mut c_void);
        let (nccl, comm, stream) = (sums.nccl, sums.comms[self.here], context.stream.cast());
        let counts = match &self.combine {
            Combine::Sum(count) => {
                // SAFETY: both are `count` floats on this rank's GPU and wait for the stream before
                // they are freed; the context is current and owns the stream.
                let code = unsafe { (nccl.all_reduce)(x, y, *count, FLOAT32, SUM, comm, stream) };
                return nccl.check("a sum", code);
            }
            Combine::Gather(counts) => counts,
        };
        if counts.iter().all(|count| *count == counts[0]) {
            // SAFETY: as above, except that `y` holds that many floats of every rank.
            let code = unsafe { (nccl.all_gather)(x, y, counts[0], FLOAT32, comm, stream) };
            return nccl.check("a gather", code);
        }
        // Each rank broadcasts its share; all broadcasts run as one group. SAFETY: begins a group
        // on this thread, which `group_end` ends.
        nccl.check("a gather", unsafe { (nccl.group_start)() })?;
        let (mut sent, mut before) = (Ok(()), 0);
        for (root, count) in (0..).zip(counts.iter()) {
            // SAFETY: `y` has room for the shares of all ranks, in rank order; `x`, which only the
            // root reads, is this rank's share.
            let code = unsafe {
                let to = y.byte_add(4 * before);
                (nccl.broadcast)(x, to, *count, FLOAT32, root, comm, stream)
            };
            sent = sent.and(nccl.check("a gather", code));
            before += count;
        }
        // SAFETY: as above.
        let ended = nccl.check("a gather", unsafe { (nccl.group_end)() });
        sent.and(ended)
    }
}

/// Numbers the small sums of a graph, and has the product in front of each post what it computes,
/// where that is all that becomes of it.
///
/// # Errors
/// A product that does not compile so.
pub(super) fn joined(mut work: Vec<GraphWork>) -> Result<Vec<GraphWork>> {
    let small = |work: &GraphWork| match work {
        GraphWork::Collective(sum) => sum.overlap && sum.small().is_some(),
        _ => false,
    };
    let sums: Vec<usize> = (0..work.len()).filter(|i| small(&work[*i])).collect();
    for (round, &at) in (1..).zip(&sums) {
        let GraphWork::Collective(sum) = &work[at] else { continue };
        let last = at == sums[sums.len() - 1];
        let rounds_of_graph = if last { round } else { 0 };
        let (mut sum, place) = (sum.clone(), Place { round, rounds_of_graph, posted: false });
        let product = at.checked_sub(1).and_then(|i| match &work[i] {
            // The sum takes the place of the results.
            GraphWork::Launch(product) if sum.x.address() == sum.y.address() => Some(product),
            _ => None,
        });
        let posting = match (product, sum.small()) {
            (Some(product), Some((peers, count))) => {
                let words = peers.posting(sum.here, place);
                product.posting(&sum.x, count, &peers.posted(), &words)?
            }
            _ => None,
        };
        sum.place = Place { posted: posting.is_some(), ..place };
        work[at] = GraphWork::Collective(sum);
        if let Some(posting) = posting {
            work[at - 1] = GraphWork::Launch(posting);
        }
    }
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_or_named() {
        match Nccl::get() {
            Ok(nccl) => {
                let why = nccl.check("nothing", 4).unwrap_err().to_string();
                assert!(why.starts_with("nccl: nothing") && why.contains("argument"), "{why}");
                assert_eq!(std::env::var("NCCL_NVLS_ENABLE").as_deref(), Ok("0"));
            }
            Err(why) => assert!(why.to_string().contains("libnccl.so.2"), "{why}"),
        }
    }
}
