//! Lowers operations to kernels: which ones, with which constants, on which buffers.

use std::ops::Range;

use formats::{Error, Result};
use ops::embed;
use ops::operation::{Bound, Launches, Operand};
use ops::packed::Format;
use ops::rms_norm::{self, rms_norm};
use ops::sample::kernels::SETTINGS;
use ops::sample::kernels::hand_on::TARGETS;
use ops::tuned::Thresholds;
use ops::{Op, Rope, Rows, Shape};
use program::{Node, Program, StepKind, ValueId, WeightId};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::arena::{self, FEW, Layout, bucket, prompt_bucket};
use super::kernels::Kernels;
use super::{Facts, LIBRARY_ROWS, ProductShape, kv};
use crate::{CacheType, ExecutorOptions};

mod adapters;
mod attention;
pub(super) mod experts;
pub(super) mod products;
mod sampling;
mod states;
mod stream;

pub(super) use adapters::{Adapted, Factor, LOW};
pub(super) use attention::Scratch;
pub(super) use sampling::{Room, SEATS, Sampling, mask_words};

use products::Matrix;

/// A range of bytes that a kernel is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Slot {
    /// A range of the arena.
    Arena(Range<usize>),
    /// A range of the step's words, in the class's region.
    Words(Range<usize>),
    /// A whole weight.
    Weight(usize),
    /// All matrices of a group of [`Lowering::joined`], by the first of them.
    Joined(usize),
    /// The unpacked copy of a matrix; see [`Lowering::copied`].
    Copied(usize),
    /// The frequencies of a rotation.
    Frequencies(usize),
    /// An array of a layer's cache; see [`kv::arrays`].
    Cache(usize, usize),
    /// All seats' factors of a group of sites.
    Adapter(usize, Factor),
    /// Scratch of attention; see [`Scratch`].
    Scratch(usize),
    /// Scratch of sampling; the run's own copy where each run has one.
    Sampling(Sampling),
    /// The numbers 0, 1, 2, .. of the given count.
    Numbers(usize),
    /// The first bytes of the buffer that matrices are unpacked to.
    Unpacked(usize),
}

/// A launch before it is bound to buffers.
pub(super) enum Step {
    /// A kernel, by its number in [`Kernels`].
    Kernel { kernel: usize, numbers: Numbers, buffers: Vec<Slot> },
    /// A product of the vendor's library.
    Product { shape: ProductShape, x: Slot, w: Slot, add: Option<Slot>, y: Slot },
    /// The sum of `count` floats over all ranks.
    AllReduce { x: Slot, y: Slot, count: usize },
    /// The concatenation of `counts[rank]` floats of each rank.
    AllGather { x: Slot, y: Slot, counts: Vec<usize> },
    /// A pause between launches, in which values move to another device (`gives`) and others come
    /// from it (`brings`), each with its shape.
    Exchange { number: usize, gives: Vec<(Slot, Shape)>, brings: Vec<(Slot, Shape)> },
}

/// The key of a shape class.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// The kind of step, which chooses the kernels when there are more than [`FEW`] rows or the
    /// lowering is for many sequences.
    pub(super) kind: StepKind,
    pub(super) tokens: usize,
    pub(super) outputs: usize,
    pub(super) sequences: usize,
    /// Width of each group's block table, in blocks.
    pub(super) strides: Vec<usize>,
    /// Context length, rounded up.
    pub(super) length: usize,
    /// How the step chooses the next token, if it does.
    pub(super) samples: Option<Samples>,
    /// Whether rows have adapters.
    pub(super) adapted: Adapted,
}

/// How a step chooses tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Samples {
    /// Whether top-k or top-p filters are on.
    pub(super) filters: bool,
    /// The run whose words the step reads and writes, one of [`SEATS`]. `None`: the step chooses
    /// for every row with logits, each for its slot.
    pub(super) seat: Option<usize>,
    /// Whether it does nothing else: the rows' logits are there, from a step of the same class that
    /// chose no tokens.
    pub(super) alone: bool,
}

