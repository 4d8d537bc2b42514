//! Lowers the operations of a training Program to launches.
//!
//! Products go to the vendor's library if it exists, operands have 16 bits and rows are whole
//! vectors; all others go to `matmul`. Matrices that are packed, or of another type than
//! activations, are unpacked before each product.

use std::collections::BTreeSet;
use std::ops::Range;

use formats::{Error, ErrorKind, Hint, Result, Setting};
use ops::attention::prefill::{PrefillTiling, attention_packed};
use ops::gradient::attend::{kernels as attend, tiles};
use ops::gradient::matmul::{self, matmul};
use ops::gradient::{CrossEntropy, Gradient, cross_entropy, gated_norm, norms, products, trains};
use ops::operation::{Bound, Launches, Operand};
use ops::packed::Format;
use ops::rope::MOST_PAIRS;
use ops::{Attention, GatedNorm, Op, Rope, embed, rms_norm};
use program::{Node, Program, ValueId, WeightId};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::ALIGN;
use super::layout::{Counts, Layout, Words, types};
use super::{delta, experts, scan};
use crate::gpu::kernels::Kernels;
use crate::gpu::lower::{Slot, Step, TypedSlot};
use crate::gpu::{Facts, ProductShape};

/// Most logits of the head held at once, and the least and most rows of them.
const PRODUCTS: usize = 1 << 27;
const ROWS: [usize; 2] = [16, 4096];

/// A Program and everything that its lowering depends on.
pub(super) struct Lowering {
    pub(super) program: Program,
    pub(super) facts: Facts,
    /// The type of activations and of the matrices multiplied with them.
    pub(super) scalar: Scalar,
    /// The types of all values.
    pub(super) types: Vec<Scalar>,
    /// The format of each matrix.
    pub(super) formats: Vec<Option<Format>>,
    /// Trained weights in the order of their gradients, with their byte ranges.
    pub(super) trained: Vec<(WeightId, Range<usize>)>,
    /// Distinct rotations of all Programs.
    pub(super) ropes: Vec<Rope>,
}

/// Refuses the first operation that has no training kernels.
fn check(program: &Program) -> Result<()> {
    for node in &program.nodes {
        let turns = node.op.rope().is_none_or(|rope| rope.frequencies.len() <= MOST_PAIRS as usize);
        let experts = match &node.op {
            Op::Experts(of) => Some(of),
            Op::Gradient(Gradient::ExpertsBackward(of)) => Some(&of.of),
            Op::Gradient(Gradient::AdaptedExperts(of)) => Some(&of.of),
            Op::Gradient(Gradient::AdaptedExpertsBackward(of)) => Some(&of.of),
            _ => None,
        };
        experts::check(program, node)?;
        let one_row = experts.is_none_or(|of| !of.weighs_inputs || of.routing.used == 1);
        let known = trains(&node.op) && turns && one_row;
        if !known {
            let expected = "operations that a GPU has in training";
            let error = Error::new("train", expected, node.op.name()).of(ErrorKind::Unsupported);
            return Err(error.hint(Hint::set(Setting::Place, "cpu")));
        }
        match &node.op {
            Op::Gradient(Gradient::PackedDelta(of)) => delta::check(&of.0)?,
            Op::Gradient(Gradient::PackedScan(of)) => scan::check(&of.0)?,
            _ => {}
        }
    }
    Ok(())
}

impl Lowering {
    /// # Errors
    /// An operation without training kernels on GPUs.
    pub(super) fn new(
        program: Program,
        facts: Facts,
        scalar: Scalar,
        formats: Vec<Option<Format>>,
        trained: Vec<(WeightId, Range<usize>)>,
    ) -> Result<Lowering> {
        check(&program)?;
        let own = program.results.get(1..).unwrap_or_default();
        let repeats = (1..own.len()).any(|i| own[..i].contains(&own[i]));
        if (!own.is_empty() && own.len() != trained.len()) || repeats {
            let expected = format!("a gradient of its own for each of {} weights", trained.len());
            return Err(Error::new("train", expected, format!("{} results", own.len())));
        }
        let types = types(&program, scalar);
        Ok(Lowering { program, facts, scalar, types, formats, trained, ropes: Vec::new() })
    }

