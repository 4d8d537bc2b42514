//! Adapters on a Program: the sites that they can change, and the Program with operations for them.

use crate::{Node, Program, ValueId, WeightId};
use formats::Result;
use ops::embed::Index;
use ops::low_rank::Delta;
use ops::{
    Binary, Embed, Experts, GateUp, LinearAdd, LowRank, Map, Op, Project, RmsNorm, Shape, Zip,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// A matrix whose products adapters can change.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Site {
    /// The weight's canonical name; `head` for an embedding table used as the head.
    pub name: String,
    /// The matrix.
    pub weight: WeightId,
    /// The bias that its product has.
    pub bias: Option<WeightId>,
    /// Columns of the matrix, or of one expert's; rows if it is an embedding table.
    pub input: usize,
    /// Rows of the matrix, or of one expert's; columns if it is an embedding table.
    pub output: usize,
    /// How many experts' matrices it stacks, each with factors of its own; none if it is one
    /// matrix.
    pub experts: Option<usize>,
    /// Whether it is an embedding table, whose rows are picked by tokens.
    pub gathers: bool,
    /// The part of the matrix that the Program has, if it is one of several ranks'.
    pub share: Option<RankShare>,
    /// The greatest rank of its factors, where that is more than an executor's options say for all
    /// sites: of tables that an adapter has anew.
    pub rank: Option<usize>,
}

/// The part of a matrix, or of each expert's, that one of several ranks has. Its factors are cut
/// alike.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum RankShare {
    /// Some rows.
    Rows(Range<usize>),
    /// Some columns, whose products all ranks add up.
    Columns {
        /// Which.
        columns: Range<usize>,
        /// Whether the rank is the one that adds the bias.
        adds_bias: bool,
    },
}

impl Site {
    /// How many pairs of factors it has.
    pub fn matrices(&self) -> usize {
        self.experts.unwrap_or(1)
    }

    /// The greatest rank of its factors, beside `others` for sites that say nothing.
    pub fn most_ranks(&self, others: usize) -> usize {
        self.rank.map_or(others, |own| own.max(others))
    }

    /// The part of a change of the whole matrix.
    fn part(&self, delta: &Delta) -> Delta {
        match &self.share {
            None => delta.clone(),
            Some(RankShare::Rows(rows)) => delta.rows(self.matrices(), rows.clone()),
            Some(RankShare::Columns { columns, adds_bias }) => {
                delta.columns(self.matrices(), columns.clone(), *adds_bias)
            }
        }
    }
}

/// An adapter: low-rank factors by the names of [`Site`]s.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct AdapterFactors {
    /// The factors at each site that it changes.
    pub deltas: BTreeMap<String, Delta>,
}

impl AdapterFactors {
    /// The greatest rank.
    pub fn rank(&self) -> usize {
        self.deltas.values().map(|delta| delta.rank).max().unwrap_or(0)
    }

    /// The part of the adapter at the given sites: the sites of the Program that it fits, or
    /// some of them, or a rank's shares of them.
    pub fn part(&self, sites: &[Site]) -> AdapterFactors {
        let own = sites
            .iter()
            .filter_map(|site| Some((site.name.clone(), site.part(self.deltas.get(&site.name)?))));
        AdapterFactors { deltas: own.collect() }
    }

    /// Checks that each of its factors fits one of the sites, with room for `rank` ranks at those
    /// that do not say [more](Site::most_ranks).
    ///
    /// # Errors
    /// As [`AdapterFactors::check`]; a greater rank.
    pub fn check_room(&self, sites: &[Site], rank: usize) -> Result<()> {
        self.check(sites)?;
        for (name, delta) in &self.deltas {
            let site = sites.iter().find(|site| site.name == *name);
            let most = site.map_or(rank, |site| site.most_ranks(rank));
            if delta.rank > most {
                let expected = format!("a rank up to {most}, which there is room for");
                let place = if most == rank { "adapter" } else { name };
                return Err(formats::Error::new(place, expected, delta.rank));
            }
        }
        Ok(())
    }

    /// Checks that each of its factors fits one of the sites.
    ///
    /// # Errors
    /// A site that does not exist, or factors of other sizes.
    pub fn check(&self, sites: &[Site]) -> Result<()> {
        for (name, delta) in &self.deltas {
            let Some(site) = sites.iter().find(|site| site.name == *name) else {
                let expected = "a matrix that the model was loaded to adapt";
                return Err(formats::Error::new(name, expected, "none of that name"));
            };
            delta.check(name, site.matrices(), [site.input, site.output])?;
        }
        Ok(())
    }
}

