//! Products with matrices: our kernels and the vendor's.

use std::ops::Range;

use formats::Result;
use ops::block_linear::{block_gemm, block_linear, pick_tiles};
use ops::gate_up::gate_up;
use ops::joined::{gated_columns, split_columns};
use ops::linear::gemm::{self, gemm};
use ops::linear::stream::{End, Job, StreamTiling};
use ops::linear::{self, Task, gemv};
use ops::linear_add::linear_add;
use ops::packed::{Format, Layout};
use ops::project::{Project, ProjectedMatrix, ProjectionOperands, project};
use ops::zip::zip;
use ops::{Binary, BlockLinear, GateUp, Op};
use program::{Node, StepKind, ValueId, WeightId};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::adapters::Sites;
use super::experts::share;
use super::{FEW, Lowering, Recorder, Slot, Step, TypedSlot, bucket};
use crate::gpu::arena::SHORT_PROMPT;
use crate::gpu::{Facts, ProductShape};

/// The operands of a product: a matrix and its bias, by their numbers.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) weight: WeightId,
    pub(super) bias: Option<WeightId>,
}

/// Rows that one launch of a kernel of few rows computes.
pub(super) struct Turn {
    first: usize,
    rows: u32,
    schedule: linear::GemvSchedule,
}

impl Turn {
    /// These rows of a matrix of some columns.
    pub(super) fn of(&self, matrix: &TypedSlot, columns: usize) -> Slot {
        let row = columns * matrix.scalar.bytes();
        let own = |range: &Range<usize>| {
            let start = range.start + self.first * row;
            start..start + self.rows as usize * row
        };
        match &matrix.slot {
            Slot::Arena(range) => Slot::Arena(own(range)),
            Slot::Words(range) => Slot::Words(own(range)),
            other => other.clone(),
        }
    }
}

impl Lowering {
    /// How many rows the kernels of few rows take together, at most [`FEW`]: each product of the
    /// Program reads its matrices once for this many.
    pub(super) fn together(&self) -> usize {
        let most = |node: &Node| {
            let product = node.op.product(node.weights.len())?;
            let of = |p: &ProjectionOperands| self.formats[node.weights[p.weight].0];
            let formats: Vec<Format> = product.projections.iter().filter_map(of).collect();
            let x = *node.inputs.first()?;
            let (width, x) = (self.program.shape(x).width, self.types[0][x.0]);
            Some(self.alike(&formats, (width, 1), 1, x, product.gated).0)
        };
        self.program.nodes.iter().filter_map(most).min().unwrap_or(FEW)
    }

    /// Puts matrices in tiles where rows that decode are multiplied by the kernel that reads tiles:
    /// all that only products and gathers of rows read, which take either form.
    pub(super) fn lay_in_tiles(&mut self) {
        if !self.batched || self.few || self.exact() {
            return;
        }
        let mut apart = vec![false; self.formats.len()];
        let mut tiled: Vec<Option<Format>> = vec![None; self.formats.len()];
        // The two of a gate are of one format.
        let mut gates = Vec::new();
        for node in &self.program.nodes {
            let product = node.op.product(node.weights.len());
            let own: Vec<WeightId> = match &product {
                Some(p) => p.projections.iter().map(|p| node.weights[p.weight]).collect(),
                None => vec![],
            };
            let formats: Vec<Format> = own.iter().filter_map(|w| self.formats[w.0]).collect();
            let streams = !node.outputs.iter().any(|y| self.scores[y.0])
                && formats.iter().all(|format| StreamTiling::takes(*format, self.wide))
                && StreamTiling::pick(&self.job(&formats, 1, 1, own.len() == 2)).is_some();
            for weight in &node.weights {
                if own.contains(weight) && streams {
                    tiled[weight.0] = self.in_tiles(*weight);
                } else if node.op.gathers().is_none() {
                    apart[weight.0] = true;
                }
            }
            if product.is_some_and(|product| product.gated) {
                gates.push(own);
            }
        }
        for gate in gates {
            if gate.iter().any(|w| apart[w.0] || tiled[w.0].is_none()) {
                gate.iter().for_each(|w| apart[w.0] = true);
            }
        }
        for ((format, tiled), apart) in self.formats.iter_mut().zip(tiled).zip(apart) {
            if let Some(tiled) = tiled.filter(|_| !apart) {
                *format = Some(tiled);
            }
        }
    }

