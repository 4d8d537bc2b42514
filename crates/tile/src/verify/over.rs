//! The rule of shared arrays that take over another's memory: that one is not used any more.
//! Between its last use and the first of the array that follows lies a barrier, outside of loops,
//! past which every use of the latter is reached; copies to the former have all arrived before it.

use super::{Fault, fault};
use crate::ir::{Block, Inst, Kernel, Place, Statement};

pub(super) fn check(kernel: &Kernel) -> Result<(), Fault> {
    let pairs = (0..).zip(&kernel.shared).filter_map(|(i, array)| Some((i, array.over?)));
    let mut walk = Walk { seen: vec![] };
    for (new, old) in pairs {
        if walk.seen.is_empty() {
            walk.block(&kernel.body, false);
        }
        walk.pair(Place::Shared(new), Place::Shared(old)).map_err(|index| {
            let name = |i| kernel.place_name(Place::Shared(i));
            let why = format!(
                "`{}` takes over the memory of `{}`: a barrier expected, outside of loops, behind \
                 all uses and copies of that one and before all of this one",
                name(new),
                name(old)
            );
            fault(kernel, index, walk.seen[index].node, why)
        })?;
    }
    Ok(())
}

/// The instructions in the order of [`Kernel::visit`].
struct Walk<'k> {
    seen: Vec<Seen<'k>>,
}

struct Seen<'k> {
    node: &'k Statement,
    /// Whether it is inside a loop.
    looped: bool,
    /// The last instruction of its block, or inside that.
    end: usize,
}

impl<'k> Walk<'k> {
    fn block(&mut self, block: &'k Block, looped: bool) {
        let mut own = vec![];
        for node in &block.0 {
            own.push(self.seen.len());
            self.seen.push(Seen { node, looped, end: 0 });
            let inside = looped || matches!(node.inst, Inst::For { .. });
            node.inst.blocks().into_iter().for_each(|block| self.block(block, inside));
        }
        let end = self.seen.len();
        own.into_iter().for_each(|index| self.seen[index].end = end - 1);
    }

    /// An error is the first use of the new array that no barrier is before.
    fn pair(&self, new: Place, old: Place) -> Result<(), usize> {
        let uses = |place: Place| {
            let names = move |seen: &Seen| {
                let inst = &seen.node.inst;
                inst.reads().chain(inst.writes()).any(|other| other == place)
            };
            self.seen.iter().enumerate().filter(move |(_, seen)| names(seen)).map(|(at, _)| at)
        };
        let (Some(first), Some(last)) = (uses(new).min(), uses(new).max()) else { return Ok(()) };
        let from = uses(old).max().map_or(0, |at| at + 1);
        let copies = |at: &usize| matches!(self.seen[*at].node.inst, Inst::CopyAsync { .. });
        let copied = uses(old).filter(copies).max();
        let reaches = |seen: &Seen| seen.end >= last;
        let arrived = |seen: &Seen| matches!(seen.node.inst, Inst::CopyWait(0)) && reaches(seen);
        let settles = |at: usize| {
            let seen = &self.seen[at];
            matches!(seen.node.inst, Inst::Barrier)
                && !seen.looped
                && reaches(seen)
                && copied.is_none_or(|copy| self.seen[copy..at].iter().any(arrived))
        };
        if (from..first).any(settles) { Ok(()) } else { Err(first) }
    }
}
