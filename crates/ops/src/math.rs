//! Functions of f32 that no target has as an instruction, or not accurately enough, written with
//! those it has.
//!
//! Each says where its approximation comes from and how far it is off; the tests measure that in
//! f32.

use tile::dsl::*;

/// `a[0] + x (a[1] + x (a[2] + ..))`, by Horner's rule.
#[track_caller]
fn polynomial(x: Val<f32>, coefficients: &[f32]) -> Val<f32> {
    let (last, rest) = coefficients.split_last().expect("a polynomial has a coefficient");
    rest.iter().rev().fold(last.val(), |sum, &a| sum.fma(x, a))
}

/// `1 / x` for `x` from 1 on, within 4 units in the last place: the square of `rsqrt`. That is two
/// instructions, where a correctly rounded quotient takes ten, and enough to keep 16-bit
/// element-wise kernels from the memory's rate.
#[track_caller]
fn reciprocal(x: Val<f32>) -> Val<f32> {
    let root = x.rsqrt();
    root * root
}

/// `1 / (1 + exp(-x))`.
#[track_caller]
pub fn sigmoid(x: Val<f32>) -> Val<f32> {
    reciprocal((-x).exp() + 1.0)
}

/// `x / (1 + exp(-x))`.
#[track_caller]
pub fn silu(x: Val<f32>) -> Val<f32> {
    x * sigmoid(x)
}

/// `ln(1 + exp(x))`, within a few parts in 10^6: as `max(x, 0) + ln(1 + e)`, `e = exp(-|x|)`, and
/// for small `e`, whose sum with 1 would lose it, by the Maclaurin series (DLMF 4.6.1) to `e^6`,
/// whose next term is below 1e-8 of the first.
#[track_caller]
pub fn softplus(x: Val<f32>) -> Val<f32> {
    let e = (-x.abs()).exp();
    let series = [1.0, -1.0 / 2.0, 1.0 / 3.0, -1.0 / 4.0, 1.0 / 5.0, -1.0 / 6.0];
    let small = e * polynomial(e, &series);
    x.max(0.0) + select(Order::lt(e, 0.0625), small, (e + 1.0).ln())
}

/// `x / 2 (1 + tanh(u))`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`: the approximation of Hendrycks &
/// Gimpel 2016.
///
/// Written as `x / (1 + exp(-2 u))`, which is the same and keeps its relative accuracy where the
/// sum would cancel.
#[track_caller]
pub fn gelu_tanh(x: Val<f32>) -> Val<f32> {
    let twice = (x * x * x).fma(0.044_715, x) * (8.0 / std::f32::consts::PI).sqrt();
    x * reciprocal((-twice).exp() + 1.0)
}

/// `x` times the probability that a normal variate is below it, `erfc(-x / sqrt(2)) / 2`.
#[track_caller]
pub fn gelu_erf(x: Val<f32>) -> Val<f32> {
    let z = x * std::f32::consts::FRAC_1_SQRT_2;
    let tail = erfc_far(z.abs());
    let far = select(Order::lt(x, 0.0), tail, 2.0 - tail);
    x * 0.5 * select(Order::lt(z.abs(), 1.0), erf_near(z) + 1.0, far)
}

/// The error function, within 2e-7.
#[track_caller]
pub fn erf(x: Val<f32>) -> Val<f32> {
    let far = 1.0 - erfc_far(x.abs());
    let far = select(Order::lt(x, 0.0), -far, far);
    select(Order::lt(x.abs(), 1.0), erf_near(x), far)
}

/// `erf(x)` for `|x|` up to 1: the Maclaurin series (DLMF 7.6.1) to `x^19`, whose next term is
/// below 1.5e-8.
#[track_caller]
fn erf_near(x: Val<f32>) -> Val<f32> {
    let mut factorial = 1.0;
    let mut term = |n: i32| {
        factorial *= f64::from(n.max(1));
        let sign = if n % 2 == 0 { 1.0 } else { -1.0 };
        (sign * std::f64::consts::FRAC_2_SQRT_PI / (factorial * f64::from(2 * n + 1))) as f32
    };
    let series: Vec<f32> = (0..10).map(&mut term).collect();
    x * polynomial(x * x, &series)
}

