//! Training on a GPU: weights, the arena, and the shape classes compiled so far.
//!
//! A batch is a replay of one Program. Its launches are bound when its class is first seen, and
//! recorded as one submission when it is seen again. Values lie in an arena that is planned for
//! each class, with the gradients of trained weights at its start. No sum uses atomics, so that the
//! bits depend on the batch and the device alone.
//!
//! Trained weights lie side by side, matrices first. Their f32 values, their 16-bit operands if
//! there are any, gradients, gradient sums and moments all have the same offsets, so that an update
//! takes a launch or two.

mod delta;
mod experts;
mod gains;
mod layout;
mod lower;
mod scan;
mod states;
mod updates;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use formats::{Error, ErrorKind, Hint, Result, Setting, Tensors};
use ops::packed::Format;
use ops::{Rope, embed};
use program::{Program, WeightId};
use tile::types::Scalar;

use super::Backend;
use super::kernels::Kernels;
use super::lower::{Slot, Step};
use super::weights::{self, Wanted, Weight};
use crate::{Divided, Kept, Memory, PackedRows, Precision, TrainOptions, Trainer};
use layout::{Counts, Layout, Words};
use lower::Lowering;
use ops::gradient::adamw::Rule;
use updates::Updates;

/// Alignment of a trained weight in bytes: twice a buffer's, so that 16-bit operands at half the
/// offset are aligned, too.
const ALIGN: usize = 512;

/// Number of classes that are kept bound; the batches of a training run are mostly of a few.
const KEPT: usize = 8;

/// Launches of a Program for batches of one class.
struct Class<B: Backend> {
    number: usize,
    counts: Counts,
    launches: Vec<B::Launch>,
    /// All launches as one submission, once the class has been seen again.
    recording: Option<B::Recording>,
    seen: bool,
    /// The operation of each launch.
    names: Vec<&'static str>,
    layout: Layout,
}

/// The [`Trainer`] of GPUs.
pub(super) struct GpuTrainer<B: Backend> {
    backend: Arc<B>,
    lowerings: Vec<Lowering>,
    /// The offset of each trained weight, in bytes of f32.
    trained: Vec<(WeightId, Range<usize>)>,
    /// The end of the matrices, and the end of all weights.
    ends: [usize; 2],
    /// f32 values of all trained weights, and their 16-bit operands if activations have 16 bits.
    master: B::Buffer,
    operands: B::Buffer,
    /// Whether values have been written that are not yet rounded to operands.
    changed: bool,
    updates: Option<Updates<B>>,
    /// DoRA vectors; their values divided by the row norms, at the vector's offset behind the
    /// matrices; the launches that compute them; and whether values have changed since.
    divided: Vec<Divided>,
    inverses: B::Buffer,
    gains: Vec<B::Launch>,
    due: bool,
    /// Launches that round trained matrices to operands.
    rounds: Vec<B::Launch>,
    weights: Vec<Weight<B::Buffer>>,
    frequencies: Vec<B::Buffer>,
    /// The numbers 0, 1, 2, .., and the buffer that matrices are unpacked to.
    numbers: B::Buffer,
    unpacked: B::Buffer,
    arena: B::Buffer,
    arena_bytes: usize,
    words: B::Buffer,
    words_bytes: usize,
    kernels: Kernels,
    pipelines: Vec<B::Pipeline>,
    /// In order of last use.
    classes: Vec<Class<B>>,
    /// Tokens of the last batch, and those with a loss.
    rows: [usize; 2],
    staged: Vec<u8>,
    losses: Vec<f32>,
}

