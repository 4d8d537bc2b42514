//! The packed layout as its definition has it: each element by itself, bit by bit.

use formats::quant::{BlockFormat, Parts};
use formats::{Encoding, with_block};

use super::super::{Entry, Format, Layout, Packing, field};

/// A matrix of blocks or affine groups, packed.
pub(super) fn pack(encoding: Encoding, bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let layout = Layout::new(Format::of(encoding).unwrap(), rows, cols).unwrap();
    let mut packed = vec![0; layout.bytes()];
    let rows = packed.chunks_exact_mut(4 * layout.row_words());
    for (source, row) in bytes.chunks_exact(bytes.len() / layout.rows).zip(rows) {
        let mut row = Row::new(&layout, row);
        match encoding {
            Encoding::Groups(_) => groups(encoding, source, &mut row),
            Encoding::Stored(dtype) => {
                with_block!(dtype, B => blocks::<B>(source, &mut row), else => unreachable!());
            }
        }
    }
    packed
}

fn blocks<B: BlockFormat>(source: &[u8], to: &mut Row<'_>) {
    let mut parts = Parts::default();
    for (b, block) in source.chunks_exact(B::BYTES).enumerate() {
        B::split(block, &mut parts);
        let first = b * B::ELEMENTS;
        for (i, &code) in parts.codes[..B::ELEMENTS].iter().enumerate() {
            to.code(first + i, u32::from(code));
        }
        let word = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let byte = |x: i8| u32::from(x as u8);
        for i in 0..B::ELEMENTS / to.packing.sub as usize {
            let entry = match to.packing.entry {
                Entry::Scale(_) => u32::from(parts.d),
                Entry::Pair(_) => word(parts.d, parts.min),
                Entry::Power => u32::from(block[0]),
                Entry::Byte => byte(parts.scales[i]),
                Entry::Bytes => byte(parts.scales[i]) | byte(parts.mins[i]) << 8,
            };
            to.entry(first + i * to.packing.sub as usize, entry);
        }
        if to.packing.entry.is_super() {
            to.or(3, first, 0, word(parts.d, parts.min));
        }
    }
}

fn groups(encoding: Encoding, source: &[u8], to: &mut Row<'_>) {
    let Encoding::Groups(groups) = encoding else { return };
    for (g, group) in source.chunks_exact(groups.bytes()).enumerate() {
        let first = g * groups.group;
        (0..groups.group).for_each(|i| to.code(first + i, u32::from(groups.code(group, i))));
        let [scale, offset] = groups.halves(group).map(u32::from);
        for i in (0..groups.group).step_by(to.packing.sub as usize) {
            to.entry(first + i, scale | offset << 16);
        }
    }
}

/// A row being written: its planes start as zeros.
struct Row<'a> {
    packing: Packing,
    per_word: [u32; 4],
    starts: [u32; 5],
    bytes: &'a mut [u8],
}

impl<'a> Row<'a> {
    fn new(layout: &Layout, bytes: &'a mut [u8]) -> Self {
        let format = layout.format;
        let starts = format.starts(0, layout.cols as u32);
        Row { packing: format.packing().unwrap(), per_word: format.per_word(), starts, bytes }
    }

    /// Sets bits of the word of a plane that holds an element.
    fn or(&mut self, plane: usize, element: usize, shift: u32, bits: u32) {
        let word = self.starts[plane] as usize + element / self.per_word[plane] as usize;
        let word = &mut self.bytes[4 * word..][..4];
        word.iter_mut().zip((bits << shift).to_le_bytes()).for_each(|(byte, bits)| *byte |= bits);
    }

    fn code(&mut self, element: usize, code: u32) {
        if self.packing.table.is_some() {
            return self.or(0, element, element as u32 % 8 * 4, code);
        }
        let code = code ^ self.packing.bias();
        let (base, high) = (self.packing.base(), self.packing.high());
        self.or(0, element, field(element, base), code & ((1 << base) - 1));
        if high > 0 {
            self.or(1, element, field(element, high), code >> base);
        }
    }

    fn entry(&mut self, element: usize, entry: u32) {
        let at = element % self.per_word[2] as usize / self.packing.sub as usize;
        self.or(2, element, at as u32 * self.packing.entry.bits(), entry);
    }
}
