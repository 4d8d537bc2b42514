//! Tensor parallelism (Shoeybi et al. 2019): the Program of one of several ranks, each of which has
//! a share of every layer.
//!
//! The first matrices of a block are cut by rows: each rank has some heads, with the key/value
//! heads that they share, and some columns of the feed-forward. Where there are more ranks than
//! key/value heads, neighbouring ranks have the same one, each with a cache of its own. The second
//! matrices, which read the results of the first, are cut by columns: each rank's product is a
//! summand of the whole, and an `all_reduce` behind it adds them up. The residual and the bias are
//! in the summand of one rank alone; a residual that is such a sum itself and is read by nothing
//! else is not added up first, but each rank's summand of it goes into its next one. The head is
//! cut by rows, too: each rank computes the logits of some of the vocabulary, and an `all_gather`
//! gives all of them to every rank. Everything else (embedding, norms, routers, recurrent states
//! with their products) is whole on every rank. The factors of adapters are cut as their matrices
//! are: `up` by rows, or `down` by columns, whose summand then goes into the sum with the
//! product's.
//!
//! Every expert of a mixture is cut as a feed-forward is: all ranks have some columns of all
//! experts, whichever a token chooses. Ranks with some experts each would wait for the one whose
//! experts are chosen most.
//!
//! Columns are cut between blocks of the second matrix's encoding. Where blocks do not come out
//! even, ranks take turns at the longer shares, layer by layer, so that all have as much memory of
//! a model. Of experts with fewer blocks than there are ranks, some ranks have none in a layer, and
//! add zeros; another feed-forward of so few blocks, such as a shared expert, is whole on every
//! rank.

use crate::adapt::{RankShare, table};
use crate::{Node, Program, Site, ValueId, Weight, WeightId};
use formats::{Error, Hint, Result, Setting, Source};
use ops::experts::Sizes;
use ops::operation::{CacheUse, Product, Sharding, StateAccess};
use ops::project::ProjectionOperands;
use ops::{Experts, Op, Partition, Rows, Scale, Shape};
use std::ops::Range;

/// Rows of a head, or columns of a feed-forward, that stay together where shares are uneven: as
/// many as a group of a kernel has at most.
const ROW_BLOCK: usize = 32;

/// A partition whose parts ranks take by turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Deal {
    partition: Partition,
    /// The part of rank 0.
    first: usize,
}

impl Deal {
    /// The number of a rank's part. Part 0 is never empty.
    fn part(self, rank: usize) -> usize {
        (rank + self.first) % self.partition.ranks
    }

    fn range(self, rank: usize) -> Range<usize> {
        self.partition.range(self.part(rank))
    }
}

/// A rank's part of a side of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// One of as many equal parts.
    Equal(usize),
    /// The part that a deal gives the rank.
    Dealt(Deal),
}

/// A rank's part of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Some rows.
    Rows(Part),
    /// Some rows of each of several matrices that lie below one another.
    RowsOfEach(usize, Deal),
    /// Some of each row; `adds` is of the rank that adds the bias, too.
    Columns { part: Part, adds: bool },
    /// Zeros in its place: another rank adds it.
    Zeros,
}

/// The part of a value that each rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spread {
    /// All of each row.
    Whole,
    /// One of `parts` equal parts of each row: as many as there are ranks; for keys and values, as
    /// many as there are heads, if those are fewer.
    Share { parts: usize },
    /// Uneven parts of each row.
    Dealt(Deal),
}

/// The hint where ranks cannot share a model.
fn fewer() -> Hint {
    Hint::text("fewer GPUs, or ").with_value(Setting::SplitMode, "layer")
}

impl Spread {
    /// The part of a matrix of which a rank has as much; none of a whole one.
    fn part(self) -> Option<Part> {
        match self {
            Spread::Whole => None,
            Spread::Share { parts } => Some(Part::Equal(parts)),
            Spread::Dealt(deal) => Some(Part::Dealt(deal)),
        }
    }
}

