//! Every operation on every device, against its reference.

use formats::{DType, Pairing, Result, Source, TensorView, Tensors, safetensors};
use nn::{Builder, ForwardPass, Rope, Stored, Weights};
use ops::embed::Index;
use ops::experts::{Gate, Odds, Routing};
use ops::map::Unary;
use ops::zip::Binary;
use ops::{Attention, Op};
use program::{
    BLOCK_TOKENS, CacheLayer, Node, Program, Sequence, Step, StepKind, Table, WeightId, fuse,
    fuse_mixtures, reference,
};

use crate::{CacheType, Device, DeviceSpec, ExecutorOptions};

const HIDDEN: usize = 24;
const VOCAB: usize = 40;
const HEADS: usize = 4;
/// Positions that there are embeddings of.
const PLACES: usize = 40;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;

/// Has whatever is asked for: a name ends with its shape, `gate.40x24`.
struct Any;

impl Weights for Any {
    fn find(&self, name: &str) -> Result<Option<Stored>> {
        let dims = name.rsplit('.').next().unwrap_or_default().split('x');
        let shape = dims.map(|dim| dim.parse().ok()).collect::<Option<_>>();
        Ok(shape.map(|shape| Stored { source: Source::Tensor(name.to_owned()), shape }))
    }
}

fn weight(builder: &Builder<'_>, name: &str, shape: &[usize]) -> WeightId {
    let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
    builder.weight(&format!("{name}.{}", dims.join("x")), shape).unwrap()
}

