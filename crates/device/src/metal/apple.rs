//! Apple's Metal, through its Objective-C interface. It makes no decisions: see `driver`.
//!
//! This code has never run. It is type-checked for macOS, and the fake stands in for every call. It
//! relies on Apple's documentation: buffers are zeroed, command buffers of a queue start in order,
//! a fence orders their encoders, and waiting for a command buffer waits for its completion
//! handlers.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use block2::RcBlock;
use formats::{Error, ErrorKind, Hint, Result, Setting};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2::{Message, available};
use objc2_foundation::{NSArray, NSError, NSProcessInfo, NSRange, NSString, NSURL};
use objc2_metal::{
    MTLBarrierScope, MTLBinaryArchive, MTLBinaryArchiveDescriptor, MTLBuffer, MTLCommandBuffer,
    MTLCommandEncoder, MTLCommandQueue, MTLCompileOptions, MTLComputeCommandEncoder,
    MTLComputePipelineDescriptor, MTLComputePipelineState, MTLCreateSystemDefaultDevice,
    MTLDataType, MTLDevice, MTLDispatchType, MTLFence, MTLFunctionConstantValues, MTLGPUFamily,
    MTLIndirectCommandBuffer, MTLIndirectCommandBufferDescriptor, MTLIndirectCommandType,
    MTLIndirectComputeCommand, MTLLanguageVersion, MTLLibrary, MTLMathFloatingPointFunctions,
    MTLMathMode, MTLPipelineOption, MTLResidencySet, MTLResidencySetDescriptor, MTLResourceOptions,
    MTLSize,
};
use tile::types::Scalar;

use super::api::{self, Api, Commands, Facts, Function};
use super::failure::{Failure, first_error};

// A command-line program finds no default device unless it links this framework.
#[cfg(target_os = "macos")]
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// An Objective-C object that any thread may use.
pub(crate) struct Object<P: ?Sized + 'static>(Retained<ProtocolObject<P>>)
where
    ProtocolObject<P>: Message;

// SAFETY: Metal's devices, queues, buffers, libraries, pipelines, archives, residency sets, command
// buffers and indirect command buffers may be used from any thread, as long as one at a time
// changes them; retaining and releasing is atomic. Changes happen under a lock: archives and
// residency sets under those below; buffer contents, indirect commands and commits under the
// driver's turn. Encoders, which belong to a thread, are not stored in this type.
unsafe impl<P: ?Sized> Send for Object<P> where ProtocolObject<P>: Message {}
// SAFETY: as above.
unsafe impl<P: ?Sized> Sync for Object<P> where ProtocolObject<P>: Message {}

/// The default device with one queue.
pub(crate) struct Metal {
    device: Object<dyn MTLDevice>,
    queue: Object<dyn MTLCommandQueue>,
    /// Orders the encoders of all command buffers, since memory is not hazard-tracked.
    fence: Mutex<Object<dyn MTLFence>>,
    /// Whether work has failed since the fence was made; failed work may not have updated it.
    stale: AtomicBool,
    /// The residency set of all memory, and whether it changed since it was committed.
    resident: Mutex<(Object<dyn MTLResidencySet>, bool)>,
    facts: Facts,
    /// Command buffers not yet waited for, and the first failure not yet reported.
    committed: Mutex<VecDeque<Object<dyn MTLCommandBuffer>>>,
    failure: Arc<Mutex<Option<Failure>>>,
}

