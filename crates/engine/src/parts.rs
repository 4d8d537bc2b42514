//! The parts of a loaded model: each [`Capability`] is a Program with its executor and cache. They
//! are on one device and share its weights. Parts come and go while the others compute, and all of
//! them are loaded again when their device is lost.

use crate::adapters;
use crate::events::{Capability, Events, Stage};
use crate::load::{Engine, LoadOptions, Shared};
use crate::prepare::Prepared;
use device::{Device, Executor, Memory, Outcome, Plan, Roof, Ticket, Watch};
use formats::{Error, ErrorKind, Result};
use models::Ending;
use program::Step;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The state that all parts of a model share.
#[derive(Default)]
pub(crate) struct Home {
    /// `None` while it is opened anew.
    device: Mutex<Option<Arc<dyn Device>>>,
    parts: Mutex<Vec<Weak<Shared>>>,
    /// Held while parts are loaded, disabled or reloaded.
    changing: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave these values half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Home {
    pub(crate) fn device(&self) -> Option<Arc<dyn Device>> {
        lock(&self.device).clone()
    }

    pub(crate) fn settle(&self, device: &Arc<dyn Device>) {
        lock(&self.device).get_or_insert_with(|| device.clone());
    }

    pub(crate) fn join(&self, part: &Arc<Shared>) {
        lock(&self.parts).push(Arc::downgrade(part));
    }

    fn parts(&self) -> Vec<Arc<Shared>> {
        let mut parts = lock(&self.parts);
        parts.retain(|part| part.strong_count() > 0);
        parts.iter().filter_map(Weak::upgrade).collect()
    }
}

#[derive(Default)]
struct Entered {
    closed: bool,
    inside: usize,
}

/// Counts the work that a part has, and closes when it is to be disabled.
#[derive(Default)]
pub(crate) struct Gate {
    entered: Mutex<Entered>,
    left: Condvar,
}

/// Work of a part, until it is dropped.
pub(crate) struct Inside(Arc<Gate>);

impl Drop for Inside {
    fn drop(&mut self) {
        lock(&self.0.entered).inside -= 1;
        self.0.left.notify_all();
    }
}

impl Gate {
    /// Closes the gate and waits until no work is left. After `time` it opens the gate again and
    /// returns false.
    fn drain(&self, time: Duration) -> bool {
        let late = Instant::now() + time;
        let mut entered = lock(&self.entered);
        entered.closed = true;
        while entered.inside > 0 {
            let left = late.saturating_duration_since(Instant::now());
            if left.is_zero() {
                entered.closed = false;
                return false;
            }
            let waited = self.left.wait_timeout(entered, left);
            entered = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn open(&self) {
        lock(&self.entered).closed = false;
    }

    fn is_open(&self) -> bool {
        !lock(&self.entered).closed
    }
}

/// The executor of a part that is not loaded: it answers every call with an error.
struct Absent(Error);

impl Executor for Absent {
    fn submit_watched(&mut self, _: &Step<'_>, _: &Watch<'_>) -> Result<Option<Ticket>> {
        Err(self.0.clone())
    }

    fn wait(&mut self, _: Ticket) -> Result<Outcome<'_>> {
        Err(self.0.clone())
    }

    fn keeps(&self, _: Ticket) -> bool {
        false
    }

    fn read(&mut self, _: Ticket, _: usize) -> Result<&[f32]> {
        Err(self.0.clone())
    }

    fn copy_blocks(&mut self, _: usize, _: &[(u32, u32)]) -> Result<()> {
        Err(self.0.clone())
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }

    fn compiled(&self) -> usize {
        0
    }

    fn roof(&self) -> Roof {
        Roof { token_bytes: 0, position_bytes: 0, bytes_per_second: 0.0 }
    }
}

impl Shared {
    /// The capability that this part is.
    pub(crate) fn capability(&self) -> Capability {
        Capability::of(self.options.ending)
    }

    /// Takes in work, unless the part is disabled.
    ///
    /// # Errors
    /// If the part is disabled.
    pub(crate) fn enter(&self) -> Result<Inside> {
        let mut entered = lock(&self.gate.entered);
        if entered.closed {
            return Err(self.disabled());
        }
        entered.inside += 1;
        Ok(Inside(self.gate.clone()))
    }

