//! From operations to kernels: which ones, with which constants, on which buffers.

use std::collections::HashMap;
use std::ops::Range;

use formats::{Error, Result};
use half::{bf16, f16};
use ops::attention::decode::{self, attention_decode};
use ops::attention::prefill::{Tiling, attention_prefill};
use ops::linear::gemm::{self, gemm};
use ops::linear::{self, Task, gemv};
use ops::packed::Format;
use ops::project::{Project, project};
use ops::rms_norm::rms_norm;
use ops::rope_write::{self, Variant, rope_write};
use ops::sample::kernels;
use ops::sweep::Team;
use ops::{Attention, Op, Rope, RopeWrite, Rows};
use program::{BLOCK_TOKENS, Node, Program, ValueId, WeightId};
use tile::Kernel;
use tile::ir::ParamKind;
use tile::launch::Numbers;
use tile::passes;
use tile::types::Scalar;

use super::arena::{FEW, Layout, bucket};
use super::{Facts, ProductShape};

/// A range of bytes that a kernel is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Slot {
    /// Of the arena.
    Arena(Range<usize>),
    /// Of the step's words.
    Words(Range<usize>),
    /// All of a weight.
    Weight(usize),
    /// A rotation's frequencies.
    Frequencies(usize),
    /// A layer's keys.
    Keys(usize),
    /// A layer's values.
    Values(usize),
    /// Working memory of attention: see [`Scratch`].
    Scratch(usize),
    /// Working memory of sampling.
    Sampling(Sampling),
    /// The numbers from 0 on, so many.
    Numbers(usize),
    /// The first bytes of where a matrix is unpacked to.
    Unpacked(usize),
}

/// What sampling works with besides the logits and the step's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sampling {
    Settings,
    History,
    Biases,
    Spans,
    Keys,
    Peaks,
    Bins,
    List,
    Cuts,
    Totals,
    Picked,
    Sums,
    Arrived,
    Mail,
}

impl Sampling {
    /// All of them, in the order of their numbers.
    pub(super) const ALL: [Sampling; 14] = [
        Sampling::Settings,
        Sampling::History,
        Sampling::Biases,
        Sampling::Spans,
        Sampling::Keys,
        Sampling::Peaks,
        Sampling::Bins,
        Sampling::List,
        Sampling::Cuts,
        Sampling::Totals,
        Sampling::Picked,
        Sampling::Sums,
        Sampling::Arrived,
        Sampling::Mail,
    ];

    /// Words of it, for one row; `history` and `biases` are as long as a run needs them.
    pub(super) fn words(self, vocab: usize, history: usize, biases: usize) -> usize {
        let parts = |of: u32| vocab.div_ceil(of as usize);
        match self {
            Sampling::Settings => kernels::SETTINGS as usize,
            Sampling::History => history,
            Sampling::Biases => 2 * biases,
            Sampling::Spans | Sampling::Picked | Sampling::Arrived => 1,
            Sampling::Keys => vocab,
            Sampling::Peaks | Sampling::Totals => 2 * parts(kernels::PART),
            Sampling::Cuts => 2,
            Sampling::Bins => (kernels::BINS * kernels::PER_BIN) as usize,
            Sampling::List => 2 * vocab,
            Sampling::Sums => 2 * parts(kernels::advance::SHARE),
            Sampling::Mail => 2 * kernels::advance::NOTES as usize,
        }
    }
}

/// Bytes of the three arrays that split attention works with; the last is zeros between steps.
pub(super) type Scratch = [usize; 3];

/// A launch before it is bound.
pub(super) enum Step {
    /// One of [`Kernels`].
    Kernel { kernel: usize, numbers: Numbers, buffers: Vec<Slot> },
    /// The vendor's product.
    Product { shape: ProductShape, x: Slot, w: Slot, add: Option<Slot>, y: Slot },
}

/// What tells shape classes apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) tokens: usize,
    pub(super) outputs: usize,
    /// Blocks in a row of each group's table.
    pub(super) strides: Vec<usize>,
    /// Positions in use, rounded up.
    pub(super) length: usize,
    /// Whether the step chooses its successor's token, and whether filters are on then.
    pub(super) samples: Option<bool>,
}

/// Where a step's words lie, in bytes.
#[derive(Debug, Clone)]
pub(super) struct Words {
    pub(super) tokens: Range<usize>,
    pub(super) positions: Range<usize>,
    pub(super) sequences: Range<usize>,
    pub(super) outputs: Range<usize>,
    pub(super) starts: Range<usize>,
    pub(super) tables: Vec<Range<usize>>,
    pub(super) bytes: usize,
}

