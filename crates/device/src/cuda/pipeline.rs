//! Kernels on the device: loaded, bound to buffers and arguments, launched.

use std::ffi::{CString, c_void};
use std::sync::{Arc, PoisonError};

use cudarc::driver::{result, sys};
use formats::{Error, Result};
use tile::Kernel;
use tile::emit::{self, Dialect};
use tile::ir::{Access, Inst, ParamKind};
use tile::launch::{BoundBuffer, Numbers, Requirement};
use tile::types::Scalar;

use super::{Context, CudaBuffer, Gpu};

/// The kernels of which it is known that they write each of their results once.
const WRITE_ONCE: [&str; 5] = ["gemv_", "linear_add_", "stream_", "moe_down_", "moe_combine_"];

/// Loaded code, which stays for the life of the context.
#[derive(Clone, Copy)]
pub(super) struct Module(sys::CUmodule);

/// A kernel compiled for a GPU with values for its constants. Clones refer to the same one.
#[derive(Clone)]
pub struct CudaPipeline(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    kernel: Kernel,
    function: sys::CUfunction,
    /// Bytes of dynamic shared memory.
    dynamic: u32,
    /// Whether the kernel itself waits for the one before (`griddepcontrol`), so that it may start
    /// early.
    waits: bool,
    registers: u32,
    local: u32,
}

// SAFETY: a function handle names loaded code and is valid on any thread while the context lives,
// which `context` ensures.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing here changes after construction.
unsafe impl Sync for Inner {}

/// The source that NVRTC compiles for a lowered kernel, and the name of its entry point.
///
/// # Errors
/// An instruction that was not lowered, or a constant without a value.
pub(super) fn source(kernel: &Kernel, numbers: &Numbers) -> Result<(String, String)> {
    let wrong = |fault: tile::verify::Fault| Error::new(&kernel.name, "", fault);
    let mut text = emit::text(std::slice::from_ref(kernel), Dialect::Cuda).map_err(wrong)?;
    let (symbol, instance) = emit::cuda_instance(kernel, numbers).map_err(wrong)?;
    text.push_str(&instance);
    Ok((text, symbol))
}

impl Gpu {
    /// The source that [`load`](Gpu::load) will compile, for compiling many ahead.
    ///
    /// # Errors
    /// A kernel that is not lowered for CUDA, or a constant without a value.
    pub fn source(kernel: &Kernel, numbers: &Numbers) -> Result<String> {
        source(kernel, numbers).map(|(text, _)| text)
    }

    /// Compiles (or takes from a cache) and loads a kernel that is lowered for CUDA. `numbers`
    /// holds the values of its constants.
    ///
    /// # Errors
    /// A kernel that does not compile, or that needs more shared memory or other instructions than
    /// the GPU has.
    pub fn load(&self, kernel: &Kernel, numbers: &Numbers) -> Result<CudaPipeline> {
        if kernel.has_wgmma() && !self.facts().has_wgmma() {
            let (major, minor) = self.facts().capability;
            let expected = "compute capability 9.0, for wgmma";
            return Err(Error::new(&kernel.name, expected, format!("{major}.{minor}"))
                .hint("a schedule of simdgroups that multiply by themselves"));
        }
        let (text, symbol) = source(kernel, numbers)?;
        self.0.pipeline(kernel, &text, symbol)
    }
}

