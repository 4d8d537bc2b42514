//! Elementwise product of equal shapes. The shape rule is that of [`crate::add`].

/// `y = a * b`.
pub fn reference(a: &[f32], b: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = a[i] * b[i];
    }
}
