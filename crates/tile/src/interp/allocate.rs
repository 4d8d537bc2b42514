//! Gives names that are not alive together the same column or slot, so that a threadgroup's
//! registers stay in the first-level cache.

use super::ops::{Col, Kind, Op};

const NEVER: usize = usize::MAX;

/// Names of one kind, by number.
struct Names {
    /// The operations that mention it first and last.
    first: Vec<usize>,
    last: Vec<usize>,
    /// The new number of each.
    given: Vec<usize>,
    free: Vec<usize>,
    count: usize,
}

impl Names {
    fn new(count: u32) -> Self {
        let count = count as usize;
        let (first, last, given) = (vec![NEVER; count], vec![0; count], vec![NEVER; count]);
        Names { first, last, given, free: vec![], count: 0 }
    }
}

/// Renames the columns and slots of `ops`, of which there are `count`, and returns how many are
/// left of each. `loops` are the ranges of loops with their heads, inner before outer; the columns
/// `pinned` come first and are shared with nothing.
pub(super) fn allocate(
    ops: &mut [Op],
    loops: Vec<(usize, usize)>,
    count: [u32; 2],
    pinned: &[Col],
) -> [u32; 2] {
    let which = |kind: Kind| usize::from(kind == Kind::Tile);
    let mut names = count.map(Names::new);
    let mut mentions: Vec<(usize, usize, usize)> = vec![];
    for (at, op) in ops.iter_mut().enumerate() {
        op.slots(&mut |name, kind| {
            let (kind, name) = (which(kind), *name as usize);
            let of = &mut names[kind];
            of.first[name] = of.first[name].min(at);
            of.last[name] = at;
            mentions.push((at, kind, name));
        });
    }
    // What a loop's body reads from outside must survive to the loop's end, for the next turn; so
    // must what the head itself holds. An inner loop is a mention inside the outer one, so one pass
    // is enough.
    for (start, end) in loops {
        let from = mentions.partition_point(|(at, ..)| *at < start);
        let to = mentions.partition_point(|(at, ..)| *at < end);
        for (at, kind, name) in &mentions[from..to] {
            let of = &mut names[*kind];
            if of.first[*name] < start || *at == start {
                of.last[*name] = of.last[*name].max(end - 1);
            }
        }
    }
    for (new, old) in pinned.iter().enumerate() {
        names[0].given[*old as usize] = new;
    }
    names[0].count = pinned.len();
    let mut ending: Vec<Vec<(usize, usize)>> = vec![vec![]; ops.len()];
    for (at, op) in ops.iter_mut().enumerate() {
        op.slots(&mut |name, kind| {
            let (kind, old) = (which(kind), *name as usize);
            let of = &mut names[kind];
            if of.given[old] == NEVER {
                of.given[old] = of.free.pop().unwrap_or_else(|| {
                    of.count += 1;
                    of.count - 1
                });
                ending[of.last[old]].push((kind, of.given[old]));
            }
            *name = of.given[old] as u32;
        });
        // Freed only now: a result never shares a column with its own operands.
        for (kind, slot) in std::mem::take(&mut ending[at]) {
            names[kind].free.push(slot);
        }
    }
    names.map(|of| of.count as u32)
}
