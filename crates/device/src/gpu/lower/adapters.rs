//! Lowering of adapters: launches around the products whose matrices have adapter sites. See
//! [`ops::low_rank::kernels`].
//!
//! A class of steps in which no row has an adapter is lowered as if there were no sites. In the
//! others each product is computed as without adapters, so that a row without one keeps its bits.
//! `t = down x` is computed before the product. The kernels for decode rows add `scale up t` to
//! their own sums, before a gate or a residual. The outputs of other products are changed by one
//! more launch; a gate is then computed separately, since it needs both operands with their
//! adapters.

use formats::{Error, Result};
use ops::experts::Sizes;
use ops::linear::gemm::{self, GemmTypes};
use ops::low_rank::Delta;
use ops::low_rank::kernels::{
    Low, RANKS, UpEnding, low_rank_down, low_rank_pick, low_rank_up, schedule,
};
use ops::low_rank::pairs::{low_rank_pairs_down, low_rank_pairs_up};
use ops::moe::{moe_gemm, moe_group};
use ops::packed::Format;
use ops::{Op, Rows};
use program::{Node, Program, StepKind, ValueId, WeightId};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::products::Turn;
use super::{Lowering, Recorder, Slot, TypedSlot};
use crate::Seats;

/// Rows of a prompt that one threadgroup changes, one after another.
const BLOCK: u32 = 16;

/// Number of scratch arrays of adapters; see [`Room::needs`].
pub(in crate::gpu) const LOW: usize = 5;

/// Whether rows of a class have adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(in crate::gpu) enum Adapted {
    /// No row has one.
    #[default]
    No,
    /// Some rows have adapters, none with DoRA gains.
    Plain,
    /// Some rows have adapters that may have DoRA gains.
    Gains,
}

/// The arrays of an adapter for a group of sites.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu) enum Factor {
    /// Every site's `down`, `[sites * rank, input]`; for a table `[input, rank]`.
    Down,
    /// Every site's `up`, concatenated: `[outputs, rank]`.
    Up,
    /// For each site its scale (0 without an adapter) and whether it has gains.
    Scales,
    /// A gain for each output, then an offset for each.
    Gains,
}

impl Factor {
    /// All factors, in the order of their numbers.
    pub(in crate::gpu) const ALL: [Factor; 4] =
        [Factor::Down, Factor::Up, Factor::Scales, Factor::Gains];
}

/// The sites of a node. Their factors are stored together and multiplied together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::gpu) struct Group {
    /// Indices of the matrices in the node, with their sites. A gate has both of its matrices here,
    /// with a site or without.
    matrices: Vec<(usize, Option<usize>)>,
    /// Columns of each matrix; rows of a table.
    input: usize,
    /// Rows of each matrix; columns of a table.
    outputs: Vec<usize>,
    /// Whether it is an embedding table, whose rows are picked by tokens.
    gathers: bool,
    /// Of stacks of experts' matrices how many experts there are, each with factors of its own, and
    /// how many of them a token has; else one of each.
    experts: usize,
    used: usize,
    /// Rank that each site is padded to.
    rank: usize,
    /// The type of the factors: f32 beside an f32 matrix, else bf16, to which they are rounded.
    element: Scalar,
}

impl Group {
    /// Ranks of all sites together, each padded.
    fn ranks(&self) -> usize {
        self.matrices.len() * self.rank
    }

    /// Outputs of all sites together.
    fn all(&self) -> usize {
        self.outputs.iter().sum()
    }

    /// For each site: its index in the group, the site, and its first output in the group.
    pub(in crate::gpu) fn sites(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let starts = self.outputs.iter().scan(0, |end, out| {
            *end += out;
            Some(*end - out)
        });
        let all = self.matrices.iter().zip(starts).enumerate();
        all.filter_map(|(place, ((_, site), first))| Some((place, (*site)?, first)))
    }

