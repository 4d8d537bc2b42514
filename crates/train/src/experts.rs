//! Low-rank factors of experts, as PEFT names, begins and stores those of its `target_parameters`.
//!
//! The gates and ups of a mixture share one parameter `A` `[experts * rank, width]` and have one `B`
//! `[2, experts * rank, ff]`, or `[1, experts * rank, ff]` where gates are ups; its second matrices
//! have `A` `[experts * rank, ff]` and `B` `[experts * rank, width]`: rows of ranks, as
//! [`ops::gradient::ExpertFactors`] has them.

use crate::peft::{Draws, bytes, placed};
use crate::{LoraOptions, Parameter};
use adapters::Base;
use formats::{Error, ErrorKind, Result, Source};
use ops::Op;
use ops::experts::Sizes;
use ops::gradient::{AdaptedExperts, ExpertFactors};
use program::{AdapterFactors, Node, Program, Weight, WeightId};

/// The name by which `sites` select experts.
pub(crate) const SITE: &str = "experts";

/// The factors of one mixture.
#[derive(Debug, Clone)]
pub(crate) struct ExpertModule {
    /// Its module in Hugging Face's model: `model.layers.0.mlp.experts`.
    name: String,
    /// The stacks, by their canonical names.
    stacks: [String; 3],
    sizes: Sizes,
    rank: usize,
    how: ExpertFactors,
    /// Whether gates are ups: one matrix whose factors both have.
    ups_alone: bool,
    /// The weights, in the order of [`ExpertFactors`].
    weights: Vec<WeightId>,
}

/// A weight of a mixture's factors, and the elements of which parameter it is.
pub(crate) struct ExpertWeight {
    pub(crate) weight: WeightId,
    pub(crate) parameter: usize,
    pub(crate) elements: std::ops::Range<usize>,
    /// Whether it begins with zeros, so that without the adapter it is zeros.
    pub(crate) up: bool,
}

/// The same Program with factors beside the experts of those mixtures that `wanted` says: beside
/// gates and ups, and beside second matrices, by the names of their stacks.
///
/// # Errors
/// A mixture without a block, which is a fault of the Program.
pub(crate) fn adapt(
    base: &Base<'_>,
    program: &Program,
    wanted: &dyn Fn(&[String; 3]) -> [bool; 2],
    options: &LoraOptions,
) -> Result<(Program, Vec<ExpertModule>)> {
    let mut adapted = Program { nodes: Vec::new(), ..program.clone() };
    let mut all = Vec::new();
    for node in &program.nodes {
        let (Op::Experts(of), Some(sizes)) = (&node.op, program.mixture(node)) else {
            adapted.nodes.push(node.clone());
            continue;
        };
        let stacks = [0, 1, 2].map(|i| program.weights[node.weights[i].0].name.clone());
        let [halves, outer] = wanted(&stacks);
        if !(halves || outer) {
            adapted.nodes.push(node.clone());
            continue;
        }
        let ups_alone = node.weights[0] == node.weights[1];
        let block = stacks[0].strip_prefix("blocks.").and_then(|name| name.split('.').next());
        let block = block.ok_or_else(|| Error::new(&stacks[0], "experts of a block", "others"))?;
        let module = base.config.architecture.experts_module();
        let name = placed(base, format!("model.layers.{block}.{module}"));
        let how = ExpertFactors { scale: options.scale(), halves, outer };
        let (width, ff) = (sizes.width, sizes.ff);
        let columns = [(halves, vec![width, ff, ff]), (outer, vec![ff, width])];
        let columns = columns.into_iter().filter(|(has, _)| *has).flat_map(|(_, columns)| columns);
        let mut weights = Vec::new();
        for (i, columns) in columns.enumerate() {
            let shape = vec![sizes.experts * options.rank, columns];
            let (name, source) = (format!("{name}.factor.{i}"), Source::Zeros(shape.clone()));
            weights.push(WeightId(adapted.weights.len()));
            adapted.weights.push(Weight { name, shape, source });
        }
        let op = Op::from(AdaptedExperts { of: *of, factors: how });
        let own = [&node.weights[..], &weights].concat();
        adapted.nodes.push(Node { op, weights: own, ..node.clone() });
        let rank = options.rank;
        all.push(ExpertModule { name, stacks, sizes, rank, how, ups_alone, weights });
    }
    adapted.verify()?;
    Ok((adapted, all))
}

