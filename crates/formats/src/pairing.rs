//! How files lay out heads for their rotation.

/// Which elements of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Pairing {
    /// `(i, i + n)`, n pairs.
    Half,
    /// `(2i, 2i + 1)`.
    Adjacent,
}
