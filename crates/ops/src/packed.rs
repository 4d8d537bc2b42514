//! How a weight matrix `[rows, cols]` lies in GPU memory: rows of 32-bit words, each row a few
//! planes.
//!
//! ```text
//! row     base plane | high plane | entries | supers       each starts and ends on 16 bytes; those not needed are absent
//! base    the low 2 or 4 bits of each code, or all 8; of codes that index a table, those codes
//! high    the 1 or 2 bits above, of formats with 3, 5 or 6
//! entry   one per `sub` elements: a scale, or a scale and an offset, each f16 or bf16; a power of two's byte; or one or two signed bytes
//! super   one word per block: f16 `d`, f16 `min`, which the bytes of an entry multiply
//! ```
//!
//! In a plane of `b` bits a word holds `32 / b` consecutive elements: element `4 k + i` is the `b`
//! bits at `8 i + b k`, so that a shift and a mask give the codes of four neighbours as the four
//! bytes that `dot4` takes. Codes of 8 bits are stored less 128, as signed bytes. Codes that index
//! a table are stored in order, element `i` at `4 i`, and looked up four at a time. Dense matrices
//! (f32, f16, bf16) keep their bytes: their base plane is all there is.
//!
//! Blocks may also lie in tiles of eight rows, which have the same words in another order:
//! [`Format::tiled`].
//!
//! Everything follows from [`formats::quant::BlockFormat::AFFINE`]: a new block needs no line here. MLX's
//! affine formats are another source of the same layout. What kernels read it with is
//! [`PackedWeights`].

mod pack;
mod tiles;
mod weights;

#[cfg(test)]
mod tests;

use std::ops::{Add, Div, Mul};

use formats::quant::{BlockFormat, Offset, ScaleKind, plain};
use formats::{DType, Encoding, Error, Groups, Result, with_block};
use tile::launch::Extent;
use tile::types::Scalar;
use tiles::Tile;

pub use pack::{Mlx, pack, pack_as, pack_into, pack_mlx};
pub(crate) use weights::halves;
pub use weights::{PackedWeights, RAISED, Scaled, Supers, WordRun};

/// How the elements of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Numbers: f32, f16 or bf16.
    Dense(Scalar),
    /// One of ggml's blocks.
    Block(DType),
    /// One of ggml's blocks, in tiles: see [`Format::tiled`].
    Tiles(DType),
    /// MLX's affine quantisation: `w = scale * code + bias` in groups.
    Mlx {
        /// 4 or 8.
        bits: u32,
        /// Elements that share a scale: 32, 64 or 128.
        group: u32,
        /// Element type of scales and biases: f16 or bf16.
        scale: Scalar,
    },
}

/// The numbers stored beside the codes of `sub` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Entry {
    /// A scale of a type, f16 or bf16.
    Scale(Scalar),
    /// A scale and an offset of a type, f16 or bf16.
    Pair(Scalar),
    /// A byte `e`, the scale `2^(e - 128)`.
    Power,
    /// A signed byte times the block's `d`.
    Byte,
    /// Signed bytes times the block's `d` and `-min`.
    Bytes,
}

impl Entry {
    /// Its size.
    fn bits(self) -> u32 {
        match self {
            Entry::Scale(_) | Entry::Bytes => 16,
            Entry::Pair(_) => 32,
            Entry::Power | Entry::Byte => 8,
        }
    }

    /// Whether a block has a word of its own.
    fn is_super(self) -> bool {
        matches!(self, Entry::Byte | Entry::Bytes)
    }
}

/// How codes and entries of a quantised [`Format`] turn into weights:
/// `w = scale * (code - zero) + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Packing {
    /// Bits per code, or per number that a code stands for: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// The numbers that codes of four bits stand for, where those are what is stored.
    pub table: Option<[u8; 16]>,
    /// Elements that share an entry: 16, 32, 64 or 128.
    pub sub: u32,
    /// Elements that share a super; [`Packing::sub`] where there is none.
    pub block: u32,
    /// The content of an entry.
    pub entry: Entry,
    /// The code of a weight that equals the offset.
    pub zero: u32,
}

