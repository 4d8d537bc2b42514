//! The reference interpreter: runs a Program with the operations' own reference loops. Slow and
//! obvious; every device is compared with it.

use crate::{AdapterFactors, Node, Offloaded, Program, Sequence, Site, Step, WeightId};
use formats::{Error, Result};
use ops::operation::{CachedLayer, ReferenceCall};
use ops::{Op, Rows, all_gather, all_reduce};

/// The cache of every layer, for all positions.
#[derive(Debug, Clone, Default)]
pub struct ReferenceCache {
    layers: Vec<CachedLayer>,
}

/// Replays `program` once, for a step of one sequence. `weight` returns a weight's elements,
/// row-major; the result holds every value.
///
/// # Errors
/// Errors of `weight`, and a step of several sequences, since `cache` belongs to one.
pub fn run(
    program: &Program,
    weight: &dyn Fn(WeightId) -> Result<Vec<f32>>,
    cache: &mut ReferenceCache,
    step: &Step<'_>,
) -> Result<Vec<Vec<f32>>> {
    adapted(program, weight, None, cache, step)
}

/// As [`run`], with an adapter on the step's sequence.
///
/// # Errors
/// As [`run`], an adapter that does not fit the Program's sites, and one of experts, which the
/// reference does not compute.
pub fn adapted(
    program: &Program,
    weight: &dyn Fn(WeightId) -> Result<Vec<f32>>,
    adapter: Option<&AdapterFactors>,
    cache: &mut ReferenceCache,
    step: &Step<'_>,
) -> Result<Vec<Vec<f32>>> {
    adapter.map_or(Ok(()), |adapter| adapter.check(&program.sites))?;
    let changed = |name: &str| adapter.is_some_and(|adapter| adapter.deltas.contains_key(name));
    let stack = |site: &&Site| site.experts.is_some() && changed(&site.name);
    if let Some(site) = program.sites.iter().find(stack) {
        return Err(Error::new(&site.name, "a matrix", "experts, whose factors devices compute"));
    }
    let weight = |_: usize, w| weight(w);
    let (programs, caches) = (std::slice::from_ref(program), std::slice::from_mut(cache));
    let all = together(programs, &weight, adapter, caches, step)?;
    Ok(all.into_iter().flatten().collect())
}

/// As [`run`], for the Programs of all ranks ([`Program::shard`]) together, node by node. `weight`
/// gets the rank as well; `caches` has one for each. The values returned are those of each rank.
///
/// # Errors
/// As [`run`].
pub fn ranks(
    programs: &[Program],
    weight: &dyn Fn(usize, WeightId) -> Result<Vec<f32>>,
    caches: &mut [ReferenceCache],
    step: &Step<'_>,
) -> Result<Vec<Vec<Vec<f32>>>> {
    together(programs, weight, None, caches, step)
}

/// As [`run`], for both sides of a Program from which operations were [moved](Program::offload),
/// alternating at exchanges. `weight` gets the side as well. The values returned are the home
/// side's.
///
/// # Errors
/// As [`run`], and sides whose exchanges differ.
pub fn offloaded(
    both: &Offloaded,
    weight: &dyn Fn(&Program, WeightId) -> Result<Vec<f32>>,
    cache: &mut ReferenceCache,
    step: &Step<'_>,
) -> Result<Vec<Vec<f32>>> {
    let &[sequence] = step.sequences else {
        let found = format!("{} sequences", step.sequences.len());
        return Err(Error::new("reference", "a step of one sequence", found));
    };
    let Offloaded { home, away } = both;
    let rows = Rowed::new(step, &sequence, None)?;
    let [mut here, mut there] = [home, away].map(|program| values(program, step));
    cache.layers.resize(home.layers.len(), Default::default());
    let mut none = ReferenceCache::default();
    let mut moved = away.nodes.iter().peekable();
    for node in &home.nodes {
        if !matches!(node.op, Op::Exchange(_)) {
            compute(home, node, weight, &mut here, cache, &rows)?;
            continue;
        }
        let unlike = || Error::new("offload", "an exchange on both sides", "on one");
        let brought = moved.next().ok_or_else(unlike)?;
        for (to, from) in brought.outputs.iter().zip(&node.inputs) {
            there[to.0].clone_from(&here[from.0]);
        }
        while let Some(node) = moved.next_if(|node| !matches!(node.op, Op::Exchange(_))) {
            compute(away, node, weight, &mut there, &mut none, &rows)?;
        }
        let given = moved.peek().ok_or_else(unlike)?;
        for (to, from) in node.outputs.iter().zip(&given.inputs) {
            here[to.0].clone_from(&there[from.0]);
        }
    }
    Ok(here)
}

/// Computes one node of a Program.
fn compute(
    program: &Program,
    node: &Node,
    weight: &dyn Fn(&Program, WeightId) -> Result<Vec<f32>>,
    values: &mut [Vec<f32>],
    cache: &mut ReferenceCache,
    rows: &Rowed<'_>,
) -> Result<()> {
    let weights = node.weights.iter().map(|w| weight(program, *w)).collect::<Result<Vec<_>>>()?;
    let outputs = evaluate(program, node, values, &weights, cache, rows);
    for (value, output) in node.outputs.iter().zip(outputs) {
        values[value.0] = output;
    }
    Ok(())
}

