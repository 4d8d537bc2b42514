//! The intermediate representation: a kernel as a tree of blocks of typed instructions, each value
//! assigned once.
//!
//! Control flow is structured (`For`, `If`) and carries no values: what changes in a loop lives in
//! memory, of which there are three kinds ([`Place`]): buffers (global), shared arrays
//! (threadgroup) and register arrays (one thread, or one simdgroup for tiles). A value may be used
//! after its definition in the same block and in blocks inside it. `verify` states every rule;
//! `text` prints and parses the form shown in tests.

use crate::launch::Launch;
pub use crate::table::OperandList;
use crate::types::{Scalar, Type};

/// One instruction's result. An index into [`Kernel::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

/// Where in the kernel's Rust source an instruction was written. An index into [`Kernel::sources`];
/// 0 is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SourceId(pub u32);

/// A kernel: what is launched, with everything needed to check, run or print it.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// Its name: a C identifier, unique among the kernels of a build.
    pub name: String,
    /// The values that its function was recorded with, the function's name before them; empty if
    /// no recipe recorded it.
    pub settings: Vec<KernelSetting>,
    /// Buffers and scalar arguments, in binding order.
    pub params: Vec<Param>,
    /// Specialisation constants, in declaration order.
    pub constants: Vec<Constant>,
    /// Threadgroup arrays.
    pub shared: Vec<Array>,
    /// Register arrays.
    pub registers: Vec<Array>,
    /// How it is launched.
    pub launch: Launch,
    /// The instructions of every thread.
    pub body: Block,
    /// The type of every value.
    pub values: Vec<Type>,
    /// `file:line` of the Rust source, by [`SourceId`]; the first is empty.
    pub sources: Vec<String>,
}

/// A value that the function of a kernel was recorded with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSetting {
    /// The function's parameter; `function` for its name.
    pub name: String,
    /// The value in lower-case words with underscores between: `block_q4_k`, `true`, `none`.
    pub value: String,
}

/// A parameter that a launch binds.
#[derive(Debug, Clone, PartialEq)]
pub struct Param {
    /// Its name: a C identifier.
    pub name: String,
    /// Buffer or scalar.
    pub kind: ParamKind,
}

/// The two kinds of [`Param`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// An array in device memory.
    Buffer {
        /// Element type.
        scalar: Scalar,
        /// The kernel's access.
        access: Access,
    },
    /// One number handed over at launch: `U32`, `I32` or `F32`.
    Argument(Scalar),
}

/// The access of a kernel to a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read only.
    In,
    /// Written; what it writes it may read again.
    Out,
    /// Read and written.
    InOut,
}

/// A specialisation constant: known when a pipeline is made, before any launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Constant {
    /// Its name: a C identifier.
    pub name: String,
    /// `U32`, `I32`, `F32` or `Bool`.
    pub scalar: Scalar,
}

/// A threadgroup or register array.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// Its name: a C identifier.
    pub name: String,
    /// Element type; shared arrays hold scalars.
    pub ty: Type,
    /// Elements.
    pub len: u32,
    /// A shared array's number among [`Kernel::shared`], if this one takes its memory over: from a
    /// barrier on, before which alone that one is used, and after which alone this one is.
    pub over: Option<u32>,
}

/// An array an instruction reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// A buffer among [`Kernel::params`].
    Buffer(u32),
    /// One of [`Kernel::shared`].
    Shared(u32),
    /// One of [`Kernel::registers`].
    Register(u32),
}

/// Instructions in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Block(pub Vec<Statement>);

/// A node of the tree: an instruction, its result and where it was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Statement {
    /// The instruction.
    pub inst: Inst,
    /// The value that it defines, if any.
    pub result: Option<Value>,
    /// Where it came from.
    pub source: SourceId,
}

/// A number in the program's text. Floats compare by bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Literal {
    /// `true` or `false`.
    Bool(bool),
    /// A signed number.
    I32(i32),
    /// An unsigned number.
    U32(u32),
    /// The bits of an f32.
    F32(u32),
}

impl Literal {
    /// An f32.
    pub fn float(x: f32) -> Self {
        Literal::F32(x.to_bits())
    }

    /// Its type.
    pub fn scalar(self) -> Scalar {
        match self {
            Literal::Bool(_) => Scalar::Bool,
            Literal::I32(_) => Scalar::I32,
            Literal::U32(_) => Scalar::U32,
            Literal::F32(_) => Scalar::F32,
        }
    }

