//! A Program loaded on a GPU: weights, the cache's pools, the arena, and the shape classes seen so far.

use std::collections::HashMap;
use std::sync::Arc;

use formats::{Error, Result, Tensors};
use ops::packed::Format;
use ops::sample::{Choice, Options};
use ops::{Rope, Rows};
use program::{Arguments, BLOCK_TOKENS, Limits, Program};
use tile::types::Scalar;

use super::arena::{self, Layout, bucket};
use super::lower::{Kernels, Key, Lowering, Slot, Step, Words};
use super::run::{Chooser, STEPS};
use super::weights::{self, Weight};
use super::{Backend, Dispatch};
use crate::{CacheType, Executor, LoadOptions, Memory, Roof};

/// Classes that are kept bound: chunks of prompts have any number of rows, and most are seen once.
const KEPT: usize = 64;

/// A layer's cache.
struct Layer<B> {
    keys: B,
    values: B,
}

/// A class whose launches are bound.
pub(super) struct Class<B: Backend> {
    pub(super) words: Words,
    launches: Vec<B::Launch>,
    recording: Option<B::Recording>,
    /// Where the results are, and their rows.
    results: Vec<(B::Buffer, Rows, usize)>,
}

impl<B: Backend> Class<B> {
    /// Runs it on what is staged.
    pub(super) fn launch(&mut self, backend: &B, dispatch: Dispatch, key: &Key) -> Result<()> {
        // What is seen once is not worth recording.
        if dispatch == Dispatch::Eager || key.tokens > arena::FEW {
            return backend.submit(&self.launches);
        }
        let recording = match &mut self.recording {
            Some(recording) => recording,
            empty => empty.insert(backend.record(&self.launches)?),
        };
        backend.replay(recording)
    }
}

/// See [`Executor`].
pub(super) struct GpuExecutor<B: Backend> {
    pub(super) backend: Arc<B>,
    pub(super) dispatch: Dispatch,
    pub(super) lowering: Lowering,
    weights: Vec<Weight<B::Buffer>>,
    frequencies: Vec<B::Buffer>,
    layers: Vec<Layer<B::Buffer>>,
    /// Blocks of each group that there is memory for.
    blocks: Vec<usize>,
    /// The window of each group.
    windows: Vec<Option<usize>>,
    /// Bytes of a position, in keys and as much in values, of each layer.
    position_bytes: Vec<usize>,
    arena: B::Buffer,
    arena_bytes: usize,
    words: B::Buffer,
    scratch: [B::Buffer; 3],
    scratch_bytes: usize,
    /// The numbers from 0 on, and where matrices are unpacked to: for the vendor's products.
    numbers: B::Buffer,
    unpacked: B::Buffer,
    kernels: Kernels,
    pipelines: Vec<B::Pipeline>,
    pub(super) classes: HashMap<Key, Class<B>>,
    limits: Limits,
    /// The last step's words and results.
    staged: Vec<u8>,
    results: Vec<Vec<f32>>,
    /// Choosing tokens on the device.
    pub(super) chooser: Chooser<B>,
}

