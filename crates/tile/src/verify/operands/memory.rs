//! The rules of instructions that touch arrays.

use super::{Computed, Operands};
use crate::ir::{Access, Array, AtomicOp, LoadHint, ParamKind, Place, Value};
use crate::types::{Scalar, Type};

impl Operands<'_> {
    /// From registers one element; from memory a scalar or a vector. Hints are for buffers, and
    /// `stream` only for one that the kernel does not write, since it may be read around the cache
    /// that holds the write.
    pub(crate) fn load(&self, place: Place, index: Value, lanes: u8, hint: LoadHint) -> Computed {
        let element = self.element(place, index)?;
        let register = matches!(place, Place::Register(_));
        if register && lanes != 1 {
            return Err(format!("one element of a register array expected, found {lanes}"));
        }
        match (hint, self.access(place)) {
            (LoadHint::None, _)
            | (LoadHint::Coherent, Some(_))
            | (LoadHint::Stream, Some(Access::In)) => {}
            (LoadHint::Stream, _) => return Err("`stream` is for buffers that are `in`".to_owned()),
            (LoadHint::Coherent, _) => return Err("`coherent` is for buffers".to_owned()),
        }
        if lanes == 1 {
            return Ok(Some(element));
        }
        self.aligned(index, lanes)?;
        Ok(Some(Type::Vector(element.scalar(), lanes)))
    }

    /// The element's type, or to memory a vector of it; never to a buffer that is `in`.
    pub(crate) fn store(&self, place: Place, index: Value, value: Value) -> Computed {
        let element = self.element(place, index)?;
        self.writable(place)?;
        match self.ty(value) {
            ty if ty == element => Ok(None),
            Type::Vector(scalar, lanes)
                if element == scalar.into() && !matches!(place, Place::Register(_)) =>
            {
                self.aligned(index, lanes)?;
                Ok(None)
            }
            ty => Err(format!("{element} expected, found {ty}")),
        }
    }

    /// u32 and i32 in buffers and shared arrays; f32 is only added, and only in buffers: what every
    /// target has.
    pub(crate) fn atomic(
        &self,
        op: AtomicOp,
        place: Place,
        index: Value,
        value: Value,
    ) -> Computed {
        let element = self.element(place, index)?;
        self.writable(place)?;
        self.is("the operand", value, element)?;
        let whole = element == Scalar::U32.into() || element == Scalar::I32.into();
        let sum = op == AtomicOp::Add && element == Scalar::F32.into();
        match place {
            Place::Register(_) => {
                Err("a buffer or shared array expected, found registers".to_owned())
            }
            Place::Buffer(_) if whole || sum => Ok(Some(element)),
            Place::Shared(_) if whole => Ok(Some(element)),
            Place::Buffer(_) => {
                Err(format!("u32 or i32 (or f32 to add) expected, found {element}"))
            }
            Place::Shared(_) => Err(format!("u32 or i32 expected, found {element}")),
        }
    }

    /// From a buffer that is read to a shared array of its type, 4, 8 or 16 bytes.
    pub(crate) fn copy(
        &self,
        (to, to_index): (Place, Value),
        (from, from_index): (Place, Value),
        lanes: u8,
        keep: Option<Value>,
    ) -> Computed {
        let target = self.element(to, to_index)?;
        let origin = self.element(from, from_index)?;
        let (Place::Shared(_), Place::Buffer(_)) = (to, from) else {
            return Err("a copy from a buffer to a shared array expected".to_owned());
        };
        if self.access(from) == Some(Access::Out) {
            return Err("a buffer that is `in` or `inout` expected, found `out`".to_owned());
        }
        if target != origin {
            return Err(format!("arrays of one type expected, found {target} and {origin}"));
        }
        let bytes = origin.scalar().bytes() * usize::from(lanes);
        if !matches!(bytes, 4 | 8 | 16) {
            return Err(format!("4, 8 or 16 bytes expected, found {bytes}"));
        }
        self.aligned(to_index, lanes)?;
        self.aligned(from_index, lanes)?;
        if let Some(keep) = keep {
            self.is("what follows `keep`", keep, Scalar::Bool)?;
        }
        Ok(None)
    }

    /// The element type of an array that the kernel has, at an index of u32. A literal index lies
    /// in the array, and an index of tiles in registers is a literal: which registers hold a tile
    /// cannot be computed.
    pub(super) fn element(&self, place: Place, index: Value) -> Result<Type, String> {
        let missing = |what: &str, i: u32| format!("there is no {what} number {i}");
        let literal = self.literal(index);
        let sized = |array: &Array| match literal {
            Some(i) if i >= array.len => {
                Err(format!("`{}` has {} elements, found index {i}", array.name, array.len))
            }
            None if array.ty.tile().is_some() && matches!(place, Place::Register(_)) => {
                Err(format!("`{}` holds tiles: a literal index expected", array.name))
            }
            _ => Ok(array.ty),
        };
        let k = self.kernel;
        let ty = match place {
            Place::Buffer(i) => {
                let param = k.params.get(i as usize).ok_or_else(|| missing("parameter", i))?;
                match param.kind {
                    ParamKind::Buffer { scalar, .. } => scalar.into(),
                    ParamKind::Argument(_) => {
                        return Err(format!("`{}` is an argument: an array expected", param.name));
                    }
                }
            }
            Place::Shared(i) => {
                sized(k.shared.get(i as usize).ok_or_else(|| missing("shared array", i))?)?
            }
            Place::Register(i) => {
                sized(k.registers.get(i as usize).ok_or_else(|| missing("register array", i))?)?
            }
        };
        self.is("the index", index, Scalar::U32)?;
        Ok(ty)
    }

    /// A buffer that is `in` is never written.
    pub(super) fn writable(&self, place: Place) -> Result<(), String> {
        if self.access(place) != Some(Access::In) {
            return Ok(());
        }
        Err(format!("`{}` is `in`: it is never written", self.kernel.place_name(place)))
    }

    /// Vectors lie at multiples of their lanes, which literal indices show.
    fn aligned(&self, index: Value, lanes: u8) -> Result<(), String> {
        match self.literal(index) {
            Some(i) if !i.is_multiple_of(u32::from(lanes)) => {
                Err(format!("an index that is a multiple of {lanes} expected, found {i}"))
            }
            _ => Ok(()),
        }
    }
}
