//! State spaces whose elements decay at rates of their own, the first Mamba's, over packed
//! sequences: the definition of their gradients in f64.
//!
//! A row makes of an element `h` of column `j` in front of it `h' = g h + B_i step_j x_j`, where
//! `g = exp(decay step_j)`, and `y_j = sum of C_i h' + skip_j x_j`. From the gradient `D` of the
//! element after the row follows the gradient of the element before it:
//!
//! ```text
//! D += C_i dy_j,  dC_i += h' dy_j,  dB_i += D step_j x_j,  du_j = sum of B_i D,  dp = D g h
//! dx_j = step_j du_j + skip_j dy_j,  dstep_j = x_j du_j + sum of dp decay,  D = g D
//! ddecay += dp step_j,  dskip_j += x_j dy_j
//! ```

pub(crate) mod cases;
pub mod kernels;

use crate::SelectiveScan;
use crate::gradient::round_sums;
use crate::operation::ReferenceCall;

/// A column of a head's matrix: its numbers, and where its operands lie in rows.
struct Column {
    index: usize,
    /// The first element of its head's `B`, and of its `C`.
    shared: usize,
    /// Where its decay rates, and the elements of its state, begin, and how far apart they are.
    first: usize,
    apart: usize,
    decay: Vec<f64>,
    skip: f64,
}

/// The elements of a column in front of a row and behind it, and the factors between them.
struct Moved {
    before: Vec<f64>,
    after: Vec<f64>,
    gates: Vec<f64>,
}

impl Column {
    fn new(of: &SelectiveScan, [decay, skip]: [&[f32]; 2], index: usize) -> Column {
        let SelectiveScan { heads, groups, head_dim, state, .. } = *of;
        let head = index / head_dim;
        let first = head * state * head_dim + index % head_dim;
        let decay = (0..state).map(|i| f64::from(decay[first + i * head_dim])).collect();
        Column {
            index,
            shared: head / (heads / groups) * state,
            first,
            apart: head_dim,
            decay,
            skip: f64::from(skip[index]),
        }
    }

    /// All of them.
    fn all<'a>(
        of: &'a SelectiveScan,
        weights: [&'a [f32]; 2],
    ) -> impl Iterator<Item = Column> + use<'a> {
        (0..of.heads * of.head_dim).map(move |index| Column::new(of, weights, index))
    }

    /// The column's element of a row of a value.
    fn own(&self, x: &[f32], of: &SelectiveScan, t: usize) -> f64 {
        f64::from(x[t * of.heads * of.head_dim + self.index])
    }

    /// An element of its `B` or `C` of a row.
    fn shared(&self, x: &[f32], of: &SelectiveScan, t: usize, i: usize) -> f64 {
        f64::from(x[t * of.groups * of.state + self.shared + i])
    }

    /// Its elements in front of and behind all rows.
    fn walk(&self, of: &SelectiveScan, inputs: &[&[f32]], first: &[u32]) -> Vec<Moved> {
        let mut state = vec![0.0; of.state];
        let step = |(t, first): (usize, &u32)| {
            if *first as usize == t {
                state.fill(0.0);
            }
            let before = state.clone();
            let (x, step) = (self.own(inputs[0], of, t), self.own(inputs[1], of, t));
            let gates: Vec<f64> = self.decay.iter().map(|decay| (decay * step).exp()).collect();
            for (i, (h, gate)) in state.iter_mut().zip(&gates).enumerate() {
                *h = *h * gate + self.shared(inputs[2], of, t, i) * step * x;
            }
            Moved { before, after: state.clone(), gates }
        };
        first.iter().enumerate().map(step).collect()
    }
}

