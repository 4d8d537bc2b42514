//! Cases and benchmarks of the kernels of state spaces.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::{Recipe, Scalar};

use super::kernels::{
    self, numbers, packed_scan, scan_decays, scan_inputs, scan_rates, scan_shared, scan_slopes,
    scan_states, scan_steps, together,
};
use super::{ScanBackward, ScanHead, matrices, parts};
use crate::SelectiveScan;
use crate::selective_scan::UNLIMITED;
use crate::trial::{PackedRows, close, memory, near, random, rounded, scaled, zeros_like};

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "scan_rates", cases: || cases(Which::Rates), benches: || benches(Which::Rates) },
    Spec {
        name: "packed_scan",
        cases: || cases(Which::Output),
        benches: || benches(Which::Output),
    },
    Spec {
        name: "scan_states",
        cases: || cases(Which::States),
        benches: || benches(Which::States),
    },
    Spec {
        name: "scan_slopes",
        cases: || cases(Which::Slopes),
        benches: || benches(Which::Slopes),
    },
    Spec {
        name: "scan_shared",
        cases: || cases(Which::Shared),
        benches: || benches(Which::Shared),
    },
    Spec {
        name: "scan_inputs",
        cases: || cases(Which::Inputs),
        benches: || benches(Which::Inputs),
    },
    Spec { name: "scan_steps", cases: || cases(Which::Steps), benches: || benches(Which::Steps) },
    Spec {
        name: "scan_decays",
        cases: || cases(Which::Decays),
        benches: || benches(Which::Decays),
    },
];

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Rates,
    Output,
    States,
    Slopes,
    Shared,
    Inputs,
    Steps,
    Decays,
}

/// The setting of a case.
struct Setting {
    lengths: &'static [usize],
    of: SelectiveScan,
    /// Rows of a block.
    block: usize,
    why: &'static str,
}

fn scan(sizes: [usize; 4], limit: [f32; 2]) -> SelectiveScan {
    SelectiveScan { limit, ..SelectiveScan::new(sizes) }
}

fn settings() -> Vec<Setting> {
    let of = |lengths, sizes, block, why| {
        let limit = if sizes == [6, 3, 7, 13] { [0.3, 0.9] } else { UNLIMITED };
        Setting { lengths, of: scan(sizes, limit), block, why }
    };
    vec![
        of(&[1, 2], [1, 1, 8, 32], 2, "a sequence behind a block's beginning"),
        of(&[5, 1, 9], [4, 2, 32, 32], 4, "heads that share groups"),
        of(&[3, 10], [6, 3, 7, 13], 4, "sizes that no vector divides, and bounds that bind"),
        of(&[4, 4, 6], [2, 2, 64, 16], 4, "sequences that end with blocks"),
        of(&[9], [1, 1, 32, 64], 3, "several parts of a state"),
        of(&[7, 2], [12, 1, 16, 12], 4, "a group's heads in two threadgroups"),
        of(&[2, 3], [1, 1, 6, 256], 2, "the largest states"),
        of(&[3, 1], [1, 1, 256, 6], 2, "the widest heads"),
    ]
}

/// A state space's operands, and what gradients are made of, by the definition in f64.
struct Worked {
    of: SelectiveScan,
    scalar: Scalar,
    rows: PackedRows,
    block: usize,
    /// `xbc`, `dt`, `dy`.
    inputs: [Buffer; 3],
    /// Decay rates, the bias of steps, and `skip`.
    weights: [Vec<f32>; 3],
    rates: Vec<f64>,
    y: Vec<f64>,
    answers: Vec<f64>,
    before: Vec<f64>,
    behind: Vec<f64>,
    du: Vec<f64>,
    slopes: Vec<f64>,
    along: Vec<f64>,
    terms: Vec<f64>,
    of_writes: Vec<f64>,
    of_skips: Vec<f64>,
    of_gates: Vec<f64>,
    /// `dxbc`, `ddt`, `ddecay`, `dbias`, `dskip`, by the operation's reference.
    gradients: Vec<Vec<f32>>,
}