    /// The 32 bits a register holds for it; `Bool` as 0 or 1.
    pub fn bits(self) -> u32 {
        match self {
            Literal::Bool(b) => u32::from(b),
            Literal::I32(i) => i as u32,
            Literal::U32(u) | Literal::F32(u) => u,
        }
    }

    /// The literal of a type with these register bits; `None` for storage types.
    pub fn from_bits(scalar: Scalar, bits: u32) -> Option<Self> {
        match scalar {
            Scalar::Bool => Some(Literal::Bool(bits != 0)),
            Scalar::I32 => Some(Literal::I32(bits as i32)),
            Scalar::U32 => Some(Literal::U32(bits)),
            Scalar::F32 => Some(Literal::F32(bits)),
            _ => None,
        }
    }
}

/// Elements of a row of a block that [`Inst::Wgmma`] reads: 128 bytes.
pub const ROW: u32 = 64;

/// Where element `col` of row `row` lies in such a block, from its first element on, which is a
/// multiple of 1024 bytes: each row's eight units of 16 bytes change places, unit `u` of row `r` to
/// `u ^ (r % 8)`, so that the same unit of eight neighbouring rows lies in different banks. PTX
/// calls this the 128-byte swizzling mode.
pub const fn swizzled(row: u32, col: u32) -> u32 {
    row * ROW + ((col / 8) ^ (row % 8)) * 8 + col % 8
}

/// Where an element of 16 bits lies in a shared array of such blocks, one behind the other, from
/// its number in them: see [`swizzled`].
pub const fn swizzle(element: u32) -> u32 {
    swizzled(element / ROW, element % ROW)
}

/// A thread's place in the launch. All `U32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Builtin {
    /// The threadgroup's index along axis 0, 1 or 2.
    Group(u8),
    /// How many threadgroups there are along an axis.
    Groups(u8),
    /// The thread's index in its threadgroup.
    Thread,
    /// The thread's index in its simdgroup, 0..32.
    Lane,
    /// The simdgroup's index in its threadgroup.
    Simd,
}

impl Builtin {
    /// One of each name.
    pub(crate) const ALL: [Builtin; 5] =
        [Builtin::Group(0), Builtin::Groups(0), Builtin::Thread, Builtin::Lane, Builtin::Simd];

    /// Its name in the text form.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Builtin::Group(_) => "group",
            Builtin::Groups(_) => "groups",
            Builtin::Thread => "thread",
            Builtin::Lane => "lane",
            Builtin::Simd => "simd",
        }
    }

    /// The axis of the grid, if it has one.
    pub(crate) fn axis(&mut self) -> Option<&mut u8> {
        match self {
            Builtin::Group(axis) | Builtin::Groups(axis) => Some(axis),
            Builtin::Thread | Builtin::Lane | Builtin::Simd => None,
        }
    }
}

/// How memory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LoadHint {
    /// Nothing special.
    #[default]
    None,
    /// Read once: keep it out of the first-level cache. Only for what no running kernel writes.
    Stream,
    /// May have been written by a kernel that is still draining: read from the second-level cache.
    Coherent,
}

/// Read-modify-write operations on memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// `old + value`.
    Add,
    /// The smaller.
    Min,
    /// The larger.
    Max,
    /// `value`.
    Exchange,
}

impl AtomicOp {
    pub(crate) const ALL: [AtomicOp; 4] =
        [AtomicOp::Add, AtomicOp::Min, AtomicOp::Max, AtomicOp::Exchange];

    /// Its name in the text form.
    pub(crate) fn name(self) -> &'static str {
        match self {
            AtomicOp::Add => "atomic_add",
            AtomicOp::Min => "atomic_min",
            AtomicOp::Max => "atomic_max",
            AtomicOp::Exchange => "atomic_exchange",
        }
    }
}

/// How values are combined across a simdgroup or along a tile's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

impl Reduce {
    pub(crate) const ALL: [Reduce; 3] = [Reduce::Sum, Reduce::Max, Reduce::Min];

    /// The name in the text form of a reduction of a tile's rows.
    pub(crate) fn row_name(self) -> &'static str {
        match self {
            Reduce::Sum => "row_sum",
            Reduce::Max => "row_max",
            Reduce::Min => "row_min",
        }
    }
}

