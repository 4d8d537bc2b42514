//! What products multiply with: a Program whose results are the inputs of its products, for
//! statistics of a text.

use crate::{Program, ValueId};
use ops::experts::Sizes;
use ops::{Experts, Op, Rows, Shape};

/// An input of products.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The canonical names of the matrices that it multiplies.
    pub weights: Vec<String>,
    /// Which traced value it is.
    pub trace: usize,
    /// How its rows choose experts, where the matrices are those of a mixture.
    pub routed: Option<Routed>,
}

/// How rows choose experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routed {
    /// Which traced value the scores are, `[rows, experts]`.
    pub scores: usize,
    /// Experts that there are.
    pub experts: usize,
    /// How scores choose.
    pub op: Experts,
    /// Whether each of a row's experts has a part of the row to itself, best first; else all read
    /// the whole row.
    pub apart: bool,
}

impl Program {
    /// The same Program, which traces what its products multiply with, and what each traced value
    /// is. It must not be [fused](crate::fuse) yet: fusion then leaves those values as they are.
    /// The head's input, which has rows only where logits are wanted, is left out.
    pub fn observed(&self) -> (Program, Vec<Input>) {
        let mut observed = Program { traces: Vec::new(), ..self.clone() };
        // Of the results the first is what the model computes.
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

    /// Which traced value `value` is, under the name that it has or is given.
    fn traced(&mut self, value: ValueId, name: &str) -> usize {
        let known = self.traces.iter().position(|(_, traced)| *traced == value);
        known.unwrap_or_else(|| {
            self.traces.push((name.to_owned(), value));
            self.results.push(value);
            self.traces.len() - 1
        })
    }
}
