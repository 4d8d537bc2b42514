//! The cache on a GPU. Each layer has a few arrays, which depend on the element type and grow by
//! blocks. For a layer with a recurrent state, a block is one state in f32.
//!
//! Where a device can reserve addresses, an array that may grow has addresses for all its blocks
//! from the start and gets memory in whole pages, so that nothing is copied and bound launches stay
//! valid. Elsewhere it is copied to a larger one.

use formats::{Error, Result};
use program::{BLOCK_TOKENS, CacheLayer};

use super::Backend;
use crate::CacheType;

/// The arrays of a layer's cache: the kernels' name of each, and its bytes per block. Keys that are
/// the values, too, are there once.
pub(super) fn arrays(kind: CacheType, layer: &CacheLayer) -> Vec<(&'static str, usize)> {
    let &CacheLayer { kv_heads, head_dim, state, keys_only, .. } = layer;
    let heads = kv_heads * BLOCK_TOKENS;
    let mut arrays = match kind {
        _ if state > 0 => vec![("states", size_of::<f32>() * state)],
        CacheType::Q8_0 | CacheType::Turbo => {
            let scales = heads * (head_dim / CacheType::BLOCK * 2);
            let codes = heads * kind.bytes(head_dim) - scales;
            vec![
                ("key_codes", codes),
                ("key_scales", scales),
                ("value_codes", codes),
                ("value_scales", scales),
            ]
        }
        plain => ["keys", "values"].map(|name| (name, heads * plain.bytes(head_dim))).into(),
    };
    if keys_only {
        arrays.truncate(arrays.len() / 2);
    }
    arrays
}

/// The kernels' names of a layer's arrays, and the index of each in [`arrays`].
pub(super) fn names(kind: CacheType, layer: &CacheLayer) -> Vec<(&'static str, usize)> {
    let both = arrays(kind, &CacheLayer { keys_only: false, ..*layer });
    let there = arrays(kind, layer).len();
    both.into_iter().enumerate().map(|(i, (name, _))| (name, i % there)).collect()
}

/// Checks that the layers can have a cache of this type.
///
/// # Errors
/// Heads that are not whole quantisation blocks.
pub(super) fn check(kind: CacheType, layers: &[CacheLayer]) -> Result<()> {
    layers.iter().filter(|layer| layer.state == 0).try_for_each(|layer| kind.check(layer.head_dim))
}

/// Bytes of a block over all arrays of a layer.
pub(super) fn block_bytes(kind: CacheType, layer: &CacheLayer) -> usize {
    arrays(kind, layer).iter().map(|(_, bytes)| bytes).sum()
}

/// Bytes of `blocks` blocks over all arrays of a layer, which are in pages of this size.
pub(super) fn bytes(kind: CacheType, layer: &CacheLayer, blocks: usize, page: usize) -> usize {
    let array = |each: usize| each.saturating_mul(blocks).div_ceil(page).saturating_mul(page);
    arrays(kind, layer).into_iter().map(|(_, each)| array(each)).fold(0, usize::saturating_add)
}

/// Blocks to allocate if `needed` are required: doubling up to a full context of `context` blocks,
/// then in whole contexts.
pub(super) fn target(needed: usize, context: usize, most: usize) -> usize {
    let rounded = match needed <= context {
        true => needed.next_power_of_two().min(context),
        false => needed.div_ceil(context.max(1)) * context.max(1),
    };
    rounded.min(most).max(needed)
}

/// Bytes held twice while the last array grows to a full context.
pub(super) fn copied(kind: CacheType, layer: &CacheLayer, context: usize) -> usize {
    let before = match context {
        0 | 1 => 0,
        _ => (context - 1).checked_next_power_of_two().unwrap_or(1 << (usize::BITS - 1)),
    };
    let before = if before >= context { before / 2 } else { before };
    let largest = arrays(kind, layer).into_iter().map(|(_, bytes)| bytes).max();
    largest.unwrap_or(0).saturating_mul(before)
}

/// An array and the bytes that it has memory for.
struct Array<B> {
    buffer: B,
    bytes: usize,
    /// The page size, if its addresses are reserved.
    page: Option<usize>,
}

impl<B> Array<B> {
    /// Bytes as memory comes: in whole pages, if addresses are reserved.
    fn of(&self, bytes: usize) -> usize {
        bytes.next_multiple_of(self.page.unwrap_or(1))
    }
}

/// A layer's cache.
pub(super) struct Layer<B> {
    /// Bytes per block of each array.
    blocks: Vec<usize>,
    arrays: Vec<Array<B>>,
}

impl<T: Clone> Layer<T> {
    /// Allocates `blocks` blocks, which may grow to `most`.
    ///
    /// # Errors
    /// Too little memory.
    pub(super) fn new<B: Backend<Buffer = T>>(
        backend: &B,
        kind: CacheType,
        layer: &CacheLayer,
        blocks: usize,
        most: usize,
    ) -> Result<Self> {
        let each: Vec<usize> = arrays(kind, layer).into_iter().map(|(_, bytes)| bytes).collect();
        let array = |each: &usize| {
            let bytes = sized(*each, blocks)?;
            let Some(page) = backend.page().filter(|_| most > blocks) else {
                return Ok(Array { buffer: backend.buffer(bytes)?, bytes, page: None });
            };
            // What is too large to be used is refused when it is asked for.
            let all = each.saturating_mul(most).min(LARGEST).next_multiple_of(page);
            let (buffer, bytes) = (backend.reserve(all)?, bytes.next_multiple_of(page));
            backend.extend(&buffer, bytes)?;
            Ok(Array { buffer, bytes, page: Some(page) })
        };
        let arrays = each.iter().map(array).collect::<Result<_>>()?;
        Ok(Layer { blocks: each, arrays })
    }