    fn disabled(&self) -> Error {
        let expected = "a capability that is enabled";
        let error = Error::new(self.capability(), expected, "one that is disabled");
        error.of(ErrorKind::Busy)
    }

    /// Replaces the executor. What was cached is gone with the one before.
    fn replace(&self, executor: Box<dyn Executor>) {
        let mut own = self.executor();
        *own = executor;
        let before = self.epoch.fetch_add(1, Ordering::SeqCst);
        self.prefixes.tree().renew(before + 1);
    }

    /// How often its executor was replaced.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// The executor, for work on what was cached in this epoch.
    ///
    /// # Errors
    /// If the executor was replaced since: nothing of that is cached any more.
    pub(crate) fn executor_of(&self, epoch: u64) -> Result<MutexGuard<'_, Box<dyn Executor>>> {
        // The epoch changes only while this lock is held.
        let executor = self.executor();
        if self.epoch() == epoch { Ok(executor) } else { Err(self.reloaded()) }
    }

    /// The error of work that was under way when the device was lost.
    pub(crate) fn reloaded(&self) -> Error {
        let found = "one that was lost; the model is loaded again";
        let error = Error::new(self.info.device.name, "a device that works", found);
        error.of(ErrorKind::Internal)
    }

    /// Notes that a step has failed: if the device is lost, all parts are to be loaded again.
    pub(crate) fn failed(&self) {
        if !self.executor().lost() {
            return;
        }
        for part in self.home.parts() {
            if part.gate.is_open() && !part.lost.swap(true, Ordering::SeqCst) {
                let why = Some(part.info.device.to_string());
                part.options.events.tell(part.capability(), Stage::Lost, why);
            }
        }
    }

    /// Whether its device is lost and it is not yet loaded again.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Loads all parts again, on their device opened anew, if it was lost.
    ///
    /// # Errors
    /// As [`Engine::load`]. A part that cannot be loaded again answers with that error from then
    /// on.
    pub(crate) fn ready(&self) -> Result<()> {
        if !self.is_lost() {
            return Ok(());
        }
        let _turn = lock(&self.home.changing);
        let lost: Vec<Arc<Shared>> =
            self.home.parts().into_iter().filter(|part| part.is_lost()).collect();
        if lost.is_empty() {
            // Another thread has done it meanwhile.
            return Ok(());
        }
        let gone = Error::new(self.info.device.name, "a device that works", "one that was lost");
        let gone = gone.of(ErrorKind::Internal);
        for part in &lost {
            part.replace(Box::new(Absent(gone.clone())));
        }
        // The last handle must be gone before the device is opened again.
        *lock(&self.home.device) = None;
        let mut own = Ok(());
        for part in &lost {
            let again = part.load_again(&mut |_, _| {});
            if let Err(why) = &again {
                part.replace(Box::new(Absent(why.clone())));
            }
            part.lost.store(false, Ordering::SeqCst);
            if part.capability() == self.capability() {
                own = again;
            }
        }
        own
    }

    /// Loads this part again, with the options that it was loaded with.
    fn load_again(self: &Arc<Self>, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let loaded = Prepared::beside(self, self.capability())?.load(progress)?;
        let absent = Box::new(Absent(self.disabled()));
        let executor = std::mem::replace(&mut *loaded.0.executor(), absent);
        self.replace(executor);
        Ok(())
    }

    /// The options by which a part with this capability is loaded beside this one.
    pub(crate) fn options_beside(&self, capability: Capability) -> LoadOptions {
        let (ending, context) = (capability.ending(), Some(self.info.context));
        LoadOptions { ending, context, copies: false, ..self.options.clone() }
    }
}

impl Engine {
    /// The part with a capability; the first part if there is none, which refuses what it cannot
    /// do.
    pub(crate) fn part(&self, capability: Capability) -> Arc<Shared> {
        self.find(capability).unwrap_or_else(|| self.0.clone())
    }

    fn find(&self, capability: Capability) -> Option<Arc<Shared>> {
        if self.0.capability() == capability {
            return Some(self.0.clone());
        }
        lock(&self.0.others).iter().find(|part| part.capability() == capability).cloned()
    }