/// A Program of all operations, whose results are traced.
fn everything() -> Result<Program> {
    let builder = Builder::new(&Any);
    let w = |name: &str, shape: &[usize]| weight(&builder, name, shape);
    let (table, wide, narrow) =
        (w("table", &[VOCAB, HIDDEN]), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let (scale, shift, head) =
        (w("scale", &[HIDDEN]), w("shift", &[HIDDEN]), w("head", &[VOCAB, HIDDEN]));
    let forms = [
        (None, None, [false, false]),
        (Some(0.5), Some(7), [false, false]),
        (Some(2.0), None, [true, false]),
        (None, Some(5), [true, false]),
        (None, None, [false, true]),
        (Some(2.0), Some(9), [true, true]),
    ];
    let layers: Vec<_> = (0..forms.len())
        .map(|i| {
            let [q, k, v] = [("q", wide), ("k", narrow), ("v", narrow)]
                .map(|(name, out)| w(&format!("{name}{i}"), &[out, HIDDEN]));
            let vectors = ["sinks", "slopes"].map(|name| w(&format!("{name}{i}"), &[HEADS]));
            (q, k, v, w(&format!("o{i}"), &[HIDDEN, wide]), vectors)
        })
        .collect();
    let gates = [Unary::Silu, Unary::GeluTanh, Unary::GeluErf, Unary::Relu];
    let gated: Vec<_> = (0..gates.len())
        .map(|i| {
            let [gate, up] = ["gate", "up"].map(|name| w(&format!("{name}{i}"), &[40, HIDDEN]));
            (gate, up, w(&format!("down{i}"), &[HIDDEN, 40]))
        })
        .collect();
    for (_, window, _) in forms {
        builder.cache_layer(CacheLayer::keys_values(KV_HEADS, HEAD_DIM, window));
    }
    let places = w("positions", &[PLACES, HIDDEN]);
    let step = ForwardPass::new(builder.program(), true);
    let none = Vec::new;
    let mut x =
        step.record(Op::from(ops::Embed { index: Index::Token }), &[], vec![table]).swap_remove(0);
    let index = Index::Position;
    let places = step.record(Op::from(ops::Embed { index }), &[], vec![places]).swap_remove(0);
    x = x.scale(3.0).trace("scale").add(&places);
    for &f in Unary::ALL {
        x = x.add(&x.map(f).trace(f.name())).apply(
            Op::from(ops::LayerNorm { eps: 1e-5 }),
            &[],
            vec![scale],
        );
    }
    let shifted = x.apply(Op::from(ops::LayerNorm { eps: 1e-5 }), &[], vec![scale, shift]);
    let shifted = shifted.trace("layer_norm");
    for &f in Binary::ALL {
        x = x.apply(Op::from(ops::Zip(f)), &[&shifted], none()).trace(f.name());
    }
    x = x.apply(Op::from(ops::RmsNorm { eps: 1e-5 }), &[], vec![scale]).trace("rms_norm");
    let rope = Rope {
        head_dim: HEAD_DIM,
        pairing: Pairing::Half,
        frequencies: [1.0, 0.3, 0.1, 0.02].into(),
        magnitude: 1.0,
    };
    for (layer, (&(cap, window, [sinks, slopes]), &(q, k, v, o, vectors))) in
        forms.iter().zip(&layers).enumerate()
    {
        let n = x.apply(Op::from(ops::RmsNorm { eps: 1e-5 }), &[], vec![scale]);
        let linear = |w| n.apply(Op::from(ops::Linear), &[], vec![w]);
        let turn = |w| linear(w).apply(Op::Rope(rope.clone()), &[], none());
        let (q, k, v) = (turn(q), turn(k), linear(v));
        step.record(Op::from(ops::KvWrite { layer }), &[&k, &v], none());
        let attention = Attention {
            layer,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.05,
            window,
            chunked: false,
            cap,
            sinks,
            slopes,
            chosen: None,
        };
        let vectors = [sinks, slopes].into_iter().zip(vectors).filter(|(has, _)| *has);
        let vectors = vectors.map(|(_, vector)| vector).collect();
        let y = q.apply(Op::Attention(attention), &[], vectors).apply(
            Op::from(ops::Linear),
            &[],
            vec![o],
        );
        x = x.add(&y.trace(format!("attention{layer}")));
    }
    for (&act, &(gate, up, down)) in gates.iter().zip(&gated) {
        let n = x.apply(Op::from(ops::RmsNorm { eps: 1e-5 }), &[], vec![scale]);
        let [gate, up] = [gate, up].map(|w| n.apply(Op::from(ops::Linear), &[], vec![w]));
        let y = gate.map(act).mul(&up).apply(Op::from(ops::Linear), &[], vec![down]);
        x = x.add(&y).trace(format!("gate {}", act.name()));
    }
    let logits = x.select().apply(Op::from(ops::Linear), &[], vec![head]);
    let bounded = logits.scale(1.0 / 30.0).map(Unary::Tanh).scale(30.0);
    step.finish(bounded)
}

/// A Program of what carries a state, in two parts; heads of values are wider than what stays in
/// the first cache.
fn carried() -> Result<Program> {
    let builder = Builder::new(&Any);
    let w = |name: &str, shape: &[usize]| weight(&builder, name, shape);
    let [heads, value_dim] = [4, 42];
    let net = ops::DeltaNet { tiled: true, ..ops::DeltaNet::new([heads, 2, 13, value_dim]) };
    let (width, start) = (net.width(), net.elements());
    let conv = ops::ShortConv { start, ..ops::ShortConv::new(width, 3) };
    let (table, places) = (w("table", &[VOCAB, HIDDEN]), w("positions", &[PLACES, HIDDEN]));
    let [qkv, a, b] = [("qkv", width), ("a", net.heads), ("b", net.heads)]
        .map(|(name, out)| w(name, &[out, HIDDEN]));
    let [taps, decay, dt] = [("taps", 3 * width), ("decay", net.heads), ("dt", net.heads)]
        .map(|(name, len)| w(name, &[len]));
    let (inner, groups, state) = (net.heads * net.value_dim, 2, 19);
    let scan = ops::SelectiveScan {
        layer: 0,
        start: start + conv.elements(),
        heads,
        groups,
        head_dim: value_dim,
        state,
        limit: [0.1, 2.0],
        by_element: false,
    };
    let biased = ops::ShortConv {
        start: scan.start + scan.elements(),
        ..ops::ShortConv::new(scan.width(), 4)
    };
    let by_element = ops::SelectiveScan {
        start: biased.start + biased.elements(),
        heads: 1,
        groups: 1,
        head_dim: inner,
        by_element: true,
        ..scan
    };
    let (xbc, scan_dt) = (w("xbc", &[scan.width(), HIDDEN]), w("scan_dt", &[heads, HIDDEN]));
    let [scan_decay, scan_bias, skip] =
        ["scan_decay", "scan_bias", "skip"].map(|name| w(name, &[heads]));
    let [biased_taps, bias] =
        [("biased", 4 * scan.width()), ("bias", scan.width())].map(|(name, len)| w(name, &[len]));
    let norms = ["after", "before"].map(|name| w(name, &[inner]));
    let read = [("scan_x", inner), ("scan_step", inner), ("scan_b", state), ("scan_c", state)]
        .map(|(name, out)| w(name, &[out, HIDDEN]));
    let held = [("decays", state * inner), ("skips", inner)].map(|(name, len)| w(name, &[len]));
    let head = w("head", &[VOCAB, inner]);
    builder.cache_layer(CacheLayer::carried(by_element.start + by_element.elements()));
    let step = ForwardPass::new(builder.program(), true);
    let embed =
        |index, table| step.record(Op::from(ops::Embed { index }), &[], vec![table]).swap_remove(0);
    let x = embed(Index::Token, table).add(&embed(Index::Position, places));
    let linear = |w| x.apply(Op::from(ops::Linear), &[], vec![w]);
    let mixed = linear(qkv).apply(Op::from(conv), &[], vec![taps]).trace("short_conv");
    let (a, b) = (linear(a), linear(b));
    let y = mixed.apply(Op::from(net), &[&a, &b], vec![decay, dt]).trace("delta_net");
    let xbc = linear(xbc).apply(Op::from(biased), &[], vec![biased_taps, bias]);
    let weights = vec![scan_decay, scan_bias, skip];
    let xbc = xbc.trace("short_conv with a bias");
    let z = xbc.apply(Op::from(scan), &[&linear(scan_dt)], weights).trace("selective_scan");
    let [own, steps, b, c] = read.map(linear);
    let steps = steps.map(Unary::Softplus);
    let own = own.apply(Op::from(by_element), &[&steps, &b, &c], held.to_vec());
    let z = z.add(&own.trace("selective_scan by element"));
    let norm = |norm_first| Op::from(ops::GatedNorm { eps: 1e-5, groups: 3, norm_first });
    let y = y.apply(norm(false), &[&z], vec![norms[0]]).trace("gated_norm");
    let y = y.apply(norm(true), &[&z], vec![norms[1]]).trace("gated_norm, the norm first");
    let y = y.apply(Op::from(ops::NormAdd { eps: 1e-5 }), &[&z], vec![norms[0]]).trace("norm_add");
    step.finish(y.select().apply(Op::from(ops::Linear), &[], vec![head]))
}

/// A Program of attention and of a short convolution that read the same rows, so that one operation
/// projects q, k, v and what the convolution reads: 24 columns, no multiple of 16.
fn attended_and_carried() -> Result<Program> {
    let builder = Builder::new(&Any);
    let w = |name: &str, shape: &[usize]| weight(&builder, name, shape);
    let (table, places) = (w("table", &[VOCAB, HIDDEN]), w("positions", &[PLACES, HIDDEN]));
    let (wide, narrow, columns) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 24);
    let [q, k, v, mixed] = [("q", wide), ("k", narrow), ("v", narrow), ("mixed", columns)]
        .map(|(name, out)| w(name, &[out, HIDDEN]));
    let (taps, scale) = (w("taps", &[3 * columns]), w("scale", &[HIDDEN]));
    let [o, down] = [("o", wide), ("down", columns)].map(|(name, from)| w(name, &[HIDDEN, from]));
    let head = w("head", &[VOCAB, HIDDEN]);
    let layer = builder.cache_layer(CacheLayer::keys_values(KV_HEADS, HEAD_DIM, None));
    let mut conv = ops::ShortConv::new(columns, 3);
    conv.layer = builder.cache_layer(CacheLayer::carried(conv.elements()));
    let step = ForwardPass::new(builder.program(), true);
    let embed =
        |index, table| step.record(Op::from(ops::Embed { index }), &[], vec![table]).swap_remove(0);
    let x = embed(Index::Token, table).add(&embed(Index::Position, places));
    let n = x.apply(Op::from(ops::RmsNorm { eps: 1e-5 }), &[], vec![scale]);
    let linear = |x: &nn::Tensor, w| x.apply(Op::from(ops::Linear), &[], vec![w]);
    let rope = Rope {
        head_dim: HEAD_DIM,
        pairing: Pairing::Half,
        frequencies: [1.0, 0.3, 0.1, 0.02].into(),
        magnitude: 1.0,
    };
    let turn = |w| linear(&n, w).apply(Op::Rope(rope.clone()), &[], Vec::new());
    let (q, k, v, mixed) = (turn(q), turn(k), linear(&n, v), linear(&n, mixed));
    step.record(Op::from(ops::KvWrite { layer }), &[&k, &v], Vec::new());
    let attention = Attention {
        layer,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.05,
        window: None,
        chunked: false,
        cap: None,
        sinks: false,
        slopes: false,
        chosen: None,
    };
    let attended = linear(&q.apply(Op::Attention(attention), &[], Vec::new()), o);
    let carried = linear(&mixed.apply(Op::from(conv), &[], vec![taps]), down);
    let y = attended.trace("attention").add(&carried.trace("short_conv"));
    step.finish(linear(&x.add(&y).select(), head))
}

