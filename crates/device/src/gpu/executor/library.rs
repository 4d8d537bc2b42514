//! The vendor's library when a model is loaded: copies of packed matrices for it, and where there
//! are many sequences its trial: which products it may do without a row's bits depending on the
//! number of rows, and in which way.

use formats::Result;
use program::StepKind;
use tile::types::Scalar;

use super::{GpuExecutor, LEAST_LENGTH, ahead};
use crate::gpu::arena::{Layout, SHORT_PROMPT, decode_bucket, prompt_bucket};
use crate::gpu::kernels::Kernels;
use crate::gpu::lower::{self, Key, Lowering, Slot};
use crate::gpu::sizes;
use crate::gpu::{Backend, ProductShape, alike};

/// Matrices of a shape that ways to multiply are tried on.
const MATRICES: usize = 4;

/// Products of one shape, and a few of their matrices.
type Tried<B> = (ProductShape, Vec<<B as Backend>::Buffer>);

impl<B: Backend> GpuExecutor<B> {
    /// Unpacks each matrix that prompts would unpack in every step, to a buffer of its own.
    pub(super) fn copy_unpacked(&mut self) -> Result<()> {
        let key = ahead::prompts(&self.lowering, &self.limits);
        let layout = Layout::new(&self.lowering, key.kind, key.tokens, key.outputs);
        let (steps, _) = self.lowering.launches(&key, &layout, &mut self.kernels)?;
        self.kernels.load(&*self.backend, &mut self.pipelines)?;
        for step in steps {
            let lower::Step::Kernel { kernel, numbers, buffers } = step else { continue };
            let unpacked = buffers.iter().find_map(|slot| match slot {
                Slot::Unpacked(bytes) => Some(*bytes),
                _ => None,
            });
            let weight = buffers.iter().find_map(|slot| match slot {
                Slot::Weight(w) => Some(*w),
                _ => None,
            });
            let (Some(bytes), Some(weight)) = (unpacked, weight) else { continue };
            let copy = self.backend.buffer(bytes)?;
            let bound = buffers.iter().map(|slot| match slot {
                Slot::Unpacked(_) => Ok(copy.clone()),
                slot => self.buffer(slot, &key),
            });
            let bound = bound.collect::<Result<Vec<_>>>()?;
            let launch = self.backend.bind(&self.pipelines[kernel], &numbers, &bound)?;
            self.backend.submit(&[launch])?;
            self.copies.insert(weight, (copy, bytes));
            self.lowering.copied[weight] = true;
        }
        let facts = &mut self.lowering.facts;
        facts.products = facts.products.map(|unpack| unpack.min(facts.tuned.thresholds.copied));
        Ok(())
    }

    /// Disables the vendor's library if the bits of its rows depend on the number of rows; else
    /// looks for the fastest ways to do what it does for few rows.
    pub(super) fn try_library(&mut self) -> Result<()> {
        if !self.try_prompts()? {
            self.lowering.facts.products = None;
            self.lowering.library = false;
        }
        if self.lowering.library {
            self.lowering.library = self.tune_decode()?;
        }
        Ok(())
    }

    /// Tries each product of the vendor's library in steps of prompts, and looks for the fastest
    /// way to do it for every number of rows that short prompts have; whether a row's bits do not
    /// depend on the number of rows.
    fn try_prompts(&mut self) -> Result<bool> {
        let key = ahead::prompts(&self.lowering, &self.limits);
        let mut known = std::mem::take(&mut self.kernels);
        let shapes = self.products(&key, &mut known);
        self.kernels = known;
        let shapes = shapes?;
        for (shape, ws) in &shapes {
            let alike = |w| alike::rows_are_alike(&*self.backend, shape, w);
            if !ws.first().map_or(Ok(true), alike)? {
                return Ok(false);
            }
        }
        let mut rows: Vec<usize> =
            (1..=self.limits.tokens.min(SHORT_PROMPT)).map(prompt_bucket).collect();
        rows.dedup();
        // Few rows of a prompt have logits.
        let outputs = prompt_bucket(self.limits.outputs);
        let program = &self.lowering.program;
        let vocab = self.chooses().then(|| program.shape(program.results[0]).width);
        let (heads, shapes): (Vec<_>, Vec<_>) =
            shapes.into_iter().partition(|(shape, _)| Some(shape.out as usize) == vocab);
        let few: Vec<usize> = rows.iter().copied().filter(|rows| *rows <= outputs).collect();
        Ok(self.tune(&shapes, &rows)? && self.tune(&heads, &few)?)
    }

    /// Looks for the fastest way to do each product of the vendor's library in steps that decode,
    /// for every number of rows that such steps have; whether a row's bits do not depend on that.
    fn tune_decode(&mut self) -> Result<bool> {
        let most = sizes::decode_rows(&self.limits);
        let key = ahead::of_one(&self.lowering, StepKind::Decode, 1, LEAST_LENGTH);
        let shapes = self.products(&key, &mut Kernels::default())?;
        let classes = (1..=most).map(decode_bucket);
        let mut rows: Vec<usize> = classes
            .flat_map(|rows| [rows.min(most), rows.min(self.limits.outputs)])
            .map(|rows| self.lowering.room(StepKind::Decode, rows))
            .collect();
        rows.sort_unstable();
        rows.dedup();
        self.tune(&shapes, &rows)
    }

    /// Looks for the fastest way to do products of these shapes for these numbers of rows; false if
    /// no way gives the bits of the others.
    fn tune(&self, shapes: &[Tried<B>], rows: &[usize]) -> Result<bool> {
        for (shape, ws) in shapes {
            if !alike::tune(&*self.backend, shape, ws, rows)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The products of the vendor's library in a class of steps.
    fn products(&self, key: &Key, known: &mut Kernels) -> Result<Vec<Tried<B>>> {
        let mut shapes: Vec<Tried<B>> = Vec::new();
        for (shape, w) in library_products(&self.lowering, key, known)? {
            let known = shapes.iter().position(|(known, _)| *known == shape);
            let at = known.unwrap_or_else(|| {
                shapes.push((shape, vec![]));
                shapes.len() - 1
            });
            // All packed matrices are unpacked to one place.
            let most = if matches!(w, Slot::Unpacked(_)) { 1 } else { MATRICES };
            if shapes[at].1.len() < most {
                let w = match w {
                    Slot::Unpacked(_) => self.unpacked_noise(shape.operand)?,
                    _ => self.buffer(&w, key)?,
                };
                shapes[at].1.push(w);
            }
        }
        Ok(shapes)
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
