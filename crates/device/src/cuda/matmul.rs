//! Dense matrix products by cuBLASLt: `y = x w^T`, or that plus a matrix, with `x` `[rows, width]`,
//! `w` `[out, width]`, `y` `[rows, out]`, summed in f32; `x` and `w` may lie as their transposes.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};
use formats::{Error, Result};
use tile::types::Scalar;

use super::{Context, CudaBuffer, Gpu, GraphWork, library};
use crate::gpu::ProductShape;

/// Memory that an algorithm may use: what the vendor recommends for Hopper.
const WORKSPACE: usize = 32 << 20;
/// How many of the library's proposals are tried.
const PROPOSALS: usize = 8;

/// A product of one shape, with the algorithm that ran fastest. Clones are the same one.
#[derive(Clone)]
pub struct Matmul(Arc<Inner>);

/// The vendor's library on a GPU, with its working memory. Clones are the same one.
#[derive(Clone)]
pub struct CublasLt(Arc<Handle>);

struct Handle {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    workspace: CudaBuffer,
}

// SAFETY: the library allows calls with one handle from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        drop(self.context.synchronize());
        // SAFETY: created by the library, destroyed only here; no product is running.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

struct Inner {
    library: CublasLt,
    product: sys::cublasLtMatmulDesc_t,
    /// The layouts of `w`, `x` and `y` as the library sees them: column by column.
    layouts: Vec<sys::cublasLtMatrixLayout_t>,
    /// Bytes of `x`, `w` and `y`.
    bytes: [usize; 3],
    /// Whether sums must not be cut into parts, the number of which follows from the rows.
    alike: bool,
}

// SAFETY: descriptors are not changed after construction.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.library.0.context.synchronize());
        // SAFETY: each was created by the library, is destroyed only here, and no product of it is
        // running.
        unsafe {
            for layout in self.layouts.drain(..) {
                let _ = result::destroy_matrix_layout(layout);
            }
            if !self.product.is_null() {
                let _ = result::destroy_matmul_desc(self.product);
            }
        }
    }
}

/// A product bound to its matrices.
#[derive(Clone)]
pub struct BoundProduct {
    matmul: Matmul,
    algorithm: sys::cublasLtMatmulAlgo_t,
    x: CudaBuffer,
    w: CudaBuffer,
    add: Option<CudaBuffer>,
    y: CudaBuffer,
}

impl Gpu {
    /// The vendor's library.
    ///
    /// # Errors
    /// If there is none.
    pub fn cublaslt(&self) -> Result<CublasLt> {
        library::cublaslt()?;
        let workspace = self.buffer(WORKSPACE)?;
        self.0.enter()?;
        let handle = result::create_handle().map_err(fault)?;
        Ok(CublasLt(Arc::new(Handle { context: Arc::clone(&self.0), handle, workspace })))
    }

    /// A product of `[rows, width]` and `[out, width]` matrices of f16 or bf16, with results of the
    /// same type.
    ///
    /// # Errors
    /// Without cuBLASLt, or for a type or shape that it does not do.
    pub fn matmul(&self, scalar: Scalar, rows: u32, out: u32, width: u32) -> Result<Matmul> {
        let (operand, result) = (scalar, scalar);
        let shape = ProductShape::plain([rows, out, width], operand, result);
        self.cublaslt()?.matmul(&shape)
    }
}

