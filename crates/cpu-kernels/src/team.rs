//! A team of threads that run one job together: persistent, pinned, spinning for a moment and then
//! asleep.
//!
//! [`Team::run`] hands one closure to every worker (the caller is worker 0) and returns when all
//! are done; inside, [`Worker::barrier`] keeps them in step. Nothing is allocated per job. Waiting
//! threads spin for about [`PATIENCE`], so that a busy loop pays well under a microsecond per
//! hand-over, then sleep, so that an idle engine uses no processor. Where the threads come from:
//! `topology`.

mod topology;

pub use topology::default_threads;

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a waiting thread spins before it sleeps, when every worker has a processor of its own.
/// Tests run several teams beside each other, where spinning keeps another's workers from running.
pub const PATIENCE: Duration = Duration::from_micros(if cfg!(debug_assertions) { 5 } else { 100 });

/// Yields before a thread sleeps if there are more workers than processors: spinning would only
/// keep other workers from running.
const YIELDS: usize = 16;

/// Persistent threads that run one job at a time together. Dropping it joins them.
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held for the length of a job, so that jobs from several threads queue.
    turn: Mutex<()>,
    /// The processor kept free for worker 0, when the team is pinned.
    caller_cpu: Option<usize>,
}

/// A worker's view of the current job.
pub struct Worker<'a> {
    /// This worker, `0..count`.
    pub index: usize,
    /// Workers in the team.
    pub count: usize,
    shared: &'a Shared,
    /// Set when the job is to end early.
    stop: &'a AtomicBool,
}

/// Pads a value to two cache lines, against false sharing and the adjacent-line prefetcher.
#[repr(align(128))]
struct Padded<T>(T);

/// A job that all workers run.
struct Job<'a> {
    f: &'a (dyn Fn(&Worker<'_>) + Sync),
    /// Set to end the job early.
    stop: &'a AtomicBool,
}

