//! A recorded decoder, fused and planned: fusion changes the operations but not the numbers, and
//! the plan never lets two living values share bytes.

use delft_nn::{
    AttentionOptions, Bias, Builder, Embedding, ExpertsOptions, ForwardPass, Gate,
    MixtureOfExperts, Mlp, Norm, Odds, Pairing, Projection, QkNorm, Rope, Routing, SelfAttention,
    Stored, Unary, Weights,
};
use formats::{Result, Source};
use program::{
    Group, Program, Sequence, Step, StepKind, Table, WeightId, fuse, fuse_mixtures, plan_memory,
    reference,
};
use std::sync::Arc;

const HIDDEN: usize = 24;
const VOCAB: usize = 40;
const EXPERTS: usize = 5;

/// A decoder of two blocks.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    kv_heads: usize,
    /// Columns of the feed-forward.
    ff: usize,
    /// Columns of each expert that stands beside the feed-forward, if there are any, and whether
    /// they have biases.
    experts: Option<(usize, bool)>,
    /// Whether the feed-forward reads what attention reads, and not what that makes of it.
    parallel: bool,
}

const SIZES: Sizes = Sizes { kv_heads: 2, ff: 40, experts: None, parallel: false };

/// Has every weight in the shape that is asked for, because it is told the shapes by name.
struct Any(Sizes);

impl Weights for Any {
    fn find(&self, canonical: &str) -> Result<Option<Stored>> {
        let last = canonical.trim_end_matches(".bias").rsplit('.').next().unwrap();
        let Sizes { kv_heads, ff, experts, .. } = self.0;
        let inner = experts.map_or(0, |(ff, _)| ff);
        let shape = match last {
            "gate" | "up" if canonical.contains("experts") => vec![EXPERTS * inner, HIDDEN],
            "down" if canonical.contains("experts") => vec![EXPERTS * HIDDEN, inner],
            "router" => vec![EXPERTS, HIDDEN],
            "embed" | "head" => vec![VOCAB, HIDDEN],
            "q" => vec![32, HIDDEN],
            "k" | "v" => vec![8 * kv_heads, HIDDEN],
            "o" => vec![HIDDEN, 32],
            "q_norm" | "k_norm" => vec![8],
            "gate" | "up" => vec![ff, HIDDEN],
            "down" => vec![HIDDEN, ff],
            _ => vec![HIDDEN],
        };
        let shape = if canonical.ends_with(".bias") { vec![shape[0]] } else { shape };
        Ok(Some(Stored { source: Source::Tensor(canonical.to_owned()), shape }))
    }
}

fn decoder(qkv_bias: Bias, qk_norm: Option<f32>, tracing: bool) -> Result<Program> {
    decoder_of(SIZES, qkv_bias, qk_norm, tracing)
}

fn mixture(builder: &Builder<'_>, name: &str, (ff, biases): (usize, bool)) -> MixtureOfExperts {
    let routing = Routing { used: 2, odds: Odds::Softmax, normalised: true, scale: 1.5 };
    let options = ExpertsOptions {
        hidden: HIDDEN,
        experts: EXPERTS,
        feed_forward: ff,
        router_bias: Bias::Never,
        biases,
        routing,
        limit: None,
        gate: Gate::Clamped { limit: 3.0, alpha: 1.7 },
        weighs_inputs: false,
        factors: false,
    };
    MixtureOfExperts::new(builder, name, &options).unwrap()
}

