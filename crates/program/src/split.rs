//! Cuts a Program between layers, so that its parts can run on different devices.

use crate::{Node, Program, ValueId, Weight, WeightId};
use formats::{Error, Result};
use ops::Rows;

/// A part of a Program, with its own values, weights and cache layers, all renumbered.
#[derive(Debug, Clone, PartialEq)]
pub struct ProgramPart {
    /// The operations of the part.
    pub program: Program,
    /// For each of its cache groups, the index of the whole Program's group.
    pub groups: Vec<usize>,
}

/// A cut: the node that it comes before, and the one value that crosses it.
type Cut = (usize, ValueId);

impl Program {
    /// Cuts before each of the given cache layers, which ascend; the number of layers as an index
    /// means between the last layer and the head. Each part's single result is the next part's
    /// input.
    ///
    /// # Errors
    /// A layer that does not exist, traced values, or a boundary that more than one value with a
    /// row per token crosses.
    pub fn split(&self, at: &[usize]) -> Result<Vec<ProgramPart>> {
        let whole = self.traces.is_empty() && self.input.is_none();
        let ascend = at.windows(2).all(|pair| pair[0] < pair[1]);
        if !whole || !ascend || at.last().is_some_and(|last| *last > self.layers.len()) {
            let expected =
                format!("ascending layers up to {} of a whole Program", self.layers.len());
            return Err(Error::new("split", expected, format!("{at:?}")));
        }
        let cuts = at.iter().map(|layer| self.cut(*layer)).collect::<Result<Vec<Cut>>>()?;
        let (mut parts, mut from, mut input) = (Vec::new(), 0, None);
        for (node, bridge) in cuts {
            parts.push(self.part(&self.nodes[from..node], input, &[bridge]));
            (from, input) = (node, Some(bridge));
        }
        parts.push(self.part(&self.nodes[from..], input, &self.results));
        Ok(parts)
    }

    /// Where to [`split`](Program::split) the layers from `from` on into `parts` parts, so that the
    /// largest part has as few bytes of weights as possible. With `from` 0, the embedding table is
    /// included. The head counts as one more layer, and cache layers of one block
    /// ([`blocks`](Program::blocks)) stay together.
    ///
    /// # Errors
    /// More parts than layers and head, or a boundary that cannot be cut.
    pub fn even_cuts(
        &self,
        from: usize,
        parts: usize,
        bytes: &dyn Fn(&Weight) -> Result<u64>,
    ) -> Result<Vec<usize>> {
        let layers = self.layers.len();
        let bounds = self.blocks().into_iter().chain([layers]).filter(|at| *at > from);
        let bounds: Vec<usize> = bounds.collect();
        let count = bounds.len() + 1;
        if parts == 0 || parts > count {
            let expected = format!("1 to {count} devices: one for each layer and the head");
            return Err(Error::new("split", expected, parts));
        }
        let sizes = self.weights.iter().map(bytes).collect::<Result<Vec<u64>>>()?;
        let inner = bounds.iter().map(|layer| Ok(self.cut(*layer)?.0));
        let mut ends = inner.collect::<Result<Vec<usize>>>()?;
        ends.push(self.nodes.len());
        let mut begin = if from == 0 { 0 } else { self.cut(from)?.0 };
        // Bytes before each boundary.
        let mut before = vec![0];
        for end in ends {
            let mut used: Vec<WeightId> =
                self.nodes[begin..end].iter().flat_map(|node| node.weights.clone()).collect();
            used.sort_unstable();
            used.dedup();
            let own: u64 = used.iter().map(|w| sizes[w.0]).sum();
            before.push(before[before.len() - 1] + own);
            begin = end;
        }
        Ok(least_largest(&before, parts).into_iter().map(|at| bounds[at - 1]).collect())
    }

    /// The first cache layer of each block, where a block may have several side by side: those that
    /// a cut can come before. All, if no cut can come between layers, so that one that is asked
    /// for is refused.
    pub fn blocks(&self) -> Vec<usize> {
        let all = 0..self.layers.len();
        let first: Vec<usize> =
            all.clone().filter(|layer| *layer == 0 || self.cut(*layer).is_ok()).collect();
        if first.len() > 1 { first } else { all.collect() }
    }

