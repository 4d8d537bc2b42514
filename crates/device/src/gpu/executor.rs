//! A Program loaded on a GPU: weights, cache pools, the arena, and the shape classes compiled so
//! far.

mod ahead;
mod cache;
mod library;
mod words;

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use formats::{Error, ErrorKind, Result, Tensors};
use ops::{Rope, Rows};
use program::{AdapterFactors, BLOCK_TOKENS, CacheLayer, Choose, Limits, Program, Step, StepKind};

use super::adapters::Adapters;
use super::arena::{Layout, decode_bucket};
use super::bridge::Bridge;
use super::exchange::{Exchange, Partner};
use super::kernels::Kernels;
use super::kv::{self, Layer};
use super::lower::{self, Key, Lowering, SEATS, Slot, Words};
use super::many::choosing;
use super::profile::Timed;
use super::ring::{self, Ring};
use super::run::{Chooser, Staged};
use super::sizes::{self, Sizes, stride};
use super::weights::{self, Wanted, Weight};
use super::{Backend, Dispatch};
use crate::{Executor, ExecutorOptions, Memory, Outcome, Profile, Roof, Ticket, Watch, plan};
use ahead::Ahead;

/// Shortest context of a class in steps of many sequences. Threadgroups without keys cost little.
const LEAST_LENGTH: usize = 1024;

/// Number of non-recurring classes that are kept bound: chunks of prompts have any number of rows,
/// and most are seen once.
const KEPT: usize = 64;

/// A shape class with its launches.
pub(super) struct Class<B: Backend> {
    pub(super) words: Words,
    /// Its rows, and the rows of its block tables.
    rows: usize,
    sequences: usize,
    /// The region of its words.
    region: usize,
    segments: Vec<Segment<B>>,
    /// The buffers of the results, with their rows and widths.
    results: Vec<(B::Buffer, Rows, usize)>,
    /// The buffer of the Program's input.
    input: Option<B::Buffer>,
    /// Its launches bound one by one, once a step of it has been timed.
    pub(super) timed: Option<Timed<B>>,
}

/// Launches up to an exchange, or to the end.
struct Segment<B: Backend> {
    work: Work<B>,
    exchange: Option<Exchange<B>>,
}

/// A class's launches as they are kept between steps; see [`Dispatch`].
enum Work<B: Backend> {
    Loose { steps: Vec<lower::Step>, key: Key },
    Bound(Vec<B::Launch>),
    Recorded(B::Recording),
}

impl<B: Backend> Class<B> {
    /// The buffer of a range of its words.
    pub(super) fn part(
        &self,
        executor: &GpuExecutor<B>,
        words: &Range<usize>,
    ) -> Result<B::Buffer> {
        executor.backend.part(&executor.words[self.region], words.clone())
    }
}

/// Whether a table of `blocks` blocks has wrapped before position `end`.
fn wraps(end: u32, blocks: usize) -> bool {
    end.saturating_sub(1) as usize / BLOCK_TOKENS >= blocks
}

/// Whether a class is seen often: classes with few rows, and decode steps of many sequences, which
/// few classes serve.
fn recurs(lowering: &Lowering, key: &Key) -> bool {
    lowering.narrow(key.kind, key.tokens) || (lowering.batched && key.kind == StepKind::Decode)
}