fn decoder_of(
    sizes: Sizes,
    qkv_bias: Bias,
    qk_norm: Option<f32>,
    tracing: bool,
) -> Result<Program> {
    let any = Any(sizes);
    let Sizes { kv_heads, ff, experts, parallel } = sizes;
    let builder = Builder::new(&any);
    let rope = Rope {
        head_dim: 8,
        pairing: Pairing::Half,
        frequencies: Arc::from([1.0, 0.3, 0.1, 0.02]),
        magnitude: 1.0,
    };
    let embed = Embedding::new(&builder, "embed", VOCAB, HIDDEN)?;
    let mut blocks = Vec::new();
    for i in 0..2 {
        let options = AttentionOptions {
            hidden: HIDDEN,
            output: None,
            factors: None,
            heads: 4,
            kv_heads,
            head_dim: 8,
            value_dim: None,
            qkv_bias,
            output_bias: Bias::Never,
            qk_norm: qk_norm.map_or(QkNorm::None, QkNorm::Heads),
            sinks: false,
            slopes: false,
            clip: None,
            output_norm: None,
            output_rounding: None,
            window: (i == 1).then_some(3),
            rope: Some(rope.clone()),
            scale: None,
            cap: None,
            output_gate: None,
            value_norm: None,
            shared: None,
            chunked: false,
            stretch: None,
            rotates_first: false,
        };
        blocks.push((
            Norm::rms(&builder, &format!("{i}.attention_norm"), HIDDEN, 1e-5)?,
            SelfAttention::new(&builder, &format!("{i}.attention"), options)?,
            Norm::rms(&builder, &format!("{i}.mlp_norm"), HIDDEN, 1e-5)?,
            Mlp::new(&builder, &format!("{i}.mlp"), [HIDDEN, ff], Bias::Never, &[Unary::Silu])?,
            experts.map(|experts| mixture(&builder, &format!("{i}.mlp"), experts)),
        ));
    }
    let norm = Norm::rms(&builder, "norm", HIDDEN, 1e-5)?;
    let head = Projection::new(&builder, "head", [VOCAB, HIDDEN], Bias::Never)?;
    let step = ForwardPass::new(builder.program(), tracing);
    let mut x = embed.forward(&step);
    for (attention_norm, attention, mlp_norm, mlp, experts) in &blocks {
        let read = attention_norm.forward(&x);
        x = x.add(&attention.forward(&read));
        let read = if parallel { read } else { mlp_norm.forward(&x) };
        let mut made = mlp.forward(&read);
        if let Some(experts) = experts {
            made = experts.forward(&read).add(&made);
        }
        x = x.add(&made).trace("block");
    }
    let logits = head.forward(&norm.forward(&x.select()));
    step.finish(logits)
}

/// Seeded by the weight's name, so that a fused program sees the same numbers.
fn weights(program: &Program) -> impl Fn(WeightId) -> Result<Vec<f32>> + '_ {
    |id| {
        let weight = &program.weights[id.0];
        let mut state =
            weight.name.bytes().fold(7u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
                | 1;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        Ok((0..weight.shape.iter().product()).map(next).collect())
    }
}

fn run(program: &Program, steps: &[(&[u32], u32)]) -> Vec<Vec<f32>> {
    let mut cache = reference::ReferenceCache::default();
    let mut logits = Vec::new();
    for (tokens, start) in steps {
        let tables = [Table::default(); 2];
        let step = Step {
            kind: StepKind::Prompt,
            tokens,
            sequences: &[Sequence::new(tokens.len(), *start as usize, &tables)],
            outputs: &[tokens.len() as u32 - 1],
            input: &[],
        };
        let values = reference::run(program, &weights(program), &mut cache, &step).unwrap();
        logits.extend(program.results.iter().map(|v| values[v.0].clone()));
    }
    logits
}

#[test]
fn fusion_keeps_the_numbers() {
    for (bias, norm) in [(Bias::Never, None), (Bias::Always, None), (Bias::Never, Some(1e-6))] {
        for tracing in [false, true] {
            let plain = decoder(bias, norm, tracing).unwrap();
            let fused = fuse(&plain);
            fused.verify().unwrap();
            let steps: [(&[u32], u32); 3] = [(&[3, 1, 4, 1, 5], 0), (&[9], 5), (&[2, 6], 6)];
            let (a, b) = (run(&plain, &steps), run(&fused, &steps));
            assert_eq!(a.len(), b.len());
            for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
                assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{a} {b}\n{fused}");
            }
        }
    }
}

#[test]
fn five_operations_per_block_are_left() {
    let fused = fuse(&decoder(Bias::Never, Some(1e-6), false).unwrap());
    let names: Vec<&str> = fused.nodes.iter().map(|n| n.op.name()).collect();
    let block = ["project", "rope_write", "attention", "linear_add", "gate_up", "linear_add"];
    let expected: Vec<&str> =
        ["embed"].into_iter().chain(block).chain(block).chain(["select", "project"]).collect();
    assert_eq!(names, expected, "{fused}");
    assert_eq!(fused.groups(), [None, Some(3)].map(Group::from));
}

