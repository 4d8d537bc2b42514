//! A Program loaded on the CPU: packed weights, cache pools, the arena, and the shape classes
//! compiled so far.

use super::Cpu;
use super::class::Class;
use super::pace::Pace;
use super::profile::{Span, Spans, profile};
use super::replay::{Replay, Row};
use super::state::{self, Cache, States};
use super::{experts, memory};
use crate::choose::{Carried, Choices, HostSampler, Outcomes, chosen};
use crate::{
    ComputePeaks, Executor, ExecutorOptions, Memory, Outcome, Peaks, Plan, Profile, Roof, Ticket,
    Watch, finite, plan,
};
use crate::{check_block, no_block};
use cpu_kernels::attention::{AttentionShape, Geometry, LayerCache, QuerySequence};
use cpu_kernels::isa::Isa;
use cpu_kernels::low_rank::Factors;
use cpu_kernels::matmul::{Huge, Matrix, ROWS, Scratch, Unit, peak};
use cpu_kernels::roof::read_rate;
use cpu_kernels::team::{SharedSlice, Team, default_threads};
use formats::{Error, NotFinite, Result, Tensors};
use ops::operation::Product;
use ops::{Op, Rope};
use program::{
    AdapterFactors, BLOCK_TOKENS, CHOSEN, CacheLayer, Choosing, Node, Program, Step, StepKind,
    ValueId, recycle,
};
use std::ops::Range;
use std::sync::Arc;

/// A weight as the CPU stores it.
pub(super) enum Weight {
    /// Rank 2: packed for products.
    Matrix(Matrix),
    /// Rank 1, such as norms and biases, in f32.
    Vector(Vec<f32>),
}

/// The weights of all Programs on the device. The form of one is the rows of each expert's matrix,
/// if it stacks several.
pub(super) type Store = crate::store::Store<Option<usize>, Weight>;

type Wanted<'a> = crate::store::Wanted<'a, Option<usize>, Weight>;

impl Weight {
    /// Bytes of memory it takes.
    fn bytes(&self) -> usize {
        match self {
            Weight::Matrix(matrix) => matrix.resident_bytes(),
            Weight::Vector(values) => size_of_val(values.as_slice()),
        }
    }

    /// Whether it is a matrix of floats rather than of quantised blocks.
    pub(super) fn is_float_matrix(&self) -> bool {
        matches!(self, Weight::Matrix(matrix) if !matrix.encoding().is_quantised())
    }
}

/// State that every replay reads and none changes.
pub(super) struct Loaded {
    pub(super) team: Arc<Team>,
    /// On the first of its processors, the largest first: see [`Loaded::team_of`].
    pub(super) smaller: Arc<[Team]>,
    pub(super) isa: Isa,
    pub(super) program: Program,
    pub(super) weights: Vec<Arc<Weight>>,
    /// Distinct rotations; their angles are computed once per step.
    pub(super) ropes: Vec<Rope>,
    /// The cache group of each layer.
    pub(super) groups: Vec<usize>,
    /// Whether all matrices used in products are quantised.
    pub(super) quantised: bool,
    /// See [`quantised_only`].
    pub(super) quantised_only: Vec<bool>,
    /// The low-rank factors of each adapter seat, for every matrix of every site, none at a site
    /// that the adapter leaves; `None` for an empty seat.
    pub(super) seats: Vec<Option<Vec<Vec<Factors>>>>,
    /// The greatest rank of an adapter.
    pub(super) rank: usize,
}

impl Loaded {
    /// The largest team of at most `workers` workers.
    fn team_of(&self, workers: usize) -> &Team {
        let mut all = [&*self.team].into_iter().chain(self.smaller.iter());
        all.find(|team| team.count() <= workers).unwrap_or(&self.team)
    }
}

/// The CPU's [`Executor`].
pub(super) struct CpuExecutor {
    loaded: Loaded,
    caches: Vec<Cache>,
    classes: Vec<Class>,
    arena: Huge,
    scratch: Vec<Scratch>,
    /// Scratch of attention: partial results of chunks of keys.
    partials: Huge,
    /// Blocks of each group from 0 up to the highest one written.
    used: Vec<usize>,
    /// Class, tokens and outputs of the last replay.
    last: Option<(usize, usize, usize)>,
    limits: program::Limits,
    rows: Rowed,
    sampling: Sampling,
    /// The bound on workers of decode steps, and the number that computed the last step.
    pace: Pace,
    workers: usize,
    /// Number of the last ticket.
    tickets: u64,
}

/// A step's rows as a replay reads them; the buffers are reused by every step.
#[derive(Default)]
struct Rowed {
    tokens: Vec<u32>,
    rows: Vec<Row>,
    queries: Vec<Vec<QuerySequence<'static>>>,
}

