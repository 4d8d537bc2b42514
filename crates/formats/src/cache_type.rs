//! What keys and values are cached as.

/// The element type of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CacheType {
    /// Two bytes: what every peer keeps.
    #[default]
    F16,
    /// Two bytes, of f32's range.
    BF16,
    /// Four bytes: for comparing with references.
    F32,
    /// ggml's 8-bit blocks of 32 elements, 34 bytes each. On GPUs.
    Q8_0,
}

impl CacheType {
    /// Bytes that `elements` of a head take.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            CacheType::F16 | CacheType::BF16 => 2 * elements,
            CacheType::F32 => 4 * elements,
            CacheType::Q8_0 => 34 * elements.div_ceil(32),
        }
    }
}
