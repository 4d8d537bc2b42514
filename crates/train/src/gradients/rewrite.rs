//! From a model's recorded Program to one that is trained: attention without a cache, factors beside matrices, and losses in the
//! place of logits.

use formats::{Error, ErrorKind, Result, Source};
use ops::gradient::{Attend, CrossEntropy};
use ops::{Attention, KvWrite, Linear, LinearAdd, Map, Op, Scale, Shape, Unary};
use program::{Node, Program, ValueId, Weight, WeightId};

/// A value of a new shape.
fn value(program: &mut Program, shape: Shape) -> ValueId {
    program.values.push(shape);
    ValueId(program.values.len() - 1)
}

/// The same Program for whole sequences, packed one behind the other, whose rows see each other instead of a cache. It must be as
/// it was recorded, before [`program::fuse`].
///
/// # Errors
/// Attention to a cache that nothing wrote.
pub fn pack(program: &Program) -> Result<Program> {
    let mut packed =
        Program { nodes: Vec::new(), layers: Vec::new(), traces: Vec::new(), ..program.clone() };
    packed.results.truncate(1);
    let mut cached: Vec<Option<[ValueId; 2]>> = vec![None; program.layers.len()];
    for node in &program.nodes {
        match &node.op {
            Op::KvWrite(KvWrite { layer }) => {
                cached[*layer] = Some([node.inputs[0], node.inputs[1]]);
            }
            Op::Attention(attention) => {
                let Some([k, v]) = cached[attention.layer] else {
                    return Err(Error::new("attention", "keys and values", "none"));
                };
                let rows = program.shape(node.inputs[0]).rows;
                let lse = value(&mut packed, Shape { rows, width: attention.heads });
                packed.nodes.push(Node {
                    op: Op::from(Attend(Attention { layer: 0, ..attention.clone() })),
                    inputs: vec![node.inputs[0], k, v],
                    weights: node.weights.clone(),
                    outputs: vec![node.outputs[0], lse],
                });
            }
            _ => packed.nodes.push(node.clone()),
        }
    }
    packed.verify()?;
    Ok(packed)
}

/// The factors beside one matrix of [`adapt`]'s Program.
#[derive(Debug, Clone, PartialEq)]
pub struct Factors {
    /// The matrix's canonical name.
    pub site: String,
    /// `[rank, in]`.
    pub down: WeightId,
    /// `[out, rank]`.
    pub up: WeightId,
    /// Columns and rows of the matrix.
    pub widths: [usize; 2],
}

/// The same Program with `y + scale up (down x)` in the place of the product `y` of `x` and each matrix that is `wanted` by
/// name; the factors are weights of their own, whose recipes are zeros.
///
/// # Errors
/// Weights that do not fit, which is a fault of the Program.
pub fn adapt(
    program: &Program,
    wanted: &dyn Fn(&str) -> bool,
    rank: usize,
    scale: f32,
) -> Result<(Program, Vec<Factors>)> {
    let mut adapted = Program { nodes: Vec::new(), ..program.clone() };
    let mut all = Vec::new();
    for node in &program.nodes {
        let name = node.weights.first().map(|w| program.weights[w.0].name.clone());
        let Some(site) = name.filter(|name| node.op == Op::from(Linear) && wanted(name)) else {
            adapted.nodes.push(node.clone());
            continue;
        };
        let (x, y) = (node.inputs[0], node.outputs[0]);
        let (input, output) = (program.shape(x), program.shape(y));
        let mut weight = |part: &str, shape: [usize; 2]| {
            let (name, source) = (format!("{site}.{part}"), Source::Zeros(shape.to_vec()));
            adapted.weights.push(Weight { name, shape: shape.to_vec(), source });
            WeightId(adapted.weights.len() - 1)
        };
        let down = weight("lora_A", [rank, input.width]);
        let up = weight("lora_B", [output.width, rank]);
        let base = value(&mut adapted, output);
        let [low, scaled] = [(); 2].map(|()| value(&mut adapted, Shape { width: rank, ..input }));
        let mut push = |op: Op, inputs: &[ValueId], weights: Vec<WeightId>, output: ValueId| {
            adapted.nodes.push(Node {
                op,
                inputs: inputs.to_vec(),
                weights,
                outputs: vec![output],
            });
        };
        push(node.op.clone(), &[x], node.weights.clone(), base);
        push(Op::from(Linear), &[x], vec![down], low);
        push(Op::from(Scale { by: scale }), &[low], Vec::new(), scaled);
        push(Op::from(LinearAdd), &[scaled, base], vec![up], y);
        all.push(Factors { site, down, up, widths: [input.width, output.width] });
    }
    adapted.verify()?;
    Ok((adapted, all))
}

/// The same Program with the losses of its logits in their place, `[outputs, 1]`: the product of the head and what follows it
/// become one operation.
///
/// # Errors
/// A Program that does not end in a linear head, or in one with something else behind it than scaling and a bound.
pub fn losses(program: &Program) -> Result<Program> {
    let unknown = |found: &str| {
        let expected = "logits of a linear head, scaled or bounded by tanh";
        Error::new("losses", expected, found).of(ErrorKind::Unsupported)
    };
    let writers = program.writers();
    let mut behind: Vec<&Op> = Vec::new();
    let mut logits = *program.results.first().ok_or_else(|| unknown("no result"))?;
    let head = loop {
        let node =
            writers[logits.0].map(|i| &program.nodes[i]).ok_or_else(|| unknown("an input"))?;
        match &node.op {
            Op::Linear(_) => break node.clone(),
            op @ (Op::Scale(_) | Op::Map(_)) => behind.insert(0, op),
            other => return Err(unknown(other.name())),
        }
        logits = node.inputs[0];
    };
    let (scale, cap) = match behind.as_slice() {
        [] => (1.0, None),
        [Op::Scale(Scale { by })] => (*by, None),
        [Op::Scale(before), Op::Map(Map(Unary::Tanh)), Op::Scale(after)] => {
            (before.by * after.by, Some(after.by))
        }
        [.., last] => return Err(unknown(last.name())),
    };
    let mut of = program.clone();
    let losses = value(&mut of, Shape { width: 1, ..program.shape(head.inputs[0]) });
    let op = Op::from(CrossEntropy::new(scale, cap));
    of.nodes.push(Node { op, outputs: vec![losses], ..head });
    of.results = vec![losses];
    of.traces.clear();
    super::differentiate::sweep(&mut of);
    of.verify()?;
    Ok(of)
}
