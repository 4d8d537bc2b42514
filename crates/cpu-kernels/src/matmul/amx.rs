//! Prefill on Intel's tile unit (AMX), in bf16 with f32 sums: 32 tokens by 32 rows at a time.
//!
//! The unit multiplies bytes at twice the rate of bf16, but byte products must leave it after every
//! 32 columns to be scaled, which costs more than the products. In bf16 the scales are part of the
//! weights and the sums stay in the tiles. Both sides are rounded to 8 bits, relative to each
//! number: the error is a quarter of the error of 8-bit activations with one scale per 32, so no
//! accuracy is lost. Panels are expanded to bf16 in cache, several at a time.
//!
//! Float weights ask for more. An f32 activation is the sum of two bf16 to 16 bits and of three
//! exactly; an f16 weight is exactly the sum of two. So two products (bf16 weights) or three (f16)
//! have nearly the accuracy of f32, and three or five, in training, have it. Training in 16 bits has
//! one (or two) instead. F32 weights stay in the vector unit.
//!
//! Tokens are the rows of left tiles, a panel's rows the columns of right ones: see
//! [`super::super::amx`].

use super::super::amx::{self, Run, TILE};
use super::activations::TOKENS;
use super::lanes::{Lanes, avx512::Avx512};
use super::layout::{AHEAD, GROUP, Packed};
use super::product::Source;
use super::{BLOCK, Call, Kernel, Path, ROWS, prefetch, with_panel};
use formats::{DType, Encoding, quant::BlockFormat, with_block};
use std::arch::x86_64::*;
use std::ops::Range;

/// Tiles of weights that are expanded together: 1 MiB, half the L2 cache of every processor with
/// the unit.
const WEIGHTS: usize = 1024;
/// Most blocks of a panel that are expanded together. Another pass over the output costs more than
/// a long stream.
const BLOCKS: usize = 64;

/// Bytes of scratch: the slab, 4 tiles of results.
pub(super) const SCRATCH: usize = SLAB + 4 * TILE;
/// Bytes of the slab, behind which the results lie.
pub(super) const SLAB: usize = WEIGHTS * TILE;

/// The kernel for many tokens with bf16 activations, of which floats are multiplied with as many
/// planes as their path has; `None` for types that the vector unit does better.
pub(super) fn kernel(encoding: Encoding) -> Option<Kernel> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn quantised<B: BlockFormat>(call: &Call) {
        // SAFETY: passed on.
        unsafe { product(call, &|slab| panels(call, slab, expand::<B>), &[(0, 0)]) }
    }
    unsafe fn bf16(call: &Call) {
        // SAFETY: passed on.
        unsafe {
            let expand = |slab| panels(call, slab, expand_bf16);
            product(call, &expand, passes_bf16(call.x.path()))
        }
    }
    unsafe fn f16(call: &Call) {
        // SAFETY: passed on.
        unsafe {
            let expand = |slab| panels(call, slab, expand_f16);
            product(call, &expand, passes_f16(call.x.path()))
        }
    }
    match encoding {
        Encoding::Stored(DType::BF16) => Some(bf16),
        Encoding::Stored(DType::F16) => Some(f16),
        block => with_panel!(block, B => Some(quantised::<B>), else => None),
    }
}

/// The kernel for the product with the transpose of a matrix (see [`super::multiply_turned`]):
/// `call.rows` are the matrix's columns, `call.cols` its rows and `call.panels` each 16 of the
/// columns. `None` for types that are not read so.
pub(super) fn turned(encoding: Encoding) -> Option<Kernel> {
    unsafe fn bf16(call: &Call) {
        // SAFETY: passed on.
        unsafe {
            let expand = |slab| turn(call, slab, store_bf16);
            product(call, &expand, passes_bf16(call.x.path()))
        }
    }
    unsafe fn f16(call: &Call) {
        // SAFETY: passed on.
        unsafe {
            let expand = |slab| turn(call, slab, store_f16);
            product(call, &expand, passes_f16(call.x.path()))
        }
    }
    match encoding {
        Encoding::Stored(DType::BF16) => Some(bf16),
        Encoding::Stored(DType::F16) => Some(f16),
        _ => None,
    }
}

fn passes_bf16(path: Path) -> &'static Passes {
    match path {
        Path::Exact => &BF16_EXACT,
        Path::Rounded => &BF16[..1],
        Path::InPlace | Path::Expanded => &BF16,
    }
}

fn passes_f16(path: Path) -> &'static Passes {
    match path {
        Path::Exact => &F16_EXACT,
        Path::Rounded => &F16_ROUNDED,
        Path::InPlace | Path::Expanded => &F16,
    }
}

/// Which planes of the activations and of the weights are multiplied.
type Passes = [(usize, usize)];

