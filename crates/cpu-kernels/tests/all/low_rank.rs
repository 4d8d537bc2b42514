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

#[test]
fn every_set_and_every_share_gives_the_same_bits_and_the_sum() {
    let cases = [
        ([4, 64, 64], false),
        ([16, 129, 75], true),
        ([3, 31, 40], false),
        ([21, 300, 291], false),
    ];
    for ([rank, input, output], gained) in cases {
        let (down, up) = (noise(1, rank * input), noise(2, rank * output));
        let gains = [noise(3, output), noise(4, output)];
        let gain = gained.then_some([&gains[0][..], &gains[1][..]]);
        let (x, base, residual) = (noise(5, input), noise(6, output), noise(7, output));
        let mut wanted: Vec<f64> = base.iter().map(|v| f64::from(*v)).collect();
        for (o, wanted) in wanted.iter_mut().enumerate() {
            for r in 0..rank {
                let dot = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
                let row = &down[r * input..][..input];
                let low: f64 = row.iter().zip(&x).map(dot).sum();
                *wanted += 0.5 * f64::from(up[o * rank + r]) * low;
            }
            if gained {
                let residual = f64::from(residual[o]);
                *wanted = residual
                    + f64::from(gains[0][o]) * (*wanted - residual)
                    + f64::from(gains[1][o]);
            }
        }
        let mut first: Option<Vec<f32>> = None;
        for element in [DType::F32, DType::BF16] {
            let sizes = [rank, input, output];
            let factors = Factors::new(sizes, &down, &up, 0.5, gain, element).unwrap();
            for &isa in Isa::available() {
                for cut in [0, rank / 2] {
                    let mut t = vec![0.0; rank];
                    factors.down(isa, &x, 0..cut, &mut t[..cut]);
                    factors.down(isa, &x, cut..rank, &mut t[cut..]);
                    let (mut y, cut) = (base.clone(), cut * output / rank);
                    for columns in [0..cut, cut..output] {
                        let (y, residual) = (&mut y[columns.clone()], &residual[columns.clone()]);
                        factors.up(isa, &t, columns, Some(residual), y);
                    }
                    for (y, wanted) in y.iter().zip(&wanted) {
                        assert!((f64::from(*y) - wanted).abs() < 1e-3, "{y} {wanted}");
                    }
                    assert_eq!(*first.get_or_insert_with(|| y.clone()), y, "{isa:?}");
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
    rows.pick(1, 0..2, &mut t);
    assert_eq!(t, [6.0, 8.0]);
}