/// `erfc(x) = 1 - erf(x)` for `x` from 1 on, within a few parts in 10^7 times `1 + x^2`, the
/// exponent's rounding.
///
/// The form `t P(t) exp(-x^2)`, `t = 1 / (1 + p x)`, is Hastings' (Abramowitz & Stegun 7.1.26). `P`
/// interpolates it with `p = 0.4` at the Chebyshev nodes of the `t` of 1 to 9, so that the error is
/// relative: theirs is absolute.
#[track_caller]
fn erfc_far(x: Val<f32>) -> Val<f32> {
    let t = reciprocal(x.fma(0.4, 1.0));
    let p = [
        0.225_611_5,
        0.226_929_74,
        0.197_323_74,
        0.217_677_67,
        0.000_264_912_64,
        0.250_760_82,
        -0.118_855_12,
    ];
    t * polynomial(t, &p) * (-(x * x)).exp()
}

/// Sine and cosine of `x` radians, within 1.5e-7 for `|x|` up to 4 million.
///
/// `x - n pi/2` with `n` the nearest whole number takes two steps (Cody & Waite 1980): the first
/// fused product is exact, since the difference is a multiple of 2^-23 below 1, and the second adds
/// what `pi/2` lacks in f32. Then Taylor's series for the quadrant. Every target gives the same
/// result, whatever its own sine does with large arguments.
#[track_caller]
pub fn sin_cos(x: Val<f32>) -> (Val<f32>, Val<f32>) {
    const HIGH: f32 = std::f32::consts::FRAC_PI_2;
    let low = (std::f64::consts::FRAC_PI_2 - f64::from(HIGH)) as f32;
    let turns = (x * std::f32::consts::FRAC_2_PI).round();
    let r = turns.fma(-low, turns.fma(-HIGH, x));
    let square = r * r;
    let s = [-1.0 / 6.0, 1.0 / 120.0, -1.0 / 5_040.0, 1.0 / 362_880.0];
    let c = [-1.0 / 2.0, 1.0 / 24.0, -1.0 / 720.0, 1.0 / 40_320.0, -1.0 / 3_628_800.0];
    let sine = (r * square).fma(polynomial(square, &s), r);
    let cosine = square.fma(polynomial(square, &c), 1.0);
    let quadrant = turns.i32();
    let odd = Order::ne(quadrant & 1, 0);
    let negative = |bit: Val<i32>, v: Val<f32>| select(Order::ne(bit & 2, 0), -v, v);
    (
        negative(quadrant, select(odd, cosine, sine)),
        negative(quadrant + 1, select(odd, sine, cosine)),
    )
}