/// The [`Executor`] of GPUs.
pub(super) struct GpuExecutor<B: Backend> {
    pub(super) backend: Arc<B>,
    dispatch: Dispatch,
    pub(super) lowering: Lowering,
    pub(super) weights: Vec<Weight<B::Buffer>>,
    frequencies: Vec<B::Buffer>,
    pub(super) adapters: Adapters<B>,
    layers: Vec<Layer<B::Buffer>>,
    /// Allocated blocks of each group, and the blocks of one full context.
    blocks: Vec<usize>,
    context: Vec<usize>,
    pub(super) sizes: Sizes,
    arena: B::Buffer,
    /// Regions of words; see [`Key::region`].
    words: Vec<B::Buffer>,
    pub(super) ring: Ring<B>,
    scratch: [B::Buffer; 4],
    /// The numbers 0, 1, 2, .. and the buffer that matrices are unpacked to, both for products of
    /// the vendor's library.
    numbers: B::Buffer,
    unpacked: B::Buffer,
    /// Unpacked copies of matrices, with their bytes; see [`Lowering::copied`].
    copies: HashMap<usize, (B::Buffer, usize)>,
    pub(super) kernels: Kernels,
    pipelines: Vec<B::Pipeline>,
    pub(super) classes: HashMap<Key, Class<B>>,
    pub(super) limits: Limits,
    /// The last step's words, table widths and tokens; the buffers are reused so that a step
    /// allocates nothing.
    pub(super) staged: Vec<u8>,
    pub(super) strides: Vec<usize>,
    pub(super) tokens: Vec<u32>,
    /// The buffers of the last step's results with their sizes in bytes, and the results read from
    /// them.
    pub(super) latest: Vec<(B::Buffer, usize)>,
    pub(super) results: Vec<Vec<f32>>,
    /// Number of the last ticket.
    tickets: u64,
    /// The bridges from which the input comes and to which the result goes, if not the host.
    source: Option<Bridge<B>>,
    sink: Option<Bridge<B>>,
    /// The device that computes moved operations.
    pub(super) partner: Option<Partner>,
    /// Sampling on the device.
    pub(super) chooser: Chooser<B>,
    /// Whether a launch may have failed midway, so that counters which kernels leave at zero may
    /// not be.
    unclean: bool,
    /// The error that made the device unusable.
    lost: Option<Error>,
    /// Kernels that are being prepared for later steps.
    _ahead: Option<Ahead>,
}

