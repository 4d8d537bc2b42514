//! Keys and values in blocks of memory: one pool for all layers of a kind.
//!
//! A block holds `block_tokens` positions of every layer; within it, layer by layer, head by head: the keys as
//! `[block_tokens / 16][head_dim][16]` (sixteen keys side by side, so that a vector holds the same element of sixteen
//! keys and scores need no sums across lanes), then the values as `[block_tokens][width]` with `width` the head
//! rounded up to whole vectors. The memory of a block is the operating system's until something is written there.

use super::TILE;
use crate::isa::Isa;
use crate::math::lanes::{Lanes, WIDEST, dispatch};
use crate::math::to_f16_kernel;
use crate::{LINE, prefetch};
use formats::CacheType;
use formats::{Error, Hint, Result, Setting};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// Keys side by side in a group: as many as the widest vector has lanes.
pub(super) const GROUP: usize = WIDEST;

/// The shape of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Stored type.
    pub element: CacheType,
    /// Blocks in the pool.
    pub blocks: usize,
    /// Positions of a block: a multiple of 16, typically 256.
    pub block_tokens: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head: at most [`super::MAX_HEAD_DIM`].
    pub head_dim: usize,
}

impl Geometry {
    /// Elements of a stored value: the head rounded up to whole vectors.
    pub(super) fn width(&self) -> usize {
        self.head_dim.next_multiple_of(WIDEST)
    }

    /// Elements of one head in one block: its keys, then its values.
    fn head_len(&self) -> usize {
        self.block_tokens * (self.head_dim + self.width())
    }

    /// Bytes of one layer in one block.
    pub fn layer_bytes(&self) -> usize {
        self.kv_heads * self.element.bytes(self.head_len())
    }

    /// Bytes that the pool takes when full, or an error when that is no number of bytes, or a field makes no sense.
    ///
    /// # Errors
    /// As said.
    pub fn bytes(&self, layers: usize) -> Result<usize> {
        let place = "cache";
        if self.element == CacheType::Q8_0 {
            let error = Error::new("the CPU's cache", "elements of f16, bf16 or f32", "q8_0");
            return Err(error.hint(Hint::set(Setting::CacheType, "f16")));
        }
        if self.block_tokens == 0 || !self.block_tokens.is_multiple_of(GROUP) {
            return Err(Error::new(
                place,
                format!("block_tokens a multiple of {GROUP}"),
                self.block_tokens,
            ));
        }
        if self.head_dim == 0 || self.head_dim > super::MAX_HEAD_DIM {
            return Err(Error::new(
                place,
                format!("head_dim in 1..={}", super::MAX_HEAD_DIM),
                self.head_dim,
            ));
        }
        if self.kv_heads == 0 {
            return Err(Error::new(place, "a key and value head or more", 0));
        }
        let head = self.block_tokens.checked_mul(self.element.bytes(self.head_dim + self.width()));
        let layer = head.and_then(|head| head.checked_mul(self.kv_heads));
        let total = layer.and_then(|layer| layer.checked_mul(layers)?.checked_mul(self.blocks));
        total.filter(|&total| total <= isize::MAX as usize).ok_or_else(|| {
            Error::new(
                place,
                "a size that fits the address space",
                format!("{self:?} x {layers} layers"),
            )
        })
    }
}

/// The keys and values of one layer: a view of a pool that it shares with the other layers.
#[derive(Debug, Clone)]
pub struct LayerCache {
    geometry: Geometry,
    pool: Arc<Pages>,
    /// Bytes from the pool's start to this layer in block 0.
    offset: usize,
    /// Bytes from a block to the next.
    block_stride: usize,
}