impl Program {
    /// The Program of rank `rank` of `ranks`. `block` gives how many columns of a matrix stay
    /// together: as many as a block of its encoding, or a multiple of it. Its nodes match every
    /// other rank's, one by one, except for the residuals and for experts of which a rank has
    /// nothing; its results are the whole Program's, on every rank.
    ///
    /// # Errors
    /// If heads or a matrix cannot be shared, or it is no Program of blocks as above.
    pub fn shard(
        &self,
        rank: usize,
        ranks: usize,
        block: &dyn Fn(&Weight) -> Result<usize>,
    ) -> Result<Program> {
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
        let mut sharder = Sharder {
            of: self,
            part,
            spread: vec![None; self.values.len()],
            summands: vec![None; self.values.len()],
            of_heads: self.made_of(|node| matches!(node.op.sharding(), Sharding::Heads { .. })),
            of_whole: self.made_of(Node::is_whole),
            uses: self.uses(),
            uneven: Vec::new(),
            rank,
            ranks,
            block,
        };
        for layer in sharder.part.layers.iter_mut().filter(|layer| layer.kv_heads > 0) {
            layer.kv_heads = (layer.kv_heads / ranks).max(1);
        }
        if let Some(input) = self.input {
            sharder.spread[input.0] = Some(Spread::Whole);
        }
        for number in 0..self.nodes.len() {
            sharder.node(number)?;
        }
        for value in self.results.iter().chain(self.traces.iter().map(|(_, v)| v)) {
            sharder.add_up(*value)?;
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

    /// Whether each value is given by such a node, or made of what such nodes give element by
    /// element.
    fn made_of(&self, such: impl Fn(&Node) -> bool) -> Vec<bool> {
        let mut made_of = vec![false; self.values.len()];
        for node in &self.nodes {
            let alike = matches!(node.op.sharding(), Sharding::Alike | Sharding::Columns);
            let made = such(node) || alike && node.inputs.iter().any(|v| made_of[v.0]);
            node.outputs.iter().for_each(|v| made_of[v.0] = made);
        }
        made_of
    }
}

impl Node {
    /// Whether every rank has what it gives whole: also a product to which something is added.
    fn is_whole(&self) -> bool {
        matches!(self.op.sharding(), Sharding::Whole | Sharding::Experts)
            || residual(self).is_some_and(|residual| residual < self.inputs.len())
    }
}

struct Sharder<'a> {
    of: &'a Program,
    part: Program,
    spread: Vec<Option<Spread>>,
    /// For each value that is still to be added up, this rank's summand.
    summands: Vec<Option<ValueId>>,
    of_heads: Vec<bool>,
    /// Whether each value is made of one that every rank has whole.
    of_whole: Vec<bool>,
    /// How many times each value is read.
    uses: Vec<usize>,
    /// The nodes that read uneven shares, and their matrices' shapes. How many there were of a
    /// shape decides whose turn it is.
    uneven: Vec<(usize, &'a [usize])>,
    rank: usize,
    ranks: usize,
    block: &'a dyn Fn(&Weight) -> Result<usize>,
}

impl Sharder<'_> {
    fn node(&mut self, number: usize) -> Result<()> {
        let of = self.of;
        let node = &of.nodes[number];
        let name = node.op.name();
        let residual = self.adds_summands(node);
        for (i, value) in node.inputs.iter().enumerate() {
            if residual != Some(i) {
                self.add_up(*value)?;
            }
        }
        let first = node.inputs.first().and_then(|v| self.spread[v.0]);
        let apart = [Sharding::Product, Sharding::Experts].contains(&node.op.sharding())
            || matches!(node.op.sharding(), Sharding::Heads { .. });
        if !apart && node.inputs.iter().any(|v| self.spread[v.0] != first) {
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
                self.push(node, &vec![spread.part().map(Cut::Rows); node.weights.len()], spread)
            }
            Sharding::Heads { weights } => {
                for (i, input) in node.inputs.iter().enumerate() {
                    match self.parts_read(node, i) {
                        // One head, which may be a value that ranks have whole.
                        1 if self.spread[input.0] == Some(Spread::Whole) => {}
                        parts => {
                            let expected = "heads that ranks can share";
                            self.is(name, *input, Spread::Share { parts }, expected)?;
                        }
                    }
                }
                let mut node = node.clone();
                node.op.divide_heads(self.ranks);
                let parts = self.ranks;
                let cut = weights.then_some(Cut::Rows(Part::Equal(parts)));
                self.push(&node, &vec![cut; node.weights.len()], Spread::Share { parts })
            }
            Sharding::Product => self.product(node),
            Sharding::Experts => self.experts(node, number),
            Sharding::OfRank => Err(Error::new(name, "a Program of one device", "one of a rank")),
        }
    }