impl<B: Backend> GpuExecutor<B> {
    pub(super) fn load(
        backend: Arc<B>,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        store: &weights::Store<B>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let stored = store.of(tensors, options.allow_nan);
        let formats = weights::formats(&program, tensors, &[])?;
        let lowering = Lowering::new(program, backend.facts(), &options, formats)?;
        let plan = |options: &ExecutorOptions| sizes::plan(&*backend, &lowering, options, &stored);
        let planned = plan(&options)?;
        plan::check(backend.about().name, &options, &planned, &plan)?;
        let copies = planned.copies;
        let limits = options.limits(&lowering.program);
        let windows = lowering.program.groups();
        if limits.blocks.len() != windows.len() {
            return Err(Error::new("cache", "blocks for every group", limits.blocks.len()));
        }
        let sizes = Sizes::new(&lowering, &limits, options.dispatch);
        let formats = &lowering.formats[..];
        let joined = &lowering.joined[..];
        let wanted = Wanted { formats, trained: &[], joined, allow_nan: options.allow_nan };
        let program = &lowering.program;
        let mut kernels = Kernels::default();
        let prompts = (copies > 0 || lowering.batched).then(|| ahead::prompts(&lowering, &limits));
        let prepare = || {
            for key in prompts.iter().chain(&ahead::usual(&lowering, &limits)) {
                ahead::prepare(&*backend, &lowering, key, &mut kernels);
            }
        };
        let weights = std::thread::scope(|scope| {
            if backend.prewarms() {
                let thread = std::thread::Builder::new().stack_size(8 << 20);
                // Without a thread, kernels are prepared when they are used.
                drop(thread.spawn_scoped(scope, prepare));
            }
            weights::load(&*backend, program, tensors, &wanted, &stored, progress)
        })?;
        let floats = |rope: &Rope| -> Vec<u8> {
            rope.frequencies.iter().flat_map(|f| f.to_le_bytes()).collect()
        };
        let frequencies = lowering.ropes.iter().map(|rope| backend.upload(&floats(rope)));
        let numbers: Vec<u8> = (0..sizes.numbers as u32).flat_map(u32::to_le_bytes).collect();
        let idle = lowering.idle_blocks();
        let blocks: Vec<usize> = limits.blocks.iter().map(|&most| most.min(1) + idle).collect();
        let layer = |(layer, group): (&CacheLayer, &usize)| {
            let most = limits.blocks[*group] + idle;
            Layer::new(&*backend, options.cache_type, layer, blocks[*group], most)
        };
        let layers = lowering.program.layers.iter().zip(&lowering.groups).map(layer);
        let [a, b, c, d] = sizes.scratch.map(|bytes| backend.buffer(bytes));
        let words = [sizes.words].into_iter().chain([sizes.seat; SEATS]);
        let ring = match ring::wanted(&lowering, options.dispatch) {
            true => Ring::new(&*backend, sizes.slot)?,
            false => Ring::none(),
        };
        let room = sizes::room(&lowering, &limits);
        let chooser = Chooser::new(room, sizes::masks(&lowering, &limits));
        let mut executor = GpuExecutor {
            adapters: Adapters::new(&*backend, &lowering)?,
            frequencies: frequencies.collect::<Result<_>>()?,
            layers: layers.collect::<Result<_>>()?,
            arena: backend.buffer(sizes.arena)?,
            words: words.map(|bytes| backend.buffer(bytes)).collect::<Result<_>>()?,
            ring,
            scratch: [a?, b?, c?, d?],
            numbers: backend.upload(&numbers)?,
            unpacked: backend.buffer(sizes.unpacked)?,
            copies: HashMap::new(),
            blocks,
            context: options.context,
            kernels,
            pipelines: Vec::new(),
            classes: HashMap::new(),
            limits,
            source: None,
            sink: None,
            partner: None,
            chooser,
            staged: Vec::with_capacity(sizes.words),
            strides: Vec::new(),
            tokens: Vec::new(),
            latest: Vec::new(),
            tickets: 0,
            results: vec![Vec::new(); lowering.program.results.len()],
            unclean: false,
            lost: None,
            _ahead: None,
            sizes,
            backend,
            dispatch: options.dispatch,
            lowering,
            weights,
        };
        if copies > 0 {
            executor.copy_unpacked()?;
        }
        if executor.lowering.batched {
            executor.try_library()?;
        }
        if executor.chooses_many() {
            executor.make_room(0, 0)?;
        }
        if executor.backend.prewarms() {
            executor.prewarm()?;
            let GpuExecutor { backend, lowering, limits, .. } = &executor;
            executor._ahead = Ahead::start(backend, lowering, limits);
        }
        Ok(executor)
    }

    /// Loads the kernels of the usual steps.
    fn prewarm(&mut self) -> Result<()> {
        if self.chooses() {
            self.make_room(0, 0)?;
        }
        for key in ahead::usual(&self.lowering, &self.limits) {
            let class = self.compile(&key)?;
            self.classes.insert(key, class);
        }
        Ok(())
    }

