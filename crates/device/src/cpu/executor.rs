//! A Program loaded on the CPU: packed weights, cache pools, the arena, and the shape classes seen so far.

use super::class::Class;
use super::memory;
use super::profile::{Span, Spans, profile};
use super::replay::Replay;
use crate::{
    Executor, Limits, LoadOptions, Memory, Peaks, Plan, Profile, Roof, Watch, finite, plan,
};
use cpu_kernels::attention::{Geometry, LayerCache, Shape};
use cpu_kernels::isa::Isa;
use cpu_kernels::matmul::{Huge, Matrix, Scratch, Unit, peak};
use cpu_kernels::roof::read_rate;
use cpu_kernels::team::{SharedSlice, Team, default_threads};
use formats::{Error, NotFinite, Result, Tensors};
use ops::operation::Product;
use ops::{Op, Rope, Rows};
use program::{Arguments, BLOCK_TOKENS, CacheLayer, Node, Program, ValueId};
use std::sync::Arc;

/// A weight in the form in which the CPU uses it.
pub(super) enum Weight {
    /// Of rank 2: packed for products.
    Matrix(Matrix),
    /// Of rank 1: norms and biases, in f32.
    Vector(Vec<f32>),
}

impl Weight {
    /// Whether it is a matrix of floats, not of blocks.
    pub(super) fn is_float_matrix(&self) -> bool {
        matches!(self, Weight::Matrix(matrix) if !matrix.encoding().is_quantised())
    }
}

/// What every replay reads and no replay changes.
pub(super) struct Loaded {
    pub(super) team: Arc<Team>,
    pub(super) isa: Isa,
    pub(super) program: Program,
    pub(super) weights: Vec<Weight>,
    /// Distinct rotations; their angles are computed once per step.
    pub(super) ropes: Vec<Rope>,
    /// The cache group of each layer.
    pub(super) groups: Vec<usize>,
    /// Whether all matrices that are multiplied with are quantised.
    pub(super) quantised: bool,
    /// See [`lined`].
    pub(super) lined: Vec<bool>,
}

/// See [`Executor`].
pub(super) struct CpuExecutor {
    loaded: Loaded,
    caches: Vec<LayerCache>,
    classes: Vec<Class>,
    arena: Huge,
    scratch: Vec<Scratch>,
    /// Attention's working memory.
    partials: Huge,
    /// Blocks of each group that were written to.
    used: Vec<usize>,
    /// Class and rows of the last replay.
    last: Option<(usize, usize, usize)>,
    limits: program::Limits,
}

impl CpuExecutor {
    pub(super) fn load(
        team: Arc<Team>,
        isa: Isa,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let planned = plan(&program, tensors, &options, team.count())?;
        plan::check("cpu", &options, &planned, &|options| {
            plan(&program, tensors, options, team.count())
        })?;
        let weights = load_weights(&program, tensors, &options, &team, progress)?;
        let ropes = program.ropes();
        let caches = caches(&program, &options)?;
        let partials = partials(&program, &options.blocks, team.count());
        let multiplied = program.nodes.iter().filter(|node| node.op.gathers().is_none());
        let quantised =
            !multiplied.flat_map(|node| &node.weights).any(|id| weights[id.0].is_float_matrix());
        let lined = lined(&program, &weights);
        let groups = program.layer_groups();
        let limits = options.limits(&program);
        let largest = Class::new(&program, &ropes, limits.tokens, limits.outputs, team.count());
        Ok(CpuExecutor {
            // Pages of the arena that no class touches take no memory.
            arena: Huge::zeroed(largest.bytes)?,
            scratch: (0..team.count()).map(|_| Scratch::new()).collect::<Result<_>>()?,
            partials: Huge::zeroed(partials * size_of::<f32>())?,
            used: vec![0; options.blocks.len()],
            classes: Vec::new(),
            last: None,
            limits,
            caches,
            loaded: Loaded { team, isa, program, weights, ropes, groups, quantised, lined },
        })
    }