    fn all_parts(&self) -> Vec<Arc<Shared>> {
        let others = lock(&self.0.others);
        std::iter::once(&self.0).chain(&*others).cloned().collect()
    }

    /// The parts that are enabled.
    pub(crate) fn enabled(&self) -> Vec<Arc<Shared>> {
        let mut parts = self.all_parts();
        parts.retain(|part| part.gate.is_open());
        parts
    }

    /// The capabilities that are enabled.
    pub fn capabilities(&self) -> Vec<Capability> {
        self.enabled().iter().map(|part| part.capability()).collect()
    }

    /// Loads a capability while the others go on: a Program on the engine's device, over the
    /// weights that are there already, with the engine's options and adapters. Nothing changes if
    /// it is enabled already. `progress` is called with bytes done and bytes in total.
    ///
    /// # Errors
    /// As [`Engine::load`]; files that have become another model's.
    pub fn enable(&self, capability: Capability, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let shared = &self.0;
        shared.ready()?;
        let _turn = lock(&shared.home.changing);
        match self.find(capability) {
            Some(part) if part.gate.is_open() => Ok(()),
            Some(part) => {
                part.load_again(progress)?;
                part.gate.open();
                Ok(())
            }
            None => {
                let loaded = Prepared::beside(shared, capability)?.load(progress)?;
                lock(&shared.others).push(loaded.0);
                Ok(())
            }
        }
    }

    /// Plans what [`Engine::enable`] would load.
    ///
    /// # Errors
    /// As [`Engine::enable`].
    pub fn prepare_capability(&self, capability: Capability) -> Result<Prepared> {
        self.0.ready()?;
        Prepared::beside(&self.0, capability)
    }

    /// The memory plans of all enabled capabilities, each computed when it was loaded: without the
    /// weights that were there already.
    pub fn plans(&self) -> Vec<Plan> {
        self.enabled().iter().flat_map(|part| part.plan.clone()).collect()
    }

    /// Takes no more requests for a capability, waits for at most `time` until the running ones are
    /// done, and frees its memory, except for weights that other capabilities use. Sessions forget
    /// what they had cached. Returns false, with everything as before, if requests are still
    /// running after `time`.
    pub fn disable(&self, capability: Capability, time: Duration) -> bool {
        let shared = &self.0;
        let _turn = lock(&shared.home.changing);
        let Some(part) = self.find(capability).filter(|part| part.gate.is_open()) else {
            return true;
        };
        let events = &part.options.events;
        events.tell(capability, Stage::Draining, None);
        if !part.gate.drain(time) {
            events.tell(capability, Stage::Ready, None);
            return false;
        }
        part.replace(Box::new(Absent(part.disabled())));
        device::give_back();
        events.tell(capability, Stage::Unloaded, None);
        true
    }

    /// Bytes held by weights, cache and activations of all capabilities. Weights that they share
    /// count once.
    pub fn memory(&self) -> Memory {
        let parts = self.all_parts();
        let mut whole = Memory::default();
        for part in parts {
            let Memory { weights, cache, arena, device } = part.executor().memory();
            whole.weights += weights;
            whole.cache += cache;
            whole.arena += arena;
            // All parts are on one device.
            whole.device = whole.device.or(device);
        }
        let shared = self.0.home.device().map_or(0, |device| device.shared());
        Memory { weights: whole.weights.saturating_sub(shared), ..whole }
    }

    /// The listeners to the stages of all its parts.
    pub fn events(&self) -> &Events {
        &self.0.options.events
    }
}

/// Seats all adapters of a model on a new executor of one of its parts.
pub(crate) fn seat_again(
    shared: &Shared,
    ending: Ending,
    tensors: &formats::Tensors,
    executor: &mut dyn Executor,
) -> Result<()> {
    let seated = shared.seats.seated();
    if seated.is_empty() {
        return Ok(());
    }
    adapters::with_base_of(shared, ending, tensors, |base| {
        seated.iter().try_for_each(|adapter| {
            executor.seat(adapter.seat(), Some(&adapters::resolve(base, adapter.file())?))
        })
    })
}
