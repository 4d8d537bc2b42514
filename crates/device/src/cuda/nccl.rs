//! Sums over GPUs of one machine, and what all of them have, by NCCL: each in its GPU's stream, so
//! that it is a node of a graph like any other work.
//!
//! The library is looked for when several GPUs are to share a model's layers, under the name that
//! it is installed by, `libnccl.so.2`: cudarc's bindings ask for `libnccl.so`, which only its
//! development package has. What is used of it has been the same since version 2.4.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use formats::{Error, Hint, Result, Setting};

use super::{Buffer, Gpu, library};
use crate::ranks::Group;

/// A rank's side of a group of GPUs.
type Comm = *mut c_void;

/// How long the other ranks of a step may take to end once one has failed: they may have failed at
/// the same, and wait for nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// `ncclFloat32` and `ncclSum`.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// The entry points that are used.
struct Nccl {
    init_all: unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int,
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
/// If it is nowhere to be found.
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
        // NVLink multicast stays off: a process that ends while it has multicast objects can leave
        // the host's switches so that other processes' GPUs fail, and sums as small as these gain
        // nothing by it. Connections are made at once and not at a first sum, which may be one that
        // is recorded.
        for (name, value) in [("NCCL_NVLS_ENABLE", "0"), ("NCCL_RUNTIME_CONNECT", "0")] {
            // SAFETY: readers in Rust take std's lock, and the only reader in C is the library that
            // is loaded below.
            unsafe { std::env::set_var(name, value) };
        }
        let loaded = library::open("libnccl.so", &["2"])?;
        // SAFETY: the library's header declares each with this signature.
        unsafe {
            Some(Nccl {
                init_all: loaded.symbol(c"ncclCommInitAll")?,
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

/// GPUs that add up what they have.
pub struct Sums {
    nccl: &'static Nccl,
    comms: Vec<Comm>,
    /// Held so that contexts outlive what NCCL has in them.
    gpus: Vec<Gpu>,
    /// Steps begun so far.
    steps: AtomicU64,
    /// Whether a rank has failed and left others waiting; held while a sum is enqueued.
    broken: RwLock<bool>,
}

// SAFETY: a handle may be used from any one thread at a time: each rank's is used by that rank's
// thread, or, by `abort`, once no thread is inside the library and none enters it any more.
unsafe impl Send for Sums {}
// SAFETY: as above.
unsafe impl Sync for Sums {}

impl Sums {
    /// Joins GPUs, in the order of their ranks. They are of [`Gpu::open_primary`], since NCCL works
    /// in primary contexts.
    ///
    /// # Errors
    /// Without NCCL, or if it refuses these GPUs.
    pub fn new(gpus: Vec<Gpu>) -> Result<Arc<Sums>> {
        let nccl = Nccl::get()?;
        let numbers: Vec<c_int> = gpus.iter().map(|gpu| gpu.0.device).collect();
        let count = c_int::try_from(numbers.len()).unwrap_or(c_int::MAX);
        let mut comms = vec![std::ptr::null_mut(); numbers.len()];
        // SAFETY: there is room for as many handles as there are numbers.
        let joined = unsafe { (nccl.init_all)(comms.as_mut_ptr(), count, numbers.as_ptr()) };
        nccl.check("joining GPUs", joined)?;
        let (steps, broken) = Default::default();
        let sums = Arc::new(Sums { nccl, comms, gpus, steps, broken });
        sums.first()?;
        Ok(sums)
    }

    /// One sum, to see that they meet.
    fn first(self: &Arc<Self>) -> Result<()> {
        let one = |gpu: &Gpu| gpu.upload(&1.0_f32.to_le_bytes());
        let buffers = self.gpus.iter().map(one).collect::<Result<Vec<_>>>()?;
        let sums = buffers.iter().enumerate();
        let bind = |(rank, x)| self.all_reduce(rank, x, x, 1);
        let sums: Vec<_> = sums.map(bind).collect::<Result<_>>()?;
        // One thread enqueues for all of them: it must not wait for the first before it comes to
        // the second. SAFETY: begins a group on this thread, which `group_end` ends.
        self.nccl.check("a first sum", unsafe { (self.nccl.group_start)() })?;
        let enqueued = sums.iter().try_for_each(Collective::enqueue);
        // SAFETY: as above.
        let ended = self.nccl.check("a first sum", unsafe { (self.nccl.group_end)() });
        enqueued.and(ended)?;
        for buffer in buffers {
            let mut sum = [0; 4];
            buffer.read(&mut sum)?;
            let (expected, found) = (self.gpus.len() as f32, f32::from_le_bytes(sum));
            if found != expected {
                return Err(Error::new("nccl: a first sum", expected.to_string(), found));
            }
        }
        Ok(())
    }

    /// The sum of what all ranks have in `x`, so many floats, in every rank's `y`; both may be the
    /// same bytes.
    ///
    /// # Errors
    /// If a buffer is shorter, or not the rank's.
    pub fn all_reduce(
        self: &Arc<Self>,
        rank: usize,
        x: &Buffer,
        y: &Buffer,
        count: usize,
    ) -> Result<Collective> {
        let (x, y) = (x.part(0..4 * count)?, y.part(0..4 * count)?);
        self.bind("all_reduce", rank, x, y, Joins::Sum(count))
    }

    /// What all ranks have in `x`, as many floats each as `counts` says, one rank after the other,
    /// in every rank's `y`, which is apart from `x`.
    ///
    /// # Errors
    /// If a buffer is shorter, or not the rank's, or `counts` is not one of each rank.
    pub fn all_gather(
        self: &Arc<Self>,
        rank: usize,
        x: &Buffer,
        y: &Buffer,
        counts: &[usize],
    ) -> Result<Collective> {
        let own = counts.get(rank).filter(|_| counts.len() == self.gpus.len());
        let wrong = || Error::new("all_gather", "a share of each rank", counts.len());
        let own = *own.ok_or_else(wrong)?;
        let (x, y) = (x.part(0..4 * own)?, y.part(0..4 * counts.iter().sum::<usize>())?);
        self.bind("all_gather", rank, x, y, Joins::Gather(counts.into()))
    }

    fn bind(
        self: &Arc<Self>,
        name: &str,
        rank: usize,
        x: Buffer,
        y: Buffer,
        joins: Joins,
    ) -> Result<Collective> {
        let own = self
            .gpus
            .get(rank)
            .is_some_and(|gpu| [&x, &y].iter().all(|buffer| Arc::ptr_eq(buffer.context(), &gpu.0)));
        if !own {
            let expected = format!("buffers of rank {rank} of {}", self.gpus.len());
            return Err(Error::new(name, expected, "others"));
        }
        Ok(Collective { sums: Arc::clone(self), rank, x, y, joins })
    }
}

impl Sums {
    fn broken(&self) -> bool {
        *self.broken.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends sums that wait, unless the step is over.
    fn abort(self: &Arc<Self>, step: u64) {
        // Once it is held, whoever was inside the library has left it, and nobody enters who would
        // find it not broken.
        let mut broken = self.broken.write().unwrap_or_else(PoisonError::into_inner);
        if *broken || self.steps.load(Ordering::SeqCst) != step {
            return;
        }
        *broken = true;
        drop(broken);
        for rank in 0..self.comms.len() {
            let sums = Arc::clone(self);
            // This ends the kernels that wait at once, but returns only when no graph has a sum of
            // the rank any more. SAFETY: no thread is inside the library with the handle, and
            // `drop` leaves it alone from now on.
            let abort = move || unsafe { (sums.nccl.abort)(sums.comms[rank]) };
            // Without a thread the kernels wait for ever, as they would have.
            drop(std::thread::Builder::new().spawn(abort));
        }
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
        if self.broken() {
            return;
        }
        for (comm, gpu) in self.comms.iter().zip(&self.gpus) {
            drop(gpu.synchronize());
            // SAFETY: made by `init_all`, destroyed only here; nothing that is bound to it is left,
            // since that holds `self`.
            unsafe { (self.nccl.destroy)(*comm) };
        }
    }
}

/// What all ranks do together, bound to one rank's buffers.
#[derive(Clone)]
pub struct Collective {
    sums: Arc<Sums>,
    rank: usize,
    x: Buffer,
    y: Buffer,
    joins: Joins,
}

/// What becomes of what all ranks have.
#[derive(Clone)]
enum Joins {
    /// The sum of so many floats.
    Sum(usize),
    /// So many floats of each rank, one after the other.
    Gather(Arc<[usize]>),
}

impl Collective {
    /// Enqueues it after all earlier work of this rank. It ends when all ranks have come to theirs.
    ///
    /// # Errors
    /// If NCCL refuses, or another rank has failed.
    pub fn enqueue(&self) -> Result<()> {
        let sums = &self.sums;
        let broken = sums.broken.read().unwrap_or_else(PoisonError::into_inner);
        if *broken {
            return Err(Error::new(crate::ranks::PLACE, "all ranks", "one that failed"));
        }
        let context = self.x.context();
        context.enter()?;
        let (x, y) = (self.x.address() as *const c_void, self.y.address() as *mut c_void);
        let (nccl, comm, stream) = (sums.nccl, sums.comms[self.rank], context.stream.cast());
        let counts = match &self.joins {
            Joins::Sum(count) => {
                // SAFETY: both are `count` floats of this rank's GPU, and wait for the stream
                // before they go; the context is current and the stream is its own.
                let code = unsafe { (nccl.all_reduce)(x, y, *count, FLOAT32, SUM, comm, stream) };
                return nccl.check("a sum", code);
            }
            Joins::Gather(counts) => counts,
        };
        if counts.iter().all(|count| *count == counts[0]) {
            // SAFETY: as above, but that `y` is as many floats of every rank.
            let code = unsafe { (nccl.all_gather)(x, y, counts[0], FLOAT32, comm, stream) };
            return nccl.check("a gather", code);
        }
        // Each rank's share goes to all others, all shares at once.
        // SAFETY: begins a group on this thread, which `group_end` ends.
        nccl.check("a gather", unsafe { (nccl.group_start)() })?;
        let (mut sent, mut before) = (Ok(()), 0);
        for (root, count) in (0..).zip(counts.iter()) {
            // SAFETY: `y` has room for the shares of all ranks, of which this one's begins behind
            // those of the ranks before it; `x`, which the root alone reads, is its share.
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
