//! Forward mode: from a Program to one of its result and how that changes along a direction of its
//! weights.

use formats::{Error, Result, Source};
use ops::gradient::{Forward, Recorder, RuleValue};
use ops::{Binary, Op, Shape, Zip};
use program::{Node, Program, ValueId, Weight, WeightId};

/// The Program whose first result is `program`'s, and whose second is its derivative along a
/// direction: for each weight of `wrt` there is another after the program's own, in their order, of
/// the same shape, which is the direction's part.
///
/// ```
/// use ops::{Embed, Map, Op, Shape, Unary, embed::Index};
/// use program::{Node, Program, ValueId, Weight, WeightId};
///
/// // The squares of the rows of a table that the tokens pick.
/// let (shape, source) = (vec![4, 2], formats::Source::Zeros(vec![4, 2]));
/// let node = |op, inputs, weights, output| Node { op, inputs, weights, outputs: vec![output] };
/// let program = Program {
///     values: vec![Shape::tokens(2); 2],
///     weights: vec![Weight { name: "table".into(), shape, source }],
///     nodes: vec![
///         node(Op::from(Embed { index: Index::Token }), vec![], vec![WeightId(0)], ValueId(0)),
///         node(Op::from(Map(Unary::Square)), vec![ValueId(0)], vec![], ValueId(1)),
///     ],
///     results: vec![ValueId(1)],
///     ..Program::default()
/// };
/// let tangent = delft_train::gradients::jvp(&program, &[WeightId(0)])?;
/// let batch = delft_train::Batch {
///     tokens: vec![3, 1],
///     targets: vec![0; 2],
///     weights: vec![0.0; 2],
///     sequences: std::iter::once(0..2).collect(),
///     ..Default::default()
/// };
/// let weights = |id: WeightId| match id {
///     WeightId(0) => Ok(vec![0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0]),
///     _ => Ok(vec![1.0; 8]),
/// };
/// let values = delft_train::gradients::reference::run(&tangent, &weights, &batch)?;
/// assert_eq!(values[tangent.results[0].0], [9.0, 16.0, 1.0, 4.0]);
/// assert_eq!(values[tangent.results[1].0], [6.0, 8.0, 2.0, 4.0]);
/// # Ok::<(), formats::Error>(())
/// ```
///
/// # Errors
/// An operation that has no tangent, by name; a result that does not depend on `wrt`.
pub fn jvp(program: &Program, wrt: &[WeightId]) -> Result<Program> {
    let mut at = Tangents {
        program: Program { nodes: Vec::new(), ..program.clone() },
        node: None,
        of_values: vec![None; program.values.len()],
        of_weights: vec![None; program.weights.len()],
    };
    for id in wrt {
        let weight =
            program.weights.get(id.0).ok_or_else(|| Error::new("wrt", "a weight", id.0))?;
        let (name, shape) = (format!("{}.tangent", weight.name), weight.shape.clone());
        let source = Source::Zeros(shape.clone());
        at.of_weights[id.0] = Some(WeightId(at.program.weights.len()));
        at.program.weights.push(Weight { name, shape, source });
    }
    for node in &program.nodes {
        at.program.nodes.push(node.clone());
        let weights = node.weights.iter().any(|w| at.of_weights[w.0].is_some());
        if weights || node.inputs.iter().any(|v| at.of_values[v.0].is_some()) {
            at.node = Some(node.clone());
            node.op.jvp(&mut at)?;
        }
    }
    let result = *program.results.first().ok_or_else(|| Error::new("jvp", "a result", "none"))?;
    let tangent = at.of_values[result.0];
    let constant = || Error::new("jvp", "a result that depends on the weights", "another");
    let mut tangents = at.program;
    tangents.results = vec![result, tangent.ok_or_else(constant)?];
    tangents.traces.clear();
    super::differentiate::sweep(&mut tangents);
    tangents.verify()?;
    Ok(tangents)
}

struct Tangents {
    program: Program,
    /// The node whose rule is asked.
    node: Option<Node>,
    of_values: Vec<Option<ValueId>>,
    of_weights: Vec<Option<WeightId>>,
}

impl Tangents {
    fn inputs(&self) -> &[ValueId] {
        self.node.as_ref().map_or(&[], |node| &node.inputs)
    }

    fn outputs(&self) -> &[ValueId] {
        self.node.as_ref().map_or(&[], |node| &node.outputs)
    }

    fn weights(&self) -> &[WeightId] {
        self.node.as_ref().map_or(&[], |node| &node.weights)
    }
}

impl Recorder for Tangents {
    fn record(
        &mut self,
        op: Op,
        inputs: &[RuleValue],
        weights: &[usize],
    ) -> Result<Vec<RuleValue>> {
        let inputs: Vec<ValueId> = inputs.iter().map(|v| ValueId(v.0)).collect();
        // Tangents have the places behind the node's own weights.
        let (own, count) = (self.weights(), self.weights().len());
        let weights = weights.iter().map(|&place| match place.checked_sub(count) {
            Some(tangent) => self.of_weights[own[tangent].0].unwrap_or(own[tangent]),
            None => own[place],
        });
        let weights: Vec<WeightId> = weights.collect();
        let outputs = super::push(&mut self.program, op, inputs, weights)?;
        self.of_values.resize(self.program.values.len(), None);
        Ok(outputs.into_iter().map(|v| RuleValue(v.0)).collect())
    }
}

impl Forward for Tangents {
    fn input(&self, index: usize) -> RuleValue {
        RuleValue(self.inputs()[index].0)
    }

    fn output(&self, index: usize) -> RuleValue {
        RuleValue(self.outputs()[index].0)
    }

    fn shape(&self, value: RuleValue) -> Shape {
        self.program.values[value.0]
    }

    fn tangent(&self, input: usize) -> Option<RuleValue> {
        self.of_values[self.inputs()[input].0].map(|v| RuleValue(v.0))
    }

    fn weight_tangent(&self, weight: usize) -> Option<usize> {
        let id = self.weights().get(weight)?;
        self.of_weights[id.0].map(|_| self.weights().len() + weight)
    }

    fn has_input(&self, index: usize) -> bool {
        index < self.inputs().len()
    }

    fn has_weight(&self, index: usize) -> bool {
        index < self.weights().len()
    }

    fn add(&mut self, output: usize, tangent: RuleValue) -> Result<()> {
        let value = self.outputs()[output];
        let (shape, found) = (self.program.shape(value), self.shape(tangent));
        if shape != found {
            return Err(Error::new("tangent", format!("{shape:?}"), format!("{found:?}")));
        }
        let sum = match self.of_values[value.0] {
            Some(before) => {
                let both = [RuleValue(before.0), tangent];
                self.record(Op::from(Zip(Binary::Add)), &both, &[])?.swap_remove(0)
            }
            None => tangent,
        };
        self.of_values[value.0] = Some(ValueId(sum.0));
        Ok(())
    }
}
