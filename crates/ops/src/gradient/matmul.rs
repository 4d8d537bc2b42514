//! The product that gradients are made of, `y[m, n] = sum_k a(m, k) b(n, k)`, where either side may
//! lie turned: `x W'` and `dy W` have the rows of a matrix one way and the other, `dy' x` has both
//! sides turned.
//!
//! A threadgroup computes a block of `16 tall x 16 wide` results and walks along `k` in steps of
//! 16, whose blocks of both sides wait in shared memory as f32, so that any types and sizes go.
//! Terms are added in their order, one by one. For products of 16-bit operands whose sizes allow it
//! devices have faster ones: the vendor's, and [`gemm`](crate::linear::gemm).

use tile::case::{Bench, Bottleneck, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

use crate::sweep::{begin, require_lengths, when};
use crate::trial::{near, random};

/// MatmulTypes of both sides and of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatmulTypes {
    /// Element type of `a`.
    pub a: Scalar,
    /// Element type of `b`.
    pub b: Scalar,
    /// Element type of `y`, and of the matrix that is added.
    pub y: Scalar,
}

/// How the sides lie, and what is added to the product.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MatmulForm {
    /// Whether `a` is `[terms, rows]`; else `[rows, terms]`.
    pub a_turned: bool,
    /// Whether `b` is `[terms, columns]`; else `[columns, terms]`.
    pub b_turned: bool,
    /// Whether a bias of f32, `[columns]`, is added: the buffer `bias`.
    pub bias: bool,
    /// Whether a matrix of `y`'s shape and type is added, which may be `y` itself: the buffer
    /// `add`.
    pub adds: bool,
}

/// Results of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatmulTiling {
    /// Rows: a sixteenth of a block's.
    pub tall: u32,
    /// Columns.
    pub wide: u32,
}

impl MatmulTiling {
    /// Picks the tiling for a product of `rows` rows and `columns` columns.
    pub fn pick(rows: usize, columns: usize) -> MatmulTiling {
        let of = |n: usize| if n > 16 { 4 } else { 1 };
        MatmulTiling { tall: of(rows), wide: of(columns) }
    }
}

/// Terms of a step.
const STEP: u32 = 16;
/// Threads of a group: 16 along the rows, 16 along the columns.
const THREADS: u32 = 256;

/// One side of a product.
struct Side {
    from: In,
    turned: bool,
    /// Its rows or columns, and terms.
    lines: Val<u32>,
    terms: Val<u32>,
    /// The first line of this group's block, and how many it has.
    first: Val<u32>,
    block: u32,
    staged: Shared<f32>,
}

impl Side {
    /// Brings the terms of a step to shared memory, `[STEP, block]`; zeros beyond the ends.
    fn stage(&self, first_term: Val<u32>) {
        for part in 0..STEP * self.block / THREADS {
            let i = thread_id() + part * THREADS;
            // Neighbours read neighbouring elements.
            let (line, term) = match self.turned {
                true => (i % self.block, i / self.block),
                false => (i / STEP, i % STEP),
            };
            let (of, at) = (self.first + line, first_term + term);
            let inside = Order::lt(of, self.lines) & Order::lt(at, self.terms);
            let index = match self.turned {
                true => at * self.lines + of,
                false => of * self.terms + at,
            };
            let value = self.from.get(select(inside, index, 0u32));
            self.staged.set(term * self.block + line, select(inside, value, 0.0));
        }
    }
}

/// `y[m, n] = sum_k a(m, k) b(n, k) (+ bias[n]) (+ add[m, n])`, summed in f32, on the device.
#[kernel]
pub fn matmul(
    a: In<{ types.a }>,
    b: In<{ types.b }>,
    y: Out<{ types.y }>,
    rows: Arg<u32>,
    columns: Arg<u32>,
    terms: Arg<u32>,
    types: MatmulTypes,
    form: MatmulForm,
    tiling: MatmulTiling,
) {
    let MatmulTiling { tall, wide } = tiling;
    let (bm, bn) = (16 * tall, 16 * wide);
    let blocks = dim("rows").ceil_div(bm) * dim("columns").ceil_div(bn);
    launch(Mode::Tile, [blocks, fixed(1), fixed(1)], THREADS);
    require_lengths(&[
        ("a", dim("rows") * dim("terms")),
        ("b", dim("columns") * dim("terms")),
        ("y", dim("rows") * dim("columns")),
    ]);
    // Every product of sizes is computed in 32 bits.
    require(Requirement::AtMost(dim("rows"), 1 << 24));
    let bias = form.bias.then(|| {
        require_lengths(&[("bias", dim("columns"))]);
        <In>::declare("bias")
    });
    let add = form.adds.then(|| {
        require_lengths(&[("add", dim("rows") * dim("columns"))]);
        <In>::stored("add", types.y)
    });
    begin();
    let across = (columns + (bn - 1)) / bn;
    let (first_row, first_column) = (group_id() / across * bm, group_id() % across * bn);
    let side = |from, turned, lines, first, block, name: &str| {
        let staged = Shared::named(name, STEP * block);
        Side { from, turned, lines, terms, first, block, staged }
    };
    let left = side(a, form.a_turned, rows, first_row, bm, "left");
    let right = side(b, form.b_turned, columns, first_column, bn, "right");
    let (row, column) = (thread_id() / 16u32, thread_id() % 16u32);
    let sums = Regs::<f32>::new(tall * wide, 0.0);
    for first_term in range(0u32, terms).step(STEP) {
        left.stage(first_term);
        right.stage(first_term);
        barrier();
        for term in range(0u32, STEP).unroll() {
            let x: Vec<Val<f32>> =
                (0..tall).map(|i| left.staged.get(term * bm + row + 16 * i)).collect();
            let w: Vec<Val<f32>> =
                (0..wide).map(|j| right.staged.get(term * bn + column + 16 * j)).collect();
            for i in 0..tall {
                for j in 0..wide {
                    let at = i * wide + j;
                    sums.set(at, x[i as usize].fma(w[j as usize], sums.get(at)));
                }
            }
        }
        barrier();
    }
    for i in 0..tall {
        for j in 0..wide {
            let (row, column) = (first_row + row + 16 * i, first_column + column + 16 * j);
            when(Order::lt(row, rows) & Order::lt(column, columns), || {
                let at = row * columns + column;
                let sum = sums.get(i * wide + j);
                let sum = bias.map_or(sum, |bias| sum + bias.get(column));
                y.set(at, add.map_or(sum, |add| sum + add.get(at)));
            });
        }
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "matmul", cases, benches }];