    /// Runs some work, unless the device is lost. If it fails, steps in flight are forgotten; the
    /// cache keeps its contents, and other state is reset before the next work.
    pub(super) fn attempt<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(why) = &self.lost {
            return Err(why.clone());
        }
        if self.unclean {
            self.clean().map_err(|why| self.failed(why))?;
        }
        work(self).map_err(|why| self.failed(why))
    }

    /// Records a failure and returns the error to report.
    fn failed(&mut self, why: Error) -> Error {
        self.unclean = true;
        self.chooser.forget();
        if self.backend.lost() && self.lost.is_none() {
            let name = self.backend.about().name;
            let lost = Error::new(name, "a device that works", format!("one that failed: {why}"));
            let lost = lost.of(ErrorKind::Internal).hint("load the model again");
            self.lost = Some(lost);
        }
        self.lost.clone().unwrap_or(why)
    }

    /// Zeroes the counters that kernels expect to be zero.
    fn clean(&mut self) -> Result<()> {
        self.classes.clear();
        let masks = sizes::masks(&self.lowering, &self.limits);
        self.chooser = Chooser::new(sizes::room(&self.lowering, &self.limits), masks);
        self.backend.write(&self.scratch[2], &vec![0; self.sizes.scratch[2]])?;
        self.unclean = false;
        Ok(())
    }

    fn check(&self, step: &Step<'_>) -> Result<()> {
        step.check(&self.limits)?;
        self.adapters.check(step)?;
        if let Some(sequence) = step.sequences.iter().find(|s| s.position != s.start) {
            let expected = format!("rotary position {}, the index in the cache", sequence.start);
            let error = Error::new("step", expected, sequence.position);
            return Err(error.of(ErrorKind::Unsupported));
        }
        let most = sizes::decode_rows(&self.limits);
        if self.lowering.batched && step.kind == StepKind::Decode && step.tokens.len() > most {
            let expected = format!("at most {most} rows that decode");
            return Err(Error::new("step", expected, step.tokens.len()));
        }
        // The tables of a step have one width; a wrapping table must fill it.
        for group in 0..self.blocks.len() {
            let tables = || step.sequences.iter().map(|s| (s, s.tables[group].blocks.len()));
            let wrapping = tables().find(|(sequence, len)| wraps(sequence.end(), *len));
            if let Some((_, length)) = wrapping
                && let Some((_, other)) = tables()
                    .find(|(s, len)| *len > length || (wraps(s.end(), *len) && *len != length))
            {
                let expected = format!("tables of at most {length} blocks beside one that wraps");
                let error = Error::new("step", expected, other);
                return Err(error.of(ErrorKind::Unsupported));
            }
        }
        Ok(())
    }

    /// The key of a step's class.
    pub(super) fn key(&mut self, step: &Step<'_>) -> Key {
        let end = step.sequences.iter().map(|s| s.end() as usize).max().unwrap_or(0);
        let mut strides = std::mem::take(&mut self.strides);
        strides.clear();
        strides.extend((0..self.blocks.len()).map(|group| {
            let tables = step.sequences.iter().map(|s| (s.end(), s.tables[group].blocks.len()));
            let ring = tables.clone().any(|(end, length)| wraps(end, length));
            stride(tables.map(|(_, length)| length).max().unwrap_or(1), ring)
        }));
        let (rows, outputs) = (step.tokens.len(), step.outputs.len());
        let length = end.next_power_of_two().max(BLOCK_TOKENS);
        let (kind, adapted) = (self.lowering.kind(step.kind, rows), self.adapters.class(step));
        if !self.lowering.batched || kind != StepKind::Decode {
            let (sequences, samples) = (step.sequences.len(), None);
            let tokens = rows;
            return Key { kind, tokens, outputs, sequences, strides, length, samples, adapted };
        }
        // A few classes serve all steps: idle rows of one more sequence fill them up.
        let tokens = decode_bucket(rows).min(sizes::decode_rows(&self.limits));
        Key {
            kind,
            tokens,
            outputs: if outputs == 0 { 0 } else { decode_bucket(outputs).min(self.limits.outputs) },
            sequences: tokens,
            strides,
            length: length.max(LEAST_LENGTH),
            samples: None,
            adapted,
        }
    }

    /// Lowers a class, loads its kernels, and binds and records its launches according to the
    /// dispatch mode.
    fn compile(&mut self, key: &Key) -> Result<Class<B>> {
        let layout = Layout::new(&self.lowering, key.kind, key.tokens, key.outputs);
        if layout.bytes > self.sizes.arena {
            // A smaller class may pack worse than the largest one.
            self.classes.clear();
            self.arena = self.backend.buffer(layout.bytes)?;
            self.sizes.arena = layout.bytes;
        }
        let (steps, _) = self.lowering.launches(key, &layout, &mut self.kernels)?;
        self.kernels.load(&*self.backend, &mut self.pipelines)?;
        let segments = self.segments(steps, key)?;
        let program = &self.lowering.program;
        let types = self.lowering.types(key.kind, key.tokens);
        let part = |v| self.backend.part(&self.arena, layout.value(program, types, v));
        let results = program.results.iter().map(|&v| {
            let shape = program.shape(v);
            Ok((part(v)?, shape.rows, shape.width))
        });
        let results = results.collect::<Result<_>>()?;
        let input = program.input.map(part).transpose()?;
        let (words, region) = (key.words(self.lowering.batched), key.region());
        let (rows, sequences) = (key.tokens, key.sequences);
        Ok(Class { words, rows, sequences, region, segments, results, input, timed: None })
    }

    /// Splits a class's launches at exchanges, in the form in which they are kept.
    fn segments(&self, steps: Vec<lower::Step>, key: &Key) -> Result<Vec<Segment<B>>> {
        let mut segments = Vec::new();
        let mut steps = steps.into_iter().peekable();
        loop {
            let launch = |step: &lower::Step| !matches!(step, lower::Step::Exchange { .. });
            let own: Vec<lower::Step> = std::iter::from_fn(|| steps.next_if(launch)).collect();
            let work = match self.dispatch {
                Dispatch::Eager => Work::Loose { steps: own, key: key.clone() },
                // A class that is seen once is not worth recording.
                Dispatch::Graph if recurs(&self.lowering, key) => {
                    Work::Recorded(self.backend.record(&self.bind(&own, key)?)?)
                }
                Dispatch::Arguments | Dispatch::Graph => Work::Bound(self.bind(&own, key)?),
            };
            let Some(lower::Step::Exchange { number, gives, brings }) = steps.next() else {
                segments.push(Segment { work, exchange: None });
                return Ok(segments);
            };
            let exchange = self.bind_exchange(number, [&gives, &brings], key)?;
            segments.push(Segment { work, exchange: Some(exchange) });
        }
    }

    /// Runs a class on the staged words; false if it was stopped.
    pub(super) fn launch(
        &mut self,
        class: &mut Class<B>,
        step: &Step<'_>,
        watch: &Watch<'_>,
    ) -> Result<bool> {
        let all = class.segments.len() as f64;
        for (done, Segment { work, exchange }) in class.segments.iter_mut().enumerate() {
            match work {
                Work::Loose { steps, key } => self.backend.submit(&self.bind(steps, key)?)?,
                Work::Bound(launches) => self.backend.submit(launches)?,
                Work::Recorded(recording) => self.backend.replay(recording)?,
            }
            let Some(exchange) = exchange else { continue };
            if watch.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            self.meet(exchange, step)?;
            (watch.progress)((done + 1) as f64 / all);
        }
        Ok(true)
    }

    pub(super) fn bind(&self, steps: &[lower::Step], key: &Key) -> Result<Vec<B::Launch>> {
        steps.iter().map(|step| self.bind_one(step, key)).collect()
    }

    /// The buffer of a slot in a class.
    pub(super) fn buffer(&self, slot: &Slot, key: &Key) -> Result<B::Buffer> {
        let seat = key.seat().unwrap_or(0);
        match slot {
            Slot::Arena(range) => self.backend.part(&self.arena, range.clone()),
            Slot::Words(range) => self.backend.part(&self.words[key.region()], range.clone()),
            Slot::Weight(w) => Ok(self.weights[*w].buffer.clone()),
            Slot::Joined(w) => {
                let missing = || Error::new("gpu", "matrices that are joined", "one alone");
                self.weights[*w].joined.clone().ok_or_else(missing)
            }
            Slot::Copied(w) => {
                let missing = || Error::new("gpu", "an unpacked copy", "none");
                self.copies.get(w).map(|(copy, _)| copy.clone()).ok_or_else(missing)
            }
            Slot::Frequencies(rope) => Ok(self.frequencies[*rope].clone()),
            Slot::Adapter(group, factor) => Ok(self.adapters.buffer(*group, *factor)),
            Slot::Cache(layer, array) => Ok(self.layers[*layer].array(*array)),
            Slot::Scratch(i) => Ok(self.scratch[*i].clone()),
            Slot::Sampling(part) => self.chooser.buffer(*part, seat),
            Slot::Numbers(count) => self.backend.part(&self.numbers, 0..4 * count),
            Slot::Unpacked(bytes) => self.backend.part(&self.unpacked, 0..*bytes),
        }
    }

    fn bind_one(&self, step: &lower::Step, key: &Key) -> Result<B::Launch> {
        let buffer = |slot: &Slot| self.buffer(slot, key);
        match step {
            lower::Step::Kernel { kernel, numbers, buffers } => {
                let buffers = buffers.iter().map(buffer).collect::<Result<Vec<_>>>()?;
                self.backend.bind(&self.pipelines[*kernel], numbers, &buffers)
            }
            lower::Step::Product { shape, x, w, add, y } => {
                let add = add.as_ref().map(buffer).transpose()?;
                self.backend.product(shape, &buffer(x)?, &buffer(w)?, add.as_ref(), &buffer(y)?)
            }
            lower::Step::AllReduce { x, y, count } => {
                self.backend.all_reduce(&buffer(x)?, &buffer(y)?, *count)
            }
            lower::Step::AllGather { x, y, counts } => {
                self.backend.all_gather(&buffer(x)?, &buffer(y)?, counts)
            }
            lower::Step::Exchange { .. } => {
                Err(Error::new("exchange", "a launch", "rows for another device"))
            }
        }
    }

    /// Takes out the class of a key, compiling it at first use. The caller puts it back.
    pub(super) fn class(&mut self, key: &Key) -> Result<(Key, Class<B>)> {
        match self.classes.remove_entry(key) {
            Some(known) => Ok(known),
            None => Ok((key.clone(), self.compile(key)?)),
        }
    }

    /// Remembers the result buffers of a launched step, or publishes the result to the next device.
    pub(super) fn note_results(&mut self, class: &Class<B>, tokens: usize, outputs: usize) {
        self.latest.clear();
        if let Some(sink) = &self.sink {
            sink.put(&self.backend, &class.results[0].0);
            return;
        }
        self.latest.extend(class.results.iter().map(|(buffer, rows, width)| {
            (buffer.clone(), 4 * rows.count(tokens, outputs) * width)
        }));
    }

    /// Reads a result of the last step into host memory.
    pub(super) fn read_result(&mut self, index: usize) -> Result<()> {
        let Some(to) = self.results.get_mut(index) else {
            let found = format!("result {index}");
            return Err(Error::new("read", "one of the Program's results", found));
        };
        to.clear();
        let Some((buffer, bytes)) = self.latest.get(index).filter(|(_, bytes)| *bytes > 0) else {
            return Ok(());
        };
        self.staged.clear();
        self.staged.resize(*bytes, 0);
        self.backend.read(buffer, &mut self.staged)?;
        let floats = self.staged.chunks_exact(4);
        to.extend(floats.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        Ok(())
    }
}

