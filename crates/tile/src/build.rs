//! Builds a kernel while its Rust function runs: every operation of [`crate::dsl`] appends an
//! instruction here.
//!
//! One builder is current per thread; `build` makes it, runs the function and takes the kernel out.
//! Misuse that the type system cannot see (a value used outside the loop that defines it, for one)
//! is found by the verifier, which names the Rust line each instruction was recorded at.

use std::cell::RefCell;
use std::panic::Location;

use crate::ir::{
    Array, Block, Constant, Inst, Kernel, Literal, Param, Place, SourceId, Statement, Value,
};
use crate::types::Type;

/// The kernel under construction, the blocks that are open, outermost first, and those for true of
/// the conditions whose blocks for false are open.
struct Builder {
    kernel: Kernel,
    open: Vec<Block>,
    branches: Vec<Block>,
}

thread_local! {
    static CURRENT: RefCell<Option<Builder>> = const { RefCell::new(None) };
}

/// Runs `f`, which records instructions, and returns the kernel it described.
///
/// # Panics
/// If called while another kernel is being built on this thread.
pub fn build(name: &str, f: impl FnOnce()) -> Kernel {
    let begun = Begun::new(name);
    f();
    begun.end()
}

/// A kernel that is being built on this thread; leaves none half-built behind when dropped.
struct Begun;

// As everything below, no part of a generic function, which would be compiled for every kernel.
impl Begun {
    fn new(name: &str) -> Begun {
        CURRENT.with_borrow_mut(|current| {
            assert!(current.is_none(), "{name}: a kernel is being built already");
            let (kernel, open) = (Kernel::empty(name), vec![Block::default()]);
            *current = Some(Builder { kernel, open, branches: Vec::new() });
        });
        Begun
    }

    fn end(self) -> Kernel {
        let built = CURRENT.with_borrow_mut(Option::take);
        let mut builder = built.expect("nothing but this takes the builder");
        builder.kernel.body = builder.open.pop().unwrap_or_default();
        builder.kernel
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| *current = None);
    }
}

/// Runs `f` on the current builder.
fn with<R>(f: impl FnOnce(&mut Builder) -> R) -> R {
    CURRENT.with_borrow_mut(|current| {
        f(current.as_mut().expect("kernel operations work only inside a #[kernel] function"))
    })
}

/// Changes the kernel outside its body: name, launch contract.
pub(crate) fn edit<R>(f: impl FnOnce(&mut Kernel) -> R) -> R {
    with(|b| f(&mut b.kernel))
}

/// Appends an instruction that defines a value of type `ty`.
#[track_caller]
pub(crate) fn define(inst: Inst, ty: impl Into<Type>) -> Value {
    append(inst, ty.into())
}

// No part of the generic function.
#[track_caller]
fn append(inst: Inst, ty: Type) -> Value {
    let location = Location::caller();
    with(|b| {
        let value = b.kernel.fresh(ty);
        b.push(inst, Some(value), location);
        value
    })
}

/// Appends an instruction without a result.
#[track_caller]
pub(crate) fn perform(inst: Inst) {
    let location = Location::caller();
    with(|b| b.push(inst, None, location));
}

/// A literal's value.
#[track_caller]
pub(crate) fn literal(literal: Literal) -> Value {
    define(Inst::Literal(literal), literal.scalar())
}

/// The type of a value.
pub(crate) fn type_of(value: Value) -> Type {
    with(|b| b.kernel.ty(value))
}

/// A new value that an instruction with blocks defines, such as a loop's index.
pub(crate) fn fresh(ty: impl Into<Type>) -> Value {
    let ty = ty.into();
    with(|b| b.kernel.fresh(ty))
}

/// Begins a block: what is recorded from now on is in it.
pub(crate) fn open_block() {
    with(|b| b.open.push(Block::default()));
}

/// Ends the block that was begun last, and returns it.
pub(crate) fn close_block() -> Block {
    with(|b| b.open.pop().unwrap_or_default())
}

/// Ends the block that was begun last, a condition's for true, and begins the one for false.
pub(crate) fn turn_block() {
    let then = close_block();
    with(|b| b.branches.push(then));
    open_block();
}

/// Ends a condition's block for false, and returns it behind the one for true.
pub(crate) fn close_branches() -> (Block, Block) {
    let otherwise = close_block();
    (with(|b| b.branches.pop().unwrap_or_default()), otherwise)
}

/// Declares a parameter and returns its index.
pub(crate) fn param(param: Param) -> u32 {
    edit(|kernel| {
        kernel.params.push(param);
        kernel.params.len() as u32 - 1
    })
}

/// Declares a specialisation constant and returns its index.
pub(crate) fn constant(constant: Constant) -> u32 {
    edit(|kernel| {
        kernel.constants.push(constant);
        kernel.constants.len() as u32 - 1
    })
}

/// Declares a threadgroup array; an empty name is replaced by a numbered one.
pub(crate) fn shared(array: Array) -> Place {
    edit(|kernel| Place::Shared(declare(&mut kernel.shared, array, "shared")))
}

/// Declares a register array.
pub(crate) fn register(array: Array) -> Place {
    edit(|kernel| Place::Register(declare(&mut kernel.registers, array, "r")))
}

fn declare(arrays: &mut Vec<Array>, mut array: Array, stem: &str) -> u32 {
    if array.name.is_empty() {
        array.name = format!("{stem}{}", arrays.len());
    }
    arrays.push(array);
    arrays.len() as u32 - 1
}

impl Builder {
    fn push(&mut self, inst: Inst, result: Option<Value>, location: &Location<'_>) {
        let place = format!("{}:{}", location.file(), location.line());
        let known = self.kernel.sources.iter().rposition(|s| *s == place);
        let source = known.unwrap_or_else(|| {
            self.kernel.sources.push(place);
            self.kernel.sources.len() - 1
        });
        let block = self.open.last_mut().expect("the body is open while `f` runs");
        block.0.push(Statement { inst, result, source: SourceId(source as u32) });
    }
}