/// `y` in f64: what the kernel is compared with.
fn reference(
    a: &[f32],
    b: &[f32],
    [rows, columns, terms]: [usize; 3],
    form: MatmulForm,
) -> Vec<f64> {
    let left = |m: usize, k: usize| a[if form.a_turned { k * rows + m } else { m * terms + k }];
    let right = |n: usize, k: usize| b[if form.b_turned { k * columns + n } else { n * terms + k }];
    let sum = |(m, n): (usize, usize)| {
        (0..terms).map(|k| f64::from(left(m, k)) * f64::from(right(n, k))).sum()
    };
    (0..rows * columns).map(|i| sum((i / columns, i % columns))).collect()
}

fn cases() -> Vec<Case> {
    let sides = [(false, false), (false, true), (true, false), (true, true)];
    let shapes = [
        ([1, 1, 1], "one element"),
        ([5, 3, 7], "less than a block"),
        ([16, 70, 33], "few rows, and a ragged last step"),
        ([67, 16, 16], "few columns, one step"),
        ([65, 130, 40], "blocks with ragged edges"),
    ];
    let all = [
        MatmulTypes { a: Scalar::F32, b: Scalar::F32, y: Scalar::F32 },
        MatmulTypes { a: Scalar::BF16, b: Scalar::BF16, y: Scalar::BF16 },
        MatmulTypes { a: Scalar::BF16, b: Scalar::BF16, y: Scalar::F32 },
        MatmulTypes { a: Scalar::F16, b: Scalar::F16, y: Scalar::F16 },
    ];
    let mut cases = Vec::new();
    for (number, types) in all.into_iter().enumerate() {
        for (i, (shape, why)) in shapes.into_iter().enumerate() {
            for (j, (a_turned, b_turned)) in sides.into_iter().enumerate() {
                // Each way of adding meets each way of lying.
                let kind = (i + j + number) % 4;
                let form = MatmulForm { a_turned, b_turned, bias: kind % 2 == 1, adds: kind > 1 };
                cases.push(case(shape, types, form, why));
            }
        }
    }
    cases
}

fn case(shape: [usize; 3], types: MatmulTypes, form: MatmulForm, why: &str) -> Case {
    let [rows, columns, terms] = shape;
    let a = random(types.a, 7 + terms as u64, rows * terms);
    let b = random(types.b, 11 + columns as u64, columns * terms);
    let mut want = reference(&a.to_f32(), &b.to_f32(), shape, form);
    let mut buffers = vec![a, b, Buffer::zeros(types.y, rows * columns)];
    if form.bias {
        let bias = random(Scalar::F32, 3, columns);
        want.iter_mut().zip(bias.to_f64().iter().cycle()).for_each(|(y, bias)| *y += bias);
        buffers.push(bias);
    }
    if form.adds {
        let add = random(types.y, 5, rows * columns);
        want.iter_mut().zip(add.to_f64()).for_each(|(y, add)| *y += add);
        buffers.push(add);
    }
    let want: Vec<f32> = want.into_iter().map(|y| y as f32).collect();
    Case {
        kernel: matmul(types, form, MatmulTiling::pick(rows, columns)).record(),
        label: format!("{rows} x {columns} x {terms} {} to {}, {why}", types.a, types.y),
        numbers: numbers(shape),
        buffers,
        expected: vec![(2, near(types.y, &want))],
    }
}

/// The numbers of a launch for rows, columns and terms.
pub fn numbers([rows, columns, terms]: [usize; 3]) -> Numbers {
    let numbers = Numbers::new().with("rows", rows as u32).with("columns", columns as u32);
    numbers.with("terms", terms as u32)
}

fn benches() -> Vec<Bench> {
    let bench = |shape: [usize; 3], form: MatmulForm| {
        let [rows, columns, terms] = shape;
        let of = Scalar::F32;
        let types = MatmulTypes { a: of, b: of, y: of };
        let buffers = vec![
            Fill::Noise(of, rows * terms),
            Fill::Noise(of, columns * terms),
            Fill::Zeros(of, rows * columns),
        ];
        Bench {
            kernel: matmul(types, form, MatmulTiling::pick(rows, columns)).record(),
            label: format!("{rows} x {columns} x {terms}"),
            numbers: numbers(shape),
            buffers,
            bytes: 4 * (rows * terms + columns * terms + rows * columns) as u64,
            flops: 2 * (rows * columns * terms) as u64,
            roof: Bottleneck::Matrix,
        }
    };
    let turned = MatmulForm { a_turned: true, b_turned: true, ..MatmulForm::default() };
    vec![bench([1024, 2048, 2048], MatmulForm::default()), bench([2048, 16, 1024], turned)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
