//! Products of warpgroups: what they read and add is computed when they begin, and belongs to them
//! until they are waited for.
//!
//! Whatever would make a difference on a device is refused: operands that are not written, not
//! fenced, or not behind a barrier; operands overwritten and accumulators touched before the wait;
//! accumulators touched before the product without a `wgmma_fence` between. So when within that
//! time the device reads, and when it adds, decides nothing.

use super::arith::widen_f16;
use super::lanes::{Mask, SIMD};
use super::memory::Shared;
use super::ops::{Col, Slot};
use super::order::{ALL, Order};
use super::report::{Stop, Why};
use super::run::State;
use crate::instr::cast;
use crate::ir::{Place, ROW, swizzled};
use crate::types::Scalar;

/// Simdgroups of a warpgroup.
const SIMDS: usize = 4;
/// Rows of a simdgroup's part of a product.
const ROWS: usize = 16;

/// A product's operands and accumulators, as the program names them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) scalar: Scalar,
    /// A register array of this many tiles.
    pub(super) sum: u32,
    pub(super) tiles: u32,
    pub(super) left: Left,
    /// A shared array, and the column of an index into it.
    pub(super) b: (u32, Col),
}

/// The left side of a product.
#[derive(Debug, Clone, Copy)]
pub(super) enum Left {
    /// A shared array, and the column of an index into it.
    Block((u32, Col)),
    /// The tiles of each simdgroup's rows.
    Tiles([Slot; 4]),
}

/// A product that has begun.
pub(super) struct Flight {
    warpgroup: usize,
    batch: u32,
    sum: u32,
    /// Its operands in shared memory: the array, the first element, the number of elements.
    reads: Vec<(u32, usize, usize)>,
    /// The operation that began it.
    pub(super) at: usize,
}

/// The products of a threadgroup.
pub(super) struct Products {
    pub(super) flights: Vec<Flight>,
    /// By warpgroup: batches closed so far.
    closed: Vec<u32>,
}

impl Products {
    pub(super) fn new(threads: usize) -> Self {
        Products { flights: vec![], closed: vec![0; threads.div_ceil(SIMDS * SIMD)] }
    }

    pub(super) fn clear(&mut self) {
        self.flights.clear();
        self.closed.fill(0);
    }
}

/// The active warpgroups, of which every lane must be.
fn warpgroups(mask: &Mask) -> Result<Vec<usize>, Stop> {
    let mut simds = vec![];
    mask.simds(|simd| {
        simds.push(simd);
        Ok::<(), Stop>(())
    })?;
    let mut found = vec![];
    for some in simds.chunk_by(|a, b| a / SIMDS == b / SIMDS) {
        let first = some[0] / SIMDS * SIMDS;
        let missing = (first..first + SIMDS).find(|simd| !some.contains(simd));
        if let Some(simd) = missing {
            let (what, scope) = ("product", "warpgroup");
            return Err(Stop::Divergent { idle: simd * SIMD, what, scope });
        }
        found.push(first / SIMDS);
    }
    Ok(found)
}

/// A number of 16 bits.
fn wide(scalar: Scalar, bits: u32) -> f32 {
    f32::from_bits(match scalar {
        Scalar::F16 => widen_f16(bits),
        _ => cast(scalar, Scalar::F32, bits),
    })
}

/// The numbers of a block of `rows` rows, without the swizzle.
fn numbers(shared: &Shared, first: usize, rows: usize, scalar: Scalar) -> Vec<f32> {
    let number = |i: usize| {
        let (row, col) = ((i / ROW as usize) as u32, (i % ROW as usize) as u32);
        wide(scalar, shared.peek(first + swizzled(row, col) as usize))
    };
    (0..rows * ROW as usize).map(number).collect()
}

