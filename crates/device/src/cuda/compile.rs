//! Compiles CUDA source to machine code with NVRTC, caching results in memory and on disk.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::nvrtc::{result, sys};
use formats::{Error, Result};

use super::library;
use crate::cache::{self, Cache, Key};

/// The machine code of one source.
pub(super) type Image = Arc<[u8]>;

/// A compiler for one kind of GPU. It needs no GPU and can be used by any number of threads.
pub struct Compiler {
    arch: String,
    /// The compiler's version, which is part of the cache key.
    version: String,
    disk: Option<Cache>,
    done: Mutex<HashMap<Key, Arc<OnceLock<Result<Image>>>>>,
    compiled: AtomicUsize,
}

impl Compiler {
    /// For a compute capability, such as `(9, 0)`.
    ///
    /// # Errors
    /// NVRTC is missing, or supports no GPU as old as this.
    pub fn new(capability: (u32, u32)) -> Result<Compiler> {
        Compiler::keeping(capability, Cache::of_user())
    }

    pub(super) fn keeping(capability: (u32, u32), disk: Option<Cache>) -> Result<Compiler> {
        library::nvrtc()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(fault)?;
        let arch = architecture(capability, &supported()?)?;
        let version = format!("nvrtc {major}.{minor}");
        let (done, compiled) = Default::default();
        Ok(Compiler { arch, version, disk, done, compiled })
    }

    /// The target: `sm_90a`, or `compute_120` if the GPU is newer than the compiler.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// Number of sources that NVRTC compiled, not counting cached ones.
    pub fn compiled(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }

    /// The machine code of a source (PTX if the GPU is newer than the compiler). Threads that ask
    /// for the same source wait for one compilation.
    ///
    /// # Errors
    /// The compiler's first error.
    pub(super) fn image(&self, text: &str) -> Result<(Key, Image)> {
        let key = cache::key(&[text, &self.arch, &self.version]);
        let slot = {
            let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(done.entry(key).or_default())
        };
        let image = slot.get_or_init(|| {
            if let Some(image) = self.disk.as_ref().and_then(|disk| disk.get(&key)) {
                return Ok(image.into());
            }
            let image = self.compile(text)?;
            if let Some(disk) = &self.disk {
                disk.put(&key, &image);
            }
            Ok(image.into())
        });
        Ok((key, image.clone()?))
    }

    /// Compiles the sources of some items ahead of their use, on all cores. Errors are reported
    /// when a source is used.
    pub fn ahead<T: Sync>(&self, items: &[T], texts: impl Fn(&T) -> Vec<String> + Sync) {
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                texts(item).iter().for_each(|text| drop(self.image(text)));
            }
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..cores.min(items.len()) {
                // The compiler recurses deeper than the default stack may allow.
                let thread = std::thread::Builder::new().stack_size(16 << 20);
                // Fewer threads than cores are only slower.
                drop(thread.spawn_scoped(scope, work));
            }
        });
    }

    fn compile(&self, text: &str) -> Result<Vec<u8>> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let source = CString::new(text)
            .map_err(|_| Error::new("nvrtc", "a text without zero bytes", "one with"))?;
        let program = Program(result::create_program(&source, None).map_err(fault)?);
        let options = [format!("--gpu-architecture={}", self.arch), "--std=c++17".to_owned()];
        // SAFETY: the program was created just now and is destroyed by `Program` alone.
        let compiled = unsafe { result::compile_program(program.0, &options) };
        if let Err(why) = compiled {
            return Err(self.explain(text, &program, why));
        }
        let ptx = self.arch.starts_with("compute");
        let (size_of, get): (SizeOf, Get) = if ptx {
            (sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)
        } else {
            (sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
        };
        let mut size = 0;
        // SAFETY: the program is compiled; this writes one number.
        unsafe { size_of(program.0, &mut size) }.result().map_err(fault)?;
        let mut image = vec![0_u8; size];
        // SAFETY: `image` has the size that was asked for.
        unsafe { get(program.0, image.as_mut_ptr().cast()) }.result().map_err(fault)?;
        Ok(image)
    }

    /// The compiler's first error, with the line of source that it refers to.
    fn explain(&self, text: &str, program: &Program, why: result::NvrtcError) -> Error {
        // SAFETY: the program exists; its log may be read whether or not it compiled.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        let log: Vec<u8> =
            log.into_iter().flat_map(|c| c.to_ne_bytes()).filter(|b| *b != 0).collect();
        let log = String::from_utf8_lossy(&log);
        let first = log.lines().find(|line| line.contains("error")).or(log.lines().next());
        let Some(first) = first else { return fault(why) };
        let number = first.split(['(', ')']).nth(1).and_then(|n| n.parse::<usize>().ok());
        let line = number.and_then(|n| text.lines().nth(n.checked_sub(1)?)).unwrap_or_default();
        Error::new("nvrtc", "", format!("{first} in `{}`", line.trim()))
    }
}

