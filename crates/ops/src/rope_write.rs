//! What happens to q, k and v between projection and attention, fused: per-head RMS norms of q and k (where the
//! model has them), rotation of both, and the cache write of k and v. Returns the rotated q.

use crate::attention::write_shape;
use crate::rope::Rope;
use crate::{Shape, arity, expect};
use formats::Result;

/// The constants of the fused step.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeWrite {
    /// Index of the cache layer.
    pub layer: usize,
    /// The rotation of q and k.
    pub rope: Rope,
    /// eps of the q norm, if there is one.
    pub q_norm: Option<f32>,
    /// eps of the k norm, if there is one.
    pub k_norm: Option<f32>,
}

impl RopeWrite {
    /// `q, k, v; (q_norm), (k_norm) -> q`.
    pub fn shape(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let norms = usize::from(self.q_norm.is_some()) + usize::from(self.k_norm.is_some());
        arity("rope_write", inputs, 3, weights, &[norms])?;
        for weight in weights {
            expect("rope_write", "norm weight", weight, &[self.rope.head_dim])?;
        }
        self.rope.check(inputs[0].width)?;
        self.rope.check(inputs[1].width)?;
        write_shape(&inputs[1..], &[])?;
        Ok(vec![inputs[0]])
    }
}