/// The columns of `rows`, each row of `terms` terms, one after another.
fn turned(rows: &[f32], terms: usize) -> Vec<f32> {
    let count = rows.len() / terms;
    let mut turned = vec![0.0; rows.len()];
    for (r, row) in rows.chunks(terms).enumerate() {
        for (k, x) in row.iter().enumerate() {
            turned[k * count + r] = *x;
        }
    }
    turned
}

/// Adds to each sum the products of `left`'s terms with those of its own row, one after another:
/// many sums at a time, since each waits for its last.
#[inline(always)]
pub(super) fn add_terms(sums: &mut [f32], left: &[f32], turned: &[f32]) {
    for (x, column) in left.iter().zip(turned.chunks(sums.len())) {
        for (sum, y) in sums.iter_mut().zip(column) {
            *sum += x * y;
        }
    }
}

/// `y = x w'`: rows of `width` terms, which are added one after another, as products in kernels are.
pub fn product(x: &[f32], w: &[f32], width: usize, y: &mut [f32]) {
    y.fill(0.0);
    if width == 0 || w.is_empty() {
        return;
    }
    let turned = turned(w, width);
    for (y, x) in y.chunks_mut(w.len() / width).zip(x.chunks(width)) {
        add_terms(y, x, &turned);
    }
}