impl Key {
    /// The layout of a step's words.
    pub(super) fn words(&self, batched: bool) -> Words {
        let strides = self.strides.iter().copied();
        let adapted = self.adapted != Adapted::No;
        Words::new([batched, adapted], self.tokens, self.outputs, self.sequences, strides)
    }

    /// The run that these steps belong to.
    pub(super) fn seat(&self) -> Option<usize> {
        self.samples.and_then(|samples| samples.seat)
    }

    /// The region of words: 0 for steps whose tokens the host writes, then one for each run.
    pub(super) fn region(&self) -> usize {
        self.seat().map_or(0, |seat| 1 + seat)
    }
}

/// Layout of a step's words, in bytes from the start of their region.
#[derive(Debug, Clone)]
pub(super) struct Words {
    pub(super) tokens: Range<usize>,
    pub(super) positions: Range<usize>,
    pub(super) sequences: Range<usize>,
    pub(super) outputs: Range<usize>,
    pub(super) starts: Range<usize>,
    pub(super) tables: Vec<Range<usize>>,
    /// For steps that choose: the sampler's state, and the penalties' look-back in tokens.
    pub(super) settings: Range<usize>,
    pub(super) span: Range<usize>,
    /// For steps of many sequences, which have settings for each row with logits: the slot of every
    /// row, and where chosen tokens are written.
    pub(super) slots: Range<usize>,
    pub(super) targets: Range<usize>,
    /// For steps with adapters: the seat, or 0, of every row; of every row with logits; and the
    /// seat from 0, of every row.
    pub(super) adapters: [Range<usize>; 3],
    pub(super) bytes: usize,
}

impl Words {
    /// The layout for a step with these numbers of tokens, rows with logits and sequences;
    /// `strides` are the widths of the block tables.
    pub(super) fn new(
        [batched, adapted]: [bool; 2],
        tokens: usize,
        outputs: usize,
        sequences: usize,
        strides: impl Iterator<Item = usize>,
    ) -> Words {
        let mut end = 0;
        let mut take = |words: usize| {
            let start: usize = end;
            end = (start + 4 * words.max(1)).next_multiple_of(64);
            start..start + 4 * words.max(1)
        };
        let rows = bucket(tokens);
        let choosing = if batched { outputs.max(1) } else { 1 };
        Words {
            tokens: take(rows),
            positions: take(rows),
            sequences: take(rows),
            outputs: take(bucket(outputs)),
            starts: take(sequences + 1),
            tables: strides.map(|stride| take(sequences * stride)).collect(),
            settings: take(SETTINGS as usize * choosing),
            span: take(1),
            slots: if batched { take(rows) } else { 0..0 },
            targets: if batched { take(TARGETS as usize * choosing) } else { 0..0 },
            adapters: match adapted {
                true => [take(rows), take(bucket(outputs)), take(rows)],
                false => [0..0, 0..0, 0..0],
            },
            bytes: end,
        }
    }
}

/// A Program and everything that its lowering depends on.
#[derive(Clone)]
pub(super) struct Lowering {
    pub(super) program: Program,
    pub(super) facts: Facts,
    /// The types of all values, in steps of few rows and of many.
    pub(super) types: [Vec<Scalar>; 2],
    /// The operand type of products of many rows.
    pub(super) wide: Scalar,
    /// The type of queries.
    pub(super) half: Scalar,
    /// The type of the cache.
    pub(super) cache: CacheType,
    /// Whether every row is computed as in a step of many rows; see
    /// [`ExecutorOptions::batched`](crate::ExecutorOptions::batched).
    pub(super) batched: bool,
    /// Sequences of a step, at most.
    sequences: usize,
    /// Whether, with `batched`, decode rows always take the kernels for few rows, which are faster
    /// for few sequences.
    few: bool,
    /// Whether, with `batched`, decode rows times 16-bit matrices are products of the vendor's
    /// library.
    pub(super) library: bool,
    /// Matrices that lie one behind the other, to be multiplied as one.
    pub(super) joined: Vec<Vec<WeightId>>,
    /// How each matrix is packed.
    pub(super) formats: Vec<Option<Format>>,
    /// Adapter seats and their memory.
    pub(super) adapters: adapters::Room,
    /// Distinct rotations.
    pub(super) ropes: Vec<Rope>,
    /// The cache group of each layer.
    pub(super) groups: Vec<usize>,
    /// Whether each value holds a router's scores. Those stay f32, since rounding could select
    /// other experts.
    pub(super) scores: Vec<bool>,
    /// The most elements, and the most rows, of a matrix that is multiplied with many rows.
    pub(super) unpacked: (usize, usize),
    /// The packed matrices of which an unpacked copy stays, so that prompts need not unpack them.
    pub(super) copied: Vec<bool>,
}

