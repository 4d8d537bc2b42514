//! The [`Backend`] for Metal.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use formats::{Error, Result};
use ops::tuned::{Card, CardNumbers};
use tile::Kernel;
use tile::emit::{self, Dialect};
use tile::launch::Numbers;
use tile::passes::Target;

use super::api::{Api, BINDINGS, COMMANDS, Commands, Encoder, Function};
use super::archive::Pipelines;
use super::keep::{Keeper, Span};
use super::library::Prebuilt;
use super::pace::Pace;
use super::plan::{self, Binding, Constants, Region};
use crate::cache::{self, Cache, Key};
use crate::gpu::meter::{Meter, Taken};
use crate::gpu::{self, Backend, ProductShape, read};
use crate::{About, Usage};

/// A GPU with the driver's state. All work takes effect in the order of the calls.
pub(crate) struct Driver<A: Api>(Arc<Shared<A>>);

/// Options of a driver.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// The cache of pipelines.
    pub(crate) cache: Option<Cache>,
    /// The path of a library of precompiled kernels, and whether it is required.
    pub(crate) library: Option<(PathBuf, bool)>,
    /// How often and how long residency is renewed; the default suits Apple's systems.
    pub(crate) keep: Option<Span>,
}

struct Shared<A: Api> {
    api: A,
    /// Held while giving the GPU work, and while accessing memory that it may be using.
    turn: Mutex<()>,
    /// The error that made the GPU unusable.
    lost: Mutex<Option<Error>>,
    /// Pipelines compiled ahead, by the keys of their sources.
    ahead: Mutex<HashMap<Key, Result<A::Pipeline>>>,
    loaded: Mutex<HashMap<Key, MetalPipeline<A>>>,
    kept: Pipelines<A>,
    prebuilt: Option<Prebuilt<A::Library>>,
    /// Announced kernels that are not loaded yet.
    awaited: AtomicUsize,
    meter: Arc<Meter>,
    flight: Mutex<Flight>,
    keeper: Keeper,
}

/// Command buffers committed and not yet waited for, and the allowed length of new ones.
#[derive(Default)]
struct Flight {
    /// For each, its number of launches and its kind.
    committed: VecDeque<(usize, Kind)>,
    paces: [Pace; 2],
}

/// Kinds of work whose launches take different times.
#[derive(Clone, Copy)]
enum Kind {
    /// Launches encoded one by one, such as prompts.
    Direct,
    /// Recorded launches: steps of few rows.
    Recorded,
}

/// A range of memory shared by GPU and CPU. Clones refer to the same bytes.
pub(crate) struct MetalBuffer<A: Api> {
    held: Arc<Held<A>>,
    range: Range<usize>,
}

struct Held<A: Api> {
    shared: Arc<Shared<A>>,
    memory: A::Memory,
    _taken: Taken,
}

/// A loaded kernel. Clones refer to the same one.
pub(crate) struct MetalPipeline<A: Api>(Arc<Loaded<A>>);

struct Loaded<A: Api> {
    kernel: Kernel,
    pipeline: A::Pipeline,
}

/// A kernel with its buffers and arguments.
pub(crate) struct MetalLaunch<A: Api> {
    pipeline: MetalPipeline<A>,
    bindings: Vec<Binding<MetalBuffer<A>>>,
    grid: [u32; 3],
}

/// Launches as an indirect command buffer, and everything that it refers to.
pub(crate) struct Recording<A: Api> {
    shared: Arc<Shared<A>>,
    indirect: A::Indirect,
    count: usize,
    /// Pipelines that the encoder has to touch, each once.
    touched: Vec<MetalPipeline<A>>,
    _launches: Vec<MetalLaunch<A>>,
    _constants: Option<MetalBuffer<A>>,
}

impl<A: Api> Clone for MetalBuffer<A> {
    fn clone(&self) -> Self {
        MetalBuffer { held: Arc::clone(&self.held), range: self.range.clone() }
    }
}

