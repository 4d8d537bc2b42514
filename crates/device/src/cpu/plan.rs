//! The memory that a Program takes on the CPU, and its pools of cache blocks.

use super::class::Class;
use super::state::{self, Cache, States};
use super::weights::{Wanted, weight_bytes};
use super::{experts, memory};
use crate::{ExecutorOptions, Plan};
use cpu_kernels::attention::{AttentionShape, Geometry, LayerCache};
use cpu_kernels::matmul::{Huge, Scratch};
use formats::{Error, Result, Tensors};
use ops::Op;
use program::{BLOCK_TOKENS, CacheLayer, Node, Program};

/// Memory that the Program takes with a full context.
pub(super) fn plan(
    program: &Program,
    tensors: &Tensors,
    options: &ExecutorOptions,
    threads: usize,
    wanted: &Wanted<'_>,
) -> Result<Plan> {
    let weights = program.weights.iter().zip(experts::rows_of_one(program));
    let weights = weights.filter(|(weight, each)| wanted.find(weight, each).is_none());
    let weights = weights.map(|(weight, each)| weight_bytes(weight, each, tensors));
    let mut weights = weights.collect::<Result<Vec<usize>>>()?;
    let (cache, reserved) = (
        cache_bytes(program, options, &options.context)?,
        cache_bytes(program, options, &options.blocks)?,
    );
    let limits = options.limits(program);
    let seat_rank = options.seats.rank;
    let rank = program.most_ranks(seat_rank);
    let arena = (limits.tokens, limits.outputs);
    let arena = Class::new(program, &program.ropes(), arena.0, arena.1, threads, rank).bytes;
    if options.seats.count > 0 {
        let factors = |site: &program::Site| {
            let rank = site.most_ranks(seat_rank);
            (site.input + site.output) * site.matrices() * rank * size_of::<f32>()
        };
        let adapter: usize = program.sites.iter().map(factors).sum();
        weights.push(adapter.saturating_mul(options.seats.count));
    }
    let partials = partials(program, options, threads).saturating_mul(size_of::<f32>());
    let free = memory::free();
    // The pools reserve addresses for all sessions together, and each matrix takes whole huge
    // pages.
    let unused = reserved.saturating_sub(cache).saturating_add(weights.len() * Huge::PAGE);
    let addresses = free.addresses.map(|addresses| addresses.saturating_sub(unused));
    Ok(Plan {
        host: true,
        copies: 0,
        weights: weights.into_iter().fold(0, usize::saturating_add),
        cache,
        pool: reserved.saturating_sub(cache),
        arena,
        working: partials.saturating_add(threads * Scratch::BYTES),
        active: 0,
        free: [free.memory, addresses].into_iter().flatten().min(),
    })
}

/// Bytes of the cache, for a number of blocks of each group.
fn cache_bytes(program: &Program, options: &ExecutorOptions, blocks: &[usize]) -> Result<usize> {
    let groups = program.layer_groups();
    program.layers.iter().zip(&groups).try_fold(0usize, |sum, (layer, &group)| {
        let blocks = blocks.get(group).copied().unwrap_or(0);
        let bytes = match layer.state {
            0 => geometry(options, layer, blocks).bytes(1)?,
            _ => state::layer_bytes(layer, blocks)?,
        };
        Ok(sum.saturating_add(bytes))
    })
}

/// The shape of a layer's cache.
fn geometry(options: &ExecutorOptions, layer: &CacheLayer, blocks: usize) -> Geometry {
    Geometry {
        element: options.cache_type,
        blocks,
        block_tokens: BLOCK_TOKENS,
        kv_heads: layer.kv_heads,
        head_dim: layer.head_dim,
        keys_only: layer.keys_only,
    }
}

/// One pool for the layers of each group that have the same shape.
pub(super) fn caches(program: &Program, options: &ExecutorOptions) -> Result<Vec<Cache>> {
    let groups = program.layer_groups();
    let mut caches: Vec<Option<Cache>> = groups.iter().map(|_| None).collect();
    for (group, &blocks) in options.blocks.iter().enumerate() {
        let layers: Vec<usize> = (0..groups.len()).filter(|&l| groups[l] == group).collect();
        let Some(first) = layers.first().map(|&l| program.layers[l]) else { continue };
        if first.state > 0 {
            for layer in layers {
                caches[layer] = Some(Cache::State(States::new(&program.layers[layer], blocks)?));
            }
            continue;
        }
        let mut left = layers;
        while let Some(&first) = left.first() {
            let geometry = geometry(options, &program.layers[first], blocks);
            let shape = |layer: usize| {
                let CacheLayer { kv_heads, head_dim, keys_only, .. } = program.layers[layer];
                (kv_heads, head_dim, keys_only)
            };
            let alike = |layer: &usize| shape(*layer) == shape(first);
            let (same, others): (Vec<usize>, Vec<usize>) = left.into_iter().partition(alike);
            for (&layer, cache) in same.iter().zip(LayerCache::pool(geometry, same.len())?) {
                caches[layer] = Some(Cache::KeysValues(cache));
            }
            left = others;
        }
    }
    caches
        .into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| Error::new("cache", "blocks for every group", "fewer"))
}

/// Floats of scratch for the most demanding attention or indexer over a full context. A step of many
/// sequences that would need more attends to some of them at a time.
pub(super) fn partials(program: &Program, options: &ExecutorOptions, threads: usize) -> usize {
    let groups = program.layer_groups();
    let keys = |layer: usize| {
        let group = groups[layer];
        let blocks = options.context.get(group).or(options.blocks.get(group));
        blocks.copied().unwrap_or(1) * BLOCK_TOKENS
    };
    let one = |node: &Node| match &node.op {
        Op::Attention(op) => Some(shape(op).scratch_len(threads, 2, keys(op.layer))),
        // Each worker's row has scores, and as much beside them to choose; a window begins within a
        // block.
        Op::Indexer(op) => Some(2 * threads * (keys(op.layer) + BLOCK_TOKENS)),
        _ => None,
    };
    program.nodes.iter().filter_map(one).max().unwrap_or(0)
}

/// An attention operation as the kernels take it.
pub(super) fn shape(op: &ops::Attention) -> AttentionShape {
    AttentionShape {
        heads: op.heads,
        groups: op.kv_heads,
        head_dim: op.head_dim,
        scale: op.scale,
        softcap: op.cap,
        window: op.window,
        chunked: op.chunked,
    }
}