impl Lowering {
    /// Prepares the lowering of a Program with matrices in these formats. Queries have the cache's
    /// type, or f16 if that is q8_0 or turbo.
    ///
    /// # Errors
    /// Heads that do not fit the cache's type.
    pub(super) fn new(
        mut program: Program,
        facts: Facts,
        options: &ExecutorOptions,
        formats: Vec<Option<Format>>,
    ) -> Result<Lowering> {
        program::fuse_mixtures(&mut program);
        let &ExecutorOptions { cache_type: cache, batched, sequences, .. } = options;
        kv::check(cache, &program.layers)?;
        let half = match cache {
            CacheType::F16 | CacheType::Q8_0 | CacheType::Turbo => Scalar::F16,
            CacheType::BF16 => Scalar::BF16,
            CacheType::F32 => Scalar::F32,
        };
        let wide = wide(&formats, half);
        let mut lowering = Lowering {
            facts,
            types: [
                arena::narrow_types(&program, half, wide, &formats),
                arena::wide_types(&program, half, wide),
            ],
            wide,
            half,
            cache,
            batched,
            sequences,
            few: false,
            library: false,
            joined: vec![],
            adapters: adapters::Room::new(&program, options.seats, &formats)?,
            formats,
            ropes: program.ropes(),
            groups: program.layer_groups(),
            unpacked: unpacked(&program),
            copied: vec![false; program.weights.len()],
            scores: scores(&program),
            program,
        };
        let packed = lowering.formats.iter().flatten().all(|format| format.packing().is_some());
        let Thresholds { few_sequences, library_sequences, .. } = facts.tuned.thresholds;
        let least = few_sequences[usize::from(packed)];
        lowering.few = batched && sequences <= lowering.together().max(least);
        // With adapters, products are our kernel's, which adds the adapters' part.
        lowering.library = batched
            && !lowering.few
            && !lowering.exact()
            && lowering.adapters.count == 0
            && facts.products.is_some()
            && sequences >= library_sequences;
        lowering.joined = lowering.joins();
        lowering.lay_in_tiles();
        Ok(lowering)
    }

    /// Whether the first result is logits, from which tokens can be chosen.
    pub(super) fn chooses(&self) -> bool {
        let first = self.program.results.first();
        first.is_some_and(|v| self.program.shape(*v).rows == Rows::Outputs)
    }

    /// Whether nothing is rounded below f32.
    fn exact(&self) -> bool {
        self.half == Scalar::F32
    }

    /// Whether `rows` rows of a step of this kind take the kernels for few rows: products that read
    /// a matrix once for up to [`FEW`] rows, with matching norms and gates.
    pub(super) fn narrow(&self, kind: StepKind, rows: usize) -> bool {
        match self.batched {
            true => self.few && kind == StepKind::Decode,
            false => rows <= FEW,
        }
    }

    /// The kind of a class: where many-row kernels differ only above some number of rows, fewer
    /// rows are all computed as decode rows.
    pub(super) fn kind(&self, kind: StepKind, rows: usize) -> StepKind {
        if self.narrow(kind, rows) { StepKind::Decode } else { kind }
    }

    /// Rows that the values of such a step are allocated for. Products may write the padding rows;
    /// nothing reads them.
    pub(super) fn room(&self, kind: StepKind, rows: usize) -> usize {
        match (self.batched && rows > 0, self.facts.products) {
            (true, _) if self.narrow(kind, rows) => {
                bucket(rows).next_multiple_of(FEW.min(bucket(rows)))
            }
            (true, Some(_)) if kind == StepKind::Prompt => prompt_bucket(rows),
            (true, Some(_)) => rows.max(LIBRARY_ROWS),
            (true, None) => rows,
            (false, _) => bucket(rows),
        }
    }

