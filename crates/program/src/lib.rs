//! Programs: recorded by a model's `forward`, and the transforms over them.
//!
//! A [`Program`] is a flat, typed list of operations over symbolic rows. It is a value: [`fuse()`]
//! rewrites it, [`plan_memory`] lays its activations out in one arena, [`mod@reference`] runs it
//! slowly in plain loops, and a device compiles it once per shape class and then replays it for one
//! small [`Step`] after another.

mod adapt;
mod fuse;
mod observe;
mod offload;
mod plan;
pub mod reference;
mod shard;
mod split;
mod step;
mod verify;
mod weight;

use formats::{Result, Tensors};
use ops::embed::Index;
use ops::gradient::Gradient;
use ops::operation::Operand;
use ops::{Op, Rope, Shape};
use std::fmt;

pub use adapt::{AdapterFactors, RankShare, Site};
pub use fuse::{fuse, fuse_gates, fuse_gradients, fuse_mixtures};
pub use observe::{Input, Routed};
pub use offload::Offloaded;
pub use plan::{ArenaPlan, plan_memory, plan_sizes};
pub use split::ProgramPart;
pub use step::{
    CHOSEN, Choose, Choosing, Limits, OwnedStep, Sequence, Step, StepKind, StepMemory, Table,
    recycle,
};
pub use weight::Weight;

/// An activation of a [`Program`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct ValueId(pub usize);

/// A weight of a [`Program`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct WeightId(pub usize);

/// One operation with its operands.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Node {
    /// The operation to compute.
    pub op: Op,
    /// Activations read, in the operation's order.
    pub inputs: Vec<ValueId>,
    /// Weights read, in the operation's order.
    pub weights: Vec<WeightId>,
    /// Activations written.
    pub outputs: Vec<ValueId>,
}

impl Node {
    /// The activation of an operand, which must exist.
    pub fn value(&self, operand: Operand) -> ValueId {
        match operand {
            Operand::Input(i) => self.inputs[i],
            Operand::Output(i) => self.outputs[i],
        }
    }
}

/// One cache layer of a Program: keys and values of every position, or a recurrent state that each
/// position replaces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CacheLayer {
    /// Key/value heads; 0 for a state.
    pub kv_heads: usize,
    /// Elements per head; 0 for a state.
    pub head_dim: usize,
    /// Number of positions that a query sees, itself included; `None` means all.
    pub window: Option<usize>,
    /// Elements of a recurrent state, in f32; 0 for keys and values.
    pub state: usize,
    /// Whether keys are written alone: values are the keys, or nothing reads values.
    #[serde(default)]
    pub keys_only: bool,
}

impl CacheLayer {
    /// A layer of keys and values.
    pub fn keys_values(kv_heads: usize, head_dim: usize, window: Option<usize>) -> CacheLayer {
        CacheLayer { kv_heads, head_dim, window, ..CacheLayer::default() }
    }

    /// A layer of keys alone, which are the values, too.
    pub fn keys(kv_heads: usize, head_dim: usize) -> CacheLayer {
        CacheLayer { keys_only: true, ..CacheLayer::keys_values(kv_heads, head_dim, None) }
    }

    /// A layer with a recurrent state of this many elements. A cache block holds the state after
    /// the last of its positions that was computed, so that the states at multiples of
    /// [`BLOCK_TOKENS`] are kept.
    pub fn carried(elements: usize) -> CacheLayer {
        // A position needs the state of the one before it.
        CacheLayer { window: Some(2), state: elements, ..CacheLayer::default() }
    }

    /// Its group; layers of one group share block tables.
    pub fn group(&self) -> Group {
        Group { window: self.window, carried: self.state > 0 }
    }
}

/// A kind of cache layers; all layers of a group share one block table per sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group {
    /// Number of positions that one position looks back on, itself included; `None` means all.
    pub window: Option<usize>,
    /// Whether a block holds a state, which is overwritten, rather than an entry for each position.
    pub carried: bool,
}

impl From<Option<usize>> for Group {
    /// Keys and values within a window.
    fn from(window: Option<usize>) -> Group {
        Group { window, carried: false }
    }
}

/// A recorded computation.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Program {
    /// Shapes of all activations, by [`ValueId`].
    pub values: Vec<Shape>,
    /// All weights, by [`WeightId`].
    pub weights: Vec<Weight>,
    /// Cache layers, by the `layer` of the operations.
    pub layers: Vec<CacheLayer>,
    /// Matrices that adapters can change ([`Program::with_sites`]), indexed by the `site` of
    /// operations once the Program is [adapted](Program::adapted).
    pub sites: Vec<Site>,
    /// A value that every replay is given, with a row per token: the result of the part before this
    /// one.
    pub input: Option<ValueId>,
    /// The operations in order.
    pub nodes: Vec<Node>,
    /// Values that outlive a replay: the logits first, then traced values.
    pub results: Vec<ValueId>,
    /// Names of traced values, for inspection and tests.
    pub traces: Vec<(String, ValueId)>,
}

/// Positions per block of the key/value cache.
pub const BLOCK_TOKENS: usize = 256;