/// An archive; reads are concurrent, changes exclusive.
pub(crate) struct Archive(RwLock<Object<dyn MTLBinaryArchive>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts an error of the system.
fn wrong(place: &str, error: &NSError) -> Error {
    Error::new(place, "", first_error(&error.localizedDescription().to_string()))
}

/// The error for a call that returns nothing and no reason.
fn none(what: &str) -> Error {
    Error::new("metal", what, "none from the system")
}

fn url(path: &Path) -> Result<Retained<NSURL>> {
    let name = || Error::new(path.display(), "a path that is text", "another");
    let text = path.to_str().ok_or_else(name)?;
    Ok(NSURL::fileURLWithPath(&NSString::from_str(text)))
}

fn size([width, height, depth]: [u32; 3]) -> MTLSize {
    MTLSize { width: width as usize, height: height as usize, depth: depth as usize }
}

/// The default device, or the first one: sessions without a display have no default.
fn default_device() -> Option<Retained<ProtocolObject<dyn MTLDevice>>> {
    let default = MTLCreateSystemDefaultDevice();
    #[cfg(target_os = "macos")]
    let default = default.or_else(|| objc2_metal::MTLCopyAllDevices().firstObject());
    default
}

/// The error for a machine on which Metal cannot be used.
fn lacking(expected: &str, found: &str) -> Error {
    let error = Error::new("metal", expected, found).of(ErrorKind::Unsupported);
    error.hint(Hint::set(Setting::Place, "cpu"))
}

impl Metal {
    /// Opens the default device.
    ///
    /// # Errors
    /// No device, one older than Apple's M1 and A14, or a system older than macOS 15 and iOS 18.
    pub(crate) fn open() -> Result<Metal> {
        autoreleasepool(|_| {
            let system = NSProcessInfo::processInfo().operatingSystemVersionString().to_string();
            if !available!(macos = 15.0, ios = 18.0, tvos = 18.0, visionos = 2.0) {
                return Err(lacking("macOS 15 or iOS 18", &system));
            }
            let device = default_device().ok_or_else(|| lacking("a GPU", "none"))?;
            let name = device.name().to_string();
            if !device.supportsFamily(MTLGPUFamily::Apple7) {
                let expected = "a GPU of family Apple 7 (M1, A14) or later";
                return Err(lacking(expected, &name));
            }
            let queue = device.newCommandQueue().ok_or_else(|| none("a queue"))?;
            let fence = device.newFence().ok_or_else(|| none("a fence"))?;
            let set = device
                .newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new())
                .map_err(|e| wrong("metal residency set", &e))?;
            queue.addResidencySet(&set);
            let resident = Mutex::new((Object(set), false));
            let facts = Facts {
                name,
                system,
                longest: device.maxBufferLength(),
                memory: device.recommendedMaxWorkingSetSize() as usize,
                shared: device.maxThreadgroupMemoryLength() as u32,
                touches: !device.supportsFamily(MTLGPUFamily::Apple9),
            };
            let (committed, failure, stale) = Default::default();
            let (device, queue) = (Object(device), Object(queue));
            let fence = Mutex::new(Object(fence));
            Ok(Metal { device, queue, fence, stale, resident, facts, committed, failure })
        })
    }

    /// The address of `bytes` bytes from `at`, checked for bounds.
    fn bytes(
        memory: &ProtocolObject<dyn MTLBuffer>,
        at: usize,
        bytes: usize,
    ) -> Result<NonNull<u8>> {
        let length = memory.length();
        if at.checked_add(bytes).is_none_or(|end| end > length) {
            let found = format!("{bytes} at {at}");
            return Err(Error::new("metal buffer", format!("some of {length} bytes"), found));
        }
        // SAFETY: `at` is inside the buffer, whose storage is shared, so that its contents are
        // mapped while it lives.
        Ok(unsafe { memory.contents().cast::<u8>().add(at) })
    }

    /// The descriptor of a pipeline.
    fn describe(
        library: &ProtocolObject<dyn MTLLibrary>,
        function: &Function<'_>,
    ) -> Result<Retained<MTLComputePipelineDescriptor>> {
        let values = MTLFunctionConstantValues::new();
        for (name, scalar, bits) in &function.constants {
            let ty = match scalar {
                Scalar::Bool => MTLDataType::Bool,
                Scalar::I32 => MTLDataType::Int,
                Scalar::F32 => MTLDataType::Float,
                _ => MTLDataType::UInt,
            };
            let value = NonNull::from(bits).cast::<c_void>();
            // SAFETY: the value has four bytes, as much as the widest of these types; its first is
            // a `bool`'s on a little-endian machine, as all of these are, and it is 0 or 1. It is
            // copied before the call returns.
            unsafe { values.setConstantValue_type_withName(value, ty, &NSString::from_str(name)) };
        }
        let name = &function.kernel.name;
        let made = library
            .newFunctionWithName_constantValues_error(&NSString::from_str(name), &values)
            .map_err(|e| wrong("metal", &e))?;
        let descriptor = MTLComputePipelineDescriptor::new();
        descriptor.setComputeFunction(Some(&made));
        descriptor.setLabel(Some(&NSString::from_str(name)));
        descriptor.setSupportIndirectCommandBuffers(true);
        // SAFETY: the launch contract has threads in multiples of 32, which is the width that
        // `pipeline` checks.
        unsafe { descriptor.setThreadGroupSizeIsMultipleOfThreadExecutionWidth(true) };
        Ok(descriptor)
    }

    /// Makes a pipeline from a descriptor, from an archive or by compiling.
    fn make(
        &self,
        descriptor: &MTLComputePipelineDescriptor,
        options: MTLPipelineOption,
    ) -> std::result::Result<Retained<ProtocolObject<dyn MTLComputePipelineState>>, Retained<NSError>>
    {
        self.device.0.newComputePipelineStateWithDescriptor_options_reflection_error(
            descriptor, options, None,
        )
    }

    /// Checks that a pipeline can be launched under its kernel's contract.
    fn check(
        pipeline: &ProtocolObject<dyn MTLComputePipelineState>,
        function: &Function<'_>,
    ) -> Result<()> {
        let width = pipeline.threadExecutionWidth();
        if width != 32 {
            return Err(Error::new("metal", "simdgroups of 32 threads", width));
        }
        let (wanted, most) =
            (function.kernel.launch.threads, pipeline.maxTotalThreadsPerThreadgroup());
        if wanted as usize > most {
            return Err(Error::new("metal", format!("{wanted} threads in a threadgroup"), most));
        }
        Ok(())
    }
}

