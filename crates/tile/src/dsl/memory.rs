//! Arrays: buffers, shared memory, registers.

use super::*;

/// An array that a kernel names.
pub trait Memory<T: Element>: Copy {
    /// Which one.
    fn place(self) -> Place;
}

/// What a buffer allows: `In`, `Out` and `InOut` are `Global` with one of these.
pub trait Rights: 'static {
    /// What the kernel may do.
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

/// A buffer in device memory, a parameter of the kernel.
#[derive(Debug)]
pub struct Global<T, M> {
    index: u32,
    of: PhantomData<(T, M)>,
}
impl<T, M> Clone for Global<T, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, M> Copy for Global<T, M> {}

/// A buffer that is read.
pub type In<T> = Global<T, Reads>;
/// A buffer that is written.
pub type Out<T> = Global<T, Writes>;
/// A buffer that is read and written.
pub type InOut<T> = Global<T, Both>;

impl<T: Element, M: Rights> Global<T, M> {
    /// Declares it; `#[kernel]` writes this call.
    pub fn declare(name: &str) -> Self {
        let kind = ParamKind::Buffer { scalar: T::SCALAR, access: M::ACCESS };
        Global { index: build::param(Param { name: name.to_owned(), kind }), of: PhantomData }
    }
}

impl<T: Element> In<T> {
    /// The same buffer in a helper that is generic over another element type, if that is the same.
    pub fn same<U: Element>(self) -> Option<In<U>> {
        (T::SCALAR == U::SCALAR).then_some(Global { index: self.index, of: PhantomData })
    }
}

impl<T: Element, M: Rights> Memory<T> for Global<T, M> {
    fn place(self) -> Place {
        Place::Buffer(self.index)
    }
}

/// An array shared by a threadgroup. Each call of `new` is another array.
#[derive(Debug)]
pub struct Shared<T> {
    place: Place,
    of: PhantomData<T>,
}
impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T: Element> Shared<T> {
    /// An array of `len` elements, of unknown content.
    pub fn new(len: u32) -> Self {
        Shared::named("", len)
    }

    /// An array with a name in the emitted text.
    pub fn named(name: &str, len: u32) -> Self {
        let array = Array { name: name.to_owned(), ty: T::SCALAR.into(), len };
        Shared { place: build::shared(array), of: PhantomData }
    }
}

impl<T: Element> Memory<T> for Shared<T> {
    fn place(self) -> Place {
        self.place
    }
}

/// Registers of one thread, indexed by numbers known while building if they are to stay registers.
#[derive(Debug)]
pub struct Regs<T> {
    place: Place,
    len: u32,
    of: PhantomData<T>,
}
impl<T> Clone for Regs<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Regs<T> {}

impl<T: Element> Regs<T> {
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
        let place = build::register(Array { name: String::new(), ty: T::SCALAR.into(), len });
        Regs { place, len, of: PhantomData }
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

impl<T: Element> Memory<T> for Regs<T> {
    fn place(self) -> Place {
        self.place
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

impl<T: Element> Var<T> {
    /// A register that holds `value`.
    #[track_caller]
    pub fn new(value: impl IntoVal<T>) -> Self {
        Var(Regs::new(1, value))
    }

    /// What it holds now.
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
pub trait At<T: Element>: Memory<T> {
    /// Element `index`.
    #[track_caller]
    fn get(self, index: impl IntoVal<u32>) -> Val<T> {
        self.get_with(index, Hint::None)
    }

    /// Element `index`, read with a hint.
    #[track_caller]
    fn get_with(self, index: impl IntoVal<u32>, hint: Hint) -> Val<T> {
        let (place, index) = (self.place(), index.val().value);
        Val::wrap(define(Inst::Load { place, index, lanes: 1, hint }, T::SCALAR))
    }

    /// `lanes` (2, 4, 8 or 16, at most 16 bytes) elements from `index` on, a multiple of `lanes`.
    #[track_caller]
    fn get_vec(self, index: impl IntoVal<u32>, lanes: u8, hint: Hint) -> Vec<Val<T>> {
        if lanes == 1 {
            return vec![self.get_with(index, hint)];
        }
        let (place, index) = (self.place(), index.val().value);
        let ty = Type::Vector(T::SCALAR, lanes);
        let vector = define(Inst::Load { place, index, lanes, hint }, ty);
        (0..lanes).map(|i| Val::wrap(define(Inst::Extract(vector, i), T::SCALAR))).collect()
    }

    /// Sets element `index`.
    #[track_caller]
    fn set(self, index: impl IntoVal<u32>, value: impl IntoVal<T>) {
        let (place, index, value) = (self.place(), index.val().value, value.val().value);
        perform(Inst::Store { place, index, value });
    }

    /// Sets the elements from `index` on, a multiple of their number (1, 2, 4, 8 or 16, at most 16 bytes).
    #[track_caller]
    fn set_vec(self, index: impl IntoVal<u32>, values: &[Val<T>]) {
        if let [value] = values {
            return self.set(index, *value);
        }
        let (place, index) = (self.place(), index.val().value);
        let ty = Type::Vector(T::SCALAR, values.len() as u8);
        let value = define(Inst::Pack(values.iter().map(|v| v.value).collect()), ty);
        perform(Inst::Store { place, index, value });
    }

    /// Changes element `index` in one step and returns what it was.
    #[track_caller]
    fn atomic(self, op: AtomicOp, index: impl IntoVal<u32>, value: impl IntoVal<T>) -> Val<T> {
        let (place, index, value) = (self.place(), index.val().value, value.val().value);
        Val::wrap(define(Inst::Atomic { op, place, index, value }, T::SCALAR))
    }
}

impl<T: Element, M: Memory<T>> At<T> for M {}

/// Begins to copy `lanes` elements (4, 8 or 16 bytes) to shared memory; where `keep` is false, zeros.
#[track_caller]
pub fn copy_async<T: Element>(
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

/// Waits until at most `pending` of this thread's latest batches are unfinished; a barrier then shows them to others.
#[track_caller]
pub fn copy_wait(pending: u8) {
    perform(Inst::CopyWait(pending));
}

/// `array[index]` in a kernel: recorded for the device's arrays, Rust's for vectors and slices.
pub trait Lookup<I> {
    /// What is found.
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

impl<T: Element, R: IntoVal<T>> Assign<R> for Var<T> {
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
    <T: Element, M: Rights> Global<T, M>;
    <T: Element> Shared<T>;
    <T: Element> Regs<T>;
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