impl Program {
    /// The greatest rank at any site, with room for `others` at those that say nothing.
    pub fn most_ranks(&self, others: usize) -> usize {
        self.sites.iter().fold(others, |most, site| most.max(site.most_ranks(others)))
    }

    /// Every matrix that adapters can change, in order of use: none that multiplies rows that are
    /// rounded first, since factors are for the rows as they were; and none that several operations
    /// multiply with, since elsewhere each use has factors of its own.
    pub fn adaptable(&self) -> Vec<Site> {
        let rounds = |node: &&Node| matches!(node.op, Op::RoundRows(_));
        let rounded: Vec<ValueId> =
            self.nodes.iter().filter(rounds).flat_map(|node| node.outputs.clone()).collect();
        let tables: Vec<WeightId> = self.nodes.iter().filter_map(table).collect();
        let mut uses = vec![0; self.weights.len()];
        for node in &self.nodes {
            let product = node.op.product(node.weights.len());
            let matrices = product.into_iter().flat_map(|product| product.projections);
            let mut own: Vec<usize> = matrices.map(|p| node.weights[p.weight].0).collect();
            own.sort_unstable();
            own.dedup();
            own.into_iter().for_each(|weight| uses[weight] += 1);
        }
        let mut sites: Vec<Site> = Vec::new();
        for node in &self.nodes {
            if node.inputs.first().is_some_and(|x| rounded.contains(x)) {
                continue;
            }
            let product = node.op.product(node.weights.len());
            let matrices = product.into_iter().flat_map(|product| product.projections);
            let multiplied =
                matrices.map(|p| (node.weights[p.weight], p.bias.map(|b| node.weights[b]), false));
            let gathered = table(node).map(|weight| (weight, None, true));
            for (weight, bias, gathers) in multiplied.chain(gathered) {
                let [rows, columns] = *self.weights[weight.0].shape else { continue };
                if !gathers && uses[weight.0] > 1 {
                    continue;
                }
                let tied = !gathers && tables.contains(&weight);
                let name = if tied { "head" } else { &self.weights[weight.0].name };
                let (input, output) = if gathers { (rows, columns) } else { (columns, rows) };
                let (name, share) = (name.to_owned(), None);
                let (experts, rank) = (None, None);
                let site =
                    Site { name, weight, bias, input, output, experts, gathers, share, rank };
                if !sites.iter().any(|other| other.name == site.name) {
                    sites.push(site);
                }
            }
            sites.extend(self.stacks(node));
        }
        sites
    }

    /// The three stacks of experts' matrices of a mixture.
    fn stacks(&self, node: &Node) -> Vec<Site> {
        let (Op::Experts(_), Some(sizes)) = (&node.op, self.mixture(node)) else {
            return Vec::new();
        };
        let stack = |(i, [input, output]): (usize, [usize; 2])| Site {
            name: self.weights[node.weights[i].0].name.clone(),
            weight: node.weights[i],
            bias: Experts::bias(&node.weights, i).copied(),
            input,
            output,
            experts: Some(sizes.experts),
            gathers: false,
            share: None,
            rank: None,
        };
        let (width, ff) = (sizes.width, sizes.ff);
        [[width, ff], [width, ff], [ff, width]].into_iter().enumerate().map(stack).collect()
    }

    /// A copy of the Program whose [`sites`](Program::sites) are all matrices whose names are
    /// `wanted`.
    pub fn with_sites(&self, wanted: &dyn Fn(&str) -> bool) -> Program {
        let sites = self.adaptable().into_iter().filter(|site| wanted(&site.name)).collect();
        Program { sites, ..self.clone() }
    }

    /// A copy of the Program with a [`LowRank`] after the product of every site, as the reference
    /// interpreter computes adapters; devices take the Program as it is. Mixtures of experts stay
    /// as they are. The Program must be [fused](crate::fuse); operations fused with a product that
    /// has a site are separated again.
    pub fn adapted(&self) -> Program {
        let whole = Program { nodes: Vec::new(), ..self.clone() };
        let mut adapting = Adapting { program: whole };
        for node in &self.nodes {
            adapting.node(node);
        }
        adapting.program
    }
}

