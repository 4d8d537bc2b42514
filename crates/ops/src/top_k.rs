//! The `k` greatest elements of every row, greatest first, the lower index first among equals.
//!
//! A group keeps the best it has seen in shared memory, adds as many new elements as fit, and sorts
//! both (Batcher's bitonic sort, 1968). Long rows are cut into slabs: a group each, then one that
//! merges what they found. NaN counts as minus infinity; where a row has fewer than `k` elements
//! the rest is minus infinity with the index [`u32::MAX`].
//!
//! Sampling does not sort, so it has no use for this: see [`crate::sample::kernels`].

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Extent, Mode, Numbers, Requirement};

use crate::sample::kernels::arith::{IMPOSSIBLE, key_of, logit_of};
use crate::sweep::begin;
use crate::trial::{every_float, scaled};

/// Values and indices of the `k` greatest of every row of `width`.
pub fn reference(x: &[f32], width: usize, k: usize) -> (Vec<f32>, Vec<u32>) {
    let (mut values, mut indices) = (vec![], vec![]);
    for x in x.chunks_exact(width) {
        let value = |i: usize| if x[i].is_nan() { f32::NEG_INFINITY } else { x[i] };
        let mut order: Vec<usize> = (0..width).collect();
        // A stable sort leaves equals in order of their indices.
        order.sort_by(|&a, &b| value(b).partial_cmp(&value(a)).expect("no NaN"));
        for at in 0..k {
            values.push(order.get(at).map_or(f32::NEG_INFINITY, |&i| value(i)));
            indices.push(order.get(at).map_or(u32::MAX, |&i| i as u32));
        }
    }
    (values, indices)
}

/// How many elements are sorted at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopKSchedule {
    /// A power of two, at most 2048, at least twice `k`.
    pub size: u32,
}

impl TopKSchedule {
    /// The smallest schedule that is fast for the `k` greatest; `None` beyond 1024.
    pub fn of(k: u32) -> Option<TopKSchedule> {
        (k <= 1024).then(|| TopKSchedule { size: (2 * k).next_power_of_two().max(512) })
    }
}

/// Threads of a group.
const THREADS: u32 = 256;

/// The `k` greatest of every slab of `slab` elements of the rows of `x`, `[rows, width]`: `values`
/// and `indices` are `[rows, ceil(width / slab), k]`.
#[kernel]
pub fn top_k(
    x: In<{ scalar }>,
    values: Out<f32>,
    indices: Out<u32>,
    width: Const<u32>,
    k: Const<u32>,
    slab: Const<u32>,
    scalar: Scalar,
    schedule: TopKSchedule,
) {
    let slabs = Extent::from("width").ceil_div(dim("slab"));
    launch(Mode::Row, [slabs.clone(), dim("rows"), fixed(1)], THREADS);
    contract(schedule, [("x", dim("rows") * dim("width"))], dim("rows") * slabs * dim("k"));
    begin();
    let row = group_id_of(1);
    let first = group_id() * slab;
    let size = (width - first).min(slab);
    best(schedule, k, size, values, indices, row * groups(0) + group_id(), |i| {
        (x.get(row * width + first + i).f32(), first + i)
    });
}

/// Merges what [`top_k`] found in `slabs` slabs: `[rows, slabs, k]` to `[rows, k]`.
#[kernel]
pub fn top_k_merge(
    found: In<f32>,
    places: In<u32>,
    values: Out<f32>,
    indices: Out<u32>,
    slabs: Const<u32>,
    k: Const<u32>,
    schedule: TopKSchedule,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], THREADS);
    let all = dim("rows") * dim("slabs") * dim("k");
    contract(schedule, [("found", all.clone()), ("places", all)], dim("rows") * dim("k"));
    begin();
    let size = slabs * k;
    best(schedule, k, size, values, indices, group_id(), |i| {
        (found.get(group_id() * size + i), places.get(group_id() * size + i))
    });
}

fn contract<const N: usize>(schedule: TopKSchedule, inputs: [(&str, Extent); N], results: Extent) {
    let outputs = [("values", results.clone()), ("indices", results)];
    for (name, size) in inputs.into_iter().chain(outputs) {
        require(Requirement::Length(name.to_owned(), size));
    }
    require(Requirement::AtMost(dim("k"), schedule.size / 2));
}