impl<B: Backend> GpuExecutor<B> {
    pub(super) fn load(
        backend: Arc<B>,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let half = match options.cache_type {
            CacheType::F16 => Scalar::F16,
            CacheType::F32 => Scalar::F32,
        };
        let weights = weights::load(&*backend, &program, tensors, progress)?;
        let upload = |rope: &Rope| -> Result<B::Buffer> {
            let bytes: Vec<u8> = rope.frequencies.iter().flat_map(|f| f.to_le_bytes()).collect();
            backend.upload(&bytes)
        };
        let position_bytes: Vec<usize> =
            program.layers.iter().map(|l| l.kv_heads * l.head_dim * half.bytes()).collect();
        let formats: Vec<Option<Format>> = weights.iter().map(|w| w.format).collect();
        let lowering = Lowering::new(program, backend.facts(), half, formats);
        let frequencies = lowering.ropes.iter().map(upload).collect::<Result<_>>()?;
        let wide = lowering.wide;
        let limits = options.limits();
        let types = lowering.types(limits.tokens);
        let arena_bytes =
            Layout::new(&lowering.program, types, limits.tokens, limits.outputs).bytes;
        let (elements, rows) = match lowering.facts.products.is_some() && half != Scalar::F32 {
            true => lowering.unpacked,
            false => (1, 1),
        };
        let all = 0..rows.max(limits.tokens) as u32;
        let numbers = backend.upload(&all.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())?;
        let packed = lowering.formats.iter().flatten().any(|f| *f != Format::Dense(wide));
        let unpacked = if packed { wide.bytes() * elements } else { 4 };
        let sizes = lowering.scratch(limits.tokens);
        let [a, b, c] = sizes.map(|bytes| backend.buffer(bytes));
        // A table is as long as its group has blocks, rounded up.
        let tables: usize = limits.blocks.iter().map(|b| 4 * stride(*b, false) + 64).sum();
        let rows = bucket(limits.tokens) * 3 + bucket(limits.outputs);
        let words = 4 * (rows + 2) + 64 * 6 + tables;
        let mut executor = GpuExecutor {
            arena: backend.buffer(arena_bytes)?,
            arena_bytes,
            words: backend.buffer(words)?,
            scratch: [a?, b?, c?],
            scratch_bytes: sizes.iter().sum::<usize>() + unpacked,
            numbers,
            unpacked: backend.buffer(unpacked)?,
            layers: Vec::new(),
            blocks: limits.blocks.iter().map(|&most| most.min(1)).collect(),
            windows: lowering.program.groups(),
            position_bytes,
            kernels: Kernels::default(),
            pipelines: Vec::new(),
            classes: HashMap::new(),
            limits,
            chooser: Chooser::default(),
            staged: Vec::with_capacity(words),
            results: vec![Vec::new(); lowering.program.results.len()],
            backend,
            dispatch: options.dispatch,
            lowering,
            weights,
            frequencies,
        };
        for layer in 0..executor.position_bytes.len() {
            let bytes = executor.layer_bytes(layer)?;
            let [keys, values] = [bytes; 2].map(|bytes| executor.backend.buffer(bytes));
            executor.layers.push(Layer { keys: keys?, values: values? });
        }
        if executor.backend.prewarms() {
            executor.prewarm()?;
        }
        Ok(executor)
    }

    /// Loads the kernels of the usual steps: a whole chunk of a prompt, a token, and a token that chooses the next.
    fn prewarm(&mut self) -> Result<()> {
        self.make_room(2 * STEPS, 1)?;
        let strides = vec![stride(1, false); self.blocks.len()];
        let length = BLOCK_TOKENS;
        for (tokens, samples) in
            [(self.limits.tokens, None), (1, None), (1, Some(false)), (1, Some(true))]
        {
            let key = Key { tokens, outputs: 1, strides: strides.clone(), length, samples };
            let class = self.compile(&key)?;
            self.classes.insert(key, class);
        }
        Ok(())
    }

    /// Bytes of a layer's keys, and of its values.
    fn layer_bytes(&self, layer: usize) -> Result<usize> {
        let blocks = self.blocks[self.lowering.groups[layer]];
        let bytes = self.position_bytes[layer].checked_mul(BLOCK_TOKENS);
        // Elements of the cache are numbered in 32 bits.
        let bytes = bytes.and_then(|b| b.checked_mul(blocks)).filter(|b| *b < 1 << 33);
        bytes.ok_or_else(|| {
            Error::new("cache", "less than 8 GiB a layer", format!("{blocks} blocks"))
        })
    }

    /// Makes room for so many blocks of a group: twice as many as there were, or more.
    fn grow(&mut self, group: usize, needed: usize) -> Result<()> {
        let most = self.limits.blocks[group];
        if needed <= self.blocks[group] {
            return Ok(());
        }
        self.blocks[group] = needed.next_power_of_two().min(most);
        // Whatever is bound has the old addresses.
        self.classes.clear();
        for layer in 0..self.layers.len() {
            if self.lowering.groups[layer] == group {
                let bytes = self.layer_bytes(layer)?;
                let backend = &self.backend;
                let larger = |old: &B::Buffer| -> Result<B::Buffer> {
                    let new = backend.buffer(bytes)?;
                    backend.copy(old, &new)?;
                    Ok(new)
                };
                let Layer { keys, values } = &self.layers[layer];
                self.layers[layer] = Layer { keys: larger(keys)?, values: larger(values)? };
            }
        }
        Ok(())
    }