impl State<'_> {
    /// A batch of each active warpgroup ends.
    pub(super) fn wgmma_commit(&mut self, mask: &Mask) -> Result<(), Stop> {
        warpgroups(mask)?.into_iter().for_each(|at| self.products.closed[at] += 1);
        Ok(())
    }

    /// Orders the active warpgroups' work on their accumulators before the products that follow.
    pub(super) fn wgmma_fence(&mut self, mask: &Mask) -> Result<(), Stop> {
        for warpgroup in warpgroups(mask)? {
            for simd in warpgroup * SIMDS..(warpgroup + 1) * SIMDS {
                self.registers.iter().for_each(|array| array.fence(simd));
            }
        }
        Ok(())
    }

    /// All but each active warpgroup's latest `pending` batches end.
    pub(super) fn wgmma_wait(&mut self, mask: &Mask, pending: u8) -> Result<(), Stop> {
        let waiting = warpgroups(mask)?;
        let Products { flights, closed } = &mut self.products;
        let (shared, registers, order) = (&mut self.shared, &mut self.registers, &self.order);
        flights.retain(|flight| {
            let done = closed[flight.warpgroup].saturating_sub(u32::from(pending));
            let ends = waiting.contains(&flight.warpgroup) && flight.batch < done;
            if ends {
                let thread = flight.warpgroup * SIMDS * SIMD;
                for (array, first, len) in &flight.reads {
                    let array = &mut shared[*array as usize];
                    (*first..first + len)
                        .for_each(|i| array.give_back(i, order, thread as u64 | ALL));
                }
                let simds = flight.warpgroup * SIMDS..(flight.warpgroup + 1) * SIMDS;
                simds.for_each(|simd| registers[flight.sum as usize].end_product(simd));
            }
            !ends
        });
        Ok(())
    }

    /// Each active warpgroup begins a product.
    pub(super) fn wgmma(&mut self, mask: &Mask, product: &Product) -> Result<(), Stop> {
        for warpgroup in warpgroups(mask)? {
            let (rows, columns) = (SIMDS * ROWS, ROWS * product.tiles as usize);
            let a = match product.left {
                Left::Block(a) => Some(self.operand(warpgroup, a, rows)?),
                Left::Tiles(_) => None,
            };
            let b = self.operand(warpgroup, product.b, columns)?;
            let of = |block: (u32, usize, usize), rows: usize| {
                numbers(&self.shared[block.0 as usize], block.1, rows, product.scalar)
            };
            let left = match product.left {
                Left::Block(_) => a.map_or(vec![], |a| of(a, rows)),
                Left::Tiles(tiles) => self.held(warpgroup, tiles, product.scalar),
            };
            let right = of(b, columns);
            let blocks = right.chunks(ROWS * ROW as usize);
            let right: Vec<Vec<f32>> = blocks.map(|block| turned(block, ROW as usize)).collect();
            for (s, left) in left.chunks(ROWS * ROW as usize).enumerate() {
                let simd = warpgroup * SIMDS + s;
                let place = Place::Register(product.sum);
                let registers = &mut self.registers[product.sum as usize];
                if let Some(index) = registers.unset_tile(simd) {
                    let (thread, verb, why) = (simd * SIMD, "adds to", Why::Uninitialised);
                    return Err(Stop::Element { thread, verb, place, index, why });
                }
                if !registers.begin_product(simd) {
                    let (thread, verb, why) = (simd * SIMD, "adds to", Why::Unfenced);
                    return Err(Stop::Element { thread, verb, place, index: 0, why });
                }
                for (j, right) in right.iter().enumerate() {
                    registers.add_product(simd, j, left, right, ROW as usize);
                }
            }
            let batch = self.products.closed[warpgroup];
            let reads = a.into_iter().chain([b]).collect();
            let (sum, at) = (product.sum, self.at);
            self.products.flights.push(Flight { warpgroup, batch, sum, reads, at });
        }
        Ok(())
    }

    /// The rows of a warpgroup's left side that its simdgroups hold: of each, tiles one behind
    /// another.
    fn held(&self, warpgroup: usize, tiles: [Slot; 4], scalar: Scalar) -> Vec<f32> {
        let mut rows = vec![0.0; SIMDS * ROWS * ROW as usize];
        for (s, rows) in rows.chunks_mut(ROWS * ROW as usize).enumerate() {
            for (t, slot) in tiles.into_iter().enumerate() {
                let cells = self.tiles.of(slot, warpgroup * SIMDS + s);
                for (row, cells) in rows.chunks_mut(ROW as usize).zip(cells.chunks(ROWS)) {
                    let terms = &mut row[t * ROWS..][..ROWS];
                    terms.iter_mut().zip(cells).for_each(|(x, bits)| *x = wide(scalar, bits.get()));
                }
            }
        }
        rows
    }

    /// Lends a block to a product: the array, its first element, and how many.
    fn operand(
        &mut self,
        warpgroup: usize,
        (array, index): (u32, Col),
        rows: usize,
    ) -> Result<(u32, usize, usize), Stop> {
        let thread = warpgroup * SIMDS * SIMD;
        let lanes = &self.columns.of(index)[thread..][..SIMDS * SIMD];
        let first = lanes[0].get();
        let fail = |lane: usize, message: String| Stop::Thread { thread: thread + lane, message };
        if let Some(lane) = lanes.iter().position(|lane| lane.get() != first) {
            let found = lanes[lane].get();
            let message = format!(
                "a product's block must be the same for the warpgroup: {first} expected, {found} found"
            );
            return Err(fail(lane, message));
        }
        if !first.is_multiple_of(8 * ROW) {
            let message = format!("a block at index {first}: a multiple of {} expected", 8 * ROW);
            return Err(fail(0, message));
        }
        let (place, verb, len) = (Place::Shared(array), "multiplies", rows * ROW as usize);
        let (shared, order) = (&mut self.shared[array as usize], &self.order);
        let first = first as usize;
        if first + len > shared.size() {
            let (index, len) = ((first + len - 1) as u64, shared.size());
            return Err(Stop::Bounds { thread, verb, place, index, len });
        }
        for index in first..first + len {
            let stop = |why| Stop::Element { thread, verb, place, index, why };
            shared.lend(index, order).map_err(stop)?;
        }
        Ok((array, first, len))
    }
}

/// Makes the active threads' writes ready for products after the next barrier.
pub(super) fn async_fence(order: &mut Order, mask: &Mask) {
    let mut threads = vec![];
    let _ = mask.each(|lane| {
        threads.push(lane);
        Ok::<(), ()>(())
    });
    order.async_fence(&threads);
}