/// State of sampling.
struct Sampling {
    /// One sampler per worker.
    samplers: Vec<HostSampler>,
    /// The state of each slot used so far.
    slots: Vec<Carried>,
    outcomes: Outcomes,
}

impl CpuExecutor {
    pub(super) fn load(
        cpu: &Cpu,
        pace: Pace,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let (team, smaller, isa) = (cpu.team.clone(), cpu.smaller.clone(), cpu.isa);
        let store = &cpu.store;
        let wanted = store.of(tensors, options.allow_nan);
        let plan =
            |options: &ExecutorOptions| plan(&program, tensors, options, team.count(), &wanted);
        plan::check("cpu", &options, &plan(&options)?, &plan)?;
        let weights = load_weights(&program, tensors, &wanted, &options, &team, progress)?;
        let ropes = program.ropes();
        let caches = caches(&program, &options)?;
        let partials = partials(&program, &options, team.count());
        let multiplied = program.nodes.iter().filter(|node| node.op.gathers().is_none());
        let quantised =
            !multiplied.flat_map(|node| &node.weights).any(|id| weights[id.0].is_float_matrix());
        let quantised_only = quantised_only(&program, &weights);
        let groups = program.layer_groups();
        let limits = options.limits(&program);
        let crate::Seats { count, rank } = options.seats;
        let seats = (0..count).map(|_| None).collect();
        let (tokens, outputs) = (limits.tokens, limits.outputs);
        let largest = Class::new(&program, &ropes, tokens, outputs, team.count(), rank);
        Ok(CpuExecutor {
            // Arena pages that no class touches take no memory.
            arena: Huge::zeroed(largest.bytes)?,
            scratch: (0..team.count()).map(|_| Scratch::new()).collect::<Result<_>>()?,
            partials: Huge::zeroed(partials * size_of::<f32>())?,
            used: vec![0; options.blocks.len()],
            classes: Vec::new(),
            last: None,
            rows: Rowed { queries: vec![Vec::new(); options.blocks.len()], ..Rowed::default() },
            sampling: Sampling {
                samplers: (0..team.count()).map(|_| HostSampler::default()).collect(),
                slots: Vec::new(),
                outcomes: Outcomes::new(limits.sequences),
            },
            pace,
            workers: team.count(),
            tickets: 0,
            limits,
            caches,
            loaded: Loaded {
                team,
                smaller,
                isa,
                program,
                weights,
                ropes,
                groups,
                quantised,
                quantised_only,
                seats,
                rank,
            },
        })
    }

    /// The smallest class that holds these rows, compiled at first use.
    fn class(&mut self, tokens: usize, outputs: usize) -> usize {
        let bucket =
            |n: usize, most: usize| if n == 0 { 0 } else { n.next_power_of_two().min(most) };
        let (tokens, outputs) =
            (bucket(tokens, self.limits.tokens), bucket(outputs, self.limits.outputs));
        let seen = self.classes.iter().position(|c| (c.tokens, c.outputs) == (tokens, outputs));
        seen.unwrap_or_else(|| {
            let Loaded { program, ropes, team, rank, .. } = &self.loaded;
            self.classes.push(Class::new(program, ropes, tokens, outputs, team.count(), *rank));
            self.classes.len() - 1
        })
    }
}

/// Memory that the Program takes with a full context.
pub(super) fn plan(
    program: &Program,
    tensors: &Tensors,
    options: &ExecutorOptions,
    threads: usize,
    wanted: &Wanted<'_>,
) -> Result<Plan> {
    let weights = program.weights.iter().zip(experts::rows_of_one(program));
    let weights = weights.filter(|(weight, each)| wanted.find(weight, each).is_none());
    let weights = weights.map(|(weight, each)| weight_bytes(weight, each, tensors));
    let mut weights = weights.collect::<Result<Vec<usize>>>()?;
    let (cache, reserved) = (
        cache_bytes(program, options, &options.context)?,
        cache_bytes(program, options, &options.blocks)?,
    );
    let limits = options.limits(program);
    let rank = options.seats.rank;
    let arena = (limits.tokens, limits.outputs);
    let arena = Class::new(program, &program.ropes(), arena.0, arena.1, threads, rank).bytes;
    if options.seats.count > 0 {
        let factors = |site: &program::Site| {
            (site.input + site.output) * site.matrices() * rank * size_of::<f32>()
        };
        let adapter: usize = program.sites.iter().map(factors).sum();
        weights.push(adapter.saturating_mul(options.seats.count));
    }
    let partials = partials(program, options, threads).saturating_mul(size_of::<f32>());
    let free = memory::free();
    // The pools reserve addresses for all sessions together, and each matrix takes whole huge
    // pages.
    let unused = reserved.saturating_sub(cache).saturating_add(weights.len() * Huge::PAGE);
    let addresses = free.addresses.map(|addresses| addresses.saturating_sub(unused));
    Ok(Plan {
        host: true,
        weights: weights.into_iter().fold(0, usize::saturating_add),
        cache,
        pool: reserved.saturating_sub(cache),
        arena,
        working: partials.saturating_add(threads * Scratch::BYTES),
        active: 0,
        free: [free.memory, addresses].into_iter().flatten().min(),
    })
}

