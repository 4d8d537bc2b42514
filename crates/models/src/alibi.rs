//! Slopes on scores (ALiBi, Press, Smith & Lewis 2022), as BLOOM, MPT and llama.cpp have them: of
//! `n` heads, the largest power of two `m` of them has `2^(-b i / m)` for `i = 1..=m`, and the others
//! have every second of those of `2 m` heads. `b`, by which the last of `m` falls, is 8 in most.

use nn::Stored;

/// The exponent of the last slope where nothing is said.
pub(crate) const USUAL: f64 = 8.0;

/// The weight `name`, if it is the slopes of a model with `heads` heads: numbers in a recipe.
pub(crate) fn part(name: &str, heads: usize, steepest: f64) -> Option<Stored> {
    part_by(name, heads, steepest, |slope| slope as f32)
}

/// The same, of slopes that `change` makes others of.
pub(crate) fn part_by(
    name: &str,
    heads: usize,
    steepest: f64,
    change: impl Fn(f64) -> f32,
) -> Option<Stored> {
    name.ends_with(".attention.slopes").then(|| {
        let one = |slope: f64| {
            let zero = formats::Source::Zeros(vec![1]);
            formats::Source::Plus(Box::new(zero), change(slope))
        };
        let all = slopes(heads, steepest).into_iter().map(one).collect();
        Stored { source: formats::Source::Concat(all), shape: vec![heads] }
    })
}

fn slopes(heads: usize, steepest: f64) -> Vec<f64> {
    let whole = 1 << heads.max(1).ilog2();
    let slope = |h: usize| match h.checked_sub(whole) {
        None => (h + 1) as f64 / whole as f64,
        Some(beyond) => (2 * beyond + 1) as f64 / (2 * whole) as f64,
    };
    (0..heads).map(|h| (-steepest * slope(h)).exp2()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_powers_and_every_second_of_twice_as_many() {
        assert_eq!(slopes(4, 8.0), [0.25, 0.0625, 0.015625, 0.00390625]);
        let six = slopes(6, 8.0);
        assert_eq!(six[..4], slopes(4, 8.0));
        assert_eq!(six[4..], [slopes(8, 8.0)[0], slopes(8, 8.0)[2]]);
    }
}
