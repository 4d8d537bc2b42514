//! The recording: a Step under construction and handles to its values.

use formats::{Error, Result};
use ops::{Binary, Map, Op, Scale, Shape, Unary, Zip};
use program::{Node, Program, ValueId, WeightId};
use std::cell::RefCell;
use std::rc::Rc;

struct Recording {
    program: Program,
    tracing: bool,
    error: Option<Error>,
}

/// One forward pass being recorded.
#[derive(Clone)]
pub struct ForwardPass(Rc<RefCell<Recording>>);

/// A value of a [`ForwardPass`]: `[rows, width]`.
#[derive(Clone)]
pub struct Tensor {
    step: ForwardPass,
    id: ValueId,
    shape: Shape,
}

impl ForwardPass {
    /// Starts recording onto `program`, which holds weights and cache layers. `tracing` keeps named
    /// values as results.
    pub fn new(program: Program, tracing: bool) -> Self {
        ForwardPass(Rc::new(RefCell::new(Recording { program, tracing, error: None })))
    }

    /// Appends an operation without outputs, or returns its outputs.
    ///
    /// A misfit is remembered and reported by [`ForwardPass::finish`], so that `forward` reads like
    /// the paper.
    pub fn record(&self, op: Op, inputs: &[&Tensor], weights: Vec<WeightId>) -> Vec<Tensor> {
        let mut recording = self.0.borrow_mut();
        let shapes: Vec<Shape> = inputs.iter().map(|t| t.shape).collect();
        let weight_shapes: Vec<&[usize]> =
            weights.iter().map(|w| recording.program.weights[w.0].shape.as_slice()).collect();
        let outputs = match op.infer(&shapes, &weight_shapes) {
            Ok(outputs) => outputs,
            Err(error) => {
                recording.error.get_or_insert(error);
                // Recording goes on with a stand-in; the program is never used.
                vec![shapes.first().copied().unwrap_or(Shape::tokens(1))]
            }
        };
        let base = recording.program.values.len();
        let ids: Vec<ValueId> = (base..base + outputs.len()).map(ValueId).collect();
        recording.program.values.extend(&outputs);
        let inputs = inputs.iter().map(|t| t.id).collect();
        recording.program.nodes.push(Node { op, inputs, weights, outputs: ids.clone() });
        drop(recording);
        ids.into_iter()
            .zip(outputs)
            .map(|(id, shape)| Tensor { step: self.clone(), id, shape })
            .collect()
    }

    /// Ends the recording: the verified Program whose first result is `logits`.
    ///
    /// # Errors
    /// The first operation whose shapes did not fit, and what [`Program::verify`] refuses.
    pub fn finish(self, logits: Tensor) -> Result<Program> {
        let mut recording = self.0.borrow_mut();
        if let Some(error) = recording.error.take() {
            return Err(error);
        }
        let mut program = std::mem::take(&mut recording.program);
        program.results.push(logits.id);
        let traced: Vec<ValueId> = program.traces.iter().map(|(_, v)| *v).collect();
        program.results.extend(traced);
        program.verify()?;
        Ok(program)
    }
}

impl Tensor {
    /// Elements per row.
    pub fn width(&self) -> usize {
        self.shape.width
    }

    /// Appends an operation with one output.
    pub fn apply(&self, op: Op, others: &[&Tensor], weights: Vec<WeightId>) -> Tensor {
        let inputs: Vec<&Tensor> = std::iter::once(self).chain(others.iter().copied()).collect();
        self.step.record(op, &inputs, weights).swap_remove(0)
    }

    /// Appends an operation without outputs.
    pub(crate) fn sink(&self, op: Op, others: &[&Tensor]) {
        let inputs: Vec<&Tensor> = std::iter::once(self).chain(others.iter().copied()).collect();
        self.step.record(op, &inputs, Vec::new());
    }

    /// This and the columns of `other` behind it.
    pub fn beside(&self, other: &Tensor) -> Tensor {
        let (count, width) = (self.width(), self.width() + other.width());
        let splice = ops::Splice { heads: 1, start: 0, count, shared: false, width };
        self.apply(Op::from(splice), &[other], Vec::new())
    }

    /// `self + other`.
    pub fn add(&self, other: &Tensor) -> Tensor {
        self.apply(Op::from(Zip(Binary::Add)), &[other], Vec::new())
    }

    /// `self * other`, element by element.
    pub fn mul(&self, other: &Tensor) -> Tensor {
        self.apply(Op::from(Zip(Binary::Mul)), &[other], Vec::new())
    }

    /// `f(self)`, element by element.
    pub fn map(&self, f: Unary) -> Tensor {
        self.apply(Op::from(Map(f)), &[], Vec::new())
    }

    /// `by * self`.
    pub fn scale(&self, by: f32) -> Tensor {
        self.apply(Op::from(Scale { by }), &[], Vec::new())
    }

    /// Each row times its own number, `by` `[rows, 1]`.
    pub fn scale_rows(&self, by: &Tensor) -> Tensor {
        self.apply(Op::from(ops::ScaleRows), &[by], Vec::new())
    }

    /// The rows whose logits were asked for.
    pub fn select(&self) -> Tensor {
        self.apply(Op::from(ops::Select), &[], Vec::new())
    }

    /// Names this value for inspection; it is kept only when the step traces.
    pub fn trace(self, name: impl Into<String>) -> Tensor {
        let mut recording = self.step.0.borrow_mut();
        if recording.tracing {
            recording.program.traces.push((name.into(), self.id));
        }
        drop(recording);
        self
    }
}