/// Bytes of a weight as it is stored. `each`: rows of one expert, if the weight stacks several.
fn weight_bytes(weight: &program::Weight, each: Option<usize>, tensors: &Tensors) -> Result<usize> {
    let encoding = weight.describe(tensors)?.encoding;
    Ok(match *weight.shape.as_slice() {
        [rows, cols] => {
            let each = each.unwrap_or(rows).max(1);
            (rows / each).saturating_mul(Matrix::packed_bytes(encoding, each, cols))
        }
        ref shape => shape.iter().product::<usize>().saturating_mul(size_of::<f32>()),
    })
}

/// Bytes of the cache, for a number of blocks of each group.
fn cache_bytes(program: &Program, options: &ExecutorOptions, blocks: &[usize]) -> Result<usize> {
    let groups = program.layer_groups();
    program.layers.iter().zip(&groups).try_fold(0usize, |sum, (layer, &group)| {
        let blocks = blocks.get(group).copied().unwrap_or(0);
        let bytes = match layer.state {
            0 => geometry(options, layer, blocks).bytes(1)?,
            _ => state::layer_bytes(layer, blocks)?,
        };
        Ok(sum.saturating_add(bytes))
    })
}

/// The shape of a layer's cache.
fn geometry(options: &ExecutorOptions, layer: &CacheLayer, blocks: usize) -> Geometry {
    Geometry {
        element: options.cache_type,
        blocks,
        block_tokens: BLOCK_TOKENS,
        kv_heads: layer.kv_heads,
        head_dim: layer.head_dim,
    }
}

/// One pool for each group of layers.
fn caches(program: &Program, options: &ExecutorOptions) -> Result<Vec<Cache>> {
    let groups = program.layer_groups();
    let mut caches: Vec<Option<Cache>> = groups.iter().map(|_| None).collect();
    for (group, &blocks) in options.blocks.iter().enumerate() {
        let layers: Vec<usize> = (0..groups.len()).filter(|&l| groups[l] == group).collect();
        let Some(first) = layers.first().map(|&l| program.layers[l]) else { continue };
        if first.state > 0 {
            for layer in layers {
                caches[layer] = Some(Cache::State(States::new(&program.layers[layer], blocks)?));
            }
            continue;
        }
        let geometry = geometry(options, &first, blocks);
        for (&layer, cache) in layers.iter().zip(LayerCache::pool(geometry, layers.len())?) {
            if (program.layers[layer].kv_heads, program.layers[layer].head_dim)
                != (first.kv_heads, first.head_dim)
            {
                return Err(Error::new(
                    "cache",
                    format!("{first:?}"),
                    format!("{:?}", program.layers[layer]),
                ));
            }
            caches[layer] = Some(Cache::KeysValues(cache));
        }
    }
    caches
        .into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| Error::new("cache", "blocks for every group", "fewer"))
}

/// Floats of scratch for the most demanding attention over a full context. A step of many sequences
/// that would need more attends to some of them at a time.
fn partials(program: &Program, options: &ExecutorOptions, threads: usize) -> usize {
    let groups = program.layer_groups();
    let one = |op: &ops::Attention| {
        let group = groups[op.layer];
        let blocks = options.context.get(group).or(options.blocks.get(group));
        shape(op).scratch_len(threads, 2, blocks.copied().unwrap_or(1) * BLOCK_TOKENS)
    };
    program
        .nodes
        .iter()
        .filter_map(|n| if let Op::Attention(op) = &n.op { Some(one(op)) } else { None })
        .max()
        .unwrap_or(0)
}

/// An attention operation as the kernels take it.
pub(super) fn shape(op: &ops::Attention) -> AttentionShape {
    AttentionShape {
        heads: op.heads,
        kv_heads: op.kv_heads,
        head_dim: op.head_dim,
        scale: op.scale,
        softcap: op.cap,
        window: op.window,
        chunked: op.chunked,
    }
}

