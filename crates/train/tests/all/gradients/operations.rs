//! Every operation's rule against finite differences, and the CPU against the references.

use delft_train::cpu::{CpuExecutor, FloatWeights, check};
use delft_train::gradients::{differentiate, jvp, reference};
use delft_train::{Batch, Precision};
use formats::{Source, Tensors};
use ops::embed::Index;
use ops::experts::{Experts, Gate, Odds, Routing};
use ops::gradient::{Attend, CrossEntropy, PackedConv, PackedDelta, PackedScan};
use ops::{
    Attention, Binary, DeltaNet, Embed, Gated, GatedNorm, GaussianTopK, GroupLimit, LayerNorm,
    Linear, LinearAdd, Map, MatchRms, Mix, Op, RmsNorm, Rope, Scale, ScaleColumns, ScaleRows,
    Select, SelectiveScan, Shape, ShortConv, Splice, Stretch, Unary, Xielu, Zip,
};
use program::{Node, Program, ValueId, Weight, WeightId};

/// Rows of two sequences.
const ROWS: usize = 9;

fn batch() -> Batch {
    Batch {
        tokens: vec![1, 4, 0, 2, 4, 3, 3, 1, 0],
        targets: vec![4, 0, 2, 0, 3, 3, 1, 0, 0],
        weights: vec![0.0, 0.5, 1.0, 0.0, 1.0, 0.25, 0.0, 2.0, 0.0],
        sequences: vec![0..4, 4..9],
        ..Batch::default()
    }
}

/// A Program whose inputs are rows of tables by position, which are weights like all others.
struct Built {
    program: Program,
    /// Positions that tables have.
    positions: usize,
}

impl Built {
    fn new() -> Built {
        Built { program: Program::default(), positions: ROWS }
    }

    fn weight(&mut self, shape: &[usize]) -> WeightId {
        let id = WeightId(self.program.weights.len());
        // Seeds that differ make weights that differ, and two are one weight only if their recipes
        // are equal.
        let source =
            Source::Normal { shape: shape.to_vec(), deviation: 0.7, seed: id.0 as u64 + 1 };
        let (name, shape) = (format!("weight.{}", id.0), shape.to_vec());
        self.program.weights.push(Weight { name, shape, source });
        id
    }

    fn push(
        &mut self,
        op: impl Into<Op>,
        inputs: &[ValueId],
        weights: Vec<WeightId>,
    ) -> Vec<ValueId> {
        let op = op.into();
        let shapes: Vec<Shape> = inputs.iter().map(|v| self.program.shape(*v)).collect();
        let of = |w: &WeightId| self.program.weights[w.0].shape.as_slice();
        let found = op.infer(&shapes, &weights.iter().map(of).collect::<Vec<_>>()).unwrap();
        let first = self.program.values.len();
        self.program.values.extend(&found);
        let outputs: Vec<ValueId> = (first..first + found.len()).map(ValueId).collect();
        let inputs = inputs.to_vec();
        self.program.nodes.push(Node { op, inputs, weights, outputs: outputs.clone() });
        outputs
    }

    /// Rows that differ in each position of a sequence, and by token.
    fn rows(&mut self, width: usize) -> ValueId {
        let positions = self.weight(&[self.positions, width]);
        let tokens = self.weight(&[5, width]);
        let a = self.push(Embed { index: Index::Position }, &[], vec![positions])[0];
        let b = self.push(Embed { index: Index::Token }, &[], vec![tokens])[0];
        self.push(Zip(Binary::Add), &[a, b], Vec::new())[0]
    }

    /// The loss: the sum of a value times numbers of its own.
    fn finish(mut self, value: ValueId) -> Program {
        let shape = self.program.shape(value);
        let mut by = self.rows(shape.width);
        if shape.rows == ops::Rows::Outputs {
            by = self.push(Select, &[by], Vec::new())[0];
        }
        let loss = self.push(Zip(Binary::Mul), &[value, by], Vec::new())[0];
        self.program.results = vec![loss];
        self.program.verify().unwrap();
        self.program
    }
}

