//! Packing: rows of a file's blocks and affine groups to the words of [`super`]'s planes.
//!
//! A block's codes are first bytes in the order of its elements; a plane of `b` bits then takes
//! the bits of four neighbours at a time, which its words hold as they lie:
//!
//! ```text
//! word = sum over k < 8 / b of (codes[4 k .. 4 k + 4] as u32 >> shift & mask) << (b k)
//! ```
//!
//! Nothing is read of what is packed to, and all of it is written. Whether scales are finite is
//! asked elsewhere ([`Encoding::not_finite`]): any bytes are packed.

use formats::quant::{BlockFormat, Parts};
use formats::{DType, Encoding, Error, Groups, Result, with_block};
use tile::types::Scalar;

use super::tiles::Tile;
use super::{Entry, Format, Layout, Packing, Planes};

/// Packs a matrix of numbers, blocks or affine groups.
///
/// # Errors
/// Integers, a shape that [`Layout::new`] refuses, or bytes of another size.
pub fn pack(
    encoding: impl Into<Encoding>,
    bytes: &[u8],
    rows: usize,
    cols: usize,
) -> Result<Planes> {
    let encoding = encoding.into();
    let format = Format::of(encoding).ok_or_else(|| {
        let place = format!("packed {encoding} [{rows}, {cols}]");
        Error::new(place, "a float or block type", encoding)
    })?;
    pack_as(format, encoding, bytes, rows, cols)
}

/// Likewise, in rows or in tiles.
///
/// # Errors
/// As [`pack`], and a format of another encoding.
pub fn pack_as(
    format: Format,
    encoding: Encoding,
    bytes: &[u8],
    rows: usize,
    cols: usize,
) -> Result<Planes> {
    let layout = Layout::new(format, rows, cols)?;
    check(encoding, bytes, rows, cols)?;
    let mut packed = vec![0; layout.bytes()];
    pack_into(encoding, bytes, &layout, &mut packed)?;
    Ok(Planes { layout, bytes: packed })
}

/// Refuses bytes that do not hold exactly `rows` rows.
fn check(encoding: Encoding, bytes: &[u8], rows: usize, cols: usize) -> Result<()> {
    let expected = rows.checked_mul(cols).and_then(|n| encoding.bytes_for(n));
    if expected == Some(bytes.len()) {
        return Ok(());
    }
    let place = format!("packed {encoding} [{rows}, {cols}]");
    let expected = expected.map_or("fewer".to_owned(), |n| n.to_string());
    Err(Error::new(place, format!("{expected} bytes"), bytes.len()))
}

/// Packs some whole rows of a matrix of this layout: as many as `packed` has room for,
/// [`Layout::row_words`] words each, a multiple of [`Format::together`]. Every byte of `packed` is
/// written.
///
/// # Errors
/// An encoding of another format, or bytes that do not hold that number of whole rows.
pub fn pack_into(
    encoding: Encoding,
    bytes: &[u8],
    layout: &Layout,
    packed: &mut [u8],
) -> Result<()> {
    let (per_row, cols) = (4 * layout.row_words(), layout.cols);
    let place = || format!("packed {encoding} of {cols} columns");
    if Format::of(encoding) != Some(layout.format.in_rows()) {
        return Err(Error::new(place(), layout.format.name(), encoding));
    }
    let together = layout.format.together();
    if !packed.len().is_multiple_of(together * per_row) {
        let expected = match together {
            1 => format!("room for rows of {per_row} bytes"),
            _ => format!("room for {together} rows of {per_row} bytes at a time"),
        };
        return Err(Error::new(place(), expected, packed.len()));
    }
    let rows = packed.len() / per_row;
    check(encoding, bytes, rows, cols)?;
    if let Some(tile) = Tile::of(layout.format) {
        let in_rows = Layout { format: layout.format.in_rows(), ..*layout };
        let mut eight = vec![0; together * 4 * in_rows.row_words()];
        let source = bytes.chunks_exact((bytes.len() / rows.max(1) * together).max(1));
        for (source, tiles) in source.zip(packed.chunks_exact_mut(together * per_row)) {
            pack_into(encoding, source, &in_rows, &mut eight)?;
            tile.fill(&in_rows, eight.as_chunks().0, tiles.as_chunks_mut().0);
        }
        return Ok(());
    }
    let Some(packing) = layout.format.packing() else {
        packed.copy_from_slice(bytes);
        return Ok(());
    };
    let starts = layout.format.starts(0, cols as u32).map(|start| start as usize);
    let source = bytes.chunks_exact((bytes.len() / rows.max(1)).max(1));
    for (source, row) in source.zip(packed.chunks_exact_mut(per_row)) {
        let row = Row::new(&starts, row);
        match encoding {
            Encoding::Groups(groups) => pack_groups(groups, source, &packing, row),
            Encoding::Stored(dtype) => {
                with_block!(dtype, B => pack_row::<B>(source, row), else => {});
            }
        }
    }
    Ok(())
}