/// A buffer as floats.
fn floats(buffer: &mut Huge) -> &mut [f32] {
    let len = buffer.len() / size_of::<f32>();
    // SAFETY: the buffer is borrowed exclusively, aligned to more than a float, and any bits are
    // valid.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr().cast(), len) }
}

/// The range of a value's floats in the arena.
fn place_of(loaded: &Loaded, class: &Class, step: &Step<'_>, value: ValueId) -> Range<usize> {
    let shape = loaded.program.shape(value);
    let start = class.plan.offsets[value.0] / size_of::<f32>();
    start..start + shape.rows.count(step.tokens.len(), step.outputs.len()) * shape.width
}

/// The node of exchange `number`, counted from 0.
fn exchange(program: &Program, number: usize) -> Option<usize> {
    let exchange = |node: &Node| matches!(node.op, Op::Exchange(_));
    let all = program.nodes.iter().enumerate().filter(|(_, node)| exchange(node));
    all.map(|(i, _)| i).nth(number)
}

/// A stack of experts' matrices, each padded with zero rows to whole panels.
struct Padded {
    each: usize,
    rows: usize,
    cols: usize,
}

impl Padded {
    fn new(each: usize, [rows, cols]: [usize; 2]) -> Padded {
        Padded { each, rows, cols }
    }

    /// Number of rows, including padding.
    fn rows(&self) -> usize {
        self.rows / self.each * self.each.next_multiple_of(ROWS)
    }

    /// Zero bytes decode to zeros in every encoding: floats are 0.0, and blocks have zero scales
    /// and offsets.
    fn bytes(&self, bytes: &[u8]) -> Vec<u8> {
        let each = bytes.len() / self.rows * self.each;
        let wide = bytes.len() / self.rows * self.each.next_multiple_of(ROWS);
        let mut all = Vec::with_capacity(bytes.len() / each.max(1) * wide);
        for part in bytes.chunks(each.max(1)) {
            all.extend_from_slice(part);
            all.resize(all.len() + wide - each, 0);
        }
        all
    }

    /// The index in the unpadded stack of element `at` of the padded one.
    fn origin(&self, at: usize) -> usize {
        let (row, wide) = (at / self.cols, self.each.next_multiple_of(ROWS));
        (row / wide * self.each + row % wide) * self.cols + at % self.cols
    }
}

/// Values that are kept only in quantised form in steps of many rows: gate outputs whose single
/// reader is a product with a quantised matrix.
fn quantised_only(program: &Program, weights: &[Arc<Weight>]) -> Vec<bool> {
    let (uses, writers) = (program.uses(), program.writers());
    let mut quantised_only = vec![false; program.values.len()];
    let product = |node: &Node| node.op.product(node.weights.len());
    let single = |product: &Product| product.norm.is_none() && product.projections.len() == 1;
    for node in program.nodes.iter().filter(|node| product(node).is_some_and(|p| single(&p))) {
        let value = node.inputs[0].0;
        let gated = |writer: usize| product(&program.nodes[writer]).is_some_and(|p| p.gated);
        quantised_only[value] = uses[value] == 1
            && writers[value].is_some_and(gated)
            && !weights[node.weights[0].0].is_float_matrix();
    }
    quantised_only
}

