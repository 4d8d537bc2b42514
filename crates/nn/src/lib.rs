//! Layers that record Programs.
//!
//! A [`Builder`] hands out weights by canonical name and checks their shapes; layers are built from
//! it once. A [`ForwardPass`] is the recording of one forward pass: [`Tensor`] is a handle to a
//! value in it, and its methods append operations. Layers know no device, element type or
//! quantisation.

mod builder;
mod delta_net;
mod experts;
mod gated_conv;
mod indexer;
mod latent;
mod layers;
mod lightning;
mod mamba;
mod mamba1;
mod tensor;

pub use builder::{Bias, Builder, Stored, Weights};
pub use delta_net::{DeltaNetOptions, Forgetting, GatedDeltaNet};
pub use experts::{ExpertsOptions, MixtureOfExperts};
pub use formats::Pairing;
pub use gated_conv::GatedConv;
pub use indexer::{IndexerOptions, LightningIndexer};
pub use latent::{LatentAttention, LatentOptions};
pub use layers::{
    AttentionOptions, BlockProjection, Embedding, Mlp, Norm, Projection, QkNorm, SelfAttention,
};
pub use lightning::{LightningAttention, LightningOptions};
pub use mamba::{Mamba, MambaMultipliers, MambaOptions};
pub use mamba1::{Mamba1, Mamba1Options};
pub use ops::experts::{Gate, Odds, Routing};
pub use ops::selective_scan::UNLIMITED;
pub use ops::{GatedNorm, GroupLimit, Rope, Stretch, Unary};
pub use tensor::{ForwardPass, Tensor};
