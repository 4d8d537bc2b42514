//! One launch: threadgroup after threadgroup, all threads of a group in step through the program.

use super::access::Copies;
use super::lanes::{Columns, Mask, SIMD};
use super::memory::{Buffer, Shared};
use super::ops::{Col, Fixed, Index, Op, Program};
use super::order::Order;
use super::products::{self, Products};
use super::registers::Registers;
use super::report::{self, Stop};
use super::tiles::{Tiles, combine};
use super::{Stats, arith};
use crate::ir::{Kernel, Reduce, SimdOp};
use crate::types::Scalar;
use crate::verify::Fault;

/// All that a launch changes.
pub(super) struct State<'a> {
    pub(super) kernel: &'a Kernel,
    program: &'a Program,
    threads: usize,
    grid: [u32; 3],
    group: [u32; 3],
    pub(super) columns: Columns,
    pub(super) tiles: Tiles,
    pub(super) registers: Vec<Registers>,
    pub(super) shared: Vec<Shared>,
    /// By parameter; arguments are empty buffers.
    pub(super) buffers: Vec<Buffer<'a>>,
    pub(super) order: Order,
    pub(super) copies: Copies,
    pub(super) products: Products,
    pub(super) stats: Stats,
    budget: u64,
    /// The operation that is executed.
    pub(super) at: usize,
}

impl<'a> State<'a> {
    pub(super) fn new(
        kernel: &'a Kernel,
        program: &'a Program,
        grid: [u32; 3],
        buffers: Vec<Buffer<'a>>,
        budget: u64,
    ) -> Self {
        let threads = kernel.launch.threads as usize;
        let any = |wanted: fn(&Op) -> bool| program.ops.iter().any(wanted);
        let copies = any(|op| matches!(op, Op::CopyAsync { .. }));
        let fences = any(|op| matches!(op, Op::Fence));
        let products = any(|op| matches!(op, Op::Wgmma(_)));
        let shared = kernel.shared.iter().zip(&program.atomic_shared);
        State {
            kernel,
            program,
            threads,
            grid,
            group: [0; 3],
            columns: Columns::new(program.columns, threads),
            tiles: Tiles::new(program.tiles, threads / SIMD),
            registers: kernel.registers.iter().map(|r| Registers::new(r, threads)).collect(),
            shared: shared
                .map(|(array, atomic)| Shared::new(array, *atomic, copies, products))
                .collect(),
            buffers,
            order: Order::new(threads, fences),
            copies: Copies::new(threads),
            products: Products::new(threads),
            stats: Stats::default(),
            budget,
            at: 0,
        }
    }

    /// Runs the whole grid. `bits` gives the constants' and arguments' registers.
    pub(super) fn launch(mut self, bits: &dyn Fn(Fixed) -> u32) -> Result<Stats, Fault> {
        for (col, fixed) in self.program.fixed.iter().enumerate() {
            let column = self.columns.of(col as Col);
            for (thread, cell) in column.iter().enumerate() {
                cell.set(match fixed {
                    Fixed::Thread => thread as u32,
                    Fixed::Lane => (thread % SIMD) as u32,
                    Fixed::Simd => (thread / SIMD) as u32,
                    Fixed::Groups(axis) => self.grid[usize::from(*axis)],
                    Fixed::Group(_) => 0,
                    Fixed::Bits(bits) => *bits,
                    Fixed::Constant(_) | Fixed::Argument(_) => bits(*fixed),
                });
            }
        }
        let [x, y, z] = self.grid.map(|n| n as usize);
        let all = Mask::all(self.threads);
        for linear in 0..x * y * z {
            self.group = report::place_in(linear, self.grid);
            self.one(&all).map_err(|stop| self.fault(&stop))?;
        }
        Ok(self.stats)
    }

    fn fault(&self, stop: &Stop) -> Fault {
        let (visited, source) = match self.program.places.get(self.at) {
            Some((visited, source)) => (*visited, *source),
            None => (usize::MAX, Default::default()),
        };
        Fault {
            kernel: self.kernel.name.clone(),
            line: report::line(self.kernel, visited),
            source: self.kernel.source(source).to_owned(),
            message: stop.message(self.kernel, self.group, self.grid),
        }
    }

