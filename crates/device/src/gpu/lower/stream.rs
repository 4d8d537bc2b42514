//! Products of rows that decode together: see [`ops::linear::stream`].

use formats::{Error, Result};
use ops::linear::stream::{
    End, Job, Share, StreamTiling, StreamTypes, add_splits, add_splits_laid, lay_rows, stream,
    stream_warpgroups,
};
use ops::packed::Format;
use ops::project::ProjectedMatrix;
use program::{Node, WeightId};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::adapters::Sites;
use super::products::Matrix;
use super::{Lowering, Recorder, Slot, TypedSlot};

/// Normed rows that a launch has laid for a node behind it.
pub(super) struct Ready {
    /// The number of the node.
    number: usize,
    /// The weight of its norm.
    norm: WeightId,
    y: TypedSlot,
    factors: Slot,
}

impl Lowering {
    /// How warpgroups take a product of rows that decode together, if they do.
    fn by_warpgroups(&self, job: &Job, width: usize) -> Option<StreamTiling> {
        let [stored, split] = self.facts.tuned.thresholds.warpgroup_sequences;
        let taken = job.formats.iter().all(|format| match format {
            Format::Dense(scalar) => *scalar == self.wide && self.sequences >= stored,
            _ => true,
        });
        let many = self.sequences >= split;
        let pick = || StreamTiling::by_warpgroups(job, width as u32, many);
        (self.facts.wgmma && taken).then(pick).flatten()
    }

    /// The tiling by which warpgroups take a node's rows that decode together, if they do, the
    /// format of its first matrix, and the rows of all.
    fn warpgroups_of(&self, node: &Node, rows: usize) -> Option<(StreamTiling, Format, usize)> {
        let product = node.op.product(node.weights.len())?;
        let weights = || product.projections.iter().map(|p| node.weights[p.weight].0);
        let formats: Vec<Format> = weights().map(|w| self.formats[w]).collect::<Option<_>>()?;
        let outs = || weights().map(|w| self.program.weights[w].shape[0]);
        let out = if product.gated { outs().next()? } else { outs().sum() };
        let job = self.job(&formats, out as u32, rows as u32, product.gated);
        let tiling = self.by_warpgroups(&job, self.program.shape(node.inputs[0]).width)?;
        Some((tiling, *formats.first()?, out))
    }

    /// Floats of the parts of sums that threadgroups share, in a product of rows that decode
    /// together; see [`add_splits`].
    pub(in crate::gpu) fn split_floats(&self, node: &Node, rows: usize) -> usize {
        match self.warpgroups_of(node, rows) {
            Some((tiling, _, out)) if tiling.splits() > 1 => tiling.splits() as usize * rows * out,
            _ => 0,
        }
    }
}