    /// The format of a matrix in tiles, if it is of blocks and has as many rows and columns as
    /// tiles need.
    fn in_tiles(&self, weight: WeightId) -> Option<Format> {
        let tiled = self.formats[weight.0]?.tiled()?;
        let &[rows, cols] = self.program.weights[weight.0].shape.as_slice() else { return None };
        Layout::new(tiled, rows, cols).is_ok().then_some(tiled)
    }

    /// The job of the kernel of rows that decode together.
    pub(super) fn job<'f>(
        &self,
        formats: &'f [Format],
        out: u32,
        rows: u32,
        pair: bool,
    ) -> Job<'f> {
        let Facts { shared, processors, tuned, .. } = self.facts;
        Job { formats, out, rows, pair, shared, processors, tuned: &tuned.stream }
    }

    /// Groups of matrices that are multiplied as one where rows that decode go to the vendor's
    /// library: the matrices of projections of the same rows, and the two of each gate.
    pub(super) fn joins(&self) -> Vec<Vec<WeightId>> {
        let mut joined: Vec<Vec<WeightId>> = Vec::new();
        if !self.library {
            return joined;
        }
        for node in &self.program.nodes {
            let Some(product) = node.op.product(node.weights.len()) else { continue };
            let own: Vec<WeightId> =
                product.projections.iter().map(|p| node.weights[p.weight]).collect();
            let full = |v: &ValueId| self.types[1][v.0] == Scalar::F32 && !self.scores[v.0];
            let fits = |w: &WeightId| {
                let rows = self.program.weights[w.0].shape[0];
                self.formats[w.0] == Some(Format::Dense(self.wide)) && rows.is_multiple_of(8)
            };
            let taken = |w: &WeightId| joined.iter().flatten().any(|other| other == w);
            let alone = |(i, w): (usize, &WeightId)| !own[..i].contains(w) && !taken(w);
            let joins = own.len() > 1
                && matches!(node.op, Op::Project(_) | Op::GateUp(_))
                && product.projections.iter().all(|p| p.bias.is_none())
                && (product.gated || node.outputs.iter().all(full))
                && own.iter().all(fits)
                && own.iter().enumerate().all(alone);
            if joins {
                joined.push(own);
            }
        }
        joined
    }

    /// How many rows go together where a row's bits must not depend on that, and how so many of
    /// them are shared.
    fn alike(
        &self,
        formats: &[Format],
        (width, out): (usize, u32),
        rows: u32,
        x: Scalar,
        pair: bool,
    ) -> (usize, linear::GemvSchedule) {
        let (int8, cols) = (!self.exact() && self.facts.dot4(), width as u32);
        let Facts { processors, tuned, .. } = self.facts;
        let task = Task { formats, cols, out, rows, x, pair, int8, processors, tuned };
        let (most, schedule) = linear::GemvSchedule::alike(&task, FEW as u32, self.facts.shared);
        (most as usize, schedule)
    }
}

