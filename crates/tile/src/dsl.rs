//! The language of `#[kernel]` functions: typed values whose operators record instructions.
//!
//! A [`Val<T>`] is one number per thread, a [`Frag`] a matrix tile per simdgroup; [`In`], [`Out`],
//! [`InOut`] are buffers, [`Shared`] threadgroup memory, [`Var`] and [`Regs`] registers. Rust's own
//! `for` and `if` run while the kernel is built (they unroll and choose); those on `Val`s are
//! recorded: `#[kernel]` turns `for i in range(a, b)`, `if cond`, `x[i]`, `y[i] = v`, `a < b` and
//! `v = e` on them into the functions below. Plain helper functions compose freely.

use std::marker::PhantomData;

use crate::build::{self, define, literal, perform};
use crate::instr::{BinaryOp, UnaryOp};
use crate::ir::{
    Access, Array, AtomicOp, Builtin, Constant, Inst, Literal, LoadHint, Param, ParamKind, Place,
    Reduce, SimdOp, Value,
};
use crate::launch::{Extent, Launch, Mode, Requirement};
use crate::types::{Role, Tile, Type};

pub use crate::build::build;
pub use crate::recipe::Recipe;
pub use crate::types::Scalar;
pub use tile_macros::{device, kernel};

mod memory;
mod numbers;
mod tiles;

pub use memory::*;
pub use numbers::*;
pub use tiles::*;

/// A Rust type that names an element type.
pub trait Element: Copy + 'static {
    /// The element type.
    const SCALAR: Scalar;
}

macro_rules! elements {
    ($($rust:ty => $scalar:ident;)*) => {
        $(impl Element for $rust {
            const SCALAR: Scalar = Scalar::$scalar;
        })*
    };
}

elements! {
    bool => Bool;
    i8 => I8;
    u8 => U8;
    i16 => I16;
    u16 => U16;
    i32 => I32;
    u32 => U32;
    half::f16 => F16;
    half::bf16 => BF16;
    f32 => F32;
}

/// A type arithmetic is done in, whose numbers can stand in a kernel's text.
pub trait Number: Element {
    /// The number as a literal.
    fn literal(self) -> Literal;
}
impl Number for bool {
    fn literal(self) -> Literal {
        Literal::Bool(self)
    }
}
impl Number for i32 {
    fn literal(self) -> Literal {
        Literal::I32(self)
    }
}
impl Number for u32 {
    fn literal(self) -> Literal {
        Literal::U32(self)
    }
}
impl Number for f32 {
    fn literal(self) -> Literal {
        Literal::float(self)
    }
}

/// A specialisation constant in a kernel's signature; a [`Val`] in its body.
#[derive(Debug, Clone, Copy)]
pub struct Const<T>(PhantomData<T>);

impl<T: Number> Const<T> {
    /// Declares it; `#[kernel]` writes this call.
    #[track_caller]
    pub fn declare(name: &str) -> Val<T> {
        let index = build::constant(Constant { name: name.to_owned(), scalar: T::SCALAR });
        Val::wrap(define(Inst::Constant(index), T::SCALAR))
    }
}

/// A number handed over at each launch in a kernel's signature; a [`Val`] in its body.
#[derive(Debug, Clone, Copy)]
pub struct Arg<T>(PhantomData<T>);

impl<T: Number> Arg<T> {
    /// Declares it; `#[kernel]` writes this call.
    #[track_caller]
    pub fn declare(name: &str) -> Val<T> {
        let kind = ParamKind::Argument(T::SCALAR);
        let index = build::param(Param { name: name.to_owned(), kind });
        Val::wrap(define(Inst::Argument(index), T::SCALAR))
    }
}

// ---------------------------------------------------------------- contract

/// States the launch contract: what a group computes, the grid and the threads of a group.
pub fn launch(mode: Mode, grid: [Extent; 3], threads: u32) {
    build::edit(|kernel| {
        let requirements = std::mem::take(&mut kernel.launch.requirements);
        kernel.launch = Launch { mode, grid, threads, requirements };
    });
}

/// A name in the contract: a constant, a `u32` argument, or a free dimension that the launch gives.
pub fn dim(name: &str) -> Extent {
    Extent::from(name)
}

/// A fixed number in the contract.
pub fn fixed(n: u32) -> Extent {
    Extent::Literal(n)
}

/// Adds a requirement to the contract.
pub fn require(requirement: Requirement) {
    build::edit(|kernel| kernel.launch.requirements.push(requirement));
}

/// Threads of a group, as stated by [`launch`].
pub fn threads() -> u32 {
    build::edit(|kernel| kernel.launch.threads)
}

// ---------------------------------------------------------------- places and control

#[track_caller]
fn builtin(which: Builtin) -> Val<u32> {
    Val::wrap(define(Inst::Builtin(which), Scalar::U32))
}

/// The threadgroup's index along the first axis.
#[track_caller]
pub fn group_id() -> Val<u32> {
    builtin(Builtin::Group(0))
}

