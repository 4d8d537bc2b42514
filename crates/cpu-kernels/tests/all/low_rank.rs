use delft_cpu_kernels::isa::Isa;
use delft_cpu_kernels::low_rank::*;
use formats::DType;

fn noise(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        // Seven bits of a mantissa: bf16 holds them.
        (state >> 25) as f32 / 64.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Eleven rows are whole tiles of each instruction set and a remainder; sizes are with and without
/// a part of a vector at the end.
#[test]
fn every_share_and_every_company_gives_a_row_the_same_bits_and_the_sum() {
    let cases = [
        ([4, 64, 64], false),
        ([16, 129, 75], true),
        ([3, 31, 40], false),
        ([21, 300, 291], false),
    ];
    const ROWS: usize = 11;
    for ([rank, input, output], gained) in cases {
        let (down, up) = (noise(1, rank * input), noise(2, rank * output));
        let gains = [noise(3, output), noise(4, output)];
        let gain = gained.then_some([&gains[0][..], &gains[1][..]]);
        let [x, base, residual] =
            [(5, input), (6, output), (7, output)].map(|(seed, n)| noise(seed, ROWS * n));
        let mut wanted: Vec<f64> = base.iter().map(|v| f64::from(*v)).collect();
        for (at, wanted) in wanted.iter_mut().enumerate() {
            let (row, o) = (at / output, at % output);
            for r in 0..rank {
                let dot = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
                let x = &x[row * input..][..input];
                let low: f64 = down[r * input..][..input].iter().zip(x).map(dot).sum();
                *wanted += 0.5 * f64::from(up[o * rank + r]) * low;
            }
            if gained {
                let residual = f64::from(residual[at]);
                *wanted = residual
                    + f64::from(gains[0][o]) * (*wanted - residual)
                    + f64::from(gains[1][o]);
            }
        }
        for &isa in Isa::available() {
            let mut first: Option<Vec<f32>> = None;
            for element in [DType::F32, DType::BF16] {
                let sizes = [rank, input, output];
                let factors = Factors::new(sizes, &down, &up, 0.5, gain, element).unwrap();
                for (together, cut) in [(ROWS, 0), (ROWS, rank / 2), (1, 0), (3, rank / 2)] {
                    // A row of `t` is longer than the rank, as it is beside greater adapters.
                    let (stride, mut y) = (rank + 5, base.clone());
                    let mut t = vec![f32::NAN; ROWS * stride];
                    for row in (0..ROWS).step_by(together) {
                        let rows = together.min(ROWS - row);
                        let x = &x[row * input..][..rows * input];
                        for ranks in [0..cut, cut..rank] {
                            let start = t[row * stride + ranks.start..].as_mut_ptr();
                            // SAFETY: `t` has those rows.
                            unsafe { factors.down(isa, x, ranks, OutRows { start, stride }) };
                        }
                        let t = &t[row * stride..][..rows * stride];
                        let cut = (cut * output / rank) & !15;
                        for columns in [0..cut, cut..output] {
                            let at = row * output + columns.start;
                            let out = OutRows { start: y[at..].as_mut_ptr(), stride: output };
                            let residual = Some(residual[at..].as_ptr());
                            // SAFETY: `y` and the residual have those rows.
                            unsafe { factors.up(isa, (t, stride), columns, residual, out) };
                        }
                    }
                    for (y, wanted) in y.iter().zip(&wanted) {
                        assert!((f64::from(*y) - wanted).abs() < 1e-3, "{y} {wanted}");
                    }
                    assert!(*first.get_or_insert_with(|| y.clone()) == y, "{isa:?}");
                }
            }
        }
    }
}

#[test]
fn factors_of_other_sizes_are_refused() {
    let new = |down: &[f32], up: &[f32]| Factors::new([2, 3, 4], down, up, 2.0, None, DType::F32);
    assert!(new(&[0.0; 6], &[0.0; 8]).is_ok());
    assert!(new(&[0.0; 5], &[0.0; 8]).is_err() && new(&[0.0; 6], &[0.0; 9]).is_err());
    let rows = new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[0.0; 8]).unwrap();
    let mut t = [0.0; 2];
    rows.pick(1, &mut t);
    assert_eq!(t, [6.0, 8.0]);
}
