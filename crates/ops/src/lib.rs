//! Operations: the mathematics, shape rule and reference of each, one file per operation.
//!
//! An [`Op`] is data: what to compute, with its constants, but without operands or a device. A
//! `Program` gives it operands; a device gives it a kernel. The `reference` functions are slow,
//! obvious loops in f64: every fast implementation is compared with them.

// Without the rig nothing reaches the cases: they are checked, and no code is made of them.
#![cfg_attr(not(any(test, feature = "rig")), allow(dead_code))]

pub mod add_norm;
pub mod all_gather;
pub mod all_reduce;
pub mod argmax;
pub mod attention;
pub mod block_linear;
pub mod delta_net;
pub mod embed;
pub mod exchange;
pub mod experts;
pub mod gate_up;
pub mod gated;
pub mod gated_norm;
pub mod gaussian_top_k;
pub mod gradient;
pub mod group_limit;
pub mod indexer;
pub mod join_columns;
pub mod joined;
#[cfg(any(test, feature = "rig"))]
pub mod kernels;
pub mod kv_write;
pub mod layer_norm;
pub mod linear;
pub mod linear_add;
pub mod low_rank;
pub mod map;
pub mod match_rms;
pub mod math;
pub mod mix;
pub mod moe;
pub mod norm_add;
pub mod operation;
pub mod packed;
pub mod partition;
pub mod project;
pub mod rms_norm;
pub mod rope;
pub mod rope_write;
pub mod round_rows;
pub mod sample;
pub mod scale;
pub mod scale_columns;
pub mod scale_rows;
pub mod select;
pub mod selective_scan;
pub mod short_conv;
pub mod softmax;
pub mod splice;
pub mod stretch;
pub mod sweep;
pub mod top_k;
pub mod tuned;
pub mod xielu;
pub mod zip;

mod real;
mod recurrence;
mod states;
mod trial;

use std::ops::{Deref, DerefMut};

use formats::{Error, Result};

pub use all_gather::AllGather;
pub use all_reduce::AllReduce;
pub use attention::Attention;
pub use block_linear::BlockLinear;
pub use delta_net::DeltaNet;
pub use embed::Embed;
pub use exchange::Exchange;
pub use experts::Experts;
pub use gate_up::GateUp;
pub use gated::Gated;
pub use gated_norm::GatedNorm;
pub use gaussian_top_k::GaussianTopK;
pub use gradient::Gradient;
pub use group_limit::GroupLimit;
pub use indexer::Indexer;
pub use join_columns::JoinColumns;
pub use kv_write::KvWrite;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use linear_add::LinearAdd;
pub use low_rank::LowRank;
pub use map::{Map, Unary};
pub use match_rms::MatchRms;
pub use mix::Mix;
pub use norm_add::NormAdd;
pub use operation::Operation;
pub use partition::Partition;
pub use project::Project;
pub use rms_norm::RmsNorm;
pub use rope::Rope;
pub use rope_write::RopeWrite;
pub use round_rows::RoundRows;
pub use scale::Scale;
pub use scale_columns::ScaleColumns;
pub use scale_rows::ScaleRows;
pub use select::Select;
pub use selective_scan::SelectiveScan;
pub use short_conv::ShortConv;
pub use splice::Splice;
pub use stretch::Stretch;
pub use xielu::Xielu;
pub use zip::{Binary, Zip};

/// How many rows a value has, known only when a Program is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Rows {
    /// One row for every token of the step.
    Tokens,
    /// One row for every token whose logits were asked for.
    Outputs,
    /// A fixed number of rows in every step: a value with the shape of a weight.
    Fixed(usize),
}

impl Rows {
    /// The number of rows in a step of `tokens` tokens and `outputs` rows with logits.
    pub fn count(self, tokens: usize, outputs: usize) -> usize {
        match self {
            Rows::Tokens => tokens,
            Rows::Outputs => outputs,
            Rows::Fixed(rows) => rows,
        }
    }
}

/// The shape of an activation: `[rows, width]`, row-major f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
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

    /// The shape of a value that is like a weight: a vector is one row.
    pub fn of_weight(weight: &[usize]) -> Self {
        let width = weight.last().copied().unwrap_or(1);
        let rows = weight.iter().rev().skip(1).product();
        Shape { rows: Rows::Fixed(rows), width }
    }
}

/// Makes [`Op`] of a table: each row is a variant and the type that has its constants and
/// implements [`Operation`].
macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident($type:ty),)*) => {
        /// The closed set of operations. Operands are listed as `inputs; weights -> outputs`. An
        /// `Op` dereferences to its [`Operation`], which has its rules.
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        pub enum Op {
            $($(#[$doc])* $name($type),)*
        }

        impl Deref for Op {
            type Target = dyn Operation;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Op::$name(op) => op,)*
                }
            }
        }

        impl DerefMut for Op {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $(Op::$name(op) => op,)*
                }
            }
        }

        $(impl From<$type> for Op {
            fn from(op: $type) -> Op {
                Op::$name(op)
            }
        })*
    };
}

