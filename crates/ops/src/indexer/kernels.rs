//! The kernels of indexers: the scores of a batch of rows, then the choice of each row.
//!
//! A threadgroup scores `KEYS` positions of a row: a lane has a position, and simdgroups share the
//! heads. Scores are added in one order, whatever else a launch computes. The choice finds the least
//! score that is chosen bit by bit, and counts how many are chosen in front of each position.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, noise};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use super::{Indexer, NONE, choose};
use crate::attention::{Scene, Stored, Stores, require_aligned};
use crate::kv_write::Cache;
use crate::linear::holds;
use crate::sample::kernels::arith::{IMPOSSIBLE, key_of};
use crate::sweep::begin;
use crate::trial::{memory, random};

/// Positions that a threadgroup scores.
const KEYS: u32 = 32;
/// Simdgroups that share a row's heads.
const SIMDS: u32 = 4;
/// Threads that choose.
const THREADS: u32 = 256;

/// Which positions rows choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexForm {
    /// Elements per head.
    pub head_dim: u32,
    /// Whether these are the latest: the constant `window`.
    pub window: bool,
}

/// The positions that a row sees: their first, and how many.
#[device]
fn seen(positions: In<u32>, row: Val<u32>, window: Option<Val<u32>>) -> (Val<u32>, Val<u32>) {
    // An idle row, at the greatest position, sees none.
    let end = positions.get(row) + 1u32;
    let first = window.map_or_else(|| 0u32.val(), |window| end - window.min(end));
    (first, end - first)
}

/// The scores `[rows, width]` of rows' positions, from the first that each sees on, for `q` `[rows,
/// heads, head_dim]` and weights `w` `[rows, heads]`. What lies behind a row's last position stays as
/// it was.
#[kernel]
pub fn index_scores(
    q: In<f32>,
    w: In<f32>,
    keys: In<{ stored }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    scores: Out<f32>,
    width: Arg<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    heads: Const<u32>,
    stored: Scalar,
    form: IndexForm,
) {
    require_aligned(&["keys"]);
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    score(form, &cache, Stored::numbers(keys), [q, w], scores, [heads, width]);
}

/// As [`index_scores`], over a cache of codes: i8 is q8_0, u32 turbo. 32 must divide `head_dim`.
#[kernel]
pub fn index_scores_codes(
    q: In<f32>,
    w: In<f32>,
    key_codes: In<{ codes }>,
    key_scales: In<{ Scalar::F16 }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    scores: Out<f32>,
    width: Arg<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    heads: Const<u32>,
    codes: Scalar,
    form: IndexForm,
) {
    require_aligned(&["key_codes"]);
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    let keys = Stored::codes(key_codes, key_scales);
    score(form, &cache, keys, [q, w], scores, [heads, width]);
}

/// The body of both kernels.
fn score(
    form: IndexForm,
    cache: &Cache,
    keys: Stored,
    [q, w]: [In<f32>; 2],
    scores: Out<f32>,
    [heads, width]: [Val<u32>; 2],
) {
    let d = form.head_dim;
    launch(Mode::Tile, [dim("width").ceil_div(KEYS), dim("rows"), fixed(1)], 32 * SIMDS);
    holds("q", dim("rows") * dim("heads") * d);
    holds("w", dim("rows") * dim("heads"));
    holds("positions", dim("rows"));
    holds("sequences", dim("rows"));
    holds("scores", dim("rows") * dim("width"));
    let window = form.window.then(|| Const::<u32>::declare("window"));
    begin();
    let row = group_id_of(1);
    let (first, visible) = seen(cache.positions, row, window);
    let visible = visible.min(width);
    let base = group_id() * KEYS;
    // A key's elements lie a column apart, of one more than there are keys: lanes that read
    // neighbours, and lanes that write a key, reach different banks.
    let tile = Shared::<f32>::named("tile", d * (KEYS + 1));
    let sums = Shared::<f32>::named("sums", SIMDS * KEYS);
    crate::sweep::when(Order::lt(base, visible), || {
        let sequence = cache.sequences.get(row);
        strided(KEYS * d).each(|i| {
            let (key, element) = (i / d, i % d);
            let position = first + (base + key).min(visible - 1u32);
            let slot = cache.slot_at(sequence, position);
            tile.set(element * (KEYS + 1) + key, keys.element(cache, slot, element));
        });
        barrier();
        let (simd, lane) = (simd_id(), lane_id());
        let sum = Var::new(0.0f32);
        range(simd, heads).step(SIMDS).each(|head| {
            let dot = Var::new(0.0f32);
            let at = (row * heads + head) * d;
            range(0u32, d).each(|i| {
                dot.set(q.get(at + i).fma(tile.get(i * (KEYS + 1) + lane), dot.get()));
            });
            sum.set(w.get(row * heads + head).fma(dot.get().max(0.0f32), sum.get()));
        });
        sums.set(simd * KEYS + lane, sum.get());
        barrier();
        let mine = Order::eq(simd, 0u32) & Order::lt(base + lane, visible);
        crate::sweep::when(mine, || {
            let of = |simd: u32| sums.get(simd * KEYS + lane);
            let total = (1..SIMDS).fold(of(0), |total, simd| total + of(simd));
            scores.set(row * width + base + lane, total);
        });
    });
}

