//! Arrays: buffers, shared memory, registers.
//!
//! An array of `T` is one whose elements are computed with as `T`. How memory stores them is a
//! [`Scalar`] known when the kernel is recorded: an element is converted after a load and before a
//! store. What is only moved is not: [`Raw`].

use super::*;

/// An array that a kernel names, whose elements are computed with as `T`.
pub trait Elements<T: Number>: Copy {
    /// Which one.
    fn place(self) -> Place;
    /// How its elements are stored.
    fn scalar(self) -> Scalar;
}

/// Marks a value that has the type in which its array stores it: it may be moved, selected and
/// converted.
#[derive(Debug, Clone, Copy)]
pub struct Raw;

/// The access that a buffer allows: `In`, `Out` and `InOut` are `Global` with one of these.
pub trait Rights: 'static {
    /// The kernel's access.
    const ACCESS: Access;
}

/// Marker of [`In`].
#[derive(Debug, Clone, Copy)]
pub struct Reads;
/// Marker of [`Out`].
#[derive(Debug, Clone, Copy)]
pub struct Writes;
/// Marker of [`InOut`].
#[derive(Debug, Clone, Copy)]
pub struct Both;
impl Rights for Reads {
    const ACCESS: Access = Access::In;
}
impl Rights for Writes {
    const ACCESS: Access = Access::Out;
}
impl Rights for Both {
    const ACCESS: Access = Access::InOut;
}

/// A buffer in device memory, a parameter of the kernel. In a kernel's signature `In<u32>` holds
/// words, and `In<{ scalar }>` numbers of that type, which are f32 in the body.
#[derive(Debug)]
pub struct Global<T, M> {
    index: u32,
    scalar: Scalar,
    of: PhantomData<(T, M)>,
}
impl<T, M> Clone for Global<T, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, M> Copy for Global<T, M> {}

/// A buffer that is read.
pub type In<T = f32> = Global<T, Reads>;
/// A buffer that is written.
pub type Out<T = f32> = Global<T, Writes>;
/// A buffer that is read and written.
pub type InOut<T = f32> = Global<T, Both>;

impl<T: Number, M: Rights> Global<T, M> {
    /// Declares it; `#[kernel]` writes this call.
    pub fn declare(name: &str) -> Self {
        Global::stored(name, T::SCALAR)
    }

    /// Declares one whose elements are stored as `scalar`; `#[kernel]` writes this call.
    pub fn stored(name: &str, scalar: Scalar) -> Self {
        let kind = ParamKind::Buffer { scalar, access: M::ACCESS };
        let index = build::param(Param { name: name.to_owned(), kind });
        Global { index, scalar, of: PhantomData }
    }
}

impl<T: Number, M: Rights> Elements<T> for Global<T, M> {
    fn place(self) -> Place {
        Place::Buffer(self.index)
    }

    fn scalar(self) -> Scalar {
        self.scalar
    }
}

/// An array shared by a threadgroup. Each call of `new` is another array.
#[derive(Debug)]
pub struct Shared<T = f32> {
    place: Place,
    scalar: Scalar,
    of: PhantomData<T>,
}
impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T: Number> Shared<T> {
    /// An array of `len` elements, of unknown content.
    pub fn new(len: u32) -> Self {
        Shared::named("", len)
    }

    /// An array with a name in the emitted text.
    pub fn named(name: &str, len: u32) -> Self {
        Shared::stored(T::SCALAR, name, len)
    }

    /// As [`Shared::named`], of elements that are stored as `scalar`.
    pub fn stored(scalar: Scalar, name: &str, len: u32) -> Self {
        Shared::declared(Array { name: name.to_owned(), ty: scalar.into(), len, over: None })
    }

    /// As [`Shared::named`], in the memory of another array, which nothing uses any more: between
    /// the last use of that one, whose copies have all arrived, and the first of this one lies a
    /// barrier, outside of loops. Its content is unknown at first.
    pub fn over<U: Number>(other: Shared<U>, name: &str, len: u32) -> Self {
        let Place::Shared(index) = other.place else { unreachable!("a shared array's place") };
        let ty = T::SCALAR.into();
        Shared::declared(Array { name: name.to_owned(), ty, len, over: Some(index) })
    }

    fn declared(array: Array) -> Self {
        let scalar = array.ty.scalar();
        Shared { place: build::shared(array), scalar, of: PhantomData }
    }
}