impl LayerCache {
    /// A pool for `layers` layers of one geometry, and each layer's view of it. Costs address space at once, memory
    /// only where something is written.
    ///
    /// # Errors
    /// When the geometry makes no sense, or the operating system refuses.
    pub fn pool(geometry: Geometry, layers: usize) -> Result<Vec<LayerCache>> {
        let pool = Arc::new(Pages::zeroed(geometry.bytes(layers)?)?);
        let layer_bytes = geometry.layer_bytes();
        let view = |layer| LayerCache {
            geometry,
            pool: pool.clone(),
            offset: layer * layer_bytes,
            block_stride: layers * layer_bytes,
        };
        Ok((0..layers).map(view).collect())
    }

    /// Its shape.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The first element of `head` in `block`.
    fn head<E: Store>(&self, block: usize, head: usize) -> *mut E::Bits {
        assert!(
            block < self.geometry.blocks && head < self.geometry.kv_heads,
            "cache: block {block}, head {head}"
        );
        debug_assert_eq!(size_of::<E::Bits>(), self.geometry.element.bytes(1));
        let offset = block * self.block_stride
            + self.offset
            + head * self.geometry.head_len() * size_of::<E::Bits>();
        // SAFETY: the pool has `blocks` blocks of `block_stride` bytes, and a layer's heads lie inside one.
        unsafe { self.pool.start.as_ptr().add(offset).cast() }
    }

    /// The keys around `position`, a multiple of [`GROUP`]: `[head_dim][GROUP]`.
    pub(super) fn keys<E: Store>(
        &self,
        table: &[u32],
        position: usize,
        head: usize,
    ) -> *mut E::Bits {
        let (block, slot) = self.slot(table, position);
        // SAFETY: a slot is below `block_tokens`: the group lies inside the head's keys.
        unsafe { self.head::<E>(block, head).add(slot / GROUP * GROUP * self.geometry.head_dim) }
    }

    /// The value at `position`: `[width]`; those up to the next multiple of [`GROUP`] follow it.
    pub(super) fn values<E: Store>(
        &self,
        table: &[u32],
        position: usize,
        head: usize,
    ) -> *mut E::Bits {
        let (block, slot) = self.slot(table, position);
        let geometry = &self.geometry;
        // SAFETY: a slot is below `block_tokens`: the row lies inside the head's values.
        unsafe {
            self.head::<E>(block, head)
                .add(geometry.block_tokens * geometry.head_dim + slot * geometry.width())
        }
    }

    /// Where the groups of the tile from `position` on are, a multiple of [`GROUP`]: the keys and the values of each.
    ///
    /// They exist at any position, for a table is a ring; whether they hold anything is the caller's to know.
    pub(super) fn tile<E: Store>(
        &self,
        table: &[u32],
        position: usize,
        head: usize,
    ) -> Tile<E::Bits> {
        let (geometry, tokens) = (&self.geometry, self.geometry.block_tokens);
        let (mut block, mut slot) = self.slot(table, position);
        let mut start = self.head::<E>(block, head).cast_const();
        let mut tile = Tile { keys: [start; TILE / GROUP], values: [start; TILE / GROUP] };
        for k in 0..TILE / GROUP {
            if slot == tokens {
                (block, slot) = self.slot(table, position + k * GROUP);
                start = self.head::<E>(block, head).cast_const();
            }
            // A slot is below `block_tokens`: the group lies inside the head's keys and values.
            tile.keys[k] = start.wrapping_add(slot * geometry.head_dim);
            tile.values[k] =
                start.wrapping_add(tokens * geometry.head_dim + slot * geometry.width());
            slot += GROUP;
        }
        tile
    }

    fn slot(&self, table: &[u32], position: usize) -> (usize, usize) {
        let tokens = self.geometry.block_tokens;
        (table[position / tokens % table.len()] as usize, position % tokens)
    }