/// The positions of each row's `count` greatest scores, as [`Indexer`] has them: `chosen` `[rows,
/// count]`.
#[kernel]
pub fn index_choose(
    scores: In<f32>,
    positions: In<u32>,
    chosen: Out<f32>,
    width: Arg<u32>,
    count: Const<u32>,
    form: IndexForm,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], THREADS);
    holds("scores", dim("rows") * dim("width"));
    holds("positions", dim("rows"));
    holds("chosen", dim("rows") * dim("count"));
    let window = form.window.then(|| Const::<u32>::declare("window"));
    begin();
    let row = group_id();
    let (first, visible) = seen(positions, row, window);
    let visible = visible.min(width);
    let to = row * count;
    let all = || {
        let missing = count - visible;
        strided(count).each(|i| {
            let position = (first + i - missing).f32();
            chosen.set(to + i, select(Order::lt(i, missing), NONE, position));
        });
    };
    let some = || {
        let key = |i: Val<u32>| key_of(scores.get(row * width + i)).max(IMPOSSIBLE);
        // The greatest key that `count` scores or more reach.
        let least = Var::new(0u32);
        range(0u32, 32u32).each(|bit| {
            let trial = least.get() | (1u32.val() << (31u32.val() - bit));
            let own = Var::new(0u32);
            strided(visible).each(|i| {
                own.set(own.get() + select(Order::ge(key(i), trial), 1u32, 0u32));
            });
            let reach = group_sum(own.get());
            least.set(select(Order::ge(reach, count), trial, least.get()));
        });
        let least = least.get();
        // Each thread has positions one behind the other.
        let each = (visible + (THREADS - 1)) / THREADS;
        let from = (thread_id() * each).min(visible);
        let end = (from + each).min(visible);
        let (above, ties) = (Var::new(0u32), Var::new(0u32));
        range(from, end).each(|i| {
            let key = key(i);
            above.set(above.get() + select(Order::gt(key, least), 1u32, 0u32));
            ties.set(ties.get() + select(Order::eq(key, least), 1u32, 0u32));
        });
        let counts = Shared::<u32>::named("counts", 2 * THREADS);
        counts.set(thread_id(), above.get());
        counts.set(THREADS + thread_id(), ties.get());
        // Ties are chosen from the first on, as many as are left.
        let left = count - group_sum(above.get());
        barrier();
        let (before, tied) = (Var::new(0u32), Var::new(0u32));
        range(0u32, thread_id()).each(|i| {
            before.set(before.get() + counts.get(i));
            tied.set(tied.get() + counts.get(THREADS + i));
        });
        let at = Var::new(before.get() + tied.get().min(left));
        range(from, end).each(|i| {
            let key = key(i);
            let tie = Order::eq(key, least);
            let kept = Order::gt(key, least) | (tie & Order::lt(tied.get(), left));
            crate::sweep::when(kept, || {
                chosen.set(to + at.get().min(count - 1u32), (first + i).f32());
                at.set(at.get() + 1u32);
            });
            tied.set(tied.get() + select(tie, 1u32, 0u32));
        });
    };
    test(Order::le(visible, count)).then(all).otherwise(some);
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "index_scores", cases: score_cases, benches: score_benches },
    Spec { name: "index_scores_codes", cases: code_cases, benches: || vec![] },
    Spec { name: "index_choose", cases: choose_cases, benches: choose_benches },
];

