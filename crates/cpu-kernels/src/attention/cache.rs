//! The KV cache: keys and values in blocks, with one memory pool for all layers of one shape.
//!
//! A block holds `block_tokens` positions of every layer. Within it, layer by layer and head by
//! head, are the keys as `[block_tokens / 16][head_dim][16]` (sixteen keys side by side, so that a
//! vector holds the same element of sixteen keys, and scores need no horizontal sums), then the
//! values as `[block_tokens][width]` with `width` the head rounded up to whole vectors. Codes are
//! stored like numbers; the scales follow the codes of sixteen keys or values (`store`). A
//! block takes no memory until something is written there.

use super::TILE;
use super::store::{Brain, Eighth, Half, Single, Store, Turbo, dispatch_stored};
use crate::isa::Isa;
use crate::math::lanes::{Lanes, WIDEST, dispatch};
use crate::{LINE, prefetch};
use formats::{CacheType, Error, Result};
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
    /// Whether values are the keys: they are stored both ways, and exported once.
    pub keys_only: bool,
}

impl Geometry {
    /// Elements of a stored value: the head rounded up to whole vectors.
    pub(super) fn width(&self) -> usize {
        self.head_dim.next_multiple_of(WIDEST)
    }

    /// Bytes of one head in one block: its keys, then its values.
    fn head_bytes(&self) -> usize {
        self.block_tokens / GROUP * (self.keys_bytes() + self.values_bytes())
    }

    /// Bytes of a group of keys.
    fn keys_bytes(&self) -> usize {
        self.element.bytes(GROUP * self.head_dim)
    }

    /// Bytes of a group of values.
    fn values_bytes(&self) -> usize {
        self.element.bytes(GROUP * self.width())
    }

