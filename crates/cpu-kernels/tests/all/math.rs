//! Every kernel on every instruction set against loops in f64.

use delft_cpu_kernels::isa::Isa;
use delft_cpu_kernels::math::*;
use formats::Pairing;
use formats::elementwise::{Binary, Unary};
use half::{bf16, f16};

unsafe extern "C" {
    // The C library's error function: Rust's standard library has none.
    safe fn erf(x: f64) -> f64;
}

/// Deterministic numbers in `-range..range`.
fn noise(n: usize, range: f32, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0) * range
        })
        .collect()
}

const WIDTHS: [usize; 12] = [1, 2, 3, 7, 8, 15, 16, 17, 64, 80, 129, 1024];

fn close(found: f32, expected: f64, relative: f64, absolute: f64, what: &str) {
    let error = (f64::from(found) - expected).abs();
    assert!(error <= relative * expected.abs() + absolute, "{what}: {found} for {expected}");
}

#[test]
fn unary_functions() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    type Reference = Box<dyn Fn(f64) -> f64>;
    let cases: Vec<(Unary, Reference, f32, f64, f64)> = vec![
        (Unary::Exp, Box::new(f64::exp), 87.0, 2.4e-7, 1e-45),
        (Unary::Sigmoid, Box::new(sigmoid), 80.0, 4e-7, 1e-45),
        (Unary::Silu, Box::new(move |x| x * sigmoid(x)), 80.0, 5e-7, 1e-44),
        (Unary::Tanh, Box::new(f64::tanh), 12.0, 5e-7, 1e-45),
        (Unary::Tanh, Box::new(f64::tanh), 0.3, 5e-7, 1e-45),
        (Unary::Relu, Box::new(|x| x.max(0.0)), 5.0, 0.0, 0.0),
        (Unary::Softplus, Box::new(|x| x.exp().ln_1p()), 80.0, 5e-7, 1e-45),
        (Unary::Square, Box::new(|x| x * x), 5.0, 1e-7, 0.0),
        (Unary::HardTanh, Box::new(|x| x.clamp(-1.0, 1.0)), 5.0, 0.0, 0.0),
        (
            Unary::GeluTanh,
            Box::new(move |x| {
                x * sigmoid(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x))
            }),
            6.0,
            // The exponent is as large as 27 at the end of the range: its rounding is multiplied by
            // that.
            4e-6,
            1e-45,
        ),
        (Unary::GeluErf, Box::new(|x| x / 2.0 * (1.0 + erf(x / 2f64.sqrt()))), 5.0, 3e-6, 1e-11),
    ];
    for &isa in Isa::available() {
        for (f, reference, range, relative, absolute) in &cases {
            for n in WIDTHS {
                let x = noise(n, *range, n as u64);
                let mut out = x.clone();
                map_in_place(isa, *f, &mut out);
                for i in 0..n {
                    close(
                        out[i],
                        reference(f64::from(x[i])),
                        *relative,
                        *absolute,
                        &format!("{isa} {f:?} {}", x[i]),
                    );
                }
            }
        }
    }
}

