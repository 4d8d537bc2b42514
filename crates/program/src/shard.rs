//! Tensor parallelism (Shoeybi et al. 2019): the Program of one of several ranks, each of which has
//! a share of every layer.
//!
//! The first matrices of a block are cut by rows: each rank has some heads, with the key/value
//! heads that they share, and some columns of the feed-forward. Where there are more ranks than
//! key/value heads, neighbouring ranks have the same one, each with a cache of its own. The second
//! matrices, which read the results of the first, are cut by columns: each rank's product is a
//! summand of the whole, and an `all_reduce` adds them up. The residual and the bias are in the
//! summand of rank 0 alone. The head is cut by rows, too: each rank computes the logits of some of
//! the vocabulary, and an `all_gather` gives all of them to every rank. Everything else (embedding,
//! norms) is whole on every rank. The factors of adapters are cut as their matrices are: `up` by
//! rows, or `down` by columns, whose summand then goes into the sum with the product's.

use crate::adapt::{RankShare, table};
use crate::{Node, Program, Site, ValueId, WeightId};
use formats::{Error, Hint, Result, Setting};
use ops::operation::{CacheUse, Sharding, StateAccess};
use ops::project::ProjectionOperands;
use ops::{Op, Partition, Rows, Shape};

/// Rows of a head that stay together: as many as a group of a kernel has at most.
const HEAD_BLOCK: usize = 32;

/// A rank's part of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// One of `parts` equal parts of the rows.
    Rows { parts: usize },
    /// One of as many equal parts as there are ranks, of some of each row.
    Columns,
    /// The rows that a partition gives it.
    Dealt(Partition),
}

/// The part of a value that each rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spread {
    /// All of each row.
    Whole,
    /// One of `parts` equal parts of each row: as many as there are ranks, or, of keys and values,
    /// as many as there are heads if those are fewer.
    Share { parts: usize },
}

/// The hint where ranks cannot share a model.
fn fewer() -> Hint {
    Hint::text("fewer GPUs, or ").with_value(Setting::SplitMode, "layer")
}

impl Spread {
    fn is_share(self) -> bool {
        matches!(self, Spread::Share { .. })
    }
}

impl Program {
    /// The Program of rank `rank` of `ranks`. Its nodes match every other rank's, one by one,
    /// except for the residuals; its results are the whole Program's, on every rank.
    ///
    /// # Errors
    /// If heads or a matrix cannot be shared evenly, or it is no Program of blocks as
    /// above.
    pub fn shard(&self, rank: usize, ranks: usize) -> Result<Program> {
        if rank >= ranks || ranks < 2 {
            return Err(Error::new("ranks", "one of at least two", format!("{rank} of {ranks}")));
        }
        for (layer, heads, kv_heads) in self.nodes.iter().filter_map(|node| self.heads(node)) {
            let shared = kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads);
            for (heads, shared, kind) in [
                (heads, heads.is_multiple_of(ranks), "query heads"),
                (kv_heads, shared, "key/value heads"),
            ] {
                if !shared {
                    let expected = format!("{kind} that {ranks} GPUs can share");
                    let error = Error::new(format!("layer {layer}"), expected, heads);
                    return Err(error.hint(fewer()));
                }
            }
        }
        let part = Program {
            values: self.values.clone(),
            layers: self.layers.clone(),
            input: self.input,
            results: self.results.clone(),
            traces: self.traces.clone(),
            ..Program::default()
        };
        let mut sharder =
            Sharder { of: self, part, spread: vec![None; self.values.len()], rank, ranks };
        for layer in sharder.part.layers.iter_mut().filter(|layer| layer.kv_heads > 0) {
            layer.kv_heads = (layer.kv_heads / ranks).max(1);
        }
        if let Some(input) = self.input {
            sharder.spread[input.0] = Some(Spread::Whole);
        }
        for node in &self.nodes {
            sharder.node(node)?;
        }
        for value in self.results.iter().chain(self.traces.iter().map(|(_, v)| v)) {
            sharder.whole("results", *value)?;
        }
        sharder.part.verify()?;
        Ok(sharder.part)
    }

    /// The layer, the query heads and the key/value heads of an operation that attends.
    fn heads(&self, node: &Node) -> Option<(usize, usize, usize)> {
        match node.op.cache()? {
            CacheUse { layer, access: StateAccess::Read { kv_heads, head_dim, .. } } => {
                let queries = self.shape(*node.inputs.first()?).width;
                Some((layer, queries / head_dim.max(1), kv_heads))
            }
            _ => None,
        }
    }
}

struct Sharder<'a> {
    of: &'a Program,
    part: Program,
    spread: Vec<Option<Spread>>,
    rank: usize,
    ranks: usize,
}