    /// Bytes of one layer in one block.
    pub fn layer_bytes(&self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    /// Bytes of the full pool.
    ///
    /// # Errors
    /// A size that overflows, or a field that makes no sense.
    pub fn bytes(&self, layers: usize) -> Result<usize> {
        let place = "cache";
        self.element.check(self.head_dim)?;
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

/// The keys and values of one layer: a view of a pool shared by several layers.
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
    /// A pool for `layers` layers of one geometry, and each layer's view of it. Costs address space
    /// at once, memory only where something is written.
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

    /// Its geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The first byte of `head` in `block`.
    fn head(&self, block: usize, head: usize) -> *mut u8 {
        assert!(
            block < self.geometry.blocks && head < self.geometry.kv_heads,
            "cache: block {block}, head {head}"
        );
        let offset = block * self.block_stride + self.offset + head * self.geometry.head_bytes();
        // SAFETY: the pool has `blocks` blocks of `block_stride` bytes, and a layer's heads lie
        // inside one.
        unsafe { self.pool.start.as_ptr().add(offset) }
    }

    /// The group of keys that contains `position`, and the group of its values.
    pub(super) fn group(&self, table: &[u32], position: usize, head: usize) -> (*mut u8, *mut u8) {
        let (block, slot) = self.slot(table, position);
        let (keys, values) = self.places(slot / GROUP);
        let head = self.head(block, head);
        // A slot is below `block_tokens`: the groups lie inside the head.
        (head.wrapping_add(keys), head.wrapping_add(values))
    }

    /// Byte offsets in a head of the keys and the values of a group.
    fn places(&self, group: usize) -> (usize, usize) {
        let geometry = &self.geometry;
        let values = geometry.block_tokens / GROUP * geometry.keys_bytes();
        (group * geometry.keys_bytes(), values + group * geometry.values_bytes())
    }

    /// The groups of the tile that starts at `position`, a multiple of [`GROUP`]: keys and values
    /// of each.
    ///
    /// They exist at any position, since a table is a ring; whether they hold anything is up to the
    /// caller.
    pub(super) fn tile(&self, table: &[u32], position: usize, head: usize) -> Tile {
        let tokens = self.geometry.block_tokens;
        let (mut block, mut slot) = self.slot(table, position);
        let mut start = self.head(block, head).cast_const();
        let mut tile = Tile { keys: [start; TILE / GROUP], values: [start; TILE / GROUP] };
        for k in 0..TILE / GROUP {
            if slot == tokens {
                (block, slot) = self.slot(table, position + k * GROUP);
                start = self.head(block, head).cast_const();
            }
            // A slot is below `block_tokens`: the group lies inside the head's keys and values.
            let (keys, values) = self.places(slot / GROUP);
            tile.keys[k] = start.wrapping_add(keys);
            tile.values[k] = start.wrapping_add(values);
            slot += GROUP;
        }
        tile
    }

    fn slot(&self, table: &[u32], position: usize) -> (usize, usize) {
        let tokens = self.geometry.block_tokens;
        (table[position / tokens % table.len()] as usize, position % tokens)
    }

    /// Stores the keys and values of `tokens` and `heads` of a batch of rows. Token `t` has
    /// position `position + t`; its key of head `h` is `k[t * stride + h *
    /// head_dim..][..head_dim]`, and its value likewise in `v`.
    ///
    /// Workers should split a batch by heads, or by tokens in multiples of 16 positions, since
    /// neighbours share cache lines.
    ///
    /// # Safety
    /// No other thread accesses these positions of these heads.
    ///
    /// # Panics
    /// If a row, a head or a block does not exist.
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
            dispatch_stored!(self.geometry.element, isa, write_kernel(cache: &LayerCache, rows: Rows<'_>))
        }
    }

    /// Prefetches the lines that [`LayerCache::write`] will touch at one position of one head.
    ///
    /// # Panics
    /// If the head or the block does not exist.
    pub fn fetch(&self, table: &[u32], position: usize, head: usize) {
        let (geometry, (keys, values)) = (&self.geometry, self.group(table, position, head));
        for line in (0..geometry.keys_bytes()).step_by(LINE) {
            prefetch(keys.wrapping_add(line));
        }
        // The scales of a group, where there are any, are behind its values.
        let row = geometry.values_bytes() / GROUP;
        let value = values.wrapping_add(position % GROUP * row);
        for line in (0..row).step_by(LINE) {
            prefetch(value.wrapping_add(line));
        }
    }

    /// Copies block `from` of this layer to block `to`: copy on write, for sessions that share a
    /// prefix.
    ///
    /// # Safety
    /// No other thread accesses block `to` or writes block `from`.
    ///
    /// # Panics
    /// If a block does not exist.
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

    /// Appends a block of this layer to `bytes`: its keys `[block_tokens, kv_heads, head_dim]`,
    /// then its values, unless they are the keys, in the stored element type. For quantised types
    /// it appends the keys' codes, their scales, the values' codes, their scales; two 4-bit codes
    /// share a byte, the first in its lower half.
    ///
    /// # Safety
    /// No other thread writes the block.
    ///
    /// # Panics
    /// If the block does not exist.
    pub unsafe fn read_block(&self, block: usize, bytes: &mut Vec<u8>) {
        let from = bytes.len();
        bytes.resize(from + self.plain_bytes(), 0);
        let mut rest = &mut bytes[from..];
        // SAFETY: the caller's promise.
        unsafe {
            self.each_element(block, self.exported(), |stored| {
                let (element, after) = std::mem::take(&mut rest).split_at_mut(stored.len());
                element.copy_from_slice(stored);
                rest = after;
            });
        }
        self.each_code(&mut bytes[from..], in_order);
    }

    /// Applies `change` to the codes of a block's keys and values, in types whose codes share
    /// bytes.
    fn each_code(&self, bytes: &mut [u8], change: fn(&mut [u8])) {
        if self.geometry.element.bits() == Some(4) {
            for part in bytes.chunks_exact_mut(self.part_bytes()) {
                change(&mut part[..self.code_bytes()]);
            }
        }
    }

    /// Overwrites a block of this layer with bytes from [`LayerCache::read_block`].
    ///
    /// # Safety
    /// No other thread accesses the block.
    ///
    /// # Panics
    /// If the block does not exist, or the length is wrong.
    pub unsafe fn write_block(&self, block: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.plain_bytes(), "cache: bytes of a block");
        let mut bytes = bytes.to_vec();
        self.each_code(&mut bytes, in_halves);
        for (i, side) in (0..).zip(Side::ALL) {
            // Keys that are alone are the values, too.
            let from = if self.geometry.keys_only { 0 } else { i * self.part_bytes() };
            let mut rest = &bytes[from..];
            // SAFETY: the caller's promise.
            unsafe {
                self.each_element(block, &[side], |stored| {
                    let (element, after) = rest.split_at(stored.len());
                    stored.copy_from_slice(element);
                    rest = after;
                });
            }
        }
    }

    /// Bytes of a block of this layer as exported, without padding.
    pub fn plain_bytes(&self) -> usize {
        self.exported().len() * self.part_bytes()
    }

    /// Bytes of a block's keys, or of its values, as exported.
    fn part_bytes(&self) -> usize {
        let Geometry { element, block_tokens, kv_heads, head_dim, .. } = self.geometry;
        block_tokens * kv_heads * element.bytes(head_dim)
    }

    /// Sides of a block that are exported.
    fn exported(&self) -> &'static [Side] {
        if self.geometry.keys_only { &Side::ALL[..1] } else { &Side::ALL }
    }