/// The factors of some of a mixture's matrices, which are one parameter of Hugging Face's model:
/// gates and ups, or second matrices.
struct Half<'a> {
    of: &'a ExpertModule,
    gate_up: bool,
    /// Elements that an expert reads, and that each of `parts` matrices gives.
    input: usize,
    output: usize,
    parts: usize,
}

impl ExpertModule {
    fn halves(&self) -> Vec<Half<'_>> {
        let Sizes { width, ff, .. } = self.sizes;
        let parts = if self.ups_alone { 1 } else { 2 };
        let both = Half { of: self, gate_up: true, input: width, output: ff, parts };
        let outer = Half { of: self, gate_up: false, input: ff, output: width, parts: 1 };
        let all = [(self.how.halves, both), (self.how.outer, outer)];
        all.into_iter().filter(|(has, _)| *has).map(|(_, half)| half).collect()
    }

    /// How many parameters it has.
    pub(crate) fn count(&self) -> usize {
        2 * self.halves().len()
    }

    /// The weights of its factors; its parameters begin with number `first`.
    pub(crate) fn trained(&self, first: usize) -> Vec<ExpertWeight> {
        let mut weights = self.weights.iter();
        let mut all = Vec::new();
        for (i, half) in self.halves().into_iter().enumerate() {
            let (parameter, [low, high]) = (first + 2 * i, half.elements());
            let down = weights.by_ref().take(1).map(|weight| (weight, parameter, 0..low, false));
            all.extend(down);
            let ups = weights.by_ref().take(if half.gate_up { 2 } else { 1 }).enumerate();
            // Gates that are ups have the same elements, whose gradients add up.
            all.extend(ups.map(|(i, weight)| {
                let part = i.min(half.parts - 1);
                (weight, parameter + 1, part * high..(part + 1) * high, true)
            }));
        }
        let weight = |(weight, parameter, elements, up): (&WeightId, usize, _, bool)| {
            ExpertWeight { weight: *weight, parameter, elements, up }
        };
        all.into_iter().map(weight).collect()
    }

    /// The parameters at their beginning; `index` tells the mixture from other modules.
    pub(crate) fn parameters(&self, index: usize, seed: u64) -> Vec<Parameter> {
        let mut all = Vec::new();
        let mut draws = Draws::new(seed, index as u64);
        for half in self.halves() {
            let ([low, high], ranks) = (half.elements(), half.ranks());
            let bound = 1.0 / (half.input as f32).sqrt();
            let down: Vec<f32> = (0..low).map(|_| draws.next() * bound).collect();
            let up = vec![0.0; half.parts * high];
            let shapes = [vec![ranks, half.input], vec![half.parts, ranks, half.output]];
            for ((part, shape), values) in ["A", "B"].into_iter().zip(shapes).zip([down, up]) {
                let name = half.name(part);
                all.push(Parameter { name, shape, values, decays: true });
            }
        }
        all
    }

    /// Has its parameters begin as an adapter's.
    ///
    /// # Errors
    /// Gates and ups of which one is not changed, or by another `down`.
    pub(crate) fn begin(
        &self,
        parameters: &mut [Parameter],
        adapter: &AdapterFactors,
    ) -> Result<()> {
        for (half, own) in self.halves().into_iter().zip(parameters.chunks_exact_mut(2)) {
            let stacks = if half.gate_up { &self.stacks[..half.parts] } else { &self.stacks[2..] };
            let high = half.elements()[1];
            for (part, stack) in stacks.iter().enumerate() {
                let delta = adapter.deltas.get(stack);
                let same = delta.filter(|delta| part == 0 || delta.down == own[0].values);
                let delta = same.ok_or_else(|| {
                    let expected = "one adapter of all that the module holds";
                    Error::new(&self.name, expected, "other factors for some of it")
                        .of(ErrorKind::Unsupported)
                })?;
                own[0].values.copy_from_slice(&delta.down);
                let to = &mut own[1].values[part * high..(part + 1) * high];
                half.each(|e, k, o| {
                    let from = (e * half.output + o) * self.rank + k;
                    to[half.place(e, k, o)] = delta.up[from];
                });
            }
        }
        Ok(())
    }

    /// Its tensors as PEFT stores them, with their shapes, by name.
    pub(crate) fn export(
        &self,
        base: &Base<'_>,
        parameters: &[Parameter],
    ) -> Vec<(String, [usize; 2], Vec<u8>)> {
        let architecture = base.config.architecture;
        let (by_turns, turned) = (architecture.gates_by_turns(), architecture.turns_experts());
        let mut all = Vec::new();
        for (half, own) in self.halves().into_iter().zip(parameters.chunks_exact(2)) {
            let (ranks, experts, [_, high]) = (half.ranks(), self.sizes.experts, half.elements());
            let output = half.parts * half.output;
            let row = |part: usize, o: usize| match by_turns {
                true => o * half.parts + part,
                false => part * half.output + o,
            };
            // `[expert, rank, column]`, and `[column, rank, expert]`.
            let [mut a, mut b] = [half.input, output].map(|columns| vec![0f32; ranks * columns]);
            if turned {
                std::mem::swap(&mut a, &mut b);
            }
            let (a_columns, b_columns) =
                if turned { (output, half.input) } else { (half.input, output) };
            let mut put = |e: usize, k: usize, column: usize, in_a: bool, value: f32| match in_a {
                true => a[(e * self.rank + k) * a_columns + column] = value,
                false => b[column * ranks + k * experts + e] = value,
            };
            for (i, value) in own[0].values.iter().enumerate() {
                let (row, column) = (i / half.input, i % half.input);
                put(row / self.rank, row % self.rank, column, !turned, *value);
            }
            for part in 0..half.parts {
                let values = &own[1].values[part * high..(part + 1) * high];
                half.each(|e, k, o| {
                    put(e, k, row(part, o), turned, values[half.place(e, k, o)]);
                });
            }
            all.push((own[0].name.clone(), [ranks, a_columns], bytes(&a)));
            all.push((own[1].name.clone(), [b_columns, ranks], bytes(&b)));
        }
        all
    }

    /// The parameters of Hugging Face's model that have factors, by their whole names.
    pub(crate) fn targets(&self) -> Vec<String> {
        let first = if self.ups_alone { "up_proj" } else { "gate_up_proj" };
        let end = |half: Half<'_>| if half.gate_up { first } else { "down_proj" };
        self.halves().into_iter().map(|half| format!("{}.{}", self.name, end(half))).collect()
    }
}

impl Half<'_> {
    /// Ranks of all experts.
    fn ranks(&self) -> usize {
        self.of.sizes.experts * self.of.rank
    }

    /// Elements of `A`, and of `B` of each part.
    fn elements(&self) -> [usize; 2] {
        [self.input, self.output].map(|columns| self.ranks() * columns)
    }

    /// The place of an element of a part's `B`.
    fn place(&self, expert: usize, rank: usize, column: usize) -> usize {
        (expert * self.of.rank + rank) * self.output + column
    }

    /// Calls `f` with each expert, rank and column of a part's `B`.
    fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        for e in 0..self.of.sizes.experts {
            for k in 0..self.of.rank {
                (0..self.output).for_each(|o| f(e, k, o));
            }
        }
    }

    /// The name of a tensor. PEFT wraps a module once for each of its parameters, the second around
    /// the first.
    fn name(&self, part: &str) -> String {
        let inner = self.gate_up && self.of.how.outer;
        let wrapped = if inner { ".base_layer" } else { "" };
        format!("base_model.model.{}{wrapped}.lora_{part}.weight", self.of.name)
    }
}