/// `x, step, b, c; decay, skip -> y`.
pub(super) fn output(of: &SelectiveScan, call: &mut ReferenceCall<'_>) {
    let mut y = vec![0f32; call.outputs[0].len()];
    let weights = [0, 1].map(|i| call.weights[i].as_slice());
    for column in Column::all(of, weights) {
        for (t, moved) in column.walk(of, &call.inputs, call.packed.first).iter().enumerate() {
            let asked = moved.after.iter().enumerate();
            let asked = asked.map(|(i, h)| column.shared(call.inputs[3], of, t, i) * h);
            let sum = column.skip * column.own(call.inputs[0], of, t) + asked.sum::<f64>();
            y[t * of.heads * of.head_dim + column.index] = sum as f32;
        }
    }
    call.outputs[0] = y;
}

/// `x, step, b, c, dy; decay, skip -> dx, dstep, db, dc, ddecay, dskip`.
pub(super) fn backward(of: &SelectiveScan, call: &mut ReferenceCall<'_>) {
    let (inner, each) = (of.heads * of.head_dim, of.groups * of.state);
    let first = call.packed.first;
    let mut sums: Vec<Vec<f64>> = call.outputs.iter().map(|y| vec![0.0; y.len()]).collect();
    let weights = [0, 1].map(|i| call.weights[i].as_slice());
    for column in Column::all(of, weights) {
        let all = column.walk(of, &call.inputs, first);
        let mut slopes = vec![0.0; of.state];
        for (t, Moved { before, after, gates }) in all.iter().enumerate().rev() {
            let [x, step, dy] = [0, 1, 4].map(|i| column.own(call.inputs[i], of, t));
            let (mut of_written, mut of_step) = (0.0, 0.0);
            for i in 0..of.state {
                let [b, c] = [2, 3].map(|input| column.shared(call.inputs[input], of, t, i));
                let slope = slopes[i] + c * dy;
                let shared = t * each + column.shared + i;
                sums[2][shared] += slope * step * x;
                sums[3][shared] += after[i] * dy;
                of_written += b * slope;
                slopes[i] = slope * gates[i];
                let of_power = slopes[i] * before[i];
                of_step += of_power * column.decay[i];
                sums[4][column.first + i * column.apart] += of_power * step;
            }
            let own = t * inner + column.index;
            sums[0][own] = step * of_written + column.skip * dy;
            sums[1][own] = x * of_written + of_step;
            sums[5][column.index] += x * dy;
            if first[t] as usize == t {
                slopes.fill(0.0);
            }
        }
    }
    round_sums(&mut call.outputs, sums);
}

/// `x, step, b, c, dx, dstep, db, dc; decay, skip, (ddecay, dskip) -> dy`.
pub(super) fn tangent(of: &SelectiveScan, call: &mut ReferenceCall<'_>) {
    let mut y = vec![0f32; call.outputs[0].len()];
    let weights = [0, 1].map(|i| call.weights[i].as_slice());
    let change = |i: usize, at: usize| call.weights.get(2 + i).map_or(0.0, |of| f64::from(of[at]));
    for column in Column::all(of, weights) {
        let mut changes = vec![0.0; of.state];
        let all = column.walk(of, &call.inputs, call.packed.first);
        for (t, Moved { before, after, gates }) in all.iter().enumerate() {
            if call.packed.first[t] as usize == t {
                changes.fill(0.0);
            }
            let [x, step, dx, dstep] = [0, 1, 4, 5].map(|i| column.own(call.inputs[i], of, t));
            let mut sum = change(1, column.index) * x + column.skip * dx;
            for i in 0..of.state {
                let [b, c, db, dc] =
                    [2, 3, 6, 7].map(|input| column.shared(call.inputs[input], of, t, i));
                let at = column.first + i * column.apart;
                let of_gate = gates[i] * (change(0, at) * step + column.decay[i] * dstep);
                let written = db * step * x + b * (dstep * x + step * dx);
                changes[i] = changes[i] * gates[i] + before[i] * of_gate + written;
                sum += dc * after[i] + c * changes[i];
            }
            y[t * of.heads * of.head_dim + column.index] = sum as f32;
        }
    }
    call.outputs[0] = y;
}
