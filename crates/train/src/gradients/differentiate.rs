//! Reverse mode: from a Program of a loss to one of the loss and its gradients.

use formats::{Error, Result};
use ops::gradient::{Filled, Recorder, Reverse, RuleValue, Wrt};
use ops::{Binary, Op, Shape, Zip};
use program::{Node, Program, ValueId, WeightId};

/// The Program whose first result is `program`'s, and whose further results are the derivatives of
/// the sum of all elements of that result with respect to the weights `wrt`, in their order: each
/// has the shape of its weight ([`Shape::of_weight`]).
///
/// ```
/// use ops::{Embed, Op, Shape, embed::Index};
/// use program::{Node, Program, ValueId, Weight, WeightId};
///
/// // The sum of the rows of a table that the tokens pick.
/// let (shape, source) = (vec![4, 2], formats::Source::Zeros(vec![4, 2]));
/// let program = Program {
///     values: vec![Shape::tokens(2)],
///     weights: vec![Weight { name: "table".into(), shape, source }],
///     nodes: vec![Node {
///         op: Op::from(Embed { index: Index::Token }),
///         inputs: vec![],
///         weights: vec![WeightId(0)],
///         outputs: vec![ValueId(0)],
///     }],
///     results: vec![ValueId(0)],
///     ..Program::default()
/// };
/// let gradient = delft_train::gradients::differentiate(&program, &[WeightId(0)])?;
/// let batch = delft_train::Batch {
///     tokens: vec![1, 3, 1],
///     targets: vec![0; 3],
///     weights: vec![0.0; 3],
///     sequences: std::iter::once(0..3).collect(),
///     ..Default::default()
/// };
/// let table = |_| Ok(vec![0.0; 8]);
/// let values = delft_train::gradients::reference::run(&gradient, &table, &batch)?;
/// assert_eq!(values[gradient.results[1].0], [0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 1.0, 1.0]);
/// # Ok::<(), formats::Error>(())
/// ```
///
/// # Errors
/// An operation that has no gradient, by name; a Program that reads or writes a cache.
pub fn differentiate(program: &Program, wrt: &[WeightId]) -> Result<Program> {
    let loss = *program.results.first().ok_or_else(|| Error::new("loss", "a result", "none"))?;
    let mut wanted = vec![false; program.weights.len()];
    for weight in wrt {
        *wanted.get_mut(weight.0).ok_or_else(|| Error::new("wrt", "a weight", weight.0))? = true;
    }
    let mut at = Cotangents::new(program, wanted);
    let ones = at.fill(program.shape(loss), 1.0)?;
    at.ones = Some(ones);
    at.cotangents[loss.0] = Some(ones);
    for node in program.nodes.iter().rev() {
        if at.reaches(node) {
            at.node = node.clone();
            node.op.vjp(&mut at)?;
        }
    }
    let mut results = vec![at.replaced.map_or(loss, |by| by)];
    for weight in wrt {
        let shape = Shape::of_weight(&program.weights[weight.0].shape);
        results.push(match at.of_weights[weight.0] {
            Some(cotangent) => cotangent,
            None => at.fill(shape, 0.0)?,
        });
    }
    let mut gradient = at.program;
    gradient.results = results;
    gradient.traces.clear();
    sweep(&mut gradient);
    program::fuse_gradients(&mut gradient);
    gradient.verify()?;
    Ok(gradient)
}

/// Drops nodes that nothing needs. None may write a cache.
pub(super) fn sweep(program: &mut Program) {
    let mut needed = vec![false; program.values.len()];
    program.results.iter().for_each(|v| needed[v.0] = true);
    let mut kept: Vec<Node> = Vec::new();
    for node in program.nodes.drain(..).rev() {
        if node.outputs.iter().any(|v| needed[v.0]) {
            node.inputs.iter().for_each(|v| needed[v.0] = true);
            kept.push(node);
        }
    }
    kept.reverse();
    program.nodes = kept;
}

struct Cotangents {
    program: Program,
    /// The node in reverse.
    node: Node,
    /// Values that depend on a weight that is wanted.
    depends: Vec<bool>,
    wanted: Vec<bool>,
    cotangents: Vec<Option<ValueId>>,
    of_weights: Vec<Option<ValueId>>,
    ones: Option<ValueId>,
    /// The value that is computed in place of the loss, which it equals.
    replaced: Option<ValueId>,
}

