//! Cases and benchmarks of the kernels of gated delta nets.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::{Recipe, Scalar};

use super::DeltaBackward;
use super::kernels::{
    self, delta_gates, delta_operands, delta_rates, delta_slopes, delta_states, delta_weights,
    numbers, packed_delta,
};
use crate::DeltaNet;
use crate::delta_net::{HeadRow, below_zero};
use crate::trial::{PackedRows, close, memory, near, random, rounded, scaled, zeros_like};

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "delta_rates", cases: || cases(Which::Rates), benches: || benches(Which::Rates) },
    Spec {
        name: "packed_delta",
        cases: || cases(Which::Output),
        benches: || benches(Which::Output),
    },
    Spec {
        name: "delta_states",
        cases: || cases(Which::States),
        benches: || benches(Which::States),
    },
    Spec {
        name: "delta_slopes",
        cases: || cases(Which::Slopes),
        benches: || benches(Which::Slopes),
    },
    Spec {
        name: "delta_operands",
        cases: || cases(Which::Operands),
        benches: || benches(Which::Operands),
    },
    Spec { name: "delta_gates", cases: || cases(Which::Gates), benches: || benches(Which::Gates) },
    Spec {
        name: "delta_weights",
        cases: || cases(Which::Weights),
        benches: || benches(Which::Weights),
    },
];

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Rates,
    Output,
    States,
    Slopes,
    Operands,
    Gates,
    Weights,
}

/// The setting of a case.
struct Setting {
    lengths: &'static [usize],
    net: DeltaNet,
    /// Rows of a block.
    block: usize,
    why: &'static str,
}

fn settings() -> Vec<Setting> {
    let of =
        |lengths, sizes, block, why| Setting { lengths, net: DeltaNet::new(sizes), block, why };
    let tiled =
        |setting: Setting| Setting { net: DeltaNet { tiled: true, ..setting.net }, ..setting };
    let doubled =
        |setting: Setting| Setting { net: DeltaNet { doubled: true, ..setting.net }, ..setting };
    let by_element =
        |setting: Setting| Setting { net: DeltaNet { by_element: true, ..setting.net }, ..setting };
    vec![
        of(&[1, 2], [1, 1, 32, 8], 2, "a sequence behind a block's beginning"),
        tiled(of(&[5, 1, 9], [4, 2, 32, 32], 4, "a key for two heads, by turns")),
        of(&[3, 10], [2, 1, 13, 7], 4, "sizes that no vector divides"),
        of(&[4, 4, 6], [2, 2, 16, 64], 4, "sequences that end with blocks"),
        of(&[9], [1, 1, 64, 32], 3, "several parts of a key"),
        of(&[2, 3], [1, 1, 256, 6], 2, "the longest keys"),
        of(&[3, 1], [1, 1, 6, 256], 2, "the longest values"),
        doubled(of(&[3, 4], [2, 1, 32, 8], 3, "corrections twice as strong")),
        by_element(of(
            &[1, 2],
            [1, 1, 32, 8],
            2,
            "elements, a sequence behind a block's beginning",
        )),
        by_element(tiled(of(&[5, 1, 9], [4, 2, 32, 32], 4, "elements, a key for two heads"))),
        by_element(doubled(of(
            &[3, 10],
            [2, 1, 13, 7],
            4,
            "elements, twice as strong, no vectors",
        ))),
        by_element(of(&[4, 4, 6], [2, 2, 64, 64], 4, "elements, sequences that end with blocks")),
        by_element(of(&[2, 3], [1, 1, 256, 6], 2, "elements, the longest keys")),
    ]
}

/// A net's operands, and what gradients are made of, by the definition in f64.
struct Worked {
    net: DeltaNet,
    scalar: Scalar,
    rows: PackedRows,
    block: usize,
    /// `qkv`, `a`, `b`, `dy`.
    inputs: [Buffer; 4],
    decay: Vec<f32>,
    dt: Vec<f32>,
    rates: Vec<f64>,
    y: Vec<f64>,
    misses: Vec<f64>,
    before: Vec<f64>,
    behind: Vec<f64>,
    dv: Vec<f64>,
    slopes: Vec<f64>,
    along: Vec<f64>,
    terms: Vec<f64>,
    of_gates: Vec<f64>,
    /// `dqkv`, `da`, `db`, `ddecay`, `ddt`, by the operation's reference.
    gradients: Vec<Vec<f32>>,
}

