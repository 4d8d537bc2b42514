//! The cache's blocks: growth of its groups, copies of blocks, and blocks read and written by the
//! host.

use formats::{Error, ErrorKind, Hint, Result, Setting};
use program::{BLOCK_TOKENS, Step};

use super::GpuExecutor;
use crate::gpu::{Backend, kv};

impl<B: Backend> GpuExecutor<B> {
    /// Grows the cache as far as a step needs.
    pub(in crate::gpu) fn prepare(&mut self, step: &Step<'_>) -> Result<()> {
        for group in 0..self.blocks.len() {
            let blocks = step.sequences.iter().flat_map(|sequence| sequence.tables[group].blocks);
            let needed = blocks.max().map_or(0, |block| *block as usize + 1);
            self.grow(group, needed + self.lowering.idle_blocks())?;
        }
        Ok(())
    }

    /// Grows a group to at least `needed` blocks, and further if memory allows.
    fn grow(&mut self, group: usize, needed: usize) -> Result<()> {
        if needed <= self.blocks[group] {
            return Ok(());
        }
        let mut own = self.layers.iter().zip(&self.lowering.groups).filter(|(_, of)| **of == group);
        if !own.all(|(layer, _)| layer.stays()) {
            // Bound launches use the old addresses.
            self.classes.clear();
        }
        let most = self.limits.blocks[group] + self.lowering.idle_blocks();
        // Many sequences soon exceed one context.
        let context = self.context.get(group).copied().unwrap_or(1);
        let context = if self.lowering.batched { most } else { context };
        let wanted = kv::target(needed, context, most);
        let grown = match self.enlarge(group, wanted) {
            Err(_) if wanted > needed => self.enlarge(group, needed).map(|()| needed),
            other => other.map(|()| wanted),
        };
        self.blocks[group] = grown.map_err(|why| {
            let positions = needed * BLOCK_TOKENS;
            let hint = Hint::text(format_args!("the cache cannot grow to {positions} positions: "))
                .and("a shorter context, fewer sessions, or ")
                .with_value(Setting::CacheType, "q8_0");
            if why.hint.is_some() { why } else { why.hint(hint) }
        })?;
        Ok(())
    }

    /// Grows every layer of a group to `blocks` blocks, or none if memory is short.
    fn enlarge(&mut self, group: usize, blocks: usize) -> Result<()> {
        let layers = self.layers.iter_mut().zip(&self.lowering.groups);
        let mut own: Vec<_> = layers.filter_map(|(l, of)| (*of == group).then_some(l)).collect();
        let (mut more, mut twice) = (0, 0);
        for layer in &own {
            let growth = layer.growth(blocks)?;
            (more, twice) = (more + growth.0, growth.1.max(twice));
        }
        if let Some(free) = self.backend.free()?.filter(|free| more + twice > *free) {
            let expected = format!("{} bytes of its memory for the cache", more + twice);
            let name = self.backend.about().name;
            let error = Error::new(name, expected, format!("{free} free"));
            return Err(error.of(ErrorKind::NoMemory));
        }
        own.iter_mut().try_for_each(|layer| layer.grow(&*self.backend, blocks))
    }

    /// Grows the cache to hold a block of a layer, and returns its index.
    pub(super) fn room(&mut self, layer: usize, block: u32) -> Result<usize> {
        let group = self.lowering.groups.get(layer).copied();
        let most = |group: &usize| self.limits.blocks.get(*group).copied().unwrap_or(0);
        let group = group.filter(|group| (block as usize) < most(group));
        let at = block as usize + self.lowering.idle_blocks();
        self.grow(group.ok_or_else(|| crate::no_block(layer, block))?, at + 1)?;
        Ok(at)
    }

    /// Copies a block of a group to another.
    pub(super) fn copy_block(&mut self, group: usize, from: u32, to: u32) -> Result<()> {
        let most = self.limits.blocks.get(group).copied().unwrap_or(0);
        if from as usize >= most || to as usize >= most {
            let found = format!("{from} to {to} of group {group}");
            return Err(Error::new("cache", format!("blocks below {most}"), found));
        }
        let idle = self.lowering.idle_blocks();
        let (from, to) = (from as usize + idle, to as usize + idle);
        self.grow(group, from.max(to) + 1)?;
        let layers = self.layers.iter().zip(&self.lowering.groups);
        for (layer, _) in layers.filter(|(_, of)| **of == group) {
            layer.copy_block(&*self.backend, from, to)?;
        }
        Ok(())
    }
}