    /// Bytes of unpacked copies of all packed matrices that the vendor's library multiplies.
    pub(super) fn copies(&self) -> usize {
        if self.facts.products.is_none() || self.exact() {
            return 0;
        }
        let program = &self.program;
        let mut copied = vec![false; program.weights.len()];
        for node in &program.nodes {
            let Some(product) = node.op.product(node.weights.len()) else { continue };
            // Few rows of a prompt have logits, which decides for one sequence.
            let many = self.batched || program.shape(node.inputs[0]).rows == Rows::Tokens;
            for projection in product.projections.iter().filter(|_| many) {
                let weight = node.weights[projection.weight];
                let packed = self.formats[weight.0].is_some_and(|f| f != Format::Dense(self.wide));
                let shape = &program.weights[weight.0].shape;
                let fits = shape.iter().product::<usize>() <= self.unpacked.0;
                let whole = shape[0].is_multiple_of(8) && projection.bias.is_none();
                copied[weight.0] |= packed && fits && whole;
            }
        }
        let copied = program.weights.iter().zip(copied).filter(|(_, copied)| *copied);
        let elements: usize =
            copied.map(|(weight, _)| weight.shape.iter().product::<usize>()).sum();
        self.wide.bytes() * elements
    }

    /// Blocks at the start of each cache group that belong to no sequence: idle rows write there.
    pub(super) fn idle_blocks(&self) -> usize {
        usize::from(self.batched)
    }

    /// The types of values in a step of this kind with `tokens` tokens.
    pub(super) fn types(&self, kind: StepKind, tokens: usize) -> &[Scalar] {
        &self.types[usize::from(!self.narrow(kind, tokens))]
    }

    /// The launches of a class, and for each the number of its node, or `None` if it belongs to no
    /// node.
    pub(super) fn launches(
        &self,
        key: &Key,
        layout: &Layout,
        known: &mut Kernels,
    ) -> Result<(Vec<Step>, Vec<Option<usize>>)> {
        let words = key.words(self.batched);
        let steps = vec![];
        let (group, sorted, number, ready) = (None, false, 0, None);
        let mut recorder =
            Recorder { of: self, key, layout, words, known, steps, group, sorted, number, ready };
        let alone = key.samples.is_some_and(|samples| samples.alone);
        if self.batched && self.chooses() && key.kind == StepKind::Decode && !alone {
            recorder.take_chosen()?;
        }
        let mut nodes = vec![None; recorder.steps.len()];
        let forward = if alone { &[] } else { &self.program.nodes[..] };
        for (number, node) in forward.iter().enumerate() {
            let rows = node.outputs.first().or(node.inputs.first());
            recorder.number = number;
            if rows.is_some_and(|v| recorder.rows(*v) > 0) {
                match recorder.group(number) {
                    Some(group) => recorder.adapted(group, node)?,
                    None => recorder.plain(node)?,
                }
            }
            nodes.resize(recorder.steps.len(), Some(number));
        }
        if let Some(samples) = key.samples {
            recorder.sample(samples)?;
        }
        nodes.resize(recorder.steps.len(), None);
        Ok((recorder.steps, nodes))
    }
}

/// The launches of one class, while they are recorded.
struct Recorder<'a> {
    of: &'a Lowering,
    key: &'a Key,
    layout: &'a Layout,
    words: Words,
    known: &'a mut Kernels,
    steps: Vec<Step>,
    /// The adapter sites of the product being recorded, and its first result.
    group: Option<(usize, ValueId)>,
    /// Whether rows have been sorted by adapter.
    sorted: bool,
    /// The number of the node being recorded.
    number: usize,
    /// What the launch in front has made of that node's rows.
    ready: Option<stream::Ready>,
}

/// A node, as seen by the operation that records its launches.
struct Operands<'a, 'b> {
    recorder: &'a mut Recorder<'b>,
    node: &'a Node,
}

impl Launches for Operands<'_, '_> {
    fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    fn rows(&self, operand: Operand) -> usize {
        self.recorder.rows(self.node.value(operand))
    }

    fn width(&self, operand: Operand) -> usize {
        self.recorder.width(self.node.value(operand))
    }

