//! Which accesses come before which: stamps, barriers, and the hand-over between threadgroups.
//!
//! Every access is stamped with a clock that only barriers and fences advance, so what the lockstep
//! happens to order still counts as unordered. Within a group, a barrier orders all before it, a
//! simdgroup's barrier the shared memory accesses of its lanes. Between groups (which run one after
//! another here, but not on a device) only a hand-over orders: writes, a fence and an atomic by one
//! thread; then an atomic on the same element and a fence by one thread of another. A barrier
//! before the first fence, and one after the second, extend this to the other threads of their
//! groups. That is what the memory models of CUDA, C++ and Metal promise: a fence of one thread
//! says nothing of another's atomic, whatever barrier stands between them.

use std::collections::HashMap;

/// Who touched an element last and when: the stamp, then two flags, then the thread.
pub(super) type Record = u64;

/// Bits below the stamp.
const WHO: u32 = 12;
const THREAD: u64 = 0x3FF;
/// Several lanes of the thread's simdgroup.
pub(super) const WIDE: u64 = 1 << 10;
/// Threads of several simdgroups.
const MANY: u64 = 1 << 11;
/// A warpgroup, in which no simdgroup's barrier orders anything.
pub(super) const ALL: u64 = WIDE | MANY;
/// The stamp before the first group. What the launch found in memory has none.
const INITIAL: u64 = 1;

/// The clock part of a record.
#[inline(always)]
pub(super) fn stamp(record: Record) -> u64 {
    record >> WHO
}

/// One thread of a record.
pub(super) fn thread(record: Record) -> usize {
    (record & THREAD) as usize
}

/// The accesses that one group has made visible to others that touch the same atomic.
#[derive(Debug, Clone, Copy)]
struct Release {
    /// The group's first stamp.
    born: u64,
    /// All its accesses before this stamp.
    upto: u64,
    /// The same for this thread's accesses before `own`.
    thread: u64,
    own: u64,
    /// When the atomic was executed.
    at: u64,
}

/// An element that hands work over.
#[derive(Debug, Default)]
struct Baton {
    releases: Vec<Release>,
    /// The releases that the releasing groups had seen of other batons.
    also: Vec<Seen>,
}

/// The first `len` releases of a baton.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    baton: usize,
    len: usize,
}

/// The clock and all that orders accesses.
#[derive(Debug)]
pub(super) struct Order {
    now: u64,
    born: u64,
    barrier: u64,
    simds: [u64; 32],
    /// The first stamp of every group so far.
    births: Vec<u64>,
    /// Whether the kernel fences at all; if not, nothing is handed over.
    fences: bool,
    /// By thread: its last fence, and the barrier before it.
    fenced: Vec<(u64, u64)>,
    names: HashMap<(u32, u32), usize>,
    batons: Vec<Baton>,
    /// The releases that a thread's atomics have seen (`seen_by`), that its fences have taken over
    /// since the last barrier (`taken_by`), and that the group had before it (`taken`).
    seen_by: Vec<(u64, Seen)>,
    taken: Vec<Seen>,
    taken_by: Vec<(u64, Seen)>,
    /// By thread: its last `async_fence`, and the last that a barrier has shown to others.
    published: Vec<u64>,
    shown: Vec<u64>,
}

fn add(list: &mut Vec<Seen>, new: Seen) {
    match list.iter_mut().find(|s| s.baton == new.baton) {
        Some(old) => old.len = old.len.max(new.len),
        None => list.push(new),
    }
}

fn add_by(list: &mut Vec<(u64, Seen)>, thread: u64, new: Seen) {
    match list.iter_mut().find(|(t, s)| *t == thread && s.baton == new.baton) {
        Some((_, old)) => old.len = old.len.max(new.len),
        None => list.push((thread, new)),
    }
}

impl Order {
    pub(super) fn new(threads: usize, fences: bool) -> Self {
        Order {
            now: INITIAL,
            born: INITIAL,
            barrier: INITIAL,
            simds: [INITIAL; 32],
            births: vec![],
            fences,
            fenced: vec![(0, 0); threads],
            names: HashMap::new(),
            batons: vec![],
            seen_by: vec![],
            taken: vec![],
            taken_by: vec![],
            published: vec![0; threads],
            shown: vec![0; threads],
        }
    }

    /// Begins the next threadgroup.
    pub(super) fn group(&mut self) {
        self.now += 1;
        self.born = self.now;
        self.barrier = self.now;
        self.births.push(self.now);
        self.seen_by.clear();
        self.taken.clear();
        self.taken_by.clear();
    }

    /// Which group, in order of execution, a record is from.
    pub(super) fn group_of(&self, record: Record) -> usize {
        self.births.partition_point(|born| *born <= stamp(record)).saturating_sub(1)
    }

    /// Whether a record is from the running group.
    #[inline(always)]
    pub(super) fn is_ours(&self, record: Record) -> bool {
        stamp(record) >= self.born
    }

    /// The record of an access now.
    #[inline(always)]
    pub(super) fn record(&self, who: u64) -> Record {
        self.now << WHO | who
    }

    pub(super) fn barrier(&mut self) {
        self.now += 1;
        self.barrier = self.now;
        self.shown.copy_from_slice(&self.published);
        for (_, seen) in std::mem::take(&mut self.taken_by) {
            add(&mut self.taken, seen);
        }
    }

    /// A barrier of one simdgroup; `tick` must be called once before the barriers of an
    /// instruction.
    pub(super) fn simd_barrier(&mut self, simd: usize) {
        self.simds[simd] = self.now;
    }

    /// Separates what was from what comes.
    pub(super) fn tick(&mut self) {
        self.now += 1;
    }

