//! Unroll: loops marked `unroll` whose bounds are numbers are written out, so that register arrays
//! get indices that are numbers and stay registers.
//!
//! Limits: at most [`TRIPS`] trips and [`BUDGET`] instructions a loop; a larger one stays for the
//! target's compiler.

use super::rewrite::{Rewrite, Visitor, rewrite, size};
use crate::ir::{Inst, Kernel, Literal, Statement};

/// The most trips of a loop that is written out.
const TRIPS: u32 = 128;
/// The most instructions that a loop may become.
const BUDGET: usize = 4096;

/// Every small loop that asks for it, written out.
pub(super) fn unroll(kernel: &Kernel) -> Kernel {
    rewrite(kernel, &mut Unroll)
}

struct Unroll;

impl Visitor for Unroll {
    fn node(&mut self, r: &mut Rewrite, node: Statement) {
        let Inst::For { index, start, end, step, unroll: true, body } = &node.inst else {
            return r.keep(node, self);
        };
        let bounds = (r.known_u32(*start), r.known_u32(*end), r.known_u32(*step));
        let (Some(first), Some(end), Some(step @ 1..)) = bounds else { return r.keep(node, self) };
        let trips = end.saturating_sub(first).div_ceil(step);
        if trips > TRIPS || trips as usize * size(body) > BUDGET {
            return r.keep(node, self);
        }
        let index = *index;
        // Inner loops first, once; then copies of the result.
        let body = r.inner(body.clone(), self);
        for trip in 0..trips {
            let at = r.literal(Literal::U32(first + trip * step));
            r.rename(index, at);
            r.copy(&body);
        }
    }
}
