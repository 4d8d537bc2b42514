//! From the block tree to the flat program: names become columns, and columns are reused once their
//! last reader is past.

use std::collections::HashMap;

use super::allocate::allocate;
use super::ops::{Array, Col, Fixed, Index, Op, Program, Slot};
use super::products::{Left, Product};
use crate::ir::{Access, Block, Builtin, Inst, Kernel, ParamKind, Place, Statement, Value};
use crate::types::{Role, Scalar, Tile, Type};
use crate::verify::Fault;

/// How deep blocks may nest: the interpreter recurses once per level.
const DEPTH: usize = 256;

/// Where a value lives.
#[derive(Debug, Clone)]
enum Home {
    /// A scalar's column or a vector's, in order.
    Columns(Vec<Col>),
    /// A tile's slot.
    Tile(Slot),
}

struct Compiler<'a> {
    kernel: &'a Kernel,
    ops: Vec<Op>,
    places: Vec<(usize, crate::ir::SourceId)>,
    /// Body ranges of loops, inner before outer.
    loops: Vec<(usize, usize)>,
    homes: Vec<Option<Home>>,
    /// Values defined by the open blocks, innermost last.
    scopes: Vec<Vec<Value>>,
    fixed: HashMap<Fixed, Col>,
    literals: HashMap<Col, u32>,
    columns: u32,
    tiles: u32,
    /// Instructions so far, in the order of [`Kernel::visit`].
    visited: usize,
    atomic_buffers: Vec<bool>,
    atomic_shared: Vec<bool>,
}

/// Compiles a kernel, verified or not: what it cannot run is a fault.
pub(super) fn compile(kernel: &Kernel) -> Result<Program, Fault> {
    let mut compiler = Compiler {
        kernel,
        ops: vec![],
        places: vec![],
        loops: vec![],
        homes: vec![None; kernel.values.len()],
        scopes: vec![],
        fixed: HashMap::new(),
        literals: HashMap::new(),
        columns: 0,
        tiles: 0,
        visited: 0,
        atomic_buffers: vec![false; kernel.params.len()],
        atomic_shared: vec![false; kernel.shared.len()],
    };
    compiler.block(&kernel.body)?;
    let mut fixed: Vec<(Fixed, Col)> = compiler.fixed.into_iter().collect();
    fixed.sort_by_key(|(_, column)| *column);
    let pinned: Vec<Col> = fixed.iter().map(|(_, column)| *column).collect();
    let names = [compiler.columns, compiler.tiles];
    let [columns, tiles] = allocate(&mut compiler.ops, compiler.loops, names, &pinned);
    Ok(Program {
        ops: compiler.ops,
        places: compiler.places,
        fixed: fixed.into_iter().map(|(fixed, _)| fixed).collect(),
        columns,
        tiles,
        atomic_buffers: compiler.atomic_buffers,
        atomic_shared: compiler.atomic_shared,
    })
}