fn load_weights(
    program: &Program,
    tensors: &Tensors,
    wanted: &Wanted<'_>,
    options: &ExecutorOptions,
    team: &Team,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Arc<Weight>>> {
    wanted.prune();
    let total = program.stored_bytes(tensors)?;
    let mut done = 0;
    let mut weights = Vec::with_capacity(program.weights.len());
    for (weight, each) in program.weights.iter().zip(experts::rows_of_one(program)) {
        if let Some(held) = wanted.find(weight, &each) {
            weights.push(held);
            done += weight.stored_bytes(tensors)?;
            progress(done, total);
            continue;
        }
        let read = weight.read(tensors)?;
        let named = |error| weight.named(error);
        let (packed, not_finite) = match *weight.shape.as_slice() {
            [rows, cols] => {
                // Each expert begins with a panel of its own.
                let several = |each: &usize| *each < rows && !each.is_multiple_of(ROWS);
                let padded = each.filter(several).map(|each| Padded::new(each, [rows, cols]));
                let packed = match &padded {
                    Some(padded) => {
                        let (rows, bytes) = (padded.rows(), padded.bytes(&read.bytes));
                        Matrix::pack(read.encoding, rows, cols, &bytes, team)
                    }
                    None => Matrix::pack(read.encoding, rows, cols, &read.bytes, team),
                };
                let matrix = packed.map_err(named)?;
                // Keep one copy in memory: the file's pages are not needed again.
                weight.source.release(tensors);
                let mut not_finite = matrix.not_finite();
                if let (Some(found), Some(padded)) = (&mut not_finite, &padded) {
                    found.element = padded.origin(found.element);
                }
                (Weight::Matrix(matrix), not_finite)
            }
            [_] => {
                let values = read.to_f32().map_err(named)?;
                let not_finite = NotFinite::among(&values);
                // Biases of experts are padded as their rows are packed: to whole panels.
                let several = |each: &usize| *each < values.len() && !each.is_multiple_of(ROWS);
                let padded = each.filter(several).map(|each| {
                    let mut padded = Vec::with_capacity(values.len());
                    for part in values.chunks(each) {
                        padded.extend_from_slice(part);
                        padded.resize(padded.len().next_multiple_of(ROWS), 0.0);
                    }
                    padded
                });
                (Weight::Vector(padded.unwrap_or(values)), not_finite)
            }
            _ => {
                return Err(Error::new(&weight.name, "rank 1 or 2", format!("{:?}", weight.shape)));
            }
        };
        if let Some(found) = not_finite.filter(|_| !options.allow_nan) {
            return Err(finite::refusal(weight, tensors, found));
        }
        let packed = Arc::new(packed);
        wanted.keep(weight, each, packed.bytes(), &packed);
        weights.push(packed);
        done += weight.stored_bytes(tensors)?;
        progress(done, total);
    }
    Ok(weights)
}

impl Rowed {
    /// Takes a step's rows, replacing [`CHOSEN`] by the token that the sequence's slot chose last.
    fn set(&mut self, step: &Step<'_>, slots: &[Carried]) -> Result<()> {
        self.tokens.clear();
        self.tokens.extend_from_slice(step.tokens);
        self.rows.clear();
        for (number, (first, sequence)) in step.placed().enumerate() {
            let row = |i: u32| Row {
                sequence: number,
                first,
                index: (sequence.start + i) as usize,
                position: sequence.position + i,
            };
            self.rows.extend((0..sequence.rows).map(row));
            if self.tokens[first] == CHOSEN {
                let carried = slots.get(sequence.slot as usize);
                self.tokens[first] = chosen(carried, sequence.slot)?;
            }
        }
        Ok(())
    }
}

/// The sequences of a step as attention takes them for a cache group: one entry for each row that
/// decodes, one for each prompt.
fn queries<'a>(step: &Step<'a>, group: usize, into: &mut Vec<QuerySequence<'a>>) {
    for (first, sequence) in step.placed() {
        let table = &sequence.tables[group];
        let (rows, start) = (sequence.rows as usize, sequence.start as usize);
        let each = if step.kind == StepKind::Decode { 1 } else { rows };
        into.extend((0..rows).step_by(each).map(|row| QuerySequence {
            decodes: step.kind == StepKind::Decode,
            table: table.blocks,
            row: first + row,
            tokens: each,
            position: start + row,
            oldest: table.oldest as usize,
        }));
    }
}

impl CpuExecutor {
    /// Checks that an adapter is loaded on every seat that the step names.
    fn check_seats(&self, step: &Step<'_>) -> Result<()> {
        let empty = |adapter: u32| {
            let seat = (adapter as usize).checked_sub(1);
            seat.is_some_and(|seat| self.loaded.seats.get(seat).is_none_or(Option::is_none))
        };
        match step.sequences.iter().find(|sequence| empty(sequence.adapter)) {
            None => Ok(()),
            Some(sequence) => {
                let found = format!("none on seat {}", sequence.adapter);
                Err(Error::new("step", "an adapter that was loaded", found))
            }
        }
    }

    /// Runs one replay, recording the workers' times in `spans`; no ticket if it was stopped.
    fn replay(
        &mut self,
        step: &Step<'_>,
        watch: &Watch<'_>,
        spans: Option<&Spans<'_>>,
    ) -> Result<Option<Ticket>> {
        self.last = None;
        let ticket = Ticket::next(&mut self.tickets);
        step.check(&self.limits)?;
        self.check_seats(step)?;
        self.rows.set(step, &self.sampling.slots)?;
        let class = self.class(step.tokens.len(), step.outputs.len());
        if let Some(input) = self.loaded.program.input {
            let place = place_of(&self.loaded, &self.classes[class], step, input);
            floats(&mut self.arena)[place].copy_from_slice(step.input);
        }
        let nodes = 0..self.loaded.program.nodes.len();
        if !self.compute(step, class, nodes, watch, spans) {
            return Ok(None);
        }
        self.last = Some((class, step.tokens.len(), step.outputs.len()));
        self.choose(step, ticket);
        Ok(Some(ticket))
    }