    /// Elements and element size of a factor, for one seat.
    pub(in crate::gpu) fn size(&self, factor: Factor) -> (usize, usize) {
        let element = self.element.bytes();
        match factor {
            Factor::Down => (self.experts * self.ranks() * self.input, element),
            Factor::Up => (self.experts * self.all() * self.rank, element),
            Factor::Scales => (2 * self.matrices.len(), 4),
            Factor::Gains => (2 * self.all(), 4),
        }
    }

    /// Writes a site's part of a factor into the bytes of the whole group's.
    pub(in crate::gpu) fn put(
        &self,
        factor: Factor,
        (place, first): (usize, usize),
        delta: &Delta,
        to: &mut [u8],
    ) {
        let (own, rank) = (delta.rank, self.rank);
        if self.experts > 1 && matches!(factor, Factor::Down | Factor::Up) {
            // An expert's factors lie as those of one matrix, one expert's behind the other's.
            let alone = Group { experts: 1, ..self.clone() };
            let of = |values: &[f32], e: usize| {
                let each = values.len() / self.experts;
                values[e * each..(e + 1) * each].to_vec()
            };
            let each = to.len() / self.experts;
            for (e, to) in to.chunks_exact_mut(each.max(1)).enumerate() {
                let (down, up) = (of(&delta.down, e), of(&delta.up, e));
                let own = Delta { down, up, gain: None, ..*delta };
                alone.put(factor, (place, first), &own, to);
            }
            return;
        }
        // The factor's values, their row length, the padded row length, and the first row to write.
        let (values, columns, room, from) = match factor {
            Factor::Down if self.gathers => (&delta.down, own, rank, 0),
            Factor::Down => (&delta.down, self.input, self.input, place * rank),
            Factor::Up => (&delta.up, own, rank, first),
            Factor::Scales => {
                let gains = f32::from(u8::from(delta.gain.is_some()));
                return put(to, Scalar::F32, 2 * place, &[delta.scale, gains]);
            }
            Factor::Gains => {
                if let Some(gain) = &delta.gain {
                    put(to, Scalar::F32, first, &gain.gain);
                    put(to, Scalar::F32, self.all() + first, &gain.offset);
                }
                return;
            }
        };
        for (i, row) in values.chunks_exact(columns).enumerate() {
            put(to, self.element, (from + i) * room, row);
        }
    }
}

/// The greatest number of bf16.
const GREATEST: f32 = f32::from_bits(0x7f7f_0000);