impl Context {
    /// A kernel whose text this is.
    fn pipeline(
        self: &Arc<Self>,
        kernel: &Kernel,
        text: &str,
        symbol: String,
    ) -> Result<CudaPipeline> {
        let context = self;
        let function = context.function(&kernel.name, text, symbol)?;
        let dynamic = emit::cuda_dynamic_shared(kernel);
        if dynamic > 0 {
            if dynamic > context.facts.shared {
                let most = format!("at most {} bytes of shared memory", context.facts.shared);
                return Err(Error::new(&kernel.name, most, dynamic));
            }
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            let set =
                unsafe { sys::cuFuncSetAttribute(function, attribute, dynamic as i32) }.result();
            context.check(&kernel.name, set)?;
        }
        let ask = |attribute| {
            // SAFETY: the function is loaded.
            let asked = unsafe { result::function::get_function_attribute(function, attribute) };
            context.check(&kernel.name, asked).map(|n| u32::try_from(n).unwrap_or(0))
        };
        let registers = ask(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let local = ask(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        let mut waits = false;
        kernel.visit(&mut |node| waits |= matches!(node.inst, Inst::GridWait));
        // GPUs before capability 9.0 have no instruction for it, and the source omits it: nothing
        // would wait.
        waits &= context.facts.capability.0 >= 9;
        let (context, kernel) = (Arc::clone(context), kernel.clone());
        let inner = Inner { context, kernel, function, dynamic, waits, registers, local };
        Ok(CudaPipeline(Arc::new(inner)))
    }

    /// A function of a text for NVRTC, compiled (or taken from a cache) and loaded once; errors name
    /// `kernel`. The context is current afterwards.
    pub(super) fn function(
        &self,
        kernel: &str,
        text: &str,
        symbol: impl Into<Vec<u8>>,
    ) -> Result<sys::CUfunction> {
        let place = |e: Error| Error { place: format!("{kernel}: {}", e.place), ..e };
        let (key, image) = self.compiler.image(text).map_err(place)?;
        self.enter()?;
        let module = {
            let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
            match modules.get(&key) {
                Some(module) => *module,
                None => {
                    // PTX is a string: it must end in a zero byte.
                    let image = [&image[..], &[0]].concat();
                    // SAFETY: the context is current, and the image is what NVRTC made, whole.
                    let loaded = unsafe { result::module::load_data(image.as_ptr().cast()) };
                    let module = Module(self.check(kernel, loaded)?);
                    modules.insert(key, module);
                    module
                }
            }
        };
        let name = CString::new(symbol).map_err(|_| Error::new(kernel, "a name", "none"))?;
        // SAFETY: the module is loaded and stays so.
        let function = unsafe { result::module::get_function(module.0, name) };
        self.check(kernel, function)
    }
}

impl CudaPipeline {
    /// Registers per thread.
    pub fn registers(&self) -> u32 {
        self.0.registers
    }

    /// Bytes of local memory per thread: spilled registers, and dynamically indexed arrays.
    pub fn local(&self) -> u32 {
        self.0.local
    }

    /// Whether the kernel waits for the one before by itself, so that [`CudaLaunch::overlapping`] can
    /// start it early.
    pub fn waits(&self) -> bool {
        self.0.waits
    }

    /// Checks the launch contract and binds buffers, in the kernel's order.
    ///
    /// # Errors
    /// The rule of the contract that is violated.
    pub fn bind(&self, numbers: &Numbers, buffers: &[CudaBuffer]) -> Result<CudaLaunch> {
        let Inner { kernel, context, .. } = &*self.0;
        let fail = |why: &str| Error::new(&kernel.name, "", why);
        if buffers.iter().any(|b| !Arc::ptr_eq(b.context(), context)) {
            return Err(fail("a buffer is on another GPU"));
        }
        let mut next = buffers.iter();
        let mut words = Vec::with_capacity(kernel.params.len());
        let mut bounds = Vec::with_capacity(buffers.len());
        for param in &kernel.params {
            words.push(match param.kind {
                ParamKind::Buffer { scalar, .. } => match next.next() {
                    Some(b) => {
                        bounds
                            .push(BoundBuffer { len: b.len() / scalar.bytes(), align: b.align() });
                        b.address()
                    }
                    // `Kernel::bind` reports it below.
                    None => 0,
                },
                ParamKind::Argument(_) => numbers.get(&param.name).unwrap_or(0).into(),
            });
        }
        // Surplus buffers make the count wrong, which the contract reports.
        bounds.extend(next.map(|b| BoundBuffer { len: b.len(), align: b.align() }));
        let grid = kernel.bind(numbers, &bounds).map_err(|why| Error::new("cuda", "", why))?;
        Ok(CudaLaunch {
            pipeline: self.clone(),
            numbers: numbers.clone(),
            parameters: Parameters::new(words.into_iter().map(|word| vec![word]).collect()),
            grid,
            _buffers: buffers.into(),
            overlap: false,
        })
    }

    /// Binds and enqueues.
    ///
    /// # Errors
    /// As [`bind`](CudaPipeline::bind) and [`CudaLaunch::enqueue`].
    pub fn launch(&self, numbers: &Numbers, buffers: &[CudaBuffer]) -> Result<()> {
        self.bind(numbers, buffers)?.enqueue()
    }
}

/// A launch's parameters as the driver takes them, prepared once. Clones refer to the same ones.
#[derive(Clone)]
struct Parameters {
    /// Addresses, and 32-bit arguments in the low half; a structure has several words.
    words: Arc<[Vec<u64>]>,
    /// A pointer to each one's words.
    pointers: Arc<[*mut c_void]>,
}

// SAFETY: the pointers refer to `words`, which live as long and are never written.
unsafe impl Send for Parameters {}
// SAFETY: as above.
unsafe impl Sync for Parameters {}

impl Parameters {
    fn new(words: Vec<Vec<u64>>) -> Parameters {
        let pointer = |words: &Vec<u64>| words.as_ptr().cast_mut().cast();
        let pointers = words.iter().map(pointer).collect();
        Parameters { words: words.into(), pointers }
    }
}

/// A kernel with its buffers and arguments, ready to run any number of times.
#[derive(Clone)]
pub struct CudaLaunch {
    pipeline: CudaPipeline,
    parameters: Parameters,
    grid: [u32; 3],
    /// Arguments and dimensions by name.
    numbers: Numbers,
    /// Keeps the addresses allocated.
    _buffers: Box<[CudaBuffer]>,
    overlap: bool,
}

impl CudaLaunch {
    /// Lets it start while the work before it finishes, if the kernel waits by itself.
    pub fn overlapping(mut self) -> CudaLaunch {
        self.overlap = self.pipeline.0.waits;
        self
    }

    /// Makes it start only when the work before it is done.
    pub fn apart(mut self) -> CudaLaunch {
        self.overlap = false;
        self
    }

    /// The same launch with a `tk_post` of these words, which `define` defines, for the `count`
    /// results that go to `y`; `None` for other kernels than products that write as many, each once.
    ///
    /// # Errors
    /// As [`Gpu::load`].
    pub(super) fn posting(
        &self,
        y: &CudaBuffer,
        count: usize,
        define: &str,
        words: &[u64],
    ) -> Result<Option<CudaLaunch>> {
        let Inner { context, kernel, .. } = &*self.pipeline.0;
        if !WRITE_ONCE.iter().any(|family| kernel.name.starts_with(family)) {
            return Ok(None);
        }
        let address = y.address();
        let as_many = |name: &str| {
            let value = |of: &str| self.numbers.get(of);
            let rules = kernel.launch.requirements.iter();
            let lengths = rules.filter_map(|rule| match rule {
                Requirement::Length(of, length) if of == name => length.eval(&value).ok(),
                _ => None,
            });
            lengths.max().is_some_and(|length| length as usize == count)
        };
        let own = |i: &usize| {
            let written = ParamKind::Buffer { scalar: Scalar::F32, access: Access::Out };
            let param = &kernel.params[*i];
            let bound = self.parameters.words[*i] == [address];
            param.kind == written && bound && as_many(&param.name)
        };
        let Some(param) = (0..kernel.params.len()).find(own) else { return Ok(None) };
        let Ok(text) = emit::cuda_posting(kernel, param, define) else { return Ok(None) };
        let mut parameters = self.parameters.words.to_vec();
        parameters[param] = words.to_vec();
        let pipeline = context.pipeline(kernel, &text, kernel.name.clone())?;
        let parameters = Parameters::new(parameters);
        Ok(Some(CudaLaunch { pipeline, parameters, ..self.clone() }))
    }

    /// Enqueues it after all earlier work.
    ///
    /// # Errors
    /// The driver refuses. Failures of the kernel itself show at [`Gpu::synchronize`].
    pub fn enqueue(&self) -> Result<()> {
        let Inner { context, kernel, function, dynamic, .. } = &*self.pipeline.0;
        let pointers = self.parameters.pointers.as_ptr().cast_mut();
        let [x, y, z] = self.grid;
        let shape = [x, y, z, kernel.launch.threads, *dynamic];
        // SAFETY: function and stream live as long as the context. There is a pointer for each
        // parameter of the kernel, to a word that holds an address or a 32-bit number as the
        // emitted signature has it. Buffers are alive (`_buffers`) and free themselves only once
        // the stream has drained. They are long enough by the kernel's contract, and Rust holds no
        // reference to their bytes.
        let launched = unsafe { launch(context, *function, shape, self.overlap, pointers) }?;
        context.check(&kernel.name, launched.result())
    }
}

/// Enqueues a kernel: `[grid x, y, z, threads, bytes of dynamic shared memory]`. With `overlap`, it
/// may start while the work before it finishes.
///
/// # Safety
/// The function is of this context. There is a pointer for each of its parameters, to a value of the
/// parameter's type; the driver writes to none and copies them before it returns. What the kernel
/// reads and writes is there until the stream has drained.
pub(super) unsafe fn launch(
    context: &Context,
    function: sys::CUfunction,
    [x, y, z, threads, dynamic]: [u32; 5],
    overlap: bool,
    pointers: *mut *mut c_void,
) -> Result<sys::CUresult> {
    context.enter()?;
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: dynamic,
        hStream: context.stream,
        attrs: &mut attribute,
        numAttrs: u32::from(overlap),
    };
    // SAFETY: the context is current; the rest is the caller's promise.
    Ok(unsafe { sys::cuLaunchKernelEx(&config, function, pointers, std::ptr::null_mut()) })
}