/// The `k` greatest of `size` elements that `read` gives with their indices, to the `k` places of
/// `slot`.
#[device]
fn best(
    schedule: TopKSchedule,
    k: Val<u32>,
    size: Val<u32>,
    values: Out<f32>,
    indices: Out<u32>,
    slot: Val<u32>,
    read: impl Fn(Val<u32>) -> (Val<f32>, Val<u32>),
) {
    let keys = Shared::<u32>::named("keys", schedule.size);
    let whose = Shared::<u32>::named("whose", schedule.size);
    let nothing = |i: Val<u32>| {
        keys[i] = IMPOSSIBLE;
        whose[i] = u32::MAX;
    };
    for i in range(thread_id(), k).step(THREADS) {
        nothing(i);
    }
    let fresh = schedule.size - k;
    for start in range(0u32, size).step(fresh) {
        // The first `k` places hold the best so far, and each thread the places that are its own.
        for i in range(thread_id(), fresh).step(THREADS) {
            if start + i < size {
                let (value, index) = read(start + i);
                keys.set(k + i, key_of(value).max(IMPOSSIBLE));
                whose.set(k + i, index);
            } else {
                nothing(k + i);
            }
        }
        barrier();
        sort(schedule, keys, whose);
    }
    for i in range(thread_id(), k).step(THREADS) {
        values.set(slot * k + i, logit_of(keys[i]));
        indices.set(slot * k + i, whose[i]);
    }
}

/// Sorts keys downwards, equal ones by index upwards; ends with a barrier.
#[device]
fn sort(schedule: TopKSchedule, keys: Shared<u32>, whose: Shared<u32>) {
    for stage in range(0u32, schedule.size.ilog2()) {
        for step in range(0u32, stage + 1u32) {
            let shift = stage - step;
            let distance = 1u32.val() << shift;
            for pair in range(thread_id(), schedule.size / 2).step(THREADS) {
                let a = pair >> shift << shift << 1u32 | pair & (distance - 1u32);
                let b = a + distance;
                let (ka, kb) = (keys[a], keys[b]);
                let (wa, wb) = (whose[a], whose[b]);
                let before = kb > ka || (kb == ka && wb < wa);
                // Neighbouring runs go in opposite directions, the last run of all downwards.
                let downwards = a & (2u32.val() << stage) == 0u32;
                if before == downwards && (ka != kb || wa != wb) {
                    keys[a] = kb;
                    keys[b] = ka;
                    whose[a] = wb;
                    whose[b] = wa;
                }
            }
            barrier();
        }
    }
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "top_k", cases, benches },
    Spec { name: "top_k_merge", cases: merge_cases, benches: merge_benches },
];