impl<A: Api> Clone for MetalPipeline<A> {
    fn clone(&self) -> Self {
        MetalPipeline(Arc::clone(&self.0))
    }
}

impl<A: Api> Clone for MetalLaunch<A> {
    fn clone(&self) -> Self {
        MetalLaunch { pipeline: self.pipeline.clone(), bindings: self.bindings.clone(), grid: self.grid }
    }
}

impl<A: Api> Region for MetalBuffer<A> {
    fn memory(&self) -> usize {
        Arc::as_ptr(&self.held).addr()
    }

    fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl<A: Api> Drop for Held<A> {
    fn drop(&mut self) {
        // A kernel may still be using it.
        self.shared.finish();
        self.shared.api.depart(&self.memory);
    }
}

impl<A: Api> Drop for Recording<A> {
    fn drop(&mut self) {
        self.shared.finish();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<A: Api> Shared<A> {
    /// Takes the turn, unless the GPU is lost.
    fn turn(&self) -> Result<MutexGuard<'_, ()>> {
        let turn = lock(&self.turn);
        match &*lock(&self.lost) {
            Some(why) => Err(why.clone()),
            None => Ok(turn),
        }
    }

    /// Waits for the oldest pending command buffer and records its time. Returns false if there was
    /// none.
    fn advance(&self) -> bool {
        let Some(seconds) = self.api.advance() else { return false };
        let mut flight = lock(&self.flight);
        if let Some((launches, kind)) = flight.committed.pop_front() {
            flight.paces[kind as usize].took(launches, seconds);
        }
        true
    }

    /// Waits for all work.
    fn finish(&self) {
        while self.advance() {}
    }

    /// Waits for all work and reports its failure.
    fn wait(&self) -> Result<()> {
        self.finish();
        self.told()
    }

    /// Commits `count` launches, in as many command buffers as their pace asks for. `encode`
    /// encodes a range of them.
    fn give(
        &self,
        kind: Kind,
        count: usize,
        mut encode: impl FnMut(&mut A::Encoder<'_>, Range<usize>),
    ) -> Result<()> {
        self.keeper.used();
        let most = lock(&self.flight).paces[kind as usize].launches();
        for start in (0..count).step_by(most) {
            let part = start..count.min(start + most);
            let mut encoder = self.api.encoder()?;
            encode(&mut encoder, part.clone());
            encoder.commit()?;
            lock(&self.flight).committed.push_back((part.len(), kind));
        }
        Ok(())
    }

    /// Reports a failure of finished work.
    fn told(&self) -> Result<()> {
        let Some(failure) = self.api.failure() else { return Ok(()) };
        let error = failure.error();
        if failure.fatal() {
            *lock(&self.lost) = Some(error.clone());
        }
        Err(error)
    }

    /// Makes a pipeline from a library's function.
    fn pipeline(&self, library: &A::Library, function: &Function<'_>) -> Result<A::Pipeline> {
        let (pipeline, new) = self.api.pipeline(library, function, self.kept.archive())?;
        if new {
            self.kept.added();
        }
        Ok(pipeline)
    }

    /// Compiles a lowered kernel's source to a pipeline.
    fn compile(&self, kernel: &Kernel, text: &str) -> Result<A::Pipeline> {
        let place = |e: Error| Error { place: format!("{}: {}", kernel.name, e.place), ..e };
        let library = self.api.compile(text, emit::metal_version(kernel)).map_err(place)?;
        self.pipeline(&library, &Function { kernel, constants: vec![] }).map_err(place)
    }
}

/// The source of a lowered kernel, and its cache key.
fn source(kernel: &Kernel) -> Result<(String, Key)> {
    let text = emit::text(std::slice::from_ref(kernel), Dialect::Metal)
        .map_err(|fault| Error::new(&kernel.name, "", fault))?;
    let key = cache::key(&["text", &text]);
    Ok((text, key))
}

impl<A: Api> MetalBuffer<A> {
    /// The range of its first bytes in its memory.
    fn first(&self, bytes: usize) -> Result<Range<usize>> {
        if bytes > self.range.len() {
            let most = format!("at most {} bytes", self.range.len());
            return Err(Error::new("metal buffer", most, bytes));
        }
        Ok(self.range.start..self.range.start + bytes)
    }
}

impl<A: Api> MetalLaunch<A> {
    /// Encodes the launch; `word` binds an argument.
    fn encode<C: Commands<A>>(
        &self,
        to: &mut C,
        waits: bool,
        mut word: impl FnMut(&mut C, usize, u32),
    ) {
        if waits {
            to.barrier();
        }
        to.pipeline(&self.pipeline.0.pipeline);
        for (index, binding) in self.bindings.iter().enumerate() {
            match binding {
                Binding::Buffer(buffer, _) => {
                    to.buffer(index, &buffer.held.memory, buffer.range.clone());
                }
                Binding::Word(bits) => word(to, index, *bits),
            }
        }
        to.dispatch(self.grid, self.pipeline.0.kernel.launch.threads);
    }
}

fn waits<A: Api>(launches: &[MetalLaunch<A>]) -> Vec<bool> {
    plan::barriers(launches.iter().map(|launch| launch.bindings.as_slice()))
}

impl<A: Api> Driver<A> {
    /// Opens a driver for this GPU.
    ///
    /// # Errors
    /// A required library that cannot be used.
    pub(crate) fn new(api: A, options: Options) -> Result<Driver<A>> {
        let prebuilt = match options.library {
            Some((path, true)) => Some(Prebuilt::open(&api, &path)?),
            Some((path, false)) => Prebuilt::open(&api, &path).ok(),
            None => None,
        };
        let kept = Pipelines::open(&api, options.cache);
        let (turn, lost, ahead, loaded, awaited, meter, flight) = Default::default();
        let keeper = Keeper::default();
        #[rustfmt::skip]
        let shared = Arc::new(Shared {
            api, turn, lost, ahead, loaded, kept, prebuilt, awaited, meter, flight, keeper,
        });
        let weak = Arc::downgrade(&shared);
        shared.keeper.start(options.keep.unwrap_or_default(), move || {
            let shared = weak.upgrade();
            shared.is_some_and(|shared| {
                shared.api.keep();
                true
            })
        });
        Ok(Driver(shared))
    }

    #[cfg(test)]
    pub(super) fn api(&self) -> &A {
        &self.0.api
    }

    /// Counts a loaded kernel. After the last announced one, new pipelines are written to disk.
    fn arrived(&self) {
        let before = self.0.awaited.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            Some(left.saturating_sub(1))
        });
        if before.unwrap_or(0) <= 1 {
            self.0.kept.save(&self.0.api);
        }
    }