/// The nearest whole number of `x`, which is below 2^22, ties away from zero: what C's `roundf` and
/// ggml's quantisers do.
///
/// The fraction is cut off `x` plus the largest number below a half: a half itself would carry the
/// number just below one half to one, while the sum of a tie and that number rounds up to the next
/// whole one.
#[track_caller]
pub fn round_away(x: Val<f32>) -> Val<i32> {
    let half = 0.5f32.next_down().to_bits();
    let toward = ((x.bits::<u32>() & 0x8000_0000) | half).bits::<f32>();
    (x + toward).cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use formats::elementwise::erf as exact_erf;
    use tile::case::Buffer;
    use tile::launch::{Mode, Numbers};

    #[kernel]
    fn apply(x: In<f32>, y: Out<f32>, n: Arg<u32>, f: fn(Val<f32>) -> Val<f32>) {
        launch(Mode::Element, [dim("n").ceil_div(256u32), fixed(1), fixed(1)], 256);
        let i = group_id() * 256u32 + thread_id();
        if i < n {
            y[i] = f(x[i]);
        }
    }

    /// The results of the kernel language for each of `xs`.
    fn evaluate(f: fn(Val<f32>) -> Val<f32>, xs: &[f32]) -> Vec<f64> {
        let numbers = Numbers::new().with("n", xs.len() as u32);
        let mut buffers = [Buffer::floats(Scalar::F32, xs), Buffer::zeros(Scalar::F32, xs.len())];
        tile::interp::run(&apply(f).record(), &numbers, &mut buffers).unwrap();
        buffers[1].to_f64()
    }

    fn worst(f: fn(Val<f32>) -> Val<f32>, exact: fn(f64) -> f64, xs: &[f32]) -> f64 {
        let off = |(y, &x): (f64, &f32)| (y - exact(f64::from(x))).abs();
        evaluate(f, xs).into_iter().zip(xs).map(off).fold(0.0, f64::max)
    }

    #[test]
    fn erf_agrees_with_published_values() {
        // Abramowitz & Stegun, table 7.1.
        let table = [
            (0.0, 0.0),
            (0.1, 0.112_462_916_0),
            (0.5, 0.520_499_877_8),
            (1.0, 0.842_700_792_9),
            (1.5, 0.966_105_146_5),
            (2.0, 0.995_322_265_0),
        ];
        for (x, want) in table {
            assert!((exact_erf(x) - want).abs() < 6e-11, "{x}");
            assert!((exact_erf(-x) + want).abs() < 6e-11, "{x}");
        }
        let xs: Vec<f32> = (-24_000..=24_000).map(|i| i as f32 * 2.5e-4).collect();
        let off = worst(erf, exact_erf, &xs);
        println!("erf: {} values, within {off:.2e}", xs.len());
        assert!(off <= 2e-7, "{off}");
    }

    #[test]
    fn gelu_keeps_its_relative_accuracy_in_the_tail() {
        let xs: Vec<f32> = (-900..=900).map(|i| i as f32 * 0.01).collect();
        // P(X < x) in the tail by the continued fraction of DLMF 7.9.2; elsewhere from the error
        // function.
        let below = |x: f64| {
            let z = -x / 2f64.sqrt();
            if z < 2.0 {
                return 0.5 * (1.0 - exact_erf(z));
            }
            let fraction = (1..200).rev().fold(0.0, |b, k| 0.5 * f64::from(k) / (z + b));
            0.5 * (-z * z).exp() / (std::f64::consts::PI.sqrt() * (z + fraction))
        };
        let mut worst: f64 = 0.0;
        for (y, &x) in evaluate(gelu_erf, &xs).into_iter().zip(&xs) {
            let want = f64::from(x) * below(f64::from(x));
            worst = worst.max((y - want).abs() / want.abs().max(1e-30));
        }
        println!("gelu: relative error {worst:.1e} down to -9");
        assert!(worst <= 1e-5, "{worst}");
    }

    #[test]
    fn softplus_keeps_its_relative_accuracy() {
        let xs: Vec<f32> = (-8000..=8000).map(|i| i as f32 * 0.01).collect();
        let mut worst: f64 = 0.0;
        for (y, &x) in evaluate(softplus, &xs).into_iter().zip(&xs) {
            let want = f64::from(x).max(0.0) + (-f64::from(x).abs()).exp().ln_1p();
            worst = worst.max((y - want).abs() / want);
        }
        println!("softplus: relative error {worst:.1e}");
        assert!(worst <= 2e-6, "{worst}");
    }

    #[test]
    fn sines_hold_for_large_angles() {
        let mut xs: Vec<f32> = (-20_000..20_000).map(|i| i as f32 * 1e-3).collect();
        xs.extend((0..20_000).map(|i| (1u32 << 22).saturating_sub(i * 209) as f32 - 0.25));
        // Near multiples of pi/2 the reduced angle has the fewest bits.
        xs.extend((1..20_000).map(|i| (f64::from(i * 33) * std::f64::consts::FRAC_PI_2) as f32));
        for (f, exact) in [
            ((|x| sin_cos(x).0) as fn(Val<f32>) -> Val<f32>, f64::sin as fn(f64) -> f64),
            (|x| sin_cos(x).1, f64::cos),
        ] {
            let off = worst(f, exact, &xs);
            println!("sine or cosine: {} values, within {off:.2e}", xs.len());
            assert!(off <= 1.5e-7, "{off}");
        }
    }

    #[test]
    fn ties_round_away_from_zero() {
        let xs = [0.5, -0.5, 1.5, 2.5, -2.5, 0.499_999_97, -0.499_999_97, 126.5, 0.0, -3.2];
        let want = xs.map(|x: f32| f64::from(x.round()));
        assert_eq!(evaluate(|x| round_away(x).f32(), &xs), want);
    }
}