/// A Program whose attention sees three positions that an indexer chooses, of all and of the latest
/// seven.
fn chosen() -> Result<Program> {
    let (heads, count) = (4, 3);
    let builder = Builder::new(&Any);
    let w = |name: String, shape: &[usize]| weight(&builder, &name, shape);
    let table = w("table".into(), &[VOCAB, HIDDEN]);
    let places = w("positions".into(), &[PLACES, HIDDEN]);
    let head = w("head".into(), &[VOCAB, HIDDEN]);
    let (wide, narrow) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let windows = [None, Some(7)];
    let layers: Vec<_> = (0..windows.len())
        .map(|i| {
            let shapes = [
                ("q", wide),
                ("k", narrow),
                ("v", narrow),
                ("iq", heads * HEAD_DIM),
                ("ik", HEAD_DIM),
            ];
            let own = shapes.map(|(name, rows)| w(format!("{name}{i}"), &[rows, HIDDEN]));
            let weights = w(format!("iw{i}"), &[heads, HIDDEN]);
            (own, weights, w(format!("o{i}"), &[HIDDEN, wide]))
        })
        .collect();
    for window in windows {
        builder.cache_layer(CacheLayer::keys_values(KV_HEADS, HEAD_DIM, window));
        builder.cache_layer(CacheLayer { window, ..CacheLayer::keys(1, HEAD_DIM) });
    }
    let step = ForwardPass::new(builder.program(), true);
    let embed =
        |index, table| step.record(Op::from(ops::Embed { index }), &[], vec![table]).swap_remove(0);
    let mut x = embed(Index::Token, table).add(&embed(Index::Position, places));
    let rope = Rope {
        head_dim: HEAD_DIM,
        pairing: Pairing::Half,
        frequencies: [1.0, 0.3, 0.1, 0.02].into(),
        magnitude: 1.0,
    };
    for (i, (&window, ([q, k, v, iq, ik], weights, o))) in windows.iter().zip(layers).enumerate() {
        let linear = |w| x.apply(Op::from(ops::Linear), &[], vec![w]);
        let turn = |w| linear(w).apply(Op::Rope(rope.clone()), &[], Vec::new());
        let (q, k, v, iq, ik) = (turn(q), turn(k), linear(v), turn(iq), turn(ik));
        step.record(Op::from(ops::KvWrite { layer: 2 * i }), &[&k, &v], Vec::new());
        step.record(Op::from(ops::KvWrite { layer: 2 * i + 1 }), &[&ik], Vec::new());
        let indexer = ops::Indexer { layer: 2 * i + 1, heads, head_dim: HEAD_DIM, count, window };
        let seen = iq.apply(Op::from(indexer), &[&linear(weights)], Vec::new());
        let seen = seen.trace(format!("chosen{i}"));
        let attention = Attention {
            layer: 2 * i,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.3,
            window,
            chunked: false,
            cap: None,
            sinks: false,
            slopes: false,
            chosen: Some(count),
        };
        let y = q.apply(Op::Attention(attention), &[&seen], Vec::new());
        let y = y.apply(Op::from(ops::Linear), &[], vec![o]).trace(format!("attention{i}"));
        x = x.add(&y);
    }
    step.finish(x.select().apply(Op::from(ops::Linear), &[], vec![head]))
}