#[test]
fn living_values_never_share_bytes() {
    for tracing in [false, true] {
        for program in [
            decoder(Bias::Always, Some(1e-6), tracing).unwrap(),
            fuse(&decoder(Bias::Always, None, tracing).unwrap()),
        ] {
            let (tokens, outputs) = (7, 2);
            let plan = plan_memory(&program, tokens, outputs);
            let bytes = |v: usize| {
                let shape = program.values[v];
                let rows = if shape.rows == ops::Rows::Tokens { tokens } else { outputs };
                rows * shape.width * 4
            };
            // Who owns each byte, replayed node by node.
            let mut owner = vec![usize::MAX; plan.bytes];
            for (i, node) in program.nodes.iter().enumerate() {
                for v in &node.inputs {
                    let at = plan.offsets[v.0];
                    assert!(
                        owner[at..at + bytes(v.0)].iter().all(|o| *o == v.0),
                        "node {i} reads %{}\n{program}",
                        v.0
                    );
                }
                for v in &node.outputs {
                    let at = plan.offsets[v.0];
                    owner[at..at + bytes(v.0)].fill(v.0);
                    let clobbered = node.inputs.iter().enumerate().any(|(j, input)| {
                        let from = plan.offsets[input.0];
                        plan.in_place[i] != Some(j)
                            && from < at + bytes(v.0)
                            && at < from + bytes(input.0)
                    });
                    assert!(!clobbered, "node {i} overwrites its input\n{program}");
                }
            }
            for v in &program.results {
                let at = plan.offsets[v.0];
                assert!(owner[at..at + bytes(v.0)].iter().all(|o| *o == v.0), "result %{}", v.0);
            }
            let unshared: usize = (0..program.values.len()).map(bytes).sum();
            assert!(plan.bytes < unshared / 2 || tracing, "{} of {unshared}", plan.bytes);
        }
    }
}

#[test]
fn the_verifier_names_what_is_wrong() {
    let good = decoder(Bias::Never, None, false).unwrap();
    let mut bad = good.clone();
    bad.nodes.remove(0);
    assert!(bad.verify().unwrap_err().to_string().contains("a value written before"));
    let mut bad = good.clone();
    bad.weights[1].shape = vec![HIDDEN + 1];
    assert!(bad.verify().unwrap_err().to_string().contains("rms_norm"));
    let mut bad = good.clone();
    bad.nodes.retain(|n| n.op.name() != "kv_write");
    assert!(bad.verify().unwrap_err().to_string().contains("written before"));
    let mut bad = good;
    bad.layers[0].kv_heads = 4;
    assert!(bad.verify().is_err());
}

/// What a rank has of a weight of the whole Program.
fn cut(weight: &program::Weight, whole: Vec<f32>) -> Vec<f32> {
    match &weight.source {
        Source::Rows { start, count, stride, run, .. } => {
            let row: usize = weight.shape[1..].iter().product();
            let runs = (0..count / run).map(|i| (start + i * stride) * row);
            runs.flat_map(|at| &whole[at..at + run * row]).copied().collect()
        }
        Source::Columns { start, count, .. } => {
            let rows = whole.chunks(whole.len() / weight.shape[0]);
            rows.flat_map(|row| &row[*start..start + count]).copied().collect()
        }
        Source::Zeros(_) => vec![0.0; whole.len()],
        _ => whole,
    }
}

/// Programs of ranks, whose columns are cut between blocks of this many.
fn shards(whole: &Program, ranks: usize, block: usize) -> Vec<Program> {
    (0..ranks).map(|rank| whole.shard(rank, ranks, &|_| Ok(block)).unwrap()).collect()
}