    fn check(&self, arguments: &Arguments<'_>) -> Result<()> {
        arguments.check(&self.limits)?;
        let first = arguments.positions.first().copied().unwrap_or(0);
        for (window, table) in self.windows.iter().zip(arguments.tables) {
            let seen = window.map_or(0, |w| (first + 1).saturating_sub(w as u32));
            if table.oldest > seen {
                let expected = format!("a table that holds position {seen}, which is seen");
                return Err(Error::new("step", expected, format!("those from {}", table.oldest)));
            }
        }
        Ok(())
    }

    /// What tells this step's class apart.
    pub(super) fn key(&self, arguments: &Arguments<'_>) -> Key {
        let last = arguments.positions.last().map_or(0, |p| *p as usize);
        let strides = arguments.tables.iter().map(|table| {
            let wraps = last / BLOCK_TOKENS >= table.blocks.len();
            stride(table.blocks.len(), wraps)
        });
        Key {
            tokens: arguments.tokens.len(),
            outputs: arguments.outputs.len(),
            strides: strides.collect(),
            length: (last + 1).next_power_of_two().max(BLOCK_TOKENS),
            samples: None,
        }
    }

    /// Lowers, loads and binds a class.
    fn compile(&mut self, key: &Key) -> Result<Class<B>> {
        let types = self.lowering.types(key.tokens);
        let layout = Layout::new(&self.lowering.program, types, key.tokens, key.outputs);
        if layout.bytes > self.arena_bytes {
            // A smaller class may pack worse than the largest.
            self.classes.clear();
            self.arena = self.backend.buffer(layout.bytes)?;
            self.arena_bytes = layout.bytes;
        }
        let steps = self.lowering.class(key, &layout, &mut self.kernels)?;
        let first = self.pipelines.len();
        let sources = self.kernels.sources[first..].iter();
        let built: Vec<_> = sources.map(|(k, numbers)| self.backend.built(k, numbers)).collect();
        let new = || self.kernels.all[first..].iter().zip(&built);
        let missing: Vec<&tile::Kernel> =
            new().filter(|(_, built)| built.is_none()).map(|(kernel, _)| kernel).collect();
        self.backend.ahead(&missing);
        for (kernel, built) in new() {
            let built = built.clone().map_or_else(|| self.backend.load(kernel), Ok)?;
            self.pipelines.push(built);
        }
        let launches = steps.iter().map(|step| self.bind(step)).collect::<Result<Vec<_>>>()?;
        let results = self.lowering.program.results.iter().map(|&v| {
            let shape = self.lowering.program.shape(v);
            let types = self.lowering.types(key.tokens);
            let range = layout.value(&self.lowering.program, types, v);
            Ok((self.backend.part(&self.arena, range)?, shape.rows, shape.width))
        });
        let results = results.collect::<Result<_>>()?;
        Ok(Class { words: Words::new(key), launches, recording: None, results })
    }

    fn bind(&self, step: &Step) -> Result<B::Launch> {
        let buffer = |slot: &Slot| match slot {
            Slot::Arena(range) => self.backend.part(&self.arena, range.clone()),
            Slot::Words(range) => self.backend.part(&self.words, range.clone()),
            Slot::Weight(w) => Ok(self.weights[*w].buffer.clone()),
            Slot::Frequencies(rope) => Ok(self.frequencies[*rope].clone()),
            Slot::Keys(layer) => Ok(self.layers[*layer].keys.clone()),
            Slot::Values(layer) => Ok(self.layers[*layer].values.clone()),
            Slot::Scratch(i) => Ok(self.scratch[*i].clone()),
            Slot::Sampling(part) => self.chooser.buffer(*part),
            Slot::Numbers(count) => self.backend.part(&self.numbers, 0..4 * count),
            Slot::Unpacked(bytes) => self.backend.part(&self.unpacked, 0..*bytes),
        };
        match step {
            Step::Kernel { kernel, numbers, buffers } => {
                let buffers = buffers.iter().map(buffer).collect::<Result<Vec<_>>>()?;
                self.backend.bind(&self.pipelines[*kernel], numbers, &buffers)
            }
            Step::Product { shape, x, w, add, y } => {
                let add = add.as_ref().map(buffer).transpose()?;
                self.backend.product(shape, &buffer(x)?, &buffer(w)?, add.as_ref(), &buffer(y)?)
            }
        }
    }