/// As many as an activation has planes.
const BF16: [(usize, usize); 2] = [(0, 0), (1, 0)];
/// For activations of two planes.
const F16: [(usize, usize); 3] = [(0, 0), (1, 0), (0, 1)];
/// For activations of three. What is small is added up first, so that it is rounded as little.
const BF16_EXACT: [(usize, usize); 3] = [(2, 0), (1, 0), (0, 0)];
/// The same.
const F16_EXACT: [(usize, usize); 5] = [(2, 0), (1, 1), (1, 0), (0, 1), (0, 0)];
/// For activations of one.
const F16_ROUNDED: [(usize, usize); 2] = [(0, 0), (0, 1)];

/// Panels and blocks that are expanded together, to one or two planes of bf16, one behind the other.
struct Slab {
    panels: Range<usize>,
    blocks: Range<usize>,
    to: *mut u8,
    /// Bytes from one panel to the next.
    step: usize,
}

/// Expands blocks `first..first + blocks` (`first` starts a group) of a panel to one or two planes
/// of bf16, one behind the other. Columns that the panel has not are zeros.
type Expand = unsafe fn(panel: *const u8, columns: usize, first: usize, blocks: usize, to: *mut u8);

/// Expands a slab panel by panel.
unsafe fn panels(call: &Call, slab: Slab, expand: Expand) {
    let (columns, blocks) = (call.cols, slab.blocks.len());
    for (p, panel) in slab.panels.enumerate() {
        let to = slab.to.wrapping_add(p * slab.step);
        // SAFETY: panels and blocks are the call's, and the slab has room for them.
        unsafe { expand(call.panel(panel), columns, slab.blocks.start, blocks, to) };
    }
}

/// The product of the call.
unsafe fn product(call: &Call, expand: &dyn Fn(Slab), passes: &Passes) {
    let total = call.cols.div_ceil(BLOCK);
    let planes = 1 + passes.iter().map(|pass| pass.1).max().unwrap_or(0);
    let most = WEIGHTS / (planes * BLOCKS.min(total).max(1));
    // SAFETY: the processor has the tiles (`Isa::Amx`), and the shapes are within palette 1;
    // panels, tokens and scratch are the call's, the scratch being `SCRATCH` bytes and the lines
    // being allocated to whole groups.
    unsafe {
        amx::configure();
        for panel in call.panels.clone().step_by(most) {
            let panels = most.min(call.panels.end - panel);
            for block in (0..total).step_by(BLOCKS) {
                let blocks = BLOCKS.min(total - block);
                let step = planes * blocks * TILE;
                expand(Slab {
                    panels: panel..panel + panels,
                    blocks: block..block + blocks,
                    to: call.scratch,
                    step,
                });
                let mut token = call.tokens.start / TOKENS * TOKENS;
                while token < call.tokens.end {
                    let groups = if token + TOKENS < call.tokens.end { 2 } else { 1 };
                    for p in (0..panels).step_by(2) {
                        let (panel, panels) = (panel + p, 2.min(panels - p));
                        let tiles = Tiles { panel, panels, token, groups, block, blocks, step };
                        tiles.multiply(call, call.scratch.add(p * step), passes);
                    }
                    token += groups * TOKENS;
                }
            }
        }
        amx::release();
    }
}

/// One or two panels by one or two groups of tokens.
struct Tiles {
    panel: usize,
    panels: usize,
    token: usize,
    groups: usize,
    block: usize,
    blocks: usize,
    /// Bytes from one panel of the slab to the next.
    step: usize,
}

impl Tiles {
    /// Multiplies these blocks and adds the results to the output.
    unsafe fn multiply(&self, call: &Call, weights: *const u8, passes: &Passes) {
        let (row, tokens) = (self.panel * ROWS, self.groups * TOKENS);
        let first = self.block == 0;
        let whole = row + self.panels * ROWS <= call.rows
            && call.tokens.start <= self.token
            && self.token + tokens <= call.tokens.end;
        // SAFETY: the slab holds the panels, the lines hold the groups; results go to the output
        // only where it has all of them, and to 4 tiles of scratch otherwise.
        unsafe {
            let out = call.out.start.wrapping_add(self.token * call.out.stride + row).cast::<u8>();
            let stride = 4 * call.out.stride;
            let plain = call.epilogue.bias.is_none() || !first;
            let add = call.epilogue.accumulate || !first;
            if whole && plain {
                let from = if add { (out.cast_const(), stride) } else { amx::NOTHING };
                return self.passes(call, weights, passes, from, (out, stride));
            }
            let results = call.scratch.add(SLAB);
            if plain {
                // The same sums as above, in the same order: a row's bits do not depend on whether
                // its tile is whole.
                let rows = call.rows.min(row + self.panels * ROWS) - row;
                let (floats, first) = (results.cast::<f32>(), call.tokens.start.max(self.token));
                let seen = first..call.tokens.end.min(self.token + tokens);
                let place = |t: usize| call.out.start.wrapping_add(t * call.out.stride + row);
                if add {
                    for t in seen.clone() {
                        place(t).copy_to_nonoverlapping(floats.add(32 * (t - self.token)), rows);
                    }
                }
                let from = if add { (results.cast_const(), 128) } else { amx::NOTHING };
                self.passes(call, weights, passes, from, (results, 128));
                for t in seen {
                    floats.add(32 * (t - self.token)).copy_to_nonoverlapping(place(t), rows);
                }
                return;
            }
            self.passes(call, weights, passes, amx::NOTHING, (results, 128));
            for p in 0..self.panels {
                for t in 0..tokens {
                    let y = Avx512::load_f32(results.cast::<f32>().add(32 * t + ROWS * p));
                    Avx512::write(call, self.panel + p, self.token + t, &[y], first);
                }
            }
        }
    }

