//! Element types of cached keys and values.

use crate::{Error, Hint, Result, Setting};

/// The element type of cached keys and values.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub enum CacheType {
    /// Two bytes: what every peer keeps.
    #[default]
    F16,
    /// Two bytes, of f32's range.
    BF16,
    /// Four bytes: for comparing with references.
    F32,
    /// ggml's 8-bit blocks of 32 elements, 34 bytes each.
    Q8_0,
    /// ggml's 4-bit blocks (`q4_0`) of 32 elements, 18 bytes each, of heads turned by
    /// [`CacheType::rotate`].
    Turbo,
}

impl CacheType {
    /// Elements that share a scale, in types that have scales.
    pub const BLOCK: usize = 32;

    /// The factor on sums of [`CacheType::rotate`]: `1 / sqrt(32)`.
    pub const ROTATION: f32 = 0.176_776_7;

    /// Bytes that `elements` of a head take.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            CacheType::F16 | CacheType::BF16 => 2 * elements,
            CacheType::F32 => 4 * elements,
            CacheType::Q8_0 => 34 * elements.div_ceil(Self::BLOCK),
            CacheType::Turbo => 18 * elements.div_ceil(Self::BLOCK),
        }
    }

    /// Bits of a code, in types that have scales.
    pub fn bits(self) -> Option<usize> {
        match self {
            CacheType::Q8_0 => Some(8),
            CacheType::Turbo => Some(4),
            CacheType::F16 | CacheType::BF16 | CacheType::F32 => None,
        }
    }

    /// Whether heads of `head_dim` elements can be cached so.
    ///
    /// # Errors
    /// If heads are no whole blocks.
    pub fn check(self, head_dim: usize) -> Result<()> {
        if self.bits().is_none() || head_dim.is_multiple_of(Self::BLOCK) {
            return Ok(());
        }
        let place = format!("a cache of {}", format!("{self:?}").to_lowercase());
        let found = format!("{head_dim} elements");
        let error = Error::new(place, "heads of a multiple of 32 elements", found);
        Err(error.hint(Hint::set(Setting::CacheType, "f16 or bf16")))
    }

    /// Whether queries, keys and values are turned by [`CacheType::rotate`] before they meet.
    pub fn rotates(self) -> bool {
        self == CacheType::Turbo
    }

    /// Rotates each 32 elements of heads by a Hadamard matrix over `sqrt(32)`, which is its own
    /// inverse: products of two rotated heads equal the products of the heads, and an element far
    /// greater than its neighbours, which would leave these few of 16 codes, becomes a part of all
    /// (Ashkboos et al., QuaRot, 2024).
    #[inline(always)]
    pub fn rotate(heads: &mut [f32]) {
        let (blocks, _) = heads.as_chunks_mut::<{ CacheType::BLOCK }>();
        for block in blocks {
            for step in [1, 2, 4, 8, 16] {
                for i in 0..CacheType::BLOCK {
                    if i & step == 0 {
                        let (a, b) = (block[i], block[i + step]);
                        (block[i], block[i + step]) = (a + b, a - b);
                    }
                }
            }
            for x in block {
                *x *= CacheType::ROTATION;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row `i`, column `j` of Sylvester's Hadamard matrix is `(-1)^popcount(i & j)`.
    #[test]
    fn a_rotation_is_sylvesters_and_its_own_inverse() {
        let x: Vec<f32> = (0..64).map(|i| ((i * 37 + 11) % 29) as f32 - 14.0).collect();
        let mut turned = x.clone();
        CacheType::rotate(&mut turned);
        for (block, turned) in x.chunks_exact(32).zip(turned.chunks_exact(32)) {
            for (i, found) in turned.iter().enumerate() {
                let sign =
                    |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let sum: f64 = block.iter().enumerate().map(|(j, &x)| sign(j) * f64::from(x)).sum();
                assert!((f64::from(*found) - sum / 32f64.sqrt()).abs() < 1e-5, "{i}");
            }
        }
        CacheType::rotate(&mut turned);
        assert!(x.iter().zip(&turned).all(|(x, t)| (x - t).abs() < 1e-5));
    }

    #[test]
    fn heads_are_whole_blocks_or_refused_by_name() {
        assert_eq!([CacheType::Q8_0, CacheType::Turbo].map(|t| t.bytes(64)), [68, 36]);
        assert!(CacheType::F16.check(80).is_ok() && CacheType::Turbo.check(96).is_ok());
        let why = CacheType::Turbo.check(80).unwrap_err().to_string();
        assert!(why.contains("turbo") && why.contains("80 elements"), "{why}");
    }
}
