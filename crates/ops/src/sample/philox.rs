//! Philox4x32-10: random numbers as a function of a counter and a key, with no state to carry.
//!
//! J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

/// The multipliers of the first and third word.
pub const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key in each round.
pub const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Rounds.
pub const ROUNDS: u32 = 10;

/// Ten rounds of Philox on `counter` under `key`.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    for _ in 0..ROUNDS {
        let first = u64::from(a) * u64::from(MULTIPLIERS[0]);
        let second = u64::from(c) * u64::from(MULTIPLIERS[1]);
        (a, b, c, d) = (
            (second >> 32) as u32 ^ b ^ k,
            second as u32,
            (first >> 32) as u32 ^ d ^ l,
            first as u32,
        );
        k = k.wrapping_add(WEYL[0]);
        l = l.wrapping_add(WEYL[1]);
    }
    [a, b, c, d]
}

/// 64 random bits for one position under one seed: the first two words, the first one above.
pub fn bits(seed: u64, position: u64) -> u64 {
    stream(seed, position, 0)
}

/// As [`bits`], from one of several independent streams; stream 0 is [`bits`] itself.
pub fn stream(seed: u64, position: u64, number: u32) -> u64 {
    let [a, b, ..] = philox(
        [position as u32, (position >> 32) as u32, number, 0],
        [seed as u32, (seed >> 32) as u32],
    );
    u64::from(a) << 32 | u64::from(b)
}

/// A number in `0..1`, uniform on the multiples of 2^-53, for one position under one seed.
pub fn uniform(seed: u64, position: u64) -> f64 {
    (bits(seed, position) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors publish with Random123 (`kat_vectors`).
    #[test]
    fn known_answers() {
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        for (counter, key, answer) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ] {
            assert_eq!(philox(counter, key), answer);
        }
    }

    #[test]
    fn uniform_numbers_are_uniform() {
        let mut counts = [0f64; 20];
        let n = 100_000;
        for position in 0..n {
            let u = uniform(7, position);
            assert!((0.0..1.0).contains(&u));
            counts[(u * 20.0) as usize] += 1.0;
        }
        let expected = n as f64 / 20.0;
        let chi: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
        // 19 degrees of freedom: the 0.999 quantile.
        assert!(chi < 43.8, "{chi}");
        assert_ne!(uniform(7, 0), uniform(8, 0));
    }
}