    /// Stores a pipeline under its key.
    fn keep(&self, key: Key, kernel: &Kernel, pipeline: A::Pipeline) -> MetalPipeline<A> {
        let made = MetalPipeline(Arc::new(Loaded { kernel: kernel.clone(), pipeline }));
        lock(&self.0.loaded).entry(key).or_insert(made).clone()
    }
}

impl<A: Api> Backend for Driver<A> {
    type Buffer = MetalBuffer<A>;
    type Pipeline = MetalPipeline<A>;
    type Launch = MetalLaunch<A>;
    type Recording = Recording<A>;
    /// No copy is in flight: the CPU makes copies while the GPU is idle.
    type Event = ();

    fn about(&self) -> About {
        let facts = self.0.api.facts();
        let threads = plan::cores(&facts.name) as usize;
        let (isa, driver) = (facts.name.clone(), facts.system.clone());
        About { name: "metal", threads, isa, driver }
    }

    fn facts(&self) -> gpu::Facts {
        let facts = self.0.api.facts();
        let processors = plan::cores(&facts.name);
        let shared = facts.shared.min(32 << 10);
        let (target, tuned) = (Target::Metal, CardNumbers::of(Card::Apple));
        gpu::Facts { target, processors, shared, wgmma: false, products: None, tuned }
    }