/// The logits of all ranks together are the whole Program's.
fn compare(whole: &Program, shards: &[Program]) {
    let weight = |rank: usize, id: WeightId| {
        let part = &shards[rank].weights[id.0];
        let of = whole.weights.iter().position(|w| w.name == part.name).unwrap();
        Ok(cut(part, weights(whole)(WeightId(of))?))
    };
    let mut cache = reference::ReferenceCache::default();
    let mut caches = vec![reference::ReferenceCache::default(); shards.len()];
    for (tokens, start) in [(&[3, 1, 4, 1, 5][..], 0), (&[9], 5), (&[2, 6], 6)] {
        let step = Step {
            kind: StepKind::Prompt,
            tokens,
            sequences: &[Sequence::new(tokens.len(), start, &[])],
            outputs: &[0],
            input: &[],
        };
        let wanted = reference::run(whole, &weights(whole), &mut cache, &step).unwrap();
        let found = reference::ranks(shards, &weight, &mut caches, &step).unwrap();
        let wanted = &wanted[whole.results[0].0];
        let first = &found[0][shards[0].results[0].0];
        for (shard, values) in shards.iter().zip(&found) {
            let found = &values[shard.results[0].0];
            assert_eq!(first, found, "the same on every rank");
            for (a, b) in wanted.iter().zip(found) {
                assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{a} {b}\n{shard}");
            }
        }
    }
}

#[test]
fn ranks_together_are_the_whole() {
    // Ranks, key/value heads (of four query heads): also fewer than there are ranks.
    for (ranks, kv_heads, bias, norm) in [
        (2, 2, Bias::Never, None),
        (2, 2, Bias::Always, Some(1e-6)),
        (4, 4, Bias::Always, None),
        (2, 1, Bias::Always, Some(1e-6)),
        (4, 1, Bias::Never, None),
        (4, 2, Bias::Always, Some(1e-6)),
    ] {
        let plain = decoder_of(Sizes { kv_heads, ..SIZES }, bias, norm, false).unwrap();
        for whole in [plain.clone(), fuse(&plain)] {
            let shards = shards(&whole, ranks, 1);
            let count = |name| whole.nodes.iter().filter(|node| node.op.name() == name).count();
            let attentions = count("attention");
            let text = shards[1].to_string();
            assert_eq!(text.matches("all_reduce").count(), 2 * attentions, "{text}");
            assert_eq!(text.matches("all_gather").count(), 1, "the head's rows: {text}");
            assert!(!text.contains("linear_add"), "only rank 0 adds the residual: {text}");
            compare(&whole, &shards);
        }
    }
}

/// How many columns a rank has of the matrices with this name in each block.
fn widths(shard: &Program, name: &str) -> [usize; 2] {
    [0, 1].map(|block| {
        let name = format!("{block}.mlp.{name}");
        shard.weights.iter().find(|weight| weight.name == name).map_or(0, |w| w.shape[1])
    })
}

/// Columns that blocks do not share out evenly: ranks take turns at the longer shares.
#[test]
fn uneven_feed_forwards_are_shared_by_blocks() {
    for (ff, block, ranks, expected) in [
        (40, 8, 2, &[[24, 16], [16, 24]][..]),
        (40, 10, 2, &[[20, 20], [20, 20]]),
        (39, 8, 2, &[[24, 15], [15, 24]]),
        (72, 8, 4, &[[24, 16], [16, 16], [16, 16], [16, 24]]),
    ] {
        let plain = decoder_of(Sizes { ff, ..SIZES }, Bias::Never, None, false).unwrap();
        for whole in [plain.clone(), fuse(&plain)] {
            let shards = shards(&whole, ranks, block);
            let found: Vec<_> = shards.iter().map(|shard| widths(shard, "down")).collect();
            assert_eq!(found, expected, "{ff} columns in blocks of {block}");
            compare(&whole, &shards);
        }
    }
    // Fewer blocks than ranks: all is whole on each.
    let whole = fuse(&decoder_of(SIZES, Bias::Never, None, false).unwrap());
    let shards = shards(&whole, 4, 16);
    assert!(shards.iter().all(|shard| widths(shard, "down") == [40, 40]));
    compare(&whole, &shards);
}

