//! Loads, stores, atomics and asynchronous copies by the active lanes, each element checked.

use super::lanes::{Columns, Mask, SIMD};
use super::memory::{Buffer, Memory, Shared, half, word};
use super::ops::{Array, Col, Slot};
use super::order::{Order, WIDE};
use super::report::{Stop, Why};
use super::run::State;
use super::tiles::combine;
use crate::instr::BinaryOp;
use crate::ir::{AtomicOp, Place, Reduce, swizzle};
use crate::types::{Scalar, Tile};

/// A refused access, before the array's name is known.
pub(super) struct Refused {
    thread: usize,
    how: How,
}

enum How {
    Bounds { index: u64, len: usize },
    Misaligned { index: u32, lanes: usize },
    Element { index: usize, why: Why },
}

impl Refused {
    fn element(thread: usize, index: usize, why: Why) -> Self {
        Refused { thread, how: How::Element { index, why } }
    }

    #[cold]
    fn stop(self, verb: &'static str, on: Array) -> Stop {
        let thread = self.thread;
        let place = match on {
            Array::Buffer(i) => Place::Buffer(i),
            Array::Shared(i) => Place::Shared(i),
        };
        match self.how {
            How::Bounds { index, len } => Stop::Bounds { thread, verb, place, index, len },
            How::Misaligned { index, lanes } => {
                Stop::Misaligned { thread, verb, place, index, lanes }
            }
            How::Element { index, why } => Stop::Element { thread, verb, place, index, why },
        }
    }
}

/// Checks every active lane's index of `lanes` elements.
#[inline(always)]
fn bounds(
    columns: &Columns,
    mask: &Mask,
    index: Col,
    lanes: usize,
    len: usize,
) -> Result<(), Refused> {
    let index = columns.of(index);
    let within = |thread: usize| {
        let at = index[thread].get();
        // Vectors have 2, 4, 8 or 16 lanes.
        (at as usize + lanes <= len) & (at & (lanes as u32 - 1) == 0)
    };
    if mask.all_of(within) {
        return Ok(());
    }
    mask.each(|thread| {
        let at = index[thread].get();
        // `lanes` is at most 16, so this does not overflow.
        if at as usize + lanes > len {
            return Err(Refused { thread, how: How::Bounds { index: u64::from(at), len } });
        }
        if lanes > 1 && !at.is_multiple_of(lanes as u32) {
            return Err(Refused { thread, how: How::Misaligned { index: at, lanes } });
        }
        Ok(())
    })
}

/// Loads whose indices have been checked, from what no thread writes.
#[inline(always)]
fn gather(columns: &Columns, mask: &Mask, index: Col, d: &[Col], read: impl Fn(usize) -> u32) {
    let index = columns.of(index);
    for (i, d) in d.iter().enumerate() {
        let d = columns.of(*d);
        let _ = mask.each(|lane| {
            d[lane].set(read(index[lane].get() as usize + i));
            Ok::<(), ()>(())
        });
    }
}

fn load_input(columns: &Columns, mask: &Mask, buffer: &Buffer<'_>, index: Col, d: &[Col]) {
    let bytes = &*buffer.bytes;
    match buffer.scalar {
        Scalar::F32 | Scalar::U32 | Scalar::I32 => {
            gather(columns, mask, index, d, |i| word(bytes, i));
        }
        Scalar::F16 | Scalar::BF16 | Scalar::U16 => {
            gather(columns, mask, index, d, |i| half(bytes, i));
        }
        Scalar::I16 => gather(columns, mask, index, d, |i| half(bytes, i) as i16 as u32),
        Scalar::U8 | Scalar::Bool => gather(columns, mask, index, d, |i| u32::from(bytes[i])),
        Scalar::I8 => gather(columns, mask, index, d, |i| bytes[i] as i8 as u32),
    }
}

#[inline(always)]
fn load<M: Memory>(
    memory: &mut M,
    order: &Order,
    columns: &Columns,
    mask: &Mask,
    (index, d): (Col, &[Col]),
) -> Result<(), Refused> {
    let index = columns.of(index);
    if let [d] = d {
        let d = columns.of(*d);
        return each_lane(mask, |lane| {
            let from = index[lane].get() as usize;
            memory.reads(from, order, lane as u64).map_err(|why| (lane, from, why))?;
            d[lane].set(memory.get(from));
            Ok(())
        });
    }
    each_lane(mask, |lane| {
        let from = index[lane].get() as usize;
        for (i, d) in d.iter().enumerate() {
            let refused = |why| (lane, from + i, why);
            memory.reads(from + i, order, lane as u64).map_err(refused)?;
            columns.of(*d)[lane].set(memory.get(from + i));
        }
        Ok(())
    })
}