impl<B: Backend> GpuExecutor<B> {
    /// Whether the first result is logits, from which tokens can be chosen.
    pub(super) fn chooses(&self) -> bool {
        self.lowering.chooses()
    }

    /// Whether it chooses tokens for steps of many sequences.
    pub(super) fn chooses_many(&self) -> bool {
        self.lowering.batched && self.chooses()
    }

    /// Writes bytes to a part of a buffer, before any later work.
    pub(super) fn send(&mut self, to: &B::Buffer, bytes: &[u8]) -> Result<()> {
        self.ring.send(&*self.backend, self.sizes.slot, &[(to, bytes)])
    }

    /// Submits a step; false if it was stopped, which is possible only at an exchange.
    fn enqueue(&mut self, step: &Step<'_>, ticket: Ticket, watch: &Watch<'_>) -> Result<bool> {
        self.latest.clear();
        self.drop_unchosen();
        if self.chooses_many() {
            return self.submit_many(step, ticket, watch);
        }
        if let Some(choosing) = self.fed(step) {
            return self.feed(step, &choosing, ticket).map(|()| true);
        }
        self.chooser.outcomes.begin(ticket);
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.clear();
        tokens.extend_from_slice(step.tokens);
        for (first, sequence) in step.placed() {
            tokens[first] = self.known(tokens[first], sequence.slot)?;
            self.chooser.end(sequence.slot);
        }
        let whole = self.replay(&Step { tokens: &tokens, ..*step }, watch)?;
        self.tokens = tokens;
        if !whole {
            return Ok(false);
        }
        if let Some(choices) = self.chooser.outcomes.get_mut(ticket.number()) {
            step.choosing().for_each(|choosing| choices.push(choosing.choose));
        }
        self.choose_by_host(choosing(step), ticket).map(|()| true)
    }