    /// `to = from + the sum of the passes' x w`, where tokens are the given number of bytes apart
    /// and panels 64.
    unsafe fn passes(
        &self,
        call: &Call,
        weights: *const u8,
        passes: &Passes,
        from: (*const u8, usize),
        to: (*mut u8, usize),
    ) {
        let group = call.x.lines() * TILE;
        let run = |&(x, w): &(usize, usize)| {
            // Activations and the slab have the planes of lines and of tiles that the passes name.
            let lines = x * call.x.plane() + self.block * TOKENS;
            let left = call.x.line(self.token).wrapping_add(lines).cast::<u8>().cast_const();
            let right = weights.wrapping_add(w * self.blocks * TILE);
            Run {
                left: [left, left.wrapping_add(group)],
                right: [right, right.wrapping_add(self.step)],
                tiles: self.blocks,
            }
        };
        let mut runs = [run(&passes[0]); 5];
        runs.iter_mut().zip(passes).for_each(|(to, pass)| *to = run(pass));
        // SAFETY: the caller's promises: the tiles are there, and so are the sums.
        unsafe { amx::multiply(&runs[..passes.len()], [self.groups, self.panels], from, to) }
    }
}

/// See [`Expand`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand<B: BlockFormat>(
    panel: *const u8,
    columns: usize,
    first: usize,
    blocks: usize,
    mut to: *mut u8,
) {
    let total = columns / BLOCK;
    // Code `e` of each row's quad, as f32.
    macro_rules! codes {
        ($quad:expr, $e:literal) => {
            _mm512_cvtepi32_ps(_mm512_and_si512(
                _mm512_srli_epi32::<{ 8 * $e }>($quad),
                _mm512_set1_epi32(255),
            ))
        };
    }
    // SAFETY: the panel has the blocks, `to` has room for them.
    unsafe {
        let groups = first / GROUP..(first + blocks).div_ceil(GROUP);
        for g in groups.clone() {
            let (group, n) = Packed::<B>::open::<Avx512>(panel, total, g, &groups);
            for b in 0..n {
                <Packed<B> as Source<Avx512>>::fetch(group, b);
                for h in 0..BLOCK / Packed::<B>::SUB {
                    let scale = <Packed<B> as Source<Avx512>>::scale(group, b, h);
                    let offset = if <Packed<B> as Source<Avx512>>::OFFSETS {
                        <Packed<B> as Source<Avx512>>::offset(group, b, h)
                    } else {
                        _mm512_mul_ps(scale, _mm512_set1_ps(-f32::from(Packed::<B>::ZERO)))
                    };
                    for q in h * (Packed::<B>::SUB / 4)..(h + 1) * (Packed::<B>::SUB / 4) {
                        let quad = <Packed<B> as Source<Avx512>>::quad(group, b, q);
                        let at = to.add(128 * q);
                        let (w0, w1) = (codes!(quad, 0), codes!(quad, 1));
                        let (w2, w3) = (codes!(quad, 2), codes!(quad, 3));
                        let pair = amx::pair(
                            _mm512_fmadd_ps(w0, scale, offset),
                            _mm512_fmadd_ps(w1, scale, offset),
                        );
                        Avx512::store_bytes(at, pair);
                        let pair = amx::pair(
                            _mm512_fmadd_ps(w2, scale, offset),
                            _mm512_fmadd_ps(w3, scale, offset),
                        );
                        Avx512::store_bytes(at.add(64), pair);
                    }
                }
                to = to.add(TILE);
            }
        }
    }
}

/// Columns `first` and `first + 1` of a panel of 16-bit floats; a column beyond the last is zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn columns_of(panel: *const u8, columns: usize, first: usize) -> [__m256i; 2] {
    [first, first + 1].map(|column| {
        if column >= columns {
            return _mm256_setzero_si256();
        }
        // SAFETY: the panel has the column, of 32 bytes.
        unsafe { _mm256_loadu_si256(panel.add(column * 2 * ROWS).cast()) }
    })
}

