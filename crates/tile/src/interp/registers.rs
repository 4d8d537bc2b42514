//! Register arrays: one copy per thread, or per simdgroup for tiles; each knows which of its
//! elements are set.

use std::cell::Cell;

use super::lanes::{Columns, Mask, SIMD};
use super::ops::{Col, Slot};
use super::products::add_terms;
use super::tiles::{ELEMENTS, Tiles};
use crate::ir;
use crate::types::Type;

/// A register array.
pub(super) struct Registers {
    pub(super) len: usize,
    cells: Vec<Cell<u32>>,
    /// Columns of an element: its lanes if it is a vector.
    width: usize,
    threads: usize,
    /// For every element and simdgroup, a bit per lane that is set; for tiles all or none.
    set: Vec<u32>,
    /// By simdgroup: products under way that add to it, and whether it was touched since the last
    /// fence for products.
    products: Vec<u32>,
    touched: Vec<Cell<bool>>,
}

impl Registers {
    pub(super) fn new(array: &ir::Array, threads: usize) -> Self {
        let (len, simds) = (array.len as usize, threads / SIMD);
        let (cells, width) = match array.ty {
            Type::Scalar(_) => (threads, 1),
            Type::Vector(_, lanes) => (threads * usize::from(lanes), usize::from(lanes)),
            Type::Tile(_) => (simds * ELEMENTS, 1),
        };
        let cells = vec![Cell::new(0); len * cells];
        let (products, touched) = (vec![0; simds], vec![Cell::new(false); simds]);
        Registers { len, cells, width, threads, set: vec![0; len * simds], products, touched }
    }

    /// Clears the registers for a new threadgroup.
    pub(super) fn clear(&mut self) {
        self.set.fill(0);
        self.products.fill(0);
    }

    fn column(&self, element: usize, lane: usize) -> &[Cell<u32>] {
        &self.cells[(element * self.width + lane) * self.threads..][..self.threads]
    }

    /// Element `element` to columns. `Err` is the first lane for which it is not set.
    pub(super) fn load(
        &self,
        columns: &Columns,
        mask: &Mask,
        element: usize,
        d: &[Col],
    ) -> Result<(), usize> {
        let simds = self.threads / SIMD;
        let set = &self.set[element * simds..][..simds];
        if !mask.is_all(self.threads) || set.iter().any(|word| *word != !0) {
            mask.each(
                |lane| {
                    if set[lane / SIMD] >> (lane % SIMD) & 1 == 0 { Err(lane) } else { Ok(()) }
                },
            )?;
        }
        for (i, d) in d.iter().enumerate() {
            copy(mask, columns.of(*d), self.column(element, i));
        }
        Ok(())
    }

    /// Columns to element `element`.
    pub(super) fn store(&mut self, columns: &Columns, mask: &Mask, element: usize, v: &[Col]) {
        let simds = self.threads / SIMD;
        let set = &mut self.set[element * simds..][..simds];
        if mask.is_all(self.threads) {
            set.fill(!0);
        } else {
            let _ = mask.each(|lane| {
                set[lane / SIMD] |= 1 << (lane % SIMD);
                Ok::<(), ()>(())
            });
        }
        for (i, v) in v.iter().enumerate() {
            copy(mask, self.column(element, i), columns.of(*v));
        }
    }

    /// One lane's element to columns; whether it is set.
    pub(super) fn load_lane(
        &self,
        columns: &Columns,
        lane: usize,
        element: usize,
        d: &[Col],
    ) -> bool {
        for (i, d) in d.iter().enumerate() {
            columns.of(*d)[lane].set(self.column(element, i)[lane].get());
        }
        self.set[element * (self.threads / SIMD) + lane / SIMD] >> (lane % SIMD) & 1 == 1
    }

    /// One lane's columns to its element.
    pub(super) fn store_lane(&mut self, columns: &Columns, lane: usize, element: usize, v: &[Col]) {
        self.set[element * (self.threads / SIMD) + lane / SIMD] |= 1 << (lane % SIMD);
        for (i, v) in v.iter().enumerate() {
            self.column(element, i)[lane].set(columns.of(*v)[lane].get());
        }
    }

    fn tile(&self, element: usize, simd: usize) -> &[Cell<u32>] {
        &self.cells[(element * (self.threads / SIMD) + simd) * ELEMENTS..][..ELEMENTS]
    }

    /// Whether no product adds to a simdgroup's tiles; if not, they may not be touched.
    pub(super) fn is_free(&self, simd: usize) -> bool {
        self.products[simd] == 0
    }

    /// The first of a simdgroup's tiles that is not set.
    pub(super) fn unset_tile(&self, simd: usize) -> Option<usize> {
        (0..self.len).find(|element| self.set[element * (self.threads / SIMD) + simd] == 0)
    }

    /// Orders earlier work on a simdgroup's tiles before the products that follow.
    pub(super) fn fence(&self, simd: usize) {
        self.touched[simd].set(false);
    }

    /// A product that adds to a simdgroup's tiles begins, unless a fence is missing.
    pub(super) fn begin_product(&mut self, simd: usize) -> bool {
        self.products[simd] += 1;
        !self.touched[simd].get()
    }

    /// It has ended.
    pub(super) fn end_product(&mut self, simd: usize) {
        self.products[simd] -= 1;
    }

    /// Adds `left right` to a simdgroup's tile: `left` is `[rows, terms]`, `right` `[terms, columns]`,
    /// and each sum's terms are added in their order.
    pub(super) fn add_product(
        &mut self,
        simd: usize,
        element: usize,
        left: &[f32],
        right: &[f32],
        terms: usize,
    ) {
        let count = right.len() / terms;
        let mut sums = [0.0; ELEMENTS];
        let sums = &mut sums[..count];
        for (cells, left) in self.tile(element, simd).chunks(count).zip(left.chunks(terms)) {
            sums.iter_mut().zip(cells).for_each(|(sum, cell)| *sum = f32::from_bits(cell.get()));
            add_terms(sums, left, right);
            sums.iter().zip(cells).for_each(|(sum, cell)| cell.set(sum.to_bits()));
        }
    }

    /// A simdgroup's tile to a slot; whether it is set.
    pub(super) fn load_tile(&self, tiles: &Tiles, simd: usize, element: usize, d: Slot) -> bool {
        self.touched[simd].set(true);
        let from = self.tile(element, simd);
        tiles.of(d, simd).iter().zip(from).for_each(|(d, from)| d.set(from.get()));
        self.set[element * (self.threads / SIMD) + simd] != 0
    }

    /// A slot to a simdgroup's tile.
    pub(super) fn store_tile(&mut self, tiles: &Tiles, simd: usize, element: usize, v: Slot) {
        self.set[element * (self.threads / SIMD) + simd] = !0;
        self.touched[simd].set(true);
        let to = self.tile(element, simd);
        to.iter().zip(tiles.of(v, simd)).for_each(|(to, v)| to.set(v.get()));
    }
}

/// The active lanes of one column to another.
fn copy(mask: &Mask, d: &[Cell<u32>], from: &[Cell<u32>]) {
    match &mask.list {
        None => {
            let run = mask.start..mask.end;
            d[run.clone()].iter().zip(&from[run]).for_each(|(d, from)| d.set(from.get()));
        }
        Some(list) => {
            list.iter().map(|l| usize::from(*l)).for_each(|l| d[l].set(from[l].get()));
        }
    }
}