    fn replay(&mut self, step: &Step<'_>, watch: &Watch<'_>) -> Result<bool> {
        self.prepare(step)?;
        let key = self.key(step);
        self.replay_as(key, step, Staged::Nothing, watch)
    }

    /// Replays a step of a class for which the cache has room; false if it was stopped.
    pub(super) fn replay_as(
        &mut self,
        wanted: Key,
        step: &Step<'_>,
        choosing: Staged<'_>,
        watch: &Watch<'_>,
    ) -> Result<bool> {
        let (key, mut class) = self.class(&wanted)?;
        self.strides = wanted.strides;
        self.stage(&class, step, choosing)?;
        let whole = self.launch(&mut class, step, watch)?;
        if whole {
            self.note_results(&class, step.tokens.len(), step.outputs.len());
        }
        self.keep(key, class);
        Ok(whole)
    }

    /// Puts a class back, first dropping all non-recurring classes if there are too many.
    pub(super) fn keep(&mut self, key: Key, class: Class<B>) {
        if self.classes.keys().filter(|key| !recurs(&self.lowering, key)).count() >= KEPT {
            self.classes.retain(|key, _| recurs(&self.lowering, key));
        }
        self.classes.insert(key, class);
    }
}

impl<B: Backend> Executor for GpuExecutor<B> {
    /// A step is submitted as a whole and can be stopped only at an exchange with another device.
    fn submit_watched(&mut self, step: &Step<'_>, watch: &Watch<'_>) -> Result<Option<Ticket>> {
        let ticket = Ticket::next(&mut self.tickets);
        self.check(step)?;
        let whole = self.attempt(|executor| executor.enqueue(step, ticket, watch))?;
        Ok(whole.then_some(ticket))
    }

