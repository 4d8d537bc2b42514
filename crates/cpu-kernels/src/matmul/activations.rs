//! The right-hand side of a product: rows of f32, and the same rows quantised to signed bytes for
//! quantised weights.
//!
//! Each 32 elements of a token become one [`Line`]: codes `q = round(127 x / max|x|)`, the scale
//! `max|x| / 127`, and the sums that zero points and mins are multiplied with. Each block of 32
//! elements has its own scale, as blocks of weights do.
//!
//! Lines are ordered for the kernels: tokens are stored in groups of 16 (fewer if fewer tokens are
//! read in place), and a group holds its lines block by block, so that one base address serves a
//! whole tile of tokens.

#[cfg(target_arch = "x86_64")]
use super::super::amx;
use super::{BLOCK, Isa};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Tokens per group: the height of a tile.
pub(super) const TOKENS: usize = 16;

/// How rows are multiplied. The bits of a row's results depend on the path, never on the number of
/// rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// For few rows: weights are read in place, once for up to eight rows.
    InPlace,
    /// For many rows: panels of weights are expanded first, and multiplied with tiles of rows.
    Expanded,
    /// The same for training: beside float weights all bits of an activation count, where
    /// [`Path::Expanded`] lets the tile unit round it to 16.
    Exact,
    /// The same for training in 16 bits: the tile unit rounds every activation to one bf16.
    Rounded,
}

/// 32 quantised elements of one token, in one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line {
    /// `round(x / scale)`, in `-127..=127`.
    pub(super) codes: [i8; 32],
    /// The scale: the value of one step of the codes.
    pub(super) scale: f32,
    /// `-128 * sum(codes)`: the initial accumulator for weight codes with zero point 128.
    pub(super) bias: i32,
    /// The same for each half.
    pub(super) half_bias: [i32; 2],
    /// `scale * sum(codes)`, which the weights' mins are multiplied with.
    pub(super) sum: f32,
    /// The same for each half.
    pub(super) half_sum: [f32; 2],
}

/// The tile unit's form of a [`Line`], of the same size: 32 bf16 (see `amx`). For float weights a
/// second plane of the same length holds the rounding errors of the first; on [`Path::Exact`] a third
/// holds the errors of the second. The three then add up to the activation.
#[cfg(target_arch = "x86_64")]
pub(super) type Halves = [u16; BLOCK];

/// `tokens` rows of `cols` activations, and storage for their quantised form.
///
/// It allocates nothing, so the caller's storage can be reused by every step. The rows are
/// quantised once and then multiplied with any number of matrices.
pub struct Activations<'a> {
    rows: *const f32,
    stride: usize,
    tokens: usize,
    cols: usize,
    /// Elements of a whole row, of which `cols` are seen.
    width: usize,
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
    /// Bytes of storage for the quantised form, a multiple of 64; 0 if `cols` is not a multiple of
    /// 32, which only float weights allow, except on [`Path::Rounded`], which fills the last block.
    pub fn bytes(path: Path, tokens: usize, cols: usize) -> usize {
        planes(path)
            * tokens.next_multiple_of(group(path, tokens))
            * lines(path, cols)
            * size_of::<Line>()
    }

    /// Rows at `rows`, `rows + stride`, ... (in floats), with storage of [`Activations::bytes`]
    /// bytes, aligned to 64. If no float weights read them, half of the storage is enough on
    /// [`Path::Expanded`], and the rows of a block are not read again after it is quantised.
    ///
    /// # Safety
    /// For `'a`, the rows are readable and the storage is initialised and used by nothing else, as
    /// far as the above needs them.
    pub unsafe fn new(
        path: Path,
        rows: *const f32,
        stride: usize,
        tokens: usize,
        cols: usize,
        storage: *mut u8,
    ) -> Self {
        debug_assert!(storage.cast::<Line>().is_aligned());
        let (width, lines) = (cols, storage.cast());
        Activations { rows, stride, tokens, cols, width, path, lines, life: PhantomData }
    }

    /// Some columns of the same rows, with the lines that they have been quantised to; they begin
    /// with a whole block.
    ///
    /// # Panics
    /// If there are no such columns.
    pub fn window(&self, columns: Range<usize>) -> Activations<'_> {
        assert!(columns.start.is_multiple_of(BLOCK) && columns.start <= columns.end);
        assert!(columns.end <= self.cols);
        Activations {
            rows: self.rows.wrapping_add(columns.start),
            cols: columns.len(),
            lines: self.lines.wrapping_add(columns.start / BLOCK * self.group()),
            ..*self
        }
    }

    /// How the rows are multiplied.
    pub(super) fn path(&self) -> Path {
        self.path
    }

    /// Number of rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Elements per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Blocks of 32 to quantise over all tokens; 0 if `cols` is not a multiple of 32, except on
    /// [`Path::Rounded`], which fills the last block.
    pub fn blocks(&self) -> usize {
        self.tokens * lines(self.path, self.cols)
    }

    /// Quantises a range of the [`Activations::blocks`] (token after token), which threads may
    /// split as they like. `float`: float weights read the rows, too, and need all planes.
    ///
    /// # Safety
    /// No other thread works on these blocks at the same time, and products that read them wait
    /// until it is done.
    pub unsafe fn quantise(&self, isa: Isa, blocks: Range<usize>, float: bool) {
        assert!(blocks.end <= self.blocks());
        if !self.cols.is_multiple_of(BLOCK) && !self.halves(isa) {
            // Read as they are.
            return;
        }
        // No other processor has the tile unit.
        #[cfg(not(target_arch = "x86_64"))]
        let _ = float;
        // SAFETY: the ISA value proves the instruction set; the rest is passed on.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Amx if self.halves(isa) => {
                    halve(self, blocks, if float { planes(self.path) } else { 1 });
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Amx | Isa::Avx512 => quantise_avx512(self, blocks),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::AvxVnni => quantise_avx2(self, blocks),
                _ => quantise(self, blocks),
            }
        }
    }

    /// Writes the values of a token as a product sees them to `out`, of `cols` elements: quantised
    /// for weights in blocks (`quantised`), rounded to bf16 on the tile unit, or unchanged.
    ///
    /// # Safety
    /// The rows exist and, for weights in blocks, [`Activations::quantise`] has been done.
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

    /// Whether `quantise` produces halves of 16 bits for the tile unit instead of lines of codes.
    pub fn halves(&self, isa: Isa) -> bool {
        halves(isa, self.path, self.width)
    }

    /// Tokens stored together: a power of two, at most [`TOKENS`].
    pub(super) fn group(&self) -> usize {
        group(self.path, self.tokens)
    }

    /// The line of a token's first block; its block `b` is `b * self.group()` lines on.
    pub(super) fn line(&self, token: usize) -> *mut Line {
        let group = self.group();
        self.lines.wrapping_add(token / group * group * self.lines() + token % group)
    }

    /// Lines of a token.
    pub(super) fn lines(&self) -> usize {
        lines(self.path, self.width)
    }

    /// Lines of all tokens, which is the distance of one plane of [`Halves`] from the next.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn plane(&self) -> usize {
        self.tokens.next_multiple_of(self.group()) * self.lines()
    }

    /// A token's f32 row.
    pub(super) fn row(&self, token: usize) -> *const f32 {
        self.rows.wrapping_add(token * self.stride)
    }

    /// The source of block `i`, and its line.
    fn block(&self, i: usize) -> (*const [f32; BLOCK], *mut Line) {
        let per_row = lines(self.path, self.cols);
        let (token, block) = (i / per_row, i % per_row);
        (
            self.row(token).wrapping_add(block * BLOCK).cast(),
            self.line(token).wrapping_add(block * self.group()),
        )
    }

    /// Row stride in floats.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

