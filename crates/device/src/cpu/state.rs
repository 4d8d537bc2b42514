//! States that sequences carry from position to position, in blocks of cache: see
//! [`CacheLayer::carried`].

use cpu_kernels::attention::LayerCache;
use cpu_kernels::matmul::Huge;
use formats::{Error, Result};
use program::CacheLayer;

/// Floats of a cache line, with which every state begins.
const LINE: usize = 16;

/// The cache of one layer.
pub(super) enum Cache {
    /// Keys and values.
    KeysValues(LayerCache),
    /// A state.
    State(States),
}

/// The states of one layer, one for each block. Costs address space at once, memory only where
/// something is written.
pub(super) struct States {
    pool: Huge,
    /// Floats from a block to the next.
    stride: usize,
    /// Floats of the state.
    elements: usize,
    /// Blocks.
    count: usize,
}

impl States {
    /// Room for so many blocks of a layer.
    ///
    /// # Errors
    /// When that is no number of bytes, or the operating system refuses.
    pub(super) fn new(layer: &CacheLayer, count: usize) -> Result<States> {
        let pool = Huge::zeroed(layer_bytes(layer, count)?)?;
        Ok(States { pool, stride: padded(layer), elements: layer.state, count })
    }

    /// The state in a block.
    ///
    /// # Panics
    /// When the block does not exist.
    pub(super) fn start(&self, block: u32) -> *mut f32 {
        assert!((block as usize) < self.count, "states: block {block}");
        // SAFETY: the pool has `count` blocks of `stride` floats.
        unsafe { self.pool.as_ptr().cast::<f32>().add(block as usize * self.stride) }
    }

    /// The bytes of the state in a block.
    ///
    /// # Safety
    /// Nobody else uses the block, or all only read it.
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

/// Floats of a layer in a block.
fn padded(layer: &CacheLayer) -> usize {
    layer.state.next_multiple_of(LINE)
}

/// Bytes of a layer's states in so many blocks.
///
/// # Errors
/// When that is no number of bytes.
pub(super) fn layer_bytes(layer: &CacheLayer, count: usize) -> Result<usize> {
    let block = padded(layer).checked_mul(size_of::<f32>());
    let bytes = block.and_then(|block| block.checked_mul(count));
    bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(|| {
        let found = format!("{count} blocks of {} floats", layer.state);
        Error::new("cache", "a size that fits the address space", found)
    })
}

impl Cache {
    /// Blocks that there are.
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

    /// Bytes of a block as they are read and written: without what pads them.
    pub(super) fn plain_bytes(&self) -> usize {
        match self {
            Cache::KeysValues(cache) => cache.plain_bytes(),
            Cache::State(states) => states.elements * size_of::<f32>(),
        }
    }

    /// Copies a block of this layer to another.
    ///
    /// # Safety
    /// Nobody else uses either block.
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
    /// Nobody writes the block.
    pub(super) unsafe fn read_block(&self, block: usize, bytes: &mut Vec<u8>) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Cache::KeysValues(cache) => cache.read_block(block, bytes),
                Cache::State(states) => bytes.extend_from_slice(states.stored(block)),
            }
        }
    }

    /// Makes a block of this layer what [`Cache::read_block`] gave.
    ///
    /// # Safety
    /// Nobody else uses the block.
    ///
    /// # Panics
    /// When there are other than [`Cache::plain_bytes`].
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