/// [`Expand`] for bf16: columns pair up.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_bf16(panel: *const u8, columns: usize, first: usize, blocks: usize, to: *mut u8) {
    for i in 0..blocks * BLOCK / 2 {
        // SAFETY: `to` has room for the columns.
        unsafe {
            let column = first * BLOCK + 2 * i;
            let [low, high] = columns_of(panel, columns, column).map(|x| _mm512_cvtepu16_epi32(x));
            Avx512::store_bytes(
                to.add(64 * i),
                _mm512_or_si512(low, _mm512_slli_epi32::<16>(high)),
            );
            prefetch(panel.wrapping_add(column * 2 * ROWS + AHEAD));
        }
    }
}

/// [`Expand`] for f16, whose 11 bits are the sum of two bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_f16(panel: *const u8, columns: usize, first: usize, blocks: usize, to: *mut u8) {
    for i in 0..blocks * BLOCK / 2 {
        // SAFETY: as `expand_bf16`, with room for two planes.
        unsafe {
            let column = first * BLOCK + 2 * i;
            let [low, high] = columns_of(panel, columns, column).map(|x| _mm512_cvtph_ps(x));
            let [sum, rest] = amx::split_pair(low, high);
            Avx512::store_bytes(to.add(64 * i), sum);
            Avx512::store_bytes(to.add(blocks * TILE + 64 * i), rest);
            prefetch(panel.wrapping_add(column * 2 * ROWS + AHEAD));
        }
    }
}

/// Writes 16 rows' pairs of 16-bit numbers, as they are stored, to a tile row, and its other plane
/// the given number of bytes on.
type StorePairs = unsafe fn(pairs: __m512i, to: *mut u8, plane: usize);

/// Expands the transpose of a slab: its panels are each 16 columns of the matrix, its blocks each
/// two of the matrix's panels. The matrix is read in the order of memory.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn turn(call: &Call, slab: Slab, store: StorePairs) {
    const COLUMN: usize = 2 * ROWS;
    let (plane, sources) = (slab.blocks.len() * TILE, call.cols.div_ceil(ROWS));
    for source in 2 * slab.blocks.start..2 * slab.blocks.end {
        let place = source - 2 * slab.blocks.start;
        for (p, panel) in slab.panels.clone().enumerate() {
            let first = panel * ROWS;
            let there = if source < sources { ROWS } else { 0 };
            let columns = there.min(call.rows - first);
            let mut part = [0u8; ROWS * COLUMN];
            // SAFETY: the matrix has the columns in each of its panels; the slab has room for its
            // tiles, of which each panel fills half.
            unsafe {
                let mut from = call.panel(source).wrapping_add(first * COLUMN);
                for line in (0..ROWS * COLUMN).step_by(64) {
                    prefetch(from.wrapping_add(call.panel_bytes + line));
                }
                if columns < ROWS {
                    if columns > 0 {
                        from.copy_to_nonoverlapping(part.as_mut_ptr(), columns * COLUMN);
                    }
                    from = part.as_ptr();
                }
                let to = slab.to.add(p * slab.step + place * TILE / 2);
                for (i, pairs) in transposed(from).into_iter().enumerate() {
                    store(pairs, to.add(64 * i), plane);
                }
            }
        }
    }
}

/// The transpose of 16 rows of 8 words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn transposed(from: *const u8) -> [__m512i; 8] {
    let mut rows = [_mm512_setzero_si512(); 8];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let low = _mm256_loadu_si256(from.add(32 * i).cast());
            let high = _mm256_loadu_si256(from.add(32 * (i + 8)).cast());
            *row = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        }
    }
    // Within each half: columns of four words, then quarters of them.
    let quads = amx::quads(rows);
    let low = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0);
    let high = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
    let mut all = quads;
    for i in 0..4 {
        all[i] = _mm512_permutex2var_epi64(quads[i], low, quads[i + 4]);
        all[i + 4] = _mm512_permutex2var_epi64(quads[i], high, quads[i + 4]);
    }
    all
}

/// See [`StorePairs`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn store_bf16(pairs: __m512i, to: *mut u8, _: usize) {
    // SAFETY: the caller's promise.
    unsafe { Avx512::store_bytes(to, pairs) }
}

/// See [`StorePairs`]: f16 are sums of two bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn store_f16(pairs: __m512i, to: *mut u8, plane: usize) {
    let low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    let high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs)));
    let [sum, rest] = amx::split_pair(low, high);
    // SAFETY: the caller's promise.
    unsafe {
        Avx512::store_bytes(to, sum);
        Avx512::store_bytes(to.add(plane), rest);
    }
}
