//! Eight numbers at a time, for the search for scales: with AVX2 where the processor has it, else in
//! plain Rust. Both do the same arithmetic, so that files have the same bytes on every machine.

/// Eight f32.
pub(crate) trait Lanes: Copy {
    /// Those of an array.
    fn new(of: [f32; 8]) -> Self;

    /// As an array.
    fn array(self) -> [f32; 8];

    /// `self + other`.
    fn add(self, other: Self) -> Self;

    /// `self - other`.
    fn sub(self, other: Self) -> Self;

    /// `self * other`.
    fn mul(self, other: Self) -> Self;

    /// `self / other`.
    fn div(self, other: Self) -> Self;

    /// `self` where it is greater than `least`, else that: also in place of a NaN.
    fn at_least(self, least: Self) -> Self;

    /// `self` where it is less than `most`, else that.
    fn at_most(self, most: Self) -> Self;

    /// `yes` where `self < other`, else `no`.
    fn less(self, other: Self, yes: Self, no: Self) -> Self;

    /// The same number eight times.
    #[inline(always)]
    fn all(x: f32) -> Self {
        Self::new([x; 8])
    }

    /// Without the sign.
    #[inline(always)]
    fn abs(self) -> Self {
        self.at_least(Self::all(0.0).sub(self))
    }

    /// Nearest integers inside `low..=high`; a NaN gives `low`.
    #[inline(always)]
    fn nearest(self, low: f32, high: f32) -> Self {
        // Adding 1.5 * 2^23 leaves no fraction bits: two additions round to even.
        let round = Self::all(12_582_912.0);
        self.at_least(Self::all(low)).at_most(Self::all(high)).add(round).sub(round)
    }

    /// `1 / self`, or 0 where that has no finite value.
    #[inline(always)]
    fn reciprocal(self) -> Self {
        let inverse = Self::all(1.0).div(self);
        inverse.abs().less(Self::all(f32::INFINITY), inverse, Self::all(0.0))
    }

    /// The sum of all, one after the other.
    #[inline(always)]
    fn total(self) -> f32 {
        self.array().iter().sum()
    }
}

/// In plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; 8]);

impl Plain {
    #[inline(always)]
    fn with(self, other: Plain, of: impl Fn(f32, f32) -> f32) -> Plain {
        let mut result = self;
        for (x, other) in result.0.iter_mut().zip(other.0) {
            *x = of(*x, other);
        }
        result
    }
}

impl Lanes for Plain {
    #[inline(always)]
    fn new(of: [f32; 8]) -> Self {
        Plain(of)
    }

    #[inline(always)]
    fn array(self) -> [f32; 8] {
        self.0
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.with(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.with(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.with(other, |a, b| a / b)
    }

    #[inline(always)]
    fn at_least(self, least: Self) -> Self {
        self.with(least, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn at_most(self, most: Self) -> Self {
        self.with(most, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn less(self, other: Self, yes: Self, no: Self) -> Self {
        let mut result = no;
        for (i, to) in result.0.iter_mut().enumerate() {
            *to = if self.0[i] < other.0[i] { yes.0[i] } else { *to };
        }
        result
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::Lanes;
    use std::arch::x86_64::*;

    /// By AVX2. Only functions that are compiled for it make one.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    /// A method by an intrinsic.
    macro_rules! by {
        ($($name:ident: $intrinsic:ident),*) => {$(
            #[inline(always)]
            fn $name(self, other: Self) -> Self {
                // SAFETY: who made `self` has AVX2.
                Avx2(unsafe { $intrinsic(self.0, other.0) })
            }
        )*};
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn new(of: [f32; 8]) -> Self {
            // SAFETY: eight floats; the caller is compiled for AVX2 (see [`Avx2`]).
            Avx2(unsafe { _mm256_loadu_ps(of.as_ptr()) })
        }

        #[inline(always)]
        fn array(self) -> [f32; 8] {
            let mut to = [0.0; 8];
            // SAFETY: room for eight floats; who made `self` has AVX2.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), self.0) };
            to
        }

        by! {
            add: _mm256_add_ps, sub: _mm256_sub_ps, mul: _mm256_mul_ps, div: _mm256_div_ps,
            at_least: _mm256_max_ps, at_most: _mm256_min_ps
        }

        #[inline(always)]
        fn less(self, other: Self, yes: Self, no: Self) -> Self {
            // SAFETY: who made `self` has AVX2.
            unsafe {
                let less = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0);
                Avx2(_mm256_blendv_ps(no.0, yes.0, less))
            }
        }
    }
}

/// Calls a function that is generic in [`Lanes`] with the widest that the processor has. It and all
/// that it calls are `#[inline(always)]`, so that they are compiled for AVX2.
macro_rules! widest {
    ($body:ident($($argument:ident: $type:ty),*) -> $result:ty) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            fn wide($($argument: $type),*) -> $result {
                $body::<$crate::quant::lanes::Avx2>($($argument),*)
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has what it was compiled for.
                unsafe { wide($($argument),*) }
            } else {
                $body::<$crate::quant::lanes::Plain>($($argument),*)
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            $body::<$crate::quant::lanes::Plain>($($argument),*)
        }
    }};
}
pub(crate) use widest;

#[cfg(test)]
mod tests {
    use super::*;

    /// Signs, zeros of both, infinities, a NaN.
    const ODD: [f32; 8] = [0.0, -0.0, 1.5, -2.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3e-39];

    #[inline(always)]
    fn everything<V: Lanes>(turn: usize) -> Vec<[u32; 8]> {
        let other: [f32; 8] = std::array::from_fn(|i| ODD[(i + turn) % 8]);
        let (a, b) = (V::new(ODD), V::new(other));
        let all = [
            a.add(b),
            a.sub(b),
            a.mul(b),
            a.div(b),
            a.at_least(b),
            a.at_most(b),
            a.less(b, V::all(7.0), b),
            a.abs(),
            a.reciprocal(),
            a.nearest(-2.0, 1.0),
        ];
        // One NaN is like another.
        let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
        all.iter().map(|lanes| lanes.array().map(bits)).collect()
    }

    #[test]
    fn both_do_the_same_arithmetic() {
        for turn in 0..8 {
            let here = widest!(everything(turn: usize) -> Vec<[u32; 8]>);
            assert_eq!(here, everything::<Plain>(turn), "{turn}");
        }
    }
}
