//! Fusion: a norm with the projections that share it, SwiGLU's gate, residual additions, and the
//! norms, rotations and cache write of q, k and v, a short convolution with its activation, the norm
//! of each head with its gate, other gates, a residual with the norm of what is added to it; for GPUs, experts with what is added to them; for
//! training, gates and sums of products. Each rule removes passes over activations; none changes a
//! result beyond rounding.

use crate::{Node, Program, ValueId};
use ops::gradient::{Gradient, LinearBackwardAdd};
use ops::{
    Binary, GateUp, Gated, GatedNorm, KvWrite, LinearAdd, Map, NormAdd, Op, Project, RmsNorm,
    RopeWrite, ShortConv, Unary, Zip,
};

/// Rewrites a Program with fused operations. Values that are results or traced keep their meaning.
pub fn fuse(program: &Program) -> Program {
    let mut fused = program.clone();
    projections(&mut fused);
    gate_up(&mut fused);
    sums(&mut fused, |node| matches!(node.op, Op::Linear(_)).then(|| Op::from(LinearAdd)));
    rope_write(&mut fused);
    activated(&mut fused);
    gated_norms(&mut fused);
    wherever(&mut fused, norm_add_at);
    fuse_gates(&mut fused);
    fused
}

/// Rewrites a Program with gates as one operation each: to be trained, so that no activation of a
/// gate is kept for its gradient.
pub fn fuse_gates(program: &mut Program) {
    wherever(program, gated_at);
}

/// Adds products to the other terms of a value's gradient, which its readers give, as they are
/// made.
pub fn fuse_gradients(program: &mut Program) {
    let added = |node: &Node| matches!(node.op, Op::Gradient(Gradient::LinearBackward(_)));
    sums(program, |node| added(node).then(|| Op::from(LinearBackwardAdd)));
}

/// Adds residuals in mixtures of experts, for devices that add as they sum experts.
pub fn fuse_mixtures(program: &mut Program) {
    residuals_first(program);
    sums(program, |node| plain_mixture(node).then(|| node.op.clone()));
}

/// Whether a node is a mixture without a residual.
fn plain_mixture(node: &Node) -> bool {
    matches!(node.op, Op::Experts(_)) && node.inputs.len() == 2
}

/// `add(x, linear_add(shared, experts))` becomes `linear_add(shared, add(x, experts))`, the sum in
/// the mixture itself: experts beside a shared one.
fn residuals_first(program: &mut Program) {
    let mut at = 0;
    while at < program.nodes.len() {
        match residual_first_at(program, at) {
            Some((mixture, linear, x)) => {
                program.nodes[mixture].inputs.push(x);
                let outputs = program.nodes[at].outputs.clone();
                program.nodes[linear].outputs = outputs;
                program.nodes.remove(at);
            }
            None => at += 1,
        }
    }
}

/// The mixture, the product and the residual of the sum at `at`.
fn residual_first_at(program: &Program, at: usize) -> Option<(usize, usize, ValueId)> {
    let add = &program.nodes[at];
    if !matches!(add.op, Op::Zip(Zip(Binary::Add))) {
        return None;
    }
    let [a, b] = [add.inputs[0], add.inputs[1]];
    [(a, b), (b, a)].into_iter().find_map(|(x, sum)| {
        let linear = single(program, sum)?;
        let mixture = single(program, *program.nodes[linear].inputs.get(1)?)?;
        let fits = matches!(program.nodes[linear].op, Op::LinearAdd(_))
            && plain_mixture(&program.nodes[mixture])
            && program.nodes[linear].inputs[1] == program.nodes[mixture].outputs[0]
            && program.writers()[x.0].map_or(program.input == Some(x), |i| i < mixture);
        fits.then_some((mixture, linear, x))
    })
}

