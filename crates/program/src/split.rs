//! Cutting a Program at a layer's boundary, so that its parts can run on different devices.

use crate::{Node, Program, ValueId, WeightId};
use formats::{Error, Result};
use ops::{Op, Rows};

/// A part of a Program: with its own values, weights and cache layers, all numbered anew.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// What it computes.
    pub program: Program,
    /// The whole Program's group that each of its cache groups is.
    pub groups: Vec<usize>,
}

impl Program {
    /// Cuts before cache layer `layer`: the first part's one result is the second's input.
    ///
    /// # Errors
    /// If there is no such layer, values are traced, or more than one value of a row per token crosses the boundary.
    pub fn split(&self, layer: usize) -> Result<[Part; 2]> {
        if layer >= self.layers.len() || !self.traces.is_empty() || self.input.is_some() {
            let expected = format!("a layer below {} of a whole Program", self.layers.len());
            return Err(Error::new("split", expected, layer));
        }
        let first = self.nodes.iter().position(|node| node.op.layer() == Some(layer));
        let cut =
            first.and_then(|node| (1..=node).rev().find_map(|at| Some((at, self.bridge(at)?))));
        let none = || Error::new("split", "one value between the layers", "several");
        let (at, bridge) = cut.ok_or_else(none)?;
        let front = self.part(&self.nodes[..at], None, &[bridge]);
        Ok([front, self.part(&self.nodes[at..], Some(bridge), &self.results)])
    }

    /// The one value that is written before node `at` and read from there on.
    fn bridge(&self, at: usize) -> Option<ValueId> {
        let writers = self.writers();
        let early = |v: &ValueId| writers[v.0].is_some_and(|w| w < at);
        let reads = self.nodes[at..].iter().flat_map(|node| &node.inputs).chain(&self.results);
        let mut crossing: Vec<ValueId> = reads.copied().filter(early).collect();
        crossing.sort_unstable();
        crossing.dedup();
        match crossing[..] {
            [one] if self.shape(one).rows == Rows::Tokens => Some(one),
            _ => None,
        }
    }

    /// Some nodes as a Program of their own.
    fn part(&self, nodes: &[Node], input: Option<ValueId>, results: &[ValueId]) -> Part {
        let mut part = Program::default();
        let (mut values, mut weights, mut layers) = (vec![], vec![], vec![]);
        // The number of `old` among those seen so far, which it joins.
        fn renumber(old: usize, seen: &mut Vec<usize>) -> usize {
            seen.iter().position(|s| *s == old).unwrap_or_else(|| {
                seen.push(old);
                seen.len() - 1
            })
        }
        part.input = input.map(|v| ValueId(renumber(v.0, &mut values)));
        for node in nodes {
            let mut node = node.clone();
            let ids = node.inputs.iter_mut().chain(&mut node.outputs);
            ids.for_each(|v| *v = ValueId(renumber(v.0, &mut values)));
            node.weights.iter_mut().for_each(|w| *w = WeightId(renumber(w.0, &mut weights)));
            match &mut node.op {
                Op::KvWrite { layer } => *layer = renumber(*layer, &mut layers),
                Op::Attention(op) => op.layer = renumber(op.layer, &mut layers),
                Op::RopeWrite(op) => op.layer = renumber(op.layer, &mut layers),
                _ => {}
            }
            part.nodes.push(node);
        }
        part.results = results.iter().map(|v| ValueId(renumber(v.0, &mut values))).collect();
        part.values = values.into_iter().map(|v| self.values[v]).collect();
        part.weights = weights.into_iter().map(|w| self.weights[w].clone()).collect();
        part.layers = layers.into_iter().map(|l| self.layers[l]).collect();
        let all = self.groups();
        let groups = part.groups();
        let whole = |window| all.iter().position(|g| g == window).unwrap_or(0);
        Part { groups: groups.iter().map(whole).collect(), program: part }
    }
}