impl Program {
    /// The sizes of a node's mixture of experts, if it is one or the gradient of one.
    pub fn mixture(&self, node: &Node) -> Option<ops::experts::Sizes> {
        let op = match &node.op {
            Op::Experts(op) => op,
            Op::Gradient(Gradient::ExpertsBackward(of)) => &of.of,
            Op::Gradient(Gradient::AdaptedExperts(of)) => &of.of,
            Op::Gradient(Gradient::AdaptedExpertsBackward(of)) => &of.of,
            _ => return None,
        };
        let gate = &self.weights[node.weights.first()?.0];
        op.sizes([0, 1].map(|i| self.shape(node.inputs[i]).width), &[&gate.shape]).ok()
    }

    /// Shape of a value.
    pub fn shape(&self, value: ValueId) -> Shape {
        self.values[value.0]
    }

    /// The groups of the cache layers, in order of first use.
    pub fn groups(&self) -> Vec<Group> {
        let mut groups = Vec::new();
        for layer in self.layers.iter().map(CacheLayer::group) {
            if !groups.contains(&layer) {
                groups.push(layer);
            }
        }
        groups
    }

    /// Limits every query to the last `positions` positions, itself included, as in a context that
    /// forgets its oldest tokens.
    pub fn bound(&mut self, positions: usize) {
        let least = |window: &mut Option<usize>| {
            *window = Some(window.map_or(positions, |w| w.min(positions)));
        };
        let kept = self.layers.iter_mut().filter(|layer| layer.state == 0);
        kept.for_each(|layer| least(&mut layer.window));
        self.nodes.iter_mut().for_each(|node| node.op.bound(positions));
    }

    /// The group of each layer: an index into [`Program::groups`].
    pub fn layer_groups(&self) -> Vec<usize> {
        let groups = self.groups();
        let group =
            |layer: &CacheLayer| groups.iter().position(|g| *g == layer.group()).unwrap_or(0);
        self.layers.iter().map(group).collect()
    }

    /// Bytes of all weights as stored in the model's files.
    ///
    /// # Errors
    /// A weight that is missing or that cannot be described.
    pub fn stored_bytes(&self, tensors: &Tensors) -> Result<u64> {
        self.weights.iter().map(|weight| weight.stored_bytes(tensors)).sum()
    }

    /// The distinct rotations, in order of first use.
    pub fn ropes(&self) -> Vec<Rope> {
        let mut ropes: Vec<Rope> = Vec::new();
        for rope in self.nodes.iter().filter_map(|node| node.op.rope()) {
            if !ropes.contains(rope) {
                ropes.push(rope.clone());
            }
        }
        ropes
    }

    /// The share of each weight that one token reads. An embedding table counts 0, since only a row
    /// is read; a mixture counts the experts that are used.
    pub fn shares_read(&self) -> Vec<f64> {
        let mut shares = vec![0.0_f64; self.weights.len()];
        for node in self.nodes.iter().filter(|node| node.op.gathers().is_none()) {
            let inputs: Vec<Shape> = node.inputs.iter().map(|v| self.shape(*v)).collect();
            let experts = node.op.experts(&inputs);
            let share = experts.map_or(1.0, |(used, count)| used as f64 / count as f64);
            node.weights.iter().for_each(|w| shares[w.0] = shares[w.0].max(share));
        }
        shares
    }

    /// Number of learned positions; `usize::MAX` if the model has no learned positions.
    pub fn learned_positions(&self) -> usize {
        let by_position = |node: &&Node| node.op.gathers() == Some(Index::Position);
        let tables = self.nodes.iter().filter(by_position).flat_map(|node| &node.weights);
        tables.map(|w| self.weights[w.0].shape[0]).min().unwrap_or(usize::MAX)
    }

    /// How many times each value is read; results count once more.
    pub fn uses(&self) -> Vec<usize> {
        let mut uses = vec![0; self.values.len()];
        for value in self.nodes.iter().flat_map(|node| &node.inputs).chain(&self.results) {
            uses[value.0] += 1;
        }
        uses
    }

    /// The node that writes each value.
    pub fn writers(&self) -> Vec<Option<usize>> {
        let mut writers = vec![None; self.values.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            for value in &node.outputs {
                writers[value.0] = Some(i);
            }
        }
        writers
    }
}

impl fmt::Display for Program {
    /// One line per operation: `%4, %5 = project %3; blocks.0.attention.norm, ..`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |values: &[ValueId]| {
            values.iter().map(|v| format!("%{}", v.0)).collect::<Vec<_>>().join(", ")
        };
        if let Some(input) = self.input {
            writeln!(f, "input {}", list(&[input]))?;
        }
        for node in &self.nodes {
            if !node.outputs.is_empty() {
                let shape = self.shape(node.outputs[0]);
                write!(f, "{}: [{:?}, {}] = ", list(&node.outputs), shape.rows, shape.width)?;
            }
            write!(f, "{} {}", node.op.name(), list(&node.inputs))?;
            if let Some(layer) = node.op.layer() {
                write!(f, " @{layer}")?;
            }
            if let Some(site) = node.op.site().and_then(|site| self.sites.get(site)) {
                write!(f, " @{}", site.name)?;
            }
            if !node.weights.is_empty() {
                let names: Vec<&str> =
                    node.weights.iter().map(|w| self.weights[w.0].name.as_str()).collect();
                write!(f, "; {}", names.join(", "))?;
            }
            writeln!(f)?;
        }
        writeln!(f, "return {}", list(&self.results))
    }
}