impl Words {
    pub(super) fn new(key: &Key) -> Words {
        let mut end = 0;
        let mut take = |words: usize| {
            let start: usize = end;
            end = (start + 4 * words.max(1)).next_multiple_of(64);
            start..start + 4 * words.max(1)
        };
        let rows = bucket(key.tokens);
        Words {
            tokens: take(rows),
            positions: take(rows),
            sequences: take(rows),
            outputs: take(bucket(key.outputs)),
            starts: take(2),
            tables: key.strides.iter().map(|&s| take(s)).collect(),
            bytes: end,
        }
    }
}

/// Kernels as they are loaded, each once.
#[derive(Default)]
pub(super) struct Kernels {
    pub(super) all: Vec<Kernel>,
    /// What each was before it was lowered, and the values of its constants.
    pub(super) sources: Vec<(Kernel, Numbers)>,
    known: HashMap<(String, Vec<u32>), usize>,
}

impl Kernels {
    /// The kernel with the constants that `numbers` has, lowered.
    fn get(&mut self, kernel: &Kernel, numbers: &Numbers, facts: Facts) -> Result<usize> {
        let constants: Option<Vec<u32>> =
            kernel.constants.iter().map(|c| numbers.get(&c.name)).collect();
        let constants = constants
            .ok_or_else(|| Error::new(&kernel.name, "a value for each constant", "fewer"))?;
        let key = (kernel.name.clone(), constants);
        if let Some(&known) = self.known.get(&key) {
            return Ok(known);
        }
        let special = passes::specialise(kernel, numbers);
        let lowered = passes::lower(&special, facts.target)
            .map_err(|fault| Error::new(&kernel.name, "", fault))?;
        self.all.push(lowered);
        self.sources.push((kernel.clone(), numbers.clone()));
        self.known.insert(key, self.all.len() - 1);
        Ok(self.all.len() - 1)
    }
}

/// A Program and all that its lowering depends on.
pub(super) struct Lowering {
    pub(super) program: Program,
    pub(super) facts: Facts,
    /// The types of all values, in steps of few rows and of many.
    pub(super) types: [Vec<Scalar>; 2],
    /// The type of operands of products of many rows.
    pub(super) wide: Scalar,
    /// The type of queries and of the cache.
    pub(super) half: Scalar,
    /// How matrices are packed.
    pub(super) formats: Vec<Option<Format>>,
    /// Distinct rotations.
    pub(super) ropes: Vec<Rope>,
    /// The cache group of each layer.
    pub(super) groups: Vec<usize>,
}