impl Compiler<'_> {
    fn block(&mut self, block: &Block) -> Result<(), Fault> {
        self.scopes.push(vec![]);
        for node in &block.0 {
            self.node(node)?;
        }
        self.close();
        Ok(())
    }

    /// Ends the scope of the innermost block's values.
    fn close(&mut self) {
        for value in self.scopes.pop().unwrap_or_default() {
            self.homes[value.0 as usize] = None;
        }
    }

    fn node(&mut self, node: &Statement) -> Result<(), Fault> {
        let visited = self.visited;
        self.visited += 1;
        let (kernel, source) = (self.kernel, node.source);
        let fault = |message: String| Fault {
            kernel: kernel.name.clone(),
            line: super::report::line(kernel, visited),
            source: kernel.source(source).to_owned(),
            message,
        };
        if self.scopes.len() > DEPTH {
            return Err(fault(format!("blocks nested more than {DEPTH} deep")));
        }
        match &node.inst {
            Inst::For { index, start, end, step, body, .. } => {
                let at = self.ops.len();
                self.scopes.push(vec![]);
                self.head(node, visited, [*index, *start, *end, *step]).map_err(fault)?;
                self.block(body)?;
                self.close();
                let past = self.ops.len();
                self.loops.push((at, past));
                if let Op::For { end, .. } = &mut self.ops[at] {
                    *end = past;
                }
            }
            Inst::If { cond, then, otherwise } => {
                let cond = self.scalar(*cond, Scalar::Bool).map_err(fault)?;
                let at = self.ops.len();
                self.emit(node, visited, Op::If { cond, otherwise: 0, end: 0 });
                self.block(then)?;
                let middle = self.ops.len();
                self.block(otherwise)?;
                let past = self.ops.len();
                if let Op::If { otherwise, end, .. } = &mut self.ops[at] {
                    (*otherwise, *end) = (middle, past);
                }
            }
            _ => self.simple(node, visited).map_err(fault)?,
        }
        Ok(())
    }

    /// A loop's first operation; where it ends is not known yet.
    fn head(&mut self, node: &Statement, visited: usize, values: [Value; 4]) -> Result<(), String> {
        let [index, start, stop, step] = values;
        let (start, stop) = (self.scalar(start, Scalar::U32)?, self.scalar(stop, Scalar::U32)?);
        let step = self.scalar(step, Scalar::U32)?;
        let index = self.define_scalar(index)?;
        self.emit(node, visited, Op::For { index, start, stop, step, end: 0 });
        Ok(())
    }

    fn emit(&mut self, node: &Statement, visited: usize, op: Op) {
        self.ops.push(op);
        self.places.push((visited, node.source));
    }

    fn simple(&mut self, node: &Statement, visited: usize) -> Result<(), String> {
        let op = match &node.inst {
            Inst::Literal(literal) => return self.fix(node, Fixed::Bits(literal.bits())),
            Inst::Constant(i) => {
                if *i as usize >= self.kernel.constants.len() {
                    return Err(format!("constant {i} is not declared"));
                }
                return self.fix(node, Fixed::Constant(*i));
            }
            Inst::Argument(i) => {
                let param = self.kernel.params.get(*i as usize);
                if !param.is_some_and(|p| matches!(p.kind, ParamKind::Argument(_))) {
                    return Err(format!("parameter {i} is no argument"));
                }
                return self.fix(node, Fixed::Argument(*i));
            }
            Inst::Builtin(which) => {
                let fixed = match which {
                    Builtin::Group(axis) | Builtin::Groups(axis) if *axis > 2 => {
                        return Err(format!("axis {axis}: there are three"));
                    }
                    Builtin::Group(axis) => Fixed::Group(*axis),
                    Builtin::Groups(axis) => Fixed::Groups(*axis),
                    Builtin::Thread => Fixed::Thread,
                    Builtin::Lane => Fixed::Lane,
                    Builtin::Simd => Fixed::Simd,
                };
                return self.fix(node, fixed);
            }
            Inst::Unary(op, a) => match self.ty(*a)? {
                Type::Tile(tile) => {
                    let a = self.tile(*a)?.0;
                    let d = self.define_tile(node)?;
                    Op::TileUnary { op: *op, scalar: tile.scalar, tile, d, a }
                }
                ty => {
                    let (scalar, a) = (ty.scalar(), self.column(*a)?);
                    if !op.takes(scalar) {
                        return Err(format!("{} does not take {scalar}", op.name()));
                    }
                    Op::Unary { op: *op, scalar, d: self.define(node)?, a }
                }
            },
            Inst::Binary(op, a, b) => {
                let (ty, other) = (self.ty(*a)?, self.ty(*b)?);
                if ty != other || !op.takes(ty.scalar()) {
                    return Err(format!("{} does not take {ty} and {other}", op.name()));
                }
                match ty {
                    Type::Tile(tile) => {
                        let (a, b) = (self.tile(*a)?.0, self.tile(*b)?.0);
                        let d = self.define_tile(node)?;
                        Op::TileBinary { op: *op, scalar: tile.scalar, tile, d, a, b }
                    }
                    _ => {
                        let (a, b) = (self.column(*a)?, self.column(*b)?);
                        Op::Binary { op: *op, scalar: ty.scalar(), d: self.define(node)?, a, b }
                    }
                }
            }
            Inst::Fma(a, b, c) => match self.ty(*a)? {
                Type::Tile(tile) => {
                    let [a, b, c] = [*a, *b, *c].map(|v| self.tile_of(v, tile));
                    Op::TileFma { tile, a: a?, b: b?, c: c?, d: self.define_tile(node)? }
                }
                _ => {
                    let [a, b, c] = [*a, *b, *c].map(|v| self.scalar(v, Scalar::F32));
                    Op::Fma { a: a?, b: b?, c: c?, d: self.define(node)? }
                }
            },
            Inst::Select { cond, yes, no } => match self.ty(*yes)? {
                Type::Tile(tile) => {
                    let cond = self.tile_of(*cond, tile.with(Scalar::Bool))?;
                    let [yes, no] = [*yes, *no].map(|v| self.tile_of(v, tile));
                    Op::TileSelect { tile, cond, yes: yes?, no: no?, d: self.define_tile(node)? }
                }
                ty => {
                    let cond = self.scalar(*cond, Scalar::Bool)?;
                    let [yes, no] = [*yes, *no].map(|v| self.scalar(v, ty.scalar()));
                    Op::Select { cond, yes: yes?, no: no?, d: self.define(node)? }
                }
            },
            Inst::Cast(to, a) => return self.cast(node, visited, *to, *a),
            Inst::Bitcast(to, a) => {
                let from = self.ty(*a)?.scalar();
                let a = self.column(*a)?;
                if from.bytes() != to.bytes() {
                    return Err(format!("{from} and {to} differ in size"));
                }
                // In registers signed numbers are extended by their sign, all others by zeros.
                let bits = |s: Scalar| match (s.bytes(), matches!(s, Scalar::I8 | Scalar::I16)) {
                    (1, true) => Scalar::I8,
                    (1, false) => Scalar::U8,
                    (2, true) => Scalar::I16,
                    (2, false) => Scalar::U16,
                    _ => Scalar::U32,
                };
                if bits(from) == bits(*to) {
                    return self.alias(node, vec![a]);
                }
                Op::Cast { from: bits(from), to: bits(*to), d: self.define(node)?, a }
            }
            Inst::Dot4 { a, b, acc } => {
                let [a, b] = [*a, *b].map(|v| self.scalar(v, Scalar::U32));
                let acc = self.scalar(*acc, Scalar::I32)?;
                Op::Dot4 { a: a?, b: b?, acc, d: self.define(node)? }
            }
            Inst::FmaHalves { a, b, c } => {
                let [a, b, c] = [*a, *b, *c].map(|v| self.scalar(v, Scalar::U32));
                Op::FmaHalves { a: a?, b: b?, c: c?, d: self.define(node)? }
            }
            Inst::Lookup { codes, table } => {
                let codes = self.scalar(*codes, Scalar::U32)?;
                let words = table.iter().map(|v| self.scalar(*v, Scalar::U32));
                let table = words.collect::<Result<_, _>>()?;
                Op::Lookup { codes, table, d: self.define(node)? }
            }
            Inst::Pack(values) => {
                let columns = values.iter().map(|v| self.column(*v)).collect::<Result<_, _>>()?;
                return self.alias(node, columns);
            }
            Inst::Extract(vector, i) => {
                let columns = self.columns(*vector)?;
                let Some(column) = columns.get(usize::from(*i)).copied() else {
                    return Err(format!("element {i} of a vector of {}", columns.len()));
                };
                return self.alias(node, vec![column]);
            }
            Inst::Load { place: Place::Register(array), index, .. } => {
                let (array, index) = (*array, self.index(*array, *index)?);
                match self.kernel.registers[array as usize].ty {
                    Type::Tile(_) => {
                        Op::TileRegisterLoad { array, index, d: self.define_tile(node)? }
                    }
                    _ => Op::RegisterLoad { array, index, d: self.define_columns(node)?.into() },
                }
            }
            Inst::Load { place, index, lanes, .. } => {
                let from = self.array(*place)?;
                let index = self.scalar(*index, Scalar::U32)?;
                let d: Box<[Col]> = self.define_columns(node)?.into();
                if d.len() != usize::from(*lanes) {
                    return Err(format!("{lanes} lanes loaded into {}", d.len()));
                }
                Op::Load { from, index, d }
            }
            Inst::Store { place: Place::Register(array), index, value } => {
                let (array, index) = (*array, self.index(*array, *index)?);
                let ty = self.kernel.registers[array as usize].ty;
                if self.ty(*value)? != ty {
                    return Err(format!("{} stored to registers of {ty}", self.ty(*value)?));
                }
                match ty {
                    Type::Tile(_) => {
                        Op::TileRegisterStore { array, index, v: self.tile(*value)?.0 }
                    }
                    _ => Op::RegisterStore { array, index, v: self.columns(*value)?.into() },
                }
            }
            Inst::Store { place, index, value } => {
                let to = self.written(*place)?;
                let element = self.kernel.element(*place).scalar();
                if self.ty(*value)?.scalar() != element {
                    return Err(format!(
                        "{} stored to {}, which holds {element}",
                        self.ty(*value)?,
                        self.kernel.place_name(*place)
                    ));
                }
                let index = self.scalar(*index, Scalar::U32)?;
                Op::Store { to, index, v: self.columns(*value)?.into() }
            }
            Inst::Atomic { op, place, index, value } => {
                let on = self.written(*place)?;
                match on {
                    Array::Buffer(i) => self.atomic_buffers[i as usize] = true,
                    Array::Shared(i) => self.atomic_shared[i as usize] = true,
                }
                let element = self.kernel.element(*place).scalar();
                if !matches!(element, Scalar::F32 | Scalar::I32 | Scalar::U32) {
                    return Err(format!("an atomic on {element}"));
                }
                let index = self.scalar(*index, Scalar::U32)?;
                let v = self.scalar(*value, element)?;
                let d = match node.result {
                    Some(_) => self.define(node)?,
                    None => self.column_of_its_own(),
                };
                Op::Atomic { op: *op, on, index, v, d }
            }
            Inst::Barrier => Op::Barrier,
            Inst::SimdBarrier => Op::SimdBarrier,
            Inst::Fence => Op::Fence,
            Inst::Simd(op, value, lane) => {
                let scalar = self.ty(*value)?.scalar();
                let a = self.column(*value)?;
                let lane = lane.map(|l| self.scalar(l, Scalar::U32)).transpose()?;
                if (*op == crate::ir::SimdOp::Shuffle) != lane.is_some() {
                    return Err("a lane is given for `shuffle` only, and always".to_owned());
                }
                Op::Simd { op: *op, scalar, a, lane, d: self.define(node)? }
            }
            Inst::CopyAsync { to, to_index, from, from_index, lanes, keep } => {
                let (Array::Shared(shared), Array::Buffer(buffer)) =
                    (self.array(*to)?, self.array(*from)?)
                else {
                    return Err("an asynchronous copy goes from a buffer to shared memory".into());
                };
                if self.kernel.element(*to) != self.kernel.element(*from) {
                    return Err("the arrays of an asynchronous copy differ in type".to_owned());
                }
                let bytes = usize::from(*lanes) * self.kernel.element(*to).scalar().bytes();
                if ![4, 8, 16].contains(&bytes) {
                    return Err(format!("an asynchronous copy of {bytes} bytes, not 4, 8 or 16"));
                }
                let [to_index, from_index] =
                    [*to_index, *from_index].map(|v| self.scalar(v, Scalar::U32));
                let keep = keep.map(|k| self.scalar(k, Scalar::Bool)).transpose()?;
                let (to_index, from_index) = (to_index?, from_index?);
                let lanes = u32::from(*lanes);
                Op::CopyAsync { to: shared, to_index, from: buffer, from_index, lanes, keep }
            }
            Inst::CopyCommit => Op::CopyCommit,
            Inst::CopyWait(pending) => Op::CopyWait(*pending),
            Inst::WgmmaFence => Op::WgmmaFence,
            Inst::WgmmaCommit => Op::WgmmaCommit,
            Inst::WgmmaWait(pending) => Op::WgmmaWait(*pending),
            Inst::AsyncFence => Op::AsyncFence,
            // Kernels run one after another here, so neither has anything to do.
            Inst::GridTrigger | Inst::GridWait => return Ok(()),
            _ => self.tile_op(node)?,
        };
        self.emit(node, visited, op);
        Ok(())
    }

    fn tile_op(&mut self, node: &Statement) -> Result<Op, String> {
        Ok(match &node.inst {
            Inst::Splat(ty, a) => {
                let tile = ty.tile().ok_or("a splat makes a tile")?;
                match self.ty(*a)? {
                    Type::Tile(row) if row.role == Role::Row && row.rows == tile.rows => {
                        let a = self.tile(*a)?.0;
                        Op::Across { tile, a, d: self.define_tile(node)? }
                    }
                    Type::Tile(other) => return Err(format!("a splat of {}", Type::Tile(other))),
                    _ => {
                        let a = self.scalar(*a, tile.scalar)?;
                        Op::Splat { tile, a, d: self.define_tile(node)? }
                    }
                }
            }
            Inst::TileLoad { ty, place, index, stride, transposed, swizzled } => {
                let tile = ty.tile().ok_or("a tile load makes a tile")?;
                let from = self.array(*place)?;
                if self.kernel.element(*place).scalar() != tile.scalar {
                    return Err(format!("{ty} from {}", self.kernel.element(*place)));
                }
                let [index, stride] = [*index, *stride].map(|v| self.scalar(v, Scalar::U32));
                let (index, stride) = (index?, stride?);
                let (transposed, swizzled) = (*transposed, *swizzled);
                let d = self.define_tile(node)?;
                Op::TileLoad { tile, from, index, stride, transposed, swizzled, d }
            }
            Inst::TileStore { place, index, stride, value } => {
                let to = self.written(*place)?;
                let (v, tile) = self.tile(*value)?;
                if self.kernel.element(*place).scalar() != tile.scalar {
                    return Err(format!("{} to {}", Type::Tile(tile), self.kernel.element(*place)));
                }
                let [index, stride] = [*index, *stride].map(|v| self.scalar(v, Scalar::U32));
                Op::TileStore { tile, to, index: index?, stride: stride?, v }
            }
            Inst::TileOf(ty, words) => {
                let tile = ty.tile().ok_or("words make a tile")?;
                if words.len() * 64 != tile.elements() {
                    return Err(format!("{ty} of {} words", words.len()));
                }
                let first = self.scalar(words[0], Scalar::U32)?;
                let mut all = [first; 4];
                for (col, word) in all.iter_mut().zip(words) {
                    *col = self.scalar(*word, Scalar::U32)?;
                }
                Op::TileOf { tile, words: all, d: self.define_tile(node)? }
            }
            Inst::Mma { a, b, c } => {
                let ((a, left), (b, right), (c, sum)) =
                    (self.tile(*a)?, self.tile(*b)?, self.tile(*c)?);
                let fits = left.cols == right.rows
                    && (sum.rows, sum.cols) == (left.rows, right.cols)
                    && sum.scalar == Scalar::F32
                    && left.scalar == right.scalar
                    && left.scalar.is_float();
                if !fits {
                    let [a, b, c] = [left, right, sum].map(Type::Tile);
                    return Err(format!("the product {c} + {a} {b} has no meaning"));
                }
                Op::Mma { left, right, a, b, c, d: self.define_tile(node)? }
            }
            Inst::Wgmma { sum, a, a_index, b, b_index } => {
                let Array::Shared(left) = self.array(*a)? else {
                    return Err("a product reads blocks of shared memory".to_owned());
                };
                let scalar = self.kernel.element(*a).scalar();
                let a_index = self.scalar(*a_index, Scalar::U32)?;
                self.warpgroups(*sum, (scalar, Left::Block((left, a_index))), (*b, *b_index))?
            }
            Inst::WgmmaOf { sum, left, b, b_index } => {
                let scalar = self.kernel.element(*b).scalar();
                let tile = Tile::new(scalar, Role::A);
                let slots = left.iter().map(|value| self.tile_of(*value, tile));
                let slots: Vec<Slot> = slots.collect::<Result<_, _>>()?;
                let slots = slots.try_into().map_err(|_| "such a product has no meaning")?;
                self.warpgroups(*sum, (scalar, Left::Tiles(slots)), (*b, *b_index))?
            }
            Inst::RowReduce(op, a) => {
                let (a, tile) = self.tile(*a)?;
                Op::RowReduce { op: *op, tile, a, d: self.define_tile(node)? }
            }
            Inst::TileRow(ty) | Inst::TileCol(ty) => {
                let tile = ty.tile().ok_or("positions make a tile")?;
                let column = matches!(node.inst, Inst::TileCol(_));
                Op::Position { tile, column, d: self.define_tile(node)? }
            }
            Inst::ToLeft(ty, a) => {
                let (a, tile) = self.tile(*a)?;
                let to = ty.scalar();
                Op::TileCast { from: tile.scalar, to, tile, a, d: self.define_tile(node)? }
            }
            other => return Err(format!("{other:?} is not run here")),
        })
    }

    /// Casts between integers of which the wider has 32 bits change no register, so they cost
    /// nothing.
    fn cast(
        &mut self,
        node: &Statement,
        visited: usize,
        to: Scalar,
        a: Value,
    ) -> Result<(), String> {
        let ty = self.ty(a)?;
        let from = ty.scalar();
        if let Type::Tile(tile) = ty {
            let a = self.tile(a)?.0;
            let d = self.define_tile(node)?;
            self.emit(node, visited, Op::TileCast { from, to, tile, d, a });
            return Ok(());
        }
        let columns = self.columns(a)?;
        let widens = !from.is_float() && matches!(to, Scalar::I32 | Scalar::U32);
        if from == to || widens {
            return self.alias(node, columns);
        }
        let defined = self.define_columns(node)?;
        if defined.len() != columns.len() {
            return Err(format!("a cast of {} lanes to {}", columns.len(), defined.len()));
        }
        for (d, a) in defined.into_iter().zip(columns) {
            self.emit(node, visited, Op::Cast { from, to, d, a });
        }
        Ok(())
    }

    fn ty(&self, value: Value) -> Result<Type, String> {
        let ty = self.kernel.values.get(value.0 as usize);
        ty.copied().ok_or_else(|| format!("%{} is not declared", value.0))
    }

    fn home(&self, value: Value) -> Result<&Home, String> {
        let home = self.homes.get(value.0 as usize).and_then(Option::as_ref);
        home.ok_or_else(|| format!("%{} is used where it is not defined", value.0))
    }

    fn columns(&self, value: Value) -> Result<Vec<Col>, String> {
        match self.home(value)? {
            Home::Columns(columns) => Ok(columns.clone()),
            Home::Tile(_) => Err(format!("%{} is a tile, not a number", value.0)),
        }
    }

    fn column(&self, value: Value) -> Result<Col, String> {
        match self.columns(value)?.as_slice() {
            [column] => Ok(*column),
            _ => Err(format!("%{} is a vector, not a number", value.0)),
        }
    }

    fn scalar(&self, value: Value, expected: Scalar) -> Result<Col, String> {
        let found = self.ty(value)?;
        if found != Type::Scalar(expected) {
            return Err(format!("%{} is {found}, {expected} expected", value.0));
        }
        self.column(value)
    }

    /// A product that adds to registers.
    fn warpgroups(
        &self,
        sum: Place,
        (scalar, left): (Scalar, Left),
        (b, b_index): (Place, Value),
    ) -> Result<Op, String> {
        let (Place::Register(sum), Array::Shared(right)) = (sum, self.array(b)?) else {
            return Err("a product adds blocks of shared memory to registers".to_owned());
        };
        let sums = &self.kernel.registers[sum as usize];
        let whole = sums.ty == Type::Tile(Tile::new(Scalar::F32, Role::C))
            && self.kernel.element(b).scalar() == scalar
            && matches!(scalar, Scalar::F16 | Scalar::BF16)
            && self.kernel.launch.threads.is_multiple_of(128);
        if !whole {
            return Err("such a product has no meaning".to_owned());
        }
        let b = (right, self.scalar(b_index, Scalar::U32)?);
        Ok(Op::Wgmma(Product { scalar, sum, tiles: sums.len, left, b }))
    }

    fn tile(&self, value: Value) -> Result<(Slot, Tile), String> {
        match (self.home(value)?, self.ty(value)?) {
            (Home::Tile(slot), Type::Tile(tile)) => Ok((*slot, tile)),
            _ => Err(format!("%{} is a number, not a tile", value.0)),
        }
    }

    fn tile_of(&self, value: Value, expected: Tile) -> Result<Slot, String> {
        match self.tile(value)? {
            (slot, tile) if tile == expected => Ok(slot),
            (_, tile) => Err(format!(
                "%{} is {}, {} expected",
                value.0,
                Type::Tile(tile),
                Type::Tile(expected)
            )),
        }
    }

    fn array(&self, place: Place) -> Result<Array, String> {
        match place {
            Place::Buffer(i) => match self.kernel.params.get(i as usize).map(|p| p.kind) {
                Some(ParamKind::Buffer { .. }) => Ok(Array::Buffer(i)),
                _ => Err(format!("parameter {i} is no buffer")),
            },
            Place::Shared(i) if (i as usize) < self.kernel.shared.len() => Ok(Array::Shared(i)),
            Place::Shared(i) => Err(format!("shared array {i} is not declared")),
            Place::Register(_) => Err("registers cannot be used here".to_owned()),
        }
    }

    fn written(&self, place: Place) -> Result<Array, String> {
        let array = self.array(place)?;
        if let Array::Buffer(i) = array {
            let param = &self.kernel.params[i as usize];
            if matches!(param.kind, ParamKind::Buffer { access: Access::In, .. }) {
                return Err(format!("`{}` is an input: it is read only", param.name));
            }
        }
        Ok(array)
    }

    /// An index into a register array: known and checked now, or a column.
    fn index(&self, array: u32, value: Value) -> Result<Index, String> {
        let Some(declared) = self.kernel.registers.get(array as usize) else {
            return Err(format!("register array {array} is not declared"));
        };
        let column = self.scalar(value, Scalar::U32)?;
        match self.literals.get(&column) {
            Some(i) if *i < declared.len => Ok(Index::Known(*i)),
            // Out of bounds is a fault only if it is reached.
            _ => Ok(Index::Each(column)),
        }
    }

    fn place_value(&mut self, value: Value, home: Home) -> Result<(), String> {
        match self.homes.get_mut(value.0 as usize) {
            Some(slot @ None) => *slot = Some(home),
            _ => return Err(format!("%{} is defined twice", value.0)),
        }
        if let Some(scope) = self.scopes.last_mut() {
            scope.push(value);
        }
        Ok(())
    }

    fn result(node: &Statement) -> Result<Value, String> {
        node.result.ok_or_else(|| "its result has no name".to_owned())
    }

    fn alias(&mut self, node: &Statement, columns: Vec<Col>) -> Result<(), String> {
        self.place_value(Self::result(node)?, Home::Columns(columns))
    }

    fn fix(&mut self, node: &Statement, fixed: Fixed) -> Result<(), String> {
        let column = match self.fixed.get(&fixed) {
            Some(column) => *column,
            None => {
                let column = self.column_of_its_own();
                self.fixed.insert(fixed, column);
                if let Fixed::Bits(bits) = fixed {
                    self.literals.insert(column, bits);
                }
                column
            }
        };
        self.alias(node, vec![column])
    }

    fn column_of_its_own(&mut self) -> Col {
        self.columns += 1;
        self.columns - 1
    }

    fn define_scalar(&mut self, value: Value) -> Result<Col, String> {
        let column = self.column_of_its_own();
        self.place_value(value, Home::Columns(vec![column]))?;
        Ok(column)
    }

    fn define(&mut self, node: &Statement) -> Result<Col, String> {
        let value = Self::result(node)?;
        match self.ty(value)? {
            Type::Scalar(_) => self.define_scalar(value),
            ty => Err(format!("its result is {ty}, not a number")),
        }
    }

    fn define_columns(&mut self, node: &Statement) -> Result<Vec<Col>, String> {
        let value = Self::result(node)?;
        let lanes = match self.ty(value)? {
            Type::Scalar(_) => 1,
            Type::Vector(_, lanes) => lanes,
            ty @ Type::Tile(_) => return Err(format!("its result is {ty}, not numbers")),
        };
        let columns: Vec<Col> = (0..lanes).map(|_| self.column_of_its_own()).collect();
        self.place_value(value, Home::Columns(columns.clone()))?;
        Ok(columns)
    }

    fn define_tile(&mut self, node: &Statement) -> Result<Slot, String> {
        let value = Self::result(node)?;
        match self.ty(value)? {
            Type::Tile(tile) if tile.elements() <= super::tiles::ELEMENTS => {}
            ty => return Err(format!("its result is {ty}, not a tile")),
        }
        self.tiles += 1;
        self.place_value(value, Home::Tile(self.tiles - 1))?;
        Ok(self.tiles - 1)
    }
}