impl Packing {
    /// The packing of a block.
    fn of<B: BlockFormat>() -> Packing {
        let affine = B::AFFINE;
        let (zero, min) = match affine.offset {
            Offset::Zero(zero) => (u32::from(zero), false),
            Offset::Min => (0, true),
        };
        let entry = match (affine.scale, min) {
            _ if B::POWER.is_some() => Entry::Power,
            (ScaleKind::Half, false) => Entry::Scale(Scalar::F16),
            (ScaleKind::Half, true) => Entry::Pair(Scalar::F16),
            (ScaleKind::Brain, false) => Entry::Scale(Scalar::BF16),
            (ScaleKind::Brain, true) => Entry::Pair(Scalar::BF16),
            (ScaleKind::Super, false) => Entry::Byte,
            (ScaleKind::Super, true) => Entry::Bytes,
        };
        Packing {
            bits: affine.value_bits(),
            table: affine.table,
            sub: affine.sub as u32,
            block: B::ELEMENTS as u32,
            entry,
            zero,
        }
    }

    /// Bits per element of the base plane.
    pub fn base(&self) -> u32 {
        match self.bits {
            _ if self.table.is_some() => 4,
            8 => 8,
            4..8 => 4,
            _ => 2,
        }
    }

    /// Bits per element of the high plane; 0 if there is none.
    pub fn high(&self) -> u32 {
        if self.table.is_some() { 0 } else { self.bits - self.base() }
    }

    /// The number subtracted from a code before it is stored, or once it is looked up: 128 for codes
    /// of 8 bits, so that they are signed bytes.
    pub fn bias(&self) -> u32 {
        if self.bits == 8 { 128 } else { 0 }
    }
}

/// Elements per word of the planes of a row, in their order; 0 for a plane that is absent.
type PerWord = [u32; 4];

impl Format {
    /// The format of a weight, if matrices that are encoded so can be multiplied with. Codes of
    /// affine groups take 4 or 8 bits, and a longer group is kept as several with the same scale.
    pub fn of(encoding: impl Into<Encoding>) -> Option<Format> {
        let dtype = match encoding.into() {
            Encoding::Stored(dtype) => dtype,
            Encoding::Groups(Groups { bits, group, scale }) => {
                let group = [128, 64, 32].into_iter().find(|most| group.is_multiple_of(*most))?;
                let scale = if scale == DType::BF16 { Scalar::BF16 } else { Scalar::F16 };
                let bits = if bits <= 4 { 4 } else { 8 };
                return Some(Format::Mlx { bits, group: group as u32, scale });
            }
        };
        match dtype {
            DType::F32 => Some(Format::Dense(Scalar::F32)),
            DType::F16 => Some(Format::Dense(Scalar::F16)),
            DType::BF16 => Some(Format::Dense(Scalar::BF16)),
            block if block.is_block() => Some(Format::Block(block)),
            _ => None,
        }
    }

    /// The format whose matrices have the same words in tiles of eight rows by four runs, each in
    /// one piece of memory, so that simdgroups copy them in few and long pieces. Their rows are a
    /// multiple of [`Format::together`].
    pub fn tiled(self) -> Option<Format> {
        match self {
            Format::Block(dtype) => Some(Format::Tiles(dtype)),
            _ => None,
        }
    }

    /// The format whose matrices have the same words in rows.
    pub fn in_rows(self) -> Format {
        match self {
            Format::Tiles(dtype) => Format::Block(dtype),
            rows => rows,
        }
    }

    /// Rows that lie together: matrices have a multiple of this, and are packed by as many.
    pub fn together(self) -> usize {
        if matches!(self, Format::Tiles(_)) { tiles::ROWS as usize } else { 1 }
    }

    /// Every format there is, in rows.
    pub fn all() -> Vec<Format> {
        let mut all: Vec<Format> = Vec::new();
        for format in DType::ALL.into_iter().filter_map(Format::of) {
            if !all.contains(&format) {
                all.push(format);
            }
        }
        for bits in [4, 8] {
            for group in [32, 64, 128] {
                for scale in [Scalar::F16, Scalar::BF16] {
                    all.push(Format::Mlx { bits, group, scale });
                }
            }
        }
        all
    }

    /// Its name in labels and errors: `q4_k`, `bf16`, `mlx4_64_bf16`.
    pub fn name(self) -> String {
        match self {
            Format::Dense(scalar) => scalar.name().to_owned(),
            Format::Block(dtype) => dtype.name().to_owned(),
            Format::Tiles(dtype) => format!("{}_tiles", dtype.name()),
            Format::Mlx { bits, group, scale } => format!("mlx{bits}_{group}_{scale}"),
        }
    }