impl Worked {
    fn new(setting: &Setting, scalar: Scalar) -> Worked {
        let &Setting { lengths, of, block, .. } = setting;
        let packed = PackedRows::new(lengths);
        let (rows, heads) = (packed.len(), of.heads);
        let values = rows * heads * of.head_dim;
        let inputs = [
            random(scalar, 1, rows * of.width()),
            scaled(scalar, 2, rows * heads, 2.0),
            random(scalar, 3, values),
        ];
        let decay = (0..heads).map(|h| -0.02 - 0.4 * h as f32).collect();
        let [bias, skip] = [4, 5].map(|seed| random(Scalar::F32, seed, heads).to_f32());
        let matrices = rows.div_ceil(block) * of.elements();
        let mut worked = Worked {
            of,
            scalar,
            block,
            weights: [decay, bias, skip],
            rates: vec![0.0; rows * heads * 2],
            y: vec![0.0; values],
            answers: vec![0.0; values],
            before: vec![0.0; matrices],
            behind: vec![0.0; matrices],
            du: vec![0.0; values],
            slopes: vec![0.0; rows * heads / together(&of) * 2 * of.state],
            along: vec![0.0; rows.div_ceil(block) * heads * of.state],
            terms: vec![0.0; rows * heads],
            of_writes: vec![0.0; rows * heads],
            of_skips: vec![0.0; rows * heads],
            of_gates: vec![0.0; rows * heads],
            gradients: Vec::new(),
            rows: packed,
            inputs,
        };
        (0..heads).for_each(|h| worked.head(h));
        let lengths = [rows * of.width(), rows * heads, heads, heads, heads];
        let op = ScanBackward(of);
        worked.gradients =
            worked.rows.reference(&op, &worked.inputs.each_ref(), &worked.weights, &lengths);
        worked
    }

    /// Works a head's rows out.
    fn head(&mut self, h: usize) {
        let of = self.of;
        let SelectiveScan { heads, head_dim: n, state, .. } = of;
        let size = state * n;
        let [xbc, dt, dy] = self.inputs.each_ref().map(Buffer::to_f32);
        let weights = self.weights.clone();
        let weights = weights.each_ref().map(Vec::as_slice);
        let skip = ScanHead::new(&of, weights, h).skip;
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let around = matrices(&of, h, (&xbc, &dt), weights, &self.rows.first);
        let row = |t: usize| {
            let row = &xbc[t * of.width()..][..of.width()];
            let [x, b, c] = parts(&of, h).map(|part| wide(&row[part]));
            [x, b, c, wide(&dy[(t * heads + h) * n..][..n])]
        };
        for (t, (before, after, found)) in around.iter().enumerate() {
            let (item, starts, [x, _, c, _]) = (t * heads + h, self.rows.is_first(t), row(t));
            let gate = if starts { 0.0 } else { found.gate };
            self.rates[item * 2..][..2].copy_from_slice(&[found.step, gate]);
            if !starts && t.is_multiple_of(self.block) {
                let at = (t / self.block * heads + h) * size;
                self.before[at..at + size].copy_from_slice(before);
            }
            for j in 0..n {
                let answer: f64 = (0..state).map(|i| c[i] * after[i * n + j]).sum();
                self.answers[item * n + j] = answer;
                self.y[item * n + j] = answer + skip * x[j];
            }
        }
        let mut change = vec![0.0; size];
        let mut of_gate = 0.0;
        for (t, (_, after, found)) in around.iter().enumerate().rev() {
            let (item, [x, b, c, dy]) = (t * heads + h, row(t));
            if self.rows.is_last(t) {
                change.fill(0.0);
                of_gate = 0.0;
            } else if (t + 1).is_multiple_of(self.block) {
                let number = t / self.block;
                let at = (number * heads + h) * size;
                self.behind[at..at + size].copy_from_slice(&change);
                for i in 0..state {
                    let rows = [after, &change].map(|matrix| &matrix[i * n..][..n]);
                    self.along[(number * state + i) * heads + h] = dot(rows[0], rows[1]);
                }
            }
            let to = (t * heads + h) / together(&of) * 2 * state;
            for i in 0..state {
                let own = i * n..(i + 1) * n;
                change[own.clone()].iter_mut().zip(&dy).for_each(|(d, dy)| *d += c[i] * dy);
                self.slopes[to + i] += found.step * dot(&change[own.clone()], &x);
                self.slopes[to + state + i] += dot(&after[own], &dy);
            }
            let du: Vec<f64> =
                (0..n).map(|j| (0..state).map(|i| b[i] * change[i * n + j]).sum()).collect();
            let of_write = dot(&x, &du);
            let term = dot(&self.answers[item * n..][..n], &dy) - found.step * of_write;
            of_gate += term;
            self.terms[item] = term;
            self.of_writes[item] = of_write;
            self.of_skips[item] = dot(&x, &dy);
            self.of_gates[item] = if self.rows.is_first(t) { 0.0 } else { of_gate };
            self.du[item * n..][..n].copy_from_slice(&du);
            change.iter_mut().for_each(|d| *d *= found.gate);
        }
    }

