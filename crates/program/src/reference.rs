//! Runs a Program with the operations' own reference loops: slow, obvious, and what every device is compared with.

use crate::{Arguments, Node, Program, WeightId};
use formats::{Error, Result};
use ops::project::Project;
use ops::{Op, Rows, add, all_reduce, embed, linear, mul, rms_norm, select, silu};

/// Keys and values of every position, per layer: `[positions, kv_heads * head_dim]`, f32.
#[derive(Debug, Clone, Default)]
pub struct Cache {
    layers: Vec<(Vec<f32>, Vec<f32>)>,
}

/// Replays `program` once. `weight` gives a weight's elements, row-major; the result holds every value.
pub fn run(
    program: &Program,
    weight: &dyn Fn(WeightId) -> Result<Vec<f32>>,
    cache: &mut Cache,
    arguments: &Arguments<'_>,
) -> Result<Vec<Vec<f32>>> {
    let weight = |_: usize, w| weight(w);
    let all =
        ranks(std::slice::from_ref(program), &weight, std::slice::from_mut(cache), arguments)?;
    Ok(all.into_iter().flatten().collect())
}

/// As [`run`], the Programs of all ranks ([`Program::shard`]) together, node by node. `weight` is told the rank first.
pub fn ranks(
    programs: &[Program],
    weight: &dyn Fn(usize, WeightId) -> Result<Vec<f32>>,
    caches: &mut [Cache],
    arguments: &Arguments<'_>,
) -> Result<Vec<Vec<Vec<f32>>>> {
    let mut all: Vec<_> = programs.iter().map(|program| values(program, arguments)).collect();
    for (program, cache) in programs.iter().zip(&mut *caches) {
        cache.layers.resize(program.layers.len(), Default::default());
    }
    for i in 0..programs.iter().map(|program| program.nodes.len()).max().unwrap_or(0) {
        let sums = programs.iter().filter(|program| program.nodes[i].op == Op::AllReduce).count();
        if sums > 0 && sums < programs.len() {
            return Err(Error::new("ranks", "an all_reduce of all of them", format!("of {sums}")));
        }
        if sums > 0 {
            let part = |(program, values): (&Program, &Vec<Vec<f32>>)| {
                values[program.nodes[i].inputs[0].0].clone()
            };
            let parts: Vec<Vec<f32>> = programs.iter().zip(&all).map(part).collect();
            let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
            for (program, values) in programs.iter().zip(&mut all) {
                all_reduce::reference(&parts, &mut values[program.nodes[i].outputs[0].0]);
            }
            continue;
        }
        for (rank, program) in programs.iter().enumerate() {
            let node = &program.nodes[i];
            let weights =
                node.weights.iter().map(|w| weight(rank, *w)).collect::<Result<Vec<_>>>()?;
            let outputs =
                evaluate(program, node, &all[rank], &weights, &mut caches[rank], arguments);
            for (value, output) in node.outputs.iter().zip(outputs) {
                all[rank][value.0] = output;
            }
        }
    }
    Ok(all)
}

/// Room for every value, and the input.
fn values(program: &Program, arguments: &Arguments<'_>) -> Vec<Vec<f32>> {
    let rows = |rows: Rows| match rows {
        Rows::Tokens => arguments.tokens.len(),
        Rows::Outputs => arguments.outputs.len(),
    };
    let mut values: Vec<Vec<f32>> =
        program.values.iter().map(|s| vec![0.0; rows(s.rows) * s.width]).collect();
    if let Some(input) = program.input {
        values[input.0] = arguments.input.to_vec();
    }
    values
}