    /// How it is quantised; none for dense formats.
    pub fn packing(self) -> Option<Packing> {
        match self {
            Format::Dense(_) => None,
            Format::Block(dtype) | Format::Tiles(dtype) => with_block!(dtype, B => {
                Some(Packing::of::<B>())
            }, else => None),
            Format::Mlx { bits, group, scale } => Some(Packing {
                bits,
                table: None,
                sub: group,
                block: group,
                entry: Entry::Pair(scale),
                zero: 0,
            }),
        }
    }

    /// Elements that one 16-byte load of the base plane holds: 4, 8, 16, 32 or 64.
    pub fn run(self) -> u32 {
        4 * self.per_word()[0]
    }

    /// Words that a kernel holds for a run: of all planes.
    pub fn words(self) -> u32 {
        self.counts().iter().sum()
    }

    /// Words of shared memory that a simdgroup copies a run for each lane to.
    pub fn copied(self) -> u32 {
        Tile::of(self).map_or(32 * self.words(), |tile| tile.words())
    }

    /// Words per run of each plane; neighbouring runs may share one.
    fn counts(self) -> [u32; 4] {
        self.per_word().map(|per| self.run().checked_div(per).map_or(0, |count| count.max(1)))
    }

    /// A row's columns are a multiple of this.
    pub fn step(self) -> u32 {
        let runs = if self.together() > 1 { tiles::RUNS } else { 1 };
        self.packing().map_or(self.run(), |p| p.block.max(runs * self.run()))
    }

    /// Words of a row, in a launch contract.
    pub fn extent(self, cols: Extent) -> Extent {
        if let Some(tile) = Tile::of(self) {
            return cols.ceil_div(tiles::RUNS * self.run()) * (tile.words() / tiles::ROWS);
        }
        let planes = self.per_word().into_iter().filter(|per| *per > 0);
        let words = planes.map(|per| cols.clone().ceil_div(4 * per) * 4);
        words.reduce(|sum, plane| sum + plane).unwrap_or(Extent::Literal(0))
    }

    fn per_word(self) -> PerWord {
        let Some(p) = self.packing() else {
            let Format::Dense(scalar) = self else { return [1, 0, 0, 0] };
            return [4 / scalar.bytes() as u32, 0, 0, 0];
        };
        let high = if p.high() == 0 { 0 } else { 32 / p.high() };
        let block = if p.entry.is_super() { p.block } else { 0 };
        [32 / p.base(), high, p.sub * 32 / p.entry.bits(), block]
    }

    /// The word of a row at which each plane starts, and last the row's size: on the CPU and in
    /// kernels. Tiles have planes of their own, and rows no more than a size.
    fn starts<N>(self, zero: N, cols: N) -> [N; 5]
    where
        N: Copy + Add<u32, Output = N> + Add<N, Output = N>,
        N: Div<u32, Output = N> + Mul<u32, Output = N>,
    {
        let mut end = zero;
        let mut starts = [zero; 5];
        if let Some(tile) = Tile::of(self) {
            starts[4] = cols / (tiles::RUNS * self.run()) * (tile.words() / tiles::ROWS);
            return starts;
        }
        for (start, per) in starts[1..].iter_mut().zip(self.per_word()) {
            if per > 0 {
                end = end + (cols + (4 * per - 1)) / (4 * per) * 4;
            }
            *start = end;
        }
        starts
    }
}

/// The sizes of a matrix in a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// How its elements are stored.
    pub format: Format,
    /// Rows: outputs.
    pub rows: usize,
    /// Columns: inputs.
    pub cols: usize,
}

impl Layout {
    /// Errors: columns that are no whole number of blocks (or 16-byte loads), rows that do not lie
    /// together, or a matrix of 16 GiB and more.
    pub fn new(format: Format, rows: usize, cols: usize) -> Result<Layout> {
        let place = || format!("packed {} [{rows}, {cols}]", format.name());
        let step = format.step() as usize;
        if cols == 0 || !cols.is_multiple_of(step) {
            return Err(Error::new(place(), format!("columns in multiples of {step}"), cols));
        }
        let together = format.together();
        if !rows.is_multiple_of(together) {
            return Err(Error::new(place(), format!("rows in multiples of {together}"), rows));
        }
        // Words are numbered in 32 bits; a row's sizes are computed in them too.
        let layout = Layout { format, rows, cols };
        let words = (cols < 1 << 28).then(|| layout.row_words().checked_mul(rows)).flatten();
        match words {
            Some(words) if words < u32::MAX as usize => Ok(layout),
            _ => Err(Error::new(place(), "less than 2^32 words", "more")),
        }
    }

