//! The dot product of references.

/// `sum_i a[i] b[i]`, each product and the sum in f64, in order.
///
/// References of products call it for every output, so it lives in a crate that tests optimise.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