impl Recorder<'_> {
    /// Products of rows that decode together, which read each matrix once for many of them: see
    /// [`stream`].
    #[allow(clippy::too_many_arguments, reason = "what a product is made of")]
    pub(super) fn stream(
        &mut self,
        (x, norm): (TypedSlot, Option<(f32, WeightId)>),
        matrices: &[Matrix],
        (rows, width): (usize, usize),
        end: End,
        residual: Option<Slot>,
        results: &[TypedSlot],
        sites: Option<Sites>,
    ) -> Result<()> {
        let shapes: Vec<(Format, u32)> =
            matrices.iter().map(|m| self.matrix(m.weight)).collect::<Result<_>>()?;
        let formats: Vec<Format> = shapes.iter().map(|s| s.0).collect();
        let pair = matches!(end, End::Gate(_));
        let out = if pair { shapes[0].1 } else { shapes.iter().map(|s| s.1).sum() };
        let job = self.of.job(&formats, out, rows as u32, pair);
        let none = || Error::new("gpu", "shared memory for eight rows", job.shared);
        let warpgroups = self.of.by_warpgroups(&job, width);
        let tiling = warpgroups.or_else(|| StreamTiling::pick(&job)).ok_or_else(none)?;
        let (x, factors) = match tiling.share {
            Share::Warpgroups { .. } if formats[0].packing().is_some() => {
                let (x, factors) = self.laid((x, norm), formats[0].run(), rows, width)?;
                (x, Some(factors))
            }
            _ => {
                let x = self.normed_rows(norm, x, (rows, width))?;
                let as_they_are = match tiling.share {
                    Share::Warpgroups { .. } => x.scalar == self.of.wide,
                    _ => matches!(x.scalar, Scalar::F16 | Scalar::BF16),
                };
                (if as_they_are { x } else { self.rounded(x, rows, width)? }, None)
            }
        };
        let mut numbers = Numbers::new()
            .with("rows", rows as u32)
            .with("width", width as u32)
            .with("groups", tiling.groups(&job));
        let names: Vec<[String; 4]> = (0..matrices.len())
            .map(|j| ["out", "y", "weight", "bias"].map(|part| format!("{part}{j}")))
            .collect();
        let mut bound = vec![("x", x.slot)];
        bound.extend(factors.map(|factors| ("factors", factors)));
        let parts = self.split_parts(rows, &shapes, tiling.splits());
        let mut kinds = Vec::new();
        for (j, ([out, y, weight, name], matrix)) in names.iter().zip(matrices).enumerate() {
            if let Some(result) = results.get(j) {
                numbers.set(out, shapes[j].1);
                bound.push((y, parts.get(j).unwrap_or(&result.slot).clone()));
            }
            bound.push((weight, self.weight(matrix.weight)));
            let bias = matrix.bias.filter(|_| parts.is_empty());
            let bias = bias.map(|b| (name.as_str(), self.weight(b)));
            kinds.push(ProjectedMatrix { format: shapes[j].0, bias: bias.is_some() });
            bound.extend(bias);
        }
        if !parts.is_empty() {
            let kernel = stream_warpgroups(Scalar::F32, &kinds, End::Store, tiling, None);
            self.push(kernel, numbers, &bound)?;
            let outs: Vec<u32> = shapes.iter().map(|shape| shape.1).collect();
            let parts = (tiling.splits(), &outs[..], parts);
            return self.add_splits(parts, matrices, rows, (end, residual), results, sites);
        }
        bound.extend(residual.map(|residual| ("residual", residual)));
        let low = sites.map(|sites| {
            sites.bind(None, &mut numbers, &mut bound);
            sites.low
        });
        let types = StreamTypes { x: x.scalar, operand: self.of.wide, y: results[0].scalar };
        let kernel = match tiling.share {
            Share::Warpgroups { .. } => stream_warpgroups(types.y, &kinds, end, tiling, low),
            Share::Terms | Share::Sums => stream(types, &kinds, end, tiling, low),
        };
        self.push(kernel, numbers, &bound)
    }

    /// Where the parts of sums lie that several threadgroups share, of each matrix; nothing if sums
    /// are not split.
    fn split_parts(&self, rows: usize, shapes: &[(Format, u32)], splits: u32) -> Vec<Slot> {
        if splits == 1 {
            return vec![];
        }
        let mut end = self.layout.splits.start;
        let own = |&(_, out): &(Format, u32)| {
            let start = end;
            end += 4 * splits as usize * rows * out as usize;
            Slot::Arena(start..end)
        };
        shapes.iter().map(own).collect()
    }

    /// The results of products whose sums are in so many parts, of matrices of `outs` rows.
    fn add_splits(
        &mut self,
        (splits, outs, parts): (u32, &[u32], Vec<Slot>),
        matrices: &[Matrix],
        rows: usize,
        (end, residual): (End, Option<Slot>),
        results: &[TypedSlot],
        sites: Option<Sites>,
    ) -> Result<()> {
        let mut numbers = Numbers::new().with("rows", rows as u32);
        numbers.set("width", outs.iter().sum());
        let biases: Vec<bool> = matrices.iter().map(|m| m.bias.is_some()).collect();
        if let (Some(residual), [false], [part]) = (&residual, &biases[..], &parts[..])
            && let Some(next) = self.next_norm()
        {
            let bound = [("residual", residual), ("part", part), ("sum", &results[0].slot)];
            let bound = bound.map(|(name, slot)| (name, slot.clone())).to_vec();
            return self.add_splits_laid((splits, rows), numbers, bound, results[0].scalar, next);
        }
        let names: Vec<[String; 4]> = (0..matrices.len())
            .map(|j| ["out", "y", "part", "bias"].map(|part| format!("{part}{j}")))
            .collect();
        let mut bound: Vec<(&str, Slot)> = Vec::new();
        bound.extend(residual.map(|residual| ("residual", residual)));
        for (j, ([out, y, part, bias], slot)) in names.iter().zip(parts).enumerate() {
            numbers.set(out, outs[j]);
            bound.extend([(y.as_str(), results[j].slot.clone()), (part, slot)]);
            bound.extend(matrices[j].bias.map(|b| (bias.as_str(), self.weight(b))));
        }
        let low = sites.map(|sites| {
            sites.bind(None, &mut numbers, &mut bound);
            sites.low
        });
        self.push(add_splits(results[0].scalar, &biases, end, splits, low), numbers, &bound)
    }

    /// The norm of the next node, if warpgroups take what this one computes to packed matrices, and
    /// the run of those. Loads with adapters, whose factors read normed rows, have none.
    fn next_norm(&self) -> Option<(f32, WeightId, u32)> {
        let nodes = &self.of.program.nodes;
        let (own, next) = (&nodes[self.number], nodes.get(self.number + 1)?);
        if self.of.adapters.count > 0 || next.inputs.first() != own.outputs.first() {
            return None;
        }
        let eps = next.op.product(next.weights.len())?.norm?;
        let (_, format, _) = self.of.warpgroups_of(next, self.rows(own.outputs[0]))?;
        format.packing().map(|_| (eps, next.weights[0], format.run()))
    }

    /// As [`Self::add_splits`], with the rows that the next node reads.
    fn add_splits_laid(
        &mut self,
        (splits, rows): (u32, usize),
        numbers: Numbers,
        mut bound: Vec<(&str, Slot)>,
        scalar: Scalar,
        (eps, norm, run): (f32, WeightId, u32),
    ) -> Result<()> {
        let width = self.width(self.of.program.nodes[self.number].outputs[0]);
        let (y, factors) = self.laid_slots(rows, width);
        bound.extend([("y", y.slot.clone()), ("norm", self.weight(norm))]);
        bound.push(("factors", factors.clone()));
        let kernel = add_splits_laid(splits, scalar, run);
        self.push(kernel, numbers.with_f32("eps", eps), &bound)?;
        self.ready = Some(Ready { number: self.number + 1, norm, y, factors });
        Ok(())
    }

    /// Activations as warpgroups multiply them by matrices with such runs, normed first if there is a
    /// norm, and the rows' factors.
    fn laid(
        &mut self,
        (x, norm): (TypedSlot, Option<(f32, WeightId)>),
        run: u32,
        rows: usize,
        width: usize,
    ) -> Result<(TypedSlot, Slot)> {
        let number = self.number;
        let own = |ready: &mut Ready| {
            ready.number == number && norm.is_some_and(|(_, weight)| weight == ready.norm)
        };
        if let Some(ready) = self.ready.take_if(own) {
            return Ok((ready.y, ready.factors));
        }
        let (to, factors) = self.laid_slots(rows, width);
        let mut numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
        let mut bound = vec![("x", x.slot), ("y", to.slot.clone()), ("factors", factors.clone())];
        if let Some((eps, weight)) = norm {
            numbers = numbers.with_f32("eps", eps);
            bound.push(("norm", self.weight(weight)));
        }
        self.push(lay_rows(run, x.scalar, norm.is_some()), numbers, &bound)?;
        Ok((to, factors))
    }

    /// Where such activations and factors lie: in the half of the arena's scratch that normed rows
    /// leave free.
    fn laid_slots(&self, rows: usize, width: usize) -> (TypedSlot, Slot) {
        let scalar = Scalar::F16;
        let size = self.room(rows) * width * scalar.bytes();
        let start = self.layout.scratch[0].start + size;
        let [slot, factors] = [(start, size), (self.layout.factors.start, 4 * self.room(rows))]
            .map(|(start, size)| Slot::Arena(start..start + size));
        (TypedSlot { slot, scalar }, factors)
    }
}