impl Api for Metal {
    type Memory = Object<dyn MTLBuffer>;
    type Library = Object<dyn MTLLibrary>;
    type Pipeline = Object<dyn MTLComputePipelineState>;
    type Archive = Archive;
    type Indirect = Object<dyn MTLIndirectCommandBuffer>;
    type Encoder<'a> = Encoder<'a>;
    type Slot<'a> = Slot;

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn memory(&self, bytes: usize) -> Result<Self::Memory> {
        autoreleasepool(|_| {
            let options = MTLResourceOptions::StorageModeShared
                | MTLResourceOptions::HazardTrackingModeUntracked;
            let made = self.device.0.newBufferWithLength_options(bytes, options);
            made.map(Object).ok_or_else(|| {
                let error = Error::new("metal", "memory", format!("none for {bytes} bytes"));
                error.hint("a smaller model, a shorter context, or fewer other programs")
            })
        })
    }

    fn write(&self, to: &Self::Memory, at: usize, bytes: &[u8]) -> Result<()> {
        let start = Metal::bytes(&to.0, at, bytes.len())?;
        // SAFETY: the range is inside the buffer; the driver's turn keeps other threads away, and
        // the GPU is done. Rust holds no reference to it, so `bytes` does not overlap it.
        unsafe { start.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        Ok(())
    }

    fn read(&self, from: &Self::Memory, at: usize, bytes: &mut [u8]) -> Result<()> {
        let start = Metal::bytes(&from.0, at, bytes.len())?;
        let len = bytes.len();
        // SAFETY: as for `write`.
        unsafe { start.copy_to_nonoverlapping(NonNull::from(bytes).cast(), len) };
        Ok(())
    }

    fn look(&self, from: &Self::Memory, at: usize) -> Result<[u32; 2]> {
        let start = Metal::bytes(&from.0, at, 8)?;
        // SAFETY: eight bytes are there, word-aligned, and Rust holds no reference to them. Kernels
        // may be writing them, in whole words, or their neighbours; no value of a word is invalid.
        Ok(unsafe { start.cast::<[u32; 2]>().read_volatile() })
    }

    fn put(&self, to: &Self::Memory, at: usize, word: u32) -> Result<()> {
        let start = Metal::bytes(&to.0, at, 4)?;
        // SAFETY: four bytes are there, and Rust holds no reference to them; the driver's turn
        // keeps other threads away.
        unsafe { start.cast::<u32>().write_volatile(word) };
        Ok(())
    }

    fn reside(&self, memory: &Self::Memory) {
        let mut resident = lock(&self.resident);
        resident.0.0.addAllocation(ProtocolObject::from_ref(&*memory.0));
        resident.1 = true;
    }

    fn keep(&self) {
        lock(&self.resident).0.0.requestResidency();
    }

    fn allocated(&self) -> usize {
        self.device.0.currentAllocatedSize()
    }

    fn pooled<R>(&self, work: impl FnOnce() -> R) -> R {
        autoreleasepool(|_| work())
    }

    fn depart(&self, memory: &Self::Memory) {
        let resident = lock(&self.resident);
        resident.0.0.removeAllocation(ProtocolObject::from_ref(&*memory.0));
        // Commit at once, or the set would keep the memory until the next step.
        resident.0.0.commit();
    }

    fn compile(&self, text: &str, version: (u32, u32)) -> Result<Self::Library> {
        autoreleasepool(|_| {
            let options = MTLCompileOptions::new();
            options.setLanguageVersion(match version {
                (3, 2) => MTLLanguageVersion::Version3_2,
                _ => MTLLanguageVersion::Version3_1,
            });
            // Masks are infinite, so infinities must be exact; and functions are as precise as in a
            // metallib.
            options.setMathMode(MTLMathMode::Safe);
            options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
            let source = NSString::from_str(text);
            let made = self.device.0.newLibraryWithSource_options_error(&source, Some(&options));
            made.map(Object).map_err(|e| wrong("metal", &e))
        })
    }

    fn open(&self, path: &Path) -> Result<Self::Library> {
        autoreleasepool(|_| {
            let made = self.device.0.newLibraryWithURL_error(&*url(path)?);
            made.map(Object).map_err(|e| wrong(&path.display().to_string(), &e))
        })
    }

    fn pipeline(
        &self,
        library: &Self::Library,
        function: &Function<'_>,
        archive: Option<&Archive>,
    ) -> Result<(Self::Pipeline, bool)> {
        autoreleasepool(|_| {
            let descriptor = Metal::describe(&library.0, function)?;
            if let Some(Archive(archive)) = archive {
                let archive = archive.read().unwrap_or_else(PoisonError::into_inner);
                descriptor.setBinaryArchives(Some(&NSArray::from_slice(&[&*archive.0])));
                let options = MTLPipelineOption::FailOnBinaryArchiveMiss;
                if let Ok(found) = self.make(&descriptor, options) {
                    Metal::check(&found, function)?;
                    return Ok((Object(found), false));
                }
                descriptor.setBinaryArchives(None);
            }
            let made = self.make(&descriptor, MTLPipelineOption::empty());
            let made = made.map_err(|e| wrong("metal", &e))?;
            Metal::check(&made, function)?;
            let added = archive.is_some_and(|Archive(archive)| {
                let archive = archive.write().unwrap_or_else(PoisonError::into_inner);
                archive.0.addComputePipelineFunctionsWithDescriptor_error(&descriptor).is_ok()
            });
            Ok((Object(made), added))
        })
    }

    fn archive(&self, file: Option<&Path>) -> Result<Archive> {
        autoreleasepool(|_| {
            let descriptor = MTLBinaryArchiveDescriptor::new();
            if let Some(path) = file {
                descriptor.setUrl(Some(&*url(path)?));
            }
            let made = self.device.0.newBinaryArchiveWithDescriptor_error(&descriptor);
            let made = made.map_err(|e| wrong("metal pipelines", &e))?;
            Ok(Archive(RwLock::new(Object(made))))
        })
    }

    fn save(&self, archive: &Archive, to: &Path) -> Result<()> {
        autoreleasepool(|_| {
            let archive = archive.0.write().unwrap_or_else(PoisonError::into_inner);
            let written = archive.0.serializeToURL_error(&*url(to)?);
            written.map_err(|e| wrong("metal pipelines", &e))
        })
    }

    fn indirect(&self, commands: usize, bindings: usize) -> Result<Self::Indirect> {
        autoreleasepool(|_| {
            let descriptor = MTLIndirectCommandBufferDescriptor::new();
            descriptor.setCommandTypes(MTLIndirectCommandType::ConcurrentDispatch);
            descriptor.setInheritPipelineState(false);
            descriptor.setInheritBuffers(false);
            descriptor.setMaxKernelBufferBindCount(bindings);
            let options = MTLResourceOptions::StorageModeShared
                | MTLResourceOptions::HazardTrackingModeUntracked;
            // SAFETY: the driver asks for no more commands than `api::COMMANDS`, which is Metal's
            // limit.
            let made = unsafe {
                self.device.0.newIndirectCommandBufferWithDescriptor_maxCommandCount_options(
                    &descriptor,
                    commands,
                    options,
                )
            };
            made.map(Object).ok_or_else(|| none("an indirect command buffer"))
        })
    }

    fn slot<'a>(&self, indirect: &'a Self::Indirect, index: usize) -> Self::Slot<'a> {
        assert!(index < indirect.0.size(), "a command of the buffer");
        // SAFETY: the index is inside, as was just checked.
        Slot(unsafe { indirect.0.indirectComputeCommandAtIndex(index) })
    }

    fn encoder(&self) -> Result<Encoder<'_>> {
        {
            let mut resident = lock(&self.resident);
            if std::mem::take(&mut resident.1) {
                resident.0.0.commit();
                resident.0.0.requestResidency();
            }
        }
        autoreleasepool(|_| {
            let buffer = self.queue.0.commandBuffer().ok_or_else(|| none("a command buffer"))?;
            let encoder = buffer
                .computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)
                .ok_or_else(|| none("a compute encoder"))?;
            let mut fence = lock(&self.fence);
            if lock(&self.committed).is_empty() {
                // Nothing to wait for: the fence need not have been updated. One that failed work
                // should have updated is replaced.
                if self.stale.swap(false, Ordering::Relaxed) {
                    *fence = Object(self.device.0.newFence().ok_or_else(|| none("a fence"))?);
                }
            } else {
                encoder.waitForFence(&fence.0);
            }
            let fence = fence.0.clone();
            Ok(Encoder { of: self, buffer: Some(buffer), encoder, fence })
        })
    }

    fn advance(&self) -> Option<f64> {
        // Left in place: another thread that asks meanwhile waits for the same one.
        let first = lock(&self.committed).front().map(|first| first.0.clone())?;
        let seconds = autoreleasepool(|_| {
            first.waitUntilCompleted();
            first.GPUEndTime() - first.GPUStartTime()
        });
        // A command buffer keeps alive what it uses.
        let mut committed = lock(&self.committed);
        if committed.front().is_some_and(|found| found.0 == first) {
            committed.pop_front();
        }
        Some(seconds)
    }

    fn failure(&self) -> Option<Failure> {
        let failure = lock(&self.failure).take();
        if failure.is_some() {
            self.stale.store(true, Ordering::Relaxed);
        }
        failure
    }
}

