//! Losses and gradients against PyTorch, finite differences and identities.

mod devices;
mod models;
mod operations;