    /// The smallest class that holds so many rows, compiled on first sight.
    fn class(&mut self, tokens: usize, outputs: usize) -> usize {
        let bucket =
            |n: usize, most: usize| if n == 0 { 0 } else { n.next_power_of_two().min(most) };
        let (tokens, outputs) =
            (bucket(tokens, self.limits.tokens), bucket(outputs, self.limits.outputs));
        let seen = self.classes.iter().position(|c| (c.tokens, c.outputs) == (tokens, outputs));
        seen.unwrap_or_else(|| {
            let Loaded { program, ropes, team, .. } = &self.loaded;
            self.classes.push(Class::new(program, ropes, tokens, outputs, team.count()));
            self.classes.len() - 1
        })
    }
}

/// What loading a Program and using it with a whole context takes.
pub(super) fn plan(
    program: &Program,
    tensors: &Tensors,
    options: &LoadOptions,
    threads: usize,
) -> Result<Plan> {
    let weights = program.weights.iter().map(|weight| weight_bytes(weight, tensors));
    let weights = weights.collect::<Result<Vec<usize>>>()?;
    let (cache, reserved) = (
        cache_bytes(program, options, &options.context)?,
        cache_bytes(program, options, &options.blocks)?,
    );
    let limits = options.limits(program);
    let arena = Class::new(program, &program.ropes(), limits.tokens, limits.outputs, threads).bytes;
    let partials = partials(program, &options.context, threads).saturating_mul(size_of::<f32>());
    let free = memory::free();
    // The pools take addresses for all sessions together, and each matrix takes whole huge pages.
    let unused = reserved.saturating_sub(cache).saturating_add(weights.len() * Huge::PAGE);
    let addresses = free.addresses.map(|addresses| addresses.saturating_sub(unused));
    Ok(Plan {
        host: true,
        weights: weights.into_iter().fold(0, usize::saturating_add),
        cache,
        arena,
        working: partials.saturating_add(threads * Scratch::BYTES),
        active: 0,
        free: [free.memory, addresses].into_iter().flatten().min(),
    })
}

/// Bytes of a weight in the form in which it is kept.
fn weight_bytes(weight: &program::Weight, tensors: &Tensors) -> Result<usize> {
    let encoding = weight.describe(tensors)?.encoding;
    Ok(match *weight.shape.as_slice() {
        [rows, cols] => Matrix::packed_bytes(encoding, rows, cols),
        ref shape => shape.iter().product::<usize>().saturating_mul(size_of::<f32>()),
    })
}

/// Bytes of so many blocks of each group.
fn cache_bytes(program: &Program, options: &LoadOptions, blocks: &[usize]) -> Result<usize> {
    let groups = program.layer_groups();
    program.layers.iter().zip(&groups).try_fold(0usize, |sum, (layer, &group)| {
        let blocks = blocks.get(group).copied().unwrap_or(0);
        Ok(sum.saturating_add(geometry(options, layer, blocks).bytes(1)?))
    })
}

/// The shape of a layer's cache.
fn geometry(options: &LoadOptions, layer: &CacheLayer, blocks: usize) -> Geometry {
    Geometry {
        element: options.cache_type,
        blocks,
        block_tokens: BLOCK_TOKENS,
        kv_heads: layer.kv_heads,
        head_dim: layer.head_dim,
    }
}

/// One pool for each group of layers.
fn caches(program: &Program, options: &LoadOptions) -> Result<Vec<LayerCache>> {
    let groups = program.layer_groups();
    let mut caches: Vec<Option<LayerCache>> = vec![None; groups.len()];
    for (group, &blocks) in options.blocks.iter().enumerate() {
        let layers: Vec<usize> = (0..groups.len()).filter(|&l| groups[l] == group).collect();
        let Some(first) = layers.first().map(|&l| program.layers[l]) else { continue };
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
            caches[layer] = Some(cache);
        }
    }
    caches
        .into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| Error::new("cache", "blocks for every group", "fewer"))
}