impl<T: Number> Elements<T> for Shared<T> {
    fn place(self) -> Place {
        self.place
    }

    fn scalar(self) -> Scalar {
        self.scalar
    }
}

/// Registers of one thread, indexed by numbers known while building if they are to stay registers.
#[derive(Debug)]
pub struct Regs<T = f32> {
    place: Place,
    scalar: Scalar,
    len: u32,
    of: PhantomData<T>,
}
impl<T> Clone for Regs<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Regs<T> {}

impl<T: Number> Regs<T> {
    /// `len` registers that all hold `value`.
    #[track_caller]
    pub fn new(len: u32, value: impl IntoVal<T>) -> Self {
        let regs = Regs::uninit(len);
        let value = value.val();
        for i in 0..len {
            regs.set(i, value);
        }
        regs
    }

    /// `len` registers that must be set before they are read.
    pub fn uninit(len: u32) -> Self {
        Regs::stored(T::SCALAR, len)
    }

    /// As [`Regs::uninit`], of elements that are stored as `scalar`.
    pub fn stored(scalar: Scalar, len: u32) -> Self {
        let place =
            build::register(Array { name: String::new(), ty: scalar.into(), len, over: None });
        Regs { place, scalar, len, of: PhantomData }
    }

    /// How many there are.
    pub fn len(self) -> u32 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

impl<T: Number> Elements<T> for Regs<T> {
    fn place(self) -> Place {
        self.place
    }

    fn scalar(self) -> Scalar {
        self.scalar
    }
}

/// One register that can change: what an accumulator in a recorded loop has to be.
#[derive(Debug)]
pub struct Var<T>(Regs<T>);
impl<T> Clone for Var<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Var<T> {}

impl<T: Number> Var<T> {
    /// A register that holds `value`.
    #[track_caller]
    pub fn new(value: impl IntoVal<T>) -> Self {
        Var(Regs::new(1, value))
    }

    /// Its current value.
    #[track_caller]
    pub fn get(&self) -> Val<T> {
        self.0.get(0u32)
    }

    /// Makes it hold `value`.
    #[track_caller]
    pub fn set(&self, value: impl IntoVal<T>) {
        self.0.set(0u32, value);
    }
}

macro_rules! assign {
    ($($trait:ident, $method:ident, $op:tt, $($t:ty),*;)*) => {
        $($(impl<R: IntoVal<$t>> std::ops::$trait<R> for Var<$t> {
            #[track_caller]
            fn $method(&mut self, other: R) {
                self.set(self.get() $op other.val());
            }
        })*)*
    };
}
assign! {
    AddAssign, add_assign, +, f32, i32, u32;
    SubAssign, sub_assign, -, f32, i32, u32;
    MulAssign, mul_assign, *, f32, i32, u32;
    BitOrAssign, bitor_assign, |, u32, bool;
    BitAndAssign, bitand_assign, &, u32, bool;
}

/// Reading and writing an array of `T`.
pub trait At<T: Number>: Elements<T> {
    /// Element `index`.
    #[track_caller]
    fn get(self, index: impl IntoVal<u32>) -> Val<T> {
        self.get_with(index, LoadHint::None)
    }

    /// Element `index`, read with a hint.
    #[track_caller]
    fn get_with(self, index: impl IntoVal<u32>, hint: LoadHint) -> Val<T> {
        let at = (self.place(), self.scalar());
        Val::wrap(read(at, index.val().value, hint, Some(T::SCALAR)))
    }

    /// Element `index` as it is stored.
    #[track_caller]
    fn get_raw(self, index: impl IntoVal<u32>) -> Val<Raw> {
        let at = (self.place(), self.scalar());
        Val::wrap(read(at, index.val().value, LoadHint::None, None))
    }

