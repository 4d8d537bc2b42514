//! The memory that gated delta nets and state spaces share in training: one launch's arrays lie
//! where another's did.

use std::ops::Range;

use program::Program;
use tile::types::Scalar;

use super::layout::{Counts, align};
use super::{delta, scan};

/// Fewest and most rows of a block: see [`block`].
const ROWS: [usize; 2] = [16, 128];

/// Rows between matrices that are kept for gradients: about twice the root of the number of all
/// rows, so that memory holds few of them and many blocks go at once.
pub(super) fn block(tokens: usize) -> usize {
    (2 * tokens.isqrt()).next_power_of_two().clamp(ROWS[0], ROWS[1])
}

/// The bytes of an array of f32, from the beginning of all of them: it has the last of these
/// numbers of elements, and those in front of it the others.
pub(super) fn place(elements: impl IntoIterator<Item = usize>) -> Range<usize> {
    let bytes = elements.into_iter().map(|elements| Scalar::F32.bytes() * elements);
    bytes.fold(0..0, |before, bytes| {
        let start = align(before.end);
        start..start + bytes
    })
}

/// Bytes of the arrays of a Program's nets and state spaces.
pub(super) fn bytes(program: &Program, counts: Counts) -> usize {
    let of = |node| delta::bytes(node, counts).max(scan::bytes(node, counts));
    program.nodes.iter().map(of).max().unwrap_or(0)
}