/// The gate that is the `mul` at `at` and its activation.
fn gated_at(program: &Program, at: usize) -> Option<(Node, Vec<usize>)> {
    let mul = &program.nodes[at];
    if !matches!(mul.op, Op::Zip(Zip(Binary::Mul))) {
        return None;
    }
    let [a, b] = [mul.inputs[0], mul.inputs[1]];
    [(a, b), (b, a)].into_iter().find_map(|(value, up)| {
        let map = single(program, value)?;
        let Op::Map(Map(act)) = program.nodes[map].op else { return None };
        let inputs = vec![program.nodes[map].inputs[0], up];
        Some((Node { op: Op::from(Gated(act)), inputs, ..mul.clone() }, vec![map]))
    })
}

/// Rewrites every node for which `found` gives another one, and those that this one replaces, too.
fn wherever(program: &mut Program, found: impl Fn(&Program, usize) -> Option<(Node, Vec<usize>)>) {
    let mut at = 0;
    while at < program.nodes.len() {
        match found(program, at) {
            Some((node, gone)) => {
                rewrite(program, at, node, &gone);
                at = 0;
            }
            None => at += 1,
        }
    }
}

/// Replaces the node at `at` and drops `gone`.
fn rewrite(program: &mut Program, at: usize, node: Node, gone: &[usize]) {
    program.nodes[at] = node;
    let mut index = 0;
    program.nodes.retain(|_| {
        index += 1;
        index - 1 == at || !gone.contains(&(index - 1))
    });
}

/// The node that writes `value`, if it has exactly one reader and is no result.
fn single(program: &Program, value: ValueId) -> Option<usize> {
    (program.uses()[value.0] == 1).then(|| program.writers()[value.0]).flatten()
}

/// `rms_norm` + the linears that read it; or linears alone that share an input.
fn projections(program: &mut Program) {
    let mut at = 0;
    while at < program.nodes.len() {
        let node = &program.nodes[at];
        let norm = match node.op {
            Op::RmsNorm(norm) => Some(norm.eps),
            Op::Linear(_) => None,
            _ => {
                at += 1;
                continue;
            }
        };
        let shared = if norm.is_some() { node.outputs[0] } else { node.inputs[0] };
        let readers: Vec<usize> = (0..program.nodes.len())
            .filter(|&i| program.nodes[i].inputs.contains(&shared))
            .collect();
        let mut linears: Vec<usize> = readers
            .iter()
            .copied()
            .filter(|&i| i >= at && matches!(program.nodes[i].op, Op::Linear(_)))
            .collect();
        // What attention takes may be rounded, and all results of a product have one type.
        if linears.iter().any(|&i| attended(program, program.nodes[i].outputs[0])) {
            linears.retain(|&i| !scores(program, program.nodes[i].outputs[0]));
        }
        let enough = if norm.is_some() {
            !linears.is_empty() && linears.len() == program.uses()[shared.0]
        } else {
            linears.len() > 1
        };
        if enough {
            let mut weights = if norm.is_some() { node.weights.clone() } else { Vec::new() };
            weights.extend(linears.iter().flat_map(|&i| program.nodes[i].weights.clone()));
            let fused = Node {
                op: Op::Project(Project {
                    norm,
                    biases: linears.iter().map(|&i| program.nodes[i].weights.len() == 2).collect(),
                }),
                inputs: vec![node.inputs[0]],
                weights,
                outputs: linears.iter().map(|&i| program.nodes[i].outputs[0]).collect(),
            };
            rewrite(program, at, fused, &linears);
        }
        at += 1;
    }
}

/// Whether attention takes a value, as it is or rotated.
fn attended(program: &Program, value: ValueId) -> bool {
    let takes = |node: &Node| matches!(node.op, Op::Rope(_) | Op::KvWrite(_) | Op::Attention(_));
    program.nodes.iter().any(|node| takes(node) && node.inputs.contains(&value))
}

/// Whether a value chooses experts.
fn scores(program: &Program, value: ValueId) -> bool {
    let chooses = |node: &Node| matches!(node.op, Op::Experts(_)) && node.inputs[1] == value;
    program.nodes.iter().any(chooses)
}