    /// `lanes` (2, 4, 8 or 16, at most 16 bytes) elements from `index` on, a multiple of `lanes`.
    #[track_caller]
    fn get_vec(self, index: impl IntoVal<u32>, lanes: u8, hint: LoadHint) -> Vec<Val<T>> {
        let mut values = Vec::with_capacity(usize::from(lanes));
        // No closure: it would hide the caller's line.
        for value in self.get_raw_vec(index, lanes, hint) {
            values.push(value.cast());
        }
        values
    }

    /// As [`At::get_vec`], elements as they are stored.
    #[track_caller]
    fn get_raw_vec(self, index: impl IntoVal<u32>, lanes: u8, hint: LoadHint) -> Vec<Val<Raw>> {
        read_vec((self.place(), self.scalar()), index.val().value, lanes, hint)
    }

    /// Sets element `index`.
    #[track_caller]
    fn set(self, index: impl IntoVal<u32>, value: impl IntoVal<T>) {
        if self.scalar() == T::SCALAR {
            let index = index.val();
            return write(self.place(), index, value.val().value);
        }
        let value = value.val().to(self.scalar());
        write(self.place(), index.val(), value.value);
    }

    /// Sets element `index` to what is of the type in which it is stored.
    #[track_caller]
    fn set_raw(self, index: impl IntoVal<u32>, value: Val<Raw>) {
        write(self.place(), index.val(), value.value);
    }

    /// Sets the elements from `index` on, a multiple of their number (1, 2, 4, 8 or 16, at most 16
    /// bytes).
    #[track_caller]
    fn set_vec(self, index: impl IntoVal<u32>, values: &[Val<T>]) {
        let mut rounded = Vec::with_capacity(values.len());
        for value in values {
            rounded.push(value.to(self.scalar()));
        }
        self.set_raw_vec(index, &rounded);
    }

    /// As [`At::set_vec`], to what is of the type in which elements are stored.
    #[track_caller]
    fn set_raw_vec(self, index: impl IntoVal<u32>, values: &[Val<Raw>]) {
        write_vec(self.place(), self.scalar(), index.val(), values);
    }

    /// Changes element `index` in one step and returns what it was.
    #[track_caller]
    fn atomic(self, op: AtomicOp, index: impl IntoVal<u32>, value: impl IntoVal<T>) -> Val<T> {
        let (place, index, value) = (self.place(), index.val().value, value.val().value);
        Val::wrap(changed(op, place, index, value, self.scalar()))
    }
}

impl<T: Number, M: Elements<T>> At<T> for M {}

// What the generic functions above record is no part of them: they are compiled for every use in a
// kernel.

/// An element of the array, which stores it as a type, converted to another if one is given.
#[track_caller]
fn read(
    (place, scalar): (Place, Scalar),
    index: Value,
    hint: LoadHint,
    to: Option<Scalar>,
) -> Value {
    let value = define(Inst::Load { place, index, lanes: 1, hint }, scalar);
    match to {
        Some(to) => convert(value, to),
        None => value,
    }
}

#[track_caller]
fn read_vec(
    (place, scalar): (Place, Scalar),
    index: Value,
    lanes: u8,
    hint: LoadHint,
) -> Vec<Val<Raw>> {
    if lanes == 1 {
        return vec![Val::wrap(read((place, scalar), index, hint, None))];
    }
    let vector = define(Inst::Load { place, index, lanes, hint }, Type::Vector(scalar, lanes));
    (0..lanes).map(|i| Val::wrap(define(Inst::Extract(vector, i), scalar))).collect()
}

#[track_caller]
fn changed(op: AtomicOp, place: Place, index: Value, value: Value, scalar: Scalar) -> Value {
    define(Inst::Atomic { op, place, index, value }, scalar)
}

#[track_caller]
fn write(place: Place, index: Val<u32>, value: Value) {
    perform(Inst::Store { place, index: index.value, value });
}

#[track_caller]
fn write_vec(place: Place, scalar: Scalar, index: Val<u32>, values: &[Val<Raw>]) {
    if let [value] = values {
        return write(place, index, value.value);
    }
    let ty = Type::Vector(scalar, values.len() as u8);
    let value = define(Inst::Pack(values.iter().map(|v| v.value).collect()), ty);
    write(place, index, value);
}

/// Begins to copy `lanes` elements (4, 8 or 16 bytes) to shared memory; where `keep` is false,
/// zeros.
#[track_caller]
pub fn copy_async<T: Number>(
    to: Shared<T>,
    to_index: impl IntoVal<u32>,
    from: In<T>,
    from_index: impl IntoVal<u32>,
    lanes: u8,
    keep: Option<Val<bool>>,
) {
    let (to_index, from_index) = (to_index.val().value, from_index.val().value);
    let keep = keep.map(|k| k.value);
    perform(Inst::CopyAsync {
        to: to.place,
        to_index,
        from: from.place(),
        from_index,
        lanes,
        keep,
    });
}

/// Closes a batch of this thread's copies.
#[track_caller]
pub fn copy_commit() {
    perform(Inst::CopyCommit);
}

/// Waits until at most `pending` of this thread's latest batches are unfinished; a barrier then
/// shows them to others.
#[track_caller]
pub fn copy_wait(pending: u8) {
    perform(Inst::CopyWait(pending));
}

/// `array[index]` in a kernel: recorded for the device's arrays, Rust's for vectors and slices.
pub trait Lookup<I> {
    /// The type of an element.
    type Found;
    /// The element.
    fn lookup(&self, index: I) -> Self::Found;
}

/// `array[index] = value` in a kernel.
#[diagnostic::on_unimplemented(
    message = "`{Self}[..] = ..` works on `Out`, `InOut`, `Shared` and `Regs` only"
)]
pub trait Put<I, V> {
    /// Sets the element.
    fn put(&self, index: I, value: V);
}