fn weights(program: &Program) -> Vec<Vec<f32>> {
    let aside = tempfile::tempdir().unwrap();
    let tensors = no_tensors(aside.path());
    program.weights.iter().map(|w| w.read(&tensors).unwrap().to_f32().unwrap()).collect()
}

/// Files without tensors: recipes here make their numbers themselves.
fn no_tensors(folder: &std::path::Path) -> Tensors {
    let bytes = 1f32.to_le_bytes();
    let shape = [1];
    let one = formats::TensorView {
        name: "one",
        dtype: formats::DType::F32,
        shape: &shape,
        bytes: &bytes,
    };
    formats::safetensors::write(&folder.join("model.safetensors"), &[], [one]).unwrap();
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    Tensors::open(folder).unwrap()
}

fn sum(program: &Program, weights: &[Vec<f32>]) -> f64 {
    let values =
        reference::run(program, &|w: WeightId| Ok(weights[w.0].clone()), &batch()).unwrap();
    values[program.results[0].0].iter().map(|v| f64::from(*v)).sum()
}

/// Every gradient along a direction against the difference of losses along it, and the CPU's
/// against the references'.
fn prove(name: &str, program: &Program) {
    prove_but(name, program, &[]);
}

/// The same of all weights but those that stay as they are.
fn prove_but(name: &str, program: &Program, frozen: &[WeightId]) {
    let own = weights(program);
    let all = (0..program.weights.len()).map(WeightId);
    let all: Vec<WeightId> = all.filter(|weight| !frozen.contains(weight)).collect();
    let gradient = differentiate(program, &all).unwrap_or_else(|e| panic!("{name}: {e}"));
    let values = reference::run(&gradient, &|w: WeightId| Ok(own[w.0].clone()), &batch()).unwrap();
    let result = |i: usize| &values[gradient.results[i].0];
    for (at, id) in all.iter().enumerate() {
        let (w, weight) = (id.0, &program.weights[id.0]);
        let direction: Vec<f32> =
            (0..own[w].len()).map(|i| ((i * 37 + w * 11 + 5) % 17) as f32 / 8.0 - 1.0).collect();
        let h = 2e-3;
        let moved = |by: f32| {
            let mut all = own.clone();
            all[w].iter_mut().zip(&direction).for_each(|(v, d)| *v += by * d);
            sum(program, &all)
        };
        let slope = (moved(h) - moved(-h)) / f64::from(2.0 * h);
        let terms = result(at + 1).iter().zip(&direction);
        let along: f64 = terms.clone().map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        let scale: f64 = terms.map(|(g, d)| f64::from((g * d).abs())).sum();
        let off = (slope - along).abs() / scale.max(0.05);
        assert!(off < 3e-3, "{name}: {}: {slope} {along}", weight.name);
    }
    transposed(name, program, &own, frozen);
    check(&gradient).unwrap();
    let aside = tempfile::tempdir().unwrap();
    let tensors = no_tensors(aside.path());
    let mut executor = CpuExecutor::new(Some(2), Precision::F32).unwrap();
    let loaded = FloatWeights::read(&[&gradient], &tensors, &[], executor.team()).unwrap();
    let batch = batch();
    let found = executor.run(&gradient, &loaded, &batch).unwrap();
    for i in 0..gradient.results.len() {
        let (found, want) = (found.get(i), result(i));
        let most = want.iter().fold(1f32, |most, v| most.max(v.abs()));
        for (f, w) in found.iter().zip(want) {
            assert!((f - w).abs() < 2e-5 * most, "{name}: result {i}: {f} {w}");
        }
        assert_eq!(found.len(), want.len());
    }
}

