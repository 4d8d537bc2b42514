//! Recurrent states, stored in cache blocks; see [`CacheLayer::carried`].

use cpu_kernels::attention::LayerCache;
use cpu_kernels::matmul::Huge;
use formats::{Error, Result};
use program::CacheLayer;

/// Floats of a cache line; every state begins on one.
const LINE: usize = 16;

/// The cache of one layer.
pub(super) enum Cache {
    /// Keys and values.
    KeysValues(LayerCache),
    /// A state.
    State(States),
}

/// The states of one layer, one for each block. Reserves address space at once, but takes memory
/// only where something is written.
pub(super) struct States {
    pool: Huge,
    /// Floats from one block to the next.
    stride: usize,
    /// Floats of one state.
    elements: usize,
    /// Number of blocks.
    count: usize,
}

impl States {
    /// Reserves `count` blocks of a layer.
    ///
    /// # Errors
    /// A size that overflows, or that the operating system refuses.
    pub(super) fn new(layer: &CacheLayer, count: usize) -> Result<States> {
        let pool = Huge::zeroed(layer_bytes(layer, count)?)?;
        Ok(States { pool, stride: padded(layer), elements: layer.state, count })
    }

    /// The state in a block.
    ///
    /// # Panics
    /// If the block does not exist.
    pub(super) fn start(&self, block: u32) -> *mut f32 {
        assert!((block as usize) < self.count, "states: block {block}");
        // SAFETY: the pool has `count` blocks of `stride` floats.
        unsafe { self.pool.as_ptr().cast::<f32>().add(block as usize * self.stride) }
    }

    /// The bytes of the state in a block.
    ///
    /// # Safety
    /// No other thread accesses the block, or all of them only read.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller's promise stands in for the borrow checker"
    )]
    unsafe fn stored(&self, block: usize) -> &mut [u8] {
        let start = self.start(block as u32).cast::<u8>();
        // SAFETY: a state lies inside its block; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, self.elements * size_of::<f32>()) }
    }
}

/// Floats of a layer's state in a block, padded to whole cache lines.
fn padded(layer: &CacheLayer) -> usize {
    layer.state.next_multiple_of(LINE)
}

/// Bytes of a layer's states in `count` blocks.
///
/// # Errors
/// A size that overflows.
pub(super) fn layer_bytes(layer: &CacheLayer, count: usize) -> Result<usize> {
    let block = padded(layer).checked_mul(size_of::<f32>());
    let bytes = block.and_then(|block| block.checked_mul(count));
    bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(|| {
        let found = format!("{count} blocks of {} floats", layer.state);
        Error::new("cache", "a size that fits the address space", found)
    })
}

impl Cache {
    /// Number of blocks.
    pub(super) fn blocks(&self) -> usize {
        match self {
            Cache::KeysValues(cache) => cache.geometry().blocks,
            Cache::State(states) => states.count,
        }
    }

    /// Bytes of this layer in one block.
    pub(super) fn layer_bytes(&self) -> usize {
        match self {
            Cache::KeysValues(cache) => cache.geometry().layer_bytes(),
            Cache::State(states) => states.stride * size_of::<f32>(),
        }
    }

    /// Bytes of a block as exported by [`Cache::read_block`], without padding.
    pub(super) fn plain_bytes(&self) -> usize {
        match self {
            Cache::KeysValues(cache) => cache.plain_bytes(),
            Cache::State(states) => states.elements * size_of::<f32>(),
        }
    }

    /// Copies a block of this layer to another.
    ///
    /// # Safety
    /// No other thread accesses either block.
    pub(super) unsafe fn copy_block(&self, from: usize, to: usize) {
        // SAFETY: the caller's promise; a copy to itself has nothing to do.
        unsafe {
            match self {
                Cache::KeysValues(cache) => cache.copy_block(from, to),
                Cache::State(_) if from == to => {}
                Cache::State(states) => states.stored(to).copy_from_slice(states.stored(from)),
            }
        }
    }

    /// Appends a block of this layer to `bytes`.
    ///
    /// # Safety
    /// No thread writes the block.
    pub(super) unsafe fn read_block(&self, block: usize, bytes: &mut Vec<u8>) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Cache::KeysValues(cache) => cache.read_block(block, bytes),
                Cache::State(states) => bytes.extend_from_slice(states.stored(block)),
            }
        }
    }

    /// Overwrites a block of this layer with bytes from [`Cache::read_block`].
    ///
    /// # Safety
    /// No other thread accesses the block.
    ///
    /// # Panics
    /// If the length is not [`Cache::plain_bytes`].
    pub(super) unsafe fn write_block(&self, block: usize, bytes: &[u8]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Cache::KeysValues(cache) => cache.write_block(block, bytes),
                Cache::State(states) => states.stored(block).copy_from_slice(bytes),
            }
        }
    }
}