/// Writes numbers as elements of a type, starting at element `from`.
fn put(to: &mut [u8], scalar: Scalar, from: usize, values: &[f32]) {
    let size = scalar.bytes();
    for (to, value) in to[from * size..].chunks_exact_mut(size).zip(values) {
        match scalar {
            Scalar::BF16 => {
                // The greatest stay finite.
                let value = value.clamp(-GREATEST, GREATEST);
                to.copy_from_slice(&formats::quant::plain::f32_to_bf16(value).to_le_bytes());
            }
            _ => to.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

/// The inputs of a kernel that adds `scale up t` to its own sums.
pub(super) struct Sites {
    pub(super) low: Low,
    group: usize,
    count: u32,
    /// `t`, and its row length.
    t: (TypedSlot, usize),
    /// The seat of each row.
    seats: TypedSlot,
}

impl Sites {
    /// Binds its buffers for the rows of a turn, or for all rows.
    pub(super) fn bind(
        &self,
        turn: Option<&Turn>,
        numbers: &mut Numbers,
        bound: &mut Vec<(&str, Slot)>,
    ) {
        let of = |matrix: &TypedSlot, columns| match turn {
            Some(turn) => turn.of(matrix, columns),
            None => matrix.slot.clone(),
        };
        numbers.set("count", self.count);
        bound.extend([("t", of(&self.t.0, self.t.1)), ("seats", of(&self.seats, 1))]);
        let factors =
            [("site_up", Factor::Up), ("site_scales", Factor::Scales), ("gains", Factor::Gains)];
        bound.extend(factors.map(|(name, factor)| (name, Slot::Adapter(self.group, factor))));
    }
}

/// Adapter seats and the groups of sites of a Program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::gpu) struct Room {
    /// Number of seats.
    pub(in crate::gpu) count: usize,
    /// The rank that sites are padded to, except tables that an adapter has anew.
    pub(in crate::gpu) rank: usize,
    /// The groups of sites.
    pub(in crate::gpu) groups: Vec<Group>,
    /// The group of each node, if it has sites and is no mixture.
    nodes: Vec<Option<usize>>,
    /// For each node that is a mixture the group of its gates and ups, and of its downs.
    mixtures: Vec<[Option<usize>; 2]>,
}

impl Room {
    /// Plans the given seats for a Program's sites.
    ///
    /// # Errors
    /// A factor with more elements than a kernel can index.
    pub(in crate::gpu) fn new(
        program: &Program,
        seats: Seats,
        formats: &[Option<Format>],
    ) -> Result<Room> {
        let rank = seats.rank.next_multiple_of(RANKS);
        let mut room = Room { count: seats.count, rank, ..Room::default() };
        if room.count == 0 {
            return Ok(room);
        }
        for node in &program.nodes {
            let sites = node.sites(&program.sites);
            let keeps = |site: &Option<usize>| site.is_some() || matches!(node.op, Op::GateUp(_));
            room.mixtures.push([None; 2]);
            if sites.iter().all(Option::is_none) {
                room.nodes.push(None);
                continue;
            }
            if let Some(sizes) = program.mixture(node) {
                room.nodes.push(None);
                room.mixture(program, node, &sites, formats, sizes)?;
                continue;
            }
            let product = node.op.product(node.weights.len());
            let gathers = product.is_none();
            let weights: Vec<WeightId> = match product {
                Some(product) => {
                    product.projections.iter().map(|p| node.weights[p.weight]).collect()
                }
                None => vec![node.weights[0]],
            };
            let shape = |weight: WeightId| &program.weights[weight.0].shape;
            let matrices: Vec<_> =
                sites.into_iter().enumerate().filter(|(_, s)| keeps(s)).collect();
            let plain = |(place, _): &(usize, Option<usize>)| {
                formats[weights[*place].0] == Some(Format::Dense(Scalar::F32))
            };
            let element = if matrices.iter().any(plain) { Scalar::F32 } else { Scalar::BF16 };
            let (input, output) = if gathers { (0, 1) } else { (1, 0) };
            let outputs =
                matrices.iter().map(|(place, _)| shape(weights[*place])[output]).collect();
            let input = shape(weights[0])[input];
            let (experts, used) = (1, 1);
            let own = matrices.iter().filter_map(|(_, site)| program.sites[(*site)?].rank);
            let rank = own.max().map_or(rank, |own| own.next_multiple_of(RANKS).max(rank));
            let group = Group { matrices, input, outputs, gathers, experts, used, rank, element };
            room.nodes.push(Some(room.groups.len()));
            room.push(group, &program.weights[weights[0].0].name)?;
        }
        Ok(room)
    }

    /// Plans the sites of a mixture, the last node so far: gates and ups read one input, downs
    /// another.
    fn mixture(
        &mut self,
        program: &Program,
        node: &Node,
        sites: &[Option<usize>],
        formats: &[Option<Format>],
        Sizes { experts, used, width, ff }: Sizes,
    ) -> Result<()> {
        let halves = [(0..2, width, ff), (2..3, ff, width)];
        for (half, (matrices, input, output)) in halves.into_iter().enumerate() {
            if sites[matrices.clone()].iter().all(Option::is_none) {
                continue;
            }
            let plain = |i: usize| formats[node.weights[i].0] == Some(Format::Dense(Scalar::F32));
            let element = if matrices.clone().any(plain) { Scalar::F32 } else { Scalar::BF16 };
            let name = &program.weights[node.weights[matrices.start].0].name;
            let matrices: Vec<_> = matrices.map(|i| (i, sites[i])).collect();
            let (outputs, gathers, rank) = (vec![output; matrices.len()], false, self.rank);
            let group = Group { matrices, input, outputs, gathers, experts, used, rank, element };
            if let Some(last) = self.mixtures.last_mut() {
                last[half] = Some(self.groups.len());
            }
            self.push(group, name)?;
        }
        Ok(())
    }

    /// Whether adapters may change a node that is no mixture.
    pub(super) fn has_sites(&self, node: usize) -> bool {
        self.nodes.get(node).is_some_and(Option::is_some)
    }

    fn push(&mut self, group: Group, name: &str) -> Result<()> {
        for factor in Factor::ALL {
            let elements = group.size(factor).0.checked_mul(self.count);
            if elements.is_none_or(|elements| elements >= u32::MAX as usize) {
                let expected = "less than 2^32 elements of adapters at a site";
                return Err(Error::new(name, expected, "more"));
            }
        }
        self.groups.push(group);
        Ok(())
    }

    /// Bytes of all seats.
    pub(in crate::gpu) fn bytes(&self) -> usize {
        let size = |factor| {
            move |group: &Group| {
                let (elements, bytes) = group.size(factor);
                elements * bytes
            }
        };
        let all = Factor::ALL.map(|factor| self.groups.iter().map(size(factor)).sum::<usize>());
        self.count * all.iter().sum::<usize>()
    }

    /// Bytes of each scratch array in a class of `rows` rows: `t`; residuals that products
    /// overwrite; and the rows sorted by seat: the first row of each seat, their order, and blocks
    /// of them.
    pub(in crate::gpu) fn needs(&self, rows: usize) -> [usize; LOW] {
        if self.count == 0 {
            return [0; LOW];
        }
        let most = |of: fn(&Group) -> usize| self.groups.iter().map(of).max().unwrap_or(0);
        let ranks = most(|group| group.used * group.ranks());
        let outputs = most(|group| group.outputs[0]);
        // No block has fewer rows than one.
        let words = [rows * ranks, rows * outputs, self.count + 1, rows, 2 * (rows + self.count)];
        words.map(|words| 4 * words)
    }
}

impl Lowering {
    /// The type in which factors are multiplied for prompts: bf16, which does not overflow, unless
    /// nothing is rounded.
    fn low_operand(&self) -> Scalar {
        if self.exact() { Scalar::F32 } else { Scalar::BF16 }
    }
}

impl Recorder<'_> {
    /// The group of sites of a node, if rows of this class have adapters.
    pub(super) fn group(&self, node: usize) -> Option<usize> {
        let adapted = self.key.adapted != Adapted::No;
        self.of.adapters.nodes.get(node).copied().flatten().filter(|_| adapted)
    }

    /// Whether a mixture has sites, with gates and ups or with downs. Its rows are then computed
    /// product by product whether they have adapters or not, so that they keep their bits.
    pub(super) fn changes_experts(&self) -> bool {
        let mixture = self.of.adapters.mixtures.get(self.number);
        mixture.is_some_and(|groups| groups.iter().any(Option::is_some))
    }

    /// Applies the adapters of the pairs of a mixture's rows to products of experts, `ys` `[pairs,
    /// out]` in f32, whose input is `x`, each row read by `share` pairs; `ids` are the experts of
    /// pairs.
    pub(super) fn change_pairs(
        &mut self,
        half: usize,
        (x, share): (&TypedSlot, usize),
        ids: Slot,
        ys: &[Slot],
    ) -> Result<()> {
        let room = &self.of.adapters;
        let group = room.mixtures.get(self.number).and_then(|groups| groups[half]);
        let Some(group) = group.filter(|_| self.key.adapted != Adapted::No) else {
            return Ok(());
        };
        let node = &self.of.program.nodes[self.number];
        let (rows, seats) = (self.rows(node.inputs[0]), self.seats(node.inputs[0]));
        let of = &room.groups[group];
        let (pairs, ranks, rank) = (rows * of.used, of.ranks(), of.rank as u32);
        let (used, sites, element) = (of.used as u32, of.matrices.len() as u32, of.element);
        let numbers = Numbers::new()
            .with("pairs", pairs as u32)
            .with("experts", of.experts as u32)
            .with("count", room.count as u32);
        let (input, output) = (of.input as u32, of.outputs[0] as u32);
        let t = self.low(0, pairs * ranks);
        let bound = [
            ("x", x.slot.clone()),
            ("ids", ids.clone()),
            ("seats", seats.clone()),
            ("down", Slot::Adapter(group, Factor::Down)),
            ("t", t.clone()),
        ];
        let sizes = numbers.clone().with("width", input).with("ranks", ranks as u32);
        let sizes = sizes.with("share", share as u32);
        self.push(low_rank_pairs_down(x.scalar, element, used), sizes, &bound)?;
        let mut bound = vec![
            ("t", t),
            ("ids", ids),
            ("seats", seats),
            ("up", Slot::Adapter(group, Factor::Up)),
            ("scales", Slot::Adapter(group, Factor::Scales)),
        ];
        bound.extend(["y0", "y1"].into_iter().zip(ys.iter().cloned()));
        let kernel = low_rank_pairs_up(element, rank, sites, used);
        self.push(kernel, numbers.with("out", output), &bound)
    }

    /// Records a node with sites.
    pub(super) fn adapted(&mut self, group: usize, node: &Node) -> Result<()> {
        let (x, y) = (node.inputs.first().copied(), node.outputs[0]);
        let Some(product) = node.op.product(node.weights.len()) else {
            self.plain(node)?;
            self.pick(group)?;
            return self.up(group, &[self.operand(y)], y, false);
        };
        if product.gated || self.takes_sites(node)? {
            // `self.group` is read when the node's operands have been recorded.
            self.group = Some((group, y));
            let done = self.plain(node);
            self.group = None;
            return done;
        }
        let x = x.ok_or_else(|| Error::new("low_rank", "an input", "none"))?;
        let norm = product.norm.map(|eps| (eps, node.weights[0]));
        let residual = product.residual.map(|input| self.operand(node.inputs[input]));
        // A norm of many rows remains in scratch after the product has read it.
        let normed = norm.is_some() && !self.row_by_row(y);
        if !normed {
            self.down(group, (self.operand(x), norm), residual.clone(), y)?;
        }
        self.plain(node)?;
        if normed {
            let x = self.scratch(0, self.room(self.rows(x)) * self.width(x));
            self.down(group, (x, None), None, y)?;
        }
        let places = self.of.adapters.groups[group].matrices.iter().map(|(place, _)| *place);
        let ys: Vec<TypedSlot> = places.map(|place| self.operand(node.outputs[place])).collect();
        self.up(group, &ys, y, residual.is_some())
    }

    /// Applies adapters to both operands of a gate, which are products of `x`.
    pub(super) fn change(&mut self, x: &TypedSlot, operands: &[TypedSlot]) -> Result<()> {
        let Some((group, y)) = self.group else { return Ok(()) };
        self.down(group, (x.clone(), None), None, y)?;
        self.up(group, operands, y, false)
    }

    /// Records `t = down x` for the current product, if it has sites, and returns what its kernel
    /// needs to add `scale up t`.
    pub(super) fn sites(
        &mut self,
        x: TypedSlot,
        norm: Option<(f32, WeightId)>,
    ) -> Result<Option<Sites>> {
        let Some((group, y)) = self.group else { return Ok(None) };
        self.down(group, (x, norm), None, y)?;
        let room = &self.of.adapters;
        let of = &room.groups[group];
        let (ranks, rank, count) = (of.ranks(), of.rank as u32, room.count as u32);
        let bits = of.matrices.iter().map(|(place, _)| 1 << place);
        let gains = self.key.adapted == Adapted::Gains;
        let beside = self.row_by_row(y) && self.narrow(self.rows(y));
        let low = Low { element: of.element, rank, gains, sites: bits.sum(), beside };
        let rows = self.rows(y);
        let scalar = Scalar::F32;
        let t = (TypedSlot { slot: self.low(0, rows * ranks), scalar }, ranks);
        let seats = TypedSlot { slot: self.seats(y), scalar: Scalar::U32 };
        Ok(Some(Sites { low, group, count, t, seats }))
    }

    /// Whether rows of a value are computed one by one: decode rows, and rows with logits.
    fn row_by_row(&self, y: ValueId) -> bool {
        self.key.kind == StepKind::Decode || self.of.program.shape(y).rows == Rows::Outputs
    }

    /// The seats of a value's rows.
    fn seats(&self, y: ValueId) -> Slot {
        let [tokens, outputs, _] = &self.words.adapters;
        let outputs_only = self.of.program.shape(y).rows == Rows::Outputs;
        Slot::Words(if outputs_only { outputs } else { tokens }.clone())
    }

    /// The first `words` words of one of the adapters' scratch arrays.
    fn low(&self, i: usize, words: usize) -> Slot {
        let start = self.layout.low[i].start;
        Slot::Arena(start..start + 4 * words)
    }

    /// Records the lookup of `t` in a table's factor.
    fn pick(&mut self, group: usize) -> Result<()> {
        let room = &self.of.adapters;
        let Group { input, element, rank, .. } = room.groups[group];
        let rows = self.key.tokens;
        let numbers = Numbers::new()
            .with("vocab", input as u32)
            .with("ranks", rank as u32)
            .with("count", room.count as u32);
        let bound = [
            ("tokens", Slot::Words(self.words.tokens.clone())),
            ("seats", Slot::Words(self.words.adapters[0].clone())),
            ("down", Slot::Adapter(group, Factor::Down)),
            ("t", self.low(0, rows * rank)),
        ];
        self.push(low_rank_pick(element), numbers.with("rows", rows as u32), &bound)
    }

    /// Records `t = down x` for the rows of a product's result `y`, and keeps a copy of the
    /// residual if `y` overwrites it and DoRA needs it.
    fn down(
        &mut self,
        group: usize,
        (x, norm): (TypedSlot, Option<(f32, WeightId)>),
        residual: Option<TypedSlot>,
        y: ValueId,
    ) -> Result<()> {
        let room = &self.of.adapters;
        let (sites, count) = (&room.groups[group], room.count as u32);
        let (rows, width, ranks) = (self.rows(y), sites.input, sites.ranks());
        let (outer, element) = (sites.outputs[0], sites.element);
        let gains = self.key.adapted == Adapted::Gains;
        let residual = residual.filter(|_| gains);
        if let Some(found) = residual.as_ref().filter(|r| r.scalar != Scalar::F32) {
            let found = format!("{:?}", found.scalar);
            return Err(Error::new("low_rank", "a residual of f32", found));
        }
        let kept = self.low(1, rows * outer);
        let numbers = Numbers::new().with("width", width as u32);
        let t = self.low(0, rows * ranks);
        let down = Slot::Adapter(group, Factor::Down);
        if self.row_by_row(y) {
            let schedule = schedule(width as u32, ranks as u32, x.scalar, element);
            let mut numbers = numbers
                .with("rows", rows as u32)
                .with("ranks", ranks as u32)
                .with("count", count)
                .with("groups", schedule.groups(ranks as u32, self.of.facts.processors));
            let mut bound = vec![("x", x.slot), ("t", t), ("seats", self.seats(y)), ("down", down)];
            if let Some((eps, weight)) = norm {
                numbers = numbers.with_f32("eps", eps);
                bound.push(("norm", self.weight(weight)));
            }
            let keeps = residual.is_some();
            if let Some(residual) = residual {
                numbers.set("outer", outer as u32);
                bound.extend([("residual", residual.slot), ("kept", kept)]);
            }
            let kernel = low_rank_down(x.scalar, element, norm.is_some(), keeps, schedule);
            return self.push(kernel, numbers, &bound);
        }
        if let Some(residual) = residual {
            let (format, kept) = (Format::Dense(Scalar::F32), TypedSlot { slot: kept, ..residual });
            self.gather(format, residual.slot, Slot::Numbers(rows), rows, outer, kept)?;
        }
        let operand = self.of.low_operand();
        // All groups use one block size, so that rows are sorted by seat only once.
        let schedule = self.low_schedule(rows);
        let [offsets, order, blocks] = self.by_seat(rows, schedule.bm)?;
        let types = GemmTypes { x: x.scalar, operand, y: Scalar::F32 };
        let numbers = numbers
            .with("pairs", rows as u32)
            .with("out", ranks as u32)
            .with("experts", count)
            .with("share", 1);
        let bound = [
            ("x", x.slot),
            ("y", t),
            ("weight", down),
            ("order", order),
            ("offsets", offsets),
            ("blocks", blocks),
        ];
        self.push(moe_gemm(types, Format::Dense(element), schedule), numbers, &bound)
    }

    /// The schedule of `down x` for many rows: a row's terms are summed in an order that does not
    /// depend on the number of rows.
    fn low_schedule(&self, rows: usize) -> gemm::GemmSchedule {
        let machine = self.of.facts.machine();
        // The blocks of small groups were not counted for so few columns.
        let machine = gemm::Machine { wgmma: false, tuned: &ops::tuned::NVIDIA, ..machine };
        let room = &self.of.adapters;
        let exact = self.of.exact();
        let element = if exact { Scalar::F32 } else { Scalar::BF16 };
        let ranks = (3 * room.rank) as u32;
        let format = Format::Dense(element);
        gemm::GemmSchedule::alike((rows as u32, ranks), self.of.low_operand(), format, machine)
    }

    /// Sorts rows by seat, in blocks of `block`: the first row of each seat, the order, the blocks.
    fn by_seat(&mut self, rows: usize, block: u32) -> Result<[Slot; 3]> {
        let count = self.of.adapters.count;
        let tiles = rows.div_ceil(block as usize) + count;
        let [offsets, order, blocks] =
            [(2, count + 1), (3, rows), (4, 2 * tiles)].map(|(i, words)| self.low(i, words));
        if !self.sorted {
            let numbers = Numbers::new()
                .with("pairs", rows as u32)
                .with("experts", count as u32)
                .with("block_rows", block);
            let bound = [
                ("ids", Slot::Words(self.words.adapters[2].clone())),
                ("offsets", offsets.clone()),
                ("order", order.clone()),
                ("blocks", blocks.clone()),
            ];
            self.push(moe_group((count as u32).next_multiple_of(64)), numbers, &bound)?;
            self.sorted = true;
        }
        Ok([offsets, order, blocks])
    }

    /// Adds `scale up t` to the outputs of products, and applies DoRA gains.
    fn up(
        &mut self,
        group: usize,
        products: &[TypedSlot],
        y: ValueId,
        residual: bool,
    ) -> Result<()> {
        let room = &self.of.adapters;
        let sites = &room.groups[group];
        let rank = sites.rank;
        let (rows, element) = (self.rows(y), sites.element);
        let ending = match self.key.adapted {
            Adapted::Gains => UpEnding::Gains { residual },
            _ => UpEnding::Plain,
        };
        let mut numbers = Numbers::new().with("rows", rows as u32).with("count", room.count as u32);
        let names: Vec<[String; 2]> =
            (0..products.len()).map(|j| ["out", "y"].map(|part| format!("{part}{j}"))).collect();
        let mut bound = vec![
            ("t", self.low(0, rows * sites.ranks())),
            ("up", Slot::Adapter(group, Factor::Up)),
            ("scales", Slot::Adapter(group, Factor::Scales)),
            ("seats", self.seats(y)),
            ("gains", Slot::Adapter(group, Factor::Gains)),
            ("kept", self.low(1, rows * sites.outputs[0])),
        ];
        for ([out, name], (product, width)) in names.iter().zip(products.iter().zip(&sites.outputs))
        {
            numbers.set(out, *width as u32);
            bound.push((name.as_str(), product.slot.clone()));
        }
        let to: Vec<Scalar> = products.iter().map(|product| product.scalar).collect();
        let block = if self.row_by_row(y) { 1 } else { BLOCK };
        self.push(low_rank_up(&to, element, rank as u32, block, ending), numbers, &bound)
    }
}
