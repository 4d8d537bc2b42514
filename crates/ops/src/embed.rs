//! Embedding gather: `y[t] = table[token[t]]`. Token ids are step arguments, not an operand.

use crate::{Shape, arity, expect};
use formats::Result;

/// `; table[vocab, width] -> [tokens, width]`.
pub fn shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("embed", inputs, 0, weights, &[1])?;
    expect("embed", "table rank", &[weights[0].len()], &[2])?;
    Ok(vec![Shape::tokens(weights[0][1])])
}

/// Gathers rows of `table` `[vocab, width]` into `y` `[tokens, width]`. Ids must be below `vocab`.
pub fn reference(tokens: &[u32], table: &[f32], width: usize, y: &mut [f32]) {
    for (&token, y) in tokens.iter().zip(y.chunks_exact_mut(width)) {
        y.copy_from_slice(&table[token as usize * width..][..width]);
    }
}