impl Sharder<'_> {
    fn node(&mut self, node: &Node) -> Result<()> {
        let name = node.op.name();
        let first = node.inputs.first().and_then(|v| self.spread[v.0]);
        if !matches!(node.op.sharding(), Sharding::Product | Sharding::Heads { .. })
            && node.inputs.iter().any(|v| self.spread[v.0] != first)
        {
            return Err(Error::new(name, "operands shared alike", "a whole one and a share"));
        }
        match node.op.sharding() {
            Sharding::Whole => {
                node.inputs.iter().try_for_each(|v| self.whole(name, *v))?;
                self.keep(node, Spread::Whole)
            }
            Sharding::Alike => {
                self.divides(node, first)?;
                self.keep(node, first.unwrap_or(Spread::Whole))
            }
            Sharding::Columns => {
                let spread = first.unwrap_or(Spread::Whole);
                let cut = match spread {
                    Spread::Whole => None,
                    Spread::Share { parts } => Some(Cut::Rows { parts }),
                };
                self.push(node, &vec![cut; node.weights.len()], spread)
            }
            Sharding::Heads { weights } => {
                for (i, input) in node.inputs.iter().enumerate() {
                    let parts = self.parts_read(node, i);
                    self.is(name, *input, Spread::Share { parts }, "heads that ranks can share")?;
                }
                let mut node = node.clone();
                node.op.divide_heads(self.ranks);
                let parts = self.ranks;
                let cut = weights.then_some(Cut::Rows { parts });
                self.push(&node, &vec![cut; node.weights.len()], Spread::Share { parts })
            }
            Sharding::Product => self.product(node),
            Sharding::OfRank => Err(Error::new(name, "a Program of one device", "one of a rank")),
        }
    }

    /// The number of parts into which ranks cut input number `input` of an operation on heads.
    fn parts_read(&self, node: &Node, input: usize) -> usize {
        match node.op.cache() {
            Some(CacheUse { layer, access: StateAccess::Append { keys } })
                if (keys..keys + 2).contains(&input) =>
            {
                self.of.layers[layer].kv_heads.min(self.ranks)
            }
            _ => self.ranks,
        }
    }

    /// The number of parts into which ranks cut a value. The first operation on heads that reads
    /// it, or that reads a value computed from it alone, decides: keys and values have one part for
    /// each head, if there are fewer heads than ranks.
    fn parts(&self, value: ValueId) -> usize {
        let mut value = value;
        loop {
            let reads = |node: &&Node| node.inputs.contains(&value);
            let Some(reader) = self.of.nodes.iter().find(reads) else { return self.ranks };
            let input = reader.inputs.iter().position(|v| *v == value).unwrap_or_default();
            match (reader.op.sharding(), reader.outputs.first()) {
                (Sharding::Heads { .. }, _) => return self.parts_read(reader, input),
                // An operation's outputs have higher numbers than its inputs, so that this ends.
                (Sharding::Alike | Sharding::Columns, Some(&output)) => value = output,
                _ => return self.ranks,
            }
        }
    }

    /// Whether the weights of an operation on a share of each row are of parts that the share has
    /// whole.
    fn divides(&self, node: &Node, spread: Option<Spread>) -> Result<()> {
        let Some(x) = node.inputs.first().filter(|_| spread.is_some_and(Spread::is_share)) else {
            return Ok(());
        };
        let width = self.part.values[x.0].width;
        for weight in node.weights.iter().map(|w| &self.of.weights[w.0]) {
            let group = weight.shape.last().copied().unwrap_or(1).max(1);
            if !width.is_multiple_of(group) {
                let expected = format!("norms of heads, that {} GPUs can share", self.ranks);
                return Err(Error::new(&weight.name, expected, group).hint(fewer()));
            }
        }
        Ok(())
    }

    fn product(&mut self, node: &Node) -> Result<()> {
        let name = node.op.name();
        let product = node.op.product(node.weights.len());
        let product = product.ok_or_else(|| Error::new(name, "its matrices", "none"))?;
        let residual = product.residual.map(|i| node.inputs[i]);
        if let Some(residual) = residual {
            self.whole(name, residual)?;
        }
        let one = product.projections.len() == 1 && product.norm.is_none();
        if one && self.spread[node.inputs[0].0] == Some(Spread::Share { parts: self.ranks }) {
            return self.summand(node, node.inputs[0], residual);
        }
        self.whole(name, node.inputs[0])?;
        match residual {
            Some(_) => self.keep(node, Spread::Whole),
            None => match self.head(node, &product.projections) {
                Some(partition) => self.gathered(node, &product.projections[0], partition),
                None => self.rows(node, &product.projections),
            },
        }
    }

    /// How ranks share the rows of a head: one matrix, for the rows whose logits are wanted. None
    /// if it is no head, or has fewer rows than there are ranks.
    fn head(&self, node: &Node, projections: &[ProjectionOperands]) -> Option<Partition> {
        let &[output] = &node.outputs[..] else { return None };
        let Shape { rows, width } = self.of.shape(output);
        let block = if width > HEAD_BLOCK * (self.ranks - 1) { HEAD_BLOCK } else { 1 };
        let partition = Partition { width, block, ranks: self.ranks };
        let shared = partition.widths().all(|columns| columns > 0);
        (rows == Rows::Outputs && projections.len() == 1 && shared).then_some(partition)
    }

    /// A product with the rank's rows of its matrix, and what all ranks' products make together: a
    /// whole value.
    fn gathered(
        &mut self,
        node: &Node,
        projection: &ProjectionOperands,
        partition: Partition,
    ) -> Result<()> {
        let output = node.outputs[0];
        let shape = self.of.shape(output);
        let [own, all] = [partition.range(self.rank).len(), shape.width].map(|width| {
            self.part.values.push(Shape { width, ..shape });
            self.spread.push(Some(Spread::Whole));
            ValueId(self.part.values.len() - 1)
        });
        let mut cuts = vec![None; node.weights.len()];
        for at in [projection.weight].into_iter().chain(projection.bias) {
            cuts[at] = Some(Cut::Dealt(partition));
        }
        self.push(&Node { outputs: vec![own], ..node.clone() }, &cuts, Spread::Whole)?;
        let gather = ops::AllGather { partition, rank: self.rank };
        let join = ops::JoinColumns { partition };
        for (op, from, to) in [(Op::from(gather), own, all), (Op::from(join), all, output)] {
            let node = Node { op, inputs: vec![from], weights: vec![], outputs: vec![to] };
            self.push(&node, &[], Spread::Whole)?;
        }
        Ok(())
    }

    /// Projections of a whole value: each rank has some of their rows, but all of those that give
    /// the Program's results.
    fn rows(&mut self, node: &Node, projections: &[ProjectionOperands]) -> Result<()> {
        let last =
            |v: &ValueId| self.of.shape(*v).rows == Rows::Outputs || self.of.results.contains(v);
        // Readers that need whole rows on every rank: experts read scores so, since every rank has
        // all experts.
        let read_whole = |v: &ValueId| {
            let mut readers = self.of.nodes.iter().filter(|node| node.inputs.contains(v));
            readers.any(|node| node.op.sharding() == Sharding::Whole)
        };
        if node.outputs.iter().any(|v| last(v) || read_whole(v)) {
            return self.keep(node, Spread::Whole);
        }
        // A gate's two matrices make one output.
        let parts: Vec<usize> = node.outputs.iter().map(|v| self.parts(*v)).collect();
        let mut cuts: Vec<Option<Cut>> = vec![None; node.weights.len()];
        for (i, projection) in projections.iter().enumerate() {
            let parts = parts[i.min(parts.len() - 1)];
            for at in [projection.weight].into_iter().chain(projection.bias) {
                cuts[at] = Some(Cut::Rows { parts });
            }
        }
        let spreads: Vec<Spread> = parts.into_iter().map(|parts| Spread::Share { parts }).collect();
        self.push_each(node, &cuts, &spreads)
    }

    /// A product with a rank's columns, and the sum of all ranks' products: a whole value. Rank 0
    /// adds the bias and the residual.
    fn summand(&mut self, node: &Node, x: ValueId, residual: Option<ValueId>) -> Result<()> {
        let output = node.outputs[0];
        self.part.values.push(self.of.shape(output));
        self.spread.push(Some(Spread::Whole));
        let partial = ValueId(self.part.values.len() - 1);
        let mut product = Node { outputs: vec![partial], ..node.clone() };
        if self.rank > 0 {
            product.op = Op::from(ops::Linear);
            product.weights.truncate(1);
            product.inputs = vec![x];
        } else {
            product.inputs = [x].into_iter().chain(residual).collect();
        }
        let mut cuts = vec![None; product.weights.len()];
        cuts[0] = Some(Cut::Columns);
        self.push(&product, &cuts, Spread::Whole)?;
        let sum = Node {
            op: Op::from(ops::AllReduce),
            inputs: vec![partial],
            weights: vec![],
            outputs: vec![output],
        };
        self.push(&sum, &[], Spread::Whole)
    }

    /// A node with all of its weights.
    fn keep(&mut self, node: &Node, spread: Spread) -> Result<()> {
        self.push(node, &vec![None; node.weights.len()], spread)
    }

    /// Adds a node with these parts of its weights. Its outputs all have the given spread.
    fn push(&mut self, node: &Node, cuts: &[Option<Cut>], spread: Spread) -> Result<()> {
        self.push_each(node, cuts, &vec![spread; node.outputs.len()])
    }

    /// As [`Sharder::push`], with a spread for each output.
    fn push_each(&mut self, node: &Node, cuts: &[Option<Cut>], spreads: &[Spread]) -> Result<()> {
        let (of, mut node) = (node, node.clone());
        let mut shares = Vec::with_capacity(cuts.len());
        for (weight, cut) in node.weights.iter_mut().zip(cuts) {
            let (own, share) = self.weight(*weight, *cut)?;
            *weight = own;
            shares.push(share);
        }
        self.sites(of, &node, shares);
        for (value, spread) in node.outputs.iter().zip(spreads) {
            self.spread[value.0] = Some(*spread);
            let width = &mut self.part.values[value.0].width;
            if let Spread::Share { parts } = *spread {
                if !width.is_multiple_of(parts) {
                    let expected = format!("a width that {} GPUs can share", self.ranks);
                    return Err(Error::new(node.op.name(), expected, *width));
                }
                *width /= parts;
            }
        }
        self.part.nodes.push(node);
        Ok(())
    }

    /// Gives the sites of a whole node to the rank's part of it, which has these parts of the
    /// matrices.
    fn sites(&mut self, of: &Node, part: &Node, shares: Vec<Option<RankShare>>) {
        let gathers = table(of).is_some();
        for (i, share) in shares.into_iter().enumerate() {
            let whole = |site: &&Site| site.weight == of.weights[i] && site.gathers == gathers;
            let Some(site) = self.of.sites.iter().find(whole) else { continue };
            let weight = part.weights[i];
            let [rows, columns] = *self.part.weights[weight.0].shape else { continue };
            let (input, output) = match (site.experts, gathers) {
                (Some(_), _) => (site.input, site.output),
                (None, true) => (rows, columns),
                (None, false) => (columns, rows),
            };
            let bias = site.bias.and_then(|bias| of.weights.iter().position(|w| *w == bias));
            let bias = bias.map(|at| part.weights[at]);
            let own = Site { weight, bias, input, output, share, ..site.clone() };
            if !self.part.sites.iter().any(|other| other.name == own.name) {
                self.part.sites.push(own);
            }
        }
    }

    /// The number of a weight's part among this rank's weights, which it joins, and which part it
    /// is.
    fn weight(
        &mut self,
        weight: WeightId,
        cut: Option<Cut>,
    ) -> Result<(WeightId, Option<RankShare>)> {
        let mut weight = self.of.weights[weight.0].clone();
        let mut share = None;
        if let Some(cut) = cut {
            let (axis, sides, parts) = match cut {
                Cut::Rows { parts } => (0, "rows", parts),
                Cut::Dealt(_) => (0, "rows", self.ranks),
                Cut::Columns => (1, "columns", self.ranks),
            };
            let side = weight.shape.get(axis).copied().unwrap_or(0);
            let part = match cut {
                Cut::Dealt(partition) => partition.range(self.rank),
                Cut::Rows { .. } | Cut::Columns if side.is_multiple_of(parts) => {
                    let (count, part) = (side / parts, self.rank * parts / self.ranks);
                    part * count..(part + 1) * count
                }
                Cut::Rows { .. } | Cut::Columns => {
                    let expected = format!("{sides} that {} GPUs can share", self.ranks);
                    let error = Error::new(&weight.name, expected, format!("{:?}", weight.shape));
                    return Err(error.hint(fewer()));
                }
            };
            weight.shape[axis] = part.len();
            share = Some(match cut {
                Cut::Rows { .. } | Cut::Dealt(_) => RankShare::Rows(part.clone()),
                Cut::Columns => {
                    RankShare::Columns { columns: part.clone(), adds_bias: self.rank == 0 }
                }
            });
            weight.source = match cut {
                Cut::Rows { .. } | Cut::Dealt(_) => weight.source.rows(part.start, part.len()),
                Cut::Columns => weight.source.columns(part.start, part.len()),
            };
        }
        let known = self.part.weights.iter().position(|other| *other == weight);
        let known = known.unwrap_or_else(|| {
            self.part.weights.push(weight);
            self.part.weights.len() - 1
        });
        Ok((WeightId(known), share))
    }

    fn whole(&self, name: &str, value: ValueId) -> Result<()> {
        self.is(name, value, Spread::Whole, "a whole value")
    }

    fn is(&self, name: &str, value: ValueId, spread: Spread, expected: &str) -> Result<()> {
        match self.spread[value.0] {
            Some(found) if found == spread => Ok(()),
            Some(Spread::Share { parts }) => {
                let found = format!("one of {parts} parts on each GPU");
                Err(Error::new(name, expected, found).hint(fewer()))
            }
            Some(Spread::Whole) => {
                Err(Error::new(name, expected, "a whole value on each GPU").hint(fewer()))
            }
            None => Err(Error::new(name, expected, format!("%{} before it is written", value.0))),
        }
    }
}