    fn defers(&self) -> bool {
        self.chooses_many()
    }

    fn forward(&mut self, step: &Step<'_>) -> Result<Ticket> {
        if !self.defers() {
            return Err(crate::defers_nothing());
        }
        let ticket = Ticket::next(&mut self.tickets);
        self.check(step)?;
        self.attempt(|executor| executor.forward_many(step, ticket)).map(|()| ticket)
    }

    fn choose(&mut self, ticket: Ticket, choices: &[Option<Choose<'_>>]) -> Result<()> {
        self.check_choices(choices, ticket)?;
        self.attempt(|executor| executor.choose_many(choices, ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Outcome<'_>> {
        self.attempt(|executor| match executor.chooses_many() {
            true => executor.settle_many(ticket.number()),
            false => executor.settle_ticket(ticket),
        })?;
        self.chooser.outcomes.get(ticket).ok_or_else(|| ticket.unknown())
    }

    fn keeps(&self, ticket: Ticket) -> bool {
        self.chooser.outcomes.get(ticket).is_some()
    }

    fn read(&mut self, ticket: Ticket, index: usize) -> Result<&[f32]> {
        if ticket.number() != self.tickets {
            return Err(ticket.unknown());
        }
        self.attempt(|executor| executor.read_result(index))?;
        Ok(&self.results[index])
    }

    fn copy_blocks(&mut self, group: usize, blocks: &[(u32, u32)]) -> Result<()> {
        self.attempt(|executor| {
            blocks.iter().try_for_each(|&(from, to)| executor.copy_block(group, from, to))
        })
    }

    fn read_block(&mut self, layer: usize, block: u32, bytes: &mut Vec<u8>) -> Result<()> {
        self.attempt(|executor| {
            let at = executor.room(layer, block)?;
            executor.layers[layer].read_block(&*executor.backend, at, bytes)
        })
    }

    fn write_block(&mut self, layer: usize, block: u32, bytes: &[u8]) -> Result<()> {
        self.attempt(|executor| {
            let at = executor.room(layer, block)?;
            executor.layers[layer].write_block(&*executor.backend, at, bytes)
        })
    }

    fn seat(&mut self, seat: u32, adapter: Option<&AdapterFactors>) -> Result<()> {
        self.put_adapter(seat, adapter)
    }

    fn follow(&mut self, before: &mut dyn Executor) -> bool {
        let Some(before) = before.any().and_then(|before| before.downcast_mut::<Self>()) else {
            return false;
        };
        let one = before.lowering.program.results.len() == 1 && self.limits.input > 0;
        if !one || !self.backend.has_peer(&before.backend) {
            return false;
        }
        let [sink, source] = Bridge::new();
        (before.sink, self.source) = (Some(sink), Some(source));
        self.limits.input = 0;
        true
    }

    fn any(&mut self) -> Option<&mut dyn Any> {
        Some(self)
    }

    fn join(&mut self, partner: Box<dyn Executor>) -> Result<()> {
        self.partner = Some(Partner::new(partner));
        Ok(())
    }

    fn memory(&self) -> Memory {
        let own = Memory {
            weights: self.weights.iter().map(|w| w.bytes).sum::<usize>()
                + self.copies.values().map(|(_, bytes)| bytes).sum::<usize>()
                + self.lowering.adapters.bytes(),
            cache: self.layers.iter().map(Layer::bytes).sum(),
            arena: self.sizes.arena + self.sizes.working(),
            device: self.backend.usage(),
        };
        let partner = self.partner.iter().map(|partner| partner.executor.memory());
        Memory::sum(std::iter::once(own).chain(partner))
    }

    fn lost(&self) -> bool {
        self.lost.is_some() || self.partner.iter().any(|partner| partner.executor.lost())
    }

    fn compiled(&self) -> usize {
        self.classes.len()
    }

    fn roof(&self) -> Roof {
        let read = self.weights.iter().zip(self.lowering.program.shares_read());
        let layers = self.lowering.program.layers.iter().filter(|layer| layer.state == 0);
        let position = |layer| kv::block_bytes(self.lowering.cache, layer) / BLOCK_TOKENS;
        let own = Roof {
            token_bytes: read.map(|(w, share)| (w.bytes as f64 * share) as usize).sum(),
            position_bytes: layers.map(position).sum(),
            bytes_per_second: self.backend.read_rate(),
        };
        let partner = self.partner.iter().map(|partner| partner.executor.roof());
        Roof::in_turns(std::iter::once(own).chain(partner))
    }

    fn submit_timed(&mut self, step: &Step<'_>) -> Result<Option<(Ticket, Profile)>> {
        let ticket = Ticket::next(&mut self.tickets);
        self.check(step)?;
        if self.partner.is_some() {
            return Ok(None);
        }
        self.drop_unchosen();
        let timed = self.attempt(|executor| executor.replay_timed(step, ticket))?;
        Ok(timed.map(|profile| (ticket, profile)))
    }

    fn limits(&self) -> Option<crate::ComputePeaks> {
        self.peaks().ok()
    }
}