    /// The gradients among the results, with their offsets in the arena.
    pub(super) fn gradients(&self) -> Vec<(ValueId, usize)> {
        let own = self.program.results.iter().skip(1).zip(&self.trained);
        own.map(|(v, (_, range))| (*v, range.start)).collect()
    }

    /// Whether a value is a result or an operation reads it.
    pub(super) fn reads(&self, v: ValueId) -> bool {
        let Program { results, nodes, .. } = &self.program;
        results.contains(&v) || nodes.iter().any(|node| node.inputs.contains(&v))
    }

    /// Bytes of all gradients.
    pub(super) fn gradient_bytes(&self) -> usize {
        self.trained
            .iter()
            .map(|(_, range)| range.end)
            .max()
            .map_or(0, |end| end.next_multiple_of(ALIGN))
    }

    /// Bytes of the largest matrix to unpack, and most rows of a matrix to unpack or round.
    pub(super) fn unpacked(&self) -> [usize; 2] {
        let mut most = [0; 2];
        // Experts' matrices are multiplied as they are stored.
        let mixtures =
            self.program.nodes.iter().filter(|node| self.program.mixture(node).is_some());
        let stacked: BTreeSet<usize> =
            mixtures.flat_map(|node| node.weights.iter().map(|weight| weight.0)).collect();
        for (id, (weight, format)) in self.program.weights.iter().zip(&self.formats).enumerate() {
            let (&[rows, columns], Some(format)) = (weight.shape.as_slice(), format) else {
                continue;
            };
            let trained = self.trained.iter().any(|(own, _)| own.0 == id);
            let unpacked = *format != Format::Dense(self.scalar) && !stacked.contains(&id);
            if unpacked {
                most[0] = most[0].max(rows * columns * self.scalar.bytes());
            }
            if unpacked || trained {
                most[1] = most[1].max(rows);
            }
        }
        most
    }

    /// Rows of logits that are computed at once.
    fn chunk(&self, head: WeightId, rows: usize) -> usize {
        let vocab = self.program.weights[head.0].shape[0];
        (PRODUCTS / vocab).clamp(ROWS[0], ROWS[1]).min(rows.max(1))
    }

    /// Number of rows of a norm, each as wide as its weight.
    fn norm_rows(&self, node: &Node, counts: Counts) -> usize {
        let shape = self.program.shape(node.inputs[0]);
        let width: usize = self.program.weights[node.weights[0].0].shape.iter().product();
        counts.rows(shape.rows) * (shape.width / width.max(1))
    }

    /// Bytes of one number for each row of a norm.
    fn statistics(&self, node: &Node, counts: Counts) -> usize {
        (Scalar::F32.bytes() * self.norm_rows(node, counts)).next_multiple_of(ALIGN)
    }

    /// Bytes of scratch: the head's logits, their gradients, and one number for each head or norm
    /// of every row, or two for each norm with a mean.
    pub(super) fn scratch(&self, counts: Counts) -> [usize; 3] {
        let mut most = [0; 3];
        for node in &self.program.nodes {
            match &node.op {
                Op::Gradient(Gradient::CrossEntropy(of)) => {
                    let vocab = self.program.weights[node.weights[0].0].shape[0];
                    let elements = self.chunk(node.weights[0], counts.outputs) * vocab;
                    most[0] = most[0].max(Scalar::F32.bytes() * elements);
                    let back = if of.hidden { self.scalar.bytes() } else { 0 };
                    most[1] = most[1].max(back * elements);
                }
                Op::Gradient(Gradient::AttendBackward(of)) => {
                    most[2] = most[2].max(Scalar::F32.bytes() * counts.tokens * of.0.heads);
                }
                Op::Gradient(Gradient::RmsNormBackward(of)) if of.weight => {
                    most[2] = most[2].max(self.statistics(node, counts));
                }
                Op::Gradient(Gradient::LayerNormBackward(of)) if of.weight => {
                    most[2] = most[2].max(2 * self.statistics(node, counts));
                }
                Op::Gradient(Gradient::GatedNormBackward(of)) if of.weight => {
                    let rows = counts.rows(self.program.shape(node.inputs[0]).rows);
                    most[2] = most[2].max(Scalar::F32.bytes() * rows * of.of.groups);
                }
                _ => {}
            }
        }
        most
    }