/// Combines the contributions of all ranks, in rank order.
type Joins = fn(&[&[f32]], &mut [f32]);

fn together(
    programs: &[Program],
    weight: &dyn Fn(usize, WeightId) -> Result<Vec<f32>>,
    adapter: Option<&AdapterFactors>,
    caches: &mut [ReferenceCache],
    step: &Step<'_>,
) -> Result<Vec<Vec<Vec<f32>>>> {
    let &[sequence] = step.sequences else {
        let found = format!("{} sequences", step.sequences.len());
        return Err(Error::new("reference", "a step of one sequence", found));
    };
    let rows = Rowed::new(step, &sequence, adapter)?;
    let mut all: Vec<_> = programs.iter().map(|program| values(program, step)).collect();
    for (program, cache) in programs.iter().zip(&mut *caches) {
        cache.layers.resize(program.layers.len(), Default::default());
    }
    for i in 0..programs.iter().map(|program| program.nodes.len()).max().unwrap_or(0) {
        let collective = |program: &Program| match program.nodes.get(i).map(|node| &node.op) {
            Some(Op::AllReduce(_)) => Some(all_reduce::reference as Joins),
            Some(Op::AllGather(_)) => Some(all_gather::reference as Joins),
            _ => None,
        };
        if let Some(join) = programs.iter().find_map(collective) {
            let name = |program: &Program| program.nodes.get(i).map(|node| node.op.name());
            let names: Vec<_> = programs.iter().map(name).collect();
            if names.iter().any(|name| *name != names[0]) {
                return Err(Error::new(
                    "ranks",
                    "an operation of all of them",
                    format!("{names:?}"),
                ));
            }
            let part = |(program, values): (&Program, &Vec<Vec<f32>>)| {
                values[program.nodes[i].inputs[0].0].clone()
            };
            let parts: Vec<Vec<f32>> = programs.iter().zip(&all).map(part).collect();
            let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
            for (program, values) in programs.iter().zip(&mut all) {
                join(&parts, &mut values[program.nodes[i].outputs[0].0]);
            }
            continue;
        }
        for (rank, program) in programs.iter().enumerate() {
            let node = &program.nodes[i];
            let of = |_: &Program, w| weight(rank, w);
            compute(program, node, &of, &mut all[rank], &mut caches[rank], &rows)?;
        }
    }
    Ok(all)
}

/// A step with the position of each row.
struct Rowed<'a> {
    tokens: &'a [u32],
    outputs: &'a [u32],
    /// Position of each row: its index in the cache, which is also its rotary position.
    positions: Vec<u32>,
    /// The adapter on all rows.
    adapter: Option<&'a AdapterFactors>,
}

impl<'a> Rowed<'a> {
    fn new(
        step: &Step<'a>,
        sequence: &Sequence<'_>,
        adapter: Option<&'a AdapterFactors>,
    ) -> Result<Self> {
        if sequence.position != sequence.start {
            let expected = format!("rotary position {}, the index in the cache", sequence.start);
            return Err(Error::new("reference", expected, sequence.position));
        }
        let positions = (sequence.start..sequence.end()).collect();
        Ok(Rowed { tokens: step.tokens, outputs: step.outputs, positions, adapter })
    }
}

/// Allocates every value, and fills in the input.
fn values(program: &Program, step: &Step<'_>) -> Vec<Vec<f32>> {
    let rows = |rows: Rows| rows.count(step.tokens.len(), step.outputs.len());
    let mut values: Vec<Vec<f32>> =
        program.values.iter().map(|s| vec![0.0; rows(s.rows) * s.width]).collect();
    if let Some(input) = program.input {
        values[input.0] = step.input.to_vec();
    }
    values
}

fn evaluate(
    program: &Program,
    node: &Node,
    values: &[Vec<f32>],
    weights: &[Vec<f32>],
    cache: &mut ReferenceCache,
    step: &Rowed<'_>,
) -> Vec<Vec<f32>> {
    let site = node.op.site().and_then(|site| program.sites.get(site));
    let delta = site.zip(step.adapter).and_then(|(site, adapter)| adapter.deltas.get(&site.name));
    let mut call = ReferenceCall {
        inputs: node.inputs.iter().map(|v| values[v.0].as_slice()).collect(),
        widths: node.inputs.iter().map(|v| program.shape(*v).width).collect(),
        weights,
        outputs: node.outputs.iter().map(|v| values[v.0].clone()).collect(),
        tokens: step.tokens,
        positions: &step.positions,
        picks: step.outputs,
        deltas: vec![delta; step.tokens.len()],
        cache: &mut cache.layers,
        packed: Default::default(),
    };
    node.op.reference(&mut call);
    call.outputs
}