    /// A fence by some threads.
    pub(super) fn fence(&mut self, threads: impl Iterator<Item = usize>) {
        self.now += 1;
        for thread in threads {
            self.fenced[thread] = (self.now, self.barrier);
            let t = thread as u64;
            for i in 0..self.seen_by.len() {
                let (by, seen) = self.seen_by[i];
                if by == t {
                    add_by(&mut self.taken_by, t, seen);
                }
            }
        }
    }

    /// An `async_fence` by some threads.
    pub(super) fn async_fence(&mut self, threads: &[usize]) {
        self.now += 1;
        threads.iter().for_each(|thread| self.published[*thread] = self.now);
    }

    /// Whether a barrier orders what a record says before now.
    pub(super) fn is_past(&self, record: Record) -> bool {
        stamp(record) < self.barrier
    }

    /// Whether the writer of a record has made it ready for products, and a barrier has shown that.
    pub(super) fn is_shown(&self, record: Record) -> bool {
        stamp(record) < self.shown[thread(record)]
    }

    /// An atomic on an element of a buffer: sees what others released there, then releases.
    pub(super) fn atomic(&mut self, buffer: u32, index: u32, thread: usize) {
        if !self.fences {
            return;
        }
        let name = *self.names.entry((buffer, index)).or_insert_with(|| {
            self.batons.push(Baton::default());
            self.batons.len() - 1
        });
        let t = thread as u64;
        let len = self.batons[name].releases.len();
        if len > 0 {
            add_by(&mut self.seen_by, t, Seen { baton: name, len });
            for i in 0..self.batons[name].also.len() {
                add_by(&mut self.seen_by, t, self.batons[name].also[i]);
            }
        }
        let (fence, barrier) = self.fenced[thread];
        if fence <= self.born {
            return;
        }
        let new = Release { born: self.born, upto: barrier, thread: t, own: fence, at: self.now };
        let baton = &mut self.batons[name];
        match baton.releases.iter_mut().rfind(|r| r.born == new.born && r.thread == t) {
            Some(old) => *old = new,
            None => baton.releases.push(new),
        }
        let own = self.taken_by.iter().filter(|(by, _)| *by == t).map(|(_, seen)| seen);
        for seen in self.taken.iter().chain(own).filter(|seen| seen.baton != name) {
            add(&mut baton.also, *seen);
        }
    }

    /// Whether no access now can be unordered with the recorded access: it is of this group, before
    /// its last barrier, or of what the launch found, or of nothing.
    #[inline(always)]
    pub(super) fn is_settled(&self, record: Record) -> bool {
        record < self.barrier << WHO && (record >= self.born << WHO || stamp(record) <= INITIAL)
    }

    /// Whether an access now is unordered with the recorded access to shared memory.
    #[inline(always)]
    pub(super) fn clashes_shared(&self, record: Record, who: u64) -> bool {
        stamp(record) >= self.barrier && self.clashes::<true>(record, who)
    }

    /// Whether an access now is unordered with the recorded access to a buffer.
    #[inline(always)]
    pub(super) fn clashes_global(&self, record: Record, who: u64, access: Access) -> bool {
        let stamp = stamp(record);
        if stamp >= self.barrier {
            return self.clashes::<false>(record, who);
        }
        stamp < self.born && stamp > INITIAL && !self.handed(record, who, access)
    }

    /// For a record of this group since its last barrier.
    fn clashes<const SHARED: bool>(&self, record: Record, who: u64) -> bool {
        if (record ^ who) & ((1 << WHO) - 1) == 0 && who & WIDE == 0 {
            return false;
        }
        let simd = (who & THREAD) / 32;
        let together = record & MANY == 0 && (record & THREAD) / 32 == simd;
        !(SHARED && together && stamp(record) < self.simds[simd as usize])
    }

    /// Whether what another group did has been handed over to this access.
    fn handed(&self, record: Record, who: u64, access: Access) -> bool {
        let thread = who & THREAD;
        let ready = |seen: &Seen| {
            let releases = &self.batons[seen.baton].releases[..seen.len];
            let past = releases.partition_point(|r| r.born <= stamp(record));
            let Some(latest) = past.checked_sub(1).map(|i| releases[i].born) else { return false };
            releases[..past].iter().rev().take_while(|r| r.born == latest).any(|r| {
                let own = record & (WIDE | MANY) == 0 && record & THREAD == r.thread;
                stamp(record) < r.upto
                    || (own && stamp(record) < r.own)
                    || (access.of_atomic && stamp(record) <= r.at)
            })
        };
        let by = |list: &[(u64, Seen)]| list.iter().any(|(t, seen)| *t == thread && ready(seen));
        self.taken.iter().any(ready) || by(&self.taken_by)
    }

    /// Adds an access to a record of reads (or of atomics), which may be of several threads.
    /// Returns what must be kept beside it: an access of another group that is not ordered before
    /// this one.
    #[inline(always)]
    pub(super) fn note<const SHARED: bool>(
        &self,
        record: &mut Record,
        who: u64,
        access: Access,
    ) -> Option<Record> {
        let old = *record;
        *record = self.record(who);
        if stamp(old) < self.barrier {
            let foreign = !SHARED && stamp(old) < self.born && stamp(old) > INITIAL;
            return (foreign && !self.handed(old, who, access)).then_some(old);
        }
        if self.clashes::<SHARED>(old, who) {
            let together = old & MANY == 0 && (old & THREAD) / 32 == (who & THREAD) / 32;
            *record = self.record(who | if together { WIDE } else { MANY });
        }
        None
    }
}

/// The properties of an access that the ordering rules depend on.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Access {
    /// The record it is compared with is of atomics.
    pub(super) of_atomic: bool,
}