/// Floats of working memory for the hungriest attention over so many blocks of each group.
fn partials(program: &Program, blocks: &[usize], threads: usize) -> usize {
    let groups = program.layer_groups();
    let one = |op: &ops::Attention| {
        let blocks = blocks.get(groups[op.layer]).copied().unwrap_or(1);
        shape(op).scratch_len(threads, 1, blocks * BLOCK_TOKENS)
    };
    program
        .nodes
        .iter()
        .filter_map(|n| if let Op::Attention(op) = &n.op { Some(one(op)) } else { None })
        .max()
        .unwrap_or(0)
}

/// An attention operation as the kernels take it.
pub(super) fn shape(op: &ops::Attention) -> Shape {
    Shape {
        heads: op.heads,
        kv_heads: op.kv_heads,
        head_dim: op.head_dim,
        scale: op.scale,
        softcap: op.cap,
        window: op.window,
    }
}

/// A buffer as floats.
fn floats(buffer: &mut Huge) -> &mut [f32] {
    let len = buffer.len() / size_of::<f32>();
    // SAFETY: the buffer is borrowed exclusively, aligned to more than a float, and any bits are valid.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr().cast(), len) }
}

/// The values that, of many rows, never exist but as what the one product that reads them takes: gates of a quantised matrix.
fn lined(program: &Program, weights: &[Weight]) -> Vec<bool> {
    let (uses, writers) = (program.uses(), program.writers());
    let mut lined = vec![false; program.values.len()];
    let product = |node: &Node| node.op.product(node.weights.len());
    let single = |product: &Product| product.norm.is_none() && product.projections.len() == 1;
    for node in program.nodes.iter().filter(|node| product(node).is_some_and(|p| single(&p))) {
        let value = node.inputs[0].0;
        let gated = |writer: usize| product(&program.nodes[writer]).is_some_and(|p| p.gated);
        lined[value] = uses[value] == 1
            && writers[value].is_some_and(gated)
            && !weights[node.weights[0].0].is_float_matrix();
    }
    lined
}