/// A row worth testing: its width, `k`, the slab, a change to it and what it shows.
type Row = (usize, usize, usize, fn(&mut [f32]), &'static str);

const ROWS: [Row; 7] = [
    (1, 1, 1, |_| (), "one element"),
    (31, 40, 64, |_| (), "fewer elements than asked for"),
    (1000, 1, 1000, |x| x.fill(2.0), "all equal"),
    (1000, 40, 600, |x| x.iter_mut().step_by(2).for_each(|x| *x = f32::NAN), "NaN, two slabs"),
    (1500, 7, 512, |x| x.iter_mut().for_each(|x| *x = x.round()), "equals in several slabs"),
    (513, 256, 513, |x| x[300..].fill(f32::NEG_INFINITY), "minus infinities, two turns"),
    (5000, 1024, 5000, |_| (), "the most that are sorted"),
];

fn numbers(rows: usize, k: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("k", k as u32)
}

fn exact(values: &[f32], indices: &[u32]) -> [Expected; 2] {
    let values = values.iter().copied().map(f64::from).collect();
    [Expected::Exact(values), Expected::Exact(Buffer::words(indices).to_f64())]
}

/// The answers of every slab of rows, `[rows, slabs, k]`, with indices in the row.
fn slabs(x: &[f32], width: usize, k: usize, slab: usize) -> (Vec<f32>, Vec<u32>) {
    let (mut values, mut indices) = (vec![], vec![]);
    for row in x.chunks_exact(width) {
        for (i, part) in row.chunks(slab).enumerate() {
            let (v, at) = reference(part, part.len(), k);
            values.extend(v);
            let shift = |at: u32| if at == u32::MAX { at } else { at + (i * slab) as u32 };
            indices.extend(at.into_iter().map(shift));
        }
    }
    (values, indices)
}

fn schedule(k: usize) -> TopKSchedule {
    TopKSchedule::of(k as u32).expect("cases ask for no more than 1024")
}

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |&(width, k, slab, change, why): &Row| {
            let rows = 2;
            let mut x = scaled(scalar, width as u64, rows * width, 8.0).to_f32();
            x.chunks_exact_mut(width).for_each(change);
            let (values, indices) = slabs(&x, width, k, slab);
            let [best, whose] = exact(&values, &indices);
            Case {
                kernel: top_k(scalar, schedule(k)).record(),
                label: format!("{k} of {rows} x {width} {scalar}, {why}"),
                numbers: numbers(rows, k).with("width", width as u32).with("slab", slab as u32),
                buffers: vec![
                    Buffer::floats(scalar, &x),
                    Buffer::zeros(Scalar::F32, values.len()),
                    Buffer::zeros(Scalar::U32, values.len()),
                ],
                expected: vec![(1, best), (2, whose)],
            }
        };
        ROWS.iter().map(case).collect()
    }
    every_float(of)
}

fn merge_cases() -> Vec<Case> {
    let case = |&(width, k, slab, change, why): &Row| {
        let rows = 2;
        let mut x = scaled(Scalar::F32, width as u64, rows * width, 8.0).to_f32();
        x.chunks_exact_mut(width).for_each(change);
        let (found, places) = slabs(&x, width, k, slab);
        let (values, indices) = reference(&x, width, k);
        let [best, whose] = exact(&values, &indices);
        let parts = width.div_ceil(slab);
        Case {
            kernel: top_k_merge(schedule(k)).record(),
            label: format!("{k} of {rows} x {parts} slabs, {why}"),
            numbers: numbers(rows, k).with("slabs", parts as u32),
            buffers: vec![
                Buffer::floats(Scalar::F32, &found),
                Buffer::words(&places),
                Buffer::zeros(Scalar::F32, values.len()),
                Buffer::zeros(Scalar::U32, values.len()),
            ],
            expected: vec![(2, best), (3, whose)],
        }
    };
    ROWS.iter().map(case).collect()
}

/// A vocabulary of today's models, cut into as many slabs as keep a GPU busy.
const BENCH: [usize; 3] = [151_936, 40, 1024];

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let [width, k, slab] = BENCH;
        let results = width.div_ceil(slab) * k;
        let buffers = vec![
            Fill::Noise(scalar, width),
            Fill::Zeros(Scalar::F32, results),
            Fill::Zeros(Scalar::U32, results),
        ];
        let numbers = numbers(1, k).with("width", width as u32).with("slab", slab as u32);
        let label = format!("{k} of 1 x {width}");
        vec![crate::trial::memory(top_k(scalar, schedule(k)), &label, numbers, buffers, 0)]
    }
    every_float(of)
}

fn merge_benches() -> Vec<Bench> {
    let [width, k, slab] = BENCH;
    let parts = width.div_ceil(slab);
    let buffers = vec![
        Fill::Noise(Scalar::F32, parts * k),
        Fill::Noise(Scalar::U32, parts * k),
        Fill::Zeros(Scalar::F32, k),
        Fill::Zeros(Scalar::U32, k),
    ];
    let numbers = numbers(1, k).with("slabs", parts as u32);
    let label = format!("{k} of 1 x {parts} slabs");
    vec![crate::trial::memory(top_k_merge(schedule(k)), &label, numbers, buffers, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }

    #[test]
    fn the_most_that_are_sorted_is_known() {
        assert_eq!(
            [1, 256, 257, 1024].map(|k| TopKSchedule::of(k).map(|s| s.size)),
            [Some(512), Some(512), Some(1024), Some(2048)]
        );
        assert_eq!(TopKSchedule::of(1025), None);
    }
}
