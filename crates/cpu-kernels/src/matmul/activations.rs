//! The right-hand side of a product: rows of f32, and the same rows as signed bytes for quantised
//! weights.
//!
//! Each 32 elements of a token become one [`Line`]: codes `q = round(127 x / max|x|)`, the scale
//! `max|x| / 127`, and the sums that zero points and mins are multiplied with. Scales are exact per
//! 32 elements, as the weights' are.
//!
//! Lines are ordered for the kernels: tokens stand together in groups of 16 (fewer when there are
//! fewer tokens that are read in place), and a group holds its lines block by block, so that one
//! base address serves a whole tile of tokens.

use super::{BLOCK, Isa};
use std::marker::PhantomData;
use std::ops::Range;

/// Tokens per group: the height of a tile.
pub(super) const TOKENS: usize = 16;

/// How rows are multiplied. The bits of a row's results follow from it, never from how many rows
/// there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Weights are read in place, once for up to eight rows: for rows that are few.
    InPlace,
    /// Panels of weights are expanded first, for tiles of rows: for rows that are many.
    Expanded,
}

/// 32 quantised elements of one token, in one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line {
    /// `round(x / scale)`, in `-127..=127`.
    pub(super) codes: [i8; 32],
    /// f32 per step of the codes.
    pub(super) scale: f32,
    /// `-128 * sum(codes)`: where the accumulator of codes with zero point 128 starts.
    pub(super) bias: i32,
    /// The same for each half.
    pub(super) half_bias: [i32; 2],
    /// `scale * sum(codes)`: what a min is multiplied with.
    pub(super) sum: f32,
    /// The same for each half.
    pub(super) half_sum: [f32; 2],
}

/// What the tile unit reads in place of a [`Line`], of the same size: 32 bf16 (see `amx`). A second
/// plane, as long as the first, holds what the first rounded away, for weights that are finer than
/// bf16.
#[cfg(target_arch = "x86_64")]
pub(super) type Halves = [u16; BLOCK];

/// `tokens` rows of `cols` activations, and storage for their quantised form.
///
/// It allocates nothing: the caller's storage may serve every step. The rows are quantised once and
/// then multiply any number of matrices.
pub struct Activations<'a> {
    rows: *const f32,
    stride: usize,
    tokens: usize,
    cols: usize,
    path: Path,
    lines: *mut Line,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointers are only followed by `quantise` and `multiply`, whose callers prove that no
// two threads write the same line, and none reads one before it is written.
unsafe impl Send for Activations<'_> {}
// SAFETY: as above.
unsafe impl Sync for Activations<'_> {}

impl<'a> Activations<'a> {
    /// Bytes of storage for the quantised form, a multiple of 64; 0 when `cols` is not a multiple
    /// of 32, as only float weights have such rows.
    pub fn bytes(path: Path, tokens: usize, cols: usize) -> usize {
        if !cols.is_multiple_of(BLOCK) {
            return 0;
        }
        // Rows of the tile unit become `Halves`, which have two planes.
        let planes = if path == Path::Expanded { 2 } else { 1 };
        planes * tokens.next_multiple_of(group(path, tokens)) * (cols / BLOCK) * size_of::<Line>()
    }

    /// Rows at `rows`, `rows + stride`, ... (in f32), with storage for [`Activations::bytes`],
    /// aligned to 64. Where no float weights read them, half of that is enough for the expanded
    /// path, and the rows of a block are read when it is quantised and then no more.
    ///
    /// # Safety
    /// For `'a`, the rows are readable and the storage is initialised and used by nothing else, as
    /// far as the above asks for them.
    pub unsafe fn new(
        path: Path,
        rows: *const f32,
        stride: usize,
        tokens: usize,
        cols: usize,
        storage: *mut u8,
    ) -> Self {
        debug_assert!(storage.cast::<Line>().is_aligned());
        Activations { rows, stride, tokens, cols, path, lines: storage.cast(), life: PhantomData }
    }

    /// How they are multiplied.
    pub(super) fn path(&self) -> Path {
        self.path
    }

    /// Rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Elements per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Blocks of 32 to quantise over all tokens; 0 when `cols` is not a multiple of 32.
    pub fn blocks(&self) -> usize {
        if self.cols.is_multiple_of(BLOCK) { self.tokens * (self.cols / BLOCK) } else { 0 }
    }