    fn buffer(&self, bytes: usize) -> Result<MetalBuffer<A>> {
        let longest = self.0.api.facts().longest;
        if bytes > longest {
            let most = format!("at most {longest} bytes in one buffer");
            let error = Error::new("metal", most, bytes);
            return Err(error.hint("a smaller model or a shorter context"));
        }
        let memory = self.0.api.memory(bytes.max(1))?;
        self.0.api.reside(&memory);
        let (shared, taken) = (Arc::clone(&self.0), self.0.meter.take(bytes));
        let held = Arc::new(Held { shared, memory, _taken: taken });
        Ok(MetalBuffer { held, range: 0..bytes })
    }

    fn pinned(&self, words: usize) -> Result<MetalBuffer<A>> {
        self.buffer(4 * words)
    }

    fn read_pinned(&self, pinned: &MetalBuffer<A>, word: usize) -> Result<Option<[u32; 2]>> {
        let at = pinned.first(4 * word + 8)?.start + 4 * word;
        let _turn = self.0.turn()?;
        // Writes of a command buffer are guaranteed to be visible only when it is done: wait for
        // one after another.
        loop {
            let more = self.0.advance();
            self.0.told()?;
            let found = self.0.api.look(&pinned.held.memory, at)?;
            if found[0] != u32::MAX {
                return Ok(Some(found));
            }
            if !more {
                return Err(Error::new("metal pinned words", "a note", "none"));
            }
        }
    }

    fn write_pinned(&self, pinned: &MetalBuffer<A>, word: usize, bytes: &[u8]) -> Result<()> {
        let at = pinned.first(4 * word + bytes.len())?.start + 4 * word;
        let (words, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(Error::new(
                "metal pinned words",
                "whole words",
                format!("{} bytes", bytes.len()),
            ));
        }
        let _turn = self.0.turn()?;
        let put = |(i, word): (usize, &[u8; 4])| {
            self.0.api.put(&pinned.held.memory, at + 4 * i, u32::from_le_bytes(*word))
        };
        words.iter().enumerate().try_for_each(put)
    }

    fn event(&self) -> Result<()> {
        Ok(())
    }

    fn record_event(&self, (): &()) -> Result<()> {
        Ok(())
    }

    fn wait_event(&self, (): &()) -> Result<()> {
        Ok(())
    }

    fn part(&self, of: &MetalBuffer<A>, range: Range<usize>) -> Result<MetalBuffer<A>> {
        let whole = of.first(range.end)?;
        if range.start > range.end {
            return Err(Error::new("metal buffer", "a range", format!("{range:?}")));
        }
        Ok(MetalBuffer { held: Arc::clone(&of.held), range: whole.start + range.start..whole.end })
    }

    fn write(&self, to: &MetalBuffer<A>, bytes: &[u8]) -> Result<()> {
        let range = to.first(bytes.len())?;
        let _turn = self.0.turn()?;
        self.0.wait()?;
        self.0.api.write(&to.held.memory, range.start, bytes)
    }

    fn read(&self, from: &MetalBuffer<A>, to: &mut [u8]) -> Result<()> {
        let range = from.first(to.len())?;
        let _turn = self.0.turn()?;
        self.0.wait()?;
        self.0.api.read(&from.held.memory, range.start, to)
    }

    fn copy(&self, from: &MetalBuffer<A>, to: &MetalBuffer<A>) -> Result<()> {
        // Memory is shared with the CPU. Copy in pieces to keep the temporary small.
        const PIECE: usize = 1 << 20;
        to.first(from.range.len())?;
        let mut bytes = vec![0; PIECE.min(from.range.len())];
        let _turn = self.0.turn()?;
        self.0.wait()?;
        for at in (0..from.range.len()).step_by(PIECE) {
            let piece = &mut bytes[..PIECE.min(from.range.len() - at)];
            self.0.api.read(&from.held.memory, from.range.start + at, piece)?;
            self.0.api.write(&to.held.memory, to.range.start + at, piece)?;
        }
        Ok(())
    }

