//! How kernels go over the matrices that a recurrence carries through packed sequences: those of
//! gated delta nets ([`super::delta`]) and of state spaces ([`super::scan`]), whose `C`, `B` and
//! `x` are what others call queries, keys and values (Dao & Gu 2024, section 7.2).
//!
//! A head's matrix `[key_dim, value_dim]` lies in registers while the rows of a sequence, or of a
//! block of rows, pass. Lanes have columns of it where sums are over keys, and rows (`turned`)
//! where they are over values, so that no sum leaves a simdgroup.

use tile::dsl::*;
use tile::launch::{Extent, Mode};

use crate::delta_net::MAX_KEY_DIM;
use crate::recurrence::{COLUMN_LANES, KEY_LANES, Share};
use crate::sweep::{load, when};
use formats::{Error, ErrorKind, Result};

/// The parameters that distinguish the kernels of matrices `[key_dim, value_dim]`, and how lanes
/// share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedForm {
    /// Elements of a query or key, of `B` or `C`.
    pub key_dim: u32,
    /// Elements of a value, of a head's `x`.
    pub value_dim: u32,
    /// Whether lanes have rows of the matrix, in parts that several share, instead of columns.
    pub turned: bool,
    /// Neighbouring elements of a row or column that a lane has.
    pub run: u8,
    /// Neighbouring rows or columns that a lane has a share of.
    pub wide: u8,
    /// Simdgroups of a threadgroup, each with rows or columns of its own.
    pub simds: u32,
    /// See [`DeltaNet::tiled`](crate::DeltaNet::tiled).
    pub tiled: bool,
    /// See [`DeltaNet::doubled`](crate::DeltaNet::doubled).
    pub doubled: bool,
    /// See [`DeltaNet::by_element`](crate::DeltaNet::by_element).
    pub by_element: bool,
}

impl PackedForm {
    /// The form in which lanes have columns, or rows if `turned`, of an operation whose rows have
    /// `width` elements. `sizes` are those of keys and of values, and what the operation calls
    /// them.
    ///
    /// # Errors
    /// Keys or values that do not fit a simdgroup's registers.
    pub fn new(
        op: &str,
        sizes: [(&str, usize); 2],
        width: usize,
        turned: bool,
    ) -> Result<PackedForm> {
        for (what, len) in sizes {
            if len > MAX_KEY_DIM {
                let expected = format!("{what} of up to {MAX_KEY_DIM} elements");
                return Err(Error::new(op, expected, len).of(ErrorKind::Unsupported));
            }
        }
        Ok(PackedForm::of_sizes(sizes.map(|(_, len)| len), width, turned))
    }

    /// The same for keys and values of any numbers of elements.
    pub(super) fn of_sizes(
        [key_dim, value_dim]: [usize; 2],
        width: usize,
        turned: bool,
    ) -> PackedForm {
        let (shared, own) = if turned { (value_dim, key_dim) } else { (key_dim, value_dim) };
        let fours = shared.is_multiple_of(4 * KEY_LANES as usize) && width.is_multiple_of(4);
        let pairs = own.is_multiple_of(2) && width.is_multiple_of(2);
        let wide = if pairs { 2 } else { 1 };
        let several = own.is_multiple_of(4 * COLUMN_LANES as usize * wide);
        PackedForm {
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            turned,
            run: if fours { 4 } else { 1 },
            wide: wide as u8,
            simds: if several { 4 } else { 1 },
            tiled: false,
            doubled: false,
            by_element: false,
        }
    }

    /// A lane's share of a row or column.
    pub(super) fn share(self) -> Share {
        Share { len: if self.turned { self.value_dim } else { self.key_dim }, run: self.run }
    }

    /// Rows, or columns, of the matrix.
    fn breadth(self) -> u32 {
        if self.turned { self.key_dim } else { self.value_dim }
    }

    /// Rows or columns of a threadgroup.
    pub(super) fn group(self) -> u32 {
        self.simds * COLUMN_LANES * u32::from(self.wide)
    }

    /// Registers of a lane's part of a matrix.
    pub(super) fn registers(self) -> u32 {
        self.share().own() * u32::from(self.wide)
    }

    /// Threadgroups that have a whole matrix together.
    pub(super) fn groups(self) -> u32 {
        self.breadth().div_ceil(self.group())
    }

    /// States the launch, with these many threadgroups along the other axes.
    pub(super) fn launch(self, others: [Extent; 2]) {
        let [second, last] = others;
        launch(Mode::Row, [fixed(self.groups()), second, last], 32 * self.simds);
    }

    /// Elements of a row of values for each head of every row.
    pub(super) fn values(self) -> Extent {
        heads() * self.value_dim
    }

    /// Elements of a matrix for each head of every block.
    pub(super) fn matrices(self) -> Extent {
        blocks() * (self.key_dim * self.value_dim)
    }
}