/// `<J v, 1> = <v, J' 1>` for all weights together, far closer than differences tell.
fn transposed(name: &str, program: &Program, own: &[Vec<f32>], frozen: &[WeightId]) {
    // The head of a cross-entropy has no tangent.
    let losses = program.nodes.iter().filter(|node| node.op.name() == "cross_entropy");
    let heads: Vec<WeightId> = losses.flat_map(|node| node.weights.clone()).collect();
    let all = (0..own.len()).map(WeightId);
    let all: Vec<WeightId> = all.filter(|w| !heads.contains(w) && !frozen.contains(w)).collect();
    let direction = |w: WeightId| -> Vec<f32> {
        (0..own[w.0].len()).map(|i| ((i * 29 + w.0 * 7 + 3) % 19) as f32 / 9.0 - 1.0).collect()
    };
    let tangent = jvp(program, &all).unwrap_or_else(|e| panic!("{name}: {e}"));
    let given = |w: WeightId| match w.0.checked_sub(own.len()) {
        Some(of) => Ok(direction(all[of])),
        None => Ok(own[w.0].clone()),
    };
    let values = reference::run(&tangent, &given, &batch()).unwrap();
    let forward: f64 = values[tangent.results[1].0].iter().map(|v| f64::from(*v)).sum();
    let gradient = differentiate(program, &all).unwrap();
    let values = reference::run(&gradient, &|w: WeightId| Ok(own[w.0].clone()), &batch()).unwrap();
    let (mut back, mut size) = (0.0, 0.0);
    for (w, result) in all.iter().zip(&gradient.results[1..]) {
        for (g, d) in values[result.0].iter().zip(direction(*w)) {
            back += f64::from(*g) * f64::from(d);
            size += f64::from((g * d).abs());
        }
    }
    assert!((forward - back).abs() < 1e-5 * size.max(1.0), "{name}: {forward} {back} of {size}");
}

#[test]
fn functions_of_elements() {
    for &f in Unary::ALL.iter().filter(|f| **f != Unary::Relu) {
        let mut built = Built::new();
        let x = built.rows(6);
        let y = built.push(Map(f), &[x], Vec::new())[0];
        prove(f.name(), &built.finish(y));
    }
    let mut built = Built::new();
    let x = built.rows(6);
    let numbers = vec![built.weight(&[1]), built.weight(&[1])];
    let y = built.push(Xielu { linear: 0.5 }, &[x], numbers)[0];
    prove("xielu", &built.finish(y));
    for f in [Binary::Add, Binary::Sub, Binary::Mul] {
        let mut built = Built::new();
        let (a, b) = (built.rows(6), built.rows(6));
        let y = built.push(Zip(f), &[a, b], Vec::new())[0];
        let square = built.push(Zip(f), &[y, y], Vec::new())[0];
        prove(f.name(), &built.finish(square));
    }
}

#[test]
fn rows_and_scales() {
    let mut built = Built::new();
    let (x, s) = (built.rows(6), built.rows(1));
    let y = built.push(ScaleRows, &[x, s], Vec::new())[0];
    let y = built.push(Scale { by: -1.5 }, &[y], Vec::new())[0];
    let y = built.push(Stretch { by: 0.7, step: 2, ahead: 1 }, &[y], Vec::new())[0];
    let y = built.push(Select, &[y], Vec::new())[0];
    prove("rows", &built.finish(y));
}

#[test]
fn columns() {
    for bias in [false, true] {
        let mut built = Built::new();
        let x = built.rows(6);
        let mut weights = vec![built.weight(&[6])];
        weights.extend(bias.then(|| built.weight(&[6])));
        let y = built.push(ScaleColumns, &[x], weights)[0];
        prove("scale_columns", &built.finish(y));
    }
}

#[test]
fn products() {
    let mut built = Built::new();
    let (x, residual) = (built.rows(6), built.rows(5));
    let (w, b) = (built.weight(&[5, 6]), built.weight(&[5]));
    let y = built.push(Linear, &[x], vec![w, b])[0];
    let again = built.weight(&[5, 5]);
    let y = built.push(LinearAdd, &[y, residual], vec![again])[0];
    prove("products", &built.finish(y));
}

/// Products of one value, whose gradients are added where they are made.
#[test]
fn products_of_one_value() {
    let mut built = Built::new();
    let x = built.rows(6);
    let weights = [5, 5, 7].map(|out| built.weight(&[out, 6]));
    let [a, b, c] = weights.map(|w| built.push(Linear, &[x], vec![w])[0]);
    let sum = built.push(Zip(Binary::Mul), &[a, b], Vec::new())[0];
    let narrow = built.weight(&[5, 7]);
    let y = built.push(LinearAdd, &[c, sum], vec![narrow])[0];
    let program = built.finish(y);
    prove("products of one value", &program);
    let gradient = differentiate(&program, &[WeightId(0)]).unwrap();
    let names: Vec<&str> = gradient.nodes.iter().map(|node| node.op.name()).collect();
    assert_eq!(names.iter().filter(|name| **name == "linear_backward_add").count(), 2, "{names:?}");
}