    /// The launches of a class, and the operation of each.
    ///
    /// # Errors
    /// A kernel that cannot be built.
    pub(super) fn steps(
        &self,
        counts: Counts,
        layout: &Layout,
        known: &mut Kernels,
    ) -> Result<(Vec<Step>, Vec<&'static str>)> {
        let words = Words::new(counts);
        let mut recorder = Recorder { of: self, counts, layout, words, known, steps: Vec::new() };
        let mut names = Vec::new();
        for node in &self.program.nodes {
            recorder.node(node)?;
            names.resize(recorder.steps.len(), node.op.name());
        }
        Ok((recorder.steps, names))
    }
}

/// The launches of one class, while they are recorded.
pub(super) struct Recorder<'a> {
    pub(super) of: &'a Lowering,
    pub(super) counts: Counts,
    pub(super) layout: &'a Layout,
    pub(super) words: Words,
    known: &'a mut Kernels,
    steps: Vec<Step>,
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
        self.recorder.count(self.node.value(operand))
    }

    fn width(&self, operand: Operand) -> usize {
        self.recorder.width(self.node.value(operand))
    }

    fn scalar(&self, operand: Operand) -> Scalar {
        self.recorder.of.types[self.node.value(operand).0]
    }

    fn weight(&self, index: usize) -> Option<&[usize]> {
        let weight = self.node.weights.get(index)?;
        Some(&self.recorder.of.program.weights[weight.0].shape)
    }

    fn format(&self, weight: usize) -> Result<Format> {
        self.recorder.format(self.node.weights[weight])
    }

    fn push(
        &mut self,
        kernel: Recipe<'static>,
        numbers: Numbers,
        bound: &[(&str, Bound)],
    ) -> Result<()> {
        let recorder = &*self.recorder;
        let words = &recorder.words;
        let slot = |bound: Bound| match bound {
            Bound::Value(operand) => recorder.value(self.node.value(operand)).slot(),
            Bound::Weight(index) => Slot::Weight(self.node.weights[index].0),
            Bound::Frequencies => {
                let rope = self.node.op.rope();
                let ropes = &recorder.of.ropes;
                Slot::Frequencies(ropes.iter().position(|r| Some(r) == rope).unwrap_or(0))
            }
            Bound::Tokens => Slot::Words(words.tokens.clone()),
            Bound::Positions => Slot::Words(words.positions.clone()),
            Bound::Picks => Slot::Words(words.picks.clone()),
            Bound::Targets => Slot::Words(words.targets.clone()),
            Bound::Counts => Slot::Words(words.counts.clone()),
            Bound::Draws => Slot::Words(words.draws.clone()),
            Bound::Firsts => Slot::Words(words.first.clone()),
            Bound::Ends => Slot::Words(words.ends.clone()),
        };
        let bound: Vec<(&str, Slot)> =
            bound.iter().map(|&(name, bound)| (name, slot(bound))).collect();
        self.recorder.push(kernel, numbers, &bound)
    }
}

/// A matrix in the arena or among the weights, with its element type.
#[derive(Clone)]
pub(super) struct Matrix {
    /// Exactly the matrix's bytes.
    slot: Slot,
    scalar: Scalar,
}

impl Matrix {
    pub(super) fn slot(&self) -> Slot {
        self.slot.clone()
    }

    /// A range of its elements; a weight is returned whole.
    fn part(&self, first: usize, elements: usize) -> Matrix {
        let Slot::Arena(range) = &self.slot else { return self.clone() };
        let start = range.start + first * self.scalar.bytes();
        let slot = Slot::Arena(start..start + elements * self.scalar.bytes());
        Matrix { slot, scalar: self.scalar }
    }
}

