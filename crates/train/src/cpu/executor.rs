//! One replay: the operations of a Program in order, each by all threads.

use super::experts;
use super::products::Quantised;
use super::weights::FloatWeights;
use crate::Batch;
use crate::packing::Packing;
use cpu_kernels::delta::MAX_KEY_DIM;
use cpu_kernels::isa::Isa;
use cpu_kernels::matmul::{Activations, Epilogue, Huge, Scratch as Product, Turned};
use cpu_kernels::team::{SharedSlice, Team, default_threads};
use device::Precision;
use formats::{DType, Error, ErrorKind, Result};
use ops::gradient::{Gradient, trains};
use ops::{Attention, Op, Rope};
use program::{ArenaPlan, Node, Program, ValueId, plan_memory};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Whether the CPU can run a Program in training.
///
/// # Errors
/// The first operation that it has not, by name; keys of a gated delta net that do not fit its
/// kernels.
pub fn check(program: &Program) -> Result<()> {
    for node in &program.nodes {
        if let Op::Gradient(Gradient::PackedDelta(of)) = &node.op
            && of.0.key_dim > MAX_KEY_DIM
        {
            let expected = format!("keys of up to {MAX_KEY_DIM} elements");
            let error = Error::new("delta_net", expected, of.0.key_dim);
            return Err(error.of(ErrorKind::Unsupported));
        }
    }
    match program.nodes.iter().find(|node| !trains(&node.op)) {
        Some(node) => {
            let expected = "operations that can be trained";
            Err(Error::new("train", expected, node.op.name()).of(ErrorKind::Unsupported))
        }
        None => Ok(()),
    }
}

/// A team of threads and their memory, for any Program.
pub struct CpuExecutor {
    pub(super) isa: Isa,
    pub(super) team: Team,
    pub(super) scratch: Vec<Mutex<Scratch>>,
    pub(super) precision: Precision,
    arena: Huge,
    /// Quantised rows of the last two values that were multiplied.
    pub(super) storage: [Huge; 2],
    /// Rows of logits in hand.
    pub(super) logits: Mutex<Vec<f32>>,
    /// The seconds that each operation of the last run took.
    seconds: Mutex<BTreeMap<&'static str, f64>>,
}

/// A thread's own memory.
pub(super) struct Scratch {
    pub(super) product: Product,
    pub(super) turned: Turned,
    pub(super) floats: Vec<f32>,
}

/// A Program's replay: where its values lie, and what its rows are.
pub(super) struct Run<'a> {
    pub(super) of: &'a CpuExecutor,
    pub(super) program: &'a Program,
    pub(super) weights: &'a FloatWeights,
    pub(super) batch: &'a Batch,
    pub(super) packing: Packing,
    pub(super) plan: ArenaPlan,
    pub(super) quantised: Quantised,
    values: SharedSlice<'a, f32>,
    /// Cosines and sines of every token, for each rotation.
    angles: Vec<(Rope, Vec<f32>, Vec<f32>)>,
}

/// The results of a replay.
pub struct Results<'a> {
    run: Run<'a>,
}

impl Results<'_> {
    /// A result, row-major.
    pub fn get(&self, index: usize) -> &[f32] {
        // SAFETY: nothing is run any more, and results outlive it.
        unsafe { self.run.values.slice(self.run.range(self.run.program.results[index])) }
    }
}

impl CpuExecutor {
    /// An executor with `threads` threads; `None` means one for each physical core that this
    /// process may use. With [`Precision::BF16`] the tile unit rounds activations to bf16 in
    /// products; other units have f32 in any case.
    ///
    /// # Errors
    /// More threads than the system gives, or too little memory.
    pub fn new(threads: Option<usize>, precision: Precision) -> Result<CpuExecutor> {
        let team = Team::new(threads.unwrap_or_else(default_threads))?;
        let scratch = || {
            let (product, turned) = (Product::new()?, Turned::new()?);
            Ok(Mutex::new(Scratch { product, turned, floats: Vec::new() }))
        };
        Ok(CpuExecutor {
            isa: Isa::detect()?,
            scratch: (0..team.count()).map(|_| scratch()).collect::<Result<_>>()?,
            team,
            precision,
            arena: Huge::zeroed(0)?,
            storage: [Huge::zeroed(0)?, Huge::zeroed(0)?],
            logits: Mutex::new(Vec::new()),
            seconds: Mutex::new(BTreeMap::new()),
        })
    }