/// A Program of mixtures of experts: one whose sum is added to its layer's input, and one beside an
/// expert that all tokens have.
fn mixtures() -> Result<Program> {
    let builder = Builder::new(&Any);
    let (experts, ff) = (6, 40);
    let w = |name: String, shape: &[usize]| weight(&builder, &name, shape);
    let table = w("table".into(), &[VOCAB, HIDDEN]);
    let (scale, head) = (w("scale".into(), &[HIDDEN]), w("head".into(), &[VOCAB, HIDDEN]));
    let gated = |count: usize, i: usize| {
        let parts = [("gate", [ff, HIDDEN]), ("up", [ff, HIDDEN]), ("down", [HIDDEN, ff])];
        parts.map(|(part, [out, cols])| w(format!("{part}{count}.{i}"), &[count * out, cols]))
    };
    let layers = [2, 3].map(|used| {
        (used, w(format!("router{used}"), &[experts, HIDDEN]), gated(experts, used), gated(1, used))
    });
    let places = w("positions".into(), &[PLACES, HIDDEN]);
    let step = ForwardPass::new(builder.program(), true);
    let embed =
        |index, table| step.record(Op::from(ops::Embed { index }), &[], vec![table]).swap_remove(0);
    let mut x = embed(Index::Token, table).add(&embed(Index::Position, places));
    for (used, router, all, shared) in layers {
        let n = x.apply(Op::from(ops::RmsNorm { eps: 1e-5 }), &[], vec![scale]);
        let linear = |w| n.apply(Op::from(ops::Linear), &[], vec![w]);
        let routing = Routing { used, odds: Odds::Softmax, normalised: true, scale: 1.5 };
        let (gate, weighs_inputs, inner) = (Gate::Plain(Unary::Silu), false, false);
        let op = ops::Experts { routing, gate, weighs_inputs, inner };
        let mut y = n.apply(Op::from(op), &[&linear(router)], all.to_vec());
        if used == 3 {
            let [gate, up, down] = shared;
            let inner = linear(gate).map(Unary::Silu).mul(&linear(up));
            y = y.add(&inner.apply(Op::from(ops::Linear), &[], vec![down]));
        }
        x = x.add(&y).trace(format!("mixture of {used}"));
    }
    step.finish(x.select().apply(Op::from(ops::Linear), &[], vec![head]))
}