/// Calls `f` on each lane until an element is refused. Lanes are most often a run: a loop of its
/// own, into which `f` is inlined.
#[inline(always)]
fn each_lane(
    mask: &Mask,
    mut f: impl FnMut(usize) -> Result<(), (usize, usize, Why)>,
) -> Result<(), Refused> {
    let mut list = mask.list.as_deref().unwrap_or_default().iter();
    let (mut at, end) = (mask.start, if mask.list.is_some() { mask.start } else { mask.end });
    loop {
        let lane = if at < end {
            at += 1;
            at - 1
        } else {
            match list.next() {
                Some(lane) => usize::from(*lane),
                None => return Ok(()),
            }
        };
        f(lane).map_err(|(thread, index, why)| Refused::element(thread, index, why))?;
    }
}

#[inline(always)]
fn store<M: Memory>(
    memory: &mut M,
    order: &Order,
    columns: &Columns,
    mask: &Mask,
    (index, v): (Col, &[Col]),
) -> Result<(), Refused> {
    let index = columns.of(index);
    each_lane(mask, |lane| {
        let to = index[lane].get() as usize;
        for (i, v) in v.iter().enumerate() {
            let refused = |why| (lane, to + i, why);
            memory.writes(to + i, order, lane as u64).map_err(refused)?;
            memory.put(to + i, columns.of(*v)[lane].get());
        }
        Ok(())
    })
}

/// Where a tile lies in memory.
struct Lies {
    first: u32,
    stride: u32,
    transposed: bool,
    swizzled: bool,
}

impl Lies {
    /// Calls `f` with each element's number in the tile and in memory.
    fn each(
        &self,
        tile: Tile,
        simd: usize,
        memory: &mut dyn Memory,
        mut f: impl FnMut(&mut dyn Memory, usize, usize) -> Result<(), Why>,
    ) -> Result<(), Refused> {
        let (thread, cols, len) = (simd * SIMD, usize::from(tile.cols), memory.len());
        for i in 0..tile.elements() {
            let (r, c) = (i / cols, i % cols);
            let (far, near) = if self.transposed { (c, r) } else { (r, c) };
            let at = u64::from(self.first) + far as u64 * u64::from(self.stride) + near as u64;
            if at >= len as u64 {
                return Err(Refused { thread, how: How::Bounds { index: at, len } });
            }
            let at = if self.swizzled { swizzle(at as u32) as usize } else { at as usize };
            if at >= len {
                return Err(Refused { thread, how: How::Bounds { index: at as u64, len } });
            }
            f(memory, i, at).map_err(|why| Refused::element(thread, at, why))?;
        }
        Ok(())
    }
}

/// An asynchronous copy that has begun.
pub(super) struct Flight {
    thread: u16,
    batch: u32,
    to: u32,
    index: u32,
    lanes: u32,
    /// The operation that began it.
    pub(super) at: usize,
}

/// The copies of a threadgroup.
pub(super) struct Copies {
    pub(super) flights: Vec<Flight>,
    /// By thread: batches closed so far.
    closed: Vec<u32>,
}

impl Copies {
    pub(super) fn new(threads: usize) -> Self {
        Copies { flights: vec![], closed: vec![0; threads] }
    }

    pub(super) fn clear(&mut self) {
        self.flights.clear();
        self.closed.fill(0);
    }

    pub(super) fn commit(&mut self, mask: &Mask) {
        let _ = mask.each(|lane| {
            self.closed[lane] += 1;
            Ok::<(), ()>(())
        });
    }

    /// All but each active lane's latest `pending` batches end.
    pub(super) fn wait(&mut self, mask: &Mask, pending: u8, shared: &mut [Shared], order: &Order) {
        let mut done = vec![0; self.closed.len()];
        let _ = mask.each(|lane| {
            done[lane] = self.closed[lane].saturating_sub(u32::from(pending));
            Ok::<(), ()>(())
        });
        self.flights.retain(|flight| {
            let thread = usize::from(flight.thread);
            let lands = flight.batch < done[thread];
            if lands {
                let elements = flight.index..flight.index + flight.lanes;
                let to = &mut shared[flight.to as usize];
                elements.for_each(|i| to.arrive(i as usize, order, thread));
            }
            !lands
        });
    }
}