impl<B: Backend> GpuTrainer<B> {
    pub(super) fn load(
        backend: Arc<B>,
        tensors: &Tensors,
        options: TrainOptions,
    ) -> Result<GpuTrainer<B>> {
        let TrainOptions { programs, trained, divided, precision } = options;
        let facts = backend.facts();
        let scalar = match precision {
            Precision::F32 => Scalar::F32,
            Precision::BF16 => Scalar::BF16,
        };
        let whole = programs.last().ok_or_else(|| Error::new("train", "a Program", "none"))?;
        let mut formats = weights::formats(whole, tensors, &trained)?;
        let (places, ends) = places(whole, &trained);
        let [matrices, end] = ends;
        let rounded = if scalar == Scalar::F32 { 0 } else { matrices / 4 * scalar.bytes() };
        room(&*backend, weights::bytes(whole, &formats) + rounded)?;
        let wanted = Wanted { formats: &formats, trained: &trained, joined: &[], allow_nan: false };
        let store = weights::Store::<B>::default();
        let stored = store.of(tensors, wanted.allow_nan);
        let mut loaded =
            weights::load(&*backend, whole, tensors, &wanted, &stored, &mut |_, _| {})?;
        let master = backend.buffer(end.max(ALIGN))?;
        let operands = backend.buffer(rounded.max(ALIGN))?;
        let inverses = backend.buffer((end - matrices).max(4))?;
        let mut masters = Vec::new();
        for (id, range) in &places {
            let own = backend.part(&master, range.clone())?;
            loaded[id.0].buffer = own.clone();
            if range.end > matrices {
                continue;
            }
            formats[id.0] = Some(Format::Dense(scalar));
            if scalar != Scalar::F32 {
                let [start, end] = [range.start, range.end].map(|at| at / 4 * scalar.bytes());
                loaded[id.0].buffer = backend.part(&operands, start..end)?;
                masters.push((*id, own));
            }
        }
        gains::check(whole, &trained, &divided)?;
        for own in &divided {
            let elements: usize = whole.weights[own.weight.0].shape.iter().product();
            loaded[own.weight.0].buffer = backend.buffer(4 * elements)?;
        }
        let lowering =
            |program| Lowering::new(program, facts, scalar, formats.clone(), places.clone());
        let lowerings = programs.into_iter().map(lowering).collect::<Result<Vec<_>>>()?;
        let empty = backend.buffer(256)?;
        let mut trainer = GpuTrainer {
            lowerings,
            trained: places,
            ends,
            master,
            operands,
            changed: true,
            updates: None,
            divided,
            inverses,
            gains: Vec::new(),
            due: true,
            rounds: Vec::new(),
            weights: loaded,
            frequencies: Vec::new(),
            numbers: empty.clone(),
            unpacked: empty.clone(),
            arena: empty.clone(),
            arena_bytes: 0,
            words: empty,
            words_bytes: 0,
            kernels: Kernels::default(),
            pipelines: Vec::new(),
            classes: Vec::new(),
            rows: [0; 2],
            staged: Vec::new(),
            losses: Vec::new(),
            backend,
        };
        trainer.make_room()?;
        trainer.round(masters)?;
        Ok(trainer)
    }

    /// Allocates what all classes of all Programs share.
    fn make_room(&mut self) -> Result<()> {
        let mut ropes: Vec<Rope> = Vec::new();
        for rope in self.lowerings.iter().flat_map(|lowering| lowering.program.ropes()) {
            if !ropes.contains(&rope) {
                ropes.push(rope);
            }
        }
        let upload = |rope: &Rope| {
            let bytes: Vec<u8> = rope.frequencies.iter().flat_map(|f| f.to_le_bytes()).collect();
            self.backend.upload(&bytes)
        };
        self.frequencies = ropes.iter().map(upload).collect::<Result<_>>()?;
        let [unpacked, rows] = self.lowerings[0].unpacked();
        self.unpacked = self.backend.buffer(unpacked.max(4))?;
        let numbers: Vec<u8> = (0..rows.max(1) as u32).flat_map(u32::to_le_bytes).collect();
        self.numbers = self.backend.upload(&numbers)?;
        self.lowerings.iter_mut().for_each(|lowering| lowering.ropes.clone_from(&ropes));
        Ok(())
    }