impl From<Matrix> for TypedSlot {
    fn from(Matrix { slot, scalar }: Matrix) -> TypedSlot {
        TypedSlot { slot, scalar }
    }
}

/// An operand of a product; if `turned`, it is stored as `[terms, rows]`.
struct Side {
    matrix: Matrix,
    turned: bool,
}

/// The addend of a product.
#[derive(Default)]
struct Added {
    bias: Option<WeightId>,
    matrix: Option<Slot>,
}

impl Recorder<'_> {
    pub(super) fn push(
        &mut self,
        recipe: Recipe,
        numbers: Numbers,
        bound: &[(&str, Slot)],
    ) -> Result<()> {
        let step = self.known.step(recipe, numbers, self.of.facts, bound)?;
        self.steps.push(step);
        Ok(())
    }

    pub(super) fn count(&self, v: ValueId) -> usize {
        self.counts.rows(self.of.program.shape(v).rows)
    }

    fn width(&self, v: ValueId) -> usize {
        self.of.program.shape(v).width
    }

    pub(super) fn value(&self, v: ValueId) -> Matrix {
        let slot = Slot::Arena(self.layout.value(self.of, v));
        Matrix { slot, scalar: self.of.types[v.0] }
    }

    pub(super) fn format(&self, weight: WeightId) -> Result<Format> {
        let named = || Error::new(&self.of.program.weights[weight.0].name, "a matrix", "a vector");
        self.of.formats[weight.0].ok_or_else(named)
    }

    /// A matrix in the type of activations, unpacked if it has another.
    fn matrix(&mut self, weight: WeightId) -> Result<Matrix> {
        let (format, scalar) = (self.format(weight)?, self.of.scalar);
        if format == Format::Dense(scalar) {
            return Ok(Matrix { slot: Slot::Weight(weight.0), scalar });
        }
        let &[rows, columns] = self.of.program.weights[weight.0].shape.as_slice() else {
            return Err(Error::new("train", "a matrix", "a vector"));
        };
        let slot = Slot::Unpacked(rows * columns * scalar.bytes());
        let bound = [
            ("tokens", Slot::Numbers(rows)),
            ("table", Slot::Weight(weight.0)),
            ("y", slot.clone()),
        ];
        self.push(embed::kernel(format, scalar), embed::numbers(rows, columns), &bound)?;
        Ok(Matrix { slot, scalar })
    }

    fn node(&mut self, node: &Node) -> Result<()> {
        let first = node.outputs.first().or(node.inputs.first());
        if first.is_some_and(|v| self.count(*v) == 0) {
            return Ok(());
        }
        if node.op.launch(&mut Operands { recorder: self, node })? {
            return Ok(());
        }
        let Node { op, inputs, weights, outputs } = node;
        match op {
            Op::Linear(_) | Op::LinearAdd(_) => {
                let matrix = inputs.get(1).map(|v| self.value(*v).slot());
                let added = Added { bias: weights.get(1).copied(), matrix };
                self.linear(inputs[0], weights[0], false, added, outputs[0])
            }
            Op::Gradient(Gradient::LinearBackward(_) | Gradient::LinearBackwardAdd(_)) => {
                let matrix = inputs.get(1).map(|v| self.value(*v).slot());
                let added = Added { bias: None, matrix };
                self.linear(inputs[0], weights[0], true, added, outputs[0])
            }
            Op::Gradient(Gradient::Outer(_)) => {
                let sizes = [self.width(inputs[0]), self.width(inputs[1]), self.count(inputs[0])];
                let turned = |matrix| Side { matrix, turned: true };
                let (dy, x) = (turned(self.value(inputs[0])), turned(self.value(inputs[1])));
                self.product(sizes, dy, x, Added::default(), self.value(outputs[0]))
            }
            Op::Experts(of) => self.experts_forward((of, None), node),
            Op::Gradient(Gradient::AdaptedExperts(of)) => {
                self.experts_forward((&of.of, Some(&of.factors)), node)
            }
            Op::Gradient(Gradient::ExpertsBackward(of)) => {
                self.experts_backward((&of.of, of.weights, None), node)
            }
            Op::Gradient(Gradient::AdaptedExpertsBackward(of)) => {
                self.experts_backward((&of.of, false, Some(&of.factors)), node)
            }
            Op::Gradient(Gradient::Attend(of)) => self.attend(&of.0, node),
            Op::Gradient(Gradient::AttendBackward(of)) => self.attend_backward(&of.0, node),
            Op::Gradient(Gradient::PackedDelta(of)) => self.delta(&of.0, node),
            Op::Gradient(Gradient::DeltaBackward(of)) => self.delta_backward(&of.0, node),
            Op::Gradient(Gradient::PackedScan(of)) => self.scan(&of.0, node),
            Op::Gradient(Gradient::ScanBackward(of)) => self.scan_backward(&of.0, node),
            Op::Gradient(Gradient::GatedNormBackward(of)) => self.gated_norm_backward(&of.of, node),
            Op::Gradient(Gradient::RmsNormBackward(of)) => {
                self.norm_backward((of.eps, false), node)
            }
            Op::Gradient(Gradient::LayerNormBackward(of)) => {
                self.norm_backward((of.eps, true), node)
            }
            Op::Gradient(Gradient::CrossEntropy(of)) => self.losses(of, node),
            _ => Err(Error::new("train", "an operation that GPUs have", op.name())),
        }
    }

    /// Records the product of a value with a matrix, or with its transpose if `turned`.
    fn linear(
        &mut self,
        x: ValueId,
        weight: WeightId,
        turned: bool,
        added: Added,
        y: ValueId,
    ) -> Result<()> {
        let sizes = [self.count(x), self.width(y), self.width(x)];
        let matrix = match self.format(weight)? {
            // Rounding a router's matrix could select other experts.
            Format::Dense(scalar) if !turned && self.of.types[y.0] != self.of.scalar => {
                Matrix { slot: Slot::Weight(weight.0), scalar }
            }
            _ => self.matrix(weight)?,
        };
        let side = Side { matrix, turned };
        let x = Side { matrix: self.value(x), turned: false };
        self.product(sizes, x, side, added, self.value(y))
    }

    /// Records `y[rows, columns] = sum over terms of a(row, term) b(column, term)`, plus `added`.
    fn product(
        &mut self,
        [rows, columns, terms]: [usize; 3],
        a: Side,
        b: Side,
        added: Added,
        y: Matrix,
    ) -> Result<()> {
        if self.is_vendors([rows, columns, terms], &a, &b, &added, y.scalar) {
            let mut add = added.matrix;
            if let Some(bias) = added.bias {
                // Every row starts as the bias.
                let zeros = Slot::Words(self.words.zeros.start..self.words.zeros.start + 4 * rows);
                let bound = [("tokens", zeros), ("table", Slot::Weight(bias.0)), ("y", y.slot())];
                let kernel = embed::kernel(Format::Dense(Scalar::F32), y.scalar);
                self.push(kernel, embed::numbers(rows, columns), &bound)?;
                add = Some(y.slot());
            }
            let shape = ProductShape {
                rows: rows as u32,
                out: columns as u32,
                width: terms as u32,
                operand: a.matrix.scalar,
                result: y.scalar,
                adds: add.is_some(),
                x_turned: a.turned,
                w_turned: b.turned,
                alike: false,
                tuned: false,
            };
            let (x, w) = (a.matrix.slot, b.matrix.slot);
            self.steps.push(Step::Product { shape, x, w, add, y: y.slot });
            return Ok(());
        }
        let types = matmul::MatmulTypes { a: a.matrix.scalar, b: b.matrix.scalar, y: y.scalar };
        let form = matmul::MatmulForm {
            a_turned: a.turned,
            b_turned: b.turned,
            bias: added.bias.is_some(),
            adds: added.matrix.is_some(),
        };
        let mut bound = vec![("a", a.matrix.slot), ("b", b.matrix.slot), ("y", y.slot)];
        bound.extend(added.bias.map(|bias| ("bias", Slot::Weight(bias.0))));
        bound.extend(added.matrix.map(|matrix| ("add", matrix)));
        let kernel = matmul(types, form, matmul::MatmulTiling::pick(rows, columns));
        self.push(kernel, matmul::numbers([rows, columns, terms]), &bound)
    }

    /// Whether a product suits the vendor's library: 16-bit operands, and rows of whole vectors.
    fn is_vendors(
        &self,
        [rows, columns, terms]: [usize; 3],
        a: &Side,
        b: &Side,
        added: &Added,
        y: Scalar,
    ) -> bool {
        let half = a.matrix.scalar;
        let types = half != Scalar::F32 && half == b.matrix.scalar;
        // Stride of each matrix, in elements.
        let strides =
            [if a.turned { rows } else { terms }, if b.turned { columns } else { terms }, columns];
        let whole = strides.iter().all(|stride| stride.is_multiple_of(8));
        let one = added.bias.is_none() || added.matrix.is_none();
        self.of.facts.products.is_some() && types && whole && one && (y == half || y == Scalar::F32)
    }

    /// Whether the matrix-unit kernels support this attention, which have windows, but no chunks.
    fn on_tiles(&self, of: &Attention) -> bool {
        let halves = self.of.scalar != Scalar::F32 && !of.chunked;
        halves && tiles::takes(of.head_dim, self.of.facts.shared)
    }

    fn attend_numbers(&self, of: &Attention) -> Numbers {
        let Counts { tokens, sequences, longest, .. } = self.counts;
        let numbers = attend::numbers(of, tokens);
        match self.on_tiles(of) {
            true => numbers.with("batch", sequences as u32).with("longest", longest as u32),
            false => numbers,
        }
    }

    fn attend(&mut self, of: &Attention, node: &Node) -> Result<()> {
        let value = |v: ValueId| self.value(v).slot();
        let [q, k, v] = [0, 1, 2].map(|i| value(node.inputs[i]));
        let mut bound =
            vec![("q", q), ("y", value(node.outputs[0])), ("lse", value(node.outputs[1]))];
        let [sinks, slopes] = of.sinks_and_slopes(&node.weights);
        bound.extend(sinks.map(|sinks| ("sinks", Slot::Weight(sinks.0))));
        bound.extend(slopes.map(|slopes| ("slopes", Slot::Weight(slopes.0))));
        let (form, numbers) = (attend::form(of), self.attend_numbers(of));
        if !self.on_tiles(of) {
            bound.extend([("k", k), ("v", v), ("first", Slot::Words(self.words.first.clone()))]);
            return self.push(attend::attend(self.of.scalar, form), numbers, &bound);
        }
        let Words { positions, starts, .. } = self.words.clone();
        bound.extend([("keys", k), ("values", v)]);
        bound.extend([("positions", Slot::Words(positions)), ("starts", Slot::Words(starts))]);
        let Facts { shared, tuned, .. } = self.of.facts;
        let tiling = PrefillTiling::pick(form.head_dim, shared, &tuned.attention);
        self.push(attention_packed(self.of.scalar, form, tiling), numbers, &bound)
    }

    fn attend_backward(&mut self, of: &Attention, node: &Node) -> Result<()> {
        let value = |v: ValueId| self.value(v).slot();
        let (start, items) = (self.layout.along.start, self.counts.tokens * of.heads);
        let along = Slot::Arena(start..start + 4 * items);
        let [q, k, v, y, lse, dy] = [0, 1, 2, 3, 4, 5].map(|i| value(node.inputs[i]));
        let [dq, dk, dv] = [0, 1, 2].map(|i| value(node.outputs[i]));
        let dsinks = node.outputs.get(3).map(|v| value(*v));
        let (form, numbers) = (attend::backward_form(of), self.attend_numbers(of));
        let (scalar, words) = (self.of.scalar, self.words.clone());
        let mut shared = vec![("q", q), ("k", k), ("v", v), ("lse", lse.clone())];
        shared.extend([("dy", dy.clone()), ("along", along.clone())]);
        let [sinks, slopes] = of.sinks_and_slopes(&node.weights);
        shared.extend(slopes.map(|slopes| ("slopes", Slot::Weight(slopes.0))));
        if self.on_tiles(of) {
            let sizes = Numbers::new().with("items", items as u32);
            let sizes = sizes.with("head_dim", of.head_dim as u32);
            let bound = [("y", y), ("dy", dy), ("along", along.clone())];
            self.push(tiles::attend_along(scalar), sizes, &bound)?;
            shared.push(("starts", Slot::Words(words.starts)));
            let queries = [&shared[..], &[("dq", dq)]].concat();
            self.push(tiles::attend_tile_queries(scalar, form), numbers.clone(), &queries)?;
            let keys = [&shared[..], &[("dk", dk), ("dv", dv)]].concat();
            self.push(tiles::attend_tile_keys(scalar, form), numbers, &keys)?;
        } else {
            let first = Slot::Words(words.first);
            let chunks = of.chunked.then(|| ("first", first.clone()));
            let queries = [&shared[..], &[("y", y), ("first", first), ("dq", dq)]].concat();
            self.push(attend::attend_queries(scalar, form), numbers.clone(), &queries)?;
            let ends = Slot::Words(words.ends);
            let mut keys = [&shared[..], &[("ends", ends), ("dk", dk), ("dv", dv)]].concat();
            keys.extend(chunks);
            self.push(attend::attend_keys(scalar, form), numbers, &keys)?;
        }
        let (Some(y), Some(sinks)) = (dsinks, sinks) else { return Ok(()) };
        let sizes = products::numbers(self.counts.tokens, of.heads);
        let bound = [("sinks", Slot::Weight(sinks.0)), ("lse", lse), ("along", along), ("y", y)];
        self.push(attend::attend_sinks(), sizes, &bound)
    }

    /// Records the gradients of a norm with its weight, and its bias if it is `centred`. Those come
    /// first, since the input's may overwrite what all read.
    fn norm_backward(&mut self, (eps, centred): (f32, bool), node: &Node) -> Result<()> {
        let value = |v: ValueId| self.value(v).slot();
        let [x, dy, dx, dweight] =
            [node.inputs[0], node.inputs[1], node.outputs[0], node.outputs[1]].map(value);
        let dbias = node.outputs.get(2).map(|v| value(*v));
        let (weight, scalar) = (node.weights[0], self.of.scalar);
        let width = self.width(node.outputs[1]);
        let rows = self.of.norm_rows(node, self.counts);
        let (start, apart) = (self.layout.along.start, self.of.statistics(node, self.counts));
        let [scales, means] =
            [start, start + apart].map(|start| Slot::Arena(start..start + 4 * rows));
        let means = centred.then_some(("means", means));
        let numbers = rms_norm::launch_numbers(rows, width, eps);
        let mut bound = vec![("x", x.clone()), ("scales", scales.clone())];
        bound.extend(means.clone());
        self.push(norms::norm_scales(scalar, centred), numbers.clone(), &bound)?;
        let mut bound =
            vec![("x", x.clone()), ("dy", dy.clone()), ("scales", scales), ("y", dweight)];
        bound.extend(means);
        let sizes = products::numbers(rows, width);
        self.push(norms::norm_weights(scalar, centred), sizes.clone(), &bound)?;
        if let Some(dbias) = dbias {
            let kernel = products::sum_rows(scalar, Scalar::F32, false);
            self.push(kernel, sizes, &[("x", dy.clone()), ("y", dbias)])?;
        }
        let bound = [("x", x), ("dy", dy), ("weight", Slot::Weight(weight.0)), ("dx", dx)];
        self.push(norms::norm_backward(scalar, rms_norm::team(width), centred), numbers, &bound)
    }

    /// Records the gradients of a gated norm with its weight, whose sums need each group's factor.
    fn gated_norm_backward(&mut self, of: &GatedNorm, node: &Node) -> Result<()> {
        let value = |v: ValueId| self.value(v).slot();
        let [gate, x, dy] = [0, 1, 2].map(|i| value(node.inputs[i]));
        let [dgate, dx, dweight] = [0, 1, 2].map(|i| value(node.outputs[i]));
        let (rows, width) = (self.count(node.inputs[0]), self.width(node.inputs[0]));
        let (start, each, scalar) = (self.layout.along.start, width / of.groups, self.of.scalar);
        let scales = Slot::Arena(start..start + 4 * rows * of.groups);
        let shared = [("gate", gate), ("x", x), ("dy", dy), ("scales", scales)];
        let weight = Slot::Weight(node.weights[0].0);
        let own = [("weight", weight), ("dgate", dgate), ("dx", dx)];
        let bound = [&shared[..], &own].concat();
        let kernel =
            gated_norm::gated_norm_backward(scalar, rms_norm::team(each), of.norm_first, true);
        let numbers = ops::gated_norm::numbers(rows * of.groups, of.groups, each, of.eps);
        self.push(kernel, numbers, &bound)?;
        let bound = [&shared[..], &[("y", dweight)]].concat();
        let numbers = gated_norm::weight_numbers(rows, of.groups, width);
        self.push(gated_norm::gated_norm_weights(scalar), numbers, &bound)
    }

    /// Records losses, some rows at a time: logits are replaced by their gradients, which are
    /// multiplied back.
    fn losses(&mut self, of: &CrossEntropy, node: &Node) -> Result<()> {
        let (x, head, scalar) = (node.inputs[0], node.weights[0], self.of.scalar);
        let (rows, width) = (self.count(x), self.width(x));
        let vocab = self.of.program.weights[head.0].shape[0];
        let each = self.of.chunk(head, rows);
        let matrix = self.matrix(head)?;
        let scratch = |range: &Range<usize>, scalar: Scalar| Matrix {
            slot: Slot::Arena(range.clone()),
            scalar,
        };
        let products = scratch(&self.layout.products, Scalar::F32);
        let slopes = scratch(&self.layout.slopes, scalar);
        let losses = self.value(node.outputs[0]).slot();
        for start in (0..rows).step_by(each) {
            let count = each.min(rows - start);
            let side = |matrix: Matrix, turned| Side { matrix, turned };
            let own = self.value(x).part(start * width, count * width);
            let (products, slopes) =
                (products.part(0, count * vocab), slopes.part(0, count * vocab));
            let added = Added { bias: node.weights.get(1).copied(), matrix: None };
            let (left, right) = (side(own.clone(), false), side(matrix.clone(), false));
            self.product([count, vocab, width], left, right, added, products.clone())?;
            let mut bound = vec![
                ("products", products.slot()),
                ("picks", Slot::Words(self.words.picks.clone())),
                ("targets", Slot::Words(self.words.targets.clone())),
                ("counts", Slot::Words(self.words.counts.clone())),
                ("losses", losses.clone()),
            ];
            bound.extend(of.hidden.then(|| ("slopes", slopes.slot())));
            let gradient = of.hidden.then_some(scalar);
            let kernel = cross_entropy::cross_entropy(gradient, of.cap.is_some());
            let counts = (rows, self.counts.tokens);
            let numbers = cross_entropy::numbers(of, vocab, (start, count), counts);
            self.push(kernel, numbers, &bound)?;
            if of.hidden {
                let dx = self.value(node.outputs[1]).part(start * width, count * width);
                let (left, right) = (side(slopes.clone(), false), side(matrix.clone(), true));
                self.product([count, width, vocab], left, right, Added::default(), dx)?;
            }
            if let Some(dbias) = node.outputs.get(3).filter(|_| of.head) {
                let dbias = self.value(*dbias).slot();
                let mut bound = vec![("x", slopes.slot()), ("y", dbias.clone())];
                bound.extend((start > 0).then_some(("add", dbias)));
                let kernel = products::sum_rows(scalar, Scalar::F32, start > 0);
                self.push(kernel, products::numbers(count, vocab), &bound)?;
            }
            if of.head {
                let dhead = self.value(node.outputs[2]);
                let matrix = (start > 0).then(|| dhead.slot());
                let (left, right) = (side(slopes, true), side(own, true));
                let added = Added { bias: None, matrix };
                self.product([vocab, width, count], left, right, added, dhead)?;
            }
        }
        Ok(())
    }
}