    fn scalar(&self, operand: Operand) -> Scalar {
        self.recorder.scalar(self.node.value(operand))
    }

    fn weight(&self, index: usize) -> Option<&[usize]> {
        let weight = self.node.weights.get(index)?;
        Some(&self.recorder.of.program.weights[weight.0].shape)
    }

    fn format(&self, weight: usize) -> Result<Format> {
        Ok(self.recorder.matrix(self.node.weights[weight])?.0)
    }

    fn push(
        &mut self,
        kernel: Recipe<'static>,
        numbers: Numbers,
        bound: &[(&str, Bound)],
    ) -> Result<()> {
        let recorder = &*self.recorder;
        let slot = |bound: Bound| {
            Ok(match bound {
                Bound::Value(operand) => recorder.value(self.node.value(operand)),
                Bound::Weight(index) => recorder.weight(self.node.weights[index]),
                Bound::Frequencies => {
                    let rope = self.node.op.rope();
                    let ropes = &recorder.of.ropes;
                    Slot::Frequencies(ropes.iter().position(|r| Some(r) == rope).unwrap_or(0))
                }
                Bound::Tokens => Slot::Words(recorder.words.tokens.clone()),
                Bound::Positions => Slot::Words(recorder.words.positions.clone()),
                Bound::Picks => Slot::Words(recorder.words.outputs.clone()),
                Bound::Targets | Bound::Counts | Bound::Draws | Bound::Firsts | Bound::Ends => {
                    let expected = "what a step of sequences has";
                    let found = "what batches of a training run have";
                    return Err(Error::new(self.node.op.name(), expected, found));
                }
            })
        };
        let bound: Vec<(&str, Slot)> =
            bound.iter().map(|&(name, bound)| Ok((name, slot(bound)?))).collect::<Result<_>>()?;
        self.recorder.push(kernel, numbers, &bound)
    }
}

/// A slot with its element type: an operand that need not be a value of the Program.
#[derive(Clone)]
pub(super) struct TypedSlot {
    pub(super) slot: Slot,
    pub(super) scalar: Scalar,
}