    /// Stores the keys and values of `tokens` and `heads` of a batch of rows. Token `t` is at `position + t`, and its
    /// key of head `h` is `k[t * stride + h * head_dim..][..head_dim]`, its value likewise in `v`.
    ///
    /// Workers share a batch best by heads, or by tokens in multiples of 16 positions: neighbours share cache lines.
    ///
    /// # Safety
    /// Nobody else reads or writes these positions of these heads at the same time.
    ///
    /// # Panics
    /// When a row, a head or a block does not exist.
    pub unsafe fn write(
        &self,
        isa: Isa,
        table: &[u32],
        position: usize,
        k: &[f32],
        v: &[f32],
        stride: usize,
        tokens: Range<usize>,
        heads: Range<usize>,
    ) {
        if tokens.is_empty() || heads.is_empty() {
            return;
        }
        let end = (tokens.end - 1) * stride + heads.end * self.geometry.head_dim;
        assert!(
            end <= k.len() && end <= v.len() && heads.end <= self.geometry.kv_heads,
            "cache: rows to write"
        );
        let (cache, rows) = (self, Rows { table, position, k, v, stride, tokens, heads });
        // SAFETY: the rows exist; the slots are this caller's.
        unsafe {
            match self.geometry.element {
                CacheType::F16 => {
                    dispatch!(isa, write_kernel[Half](cache: &LayerCache, rows: Rows<'_>))
                }
                CacheType::BF16 => {
                    dispatch!(isa, write_kernel[Brain](cache: &LayerCache, rows: Rows<'_>))
                }
                CacheType::F32 => {
                    dispatch!(isa, write_kernel[Single](cache: &LayerCache, rows: Rows<'_>))
                }
                CacheType::Q8_0 => unreachable!("no pool is made of it"),
            }
        }
    }

    /// Asks for the lines that [`LayerCache::write`] will touch at one position of one head.
    ///
    /// # Panics
    /// When the head or the block does not exist.
    pub fn fetch(&self, table: &[u32], position: usize, head: usize) {
        match self.geometry.element {
            CacheType::F16 => self.fetch_as::<Half>(table, position, head),
            CacheType::BF16 => self.fetch_as::<Brain>(table, position, head),
            CacheType::F32 => self.fetch_as::<Single>(table, position, head),
            CacheType::Q8_0 => unreachable!("no pool is made of it"),
        }
    }

    fn fetch_as<E: Store>(&self, table: &[u32], position: usize, head: usize) {
        let (dim, element) = (self.geometry.head_dim, size_of::<E::Bits>());
        let keys = self.keys::<E>(table, position, head).cast::<u8>();
        for line in (0..dim * GROUP * element).step_by(LINE) {
            prefetch(keys.wrapping_add(line));
        }
        let value = self.values::<E>(table, position, head).cast::<u8>();
        for line in (0..dim * element).step_by(LINE) {
            prefetch(value.wrapping_add(line));
        }
    }

    /// Copies block `from` of this layer to block `to`: copy on write, for sessions that share a prefix.
    ///
    /// # Safety
    /// Nobody else uses block `to`, and nobody writes block `from`, at the same time.
    ///
    /// # Panics
    /// When a block does not exist.
    pub unsafe fn copy_block(&self, from: usize, to: usize) {
        assert!(
            from < self.geometry.blocks && to < self.geometry.blocks,
            "cache: blocks {from} and {to}"
        );
        let start = self.pool.start.as_ptr();
        let (from, to) =
            (from * self.block_stride + self.offset, to * self.block_stride + self.offset);
        // SAFETY: both lie inside the pool; equal blocks are allowed by `copy`.
        unsafe { std::ptr::copy(start.add(from), start.add(to), self.geometry.layer_bytes()) };
    }

    /// Appends a block of this layer to `bytes`: its keys `[block_tokens, kv_heads, head_dim]`, then
    /// its values, each element as it is stored.
    ///
    /// # Safety
    /// Nobody writes the block at the same time.
    ///
    /// # Panics
    /// When the block does not exist.
    pub unsafe fn read_block(&self, block: usize, bytes: &mut Vec<u8>) {
        let from = bytes.len();
        bytes.resize(from + self.plain_bytes(), 0);
        let mut rest = &mut bytes[from..];
        // SAFETY: the caller's promise.
        unsafe {
            self.each_element(block, |stored| {
                let (element, after) = std::mem::take(&mut rest).split_at_mut(stored.len());
                element.copy_from_slice(stored);
                rest = after;
            });
        }
    }

    /// Makes a block of this layer what [`LayerCache::read_block`] gave.
    ///
    /// # Safety
    /// Nobody else uses the block at the same time.
    ///
    /// # Panics
    /// When the block does not exist, or there are too few bytes.
    pub unsafe fn write_block(&self, block: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.plain_bytes(), "cache: bytes of a block");
        let mut rest = bytes;
        // SAFETY: the caller's promise.
        unsafe {
            self.each_element(block, |stored| {
                let (element, after) = rest.split_at(stored.len());
                stored.copy_from_slice(element);
                rest = after;
            });
        }
    }

    /// Bytes of a block of this layer without what pads values.
    pub fn plain_bytes(&self) -> usize {
        let Geometry { element, block_tokens, kv_heads, head_dim, .. } = self.geometry;
        2 * block_tokens * kv_heads * element.bytes(head_dim)
    }

    /// Shows `visit` the bytes of each element of a block: of the keys by position, head and place
    /// in the head, then of the values.
    ///
    /// # Safety
    /// Nobody else uses the block at the same time, but to read it where `visit` only reads.
    unsafe fn each_element(&self, block: usize, mut visit: impl FnMut(&mut [u8])) {
        let Geometry { element, blocks, block_tokens, kv_heads, head_dim } = self.geometry;
        assert!(block < blocks, "cache: block {block}");
        let (size, width) = (element.bytes(1), self.geometry.width());
        // SAFETY: a layer lies inside its block, and its block inside the pool.
        let layer =
            unsafe { self.pool.start.as_ptr().add(block * self.block_stride + self.offset) };
        let at = |head: usize, index: usize| {
            // SAFETY: the index is one of the head's elements.
            let start = unsafe { layer.add((head * self.geometry.head_len() + index) * size) };
            // SAFETY: as above; nobody else uses it, by the caller's promise.
            unsafe { std::slice::from_raw_parts_mut(start, size) }
        };
        for position in 0..block_tokens {
            let group = position / GROUP * GROUP * head_dim + position % GROUP;
            for head in 0..kv_heads {
                (0..head_dim).for_each(|i| visit(at(head, group + i * GROUP)));
            }
        }
        for position in 0..block_tokens {
            let row = block_tokens * head_dim + position * width;
            for head in 0..kv_heads {
                (0..head_dim).for_each(|i| visit(at(head, row + i)));
            }
        }
    }
}

/// Where a tile's groups are.
#[derive(Clone, Copy)]
pub(super) struct Tile<T> {
    /// Of every group `[head_dim][GROUP]`.
    pub(super) keys: [*const T; TILE / GROUP],
    /// Of every group `[GROUP][width]`.
    pub(super) values: [*const T; TILE / GROUP],
}

/// Rows to write: see [`LayerCache::write`].
struct Rows<'a> {
    table: &'a [u32],
    position: usize,
    k: &'a [f32],
    v: &'a [f32],
    stride: usize,
    tokens: Range<usize>,
    heads: Range<usize>,
}

/// # Safety
/// As for [`LayerCache::write`], whose checks hold.
#[inline(always)]
unsafe fn write_kernel<L: Lanes, E: Store>(cache: &LayerCache, rows: Rows<'_>) {
    let dim = cache.geometry.head_dim;
    let mut key = [E::ZERO; super::MAX_HEAD_DIM];
    for head in rows.heads.clone() {
        for token in rows.tokens.clone() {
            let (position, at) = (rows.position + token, token * rows.stride + head * dim);
            // SAFETY: the rows exist, as `write` checked; a head is at most MAX_HEAD_DIM; the slots exist.
            unsafe {
                E::convert::<L>(
                    rows.v.as_ptr().add(at),
                    cache.values::<E>(rows.table, position, head),
                    dim,
                );
                E::convert::<L>(rows.k.as_ptr().add(at), key.as_mut_ptr(), dim);
                let keys = cache.keys::<E>(rows.table, position, head).add(position % GROUP);
                for i in 0..dim {
                    *keys.add(i * GROUP) = key[i];
                }
            }
        }
    }
}

/// How numbers are stored.
pub(super) trait Store: 'static {
    /// What one is stored as.
    type Bits: Copy;
    /// Zero.
    const ZERO: Self::Bits;

    /// Reads a vector.
    ///
    /// # Safety
    /// `p` points to `L::N` elements.
    unsafe fn load<L: Lanes>(p: *const Self::Bits) -> L;

    /// Converts `n` numbers.
    ///
    /// # Safety
    /// `x` and `out` point to `n` elements.
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut Self::Bits, n: usize);
}

/// [`CacheType::F16`].
pub(super) struct Half;

/// [`CacheType::BF16`].
pub(super) struct Brain;

/// [`CacheType::F32`].
pub(super) struct Single;

impl Store for Half {
    type Bits = u16;
    const ZERO: u16 = 0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut u16, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { to_f16_kernel::<L>(x, out, n) }
    }
}

impl Store for Brain {
    type Bits = u16;
    const ZERO: u16 = 0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u16) -> L {
        let mut whole = [0.0; WIDEST];
        // SAFETY: `L::N <= WIDEST` elements are readable, by the caller's promise, and fit.
        unsafe {
            for (i, x) in whole[..L::N].iter_mut().enumerate() {
                // A bf16 is the upper half of an f32.
                *x = f32::from_bits(u32::from(*p.add(i)) << 16);
            }
            L::load(whole.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut u16, n: usize) {
        for i in 0..n {
            // SAFETY: the caller's promise.
            unsafe { *out.add(i) = half::bf16::from_f32(*x.add(i)).to_bits() };
        }
    }
}

impl Store for Single {
    type Bits = f32;
    const ZERO: f32 = 0.0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p) }
    }
    #[inline(always)]
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut f32, n: usize) {
        // SAFETY: the caller's promise; a cache and its input are different memory.
        unsafe { std::ptr::copy_nonoverlapping(x, out, n) }
    }
}