impl CublasLt {
    /// The library's version: `130001` for 13.0.1, say.
    pub fn version(&self) -> usize {
        // SAFETY: asks for nothing; the library is loaded.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// A product of a shape.
    ///
    /// # Errors
    /// For a type or shape that the library does not do.
    pub fn matmul(&self, shape: &ProductShape) -> Result<Matmul> {
        let ProductShape { rows, out, width, operand, result: sum, alike, .. } = *shape;
        let ProductShape { x_turned, w_turned, .. } = *shape;
        let kind = |scalar| match scalar {
            Scalar::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
            Scalar::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
            Scalar::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
            other => Err(Error::new("cublaslt", "f16, bf16 or f32", other)),
        };
        let kinds = [kind(operand)?, kind(operand)?, kind(sum)?];
        self.0.context.enter()?;
        let size = |a: u32, b: u32, of: Scalar| a as usize * b as usize * of.bytes();
        let bytes = [size(rows, width, operand), size(out, width, operand), size(rows, out, sum)];
        let product = std::ptr::null_mut();
        let mut inner = Inner { library: self.clone(), product, layouts: vec![], bytes, alike };
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        inner.product =
            result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(fault)?;
        // The library counts column by column, where a row-major matrix is its own transpose: y^T =
        // w x^T. `CUBLAS_OP_T`, which these bindings do not name.
        let transposed = 1_i32;
        let bytes = size_of_val(&transposed);
        let of_w = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let of_x = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB;
        for (attribute, wanted) in [(of_w, !w_turned), (of_x, x_turned)] {
            if !wanted {
                continue;
            }
            // SAFETY: the descriptor lives, and the attribute is copied from a value of its type.
            unsafe {
                let value = std::ptr::from_ref(&transposed).cast::<c_void>();
                result::set_matmul_desc_attribute(inner.product, attribute, value, bytes)
            }
            .map_err(fault)?;
        }
        let turn = |(fast, slow), turned| if turned { (slow, fast) } else { (fast, slow) };
        let lain = [turn((width, out), w_turned), turn((width, rows), x_turned), (out, rows)];
        for ((fast, slow), kind) in lain.into_iter().zip(kinds) {
            let (fast, slow) = (u64::from(fast), u64::from(slow));
            let layout = result::create_matrix_layout(kind, fast, slow, fast as i64);
            inner.layouts.push(layout.map_err(fault)?);
        }
        Ok(Matmul(Arc::new(inner)))
    }
}

impl Matmul {
    /// Binds it to matrices, with the fastest of the library's algorithms as timed on them.
    ///
    /// # Errors
    /// If a buffer is too short, or the library does not do this shape.
    pub fn bind(&self, x: &CudaBuffer, w: &CudaBuffer, y: &CudaBuffer) -> Result<BoundProduct> {
        self.fits(x, w, y)?;
        let gpu = Gpu(Arc::clone(&self.0.library.0.context));
        let mut best: Option<(f64, BoundProduct)> = None;
        let mut refused = None;
        for algorithm in self.proposals()? {
            let (matmul, x, w, y) = (self.clone(), x.clone(), w.clone(), y.clone());
            let product = BoundProduct { matmul, algorithm, x, w, add: None, y };
            match gpu.time(vec![GraphWork::Product(product.clone())], 3) {
                Ok(took) if best.as_ref().is_none_or(|(least, _)| took.least < *least) => {
                    best = Some((took.least, product));
                }
                Ok(_) => {}
                Err(why) => refused = Some(why),
            }
        }
        let none = || refused.unwrap_or_else(|| Error::new("cublaslt", "an algorithm", "none"));
        best.map(|(_, product)| product).ok_or_else(none)
    }

    /// Binds it to matrices, with the algorithm that the library proposes first. `add`, if there is
    /// one, is added to the product; it may be the same bytes as `y`.
    ///
    /// # Errors
    /// If a buffer is too short, or the library does not do this shape.
    pub fn bind_first(
        &self,
        x: &CudaBuffer,
        w: &CudaBuffer,
        add: Option<&CudaBuffer>,
        y: &CudaBuffer,
    ) -> Result<BoundProduct> {
        self.fits(x, w, add.unwrap_or(y))?;
        self.fits(x, w, y)?;
        let first = self.proposals()?.into_iter().next();
        let algorithm = first.ok_or_else(|| Error::new("cublaslt", "an algorithm", "none"))?;
        let (matmul, x, w, y) = (self.clone(), x.clone(), w.clone(), y.clone());
        Ok(BoundProduct { matmul, algorithm, x, w, add: add.cloned(), y })
    }

    /// It with the fastest of the library's algorithms among those whose results begin and end with
    /// these bytes, bound to nothing, for [`BoundProduct::to`], and the number of that algorithm
    /// among the library's proposals; none if no algorithm's do. Timed on all of the matrices in
    /// turn: one alone might stay in a cache. The proposal of number `known`, if its results are
    /// right, is taken without timing any.
    ///
    /// # Errors
    /// If a buffer is too short, or the library does not do this shape.
    pub fn bind_fastest(
        &self,
        x: &CudaBuffer,
        ws: &[CudaBuffer],
        add: Option<&CudaBuffer>,
        y: &CudaBuffer,
        expected: [&[u8]; 2],
        known: Option<u8>,
    ) -> Result<Option<(u8, BoundProduct)>> {
        for w in ws {
            self.fits(x, w, add.unwrap_or(y))?;
            self.fits(x, w, y)?;
        }
        let Some(first) = ws.first() else { return Ok(None) };
        let gpu = Gpu(Arc::clone(&self.0.library.0.context));
        let proposals = self.proposals()?;
        let bound = |algorithm, w: &CudaBuffer| {
            let (matmul, x, w, y) = (self.clone(), x.clone(), w.clone(), y.clone());
            BoundProduct { matmul, algorithm, x, w, add: add.cloned(), y }
        };
        // It must not hold what it was tried on.
        let nothing = self.0.library.0.workspace.part(0..0)?;
        let freed = |product: BoundProduct| {
            let [x, w, y] = [nothing.clone(), nothing.clone(), nothing.clone()];
            BoundProduct { x, w, add: None, y, ..product }
        };
        if let Some(number) = known
            && let Some(algorithm) = proposals.get(usize::from(number))
        {
            let product = bound(*algorithm, first);
            if product.gives(expected)? {
                return Ok(Some((number, freed(product))));
            }
        }
        let mut best: Option<(f64, u8, BoundProduct)> = None;
        for (number, algorithm) in (0..).zip(proposals) {
            let product = bound(algorithm, first);
            if !product.gives(expected)? {
                continue;
            }
            let work = ws.iter().map(|w| GraphWork::Product(bound(algorithm, w))).collect();
            let took = gpu.time_roughly(work)?;
            if best.as_ref().is_none_or(|(least, ..)| took < *least) {
                best = Some((took, number, product));
            }
        }
        Ok(best.map(|(_, number, product)| (number, freed(product))))
    }