    /// The cut before a layer: the latest node at which a single value with a row per token
    /// crosses.
    fn cut(&self, layer: usize) -> Result<Cut> {
        let of = |layer| self.nodes.iter().position(|node| node.op.layer() == Some(layer));
        let first = layer.checked_sub(1).and_then(of).map_or(0, |node| node + 1);
        let last = of(layer).unwrap_or(self.nodes.len().saturating_sub(1));
        let writers = self.writers();
        let cut = (first.max(1)..=last).rev().find_map(|at| Some((at, self.bridge(&writers, at)?)));
        cut.ok_or_else(|| Error::new("split", "one value between the layers", "several"))
    }

    /// The one value that is written before node `at` and read from there on, if there is only one.
    fn bridge(&self, writers: &[Option<usize>], at: usize) -> Option<ValueId> {
        let early = |v: &&ValueId| writers[v.0].is_some_and(|w| w < at);
        let mut crossing = self.nodes[at..]
            .iter()
            .flat_map(|node| &node.inputs)
            .chain(&self.results)
            .filter(early);
        let one = *crossing.next()?;
        let alone = crossing.all(|other| *other == one);
        (alone && self.shape(one).rows == Rows::Tokens).then_some(one)
    }

    /// Some nodes as a Program of their own.
    fn part(&self, nodes: &[Node], input: Option<ValueId>, results: &[ValueId]) -> ProgramPart {
        let mut part = Program::default();
        let (mut values, mut weights, mut layers) = (vec![], vec![], vec![]);
        // The new number of `old`, which is appended if it has not been seen.
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
            if let Some(layer) = node.op.layer() {
                node.op.set_layer(renumber(layer, &mut layers));
            }
            part.nodes.push(node);
        }
        part.results = results.iter().map(|v| ValueId(renumber(v.0, &mut values))).collect();
        part.values = values.into_iter().map(|v| self.values[v]).collect();
        let mut used: Vec<usize> =
            nodes.iter().flat_map(|node| node.sites(&self.sites)).flatten().collect();
        used.sort_unstable();
        used.dedup();
        for site in used {
            let site = &self.sites[site];
            let mut own = |weight: WeightId| WeightId(renumber(weight.0, &mut weights));
            let (weight, bias) = (own(site.weight), site.bias.map(&mut own));
            part.sites.push(crate::Site { weight, bias, ..site.clone() });
        }
        part.weights = weights.into_iter().map(|w| self.weights[w].clone()).collect();
        part.layers = layers.into_iter().map(|l| self.layers[l]).collect();
        let all = self.groups();
        let groups = part.groups();
        let whole = |group| all.iter().position(|g| g == group).unwrap_or(0);
        ProgramPart { groups: groups.iter().map(whole).collect(), program: part }
    }
}

/// Cuts sizes, given as prefix sums, into `parts` non-empty runs whose largest is as small as
/// possible.
fn least_largest(before: &[u64], parts: usize) -> Vec<usize> {
    let count = before.len() - 1;
    // `best[p][end]`: the smallest largest size of `p + 1` runs that end at `end`, and the start of
    // the last run.
    let mut best = vec![vec![(u64::MAX, 0); count + 1]; parts];
    for end in 1..=count {
        best[0][end] = (before[end], 0);
    }
    for p in 1..parts {
        for end in p + 1..=count {
            let with =
                |start: usize| (best[p - 1][start].0.max(before[end] - before[start]), start);
            best[p][end] = (p..end).map(with).min().unwrap_or((u64::MAX, 0));
        }
    }
    let mut cuts = Vec::new();
    let mut end = count;
    for p in (1..parts).rev() {
        end = best[p][end].1;
        cuts.push(end);
    }
    cuts.reverse();
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_as_even_as_they_can_be() {
        let cuts = |sizes: &[u64], parts| {
            let mut before = vec![0];
            sizes.iter().for_each(|s| before.push(before[before.len() - 1] + s));
            least_largest(&before, parts)
        };
        assert_eq!(cuts(&[1, 1, 1, 1], 2), [2]);
        assert_eq!(cuts(&[5, 1, 1, 1], 2), [1]);
        assert_eq!(cuts(&[1, 1, 1, 5], 3), [1, 3]);
        assert_eq!(cuts(&[0, 0, 0], 3), [1, 2]);
        assert_eq!(cuts(&[7, 7], 1), [0; 0]);
    }
}
