//! The rules of instructions: what their operands are, and so what their result is.

use super::contract::well_formed;
use crate::instr::{BinaryOp, UnaryOp};
use crate::ir::{Access, Builtin, Inst, Kernel, Literal, ParamKind, Place, SimdOp, Value};
use crate::types::{Role, Scalar, Tile, Type};

mod memory;
mod tiles;

/// The type of an instruction's result, `None` if it has none; or the rule it breaks.
pub(crate) type Computed = Result<Option<Type>, String>;

/// A kernel and the questions that rules ask of it. Every value asked for is one of the kernel's.
pub(crate) struct Operands<'k> {
    kernel: &'k Kernel,
    /// The values that are u32 literals.
    literals: Vec<Option<u32>>,
}

impl<'k> Operands<'k> {
    pub(super) fn new(kernel: &'k Kernel) -> Self {
        let mut literals = vec![None; kernel.values.len()];
        kernel.visit(&mut |node| {
            if let (Inst::Literal(Literal::U32(n)), Some(value)) = (&node.inst, node.result)
                && let Some(literal) = literals.get_mut(value.0 as usize)
            {
                *literal = Some(*n);
            }
        });
        Operands { kernel, literals }
    }

    /// The type of what an instruction computes: always one of the language's.
    pub(super) fn result(&self, inst: &Inst) -> Computed {
        let ty = inst.computed(self)?;
        ty.map_or(Ok(()), well_formed)?;
        Ok(ty)
    }

    /// A constant is one of the kernel's.
    pub(crate) fn constant(&self, index: u32) -> Computed {
        match self.kernel.constants.get(index as usize) {
            Some(constant) => Ok(Some(constant.scalar.into())),
            None => Err(format!("there is no constant number {index}")),
        }
    }

    /// An argument is a parameter that is no buffer.
    pub(crate) fn argument(&self, index: u32) -> Computed {
        match self.kernel.params.get(index as usize) {
            Some(param) => match param.kind {
                ParamKind::Argument(scalar) => Ok(Some(scalar.into())),
                ParamKind::Buffer { .. } => Err(format!("`{}` is a buffer", param.name)),
            },
            None => Err(format!("there is no parameter number {index}")),
        }
    }

    /// A grid has three axes.
    pub(crate) fn builtin(&self, which: Builtin) -> Computed {
        match which {
            Builtin::Group(axis) | Builtin::Groups(axis) if axis > 2 => {
                Err(format!("axis 0, 1 or 2 expected, found {axis}"))
            }
            _ => Ok(Some(Scalar::U32.into())),
        }
    }

    /// Each operation says which element types it takes; storage types are none of them.
    pub(crate) fn unary(&self, op: UnaryOp, a: Value) -> Computed {
        let ty = self.element_wise(a)?;
        if op.takes(ty.scalar()) { Ok(Some(ty)) } else { Err(not_taken(ty)) }
    }

    /// Both operands have one type; a comparison's result is bool in their shape.
    pub(crate) fn binary(&self, op: BinaryOp, a: Value, b: Value) -> Computed {
        let ty = self.element_wise(a)?;
        self.same(a, b)?;
        if op.takes(ty.scalar()) {
            Ok(Some(ty.with(op.result(ty.scalar()))))
        } else {
            Err(not_taken(ty))
        }
    }

    /// All three operands have one type, of f32.
    pub(crate) fn fma(&self, a: Value, b: Value, c: Value) -> Computed {
        let ty = self.element_wise(a)?;
        self.same(a, b)?;
        self.same(a, c)?;
        if ty.scalar() == Scalar::F32 { Ok(Some(ty)) } else { Err(not_taken(ty)) }
    }

    /// Both choices have one type, and the condition is bool in their shape.
    pub(crate) fn select(&self, cond: Value, yes: Value, no: Value) -> Computed {
        let ty = self.element_wise(yes)?;
        self.same(yes, no)?;
        self.is("the condition", cond, ty.with(Scalar::Bool))?;
        Ok(Some(ty))
    }

    /// Any element type to any other in the same shape, so long as the language has such a type.
    pub(crate) fn cast(&self, to: Scalar, a: Value) -> Computed {
        Ok(Some(self.ty(a).with(to)))
    }

    /// Scalars of one size; a bool has no bits to speak of.
    pub(crate) fn bitcast(&self, to: Scalar, a: Value) -> Computed {
        match self.ty(a) {
            Type::Scalar(from)
                if from.bytes() == to.bytes() && from != Scalar::Bool && to != Scalar::Bool =>
            {
                Ok(Some(to.into()))
            }
            from => Err(format!("two scalars of one size expected, found {from} and {to}")),
        }
    }

    /// Packed bytes in u32, summed in i32.
    pub(crate) fn dot4(&self, a: Value, b: Value, acc: Value) -> Computed {
        self.is("the first operand", a, Scalar::U32)?;
        self.is("the second operand", b, Scalar::U32)?;
        self.is("the sum", acc, Scalar::I32)?;
        Ok(Some(Scalar::I32.into()))
    }

    /// Two f16 in each u32.
    pub(crate) fn fma_halves(&self, operands: [Value; 3]) -> Computed {
        let names = ["the first operand", "the second operand", "what is added"];
        for (name, value) in names.into_iter().zip(operands) {
            self.is(name, value, Scalar::U32)?;
        }
        Ok(Some(Scalar::U32.into()))
    }