impl Node {
    /// For each matrix that the node multiplies with, or whose rows tokens pick, its index in
    /// `sites`; for a mixture those of its three stacks.
    pub fn sites(&self, sites: &[Site]) -> Vec<Option<usize>> {
        let one = |weight: WeightId, gathers: bool| {
            sites.iter().position(|site| site.weight == weight && site.gathers == gathers)
        };
        match self.op.product(self.weights.len()) {
            Some(product) => {
                let weights = product.projections.iter().map(|p| self.weights[p.weight]);
                weights.map(|weight| one(weight, false)).collect()
            }
            None if matches!(self.op, Op::Experts(_)) => {
                self.weights.iter().take(3).map(|weight| one(*weight, false)).collect()
            }
            None => vec![table(self).and_then(|weight| one(weight, true))],
        }
    }
}

/// The embedding table from which tokens pick rows, if the node picks rows so.
pub(crate) fn table(node: &Node) -> Option<WeightId> {
    match node.op {
        Op::Embed(Embed { index: Index::Token }) => node.weights.first().copied(),
        _ => None,
    }
}

struct Adapting {
    program: Program,
}

impl Adapting {
    fn value(&mut self, shape: Shape) -> ValueId {
        self.program.values.push(shape);
        ValueId(self.program.values.len() - 1)
    }

    fn push(
        &mut self,
        op: impl Into<Op>,
        inputs: Vec<ValueId>,
        weights: Vec<WeightId>,
        outputs: Vec<ValueId>,
    ) {
        self.program.nodes.push(Node { op: op.into(), inputs, weights, outputs });
    }

    /// Records the adapter of a site: from the product `y` to `output`, with `others` as further
    /// inputs.
    fn low_rank(&mut self, site: usize, y: ValueId, others: &[ValueId], output: ValueId) {
        let inputs = [&[y], others].concat();
        self.push(LowRank { site }, inputs, Vec::new(), vec![output]);
    }

    fn node(&mut self, node: &Node) {
        let product = node.op.product(node.weights.len());
        let sites = node.sites(&self.program.sites);
        // A mixture applies its experts' factors itself.
        if sites.iter().all(Option::is_none) || matches!(node.op, Op::Experts(_)) {
            self.program.nodes.push(node.clone());
            return;
        }
        let mut node = node.clone();
        let mut x = node.inputs.first().copied();
        if let (Some(eps), Some(value)) = (product.as_ref().and_then(|p| p.norm), x) {
            let normed = self.value(self.program.shape(value));
            let weight = node.weights.remove(0);
            self.push(RmsNorm { eps }, vec![value], vec![weight], vec![normed]);
            node.inputs[0] = normed;
            x = Some(normed);
        }
        let (inputs, outputs) = (node.inputs.clone(), node.outputs.clone());
        // First the products, each into a new value if a site follows; then the sites.
        let gate = match node.op {
            Op::GateUp(GateUp { act, .. }) => Some(act),
            _ => None,
        };
        let shape = self.program.shape(outputs[0]);
        let wanted: Vec<ValueId> = match gate {
            Some(_) => sites.iter().map(|_| self.value(shape)).collect(),
            None => outputs.clone(),
        };
        let made: Vec<ValueId> = sites
            .iter()
            .zip(&wanted)
            .map(|(site, &value)| match site {
                Some(_) => self.value(self.program.shape(value)),
                None => value,
            })
            .collect();
        let op = match node.op {
            Op::Project(Project { biases, .. }) => Op::Project(Project { norm: None, biases }),
            Op::GateUp(_) => Op::Project(Project { norm: None, biases: vec![false; 2] }),
            op => op,
        };
        let adds = op == Op::from(LinearAdd);
        self.push(op, inputs.clone(), node.weights, made.clone());
        let others: Vec<ValueId> = if adds { inputs } else { x.into_iter().collect() };
        for (i, site) in sites.iter().enumerate() {
            if let Some(site) = site {
                self.low_rank(*site, made[i], &others, wanted[i]);
            }
        }
        if let Some(act) = gate {
            let mapped = self.value(shape);
            self.push(Map(act), vec![wanted[0]], Vec::new(), vec![mapped]);
            self.push(Zip(Binary::Mul), vec![mapped, wanted[1]], Vec::new(), outputs);
        }
    }
}