/// The scenes that scores are tested on.
fn scenes() -> Vec<Scene> {
    let of = || Scene { kv_heads: 1, ..Scene::default() };
    vec![
        Scene { why: "one position", group: 3, rows: vec![(0, 0)], ..of() },
        Scene {
            why: "rows of unlike lengths, one idle",
            group: 8,
            rows: vec![(2, 70), (0, 31), (1, 32), (3, u32::MAX), (2, 69)],
            ..of()
        },
        Scene { why: "a window", group: 5, window: Some(40), rows: vec![(0, 99)], ..of() },
        Scene { why: "wide heads", group: 4, head_dim: 128, rows: vec![(0, 45)], ..of() },
    ]
}

fn form_of(scene: &Scene) -> IndexForm {
    IndexForm { head_dim: scene.head_dim as u32, window: scene.window.is_some() }
}

fn score_case(scene: &Scene, kernel: Recipe<'static>, stores: Stores) -> Case {
    let (rows, heads, d) = (scene.rows.len(), scene.heads(), scene.head_dim);
    let (q, w) = (random(Scalar::F32, 5, rows * heads * d), random(Scalar::F32, 6, rows * heads));
    let width = scene.stride() * scene.block;
    let (queries, weights, slot) = (q.to_f32(), w.to_f32(), scene.slots());
    let mut wanted = vec![0.0; rows * width];
    for (row, &(sequence, position)) in scene.rows.iter().enumerate() {
        let end = position.wrapping_add(1) as usize;
        let first = scene.first(end);
        for p in first..end {
            let key = &stores.keys[slot(sequence as usize, p) * d..][..d];
            let head = |h: usize| {
                let product = formats::dot(&queries[(row * heads + h) * d..][..d], key);
                f64::from(weights[row * heads + h]) * product.max(0.0)
            };
            wanted[row * width + p - first] = (0..heads).map(head).sum();
        }
    }
    // Of each cache the keys alone.
    let keys = stores.buffers.len() / 2;
    let mut buffers = vec![q, w];
    buffers.extend(stores.buffers.into_iter().take(keys));
    buffers.extend(scene.words());
    buffers.push(Buffer::zeros(Scalar::F32, rows * width));
    let mut numbers = numbers(rows, width, scene.window)
        .with("stride", scene.stride() as u32)
        .with("block", scene.block as u32)
        .with("kv_heads", 1);
    numbers.set("heads", heads as u32);
    Case {
        label: scene.label("scores"),
        kernel: kernel.record(),
        numbers,
        expected: vec![(buffers.len() - 1, Expected::Near(wanted, 1e-5))],
        buffers,
    }
}

/// The numbers that all kernels of indexers take.
pub fn numbers(rows: usize, width: usize, window: Option<usize>) -> Numbers {
    let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
    match window {
        Some(window) => numbers.with("window", u32::try_from(window).unwrap_or(u32::MAX)),
        None => numbers,
    }
}

fn score_cases() -> Vec<Case> {
    let of = |stored: Scalar| -> Vec<Case> {
        let case = |scene: &Scene| {
            score_case(scene, index_scores(stored, form_of(scene)), scene.plain(stored))
        };
        scenes().iter().map(case).collect()
    };
    [Scalar::F32, Scalar::F16, Scalar::BF16].into_iter().flat_map(of).collect()
}

fn code_cases() -> Vec<Case> {
    let of = |scene: &Scene| {
        let kernel = |codes| index_scores_codes(codes, form_of(scene));
        [
            score_case(scene, kernel(Scalar::I8), scene.q8_0()),
            score_case(scene, kernel(Scalar::U32), scene.turbo()),
        ]
    };
    scenes().iter().flat_map(of).collect()
}