/// Exchanges between the 32 lanes of a simdgroup. Every lane takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SimdOp {
    /// Every lane gets the combination of all. `F32`, `I32`, `U32`.
    Reduce(Reduce),
    /// The sum of the lanes below this one. `U32`, `I32`.
    PrefixSum,
    /// The value of the lane named by a second operand, `U32` below 32.
    Shuffle,
    /// The value of the lane whose number differs in these bits.
    ShuffleXor(u8),
    /// Whether any lane's `Bool` is true.
    Any,
    /// Whether all are.
    All,
    /// A `U32` whose bit `i` is lane `i`'s `Bool`.
    Ballot,
}

impl SimdOp {
    /// One of each name.
    pub(crate) const ALL: [SimdOp; 9] = [
        SimdOp::Reduce(Reduce::Sum),
        SimdOp::Reduce(Reduce::Max),
        SimdOp::Reduce(Reduce::Min),
        SimdOp::PrefixSum,
        SimdOp::Shuffle,
        SimdOp::ShuffleXor(0),
        SimdOp::Any,
        SimdOp::All,
        SimdOp::Ballot,
    ];

    /// Its name in the text form.
    pub(crate) fn name(self) -> &'static str {
        match self {
            SimdOp::Reduce(Reduce::Sum) => "simd_sum",
            SimdOp::Reduce(Reduce::Max) => "simd_max",
            SimdOp::Reduce(Reduce::Min) => "simd_min",
            SimdOp::PrefixSum => "simd_prefix_sum",
            SimdOp::Shuffle => "shuffle",
            SimdOp::ShuffleXor(_) => "shuffle_xor",
            SimdOp::Any => "simd_any",
            SimdOp::All => "simd_all",
            SimdOp::Ballot => "ballot",
        }
    }

    /// The bits in which lanes differ that exchange values, if it names any.
    pub(crate) fn mask(&mut self) -> Option<&mut u8> {
        match self {
            SimdOp::ShuffleXor(mask) => Some(mask),
            _ => None,
        }
    }
}

