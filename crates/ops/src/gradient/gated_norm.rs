//! Gradients of the gated RMS norm behind a state space ([`crate::gated_norm`]). With `s` the gate's
//! function, `v` what is normed, `n = v / rms(v)` and `g` the gradient of `n`:
//!
//! ```text
//! dv = (g - n mean(g n)) / rms(v)
//! y = n weight, v = x s:     g = dy weight,    dx = dv s,  ds = dv x,           dweight = dy n
//! y = n weight s, v = x:     g = dy weight s,  dx = dv,    ds = dy weight n,    dweight = dy n s
//! ```
//!
//! Only the CPU trains them.

use super::round_sums;
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{GatedNorm, Rows, Shape, alike, arity, expect};
use formats::Result;

/// `gate, x, dy; weight -> dgate, dx, (dweight)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedNormBackward {
    /// The norm.
    pub of: GatedNorm,
    /// Whether the weight's gradient is an output.
    pub weight: bool,
}

/// `gate, x, dgate, dx; weight, (dweight) -> dy`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedNormTangent(pub GatedNorm);

/// A group of a row, in f64: the gate's function and its slope, `x`, what is normed over its root
/// mean square, and the factor that makes it so.
struct Normed {
    s: Vec<f64>,
    slope: Vec<f64>,
    x: Vec<f64>,
    n: Vec<f64>,
    scale: f64,
}

fn normed(of: &GatedNorm, gate: &[f32], x: &[f32]) -> Normed {
    let logistic = |z: f64| 1.0 / (1.0 + (-z).exp());
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
    let (gate, x) = (wide(gate), wide(x));
    let s: Vec<f64> = gate.iter().map(|z| z * logistic(*z)).collect();
    let slope = |z: &f64| logistic(*z) * (1.0 + z * (1.0 - logistic(*z)));
    let slope = gate.iter().map(slope).collect();
    let v: Vec<f64> = match of.norm_first {
        true => x.clone(),
        false => x.iter().zip(&s).map(|(x, s)| x * s).collect(),
    };
    let mean = v.iter().map(|v| v * v).sum::<f64>() / v.len() as f64;
    let scale = 1.0 / (mean + f64::from(of.eps)).sqrt();
    Normed { n: v.iter().map(|v| v * scale).collect(), s, slope, x, scale }
}

impl Normed {
    /// The change of what is normed from that of `n`, or the other way round.
    fn across(&self, change: &[f64]) -> Vec<f64> {
        let along: f64 = change.iter().zip(&self.n).map(|(change, n)| change * n).sum();
        let mean = along / self.n.len() as f64;
        change.iter().zip(&self.n).map(|(change, n)| (change - n * mean) * self.scale).collect()
    }
}

impl GatedNormBackward {
    /// The gradients of one row's `gate` and `x`; the weight's are added to `sums`, if there are
    /// any.
    pub fn row(
        &self,
        [gate, x, dy, weight]: [&[f32]; 4],
        [dgate, dx]: [&mut [f32]; 2],
        mut sums: Option<&mut [f64]>,
    ) {
        let each = gate.len() / self.of.groups;
        for start in (0..gate.len()).step_by(each) {
            let own = start..start + each;
            let of = normed(&self.of, &gate[own.clone()], &x[own.clone()]);
            let first = self.of.norm_first;
            let dy: Vec<f64> = dy[own.clone()].iter().map(|dy| f64::from(*dy)).collect();
            let weight = weight[own.clone()].iter().map(|w| f64::from(*w));
            // `dy weight`.
            let g: Vec<f64> = dy.iter().zip(weight).map(|(dy, w)| dy * w).collect();
            let gated =
                |g: &[f64]| -> Vec<f64> { g.iter().zip(&of.s).map(|(g, s)| g * s).collect() };
            let dv = of.across(&if first { gated(&g) } else { g.clone() });
            for i in 0..each {
                let (of_x, of_s) = match first {
                    true => (dv[i], g[i] * of.n[i]),
                    false => (dv[i] * of.s[i], dv[i] * of.x[i]),
                };
                dx[start + i] = of_x as f32;
                dgate[start + i] = (of_s * of.slope[i]) as f32;
                if let Some(sums) = &mut sums {
                    sums[start + i] += dy[i] * of.n[i] * if first { of.s[i] } else { 1.0 };
                }
            }
        }
    }
}

impl Operation for GatedNormBackward {
    fn name(&self) -> &'static str {
        "gated_norm_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[1])?;
        let y = self.of.infer(&inputs[..2], weights)?;
        alike(self.name(), &[y[0], inputs[2]])?;
        let dweight = Shape { rows: Rows::Fixed(1), width: y[0].width };
        Ok([y[0], y[0]].into_iter().chain(self.weight.then_some(dweight)).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        let mut sums = vec![0.0; width];
        let [mut dgate, mut dx] = [0, 1].map(|i| vec![0f32; call.outputs[i].len()]);
        for t in 0..dx.len() / width {
            let row = t * width..(t + 1) * width;
            let [gate, x, dy] = [0, 1, 2].map(|i| &call.inputs[i][row.clone()]);
            let to = [&mut dgate[row.clone()], &mut dx[row]];
            self.row([gate, x, dy, &call.weights[0]], to, Some(&mut sums));
        }
        (call.outputs[0], call.outputs[1]) = (dgate, dx);
        round_sums(&mut call.outputs[2..], [sums]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for GatedNormTangent {
    fn name(&self) -> &'static str {
        "gated_norm_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 4, weights, &[1, 2])?;
        alike(self.name(), inputs)?;
        for weight in weights {
            expect(self.name(), "norm weight", weight, &[inputs[0].width])?;
        }
        self.0.infer(&inputs[..2], &weights[..1])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let each = call.widths[0] / self.0.groups;
        let weights: Vec<&[f32]> = call.weights.iter().map(Vec::as_slice).collect();
        for (at, y) in call.outputs[0].chunks_exact_mut(each).enumerate() {
            let [gate, x, dgate, dx] = [0, 1, 2, 3].map(|i| &call.inputs[i][at * each..][..each]);
            let of = normed(&self.0, gate, x);
            let first = at % self.0.groups * each;
            let ds: Vec<f64> = (0..each).map(|i| of.slope[i] * f64::from(dgate[i])).collect();
            let dv: Vec<f64> = match self.0.norm_first {
                true => dx.iter().map(|dx| f64::from(*dx)).collect(),
                false => (0..each).map(|i| f64::from(dx[i]) * of.s[i] + of.x[i] * ds[i]).collect(),
            };
            let dn = of.across(&dv);
            for (i, y) in y.iter_mut().enumerate() {
                let w = f64::from(weights[0][first + i]);
                let dw = weights.get(1).map_or(0.0, |dw| f64::from(dw[first + i]));
                let change = dn[i] * w + of.n[i] * dw;
                *y = match self.0.norm_first {
                    true => change * of.s[i] + of.n[i] * w * ds[i],
                    false => change,
                } as f32;
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