    /// Checks a step and makes room in the cache for it. What was chosen ahead is forgotten.
    pub(super) fn prepare(&mut self, arguments: &Arguments<'_>) -> Result<()> {
        self.chooser.forget();
        self.results.iter_mut().for_each(Vec::clear);
        self.check(arguments)?;
        for (group, table) in arguments.tables.iter().enumerate() {
            let needed = table.blocks.iter().max().map_or(0, |b| *b as usize + 1);
            self.grow(group, needed)?;
        }
        Ok(())
    }

    /// The class of a key, compiled on first sight. It is taken out: whoever uses it puts it back.
    pub(super) fn class(&mut self, key: &Key) -> Result<Class<B>> {
        match self.classes.remove(key) {
            Some(class) => Ok(class),
            None => self.compile(key),
        }
    }

    /// Writes the step's words where its class expects them.
    pub(super) fn stage(&mut self, words: &Words, arguments: &Arguments<'_>) -> Result<()> {
        self.staged.clear();
        self.staged.resize(words.bytes, 0);
        let mut put = |range: &std::ops::Range<usize>, values: &[u32]| {
            let to = self.staged[range.clone()].chunks_exact_mut(4);
            to.zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
        };
        put(&words.tokens, arguments.tokens);
        put(&words.positions, arguments.positions);
        put(&words.outputs, arguments.outputs);
        put(&words.starts, &[0, arguments.tokens.len() as u32]);
        words.tables.iter().zip(arguments.tables).for_each(|(range, t)| put(range, t.blocks));
        self.backend.write(&self.words, &self.staged)
    }

    fn read(&mut self, class: &Class<B>, tokens: usize, outputs: usize) -> Result<()> {
        for ((buffer, rows, width), to) in class.results.iter().zip(&mut self.results) {
            let rows = match rows {
                Rows::Tokens => tokens,
                Rows::Outputs => outputs,
            };
            let bytes = 4 * rows * width;
            self.staged.clear();
            self.staged.resize(bytes, 0);
            if bytes > 0 {
                self.backend.read(buffer, &mut self.staged)?;
            }
            to.clear();
            let floats = self.staged.chunks_exact(4);
            to.extend(floats.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        Ok(())
    }
}

/// Blocks in a row of a table. One that does not wrap may be longer than it has blocks, so that it serves for longer.
fn stride(blocks: usize, wraps: bool) -> usize {
    if wraps { blocks } else { blocks.next_power_of_two().max(16) }
}

impl<B: Backend> Executor for GpuExecutor<B> {
    fn run(&mut self, arguments: &Arguments<'_>) -> Result<()> {
        self.prepare(arguments)?;
        let key = self.key(arguments);
        let mut class = self.class(&key)?;
        self.stage(&class.words, arguments)?;
        let launched = class.launch(&*self.backend, self.dispatch, &key);
        let (tokens, outputs) = (arguments.tokens.len(), arguments.outputs.len());
        let done = launched.and_then(|()| self.read(&class, tokens, outputs));
        if self.classes.len() >= KEPT {
            self.classes.retain(|key, _| key.tokens <= arena::FEW);
        }
        self.classes.insert(key, class);
        done
    }

    fn choose(
        &mut self,
        arguments: &Arguments<'_>,
        options: &Options,
        history: &[u32],
    ) -> Option<Result<Choice>> {
        Some(self.chosen(arguments, options, history))
    }

    fn result(&self, index: usize) -> &[f32] {
        &self.results[index]
    }

    fn memory(&self) -> Memory {
        let layer = |(i, bytes): (usize, &usize)| {
            2 * bytes * BLOCK_TOKENS * self.blocks[self.lowering.groups[i]]
        };
        Memory {
            weights: self.weights.iter().map(|w| w.bytes).sum(),
            cache: self.position_bytes.iter().enumerate().map(layer).sum(),
            arena: self.arena_bytes + self.scratch_bytes,
        }
    }

    fn compiled(&self) -> usize {
        self.classes.len()
    }

    fn roof(&self) -> Roof {
        let bytes =
            self.weights.iter().zip(self.lowering.program.multiplied()).filter(|(_, read)| *read);
        Roof {
            token_bytes: bytes.map(|(w, _)| w.bytes).sum(),
            position_bytes: self.position_bytes.iter().map(|bytes| 2 * bytes).sum(),
            bytes_per_second: self.backend.read_rate(),
        }
    }
}