    /// Computes a range of nodes of the current step. Returns false if it was stopped.
    fn compute(
        &mut self,
        step: &Step<'_>,
        class: usize,
        nodes: Range<usize>,
        watch: &Watch<'_>,
        spans: Option<&Spans<'_>>,
    ) -> bool {
        let mut all: Vec<Vec<QuerySequence<'_>>> = std::mem::take(&mut self.rows.queries);
        for (group, into) in all.iter_mut().enumerate() {
            queries(step, group, into);
        }
        let replay = Replay {
            loaded: &self.loaded,
            class: &self.classes[class],
            step,
            tokens: &self.rows.tokens,
            rows: &self.rows.rows,
            queries: &all,
            arena: self.arena.as_ptr(),
            caches: &self.caches,
            scratch: SharedSlice::new(&mut self.scratch),
            partials: SharedSlice::new(floats(&mut self.partials)),
            spans,
            watch,
            nodes,
        };
        let team = match step.kind {
            StepKind::Decode => self.loaded.team_of(self.pace.workers()),
            StepKind::Prompt => &self.loaded.team,
        };
        self.workers = team.count();
        let whole = replay.run(team);
        self.rows.queries = all.into_iter().map(recycle).collect();
        for (group, used) in self.used.iter_mut().enumerate() {
            let blocks = step.sequences.iter().flat_map(|s| s.tables[group].blocks);
            *used = blocks.fold(*used, |used, &block| used.max(block as usize + 1));
        }
        whole
    }

    /// Chooses tokens for the step's sequences: a single one on this thread, several on all
    /// workers that computed the step.
    fn choose(&mut self, step: &Step<'_>, ticket: Ticket) {
        let logits = self.result(0);
        // SAFETY: the arena is not written before the next replay, and lives as long as this
        // executor.
        let logits = unsafe { std::slice::from_raw_parts(logits.as_ptr(), logits.len()) };
        let Sampling { samplers, slots, outcomes } = &mut self.sampling;
        let choices = outcomes.begin(ticket);
        let Some(vocab) = self.limits.vocab else { return };
        for Choosing { row, sequence, choose, .. } in step.choosing() {
            let slot = sequence.slot as usize;
            if slot >= slots.len() {
                slots.resize_with(slot + 1, Carried::default);
            }
            // A chosen token is in the slot's history already.
            if step.tokens[row] != CHOSEN {
                slots[slot].begin(choose);
            }
            choices.push(choose);
        }
        let count = choices.chosen.len();
        let Choices { chosen, likeliest } = choices;
        let (chosen, likeliest) = (SharedSlice::new(chosen), SharedSlice::new(likeliest));
        let samplers = SharedSlice::new(samplers);
        let carried = &*slots;
        let one = |worker: usize, i: usize, choosing: Choosing<'_>| {
            let Choosing { output, sequence, choose, .. } = choosing;
            let history = &carried[sequence.slot as usize].history;
            let (row, at) = (&logits[output * vocab..][..vocab], u64::from(sequence.end()));
            // SAFETY: each worker has its own sampler, and each sequence its own entry.
            unsafe {
                let sampler = &mut samplers.slice_mut(worker..worker + 1)[0];
                let chosen = &mut chosen.slice_mut(i..i + 1)[0];
                let likeliest = likeliest.slice_mut(chosen.range());
                chosen.choice = sampler.choose(row, history, at, choose, likeliest);
            }
        };
        if count == 1 {
            step.choosing().for_each(|choosing| one(0, 0, choosing));
        } else if count > 1 {
            self.loaded.team_of(self.workers).run(&|worker| {
                let mine = worker.split(count);
                let own = step.choosing().enumerate().skip(mine.start).take(mine.len());
                own.for_each(|(i, choosing)| one(worker.index, i, choosing));
            });
        }
        for (i, Choosing { sequence, choose, .. }) in step.choosing().enumerate() {
            let slot = &mut slots[sequence.slot as usize];
            match choices.chosen[i].choice {
                Ok(choice) => slot.push(choice.token, choose.options.looks_back()),
                Err(_) => slot.token = None,
            }
        }
    }

    fn result(&self, index: usize) -> &[f32] {
        let (Some((class, tokens, outputs)), Some(ValueId(value))) =
            (self.last, self.loaded.program.results.get(index).copied())
        else {
            return &[];
        };
        let shape = self.loaded.program.values[value];
        let rows = shape.rows.count(tokens, outputs);
        let offset = self.classes[class].plan.offsets[value];
        let bytes = &self.arena[offset..][..rows * shape.width * size_of::<f32>()];
        // SAFETY: offsets are multiples of 64 in a buffer aligned to more; any bits are valid f32.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), rows * shape.width) }
    }
}

