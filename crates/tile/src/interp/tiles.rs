//! Matrices held by simdgroups: every element of every slot as 32 register bits.

use std::cell::Cell;

use super::arith::{fused, widen_f16};
use super::ops::Slot;
use crate::instr::{BinaryOp, UnaryOp, cast};
use crate::ir::Reduce;
use crate::types::{Role, Scalar, Tile};

/// Elements of the largest tile.
pub(super) const ELEMENTS: usize = 256;

/// The tiles of a threadgroup.
pub(super) struct Tiles {
    cells: Vec<Cell<u32>>,
    simds: usize,
}

impl Tiles {
    pub(super) fn new(slots: u32, simds: usize) -> Self {
        Tiles { cells: vec![Cell::new(0); slots as usize * simds * ELEMENTS], simds }
    }

    /// A simdgroup's matrix in a slot.
    #[inline(always)]
    pub(super) fn of(&self, slot: Slot, simd: usize) -> &[Cell<u32>] {
        &self.cells[(slot as usize * self.simds + simd) * ELEMENTS..][..ELEMENTS]
    }

    /// `d = op a`, element by element; `Err` with the operands where that has no meaning.
    pub(super) fn unary(
        &self,
        simd: usize,
        (op, scalar, tile): (UnaryOp, Scalar, Tile),
        (d, a): (Slot, Slot),
    ) -> Result<(), String> {
        let (d, a) = (self.of(d, simd), self.of(a, simd));
        d.iter().zip(a).take(tile.elements()).try_for_each(|(d, a)| {
            let result = op.eval(scalar, a.get());
            d.set(result.ok_or_else(|| format!("{} of {} is undefined", op.name(), a.get()))?);
            Ok(())
        })
    }

    /// `d = a op b`, element by element.
    pub(super) fn binary(
        &self,
        simd: usize,
        (op, scalar, tile): (BinaryOp, Scalar, Tile),
        (d, a, b): (Slot, Slot, Slot),
    ) -> Result<(), String> {
        let [d, a, b] = [d, a, b].map(|slot| self.of(slot, simd));
        for i in 0..tile.elements() {
            let (a, b) = (a[i].get(), b[i].get());
            let undefined = || format!("{a} {} {b} is undefined", op.name());
            d[i].set(op.eval(scalar, a, b).ok_or_else(undefined)?);
        }
        Ok(())
    }

    /// `d = f(a, b, c)`, element by element.
    pub(super) fn map3(
        &self,
        simd: usize,
        tile: Tile,
        d: Slot,
        operands: [Slot; 3],
        f: impl Fn(u32, u32, u32) -> u32,
    ) {
        let d = self.of(d, simd);
        let [a, b, c] = operands.map(|slot| self.of(slot, simd));
        for i in 0..tile.elements() {
            d[i].set(f(a[i].get(), b[i].get(), c[i].get()));
        }
    }

    /// `d = a b + c`, element by element.
    pub(super) fn fma(&self, simd: usize, tile: Tile, d: Slot, operands: [Slot; 3]) {
        self.map3(simd, tile, d, operands, fused);
    }

    /// `d = a` in another element type.
    pub(super) fn convert(
        &self,
        simd: usize,
        tile: Tile,
        from: Scalar,
        to: Scalar,
        d: Slot,
        a: Slot,
    ) {
        let (d, a) = (self.of(d, simd), self.of(a, simd));
        d.iter().zip(a).take(tile.elements()).for_each(|(d, a)| d.set(cast(from, to, a.get())));
    }

    /// The same bits everywhere.
    pub(super) fn fill(&self, simd: usize, tile: Tile, d: Slot, bits: u32) {
        self.of(d, simd).iter().take(tile.elements()).for_each(|d| d.set(bits));
    }

    /// Each row with its value.
    pub(super) fn across(&self, simd: usize, tile: Tile, d: Slot, a: Slot) {
        let (d, a) = (self.of(d, simd), self.of(a, simd));
        let cols = usize::from(tile.cols).max(1);
        d.iter().take(tile.elements()).enumerate().for_each(|(i, d)| d.set(a[i / cols].get()));
    }

    /// Each element's row or column.
    pub(super) fn position(&self, simd: usize, tile: Tile, column: bool, d: Slot) {
        let cols = usize::from(tile.cols).max(1);
        for (i, d) in self.of(d, simd).iter().take(tile.elements()).enumerate() {
            d.set(if column { i % cols } else { i / cols } as u32);
        }
    }

    /// An operand of the lanes' words, of which `word` gives the `i`th of a lane: see
    /// [`crate::ir::Inst::TileOf`].
    pub(super) fn gather(
        &self,
        simd: usize,
        tile: Tile,
        d: Slot,
        word: impl Fn(usize, usize) -> u32,
    ) {
        let cols = usize::from(tile.cols);
        for (i, cell) in self.of(d, simd).iter().take(tile.elements()).enumerate() {
            let (row, col) = (i / cols, i % cols);
            let (other, k) = if tile.role == Role::A { (row, col) } else { (col, row) };
            let bits = word(row / 8 + col / 8 * 2, other % 8 * 4 + k % 8 / 2);
            cell.set(if k % 2 == 0 { bits & 0xFFFF } else { bits >> 16 });
        }
    }

    /// `d = c + a b`. Products of 16-bit floats are exact in f32; they are added in the order of
    /// `k`.
    pub(super) fn mma(&self, simd: usize, left: Tile, right: Tile, d: Slot, [a, b, c]: [Slot; 3]) {
        let (m, k, n) = (usize::from(left.rows), usize::from(left.cols), usize::from(right.cols));
        let read = |slot: Slot, scalar: Scalar| {
            let mut numbers = [0.0f32; ELEMENTS];
            for (number, cell) in numbers.iter_mut().zip(self.of(slot, simd)) {
                let bits = cell.get();
                *number = f32::from_bits(match scalar {
                    Scalar::F16 => widen_f16(bits),
                    Scalar::BF16 => cast(Scalar::BF16, Scalar::F32, bits),
                    _ => bits,
                });
            }
            numbers
        };
        let (a, b) = (read(a, left.scalar), read(b, right.scalar));
        let mut sum = read(c, Scalar::F32);
        for i in 0..m {
            let row = &mut sum[i * n..(i + 1) * n];
            for j in 0..k {
                let x = a[i * k + j];
                for (sum, y) in row.iter_mut().zip(&b[j * n..(j + 1) * n]) {
                    *sum += x * y;
                }
            }
        }
        for (cell, number) in self.of(d, simd).iter().zip(sum).take(m * n) {
            cell.set(number.to_bits());
        }
    }

    /// Combines each row, from its first column on.
    pub(super) fn reduce(&self, simd: usize, tile: Tile, op: Reduce, d: Slot, a: Slot) {
        let (d, a) = (self.of(d, simd), self.of(a, simd));
        let cols = usize::from(tile.cols).max(1);
        for (row, d) in a[..tile.elements()].chunks(cols).zip(d) {
            let values = row.iter().map(Cell::get);
            d.set(values.reduce(|x, y| combine(op, tile.scalar, x, y)).unwrap_or(0));
        }
    }
}

/// `x` and `y` combined.
pub(super) fn combine(op: Reduce, scalar: Scalar, x: u32, y: u32) -> u32 {
    let op = match op {
        Reduce::Sum => BinaryOp::Add,
        Reduce::Max => BinaryOp::Max,
        Reduce::Min => BinaryOp::Min,
    };
    // Sums and extremes are defined for all operands.
    op.eval(scalar, x, y).unwrap_or(0)
}