/// Instantiates a generic kernel for types known at run time.
macro_rules! with_float {
    ($scalar:expr, $T:ident => $body:expr) => {
        match $scalar {
            Scalar::F16 => {
                type $T = f16;
                $body
            }
            Scalar::BF16 => {
                type $T = bf16;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}

impl Lowering {
    /// Whether nothing is rounded to less than f32.
    fn exact(&self) -> bool {
        self.half == Scalar::F32
    }

    /// The types of values in steps of so many tokens.
    pub(super) fn types(&self, tokens: usize) -> &[Scalar] {
        &self.types[usize::from(tokens > FEW)]
    }

    /// The most elements that any matrix of many rows has, and the most rows.
    pub(super) fn unpacked(&self) -> (usize, usize) {
        let program = &self.program;
        let of = |node: &Node| match node.op {
            Op::Linear | Op::Project(_) | Op::LinearAdd | Op::GateUp { .. }
                if program.shape(node.inputs[0]).rows == Rows::Tokens =>
            {
                node.weights.clone()
            }
            _ => vec![],
        };
        let shapes = program.nodes.iter().flat_map(of).map(|w| &program.weights[w.0].shape);
        let most = |a: (usize, usize), shape: &Vec<usize>| match shape[..] {
            [rows, cols] => (a.0.max(rows * cols), a.1.max(rows)),
            _ => a,
        };
        shapes.fold((0, 0), most)
    }

    /// Bytes of attention's working memory that any class of up to so many rows needs.
    pub(super) fn scratch(&self, tokens: usize) -> Scratch {
        let mut most = [4; 3];
        for node in &self.program.nodes {
            let Op::Attention(op) = &node.op else { continue };
            for rows in [tokens, FEW.min(tokens), 1] {
                let heads = bucket(rows) * op.heads;
                let parts = heads * self.splits(op, rows, usize::MAX);
                let needs = [4 * parts * op.head_dim, 8 * parts, 4 * heads];
                (0..3).for_each(|i| most[i] = most[i].max(needs[i]));
            }
        }
        most
    }

    /// Threadgroups that share the keys of a head, for so many positions.
    fn splits(&self, op: &Attention, rows: usize, length: usize) -> usize {
        let busy = 2 * self.facts.processors as usize / (op.kv_heads * rows).max(1);
        busy.min(length.div_ceil(64)).clamp(1, decode::MOST_SPLITS as usize)
    }

    /// The launches of a class.
    pub(super) fn class(
        &self,
        key: &Key,
        layout: &Layout,
        known: &mut Kernels,
    ) -> Result<Vec<Step>> {
        let words = Words::new(key);
        let mut recorder = Recorder { of: self, key, layout, words, known, steps: vec![] };
        for node in &self.program.nodes {
            let rows = node.outputs.first().or(node.inputs.first());
            if rows.is_some_and(|v| recorder.rows(*v) > 0) {
                recorder.node(node)?;
            }
        }
        if let Some(filters) = key.samples {
            recorder.sample(filters)?;
        }
        Ok(recorder.steps)
    }
}

/// One class in the making.
struct Recorder<'a> {
    of: &'a Lowering,
    key: &'a Key,
    layout: &'a Layout,
    words: Words,
    known: &'a mut Kernels,
    steps: Vec<Step>,
}

/// What multiplies: a matrix and its bias, by their numbers.
#[derive(Clone, Copy)]
struct Matrix {
    weight: WeightId,
    bias: Option<WeightId>,
}

/// An operand that is not (always) a value of the Program.
#[derive(Clone)]
struct Operand {
    slot: Slot,
    scalar: Scalar,
}

impl Recorder<'_> {
    fn push(&mut self, kernel: &Kernel, numbers: Numbers, bound: &[(&str, Slot)]) -> Result<()> {
        let kernel_index = self.known.get(kernel, &numbers, self.of.facts)?;
        let buffers = kernel
            .params
            .iter()
            .filter(|p| matches!(p.kind, ParamKind::Buffer { .. }))
            .map(|p| {
                let slot = bound.iter().find(|(name, _)| *name == p.name);
                let missing = || Error::new(&kernel.name, format!("a buffer `{}`", p.name), "none");
                slot.map(|(_, slot)| slot.clone()).ok_or_else(missing)
            })
            .collect::<Result<_>>()?;
        self.steps.push(Step::Kernel { kernel: kernel_index, numbers, buffers });
        Ok(())
    }

    /// Rows that a value has in this step.
    fn rows(&self, v: ValueId) -> usize {
        match self.of.program.shape(v).rows {
            Rows::Tokens => self.key.tokens,
            Rows::Outputs => self.key.outputs,
        }
    }

    fn width(&self, v: ValueId) -> usize {
        self.of.program.shape(v).width
    }

    fn scalar(&self, v: ValueId) -> Scalar {
        self.of.types(self.key.tokens)[v.0]
    }

    fn value(&self, v: ValueId) -> Slot {
        let types = self.of.types(self.key.tokens);
        Slot::Arena(self.layout.value(&self.of.program, types, v))
    }

    fn operand(&self, v: ValueId) -> Operand {
        Operand { slot: self.value(v), scalar: self.scalar(v) }
    }

    fn weight(&self, w: WeightId) -> Slot {
        Slot::Weight(w.0)
    }

    /// How a matrix is packed, and its rows.
    fn matrix(&self, w: WeightId) -> Result<(Format, u32)> {
        let weight = &self.of.program.weights[w.0];
        let format =
            self.of.formats[w.0].ok_or_else(|| Error::new(&weight.name, "a matrix", "a vector"))?;
        Ok((format, weight.shape[0] as u32))
    }

    fn node(&mut self, node: &Node) -> Result<()> {
        let Node { op, inputs, weights, outputs } = node;
        match op {
            Op::Embed => self.embed(weights[0], outputs[0]),
            Op::RmsNorm { eps } => {
                let len = self.of.program.weights[weights[0].0].shape[0];
                let rows = self.rows(inputs[0]) * (self.width(inputs[0]) / len);
                let (x, y) = (self.operand(inputs[0]), self.value(outputs[0]));
                let y = Operand { slot: y, scalar: x.scalar };
                self.norm(x, weights[0], *eps, rows, len, y)
            }
            Op::Linear => {
                let matrix = Matrix { weight: weights[0], bias: weights.get(1).copied() };
                let (x, y) = (self.operand(inputs[0]), self.operand(outputs[0]));
                let (rows, width) = (self.rows(inputs[0]), self.width(inputs[0]));
                self.linear(x, matrix, rows, width, y)
            }
            Op::Add => self.flat(ops::add::add::<f32>, ops::add::add::<f16>, node),
            Op::Mul => self.flat(ops::mul::mul::<f32>, ops::mul::mul::<f16>, node),
            Op::Silu => {
                let kernel =
                    with_float!(self.scalar(inputs[0]), T => ops::silu::silu_kernel::<T>());
                self.map(&kernel, &[("x", self.value(inputs[0]))], outputs[0])
            }
            Op::Rope(rope) => self.rope(rope, inputs[0], outputs[0]),
            Op::KvWrite { layer } => self.kv_write(*layer, inputs[0], inputs[1]),
            Op::Attention(attention) => self.attention(attention, inputs[0], outputs[0]),
            Op::Select => self.select(inputs[0], outputs[0]),
            Op::Project(project) => self.project(project, inputs[0], weights, outputs),
            Op::GateUp { norm } => self.gate_up(*norm, inputs[0], weights, outputs[0]),
            Op::LinearAdd => {
                let matrix = Matrix { weight: weights[0], bias: weights.get(1).copied() };
                self.linear_add(inputs[0], inputs[1], matrix, outputs[0])
            }
            Op::RopeWrite(write) => self.rope_write(write, inputs, weights, outputs[0]),
        }
    }

    /// Chooses a token from the logits of one row, and makes it the next step's.
    fn sample(&mut self, filters: bool) -> Result<()> {
        let logits = self.of.program.results[0];
        let vocab = self.width(logits);
        let numbers = Numbers::new().with("rows", 1).with("vocab", vocab as u32);
        let of = |name, part| (name, Slot::Sampling(part));
        let (keys, peaks) = (of("keys", Sampling::Keys), of("peaks", Sampling::Peaks));
        let (bins, settings) = (of("bins", Sampling::Bins), of("settings", Sampling::Settings));
        let history = of("history", Sampling::History);
        let logits = ("logits", self.value(logits));
        let (keys, peaks) = (&keys, &peaks);
        let adjusted = [
            logits.clone(),
            settings.clone(),
            history.clone(),
            of("biases", Sampling::Biases),
            keys.clone(),
            peaks.clone(),
            bins.clone(),
        ];
        self.push(&kernels::adjust::<f32>(), numbers.clone(), &adjusted)?;
        let cuts = of("cuts", Sampling::Cuts);
        if filters {
            let mut bound = vec![keys.clone(), peaks.clone(), settings.clone(), bins];
            self.push(&kernels::weigh(), numbers.clone(), &bound)?;
            let schedule = if vocab > 8192 { kernels::WIDE } else { kernels::NARROW };
            bound.extend([of("list", Sampling::List), cuts.clone()]);
            self.push(&kernels::cut(schedule), numbers.clone(), &bound)?;
        }
        let bound = [
            keys.clone(),
            peaks.clone(),
            settings.clone(),
            cuts,
            of("totals", Sampling::Totals),
            of("arrived", Sampling::Arrived),
            of("tokens", Sampling::Picked),
        ];
        self.push(&kernels::draw(), numbers.clone(), &bound)?;
        let bound = [
            logits,
            of("picked", Sampling::Picked),
            of("spans", Sampling::Spans),
            ("tokens", Slot::Words(self.words.tokens.clone())),
            ("positions", Slot::Words(self.words.positions.clone())),
            settings,
            history,
            of("mail", Sampling::Mail),
            of("sums", Sampling::Sums),
            of("arrived", Sampling::Arrived),
        ];
        self.push(&kernels::advance(), numbers, &bound)
    }

    fn embed(&mut self, table: WeightId, y: ValueId) -> Result<()> {
        let (format, _) = self.matrix(table)?;
        let kernel = match format {
            Format::Dense(scalar) => {
                with_float!(scalar, T => ops::embed::embed::<T, f32>())
            }
            packed => ops::embed::embed_packed::<f32>(packed),
        };
        let numbers =
            Numbers::new().with("rows", self.rows(y) as u32).with("width", self.width(y) as u32);
        let tokens = Slot::Words(self.words.tokens.clone());
        let bound = [("tokens", tokens), ("table", self.weight(table)), ("y", self.value(y))];
        self.push(&kernel, numbers, &bound)
    }

    fn select(&mut self, x: ValueId, y: ValueId) -> Result<()> {
        let kernel = with_float!(self.scalar(x), T => ops::select::select_rows::<T>());
        let numbers =
            Numbers::new().with("rows", self.rows(y) as u32).with("width", self.width(y) as u32);
        let picks = Slot::Words(self.words.outputs.clone());
        self.push(&kernel, numbers, &[("picks", picks), ("x", self.value(x)), ("y", self.value(y))])
    }

    fn norm(
        &mut self,
        x: Operand,
        weight: WeightId,
        eps: f32,
        rows: usize,
        width: usize,
        y: Operand,
    ) -> Result<()> {
        let team = if width <= 512 { Team::Simd } else { Team::Group };
        let kernel = with_float!(x.scalar, T => with_float!(y.scalar, Y => {
            rms_norm::<T, f32, Y>(team)
        }));
        let numbers = Numbers::new()
            .with("rows", rows as u32)
            .with("width", width as u32)
            .with_f32("eps", eps);
        self.push(
            &kernel,
            numbers,
            &[("x", x.slot), ("weight", self.weight(weight)), ("y", y.slot)],
        )
    }

    /// An operation on two values of one type and shape.
    fn flat(&mut self, f32s: fn() -> Kernel, f16s: fn() -> Kernel, node: &Node) -> Result<()> {
        let [a, b] = [node.inputs[0], node.inputs[1]];
        let kernel = if self.scalar(a) == Scalar::F16 { f16s() } else { f32s() };
        self.map(&kernel, &[("a", self.value(a)), ("b", self.value(b))], node.outputs[0])
    }

    /// An element-wise kernel over all of a value.
    fn map(&mut self, kernel: &Kernel, from: &[(&str, Slot)], y: ValueId) -> Result<()> {
        let n = self.rows(y) * self.width(y);
        let bound = [from, &[("y", self.value(y))]].concat();
        self.push(kernel, Numbers::new().with("n", n as u32), &bound)
    }

    fn rope(&mut self, rope: &Rope, x: ValueId, y: ValueId) -> Result<()> {
        let kernel = with_float!(self.scalar(x), T => ops::rope::rope::<T>(rope.pairing));
        let numbers = Numbers::new()
            .with("tokens", self.rows(x) as u32)
            .with("heads", (self.width(x) / rope.head_dim) as u32)
            .with("head_dim", rope.head_dim as u32)
            .with("pairs", rope.frequencies.len() as u32)
            .with_f32("magnitude", rope.magnitude);
        let bound = [
            ("x", self.value(x)),
            ("positions", Slot::Words(self.words.positions.clone())),
            ("frequencies", self.frequencies(rope)),
            ("y", self.value(y)),
        ];
        self.push(&kernel, numbers, &bound)
    }

    fn frequencies(&self, rope: &Rope) -> Slot {
        Slot::Frequencies(self.of.ropes.iter().position(|r| r == rope).unwrap_or(0))
    }

    /// What every kernel binds that reads or writes a layer's cache.
    fn cache(&self, layer: usize) -> (Numbers, Vec<(&'static str, Slot)>) {
        let group = self.of.groups[layer];
        let numbers = Numbers::new()
            .with("stride", self.key.strides[group] as u32)
            .with("block", BLOCK_TOKENS as u32)
            .with("kv_heads", self.of.program.layers[layer].kv_heads as u32);
        let bound = vec![
            ("positions", Slot::Words(self.words.positions.clone())),
            ("sequences", Slot::Words(self.words.sequences.clone())),
            ("table", Slot::Words(self.words.tables[group].clone())),
            ("keys", Slot::Keys(layer)),
            ("values", Slot::Values(layer)),
        ];
        (numbers, bound)
    }

    fn kv_write(&mut self, layer: usize, k: ValueId, v: ValueId) -> Result<()> {
        let kernel = with_float!(self.scalar(k), T => {
            with_float!(self.of.half, C => ops::kv_write::kv_write::<T, C>())
        });
        let (numbers, mut bound) = self.cache(layer);
        let numbers = numbers
            .with("tokens", self.rows(k) as u32)
            .with("head_dim", self.of.program.layers[layer].head_dim as u32);
        bound.extend([("k", self.value(k)), ("v", self.value(v))]);
        self.push(&kernel, numbers, &bound)
    }

    fn rope_write(
        &mut self,
        write: &RopeWrite,
        inputs: &[ValueId],
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let rows = self.rows(y);
        let variant = Variant {
            pairing: write.rope.pairing,
            q_norm: write.q_norm.is_some(),
            k_norm: write.k_norm.is_some(),
            schedule: if rows > FEW { rope_write::PROMPT } else { rope_write::DECODE },
        };
        let kernel = with_float!(self.scalar(inputs[0]), T => with_float!(self.scalar(y), Y => {
            with_float!(self.of.half, C => rope_write::<T, Y, f32, C>(variant))
        }));
        let (numbers, mut bound) = self.cache(write.layer);
        let head_dim = write.rope.head_dim;
        let mut numbers = numbers
            .with("tokens", rows as u32)
            .with("heads", (self.width(inputs[0]) / head_dim) as u32)
            .with("head_dim", head_dim as u32)
            .with("pairs", write.rope.frequencies.len() as u32)
            .with_f32("magnitude", write.rope.magnitude);
        bound.extend([
            ("q", self.value(inputs[0])),
            ("k", self.value(inputs[1])),
            ("v", self.value(inputs[2])),
            ("y", self.value(y)),
            ("frequencies", self.frequencies(&write.rope)),
        ]);
        let mut weights = weights.iter();
        for (buffer, constant, eps) in
            [("q_norm", "q_eps", write.q_norm), ("k_norm", "k_eps", write.k_norm)]
        {
            if let (Some(eps), Some(weight)) = (eps, eps.and_then(|_| weights.next())) {
                numbers = numbers.with_f32(constant, eps);
                bound.push((buffer, self.weight(*weight)));
            }
        }
        self.push(&kernel, numbers, &bound)
    }

    fn attention(&mut self, op: &Attention, q: ValueId, y: ValueId) -> Result<()> {
        let form = ops::attention::Form {
            head_dim: op.head_dim as u32,
            group: (op.heads / op.kv_heads) as u32,
            window: op.window.is_some(),
            softcap: false,
            sinks: false,
        };
        let rows = self.rows(q);
        let (numbers, mut bound) = self.cache(op.layer);
        let mut numbers = numbers.with_f32("scale", op.scale);
        if let Some(window) = op.window {
            numbers = numbers.with("window", u32::try_from(window).unwrap_or(u32::MAX));
        }
        bound.extend([("q", self.value(q)), ("y", self.value(y))]);
        // The matrix units take 16 elements at a time, of 16 bits.
        if rows > FEW && !self.of.exact() && op.head_dim.is_multiple_of(16) && op.head_dim <= 256 {
            let head_dim = form.head_dim;
            let roomy = self.of.facts.shared >= 100 << 10;
            let tiling = if roomy { Tiling::large(head_dim) } else { Tiling::small(head_dim) };
            let kernel = attention_prefill::<f16>(form, tiling);
            let numbers =
                numbers.with("tokens", rows as u32).with("longest", rows as u32).with("batch", 1);
            bound.push(("starts", Slot::Words(self.words.starts.clone())));
            return self.push(&kernel, numbers, &bound);
        }
        let stages = if self.of.facts.shared >= 100 << 10 { decode::STAGES } else { 0 };
        let kernel = with_float!(self.scalar(q), T => {
            with_float!(self.of.half, C => attention_decode::<T, C>(form, stages))
        });
        let splits = self.of.splits(op, rows, self.key.length);
        let numbers = numbers.with("rows", rows as u32).with("splits", splits as u32);
        let scratch = ["partial", "stats", "counters"].into_iter().enumerate();
        bound.extend(scratch.map(|(i, name)| (name, Slot::Scratch(i))));
        self.push(&kernel, numbers, &bound)
    }

    /// How a product of few rows is shared.
    fn few(
        &self,
        formats: &[Format],
        width: usize,
        out: u32,
        rows: u32,
        x: Scalar,
        pair: bool,
    ) -> linear::Schedule {
        let int8 = !self.of.exact();
        let cols = width as u32;
        linear::Schedule::pick(&Task { formats, cols, out, rows, x, pair, int8 })
    }

    fn linear(
        &mut self,
        x: Operand,
        matrix: Matrix,
        rows: usize,
        width: usize,
        y: Operand,
    ) -> Result<()> {
        let (format, out) = self.matrix(matrix.weight)?;
        if self.is_vendors(matrix, rows, width, y.scalar)? {
            return self.product(x, matrix.weight, rows, width, None, y);
        }
        let mut numbers = Numbers::new().with("width", width as u32).with("out", out);
        let mut bound = vec![("x", x.slot), ("y", y.slot), ("weight", self.weight(matrix.weight))];
        bound.extend(matrix.bias.map(|b| ("bias", self.weight(b))));
        let bias = matrix.bias.is_some();
        let kernel = if rows <= FEW {
            let few = bucket(rows) as u32;
            let schedule = self.few(&[format], width, out, few, x.scalar, false);
            numbers.set("groups", schedule.groups(out, self.of.facts.processors));
            with_float!(x.scalar, X => with_float!(y.scalar, Y => {
                gemv::<X, Y>(format, bias, few, schedule)
            }))
        } else {
            let operand = if self.of.exact() { Scalar::F32 } else { self.of.wide };
            let Facts { shared, processors, .. } = self.of.facts;
            let schedule =
                gemm::Schedule::pick((rows as u32, out), operand, format, shared, processors);
            numbers.set("rows", rows as u32);
            with_float!(x.scalar, X => with_float!(y.scalar, Y => with_float!(operand, T => {
                gemm::<X, T, Y>(format, bias, schedule)
            })))
        };
        self.push(&kernel, numbers, &bound)
    }

    /// Whether a product is one for the vendor's library: of many rows, so many that packed weights are worth unpacking.
    fn is_vendors(&self, matrix: Matrix, rows: usize, width: usize, y: Scalar) -> Result<bool> {
        let (format, out) = self.matrix(matrix.weight)?;
        let Some(unpack) = self.of.facts.products else { return Ok(false) };
        let packed = format != Format::Dense(self.of.wide);
        let least = if packed { unpack } else { FEW + 1 };
        // The head's matrix, of which few rows are wanted, is not worth the room.
        let room = !packed || out as usize * width <= self.of.unpacked().0;
        let fits = room && out.is_multiple_of(8) && (y == Scalar::F32 || y == self.of.wide);
        Ok(!self.of.exact() && fits && rows >= least && matrix.bias.is_none())
    }

    /// The vendor's product, plus `add`, of operands that are first made what it takes.
    fn product(
        &mut self,
        x: Operand,
        weight: WeightId,
        rows: usize,
        width: usize,
        add: Option<Slot>,
        y: Operand,
    ) -> Result<()> {
        let (format, out) = self.matrix(weight)?;
        let wide = self.of.wide;
        let x = if x.scalar == wide {
            x.slot
        } else {
            let start = self.layout.scratch[0].start;
            let cast = Slot::Arena(start..start + rows * width * wide.bytes());
            let format = Format::Dense(x.scalar);
            self.unpack(format, x.slot, rows, width, cast.clone())?;
            cast
        };
        let w = if format == Format::Dense(wide) {
            self.weight(weight)
        } else {
            let to = Slot::Unpacked(out as usize * width * wide.bytes());
            self.unpack(format, self.weight(weight), out as usize, width, to.clone())?;
            to
        };
        let shape = ProductShape {
            rows: rows as u32,
            out,
            width: width as u32,
            operand: wide,
            result: y.scalar,
            adds: add.is_some(),
        };
        self.steps.push(Step::Product { shape, x, w, add, y: y.slot });
        Ok(())
    }

    /// A matrix in the type of the vendor's operands: what embeds all its rows, in order.
    fn unpack(
        &mut self,
        format: Format,
        from: Slot,
        rows: usize,
        width: usize,
        to: Slot,
    ) -> Result<()> {
        let kernel = with_float!(self.of.wide, Y => match format {
            Format::Dense(scalar) => with_float!(scalar, T => ops::embed::embed::<T, Y>()),
            packed => ops::embed::embed_packed::<Y>(packed),
        });
        let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
        let bound = [("tokens", Slot::Numbers(rows)), ("table", from), ("y", to)];
        self.push(&kernel, numbers, &bound)
    }

    /// An operand in the arena's scratch, of the type of products of many rows where there are many.
    fn scratch(&self, i: usize, elements: usize) -> Operand {
        let many = self.key.tokens > FEW && !self.of.exact();
        let scalar = if many { self.of.wide } else { Scalar::F32 };
        let start = self.layout.scratch[i].start;
        Operand { slot: Slot::Arena(start..start + scalar.bytes() * elements), scalar }
    }

    /// The rows of `x` as projections take them: normed where a norm is in front, which many rows need done first.
    fn normed(&mut self, norm: Option<(f32, WeightId)>, x: ValueId) -> Result<Operand> {
        let Some((eps, weight)) = norm else { return Ok(self.operand(x)) };
        let (rows, width) = (self.rows(x), self.width(x));
        let y = self.scratch(0, rows * width);
        self.norm(self.operand(x), weight, eps, rows, width, y.clone())?;
        Ok(y)
    }

    fn project(
        &mut self,
        op: &Project,
        x: ValueId,
        weights: &[WeightId],
        outputs: &[ValueId],
    ) -> Result<()> {
        let (rows, width) = (self.rows(x), self.width(x));
        let matrices: Vec<Matrix> = op
            .projections()
            .map(|p| Matrix { weight: weights[p.weight], bias: p.bias.map(|b| weights[b]) })
            .collect();
        let norm = op.norm.map(|eps| (eps, weights[0]));
        if rows > FEW {
            let x = self.normed(norm, x)?;
            for (&matrix, &y) in matrices.iter().zip(outputs) {
                self.linear(x.clone(), matrix, rows, width, self.operand(y))?;
            }
            return Ok(());
        }
        let few = bucket(rows) as u32;
        let shapes: Vec<(Format, u32)> =
            matrices.iter().map(|m| self.matrix(m.weight)).collect::<Result<_>>()?;
        let formats: Vec<Format> = shapes.iter().map(|s| s.0).collect();
        let out = shapes.iter().map(|s| s.1).sum();
        let schedule = self.few(&formats, width, out, few, self.scalar(x), false);
        let mut numbers = Numbers::new()
            .with("width", width as u32)
            .with("groups", schedule.groups(out, self.of.facts.processors));
        let names: Vec<[String; 4]> = (0..matrices.len())
            .map(|j| ["out", "y", "weight", "bias"].map(|part| format!("{part}{j}")))
            .collect();
        let mut bound = vec![("x", self.value(x))];
        if let Some((eps, weight)) = norm {
            numbers = numbers.with_f32("eps", eps);
            bound.push(("norm", self.weight(weight)));
        }
        let mut kinds = Vec::new();
        for (j, ([out, y, weight, bias], matrix)) in names.iter().zip(&matrices).enumerate() {
            numbers.set(out, shapes[j].1);
            bound.push((y, self.value(outputs[j])));
            bound.push((weight, self.weight(matrix.weight)));
            bound.extend(matrix.bias.map(|b| (bias.as_str(), self.weight(b))));
            kinds.push((shapes[j].0, matrix.bias.is_some()));
        }
        let kernel = with_float!(self.scalar(x), X => with_float!(self.scalar(outputs[0]), Y => {
            project::<X, Y>(&kinds, norm.is_some(), few, schedule)
        }));
        self.push(&kernel, numbers, &bound)
    }

    fn gate_up(
        &mut self,
        norm: Option<f32>,
        x: ValueId,
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let (rows, width) = (self.rows(x), self.width(x));
        let norm = norm.map(|eps| (eps, weights[0]));
        let [gate, up] = [weights[weights.len() - 2], weights[weights.len() - 1]];
        let ((format, out), (other, _)) = (self.matrix(gate)?, self.matrix(up)?);
        if rows > FEW || format != other {
            let x = self.normed(norm, x)?;
            let elements = rows * out as usize;
            // Few rows are computed in powers of two.
            let room = bucket(rows) * out as usize;
            let [a, b] = [self.scratch(1, room), self.scratch(2, room)];
            for (weight, y) in [(gate, &a), (up, &b)] {
                let matrix = Matrix { weight, bias: None };
                self.linear(x.clone(), matrix, rows, width, y.clone())?;
            }
            let bound = [("gate", a.slot), ("up", b.slot), ("y", self.value(y))];
            let numbers = Numbers::new().with("n", elements as u32);
            let kernel = with_float!(self.scalar(y), T => ops::silu_mul::silu_mul::<T>());
            return self.push(&kernel, numbers, &bound);
        }
        let few = bucket(rows) as u32;
        let schedule = self.few(&[format], width, out, few, self.scalar(x), true);
        let mut numbers = Numbers::new()
            .with("width", width as u32)
            .with("out", out)
            .with("groups", schedule.groups(out, self.of.facts.processors));
        let mut bound = vec![
            ("x", self.value(x)),
            ("y", self.value(y)),
            ("gate", self.weight(gate)),
            ("up", self.weight(up)),
        ];
        if let Some((eps, weight)) = norm {
            numbers = numbers.with_f32("eps", eps);
            bound.push(("norm", self.weight(weight)));
        }
        let kernel = with_float!(self.scalar(x), X => with_float!(self.scalar(y), Y => {
            ops::gate_up::gate_up::<X, Y>(format, norm.is_some(), few, schedule)
        }));
        self.push(&kernel, numbers, &bound)
    }

    fn linear_add(
        &mut self,
        x: ValueId,
        residual: ValueId,
        matrix: Matrix,
        y: ValueId,
    ) -> Result<()> {
        let (rows, width) = (self.rows(x), self.width(x));
        let (format, out) = self.matrix(matrix.weight)?;
        if rows > FEW {
            let to = self.operand(y);
            if self.is_vendors(matrix, rows, width, to.scalar)? {
                let add = Some(self.value(residual));
                return self.product(self.operand(x), matrix.weight, rows, width, add, to);
            }
            let start = self.layout.scratch[1].start;
            let slot = Slot::Arena(start..start + 4 * rows * out as usize);
            let sum = Operand { slot, scalar: Scalar::F32 };
            self.linear(self.operand(x), matrix, rows, width, sum.clone())?;
            let bound = [("a", sum.slot), ("b", self.value(residual))];
            return self.map(&ops::add::add::<f32>(), &bound, y);
        }
        let few = bucket(rows) as u32;
        let schedule = self.few(&[format], width, out, few, self.scalar(x), false);
        let numbers = Numbers::new()
            .with("width", width as u32)
            .with("out", out)
            .with("groups", schedule.groups(out, self.of.facts.processors));
        let mut bound = vec![
            ("x", self.value(x)),
            ("residual", self.value(residual)),
            ("y", self.value(y)),
            ("weight", self.weight(matrix.weight)),
        ];
        bound.extend(matrix.bias.map(|b| ("bias", self.weight(b))));
        let kernel = with_float!(self.scalar(x), X => with_float!(self.scalar(y), Y => {
            ops::linear_add::linear_add::<X, Y>(format, matrix.bias.is_some(), few, schedule)
        }));
        self.push(&kernel, numbers, &bound)
    }
}