impl CpuExecutor {
    /// The cache of a layer, checked to have this block, and its group.
    fn block(&self, layer: usize, block: u32) -> Result<(usize, &Cache)> {
        let of = self.loaded.groups.get(layer).zip(self.caches.get(layer));
        let of = of.map(|(group, cache)| (*group, cache));
        let has = |(_, cache): &(usize, &Cache)| (block as usize) < cache.blocks();
        of.filter(has).ok_or_else(|| no_block(layer, block))
    }
}

impl Executor for CpuExecutor {
    fn submit_watched(&mut self, step: &Step<'_>, watch: &Watch<'_>) -> Result<Option<Ticket>> {
        self.replay(step, watch, None)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Outcome<'_>> {
        self.sampling.outcomes.get(ticket).ok_or_else(|| ticket.unknown())
    }

    fn keeps(&self, ticket: Ticket) -> bool {
        self.sampling.outcomes.get(ticket).is_some()
    }

    fn read(&mut self, ticket: Ticket, index: usize) -> Result<&[f32]> {
        if ticket.number() != self.tickets { Err(ticket.unknown()) } else { Ok(self.result(index)) }
    }

    fn ahead(&self) -> usize {
        0
    }

    fn exchange(
        &mut self,
        step: &Step<'_>,
        number: usize,
        brings: &[Vec<f32>],
        gives: &mut Vec<Vec<f32>>,
    ) -> Result<()> {
        self.last = None;
        step.check(&self.limits)?;
        self.rows.set(step, &self.sampling.slots)?;
        let class = self.class(step.tokens.len(), step.outputs.len());
        let place = |number| exchange(&self.loaded.program, number);
        let (Some(first), Some(last)) = (place(number), place(number + 1)) else {
            let found = format!("exchange {number}");
            return Err(Error::new("exchange", "one of the Program's, and one behind it", found));
        };
        let CpuExecutor { loaded, classes, arena, .. } = self;
        let floats_of = |value: &ValueId| place_of(loaded, &classes[class], step, *value);
        let brought = &loaded.program.nodes[first].outputs;
        let fit = brings.iter().map(Vec::len).eq(brought.iter().map(|v| floats_of(v).len()));
        if !fit {
            let found: Vec<usize> = brings.iter().map(Vec::len).collect();
            return Err(Error::new("exchange", "rows of its values", format!("{found:?} floats")));
        }
        for (value, from) in brought.iter().zip(brings) {
            floats(arena)[floats_of(value)].copy_from_slice(from);
        }
        if !self.compute(step, class, first + 1..last, &Watch::NONE, None) {
            return Err(Error::new("exchange", "a step that ends", "one that was stopped"));
        }
        let CpuExecutor { loaded, classes, arena, .. } = self;
        let given = &loaded.program.nodes[last].inputs;
        gives.resize_with(given.len(), Vec::new);
        for (to, value) in gives.iter_mut().zip(given) {
            let place = place_of(loaded, &classes[class], step, *value);
            to.clear();
            to.extend_from_slice(&floats(arena)[place]);
        }
        Ok(())
    }

    fn copy_blocks(&mut self, group: usize, blocks: &[(u32, u32)]) -> Result<()> {
        let count = self.limits.blocks.get(group).copied().unwrap_or(0);
        for &(from, to) in blocks {
            if from as usize >= count || to as usize >= count {
                let found = format!("{from} to {to} of group {group}");
                return Err(Error::new("cache", format!("blocks below {count}"), found));
            }
            let layers = self.caches.iter().zip(&self.loaded.groups);
            for (cache, _) in layers.filter(|(_, of)| **of == group) {
                // SAFETY: no replay is under way, so that nothing else uses the cache.
                unsafe { cache.copy_block(from as usize, to as usize) };
            }
            self.used[group] = self.used[group].max(to as usize + 1);
        }
        Ok(())
    }

    fn read_block(&mut self, layer: usize, block: u32, bytes: &mut Vec<u8>) -> Result<()> {
        let (_, cache) = self.block(layer, block)?;
        // SAFETY: no replay is under way, so that nothing else uses the cache.
        unsafe { cache.read_block(block as usize, bytes) };
        Ok(())
    }

    fn write_block(&mut self, layer: usize, block: u32, bytes: &[u8]) -> Result<()> {
        let (group, cache) = self.block(layer, block)?;
        check_block(cache.plain_bytes(), bytes)?;
        // SAFETY: no replay is under way, so that nothing else uses the cache.
        unsafe { cache.write_block(block as usize, bytes) };
        self.used[group] = self.used[group].max(block as usize + 1);
        Ok(())
    }