    /// The type that matrices are packed in that are set in f32: what their products read.
    pub fn operands(&self) -> DType {
        let halves = matches!(self.isa, Isa::Amx { .. }) && self.precision == Precision::BF16;
        if halves { DType::BF16 } else { DType::F32 }
    }

    /// The seconds that each operation of the last run took, by name.
    pub fn time(&self) -> BTreeMap<&'static str, f64> {
        self.seconds.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its threads.
    pub fn team(&self) -> &Team {
        &self.team
    }

    /// Bytes of the values of a Program, and of the rows of an expert that all tokens choose, for
    /// `tokens` rows of which `outputs` are to predict something.
    pub fn bytes(program: &Program, tokens: usize, outputs: usize) -> usize {
        plan_memory(program, tokens, outputs).bytes + experts::gathered(program, tokens)
    }

    /// Runs a Program that [`check`] let pass.
    ///
    /// # Errors
    /// Too little memory; tokens outside the tables; a batch whose parts do not agree.
    pub fn run<'a>(
        &'a mut self,
        program: &'a Program,
        weights: &'a FloatWeights,
        batch: &'a Batch,
    ) -> Result<Results<'a>> {
        let packing = Packing::new(batch)?;
        packing.fits(program, batch)?;
        let rows = [batch.tokens.len(), packing.picks.len()];
        let plan = plan_memory(program, rows[0], rows[1]);
        if self.arena.len() < plan.bytes {
            self.arena = Huge::zeroed(0)?;
            self.arena = Huge::zeroed(plan.bytes)?;
        }
        let bytes = storage(self.precision, program, rows);
        for storage in self.storage.iter_mut().filter(|storage| storage.len() < bytes) {
            *storage = Huge::zeroed(bytes)?;
        }
        let floats = self.arena.len() / size_of::<f32>();
        // SAFETY: the arena is aligned and initialised, and only this run, which borrows the
        // executor alone, uses it.
        let values = unsafe { SharedSlice::from_raw(self.arena.as_ptr().cast::<f32>(), floats) };
        let of: &'a CpuExecutor = self;
        let angles = program.ropes().into_iter().map(|rope| angles(rope, &packing)).collect();
        let quantised = Quantised::default();
        let run = Run { of, program, weights, batch, packing, plan, quantised, values, angles };
        let mut seconds = BTreeMap::new();
        let mut began = Instant::now();
        for (index, node) in program.nodes.iter().enumerate() {
            run.node(index, node)?;
            let ended = Instant::now();
            *seconds.entry(node.op.name()).or_default() += (ended - began).as_secs_f64();
            began = ended;
        }
        *of.seconds.lock().unwrap_or_else(PoisonError::into_inner) = seconds;
        Ok(Results { run })
    }
}

/// Bytes of quantised rows of the hungriest product.
fn storage(precision: Precision, program: &Program, [tokens, outputs]: [usize; 2]) -> usize {
    let each = program.nodes.iter().filter_map(|node| {
        let &[rows, columns] = program.weights[node.weights.first()?.0].shape.as_slice() else {
            return None;
        };
        let x = program.shape(*node.inputs.first()?);
        let count = x.rows.count(tokens, outputs);
        let bytes = |width| Activations::bytes(Run::path(precision), count, width);
        Some(bytes(rows).max(bytes(columns)))
    });
    each.max().unwrap_or(0)
}