/// A file of seeded weights.
fn tensors(program: &Program, folder: &std::path::Path) -> Tensors {
    let values: Vec<Vec<u8>> = program
        .weights
        .iter()
        .enumerate()
        .map(|(i, weight)| {
            let n = weight.shape.iter().product();
            let value = |x: &f32| if weight.name.contains("decay") { -x.abs() } else { *x };
            let noise = tile::case::noise(i as u64 + 1, n);
            noise.iter().flat_map(|x| value(x).to_le_bytes()).collect()
        })
        .collect();
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    let file = folder.join("model.safetensors");
    let tensors = program.weights.iter().zip(&values).map(|(weight, bytes)| TensorView {
        name: &weight.name,
        dtype: DType::F32,
        shape: &weight.shape,
        bytes,
    });
    safetensors::write(&file, &[], tensors).unwrap();
    Tensors::open(&file).unwrap()
}

/// Token numbers of the steps: a prompt, a token, a few, a longer chunk.
const STEPS: [usize; 4] = [21, 1, 3, 12];

/// All results of all steps, one after the other: by a device, or by the reference.
fn results(
    program: &Program,
    tensors: &Tensors,
    device: Option<(&dyn Device, CacheType)>,
) -> Vec<(String, Vec<f32>)> {
    results_of(program, tensors, device, |rows| vec![rows - 1])
}