    /// Bytes of the codes of a block's keys, or of its values, in quantised types.
    fn code_bytes(&self) -> usize {
        let Geometry { element, block_tokens, kv_heads, head_dim, .. } = self.geometry;
        element.bits().map_or(0, |bits| block_tokens * kv_heads * head_dim * bits / 8)
    }

    /// Calls `visit` on the bytes of parts of a block, in export order, some at a time.
    ///
    /// # Safety
    /// No other thread accesses the block; others may read it if `visit` only reads.
    unsafe fn each_element(&self, block: usize, sides: &[Side], mut visit: impl FnMut(&mut [u8])) {
        let Geometry { element, blocks, block_tokens, kv_heads, head_dim, .. } = self.geometry;
        assert!(block < blocks, "cache: block {block}");
        let mut show = |part: Part| {
            for position in 0..block_tokens {
                let (keys, values) = self.places(position / GROUP);
                let group = if part.side == Side::Keys { keys } else { values } + part.first;
                let key = position % GROUP;
                for head in 0..kv_heads {
                    let head = self.head(block, head);
                    for i in 0..part.count {
                        let at = part.row.map_or(i * GROUP + key, |row| key * row + i);
                        let start = head.wrapping_add(group + at * part.bytes);
                        // SAFETY: it lies inside the head; no other thread accesses it, by the
                        // caller's promise.
                        visit(unsafe { std::slice::from_raw_parts_mut(start, part.bytes) });
                    }
                }
            }
        };
        for &side in sides {
            let row = |elements: usize| (side == Side::Values).then_some(elements);
            let Some(bits) = element.bits() else {
                let (bytes, width) = (element.bytes(1), self.geometry.width());
                show(Part { side, first: 0, count: head_dim, bytes, row: row(width) });
                continue;
            };
            let codes = head_dim * bits / 8;
            let scales = head_dim / CacheType::BLOCK;
            show(Part { side, first: 0, count: codes, bytes: 1, row: row(codes) });
            show(Part { side, first: GROUP * codes, count: scales, bytes: 2, row: None });
        }
    }
}

/// A side of a cache: the keys or the values of its positions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Keys,
    Values,
}

impl Side {
    /// Both, in export order.
    const ALL: [Side; 2] = [Side::Keys, Side::Values];
}

/// The bytes of each position and head that [`LayerCache::each_element`] visits: `count` pieces of
/// `bytes` bytes.
#[derive(Clone, Copy)]
struct Part {
    side: Side,
    /// Byte offset in a group.
    first: usize,
    count: usize,
    bytes: usize,
    /// Pieces from one position to the next; `None` if the positions of a group are interleaved.
    row: Option<usize>,
}

/// Reorders the codes of blocks of 32 elements: byte `j` holds elements `j` and `16 + j` before,
/// and elements `2 j` and `2 j + 1` after.
fn in_order(codes: &mut [u8]) {
    let (blocks, _) = codes.as_chunks_mut::<16>();
    for block in blocks {
        let code = |i: usize, block: &[u8; 16]| block[i % 16] >> (i / 16 * 4) & 15;
        *block = std::array::from_fn(|j| code(2 * j, block) | code(2 * j + 1, block) << 4);
    }
}

/// The inverse of [`in_order`].
fn in_halves(codes: &mut [u8]) {
    let (blocks, _) = codes.as_chunks_mut::<16>();
    for block in blocks {
        let code = |i: usize, block: &[u8; 16]| block[i / 2] >> (i % 2 * 4) & 15;
        *block = std::array::from_fn(|j| code(j, block) | code(16 + j, block) << 4);
    }
}

/// Addresses of a tile's groups.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Each group is `[head_dim][GROUP]`.
    pub(super) keys: [*const u8; TILE / GROUP],
    /// Each group is `[GROUP][width]`.
    pub(super) values: [*const u8; TILE / GROUP],
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
    let (dim, width) = (cache.geometry.head_dim, cache.geometry.width());
    for head in rows.heads.clone() {
        for token in rows.tokens.clone() {
            let (position, at) = (rows.position + token, token * rows.stride + head * dim);
            let groups = cache.group(rows.table, position, head);
            // SAFETY: the rows exist, as `write` checked; a head is at most MAX_HEAD_DIM; the slots
            // exist.
            unsafe {
                let (k, v) = (rows.k.as_ptr().add(at), rows.v.as_ptr().add(at));
                E::put::<L>(k, v, groups, dim, width, position % GROUP);
            }
        }
    }
}

/// Zeroed memory pages.
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
    /// Maps `bytes` zeros, which take no memory until they are written.
    fn zeroed(bytes: usize) -> Result<Pages> {
        // The system refuses an empty mapping.
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

    /// Allocates `bytes` zeros.
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
