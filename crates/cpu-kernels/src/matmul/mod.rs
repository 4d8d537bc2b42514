//! Matrix products `y = x W^T (+ bias) (+ y)` with weights of any type, packed once at load.
//!
//! [`Matrix::pack`] lays the weights out in panels of 16 rows (see `layout` for quantised, `float`
//! for plain types) at the size they have in the file. [`Activations`] hold the tokens, quantised
//! once for all matrices that read them. [`multiply`] does a range of panels for a range of tokens
//! and is called by every thread of a team; what a thread reads is one contiguous stream. No call
//! allocates.

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
mod blas;
mod float;
#[cfg(target_arch = "aarch64")]
mod i8mm;
mod lanes;
mod layout;
mod memory;
mod peak;
mod product;
mod tiled;
mod turned;

pub use super::isa::Isa;
use super::team::Team;
use super::{LINE, prefetch};
pub use activations::{Activations, Path};
pub use blas::{Blas, Sgemm};
pub use memory::Huge;
pub use peak::{Unit, peak};
pub use tiled::{PackedSide, Side, StridedRows, multiply_packed, outer, pack, tiles_halves};
pub use turned::{Turned, multiply_turned};

use formats::quant::BlockFormat;
use formats::{DType, Encoding, Error, Groups, NotFinite, Result, with_block};
use lanes::Lanes;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows per panel: the lanes of a 512-bit register.
pub const ROWS: usize = 16;

/// Columns per block: the activations' scales are exact per 32.
pub const BLOCK: usize = 32;

/// Runs an expression with `B` bound to the block type of an encoding's panels, or another
/// expression for panels of floats.
macro_rules! with_panel {
    ($encoding:expr, $B:ident => $then:expr, else => $else:expr) => {
        match $encoding {
            formats::Encoding::Stored(dtype) => with_block!(dtype, $B => $then, else => $else),
            formats::Encoding::Groups(groups) => {
                // Codes take four bits or eight, and a longer group is kept as several with the
                // same scale.
                let (narrow, brain) = (groups.bits <= 4, groups.scale == formats::DType::BF16);
                match (narrow, groups.group % 64, groups.group % 32, brain) {
                    (true, 0, _, true) => {
                        type $B = formats::quant::GroupBlock<4, 64, true>;
                        $then
                    }
                    (true, 0, _, false) => {
                        type $B = formats::quant::GroupBlock<4, 64, false>;
                        $then
                    }
                    (true, _, 0, true) => {
                        type $B = formats::quant::GroupBlock<4, 32, true>;
                        $then
                    }
                    (true, _, 0, false) => {
                        type $B = formats::quant::GroupBlock<4, 32, false>;
                        $then
                    }
                    (false, 0, _, true) => {
                        type $B = formats::quant::GroupBlock<8, 64, true>;
                        $then
                    }
                    (false, 0, _, false) => {
                        type $B = formats::quant::GroupBlock<8, 64, false>;
                        $then
                    }
                    (false, _, 0, true) => {
                        type $B = formats::quant::GroupBlock<8, 32, true>;
                        $then
                    }
                    (false, _, 0, false) => {
                        type $B = formats::quant::GroupBlock<8, 32, false>;
                        $then
                    }
                    _ => $else,
                }
            }
        }
    };
}
use with_panel;

/// Something that runs a function on several threads: a thread team, or the caller alone
/// ([`Alone`]).
pub trait Parallel {
    /// Calls `f(index, count)` once for every index below `count`, on any threads, and returns when
    /// all are done.
    fn run(&self, f: &(dyn Fn(usize, usize) + Sync));
}

impl Parallel for Team {
    fn run(&self, f: &(dyn Fn(usize, usize) + Sync)) {
        Team::run(self, &|worker| f(worker.index, worker.count));
    }
}

/// One thread: the caller's.
pub struct Alone;

impl Parallel for Alone {
    fn run(&self, f: &(dyn Fn(usize, usize) + Sync)) {
        f(0, 1);
    }
}

/// A weight matrix `[rows = out, cols = in]`, packed.
pub struct Matrix {
    encoding: Encoding,
    rows: usize,
    cols: usize,
    panel_bytes: usize,
    data: Huge,
    not_finite: Option<NotFinite>,
    /// The unit that multiplies it with the rows of prompts, if not the vector unit, and the fewest
    /// rows that are given to it.
    blas: Option<(&'static Blas, usize)>,
}

impl Matrix {
    /// Whether [`Matrix::pack`] takes this encoding.
    pub fn supports(encoding: Encoding) -> bool {
        match encoding {
            Encoding::Stored(DType::F32 | DType::F16 | DType::BF16) => true,
            encoding => with_panel!(encoding, B => B::ELEMENTS > 1, else => false),
        }
    }