    /// Binds the launches that round trained matrices from the given f32 values.
    fn round(&mut self, masters: Vec<(WeightId, B::Buffer)>) -> Result<()> {
        for (id, master) in masters {
            let lowering = &self.lowerings[0];
            let &[rows, columns] = lowering.program.weights[id.0].shape.as_slice() else {
                continue;
            };
            let recipe = embed::kernel(Format::Dense(Scalar::F32), lowering.scalar);
            let numbers = embed::numbers(rows, columns);
            let (kernel, _) = self.kernels.get(recipe, &numbers, lowering.facts)?;
            self.kernels.load(&*self.backend, &mut self.pipelines)?;
            let picks = self.backend.part(&self.numbers, 0..4 * rows)?;
            let buffers = [picks, master, self.weights[id.0].buffer.clone()];
            self.rounds.push(self.backend.bind(&self.pipelines[kernel], &numbers, &buffers)?);
        }
        Ok(())
    }

    /// Makes the class of these batches the latest one, binding it at first use.
    fn class(&mut self, number: usize, counts: Counts) -> Result<()> {
        let known = self.classes.iter().position(|c| c.number == number && c.counts == counts);
        if let Some(known) = known {
            let class = self.classes.remove(known);
            self.classes.push(class);
            return Ok(());
        }
        let lowering = &self.lowerings[number];
        let layout = Layout::new(lowering, counts);
        let words = Words::new(counts).bytes;
        if layout.bytes > self.arena_bytes || words > self.words_bytes {
            // Bound launches use the old addresses.
            self.classes.clear();
            let (arena, words) = (layout.bytes.max(self.arena_bytes), words.max(self.words_bytes));
            let small = self.backend.buffer(256)?;
            (self.arena, self.words) = (small.clone(), small);
            (self.arena_bytes, self.words_bytes) = (0, 0);
            self.arena = self.backend.buffer(arena)?;
            self.words = self.backend.buffer(words)?;
            (self.arena_bytes, self.words_bytes) = (arena, words);
        }
        let (steps, names) = lowering.steps(counts, &layout, &mut self.kernels)?;
        self.kernels.load(&*self.backend, &mut self.pipelines)?;
        let launches = steps.iter().map(|step| self.bind(step)).collect::<Result<_>>()?;
        if self.classes.len() >= KEPT {
            self.classes.remove(0);
        }
        let (recording, seen) = (None, false);
        self.classes.push(Class { number, counts, launches, recording, seen, names, layout });
        Ok(())
    }

    /// Runs all launches of the latest class.
    fn replay(&mut self) -> Result<()> {
        let Some(class) = self.classes.last_mut() else { return Ok(()) };
        if class.recording.is_none() && std::mem::replace(&mut class.seen, true) {
            class.recording = Some(self.backend.record(&class.launches)?);
        }
        match &mut class.recording {
            Some(recording) => self.backend.replay(recording),
            None => self.backend.submit(&class.launches),
        }
    }

    fn bind(&self, step: &Step) -> Result<B::Launch> {
        let buffer = |slot: &Slot| match slot {
            Slot::Arena(range) => self.backend.part(&self.arena, range.clone()),
            Slot::Words(range) => self.backend.part(&self.words, range.clone()),
            Slot::Weight(w) => Ok(self.weights[*w].buffer.clone()),
            Slot::Frequencies(rope) => Ok(self.frequencies[*rope].clone()),
            Slot::Numbers(count) => self.backend.part(&self.numbers, 0..4 * count),
            Slot::Unpacked(bytes) => self.backend.part(&self.unpacked, 0..*bytes),
            Slot::Joined(_)
            | Slot::Copied(_)
            | Slot::Adapter(..)
            | Slot::Cache(..)
            | Slot::Scratch(_)
            | Slot::Sampling(_) => {
                Err(Error::new("train", "a value of a batch", format!("{slot:?}")))
            }
        };
        match step {
            Step::Kernel { kernel, numbers, buffers } => {
                let buffers = buffers.iter().map(buffer).collect::<Result<Vec<_>>>()?;
                self.backend.bind(&self.pipelines[*kernel], numbers, &buffers)
            }
            Step::Product { shape, x, w, add, y } => {
                let add = add.as_ref().map(buffer).transpose()?;
                self.backend.product(shape, &buffer(x)?, &buffer(w)?, add.as_ref(), &buffer(y)?)
            }
            Step::AllReduce { x, y, count } => {
                self.backend.all_reduce(&buffer(x)?, &buffer(y)?, *count)
            }
            Step::AllGather { x, y, counts } => {
                self.backend.all_gather(&buffer(x)?, &buffer(y)?, counts)
            }
            Step::Exchange { .. } => {
                Err(Error::new("train", "a Program on one device", "one on several"))
            }
        }
    }