#[test]
fn gates() {
    for act in [Unary::Silu, Unary::GeluTanh, Unary::GeluErf] {
        let mut built = Built::new();
        let (gate, up) = (built.rows(6), built.rows(6));
        let y = built.push(Gated(act), &[gate, up], Vec::new())[0];
        prove("gated", &built.finish(y));
    }
}

#[test]
fn norms() {
    for (width, group) in [(8, 8), (8, 4)] {
        let mut built = Built::new();
        let (x, w) = (built.rows(width), built.weight(&[group]));
        let y = built.push(RmsNorm { eps: 1e-3 }, &[x], vec![w])[0];
        prove("rms_norm", &built.finish(y));
    }
    let mut built = Built::new();
    let (x, w, b) = (built.rows(8), built.weight(&[8]), built.weight(&[8]));
    let y = built.push(LayerNorm { eps: 1e-3 }, &[x], vec![w, b])[0];
    prove("layer_norm", &built.finish(y));
}

#[test]
fn rotations() {
    for pairing in [formats::Pairing::Half, formats::Pairing::Adjacent] {
        let mut built = Built::new();
        let x = built.rows(12);
        let frequencies = [1.0, 0.3].into();
        let rope = Rope { head_dim: 6, pairing, frequencies, magnitude: 1.25 };
        let y = built.push(Op::Rope(rope), &[x], Vec::new())[0];
        prove("rope", &built.finish(y));
    }
}

#[test]
fn attention() {
    for (window, chunked, cap, [sinks, slopes]) in [
        (None, false, None, [false, false]),
        (Some(3), false, None, [false, false]),
        (Some(3), true, None, [false, true]),
        (None, false, Some(0.8), [false, false]),
        (None, false, None, [false, true]),
        (Some(2), false, Some(2.0), [true, false]),
        (None, false, Some(2.0), [true, true]),
    ] {
        let mut built = Built::new();
        let (q, k, v) = (built.rows(16), built.rows(8), built.rows(8));
        let attention = Attention {
            layer: 0,
            heads: 4,
            kv_heads: 2,
            head_dim: 4,
            scale: 0.5,
            window,
            chunked,
            cap,
            sinks,
            slopes,
            chosen: None,
        };
        let weights: Vec<WeightId> = (0..attention.vectors()).map(|_| built.weight(&[4])).collect();
        let frozen: Vec<WeightId> =
            weights.last().filter(|_| slopes).copied().into_iter().collect();
        let y = built.push(Attend(attention), &[q, k, v], weights)[0];
        prove_but("attend", &built.finish(y), &frozen);
    }
}

/// Kernels as long as a sequence and longer, and more columns than a thread takes at a time.
#[test]
fn convolutions() {
    for (width, kernel, biased) in [(6, 2, false), (70, 4, true), (5, 6, false)] {
        let mut built = Built::new();
        let x = built.rows(width);
        let mut weights = vec![built.weight(&[kernel * width])];
        weights.extend(biased.then(|| built.weight(&[width])));
        let conv = ShortConv::new(width, kernel);
        let y = built.push(PackedConv(conv), &[x], weights)[0];
        prove("packed_short_conv", &built.finish(y));
    }
}