/// As [`results`], with the logits of the rows that `picks` says of a step of so many.
fn results_of(
    program: &Program,
    tensors: &Tensors,
    device: Option<(&dyn Device, CacheType)>,
    picks: fn(u32) -> Vec<u32>,
) -> Vec<(String, Vec<f32>)> {
    let mut cache = reference::ReferenceCache::default();
    let weight = |id: WeightId| {
        let weight = &program.weights[id.0];
        weight.read(tensors)?.to_f32()
    };
    let groups = program.groups().len();
    let mut executor = device.map(|(device, cache_type)| {
        let options = ExecutorOptions {
            cache_type,
            rows: (32, 32),
            blocks: vec![1; groups],
            context: vec![1; groups],
            ..ExecutorOptions::default()
        };
        device.load(program.clone(), tensors, options, &mut |_, _| {}).unwrap()
    });
    assert!(STEPS.iter().sum::<usize>() <= BLOCK_TOKENS);
    let tables = vec![Table { blocks: &[0], oldest: 0 }; groups];
    let (mut found, mut start) = (Vec::new(), 0);
    let names = ["logits"].into_iter().chain(program.traces.iter().map(|(name, _)| name.as_str()));
    let names: Vec<&str> = names.collect();
    for rows in STEPS {
        let positions: Vec<u32> = (start..start + rows as u32).collect();
        let tokens: Vec<u32> = positions.iter().map(|p| p * 7 % VOCAB as u32).collect();
        let outputs = picks(rows as u32);
        let step = Step {
            kind: if rows == 1 { StepKind::Decode } else { StepKind::Prompt },
            tokens: &tokens,
            sequences: &[Sequence::new(rows, start as usize, &tables)],
            outputs: &outputs,
            input: &[],
        };
        let mut named = |i: usize, values: &[f32]| {
            found.push((format!("{} of {rows} rows at {start}", names[i]), values.to_vec()));
        };
        match &mut executor {
            Some(executor) => {
                let ticket = executor.submit(&step).unwrap();
                (0..names.len()).for_each(|i| named(i, executor.read(ticket, i).unwrap()));
            }
            None => {
                let values = reference::run(program, &weight, &mut cache, &step).unwrap();
                let results = program.results.iter().enumerate();
                results.for_each(|(i, v)| named(i, &values[v.0]));
            }
        }
        start += rows as u32;
    }
    if let Some(executor) = &mut executor {
        let mut at = |position: usize| {
            let (kind, sequences) = (StepKind::Decode, &[Sequence::new(1, position, &tables)]);
            executor.submit(&Step { kind, tokens: &[1], sequences, outputs: &[], input: &[] })
        };
        at(PLACES - 1).unwrap();
        let refusal = at(PLACES).unwrap_err().to_string();
        assert!(refusal.contains("positions below 40"), "{refusal}");
    }
    found
}

/// A head behind a norm, without layers: nothing that ranks add up.
fn head_alone(vocab: usize) -> Result<Program> {
    let builder = Builder::new(&Any);
    let w = |name: &str, shape: &[usize]| weight(&builder, name, shape);
    let (table, places) = (w("table", &[vocab, HIDDEN]), w("positions", &[PLACES, HIDDEN]));
    let (scale, head) = (w("scale", &[HIDDEN]), w("head", &[vocab, HIDDEN]));
    let step = ForwardPass::new(builder.program(), true);
    let embed =
        |index, table| step.record(Op::from(ops::Embed { index }), &[], vec![table]).swap_remove(0);
    let x = embed(Index::Token, table).add(&embed(Index::Position, places));
    let n = x.select().apply(Op::from(ops::RmsNorm { eps: 1e-5 }), &[], vec![scale]);
    step.finish(n.apply(Op::from(ops::Linear), &[], vec![head]))
}

/// Each rank computes some of the logits, uneven shares among them, and every rank gets the bits
/// that one device computes.
#[test]
fn gathered_logits_are_those_of_one_device() {
    let one = "sim".parse::<DeviceSpec>().unwrap().open(None).unwrap();
    for (vocab, counts) in
        [(200, [&[128, 72][..], &[96, 64, 40]]), (VOCAB, [&[32, 8], &[14, 13, 13]])]
    {
        let plain = head_alone(vocab).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let tensors = tensors(&plain, folder.path());
        for program in [plain.clone(), fuse(&plain)] {
            let all = |device: &dyn Device| {
                let device = Some((device, CacheType::F32));
                results_of(&program, &tensors, device, |rows| (0..rows).step_by(2).collect())
            };
            let wanted = all(&*one);
            for (places, counts) in ["sim,sim", "sim,sim,sim"].into_iter().zip(counts) {
                let ranks = places.parse::<DeviceSpec>().unwrap().open_ranks().unwrap();
                assert!(all(&*ranks) == wanted, "{vocab} logits of {places}");
                for (rank, count) in counts.iter().enumerate() {
                    let part = program.shard(rank, counts.len(), &|_| Ok(1)).unwrap();
                    let heads = part.weights.iter().filter(|w| w.name.starts_with("head"));
                    let shapes: Vec<_> = heads.map(|w| w.shape.clone()).collect();
                    assert_eq!(shapes, [[*count, HIDDEN]], "rank {rank} of {places}");
                }
            }
        }
    }
}