    /// One threadgroup.
    fn one(&mut self, all: &Mask) -> Result<(), Stop> {
        for (col, fixed) in self.program.fixed.iter().enumerate() {
            if let Fixed::Group(axis) = fixed {
                self.columns.fill(col as Col, self.group[usize::from(*axis)]);
            }
        }
        self.registers.iter_mut().for_each(Registers::clear);
        self.order.group();
        self.copies.clear();
        self.products.clear();
        self.block(0, self.program.ops.len(), all)?;
        self.stats.groups += 1;
        if let Some(flight) = self.copies.flights.first() {
            self.at = flight.at;
            return Err(Stop::Launch(
                "an asynchronous copy that nothing waits for; hint: copy_commit, then copy_wait"
                    .to_owned(),
            ));
        }
        if let Some(flight) = self.products.flights.first() {
            self.at = flight.at;
            let hint = "hint: wgmma_commit, then wgmma_wait";
            return Err(Stop::Launch(format!("a product that nothing waits for; {hint}")));
        }
        self.within_budget()
    }

    fn within_budget(&self) -> Result<(), Stop> {
        if self.stats.instructions <= self.budget {
            return Ok(());
        }
        Err(Stop::Launch(format!(
            "more than {} instructions executed: a runaway loop; hint: check the loop's bounds, or allow more",
            self.budget
        )))
    }

    fn block(&mut self, start: usize, end: usize, mask: &Mask) -> Result<(), Stop> {
        let program = self.program;
        let count = mask.count() as u64;
        let mut at = start;
        while at < end {
            self.at = at;
            self.stats.instructions += count;
            match &program.ops[at] {
                Op::For { index, start, stop, step, end } => {
                    self.turns(at, *end, mask, [*index, *start, *stop, *step])?;
                    at = *end;
                }
                Op::If { cond, otherwise, end } => {
                    let cond = self.columns.of(*cond);
                    match mask.split(|lane| cond[lane].get() != 0) {
                        None => self.block(at + 1, *otherwise, mask)?,
                        Some((yes, no)) => {
                            if let Some(yes) = yes {
                                self.block(at + 1, *otherwise, &yes)?;
                            }
                            if let Some(no) = no {
                                self.block(*otherwise, *end, &no)?;
                            }
                        }
                    }
                    at = *end;
                }
                op => {
                    self.step(op, mask)?;
                    at += 1;
                }
            }
        }
        Ok(())
    }

    /// A loop; a lane leaves it when its own index reaches its own bound.
    fn turns(&mut self, at: usize, end: usize, mask: &Mask, columns: [Col; 4]) -> Result<(), Stop> {
        let [index, start, stop, step] = columns;
        let of = |columns: &Columns, col: Col, lane: usize| columns.of(col)[lane].get();
        mask.each(|lane| {
            if of(&self.columns, step, lane) == 0 {
                let message = "a loop with step 0 never ends".to_owned();
                return Err(Stop::Thread { thread: lane, message });
            }
            self.columns.of(index)[lane].set(of(&self.columns, start, lane));
            Ok(())
        })?;
        let mut fewer: Option<Mask> = None;
        loop {
            let mask = fewer.as_ref().unwrap_or(mask);
            let (indices, stops) = (self.columns.of(index), self.columns.of(stop));
            match mask.split(|lane| indices[lane].get() < stops[lane].get()) {
                None => {}
                Some((None, _)) => return Ok(()),
                Some((still, _)) => {
                    fewer = still;
                    continue;
                }
            }
            self.block(at + 1, end, mask)?;
            self.at = at;
            self.stats.instructions += mask.count() as u64;
            self.within_budget()?;
            let (indices, steps) = (self.columns.of(index), self.columns.of(step));
            if let Err(lane) = arith::advance(mask, indices, steps) {
                let message = format!(
                    "the loop's index passes 2^32 after {}, so the loop would never end",
                    indices[lane].get()
                );
                return Err(Stop::Thread { thread: lane, message });
            }
        }
    }