/// Sizes that no vector divides, and heads that share keys, either way; corrections of up to twice
/// what is missed, and elements of keys that forget at rates of their own.
#[test]
fn delta_nets() {
    for (sizes, tiled, doubled, by_element) in [
        ([2, 2, 4, 3], false, false, false),
        ([4, 2, 3, 18], false, true, false),
        ([6, 3, 5, 2], true, false, false),
        ([1, 1, 33, 35], true, false, false),
        ([2, 2, 4, 3], false, false, true),
        ([4, 2, 3, 18], true, true, true),
        ([1, 1, 33, 35], false, false, true),
    ] {
        let mut built = Built::new();
        let net = DeltaNet { tiled, doubled, by_element, ..DeltaNet::new(sizes) };
        let rows = [net.width(), net.gates(), net.heads];
        let [qkv, a, b] = rows.map(|width| built.rows(width));
        // Logarithms of factors are below zero.
        let a = if by_element {
            let steps = built.push(Map(Unary::Softplus), &[a], Vec::new())[0];
            built.push(Scale { by: -0.5 }, &[steps], Vec::new())[0]
        } else {
            a
        };
        let weights = (0..net.weights()).map(|_| built.weight(&[net.heads])).collect();
        let y = built.push(PackedDelta(net), &[qkv, a, b], weights)[0];
        prove(&format!("{net:?}"), &built.finish(y));
    }
}

#[test]
fn state_spaces() {
    let unlimited = ops::selective_scan::UNLIMITED;
    for (heads, groups, head_dim, state, limit) in [
        (1, 1, 1, 1, unlimited),
        (4, 2, 3, 5, unlimited),
        (3, 1, 8, 4, unlimited),
        // Some steps are on a bound, and change nothing.
        (4, 4, 2, 3, [0.4, 1.1]),
    ] {
        let sizes = [heads, groups, head_dim, state];
        let scan = SelectiveScan { limit, ..SelectiveScan::new(sizes) };
        let mut built = Built::new();
        let (xbc, dt) = (built.rows(scan.width()), built.rows(heads));
        let weights = [0, 1, 2].map(|_| built.weight(&[heads])).to_vec();
        let y = built.push(PackedScan(scan), &[xbc, dt], weights)[0];
        prove(&format!("{scan:?}"), &built.finish(y));
    }
}

#[test]
fn state_spaces_that_decay_by_element() {
    // The last has columns for several threads.
    for (heads, groups, head_dim, state) in
        [(1, 1, 1, 1), (1, 1, 7, 4), (4, 2, 3, 5), (1, 1, 133, 2)]
    {
        let sizes = [heads, groups, head_dim, state];
        let scan = SelectiveScan { by_element: true, ..SelectiveScan::new(sizes) };
        let (inner, each) = (heads * head_dim, groups * state);
        let mut built = Built::new();
        let [x, steps, b, c] = [inner, inner, each, each].map(|width| built.rows(width));
        let steps = built.push(Map(Unary::Softplus), &[steps], Vec::new())[0];
        let weights = vec![built.weight(&[inner * state]), built.weight(&[inner])];
        let y = built.push(PackedScan(scan), &[x, steps, b, c], weights)[0];
        prove(&format!("{scan:?}"), &built.finish(y));
    }
}

#[test]
fn gated_norms() {
    for (groups, norm_first) in [(1, false), (1, true), (3, false), (2, true)] {
        let norm = GatedNorm { eps: 1e-3, groups, norm_first };
        let mut built = Built::new();
        let (gate, x) = (built.rows(12), built.rows(12));
        let weight = built.weight(&[12]);
        let y = built.push(norm, &[gate, x], vec![weight])[0];
        prove(&format!("{norm:?}"), &built.finish(y));
    }
}

/// Streams that are summed, made as long as others, and cut to what stands out.
#[test]
fn streams() {
    for (from, to) in [(4, 4), (1, 4), (5, 2)] {
        let mut built = Built::new();
        let (x, c) = (built.rows(6 * from), built.rows(to * from));
        let y = built.push(Mix { from, to }, &[x, c], Vec::new())[0];
        prove(&format!("{from} into {to}"), &built.finish(y));
    }
    // The last of the floors is above all mean squares.
    for floor in [1e-5, 1.0, 100.0] {
        let mut built = Built::new();
        let (x, like) = (built.rows(12), built.rows(4));
        let y = built.push(MatchRms { floor }, &[x, like], Vec::new())[0];
        prove(&format!("a floor of {floor}"), &built.finish(y));
    }
    for deviations in [-0.5, 0.3, 1.2] {
        let mut built = Built::new();
        let x = built.rows(17);
        let y = built.push(GaussianTopK { deviations }, &[x], Vec::new())[0];
        prove(&format!("{deviations} deviations"), &built.finish(y));
    }
}

