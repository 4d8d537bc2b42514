//! The rules of instructions on tiles.

use super::{Computed, Operands};
use crate::ir::{Array, Place, ROW, Value};
use crate::types::{Role, Scalar, Tile, Type};

impl Operands<'_> {
    /// An accumulator or a row from one scalar, or an accumulator from the row of its size; of one
    /// element type.
    pub(crate) fn splat(&self, ty: Type, value: Value) -> Computed {
        let to = role(ty, &[Role::C, Role::Row])?;
        let row = Tile::sized(to.scalar, Role::Row, to.rows);
        match self.ty(value) {
            from if from == to.scalar.into() => Ok(Some(ty)),
            from if from == row.into() && to.role == Role::C => Ok(Some(ty)),
            from => Err(format!("{} or {} expected, found {from}", to.scalar, Type::Tile(row))),
        }
    }

    /// An operand of a product, or an f32 accumulator, from a buffer or shared array of its element
    /// type; swizzled ones are operands of 16 bits in shared memory.
    pub(crate) fn tile_load(
        &self,
        ty: Type,
        place: Place,
        (index, stride): (Value, Value),
        swizzled: bool,
    ) -> Computed {
        let to = role(ty, &[Role::A, Role::B, Role::C])?;
        if to.role == Role::C && to.scalar != Scalar::F32 {
            return Err(format!("an accumulator of f32 expected, found {ty}"));
        }
        let blocks = to.scalar.bytes() == 2 && matches!(place, Place::Shared(_));
        if swizzled && !blocks {
            return Err(format!(
                "16 bits in shared memory expected of a swizzled tile, found {ty}"
            ));
        }
        self.tile_memory(to, place, index, stride)?;
        Ok(Some(ty))
    }

    /// An f16 or bf16 operand of a product, of four words or, if it has 8 rows, of one.
    pub(crate) fn tile_of(&self, ty: Type, words: &[Value]) -> Computed {
        let to = role(ty, &[Role::A, Role::B])?;
        if !matches!(to.scalar, Scalar::F16 | Scalar::BF16) {
            return Err(format!("an operand of f16 or bf16 expected, found {ty}"));
        }
        let wanted = to.elements() / 64;
        if words.len() != wanted {
            return Err(format!("{wanted} words for {ty} expected, found {}", words.len()));
        }
        for word in words {
            self.is("a word", *word, Scalar::U32)?;
        }
        Ok(Some(ty))
    }

    /// An accumulator to a buffer or shared array of its element type.
    pub(crate) fn tile_store(
        &self,
        place: Place,
        index: Value,
        stride: Value,
        value: Value,
    ) -> Computed {
        let from = role(self.ty(value), &[Role::C])?;
        self.writable(place)?;
        self.tile_memory(from, place, index, stride)?;
        Ok(None)
    }

    /// f16 by f16 or bf16 by bf16, summed in f32, all of one size.
    pub(crate) fn mma(&self, a: Value, b: Value, c: Value) -> Computed {
        let left = role(self.ty(a), &[Role::A])?;
        let right = role(self.ty(b), &[Role::B])?;
        let sum = role(self.ty(c), &[Role::C])?;
        if !matches!(left.scalar, Scalar::F16 | Scalar::BF16) || left.scalar != right.scalar {
            let (left, right) = (left.scalar, right.scalar);
            return Err(format!("f16 by f16 or bf16 by bf16 expected, found {left} by {right}"));
        }
        if sum.scalar != Scalar::F32 {
            return Err(format!("an accumulator of f32 expected, found {}", sum.scalar));
        }
        if left.rows != right.rows || left.rows != sum.rows {
            let (m, k, n) = (left.rows, right.rows, sum.rows);
            return Err(format!("tiles of one size expected, found {m}, {k} and {n} rows"));
        }
        Ok(Some(sum.into()))
    }

    /// At most sixteen registers of f32 accumulators; f16 by f16 or bf16 by bf16 in shared arrays,
    /// both at multiples of 1024 bytes and of whole kilobytes, the blocks too. Threads in whole
    /// warpgroups.
    pub(crate) fn wgmma(
        &self,
        sum: Place,
        (a, a_index): (Place, Value),
        b: (Place, Value),
    ) -> Computed {
        let right = self.wgmma_right(sum, b)?;
        let left = self.block(a, a_index, 64)?;
        if !matches!(left, Scalar::F16 | Scalar::BF16) || left != right {
            return Err(format!("f16 by f16 or bf16 by bf16 expected, found {left} by {right}"));
        }
        Ok(None)
    }

    /// As [`Self::wgmma`], with four left operands of 16 x 16 of the right one's type.
    pub(crate) fn wgmma_of(&self, sum: Place, left: &[Value], b: (Place, Value)) -> Computed {
        let right = self.wgmma_right(sum, b)?;
        if !matches!(right, Scalar::F16 | Scalar::BF16) {
            return Err(format!("a block of f16 or bf16 expected, found {right}"));
        }
        let expected = Type::Tile(Tile::new(right, Role::A));
        if left.len() != 4 {
            return Err(format!("four left operands expected, found {}", left.len()));
        }
        match left.iter().map(|value| self.ty(*value)).find(|ty| *ty != expected) {
            Some(found) => Err(format!("left operands of {expected} expected, found {found}")),
            None => Ok(None),
        }
    }

    /// What a warpgroup adds to, and the right side: the type of its elements.
    fn wgmma_right(&self, sum: Place, (b, b_index): (Place, Value)) -> Result<Scalar, String> {
        let k = self.kernel;
        let sums = match sum {
            Place::Register(i) => k.registers.get(i as usize),
            _ => None,
        };
        let accumulator = Type::Tile(Tile::new(Scalar::F32, Role::C));
        let Some(Array { len: tiles @ 1..=16, .. }) = sums.filter(|s| s.ty == accumulator) else {
            let found = sums.map_or("another array".to_owned(), |s| format!("{}[{}]", s.ty, s.len));
            return Err(format!("1 to 16 registers of {accumulator} expected, found {found}"));
        };
        let right = self.block(b, b_index, 16 * tiles)?;
        if !k.launch.threads.is_multiple_of(128) {
            let threads = k.launch.threads;
            return Err(format!("whole warpgroups of 128 threads expected, found {threads}"));
        }
        Ok(right)
    }

    /// A block of `rows` rows in a shared array: its element type.
    fn block(&self, place: Place, index: Value, rows: u32) -> Result<Scalar, String> {
        let element = self.element(place, index)?;
        let Place::Shared(at) = place else {
            return Err("a shared array expected".to_owned());
        };
        let (before, from) = self.kernel.shared.split_at(at as usize);
        let bytes = |array: &Array| {
            (u64::from(array.len) * array.ty.scalar().bytes() as u64).next_multiple_of(16)
        };
        let (start, len) = (before.iter().map(bytes).sum::<u64>(), bytes(&from[0]));
        let name = self.kernel.place_name(place);
        if !start.is_multiple_of(1024) || !len.is_multiple_of(1024) {
            return Err(format!(
                "`{name}`: whole kilobytes expected, found {len} bytes after {start}; hint: declare it before smaller arrays"
            ));
        }
        let (within, size) = (from[0].len, rows * ROW);
        if size > within {
            return Err(format!("`{name}`: a block of {size} elements expected, it has {within}"));
        }
        if let Some(i) = self.literal(index).filter(|i| !i.is_multiple_of(8 * ROW)) {
            return Err(format!("an index that is a multiple of {} expected, found {i}", 8 * ROW));
        }
        Ok(element.scalar())
    }

    /// An f32 accumulator to the f32 row of its size.
    pub(crate) fn row_reduce(&self, value: Value) -> Computed {
        let from = role(self.ty(value), &[Role::C])?;
        if from.scalar != Scalar::F32 {
            return Err(format!("an accumulator of f32 expected, found {}", from.scalar));
        }
        Ok(Some(Tile::sized(Scalar::F32, Role::Row, from.rows).into()))
    }

    /// Row and column numbers are u32 accumulators.
    pub(crate) fn positions(&self, ty: Type) -> Computed {
        if role(ty, &[Role::C])?.scalar != Scalar::U32 {
            return Err(format!("an accumulator of u32 expected, found {ty}"));
        }
        Ok(Some(ty))
    }

    /// An f32 accumulator to the f16 or bf16 left operand of its size.
    pub(crate) fn to_left(&self, ty: Type, value: Value) -> Computed {
        let to = role(ty, &[Role::A])?;
        let from = role(self.ty(value), &[Role::C])?;
        let rounds = matches!(to.scalar, Scalar::F16 | Scalar::BF16);
        if from.scalar != Scalar::F32 || from.rows != to.rows || !rounds {
            let from = self.ty(value);
            return Err(format!(
                "an f32 accumulator to an f16 or bf16 operand of its size expected, found {from} to {ty}"
            ));
        }
        Ok(Some(ty))
    }

    /// Memory of the tile's element type, which registers are not, at an index and with a stride of
    /// u32.
    fn tile_memory(
        &self,
        tile: Tile,
        place: Place,
        index: Value,
        stride: Value,
    ) -> Result<(), String> {
        let element = self.element(place, index)?;
        self.is("the stride", stride, Scalar::U32)?;
        if let Place::Register(_) = place {
            return Err("a buffer or shared array expected, found registers".to_owned());
        }
        if element != tile.scalar.into() {
            return Err(format!("memory of {} expected, found {element}", tile.scalar));
        }
        Ok(())
    }
}

/// The tile, if it has one of these roles.
fn role(ty: Type, roles: &[Role]) -> Result<Tile, String> {
    let wanted = || roles.iter().map(|r| r.name()).collect::<Vec<_>>().join(" or ");
    let tile = ty.tile().filter(|t| roles.contains(&t.role));
    tile.ok_or_else(|| format!("a tile with role {} expected, found {ty}", wanted()))
}