impl Recorder<'_> {
    fn push(&mut self, recipe: Recipe, numbers: Numbers, bound: &[(&str, Slot)]) -> Result<()> {
        let step = self.known.step(recipe, numbers, self.of.facts, bound)?;
        self.steps.push(step);
        Ok(())
    }

    /// See [`Lowering::narrow`].
    fn narrow(&self, rows: usize) -> bool {
        self.of.narrow(self.key.kind, rows)
    }

    /// See [`Lowering::room`].
    fn room(&self, rows: usize) -> usize {
        self.of.room(self.key.kind, rows)
    }

    /// Number of rows of a value in this step.
    fn rows(&self, v: ValueId) -> usize {
        self.of.program.shape(v).rows.count(self.key.tokens, self.key.outputs)
    }

    fn width(&self, v: ValueId) -> usize {
        self.of.program.shape(v).width
    }

    fn scalar(&self, v: ValueId) -> Scalar {
        self.of.types(self.key.kind, self.key.tokens)[v.0]
    }

    fn value(&self, v: ValueId) -> Slot {
        let types = self.of.types(self.key.kind, self.key.tokens);
        Slot::Arena(self.layout.value(&self.of.program, types, v))
    }

    fn operand(&self, v: ValueId) -> TypedSlot {
        TypedSlot { slot: self.value(v), scalar: self.scalar(v) }
    }

    fn weight(&self, w: WeightId) -> Slot {
        Slot::Weight(w.0)
    }

    /// The format of a matrix, and its rows.
    fn matrix(&self, w: WeightId) -> Result<(Format, u32)> {
        let weight = &self.of.program.weights[w.0];
        let format =
            self.of.formats[w.0].ok_or_else(|| Error::new(&weight.name, "a matrix", "a vector"))?;
        Ok((format, weight.shape[0] as u32))
    }

    /// Records a node without adapters.
    fn plain(&mut self, node: &Node) -> Result<()> {
        if self.router(self.number + 1).is_some() {
            // The launch of the router behind norms its rows.
            return Ok(());
        }
        if let Some(router) = self.router(self.number) {
            return self.normed_router(node, router);
        }
        if node.op.launch(&mut Operands { recorder: self, node })? {
            return Ok(());
        }
        let Node { op, inputs, weights, outputs } = node;
        match op {
            Op::Linear(_) => {
                let matrix = Matrix { weight: weights[0], bias: weights.get(1).copied() };
                let (x, y) = (self.operand(inputs[0]), self.operand(outputs[0]));
                let (rows, width) = (self.rows(inputs[0]), self.width(inputs[0]));
                self.linear(x, matrix, rows, width, self.of.scores[outputs[0].0], y)
            }
            Op::BlockLinear(op) => {
                let (x, y) = (self.operand(inputs[0]), self.operand(outputs[0]));
                let (rows, width) = (self.rows(inputs[0]), self.width(inputs[0]));
                self.block_linear(op, x, weights[0], (rows, width), y)
            }
            Op::KvWrite(op) => self.kv_write(op.layer, inputs),
            Op::Attention(attention) => {
                let from = (inputs[0], inputs.get(1).copied());
                self.attention(attention, from, weights, outputs[0])
            }
            Op::Indexer(op) => self.index(op, [inputs[0], inputs[1]], outputs[0]),
            Op::ShortConv(conv) => self.short_conv(conv, inputs[0], weights, outputs[0]),
            Op::DeltaNet(net) => self.delta_net(net, inputs, weights, outputs[0]),
            Op::SelectiveScan(scan) => self.selective_scan(scan, inputs, weights, outputs[0]),
            Op::Project(project) => self.project(project, inputs[0], weights, outputs),
            Op::GateUp(op) => self.gate_up(op, inputs[0], weights, outputs[0]),
            Op::LinearAdd(_) => {
                let matrix = Matrix { weight: weights[0], bias: weights.get(1).copied() };
                self.linear_add(inputs[0], inputs[1], matrix, outputs[0])
            }
            Op::Experts(op) => self.mixture(op, node),
            Op::RopeWrite(write) => self.rope_write(write, inputs, weights, outputs[0]),
            Op::AllReduce(_) => {
                if self.scalar(inputs[0]) != Scalar::F32 {
                    let found = format!("{:?}", self.scalar(inputs[0]));
                    return Err(Error::new("all_reduce", "values of f32", found));
                }
                let count = self.rows(outputs[0]) * self.width(outputs[0]);
                let (x, y) = (self.value(inputs[0]), self.value(outputs[0]));
                self.steps.push(Step::AllReduce { x, y, count });
                Ok(())
            }
            Op::AllGather(gather) => {
                let rows = self.rows(inputs[0]);
                let counts = gather.partition.widths().map(|width| rows * width).collect();
                let (x, y) = (self.value(inputs[0]), self.value(outputs[0]));
                self.steps.push(Step::AllGather { x, y, counts });
                Ok(())
            }
            Op::Exchange(exchange) => {
                let found = inputs.iter().chain(outputs).map(|v| self.scalar(*v));
                if let Some(found) = found.into_iter().find(|scalar| *scalar != Scalar::F32) {
                    return Err(Error::new("exchange", "values of f32", format!("{found:?}")));
                }
                let all = |values: &[ValueId]| {
                    values.iter().map(|v| (self.value(*v), self.of.program.shape(*v))).collect()
                };
                let (number, gives, brings) = (exchange.number, all(inputs), all(outputs));
                self.steps.push(Step::Exchange { number, gives, brings });
                Ok(())
            }
            _ => Err(Error::new("gpu", "an operation that GPUs have", op.name())),
        }
    }

    /// Gathers the rows of a table that `picks` names, converted to `y`'s type.
    fn gather(
        &mut self,
        format: Format,
        table: Slot,
        picks: Slot,
        rows: usize,
        width: usize,
        y: TypedSlot,
    ) -> Result<()> {
        let bound = [("tokens", picks), ("table", table), ("y", y.slot)];
        self.push(embed::kernel(format, y.scalar), embed::numbers(rows, width), &bound)
    }

    fn norm(
        &mut self,
        x: TypedSlot,
        weight: WeightId,
        eps: f32,
        rows: usize,
        width: usize,
        y: TypedSlot,
    ) -> Result<()> {
        let types = rms_norm::NormTypes { x: x.scalar, weight: Scalar::F32, y: y.scalar };
        let kernel = rms_norm(types, rms_norm::team(width));
        let numbers = rms_norm::launch_numbers(rows, width, eps);
        self.push(kernel, numbers, &[("x", x.slot), ("weight", self.weight(weight)), ("y", y.slot)])
    }

    /// Launches an elementwise kernel over a whole value.
    fn flat(&mut self, kernel: Recipe, from: &[(&str, Slot)], y: ValueId) -> Result<()> {
        let n = self.rows(y) * self.width(y);
        let bound = [from, &[("y", self.value(y))]].concat();
        self.push(kernel, Numbers::new().with("n", n as u32), &bound)
    }
}