/// Every rank has its columns of each expert, beside which a feed-forward may stand: both are one
/// sum. With fewer blocks than ranks, some ranks have no expert in a layer.
#[test]
fn experts_are_shared_as_feed_forwards_are() {
    for (ff, biases, block, ranks, expected) in [
        (16, false, 8, 2, &[[8, 8], [8, 8]][..]),
        (16, true, 1, 4, &[[4, 4], [4, 4], [4, 4], [4, 4]]),
        (24, true, 8, 2, &[[16, 8], [8, 16]]),
        (20, true, 8, 2, &[[16, 4], [4, 16]]),
        (24, true, 8, 4, &[[8, 8], [8, 8], [8, 0], [0, 8]]),
        (8, true, 8, 2, &[[8, 0], [0, 8]]),
        (8, false, 8, 4, &[[8, 0], [0, 0], [0, 0], [0, 8]]),
    ] {
        for parallel in [false, true] {
            let sizes = Sizes { experts: Some((ff, biases)), parallel, ..SIZES };
            let plain = decoder_of(sizes, Bias::Never, None, false).unwrap();
            let fused = fuse(&plain);
            let mut added = fused.clone();
            fuse_mixtures(&mut added);
            for (whole, sums) in [(plain, None), (fused, None), (added, Some(parallel))] {
                let shards = shards(&whole, ranks, block);
                let found: Vec<_> =
                    shards.iter().map(|shard| widths(shard, "experts.down")).collect();
                assert_eq!(found, expected, "{ff} columns in blocks of {block}");
                let part = |name: &str, shard: &Program| {
                    let own = shard.weights.iter().filter(|weight| weight.name.contains(name));
                    own.map(|weight| weight.shape.iter().product::<usize>()).sum::<usize>()
                };
                for name in ["experts.gate", "experts.up", "experts.down"] {
                    let bias = |program: &Program| part(&format!("{name}.bias"), program);
                    let matrices = |program: &Program| part(name, program) - bias(program);
                    let all: usize = shards.iter().map(matrices).sum();
                    assert_eq!(all, matrices(&whole), "{name}");
                }
                if let Some(parallel) = sums {
                    let count = shards[1].to_string().matches("all_reduce").count();
                    assert_eq!(count, if parallel { 2 } else { 4 }, "{}", shards[1]);
                }
                compare(&whole, &shards);
            }
        }
    }
}

#[test]
fn what_ranks_cannot_share_is_refused() {
    let whole = fuse(&decoder(Bias::Never, None, false).unwrap());
    for (rank, ranks, says) in
        [(0, 3, "layer 0: expected query heads that 3 GPUs"), (0, 1, "two"), (2, 2, "2 of 2")]
    {
        let why = whole.shard(rank, ranks, &|_| Ok(1)).unwrap_err().to_string();
        assert!(why.contains(says), "{why}");
    }
    let why =
        whole.shard(0, 2, &|_| Ok(1)).unwrap().shard(0, 2, &|_| Ok(1)).unwrap_err().to_string();
    assert!(why.contains("expected a Program of one device"), "{why}");
    // Fewer blocks than ranks, and nothing that says that their products are whole.
    let odd = decoder_of(Sizes { ff: 39, ..SIZES }, Bias::Never, None, false).unwrap();
    let why = odd.shard(0, 2, &|_| Ok(39)).unwrap_err().to_string();
    assert!(why.contains("mlp.gate: expected rows that 2 GPUs can share"), "{why}");
}

/// Two parts, one after the other, are the whole.
#[test]
fn a_program_can_be_cut_between_layers() {
    for norm in [None, Some(1e-6)] {
        let plain = decoder(Bias::Never, norm, false).unwrap();
        for whole in [plain.clone(), fuse(&plain)] {
            for layer in 0..=whole.layers.len() {
                let [front, back] = &whole.split(&[layer]).unwrap()[..] else {
                    panic!("two parts")
                };
                front.program.verify().unwrap();
                back.program.verify().unwrap();
                assert_eq!(front.program.layers, whole.layers[..layer]);
                assert_eq!(back.program.layers, whole.layers[layer..]);
                assert_eq!(front.program.nodes.len() + back.program.nodes.len(), whole.nodes.len());
                let mut caches =
                    [reference::ReferenceCache::default(), reference::ReferenceCache::default()];
                let tokens = [3, 1, 4, 1, 5];
                let mut step = Step {
                    kind: StepKind::Prompt,
                    tokens: &tokens,
                    sequences: &[Sequence::new(tokens.len(), 0, &[])],
                    outputs: &[2, 4],
                    input: &[],
                };
                let mut all = reference::ReferenceCache::default();
                let wanted = reference::run(&whole, &weights(&whole), &mut all, &step).unwrap();
                let half = &front.program;
                let values = reference::run(half, &weights(half), &mut caches[0], &step).unwrap();
                step.input = &values[half.results[0].0];
                let half = &back.program;
                let found = reference::run(half, &weights(half), &mut caches[1], &step).unwrap();
                assert_eq!(found[half.results[0].0], wanted[whole.results[0].0], "at {layer}");
            }
            let parts = whole.split(&[0, 1, 2]).unwrap();
            let layers = |part: &program::ProgramPart| part.program.layers.len();
            assert_eq!(parts.iter().map(layers).collect::<Vec<_>>(), [0, 1, 1, 0]);
            for wrong in [&[3][..], &[1, 1], &[2, 1]] {
                let why = whole.split(wrong).unwrap_err().to_string();
                assert!(why.contains("ascending layers up to 2"), "{why}");
            }
            // The table of embeddings weighs as much as the head.
            let one = |weight: &program::Weight| Ok(weight.shape.iter().product::<usize>() as u64);
            assert_eq!(whole.even_cuts(0, 2, &one).unwrap(), [1]);
            assert_eq!(whole.even_cuts(0, 3, &one).unwrap(), [1, 2]);
            assert_eq!(whole.even_cuts(1, 2, &one).unwrap(), [2]);
            let why = whole.even_cuts(1, 3, &one).unwrap_err().to_string();
            assert!(why.contains("1 to 2 devices"), "{why}");
        }
    }
}