/// `mul(f(gate), up)` over a two-way projection without biases.
fn gate_up(program: &mut Program) {
    let mut at = 0;
    while at < program.nodes.len() {
        if let Some((project, map, act)) = gate_up_at(program, at) {
            let Op::Project(Project { norm, .. }) = program.nodes[project].op else {
                unreachable!("matched above")
            };
            let node = Node {
                op: Op::from(GateUp { norm, act }),
                outputs: program.nodes[at].outputs.clone(),
                ..program.nodes[project].clone()
            };
            rewrite(program, project, node, &[map, at]);
        } else {
            at += 1;
        }
    }
}

/// The projection and the activation function whose product is the `mul` at `at`.
fn gate_up_at(program: &Program, at: usize) -> Option<(usize, usize, Unary)> {
    let mul = &program.nodes[at];
    if !matches!(mul.op, Op::Zip(Zip(Binary::Mul))) {
        return None;
    }
    let map = single(program, mul.inputs[0])?;
    let Op::Map(Map(act)) = program.nodes[map].op else { return None };
    let gate = program.nodes[map].inputs[0];
    let project = single(program, gate)?;
    let node = &program.nodes[project];
    let fits = matches!(&node.op, Op::Project(p) if p.biases == [false, false])
        && node.outputs == [gate, mul.inputs[1]]
        && single(program, mul.inputs[1]) == Some(project);
    fits.then_some((project, map, act))
}

/// `add(residual, product(x))`, either way round, for products that `fused` gives another operation
/// for.
fn sums(program: &mut Program, fused: impl Fn(&Node) -> Option<Op>) {
    let mut at = 0;
    while at < program.nodes.len() {
        let found = matches!(program.nodes[at].op, Op::Zip(Zip(Binary::Add)))
            .then(|| {
                let [a, b] = [program.nodes[at].inputs[0], program.nodes[at].inputs[1]];
                [(a, b), (b, a)].into_iter().find_map(|(residual, value)| {
                    let linear = single(program, value)?;
                    let node = &program.nodes[linear];
                    let op = fused(node).filter(|_| node.outputs[0] == value)?;
                    Some((residual, linear, op))
                })
            })
            .flatten();
        if let Some((residual, linear, op)) = found {
            let mut node = Node { op, ..program.nodes[linear].clone() };
            node.inputs.push(residual);
            node.outputs[0] = program.nodes[at].outputs[0];
            rewrite(program, at, node, &[linear]);
        } else {
            at += 1;
        }
    }
}

/// `map(short_conv(x))`.
fn activated(program: &mut Program) {
    wherever(program, activated_at);
}

/// The convolution with the activation that is the `map` at `at`.
fn activated_at(program: &Program, at: usize) -> Option<(Node, Vec<usize>)> {
    let Op::Map(Map(act)) = program.nodes[at].op else { return None };
    let conv = single(program, program.nodes[at].inputs[0])?;
    let Op::ShortConv(op @ ShortConv { activation: None, .. }) = program.nodes[conv].op else {
        return None;
    };
    let op = Op::from(ShortConv { activation: Some(act), ..op });
    let outputs = program.nodes[at].outputs.clone();
    Some((Node { op, outputs, ..program.nodes[conv].clone() }, vec![conv]))
}

/// `mul(rms_norm(x), silu(gate))`, either way round.
fn gated_norms(program: &mut Program) {
    wherever(program, gated_norm_at);
}

/// The gated norm that is the `mul` at `at`, its norm and its activation.
fn gated_norm_at(program: &Program, at: usize) -> Option<(Node, Vec<usize>)> {
    let mul = &program.nodes[at];
    if !matches!(mul.op, Op::Zip(Zip(Binary::Mul))) {
        return None;
    }
    let [a, b] = [mul.inputs[0], mul.inputs[1]];
    [(a, b), (b, a)].into_iter().find_map(|(normed, gate)| {
        let (norm, map) = (single(program, normed)?, single(program, gate)?);
        let [norm_node, map_node] = [norm, map].map(|at| &program.nodes[at]);
        let (Op::RmsNorm(RmsNorm { eps }), Op::Map(Map(Unary::Silu))) =
            (&norm_node.op, &map_node.op)
        else {
            return None;
        };
        let weight = program.weights[norm_node.weights[0].0].shape.iter().product::<usize>();
        let groups = program.shape(normed).width / weight.max(1);
        let node = Node {
            op: Op::from(GatedNorm { eps: *eps, groups, norm_first: true }),
            inputs: vec![map_node.inputs[0], norm_node.inputs[0]],
            weights: norm_node.weights.clone(),
            outputs: mul.outputs.clone(),
        };
        Some((node, vec![norm, map]))
    })
}