#[allow(missing_docs, reason = "each variant's comment says what its fields are")]
/// The closed set of instructions. Indices count elements of the array, not bytes.
#[derive(Debug, Clone, PartialEq)]
pub enum Inst {
    /// A number.
    Literal(Literal),
    /// A specialisation constant, by index.
    Constant(u32),
    /// A scalar argument, by index into the parameters.
    Argument(u32),
    /// The thread's place.
    Builtin(Builtin),
    /// One operand; element-wise on tiles.
    Unary(crate::instr::UnaryOp, Value),
    /// Two operands of one type; element-wise on tiles.
    Binary(crate::instr::BinaryOp, Value, Value),
    /// `a * b + c`, rounded once. `F32`, tiles too.
    Fma(Value, Value, Value),
    /// `yes` where `cond` (a `Bool` of the same shape), else `no`.
    Select { cond: Value, yes: Value, no: Value },
    /// Conversion to another element type: floats round to nearest even, floats to integers
    /// truncate and saturate. On vectors and tiles element by element.
    Cast(Scalar, Value),
    /// The same bits as another scalar of the same size.
    Bitcast(Scalar, Value),
    /// `acc + sum of four products of bytes`: `a` and `b` hold signed bytes in a `U32`, lowest
    /// first; `acc` is `I32`.
    Dot4 { a: Value, b: Value, acc: Value },
    /// `a * b + c`, rounded once, of both halves of words that are two f16 each.
    FmaHalves { a: Value, b: Value, c: Value },
    /// Four bytes of a table of sixteen, which four words hold, lowest first: byte `i` is the one
    /// that the bits from `4 i` on of `codes` name. All `U32`.
    Lookup { codes: Value, table: Vec<Value> },
    /// Scalars of one type to a vector.
    Pack(Vec<Value>),
    /// One element of a vector.
    Extract(Value, u8),
    /// `lanes` consecutive elements; their index is a multiple of `lanes`. A scalar where that
    /// is 1. From registers, one element of the array's type.
    Load { place: Place, index: Value, lanes: u8, hint: LoadHint },
    /// A scalar, a vector (its index a multiple of its lanes), or an element of a register array.
    Store { place: Place, index: Value, value: Value },
    /// Returns the old value. `U32` or `I32` of a buffer or shared array; `F32` for `Add` on a
    /// buffer.
    Atomic { op: AtomicOp, place: Place, index: Value, value: Value },
    /// All threads of the threadgroup wait; shared and global writes before it are seen after it.
    Barrier,
    /// All lanes of the simdgroup wait; shared writes before it are seen after it.
    SimdBarrier,
    /// Writes before it are seen by every threadgroup before what comes after it: for atomics that
    /// hand work over.
    Fence,
    /// An exchange between lanes; the second operand is for [`SimdOp::Shuffle`].
    Simd(SimdOp, Value, Option<Value>),
    /// Begins to copy `lanes` elements (4, 8 or 16 bytes) from a buffer to a shared array of the
    /// same type. Where `keep` is false it writes zeros and reads nothing.
    CopyAsync {
        to: Place,
        to_index: Value,
        from: Place,
        from_index: Value,
        lanes: u8,
        keep: Option<Value>,
    },
    /// Closes a batch of copies of this thread.
    CopyCommit,
    /// Waits until at most this many of the thread's latest batches are unfinished. A barrier shows
    /// them to others.
    CopyWait(u8),
    /// Lets the next kernel of the stream start early.
    GridTrigger,
    /// Waits for the kernel before: nothing that it writes may be read earlier. Each
    /// simdgroup waits for itself, as often as it likes.
    GridWait,
    /// A tile with the same value everywhere, from a scalar; or from a row tile, each row with its
    /// value.
    Splat(Type, Value),
    /// A tile from memory: element `(r, c)` is at `index + r * stride + c`, or
    /// `index + c * stride + r` if transposed; if swizzled, where [`swizzle`] puts that.
    TileLoad {
        ty: Type,
        place: Place,
        index: Value,
        stride: Value,
        transposed: bool,
        swizzled: bool,
    },
    /// An accumulator to memory, element `(r, c)` to `index + r * stride + c`.
    TileStore { place: Place, index: Value, stride: Value, value: Value },
    /// An operand of a product from the lanes' own words, each two elements that are neighbours
    /// along the sum, the first in the low half. With `g = lane / 4` and `t = 2 (lane % 4)`, the
    /// four words of a left operand are `(g, t)`, `(g + 8, t)`, `(g, t + 8)` and `(g + 8, t + 8)`;
    /// of a right one `(t, g)`, `(t + 8, g)`, `(t, g + 8)` and `(t + 8, g + 8)`. Tiles of 8 rows
    /// have the first word alone.
    TileOf(Type, Vec<Value>),
    /// `c + a b`, summed in f32.
    Mma { a: Value, b: Value, c: Value },
    /// Begins the product of a warpgroup, four simdgroups from a multiple of four on: all registers
    /// of `sum`, accumulators of f32, become themselves plus `a b'` over 64 terms. Tile `j` of
    /// simdgroup `s` gets rows `16 (s % 4)` on of `a` by rows `16 j` on of `b`: blocks of [`ROW`]
    /// elements a row in shared memory, 64 rows of `a` and 16 a register of `b`, swizzled as
    /// [`swizzled`] says. Until it is waited for, neither blocks nor registers may be touched
    /// otherwise.
    Wgmma { sum: Place, a: Place, a_index: Value, b: Place, b_index: Value },
    /// As [`Inst::Wgmma`], with each simdgroup's rows of `a` in its lanes' registers: four left
    /// operands, 16 terms each, one behind another.
    WgmmaOf { sum: Place, left: Vec<Value>, b: Place, b_index: Value },
    /// Orders earlier work on accumulators before the products that begin after it.
    WgmmaFence,
    /// Closes a batch of the warpgroup's products.
    WgmmaCommit,
    /// Waits until at most this many of the warpgroup's latest batches are unfinished.
    WgmmaWait(u8),
    /// The thread's writes to shared memory before it are seen by products that begin after the
    /// next barrier.
    AsyncFence,
    /// Combines each row of an accumulator.
    RowReduce(Reduce, Value),
    /// Each element's row number, as a `U32` accumulator.
    TileRow(Type),
    /// Each element's column number.
    TileCol(Type),
    /// An accumulator as a left operand, rounded to its type.
    ToLeft(Type, Value),
    /// `body` with `index` at `start`, `start + step`, .. below `end`; all `U32`, `step` positive.
    For { index: Value, start: Value, end: Value, step: Value, unroll: bool, body: Block },
    /// One block or the other.
    If { cond: Value, then: Block, otherwise: Block },
}