    fn step(&mut self, op: &Op, mask: &Mask) -> Result<(), Stop> {
        let columns = &self.columns;
        let undefined = |name: &str, scalar: Scalar, e: arith::Undefined| {
            let show = |bits: u32| match scalar {
                Scalar::I32 => (bits as i32).to_string(),
                _ => bits.to_string(),
            };
            let why = format!("undefined arithmetic: {} {name} {}", show(e.a), show(e.b));
            Stop::Thread { thread: e.lane, message: why }
        };
        match op {
            Op::Unary { op, scalar, d, a } => {
                return arith::unary(columns, mask, *op, *scalar, (*d, *a))
                    .map_err(|e| undefined(op.name(), *scalar, e));
            }
            Op::Binary { op, scalar, d, a, b } => {
                return arith::binary(columns, mask, *op, *scalar, (*d, *a, *b))
                    .map_err(|e| undefined(op.name(), *scalar, e));
            }
            Op::Fma { d, a, b, c } => arith::fma(columns, mask, *d, [*a, *b, *c]),
            Op::Select { d, cond, yes, no } => {
                arith::select(columns, mask, *d, [*cond, *yes, *no]);
            }
            Op::Cast { from, to, d, a } => arith::convert(columns, mask, *from, *to, (*d, *a)),
            Op::Dot4 { d, a, b, acc } => arith::dots(columns, mask, *d, [*a, *b, *acc]),
            Op::FmaHalves { d, a, b, c } => arith::halves(columns, mask, *d, [*a, *b, *c]),
            Op::Lookup { d, codes, table } => arith::lookups(columns, mask, *d, *codes, table),
            Op::Load { from, index, d } => {
                return self.load(mask, *from, *index, d);
            }
            Op::Store { to, index, v } => return self.store(mask, *to, *index, v),
            Op::Atomic { op, on, index, v, d } => {
                return self.atomic(mask, (*op, *on), (*index, *v, *d));
            }
            Op::RegisterLoad { array, index, d } => {
                return self.register_load(mask, *array, *index, d);
            }
            Op::RegisterStore { array, index, v } => {
                return self.register_store(mask, *array, *index, v);
            }
            Op::Barrier => {
                if !mask.is_all(self.threads) {
                    let list = mask.list.as_deref().unwrap_or_default();
                    let active = |lane: &usize| match list {
                        [] => (mask.start..mask.end).contains(lane),
                        list => list.binary_search(&(*lane as u16)).is_ok(),
                    };
                    let idle = (0..self.threads).find(|lane| !active(lane)).unwrap_or(0);
                    return Err(Stop::Divergent { idle, what: "barrier", scope: "threadgroup" });
                }
                self.order.barrier();
                self.stats.barriers += 1;
            }
            Op::SimdBarrier => {
                self.order.tick();
                let barrier = mask.simds(|simd| {
                    self.order.simd_barrier(simd);
                    Ok(())
                });
                return barrier.map_err(|stop: Stop| stop.of("simdgroup barrier"));
            }
            Op::Fence => {
                let mut threads = vec![];
                let _ = mask.each(|lane| {
                    threads.push(lane);
                    Ok::<(), ()>(())
                });
                self.order.fence(threads.into_iter());
            }
            Op::Simd { op, scalar, d, a, lane } => {
                return self.simd(mask, (*op, *scalar), (*d, *a, *lane));
            }
            Op::CopyAsync { to, to_index, from, from_index, lanes, keep } => {
                return self.copy(mask, (*to, *to_index), (*from, *from_index), *lanes, *keep);
            }
            Op::CopyCommit => self.copies.commit(mask),
            Op::CopyWait(pending) => {
                self.copies.wait(mask, *pending, &mut self.shared, &self.order);
            }
            Op::Wgmma(product) => return self.wgmma(mask, product),
            Op::WgmmaFence => return self.wgmma_fence(mask),
            Op::WgmmaCommit => return self.wgmma_commit(mask),
            Op::WgmmaWait(pending) => return self.wgmma_wait(mask, *pending),
            Op::AsyncFence => products::async_fence(&mut self.order, mask),
            Op::For { .. } | Op::If { .. } => {}
            tile => return self.tile(tile, mask).map_err(|stop| stop.of("tile operation")),
        }
        Ok(())
    }

    fn register_load(
        &mut self,
        mask: &Mask,
        array: u32,
        index: Index,
        d: &[Col],
    ) -> Result<(), Stop> {
        let registers = &self.registers[array as usize];
        let unset = |thread: usize, element: usize| self.unset(thread, array, element);
        match index {
            Index::Known(i) => registers
                .load(&self.columns, mask, i as usize, d)
                .map_err(|thread| unset(thread, i as usize)),
            Index::Each(index) => mask.each(|lane| {
                let element = self.register_index(lane, array, index, "loads")?;
                match registers.load_lane(&self.columns, lane, element, d) {
                    true => Ok(()),
                    false => Err(unset(lane, element)),
                }
            }),
        }
    }