    fn fits(&self, x: &CudaBuffer, w: &CudaBuffer, y: &CudaBuffer) -> Result<()> {
        for (buffer, bytes) in [x, w, y].into_iter().zip(self.0.bytes) {
            if buffer.len() < bytes || !Arc::ptr_eq(buffer.context(), &self.0.library.0.context) {
                return Err(Error::new("cublaslt", format!("{bytes} bytes"), buffer.len()));
            }
        }
        Ok(())
    }

    fn proposals(&self) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let Inner { library, product, layouts, alike, .. } = &*self.0;
        let [w, x, y] = layouts[..] else { return Ok(vec![]) };
        let preference = result::create_matmul_pref().map_err(fault)?;
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let limit = std::ptr::from_ref(&WORKSPACE).cast::<c_void>();
        let schemes =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        // `CUBLASLT_REDUCTION_SCHEME_NONE`, which these bindings do not name.
        let none = std::ptr::from_ref(&0_u32).cast::<c_void>();
        // SAFETY: an all-zero result is one that says nothing; the library overwrites those it
        // counts.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; PROPOSALS] =
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: all descriptors live; `found` has room for as many as are asked for; the
        // preference is destroyed only here.
        let asked = unsafe {
            let set = result::set_matmul_pref_attribute(preference, attribute, limit, 8);
            // Nothing is said where anything is allowed, which is the library's own choice.
            let set = match alike {
                true => set
                    .and_then(|()| result::set_matmul_pref_attribute(preference, schemes, none, 4)),
                false => set,
            };
            let asked = set.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    library.0.handle,
                    *product,
                    w,
                    x,
                    y,
                    y,
                    preference,
                    PROPOSALS as i32,
                    found.as_mut_ptr(),
                    &mut count,
                )
                .result()
            });
            let _ = result::destroy_matmul_pref(preference);
            asked
        };
        asked.map_err(fault)?;
        let count = usize::try_from(count).unwrap_or(0).min(PROPOSALS);
        let good = found[..count].iter().filter(|f| f.state.result().is_ok());
        Ok(good.map(|f| f.algo).collect())
    }
}

impl BoundProduct {
    /// The same product of other matrices; see [`Matmul::bind_first`].
    ///
    /// # Errors
    /// If a buffer is too short.
    pub fn to(
        &self,
        x: &CudaBuffer,
        w: &CudaBuffer,
        add: Option<&CudaBuffer>,
        y: &CudaBuffer,
    ) -> Result<BoundProduct> {
        self.matmul.fits(x, w, add.unwrap_or(y))?;
        self.matmul.fits(x, w, y)?;
        let (x, w, add, y) = (x.clone(), w.clone(), add.cloned(), y.clone());
        Ok(BoundProduct { x, w, add, y, ..self.clone() })
    }

    /// Runs it; whether its results begin and end with these bytes. False if the library refuses
    /// the algorithm, which it may do only now.
    fn gives(&self, expected: [&[u8]; 2]) -> Result<bool> {
        self.y.fill(0)?;
        if self.enqueue().is_err() {
            return Ok(false);
        }
        let all = self.matmul.0.bytes[2];
        let [start, end] = expected.map(<[u8]>::len);
        for (range, expected) in [0..start, all.saturating_sub(end)..all].into_iter().zip(expected)
        {
            let mut found = vec![0; expected.len()];
            self.y.part(range)?.read(&mut found)?;
            if found != expected {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Enqueues it after all earlier work.
    ///
    /// # Errors
    /// If the library refuses.
    pub fn enqueue(&self) -> Result<()> {
        let Inner { library, product, layouts, .. } = &*self.matmul.0;
        let Handle { context, handle, workspace } = &*library.0;
        let [w, x, y] = layouts[..] else { return Ok(()) };
        context.enter()?;
        let (one, share) = (1.0_f32, if self.add.is_some() { 1.0_f32 } else { 0.0 });
        let pointer = |b: &CudaBuffer| b.address() as *mut c_void;
        // SAFETY: descriptors, matrices and workspace are held by `self` and free themselves only
        // when the stream has drained; the matrices are as long as the layouts say (`bind`); the
        // scales are read before the call returns. The driver's stream is the runtime's under
        // another name.
        let launched = unsafe {
            result::matmul(
                *handle,
                *product,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&share).cast(),
                pointer(&self.w),
                w,
                pointer(&self.x),
                x,
                pointer(self.add.as_ref().unwrap_or(&self.y)),
                y,
                pointer(&self.y),
                y,
                &self.algorithm,
                pointer(workspace),
                WORKSPACE,
                context.stream.cast(),
            )
        };
        launched.map_err(fault)
    }
}

fn fault(e: cudarc::cublaslt::result::CublasError) -> Error {
    Error::new("cublaslt", "", format!("{:?}", e.0))
}