/// `target = value` in a kernel.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be assigned `{V}` in a kernel",
    note = "a value that changes is a `Var`: `let mut x = Var::new(..)`"
)]
pub trait Assign<V> {
    /// Sets it.
    fn assign(&mut self, value: V);
}

impl<T: Number, R: IntoVal<T>> Assign<R> for Var<T> {
    #[track_caller]
    fn assign(&mut self, value: R) {
        self.set(value);
    }
}

macro_rules! plain {
    ($($t:ty),*) => {
        $(impl Assign<$t> for $t {
            fn assign(&mut self, value: $t) {
                *self = value;
            }
        })*
    };
}
plain!(usize, u32, i32, u8, bool, f32);

macro_rules! arrays {
    ($(<$($g:ident $(: $bound:ident)?),*> $array:ty;)*) => {
        $(impl<$($g $(: $bound)?,)* I: IntoVal<u32>> Lookup<I> for $array {
            type Found = Val<T>;
            #[track_caller]
            fn lookup(&self, index: I) -> Val<T> {
                self.get(index)
            }
        }
        impl<$($g $(: $bound)?,)* I: IntoVal<u32>, V: IntoVal<T>> Put<I, V> for $array {
            #[track_caller]
            fn put(&self, index: I, value: V) {
                self.set(index, value);
            }
        })*
    };
}
arrays! {
    <T: Number, M: Rights> Global<T, M>;
    <T: Number> Shared<T>;
    <T: Number> Regs<T>;
}

macro_rules! containers {
    ($(<$($n:ident)?> $array:ty;)*) => {
        $(impl<X: Clone $(, const $n: usize)?> Lookup<usize> for $array {
            type Found = X;
            fn lookup(&self, index: usize) -> X {
                self[index].clone()
            }
        })*
    };
}
containers! {
    <> Vec<X>;
    <> [X];
    <> &[X];
    <N> [X; N];
}

/// `array[index]`; `#[kernel]` writes this call.
#[track_caller]
pub fn at<A: Lookup<I> + ?Sized, I>(array: &A, index: I) -> A::Found {
    array.lookup(index)
}

/// `array[index] = value`; `#[kernel]` writes this call.
#[track_caller]
pub fn put<A: Put<I, V>, I, V>(array: &A, index: I, value: V) {
    array.put(index, value);
}

/// `target = value`; `#[kernel]` writes this call.
#[track_caller]
pub fn assign<A: Assign<V>, V>(target: &mut A, value: V) {
    target.assign(value);
}
