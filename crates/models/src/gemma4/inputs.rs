//! The inputs that each layer of the small models has of its own (Gemma 3n, Gemma 4): rows of a
//! second table, and a product of the embedding.
//!
//! ```text
//! inputs = (sqrt(width) table[token] + norm(projection(x_0) / sqrt(hidden))) / sqrt(2)
//! norm(projection(gelu(gate(x)) * input_i))
//! ```

use crate::Config;
use crate::names::Row;
use formats::Result;
use nn::{Bias, Builder, Embedding, ForwardPass, Norm, Projection, Tensor, Unary};
use ops::{Op, Splice};

pub(crate) const NAMES: &[Row] = &[
    ("inputs", "model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("inputs_projection", "model.per_layer_model_projection", "per_layer_model_proj"),
    ("inputs_norm", "model.per_layer_projection_norm", "per_layer_proj_norm"),
    ("blocks.{}.input.gate", "model.layers.{}.per_layer_input_gate", "blk.{}.inp_gate"),
    ("blocks.{}.input.projection", "model.layers.{}.per_layer_projection", "blk.{}.proj"),
    ("blocks.{}.after_input_norm", "model.layers.{}.post_per_layer_input_norm", "blk.{}.post_norm"),
];

/// The inputs of all layers, one beside the other in each row.
pub(crate) struct Inputs {
    table: Embedding,       // [tokens] -> [layers * width]
    projection: Projection, // [hidden] -> [layers * width]
    norm: Norm,
    width: usize,
    hidden: usize,
}

impl Inputs {
    /// Takes `inputs` `[vocab, layers * width]`, `inputs_projection` and `inputs_norm`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub(crate) fn new(builder: &Builder<'_>, config: &Config, width: usize) -> Result<Inputs> {
        let (all, hidden) = (config.layers * width, config.hidden);
        Ok(Inputs {
            table: Embedding::new(builder, "inputs", config.vocab, all)?,
            projection: Projection::new(builder, "inputs_projection", [all, hidden], Bias::Never)?,
            norm: Norm::rms(builder, "inputs_norm", width, config.norm_eps)?,
            width,
            hidden,
        })
    }

    /// The inputs of the step's tokens, whose embeddings are `x`.
    pub(crate) fn forward(&self, step: &ForwardPass, x: &Tensor) -> Tensor {
        let projected = self.projection.forward(x).scale(1.0 / (self.hidden as f32).sqrt());
        let own = self.table.forward(step).scale((self.width as f32).sqrt());
        self.norm.forward(&projected).add(&own).scale(0.5f32.sqrt())
    }
}

/// How a layer takes its input in.
pub(crate) struct Input {
    gate: Projection,       // [hidden] -> [width]
    projection: Projection, // [width] -> [hidden]
    after: Norm,
    part: Splice,
}

impl Input {
    /// Takes the weights below `blocks.{i}.input`, and the norm behind.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub(crate) fn new(
        builder: &Builder<'_>,
        config: &Config,
        width: usize,
        i: usize,
    ) -> Result<Input> {
        let (name, hidden) = (format!("blocks.{i}.input"), config.hidden);
        let linear = |part: &str, shape| {
            Projection::new(builder, &format!("{name}.{part}"), shape, Bias::Never)
        };
        let after = format!("blocks.{i}.after_input_norm");
        Ok(Input {
            gate: linear("gate", [width, hidden])?,
            projection: linear("projection", [hidden, width])?,
            after: Norm::rms(builder, &after, hidden, config.norm_eps)?,
            part: Splice { heads: 1, start: i * width, count: width, shared: false, width },
        })
    }

    /// What layer `i` adds for its part of `inputs` where the residual stream is `x`.
    pub(crate) fn forward(&self, x: &Tensor, inputs: &Tensor) -> Tensor {
        let own = inputs.apply(Op::from(self.part), &[], Vec::new());
        let y = self.gate.forward(x).map(Unary::GeluTanh).mul(&own);
        self.after.forward(&self.projection.forward(&y))
    }
}