    /// Four words of bytes, and a word of codes.
    pub(crate) fn lookup(&self, codes: Value, table: &[Value]) -> Computed {
        self.is("the codes", codes, Scalar::U32)?;
        if table.len() != 4 {
            return Err(format!("a table of 4 words expected, found {}", table.len()));
        }
        for word in table {
            self.is("a word of the table", *word, Scalar::U32)?;
        }
        Ok(Some(Scalar::U32.into()))
    }

    /// Scalars of one type, as many as a vector has lanes.
    pub(crate) fn pack(&self, values: &[Value]) -> Computed {
        let (first, scalar) = match values.first().map(|v| (*v, self.ty(*v))) {
            Some((first, Type::Scalar(scalar))) => (first, scalar),
            Some((_, other)) => return Err(format!("scalars expected, found {other}")),
            None => return Err("scalars expected, found none".to_owned()),
        };
        values.iter().try_for_each(|v| self.same(first, *v))?;
        let lanes = u8::try_from(values.len());
        let lanes = lanes.map_err(|_| format!("at most 16 expected, found {}", values.len()))?;
        Ok(Some(Type::Vector(scalar, lanes)))
    }

    /// A lane that the vector has.
    pub(crate) fn extract(&self, vector: Value, lane: u8) -> Computed {
        match self.ty(vector) {
            Type::Vector(scalar, lanes) if lane < lanes => Ok(Some(scalar.into())),
            Type::Vector(_, lanes) => Err(format!("a lane below {lanes} expected, found {lane}")),
            other => Err(format!("a vector expected, found {other}")),
        }
    }

    /// Exchanges take 32-bit numbers, prefix sums whole ones, votes truth values. A shuffle names
    /// the lane it reads and nothing else does; a simdgroup has 32 lanes.
    pub(crate) fn simd(&self, op: SimdOp, value: Value, lane: Option<Value>) -> Computed {
        use Scalar::{Bool, F32, I32, U32};
        let ty = self.ty(value);
        let (takes, result): (&[Scalar], Type) = match op {
            SimdOp::Reduce(_) | SimdOp::Shuffle | SimdOp::ShuffleXor(_) => (&[F32, I32, U32], ty),
            SimdOp::PrefixSum => (&[I32, U32], ty),
            SimdOp::Any | SimdOp::All => (&[Bool], Bool.into()),
            SimdOp::Ballot => (&[Bool], U32.into()),
        };
        if !takes.iter().any(|s| ty == (*s).into()) {
            return Err(not_taken(ty));
        }
        match (op, lane) {
            (SimdOp::Shuffle, Some(lane)) => self.is("the lane", lane, U32)?,
            (SimdOp::Shuffle, None) => return Err("a lane to read expected".to_owned()),
            (_, Some(_)) => return Err("one operand expected, found a lane too".to_owned()),
            (SimdOp::ShuffleXor(mask), None) if mask >= 32 => {
                return Err(format!("a mask below 32 expected, found {mask}"));
            }
            (_, None) => {}
        }
        Ok(Some(result))
    }

    /// A loop's bounds are u32 and its step, where it is a literal, positive.
    pub(crate) fn bounds(&self, start: Value, end: Value, step: Value) -> Computed {
        self.is("the start", start, Scalar::U32)?;
        self.is("the end", end, Scalar::U32)?;
        self.is("the step", step, Scalar::U32)?;
        if self.literal(step) == Some(0) {
            return Err("a positive step expected, found 0".to_owned());
        }
        Ok(None)
    }

    /// A condition is one bool.
    pub(crate) fn condition(&self, cond: Value) -> Computed {
        self.is("the condition", cond, Scalar::Bool)?;
        Ok(None)
    }

    // ------------------------------------------------------------ questions

    fn ty(&self, value: Value) -> Type {
        self.kernel.ty(value)
    }

    fn literal(&self, value: Value) -> Option<u32> {
        self.literals.get(value.0 as usize).copied().flatten()
    }

    /// Arithmetic is element-wise on scalars and on accumulator and row tiles; vectors and operands
    /// have none.
    fn element_wise(&self, value: Value) -> Result<Type, String> {
        match self.ty(value) {
            Type::Vector(..) => {
                Err(format!("{}; hint: extract its lanes", not_taken(self.ty(value))))
            }
            Type::Tile(Tile { role: Role::A | Role::B, .. }) => Err(not_taken(self.ty(value))),
            ty => Ok(ty),
        }
    }

    fn same(&self, a: Value, b: Value) -> Result<(), String> {
        let (first, other) = (self.ty(a), self.ty(b));
        if first == other {
            return Ok(());
        }
        Err(format!("operands of one type expected, found {first} and {other}"))
    }

    fn is(&self, what: &str, value: Value, wanted: impl Into<Type>) -> Result<(), String> {
        let (wanted, found) = (wanted.into(), self.ty(value));
        if wanted == found {
            return Ok(());
        }
        Err(format!("{what} is {found}: {wanted} expected"))
    }

    /// The kernel's access to a buffer.
    fn access(&self, place: Place) -> Option<Access> {
        let Place::Buffer(index) = place else { return None };
        match self.kernel.params.get(index as usize)?.kind {
            ParamKind::Buffer { access, .. } => Some(access),
            ParamKind::Argument(_) => None,
        }
    }
}

fn not_taken(ty: Type) -> String {
    format!("it does not take {ty}")
}
