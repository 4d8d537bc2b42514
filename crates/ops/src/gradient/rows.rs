//! Rows that go back where they were taken from: of a table by token, of a value by selection.

use super::elements::fill;
use super::{Reverse, Wrt, give, one};
use crate::embed::{Index, PICKS, WIDTHS};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y, launch_flat};
use crate::sweep::{
    RowThreads, begin, lanes, lanes_of_both, load, require_lengths, require_vectors, when,
};
use crate::trial::{every_float, exact, memory, near, random, rows_of};
use crate::{Rows, Select, Shape, arity};
use formats::{Error, Result};
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

/// `dy[tokens, width] -> [table, width]`: row `r` is the sum of the rows of `dy` whose tokens
/// picked `r`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gathered {
    /// The numbers that picked the table's rows.
    pub index: Index,
    /// Rows of the table.
    pub table: usize,
}

/// `dy[outputs, width] -> [tokens, width]`: rows that were not selected are zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread;

impl Operation for Gathered {
    fn name(&self) -> &'static str {
        "gathered"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        Ok(vec![Shape { rows: Rows::Fixed(self.table), width: inputs[0].width }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        let rows = match self.index {
            Index::Token => call.tokens,
            Index::Position => call.positions,
        };
        let mut sums = vec![0f64; call.outputs[0].len()];
        for (&row, dy) in rows.iter().zip(call.inputs[0].chunks_exact(width)) {
            let sums = &mut sums[row as usize * width..][..width];
            sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += f64::from(*dy));
        }
        call.outputs[0].iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let zeros = fill(to.scalar(Y));
        launch_flat(to, zeros, Numbers::new().with_f32("value", 0.0), &[])?;
        let picks = match self.index {
            Index::Token => Bound::Tokens,
            Index::Position => Bound::Positions,
        };
        let bound = [("picks", picks), ("dy", Bound::Value(X)), ("sums", Bound::Value(Y))];
        to.push(
            gathered(to.scalar(X)),
            gather_numbers(to.rows(X), self.table, to.width(X)),
            &bound,
        )?;
        Ok(true)
    }
}

impl Operation for Spread {
    fn name(&self) -> &'static str {
        "spread"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        if inputs[0].rows != Rows::Outputs {
            return Err(Error::new(self.name(), "selected rows", format!("{:?}", inputs[0].rows)));
        }
        Ok(vec![Shape::tokens(inputs[0].width)])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        for (&row, dy) in call.picks.iter().zip(call.inputs[0].chunks_exact(width)) {
            call.outputs[0][row as usize * width..][..width].copy_from_slice(dy);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let scalar = to.scalar(X);
        launch_flat(to, fill(scalar), Numbers::new().with_f32("value", 0.0), &[])?;
        let bound = [("picks", Bound::Picks), ("dy", Bound::Value(X)), ("dx", Bound::Value(Y))];
        to.push(spread_rows(scalar), numbers(to.rows(X), to.rows(Y), to.width(X)), &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, Select, &[dy], &[]))
    }
}

/// `dx[picks[i]] = dy[i]`, on the device; other rows stay. No two rows go to one.
#[kernel]
pub fn spread_rows(
    picks: In<u32>,
    dy: In<{ scalar }>,
    dx: InOut<{ scalar }>,
    width: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    require_lengths(&[("picks", dim("rows"))]);
    require_vectors(&[("dy", dim("rows") * dim("width")), ("dx", dim("tokens") * dim("width"))]);
    begin();
    let (from, to) = (group_id() * width, picks.get(group_id()) * width);
    RowThreads::Group.sweep(width, lanes(scalar), |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(dy, from + i, lanes)).collect();
        for (&i, values) in at.iter().zip(loaded) {
            dx.set_vec(to + i, &values);
        }
    });
}

