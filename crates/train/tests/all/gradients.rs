//! Losses and gradients against PyTorch, finite differences and identities.

mod models;
mod operations;