/// One row of blocks.
fn pack_row<B: BlockFormat>(source: &[u8], mut row: Row<'_>) {
    // Of the block rather than of the layout, so that all of it is known when this is compiled.
    let packing = Packing::of::<B>();
    let subs = B::ELEMENTS / B::AFFINE.sub;
    let mut parts = Parts::default();
    let mut blocks = 0;
    for block in source.chunks_exact(B::BYTES) {
        B::split(block, &mut parts);
        let codes = &mut parts.codes[..B::ELEMENTS];
        row.codes(&packing, blocks * B::ELEMENTS, codes.as_chunks().0);
        let (first, scales, mins) = (blocks * subs, &parts.scales[..], &parts.mins[..]);
        match packing.entry {
            Entry::Scale(_) => row.entries(first, subs, |_| parts.d.to_le_bytes()),
            Entry::Pair(_) => row.entries(first, subs, |_| pair(parts.d, parts.min)),
            Entry::Power => row.entries(first, subs, |_| [block[B::POWER.unwrap_or(0)]]),
            Entry::Byte => row.entries(first, subs, |i| [scales[i] as u8]),
            Entry::Bytes => row.entries(first, subs, |i| [scales[i] as u8, mins[i] as u8]),
        }
        if packing.entry.is_super() {
            row.supers[blocks] = pair(parts.d, parts.min);
        }
        blocks += 1;
    }
    row.pad(&packing, blocks * B::ELEMENTS);
}

/// A word of two halves, the first lowest.
fn pair(low: u16, high: u16) -> [u8; 4] {
    (u32::from(low) | u32::from(high) << 16).to_le_bytes()
}

/// One row of affine groups.
fn pack_groups(groups: Groups, source: &[u8], packing: &Packing, mut row: Row<'_>) {
    let sub = packing.sub as usize;
    let mut codes = [0; LONGEST];
    let mut elements = 0;
    for group in source.chunks_exact(groups.bytes()) {
        let [scale, offset] = groups.halves(group);
        for first in (0..groups.group).step_by(sub) {
            unpack(groups, group, first, &mut codes[..sub]);
            row.codes(packing, elements, codes[..sub].as_chunks().0);
            row.entries(elements / sub, 1, |_| pair(scale, offset));
            elements += sub;
        }
    }
    row.pad(packing, elements);
}

/// The most elements of affine groups that share an entry: see [`Format::of`].
const LONGEST: usize = 128;

/// Codes of a group from one on, which begins a byte.
fn unpack(groups: Groups, group: &[u8], first: usize, codes: &mut [u8]) {
    match groups.bits {
        4 => {
            let pairs = codes.as_chunks_mut::<2>().0.iter_mut();
            pairs.zip(&group[first / 2..]).for_each(|(pair, b)| *pair = [b & 15, b >> 4]);
        }
        8 => codes.copy_from_slice(&group[first..][..codes.len()]),
        _ => {
            let all = codes.iter_mut().enumerate();
            all.for_each(|(i, code)| *code = groups.code(group, first + i));
        }
    }
}

/// A row being written, plane by plane.
struct Row<'a> {
    base: &'a mut [[u8; 4]],
    high: &'a mut [[u8; 4]],
    /// One after another, in as many whole bytes each as [`Entry`] has.
    entries: &'a mut [u8],
    supers: &'a mut [[u8; 4]],
}

impl<'a> Row<'a> {
    /// The planes of a row's bytes, which start at these words.
    fn new(starts: &[usize; 5], bytes: &'a mut [u8]) -> Self {
        let words = bytes.as_chunks_mut().0;
        let (base, rest) = words.split_at_mut(starts[1]);
        let (high, rest) = rest.split_at_mut(starts[2] - starts[1]);
        let (entries, supers) = rest.split_at_mut(starts[3] - starts[2]);
        Row { base, high, entries: entries.as_flattened_mut(), supers }
    }

    /// Codes from an element on: their lowest bits in the base plane, and those above in the high
    /// plane.
    fn codes(&mut self, packing: &Packing, first: usize, codes: &[[u8; 4]]) {
        let (base, high) = (packing.base(), packing.high());
        let to = &mut self.base[first * base as usize / 32..];
        match base {
            _ if packing.table.is_some() => put_in_order(codes, to),
            2 => put::<2, 4>(codes, 0, to),
            4 => put::<4, 2>(codes, 0, to),
            // Signed: see `Packing::bias`.
            _ => to.iter_mut().zip(codes).for_each(|(word, four)| *word = four.map(|c| c ^ 0x80)),
        }
        let to = &mut self.high[first * high as usize / 32..];
        match high {
            1 => put::<1, 8>(codes, base, to),
            2 => put::<2, 4>(codes, base, to),
            _ => {}
        }
    }