#[test]
fn functions_at_the_edges() {
    for &isa in Isa::available() {
        let x =
            [f32::NEG_INFINITY, -1000.0, -105.0, 0.0, 88.7, 89.0, 1000.0, f32::INFINITY, f32::NAN];
        let map = |f, x: &[f32; 9]| {
            let mut y = *x;
            map_in_place(isa, f, &mut y);
            y
        };
        let y = map(Unary::Exp, &x);
        assert_eq!(y[..4], [0.0, 0.0, 0.0, 1.0], "{isa}");
        assert!(y[4] > 3e38 && y[4].is_finite(), "{isa} {}", y[4]);
        assert!(y[5..8].iter().all(|&y| y == f32::INFINITY) && y[8].is_nan(), "{isa} {y:?}");
        // The least results are normal numbers.
        let y = map(Unary::Exp, &[-100.0, -87.34, -87.33, -87.3, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert!(y[..2] == [0.0, 0.0] && y[2].is_normal(), "{isa} {y:?}");
        close(y[3], f64::from(-87.3f32).exp(), 2.4e-7, 0.0, "exp(-87.3)");
        let y = map(Unary::Tanh, &x);
        assert!(y[0] == -1.0 && y[3] == 0.0 && y[7] == 1.0 && y[8].is_nan(), "{isa} {y:?}");
        let y = map(Unary::Silu, &x);
        assert!(y[1] == 0.0 && y[3] == 0.0 && y[6] == 1000.0 && y[8].is_nan(), "{isa} {y:?}");
        let y = map(Unary::GeluErf, &x);
        assert!(y[1] == 0.0 && y[3] == 0.0 && y[6] == 1000.0 && y[8].is_nan(), "{isa} {y:?}");
    }
}

#[test]
fn binary_functions() {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let gelu = |x: f64| x / 2.0 * (1.0 + erf(x / 2f64.sqrt()));
    let gelu_tanh = |x: f64| {
        x / (1.0 + (-2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).exp())
    };
    for &isa in Isa::available() {
        for n in WIDTHS {
            let (x, y) = (noise(n, 4.0, 1), noise(n, 3.0, 2));
            type Reference<'a> = &'a dyn Fn(f64, f64) -> f64;
            let check = |out: Vec<f32>, reference: Reference<'_>, what: String| {
                for i in 0..n {
                    close(out[i], reference(x[i].into(), y[i].into()), 3e-6, 5e-7, &what);
                }
            };
            let sums: [(Binary, Reference<'_>); 5] = [
                (Binary::Add, &|x, y| x + y),
                (Binary::Sub, &|x, y| x - y),
                (Binary::Mul, &|x, y| x * y),
                (Binary::Max, &|x, y| x.max(y)),
                (Binary::Min, &|x, y| x.min(y)),
            ];
            assert_eq!(sums.len(), Binary::ALL.len());
            for (f, reference) in sums {
                let mut out = x.clone();
                zip_in_place(isa, f, &mut out, &y);
                check(out, reference, format!("{isa} {f:?}"));
            }
            let gates: [(Unary, Reference<'_>); 3] = [
                (Unary::Silu, &|x, y| silu(x) * y),
                (Unary::GeluTanh, &|x, y| gelu_tanh(x) * y),
                (Unary::GeluErf, &|x, y| gelu(x) * y),
            ];
            for (f, reference) in gates {
                let mut out = x.clone();
                gate_in_place(isa, f, &mut out, &y);
                check(out, reference, format!("{isa} {f:?} gate"));
            }
            let mut out = x.clone();
            scale_in_place(isa, 0.3, &mut out);
            check(out, &|x, _| x * f64::from(0.3f32), format!("{isa} scale"));
        }
    }
}

#[test]
fn rms_norm_of_rows_and_heads() {
    for &isa in Isa::available() {
        for width in WIDTHS {
            for rows in [0, 1, 3] {
                let (x, weight, eps) = (noise(rows * width, 2.0, 3), noise(width, 1.5, 4), 1e-6f32);
                let mut out = vec![0.0; x.len()];
                rms_norm(isa, &x, &weight, eps, &mut out);
                let mut same = x.clone();
                rms_norm_in_place(isa, &mut same, &weight, eps);
                assert_eq!(out, same);
                for (row, out) in x.chunks(width).zip(out.chunks(width)) {
                    let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
                    let scale = 1.0 / (squares / width as f64 + f64::from(eps)).sqrt();
                    for i in 0..width {
                        close(
                            out[i],
                            f64::from(row[i]) * scale * f64::from(weight[i]),
                            1e-6,
                            0.0,
                            "rms_norm",
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn layer_norm_of_rows_far_from_zero() {
    for &isa in Isa::available() {
        for width in WIDTHS {
            for biased in [false, true] {
                let x: Vec<f32> = noise(3 * width, 0.5, 3).iter().map(|x| x + 8.0).collect();
                let (weight, bias) = (noise(width, 1.5, 4), noise(width, 1.0, 5));
                let bias = biased.then_some(&bias[..]);
                let mut out = x.clone();
                layer_norm_in_place(isa, &mut out, &weight, bias, 1e-5);
                for (row, out) in x.chunks(width).zip(out.chunks(width)) {
                    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / width as f64;
                    let square = |x: &f32| (f64::from(*x) - mean).powi(2);
                    let variance = row.iter().map(square).sum::<f64>() / width as f64;
                    for i in 0..width {
                        let deviation = (f64::from(row[i]) - mean) / (variance + 1e-5).sqrt();
                        let shift = bias.map_or(0.0, |bias| f64::from(bias[i]));
                        let expected = deviation * f64::from(weight[i]) + shift;
                        close(out[i], expected, 1e-5, 2e-5, "layer_norm");
                    }
                }
            }
        }
    }
}

#[test]
fn softmax_max_and_argmax() {
    for &isa in Isa::available() {
        for width in WIDTHS {
            let mut x = noise(3 * width, 20.0, 5);
            x[width - 1] = f32::NEG_INFINITY;
            if width == 1 {
                x[0] = 0.0;
            }
            let before = x.clone();
            softmax(isa, &mut x, width);
            for (row, before) in x.chunks(width).zip(before.chunks(width)) {
                let top = before.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(max(isa, before), top);
                assert_eq!(argmax(isa, before), before.iter().position(|&x| x == top).unwrap());
                let total: f64 = before.iter().map(|&x| f64::from(x - top).exp()).sum();
                for i in 0..width {
                    close(row[i], f64::from(before[i] - top).exp() / total, 1e-6, 1e-44, "softmax");
                }
            }
        }
        let ties = [1.0, f32::NAN, 5.0, 2.0, 5.0, f32::NAN, 5.0];
        assert_eq!(argmax(isa, &ties), 2);
        let long: Vec<f32> = ties.iter().copied().cycle().take(700).collect();
        assert_eq!((argmax(isa, &long), max(isa, &long)), (2, 5.0));
        assert_eq!(
            (argmax(isa, &[f32::NAN; 40]), max(isa, &[f32::NAN; 40])),
            (0, f32::NEG_INFINITY)
        );
        assert_eq!((argmax(isa, &[]), max(isa, &[])), (0, f32::NEG_INFINITY));
        let mut late = vec![f32::NEG_INFINITY; 1000];
        late[999] = -3.0;
        assert_eq!(argmax(isa, &late), 999);
    }
}

#[test]
fn rope_of_both_pairings() {
    for &isa in Isa::available() {
        for (head_dim, rotary) in
            [(12, 12), (12, 4), (64, 64), (64, 32), (80, 80), (96, 70), (128, 128), (8, 0)]
        {
            let frequencies: Vec<f32> = (0..rotary / 2)
                .map(|i| 10_000f64.powf(-2.0 * i as f64 / rotary as f64) as f32)
                .collect();
            let angle = |f: &f32| f64::from(1234.0 * f);
            let cos: Vec<f32> = frequencies.iter().map(|f| angle(f).cos() as f32).collect();
            let sin: Vec<f32> = frequencies.iter().map(|f| angle(f).sin() as f32).collect();
            for pairing in [Pairing::Half, Pairing::Adjacent] {
                let before = noise(3 * head_dim, 1.0, 6);
                let mut x = before.clone();
                rope(isa, &mut x, head_dim, &cos, &sin, pairing);
                for (head, before) in x.chunks(head_dim).zip(before.chunks(head_dim)) {
                    assert_eq!(head[rotary..], before[rotary..]);
                    for i in 0..rotary / 2 {
                        let (a, b) = if pairing == Pairing::Half {
                            (i, rotary / 2 + i)
                        } else {
                            (2 * i, 2 * i + 1)
                        };
                        let (s, c) = angle(&frequencies[i]).sin_cos();
                        let (x, y) = (f64::from(before[a]), f64::from(before[b]));
                        close(head[a], x * c - y * s, 0.0, 2e-7, "rope");
                        close(head[b], y * c + x * s, 0.0, 2e-7, "rope");
                    }
                }
            }
        }
    }
}

#[test]
fn conversions_round_to_nearest_even() {
    let mut x = noise(1000, 3.0, 7);
    x.extend([
        0.0,
        -0.0,
        1e-7,
        6e-8,
        3e-8,
        65504.0,
        65519.0,
        65520.0,
        1e30,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ]);
    // Halfway cases: 1 + 2^-11 and 1 + 3 * 2^-11 in f16, 1 + 2^-8 and 1 + 3 * 2^-8 in bf16.
    x.extend([1.000_488_3, 1.001_464_8, 1.003_906_3, 1.011_718_8]);
    for &isa in Isa::available() {
        let (mut half, mut brain) = (vec![f16::ZERO; x.len()], vec![bf16::ZERO; x.len()]);
        to_f16(isa, &x, &mut half);
        to_bf16(isa, &x, &mut brain);
        let (mut wide_half, mut wide_brain) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        from_f16(isa, &half, &mut wide_half);
        from_bf16(isa, &brain, &mut wide_brain);
        for i in 0..x.len() {
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same(wide_half[i], f16::from_f32(x[i]).to_f32()), "{isa} f16 of {}", x[i]);
            assert!(same(wide_brain[i], bf16::from_f32(x[i]).to_f32()), "{isa} bf16 of {}", x[i]);
        }
    }
}
