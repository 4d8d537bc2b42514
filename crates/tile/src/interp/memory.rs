//! Buffers and shared arrays: elements, bounds, what is initialised, and who touched what.

use std::collections::HashMap;

use super::order::{self, Access, Order, Record};
use super::report::{Did, Why};
use crate::ir;
use crate::types::Scalar;

/// The last accesses of every element. Zeros stand for none, so that an element that no thread
/// touches costs no time: memory of zeros is the system's.
#[derive(Debug, Default)]
struct Shadow {
    /// Whether the launch found the elements initialised.
    found: bool,
    written: Vec<Record>,
    read: Vec<Record>,
    /// Empty where no atomic is in the kernel.
    atomic: Vec<Record>,
    /// Earlier groups' reads (false) and atomics (true) of an element, where one record does not
    /// hold them.
    others: HashMap<(usize, bool), Vec<Record>>,
    /// The thread, plus one, whose unfinished copy will write it. Empty where there are none.
    flying: Vec<u16>,
    /// How many unfinished products read it. Empty where there are none.
    lent: Vec<u32>,
}

/// Stops an access to an element.
#[cold]
fn race(record: Record, order: &Order, did: Did) -> Why {
    let group = (!order.is_ours(record)).then(|| order.group_of(record));
    Why::Race { did, thread: order::thread(record), group }
}

impl Shadow {
    fn new(len: usize, found: bool, atomic: bool, flying: bool) -> Self {
        Shadow {
            found,
            written: vec![0; len],
            read: vec![0; len],
            atomic: vec![0; if atomic { len } else { 0 }],
            others: HashMap::new(),
            flying: vec![0; if flying { len } else { 0 }],
            lent: vec![],
        }
    }

    #[inline(always)]
    fn landed(&self, i: usize) -> Result<(), Why> {
        match self.flying.get(i) {
            None | Some(0) => Ok(()),
            Some(thread) => Err(Why::Flying { thread: usize::from(*thread) - 1 }),
        }
    }

    /// Whether nothing reads it on its own time.
    #[inline(always)]
    fn free(&self, i: usize) -> Result<(), Why> {
        match self.lent.get(i) {
            None | Some(0) => Ok(()),
            Some(_) => Err(Why::Lent),
        }
    }

    #[inline(always)]
    fn against<const SHARED: bool>(
        record: Record,
        order: &Order,
        who: u64,
        access: Access,
        did: Did,
    ) -> Result<(), Why> {
        let clash = match SHARED {
            true => order.clashes_shared(record, who),
            false => order.clashes_global(record, who, access),
        };
        if clash { Err(race(record, order, did)) } else { Ok(()) }
    }

    fn against_others(&self, i: usize, order: &Order, who: u64, atomic: bool) -> Result<(), Why> {
        let did = if atomic { Did::Changed } else { Did::Read };
        let access = Access { of_atomic: atomic };
        let others = self.others.get(&(i, atomic)).into_iter().flatten();
        others
            .copied()
            .try_for_each(|record| Self::against::<false>(record, order, who, access, did))
    }

    /// Whether an element that was last written so has a value.
    #[inline(always)]
    fn is_there<const SHARED: bool>(&self, written: Record, order: &Order) -> bool {
        if SHARED { order.is_ours(written) } else { written != 0 || self.found }
    }

    /// Whether no write of an element can be unordered with an access now: the usual case, for which
    /// reads and writes have a short way.
    #[inline(always)]
    fn is_settled(&self, i: usize, order: &Order) -> bool {
        order.is_settled(self.written[i])
            && self.atomic.is_empty()
            && self.flying.get(i).is_none_or(|thread| *thread == 0)
    }

    #[inline(always)]
    fn reads<const SHARED: bool>(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        let written = self.written[i];
        if !self.is_there::<SHARED>(written, order) || !self.is_settled(i, order) {
            return self.reads_beside::<SHARED>(i, order, who);
        }
        self.note::<SHARED>(i, order, who);
        Ok(())
    }

    /// Records a read of an element.
    #[inline(always)]
    fn note<const SHARED: bool>(&mut self, i: usize, order: &Order, who: u64) {
        if let Some(kept) = order.note::<SHARED>(&mut self.read[i], who, Access::default()) {
            self.others.entry((i, false)).or_default().push(kept);
        }
    }

    /// A read of an element that others have written since the last barrier, or may have.
    #[inline(never)]
    fn reads_beside<const SHARED: bool>(
        &mut self,
        i: usize,
        order: &Order,
        who: u64,
    ) -> Result<(), Why> {
        let access = Access::default();
        let written = self.written[i];
        if !self.is_there::<SHARED>(written, order) {
            self.landed(i)?;
            return Err(Why::Uninitialised);
        }
        self.landed(i)?;
        Self::against::<SHARED>(written, order, who, access, Did::Wrote)?;
        if let Some(atomic) = self.atomic.get(i) {
            let access = Access { of_atomic: true };
            Self::against::<SHARED>(*atomic, order, who, access, Did::Changed)?;
            if !SHARED && !self.others.is_empty() {
                self.against_others(i, order, who, true)?;
            }
        }
        self.note::<SHARED>(i, order, who);
        Ok(())
    }

