//! Operations: the mathematics, shape rule and reference of each, one file per operation.
//!
//! An [`Op`] is data: what to compute, with its constants, but without operands or a device. A `Program` gives it
//! operands; a device gives it a kernel. The `reference` functions are slow, obvious loops in f64: every fast
//! implementation is compared with them.

pub mod add;
pub mod add_norm;
pub mod all_reduce;
pub mod argmax;
pub mod attention;
pub mod embed;
pub mod gate_up;
pub mod gelu;
pub mod gelu_mul;
pub mod kernels;
pub mod kv_write;
pub mod layer_norm;
pub mod linear;
pub mod linear_add;
pub mod math;
pub mod moe;
pub mod mul;
pub mod packed;
pub mod project;
pub mod rms_norm;
pub mod rope;
pub mod rope_write;
pub mod sample;
pub mod scale;
pub mod select;
pub mod silu;
pub mod silu_mul;
pub mod softmax;
pub mod sweep;
pub mod top_k;

mod trial;

use formats::{Error, Result};

pub use attention::Attention;
pub use rope::Rope;
pub use rope_write::RopeWrite;

/// How many rows a value has, known only when a Program is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rows {
    /// One row for every token of the step.
    Tokens,
    /// One row for every token whose logits were asked for.
    Outputs,
}

/// The shape of an activation: `[rows, width]`, row-major f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Symbolic number of rows.
    pub rows: Rows,
    /// Elements per row.
    pub width: usize,
}

impl Shape {
    /// `[tokens, width]`.
    pub fn tokens(width: usize) -> Self {
        Shape { rows: Rows::Tokens, width }
    }
}

/// The closed set of operations. Operands are listed as `inputs; weights -> outputs`.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// `; table[vocab, width] -> x`: rows of the embedding table, by token id. See [`embed`].
    Embed,
    /// `x; weight[group] -> y`. See [`rms_norm`].
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `x; weight[out, in], (bias[out]) -> y`. See [`linear`].
    Linear,
    /// `a, b -> a + b`. See [`add`].
    Add,
    /// `a, b -> a * b`. See [`mul`].
    Mul,
    /// `x -> x * sigmoid(x)`. See [`silu`].
    Silu,
    /// `x -> rotated x`. See [`rope`].
    Rope(Rope),
    /// `k, v ->`: appends to the layer's cache. See [`attention`].
    KvWrite {
        /// Index of the cache layer.
        layer: usize,
    },
    /// `q -> y`: reads the layer's cache. See [`attention`].
    Attention(Attention),
    /// `x[tokens] -> x[outputs]`. See [`select`].
    Select,
    /// `x; (norm), weight, (bias), weight, (bias).. -> y, y..`: a norm and the projections that share it. See [`project`].
    Project(project::Project),
    /// `x; (norm), gate, up -> y`: `silu(gate(x)) * up(x)`. See [`gate_up`].
    GateUp {
        /// The norm in front, if it was fused.
        norm: Option<f32>,
    },
    /// `x, residual; weight, (bias) -> residual + linear(x)`. See [`linear_add`].
    LinearAdd,
    /// `x -> sum of x over all ranks`. See [`all_reduce`].
    AllReduce,
    /// `q, k, v; (q_norm), (k_norm) -> q`: per-head norms, rotation, cache write. See [`rope_write`].
    RopeWrite(RopeWrite),
}

impl Op {
    /// Its name in the text form and in profiles.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed => "embed",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Linear => "linear",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Silu => "silu",
            Op::Rope(_) => "rope",
            Op::KvWrite { .. } => "kv_write",
            Op::Attention(_) => "attention",
            Op::Select => "select",
            Op::Project(_) => "project",
            Op::GateUp { .. } => "gate_up",
            Op::LinearAdd => "linear_add",
            Op::AllReduce => "all_reduce",
            Op::RopeWrite(_) => "rope_write",
        }
    }

    /// The shapes of the outputs, or why these operands do not fit.
    pub fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        match self {
            Op::Embed => embed::shape(inputs, weights),
            Op::RmsNorm { .. } => rms_norm::shape(inputs, weights),
            Op::Linear => linear::shape(inputs, weights),
            Op::Add | Op::Mul => add::shape(self.name(), inputs, weights),
            Op::Silu => silu::shape(inputs, weights),
            Op::Rope(rope) => rope.shape(inputs, weights),
            Op::KvWrite { .. } => attention::write_shape(inputs, weights),
            Op::Attention(attention) => attention.shape(inputs, weights),
            Op::Select => select::shape(inputs, weights),
            Op::Project(project) => project.shape(inputs, weights),
            Op::GateUp { norm } => gate_up::shape(*norm, inputs, weights),
            Op::LinearAdd => linear_add::shape(inputs, weights),
            Op::AllReduce => all_reduce::shape(inputs, weights),
            Op::RopeWrite(write) => write.shape(inputs, weights),
        }
    }

    /// The cache layer this operation writes or reads.
    pub fn layer(&self) -> Option<usize> {
        match self {
            Op::KvWrite { layer } => Some(*layer),
            Op::Attention(attention) => Some(attention.layer),
            Op::RopeWrite(write) => Some(write.layer),
            _ => None,
        }
    }
}

/// Operand counts, or an error that names them.
pub(crate) fn arity(
    name: &str,
    inputs: &[Shape],
    wanted: usize,
    weights: &[&[usize]],
    allowed: &[usize],
) -> Result<()> {
    if inputs.len() != wanted {
        return Err(Error::new(name, format!("{wanted} inputs"), inputs.len()));
    }
    if !allowed.contains(&weights.len()) {
        return Err(Error::new(name, format!("{allowed:?} weights"), weights.len()));
    }
    Ok(())
}

/// Checks one shape, naming the operand.
pub(crate) fn expect(name: &str, operand: &str, found: &[usize], expected: &[usize]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::new(format!("{name}: {operand}"), format!("{expected:?}"), format!("{found:?}")))
}

#[cfg(test)]
pub(crate) mod test {
    /// Seeded values in -1..1 for tables of cases.
    pub(crate) fn noise(seed: u64, n: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        (0..n)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }
}