/// Rows worth testing: how many are chosen, within a window, at positions; a change to scores, and
/// what it shows.
type Rows<'a> = (usize, Option<usize>, &'a [u32], fn(&mut f32), &'a str);

fn choose_cases() -> Vec<Case> {
    let case = |(count, window, positions, change, why): Rows<'_>| {
        let (rows, width) = (positions.len(), 700);
        let mut scores = noise(count as u64, rows * width);
        scores.iter_mut().for_each(change);
        let op = Indexer { layer: 0, heads: 1, head_dim: 1, count, window };
        let (mut wanted, mut aside) = (vec![NONE; rows * count], vec![0.0; width]);
        for (row, &position) in positions.iter().enumerate().filter(|(_, p)| **p != u32::MAX) {
            let first = op.first(position as usize);
            let own = &scores[row * width..][..position as usize + 1 - first];
            choose(own, first, &mut aside, &mut wanted[row * count..][..count]);
        }
        let form = IndexForm { head_dim: 1, window: window.is_some() };
        Case {
            label: format!("{count} of up to {width}: {why}"),
            kernel: index_choose(form).record(),
            numbers: numbers(rows, width, window).with("count", count as u32),
            buffers: vec![
                Buffer::floats(Scalar::F32, &scores),
                Buffer::words(positions),
                Buffer::zeros(Scalar::F32, rows * count),
            ],
            expected: vec![(2, Expected::Exact(wanted.into_iter().map(f64::from).collect()))],
        }
    };
    [
        case((40, None, &[0, 38, 39, 40, u32::MAX, 699], |_| (), "fewer, as many, more, idle")),
        case((40, None, &[299, 699], |x| *x = (*x * 4.0).round(), "ties, zeros of both signs")),
        case((3, Some(100), &[50, 650], |_| (), "a window")),
        case((300, None, &[699], |x| *x = 1.0, "all alike")),
        case((5, None, &[20], |x| *x = if *x > 0.5 { *x } else { f32::NAN }, "no numbers")),
    ]
    .into()
}

/// DeepSeek-V3.2's: rows, positions, heads, elements, positions chosen.
const BENCH: (usize, usize, usize, usize, usize) = (8, 32_768, 64, 128, 2048);

fn score_benches() -> Vec<Bench> {
    let (rows, width, heads, d, _) = BENCH;
    let stride = width / 256;
    let words = |words: Vec<u32>| Fill::These(Buffer::words(&words));
    let numbers = numbers(rows, width, None)
        .with("stride", stride as u32)
        .with("block", 256)
        .with("kv_heads", 1)
        .with("heads", heads as u32);
    let buffers = vec![
        Fill::Noise(Scalar::F32, rows * heads * d),
        Fill::Noise(Scalar::F32, rows * heads),
        Fill::Noise(Scalar::F16, width * d),
        words(vec![width as u32 - 1; rows]),
        words(vec![0; rows]),
        words((0..stride as u32).rev().collect()),
        Fill::Zeros(Scalar::F32, rows * width),
    ];
    let kernel = index_scores(Scalar::F16, IndexForm { head_dim: d as u32, window: false });
    let label = format!("{rows} x {width} x {heads} x {d}");
    vec![memory(kernel, &label, numbers, buffers, 2 * (rows * width * heads * d) as u64)]
}

fn choose_benches() -> Vec<Bench> {
    let (rows, width, _, _, count) = BENCH;
    let buffers = vec![
        Fill::Noise(Scalar::F32, rows * width),
        Fill::These(Buffer::words(&vec![width as u32 - 1; rows])),
        Fill::Zeros(Scalar::F32, rows * count),
    ];
    let kernel = index_choose(IndexForm { head_dim: 1, window: false });
    let numbers = numbers(rows, width, None).with("count", count as u32);
    vec![memory(kernel, &format!("{count} of {width}, {rows} rows"), numbers, buffers, 0)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