operations! {
    /// `; table[vocab, width] -> x`: rows of the embedding table, by token id. See [`embed`].
    Embed(Embed),
    /// `x; weight[group] -> y`. See [`rms_norm`].
    RmsNorm(RmsNorm),
    /// `x; weight[out, in], (bias[out]) -> y`. See [`linear`].
    Linear(Linear),
    /// `x; weight[blocks * out, in] -> y`, each block of columns by a matrix of its own. See
    /// [`block_linear`].
    BlockLinear(BlockLinear),
    /// `x; weight[width], (bias[width]) -> y`. See [`layer_norm`].
    LayerNorm(LayerNorm),
    /// `x -> f(x)`, element by element. See [`map`].
    Map(Map),
    /// `a, b -> f(a, b)`, element by element. See [`zip`].
    Zip(Zip),
    /// `x -> by * x`. See [`scale`].
    Scale(Scale),
    /// `x; a[1], b[1] -> xielu(x)`, element by element. See [`xielu`].
    Xielu(Xielu),
    /// `x; s[width], (b[width]) -> x * s + b`, numbers for each column. See [`scale_columns`].
    ScaleColumns(ScaleColumns),
    /// `x, s -> x * s`, a number for each row. See [`scale_rows`].
    ScaleRows(ScaleRows),
    /// `x, c -> y`: streams that are sums of others, by numbers of the row. See [`mix`].
    Mix(Mix),
    /// `x, like -> x`, each group as long as the row of `like`. See [`match_rms`].
    MatchRms(MatchRms),
    /// `x -> max(x - cutoff, 0)`, with a cutoff of each row. See [`gaussian_top_k`].
    GaussianTopK(GaussianTopK),
    /// `x, residual; weight[width] -> residual + rms_norm(x)`. See [`norm_add`].
    NormAdd(NormAdd),
    /// `x -> x`, each row rounded to 8 bits. See [`round_rows`].
    RoundRows(RoundRows),
    /// `x -> rotated x`. See [`rope`].
    Rope(Rope),
    /// `x -> x` times a number that grows with the position. See [`stretch`].
    Stretch(Stretch),
    /// `k, v ->`: appends to the layer's cache. See [`kv_write`].
    KvWrite(KvWrite),
    /// `q, (chosen) -> y`: reads the layer's cache. See [`attention`].
    Attention(Attention),
    /// `q, w -> chosen[count]`: the positions that attention is to see, by scores of keys in a
    /// cache layer of their own. See [`indexer`].
    Indexer(Indexer),
    /// `x; taps[kernel * width], (bias[width]) -> y`: mixes each element with the same column of
    /// earlier positions. See [`short_conv`].
    ShortConv(ShortConv),
    /// `qkv, a, b; decay[heads], dt[heads] -> y`: a gated delta net, which carries a matrix for
    /// each head. See [`delta_net`].
    DeltaNet(DeltaNet),
    /// `xbc, dt; decay[heads], bias[heads], skip[heads] -> y`: a selective state space, which
    /// carries a matrix for each head. See [`selective_scan`].
    SelectiveScan(SelectiveScan),
    /// `gate, up -> f(gate) up`. See [`gated`].
    Gated(Gated),
    /// `gate, x; weight[width] -> y`: an RMS norm by groups behind or in front of a gate. See
    /// [`gated_norm`].
    GatedNorm(GatedNorm),
    /// `x, (z) -> y`: columns of each head of `x`, then a head of `z`, then zeros. See [`splice`].
    Splice(Splice),
    /// `x[tokens] -> x[outputs]`. See [`select`].
    Select(Select),
    /// `x; (norm), weight, (bias), weight, (bias).. -> y, y..`: a norm and the projections that
    /// share it. See [`project`].
    Project(Project),
    /// `x; (norm), gate, up -> y`: `f(gate(x)) * up(x)`. See [`gate_up`].
    GateUp(GateUp),
    /// `x, residual; weight, (bias) -> residual + linear(x)`. See [`linear_add`].
    LinearAdd(LinearAdd),
    /// `x, scores; gate, up, down, (biases) -> y`: a mixture of experts, chosen by router scores.
    /// See [`experts`].
    Experts(Experts),
    /// `scores; correction[experts] -> scores`: keeps the scores of the experts that corrected odds
    /// choose. See [`group_limit`].
    GroupLimit(GroupLimit),
    /// `y, (x), (residual) -> y + up (down x)`, by each row's adapter. See [`low_rank`].
    LowRank(LowRank),
    /// `x -> sum of x over all ranks`. See [`all_reduce`].
    AllReduce(AllReduce),
    /// `x[rows, a rank's columns] -> y[rows, all columns]`, one rank after the other. See
    /// [`all_gather`].
    AllGather(AllGather),
    /// `x -> x`, gathered columns in the order of rows. See [`join_columns`].
    JoinColumns(JoinColumns),
    /// `gives.. -> brings..`: rows for another device, and rows from it. See [`exchange`].
    Exchange(Exchange),
    /// `q, k, v; (q_norm), (k_norm) -> q`: per-head norms, rotation, cache write. See
    /// [`rope_write`].
    RopeWrite(RopeWrite),
    /// Operations that only Programs in training have. See [`gradient`].
    #[serde(skip)]
    Gradient(Gradient),
}

impl Op {
    /// The cache layer that it writes or reads.
    pub fn layer(&self) -> Option<usize> {
        self.cache().map(|cache| cache.layer)
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

/// Checks that two inputs have one shape.
pub(crate) fn alike(name: &str, inputs: &[Shape]) -> Result<()> {
    if inputs[0] == inputs[1] {
        return Ok(());
    }
    let [a, b] = [inputs[0], inputs[1]].map(|shape| format!("{shape:?}"));
    Err(Error::new(name, a, b))
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