/// Zeroed memory of its own.
#[derive(Debug)]
struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory; who writes which part is the promise of `LayerCache`'s unsafe functions.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

#[cfg(unix)]
impl Pages {
    /// `bytes` zeros that cost no memory until they are written.
    fn zeroed(bytes: usize) -> Result<Pages> {
        // An empty mapping is an error to the system, and never read here.
        let bytes = bytes.max(1);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping touches nothing that exists.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        let refused =
            || Error::io(format!("cache of {bytes} bytes"), std::io::Error::last_os_error());
        if start == libc::MAP_FAILED {
            return Err(refused().hint("ask for a shorter context"));
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice about the mapping just made; a refusal changes nothing.
        unsafe {
            libc::madvise(start, bytes, libc::MADV_HUGEPAGE);
        }
        Ok(Pages { start: NonNull::new(start.cast()).ok_or_else(refused)?, bytes })
    }
}

#[cfg(unix)]
impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing points into it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(not(unix))]
impl Pages {
    fn layout(bytes: usize) -> Result<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(bytes, 64)
            .map_err(|error| Error::new("cache", "", error))
    }

    /// `bytes` zeros.
    fn zeroed(bytes: usize) -> Result<Pages> {
        let bytes = bytes.max(1);
        // SAFETY: the size is not 0.
        let start = unsafe { std::alloc::alloc_zeroed(Self::layout(bytes)?) };
        let start = NonNull::new(start)
            .ok_or_else(|| Error::new("cache", format!("{bytes} bytes"), "no memory"))?;
        Ok(Pages { start, bytes })
    }
}

#[cfg(not(unix))]
impl Drop for Pages {
    fn drop(&mut self) {
        if let Ok(layout) = Self::layout(self.bytes) {
            // SAFETY: allocated with this layout, and nothing points into it any more.
            unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}