    /// The gradients of `x`, or else of `B` and `C`, with zeros for the rest.
    fn part_of_inputs(&self, x: bool) -> Vec<f32> {
        let inner = self.of.heads * self.of.head_dim;
        let rows = self.gradients[0].chunks_exact(self.of.width());
        let keep = |(i, value): (usize, &f32)| if (i < inner) == x { *value } else { 0.0 };
        rows.flat_map(|row| row.iter().enumerate().map(keep)).collect()
    }

    /// The case of a kernel.
    fn case(&self, which: Which, why: &str) -> Case {
        let (of, scalar, rows) = (self.of, self.scalar, self.rows.len());
        let form = |turned| kernels::form(&of, turned).expect("states and heads that fit");
        let zeros = |scalar, len: usize| Buffer::zeros(scalar, len);
        let starts = self.rows.starts();
        let sequences = starts.len() - 1;
        let starts = Buffer::words(&starts);
        let positions = Buffer::words(&self.rows.positions());
        let [xbc, dt, dy] = self.inputs.clone();
        let [decay, bias, skip] = self.weights.each_ref().map(|x| Buffer::floats(Scalar::F32, x));
        let dxbc = zeros(scalar, xbc.len());
        let mut numbers = numbers(&of, rows, sequences, self.block);
        let (kernel, buffers, expected): (Recipe<'_>, Vec<Buffer>, Vec<(usize, Expected)>) =
            match which {
                Which::Rates => {
                    let buffers = vec![dt, decay, bias, positions, zeros_like(&self.rates)];
                    (scan_rates(scalar), buffers, vec![(4, close(&self.rates))])
                }
                Which::Output => {
                    let y = zeros(scalar, self.y.len());
                    let expected = Expected::Near(self.y.clone(), tolerance(scalar));
                    let buffers = vec![xbc, rounded(&self.rates), skip, starts, y];
                    (packed_scan(scalar, form(false)), buffers, vec![(4, expected)])
                }
                Which::States => {
                    let found = [&self.answers, &self.before, &self.du, &self.behind];
                    let mut buffers = vec![xbc, rounded(&self.rates), dy, starts];
                    buffers.extend(found.map(|of| zeros_like(of)));
                    let expected = (4..).zip(found.map(|of| close(of))).collect();
                    (scan_states(scalar, form(false)), buffers, expected)
                }
                Which::Slopes => {
                    let mut buffers = vec![xbc, rounded(&self.rates), dy, positions];
                    buffers.extend([&self.before, &self.behind].map(|x| rounded(x)));
                    // What is there before counts for nothing.
                    buffers.extend([
                        random(Scalar::F32, 6, self.slopes.len()),
                        zeros_like(&self.along),
                    ]);
                    let expected = vec![(6, close(&self.slopes)), (7, close(&self.along))];
                    (scan_slopes(scalar, form(true)), buffers, expected)
                }
                Which::Shared => {
                    let expected = vec![(1, near(scalar, &self.part_of_inputs(false)))];
                    let kernel = scan_shared(scalar, form(false));
                    (kernel, vec![rounded(&self.slopes), dxbc], expected)
                }
                Which::Inputs => {
                    let found = [&self.terms, &self.of_writes, &self.of_skips];
                    let mut buffers = vec![xbc, rounded(&self.rates), dy];
                    buffers.extend([rounded(&self.answers), rounded(&self.du), skip, dxbc]);
                    buffers.extend(found.map(|of| zeros_like(of)));
                    let mut expected = vec![(6, near(scalar, &self.part_of_inputs(true)))];
                    expected.extend((7..).zip(found.map(|of| close(of))));
                    (scan_inputs(scalar, form(false)), buffers, expected)
                }
                Which::Steps => {
                    let ddt = zeros(scalar, dt.len());
                    let mut buffers = vec![dt, decay, bias, rounded(&self.along), positions];
                    buffers.extend([rounded(&self.terms), rounded(&self.of_writes), ddt]);
                    let expected = vec![
                        (5, close(&self.of_gates)),
                        (6, near(Scalar::F32, &self.gradients[1])),
                        (7, near(scalar, &self.gradients[1])),
                    ];
                    (scan_steps(scalar, of.state as u32), buffers, expected)
                }
                Which::Decays => {
                    numbers = crate::gradient::products::numbers(rows, of.heads);
                    let y = zeros(Scalar::F32, of.heads);
                    let buffers = vec![rounded(&self.of_gates), rounded(&self.rates), y];
                    (scan_decays(), buffers, vec![(2, near(Scalar::F32, &self.gradients[2]))])
                }
            };
        let SelectiveScan { heads, groups, head_dim, state, .. } = of;
        let sizes = format!("{rows} x {heads}/{groups} of {state} x {head_dim}");
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
        // It has no buffer of this type.
        if which == Which::Decays && scalar != Scalar::F32 {
            continue;
        }
        for setting in settings() {
            cases.push(Worked::new(&setting, scalar).case(which, setting.why));
        }
    }
    cases
}

/// Four sequences of 1,024 rows, with the heads of Nemotron Nano 9B v2.
fn benches(which: Which) -> Vec<Bench> {
    let (of, scalar, block) = (scan([128, 8, 80, 128], UNLIMITED), Scalar::BF16, 128);
    let rows = 4096;
    let positions: Vec<u32> = (0..rows as u32).map(|row| row % 1024).collect();
    let form = |turned| kernels::form(&of, turned).expect("states and heads that fit");
    let (heads, size) = (rows * of.heads, of.state * of.head_dim);
    let values = heads * of.head_dim;
    let noise = |scalar, len| Fill::Noise(scalar, len);
    let zeros = |scalar, len| Fill::Zeros(scalar, len);
    let xbc = || noise(scalar, rows * of.width());
    let dxbc = || zeros(scalar, rows * of.width());
    let vector = || noise(Scalar::F32, of.heads);
    let rates = || zeros(Scalar::F32, heads * 2);
    let wide = || zeros(Scalar::F32, values);
    let matrices = || zeros(Scalar::F32, rows / block * of.heads * size);
    let slopes = || zeros(Scalar::F32, heads / together(&of) * 2 * of.state);
    let along = || zeros(Scalar::F32, rows / block * of.heads * of.state);
    let starts = || Fill::These(Buffer::words(&[0, 1024, 2048, 3072, 4096]));
    let positions = || Fill::These(Buffer::words(&positions));
    let (dt, dy) = (|| noise(scalar, heads), || noise(scalar, values));
    let floats = |len| noise(Scalar::F32, len);
    let numbers = match which {
        Which::Decays => crate::gradient::products::numbers(rows, of.heads),
        _ => numbers(&of, rows, 4, block),
    };
    // Operations for each element of a matrix and row.
    let (kernel, buffers, each) = match which {
        Which::Rates => {
            (scan_rates(scalar), vec![dt(), vector(), vector(), positions(), rates()], 0)
        }
        Which::Output => {
            let buffers = vec![xbc(), rates(), vector(), starts(), zeros(scalar, values)];
            (packed_scan(scalar, form(false)), buffers, 5)
        }
        Which::States => {
            let mut buffers = vec![xbc(), rates(), dy(), starts()];
            buffers.extend([wide(), matrices(), wide(), matrices()]);
            (scan_states(scalar, form(false)), buffers, 10)
        }
        Which::Slopes => {
            let mut buffers = vec![xbc(), rates(), dy(), positions()];
            buffers.extend([matrices(), matrices(), slopes(), along()]);
            (scan_slopes(scalar, form(true)), buffers, 10)
        }
        Which::Shared => (scan_shared(scalar, form(false)), vec![slopes(), dxbc()], 0),
        Which::Inputs => {
            let mut buffers = vec![xbc(), rates(), dy(), wide(), wide(), vector(), dxbc()];
            buffers.extend([(); 3].map(|()| zeros(Scalar::F32, heads)));
            (scan_inputs(scalar, form(false)), buffers, 0)
        }
        Which::Steps => {
            let mut buffers = vec![dt(), vector(), vector(), along(), positions()];
            buffers.extend([floats(heads), floats(heads), zeros(scalar, heads)]);
            (scan_steps(scalar, of.state as u32), buffers, 0)
        }
        Which::Decays => {
            (scan_decays(), vec![floats(heads), rates(), zeros(Scalar::F32, of.heads)], 0)
        }
    };
    vec![memory(
        kernel,
        "4 x 1024 x 128/8 of 128 x 80",
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