    /// Packs `rows` consecutive rows of `cols` weights. The source is read once, by all threads.
    ///
    /// # Errors
    /// A type that is not float, columns that are not whole blocks or none, bytes that are not
    /// `rows * cols` weights, or too little memory.
    pub fn pack(
        encoding: impl Into<Encoding>,
        rows: usize,
        cols: usize,
        bytes: &[u8],
        team: &dyn Parallel,
    ) -> Result<Matrix> {
        Matrix::packed(encoding.into(), rows, cols, bytes, team)
    }

    // No part of the generic function: its callers would compile the packing of every format.
    fn packed(
        encoding: Encoding,
        rows: usize,
        cols: usize,
        bytes: &[u8],
        team: &dyn Parallel,
    ) -> Result<Matrix> {
        let place = || format!("{encoding} matrix [{rows}, {cols}]");
        if !Matrix::supports(encoding) {
            return Err(Error::new(place(), "float or quantised weights", encoding));
        }
        if cols == 0 {
            return Err(Error::new(place(), "at least one column", cols));
        }
        let row_bytes = encoding.bytes_for(cols).ok_or_else(|| {
            Error::new(
                place(),
                format!("rows of whole blocks of {}", encoding.block_elements()),
                format!("{cols} columns"),
            )
        })?;
        let expected = rows.checked_mul(row_bytes);
        if expected != Some(bytes.len()) {
            let expected =
                expected.map_or("a size that fits in memory".into(), |n| format!("{n} bytes"));
            return Err(Error::new(place(), expected, format!("{} bytes", bytes.len())));
        }
        let panel_bytes = panel_bytes(encoding, cols);
        let panels = rows.div_ceil(ROWS);
        let data = Huge::zeroed(panels * panel_bytes)?;
        let blas = Blas::of_system();
        let matrix =
            Matrix { encoding, rows, cols, panel_bytes, data, not_finite: None, blas: None };
        let mut matrix = matrix.multiplied_by(blas);
        let first_odd: Mutex<Option<NotFinite>> = Mutex::new(None);
        let pack: fn(&[&[u8]], &mut [u8]) = match encoding {
            Encoding::Stored(DType::F32) => float::pack::<4>,
            Encoding::Stored(DType::F16 | DType::BF16) => float::pack::<2>,
            block => {
                with_panel!(block, B => layout::Packed::<B>::pack, else => unreachable!("supported types"))
            }
        };
        team.run(&|index, count| {
            for panel in share(panels, index, count) {
                let first = panel * ROWS;
                let mut source = [&bytes[..0]; ROWS];
                let count = ROWS.min(rows - first);
                for (r, source) in source[..count].iter_mut().enumerate() {
                    *source = &bytes[(first + r) * row_bytes..][..row_bytes];
                    // Here, since packing reads the row next: it comes from memory once.
                    if let Some(found) = encoding.not_finite(source) {
                        let element = (first + r) * cols + found.element;
                        let mut least = first_odd.lock().unwrap_or_else(PoisonError::into_inner);
                        if least.is_none_or(|least| element < least.element) {
                            *least = Some(NotFinite { element, ..found });
                        }
                    }
                }
                // SAFETY: panels do not overlap, lie in the buffer, and each belongs to one index.
                let to = unsafe {
                    std::slice::from_raw_parts_mut(
                        matrix.data.as_ptr().add(panel * panel_bytes),
                        panel_bytes,
                    )
                };
                match encoding {
                    Encoding::Groups(groups) => {
                        let kept: Vec<Vec<u8>> =
                            source[..count].iter().map(|row| regrouped(groups, row)).collect();
                        let rows: Vec<&[u8]> = kept.iter().map(Vec::as_slice).collect();
                        pack(&rows, to);
                    }
                    Encoding::Stored(_) => pack(&source[..count], to),
                }
            }
        });
        matrix.not_finite = first_odd.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(matrix)
    }

    /// Has a BLAS multiply it with the rows of prompts, if there is one and it takes this matrix
    /// ([`Blas::takes`]); else the vector unit does. [`Matrix::pack`] leaves it to the system's.
    pub fn multiplied_by(self, blas: Option<&'static Blas>) -> Matrix {
        let takes = |blas: &'static Blas| blas.takes(self.encoding, self.rows, self.cols);
        let blas = blas.and_then(|blas| Some((blas, takes(blas)?)));
        Matrix { blas, ..self }
    }