/// The operand type of products of many rows: f16 if all matrices are f16; else bf16, which does
/// not overflow.
fn wide(formats: &[Option<Format>], half: Scalar) -> Scalar {
    let f16 = |f: &Format| *f == Format::Dense(Scalar::F16);
    match half {
        Scalar::F32 => Scalar::F32,
        _ if formats.iter().flatten().all(f16) => Scalar::F16,
        _ => Scalar::BF16,
    }
}

/// See [`Lowering::scores`].
fn scores(program: &Program) -> Vec<bool> {
    let mut scores = vec![false; program.values.len()];
    for node in program.nodes.iter().filter(|node| matches!(node.op, Op::Experts(_))) {
        scores[node.inputs[1].0] = true;
    }
    // The router's consumer may be on the other device.
    for node in program.nodes.iter().filter(|node| matches!(node.op, Op::Exchange(_))) {
        node.inputs.iter().for_each(|v| scores[v.0] = true);
    }
    for node in program.nodes.iter().filter(|node| matches!(node.op, Op::GroupLimit(_))) {
        scores[node.inputs[0].0] = true;
    }
    scores
}

/// See [`Lowering::unpacked`].
fn unpacked(program: &Program) -> (usize, usize) {
    let many = |node: &&Node| {
        let product = node.op.product(node.weights.len());
        product.is_some() && program.shape(node.inputs[0]).rows == Rows::Tokens
    };
    let weights = program.nodes.iter().filter(many).flat_map(|node| &node.weights);
    let shapes = weights.map(|w| &program.weights[w.0].shape);
    let most = |a: (usize, usize), shape: &Vec<usize>| match shape[..] {
        [rows, cols] => (a.0.max(rows * cols), a.1.max(rows)),
        _ => a,
    };
    shapes.fold((0, 0), most)
}

#[cfg(test)]
mod tests {
    use tile::dsl::{Const, fixed, launch};
    use tile::launch::Mode;
    use tile::passes::Target;

    use super::*;

    /// A kernel of nothing, with a constant; told from others by `rows`.
    fn recipe(rows: u32, record: fn()) -> Recipe<'static> {
        Recipe::new("here", "nothing", vec![("rows", rows.to_string())], Box::new(record))
    }

    fn nothing() {
        launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
        Const::<u32>::declare("width");
    }

    fn again() {
        panic!("it was known");
    }

    #[test]
    fn a_kernel_that_is_known_is_not_recorded_again() {
        let (target, wgmma, products) = (Target::Cuda, false, None);
        let tuned = &ops::tuned::NVIDIA;
        let facts = Facts { target, processors: 1, shared: 0, wgmma, products, tuned };
        let mut kernels = Kernels::default();
        let mut get = |recipe, width: u32| {
            let numbers = Numbers::new().with("width", width);
            kernels.get(recipe, &numbers, facts).expect("a kernel of nothing is lowered").0
        };
        assert_eq!(get(recipe(3, nothing), 8), 0);
        assert_eq!(get(recipe(3, again), 8), 0);
        assert_eq!(
            get(recipe(3, again), 9),
            1,
            "another constant, another kernel of the same record"
        );
        assert_eq!(get(recipe(4, nothing), 8), 2, "another parameter");
        assert_eq!(get(recipe(4, again), 8), 2);
    }
}
