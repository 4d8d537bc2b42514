//! Cases and benchmarks of the kernels of state spaces that decay by element.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::Scalar;

use super::kernels::{
    form, numbers, packed_scan_by_element, scan_gradients_by_element, scan_shared_by_element,
};
use crate::SelectiveScan;
use crate::gradient::{PackedScan, ScanBackward};
use crate::trial::{PackedRows, memory, near, random};

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec {
        name: "packed_scan_by_element",
        cases: || cases(Which::Output),
        benches: || benches(Which::Output),
    },
    Spec {
        name: "scan_gradients_by_element",
        cases: || cases(Which::Gradients),
        benches: || benches(Which::Gradients),
    },
    Spec {
        name: "scan_shared_by_element",
        cases: || cases(Which::Shared),
        benches: || benches(Which::Shared),
    },
];

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Output,
    Gradients,
    Shared,
}

fn scan(sizes: [usize; 4]) -> SelectiveScan {
    SelectiveScan { by_element: true, ..SelectiveScan::new(sizes) }
}

/// The lengths of sequences; heads, groups, columns and states; rows of a block; and why.
type Setting = (&'static [usize], [usize; 4], usize, &'static str);

const SETTINGS: [Setting; 6] = [
    (&[1, 2], [1, 1, 8, 16], 2, "a sequence behind a block's beginning"),
    (&[5, 1, 9], [1, 1, 96, 16], 4, "several threadgroups"),
    (&[3, 10], [4, 2, 7, 13], 4, "sizes that no vector divides, heads that share B and C"),
    (&[4, 4, 6], [2, 2, 64, 32], 4, "sequences that end with blocks"),
    (&[2, 21], [1, 1, 40, 64], 16, "the largest states, blocks of more rows than sums have"),
    (&[9], [1, 1, 6, 1], 3, "a state of one"),
];

/// The operands of a state space, and what its definition makes of them.
struct Worked {
    of: SelectiveScan,
    scalar: Scalar,
    rows: PackedRows,
    block: usize,
    /// `x`, `step`, `b`, `c`, `dy`.
    inputs: [Buffer; 5],
    /// Decay rates, and `skip`.
    weights: [Vec<f32>; 2],
}

impl Worked {
    fn new(&(lengths, sizes, block, _): &Setting, scalar: Scalar) -> Worked {
        let (of, rows) = (scan(sizes), PackedRows::new(lengths));
        let (inner, each) = (of.heads * of.head_dim, of.groups * of.state);
        let noise = |seed, width| random(scalar, seed, rows.len() * width);
        let steps: Vec<f32> = noise(2, inner).to_f32().iter().map(|step| step.abs()).collect();
        let steps = Buffer::floats(scalar, &steps);
        let decay = (0..of.elements()).map(|i| -0.02 - (i % 23) as f32 / 6.0).collect();
        Worked {
            of,
            scalar,
            block,
            inputs: [noise(1, inner), steps, noise(3, each), noise(4, each), noise(5, inner)],
            weights: [decay, random(Scalar::F32, 6, inner).to_f32()],
            rows,
        }
    }

    fn output(&self) -> Vec<f32> {
        let [inputs @ .., _] = self.inputs.each_ref();
        let len = self.inputs[4].len();
        self.rows.reference(&PackedScan(self.of), &inputs, &self.weights, &[len]).swap_remove(0)
    }

    /// `dx`, `dstep`, `db`, `dc`, `ddecay`, `dskip` of these gradients of the output.
    fn gradients(&self, dy: &Buffer) -> Vec<Vec<f32>> {
        let [x, step, b, c, _] = self.inputs.each_ref();
        let inner = self.of.heads * self.of.head_dim;
        let lengths = [x.len(), x.len(), b.len(), b.len(), self.of.elements(), inner];
        let op = ScanBackward(self.of);
        self.rows.reference(&op, &[x, step, b, c, dy], &self.weights, &lengths)
    }

    /// The gradients of `B` and of `C` by threadgroup: those of the outputs of its columns.
    fn slopes(&self) -> Vec<f32> {
        let SelectiveScan { heads, groups, head_dim, state, .. } = self.of;
        let columns = form(&self.of).expect("states that fit").group() as usize;
        let (parts, dy) = (head_dim.div_ceil(columns), self.inputs[4].to_f32());
        let mut slopes = vec![0.0; self.rows.len() * heads * parts * 2 * state];
        for (head, part) in (0..heads).flat_map(|head| (0..parts).map(move |part| (head, part))) {
            let own = |i: usize| {
                let column = i % (heads * head_dim);
                column / head_dim == head && column % head_dim / columns == part
            };
            let dy = dy.iter().enumerate().map(|(i, dy)| if own(i) { *dy } else { 0.0 });
            let dy = Buffer::floats(self.scalar, &dy.collect::<Vec<f32>>());
            let found = self.gradients(&dy);
            for t in 0..self.rows.len() {
                let from = (t * groups + head / (heads / groups)) * state;
                for (i, shared) in found[2..4].iter().enumerate() {
                    let to = (((t * heads + head) * parts + part) * 2 + i) * state;
                    slopes[to..to + state].copy_from_slice(&shared[from..from + state]);
                }
            }
        }
        slopes
    }