    /// Whether a BLAS multiplies it with the rows of prompts.
    pub fn has_blas(&self) -> bool {
        self.blas.is_some()
    }

    /// Bytes of such a matrix packed by [`Matrix::pack`], for a supported encoding and columns in
    /// whole blocks.
    pub fn packed_bytes(encoding: Encoding, rows: usize, cols: usize) -> usize {
        rows.div_ceil(ROWS).saturating_mul(panel_bytes(encoding, cols))
    }

    /// The first non-finite weight that packing met.
    pub fn not_finite(&self) -> Option<NotFinite> {
        self.not_finite
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How the weights were encoded.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Bytes of memory, all of which a pass over all rows reads.
    pub fn resident_bytes(&self) -> usize {
        self.data.len()
    }

    /// The packed weights.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// Panels of [`ROWS`] rows; the last may be partly empty.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    /// Decodes row `r` (below `rows`) exactly into `out` of `cols` elements: the gather of an
    /// embedding table.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        assert!(
            r < self.rows && out.len() == self.cols,
            "row {r} of [{}, {}]",
            self.rows,
            self.cols
        );
        self.part(r, 0, out);
    }

    /// Decodes as many elements of row `r` as `out` has, from column `first` on, where a block
    /// begins.
    fn part(&self, r: usize, first: usize, out: &mut [f32]) {
        let panel = &self.data[r / ROWS * self.panel_bytes..][..self.panel_bytes];
        let (r, blocks) = (r % ROWS, self.cols / BLOCK);
        match self.encoding {
            Encoding::Stored(DType::F32) => float::row::<float::F32>(panel, r, first, out),
            Encoding::Stored(DType::F16) => float::row::<float::F16>(panel, r, first, out),
            Encoding::Stored(DType::BF16) => float::row::<float::BF16>(panel, r, first, out),
            block => with_panel!(block, B =>
                layout::Packed::<B>::row(panel, r, first / BLOCK, blocks, out),
                else => unreachable!("supported types")),
        }
    }
}

/// A row of affine groups, regrouped as [`with_panel`] stores them.
fn regrouped(groups: Groups, row: &[u8]) -> Vec<u8> {
    let bits = if groups.bits <= 4 { 4 } else { 8 };
    let kept = if groups.group.is_multiple_of(64) { 64 } else { 32 };
    let mut all = Vec::new();
    for group in row.chunks_exact(groups.bytes()) {
        for first in (0..groups.group).step_by(kept) {
            let codes = |i: usize| groups.code(group, first + i);
            match bits {
                4 => all.extend((0..kept / 2).map(|i| codes(2 * i) | codes(2 * i + 1) << 4)),
                _ => all.extend((0..kept).map(codes)),
            }
            all.extend_from_slice(&group[groups.code_bytes()..]);
        }
    }
    all
}

/// Bytes of a panel of [`ROWS`] rows.
fn panel_bytes(encoding: Encoding, cols: usize) -> usize {
    with_panel!(encoding, B => layout::Packed::<B>::panel_bytes(cols / BLOCK),
        else => float::panel_bytes(cols, encoding.block_bytes()))
}

/// The `index`-th of `count` nearly equal ranges of `0..n`.
pub fn share(n: usize, index: usize, count: usize) -> Range<usize> {
    n * index / count..n * (index + 1) / count
}

/// The output of a product, row-major `[tokens][rows]`.
#[derive(Clone, Copy)]
pub struct Output {
    /// Token 0, row 0.
    pub start: *mut f32,
    /// f32 from one token to the next.
    pub stride: usize,
}

// SAFETY: the pointer is only written by `multiply`, whose callers give every thread its own
// panels.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// Operations fused into the output of a product.
#[derive(Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// Add to what is there (a residual) instead of replacing it.
    pub accumulate: bool,
    /// Add this to every token: one per row of the matrix.
    pub bias: Option<&'a [f32]>,
}

/// A thread's working memory for [`multiply`]; made once.
pub struct Scratch(Huge);