    /// Grows to `blocks` blocks, one array after another, so that little memory is held twice. On
    /// failure the contents are unchanged.
    ///
    /// # Errors
    /// Too little memory.
    pub(super) fn grow<B: Backend<Buffer = T>>(
        &mut self,
        backend: &B,
        blocks: usize,
    ) -> Result<()> {
        for (array, each) in self.arrays.iter_mut().zip(&self.blocks) {
            let bytes = array.of(sized(*each, blocks)?);
            if bytes <= array.bytes {
                continue;
            }
            match array.page {
                Some(_) => backend.extend(&array.buffer, bytes)?,
                None => {
                    let buffer = backend.buffer(bytes)?;
                    backend.copy(&array.buffer, &buffer)?;
                    array.buffer = buffer;
                }
            }
            array.bytes = bytes;
        }
        Ok(())
    }

    /// Whether launches that are bound to its arrays stay valid when it grows.
    pub(super) fn stays(&self) -> bool {
        self.arrays.iter().all(|array| array.page.is_some())
    }

    /// Bytes that [`grow`](Layer::grow) adds in the end, and the most that it holds twice
    /// meanwhile.
    ///
    /// # Errors
    /// A cache that is too large.
    pub(super) fn growth(&self, blocks: usize) -> Result<(usize, usize)> {
        let (mut more, mut twice) = (0, 0);
        for (array, each) in self.arrays.iter().zip(&self.blocks) {
            let added = array.of(sized(*each, blocks)?).saturating_sub(array.bytes);
            more += added;
            twice = if added > 0 && array.page.is_none() { array.bytes.max(twice) } else { twice };
        }
        Ok((more, twice))
    }

    /// Copies one block to another.
    ///
    /// # Errors
    /// A copy that fails.
    pub(super) fn copy_block<B: Backend<Buffer = T>>(
        &self,
        backend: &B,
        from: usize,
        to: usize,
    ) -> Result<()> {
        for (array, each) in self.arrays.iter().zip(&self.blocks) {
            let part = |block: usize| backend.part(&array.buffer, block * each..(block + 1) * each);
            backend.copy(&part(from)?, &part(to)?)?;
        }
        Ok(())
    }

    /// Appends a block to `bytes`: its part of each array in turn.
    ///
    /// # Errors
    /// A read that fails.
    pub(super) fn read_block<B: Backend<Buffer = T>>(
        &self,
        backend: &B,
        block: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        for (array, each) in self.arrays.iter().zip(&self.blocks) {
            let part = backend.part(&array.buffer, block * each..(block + 1) * each)?;
            let from = bytes.len();
            bytes.resize(from + each, 0);
            backend.read(&part, &mut bytes[from..])?;
        }
        Ok(())
    }

    /// Overwrites a block with bytes from [`read_block`](Layer::read_block).
    ///
    /// # Errors
    /// A wrong number of bytes, or a write that fails.
    pub(super) fn write_block<B: Backend<Buffer = T>>(
        &self,
        backend: &B,
        block: usize,
        bytes: &[u8],
    ) -> Result<()> {
        crate::check_block(self.blocks.iter().sum(), bytes)?;
        let mut rest = bytes;
        for (array, each) in self.arrays.iter().zip(&self.blocks) {
            let part = backend.part(&array.buffer, block * each..(block + 1) * each)?;
            let (own, after) = rest.split_at(*each);
            backend.write(&part, own)?;
            rest = after;
        }
        Ok(())
    }

    /// An array, by its index in [`arrays`].
    pub(super) fn array(&self, index: usize) -> T {
        self.arrays[index].buffer.clone()
    }

    /// Bytes of all arrays.
    pub(super) fn bytes(&self) -> usize {
        self.arrays.iter().map(|array| array.bytes).sum()
    }
}

/// Fewest bytes that an array cannot have: kernels index elements of the cache with 32 bits.
const LARGEST: usize = 1 << 33;

/// Bytes of an array of `blocks` blocks.
fn sized(block: usize, blocks: usize) -> Result<usize> {
    let bytes = block.checked_mul(blocks).filter(|bytes| *bytes < LARGEST);
    bytes.ok_or_else(|| Error::new("cache", "less than 8 GiB a layer", format!("{blocks} blocks")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_doubles_up_to_a_context() {
        let needed = [1, 2, 3, 5, 9, 20, 21, 41];
        assert_eq!(needed.map(|n| target(n, 20, 60)), [1, 2, 4, 8, 16, 20, 40, 60]);
        assert_eq!(target(3, 1, 100), 3);
        assert_eq!(target(50, 20, 50), 50);
    }

    #[test]
    fn what_is_copied_is_the_room_before() {
        let layer = CacheLayer::keys_values(2, 64, None);
        let of = |context| copied(CacheType::F16, &layer, context) / (2 * 64 * 2 * BLOCK_TOKENS);
        assert_eq!([1, 2, 3, 4, 5, 8, 9, 20].map(of), [0, 1, 2, 2, 4, 4, 8, 16]);
        assert_eq!(block_bytes(CacheType::Q8_0, &layer), 2 * 2 * (64 + 4) * BLOCK_TOKENS);
        assert_eq!(block_bytes(CacheType::Turbo, &layer), 2 * 2 * (32 + 4) * BLOCK_TOKENS);
        let state = CacheLayer::carried(100);
        assert_eq!(block_bytes(CacheType::Q8_0, &state), 400);
        assert_eq!(copied(CacheType::F16, &state, 5), 4 * 400);
    }
}