/// The threadgroup's index along an axis, 0 to 2.
#[track_caller]
pub fn group_id_of(axis: u8) -> Val<u32> {
    builtin(Builtin::Group(axis))
}

/// How many threadgroups there are along an axis.
#[track_caller]
pub fn groups(axis: u8) -> Val<u32> {
    builtin(Builtin::Groups(axis))
}

/// The thread's index in its threadgroup.
#[track_caller]
pub fn thread_id() -> Val<u32> {
    builtin(Builtin::Thread)
}

/// The thread's index in its simdgroup, 0..32.
#[track_caller]
pub fn lane_id() -> Val<u32> {
    builtin(Builtin::Lane)
}

/// The simdgroup's index in its threadgroup.
#[track_caller]
pub fn simd_id() -> Val<u32> {
    builtin(Builtin::Simd)
}

/// All threads of the threadgroup wait, and see each other's writes to memory.
#[track_caller]
pub fn barrier() {
    perform(Inst::Barrier);
}

/// All lanes of the simdgroup wait, and see each other's writes to shared memory.
#[track_caller]
pub fn simd_barrier() {
    perform(Inst::SimdBarrier);
}

/// Orders this thread's writes before its later atomics, for all threadgroups.
#[track_caller]
pub fn fence() {
    perform(Inst::Fence);
}

/// Lets the next kernel start early; see [`grid_wait`].
#[track_caller]
pub fn grid_trigger() {
    perform(Inst::GridTrigger);
}

/// Waits for the previous kernel's writes, where kernels may overlap.
#[track_caller]
pub fn grid_wait() {
    perform(Inst::GridWait);
}

/// The iterables of `for`: a [`Range`] is recorded, anything else runs while the kernel is built.
pub trait Loop {
    /// The value that the body gets.
    type Item;
    /// Runs or records the body.
    fn run(self, body: impl FnMut(Self::Item));
}

impl<I: IntoIterator> Loop for I {
    type Item = I::Item;
    fn run(self, body: impl FnMut(I::Item)) {
        self.into_iter().for_each(body);
    }
}

impl Loop for Range {
    type Item = Val<u32>;
    #[track_caller]
    fn run(self, body: impl FnMut(Val<u32>)) {
        self.each(body);
    }
}

/// `for item in over { body }`; `#[kernel]` writes this call.
#[track_caller]
pub fn each<L: Loop>(over: L, body: impl FnMut(L::Item)) {
    over.run(body);
}

/// A recorded loop's bounds: see [`range`].
#[derive(Debug, Clone, Copy)]
pub struct Range {
    start: Val<u32>,
    end: Val<u32>,
    step: Val<u32>,
    unroll: bool,
}

impl Range {
    /// With another step, positive.
    #[track_caller]
    pub fn step(self, step: impl IntoVal<u32>) -> Self {
        Range { step: step.val(), ..self }
    }

    /// Unrolled by the target's compiler, if its bounds are constant.
    pub fn unroll(self) -> Self {
        Range { unroll: true, ..self }
    }

    /// Records the loop.
    #[track_caller]
    pub fn each(self, body: impl FnOnce(Val<u32>)) {
        let index = self.begin();
        body(Val::wrap(index));
        self.end(index);
    }

    // No part of the generic function, which is compiled for every loop of every kernel.
    fn begin(&self) -> Value {
        let index = build::fresh(Scalar::U32);
        build::open_block();
        index
    }

    #[track_caller]
    fn end(self, index: Value) {
        let body = build::close_block();
        let (start, end, step) = (self.start.value, self.end.value, self.step.value);
        perform(Inst::For { index, start, end, step, unroll: self.unroll, body });
    }
}

/// `start..end` on the device.
#[track_caller]
pub fn range(start: impl IntoVal<u32>, end: impl IntoVal<u32>) -> Range {
    Range { start: start.val(), end: end.val(), step: 1u32.val(), unroll: false }
}

/// This thread's share of `0..end`: `thread, thread + threads, ..`. Neighbours touch neighbouring
/// elements.
#[track_caller]
pub fn strided(end: impl IntoVal<u32>) -> Range {
    let step = threads();
    range(thread_id(), end).step(step)
}

/// A condition whose first block has been dealt with or not; `#[kernel]` writes
/// `test(cond).then(|| ..).otherwise(|| ..)` for `if`.
#[derive(Debug, Clone, Copy)]
pub struct Test {
    known: Result<bool, Val<bool>>,
}

/// Begins an `if`: recorded for a `Val<bool>`, decided while building for a `bool`.
pub fn test(cond: impl Condition) -> Test {
    Test { known: cond.known() }
}

impl Test {
    /// The block for true.
    pub fn then(self, f: impl FnOnce()) -> Self {
        if self.begin() {
            f();
        }
        self
    }

    /// The block for false, and the end.
    #[track_caller]
    pub fn otherwise(self, f: impl FnOnce()) {
        if self.turn() {
            f();
        }
        self.end();
    }