impl Recorder<'_> {
    /// The launches of a product of few rows. Those of many sequences take turns where not all
    /// rows' activations fit shared memory, and are shared so that a row's bits do not depend on
    /// how many there are.
    pub(super) fn turns(
        &self,
        formats: &[Format],
        (width, out): (usize, u32),
        rows: usize,
        x: Scalar,
        pair: bool,
    ) -> Vec<Turn> {
        if !self.of.batched {
            let (cols, rows) = (width as u32, bucket(rows) as u32);
            let int8 = !self.of.exact() && self.of.facts.dot4();
            let Facts { processors, tuned, .. } = self.of.facts;
            let task = Task { formats, cols, out, rows, x, pair, int8, processors, tuned };
            return vec![Turn { first: 0, rows, schedule: linear::GemvSchedule::pick(&task) }];
        }
        let alike = |rows| self.of.alike(formats, (width, out), rows, x, pair);
        let most = alike(1).0;
        let turn = |first: usize| {
            let rows = bucket((rows - first).min(most)) as u32;
            Turn { first, rows, schedule: alike(rows).1 }
        };
        (0..rows).step_by(most).map(turn).collect()
    }

    /// A product; `precise`: its operands are not rounded, however many rows there are.
    pub(super) fn linear(
        &mut self,
        x: TypedSlot,
        matrix: Matrix,
        rows: usize,
        width: usize,
        precise: bool,
        y: TypedSlot,
    ) -> Result<()> {
        let (format, out) = self.matrix(matrix.weight)?;
        let many = !precise && !self.narrow(rows);
        if many && self.is_vendors(matrix, rows, width, y.scalar)? {
            return self.product(x, matrix.weight, rows, width, None, y);
        }
        if many && self.streams(&[matrix], width)? {
            return self.stream((x, None), &[matrix], (rows, width), End::Store, None, &[y], None);
        }
        let mut numbers = Numbers::new().with("width", width as u32).with("out", out);
        let (from, to) = (x.slot.clone(), y.slot.clone());
        let mut bound = vec![("x", from), ("y", to), ("weight", self.weight(matrix.weight))];
        bound.extend(matrix.bias.map(|b| ("bias", self.weight(b))));
        let bias = matrix.bias.is_some();
        if self.narrow(rows) {
            for turn in self.turns(&[format], (width, out), rows, x.scalar, false) {
                numbers.set("groups", turn.schedule.groups(out, self.of.facts.processors));
                (bound[0].1, bound[1].1) = (turn.of(&x, width), turn.of(&y, out as usize));
                let kernel = gemv(x.scalar, y.scalar, format, bias, turn.rows, turn.schedule);
                self.push(kernel, numbers.clone(), &bound)?;
            }
            return Ok(());
        }
        let operand = if self.of.exact() || precise { Scalar::F32 } else { self.of.wide };
        let machine = self.of.facts.machine();
        let pick =
            if self.of.batched { gemm::GemmSchedule::alike } else { gemm::GemmSchedule::pick };
        let schedule = pick((rows as u32, out), operand, format, machine);
        numbers.set("rows", rows as u32);
        let types = gemm::GemmTypes { x: x.scalar, operand, y: y.scalar };
        self.push(gemm(types, format, bias, schedule), numbers, &bound)
    }

    /// A product with a matrix for each block of columns.
    pub(super) fn block_linear(
        &mut self,
        op: &BlockLinear,
        x: TypedSlot,
        weight: WeightId,
        (rows, width): (usize, usize),
        y: TypedSlot,
    ) -> Result<()> {
        let (format, all) = self.matrix(weight)?;
        let (blocks, columns) = (op.blocks as u32, (width / op.blocks) as u32);
        let (facts, out) = (self.of.facts, all / blocks);
        let numbers = op.numbers(rows, width, all as usize);
        let bound = [("x", x.slot.clone()), ("y", y.slot.clone()), ("weight", self.weight(weight))];
        if self.narrow(rows) {
            let processors = share(facts.processors, rows * op.blocks);
            let (formats, tuned) = (&[format], facts.tuned);
            let task = Task {
                formats,
                cols: columns,
                out,
                rows: 1,
                x: x.scalar,
                pair: false,
                int8: false,
                processors,
                tuned,
            };
            let schedule = linear::GemvSchedule::pick(&task);
            let numbers = numbers.with("groups", schedule.groups(out, processors));
            return self.push(block_linear(x.scalar, y.scalar, format, schedule), numbers, &bound);
        }
        let operand = if self.of.exact() { Scalar::F32 } else { self.of.wide };
        let sizes = (rows as u32, blocks, out);
        let schedule = pick_tiles(sizes, operand, format, facts.machine(), self.of.batched);
        let types = gemm::GemmTypes { x: x.scalar, operand, y: y.scalar };
        self.push(block_gemm(types, format, schedule), numbers, &bound)
    }

    /// Whether these matrices go to the kernel of rows that decode together, in one launch. In a
    /// load for one sequence those are the packed ones of a prompt that is too short for the
    /// vendor's library.
    fn streams(&self, matrices: &[Matrix], width: usize) -> Result<bool> {
        let many = match self.of.batched {
            true => !self.of.few && self.key.kind == StepKind::Decode,
            false => self.of.facts.products.is_some_and(|unpack| self.key.tokens < unpack),
        };
        if !many || self.of.exact() {
            return Ok(false);
        }
        let mut formats = Vec::new();
        for matrix in matrices {
            // Several are one launch, or joined. Whose results do not matter here.
            if matrices.len() == 1 && self.is_vendors(*matrix, 1, width, Scalar::F32)? {
                return Ok(false);
            }
            formats.push(self.matrix(matrix.weight)?.0);
        }
        if !self.of.batched && formats.iter().any(|format| format.packing().is_none()) {
            return Ok(false);
        }
        let taken = formats.iter().all(|format| StreamTiling::takes(*format, self.of.wide));
        // Whether two are read side by side takes more room: what has that has room for either.
        let job = self.of.job(&formats, 1, 1, matrices.len() == 2);
        Ok(taken && StreamTiling::pick(&job).is_some())
    }

    /// Whether the kernel of a product adds what adapters add: one of rows that decode, with a
    /// residual or several results.
    pub(super) fn takes_sites(&self, node: &Node) -> Result<bool> {
        let (Op::Project(_) | Op::LinearAdd(_)) = node.op else { return Ok(false) };
        let Some(product) = node.op.product(node.weights.len()) else { return Ok(false) };
        let x = node.inputs[0];
        let matrix = |p: &ProjectionOperands| Matrix {
            weight: node.weights[p.weight],
            bias: p.bias.map(|b| node.weights[b]),
        };
        let matrices: Vec<Matrix> = product.projections.iter().map(matrix).collect();
        let precise = node.outputs.iter().any(|y| self.of.scores[y.0]);
        let few = self.narrow(self.rows(x));
        Ok(few || (!precise && self.streams(&matrices, self.width(x))?))
    }

    /// The first of these matrices, if rows that decode take them as one.
    fn joins(&self, matrices: &[Matrix]) -> Option<WeightId> {
        let own = |group: &&Vec<WeightId>| group.iter().eq(matrices.iter().map(|m| &m.weight));
        let decodes = self.of.library && self.key.kind == StepKind::Decode;
        let group = self.of.joined.iter().find(own).filter(|_| decodes)?;
        group.first().copied()
    }

    /// Rows that decode times these matrices as one, by the vendor's library, of which `first` is
    /// the first: the results of a row lie one behind the other, in the arena's scratch.
    fn joined(
        &mut self,
        x: &TypedSlot,
        (first, matrices): (WeightId, &[Matrix]),
        (rows, width): (usize, usize),
        result: Scalar,
    ) -> Result<Slot> {
        let outs = matrices.iter().map(|m| Ok(self.matrix(m.weight)?.1));
        let out: u32 = outs.sum::<Result<u32>>()?;
        let start = self.layout.scratch[1].start;
        let bytes = self.room(rows) * out as usize * result.bytes();
        let y = TypedSlot { slot: Slot::Arena(start..start + bytes), scalar: result };
        let w = Slot::Joined(first.0);
        self.multiply(x.clone(), (w, out), (rows, width), None, y.clone())?;
        Ok(y.slot)
    }

    /// Activations in the type of operands of products of many rows, in the arena's scratch.
    pub(super) fn rounded(&mut self, x: TypedSlot, rows: usize, width: usize) -> Result<TypedSlot> {
        let wide = self.of.wide;
        let start = self.layout.scratch[0].start;
        let to = Slot::Arena(start..start + self.room(rows) * width * wide.bytes());
        self.unpack(Format::Dense(x.scalar), x.slot, rows, width, to.clone())?;
        Ok(TypedSlot { slot: to, scalar: wide })
    }

    /// Whether a product goes to the vendor's library: its rows must be many enough that unpacking
    /// packed weights pays. In loads for many sequences the number of rows must not decide: prompts
    /// go to the library and decode rows to our kernels, but for 16-bit matrices of loads for so
    /// many sequences that the library has their decode rows too ([`Lowering::library`]).
    fn is_vendors(&self, matrix: Matrix, rows: usize, width: usize, y: Scalar) -> Result<bool> {
        let (format, out) = self.matrix(matrix.weight)?;
        let Some(unpack) = self.of.facts.products else { return Ok(false) };
        let packed = format != Format::Dense(self.of.wide);
        let enough = match (self.of.batched, packed) {
            (true, _) if self.key.kind == StepKind::Prompt => true,
            (true, packed) => self.of.library && !packed,
            (false, true) => rows >= unpack,
            (false, false) => rows > FEW,
        };
        // The head's matrix, of which few rows are wanted, is not worth the room.
        let room = !packed || out as usize * width <= self.of.unpacked.0;
        let fits = room && out.is_multiple_of(8) && (y == Scalar::F32 || y == self.of.wide);
        Ok(!self.of.exact() && fits && enough && matrix.bias.is_none())
    }

    /// The vendor's product, plus `add`, of operands that are first made what it takes.
    fn product(
        &mut self,
        x: TypedSlot,
        weight: WeightId,
        rows: usize,
        width: usize,
        add: Option<Slot>,
        y: TypedSlot,
    ) -> Result<()> {
        let (format, out) = self.matrix(weight)?;
        let wide = self.of.wide;
        let w = if format == Format::Dense(wide) {
            self.weight(weight)
        } else if self.of.copied[weight.0] {
            Slot::Copied(weight.0)
        } else {
            let to = Slot::Unpacked(out as usize * width * wide.bytes());
            self.unpack(format, self.weight(weight), out as usize, width, to.clone())?;
            to
        };
        self.multiply(x, (w, out), (rows, width), add, y)
    }

    /// The vendor's product with a matrix of its operands' type.
    fn multiply(
        &mut self,
        x: TypedSlot,
        (w, out): (Slot, u32),
        (rows, width): (usize, usize),
        add: Option<Slot>,
        y: TypedSlot,
    ) -> Result<()> {
        let wide = self.of.wide;
        let all = if self.of.batched { self.room(rows) } else { rows };
        let x = if x.scalar == wide { x.slot } else { self.rounded(x, rows, width)?.slot };
        let often = self.key.kind == StepKind::Decode || all <= SHORT_PROMPT;
        let shape = ProductShape {
            adds: add.is_some(),
            alike: self.of.batched,
            tuned: self.of.batched && often,
            ..ProductShape::plain([all as u32, out, width as u32], wide, y.scalar)
        };
        self.steps.push(Step::Product { shape, x, w, add, y: y.slot });
        Ok(())
    }

    /// A matrix in the type of the vendor's operands: what embeds all its rows, in order.
    pub(super) fn unpack(
        &mut self,
        format: Format,
        from: Slot,
        rows: usize,
        width: usize,
        to: Slot,
    ) -> Result<()> {
        let to = TypedSlot { slot: to, scalar: self.of.wide };
        self.gather(format, from, Slot::Numbers(rows), rows, width, to)
    }

    /// An operand in the arena's scratch, of the type of products of many rows where there are
    /// many.
    pub(super) fn scratch(&self, i: usize, elements: usize) -> TypedSlot {
        let many = !self.narrow(self.key.tokens) && !self.of.exact();
        let scalar = if many { self.of.wide } else { Scalar::F32 };
        let start = self.layout.scratch[i].start;
        TypedSlot { slot: Slot::Arena(start..start + scalar.bytes() * elements), scalar }
    }

    /// The rows of `x` as projections take them: normed where a norm is in front, which many rows
    /// need done first.
    fn normed(&mut self, norm: Option<(f32, WeightId)>, x: ValueId) -> Result<TypedSlot> {
        let size = (self.rows(x), self.width(x));
        self.normed_rows(norm, self.operand(x), size)
    }

    /// As [`Self::normed`], of rows wherever they are.
    pub(super) fn normed_rows(
        &mut self,
        norm: Option<(f32, WeightId)>,
        x: TypedSlot,
        (rows, width): (usize, usize),
    ) -> Result<TypedSlot> {
        let Some((eps, weight)) = norm else { return Ok(x) };
        let y = self.scratch(0, self.room(rows) * width);
        self.norm(x, weight, eps, rows, width, y.clone())?;
        Ok(y)
    }

    /// The norm in front of products of few rows, and their rows: normed already where groups are
    /// small, each of which would sum up the squares of whole rows for a few outputs.
    fn apart(
        &mut self,
        norm: Option<(f32, WeightId)>,
        x: ValueId,
    ) -> Result<(Option<(f32, WeightId)>, TypedSlot)> {
        match norm {
            Some(_) if self.of.facts.small_groups() => Ok((None, self.normed(norm, x)?)),
            _ => Ok((norm, self.operand(x))),
        }
    }

    pub(super) fn project(
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
        if !self.narrow(rows) {
            let precise = outputs.iter().any(|y| self.of.scores[y.0]);
            let streams = !precise && self.streams(&matrices, width)?;
            if streams && self.of.adapters.count == 0 && self.joins(&matrices).is_none() {
                let results: Vec<TypedSlot> = outputs.iter().map(|y| self.operand(*y)).collect();
                let (x, size) = ((self.operand(x), norm), (rows, width));
                return self.stream(x, &matrices, size, End::Store, None, &results, None);
            }
            let x = self.normed(norm, x)?;
            if let Some(first) = self.joins(&matrices) {
                let all = self.joined(&x, (first, &matrices), (rows, width), Scalar::F32)?;
                return self.split(all, &matrices, rows, outputs);
            }
            if streams {
                let results: Vec<TypedSlot> = outputs.iter().map(|y| self.operand(*y)).collect();
                let (sites, size) = (self.sites(x.clone(), None)?, (rows, width));
                return self.stream((x, None), &matrices, size, End::Store, None, &results, sites);
            }
            for (&matrix, &y) in matrices.iter().zip(outputs) {
                self.linear(x.clone(), matrix, rows, width, self.of.scores[y.0], self.operand(y))?;
            }
            return Ok(());
        }
        let shapes: Vec<(Format, u32)> =
            matrices.iter().map(|m| self.matrix(m.weight)).collect::<Result<_>>()?;
        let formats: Vec<Format> = shapes.iter().map(|s| s.0).collect();
        let all = shapes.iter().map(|s| s.1).sum();
        let to: Vec<TypedSlot> = outputs.iter().map(|y| self.operand(*y)).collect();
        let (norm, x) = self.apart(norm, x)?;
        let sites = self.sites(x.clone(), norm)?;
        for turn in self.turns(&formats, (width, all), rows, x.scalar, false) {
            let x = (x.clone(), width);
            self.project_turn(&turn, norm, x, &matrices, &to, sites.as_ref())?;
        }
        Ok(())
    }

    /// Takes apart the rows of results of joined matrices.
    fn split(
        &mut self,
        all: Slot,
        matrices: &[Matrix],
        rows: usize,
        outputs: &[ValueId],
    ) -> Result<()> {
        let mut numbers = Numbers::new().with("rows", rows as u32);
        let names = |j: usize| ["out", "y"].map(|part| format!("{part}{j}"));
        let names: Vec<[String; 2]> = (0..matrices.len()).map(names).collect();
        let (mut bound, mut width) = (vec![("x", all)], 0);
        for (([out, y], matrix), output) in names.iter().zip(matrices).zip(outputs) {
            let columns = self.matrix(matrix.weight)?.1;
            numbers.set(out, columns);
            bound.push((y, self.value(*output)));
            width += columns;
        }
        numbers.set("width", width);
        self.push(split_columns(matrices.len() as u32), numbers, &bound)
    }

    /// Some rows of projections, all in one launch.
    fn project_turn(
        &mut self,
        turn: &Turn,
        norm: Option<(f32, WeightId)>,
        (x, width): (TypedSlot, usize),
        matrices: &[Matrix],
        outputs: &[TypedSlot],
        sites: Option<&Sites>,
    ) -> Result<()> {
        let shapes: Vec<(Format, u32)> =
            matrices.iter().map(|m| self.matrix(m.weight)).collect::<Result<_>>()?;
        let all = shapes.iter().map(|s| s.1).sum();
        let groups = turn.schedule.groups(all, self.of.facts.processors);
        let mut numbers = Numbers::new().with("width", width as u32).with("groups", groups);
        let names: Vec<[String; 4]> = (0..matrices.len())
            .map(|j| ["out", "y", "weight", "bias"].map(|part| format!("{part}{j}")))
            .collect();
        let mut bound = vec![("x", turn.of(&x, width))];
        if let Some((eps, weight)) = norm {
            numbers = numbers.with_f32("eps", eps);
            bound.push(("norm", self.weight(weight)));
        }
        let mut parts = Vec::new();
        for (j, ([out, y, weight, bias], matrix)) in names.iter().zip(matrices).enumerate() {
            numbers.set(out, shapes[j].1);
            bound.push((y, turn.of(&outputs[j], shapes[j].1 as usize)));
            bound.push((weight, self.weight(matrix.weight)));
            bound.extend(matrix.bias.map(|b| (bias.as_str(), self.weight(b))));
            parts.push(ProjectedMatrix { format: shapes[j].0, bias: matrix.bias.is_some() });
        }
        let low = sites.map(|sites| {
            sites.bind(Some(turn), &mut numbers, &mut bound);
            sites.low
        });
        let (from, to) = (x.scalar, outputs[0].scalar);
        let kernel = project(from, to, &parts, norm.is_some(), turn.rows, turn.schedule, low);
        self.push(kernel, numbers, &bound)
    }

    pub(super) fn gate_up(
        &mut self,
        op: &GateUp,
        x: ValueId,
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let (rows, width) = (self.rows(x), self.width(x));
        let norm = op.norm.map(|eps| (eps, weights[0]));
        let [gate, up] = [weights[weights.len() - 2], weights[weights.len() - 1]];
        let ((format, out), (other, _)) = (self.matrix(gate)?, self.matrix(up)?);
        if !self.narrow(rows) || format != other {
            let both = [gate, up].map(|weight| Matrix { weight, bias: None });
            let to = self.operand(y);
            // Nothing but the product reads normed rows in loads without adapters: they are made as
            // it needs them.
            let end = End::Gate(op.act);
            let streams = format == other && self.streams(&both, width)?;
            if streams && self.of.adapters.count == 0 && self.joins(&both).is_none() {
                let x = (self.operand(x), norm);
                return self.stream(x, &both, (rows, width), end, None, &[to], None);
            }
            let x = self.normed(norm, x)?;
            if let Some(first) = self.joins(&both) {
                let all = self.joined(&x, (first, &both), (rows, width), to.scalar)?;
                let numbers = Numbers::new().with("rows", rows as u32).with("out", out);
                let kernel = gated_columns(to.scalar, op.act);
                return self.push(kernel, numbers, &[("x", all), ("y", to.slot)]);
            }
            if streams {
                let (sites, size) = (self.sites(x.clone(), None)?, (rows, width));
                return self.stream((x, None), &both, size, end, None, &[to], sites);
            }
            let elements = rows * out as usize;
            // More rows may be computed than there are.
            let room = self.room(rows) * out as usize;
            let [a, b] = [self.scratch(1, room), self.scratch(2, room)];
            for (weight, y) in [(gate, &a), (up, &b)] {
                let matrix = Matrix { weight, bias: None };
                self.linear(x.clone(), matrix, rows, width, false, y.clone())?;
            }
            self.change(&x, &[a.clone(), b.clone()])?;
            let bound = [("gate", a.slot), ("up", b.slot), ("y", self.value(y))];
            let numbers = Numbers::new().with("n", elements as u32);
            let kernel = ops::gated::gated([self.scalar(y); 2], op.act);
            return self.push(kernel, numbers, &bound);
        }
        let ((norm, from), to) = (self.apart(norm, x)?, self.operand(y));
        let sites = self.sites(from.clone(), norm)?;
        for turn in self.turns(&[format], (width, out), rows, from.scalar, true) {
            let mut numbers = Numbers::new()
                .with("width", width as u32)
                .with("out", out)
                .with("groups", turn.schedule.groups(out, self.of.facts.processors));
            let mut bound = vec![
                ("x", turn.of(&from, width)),
                ("y", turn.of(&to, out as usize)),
                ("gate", self.weight(gate)),
                ("up", self.weight(up)),
            ];
            if let Some((eps, weight)) = norm {
                numbers = numbers.with_f32("eps", eps);
                bound.push(("norm", self.weight(weight)));
            }
            let low = sites.as_ref().map(|sites| {
                sites.bind(Some(&turn), &mut numbers, &mut bound);
                sites.low
            });
            let ((x, y), normed) = ((from.scalar, to.scalar), norm.is_some());
            let kernel = gate_up(x, y, format, normed, op.act, turn.rows, turn.schedule, low);
            self.push(kernel, numbers, &bound)?;
        }
        Ok(())
    }

    pub(super) fn linear_add(
        &mut self,
        x: ValueId,
        residual: ValueId,
        matrix: Matrix,
        y: ValueId,
    ) -> Result<()> {
        let (rows, width) = (self.rows(x), self.width(x));
        let (format, out) = self.matrix(matrix.weight)?;
        if !self.narrow(rows) {
            let to = self.operand(y);
            if self.is_vendors(matrix, rows, width, to.scalar)? {
                let (x, add) = (self.operand(x), Some(self.value(residual)));
                return self.product(x, matrix.weight, rows, width, add, to);
            }
            if self.streams(&[matrix], width)? {
                let (x, residual) = (self.operand(x), Some(self.value(residual)));
                let (sites, size) = (self.sites(x.clone(), None)?, (rows, width));
                return self.stream((x, None), &[matrix], size, End::Add, residual, &[to], sites);
            }
            let start = self.layout.scratch[1].start;
            let slot = Slot::Arena(start..start + 4 * self.room(rows) * out as usize);
            let sum = TypedSlot { slot, scalar: Scalar::F32 };
            self.linear(self.operand(x), matrix, rows, width, false, sum.clone())?;
            let bound = [("a", sum.slot), ("b", self.value(residual))];
            return self.flat(zip(Scalar::F32, Binary::Add), &bound, y);
        }
        let (from, to, bias) = (self.operand(x), self.operand(y), matrix.bias.is_some());
        let residual = self.operand(residual);
        let sites = self.sites(from.clone(), None)?;
        for turn in self.turns(&[format], (width, out), rows, from.scalar, false) {
            let mut numbers = Numbers::new()
                .with("width", width as u32)
                .with("out", out)
                .with("groups", turn.schedule.groups(out, self.of.facts.processors));
            let mut bound = vec![
                ("x", turn.of(&from, width)),
                ("residual", turn.of(&residual, out as usize)),
                ("y", turn.of(&to, out as usize)),
                ("weight", self.weight(matrix.weight)),
            ];
            bound.extend(matrix.bias.map(|b| ("bias", self.weight(b))));
            let low = sites.as_ref().map(|sites| {
                sites.bind(Some(&turn), &mut numbers, &mut bound);
                sites.low
            });
            let (x, y) = (from.scalar, to.scalar);
            let kernel = linear_add(x, y, format, bias, turn.rows, turn.schedule, low);
            self.push(kernel, numbers, &bound)?;
        }
        Ok(())
    }
}