impl Scratch {
    /// Size in bytes.
    #[cfg(target_arch = "x86_64")]
    pub const BYTES: usize = more(Scratch::OF_ALL, amx::SCRATCH);
    /// Size in bytes.
    #[cfg(target_arch = "aarch64")]
    pub const BYTES: usize = more(Scratch::OF_ALL, i8mm::SCRATCH);
    /// Size in bytes.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub const BYTES: usize = Scratch::OF_ALL;
    /// Bytes that every processor's kernels need.
    const OF_ALL: usize = more(product::SCRATCH, blas::SCRATCH);

    /// # Errors
    /// When there is no memory.
    pub fn new() -> Result<Scratch> {
        Ok(Scratch(Huge::zeroed(Scratch::BYTES)?))
    }
}

/// The greater of two, in constants.
const fn more(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// One call of [`multiply`], as the kernels see it.
struct Call<'a> {
    weights: *const u8,
    panel_bytes: usize,
    rows: usize,
    cols: usize,
    x: &'a Activations<'a>,
    tokens: Range<usize>,
    panels: Range<usize>,
    out: Output,
    epilogue: Epilogue<'a>,
    scratch: *mut u8,
}

impl Call<'_> {
    /// Where a panel starts.
    fn panel(&self, panel: usize) -> *const u8 {
        self.weights.wrapping_add(panel * self.panel_bytes)
    }

    /// Writes the results of a panel for tokens from `token` on, as far as they belong to the call.
    /// `first`: nothing of this call has been written there yet.
    ///
    /// # Safety
    /// The panel is the call's, and the processor has `L`.
    #[inline(always)]
    unsafe fn write<L: Lanes>(&self, panel: usize, token: usize, y: &[L::Floats], first: bool) {
        let row = panel * ROWS;
        let (add, bias) =
            (self.epilogue.accumulate || !first, self.epilogue.bias.filter(|_| first));
        for (token, &y) in (token..).zip(y).filter(|(token, _)| self.tokens.contains(token)) {
            let mut y = y;
            let to = self.out.start.wrapping_add(token * self.out.stride + row);
            // SAFETY: rows `row..self.rows` of the token may be read and written; a bias has
            // `self.rows` elements.
            unsafe {
                if row + ROWS <= self.rows {
                    if let Some(bias) = bias {
                        y = L::add(y, L::load_f32(bias.as_ptr().add(row)));
                    }
                    if add {
                        y = L::add(y, L::load_f32(to));
                    }
                    L::store_f32(to, y);
                    continue;
                }
                let mut lanes = [0f32; ROWS];
                L::store_f32(lanes.as_mut_ptr(), y);
                for (r, &lane) in lanes[..self.rows - row].iter().enumerate() {
                    let bias = bias.map_or(0.0, |bias| bias[row + r]);
                    *to.add(r) = lane + bias + if add { *to.add(r) } else { 0.0 };
                }
            }
        }
    }
}

/// `out[t][r] (+)= x[t] . w[r] (+ bias[r])` for the rows of the panels and the tokens given.
///
/// `x` must have been quantised for the same instruction set, which decides the form (bytes, or
/// bf16 for the tile unit). F32 weights need no quantisation, nor do float weights if `cols` is no
/// multiple of 32. A token's results depend neither on how panels are split among threads nor on
/// the other tokens.
///
/// # Safety
/// - `out` is writable at every token of the range for the rows of these panels, and no other
///   thread uses them.
/// - The lines of `x` are not written meanwhile.
///
/// # Panics
/// If shapes or ranges do not fit each other.
pub unsafe fn multiply(
    isa: Isa,
    w: &Matrix,
    x: &Activations,
    tokens: Range<usize>,
    panels: Range<usize>,
    out: Output,
    epilogue: Epilogue,
    scratch: &mut Scratch,
) {
    assert!(x.cols() == w.cols && tokens.end <= x.tokens() && panels.end <= w.panels());
    assert!(epilogue.bias.is_none_or(|bias| bias.len() == w.rows));
    if tokens.is_empty() || panels.is_empty() {
        return;
    }
    let call = Call {
        weights: w.data.as_ptr(),
        panel_bytes: w.panel_bytes,
        rows: w.rows,
        cols: w.cols,
        x,
        tokens,
        panels,
        out,
        epilogue,
        scratch: scratch.0.as_ptr(),
    };
    if let Some((blas, fewest)) = w.blas.filter(|_| call.x.path() != Path::InPlace) {
        // SAFETY: ranges were checked; the rest is the caller's promise.
        return unsafe { blas.product(&call, w, fewest) };
    }
    let kernel = kernel(isa, w.encoding, call.x);
    // SAFETY: the ISA value proves the instruction set; ranges were checked; the rest is the
    // caller's promise.
    unsafe { kernel(&call) }
}