    // No part of the generic functions, which are compiled for every branch of every kernel. The
    // builder holds the blocks, so that a `Test` is nothing to drop.

    /// Opens the block for true if the condition is recorded; whether the block is to run.
    fn begin(self) -> bool {
        if self.known.is_err() {
            build::open_block();
        }
        self.known.unwrap_or(true)
    }

    /// Opens the block for false if the condition is recorded; whether the block is to run.
    fn turn(self) -> bool {
        if self.known.is_err() {
            build::turn_block();
        }
        !self.known.unwrap_or(false)
    }

    #[track_caller]
    fn end(self) {
        if let Err(cond) = self.known {
            let (then, otherwise) = build::close_branches();
            perform(Inst::If { cond: cond.value, then, otherwise });
        }
    }
}

/// `yes` where `cond` holds, else `no`; both are computed.
#[track_caller]
pub fn select<T>(cond: Val<bool>, yes: impl IntoVal<T>, no: impl IntoVal<T>) -> Val<T> {
    Val::wrap(chosen(cond.value, yes.val().value, no.val().value))
}

// What generic functions record is no part of them: they are compiled for every use in a kernel.
#[track_caller]
fn chosen(cond: Value, yes: Value, no: Value) -> Value {
    define(Inst::Select { cond, yes, no }, build::type_of(yes))
}

// ---------------------------------------------------------------- simdgroups and threadgroups

#[track_caller]
fn simd<T: Element, U: Element>(op: SimdOp, value: Val<T>, lane: Option<Val<u32>>) -> Val<U> {
    Val::wrap(simd_of(op, value.value, lane, U::SCALAR))
}

#[track_caller]
fn simd_of(op: SimdOp, value: Value, lane: Option<Val<u32>>, result: Scalar) -> Value {
    define(Inst::Simd(op, value, lane.map(|lane| lane.value)), result)
}

/// The combination of all 32 lanes' values, in every lane.
#[track_caller]
pub fn simd_reduce<T: Number>(op: Reduce, value: Val<T>) -> Val<T> {
    simd(SimdOp::Reduce(op), value, None)
}

/// The sum over the simdgroup.
#[track_caller]
pub fn simd_sum<T: Number>(value: Val<T>) -> Val<T> {
    simd_reduce(Reduce::Sum, value)
}

/// The largest in the simdgroup.
#[track_caller]
pub fn simd_max<T: Number>(value: Val<T>) -> Val<T> {
    simd_reduce(Reduce::Max, value)
}

/// The sum of the lanes below.
#[track_caller]
pub fn simd_prefix_sum<T: Number>(value: Val<T>) -> Val<T> {
    simd(SimdOp::PrefixSum, value, None)
}

/// Another lane's value.
#[track_caller]
pub fn shuffle<T: Number>(value: Val<T>, lane: impl IntoVal<u32>) -> Val<T> {
    simd(SimdOp::Shuffle, value, Some(lane.val()))
}

/// The value of the lane whose number differs in the bits of `mask`.
#[track_caller]
pub fn shuffle_xor<T: Number>(value: Val<T>, mask: u8) -> Val<T> {
    simd(SimdOp::ShuffleXor(mask), value, None)
}

/// Whether any lane's condition holds.
#[track_caller]
pub fn simd_any(cond: Val<bool>) -> Val<bool> {
    simd(SimdOp::Any, cond, None)
}

/// Whether all lanes' conditions hold.
#[track_caller]
pub fn simd_all(cond: Val<bool>) -> Val<bool> {
    simd(SimdOp::All, cond, None)
}

/// A bit per lane.
#[track_caller]
pub fn ballot(cond: Val<bool>) -> Val<u32> {
    simd(SimdOp::Ballot, cond, None)
}

/// The combination of all threads' values, in every thread. Ends and begins with a barrier when
/// there is more than one simdgroup.
#[track_caller]
pub fn group_reduce<T: Number>(op: Reduce, value: Val<T>) -> Val<T> {
    let own = simd_reduce(op, value);
    let simds = threads() / 32;
    if simds == 1 {
        return own;
    }
    let partial = Shared::<T>::new(simds);
    // The array may still be read by an earlier use of the same helper's loop iteration.
    barrier();
    test(lane_id().eq(0u32)).then(|| partial.set(simd_id(), own)).otherwise(|| {});
    barrier();
    let mut total = partial.get(0u32);
    for i in 1..simds {
        let next = partial.get(i);
        total = match op {
            Reduce::Sum => total.plus(next),
            Reduce::Max => total.max(next),
            Reduce::Min => total.min(next),
        };
    }
    total
}

/// The sum over the threadgroup.
#[track_caller]
pub fn group_sum<T: Number>(value: Val<T>) -> Val<T> {
    group_reduce(Reduce::Sum, value)
}

/// The largest in the threadgroup.
#[track_caller]
pub fn group_max<T: Number>(value: Val<T>) -> Val<T> {
    group_reduce(Reduce::Max, value)
}
