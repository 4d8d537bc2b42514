//! Pipeline parallelism: a model on several devices, layer by layer. The embedding table and the
//! first layers lie on the first device, the head on the last.
//!
//! The Program is cut between layers. Each device loads its part and the cache of its own layers.
//! In every replay the one value at a cut moves to the next device, directly between devices of one
//! kind, else through the host. The last device chooses tokens if it can.

use formats::{Error, Result, Tensors};
use program::{AdapterFactors, CHOSEN, Program, Site, Step, StepMemory};

use crate::{
    About, CachesLatents, Device, Executor, ExecutorOptions, Memory, Outcome, Plan, Roof, Ticket,
    Watch,
};

/// Several devices as one.
pub struct Split {
    devices: Vec<Box<dyn Device>>,
    /// Number of layers after the first device, if it was given.
    after: Option<usize>,
}

impl Split {
    /// Splits a model's weights evenly over all devices. With `after`, the first device keeps all
    /// but the last `after` layers, and the others share those and the head evenly.
    pub fn new(devices: Vec<Box<dyn Device>>, after: Option<usize>) -> Split {
        Split { devices, after }
    }

    /// The Program of each device, with its load options.
    fn parts(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Loading>> {
        let blocks = program.blocks();
        let layers = blocks.len();
        let all = program.groups().len();
        if options.blocks.len() != all || options.context.len() != all {
            let expected = format!("blocks of each of {all} cache groups");
            return Err(Error::new("split", expected, options.blocks.len()));
        }
        let bytes = |weight: &program::Weight| weight.stored_bytes(tensors);
        let cuts = match self.after {
            None => program.even_cuts(0, self.devices.len(), &bytes)?,
            Some(last) if (1..layers).contains(&last) => {
                let first = blocks[layers - last];
                let rest = program.even_cuts(first, self.devices.len() - 1, &bytes)?;
                [vec![first], rest].concat()
            }
            Some(last) => {
                let expected = format!("1 to {} of {layers} layers on GPUs", layers - 1);
                return Err(Error::new("split", expected, last));
            }
        };
        let load = |part: program::ProgramPart| {
            let of = |blocks: &[usize]| part.groups.iter().map(|g| blocks[*g]).collect();
            let options = ExecutorOptions {
                blocks: of(&options.blocks),
                context: of(&options.context),
                ..options.clone()
            };
            Loading { program: part.program, groups: part.groups, options }
        };
        Ok(program.split(&cuts)?.into_iter().map(load).collect())
    }
}

/// A part before it is loaded.
struct Loading {
    program: Program,
    groups: Vec<usize>,
    options: ExecutorOptions,
}

/// A loaded part; `groups` maps its cache groups to the whole Program's, `layers` counts its cache
/// layers.
struct Share {
    executor: Box<dyn Executor>,
    groups: Vec<usize>,
    layers: usize,
}

/// The executor of a [`Split`].
struct SplitExecutor {
    /// All devices but the last.
    front: Vec<Share>,
    last: Share,
    /// Adapter sites of each part.
    sites: Vec<Vec<Site>>,
    groups: usize,
    memory: StepMemory,
}

impl Device for Split {
    fn about(&self) -> About {
        let mut all = self.devices.iter().map(|device| device.about());
        let mut first = all.next().unwrap_or_default();
        let rest: Vec<About> = all.collect();
        let Some(second) = rest.first() else { return first };
        let many = if rest.len() > 1 { format!("{} of ", rest.len()) } else { String::new() };
        let on = format!("{many}{}, {}", second.name, second.isa);
        first.isa = match self.after {
            Some(last) => format!("{}; the last {last} layers on {on}", first.isa),
            None => format!("{}; further layers on {on}", first.isa),
        };
        first
    }

    fn caches_latents(&self) -> CachesLatents {
        let each = self.devices.iter().map(|device| device.caches_latents());
        each.min().unwrap_or(CachesLatents::Never)
    }

    fn check(&self, program: &Program) -> Result<()> {
        self.devices.iter().try_for_each(|device| device.check(program))
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Plan>> {
        let parts = self.parts(program, tensors, options)?;
        let plans = self.devices.iter().zip(parts);
        let plans = plans.map(|(on, part)| on.plan(&part.program, tensors, &part.options));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        Ok(plans.concat())
    }

    fn shared(&self) -> usize {
        self.devices.iter().map(|device| device.shared()).sum()
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        let groups = program.groups().len();
        let parts = self.parts(&program, tensors, &options)?;
        let bytes = |part: &Loading| part.program.stored_bytes(tensors);
        let sizes = parts.iter().map(bytes).collect::<Result<Vec<u64>>>()?;
        let sites = parts.iter().map(|part| part.program.sites.clone()).collect();
        let (mut before, total) = (0, sizes.iter().sum());
        let mut loaded = Vec::new();
        // Load from the last to the first: the GPUs behind the CPU have less memory, so a failure
        // shows early.
        for ((device, part), size) in self.devices.iter().zip(parts).zip(sizes).rev() {
            let mut told = |done, _| progress(before + done, total);
            let layers = part.program.layers.len();
            let executor = device.load(part.program, tensors, part.options, &mut told)?;
            loaded.push(Share { executor, groups: part.groups, layers });
            before += size;
        }
        loaded.reverse();
        for at in 1..loaded.len() {
            let (front, back) = loaded.split_at_mut(at);
            back[0].executor.follow(&mut *front[at - 1].executor);
        }
        let none = || Error::new("split", "a device", "none");
        let last = loaded.pop().ok_or_else(none)?;
        let (front, memory) = (loaded, StepMemory::default());
        Ok(Box::new(SplitExecutor { front, last, sites, groups, memory }))
    }
}

impl SplitExecutor {
    fn all(&self) -> impl Iterator<Item = &dyn Executor> {
        self.front.iter().chain([&self.last]).map(|share| &*share.executor)
    }