    /// Writes a batch's words. Padding rows form a sequence of their own, without losses.
    fn stage(&mut self, rows: &PackedRows<'_>, counts: Counts) -> Result<()> {
        let words = Words::new(counts);
        self.staged.clear();
        self.staged.resize(words.bytes, 0);
        let (own, all) = (rows.tokens.len() as u32, counts.tokens as u32);
        let filled = |values: &[u32], rest: &dyn Fn(u32) -> u32| -> Vec<u32> {
            values.iter().copied().chain((own..all).map(rest)).collect()
        };
        let first = filled(rows.first, &|_| own);
        let mut ends = vec![all; first.len()];
        // A sequence ends where the next one begins.
        for row in (1..ends.len()).rev() {
            ends[row - 1] = if first[row] == first[row - 1] { ends[row] } else { row as u32 };
        }
        let mut starts = first.clone();
        starts.dedup();
        // Missing sequences have no rows.
        starts.resize(counts.sequences + 1, all);
        let mut predicts = vec![false; first.len()];
        rows.picks.iter().for_each(|row| predicts[*row as usize] = true);
        let idle = (0..all).filter(|row| !predicts[*row as usize]);
        let picks: Vec<u32> = rows.picks.iter().copied().chain(idle).take(counts.outputs).collect();
        let shares: Vec<u32> = rows.counts.iter().map(|count| count.to_bits()).collect();
        let parts = [
            (&words.tokens, filled(rows.tokens, &|_| 0)),
            (&words.positions, filled(rows.positions, &|row| row - own)),
            (&words.first, first),
            (&words.ends, ends),
            (&words.targets, filled(rows.targets, &|_| 0)),
            (&words.counts, filled(&shares, &|_| 0)),
            (&words.draws, filled(rows.draws, &|_| 0)),
            (&words.picks, picks),
            (&words.starts, starts),
        ];
        for (range, values) in parts {
            let to = self.staged[range.clone()].chunks_exact_mut(4);
            to.zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
        }
        self.rows = [rows.tokens.len(), rows.picks.len()];
        self.backend.write(&self.words, &self.staged)
    }
}

/// The byte range of each trained weight, matrices first, otherwise in order; and the end of the
/// matrices and of all.
fn places(program: &Program, trained: &[WeightId]) -> (Vec<(WeightId, Range<usize>)>, [usize; 2]) {
    let shape = |id: &WeightId| program.weights[id.0].shape.as_slice();
    let mut places: Vec<(WeightId, Range<usize>)> = trained.iter().map(|id| (*id, 0..0)).collect();
    let mut ends = [0; 2];
    for matrices in [true, false] {
        ends[1] = ends[0];
        for (id, range) in places.iter_mut().filter(|(id, _)| (shape(id).len() == 2) == matrices) {
            *range = ends[1]..ends[1] + 4 * shape(id).iter().product::<usize>();
            ends[1] = range.end.next_multiple_of(ALIGN);
        }
        ends = if matrices { [ends[1]; 2] } else { ends };
    }
    (places, ends)
}

/// Refuses weights that do not fit into free memory.
fn room<B: Backend>(backend: &B, needed: usize) -> Result<()> {
    match backend.free()? {
        Some(free) if free < needed => {
            let expected = format!("{needed} bytes of its memory for weights");
            let error = Error::new(backend.about().name, expected, format!("{free} free"));
            Err(error.of(ErrorKind::NoMemory).hint(Hint::set(Setting::Place, "cpu")))
        }
        _ => Ok(()),
    }
}

impl<B: Backend> Trainer for GpuTrainer<B> {
    fn write(&mut self, weight: WeightId, kept: Kept, values: &[f32]) -> Result<()> {
        let place = self.place(weight, kept, values.len())?;
        self.changed |= kept == Kept::Values;
        self.due |= kept == Kept::Values;
        self.staged.clear();
        self.staged.resize(4 * values.len(), 0);
        let words = self.staged.as_chunks_mut().0;
        words.iter_mut().zip(values).for_each(|(word, value)| *word = value.to_le_bytes());
        self.backend.write(&place, &self.staged)
    }

