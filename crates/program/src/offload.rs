//! Moves some operations of a Program to another device, inside layers: the Program becomes two,
//! which alternate and pass rows to each other at their [exchanges](ops::Exchange).
//!
//! ```text
//! home:  a  b  X0  d  e  X1  g          X0 gives what c reads, and brings what c wrote
//! away:     X0  c  X1  f  X2            X1 gives what c wrote, and brings what f reads
//! ```
//!
//! Moved operations have no cache and no adapters, and read no tokens, so the other device need not
//! know the tokens.

use formats::{Error, Result};
use ops::Exchange;

use crate::{Node, Program, ValueId, WeightId};

/// The two sides of a Program.
#[derive(Debug, Clone, PartialEq)]
pub struct Offloaded {
    /// The operations that stay, with the whole Program's values, cache and results. It is replayed
    /// from beginning to end, pausing at each exchange until the values that it brings are there.
    pub home: Program,
    /// The moved operations. Exchange `i` brings the inputs of the operations up to exchange `i +
    /// 1`, which gives their outputs: those are the values that the home Program's exchange `i`
    /// brings.
    pub away: Program,
}

/// A run of consecutive moved operations.
struct Run {
    nodes: std::ops::Range<usize>,
    /// Values that the run reads and others write, and values that it writes and others read.
    reads: Vec<ValueId>,
    writes: Vec<ValueId>,
}

impl Program {
    /// Moves the operations that `moved` selects by number and node.
    ///
    /// # Errors
    /// No operation is moved, or one that reads tokens or the cache, or that has an adapter site.
    pub fn offload(&self, moved: &dyn Fn(usize, &Node) -> bool) -> Result<Offloaded> {
        let moved: Vec<bool> = self.nodes.iter().enumerate().map(|(i, n)| moved(i, n)).collect();
        let bound = |node: &Node| {
            let sites = node.sites(&self.sites).iter().any(Option::is_some);
            sites || node.op.cache().is_some() || node.op.gathers().is_some()
        };
        let kept = self.nodes.iter().zip(&moved).find(|(node, moved)| **moved && bound(node));
        if let Some((node, _)) = kept {
            let expected = "operations without tokens, cache and adapters' factors";
            return Err(Error::new("offload", expected, node.op.name()));
        }
        let runs = self.runs(&moved);
        if runs.is_empty() {
            return Err(Error::new("offload", "an operation to move", "none"));
        }
        Ok(Offloaded { home: self.home(&runs), away: self.away(&runs) })
    }

    fn runs(&self, moved: &[bool]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut end = 0;
        while let Some(start) = (end..moved.len()).find(|i| moved[*i]) {
            end = (start..moved.len()).find(|i| !moved[*i]).unwrap_or(moved.len());
            let (inside, behind) = (&self.nodes[start..end], &self.nodes[end..]);
            let own: Vec<ValueId> = inside.iter().flat_map(|node| node.outputs.clone()).collect();
            let mut reads: Vec<ValueId> = Vec::new();
            for value in inside.iter().flat_map(|node| &node.inputs) {
                if !own.contains(value) && !reads.contains(value) {
                    reads.push(*value);
                }
            }
            let traced = self.traces.iter().map(|(_, value)| value);
            let outside = behind.iter().flat_map(|node| &node.inputs).chain(&self.results);
            let read = |value: &ValueId| outside.clone().chain(traced.clone()).any(|v| v == value);
            let writes = own.into_iter().filter(read).collect();
            runs.push(Run { nodes: start..end, reads, writes });
        }
        runs
    }

    /// The home side: the remaining operations, with an exchange in place of each run. Values keep
    /// their numbers.
    fn home(&self, runs: &[Run]) -> Program {
        let mut home = Program { nodes: Vec::new(), weights: Vec::new(), ..self.clone() };
        let mut from = 0;
        for (number, run) in runs.iter().enumerate() {
            home.nodes.extend_from_slice(&self.nodes[from..run.nodes.start]);
            let brings = run.writes.iter().map(|v| self.shape(*v)).collect();
            home.nodes.push(exchange(number, run.reads.clone(), run.writes.clone(), brings));
            from = run.nodes.end;
        }
        home.nodes.extend_from_slice(&self.nodes[from..]);
        let mut own = Weights { of: self, seen: Vec::new() };
        home.nodes.iter_mut().flat_map(|node| &mut node.weights).for_each(|w| own.renumber(w));
        for site in &mut home.sites {
            own.renumber(&mut site.weight);
            site.bias.iter_mut().for_each(|bias| own.renumber(bias));
        }
        home.weights = own.weights();
        home
    }

    /// The away side: the moved runs, between exchanges. A value that several runs read is brought
    /// to each.
    fn away(&self, runs: &[Run]) -> Program {
        let mut away = Program::default();
        let mut own = Weights { of: self, seen: Vec::new() };
        let mut gives = Vec::new();
        for (number, run) in runs.iter().enumerate() {
            let mut known: Vec<(ValueId, ValueId)> = Vec::new();
            let mut value = |old: ValueId| match known.iter().find(|(seen, _)| *seen == old) {
                Some((_, new)) => *new,
                None => {
                    away.values.push(self.shape(old));
                    let new = ValueId(away.values.len() - 1);
                    known.push((old, new));
                    new
                }
            };
            let brought: Vec<ValueId> = run.reads.iter().map(|v| value(*v)).collect();
            let shapes = run.reads.iter().map(|v| self.shape(*v)).collect();
            let mut nodes = vec![exchange(number, gives, brought, shapes)];
            for node in &self.nodes[run.nodes.clone()] {
                let mut node = node.clone();
                node.inputs.iter_mut().chain(&mut node.outputs).for_each(|v| *v = value(*v));
                node.weights.iter_mut().for_each(|w| own.renumber(w));
                nodes.push(node);
            }
            gives = run.writes.iter().map(|v| value(*v)).collect();
            away.nodes.extend(nodes);
        }
        away.nodes.push(exchange(runs.len(), gives, vec![], vec![]));
        away.weights = own.weights();
        away
    }
}

fn exchange(
    number: usize,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    brings: Vec<ops::Shape>,
) -> Node {
    Node { op: Exchange { number, brings }.into(), inputs, weights: vec![], outputs }
}

/// The weights that one side uses, renumbered in order of use.
struct Weights<'a> {
    of: &'a Program,
    seen: Vec<WeightId>,
}

impl Weights<'_> {
    fn renumber(&mut self, weight: &mut WeightId) {
        let known = self.seen.iter().position(|seen| seen == weight);
        let number = known.unwrap_or(self.seen.len());
        if known.is_none() {
            self.seen.push(*weight);
        }
        *weight = WeightId(number);
    }

    fn weights(self) -> Vec<crate::Weight> {
        self.seen.iter().map(|w| self.of.weights[w.0].clone()).collect()
    }
}