    fn ahead(&self, kernels: &[&Kernel]) {
        self.0.awaited.store(kernels.len(), Ordering::Relaxed);
        // A kernel that cannot be printed is reported when it is loaded.
        let mut todo: Vec<_> = kernels
            .iter()
            .filter_map(|kernel| {
                let (text, key) = source(kernel).ok()?;
                let known = lock(&self.0.loaded).contains_key(&key);
                (!known).then_some((*kernel, text, key))
            })
            .collect();
        todo.sort_by_key(|(_, _, key)| *key);
        todo.dedup_by_key(|(_, _, key)| *key);
        let next = AtomicUsize::new(0);
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        std::thread::scope(|scope| {
            for _ in 0..workers.min(todo.len()) {
                scope.spawn(|| {
                    while let Some((kernel, text, key)) =
                        todo.get(next.fetch_add(1, Ordering::Relaxed))
                    {
                        let made = self.0.compile(kernel, text);
                        lock(&self.0.ahead).insert(*key, made);
                    }
                });
            }
        });
    }

    fn built(&self, kernel: &Kernel, numbers: &Numbers) -> Option<MetalPipeline<A>> {
        let prebuilt = self.0.prebuilt.as_ref().filter(|library| library.has(kernel))?;
        let constants = kernel.constants.iter().map(|constant| {
            let name = emit::metal_constant(kernel, &constant.name);
            Some((name, constant.scalar, numbers.get(&constant.name)?))
        });
        let function = Function { kernel, constants: constants.collect::<Option<_>>()? };
        let mut parts = vec!["library".to_owned(), kernel.name.clone()];
        parts.extend(function.constants.iter().map(|(_, _, bits)| bits.to_string()));
        let key = cache::key(&parts.iter().map(String::as_str).collect::<Vec<_>>());
        if let Some(known) = lock(&self.0.loaded).get(&key) {
            return Some(known.clone());
        }
        // A kernel that the library does not yield is compiled from source.
        let pipeline = self.0.pipeline(&prebuilt.library, &function).ok()?;
        self.0.kept.save(&self.0.api);
        Some(self.keep(key, kernel, pipeline))
    }

    fn load(&self, kernel: &Arc<Kernel>) -> Result<MetalPipeline<A>> {
        if kernel.params.len() > BINDINGS {
            let most = format!("at most {BINDINGS} buffers and arguments");
            return Err(Error::new(&kernel.name, most, kernel.params.len()));
        }
        let (text, key) = source(kernel)?;
        let known = lock(&self.0.loaded).get(&key).cloned();
        let pipeline = match known {
            Some(known) => Ok(known),
            None => {
                let ready = lock(&self.0.ahead).remove(&key);
                let made = ready.unwrap_or_else(|| self.0.compile(kernel, &text));
                made.map(|pipeline| self.keep(key, kernel, pipeline))
            }
        };
        self.arrived();
        pipeline
    }

    fn bind(
        &self,
        pipeline: &MetalPipeline<A>,
        numbers: &Numbers,
        buffers: &[MetalBuffer<A>],
    ) -> Result<MetalLaunch<A>> {
        if buffers.iter().any(|b| !Arc::ptr_eq(&b.held.shared, &self.0)) {
            let name = &pipeline.0.kernel.name;
            return Err(Error::new(name, "buffers of this GPU", "one of another"));
        }
        let (bindings, grid) = plan::bind(&pipeline.0.kernel, numbers, buffers)?;
        Ok(MetalLaunch { pipeline: pipeline.clone(), bindings, grid })
    }

    fn product(
        &self,
        _: &ProductShape,
        _: &MetalBuffer<A>,
        _: &MetalBuffer<A>,
        _: Option<&MetalBuffer<A>>,
        _: &MetalBuffer<A>,
    ) -> Result<MetalLaunch<A>> {
        Err(Error::new("metal", "a kernel", "a product of the vendor's, which it has none of"))
    }