    fn read(&mut self, weight: WeightId, kept: Kept, values: &mut [f32]) -> Result<()> {
        let place = self.place(weight, kept, values.len())?;
        self.staged.clear();
        self.staged.resize(4 * values.len(), 0);
        self.backend.read(&place, &mut self.staged)?;
        let words = self.staged.as_chunks().0;
        values.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_le_bytes(*word));
        Ok(())
    }

    fn replace(&mut self, number: usize, program: Program) -> Result<()> {
        let own = &self.lowerings[number];
        let (formats, trained) = (own.formats.clone(), own.trained.clone());
        self.lowerings[number] = Lowering::new(program, own.facts, own.scalar, formats, trained)?;
        self.classes.clear();
        // They use the old buffer for unpacked matrices.
        self.gains.clear();
        self.due = true;
        self.make_room()
    }

    fn run(&mut self, number: usize, rows: &PackedRows<'_>) -> Result<()> {
        let counts = Counts::new(rows.first, rows.picks.len());
        self.class(number, counts)?;
        self.stage(rows, counts)?;
        if self.changed {
            self.backend.submit(&self.rounds)?;
            self.changed = false;
        }
        self.divide()?;
        self.replay()?;
        self.divide_gradients(number)
    }

    fn losses(&mut self) -> Result<&[f32]> {
        let Some(class) = self.classes.last() else { return Ok(&[]) };
        let lowering = &self.lowerings[class.number];
        let Some(losses) = lowering.program.results.first() else { return Ok(&[]) };
        let shape = lowering.program.shape(*losses);
        let elements = shape.rows.count(self.rows[0], self.rows[1]) * shape.width;
        let start = class.layout.value(lowering, *losses).start;
        self.staged.clear();
        self.staged.resize(4 * elements, 0);
        let place = self.backend.part(&self.arena, start..start + 4 * elements)?;
        self.backend.read(&place, &mut self.staged)?;
        let floats = self.staged.as_chunks().0;
        self.losses.clear();
        self.losses.extend(floats.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        Ok(&self.losses)
    }

    fn accumulate(&mut self, first: bool) -> Result<()> {
        self.add_gradients(first)
    }

    fn reduce(&mut self) -> Result<()> {
        self.reduce_sums()
    }

    fn clear(&mut self) -> Result<()> {
        self.clear_sums()
    }

    fn squares(&mut self) -> Result<f64> {
        self.add_squares()
    }

    fn update(&mut self, rule: &Rule) -> Result<()> {
        self.apply(rule)
    }

    fn forget(&mut self) -> Result<()> {
        self.updates = None;
        Ok(())
    }

    fn time(&mut self) -> Result<Option<BTreeMap<&'static str, f64>>> {
        let Some(class) = self.classes.last() else { return Ok(None) };
        let Some(each) = self.backend.time(&class.launches)? else { return Ok(None) };
        let mut all = BTreeMap::new();
        for (name, seconds) in class.names.iter().zip(each) {
            *all.entry(*name).or_default() += seconds;
        }
        Ok(Some(all))
    }

    fn bytes(&self, number: usize, tokens: usize, outputs: usize) -> usize {
        let counts = Counts::most(tokens, outputs);
        Layout::new(&self.lowerings[number], counts).bytes + Words::new(counts).bytes
    }

    fn update_bytes(&self) -> usize {
        3 * self.ends[1]
    }

    fn free(&self) -> Result<Option<usize>> {
        let updates = if self.updates.is_some() { self.update_bytes() } else { 0 };
        let own = self.arena_bytes + self.words_bytes + updates;
        Ok(self.backend.free()?.map(|free| free + own))
    }

    fn memory(&self) -> Memory {
        let weights = self.weights.iter().map(|weight| weight.bytes).sum();
        Memory { weights, cache: 0, arena: self.arena_bytes, device: self.backend.usage() }
    }
}