    #[inline(always)]
    fn writes<const SHARED: bool>(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        let free = self.lent.is_empty() && self.others.is_empty();
        if free && self.is_settled(i, order) && order.is_settled(self.read[i]) {
            self.written[i] = order.record(who);
            return Ok(());
        }
        self.writes_beside::<SHARED>(i, order, who)
    }

    /// A write of an element that others have touched since the last barrier, or may have.
    #[inline(never)]
    fn writes_beside<const SHARED: bool>(
        &mut self,
        i: usize,
        order: &Order,
        who: u64,
    ) -> Result<(), Why> {
        let access = Access::default();
        self.landed(i)?;
        self.free(i)?;
        Self::against::<SHARED>(self.written[i], order, who, access, Did::Wrote)?;
        Self::against::<SHARED>(self.read[i], order, who, access, Did::Read)?;
        if let Some(atomic) = self.atomic.get(i) {
            let access = Access { of_atomic: true };
            Self::against::<SHARED>(*atomic, order, who, access, Did::Changed)?;
        }
        if !SHARED && !self.others.is_empty() {
            self.against_others(i, order, who, false)?;
            self.against_others(i, order, who, true)?;
        }
        self.written[i] = order.record(who);
        Ok(())
    }

    fn changes<const SHARED: bool>(
        &mut self,
        i: usize,
        order: &Order,
        who: u64,
    ) -> Result<(), Why> {
        let access = Access::default();
        self.landed(i)?;
        self.free(i)?;
        let written = self.written[i];
        if !self.is_there::<SHARED>(written, order) {
            return Err(Why::Uninitialised);
        }
        Self::against::<SHARED>(written, order, who, access, Did::Wrote)?;
        Self::against::<SHARED>(self.read[i], order, who, access, Did::Read)?;
        if !SHARED && !self.others.is_empty() {
            self.against_others(i, order, who, false)?;
        }
        let of_atomic = Access { of_atomic: true };
        if let Some(kept) = order.note::<SHARED>(&mut self.atomic[i], who, of_atomic) {
            self.others.entry((i, true)).or_default().push(kept);
        }
        Ok(())
    }
}

/// A buffer of the launch.
pub(super) struct Buffer<'a> {
    pub(super) scalar: Scalar,
    pub(super) bytes: &'a mut [u8],
    pub(super) len: usize,
    /// Inputs have none: they cannot change.
    shadow: Option<Shadow>,
}

impl<'a> Buffer<'a> {
    pub(super) fn new(
        buffer: &'a mut crate::case::Buffer,
        access: ir::Access,
        atomic: bool,
    ) -> Self {
        let len = buffer.len();
        let shadow = match access {
            ir::Access::In => None,
            _ => Some(Shadow::new(len, access == ir::Access::InOut, atomic, false)),
        };
        Buffer { scalar: buffer.scalar, bytes: &mut buffer.bytes, len, shadow }
    }

    /// A placeholder for a scalar argument among the parameters.
    pub(super) fn none() -> Self {
        Buffer { scalar: Scalar::U32, bytes: &mut [], len: 0, shadow: None }
    }

    /// Whether reads need no look at who wrote.
    #[inline(always)]
    pub(super) fn is_input(&self) -> bool {
        self.shadow.is_none()
    }

    /// The register bits of an element that is in bounds.
    #[inline(always)]
    pub(super) fn peek(&self, i: usize) -> u32 {
        match self.scalar {
            Scalar::F32 | Scalar::U32 | Scalar::I32 => word(self.bytes, i),
            Scalar::F16 | Scalar::BF16 | Scalar::U16 => half(self.bytes, i),
            Scalar::I16 => half(self.bytes, i) as i16 as u32,
            Scalar::U8 | Scalar::Bool => u32::from(self.bytes[i]),
            Scalar::I8 => self.bytes[i] as i8 as u32,
        }
    }

    /// Sets an element that is in bounds.
    #[inline(always)]
    pub(super) fn poke(&mut self, i: usize, bits: u32) {
        match self.scalar.bytes() {
            4 => self.bytes[4 * i..4 * i + 4].copy_from_slice(&bits.to_le_bytes()),
            2 => self.bytes[2 * i..2 * i + 2].copy_from_slice(&(bits as u16).to_le_bytes()),
            _ => self.bytes[i] = bits as u8,
        }
    }
}

