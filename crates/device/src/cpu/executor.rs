//! A Program loaded on the CPU: packed weights, cache pools, the arena, and the shape classes
//! compiled so far.

use super::Cpu;
use super::class::Class;
use super::pace::Pace;
use super::plan::{caches, partials, plan};
use super::profile::{Span, Spans, profile};
use super::replay::Replay;
use super::rows::{Rowed, queries};
use super::state::Cache;
use super::weights::{Weight, load_weights, quantised_only};
use crate::choose::{Carried, Choices, HostSampler, Outcomes};
use crate::{
    ComputePeaks, Executor, ExecutorOptions, Memory, Outcome, Peaks, Profile, Roof, Ticket, Watch,
    plan,
};
use crate::{check_block, no_block};
use cpu_kernels::attention::QuerySequence;
use cpu_kernels::isa::Isa;
use cpu_kernels::low_rank::Factors;
use cpu_kernels::matmul::{Huge, Scratch, Unit, peak};
use cpu_kernels::roof::read_rate;
use cpu_kernels::team::{SharedSlice, Team, default_threads};
use formats::{Error, Result, Tensors};
use ops::{Op, Rope};
use program::{
    AdapterFactors, BLOCK_TOKENS, CHOSEN, Choosing, Node, Program, Step, StepKind, ValueId, recycle,
};
use std::ops::Range;
use std::sync::Arc;

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
    pub(super) quantised_only: Vec<Option<usize>>,
    /// The adapter site of each matrix of each node: see [`Node::sites`].
    pub(super) sites: Vec<Vec<Option<usize>>>,
    /// The low-rank factors of each adapter seat, for every matrix of every site, none at a site
    /// that the adapter leaves; `None` for an empty seat.
    pub(super) seats: Vec<Option<Vec<Vec<Factors>>>>,
    /// The greatest rank of an adapter's factors, tables that it has anew not counted.
    pub(super) seat_rank: usize,
    /// The greatest rank of all, tables included.
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
        let sites = program.nodes.iter().map(|node| node.sites(&program.sites)).collect();
        let groups = program.layer_groups();
        let limits = options.limits(&program);
        let crate::Seats { count, rank: seat_rank } = options.seats;
        let rank = program.most_ranks(seat_rank);
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
                sites,
                seats,
                seat_rank,
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
        adapter.check_room(&self.loaded.program.sites, self.loaded.seat_rank)?;
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