/// `sums[picks[t]]` is the sum of all rows of `dy` with that pick, added in their order, on the
/// device; other rows stay. A threadgroup for each row, of which the first of its pick does it.
#[kernel]
pub fn gathered(
    picks: In<u32>,
    dy: In<{ scalar }>,
    sums: InOut<f32>,
    rows: Arg<u32>,
    width: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    require_lengths(&[("picks", dim("rows"))]);
    require_vectors(&[("dy", dim("rows") * dim("width")), ("sums", dim("table") * dim("width"))]);
    begin();
    let own = picks.get(group_id());
    let earlier = Var::new(0u32);
    range(thread_id(), group_id()).step(threads()).each(|t| {
        when(Order::eq(picks.get(t), own), || earlier.set(1u32));
    });
    let earlier = group_max(earlier.get());
    when(Order::eq(earlier, 0u32), || {
        RowThreads::Group.sweep(width, lanes_of_both(scalar, Scalar::F32), |at, lanes| {
            let sum = |_: &Val<u32>| (0..lanes).map(|_| Var::new(0.0)).collect::<Vec<_>>();
            let all: Vec<Vec<Var<f32>>> = at.iter().map(sum).collect();
            range(group_id(), rows).each(|t| {
                when(Order::eq(picks.get(t), own), || {
                    for (&i, sums) in at.iter().zip(&all) {
                        let more = load(dy, t * width + i, lanes);
                        sums.iter().zip(more).for_each(|(sum, more)| sum.set(sum.get() + more));
                    }
                });
            });
            for (&i, own_sums) in at.iter().zip(&all) {
                let values: Vec<Val<f32>> = own_sums.iter().map(Var::get).collect();
                sums.set_vec(own * width + i, &values);
            }
        });
    });
}

fn gather_numbers(rows: usize, table: usize, width: usize) -> Numbers {
    let numbers = Numbers::new().with("rows", rows as u32).with("table", table as u32);
    numbers.with("width", width as u32)
}

fn numbers(rows: usize, tokens: usize, width: usize) -> Numbers {
    let numbers = Numbers::new().with("rows", rows as u32).with("tokens", tokens as u32);
    numbers.with("width", width as u32)
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "gathered", cases: gather_cases, benches: gather_benches },
    Spec { name: "spread_rows", cases, benches },
];

fn gather_cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(width, why): (usize, &str)| {
            let dy = random(scalar, width as u64 + 70, PICKS.len() * width);
            let mut sums = vec![0f64; 5 * width];
            for (&row, dy) in PICKS.iter().zip(dy.to_f32().chunks_exact(width)) {
                let sums = &mut sums[row as usize * width..][..width];
                sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += f64::from(*dy));
            }
            let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
            Case {
                kernel: gathered(scalar).record(),
                label: format!("4 of 5 x {width} {scalar}, {why}"),
                numbers: gather_numbers(PICKS.len(), 5, width),
                buffers: vec![Buffer::words(&PICKS), dy, Buffer::zeros(Scalar::F32, 5 * width)],
                expected: vec![(2, near(Scalar::F32, &sums))],
            }
        };
        WIDTHS.into_iter().map(case).collect()
    }
    every_float(of)
}

fn gather_benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, table, width) = (4096, 8192, 4096);
        let picks: Vec<u32> = (0..rows).map(|i| i * 7919 % table).collect();
        let (rows, table) = (rows as usize, table as usize);
        let buffers = vec![
            Fill::These(Buffer::words(&picks)),
            Fill::Noise(scalar, rows * width),
            Fill::Zeros(Scalar::F32, table * width),
        ];
        let numbers = gather_numbers(rows, table, width);
        vec![memory(gathered(scalar), &format!("{rows} x {width}"), numbers, buffers, 0)]
    })
}

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(width, why): (usize, &str)| {
            // Those of the gather, each once.
            let picks = &PICKS[..3];
            let dy = random(scalar, width as u64 + 50, 3 * width);
            let mut dx = vec![0.0; 5 * width];
            for (&row, dy) in picks.iter().zip(dy.to_f32().chunks_exact(width)) {
                dx[row as usize * width..][..width].copy_from_slice(dy);
            }
            Case {
                kernel: spread_rows(scalar).record(),
                label: format!("3 of 5 x {width} {scalar}, {why}"),
                numbers: numbers(3, 5, width),
                buffers: vec![Buffer::words(picks), dy, Buffer::zeros(scalar, 5 * width)],
                expected: vec![(2, exact(scalar, &dx))],
            }
        };
        WIDTHS.into_iter().map(case).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let picks: Vec<u32> = (0..rows as u32).collect();
        let buffers = vec![
            Fill::These(Buffer::words(&picks)),
            Fill::Noise(scalar, rows * width),
            Fill::Zeros(scalar, rows * width),
        ];
        let numbers = numbers(rows, rows, width);
        vec![memory(spread_rows(scalar), &format!("{rows} x {width}"), numbers, buffers, 0)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