impl Cotangents {
    fn new(program: &Program, wanted: Vec<bool>) -> Cotangents {
        let mut depends = vec![false; program.values.len()];
        for node in &program.nodes {
            let weights = node.weights.iter().any(|w| wanted[w.0]);
            let inputs = node.inputs.iter().any(|v| depends[v.0]);
            node.outputs.iter().for_each(|v| depends[v.0] = weights || inputs);
        }
        Cotangents {
            cotangents: vec![None; program.values.len()],
            of_weights: vec![None; program.weights.len()],
            node: Node {
                op: Op::from(Zip(Binary::Add)),
                inputs: Vec::new(),
                weights: Vec::new(),
                outputs: Vec::new(),
            },
            program: program.clone(),
            depends,
            wanted,
            ones: None,
            replaced: None,
        }
    }

    /// Whether a loss depends on the node, and the node on what is wanted.
    fn reaches(&self, node: &Node) -> bool {
        node.outputs.iter().any(|v| self.cotangents[v.0].is_some() && self.depends[v.0])
    }

    fn fill(&mut self, shape: Shape, value: f32) -> Result<ValueId> {
        let op = Op::from(Filled { shape, value });
        Ok(self.push(op, Vec::new(), Vec::new())?.swap_remove(0))
    }

    fn push(
        &mut self,
        op: Op,
        inputs: Vec<ValueId>,
        weights: Vec<WeightId>,
    ) -> Result<Vec<ValueId>> {
        let outputs = super::push(&mut self.program, op, inputs, weights)?;
        self.cotangents.resize(self.program.values.len(), None);
        Ok(outputs)
    }
}

impl Recorder for Cotangents {
    fn record(
        &mut self,
        op: Op,
        inputs: &[RuleValue],
        weights: &[usize],
    ) -> Result<Vec<RuleValue>> {
        let inputs = inputs.iter().map(|v| ValueId(v.0)).collect();
        let weights = weights.iter().map(|i| self.node.weights[*i]).collect();
        Ok(self.push(op, inputs, weights)?.into_iter().map(|v| RuleValue(v.0)).collect())
    }
}

impl Reverse for Cotangents {
    fn input(&self, index: usize) -> RuleValue {
        RuleValue(self.node.inputs[index].0)
    }

    fn output(&self, index: usize) -> RuleValue {
        RuleValue(self.node.outputs[index].0)
    }

    fn shape(&self, value: RuleValue) -> Shape {
        self.program.values[value.0]
    }

    fn weight(&self, index: usize) -> Option<&[usize]> {
        self.node.weights.get(index).map(|w| self.program.weights[w.0].shape.as_slice())
    }

    fn cotangent(&self, output: usize) -> Option<RuleValue> {
        self.cotangents[self.node.outputs[output].0].map(|v| RuleValue(v.0))
    }

    fn is_ones(&self, value: RuleValue) -> bool {
        self.ones == Some(ValueId(value.0))
    }

    fn wants(&self, of: Wrt) -> bool {
        match of {
            Wrt::Input(i) => self.node.inputs.get(i).is_some_and(|v| self.depends[v.0]),
            Wrt::Weight(i) => self.node.weights.get(i).is_some_and(|w| self.wanted[w.0]),
        }
    }

    fn give(&mut self, of: Wrt, cotangent: RuleValue) -> Result<()> {
        let cotangent = ValueId(cotangent.0);
        let (shape, before) = match of {
            Wrt::Input(i) => {
                let value = self.node.inputs[i];
                (self.program.shape(value), self.cotangents[value.0])
            }
            Wrt::Weight(i) => {
                let weight = self.node.weights[i];
                let shape = Shape::of_weight(&self.program.weights[weight.0].shape);
                (shape, self.of_weights[weight.0])
            }
        };
        let found = self.program.shape(cotangent);
        if found != shape {
            let place = format!("gradient of {}", self.node.op.name());
            return Err(Error::new(place, format!("{shape:?}"), format!("{found:?}")));
        }
        let sum = match before {
            Some(before) => {
                let op = Op::from(Zip(Binary::Add));
                self.push(op, vec![before, cotangent], Vec::new())?.swap_remove(0)
            }
            None => cotangent,
        };
        match of {
            Wrt::Input(i) => self.cotangents[self.node.inputs[i].0] = Some(sum),
            Wrt::Weight(i) => self.of_weights[self.node.weights[i].0] = Some(sum),
        }
        Ok(())
    }

    fn replace(&mut self, output: usize, by: RuleValue) {
        if self.program.results.first() == self.node.outputs.get(output) {
            self.replaced = Some(ValueId(by.0));
        }
    }
}