    /// The number of parts into which ranks cut input number `input` of an operation on heads.
    fn parts_read(&self, node: &Node, input: usize) -> usize {
        if node.op.reads_whole(input) {
            return 1;
        }
        match node.op.cache() {
            Some(CacheUse { layer, access: StateAccess::Append { keys } })
                if (keys..keys + 2).contains(&input) =>
            {
                self.of.layers[layer].kv_heads.min(self.ranks)
            }
            _ => self.ranks,
        }
    }

    /// How ranks share a value. The first operation on heads or product that reads it, or that
    /// reads a value computed from it alone, decides: keys and values have one part for each head,
    /// if there are fewer heads than ranks; columns of a feed-forward are cut between blocks of the
    /// matrix that is multiplied with them. What has to be whole there, or meets what is whole,
    /// such as the operands of a recurrent state and the gate beside its output, is whole on every
    /// rank; and so is what is multiplied again, where it comes of one product with such values
    /// (`beside_whole`): a bottleneck of theirs.
    fn shared(&mut self, value: ValueId, beside_whole: bool) -> Result<Spread> {
        let (of, ranks) = (self.of, self.ranks);
        let (mut value, equal) = (value, Spread::Share { parts: ranks });
        loop {
            let reads = |node: &Node| node.inputs.contains(&value);
            let Some(number) = of.nodes.iter().position(reads) else { return Ok(equal) };
            let reader = &of.nodes[number];
            let input = reader.inputs.iter().position(|v| *v == value).unwrap_or_default();
            if self.is_read_whole(value) {
                return Ok(Spread::Whole);
            }
            match (reader.op.sharding(), reader.outputs.first()) {
                (Sharding::Heads { .. }, _) => {
                    return Ok(Spread::Share { parts: self.parts_read(reader, input) });
                }
                (Sharding::Alike | Sharding::Columns, _)
                    if reader.inputs.iter().any(|v| self.of_whole[v.0]) =>
                {
                    return Ok(Spread::Whole);
                }
                // An operation's outputs have higher numbers than its inputs, so that this ends.
                (Sharding::Alike | Sharding::Columns, Some(&output)) => value = output,
                (Sharding::Product, _) if !self.of_heads[value.0] => {
                    if beside_whole {
                        return Ok(Spread::Whole);
                    }
                    let product = reader.op.product(reader.weights.len());
                    let Some(product) = product.filter(|p| input == 0 && is_single(p)) else {
                        return Ok(Spread::Whole);
                    };
                    let matrix = reader.weights[product.projections[0].weight];
                    let deal = self.deal(number, of.shape(value).width, matrix)?;
                    let all = deal.partition.widths().all(|columns| columns > 0);
                    let whole = product.residual.is_some()
                        || reader.outputs.iter().all(|v| self.is_read_whole(*v));
                    return Ok(match (deal.partition.is_even(), all) {
                        (true, _) => equal,
                        (false, true) => Spread::Dealt(deal),
                        (false, false) if whole => Spread::Whole,
                        (false, false) => equal,
                    });
                }
                _ => return Ok(equal),
            }
        }
    }