    fn submit(&self, launches: &[MetalLaunch<A>]) -> Result<()> {
        if launches.is_empty() {
            return Ok(());
        }
        let _turn = self.0.turn()?;
        let waits = waits(launches);
        self.0.give(Kind::Direct, launches.len(), |encoder, part| {
            let first = part.start;
            for i in part {
                // A command buffer waits as a whole for the ones before it.
                let waits = waits[i] && i > first;
                launches[i].encode(encoder, waits, |encoder, index, word| {
                    encoder.word(index, word);
                });
            }
        })
    }

    fn record(&self, launches: &[MetalLaunch<A>]) -> Result<Recording<A>> {
        if launches.is_empty() || launches.len() > COMMANDS {
            let expected = format!("1 to {COMMANDS} launches in a recording");
            return Err(Error::new("metal", expected, launches.len()));
        }
        let mut constants = Constants::default();
        let mut places = Vec::new();
        for binding in launches.iter().flat_map(|launch| &launch.bindings) {
            match binding {
                Binding::Word(word) => places.push(constants.place(*word)),
                Binding::Buffer(buffer, _) => plan::offset(&buffer.range)?,
            }
        }
        let held = match constants.bytes() {
            none if none.is_empty() => None,
            bytes => {
                let buffer = self.buffer(bytes.len())?;
                self.write(&buffer, &bytes)?;
                Some(buffer)
            }
        };
        let bindings = launches.iter().map(|launch| launch.bindings.len()).max().unwrap_or(0);
        let indirect = self.0.api.indirect(launches.len(), bindings)?;
        let mut places = places.into_iter();
        self.0.api.pooled(|| {
            for (i, (launch, waits)) in launches.iter().zip(waits(launches)).enumerate() {
                let mut slot = self.0.api.slot(&indirect, i);
                launch.encode(&mut slot, waits, |slot, index, _| {
                    if let (Some(buffer), Some(place)) = (&held, places.next()) {
                        slot.buffer(index, &buffer.held.memory, place);
                    }
                });
            }
        });
        let mut touched: Vec<MetalPipeline<A>> = Vec::new();
        for MetalLaunch { pipeline, .. } in launches.iter().filter(|_| self.0.api.facts().touches) {
            if !touched.iter().any(|known| Arc::ptr_eq(&known.0, &pipeline.0)) {
                touched.push(pipeline.clone());
            }
        }
        Ok(Recording {
            shared: Arc::clone(&self.0),
            indirect,
            count: launches.len(),
            touched,
            _launches: launches.to_vec(),
            _constants: held,
        })
    }

    fn replay(&self, recording: &mut Recording<A>) -> Result<()> {
        let shared = &recording.shared;
        let _turn = shared.turn()?;
        shared.give(Kind::Recorded, recording.count, |encoder, part| {
            recording.touched.iter().for_each(|pipeline| encoder.touch(&pipeline.0.pipeline));
            encoder.execute(&recording.indirect, part);
        })
    }

    fn lost(&self) -> bool {
        lock(&self.0.lost).is_some()
    }

    fn usage(&self) -> Option<Usage> {
        Some(self.0.meter.usage(self.0.api.facts().memory))
    }

    fn free(&self) -> Result<Option<usize>> {
        let Usage { limit, active, .. } = self.0.meter.usage(self.0.api.facts().memory);
        // The system's count includes pipelines and recordings.
        Ok(Some(limit.saturating_sub(active.max(self.0.api.allocated()))))
    }

    fn read_rate(&self) -> f64 {
        // Larger than any cache, and small enough to fit beside a model.
        let most = self.0.api.facts().longest.min(self.0.api.facts().memory / 16);
        read::rate(self, most.clamp(1 << 20, 512 << 20)).unwrap_or(0.0)
    }
}