/// The word at `4 i`.
#[inline(always)]
pub(super) fn word(bytes: &[u8], i: usize) -> u32 {
    let b = &bytes[4 * i..4 * i + 4];
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// The 16 bits at `2 i`.
#[inline(always)]
pub(super) fn half(bytes: &[u8], i: usize) -> u32 {
    let b = &bytes[2 * i..2 * i + 2];
    u32::from(u16::from_le_bytes([b[0], b[1]]))
}

/// A shared array: register bits of its elements.
pub(super) struct Shared {
    cells: Vec<u32>,
    shadow: Shadow,
}

impl Shared {
    pub(super) fn new(array: &ir::Array, atomic: bool, copies: bool, products: bool) -> Self {
        let len = array.len as usize;
        let mut shadow = Shadow::new(len, false, atomic, copies);
        shadow.lent = vec![0; if products { len } else { 0 }];
        Shared { cells: vec![0; len], shadow }
    }

    /// Elements.
    pub(super) fn size(&self) -> usize {
        self.cells.len()
    }

    /// The register bits of an element that is in bounds, whoever may read it.
    pub(super) fn peek(&self, i: usize) -> u32 {
        self.cells[i]
    }

    /// A product begins to read the element: it must be there for products, and may not be written
    /// until that ends.
    pub(super) fn lend(&mut self, i: usize, order: &Order) -> Result<(), Why> {
        let shadow = &mut self.shadow;
        shadow.landed(i)?;
        let written = shadow.written[i];
        let newest = shadow.atomic.get(i).copied().unwrap_or(0).max(written);
        if !order.is_ours(written) {
            return Err(Why::Uninitialised);
        }
        if !order.is_past(newest) {
            return Err(race(newest, order, Did::Wrote));
        }
        if !order.is_shown(newest) {
            return Err(Why::Unpublished { thread: order::thread(newest) });
        }
        shadow.lent[i] += 1;
        Ok(())
    }

    /// The product has ended, for those threads.
    pub(super) fn give_back(&mut self, i: usize, order: &Order, who: u64) {
        self.shadow.lent[i] -= 1;
        order.note::<true>(&mut self.shadow.read[i], who, Access::default());
    }

    /// A copy by `thread` begins: the element may not be touched until it ends.
    pub(super) fn depart(
        &mut self,
        i: usize,
        order: &Order,
        thread: usize,
        bits: u32,
    ) -> Result<(), Why> {
        let old = self.shadow.written[i];
        self.shadow.writes::<true>(i, order, thread as u64)?;
        self.shadow.written[i] = old;
        self.shadow.flying[i] = thread as u16 + 1;
        self.cells[i] = bits;
        Ok(())
    }

    /// The copy has ended, for that thread.
    pub(super) fn arrive(&mut self, i: usize, order: &Order, thread: usize) {
        self.shadow.flying[i] = 0;
        self.shadow.written[i] = order.record(thread as u64);
    }
}

/// The common interface of buffers and shared arrays.
pub(super) trait Memory {
    fn len(&self) -> usize;
    fn get(&self, i: usize) -> u32;
    fn put(&mut self, i: usize, bits: u32);
    fn reads(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why>;
    fn writes(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why>;
    fn changes(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why>;
}

impl Memory for Buffer<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }
    #[inline(always)]
    fn get(&self, i: usize) -> u32 {
        self.peek(i)
    }
    #[inline(always)]
    fn put(&mut self, i: usize, bits: u32) {
        self.poke(i, bits);
    }
    #[inline(always)]
    fn reads(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        match &mut self.shadow {
            Some(shadow) => shadow.reads::<false>(i, order, who),
            None => Ok(()),
        }
    }
    #[inline(always)]
    fn writes(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        // Writes to inputs are refused when the kernel is compiled.
        match &mut self.shadow {
            Some(shadow) => shadow.writes::<false>(i, order, who),
            None => Ok(()),
        }
    }
    fn changes(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        match &mut self.shadow {
            Some(shadow) => shadow.changes::<false>(i, order, who),
            None => Ok(()),
        }
    }
}

impl Memory for Shared {
    #[inline(always)]
    fn len(&self) -> usize {
        self.cells.len()
    }
    #[inline(always)]
    fn get(&self, i: usize) -> u32 {
        self.cells[i]
    }
    #[inline(always)]
    fn put(&mut self, i: usize, bits: u32) {
        self.cells[i] = bits;
    }
    #[inline(always)]
    fn reads(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        self.shadow.reads::<true>(i, order, who)
    }
    #[inline(always)]
    fn writes(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        self.shadow.writes::<true>(i, order, who)
    }
    fn changes(&mut self, i: usize, order: &Order, who: u64) -> Result<(), Why> {
        self.shadow.changes::<true>(i, order, who)
    }
}