/// Heads of all rows.
pub(super) fn heads() -> Extent {
    dim("tokens") * dim("heads")
}

/// Heads of all blocks.
pub(super) fn blocks() -> Extent {
    dim("tokens").ceil_div(dim("block")) * dim("heads")
}

/// The head of queries and keys that a head shares; see
/// [`DeltaNet::key_head`](crate::DeltaNet::key_head).
#[track_caller]
pub(super) fn key_head(tiled: bool, head: Val<u32>, [heads, key_heads]: [Val<u32>; 2]) -> Val<u32> {
    if tiled { head % key_heads } else { head / (heads / key_heads) }
}

/// A lane's part of a head's matrix.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    pub(super) form: PackedForm,
    pub(super) heads: Val<u32>,
    pub(super) head: Val<u32>,
    /// Its first column, or row.
    pub(super) first: Val<u32>,
}

impl Lane {
    /// A lane of a threadgroup whose head is the number along the second axis.
    #[track_caller]
    pub(super) fn new(form: PackedForm, heads: Val<u32>) -> Lane {
        let wide = u32::from(form.wide);
        let simd = (group_id() * form.simds + simd_id()) * (COLUMN_LANES * wide);
        let first = simd + lane_id() / KEY_LANES * wide;
        Lane { form, heads, head: group_id_of(1), first }
    }

    /// Whether its columns or rows are there; none if all lanes' are.
    #[track_caller]
    pub(super) fn exists(&self) -> Option<Val<bool>> {
        let whole = self.form.breadth().is_multiple_of(self.form.group());
        (!whole).then(|| Order::lt(self.first, self.form.breadth()))
    }

    /// Its first column or row, or another one if it has none.
    #[track_caller]
    fn there(&self) -> Val<u32> {
        self.exists().map_or(self.first, |exists| select(exists, self.first, 0u32))
    }

    /// The index of the head, counted over all rows.
    #[track_caller]
    pub(super) fn item(&self, row: Val<u32>) -> Val<u32> {
        row * self.heads + self.head
    }

    /// The elements of its columns, or rows, of a vector that begins at `from`.
    #[track_caller]
    pub(super) fn own(&self, x: In, from: Val<u32>) -> Vec<Val<f32>> {
        load(x, from + self.there(), self.form.wide)
    }

    /// Writes those elements, which the lanes that share them have alike.
    #[track_caller]
    pub(super) fn put(&self, y: impl Elements<f32>, from: Val<u32>, values: &[Val<f32>]) {
        self.once(|| y.set_vec(from + self.first, values));
    }

    /// Records what one of the lanes that share columns or rows does, if these are there.
    #[track_caller]
    pub(super) fn once(&self, f: impl FnOnce()) {
        let one = Order::eq(lane_id() % KEY_LANES, 0u32);
        when(self.exists().map_or(one, |exists| one & exists), f);
    }

    /// Calls `f` with the place of each of its vectors of the head's matrix of a block, and the
    /// registers of its elements.
    #[track_caller]
    fn places(&self, block: Val<u32>, f: impl Fn(Val<u32>, &[u32])) {
        let form = self.form;
        let (wide, run) = (u32::from(form.wide), u32::from(form.run));
        let matrix = self.item(block) * (form.key_dim * form.value_dim);
        form.share().runs(|start, number, exists| {
            let record = || match form.turned {
                true => (0..wide).for_each(|own| {
                    let at = matrix + (self.first + own) * form.value_dim + start;
                    let registers: Vec<u32> = (0..run).map(|i| (number + i) * wide + own).collect();
                    f(at, &registers);
                }),
                false => (0..run).for_each(|i| {
                    let at = matrix + (start + i) * form.value_dim + self.first;
                    let first = (number + i) * wide;
                    f(at, &(first..first + wide).collect::<Vec<u32>>());
                }),
            };
            match (exists, self.exists()) {
                (None, None) => record(),
                (Some(one), None) | (None, Some(one)) => when(one, record),
                (Some(one), Some(other)) => when(one & other, record),
            }
        });
    }

    /// Reads its part of a block's matrix.
    #[track_caller]
    pub(super) fn take_up(&self, matrix: Regs, from: impl Elements<f32>, block: Val<u32>) {
        self.places(block, |at, registers| {
            let values = load(from, at, registers.len() as u8);
            registers.iter().zip(values).for_each(|(&i, value)| matrix.set(i, value));
        });
    }

    /// Writes its part of a block's matrix.
    #[track_caller]
    pub(super) fn leave(&self, matrix: Regs, to: impl Elements<f32>, block: Val<u32>) {
        self.places(block, |at, registers| {
            let values: Vec<Val<f32>> = registers.iter().map(|&i| matrix.get(i)).collect();
            to.set_vec(at, &values);
        });
    }
}