type SizeOf = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
type Get = unsafe fn(sys::nvrtcProgram, *mut std::ffi::c_char) -> sys::nvrtcResult;

/// A program under compilation, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `create_program`, destroyed only here. Nothing can be done about a
        // failure.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// The compute capabilities that this NVRTC supports, as `90` for 9.0.
fn supported() -> Result<Vec<u32>> {
    let mut count = 0;
    // SAFETY: writes one number.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }.result().map_err(fault)?;
    let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: `archs` has as many elements as it said it would write.
    unsafe { sys::nvrtcGetSupportedArchs(archs.as_mut_ptr()) }.result().map_err(fault)?;
    Ok(archs.into_iter().filter_map(|a| u32::try_from(a).ok()).collect())
}

/// The target for a GPU: its own instruction set if the compiler supports it, else portable code
/// for the newest one that it does.
fn architecture((major, minor): (u32, u32), supported: &[u32]) -> Result<String> {
    let wanted = major * 10 + minor;
    if wanted < 80 {
        let found = format!("{major}.{minor}");
        return Err(Error::new("cuda", "a GPU of compute capability 8.0 or later", found));
    }
    if supported.contains(&wanted) {
        // From Hopper on, `a` enables the instructions specific to one generation.
        let suffix = if wanted >= 90 && minor == 0 { "a" } else { "" };
        return Ok(format!("sm_{wanted}{suffix}"));
    }
    let newest = supported.iter().filter(|a| **a < wanted).max().ok_or_else(|| {
        Error::new("nvrtc", format!("one that knows compute capability {major}.{minor}"), "none")
    })?;
    Ok(format!("compute_{newest}"))
}

fn fault(why: result::NvrtcError) -> Error {
    Error::new("nvrtc", "", format!("{:?}", why.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tile::passes::{self, Target};

    const TEXT: &str = "extern \"C\" __global__ void k(float* y) { y[threadIdx.x] = 1.0f; }";

    /// A compiler on a cache of its own; none, with a line saying so, where there is no NVRTC.
    fn compiler(folder: &std::path::Path) -> Option<Compiler> {
        match Compiler::keeping((9, 0), Some(Cache::at(folder))) {
            Ok(compiler) => Some(compiler),
            Err(why) => {
                testing::skipped(&why);
                None
            }
        }
    }

    #[test]
    fn a_text_is_compiled_once_and_then_kept() {
        let folder = tempfile::tempdir().unwrap();
        let Some(first) = compiler(folder.path()) else { return };
        assert_eq!(first.arch(), "sm_90a");
        let (key, image) = first.image(TEXT).unwrap();
        assert_eq!(&image[..4], b"\x7fELF");
        first.ahead(&[TEXT, TEXT], |text| vec![(*text).to_owned()]);
        assert_eq!(first.compiled(), 1);

        let second = compiler(folder.path()).unwrap();
        assert_eq!(second.image(TEXT).unwrap().1, image);
        assert_eq!(second.compiled(), 0, "read from disk");

        let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        std::fs::write(&file, b"damage").unwrap();
        let third = compiler(folder.path()).unwrap();
        assert_eq!(third.image(TEXT).unwrap().0, key);
        assert_eq!(third.compiled(), 1, "compiled again");
        assert!(std::fs::metadata(&file).unwrap().len() > 1000, "and kept again");
    }

    #[test]
    fn an_error_names_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler(folder.path()) else { return };
        let text = "__device__ int a;\n__device__ int b = c;\n";
        let error = compiler.image(text).unwrap_err().to_string();
        assert!(
            error.contains("undefined") && error.contains("`__device__ int b = c;`"),
            "{error}"
        );
        assert!(!error.contains('\n'));
    }

    #[test]
    fn every_family_compiles() {
        let folder = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler(folder.path()) else { return };
        for spec in ops::kernels::all() {
            let cases = (spec.cases)();
            for case in cases.iter().take(1).chain(cases.last()) {
                let special = passes::specialise(&case.kernel, &case.numbers);
                let lowered = passes::lower(&special, Target::Cuda).unwrap();
                let text = crate::cuda::Gpu::source(&lowered, &case.numbers).unwrap();
                compiler.image(&text).unwrap_or_else(|e| panic!("{}: {e}", case.kernel.name));
            }
        }
        assert!(compiler.compiled() > 60);
    }

    #[test]
    fn targets_follow_the_gpu_and_the_compiler() {
        let known = [75, 80, 86, 89, 90, 100, 120];
        let target = |major, minor| architecture((major, minor), &known).map_err(|e| e.to_string());
        assert_eq!(target(8, 0).as_deref(), Ok("sm_80"));
        assert_eq!(target(8, 9).as_deref(), Ok("sm_89"));
        assert_eq!(target(9, 0).as_deref(), Ok("sm_90a"));
        assert_eq!(target(12, 0).as_deref(), Ok("sm_120a"));
        assert_eq!(target(12, 1).as_deref(), Ok("compute_120"));
        assert!(target(7, 5).unwrap_err().contains("7.5"));
    }
}
