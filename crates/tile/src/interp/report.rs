//! Errors of an execution, in words: thread, array, numbers, and a hint where one is known.

use super::lanes::Divergent;
use crate::ir::{Kernel, Place};
use crate::text;
use crate::verify::Fault;

/// The access of another thread to an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Did {
    Read,
    Wrote,
    Changed,
}

/// Why an access to an element is refused.
#[derive(Debug, Clone, Copy)]
pub(super) enum Why {
    /// Nothing wrote it.
    Uninitialised,
    /// An unordered access by another thread, of another group if one is given.
    Race { did: Did, thread: usize, group: Option<usize> },
    /// A copy by this thread has not ended.
    Flying { thread: usize },
    /// A product that reads it has not ended.
    Lent,
    /// This thread wrote it, and did not make it ready for products.
    Unpublished { thread: usize },
    /// A product that adds to it has not ended.
    Unfinished,
    /// It was touched since the last `wgmma_fence`.
    Unfenced,
}

/// The reason why an execution stops.
#[derive(Debug)]
pub(super) enum Stop {
    /// A thread's access to `place[index]`.
    Element { thread: usize, verb: &'static str, place: Place, index: usize, why: Why },
    /// A thread's access beyond an array.
    Bounds { thread: usize, verb: &'static str, place: Place, index: u64, len: usize },
    /// A vector's index.
    Misaligned { thread: usize, verb: &'static str, place: Place, index: u32, lanes: usize },
    /// Not all take part.
    Divergent { idle: usize, what: &'static str, scope: &'static str },
    /// Anything else a thread did.
    Thread { thread: usize, message: String },
    /// Anything that no single thread did.
    Launch(String),
}

/// Divergence is named by the operation that finds it.
impl From<Divergent> for Stop {
    fn from(Divergent { idle }: Divergent) -> Self {
        Stop::Divergent { idle, what: "", scope: "simdgroup" }
    }
}

impl Stop {
    /// The same, of this operation.
    pub(super) fn of(self, name: &'static str) -> Self {
        match self {
            Stop::Divergent { idle, what: "", scope } => {
                Stop::Divergent { idle, what: name, scope }
            }
            other => other,
        }
    }

    /// The sentence.
    pub(super) fn message(&self, kernel: &Kernel, group: [u32; 3], grid: [u32; 3]) -> String {
        let at = |thread: usize| {
            let [x, y, z] = group;
            format!("thread {thread} of group ({x}, {y}, {z})")
        };
        match self {
            Stop::Element { thread, verb, place, index, why } => {
                let subject =
                    format!("{} {verb} {}[{index}]", at(*thread), kernel.place_name(*place));
                let rest = match why {
                    Why::Uninitialised => "which nothing has written".to_owned(),
                    Why::Flying { thread: other } => format!(
                        "to which an asynchronous copy of thread {other} is not finished; hint: copy_commit, then \
                         copy_wait, then a barrier"
                    ),
                    Why::Lent => "which a product still reads; hint: wgmma_wait, then a barrier".to_owned(),
                    Why::Unpublished { thread: other } => format!(
                        "which thread {other} wrote and did not fence for products; hint: async_fence, then a barrier"
                    ),
                    Why::Unfinished => "to which a product still adds; hint: wgmma_commit, then wgmma_wait".to_owned(),
                    Why::Unfenced => "which was touched since the last fence; hint: wgmma_fence before the product".to_owned(),
                    Why::Race { did, thread: other, group } => {
                        let did = match did {
                            Did::Read => "read",
                            Did::Wrote => "wrote",
                            Did::Changed => "changed with an atomic",
                        };
                        match group {
                            None => format!(
                                "which thread {other} {did} with no barrier between: a race; hint: a barrier"
                            ),
                            Some(linear) => {
                                let [x, y, z] = place_in(*linear, grid);
                                format!(
                                    "which thread {other} of group ({x}, {y}, {z}) {did} in the same launch: a race; \
                                     hint: a fence, then an atomic that both groups use, then a fence"
                                )
                            }
                        }
                    }
                };
                format!("{subject}, {rest}")
            }
            Stop::Bounds { thread, verb, place, index, len } => format!(
                "{} {verb} {}[{index}], out of bounds: it has {len} elements",
                at(*thread),
                kernel.place_name(*place)
            ),
            Stop::Misaligned { thread, verb, place, index, lanes } => format!(
                "{} {verb} {lanes} lanes at {}[{index}], misaligned: the index must be a multiple of {lanes}",
                at(*thread),
                kernel.place_name(*place)
            ),
            Stop::Divergent { idle, what, scope } => format!(
                "a divergent {what}: {} does not take part, and the whole {scope} must",
                at(*idle)
            ),
            Stop::Thread { thread, message } => format!("{}: {message}", at(*thread)),
            Stop::Launch(message) => message.clone(),
        }
    }
}

/// The place in the grid of a group's position in the order of execution.
pub(super) fn place_in(linear: usize, grid: [u32; 3]) -> [u32; 3] {
    let [x, y, _] = grid.map(|n| n.max(1) as usize);
    [(linear % x) as u32, (linear / x % y) as u32, (linear / x / y) as u32]
}

/// The line of the text form at which an instruction stands, by its number in the order of
/// `Kernel::visit`.
pub(super) fn line(kernel: &Kernel, visited: usize) -> usize {
    text::node_lines(kernel).get(visited).copied().unwrap_or(0)
}

/// A fault of a kernel as a whole.
pub(super) fn fault(kernel: &Kernel, message: impl Into<String>) -> Fault {
    Fault { kernel: kernel.name.clone(), line: 0, source: String::new(), message: message.into() }
}