fn angles(rope: Rope, packing: &Packing) -> (Rope, Vec<f32>, Vec<f32>) {
    let (n, rows) = (rope.frequencies.len(), packing.positions.len());
    let (mut cos, mut sin) = (vec![0.0; rows * n], vec![0.0; rows * n]);
    if n > 0 {
        let each = cos.chunks_exact_mut(n).zip(sin.chunks_exact_mut(n));
        for (position, (cos, sin)) in packing.positions.iter().zip(each) {
            rope.angles(*position, cos, sin);
        }
    }
    (rope, cos, sin)
}

impl<'a> Run<'a> {
    pub(super) fn picked(&self, index: ops::embed::Index) -> &[u32] {
        self.packing.picked(self.batch, index)
    }

    pub(super) fn rows(&self, value: ValueId) -> usize {
        let shape = self.program.shape(value);
        shape.rows.count(self.batch.tokens.len(), self.packing.picks.len())
    }

    pub(super) fn width(&self, value: ValueId) -> usize {
        self.program.shape(value).width
    }

    fn range(&self, value: ValueId) -> Range<usize> {
        let start = self.plan.offsets[value.0] / size_of::<f32>();
        start..start + self.rows(value) * self.width(value)
    }

    /// A value that is read.
    ///
    /// # Safety
    /// It was written by a node before the one in hand, which does not write it at the same time.
    pub(super) unsafe fn read(&self, value: ValueId) -> &'a [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.values.slice(self.range(value)) }
    }

    /// A value that the node in hand writes.
    ///
    /// # Safety
    /// No other thread uses it, and the caller holds it once.
    pub(super) unsafe fn write(&self, value: ValueId) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.values.slice_mut(self.range(value)) }
    }

    /// A range of elements of a value that the node in hand writes.
    ///
    /// # Safety
    /// No other thread uses these elements.
    pub(super) unsafe fn part(&self, value: ValueId, range: Range<usize>) -> &'a mut [f32] {
        let all = self.range(value);
        // SAFETY: the caller's promise.
        unsafe { self.values.slice_mut(all.start + range.start..all.start + range.end) }
    }

    /// The first element of a value.
    pub(super) fn start(&self, value: ValueId) -> *mut f32 {
        // SAFETY: no element is used through this slice.
        unsafe { self.values.slice_mut(self.range(value)).as_mut_ptr() }
    }

    pub(super) fn angles(&self, rope: &Rope) -> Result<(&[f32], &[f32])> {
        let own = self.angles.iter().find(|(of, ..)| of == rope);
        let (_, cos, sin) = own.ok_or_else(|| Error::new("rope", "angles", "none"))?;
        Ok((cos, sin))
    }

    fn node(&self, index: usize, node: &Node) -> Result<()> {
        let (input, output) = (node.inputs.first().copied(), node.outputs[0]);
        let weight = |i: usize| node.weights.get(i).copied();
        match (&node.op, input) {
            (Op::Linear(_), Some(x)) => {
                let bias = weight(1).map(|id| self.weights.vector(id));
                let matrix = self.weights.matrix(node.weights[0])?;
                // SAFETY: a node's operands.
                unsafe {
                    self.product(matrix, x, output, Epilogue { bias, ..Epilogue::default() });
                }
            }
            (Op::LinearAdd(_), Some(x)) => {
                self.copy(index, node, 1);
                let bias = weight(1).map(|id| self.weights.vector(id));
                let matrix = self.weights.matrix(node.weights[0])?;
                // SAFETY: a node's operands.
                unsafe { self.product(matrix, x, output, Epilogue { bias, accumulate: true }) };
            }
            (Op::Experts(op), _) => return self.experts_forward((op, None), node),
            (Op::Gradient(op), _) => return self.gradient(index, op, node),
            _ => return self.element(index, node),
        }
        Ok(())
    }

    fn gradient(&self, index: usize, op: &Gradient, node: &Node) -> Result<()> {
        let (inputs, outputs) = (&node.inputs, &node.outputs);
        match op {
            Gradient::LinearBackward(_) | Gradient::LinearBackwardAdd(_) => {
                let adds = matches!(op, Gradient::LinearBackwardAdd(_));
                if adds {
                    self.copy(index, node, 1);
                }
                let matrix = self.weights.matrix(node.weights[0])?;
                let (dy, dx) = (self.operand(inputs[0]), self.start(outputs[0]));
                // SAFETY: a node's operands.
                unsafe { self.multiply_back(matrix, dy, dx, adds) };
            }
            Gradient::Outer(_) => {
                let of = |v: ValueId| (self.start(v).cast_const(), self.width(v));
                let (dy, x, rows) = (of(inputs[0]), of(inputs[1]), self.rows(inputs[0]));
                // SAFETY: a node's operands.
                unsafe { self.outer(dy, x, rows, self.start(outputs[0]), false) };
            }
            Gradient::SumRows(_) => {
                // SAFETY: a node's operands.
                let (x, y) = unsafe { (self.read(inputs[0]), self.write(outputs[0])) };
                self.sum_rows(x, y, false);
            }
            Gradient::Attend(of) => self.attend(&of.0, node),
            Gradient::AttendBackward(of) => self.attend_backward(&of.0, node),
            Gradient::PackedConv(of) => self.convolve(&of.0, node),
            Gradient::ConvBackward(of) => self.convolve_backward(of, node),
            Gradient::PackedDelta(of) => self.delta(&of.0, node),
            Gradient::DeltaBackward(of) => self.delta_backward(&of.0, node),
            Gradient::PackedScan(of) if of.0.by_element => self.scan_by_element(&of.0, node),
            Gradient::PackedScan(of) => self.scan(&of.0, node),
            Gradient::ScanBackward(of) if of.0.by_element => {
                self.scan_backward_by_element(&of.0, node);
            }
            Gradient::ScanBackward(of) => self.scan_backward(&of.0, node),
            Gradient::GatedNormBackward(of) => self.gated_norm_backward(of, node),
            Gradient::CrossEntropy(of) => return self.losses(of, node),
            Gradient::ExpertsBackward(of) => {
                return self.experts_backward((&of.of, of.weights, None), node);
            }
            Gradient::AdaptedExperts(of) => {
                return self.experts_forward((&of.of, Some(&of.factors)), node);
            }
            Gradient::AdaptedExpertsBackward(of) => {
                return self.experts_backward((&of.of, false, Some(&of.factors)), node);
            }
            _ => self.element_backward(index, op, node),
        }
        Ok(())
    }

    /// Calls `f` with ranges of `0..n` of at most `each`, on all threads.
    pub(super) fn each(
        &self,
        n: usize,
        each: usize,
        f: &(dyn Fn(Range<usize>, &mut Vec<f32>) + Sync),
    ) {
        self.each_with(n, each, &|range, scratch| f(range, &mut scratch.floats));
    }

    /// The same with all memory of the thread.
    pub(super) fn each_with(
        &self,
        n: usize,
        each: usize,
        f: &(dyn Fn(Range<usize>, &mut Scratch) + Sync),
    ) {
        self.of.team.run(&|worker| {
            let scratch = &self.of.scratch[worker.index];
            let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
            while let Some(range) = worker.claim(n, each) {
                f(range, &mut scratch);
            }
        });
    }

    /// The sinks of attention.
    pub(super) fn sinks(&self, of: &Attention, node: &Node) -> Option<&[f32]> {
        let [sinks, _] = of.sinks_and_slopes(&node.weights);
        sinks.map(|sinks| self.weights.vector(*sinks))
    }

    /// How much the scores of attention's heads fall with each position.
    pub(super) fn slopes(&self, of: &Attention, node: &Node) -> Vec<f32> {
        let [_, slopes] = of.sinks_and_slopes(&node.weights);
        slopes.map_or_else(|| vec![0.0; of.heads], |slopes| self.weights.vector(*slopes).to_vec())
    }
}