#[test]
fn what_a_device_lacks_is_refused_by_name() {
    let whole = everything().unwrap();
    let device = |place: &str| place.parse::<DeviceSpec>().unwrap().open(Some(1)).unwrap();
    let refusal = |place: &str, program: &Program| {
        device(place).check(program).err().map(|error| error.to_string()).unwrap_or_default()
    };
    for place in ["cpu", "sim", "sim,sim"] {
        assert_eq!(refusal(place, &whole), "");
    }
    let mut rank = whole.clone();
    rank.nodes[0].op = Op::from(ops::AllReduce);
    let said = refusal("cpu", &rank);
    assert!(said.starts_with("cpu: all_reduce: ") && said.contains("a sum over ranks"), "{said}");
    let mut turned = whole.clone();
    let frequencies = vec![1.0; 300].into();
    let rope = Rope { head_dim: 600, pairing: Pairing::Half, frequencies, magnitude: 1.0 };
    turned.nodes[0].op = Op::Rope(rope);
    let said = refusal("sim", &turned);
    assert!(said.contains("rope: ") && said.contains("300 pairs, more than 256"), "{said}");
    let mut long = whole;
    for node in &mut long.nodes {
        if let Op::Attention(attention) = &mut node.op {
            attention.head_dim = 1024;
        }
    }
    let said = refusal("cpu", &long);
    assert!(said.contains("attention: ") && said.contains("1024 elements"), "{said}");
}

/// The largest difference of two lists of numbers, in the range of the second.
fn worst(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    let range = wanted.iter().fold(0f32, |range, x| range.max(x.abs()));
    let differences = found.iter().zip(wanted).map(|(a, b)| (a - b).abs());
    differences.fold(0f32, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) })
        / range
}

/// Holds a Program, as recorded and fused, against its references, for places with the type of their
/// cache and the greatest difference.
fn agree(plain: &Program, fused: &Program, cases: &[(&str, CacheType, f32)]) {
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors(plain, folder.path());
    let wanted = results(plain, &tensors, None);
    for &(place, cache_type, tolerance) in cases {
        let device = place.parse::<DeviceSpec>().unwrap().open(Some(2)).unwrap();
        for program in [plain, fused] {
            let found = results(program, &tensors, Some((&*device, cache_type)));
            for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
                let worst = worst(found, wanted);
                assert!(worst <= tolerance, "{place}, {cache_type:?}: {name}: {worst:e}");
            }
        }
    }
}

#[test]
fn devices_agree_with_the_references() {
    let plain = everything().unwrap();
    let fused = fuse(&plain);
    assert!(fused.nodes.len() < plain.nodes.len());
    // On the simulated GPU operands of products of many rows have 8 bits of mantissa.
    let cases = [
        ("cpu", CacheType::F32, 1e-5),
        ("cpu", CacheType::F16, 3e-3),
        ("sim", CacheType::F32, 1e-5),
        ("sim", CacheType::F16, 2e-2),
    ];
    agree(&plain, &fused, &cases);
}

/// Rows are attended to with 16 bits, though the projection that gives them has f32 for what else it
/// projects.
#[test]
fn projections_of_attention_and_of_a_state_agree_with_the_reference() {
    let plain = attended_and_carried().unwrap();
    let fused = fuse(&plain);
    let projected = |node: &&Node| matches!(node.op, Op::Project(_)) && node.outputs.len() == 4;
    assert_eq!(fused.nodes.iter().filter(projected).count(), 1);
    let cases = [
        ("cpu", CacheType::F16, 3e-3),
        ("sim", CacheType::F32, 1e-5),
        ("sim", CacheType::F16, 2e-2),
        ("sim", CacheType::BF16, 2e-2),
        ("sim", CacheType::Q8_0, 2e-2),
    ];
    agree(&plain, &fused, &cases);
}