#[test]
fn experts() {
    let routing = |odds, normalised, scale| Routing { used: 2, odds, normalised, scale };
    let clamped = Gate::Clamped { limit: 1.2, alpha: 1.7 };
    let near = routing(Odds::Near { jitter: 0.4 }, false, 1.0);
    for (routing, gate, biases, factors, weighs_inputs) in [
        (routing(Odds::Softmax, true, 1.0), Gate::Plain(Unary::Silu), false, false, false),
        (routing(Odds::Softmax, false, 1.5), Gate::Plain(Unary::GeluTanh), false, true, false),
        (routing(Odds::Softmax, true, 1.0), clamped, true, false, false),
        (routing(Odds::Sigmoid, true, 1.5), Gate::Bounded { limit: 0.8 }, false, false, false),
        (routing(Odds::Sigmoid, true, 2.5), Gate::Plain(Unary::Silu), false, false, false),
        (routing(Odds::Sigmoid, false, 1.0), Gate::Plain(Unary::Silu), true, true, false),
        (near, Gate::Plain(Unary::Silu), false, false, false),
        (routing(Odds::Sigmoid, false, 1.0), Gate::Plain(Unary::Silu), false, false, true),
        (routing(Odds::Softmax, true, 1.0), Gate::Plain(Unary::Silu), true, true, true),
    ] {
        let mut built = Built::new();
        let (x, scores) = (built.rows(6), built.rows(5));
        let all: [&[usize]; 7] = [&[20, 6], &[20, 6], &[30, 4], &[20], &[20], &[30], &[5]];
        let mut shapes = all[..if biases { 6 } else { 3 }].to_vec();
        shapes.extend(factors.then_some(all[6]));
        let own: Vec<WeightId> = shapes.iter().map(|shape| built.weight(shape)).collect();
        let op = Experts { routing, gate, weighs_inputs, inner: false };
        let y = built.push(op, &[x, scores], own.clone())[0];
        let (name, program) = (format!("{op:?}"), built.finish(y));
        prove(&name, &program);
        prove_but(&format!("{name}, frozen"), &program, &own);
        // Some alone.
        prove_but(&format!("{name}, in part"), &program, &own[1..]);
    }
}

/// Heads cut at either end or within, with zeros behind them, and joined with heads of their own or
/// with one that all share.
#[test]
fn heads_of_parts() {
    for (heads, each, start, count, second, shared, width) in [
        (3, 4, 0, 4, 0, false, 4),
        (3, 5, 1, 3, 0, false, 6),
        (1, 5, 2, 3, 0, false, 3),
        (3, 5, 0, 2, 2, false, 5),
        (4, 5, 2, 3, 2, true, 5),
        (7, 3, 1, 1, 3, true, 6),
        (1, 3, 0, 3, 2, true, 5),
    ] {
        let mut built = Built::new();
        let mut inputs = vec![built.rows(heads * each)];
        if second > 0 {
            inputs.push(built.rows(if shared { second } else { heads * second }));
        }
        let op = Splice { heads, start, count, shared, width };
        let y = built.push(op, &inputs, Vec::new())[0];
        prove(&format!("{op:?}"), &built.finish(y));
    }
}

/// Experts by scores of which a limit by groups leaves some.
#[test]
fn limits_of_groups() {
    for (groups, groups_used, softmax, normalised) in
        [(1, 1, false, true), (3, 2, false, true), (3, 2, true, false), (1, 1, true, true)]
    {
        let mut built = Built::new();
        let (x, scores) = (built.rows(6), built.rows(6));
        let limit = GroupLimit { used: 2, groups, groups_used, softmax };
        let correction = built.weight(&[6]);
        let left = built.push(limit, &[scores], vec![correction])[0];
        let experts = [[24, 6], [24, 6], [36, 4]].map(|shape| built.weight(&shape));
        let routing = Routing { used: 2, odds: Odds::Sigmoid, normalised, scale: 1.5 };
        let gate = Gate::Plain(Unary::Silu);
        let op = Experts { routing, gate, weighs_inputs: false, inner: false };
        let y = built.push(op, &[x, left], experts.to_vec())[0];
        let frozen = [&experts[..], &[correction]].concat();
        prove_but(&format!("{limit:?}"), &built.finish(y), &frozen);
    }
}