    /// So many entries from one on.
    fn entries<const BYTES: usize>(
        &mut self,
        first: usize,
        count: usize,
        entry: impl Fn(usize) -> [u8; BYTES],
    ) {
        let to = &mut self.entries[first * BYTES..][..count * BYTES];
        to.as_chunks_mut().0.iter_mut().enumerate().for_each(|(i, to)| *to = entry(i));
    }

    /// Zeros behind the last element's, where a plane ends before its 16 bytes do.
    fn pad(self, packing: &Packing, elements: usize) {
        self.high[elements * packing.high() as usize / 32..].fill([0; 4]);
        let bytes = packing.entry.bits() as usize / 8;
        self.entries[elements / packing.sub as usize * bytes..].fill(0);
        if packing.entry.is_super() {
            self.supers[elements / packing.block as usize..].fill([0; 4]);
        }
    }
}

/// `BITS` bits of each code, from `shift` on: each word has the bits of `FOURS` times four
/// neighbours.
fn put<const BITS: u32, const FOURS: usize>(codes: &[[u8; 4]], shift: u32, to: &mut [[u8; 4]]) {
    let mask = 0x0101_0101 * ((1 << BITS) - 1);
    for (word, fours) in to.iter_mut().zip(codes.as_chunks::<FOURS>().0) {
        let four = |k: usize| u32::from_le_bytes(fours[k]) >> shift & mask;
        *word = (0..FOURS).fold(0, |all, k| all | four(k) << (BITS * k as u32)).to_le_bytes();
    }
}

/// Eight codes of four bits to a word, the first lowest.
fn put_in_order(codes: &[[u8; 4]], to: &mut [[u8; 4]]) {
    for (word, eight) in to.iter_mut().zip(codes.as_flattened().as_chunks::<8>().0) {
        let all = eight.iter().rev().fold(0, |all, code| all << 4 | u32::from(code & 15));
        *word = all.to_le_bytes();
    }
}

/// Tensors of an MLX affine matrix, little-endian, as safetensors holds them.
#[derive(Debug, Clone, Copy)]
pub struct Mlx<'a> {
    /// `[rows, cols * bits / 32]` u32: codes, the first in the lowest bits.
    pub codes: &'a [u8],
    /// `[rows, cols / group]`.
    pub scales: &'a [u8],
    /// `[rows, cols / group]`.
    pub biases: &'a [u8],
}

/// Packs an MLX affine matrix.
///
/// # Errors
/// A format that is not [`Format::Mlx`] with its listed numbers, a shape that [`Layout::new`]
/// refuses, or bytes of another size.
pub fn pack_mlx(format: Format, from: &Mlx, rows: usize, cols: usize) -> Result<Planes> {
    let place = |what: &str| format!("packed {} [{rows}, {cols}]: {what}", format.name());
    let Format::Mlx { bits, group, scale } = format else {
        return Err(Error::new(place("format"), "an MLX format", format.name()));
    };
    if !Format::all().contains(&format) {
        let expected = "4 or 8 bits, groups of 32, 64 or 128, scales in f16 or bf16";
        return Err(Error::new(place("format"), expected, format.name()));
    }
    let layout = Layout::new(format, rows, cols)?;
    let groups = layout.cols / group as usize;
    let code_bytes = cols / 8 * bits as usize;
    for (what, found, expected) in [
        ("codes", from.codes.len(), code_bytes),
        ("scales", from.scales.len(), 2 * groups),
        ("biases", from.biases.len(), 2 * groups),
    ] {
        if expected.checked_mul(rows) != Some(found) {
            return Err(Error::new(place(what), format!("{rows} x {expected} bytes"), found));
        }
    }
    let number = if scale == Scalar::BF16 { DType::BF16 } else { DType::F16 };
    let Some(encoding) = Groups::new(bits as usize, group as usize, number) else {
        return Err(Error::new(place("format"), "affine groups", format.name()));
    };
    let halves = from.scales.chunks_exact(2).zip(from.biases.chunks_exact(2));
    let all = from.codes.chunks_exact(encoding.code_bytes()).zip(halves);
    let bytes: Vec<u8> =
        all.flat_map(|(codes, (scale, bias))| [codes, scale, bias].concat()).collect();
    pack(Encoding::Groups(encoding), &bytes, rows, cols)
}