    fn register_store(
        &mut self,
        mask: &Mask,
        array: u32,
        index: Index,
        v: &[Col],
    ) -> Result<(), Stop> {
        match index {
            Index::Known(i) => {
                self.registers[array as usize].store(&self.columns, mask, i as usize, v);
                Ok(())
            }
            Index::Each(index) => mask.each(|lane| {
                let element = self.register_index(lane, array, index, "stores")?;
                self.registers[array as usize].store_lane(&self.columns, lane, element, v);
                Ok(())
            }),
        }
    }

    fn register_index(
        &self,
        thread: usize,
        array: u32,
        index: Col,
        verb: &'static str,
    ) -> Result<usize, Stop> {
        let (at, len) = (self.columns.of(index)[thread].get(), self.registers[array as usize].len);
        if (at as usize) < len {
            return Ok(at as usize);
        }
        let (place, index) = (crate::ir::Place::Register(array), u64::from(at));
        Err(Stop::Bounds { thread, verb, place, index, len })
    }

    fn unset(&self, thread: usize, array: u32, index: usize) -> Stop {
        let (place, why) = (crate::ir::Place::Register(array), report::Why::Uninitialised);
        Stop::Element { thread, verb: "loads", place, index, why }
    }

    /// Refuses a tile to which a product still adds.
    fn unfinished(
        &self,
        simd: usize,
        array: u32,
        index: usize,
        verb: &'static str,
    ) -> Result<(), Stop> {
        if self.registers[array as usize].is_free(simd) {
            return Ok(());
        }
        let (thread, why) = (simd * SIMD, report::Why::Unfinished);
        Err(Stop::Element { thread, verb, place: crate::ir::Place::Register(array), index, why })
    }

    /// The value that all lanes of a simdgroup agree on.
    pub(super) fn uniform(&self, col: Col, simd: usize, what: &str) -> Result<u32, Stop> {
        let lanes = &self.columns.of(col)[simd * SIMD..][..SIMD];
        let first = lanes[0].get();
        match lanes.iter().position(|lane| lane.get() != first) {
            None => Ok(first),
            Some(lane) => Err(Stop::Thread {
                thread: simd * SIMD + lane,
                message: format!(
                    "a tile's {what} must be the same in all lanes: {first} expected, {} found",
                    lanes[lane].get()
                ),
            }),
        }
    }