/// Whether rows are [`Halves`]; see [`Activations::halves`].
pub(super) fn halves(isa: Isa, path: Path, cols: usize) -> bool {
    isa == Isa::Amx && path != Path::InPlace && lines(path, cols) > 0
}

/// The number of lines of a row: zero if its columns are no whole lines and the path does not fill
/// the last with zeros.
fn lines(path: Path, cols: usize) -> usize {
    match path {
        Path::Rounded => cols.div_ceil(BLOCK),
        _ if cols.is_multiple_of(BLOCK) => cols / BLOCK,
        _ => 0,
    }
}

/// Planes of lines: as many as the tile unit's [`Halves`] have at most.
fn planes(path: Path) -> usize {
    match path {
        Path::InPlace | Path::Rounded => 1,
        Path::Expanded => 2,
        Path::Exact => 3,
    }
}

fn group(path: Path, tokens: usize) -> usize {
    match path {
        Path::InPlace => tokens.next_power_of_two().min(TOKENS),
        Path::Expanded | Path::Exact | Path::Rounded => TOKENS,
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

/// The same for [`Halves`], of one to three planes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn halve(x: &Activations, blocks: Range<usize>, planes: usize) {
    let (per_row, group, plane) = (lines(x.path, x.cols), x.group(), x.plane());
    let mut next = blocks.start;
    while next < blocks.end {
        // As far as the row goes.
        let first = next % per_row;
        let count = (per_row - first).min(blocks.end - next);
        let (from, to) = x.block(next);
        let to = to.cast::<Halves>();
        for i in 0..count {
            // SAFETY: as above, and lanes outside of the row are not read; the storage has the
            // planes.
            unsafe {
                let (from, to) = (from.add(i).cast::<f32>(), to.add(i * group));
                let mut left = load(from, x.cols - (first + i) * BLOCK);
                for p in 0..planes {
                    let (halves, rest) = nearest(left);
                    _mm512_storeu_si512(to.add(p * plane).cast(), halves);
                    left = rest;
                }
            }
        }
        next += count;
    }
}

/// The next block of a row of which `left` elements are left; zeros follow the last.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn load(from: *const f32, left: usize) -> [__m512; 2] {
    // SAFETY: masked lanes are not read; the others are the caller's.
    unsafe {
        if left >= BLOCK {
            return [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
        }
        let mask = (1u32 << left) - 1;
        [0, 16].map(|i| _mm512_maskz_loadu_ps((mask >> i) as u16, from.wrapping_add(i)))
    }
}

/// The bf16 nearest to 32 numbers, ties to even, and what they are off, exactly; NaN stays NaN, and
/// infinity is exact.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn nearest(x: [__m512; 2]) -> (__m512i, [__m512; 2]) {
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    let rounded = x.map(|x| {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        _mm512_and_si512(_mm512_mask_mov_epi32(nearest, nan, quiet), upper)
    });
    let rest = [0, 1].map(|i| {
        let rest = _mm512_sub_ps(x[i], _mm512_castsi512_ps(rounded[i]));
        let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(rest, rest);
        _mm512_maskz_mov_ps(number, rest)
    });
    (amx::upper_halves(rounded[0], rounded[1]), rest)
}

/// Quantises one block to a line, with the same bits on every processor.
#[inline(always)]
fn line(x: &[f32; BLOCK]) -> Line {
    // Compared as integers, magnitudes order like the floats, with infinity and then NaN above all,
    // so neither is lost.
    let peak = x.iter().fold(0, |peak: u32, x| peak.max(x.to_bits() & 0x7fff_ffff));
    let peak = f32::from_bits(peak);
    // Below this the inverse overflows; such a block becomes zeros.
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