/// A command buffer and its encoder.
pub(crate) struct Encoder<'a> {
    of: &'a Metal,
    /// `None` once committed.
    buffer: Option<Retained<ProtocolObject<dyn MTLCommandBuffer>>>,
    encoder: Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
    /// The fence that later command buffers wait for.
    fence: Retained<ProtocolObject<dyn MTLFence>>,
}

impl Commands<Metal> for Encoder<'_> {
    fn pipeline(&mut self, pipeline: &Object<dyn MTLComputePipelineState>) {
        self.encoder.setComputePipelineState(&pipeline.0);
    }

    fn buffer(&mut self, index: usize, memory: &Object<dyn MTLBuffer>, range: Range<usize>) {
        // SAFETY: the range is inside the memory and the index below `api::BINDINGS`, by the
        // driver's `Buffer` and `plan::bind`. The kernel stays inside the range by its contract,
        // and the command buffer retains the memory.
        unsafe { self.encoder.setBuffer_offset_atIndex(Some(&memory.0), range.start, index) };
    }

    fn barrier(&mut self) {
        self.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }

    fn dispatch(&mut self, grid: [u32; 3], threads: u32) {
        let threads = size([threads, 1, 1]);
        self.encoder.dispatchThreadgroups_threadsPerThreadgroup(size(grid), threads);
    }
}

