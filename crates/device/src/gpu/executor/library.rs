//! The trial of the vendor's library when a model for many sequences is loaded: which products it
//! may do without a row's bits depending on the number of rows, and in which way.

use formats::Result;
use program::{BLOCK_TOKENS, StepKind};
use tile::types::Scalar;

use super::{GpuExecutor, LEAST_LENGTH};
use crate::gpu::arena::{Layout, decode_bucket};
use crate::gpu::kernels::Kernels;
use crate::gpu::lower::{self, Adapted, Key, Lowering, Slot};
use crate::gpu::sizes::{self, stride};
use crate::gpu::{Backend, LIBRARY_ROWS, ProductShape, alike};

impl<B: Backend> GpuExecutor<B> {
    /// Disables the vendor's library if the bits of its rows depend on the number of rows.
    pub(super) fn try_library(&mut self) -> Result<()> {
        let outputs = usize::from(self.chooses());
        let key = Key {
            kind: StepKind::Prompt,
            tokens: LIBRARY_ROWS,
            outputs,
            sequences: 1,
            strides: vec![stride(1, false); self.blocks.len()],
            length: BLOCK_TOKENS,
            samples: None,
            adapted: Adapted::No,
        };
        let mut tried = Vec::new();
        for (shape, w) in library_products(&self.lowering, &key, &mut self.kernels)? {
            if tried.contains(&shape) {
                continue;
            }
            let w = match w {
                Slot::Weight(weight) => self.weights[weight].buffer.clone(),
                _ => self.unpacked_noise(shape.operand)?,
            };
            if !alike::rows_are_alike(&*self.backend, &shape, &w)? {
                self.lowering.facts.products = None;
                self.lowering.library = false;
                return Ok(());
            }
            tried.push(shape);
        }
        if self.lowering.library {
            self.lowering.library = self.tune_library()?;
        }
        Ok(())
    }

    /// Looks for the fastest way to do each product of the vendor's library in steps that decode,
    /// for every number of rows that such steps have; whether a row's bits do not depend on that.
    fn tune_library(&mut self) -> Result<bool> {
        /// Matrices of a shape that ways are tried on.
        const MATRICES: usize = 4;
        let most = sizes::decode_rows(&self.limits);
        let key = Key {
            kind: StepKind::Decode,
            tokens: 1,
            outputs: usize::from(self.chooses()),
            sequences: 1,
            strides: vec![stride(1, false); self.blocks.len()],
            length: LEAST_LENGTH,
            samples: None,
            adapted: Adapted::No,
        };
        let mut shapes: Vec<(ProductShape, Vec<B::Buffer>)> = Vec::new();
        for (shape, w) in library_products(&self.lowering, &key, &mut Kernels::default())? {
            let w = self.buffer(&w, &key)?;
            match shapes.iter_mut().find(|(known, _)| *known == shape) {
                Some((_, ws)) if ws.len() < MATRICES => ws.push(w),
                Some(_) => {}
                None => shapes.push((shape, vec![w])),
            }
        }
        let classes = (1..=most).map(decode_bucket);
        let mut rows: Vec<usize> = classes
            .flat_map(|rows| [rows.min(most), rows.min(self.limits.outputs)])
            .map(|rows| self.lowering.room(StepKind::Decode, rows))
            .collect();
        rows.sort_unstable();
        rows.dedup();
        for (shape, ws) in &shapes {
            if !alike::tune(&*self.backend, shape, ws, &rows)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The buffer that matrices are unpacked to, filled with noise.
    fn unpacked_noise(&self, scalar: Scalar) -> Result<B::Buffer> {
        const PIECE: usize = 1 << 20;
        let bytes = alike::noise(scalar, PIECE.min(self.sizes.unpacked) / scalar.bytes());
        self.backend.write(&self.unpacked, &bytes)?;
        let mut full = bytes.len();
        while full < self.sizes.unpacked {
            let more = full.min(self.sizes.unpacked - full);
            let from = self.backend.part(&self.unpacked, 0..more)?;
            self.backend.copy(&from, &self.backend.part(&self.unpacked, full..full + more)?)?;
            full += more;
        }
        Ok(self.unpacked.clone())
    }
}

/// The products of the vendor's library in a class of steps, each with the place of its matrix.
fn library_products(
    lowering: &Lowering,
    key: &Key,
    known: &mut Kernels,
) -> Result<Vec<(ProductShape, Slot)>> {
    let layout = Layout::new(lowering, key.kind, key.tokens, key.outputs);
    let (steps, ..) = lowering.launches(key, &layout, known)?;
    let product = |step| match step {
        lower::Step::Product { shape, w, .. } => Some((shape, w)),
        _ => None,
    };
    Ok(steps.into_iter().filter_map(product).collect())
}
