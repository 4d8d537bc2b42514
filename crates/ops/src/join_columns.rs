//! Rows of what ranks gave one after the other: from `[ranks][rows, columns of the rank]`, as
//! [`all_gather`](crate::all_gather) leaves it, to `y[rows, width]`.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::operation::{
    ActivationPrecision, Bound, Launches, Operation, ReferenceCall, Sharding, X, Y,
};
use crate::sweep::{begin, require_lengths, when};
use crate::trial::{memory, random};
use crate::{Partition, Shape, arity, expect};
use formats::Result;

/// `x[rows, width] -> y[rows, width]`, the same elements in the order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct JoinColumns {
    /// Which columns each rank gave.
    pub partition: Partition,
}

impl Operation for JoinColumns {
    fn name(&self) -> &'static str {
        "join_columns"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("join_columns", inputs, 1, weights, &[0])?;
        expect("join_columns", "width", &[inputs[0].width], &[self.partition.width])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(call.inputs[0], &self.partition, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Exact
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let bound = [("x", Bound::Value(X)), ("y", Bound::Value(Y))];
        to.push(join_columns(), numbers(to.rows(Y), &self.partition), &bound)?;
        Ok(true)
    }
}

/// `y[t, c]` is the element of row `t` and column `c` of the rank that has the column.
pub fn reference(x: &[f32], partition: &Partition, y: &mut [f32]) {
    let mut rest = x;
    let rows = y.len() / partition.width;
    for rank in 0..partition.ranks {
        let columns = partition.range(rank);
        let (own, behind) = rest.split_at(rows * columns.len());
        for (t, row) in y.chunks_exact_mut(partition.width).enumerate() {
            let part = &own[t * columns.len()..][..columns.len()];
            row[columns.clone()].copy_from_slice(part);
        }
        rest = behind;
    }
}

/// Threads of a group.
const THREADS: u32 = 256;
/// Elements that each thread loads before it stores the first.
const EACH: u32 = 8;

/// Puts what ranks gave in the order of rows, on the device. The first `longer` ranks gave one
/// block of `block` columns more than the `fewest` that each gave.
#[kernel]
pub fn join_columns(
    x: In<f32>,
    y: Out<f32>,
    width: Const<u32>,
    block: Const<u32>,
    fewest: Const<u32>,
    longer: Const<u32>,
) {
    let part = THREADS * EACH;
    launch(Mode::Row, [dim("width").ceil_div(part), dim("rows"), fixed(1)], THREADS);
    require_lengths(&[("x", dim("rows") * dim("width")), ("y", dim("rows") * dim("width"))]);
    begin();
    let (row, rows) = (group_id_of(1), groups(1));
    let start = group_id() * part + thread_id();
    let at: Vec<Val<u32>> = (0..EACH).map(|i| start + i * THREADS).collect();
    let short = fewest * block;
    // Columns of the ranks that have a block more, in front of all others.
    let front = longer * (short + block);
    let from = |&column: &Val<u32>| {
        // Beyond the end the last element is read again, and goes nowhere.
        let column = column.min(width - 1);
        let before = Order::lt(column, front);
        let long = column / (short + block) * (short + block);
        let first = select(before, long, front + (column - front) / short * short);
        let columns = select(before, short + block, short).min(width - first);
        x.get(first * rows + row * columns + (column - first))
    };
    let loaded: Vec<Val<f32>> = at.iter().map(from).collect();
    for (&column, value) in at.iter().zip(loaded) {
        when(Order::lt(column, width), || y.set(row * width + column, value));
    }
}

fn numbers(rows: usize, partition: &Partition) -> Numbers {
    let (fewest, longer) = partition.blocks();
    let Partition { width, block, .. } = *partition;
    Numbers::new()
        .with("rows", rows as u32)
        .with("width", width as u32)
        .with("block", block as u32)
        .with("fewest", fewest as u32)
        .with("longer", longer as u32)
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "join_columns", cases, benches }];

fn cases() -> Vec<Case> {
    let case = |(rows, width, block, ranks, why): (usize, usize, usize, usize, &str)| {
        let partition = Partition { width, block, ranks };
        let x = random(Scalar::F32, width as u64, rows * width);
        let mut y = vec![0.0; rows * width];
        reference(&x.to_f32(), &partition, &mut y);
        Case {
            kernel: join_columns().record(),
            label: format!("{rows} x {width} of {ranks} ranks in blocks of {block}, {why}"),
            numbers: numbers(rows, &partition),
            buffers: vec![x, Buffer::zeros(Scalar::F32, rows * width)],
            expected: vec![(1, Expected::Exact(y.into_iter().map(f64::from).collect()))],
        }
    };
    [
        (1, 96, 32, 3, "one row, which stays as it is"),
        (3, 96, 32, 3, "shares alike"),
        (3, 160, 32, 3, "two ranks with a block more"),
        (5, 100, 32, 3, "a last block that is short"),
        (4, 4200, 32, 2, "rows of several groups, and a short block"),
        (2, 5000, 1, 16, "single columns of many ranks"),
    ]
    .map(case)
    .to_vec()
}

fn benches() -> Vec<Bench> {
    let bench = |rows: usize| {
        let partition = Partition { width: 128_256, block: 32, ranks: 4 };
        let n = rows * partition.width;
        let buffers = vec![Fill::Noise(Scalar::F32, n), Fill::Zeros(Scalar::F32, n)];
        let label = format!("{rows} x {} of 4 ranks", partition.width);
        memory(join_columns(), &label, numbers(rows, &partition), buffers, 0)
    };
    [1, 64].map(bench).to_vec()
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