    /// How ranks share the columns that a node multiplies with a matrix, of which blocks stay whole.
    fn deal(&mut self, node: usize, width: usize, matrix: WeightId) -> Result<Deal> {
        let (weight, ranks) = (&self.of.weights[matrix.0], self.ranks);
        let block = (self.block)(weight)?.max(1);
        if width.is_multiple_of(block * ranks) {
            let partition = Partition { width, block: width / ranks, ranks };
            return Ok(Deal { partition, first: 0 });
        }
        // Where that makes shares less even by a sixteenth at most.
        let wide = ROW_BLOCK.next_multiple_of(block);
        let block = if width >= 16 * wide * ranks { wide } else { block };
        let partition = Partition { width, block, ranks };
        if !self.uneven.contains(&(node, &weight.shape)) {
            self.uneven.push((node, &weight.shape));
        }
        let before = self.uneven.iter().take_while(|(other, _)| *other != node);
        let turn = before.filter(|(_, shape)| *shape == weight.shape).count();
        Ok(Deal { partition, first: turn % ranks })
    }

    /// Whether the weights of an operation on a share of each row are of parts that the share has
    /// whole.
    fn divides(&self, node: &Node, spread: Option<Spread>) -> Result<()> {
        let share = spread.is_some_and(|spread| spread != Spread::Whole);
        let Some(x) = node.inputs.first().filter(|_| share) else { return Ok(()) };
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
        if let Some(residual) = residual.filter(|v| self.summands[v.0].is_none()) {
            self.whole(name, residual)?;
        }
        if let Some(part) = self.columns(node) {
            return self.summand(node, part, residual);
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

    /// The columns that a rank has of the one matrix of a product, where it has a part of what is
    /// multiplied with it.
    fn columns(&self, node: &Node) -> Option<Part> {
        let product = node.op.product(node.weights.len())?;
        match self.spread[node.inputs.first()?.0]? {
            Spread::Share { parts } if parts != self.ranks => None,
            spread => spread.part().filter(|_| is_single(&product)),
        }
    }

    /// The input that a node adds to its results and that need not be added up itself, since the
    /// results are.
    fn adds_summands(&self, node: &Node) -> Option<usize> {
        let summand = match node.op.sharding() {
            Sharding::Product => self.columns(node).is_some(),
            _ => true,
        };
        let residual = residual(node).filter(|_| summand)?;
        let value = node.inputs.get(residual)?;
        (self.uses[value.0] == 1 && self.summands[value.0].is_some()).then_some(residual)
    }

    /// Adds up a value of which each rank has a summand, if it is one.
    fn add_up(&mut self, value: ValueId) -> Result<()> {
        let Some(summand) = self.summands[value.0].take() else { return Ok(()) };
        let (op, weights) = (Op::from(ops::AllReduce), vec![]);
        let sum = Node { op, inputs: vec![summand], weights, outputs: vec![value] };
        self.push(&sum, &[], Spread::Whole)
    }

    /// Adds a node with these parts of its weights, which gives a summand of its only output. That is
    /// added up at once, unless an operation may add to it what is added up later.
    fn push_summand(&mut self, mut node: Node, cuts: &[Option<Cut>]) -> Result<()> {
        let output = node.outputs[0];
        self.part.values.push(self.of.shape(output));
        self.spread.push(Some(Spread::Whole));
        let summand = ValueId(self.part.values.len() - 1);
        node.outputs = vec![summand];
        self.summands[output.0] = Some(summand);
        self.push(&node, cuts, Spread::Whole)?;
        let adds = |node: &Node| {
            residual(node).is_some_and(|residual| node.inputs.get(residual) == Some(&output))
        };
        let later = self.uses[output.0] == 1 && self.of.nodes.iter().any(adds);
        if later { Ok(()) } else { self.add_up(output) }
    }

    /// How ranks share the rows of a head: one matrix, for the rows whose logits are wanted. None
    /// if it is no head, or has fewer rows than there are ranks.
    fn head(&self, node: &Node, projections: &[ProjectionOperands]) -> Option<Partition> {
        let &[output] = &node.outputs[..] else { return None };
        let Shape { rows, width } = self.of.shape(output);
        let block = if width > ROW_BLOCK * (self.ranks - 1) { ROW_BLOCK } else { 1 };
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
            cuts[at] = Some(Cut::Rows(Part::Dealt(Deal { partition, first: 0 })));
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
    /// the Program's results, or what is read whole.
    fn rows(&mut self, node: &Node, projections: &[ProjectionOperands]) -> Result<()> {
        let last =
            |v: &ValueId| self.of.shape(*v).rows == Rows::Outputs || self.of.results.contains(v);
        if node.outputs.iter().any(last) {
            return self.keep(node, Spread::Whole);
        }
        // A gate's two matrices make one output.
        let beside_whole = node.outputs.iter().any(|v| self.is_read_whole(*v));
        let spreads = node.outputs.iter().map(|v| self.shared(*v, beside_whole));
        let spreads = spreads.collect::<Result<Vec<Spread>>>()?;
        let mut cuts: Vec<Option<Cut>> = vec![None; node.weights.len()];
        for (i, projection) in projections.iter().enumerate() {
            let part = spreads[i.min(spreads.len() - 1)].part();
            for at in [projection.weight].into_iter().chain(projection.bias) {
                cuts[at] = part.map(Cut::Rows);
            }
        }
        self.push_each(node, &cuts, &spreads)
    }

    /// Whether an operation needs whole rows of a value on every rank: experts read scores so, since
    /// every rank has a part of all experts.
    fn is_read_whole(&self, value: ValueId) -> bool {
        let mut readers = self.of.nodes.iter().filter(|node| node.inputs.contains(&value));
        readers.any(|node| [Sharding::Whole, Sharding::Experts].contains(&node.op.sharding()))
    }

    /// A product with a rank's columns: a summand of a whole value. Rank 0 adds the bias, and the
    /// residual, if that is no sum of summands itself.
    fn summand(&mut self, node: &Node, part: Part, residual: Option<ValueId>) -> Result<()> {
        let mut product = node.clone();
        if self.rank > 0 {
            product.op = Op::from(ops::Linear);
            product.weights.truncate(1);
        }
        product.inputs.truncate(1);
        let summed = residual.and_then(|residual| self.summands[residual.0]);
        if let Some(residual) = summed.or(residual.filter(|_| self.rank == 0)) {
            product.op = Op::from(ops::LinearAdd);
            product.inputs.push(residual);
        }
        let mut cuts = vec![None; product.weights.len()];
        cuts[0] = Some(Cut::Columns { part, adds: self.rank == 0 });
        self.push_summand(product, &cuts)
    }

    /// A mixture with a rank's columns of all experts: a summand of a whole value. The rank with the
    /// first of them adds the biases of the second matrices and the residual.
    fn experts(&mut self, node: &Node, number: usize) -> Result<()> {
        let name = node.op.name();
        let residual = node.inputs.get(2).copied();
        let summed = residual.and_then(|residual| self.summands[residual.0]);
        let whole = node.inputs.iter().filter(|v| summed.is_none() || Some(**v) != residual);
        whole.into_iter().try_for_each(|v| self.whole(name, *v))?;
        let sizes = self.of.mixture(node).filter(|_| shares_experts(node));
        let Some(Sizes { experts, ff, .. }) = sizes else {
            return self.keep(node, Spread::Whole);
        };
        let deal = self.deal(number, ff, node.weights[2])?;
        let adds = deal.part(self.rank) == 0;
        let mut part = node.clone();
        part.inputs.truncate(2);
        part.inputs.extend(summed.or(residual.filter(|_| adds)));
        if deal.range(self.rank).is_empty() {
            let by = if summed.is_some() { 1.0 } else { 0.0 };
            part.op = Op::from(Scale { by });
            part.inputs = vec![summed.unwrap_or(node.inputs[0])];
            part.weights.clear();
        }
        let count = part.weights.len();
        let cut = |place: usize| match Experts::role(count, place) {
            0 | 1 | 3 | 4 => Some(Cut::RowsOfEach(experts, deal)),
            2 => Some(Cut::Columns { part: Part::Dealt(deal), adds }),
            5 if !adds => Some(Cut::Zeros),
            _ => None,
        };
        let cuts: Vec<Option<Cut>> = (0..count).map(cut).collect();
        self.push_summand(part, &cuts)
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
            match *spread {
                Spread::Whole => {}
                Spread::Dealt(deal) => *width = deal.range(self.rank).len(),
                Spread::Share { parts } if width.is_multiple_of(parts) => *width /= parts,
                Spread::Share { .. } => {
                    let expected = format!("a width that {} GPUs can share", self.ranks);
                    return Err(Error::new(node.op.name(), expected, *width));
                }
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
            let (input, output) = match gathers {
                true => (rows, columns),
                false => (columns, rows / site.matrices()),
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
        let share = match cut {
            None => None,
            Some(Cut::Zeros) => {
                weight.source = Source::Zeros(weight.shape.clone());
                None
            }
            Some(Cut::Rows(part)) => {
                let rows = self.side(&weight, 0, part)?;
                weight.shape[0] = rows.len();
                weight.source = weight.source.rows(rows.start, rows.len());
                Some(RankShare::Rows(rows))
            }
            Some(Cut::RowsOfEach(matrices, deal)) => {
                let rows = deal.range(self.rank);
                weight.shape[0] = matrices * rows.len();
                weight.source =
                    weight.source.rows_of_each(matrices, deal.partition.width, rows.clone());
                Some(RankShare::Rows(rows))
            }
            Some(Cut::Columns { part, adds }) => {
                let columns = self.side(&weight, 1, part)?;
                weight.shape[1] = columns.len();
                weight.source = weight.source.columns(columns.start, columns.len());
                Some(RankShare::Columns { columns, adds_bias: adds })
            }
        };
        let known = self.part.weights.iter().position(|other| *other == weight);
        let known = known.unwrap_or_else(|| {
            self.part.weights.push(weight);
            self.part.weights.len() - 1
        });
        Ok((WeightId(known), share))
    }

    /// The part that this rank has of the rows or columns of a weight.
    fn side(&self, weight: &Weight, axis: usize, part: Part) -> Result<Range<usize>> {
        let side = weight.shape.get(axis).copied().unwrap_or(0);
        match part {
            Part::Dealt(deal) if deal.partition.width == side => Ok(deal.range(self.rank)),
            Part::Equal(parts) if side > 0 && side.is_multiple_of(parts) => {
                let (count, part) = (side / parts, self.rank * parts / self.ranks);
                Ok(part * count..(part + 1) * count)
            }
            _ => {
                let expected =
                    format!("{} that {} GPUs can share", ["rows", "columns"][axis], self.ranks);
                let error = Error::new(&weight.name, expected, format!("{:?}", weight.shape));
                Err(error.hint(fewer()))
            }
        }
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
            Some(Spread::Dealt(_)) => {
                Err(Error::new(name, expected, "uneven parts on each GPU").hint(fewer()))
            }
            Some(Spread::Whole) => {
                Err(Error::new(name, expected, "a whole value on each GPU").hint(fewer()))
            }
            None => Err(Error::new(name, expected, format!("%{} before it is written", value.0))),
        }
    }
}

/// Whether ranks share the experts of a mixture: not where another output has what is between their
/// matrices.
fn shares_experts(node: &Node) -> bool {
    node.outputs.len() == 1
}

/// Whether a product is of one matrix and of its input as it is, so that it can be a sum of ranks'.
fn is_single(product: &Product) -> bool {
    product.projections.len() == 1 && product.norm.is_none()
}

/// The input that a product, or a mixture that ranks share, adds to its results.
fn residual(node: &Node) -> Option<usize> {
    match node.op.sharding() {
        Sharding::Product => node.op.product(node.weights.len())?.residual,
        Sharding::Experts if shares_experts(node) => Some(2),
        _ => None,
    }
}