type Kernel = unsafe fn(&Call);

/// Whether weights of a type go to the tile unit; `halves`: whether the activations are bf16.
fn tiled(isa: Isa, encoding: Encoding, halves: bool) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa == Isa::Amx && halves && amx::kernel(encoding).is_some();
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (isa, encoding, halves);
        false
    }
}

/// The kernel for weights of a type on an instruction set, for these activations.
fn kernel(isa: Isa, encoding: Encoding, x: &Activations) -> Kernel {
    match (isa, x.halves(isa)) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => x86::avx2(encoding),
        #[cfg(target_arch = "x86_64")]
        (Isa::AvxVnni, _) => x86::avx_vnni(encoding),
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, true) => amx::kernel(encoding).unwrap_or_else(|| x86::avx512(encoding)),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, _) => x86::avx512(encoding),
        #[cfg(target_arch = "aarch64")]
        (Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm, _) => neon(isa, encoding),
        _ => scalar(encoding),
    }
}

fn scalar(encoding: Encoding) -> Kernel {
    use lanes::scalar::Scalar;
    match encoding {
        Encoding::Stored(DType::F32) => float::product::<Scalar, float::F32, 1, 4>,
        Encoding::Stored(DType::F16) => float::product::<Scalar, float::F16, 1, 4>,
        Encoding::Stored(DType::BF16) => float::product::<Scalar, float::BF16, 1, 4>,
        block => {
            with_panel!(block, B => product::one_by_one::<Scalar, B>, else => unreachable!("packed types"))
        }
    }
}

/// Advanced SIMD is part of every aarch64 target, and anything beyond it is assembly, so no
/// function has to enable features.
#[cfg(target_arch = "aarch64")]
fn neon(isa: Isa, encoding: Encoding) -> Kernel {
    use lanes::neon::Neon;
    match (encoding, isa) {
        (Encoding::Stored(DType::F32), _) => float::product::<Neon<false>, float::F32, 1, 4>,
        (Encoding::Stored(DType::F16), _) => float::product::<Neon<false>, float::F16, 1, 4>,
        (Encoding::Stored(DType::BF16), _) => float::product::<Neon<false>, float::BF16, 1, 4>,
        // The unit cannot initialise sums for 8-bit codes without a zero point.
        (Encoding::Groups(Groups { bits: 5.., .. }), Isa::NeonI8mm) => {
            neon(Isa::NeonDotprod, encoding)
        }
        (block, Isa::NeonI8mm) => {
            with_panel!(block, B => i8mm::product::<B>, else => unreachable!("packed types"))
        }
        (block, Isa::NeonDotprod) => {
            with_panel!(block, B => product::product::<Neon<true>, B>, else => unreachable!("packed types"))
        }
        (block, _) => {
            with_panel!(block, B => product::product::<Neon<false>, B>, else => unreachable!("packed types"))
        }
    }
}

/// The kernels with their instruction sets enabled.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::lanes::{avx2::Avx2, avx512::Avx512};
    use super::{Call, Encoding, Kernel, float, product};
    use formats::{DType, quant::BlockFormat, with_block};

    /// A function of the name that picks the kernel: tiles of float weights in panels by tokens.
    macro_rules! kernels {
        ($name:ident, $lanes:ty, $features:literal, $p:literal x $n:literal) => {
            pub(super) fn $name(encoding: Encoding) -> Kernel {
                #[target_feature(enable = $features)]
                unsafe fn quantised<B: BlockFormat>(call: &Call) {
                    // SAFETY: passed on.
                    unsafe { product::product::<$lanes, B>(call) }
                }
                #[target_feature(enable = $features)]
                unsafe fn plain<E: float::Element>(call: &Call) {
                    // SAFETY: passed on.
                    unsafe { float::product::<$lanes, E, $p, $n>(call) }
                }
                match encoding {
                    Encoding::Stored(DType::F32) => plain::<float::F32>,
                    Encoding::Stored(DType::F16) => plain::<float::F16>,
                    Encoding::Stored(DType::BF16) => plain::<float::BF16>,
                    block => with_panel!(block, B => quantised::<B>, else => unreachable!("packed types")),
                }
            }
        };
    }
    kernels!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", 2 x 12);
    kernels!(avx2, Avx2<false>, "avx2,fma,f16c", 1 x 5);
    kernels!(avx_vnni, Avx2<true>, "avx2,fma,f16c", 1 x 5);
}