/// Every device chooses the same positions, and attends to them alone.
#[test]
fn chosen_positions_agree_with_the_reference() {
    let plain = chosen().unwrap();
    let fused = fuse(&plain);
    assert!(fused.nodes.len() < plain.nodes.len());
    agree(&plain, &fused, &[("cpu", CacheType::F32, 1e-5), ("sim", CacheType::F32, 1e-5)]);
    // Without the choice the results are others.
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors(&plain, folder.path());
    let wanted = results(&plain, &tensors, None);
    let mut all = plain;
    for node in &mut all.nodes {
        if let Op::Attention(attention) = &mut node.op {
            attention.chosen = None;
            node.inputs.truncate(1);
        }
    }
    let found = results(&all, &tensors, None);
    let apart = found.iter().zip(&wanted).map(|((_, found), (_, wanted))| worst(found, wanted));
    assert!(apart.fold(0f32, f32::max) > 0.01);
}

/// Without its cap, sinks or slopes a layer is far from what it was: the test above would tell.
#[test]
fn caps_sinks_and_slopes_matter() {
    let folder = tempfile::tempdir().unwrap();
    let whole = everything().unwrap();
    let tensors = tensors(&whole, folder.path());
    let wanted = results(&whole, &tensors, None);
    for removed in 1..6 {
        let mut without = whole.clone();
        for node in &mut without.nodes {
            if let Op::Attention(attention) = &mut node.op
                && attention.layer == removed
            {
                (attention.cap, attention.sinks, attention.slopes) = (None, false, false);
                node.weights.clear();
            }
        }
        let found = results(&without, &tensors, None);
        let of = format!("attention{removed} ");
        let layers = found.iter().zip(&wanted).filter(|((name, _), _)| name.starts_with(&of));
        let worst =
            layers.map(|((_, found), (_, wanted))| worst(found, wanted)).fold(0.0, f32::max);
        assert!(worst > 0.01, "{removed}: {worst}");
    }
}

/// With what is added to them, too.
#[test]
fn mixtures_agree_with_their_references() {
    let folder = tempfile::tempdir().unwrap();
    let plain = mixtures().unwrap();
    let tensors = tensors(&plain, folder.path());
    let wanted = results(&plain, &tensors, None);
    let fused = fuse(&plain);
    let mut added = fused.clone();
    fuse_mixtures(&mut added);
    added.verify().unwrap();
    // Only positions are added by themselves.
    let sums = |program: &Program| {
        let adds = |node: &&Node| matches!(node.op, Op::Zip(ops::Zip(Binary::Add)));
        program.nodes.iter().filter(adds).count()
    };
    assert_eq!([&fused, &added].map(sums), [3, 1]);
    let found = results(&added, &tensors, None);
    for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
        assert!(worst(found, wanted) <= 1e-6, "the reference: {name}");
    }
    for (place, threads) in [("cpu", 1), ("cpu", 3), ("sim", 1)] {
        let device = place.parse::<DeviceSpec>().unwrap().open(Some(threads)).unwrap();
        for program in [&plain, &fused, &added] {
            let found = results(program, &tensors, Some((&*device, CacheType::F32)));
            for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
                let worst = worst(found, wanted);
                assert!(worst <= 1e-5, "{place}, {threads} threads: {name}: {worst:e}");
            }
        }
    }
}

#[test]
fn states_agree_with_their_references() {
    let folder = tempfile::tempdir().unwrap();
    let plain = carried().unwrap();
    let tensors = tensors(&plain, folder.path());
    let wanted = results(&plain, &tensors, None);
    for (place, threads) in [("cpu", 1), ("cpu", 3), ("sim", 1)] {
        let device = place.parse::<DeviceSpec>().unwrap().open(Some(threads)).unwrap();
        for program in [&plain, &fuse(&plain)] {
            let found = results(program, &tensors, Some((&*device, CacheType::F32)));
            for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
                let worst = worst(found, wanted);
                assert!(worst <= 1e-5, "{place}, {threads} threads: {name}: {worst:e}");
            }
        }
    }
    let mut overlaps = plain;
    for node in &mut overlaps.nodes {
        if let Op::ShortConv(conv) = &mut node.op {
            conv.start = 0;
        }
    }
    let why = overlaps.verify().unwrap_err().to_string();
    assert!(why.contains("one operation for each part of a state"), "{why}");
}