    /// The part that has a cache layer, and the layer's number in that part.
    fn of_layer(&mut self, layer: usize, block: u32) -> Result<(&mut dyn Executor, usize)> {
        let mut own = layer;
        for share in self.front.iter_mut().chain([&mut self.last]) {
            if own < share.layers {
                return Ok((&mut *share.executor, own));
            }
            own -= share.layers;
        }
        Err(crate::no_block(layer, block))
    }
}

impl Executor for SplitExecutor {
    fn submit_watched(&mut self, step: &Step<'_>, watch: &Watch<'_>) -> Result<Option<Ticket>> {
        if let Some(other) = step.sequences.iter().find(|s| s.tables.len() != self.groups) {
            let expected = format!("tables of {} groups", self.groups);
            return Err(Error::new("step", expected, other.tables.len()));
        }
        if step.tokens.contains(&CHOSEN) {
            let expected = "tokens that are known, where a model is on several devices";
            return Err(Error::new("step", expected, "one that is still to be chosen"));
        }
        let mut input = step.input;
        let parts = (self.front.len() + 1) as f64;
        for (i, Share { executor, groups, .. }) in self.front.iter_mut().enumerate() {
            let progress = |done: f64| (watch.progress)((i as f64 + done) / parts);
            let watch = Watch { stop: watch.stop, progress: &progress };
            let submit = |part: &Step<'_>| executor.submit_watched(part, &watch);
            let Some(ticket) = self.memory.part(step, groups, &[], input, submit)? else {
                return Ok(None);
            };
            // Empty if the next device reads it from this one.
            input = executor.read(ticket, 0)?;
        }
        let progress = |done: f64| (watch.progress)((parts - 1.0 + done) / parts);
        let watch = Watch { stop: watch.stop, progress: &progress };
        let Share { executor, groups, .. } = &mut self.last;
        let submit = |part: &Step<'_>| executor.submit_watched(part, &watch);
        self.memory.part(step, groups, step.outputs, input, submit)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Outcome<'_>> {
        self.last.executor.wait(ticket)
    }

    fn keeps(&self, ticket: Ticket) -> bool {
        self.last.executor.keeps(ticket)
    }

    fn read(&mut self, ticket: Ticket, index: usize) -> Result<&[f32]> {
        self.last.executor.read(ticket, index)
    }

    fn ahead(&self) -> usize {
        0
    }

    fn copy_blocks(&mut self, group: usize, blocks: &[(u32, u32)]) -> Result<()> {
        for Share { executor, groups, .. } in self.front.iter_mut().chain([&mut self.last]) {
            if let Some(own) = groups.iter().position(|of| *of == group) {
                executor.copy_blocks(own, blocks)?;
            }
        }
        Ok(())
    }

    fn read_block(&mut self, layer: usize, block: u32, bytes: &mut Vec<u8>) -> Result<()> {
        let (executor, own) = self.of_layer(layer, block)?;
        executor.read_block(own, block, bytes)
    }

    fn write_block(&mut self, layer: usize, block: u32, bytes: &[u8]) -> Result<()> {
        let (executor, own) = self.of_layer(layer, block)?;
        executor.write_block(own, block, bytes)
    }

    fn seat(&mut self, seat: u32, adapter: Option<&AdapterFactors>) -> Result<()> {
        let shares = self.front.iter_mut().chain([&mut self.last]);
        let seated = shares.zip(&self.sites).try_for_each(|(share, sites)| {
            let part = adapter.map(|adapter| adapter.part(sites));
            share.executor.seat(seat, part.as_ref())
        });
        if seated.is_err() {
            // A partly loaded adapter is of no use: empty the seat everywhere.
            for share in self.front.iter_mut().chain([&mut self.last]) {
                share.executor.seat(seat, None)?;
            }
        }
        seated
    }

    fn memory(&self) -> Memory {
        Memory::sum(self.all().map(Executor::memory))
    }

    fn lost(&self) -> bool {
        self.all().any(Executor::lost)
    }

    fn compiled(&self) -> usize {
        self.all().map(Executor::compiled).sum()
    }

    fn roof(&self) -> Roof {
        Roof::in_turns(self.all().map(Executor::roof))
    }
}
