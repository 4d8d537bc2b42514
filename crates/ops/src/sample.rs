//! Sampling: the chain from logits to a token.