    fn simd(
        &mut self,
        mask: &Mask,
        (op, scalar): (SimdOp, Scalar),
        (d, a, lane): (Col, Col, Option<Col>),
    ) -> Result<(), Stop> {
        let columns = &self.columns;
        let exchange = mask.simds(|simd| {
            let of = |col: Col| &columns.of(col)[simd * SIMD..][..SIMD];
            let mut values = [0; SIMD];
            values.iter_mut().zip(of(a)).for_each(|(value, cell)| *value = cell.get());
            match op {
                SimdOp::Reduce(Reduce::Sum) if scalar == Scalar::F32 => {
                    butterfly(&mut values, |x, y| (f32::from_bits(x) + f32::from_bits(y)).to_bits())
                }
                SimdOp::Reduce(op) => butterfly(&mut values, |x, y| combine(op, scalar, x, y)),
                SimdOp::PrefixSum => {
                    let mut sum = 0;
                    for value in &mut values {
                        let own = *value;
                        *value = sum;
                        sum = combine(Reduce::Sum, scalar, sum, own);
                    }
                }
                SimdOp::Shuffle => {
                    let from = values;
                    let Some(lane) = lane else { return Ok(()) };
                    for (i, (value, lane)) in values.iter_mut().zip(of(lane)).enumerate() {
                        *value = *from.get(lane.get() as usize).ok_or_else(|| Stop::Thread {
                            thread: simd * SIMD + i,
                            message: format!("a shuffle from lane {}: there are 32", lane.get()),
                        })?;
                    }
                }
                SimdOp::ShuffleXor(bits) => {
                    let from = values;
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = *from.get(i ^ usize::from(bits)).ok_or_else(|| Stop::Thread {
                            thread: simd * SIMD + i,
                            message: format!("a shuffle across bits {bits}: there are 32 lanes"),
                        })?;
                    }
                }
                SimdOp::Any => values = [u32::from(values.iter().any(|v| *v != 0)); SIMD],
                SimdOp::All => values = [u32::from(values.iter().all(|v| *v != 0)); SIMD],
                SimdOp::Ballot => {
                    let bit = |(i, v): (usize, &u32)| u32::from(*v != 0) << i;
                    values = [values.iter().enumerate().map(bit).sum(); SIMD];
                }
            }
            of(d).iter().zip(values).for_each(|(cell, value)| cell.set(value));
            Ok(())
        });
        exchange.map_err(|stop: Stop| stop.of("simdgroup operation"))
    }

    fn tile(&mut self, op: &Op, mask: &Mask) -> Result<(), Stop> {
        match op {
            Op::TileLoad { tile, from, index, stride, transposed, swizzled, d } => {
                let lies = (*index, *stride, *transposed, *swizzled);
                return self.tile_load(mask, (*tile, *from), lies, *d);
            }
            Op::TileStore { tile, to, index, stride, v } => {
                return self.tile_store(mask, (*tile, *to), (*index, *stride), *v);
            }
            _ => {}
        }
        mask.simds(|simd| {
            let tiles = &self.tiles;
            let undefined = |message: String| Stop::Thread { thread: simd * SIMD, message };
            match op {
                Op::TileUnary { op, scalar, tile, d, a } => {
                    tiles.unary(simd, (*op, *scalar, *tile), (*d, *a)).map_err(undefined)?;
                }
                Op::TileBinary { op, scalar, tile, d, a, b } => {
                    tiles.binary(simd, (*op, *scalar, *tile), (*d, *a, *b)).map_err(undefined)?;
                }
                Op::TileFma { tile, d, a, b, c } => tiles.fma(simd, *tile, *d, [*a, *b, *c]),
                Op::TileSelect { tile, d, cond, yes, no } => {
                    let choose = |cond, yes, no| if cond != 0 { yes } else { no };
                    tiles.map3(simd, *tile, *d, [*cond, *yes, *no], choose);
                }
                Op::TileCast { from, to, tile, d, a } => {
                    tiles.convert(simd, *tile, *from, *to, *d, *a);
                }
                Op::Splat { tile, d, a } => {
                    tiles.fill(simd, *tile, *d, self.uniform(*a, simd, "value")?);
                }
                Op::Across { tile, d, a } => tiles.across(simd, *tile, *d, *a),
                Op::Position { tile, column, d } => tiles.position(simd, *tile, *column, *d),
                Op::TileOf { tile, words, d } => {
                    let word =
                        |i: usize, lane: usize| self.columns.of(words[i])[simd * SIMD + lane].get();
                    tiles.gather(simd, *tile, *d, word);
                }
                Op::Mma { left, right, d, a, b, c } => {
                    tiles.mma(simd, *left, *right, *d, [*a, *b, *c]);
                }
                Op::RowReduce { op, tile, d, a } => tiles.reduce(simd, *tile, *op, *d, *a),
                Op::TileRegisterLoad { array, index, d } => {
                    let element = self.tile_register(simd, *array, *index, "loads")?;
                    self.unfinished(simd, *array, element, "loads")?;
                    if !self.registers[*array as usize].load_tile(tiles, simd, element, *d) {
                        return Err(self.unset(simd * SIMD, *array, element));
                    }
                }
                Op::TileRegisterStore { array, index, v } => {
                    let element = self.tile_register(simd, *array, *index, "stores")?;
                    self.unfinished(simd, *array, element, "stores")?;
                    self.registers[*array as usize].store_tile(tiles, simd, element, *v);
                }
                _ => {}
            }
            Ok(())
        })
    }

    fn tile_register(
        &self,
        simd: usize,
        array: u32,
        index: Index,
        verb: &'static str,
    ) -> Result<usize, Stop> {
        match index {
            Index::Known(i) => Ok(i as usize),
            Index::Each(col) => {
                self.uniform(col, simd, "register index")?;
                self.register_index(simd * SIMD, array, col, verb)
            }
        }
    }
}

/// Combines all lanes in the order the targets do: with the lane 16 away, then 8, 4, 2, 1.
#[inline(always)]
fn butterfly(values: &mut [u32; SIMD], f: impl Fn(u32, u32) -> u32) {
    for distance in [16, 8, 4, 2, 1] {
        let before = *values;
        for (lane, value) in values.iter_mut().enumerate() {
            *value = f(before[lane], before[lane ^ distance]);
        }
    }
}