impl Worked {
    fn new(setting: &Setting, scalar: Scalar) -> Worked {
        let &Setting { lengths, net, block, .. } = setting;
        let packed = PackedRows::new(lengths);
        let (rows, heads, size) = (packed.len(), net.heads, net.key_dim * net.value_dim);
        let values = rows * heads * net.value_dim;
        let a = scaled(scalar, 2, rows * net.gates(), 2.0);
        let inputs = [
            random(scalar, 1, rows * net.width()),
            if net.by_element { below_zero(scalar, &a) } else { a },
            scaled(scalar, 3, rows * heads, 2.0),
            random(scalar, 4, values),
        ];
        let matrices = rows.div_ceil(block) * heads * size;
        let mut worked = Worked {
            net,
            scalar,
            block,
            decay: (0..heads).map(|h| -0.02 - 0.4 * h as f32).collect(),
            dt: random(Scalar::F32, 5, heads).to_f32(),
            rates: vec![0.0; rows * heads * 4],
            y: vec![0.0; values],
            misses: vec![0.0; values],
            before: vec![0.0; matrices],
            behind: vec![0.0; matrices],
            dv: vec![0.0; values],
            slopes: vec![0.0; rows * heads * 2 * net.key_dim],
            along: vec![0.0; rows.div_ceil(block) * heads * net.key_dim],
            terms: vec![0.0; rows * heads],
            of_gates: vec![0.0; rows * heads],
            gradients: Vec::new(),
            rows: packed,
            inputs,
        };
        (0..heads).for_each(|h| worked.head(h));
        let lengths = [rows * net.width(), rows * net.gates(), rows * heads, heads, heads];
        let weights = [worked.decay.clone(), worked.dt.clone()];
        worked.gradients = worked.rows.reference(
            &DeltaBackward(net),
            &worked.inputs.each_ref(),
            &weights[..net.weights()],
            &lengths[..3 + net.weights()],
        );
        worked
    }

    /// Works a head's rows out.
    fn head(&mut self, h: usize) {
        let net = self.net;
        let DeltaNet { heads, key_dim, value_dim, .. } = net;
        let size = key_dim * value_dim;
        let [qkv, a, b, dy] = self.inputs.each_ref().map(Buffer::to_f32);
        let rows: Vec<HeadRow> = (0..self.rows.len())
            .map(|t| {
                let of = |x: &'_ [f32], width: usize| x[t * width..][..width].to_vec();
                let (x, a, b) = (of(&qkv, net.width()), of(&a, net.gates()), of(&b, heads));
                net.row(h, [&x, &a, &b, &self.decay, &self.dt])
            })
            .collect();
        // The matrix in front of each row, and behind it.
        let mut state = vec![0.0; size];
        let mut around = Vec::new();
        for (t, row) in rows.iter().enumerate() {
            if self.rows.is_first(t) {
                state.fill(0.0);
            } else if t.is_multiple_of(self.block) {
                let at = (t / self.block * heads + h) * size;
                self.before[at..at + size].copy_from_slice(&state);
            }
            let before = state.clone();
            let y = row.advance(&mut state);
            let at = (t * heads + h) * value_dim;
            for j in 0..value_dim {
                let said = (0..key_dim).map(|i| before[i * value_dim + j] * row.gate(i) * row.k[i]);
                self.misses[at + j] = row.v[j] - said.sum::<f64>();
            }
            self.y[at..at + value_dim].copy_from_slice(&y);
            let own = [1.0 / (row.lengths[0] * row.root), 1.0 / row.lengths[1], row.gate, row.beta];
            self.rates[(t * heads + h) * 4..][..4].copy_from_slice(&own);
            around.push([before, state.clone()]);
        }
        let mut change = vec![0.0; size];
        let mut of_gate = 0.0;
        for (t, row) in rows.iter().enumerate().rev() {
            let [before, after] = &around[t];
            if self.rows.is_last(t) {
                change.fill(0.0);
                of_gate = 0.0;
            } else if (t + 1).is_multiple_of(self.block) {
                let number = t / self.block;
                let at = (number * heads + h) * size;
                self.behind[at..at + size].copy_from_slice(&change);
                for (at, (s, d)) in after.iter().zip(&change).enumerate() {
                    self.along[(number * key_dim + at / value_dim) * heads + h] += s * d;
                }
            }
            let at = (t * heads + h) * value_dim;
            let dy: Vec<f64> = dy[at..at + value_dim].iter().map(|dy| f64::from(*dy)).collect();
            let misses = &self.misses[at..at + value_dim];
            for i in 0..key_dim {
                for j in 0..value_dim {
                    change[i * value_dim + j] += row.q[i] / row.root * dy[j];
                }
            }
            let dv: Vec<f64> = (0..value_dim)
                .map(|j| {
                    let sum: f64 = (0..key_dim).map(|i| change[i * value_dim + j] * row.k[i]).sum();
                    sum * row.beta
                })
                .collect();
            let to = (t * heads + h) * 2 * key_dim;
            for i in 0..key_dim {
                for j in 0..value_dim {
                    let own = i * value_dim + j;
                    self.slopes[to + i] += after[own] * dy[j];
                    self.slopes[to + key_dim + i] +=
                        change[own] * row.beta * misses[j] - row.gate(i) * before[own] * dv[j];
                    change[own] = row.gate(i) * (change[own] - row.k[i] * dv[j]);
                }
            }
            let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
            let term = dot(&self.y[at..at + value_dim], &dy) - dot(&row.v, &dv);
            of_gate += term;
            self.terms[t * heads + h] = term;
            self.of_gates[t * heads + h] = of_gate;
            self.dv[at..at + value_dim].copy_from_slice(&dv);
        }
    }