impl State<'_> {
    pub(super) fn load(
        &mut self,
        mask: &Mask,
        from: Array,
        index: Col,
        d: &[Col],
    ) -> Result<(), Stop> {
        let stop = |refused: Refused| refused.stop("loads", from);
        let (columns, order) = (&self.columns, &self.order);
        match from {
            Array::Buffer(i) => {
                let buffer = &mut self.buffers[i as usize];
                bounds(columns, mask, index, d.len(), buffer.len).map_err(stop)?;
                self.stats.loaded += (mask.count() * d.len() * buffer.scalar.bytes()) as u64;
                if buffer.is_input() {
                    load_input(columns, mask, buffer, index, d);
                    return Ok(());
                }
                load(buffer, order, columns, mask, (index, d)).map_err(stop)
            }
            Array::Shared(i) => {
                let shared = &mut self.shared[i as usize];
                bounds(columns, mask, index, d.len(), shared.len()).map_err(stop)?;
                load(shared, order, columns, mask, (index, d)).map_err(stop)
            }
        }
    }

    pub(super) fn store(
        &mut self,
        mask: &Mask,
        to: Array,
        index: Col,
        v: &[Col],
    ) -> Result<(), Stop> {
        let stop = |refused: Refused| refused.stop("stores", to);
        let (columns, order) = (&self.columns, &self.order);
        match to {
            Array::Buffer(i) => {
                let buffer = &mut self.buffers[i as usize];
                bounds(columns, mask, index, v.len(), buffer.len).map_err(stop)?;
                self.stats.stored += (mask.count() * v.len() * buffer.scalar.bytes()) as u64;
                store(buffer, order, columns, mask, (index, v)).map_err(stop)
            }
            Array::Shared(i) => {
                let shared = &mut self.shared[i as usize];
                bounds(columns, mask, index, v.len(), shared.len()).map_err(stop)?;
                store(shared, order, columns, mask, (index, v)).map_err(stop)
            }
        }
    }

    /// One lane after the other, in their order.
    pub(super) fn atomic(
        &mut self,
        mask: &Mask,
        (op, on): (AtomicOp, Array),
        (index, v, d): (Col, Col, Col),
    ) -> Result<(), Stop> {
        let stop = |refused: Refused| refused.stop("changes", on);
        let (columns, order) = (&self.columns, &mut self.order);
        let (memory, scalar): (&mut dyn Memory, Scalar) = match on {
            Array::Buffer(i) => {
                let buffer = &mut self.buffers[i as usize];
                let (scalar, count) = (buffer.scalar, mask.count() as u64);
                self.stats.loaded += count * scalar.bytes() as u64;
                self.stats.stored += count * scalar.bytes() as u64;
                (buffer, scalar)
            }
            Array::Shared(i) => {
                let scalar = self.kernel.shared[i as usize].ty.scalar();
                (&mut self.shared[i as usize], scalar)
            }
        };
        bounds(columns, mask, index, 1, memory.len()).map_err(stop)?;
        mask.each(|lane| {
            let at = columns.of(index)[lane].get();
            let i = at as usize;
            let refused = |why| Refused::element(lane, i, why);
            memory.changes(i, order, lane as u64).map_err(refused)?;
            if let Array::Buffer(buffer) = on {
                order.atomic(buffer, at, lane);
            }
            let (old, v) = (memory.get(i), columns.of(v)[lane].get());
            let new = match op {
                AtomicOp::Add => BinaryOp::Add.eval(scalar, old, v).unwrap_or(0),
                AtomicOp::Min => combine(Reduce::Min, scalar, old, v),
                AtomicOp::Max => combine(Reduce::Max, scalar, old, v),
                AtomicOp::Exchange => v,
            };
            memory.put(i, new);
            columns.of(d)[lane].set(old);
            Ok(())
        })
        .map_err(stop)
    }

    pub(super) fn copy(
        &mut self,
        mask: &Mask,
        (to, to_index): (u32, Col),
        (from, from_index): (u32, Col),
        lanes: u32,
        keep: Option<Col>,
    ) -> Result<(), Stop> {
        let (onto, out_of) = (Array::Shared(to), Array::Buffer(from));
        let (columns, order) = (&self.columns, &self.order);
        let (shared, buffer) = (&mut self.shared[to as usize], &mut self.buffers[from as usize]);
        let width = lanes as usize;
        bounds(columns, mask, to_index, width, shared.len())
            .map_err(|refused| refused.stop("copies to", onto))?;
        let keeps = |lane: usize| keep.is_none_or(|keep| columns.of(keep)[lane].get() != 0);
        let parts = mask.split(keeps);
        let reading = match &parts {
            None => Some(mask),
            Some((kept, _)) => kept.as_ref(),
        };
        if let Some(reading) = reading {
            bounds(columns, reading, from_index, width, buffer.len)
                .map_err(|refused| refused.stop("copies from", out_of))?;
            self.stats.loaded += (reading.count() * width * buffer.scalar.bytes()) as u64;
        }
        mask.each(|lane| {
            let (keep, index) = (keeps(lane), columns.of(to_index)[lane].get());
            for i in 0..width {
                let (source, target) =
                    (columns.of(from_index)[lane].get() as usize + i, index as usize + i);
                let bits = if keep {
                    let read = buffer.reads(source, order, lane as u64);
                    let refused = |why| Refused::element(lane, source, why);
                    read.map_err(|why| refused(why).stop("copies from", out_of))?;
                    buffer.peek(source)
                } else {
                    0
                };
                let begun = shared.depart(target, order, lane, bits);
                let refused = |why| Refused::element(lane, target, why);
                begun.map_err(|why| refused(why).stop("copies to", onto))?;
            }
            let (thread, batch) = (lane as u16, self.copies.closed[lane]);
            let flight = Flight { thread, batch, to, index, lanes, at: self.at };
            self.copies.flights.push(flight);
            Ok(())
        })
    }

    pub(super) fn tile_load(
        &mut self,
        mask: &Mask,
        (tile, from): (Tile, Array),
        (index, stride, transposed, swizzled): (Col, Col, bool, bool),
        d: Slot,
    ) -> Result<(), Stop> {
        self.count_tiles(mask, (tile, from), false);
        mask.simds(|simd| {
            let lies = Lies {
                first: self.uniform(index, simd, "index")?,
                stride: self.uniform(stride, simd, "stride")?,
                transposed,
                swizzled,
            };
            let cells = self.tiles.of(d, simd);
            let (order, who) = (&self.order, (simd * SIMD) as u64 | WIDE);
            let memory: &mut dyn Memory = match from {
                Array::Buffer(i) => &mut self.buffers[i as usize],
                Array::Shared(i) => &mut self.shared[i as usize],
            };
            let read = lies.each(tile, simd, memory, |memory, i, at| {
                memory.reads(at, order, who)?;
                cells[i].set(memory.get(at));
                Ok(())
            });
            read.map_err(|refused| refused.stop("loads a tile at", from))
        })
    }

    pub(super) fn tile_store(
        &mut self,
        mask: &Mask,
        (tile, to): (Tile, Array),
        (index, stride): (Col, Col),
        v: Slot,
    ) -> Result<(), Stop> {
        self.count_tiles(mask, (tile, to), true);
        mask.simds(|simd| {
            let lies = Lies {
                first: self.uniform(index, simd, "index")?,
                stride: self.uniform(stride, simd, "stride")?,
                transposed: false,
                swizzled: false,
            };
            let cells = self.tiles.of(v, simd);
            let (order, who) = (&self.order, (simd * SIMD) as u64 | WIDE);
            let memory: &mut dyn Memory = match to {
                Array::Buffer(i) => &mut self.buffers[i as usize],
                Array::Shared(i) => &mut self.shared[i as usize],
            };
            let wrote = lies.each(tile, simd, memory, |memory, i, at| {
                memory.writes(at, order, who)?;
                memory.put(at, cells[i].get());
                Ok(())
            });
            wrote.map_err(|refused| refused.stop("stores a tile at", to))
        })
    }

    fn count_tiles(&mut self, mask: &Mask, (tile, on): (Tile, Array), store: bool) {
        if let Array::Buffer(_) = on {
            let bytes = (mask.count() / SIMD * tile.elements() * tile.scalar.bytes()) as u64;
            if store {
                self.stats.stored += bytes;
            } else {
                self.stats.loaded += bytes;
            }
        }
    }
}