    /// The case of a kernel.
    fn case(&self, which: Which, why: &str) -> Case {
        let (of, scalar, rows) = (self.of, self.scalar, self.rows.len());
        let form = form(&of).expect("states that fit");
        let starts = self.rows.starts();
        let numbers = numbers(&of, rows, starts.len() - 1, self.block);
        let floats = |values: &[f32]| Buffer::floats(Scalar::F32, values);
        let weights = self.weights.each_ref().map(|weight| floats(weight));
        let none = |scalar, len: usize| Buffer::zeros(scalar, len);
        let [x, step, b, c, dy] = self.inputs.clone();
        let inner = x.len();
        let (kernel, buffers, expected) = match which {
            Which::Output => {
                let mut buffers = vec![x, step, b, c];
                buffers.extend(weights);
                buffers.extend([Buffer::words(&starts), none(scalar, inner)]);
                let kernel = packed_scan_by_element(scalar, form);
                (kernel, buffers, vec![(7, near(scalar, &self.output()))])
            }
            Which::Gradients => {
                let (found, slopes) = (self.gradients(&self.inputs[4]), self.slopes());
                let mut buffers = vec![x, step, b, c, dy];
                buffers.extend(weights);
                buffers.push(Buffer::words(&self.rows.positions()));
                // What is there before counts for nothing.
                let matrices = [rows.div_ceil(self.block), self.block + 1];
                let matrices = matrices.map(|n| random(Scalar::F32, 7, n * of.elements()));
                buffers.extend(matrices);
                buffers.extend([none(scalar, inner), none(scalar, inner)]);
                let rest = [slopes.len(), of.elements(), of.heads * of.head_dim];
                buffers.extend(rest.map(|len| none(Scalar::F32, len)));
                let rest = [&slopes, &found[4], &found[5]].map(|x| near(Scalar::F32, x));
                let of_rows = [&found[0], &found[1]].map(|x| near(scalar, x));
                let expected = (10..).zip(of_rows.into_iter().chain(rest)).collect();
                (scan_gradients_by_element(scalar, form), buffers, expected)
            }
            Which::Shared => {
                let found = self.gradients(&dy);
                let buffers =
                    vec![floats(&self.slopes()), none(scalar, b.len()), none(scalar, b.len())];
                let expected = vec![(1, near(scalar, &found[2])), (2, near(scalar, &found[3]))];
                (scan_shared_by_element(scalar, form), buffers, expected)
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
    let scalars = [Scalar::F32, Scalar::BF16].into_iter();
    let all = scalars.flat_map(|scalar| SETTINGS.iter().map(move |setting| (scalar, setting)));
    all.map(|(scalar, setting)| Worked::new(setting, scalar).case(which, setting.3)).collect()
}

/// Four sequences of 1,024 rows of Falcon Mamba.
fn benches(which: Which) -> Vec<Bench> {
    let (of, scalar, rows, block) = (scan([1, 1, 8192, 16]), Scalar::BF16, 4096, 128);
    let form = form(&of).expect("states that fit");
    let (inner, each) = (rows * of.head_dim, rows * of.state);
    let noise = |len| Fill::Noise(scalar, len);
    let zeros = |scalar, len| Fill::Zeros(scalar, len);
    let operands = || vec![noise(inner), noise(inner), noise(each), noise(each)];
    let weights = || [of.elements(), of.head_dim].map(|len| Fill::Noise(Scalar::F32, len));
    let positions: Vec<u32> = (0..rows as u32).map(|row| row % 1024).collect();
    let slopes = || zeros(Scalar::F32, rows * super::kernels::parts(form) * 2 * of.state);
    // Operations for each element of a matrix and row.
    let (kernel, buffers, operations) = match which {
        Which::Output => {
            let mut buffers = operands();
            buffers.extend(weights());
            buffers.push(Fill::These(Buffer::words(&[0, 1024, 2048, 3072, 4096])));
            buffers.push(zeros(scalar, inner));
            (packed_scan_by_element(scalar, form), buffers, 7)
        }
        Which::Gradients => {
            let mut buffers = operands();
            buffers.push(noise(inner));
            buffers.extend(weights());
            buffers.push(Fill::These(Buffer::words(&positions)));
            let matrices = [rows / block, block + 1].map(|n| zeros(Scalar::F32, n * of.elements()));
            buffers.extend(matrices);
            buffers.extend([zeros(scalar, inner), zeros(scalar, inner), slopes()]);
            buffers.extend([of.elements(), of.head_dim].map(|len| zeros(Scalar::F32, len)));
            (scan_gradients_by_element(scalar, form), buffers, 29)
        }
        Which::Shared => {
            let buffers = vec![slopes(), zeros(scalar, each), zeros(scalar, each)];
            (scan_shared_by_element(scalar, form), buffers, 0)
        }
    };
    let numbers = numbers(&of, rows, 4, block);
    let flops = operations * (rows * of.elements()) as u64;
    vec![memory(kernel, "4 x 1024 x 1/1 of 16 x 8192", numbers, buffers, flops)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