fn load_weights(
    program: &Program,
    tensors: &Tensors,
    options: &LoadOptions,
    team: &Team,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Weight>> {
    let total = program.stored_bytes(tensors)?;
    let mut done = 0;
    let mut weights = Vec::with_capacity(program.weights.len());
    for weight in &program.weights {
        let read = weight.read(tensors)?;
        let named = |error| weight.named(error);
        let (packed, not_finite) = match *weight.shape.as_slice() {
            [rows, cols] => {
                let matrix =
                    Matrix::pack(read.encoding, rows, cols, &read.bytes, team).map_err(named)?;
                // One copy in memory: the file's pages are not needed again.
                weight.source.release(tensors);
                let not_finite = matrix.not_finite();
                (Weight::Matrix(matrix), not_finite)
            }
            [_] => {
                let values = read.to_f32().map_err(named)?;
                let not_finite = NotFinite::among(&values);
                (Weight::Vector(values), not_finite)
            }
            _ => {
                return Err(Error::new(&weight.name, "rank 1 or 2", format!("{:?}", weight.shape)));
            }
        };
        if let Some(found) = not_finite.filter(|_| !options.allow_nan) {
            return Err(finite::refusal(weight, tensors, found));
        }
        weights.push(packed);
        done += weight.stored_bytes(tensors)?;
        progress(done, total);
    }
    Ok(weights)
}

impl CpuExecutor {
    /// One replay, with the workers' times if asked for; false if it was stopped.
    fn replay(
        &mut self,
        arguments: &Arguments<'_>,
        watch: &Watch<'_>,
        spans: Option<&Spans<'_>>,
    ) -> Result<bool> {
        self.last = None;
        arguments.check(&self.limits)?;
        let class = self.class(arguments.tokens.len(), arguments.outputs.len());
        if let Some(input) = self.loaded.program.input {
            let start = self.classes[class].plan.offsets[input.0] / size_of::<f32>();
            let to = &mut floats(&mut self.arena)[start..][..arguments.input.len()];
            to.copy_from_slice(arguments.input);
        }
        let replay = Replay {
            loaded: &self.loaded,
            class: &self.classes[class],
            arguments,
            arena: self.arena.as_ptr(),
            caches: &self.caches,
            scratch: SharedSlice::new(&mut self.scratch),
            partials: SharedSlice::new(floats(&mut self.partials)),
            spans,
            watch,
        };
        let whole = replay.run();
        for (used, table) in self.used.iter_mut().zip(arguments.tables) {
            *used = table.blocks.iter().fold(*used, |used, &block| used.max(block as usize + 1));
        }
        self.last = whole.then_some((class, arguments.tokens.len(), arguments.outputs.len()));
        Ok(whole)
    }
}

impl Executor for CpuExecutor {
    fn run(&mut self, arguments: &Arguments<'_>) -> Result<()> {
        self.replay(arguments, &Watch::NONE, None).map(|_| ())
    }

    fn run_watched(&mut self, arguments: &Arguments<'_>, watch: &Watch<'_>) -> Result<bool> {
        self.replay(arguments, watch, None)
    }

    fn result(&self, index: usize) -> &[f32] {
        let Some((class, tokens, outputs)) = self.last else { return &[] };
        let ValueId(value) = self.loaded.program.results[index];
        let shape = self.loaded.program.values[value];
        let rows = match shape.rows {
            Rows::Tokens => tokens,
            Rows::Outputs => outputs,
        };
        let offset = self.classes[class].plan.offsets[value];
        let bytes = &self.arena[offset..][..rows * shape.width * size_of::<f32>()];
        // SAFETY: offsets are multiples of 64 in a buffer aligned to more; any bits are valid f32.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), rows * shape.width) }
    }

    fn memory(&self) -> Memory {
        let weight = |w: &Weight| match w {
            Weight::Matrix(matrix) => matrix.resident_bytes(),
            Weight::Vector(values) => size_of_val(values.as_slice()),
        };
        Memory {
            weights: self.loaded.weights.iter().map(weight).sum(),
            cache: self
                .caches
                .iter()
                .zip(&self.loaded.groups)
                .map(|(c, &g)| self.used[g] * c.geometry().layer_bytes())
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
        let parts: Vec<&[u8]> = loaded
            .weights
            .iter()
            .zip(loaded.program.multiplied())
            .filter_map(|(weight, read)| match weight {
                Weight::Matrix(matrix) if read => Some(matrix.bytes()),
                _ => None,
            })
            .collect();
        Roof {
            token_bytes: parts.iter().map(|part| part.len()).sum(),
            position_bytes: self
                .caches
                .iter()
                .map(|cache| cache.geometry().layer_bytes() / BLOCK_TOKENS)
                .sum(),
            bytes_per_second: read_rate(&*loaded.team, &parts, 7),
        }
    }

    fn run_timed(&mut self, arguments: &Arguments<'_>) -> Result<Option<Profile>> {
        let mut slots =
            vec![Span::default(); self.loaded.program.nodes.len() * self.loaded.team.count()];
        let spans = Spans::new(&mut slots);
        self.replay(arguments, &Watch::NONE, Some(&spans))?;
        let seconds = spans.now();
        let geometries: Vec<Geometry> = self.caches.iter().map(|c| *c.geometry()).collect();
        Ok(Some(profile(&self.loaded, &geometries, arguments, &slots, seconds)))
    }

    fn limits(&self) -> Option<Limits> {
        let peaks = |isa: Isa| {
            let [bytes_dot, narrow_dot, tiles, floats] =
                [Unit::Bytes, Unit::Narrow, Unit::Tiles, Unit::Floats]
                    .map(|unit| peak(&*self.loaded.team, isa, unit, 9));
            Peaks { isa: isa.name(), bytes_dot, narrow_dot, tiles, floats }
        };
        let used = peaks(self.loaded.isa);
        let best = Isa::available().last().copied().unwrap_or(Isa::Scalar);
        let best = if best == self.loaded.isa { used } else { peaks(best) };
        Some(Limits { cores: default_threads(), used, best })
    }
}