impl Kernel {
    /// One that has nothing but a name: no parameters, an empty body, the default launch.
    pub(crate) fn empty(name: &str) -> Kernel {
        Kernel {
            name: name.to_owned(),
            settings: vec![],
            params: vec![],
            constants: vec![],
            shared: vec![],
            registers: vec![],
            launch: Launch::default(),
            body: Block::default(),
            values: vec![],
            sources: vec![String::new()],
        }
    }

    /// The type of a value.
    pub fn ty(&self, value: Value) -> Type {
        self.values[value.0 as usize]
    }

    /// A new value of a type, for passes.
    pub fn fresh(&mut self, ty: impl Into<Type>) -> Value {
        self.values.push(ty.into());
        Value(self.values.len() as u32 - 1)
    }

    /// The element type of an array.
    pub fn element(&self, place: Place) -> Type {
        match place {
            Place::Buffer(i) => match self.params[i as usize].kind {
                ParamKind::Buffer { scalar, .. } | ParamKind::Argument(scalar) => scalar.into(),
            },
            Place::Shared(i) => self.shared[i as usize].ty,
            Place::Register(i) => self.registers[i as usize].ty,
        }
    }

    /// The name of an array.
    pub fn place_name(&self, place: Place) -> &str {
        match place {
            Place::Buffer(i) => &self.params[i as usize].name,
            Place::Shared(i) => &self.shared[i as usize].name,
            Place::Register(i) => &self.registers[i as usize].name,
        }
    }

    /// Where an instruction was written, as `file:line`, or nothing.
    pub fn source(&self, source: SourceId) -> &str {
        self.sources.get(source.0 as usize).map_or("", String::as_str)
    }

    /// Whether four simdgroups multiply together: what only GPUs of compute capability 9.0 do.
    pub fn has_wgmma(&self) -> bool {
        let mut found = false;
        self.visit(&mut |node| found |= node.inst.warpgroup_sum().is_some());
        found
    }

    /// Whether shared memory has blocks as [`swizzled`] says, whose banks follow from addresses.
    pub fn has_swizzled(&self) -> bool {
        let mut found = self.has_wgmma();
        self.visit(&mut |node| {
            found |= matches!(node.inst, Inst::TileLoad { swizzled: true, .. });
        });
        found
    }

    /// Bytes of threadgroup memory, every array aligned to 16.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_extents().iter().flatten().sum()
    }

    /// Where a shared array begins, in bytes.
    pub(crate) fn shared_offset(&self, index: u32) -> u32 {
        let own = self.shared[index as usize].over.unwrap_or(index);
        self.shared_extents()[..own as usize].iter().flatten().sum()
    }

    /// Elements of a shared array, with what those that take it over need besides.
    pub(crate) fn shared_len(&self, index: u32) -> u32 {
        let array = &self.shared[index as usize];
        let taken = |other: &&Array| other.over == Some(index);
        let bytes = |array: &Array| array.ty.scalar().bytes() as u32 * array.len;
        let most = self.shared.iter().filter(taken).map(bytes).max().unwrap_or(0);
        array.len.max(most.div_ceil(array.ty.scalar().bytes() as u32))
    }

    /// Bytes of memory that each shared array has of its own: none where it takes over another's,
    /// which then is as large as the larger of the two.
    fn shared_extents(&self) -> Vec<Option<u32>> {
        let own = |(index, array): (u32, &Array)| {
            let bytes = self.shared_len(index) * array.ty.scalar().bytes() as u32;
            array.over.is_none().then(|| bytes.next_multiple_of(16))
        };
        (0..).zip(&self.shared).map(own).collect()
    }

    /// Calls `f` on every instruction, outer before inner, in order.
    pub fn visit<'a>(&'a self, f: &mut impl FnMut(&'a Statement)) {
        fn walk<'a>(block: &'a Block, f: &mut impl FnMut(&'a Statement)) {
            for node in &block.0 {
                f(node);
                node.inst.blocks().into_iter().for_each(|block| walk(block, f));
            }
        }
        walk(&self.body, f);
    }
}