    /// Words of a row: a multiple of 4, but in tiles.
    pub fn row_words(&self) -> usize {
        self.format.starts(0, self.cols as u32)[4] as usize
    }

    /// Words of the matrix.
    pub fn words(&self) -> usize {
        self.row_words() * self.rows
    }

    /// Bytes of the matrix.
    pub fn bytes(&self) -> usize {
        4 * self.words()
    }
}

/// A matrix packed for the GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Planes {
    /// Its sizes.
    pub layout: Layout,
    /// Its words, little-endian, row after row, or tile after tile.
    pub bytes: Vec<u8>,
}

/// The bits of `2^(e - 128)` as f32, which is subnormal for an exponent `e` of 0 or 1.
fn power(e: u32) -> u32 {
    if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 }
}

/// The lowest bit of an element in its word of a plane of `bits`.
fn field(element: usize, bits: u32) -> u32 {
    let i = element as u32 % (32 / bits);
    i % 4 * 8 + i / 4 * bits
}

impl Planes {
    /// The weights of row `r`, bit for bit what the source's decoder gives.
    ///
    /// # Panics
    /// If there is no such row, or `weights` is not as long as one.
    pub fn row(&self, r: usize, weights: &mut [f32]) {
        let layout = &self.layout;
        assert!(r < layout.rows && weights.len() == layout.cols, "row {r} of {layout:?}");
        let (together, per_row) = (layout.format.together(), layout.row_words());
        let own = &self.bytes.as_chunks::<4>().0[r / together * together * per_row..];
        let own = &own[..together * per_row];
        let own = match Tile::of(layout.format) {
            Some(tile) => &tile.row(layout, own, r % together)[..],
            None => own,
        };
        let words: Vec<u32> = own.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let half = |scalar: Scalar, bits: u32| match scalar {
            Scalar::BF16 => plain::bf16_to_f32(bits as u16),
            _ => plain::f16_to_f32(bits as u16),
        };
        let Some(p) = layout.format.packing() else {
            for (e, w) in weights.iter_mut().enumerate() {
                *w = match layout.format {
                    Format::Dense(Scalar::F32) => f32::from_bits(words[e]),
                    Format::Dense(scalar) => half(scalar, words[e / 2] >> (e % 2 * 16)),
                    _ => 0.0,
                };
            }
            return;
        };
        let rows = layout.format.in_rows();
        let (per, starts) = (rows.per_word(), rows.starts(0, layout.cols as u32));
        let word = |plane: usize, e: usize| words[starts[plane] as usize + e / per[plane] as usize];
        for (e, w) in weights.iter_mut().enumerate() {
            let at = if p.table.is_some() { 4 * (e as u32 % 8) } else { field(e, p.base()) };
            let mut code = word(0, e) >> at & ((1 << p.base()) - 1);
            if p.high() > 0 {
                code |= (word(1, e) >> field(e, p.high()) & ((1 << p.high()) - 1)) << p.base();
            }
            let number = p.table.map_or(code ^ p.bias(), |table| u32::from(table[code as usize]));
            let at = e % per[2] as usize / p.sub as usize;
            let entry = word(2, e) >> (at as u32 * p.entry.bits());
            let byte = |k: u32| f32::from((entry >> (8 * k)) as u8 as i8);
            let (scale, offset) = match p.entry {
                Entry::Scale(scalar) => (half(scalar, entry), None),
                Entry::Pair(scalar) => (half(scalar, entry), Some(half(scalar, entry >> 16))),
                Entry::Power => (f32::from_bits(power(entry & 255)), None),
                Entry::Byte => (half(Scalar::F16, word(3, e)) * byte(0), None),
                Entry::Bytes => (
                    half(Scalar::F16, word(3, e)) * byte(0),
                    Some(-(half(Scalar::F16, word(3, e) >> 16) * byte(1))),
                ),
            };
            let product = scale * (number as i32 - p.zero as i32) as f32;
            // Adding a zero would lose the sign of another.
            *w = offset.map_or(product, |offset| product + offset);
        }
    }
}
