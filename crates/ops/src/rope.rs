//! Rotary embedding (Su et al. 2021): pair `i` of a head turns by `position * frequency[i]`.
//!
//! Half-split pairing couples elements `(i, i + n)`, as Hugging Face checkpoints store q and k;
//! adjacent pairing couples `(2i, 2i + 1)`, as the original Llama weights and GGUF's `llama` rows
//! do.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Numbers, Requirement};

use crate::gradient::{Forward, Reverse, Wrt, give, linear_in_x, one};
use crate::math::sin_cos;
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{RowThreads, begin, lanes, load, require_vectors};
use crate::trial::{every_float, memory, near, random, rows_of};
use crate::{Shape, arity, expect};
use formats::{Pairing, Result};
use std::sync::Arc;

/// A rotation of every head of a row: `x[tokens, heads * head_dim] -> same`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Rope {
    /// Elements per head. The first `2 * frequencies.len()` turn; the rest pass through.
    pub head_dim: usize,
    /// Which elements turn together.
    pub pairing: Pairing,
    /// Radians per position of each pair, scaling included.
    pub frequencies: Arc<[f32]>,
    /// Multiplies sine and cosine (YaRN's attention factor; 1 otherwise).
    pub magnitude: f32,
}

impl Operation for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("rope", inputs, 1, weights, &[0])?;
        self.check(inputs[0].width)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        call.outputs[0].copy_from_slice(call.inputs[0]);
        self.turn(call.positions, call.widths[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn rope(&self) -> Option<&Rope> {
        Some(self)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let numbers = Numbers::new()
            .with("tokens", to.rows(X) as u32)
            .with("heads", (to.width(X) / self.head_dim) as u32)
            .with("head_dim", self.head_dim as u32)
            .with("pairs", self.frequencies.len() as u32)
            .with_f32("magnitude", self.magnitude);
        let bound = [
            ("x", Bound::Value(X)),
            ("positions", Bound::Positions),
            ("frequencies", Bound::Frequencies),
            ("y", Bound::Value(Y)),
        ];
        to.push(rope(to.scalar(X), self.pairing), numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        // The transpose of a rotation turns the other way.
        let frequencies = self.frequencies.iter().map(|frequency| -frequency).collect();
        let back = Rope { frequencies, ..self.clone() };
        give(at, Wrt::Input(0), |at| one(at, back, &[dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        linear_in_x(at, self.clone())
    }
}

impl Rope {
    pub(crate) fn check(&self, width: usize) -> Result<()> {
        let head_dim = self.head_dim.max(1);
        expect("rope", "width modulo head_dim", &[width % head_dim], &[0])?;
        let turned = 2 * self.frequencies.len();
        expect("rope", "elements that turn", &[turned.min(self.head_dim)], &[turned])
    }

    /// The two element indices of pair `i` within a head.
    pub fn pair(&self, i: usize) -> (usize, usize) {
        match self.pairing {
            Pairing::Half => (i, i + self.frequencies.len()),
            Pairing::Adjacent => (2 * i, 2 * i + 1),
        }
    }

    /// Cosine and sine of every pair at `position`: `cos` and `sin` hold `frequencies.len()`
    /// elements.
    ///
    /// The angle is an f32 product, as reference implementations compute it; its sine is taken in
    /// f64.
    pub fn angles(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        for (i, &frequency) in self.frequencies.iter().enumerate() {
            let (s, c) = f64::from(position as f32 * frequency).sin_cos();
            cos[i] = c as f32 * self.magnitude;
            sin[i] = s as f32 * self.magnitude;
        }
    }

    /// Rotates `x` `[tokens, width]` in place.
    pub fn turn(&self, positions: &[u32], width: usize, x: &mut [f32]) {
        let n = self.frequencies.len();
        let (mut cos, mut sin) = (vec![0.0; n], vec![0.0; n]);
        for (&position, row) in positions.iter().zip(x.chunks_exact_mut(width)) {
            self.angles(position, &mut cos, &mut sin);
            for head in row.chunks_exact_mut(self.head_dim) {
                for i in 0..n {
                    let (a, b) = self.pair(i);
                    let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                    let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                    head[a] = (x * c - y * s) as f32;
                    head[b] = (y * c + x * s) as f32;
                }
            }
        }
    }
}

/// Pairs of a head that may turn: what is reserved for their sines and cosines.
pub const MOST_PAIRS: u32 = 256;

/// Cosines and sines of every pair at the positions of a few tokens, computed once and shared by a
/// threadgroup.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Angles {
    cos: Shared<f32>,
    sin: Shared<f32>,
}

impl Angles {
    /// Those of `tokens` tokens, whose positions `position` reads, times `magnitude`. All threads
    /// of the group take part; ends with a barrier.
    ///
    /// The angle is the f32 product that reference implementations compute, so that nothing is to
    /// be won by a better one; [`sin_cos`] is then exact to f32 up to a million positions of a
    /// radian each, on every target.
    #[track_caller]
    pub(crate) fn of(
        tokens: u32,
        position: impl Fn(Val<u32>) -> Val<u32>,
        frequencies: In<f32>,
        pairs: Val<u32>,
        magnitude: Val<f32>,
    ) -> Angles {
        require(Requirement::AtMost(dim("pairs"), MOST_PAIRS));
        require(Requirement::Length("frequencies".to_owned(), dim("pairs")));
        let angles = Angles {
            cos: Shared::named("cosines", MOST_PAIRS * tokens),
            sin: Shared::named("sines", MOST_PAIRS * tokens),
        };
        strided(pairs * tokens).each(|j| {
            let (token, pair) = if tokens == 1 { (0u32.val(), j) } else { (j / pairs, j % pairs) };
            let (sin, cos) = sin_cos(position(token).f32() * frequencies.get(pair));
            let at = token * MOST_PAIRS + pair;
            angles.cos.set(at, cos * magnitude);
            angles.sin.set(at, sin * magnitude);
        });
        barrier();
        angles
    }

    /// `(cos, sin)` at a token of `count` pairs from `first` on, a multiple of `count`.
    #[track_caller]
    pub(crate) fn get(self, token: u32, first: Val<u32>, count: u8) -> Vec<(Val<f32>, Val<f32>)> {
        let first = first + token * MOST_PAIRS;
        let read = |from: Shared<f32>| -> Vec<Val<f32>> {
            // Vectors of f32 have at most four elements.
            let wide = count.min(4);
            (0..u32::from(count / wide))
                .flat_map(|i| load(from, first + i * u32::from(wide), wide))
                .collect()
        };
        read(self.cos).into_iter().zip(read(self.sin)).collect()
    }
}

/// Reads some of a token's elements, from an index on.
type Read<'a> = &'a dyn Fn(u32, Val<u32>, u8) -> Vec<Val<f32>>;
/// Writes a token's elements from an index on.
type Write<'a> = &'a dyn Fn(u32, Val<u32>, &[Val<f32>]);

/// Heads that a team turns: their layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// Tokens at once, whose loads overlap.
    pub(crate) tokens: u32,
    /// Heads of each, one after the other.
    pub(crate) heads: Val<u32>,
    /// Elements of each.
    pub(crate) head_dim: Val<u32>,
    /// Pairs of each that turn.
    pub(crate) pairs: Val<u32>,
    /// Which elements are a pair.
    pub(crate) pairing: Pairing,
}

impl Heads {
    /// Reads every element once, turns the pairs and writes each where it was: `read` and `write`
    /// may go to the same buffer. Vectors have at most `lanes` elements.
    #[track_caller]
    pub(crate) fn turn(
        self,
        team: RowThreads,
        lanes: u8,
        angles: Angles,
        read: Read,
        write: Write,
    ) {
        let Heads { tokens, heads, head_dim, pairs, pairing } = self;
        // A vector of adjacent pairs has half as many of them.
        let count = if pairing == Pairing::Half { lanes } else { lanes / 2 };
        let divides = |n: Val<u32>, by: u8| Order::eq(n % u32::from(by), 0u32);
        let whole = divides(pairs, count) & divides(head_dim, lanes);
        team.sweep_if(whole, heads * pairs, count, |at, count| {
            let place = |&i: &Val<u32>| {
                let (start, pair) = (i / pairs * head_dim, i % pairs);
                match pairing {
                    Pairing::Half => (pair, [start + pair, start + pair + pairs]),
                    Pairing::Adjacent => {
                        (pair, [start + pair * 2u32, start + pair * 2u32 + u32::from(count)])
                    }
                }
            };
            let places: Vec<_> = at.iter().map(place).collect();
            // Adjacent pairs that fill a vector are one read; single ones may start at an odd
            // element.
            let one = pairing == Pairing::Adjacent && count > 1;
            let take = |token: u32, [a, b]: [Val<u32>; 2]| {
                if one {
                    return read(token, a, 2 * count);
                }
                [read(token, a, count), read(token, b, count)].concat()
            };
            let loaded: Vec<_> = (0..tokens)
                .flat_map(|token| places.iter().map(move |&(pair, at)| (token, pair, at)))
                .map(|(token, pair, at)| (token, pair, at, take(token, at)))
                .collect();
            for (token, pair, [at, other], x) in loaded {
                let (n, mut y) = (usize::from(count), x.clone());
                for (i, (cos, sin)) in angles.get(token, pair, count).into_iter().enumerate() {
                    let (a, b) = if one { (2 * i, 2 * i + 1) } else { (i, i + n) };
                    y[a] = x[a] * cos - x[b] * sin;
                    y[b] = x[b] * cos + x[a] * sin;
                }
                if one {
                    write(token, at, &y);
                } else {
                    write(token, at, &y[..n]);
                    write(token, other, &y[n..]);
                }
            }
        });
        // The rest of each head passes through.
        let rest = head_dim - pairs * 2u32;
        team.sweep(heads * rest, 1, |at, _| {
            // The quotient is taken by at least one: without a rest there is nothing to divide.
            let some = rest.max(1u32);
            let i = at[0] / some * head_dim + pairs * 2u32 + at[0] % some;
            (0..tokens).for_each(|token| write(token, i, &read(token, i, 1)));
        });
    }
}

/// Turns every head of `x` `[tokens, heads * head_dim]`, on the device. `frequencies` are
/// [`Rope`]'s, `[pairs]`; `positions` `[tokens]`. `y` may be the same buffer as `x`.
#[kernel]
pub fn rope(
    x: In<{ scalar }>,
    positions: In<u32>,
    frequencies: In<f32>,
    y: Out<{ scalar }>,
    heads: Const<u32>,
    head_dim: Const<u32>,
    pairs: Const<u32>,
    magnitude: Const<f32>,
    scalar: Scalar,
    pairing: Pairing,
) {
    launch(tile::launch::Mode::Row, [dim("tokens"), fixed(1), fixed(1)], 128);
    let size = dim("tokens") * dim("heads") * dim("head_dim");
    require_vectors(&[("x", size.clone()), ("y", size)]);
    require(Requirement::Length("positions".to_owned(), dim("tokens")));
    begin();
    let position = |_| positions.get(group_id());
    let angles = Angles::of(1, position, frequencies, pairs, magnitude);
    let first = group_id() * heads * head_dim;
    let heads = Heads { tokens: 1, heads, head_dim, pairs, pairing };
    let read = |_, i: Val<u32>, lanes: u8| load(x, first + i, lanes);
    let write = |_, i: Val<u32>, values: &[Val<f32>]| y.set_vec(first + i, values);
    heads.turn(RowThreads::Group, lanes(scalar), angles, &read, &write);
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "rope", cases, benches }];

/// Radians per position as Llama's base of 500,000 gives them.
pub(crate) fn frequencies(pairs: usize) -> Arc<[f32]> {
    (0..pairs).map(|i| 500_000f32.powf(-(i as f32) / pairs as f32)).collect()
}

/// The constants of a rotation.
pub(crate) fn numbers(rope: &Rope) -> Numbers {
    Numbers::new()
        .with("head_dim", rope.head_dim as u32)
        .with("pairs", rope.frequencies.len() as u32)
        .with_f32("magnitude", rope.magnitude)
}

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let mut all = Vec::new();
        for pairing in [Pairing::Half, Pairing::Adjacent] {
            for (positions, heads, head_dim, pairs, magnitude, why) in [
                (vec![0, 5, 4095], 3, 128, 64, 1.0, "whole heads"),
                (vec![1_000_000, 999_999, 131_071], 2, 128, 64, 1.0, "far positions"),
                (vec![77, 78], 2, 80, 16, 1.0, "a partial rotation"),
                (vec![300], 5, 64, 32, 1.190_9, "YaRN's factor"),
                (vec![3, 2], 3, 22, 7, 1.0, "pairs that no vector divides"),
                (vec![9], 2, 5, 2, 1.0, "an odd head"),
                (vec![11], 1, 2, 1, 1.0, "one pair"),
            ] {
                let rope = Rope { head_dim, pairing, frequencies: frequencies(pairs), magnitude };
                let width = heads * head_dim;
                let x = random(scalar, width as u64, positions.len() * width);
                let mut y = x.to_f32();
                rope.turn(&positions, width, &mut y);
                let n = positions.len();
                all.push(Case {
                    kernel: self::rope(scalar, pairing).record(),
                    label: format!("{n} x {heads} x {head_dim} {scalar}, {why}"),
                    numbers: numbers(&rope).with("tokens", n as u32).with("heads", heads as u32),
                    buffers: vec![
                        x,
                        Buffer::words(&positions),
                        Buffer::floats(Scalar::F32, &rope.frequencies),
                        Buffer::zeros(scalar, n * width),
                    ],
                    expected: vec![(3, near(scalar, &y))],
                });
            }
        }
        all
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let (tokens, heads) = (rows_of(scalar, 4096), 32);
        let bench = |pairing| {
            let rope =
                Rope { head_dim: 128, pairing, frequencies: frequencies(64), magnitude: 1.0 };
            let n = tokens * heads * rope.head_dim;
            let positions: Vec<u32> = (0..tokens as u32).collect();
            let buffers = vec![
                Fill::Noise(scalar, n),
                Fill::These(Buffer::words(&positions)),
                Fill::These(Buffer::floats(Scalar::F32, &rope.frequencies)),
                Fill::Zeros(scalar, n),
            ];
            let numbers = numbers(&rope).with("tokens", tokens as u32).with("heads", heads as u32);
            let kernel = self::rope(scalar, pairing);
            memory(kernel, &format!("{tokens} x 32 x 128"), numbers, buffers, 3 * n as u64)
        };
        vec![bench(Pairing::Half), bench(Pairing::Adjacent)]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairings_differ_by_a_permutation_only() {
        let half = Rope {
            head_dim: 4,
            pairing: Pairing::Half,
            frequencies: Arc::from([1.0, 0.01]),
            magnitude: 1.0,
        };
        let adjacent = Rope { pairing: Pairing::Adjacent, ..half.clone() };
        let mut a = [1.0, 2.0, 3.0, 4.0];
        let mut b = [1.0, 3.0, 2.0, 4.0];
        half.turn(&[7], 4, &mut a);
        adjacent.turn(&[7], 4, &mut b);
        assert_eq!(a, [b[0], b[2], b[1], b[3]]);
        let (s, c) = 7f32.sin_cos();
        assert!((a[0] - (c - 3.0 * s)).abs() < 1e-6);
    }

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
