//! Random numbers of a batch's rows: Philox of the row's number in the run, the column, the stream
//! of the operation and the seed. They are computed again wherever they are needed, alike on every
//! device, so that nothing is stored for gradients and a run that is resumed goes on as it would
//! have.

use tile::dsl::*;

use crate::sample::kernels::arith;
use crate::sample::philox::philox;
use crate::sweep::when;
use crate::{Rows, Shape, arity};
use formats::{Error, Result};

/// Where an operation's random numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draws {
    /// The seed of the run.
    pub seed: u64,
    /// Tells operations apart that draw for the same rows.
    pub stream: u32,
}

/// Columns of a row that one call of Philox gives numbers for.
pub const COLUMNS: usize = 4;

impl Draws {
    fn key(self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    /// Calls `f` with each element of a row and its 32 random bits. `number` is the row's in the
    /// run.
    #[inline(always)]
    pub fn each(self, number: u32, row: &mut [f32], mut f: impl FnMut(&mut f32, u32)) {
        for (block, elements) in row.chunks_mut(COLUMNS).enumerate() {
            let words = philox([block as u32, self.stream, number, 0], self.key());
            elements.iter_mut().zip(words).for_each(|(element, word)| f(element, word));
        }
    }

    /// The numbers of a launch: `seed_low`, `seed_high` and `stream`.
    pub(crate) fn numbers(self, numbers: tile::launch::Numbers) -> tile::launch::Numbers {
        let [low, high] = self.key();
        numbers.with("seed_low", low).with("seed_high", high).with("stream", self.stream)
    }
}

/// The shapes of the operation `name`, which changes each token's row by its random numbers.
///
/// # Errors
/// Operands other than rows of tokens.
pub(crate) fn infer(name: &str, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity(name, inputs, 1, weights, &[0])?;
    if inputs[0].rows != Rows::Tokens {
        return Err(Error::new(name, "a row for each token", format!("{:?}", inputs[0])));
    }
    Ok(vec![inputs[0]])
}

/// Calls `f` with the place of each element of a row of `width` and its 32 random bits, on the
/// device, where a threadgroup shares a row. `number` is the row's in the run.
#[track_caller]
pub(crate) fn each_of_row(
    [row, number, width]: [Val<u32>; 3],
    stream: Val<u32>,
    seed: [Val<u32>; 2],
    f: impl Fn(Val<u32>, Val<u32>),
) {
    let blocks = (width + (COLUMNS as u32 - 1)) / COLUMNS as u32;
    strided(blocks).each(|block| {
        let words = arith::philox([block, stream, number, 0u32.val()], seed);
        for (k, word) in (0u32..).zip(words) {
            let column = block * COLUMNS as u32 + k;
            when(Order::lt(column, width), || f(row * width + column, word));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(draws: Draws, number: u32, width: usize) -> Vec<u32> {
        let (mut row, mut bits) = (vec![0.0; width], Vec::new());
        draws.each(number, &mut row, |_, word| bits.push(word));
        bits
    }

    #[test]
    fn rows_streams_and_seeds_draw_by_themselves() {
        let of = |seed, stream, number| bits(Draws { seed, stream }, number, 9);
        let first = of(7, 0, 0);
        assert_eq!(first, of(7, 0, 0));
        assert_eq!(first[..5], bits(Draws { seed: 7, stream: 0 }, 0, 5));
        for other in [of(8, 0, 0), of(7, 1, 0), of(7, 0, 1), of(7 + (1 << 40), 0, 0)] {
            assert!(first.iter().zip(&other).all(|(a, b)| a != b));
        }
    }

    /// The correlation of numbers in -1..1 of neighbouring rows, columns and streams is that of
    /// independent ones: below five standard deviations.
    #[test]
    fn neighbours_are_independent() {
        let (rows, width) = (256, 64);
        let unit = |word: u32| f64::from(word) / f64::from(1u32 << 31) - 1.0;
        let table = |seed, stream, first: u32| -> Vec<f64> {
            let draws = Draws { seed, stream };
            let all = (first..first + rows).flat_map(|row| bits(draws, row, width));
            all.map(unit).collect()
        };
        let of = table(3, 0, 0);
        let n = of.len() as f64;
        let mean = of.iter().sum::<f64>() / n;
        let square = of.iter().map(|x| x * x).sum::<f64>() / n;
        assert!(mean.abs() < 5.0 / (3.0 * n).sqrt(), "{mean}");
        assert!((square - 1.0 / 3.0).abs() < 5.0 * (4.0 / 45.0 / n).sqrt(), "{square}");
        let next_column = [&of[1..], &of[..1]].concat();
        for other in [table(3, 0, 1), table(3, 1, 0), table(4, 0, 0), next_column] {
            let product = of.iter().zip(&other).map(|(a, b)| a * b).sum::<f64>() / n;
            assert!(product.abs() < 5.0 / (3.0 * n.sqrt()), "{product}");
        }
    }
}