/// Whatever is moved, both sides in turns are the whole.
#[test]
fn operations_can_be_moved_to_another_device() {
    for norm in [None, Some(1e-6)] {
        let plain = decoder(Bias::Always, norm, true).unwrap();
        for whole in [plain.clone(), fuse(&plain)] {
            let moved: [&[&str]; 4] = [
                &["gate_up", "linear_add", "linear"],
                &["gate_up", "zip", "map"],
                &["rms_norm", "project"],
                &["linear_add", "linear", "zip", "map", "rms_norm"],
            ];
            for names in moved {
                let both = whole.offload(&|_, node| names.contains(&node.op.name()));
                let Ok(both) = both else {
                    assert!(!whole.nodes.iter().any(|n| names.contains(&n.op.name())), "{names:?}");
                    continue;
                };
                let program::Offloaded { home, away } = &both;
                home.verify().unwrap();
                away.verify().unwrap();
                let count =
                    |p: &Program| p.nodes.iter().filter(|n| n.op.name() != "exchange").count();
                assert_eq!(count(home) + count(away), whole.nodes.len());
                assert_eq!((home.layers.len(), away.layers.len()), (2, 0));
                let used = |p: &Program| p.nodes.iter().flat_map(|n| n.weights.clone()).max();
                for side in [home, away] {
                    let last = used(side).map_or(0, |w| w.0 + 1);
                    assert_eq!(last, side.weights.len(), "no weight of the other side: {side}");
                }
                let mut caches =
                    [reference::ReferenceCache::default(), reference::ReferenceCache::default()];
                for (tokens, start) in [(&[3, 1, 4, 1, 5][..], 0), (&[9], 5)] {
                    let step = Step {
                        kind: StepKind::Prompt,
                        tokens,
                        sequences: &[Sequence::new(tokens.len(), start, &[])],
                        outputs: &[0],
                        input: &[],
                    };
                    let of = |program: &Program, id| weights(program)(id);
                    let [cache, other] = &mut caches;
                    let wanted = reference::run(&whole, &weights(&whole), cache, &step).unwrap();
                    let found = reference::offloaded(&both, &of, other, &step).unwrap();
                    for value in whole.results.iter().chain(whole.traces.iter().map(|(_, v)| v)) {
                        assert_eq!(found[value.0], wanted[value.0], "{names:?}: {home}\n{away}");
                    }
                }
            }
        }
    }
}

#[test]
fn operations_that_know_more_than_rows_are_not_moved() {
    let whole = fuse(&decoder(Bias::Never, None, false).unwrap());
    for (name, says) in [
        ("attention", "found attention"),
        ("rope_write", "found rope_write"),
        ("embed", "found embed"),
        ("experts", "found none"),
    ] {
        let why = whole.offload(&|_, node| node.op.name() == name).unwrap_err().to_string();
        assert!(why.contains(says), "{why}");
    }
    let sites = whole.with_sites(&|name| name.contains("down"));
    let why = sites.offload(&|_, node| node.op.name() == "linear_add").unwrap_err().to_string();
    assert!(why.contains("found linear_add"), "{why}");
}
