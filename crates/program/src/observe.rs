//! Observes the inputs of products: a Program whose results include them, for statistics over a
//! text.

use crate::{Program, ValueId};
use ops::experts::Sizes;
use ops::{Experts, Op, Rows, Shape};

/// An input of one or more products.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The canonical names of the matrices that are multiplied with it.
    pub weights: Vec<String>,
    /// Its index among the traced values.
    pub trace: usize,
    /// How its rows are routed, if the matrices belong to a mixture of experts.
    pub routed: Option<Routed>,
}

/// The routing of rows to experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routed {
    /// Index among the traced values of the scores, `[rows, experts]`.
    pub scores: usize,
    /// Number of experts.
    pub experts: usize,
    /// The operation, which defines how scores select experts.
    pub op: Experts,
    /// Whether each expert of a row has its own part of the row, best expert first; otherwise all
    /// read the whole row.
    pub apart: bool,
}

/// Whether node `i`'s first weight is decoded from blocks and then another matrix than the stored
/// one.
fn decoded(program: &Program, i: usize) -> bool {
    program.weights[program.nodes[i].weights[0].0].source.is_decoded()
}

impl Program {
    /// A copy of the Program that traces the inputs of its products, and the list of those inputs.
    /// The Program must not be [fused](crate::fuse) yet; fusion then leaves these values alone. The
    /// head's input is omitted, since it has rows only where logits are requested.
    pub fn observed(&self) -> (Program, Vec<Input>) {
        let mut observed = Program { traces: Vec::new(), ..self.clone() };
        // The first result is the model's own.
        observed.results.truncate(1);
        let mut inputs: Vec<Input> = Vec::new();
        for i in 0..observed.nodes.len() {
            let name = |weight: usize| {
                let weight = observed.nodes[i].weights[weight];
                observed.weights[weight.0].name.clone()
            };
            let x = observed.nodes[i].inputs[..].first().copied();
            let Some(x) = x.filter(|x| observed.shape(*x).rows == Rows::Tokens) else { continue };
            match &observed.nodes[i].op {
                // What is stored has other columns.
                Op::Linear(_) if decoded(&observed, i) => {}
                Op::Linear(_) => {
                    let weight = name(0);
                    let trace = observed.traced(x, &weight);
                    let known = inputs.iter_mut().find(|input| input.trace == trace);
                    match known.filter(|input| input.routed.is_none()) {
                        Some(input) => input.weights.push(weight),
                        None => inputs.push(Input { weights: vec![weight], trace, routed: None }),
                    }
                }
                Op::Experts(op) => {
                    let Some(sizes) = observed.mixture(&observed.nodes[i]) else { continue };
                    let (op, Sizes { experts, used, ff, .. }) = (*op, sizes);
                    let [gate, up, down] = [0, 1, 2].map(name);
                    let scores = observed.nodes[i].inputs[1];
                    let inner = ValueId(observed.values.len());
                    observed.values.push(Shape::tokens(used * ff));
                    let node = &mut observed.nodes[i];
                    node.op = Op::from(Experts { inner: true, ..op });
                    node.outputs.push(inner);
                    let scores = observed.traced(scores, &format!("{gate}.scores"));
                    let routed = |apart: bool| Some(Routed { scores, experts, op, apart });
                    let trace = observed.traced(x, &gate);
                    inputs.push(Input { weights: vec![gate, up], trace, routed: routed(false) });
                    let trace = observed.traced(inner, &down);
                    inputs.push(Input { weights: vec![down], trace, routed: routed(true) });
                }
                _ => {}
            }
        }
        (observed, inputs)
    }

    /// The index of `value` among the traced values; it is added under `name` if need be.
    fn traced(&mut self, value: ValueId, name: &str) -> usize {
        let known = self.traces.iter().position(|(_, traced)| *traced == value);
        known.unwrap_or_else(|| {
            self.traces.push((name.to_owned(), value));
            self.results.push(value);
            self.traces.len() - 1
        })
    }
}