struct Shared {
    count: usize,
    crowded: bool,
    /// Jobs started so far.
    epoch: Padded<AtomicUsize>,
    /// The job of this epoch: written by the caller while every other worker waits for the epoch.
    job: UnsafeCell<Option<*const Job<'static>>>,
    stop: AtomicBool,
    start: Bell,
    /// Workers, other than the caller, that have not finished the job.
    busy: Padded<AtomicUsize>,
    finish: Bell,
    /// Barriers completed so far: each wait watches it change.
    generation: Padded<AtomicUsize>,
    arrived: Padded<AtomicUsize>,
    passing: Bell,
    /// Workers that have called [`Worker::arrive`] since the last barrier.
    ready: Padded<AtomicUsize>,
    /// The stop flag as seen by the last worker to arrive at a barrier; the same for all that pass
    /// it.
    stopping: AtomicBool,
    /// The next unclaimed item: see [`Worker::claim`].
    ticket: Padded<AtomicUsize>,
    /// A worker panicked: no barrier of this job will complete.
    broken: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: every field but `job` is `Sync` by itself. `job` is written by the caller, who holds
// `Team::turn`, before it advances `epoch` (release), while all workers wait for that (acquire);
// they read it and never write it.
unsafe impl Sync for Shared {}
// SAFETY: `job` is a pointer to a `Sync` closure and flag that `Team::run_until` keeps alive while
// any worker may use them.
unsafe impl Send for Shared {}

/// The panic payload of a worker after another one panicked; the caller gets the other's message.
struct Broken;

thread_local! {
    /// The team whose job this thread is running, if any.
    static INSIDE: Cell<*const Shared> = const { Cell::new(std::ptr::null()) };
}

impl Team {
    /// Starts a team of `threads` workers (at least one): the caller of [`Team::run`], and one new
    /// thread for each of the others. On Linux each is pinned to its own processor of those that
    /// this process may use, whole cores first; nothing is pinned if there are more workers than
    /// processors.
    ///
    /// # Errors
    /// The operating system refuses more threads.
    pub fn new(threads: usize) -> formats::Result<Team> {
        let count = threads.max(1);
        let cpus = topology::allowed_cpus();
        let crowded = count > cpus.len();
        let shared = Arc::new(Shared {
            count,
            crowded,
            epoch: Padded(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            start: Bell::default(),
            busy: Padded(AtomicUsize::new(0)),
            finish: Bell::default(),
            generation: Padded(AtomicUsize::new(0)),
            arrived: Padded(AtomicUsize::new(0)),
            passing: Bell::default(),
            ready: Padded(AtomicUsize::new(0)),
            stopping: AtomicBool::new(false),
            ticket: Padded(AtomicUsize::new(0)),
            broken: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let cpu =
            |index: usize| if crowded || count == 1 { None } else { cpus.get(index).copied() };
        let mut team = Team {
            shared,
            threads: Vec::with_capacity(count - 1),
            turn: Mutex::new(()),
            caller_cpu: cpu(0),
        };
        for index in 1..count {
            let (shared, cpu) = (team.shared.clone(), cpu(index));
            let thread =
                std::thread::Builder::new().name(format!("delft-{index}")).spawn(move || {
                    if let Some(cpu) = cpu {
                        topology::pin(cpu);
                    }
                    serve(&shared, index);
                });
            // On an error the team is dropped, which stops and joins the threads started so far.
            team.threads.push(thread.map_err(|error| {
                formats::Error::io(format!("thread {index} of {count}"), error)
            })?);
        }
        Ok(team)
    }

    /// Workers in the team, the caller included.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Pins the calling thread to the processor that the team keeps for worker 0; does nothing in
    /// an unpinned team. For a thread that only calls [`Team::run`]; others may call it unpinned.
    pub fn pin_caller(&self) {
        if let Some(cpu) = self.caller_cpu {
            topology::pin(cpu);
        }
    }

    /// Runs `f` once on every worker and returns when all are done. Jobs from several threads
    /// queue.
    ///
    /// # Panics
    /// With the panic of a worker, after all of them stopped; the team stays usable. Also when
    /// called from inside a job of the same team, which could never end.
    pub fn run(&self, f: &(dyn Fn(&Worker<'_>) + Sync)) {
        static NEVER: AtomicBool = AtomicBool::new(false);
        self.run_until(&NEVER, f);
    }

    /// [`Team::run`] that ends early once `stop` is set: [`Worker::claim`] then returns nothing and
    /// [`Worker::gather`] returns false. Returns false if a gather did.
    pub fn run_until(&self, stop: &AtomicBool, f: &(dyn Fn(&Worker<'_>) + Sync)) -> bool {
        let shared: &Shared = &self.shared;
        assert!(
            INSIDE.get() != std::ptr::from_ref(shared),
            "Team::run called from inside one of its own jobs"
        );
        let turn = lock(&self.turn);
        shared.arrived.0.store(0, Ordering::Relaxed);
        shared.ready.0.store(0, Ordering::Relaxed);
        shared.ticket.0.store(0, Ordering::Relaxed);
        shared.broken.store(false, Ordering::Relaxed);
        shared.stopping.store(false, Ordering::Relaxed);
        shared.busy.0.store(shared.count - 1, Ordering::Relaxed);
        let job = Job { f, stop };
        // Only the lifetime changes. Below, this call waits until `busy` is 0, after which no
        // worker touches the job; a panic of worker 0 is caught, so that nothing leaves earlier.
        let everlasting = std::ptr::from_ref(&job).cast::<Job<'static>>();
        // SAFETY: this thread holds the turn and every worker waits for the next epoch, so no other
        // thread has access.
        unsafe { *shared.job.get() = Some(everlasting) };
        if shared.count > 1 {
            shared.epoch.0.fetch_add(1, Ordering::Release);
            shared.start.ring();
        }
        let outer = INSIDE.replace(shared);
        work(shared, 0, &job);
        INSIDE.set(outer);
        shared.finish.wait(shared.crowded, || shared.busy.0.load(Ordering::Acquire) == 0);
        let panic =
            if shared.broken.load(Ordering::Acquire) { lock(&shared.panic).take() } else { None };
        let stopped = shared.stopping.load(Ordering::Relaxed);
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        !stopped
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.0.fetch_add(1, Ordering::Release);
        self.shared.start.ring();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of jobs, so there is no error to report here.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team")
            .field("count", &self.shared.count)
            .field("caller_cpu", &self.caller_cpu)
            .finish()
    }
}

/// The main loop of a worker thread.
fn serve(shared: &Shared, index: usize) {
    INSIDE.set(shared);
    let mut seen = 0;
    loop {
        shared.start.wait(shared.crowded, || shared.epoch.0.load(Ordering::Acquire) != seen);
        // One job at a time, and the caller waits for all: the epoch moved by exactly one.
        seen = seen.wrapping_add(1);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: the caller wrote the job before it advanced the epoch, and writes it again only
        // after `busy` is 0.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: `Team::run_until` keeps the job alive until this worker counts itself out of
            // `busy`.
            work(shared, index, unsafe { &*job });
        }
        if shared.busy.0.fetch_sub(1, Ordering::AcqRel) == 1 {
            shared.finish.ring();
        }
    }
}

/// Runs the job as worker `index`. A panic breaks the barrier, so that no worker waits for this
/// one.
fn work(shared: &Shared, index: usize, job: &Job<'_>) {
    let worker = Worker { index, count: shared.count, shared, stop: job.stop };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (job.f)(&worker))) {
        if !panic.is::<Broken>() {
            lock(&shared.panic).get_or_insert(panic);
        }
        shared.broken.store(true, Ordering::Release);
        shared.passing.ring();
    }
}

impl Worker<'_> {
    /// Waits until every worker of the team is here. All writes before it are visible to all
    /// workers after it.
    ///
    /// Every worker must call it the same number of times in a job. Also restarts
    /// [`Worker::claim`] and [`Worker::arrive`].
    pub fn barrier(&self) {
        let shared = self.shared;
        if self.count == 1 {
            shared.ready.0.store(0, Ordering::Relaxed);
            shared.ticket.0.store(0, Ordering::Relaxed);
            shared.stopping.store(self.stop.load(Ordering::Relaxed), Ordering::Relaxed);
            return;
        }
        // The generation cannot move before this worker arrives: read first, it is the one being
        // waited for.
        let generation = shared.generation.0.load(Ordering::Relaxed);
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            shared.arrived.0.store(0, Ordering::Relaxed);
            shared.ready.0.store(0, Ordering::Relaxed);
            shared.ticket.0.store(0, Ordering::Relaxed);
            // One worker reads the flag for all; each reads this copy before it can arrive at the
            // next barrier.
            shared.stopping.store(self.stop.load(Ordering::Relaxed), Ordering::Relaxed);
            shared.generation.0.store(generation.wrapping_add(1), Ordering::Release);
            shared.passing.ring();
            return;
        }
        self.wait_until(|| shared.generation.0.load(Ordering::Acquire) != generation);
    }

    /// The first half of a barrier in two halves (a split barrier): tells the others that this
    /// worker's results are there, and returns at once. What it does until [`Worker::wait`] hides
    /// the wait for the others.
    ///
    /// Every worker may call it once between two barriers.
    pub fn arrive(&self) {
        let shared = self.shared;
        if shared.ready.0.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            shared.passing.ring();
        }
    }

    /// The second half: waits until every worker has called [`Worker::arrive`] since the last
    /// barrier. All writes before those calls are visible to this worker then. It may be called
    /// any number of times, also never.
    pub fn wait(&self) {
        self.wait_until(|| self.shared.ready.0.load(Ordering::Acquire) == self.count);
    }

    /// Waits for a condition that other workers of the job make true.
    fn wait_until(&self, passed: impl Fn() -> bool) {
        let shared = self.shared;
        shared.passing.wait(shared.crowded, || passed() || shared.broken.load(Ordering::Acquire));
        if !passed() {
            resume_unwind(Box::new(Broken));
        }
    }

    /// [`Worker::barrier`] that returns whether the job goes on: false, for every worker alike,
    /// once it is to stop.
    pub fn gather(&self) -> bool {
        self.barrier();
        !self.shared.stopping.load(Ordering::Relaxed)
    }

    /// This worker's contiguous share of `0..n`: shares differ by at most one.
    pub fn split(&self, n: usize) -> Range<usize> {
        share(n, self.index, self.count)
    }

    /// This worker's share of `0..n` in whole units of `unit` (the last may be short), e.g. panels
    /// or cache lines.
    pub fn split_units(&self, n: usize, unit: usize) -> Range<usize> {
        let units = share(n.div_ceil(unit), self.index, self.count);
        (units.start * unit).min(n)..(units.end * unit).min(n)
    }

    /// This worker's contiguous share of `0..n` when item `i` costs `weight(i)`: shares of about
    /// equal total cost. Every worker must pass the same weights; O(n).
    pub fn split_weighted(&self, n: usize, weight: impl Fn(usize) -> u64) -> Range<usize> {
        let total: u128 = (0..n).map(|i| u128::from(weight(i))).sum();
        if total == 0 {
            return self.split(n);
        }
        // An item belongs to the worker in whose share of the total its middle lies: increasing, so
        // contiguous.
        let (mut before, mut start, mut end) = (0u128, n, n);
        for i in 0..n {
            let weight = u128::from(weight(i));
            let owner = (2 * before + weight) * self.count as u128 / (2 * total);
            if owner >= self.index as u128 && start == n {
                start = i;
            }
            if owner > self.index as u128 {
                end = i;
                break;
            }
            before += weight;
        }
        start.min(end)..end
    }

    /// Claims the next `chunk` unclaimed items of `0..n`; `None` once all are taken. For items of
    /// uneven cost, or on a busy machine. There may be at most one such loop between two barriers
    /// (or a barrier and the end of the job), with the same `n` and `chunk` in every worker; no
    /// item is handed out twice. A job that is to stop has no more items: their results are
    /// missing, which the next [`Worker::gather`] reports to all.
    pub fn claim(&self, n: usize, chunk: usize) -> Option<Range<usize>> {
        // A load first: the counter stops growing once it is past the end, so that it cannot wrap.
        if self.shared.ticket.0.load(Ordering::Relaxed) >= n || self.stop.load(Ordering::Relaxed) {
            return None;
        }
        let start = self.shared.ticket.0.fetch_add(chunk.max(1), Ordering::Relaxed);
        (start < n).then(|| start..n.min(start + chunk.max(1)))
    }
}

/// Share `index` of `count` contiguous shares of `0..n`.
fn share(n: usize, index: usize, count: usize) -> Range<usize> {
    let (each, extra) = (n / count, n % count);
    let start = index * each + index.min(extra);
    start..start + each + usize::from(index < extra)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded data is consistent at every instant, so a panic elsewhere does not matter.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a condition on atomics: spinning first, asleep later.
#[derive(Default)]
struct Bell {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Bell {
    /// Returns once `ready()` is true; the thread that makes it true calls [`Bell::ring`]
    /// afterwards.
    fn wait(&self, crowded: bool, ready: impl Fn() -> bool) {
        if crowded {
            for _ in 0..YIELDS {
                if ready() {
                    return;
                }
                std::thread::yield_now();
            }
        } else if spin(&ready) {
            return;
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `ring`: either the ringer sees the sleeper, or this sees the
        // change.
        fence(Ordering::SeqCst);
        while !ready() {
            guard = self.bell.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Wakes sleeping threads; called after the change that they wait for.
    fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // Holding the lock once means that a sleeper which saw the old state is in
            // `Condvar::wait` by now.
            drop(lock(&self.lock));
            self.bell.notify_all();
        }
    }
}

/// Spins until `ready()` or for [`PATIENCE`]; returns whether it is ready.
fn spin(ready: &impl Fn() -> bool) -> bool {
    let mut began = None;
    loop {
        // The pauses grow at first, to leave the bus to working threads, but stay short: one costs
        // up to 140 cycles.
        for pauses in [1, 1, 2, 2, 4, 4, 4, 4] {
            if ready() {
                return true;
            }
            for _ in 0..pauses {
                std::hint::spin_loop();
            }
        }
        match began {
            None => began = Some(Instant::now()),
            Some(start) if start.elapsed() > PATIENCE => return ready(),
            Some(_) => {}
        }
    }
}

/// A slice of which several workers write disjoint parts at once.
#[derive(Debug)]
pub struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedSlice<'_, T> {}

// SAFETY: a part is only reached through `slice_mut` and `slice`, whose callers promise that parts
// used at once by different threads do not overlap where one writes.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Shares `slice` among workers.
    pub fn new(slice: &'a mut [T]) -> Self {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Shares `len` elements at `start` among workers.
    ///
    /// # Safety
    /// For `'a`, the elements are initialised and accessed through copies of this slice alone.
    pub unsafe fn from_raw(start: *mut T, len: usize) -> Self {
        SharedSlice { start, len, life: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part `range`, for writing.
    ///
    /// # Safety
    /// No other worker may access an element of `range` while the slice lives, except on the other
    /// side of a barrier.
    ///
    /// # Panics
    /// If `range` is not inside the slice.
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of a slice of {}",
            self.len
        );
        // SAFETY: in bounds; exclusive by the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start)
        }
    }

    /// The part `range`, for reading.
    ///
    /// # Safety
    /// No worker may write an element of `range` while the slice lives.
    ///
    /// # Panics
    /// If `range` is not inside the slice.
    pub unsafe fn slice(&self, range: Range<usize>) -> &'a [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of a slice of {}",
            self.len
        );
        // SAFETY: in bounds; not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.end - range.start) }
    }
}