#[test]
fn cross_entropies() {
    for (scale, cap, bias) in [(1.0, None, false), (0.5, None, true), (1.0, Some(1.5), false)] {
        let mut built = Built::new();
        let x = built.rows(6);
        let x = built.push(Select, &[x], Vec::new())[0];
        let mut weights = vec![built.weight(&[5, 6])];
        weights.extend(bias.then(|| built.weight(&[5])));
        let loss = built.push(CrossEntropy::new(scale, cap), &[x], weights)[0];
        built.program.results = vec![loss];
        prove("cross_entropy", &built.program);
    }
}

/// Several blocks of queries and a short sequence, with windows, bounds and sinks: what the tile
/// unit rounds to bf16 is near to what nothing rounds, of any number of threads.
#[test]
fn attention_of_rounded_operands() {
    let cases = [
        (None, false, None, [false, false]),
        (Some(70), false, None, [true, false]),
        (Some(70), true, None, [false, true]),
        (Some(33), false, Some(8.0), [false, false]),
    ];
    for (window, chunked, cap, [sinks, slopes]) in cases {
        let (heads, kv_heads, head_dim) = (4, 2, 64);
        let mut built = Built { positions: 150, ..Built::new() };
        let q = built.rows(heads * head_dim);
        let [k, v] = [0, 1].map(|_| built.rows(kv_heads * head_dim));
        let (layer, scale) = (0, 0.1);
        let attention = Attention {
            layer,
            heads,
            kv_heads,
            head_dim,
            scale,
            window,
            chunked,
            cap,
            sinks,
            slopes,
            chosen: None,
        };
        let weights: Vec<WeightId> =
            (0..attention.vectors()).map(|_| built.weight(&[heads])).collect();
        let frozen = weights.last().copied().filter(|_| slopes);
        let y = built.push(Attend(attention), &[q, k, v], weights)[0];
        let down = built.weight(&[70, heads * head_dim]);
        let y = built.push(Linear, &[y], vec![down])[0];
        let program = built.finish(y);
        let all = (0..program.weights.len()).map(WeightId);
        let all: Vec<WeightId> = all.filter(|weight| Some(*weight) != frozen).collect();
        let gradient = differentiate(&program, &all).unwrap();
        let token = |i: usize| (i * 7 % 5) as u32;
        let rows = 181;
        let counts = |i: usize| if [149, 180].contains(&i) { 0.0 } else { 1.0 };
        let batch = Batch {
            tokens: (0..rows).map(token).collect(),
            targets: (1..=rows).map(token).collect(),
            weights: (0..rows).map(counts).collect(),
            sequences: vec![0..150, 150..rows],
            ..Batch::default()
        };
        let aside = tempfile::tempdir().unwrap();
        let tensors = no_tensors(aside.path());
        let run = |threads: usize, precision: Precision| -> Vec<Vec<f32>> {
            let mut executor = CpuExecutor::new(Some(threads), precision).unwrap();
            let loaded = FloatWeights::read(&[&gradient], &tensors, &[], executor.team()).unwrap();
            let found = executor.run(&gradient, &loaded, &batch).unwrap();
            (0..gradient.results.len()).map(|i| found.get(i).to_vec()).collect()
        };
        let (want, found) = (run(1, Precision::F32), run(1, Precision::BF16));
        assert!(run(3, Precision::BF16) == found, "of any number of threads");
        for (i, (found, want)) in found.iter().zip(&want).enumerate() {
            let size = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
            let off = size(&mut found.iter().zip(want).map(|(a, b)| a - b));
            let off = off / size(&mut want.iter().copied());
            assert!(off < 0.02, "{window:?} {cap:?}: result {i} is {off:.1e} off");
        }
    }
}