impl api::Encoder<Metal> for Encoder<'_> {
    fn word(&mut self, index: usize, word: u32) {
        let bytes = NonNull::from(&word).cast::<c_void>();
        // SAFETY: four bytes, copied before the call returns; the index is below `api::BINDINGS`.
        unsafe { self.encoder.setBytes_length_atIndex(bytes, 4, index) };
    }

    fn touch(&mut self, pipeline: &Object<dyn MTLComputePipelineState>) {
        self.encoder.setComputePipelineState(&pipeline.0);
        let (none, one) = (size([0, 0, 0]), size([1, 1, 1]));
        self.encoder.dispatchThreadgroups_threadsPerThreadgroup(none, one);
    }

    fn execute(&mut self, indirect: &Object<dyn MTLIndirectCommandBuffer>, commands: Range<usize>) {
        let range = NSRange { location: commands.start, length: commands.len() };
        // SAFETY: these commands are filled in, and the recording keeps what they use until the GPU
        // is done with them.
        unsafe { self.encoder.executeCommandsInBuffer_withRange(&indirect.0, range) };
    }

    fn commit(mut self) -> Result<()> {
        let Some(buffer) = self.buffer.take() else { return Ok(()) };
        let first = Arc::clone(&self.of.failure);
        let handler = RcBlock::new(move |done: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
            // SAFETY: the system passes the finished command buffer, which is alive while the
            // handler runs.
            let done = unsafe { done.as_ref() };
            if let Some(error) = done.error() {
                let said = error.localizedDescription().to_string();
                lock(&first).get_or_insert(Failure { code: error.code(), said });
            }
        });
        autoreleasepool(|_| {
            self.encoder.updateFence(&self.fence);
            self.encoder.endEncoding();
            // SAFETY: the block is alive, and the command buffer copies it. It is called on another
            // thread, which its capture, an `Arc` of a mutex, allows.
            unsafe { buffer.addCompletedHandler(RcBlock::as_ptr(&handler)) };
            buffer.commit();
        });
        lock(&self.of.committed).push_back(Object(buffer));
        Ok(())
    }
}

impl Drop for Encoder<'_> {
    fn drop(&mut self) {
        // An abandoned encoder must be ended, too.
        if self.buffer.is_some() {
            self.encoder.endEncoding();
        }
    }
}

/// An indirect command.
pub(crate) struct Slot(Retained<ProtocolObject<dyn MTLIndirectComputeCommand>>);

impl Commands<Metal> for Slot {
    fn pipeline(&mut self, pipeline: &Object<dyn MTLComputePipelineState>) {
        self.0.setComputePipelineState(&pipeline.0);
    }

    fn buffer(&mut self, index: usize, memory: &Object<dyn MTLBuffer>, range: Range<usize>) {
        // SAFETY: the index is below the bindings that the buffer of commands was made for, and the
        // range inside the memory, by the driver's `record`, which keeps the memory as long as the
        // recording.
        unsafe { self.0.setKernelBuffer_offset_atIndex(&memory.0, range.start, index) };
    }

    fn barrier(&mut self) {
        self.0.setBarrier();
    }

    fn dispatch(&mut self, grid: [u32; 3], threads: u32) {
        let threads = size([threads, 1, 1]);
        self.0.concurrentDispatchThreadgroups_threadsPerThreadgroup(size(grid), threads);
    }
}