    fn seat(&mut self, seat: u32, adapter: Option<&AdapterFactors>) -> Result<()> {
        let count = self.loaded.seats.len();
        let index = (seat as usize).wrapping_sub(1);
        if index >= count {
            let expected = format!("one of {count} seats for adapters");
            return Err(Error::new("adapter", expected, format!("seat {seat}")));
        }
        let Some(adapter) = adapter else {
            self.loaded.seats[index] = None;
            return Ok(());
        };
        adapter.check(&self.loaded.program.sites)?;
        if adapter.rank() > self.loaded.rank {
            let expected = format!("a rank up to {}, which there is room for", self.loaded.rank);
            return Err(Error::new("adapter", expected, adapter.rank()));
        }
        let factors = |site: &program::Site| {
            let Some(delta) = adapter.deltas.get(&site.name) else { return Ok(Vec::new()) };
            let sizes = [delta.rank, site.input, site.output];
            let gain = delta.gain.as_ref().map(|gain| [&gain.gain[..], &gain.offset[..]]);
            let downs = delta.down.chunks_exact(delta.down.len() / site.matrices());
            let ups = delta.up.chunks_exact(delta.up.len() / site.matrices());
            let each = downs
                .zip(ups)
                .map(|(down, up)| Factors::new(sizes, down, up, delta.scale, gain, delta.element));
            let all: Result<Vec<Factors>> = each.collect();
            all.map_err(|e| Error { place: format!("{}: {}", site.name, e.place), ..e })
        };
        let all = self.loaded.program.sites.iter().map(factors).collect::<Result<_>>()?;
        self.loaded.seats[index] = Some(all);
        Ok(())
    }

    fn memory(&self) -> Memory {
        let seated = self.loaded.seats.iter().flatten().flatten().flatten();
        let adapters: usize = seated.map(Factors::bytes).sum();
        Memory {
            weights: self.loaded.weights.iter().map(|w| w.bytes()).sum::<usize>() + adapters,
            cache: self
                .caches
                .iter()
                .zip(&self.loaded.groups)
                .map(|(c, &g)| self.used[g] * c.layer_bytes())
                .sum(),
            arena: self.classes.iter().map(|c| c.bytes).max().unwrap_or(0),
            device: None,
        }
    }

    fn compiled(&self) -> usize {
        self.classes.len()
    }

    fn roof(&self) -> Roof {
        let loaded = &self.loaded;
        let read = loaded.weights.iter().zip(loaded.program.shares_read());
        let parts: Vec<(&[u8], f64)> = read
            .filter_map(|(weight, share)| match &**weight {
                Weight::Matrix(matrix) if share > 0.0 => Some((matrix.bytes(), share)),
                _ => None,
            })
            .collect();
        let bytes: Vec<&[u8]> = parts.iter().map(|part| part.0).collect();
        let of_token = |(bytes, share): &(&[u8], f64)| (bytes.len() as f64 * share) as usize;
        Roof {
            token_bytes: parts.iter().map(of_token).sum(),
            position_bytes: self
                .caches
                .iter()
                .filter(|cache| matches!(cache, Cache::KeysValues(_)))
                .map(|cache| cache.layer_bytes() / BLOCK_TOKENS)
                .sum(),
            bytes_per_second: read_rate(&*loaded.team, &bytes, 7),
        }
    }

    fn submit_timed(&mut self, step: &Step<'_>) -> Result<Option<(Ticket, Profile)>> {
        let mut slots =
            vec![Span::default(); self.loaded.program.nodes.len() * self.loaded.team.count()];
        let spans = Spans::new(&mut slots);
        let ticket = self.replay(step, &Watch::NONE, Some(&spans))?;
        let seconds = spans.now();
        let blocks: Vec<usize> = self.caches.iter().map(Cache::layer_bytes).collect();
        let profile = profile(&self.loaded, &blocks, step, slots.chunks(self.workers), seconds);
        Ok(ticket.map(|ticket| (ticket, profile)))
    }

    fn limits(&self) -> Option<ComputePeaks> {
        let peaks = |isa: Isa| {
            let [bytes_dot, narrow_dot, tiles, floats] =
                [Unit::Bytes, Unit::Narrow, Unit::Tiles, Unit::Floats]
                    .map(|unit| peak(&*self.loaded.team, isa, unit, 9));
            Peaks { isa: isa.name(), bytes_dot, narrow_dot, tiles, floats }
        };
        let used = peaks(self.loaded.isa);
        let best = Isa::available().last().copied().unwrap_or(Isa::Scalar);
        let best = if best == self.loaded.isa { used } else { peaks(best) };
        Some(ComputePeaks { cores: default_threads(), used, best })
    }
}