    /// Quantises a range of the [`Activations::blocks`] (token after token), which threads may
    /// split as they like; `float`: float weights read them too, and want what bf16 leaves.
    ///
    /// # Safety
    /// No other thread works on these blocks at the same time, and products that read them wait
    /// until it is done.
    pub unsafe fn quantise(&self, isa: Isa, blocks: Range<usize>, float: bool) {
        assert!(blocks.end <= self.blocks());
        // No other processor has the tile unit.
        #[cfg(not(target_arch = "x86_64"))]
        let _ = float;
        // SAFETY: the ISA value proves the instruction set; the rest is passed on.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Amx if self.halves(isa) => halve(self, blocks, float),
                #[cfg(target_arch = "x86_64")]
                Isa::Amx | Isa::Avx512 => quantise_avx512(self, blocks),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::AvxVnni => quantise_avx2(self, blocks),
                _ => quantise(self, blocks),
            }
        }
    }

    /// What a product with weights in blocks (`quantised`) or plain numbers multiplies of a token,
    /// into `out`, which has `cols` elements: as quantised, rounded to bf16 for the tile unit, or
    /// as they are.
    ///
    /// # Safety
    /// The rows are there and, for weights in blocks, [`Activations::quantise`] is done with them.
    pub unsafe fn seen(&self, isa: Isa, quantised: bool, token: usize, out: &mut [f32]) {
        assert!(token < self.tokens && out.len() == self.cols);
        // SAFETY: the caller's promise; a row has `cols` elements, and a line for every block of
        // them.
        unsafe {
            if !quantised {
                out.copy_from_slice(std::slice::from_raw_parts(self.row(token), self.cols));
                return;
            }
            for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                let line = self.line(token).add(block * self.group());
                if self.halves(isa) {
                    let halves = *line.cast::<[u16; BLOCK]>();
                    out.copy_from_slice(&halves.map(formats::quant::plain::bf16_to_f32));
                } else {
                    let Line { codes, scale, .. } = *line;
                    out.copy_from_slice(&codes.map(|code| f32::from(code) * scale));
                }
            }
        }
    }

    /// Whether `quantise` makes halves of them, 16 bits each, instead of lines of codes: for the
    /// tile unit.
    pub fn halves(&self, isa: Isa) -> bool {
        halves(isa, self.path, self.cols)
    }

    /// Tokens that stand together: a power of two, at most [`TOKENS`].
    pub(super) fn group(&self) -> usize {
        group(self.path, self.tokens)
    }

    /// The line of a token's first block; its block `b` is `b * self.group()` lines on.
    pub(super) fn line(&self, token: usize) -> *mut Line {
        let group = self.group();
        self.lines.wrapping_add(token / group * group * (self.cols / BLOCK) + token % group)
    }

    /// Lines of all tokens: how far the second plane of [`Halves`] lies behind the first.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn plane(&self) -> usize {
        self.tokens.next_multiple_of(self.group()) * (self.cols / BLOCK)
    }

    /// A token's f32.
    pub(super) fn row(&self, token: usize) -> *const f32 {
        self.rows.wrapping_add(token * self.stride)
    }

    /// Where block `i` of all is read, and where its line goes.
    fn block(&self, i: usize) -> (*const [f32; BLOCK], *mut Line) {
        let per_row = self.cols / BLOCK;
        let (token, block) = (i / per_row, i % per_row);
        (
            self.row(token).wrapping_add(block * BLOCK).cast(),
            self.line(token).wrapping_add(block * self.group()),
        )
    }

    /// f32 from one row to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

/// Whether rows are [`Halves`]; see [`Activations::halves`].
pub(super) fn halves(isa: Isa, path: Path, cols: usize) -> bool {
    isa == Isa::Amx && path == Path::Expanded && cols.is_multiple_of(BLOCK)
}

fn group(path: Path, tokens: usize) -> usize {
    match path {
        Path::InPlace => tokens.next_power_of_two().min(TOKENS),
        Path::Expanded => TOKENS,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn quantise_avx512(x: &Activations, blocks: Range<usize>) {
    // SAFETY: passed on.
    unsafe { quantise(x, blocks) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantise_avx2(x: &Activations, blocks: Range<usize>) {
    // SAFETY: passed on.
    unsafe { quantise(x, blocks) }
}

#[inline(always)]
unsafe fn quantise(x: &Activations, blocks: Range<usize>) {
    for i in blocks {
        // SAFETY: `i` is below `x.blocks()`, so that both lie in what `Activations::new` was
        // promised; the caller of `Activations::quantise` rules out other users of this line.
        unsafe {
            let (from, to) = x.block(i);
            to.write(line(&*from));
        }
    }
}

/// The same for [`Halves`]; `rest`: their second plane too.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn halve(x: &Activations, blocks: Range<usize>, rest: bool) {
    for i in blocks {
        // SAFETY: as above; the storage has both planes.
        unsafe {
            let (from, to) = x.block(i);
            let to = to.cast::<Halves>();
            if rest {
                let (halves, rest) = split(&*from);
                to.write(halves);
                to.add(x.plane()).write(rest);
            } else {
                to.write((*from).map(round));
            }
        }
    }
}

/// One block to one line. The same bits on every processor.
#[inline(always)]
fn line(x: &[f32; BLOCK]) -> Line {
    // Compared as integers, magnitudes order like the floats, with infinity and then NaN above all:
    // neither is lost.
    let peak = x.iter().fold(0, |peak: u32, x| peak.max(x.to_bits() & 0x7fff_ffff));
    let peak = f32::from_bits(peak);
    // Below this the inverse overflows; such a block is silence.
    let inverse = if peak < 1e-30 { 0.0 } else { 127.0 / peak };
    let scale = if peak < 1e-30 { 0.0 } else { peak / 127.0 };
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let mut steps = [0i32; BLOCK];
    for (step, x) in steps.iter_mut().zip(x) {
        *step = (x * inverse + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
    }
    let mut codes = [0i8; BLOCK];
    for (code, step) in codes.iter_mut().zip(&steps) {
        *code = *step as i8;
    }
    let half_sum = [0, 16].map(|at| codes[at..at + 16].iter().map(|&c| i32::from(c)).sum::<i32>());
    let sum = half_sum[0] + half_sum[1];
    Line {
        codes,
        scale,
        bias: -128 * sum,
        half_bias: half_sum.map(|sum| -128 * sum),
        sum: scale * sum as f32,
        half_sum: half_sum.map(|sum| scale * sum as f32),
    }
}

/// One block to bf16 (to nearest, ties to even; a NaN stays one), and what that leaves, rounded
/// likewise.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn split(x: &[f32; BLOCK]) -> (Halves, Halves) {
    let (mut halves, mut rest) = ([0; BLOCK], [0; BLOCK]);
    for i in 0..BLOCK {
        halves[i] = round(x[i]);
        let left = x[i] - f32::from_bits(u32::from(halves[i]) << 16);
        // Infinity less itself is no number, but infinity is all there is.
        rest[i] = if left.is_nan() { 0 } else { round(left) };
    }
    (halves, rest)
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn round(x: f32) -> u16 {
    let bits = x.to_bits();
    let nearest = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { nearest }
}