fn evaluate(
    program: &Program,
    node: &Node,
    values: &[Vec<f32>],
    weights: &[Vec<f32>],
    cache: &mut Cache,
    arguments: &Arguments<'_>,
) -> Vec<Vec<f32>> {
    let x = |i: usize| values[node.inputs[i].0].as_slice();
    let width = |i: usize| program.shape(node.inputs[i]).width;
    let mut y: Vec<Vec<f32>> = node.outputs.iter().map(|v| values[v.0].clone()).collect();
    match &node.op {
        Op::Embed => {
            let table_width = program.shape(node.outputs[0]).width;
            embed::reference(arguments.tokens, &weights[0], table_width, &mut y[0]);
        }
        Op::RmsNorm { eps } => rms_norm::reference(x(0), &weights[0], *eps, &mut y[0]),
        Op::Linear => linear::reference(
            x(0),
            &weights[0],
            weights.get(1).map(Vec::as_slice),
            width(0),
            &mut y[0],
        ),
        Op::Add => add::reference(x(0), x(1), &mut y[0]),
        Op::Mul => mul::reference(x(0), x(1), &mut y[0]),
        Op::Silu => silu::reference(x(0), &mut y[0]),
        Op::Rope(rope) => {
            y[0].copy_from_slice(x(0));
            rope.reference(arguments.positions, width(0), &mut y[0]);
        }
        Op::KvWrite { layer } => write(cache, *layer, width(0), arguments.positions, x(0), x(1)),
        Op::Attention(attention) => {
            let (keys, values) = &cache.layers[attention.layer];
            attention.reference(arguments.positions, x(0), keys, values, &mut y[0]);
        }
        Op::Select => select::reference(x(0), arguments.outputs, width(0), &mut y[0]),
        Op::Project(op) => y = project(op, x(0), width(0), weights),
        Op::GateUp { norm } => {
            let both = project(&ops::gate_up::projections(*norm), x(0), width(0), weights);
            let mut gate = vec![0.0; both[0].len()];
            silu::reference(&both[0], &mut gate);
            mul::reference(&gate, &both[1], &mut y[0]);
        }
        Op::LinearAdd => {
            let mut delta = y[0].clone();
            linear::reference(
                x(0),
                &weights[0],
                weights.get(1).map(Vec::as_slice),
                width(0),
                &mut delta,
            );
            add::reference(x(1), &delta, &mut y[0]);
        }
        // Met by `ranks` before.
        Op::AllReduce => all_reduce::reference(&[x(0)], &mut y[0]),
        Op::RopeWrite(op) => {
            let mut norms = weights.iter();
            let mut turn = |i: usize, eps: Option<f32>| {
                let mut turned = x(i).to_vec();
                if let (Some(eps), Some(weight)) = (eps, eps.and_then(|_| norms.next())) {
                    rms_norm::reference(x(i), weight, eps, &mut turned);
                }
                op.rope.reference(arguments.positions, width(i), &mut turned);
                turned
            };
            y[0] = turn(0, op.q_norm);
            let keys = turn(1, op.k_norm);
            write(cache, op.layer, width(1), arguments.positions, &keys, x(2));
        }
    }
    y
}

fn project(op: &Project, x: &[f32], width: usize, weights: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut input = x.to_vec();
    if let Some(eps) = op.norm {
        rms_norm::reference(x, &weights[0], eps, &mut input);
    }
    let one = |p: ops::project::Projection| {
        let mut y = vec![0.0; x.len() / width * (weights[p.weight].len() / width)];
        linear::reference(
            &input,
            &weights[p.weight],
            p.bias.map(|b| weights[b].as_slice()),
            width,
            &mut y,
        );
        y
    };
    op.projections().map(one).collect()
}

fn write(
    cache: &mut Cache,
    layer: usize,
    width: usize,
    positions: &[u32],
    keys: &[f32],
    values: &[f32],
) {
    let (cached_keys, cached_values) = &mut cache.layers[layer];
    for (t, &position) in positions.iter().enumerate() {
        let end = (position as usize + 1) * width;
        for (cached, rows) in [(&mut *cached_keys, keys), (&mut *cached_values, values)] {
            if cached.len() < end {
                cached.resize(end, 0.0);
            }
            cached[end - width..end].copy_from_slice(&rows[t * width..][..width]);
        }
    }
}