/// The `add(residual, rms_norm(x))` at `at`, either way round, and its norm, which is of whole rows.
fn norm_add_at(program: &Program, at: usize) -> Option<(Node, Vec<usize>)> {
    let add = &program.nodes[at];
    if !matches!(add.op, Op::Zip(Zip(Binary::Add))) {
        return None;
    }
    let [a, b] = [add.inputs[0], add.inputs[1]];
    [(a, b), (b, a)].into_iter().find_map(|(residual, normed)| {
        let norm = single(program, normed)?;
        let node = &program.nodes[norm];
        let Op::RmsNorm(RmsNorm { eps }) = node.op else { return None };
        let whole = *program.weights[node.weights[0].0].shape == [program.shape(normed).width];
        let fused = Node {
            op: Op::from(NormAdd { eps }),
            inputs: vec![node.inputs[0], residual],
            weights: node.weights.clone(),
            outputs: add.outputs.clone(),
        };
        whole.then(|| (fused, vec![norm]))
    })
}

/// A rotated operand: its source value, its optional norm, and the nodes that fusion removes.
struct Rotated {
    source: ValueId,
    norm: Option<(f32, crate::WeightId)>,
    rope: ops::Rope,
    nodes: Vec<usize>,
}

fn rotated(program: &Program, value: ValueId) -> Option<Rotated> {
    let at = single(program, value)?;
    let Op::Rope(rope) = &program.nodes[at].op else { return None };
    let source = program.nodes[at].inputs[0];
    let mut found = Rotated { source, norm: None, rope: rope.clone(), nodes: vec![at] };
    if let Some(norm) = single(program, source)
        && let Op::RmsNorm(RmsNorm { eps }) = program.nodes[norm].op
        && program.weights[program.nodes[norm].weights[0].0].shape == [rope.head_dim]
    {
        found.source = program.nodes[norm].inputs[0];
        found.norm = Some((eps, program.nodes[norm].weights[0]));
        found.nodes.push(norm);
    }
    Some(found)
}

/// Fuses the q/k norms, rotations and cache write of one layer.
fn rope_write(program: &mut Program) {
    wherever(program, rope_write_at);
}

fn rope_write_at(program: &Program, at: usize) -> Option<(Node, Vec<usize>)> {
    let write = &program.nodes[at];
    let (Op::KvWrite(KvWrite { layer }), &[key, value]) = (&write.op, &write.inputs[..]) else {
        return None;
    };
    let layer = *layer;
    let attention = program
        .nodes
        .iter()
        .position(|n| matches!(&n.op, Op::Attention(a) if a.layer == layer))
        .filter(|&i| i > at)?;
    let turned = program.nodes[attention].inputs[0];
    let (q, k) = (rotated(program, turned)?, rotated(program, key)?);
    // The fused node takes the position of the write, so q's source must have been written by then;
    // it may overwrite k's source.
    if q.rope != k.rope || program.writers()[q.source.0]? > at || program.uses()[k.source.0] != 1 {
        return None;
    }
    let node = Node {
        op: Op::RopeWrite(RopeWrite {
            layer,
            rope: q.rope,
            q_norm: q.norm.map(|n| n.0),
            k_norm: k.norm.map(|n| n.0),
        }),
        inputs: vec![q.source, k.source, value],
        weights: [q.norm, k.norm].into_iter().flatten().map(|n| n.1).collect(),
        outputs: vec![turned],
    };
    Some((node, [q.nodes, k.nodes].concat()))
}