    /// The case of a kernel.
    fn case(&self, which: Which, why: &str) -> Case {
        let (net, scalar, rows) = (self.net, self.scalar, self.rows.len());
        let form = |turned| kernels::form(&net, turned).expect("keys and values that fit");
        let zeros = |scalar, len: usize| Buffer::zeros(scalar, len);
        let of_scalar = |of: &[f32]| near(scalar, of);
        let starts = self.rows.starts();
        let sequences = starts.len() - 1;
        let starts = Buffer::words(&starts);
        let positions = Buffer::words(&self.rows.positions());
        let [qkv, a, b, dy] = self.inputs.clone();
        let [decay, dt] = [&self.decay, &self.dt].map(|x| Buffer::floats(Scalar::F32, x));
        let mut numbers = numbers(&net, rows, sequences, self.block);
        let gates = || net.by_element.then(|| self.inputs[1].clone());
        let (kernel, buffers, expected): (Recipe<'_>, Vec<Buffer>, Vec<(usize, Expected)>) =
            match which {
                Which::Rates => {
                    let mut buffers = vec![qkv, b, zeros_like(&self.rates)];
                    if !net.by_element {
                        buffers.extend([a, decay, dt]);
                    }
                    (delta_rates(scalar, form(false)), buffers, vec![(2, close(&self.rates))])
                }
                Which::Output => {
                    let y = zeros(scalar, self.y.len());
                    let kernel = packed_delta(scalar, form(false));
                    let expected = Expected::Near(self.y.clone(), tolerance(scalar));
                    let mut buffers = vec![qkv, rounded(&self.rates), starts, y];
                    buffers.extend(gates());
                    (kernel, buffers, vec![(3, expected)])
                }
                Which::States => {
                    let found = [&self.misses, &self.before, &self.dv, &self.behind];
                    let mut buffers = vec![qkv, rounded(&self.rates), dy, starts];
                    buffers.extend(found.map(|of| zeros_like(of)));
                    buffers.extend(gates());
                    let expected = (4..).zip(found.map(|of| close(of))).collect();
                    (delta_states(scalar, form(false)), buffers, expected)
                }
                Which::Slopes => {
                    let mut buffers = vec![qkv, rounded(&self.rates), rounded(&self.misses), dy];
                    buffers.extend([rounded(&self.dv), positions]);
                    buffers.extend([&self.before, &self.behind].map(|x| rounded(x)));
                    buffers.push(zeros_like(&self.slopes));
                    let mut expected = vec![(8, close(&self.slopes))];
                    if net.by_element {
                        expected.push((10, of_scalar(&self.gradients[1])));
                        buffers.extend([a.clone(), zeros(scalar, a.len())]);
                    } else {
                        expected.push((9, close(&self.along)));
                        buffers.push(zeros_like(&self.along));
                    }
                    (delta_slopes(scalar, form(true)), buffers, expected)
                }
                Which::Operands => {
                    let known = [&self.rates, &self.misses, &self.dv, &self.slopes];
                    let (dqkv, db) = (zeros(scalar, qkv.len()), zeros(scalar, b.len()));
                    let mut buffers = vec![qkv];
                    buffers.extend(known.map(|x| rounded(x)));
                    buffers.extend([dqkv, db]);
                    let mut expected = vec![
                        (5, of_scalar(&self.gradients[0])),
                        (6, of_scalar(&self.gradients[2])),
                    ];
                    if !net.by_element {
                        expected.push((7, close(&self.terms)));
                        buffers.push(zeros_like(&self.terms));
                    }
                    (delta_operands(scalar, form(false)), buffers, expected)
                }
                Which::Gates => {
                    let da = zeros(scalar, a.len());
                    let buffers = vec![
                        a,
                        decay,
                        dt,
                        rounded(&self.along),
                        positions,
                        rounded(&self.terms),
                        da,
                    ];
                    let expected =
                        vec![(5, close(&self.of_gates)), (6, of_scalar(&self.gradients[1]))];
                    (delta_gates(scalar, net.key_dim as u32), buffers, expected)
                }
                Which::Weights => {
                    numbers = crate::gradient::products::numbers(rows, net.heads);
                    // Cases take turns.
                    let of_decay = rows.is_multiple_of(2);
                    let y = zeros(Scalar::F32, net.heads);
                    let want = &self.gradients[if of_decay { 3 } else { 4 }];
                    let kernel = delta_weights(scalar, of_decay);
                    let buffers = vec![rounded(&self.of_gates), a, decay, dt, y];
                    (kernel, buffers, vec![(4, near(Scalar::F32, want))])
                }
            };
        let DeltaNet { heads, key_heads, key_dim, value_dim, .. } = net;
        let sizes = format!("{rows} x {heads}/{key_heads} of {key_dim} x {value_dim}");
        Case {
            kernel: kernel.record(),
            label: format!("{sizes} {scalar}, blocks of {}, {why}", self.block),
            numbers,
            buffers,
            expected,
        }
    }
}

fn cases(which: Which) -> Vec<Case> {
    let mut cases = Vec::new();
    for scalar in [Scalar::F32, Scalar::BF16] {
        let heads = [Which::Gates, Which::Weights].contains(&which);
        for setting in settings().into_iter().filter(|of| !(heads && of.net.by_element)) {
            cases.push(Worked::new(&setting, scalar).case(which, setting.why));
        }
    }
    cases
}

/// Four sequences of 1,024 rows, with the heads of Qwen3.5-4B.
fn benches(which: Which) -> Vec<Bench> {
    let (net, scalar, block) = (DeltaNet::new([32, 16, 128, 128]), Scalar::BF16, 128);
    let starts = [0, 1024, 2048, 3072, 4096];
    let rows = 4096;
    let positions: Vec<u32> = (0..rows as u32).map(|row| row % 1024).collect();
    let form = |turned| kernels::form(&net, turned).expect("keys and values that fit");
    let (heads, size) = (rows * net.heads, net.key_dim * net.value_dim);
    let values = heads * net.value_dim;
    let noise = |scalar, len| Fill::Noise(scalar, len);
    let zeros = |scalar, len| Fill::Zeros(scalar, len);
    let qkv = || noise(scalar, rows * net.width());
    let gates = || noise(scalar, heads);
    let vector = || noise(Scalar::F32, net.heads);
    let rates = || zeros(Scalar::F32, heads * 4);
    let wide = || zeros(Scalar::F32, values);
    let matrices = || zeros(Scalar::F32, rows / block * net.heads * size);
    let slopes = || zeros(Scalar::F32, heads * 2 * net.key_dim);
    let along = || zeros(Scalar::F32, rows / block * net.heads * net.key_dim);
    let starts = || Fill::These(Buffer::words(&starts));
    let positions = || Fill::These(Buffer::words(&positions));
    let dy = || noise(scalar, values);
    let numbers = match which {
        Which::Weights => crate::gradient::products::numbers(rows, net.heads),
        _ => numbers(&net, rows, 4, block),
    };
    let floats = |len| noise(Scalar::F32, len);
    // Operations for each element of a matrix and row.
    let (kernel, buffers, each) = match which {
        Which::Rates => {
            let buffers = vec![qkv(), gates(), rates(), gates(), vector(), vector()];
            (delta_rates(scalar, form(false)), buffers, 0)
        }
        Which::Output => {
            let buffers = vec![qkv(), rates(), starts(), zeros(scalar, values)];
            (packed_delta(scalar, form(false)), buffers, 7)
        }
        Which::States => {
            let mut buffers = vec![qkv(), rates(), dy(), starts()];
            buffers.extend([wide(), matrices(), wide(), matrices()]);
            (delta_states(scalar, form(false)), buffers, 12)
        }
        Which::Slopes => {
            let mut buffers = vec![qkv(), rates(), wide(), dy(), wide(), positions()];
            buffers.extend([matrices(), matrices(), slopes(), along()]);
            (delta_slopes(scalar, form(true)), buffers, 14)
        }
        Which::Operands => {
            let mut buffers = vec![qkv(), rates(), wide(), wide(), slopes()];
            buffers.extend([zeros(scalar, rows * net.width()), zeros(scalar, heads)]);
            buffers.push(zeros(Scalar::F32, heads));
            (delta_operands(scalar, form(false)), buffers, 0)
        }
        Which::Gates => {
            let mut buffers = vec![gates(), vector(), vector(), along(), positions()];
            buffers.extend([floats(heads), zeros(scalar, heads)]);
            (delta_gates(scalar, net.key_dim as u32), buffers, 0)
        }
        Which::Weights => {
            let buffers =
                vec![floats(heads), gates(), vector(), vector(), zeros(Scalar::F32, net.heads)];
            (delta_weights(scalar, true), buffers, 0)
        }
    };
    vec![memory(
        kernel,
        "4 x 1024 x 32/16 of 128 x 128",
        numbers,
        buffers,
        each * (heads * size) as u64,
    )]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
