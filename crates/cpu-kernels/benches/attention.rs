//! Attention of one layer with the geometry of Qwen3-0.6B (16 query heads, 8 KV heads of 128, f16
//! cache).
//!
//! Decode: one query over a cache of some depth, in GB/s of keys and values. Enough layers take
//! turns that the cache of one does not stay in the processor's caches, as in a model. Prefill: a
//! chunk of queries from position 0, in GFLOP/s of the products that causality leaves (4 * head_dim
//! per query, head and key seen).
//!
//! Prints the median and, for a machine that others use too, the best run.
//!
//! `[DELFT_ISA=avx2] cargo bench -p delft-cpu-kernels --bench attention [-- THREADS]`

use delft_cpu_kernels::attention::{
    AttentionCall, AttentionShape, Geometry, LayerCache, QuerySequence, run,
};
use delft_cpu_kernels::isa::Isa;
use delft_cpu_kernels::team::{SharedSlice, Team, default_threads};
use formats::CacheType;
use std::time::Instant;

const SHAPE: AttentionShape = AttentionShape {
    heads: 16,
    groups: 8,
    head_dim: 128,
    scale: 0.088_388_35,
    softcap: None,
    window: None,
    chunked: false,
};
const BLOCK: usize = 256;

fn main() {
    let asked = std::env::args().skip(1).find_map(|argument| argument.parse().ok());
    let most = asked.unwrap_or_else(default_threads);
    let isa = Isa::detect().expect("an instruction set");
    for threads in if most > 1 { vec![1, most] } else { vec![1] } {
        let team = Team::new(threads).expect("a team");
        team.pin_caller();
        for depth in [512, 4096, 16384] {
            decode(isa, &team, depth);
        }
        for tokens in [512, 4096] {
            for rounded in [false, true] {
                prefill(isa, &team, tokens, rounded);
            }
        }
    }
}

fn decode(isa: Isa, team: &Team, depth: usize) {
    let bytes = 2 * depth * SHAPE.groups * SHAPE.head_dim * 2;
    let layers = (512 << 20) / bytes;
    let caches = filled(isa, depth, layers);
    let (median, best) = measure(&caches, isa, team, depth - 1, 1, false);
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    let (micros, median, best) = (median * 1e6, rate(median), rate(best));
    println!(
        "{isa} x{} decode at {depth:>5}: {micros:>7.0} us, {median:>5.1} GB/s, best {best:>5.1}",
        team.count()
    );
}

fn prefill(isa: Isa, team: &Team, tokens: usize, rounded: bool) {
    let caches = filled(isa, tokens, 2);
    let (median, best) = measure(&caches, isa, team, 0, tokens, rounded);
    let seen = (tokens * (tokens + 1) / 2) as f64;
    let rate = |seconds: f64| 4.0 * seen * (SHAPE.heads * SHAPE.head_dim) as f64 / seconds / 1e9;
    let (millis, median, best) = (median * 1e3, rate(median), rate(best));
    let kind = if rounded { "rounded" } else { "exact" };
    println!(
        "{isa} x{} prefill of {tokens:>4}, {kind:>7}: {millis:>6.1} ms, {median:>5.0} GFLOP/s, best {best:>5.0}",
        team.count()
    );
}

/// Layers whose first `tokens` positions hold noise.
fn filled(isa: Isa, tokens: usize, layers: usize) -> Vec<LayerCache> {
    let blocks = tokens.div_ceil(BLOCK);
    let geometry = Geometry {
        element: CacheType::F16,
        blocks,
        block_tokens: BLOCK,
        kv_heads: SHAPE.groups,
        head_dim: SHAPE.head_dim,
        keys_only: false,
    };
    let caches = LayerCache::pool(geometry, layers).expect("a cache");
    let width = SHAPE.groups * SHAPE.head_dim;
    let rows = noise(tokens * width);
    let table: Vec<u32> = (0..blocks as u32).collect();
    for cache in &caches {
        // SAFETY: one thread, nobody else.
        unsafe { cache.write(isa, &table, 0, &rows, &rows, width, 0..tokens, 0..SHAPE.groups) };
    }
    caches
}

/// Median and best seconds of one layer's attention.
fn measure(
    caches: &[LayerCache],
    isa: Isa,
    team: &Team,
    position: usize,
    tokens: usize,
    rounded: bool,
) -> (f64, f64) {
    let width = SHAPE.heads * SHAPE.head_dim;
    let q = noise(tokens * width);
    let mut out = vec![0.0; tokens * width];
    let mut scratch = vec![0.0; SHAPE.scratch_len(team.count(), 1, position + tokens)];
    let (out, scratch) = (SharedSlice::new(&mut out), SharedSlice::new(&mut scratch));
    let table: Vec<u32> = (0..(position + tokens).div_ceil(BLOCK) as u32).collect();
    let decodes = tokens == 1;
    let sequences = [QuerySequence { decodes, table: &table, row: 0, tokens, position, oldest: 0 }];
    let mut times = Vec::new();
    let began = Instant::now();
    while times.len() < 5 || (began.elapsed().as_secs_f64() < 1.0 && times.len() < 2000) {
        let cache = &caches[times.len() % caches.len()];
        let call = AttentionCall {
            shape: SHAPE,
            cache,
            sequences: &sequences,
            q: &q,
            q_stride: width,
            sinks: None,
            slopes: None,
            chosen: None,
            rounded,
        };
        let start = Instant::now();
        // SAFETY: `out` and `scratch` are this job's alone, and the cache rests.
        team.run(&|worker| unsafe { run(worker, isa, &call, out, scratch) });
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

fn noise(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}
