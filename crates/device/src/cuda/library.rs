//! NVIDIA's libraries, looked for when they are first needed: the same program starts on a machine
//! that has none.

#[cfg(unix)]
use std::ffi::CString;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use cudarc::{cublaslt, driver, nvrtc};
use formats::{Error, Result};

/// The oldest driver whose entry points are all used here: CUDA 12.8.
const DRIVER: i32 = 12_080;

/// Loads the driver once and starts it.
///
/// # Errors
/// If there is no driver, it is older than CUDA 12.8, or it does not start.
pub(super) fn driver() -> Result<()> {
    static STARTED: OnceLock<Result<()>> = OnceLock::new();
    STARTED.get_or_init(start).clone()
}

fn start() -> Result<()> {
    // SAFETY: loading the driver runs its initialisers, which have no preconditions.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(Error::new("cuda", "an NVIDIA driver", "none on this machine"));
    }
    let mut version = 0;
    // SAFETY: this entry point is in every driver, needs no initialisation and writes one number.
    unsafe { driver::sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(|e| super::fault("cuda: driver version", e))?;
    if version < DRIVER {
        return Err(Error::new("cuda", "a driver for CUDA 12.8 or later", shown(version)));
    }
    driver::result::init().map_err(|e| super::fault("cuda", e))
}

/// Whether this machine has a GPU, or a driver that does not say that there is none: why such a one
/// cannot be used is told by whoever opens it.
pub fn present() -> bool {
    // SAFETY: loading the driver runs its initialisers, which have no preconditions.
    if !unsafe { driver::sys::is_culib_present() } {
        return false;
    }
    match driver::result::init() {
        Ok(()) => driver::result::device::get_count().map_or(true, |count| count > 0),
        Err(error) => error.0 != driver::sys::CUresult::CUDA_ERROR_NO_DEVICE,
    }
}

/// `13000` as `13.0`.
pub(super) fn shown(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Loads the run-time compiler.
///
/// # Errors
/// If it is nowhere to be found.
pub(super) fn nvrtc() -> Result<()> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading NVRTC has no preconditions.
    let present = || unsafe { nvrtc::sys::is_culib_present() };
    find(&FOUND, "libnvrtc.so", present)
}

/// Loads the matrix library.
///
/// # Errors
/// If it is nowhere to be found.
pub(super) fn cublaslt() -> Result<()> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading cuBLASLt has no preconditions.
    let present = || unsafe { cublaslt::sys::is_culib_present() };
    find(&FOUND, "libcublasLt.so", present)
}

/// Whether a library is on the loader's path, or can be made so from where the toolkit usually is.
fn find(found: &OnceLock<bool>, name: &str, present: impl Fn() -> bool) -> Result<()> {
    if *found.get_or_init(|| present() || (preload(name) && present())) {
        return Ok(());
    }
    Err(Error::new("cuda", name, "none").hint(
        "install the CUDA toolkit, or name the folder that holds it in LD_LIBRARY_PATH or CUDA_HOME",
    ))
}

/// Loads a library from the toolkit's folder. The loader then finds it under its plain name, which
/// is how it is asked for.
fn preload(name: &str) -> bool {
    toolkit(name, &["13", "12"]).iter().any(|path| load(path).is_some())
}

/// Where the toolkit would have a library of these versions.
fn toolkit(name: &str, versions: &[&str]) -> Vec<String> {
    let home = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(|key| std::env::var(key).ok());
    let homes = home.chain(["/usr/local/cuda", "/opt/cuda"].map(str::to_owned));
    homes
        .flat_map(|home| versions.iter().map(move |v| format!("{home}/lib64/{name}.{v}")))
        .collect()
}

/// A library that stays loaded for the life of the process.
pub(super) struct Loaded(
    #[cfg_attr(not(unix), expect(dead_code, reason = "nothing is loaded there"))] NonNull<c_void>,
);

/// Loads a library of one of these versions, from the loader's path or the toolkit's folder.
pub(super) fn open(name: &str, versions: &[&str]) -> Option<Loaded> {
    let plain = versions.iter().map(|v| format!("{name}.{v}"));
    plain.chain(toolkit(name, versions)).find_map(|path| load(&path)).map(Loaded)
}

#[cfg(unix)]
fn load(path: &str) -> Option<NonNull<c_void>> {
    let path = CString::new(path).ok()?;
    // SAFETY: the path ends in a zero byte, and the library stays loaded for the life of the
    // process.
    NonNull::new(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) })
}

#[cfg(not(unix))]
fn load(_path: &str) -> Option<NonNull<c_void>> {
    None
}

impl Loaded {
    /// An entry point; none if the library has none of that name.
    ///
    /// # Safety
    /// `F` is a pointer to a function of the signature that it has.
    #[cfg(unix)]
    pub(super) unsafe fn symbol<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the library is loaded, and the name ends in a zero byte.
        let found = NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })?;
        // SAFETY: as large as a pointer, and what the caller says that it is.
        Some(unsafe { std::mem::transmute_copy(&found.as_ptr()) })
    }

    /// An entry point: there is none.
    ///
    /// # Safety
    /// None is needed.
    #[cfg(not(unix))]
    pub(super) unsafe fn symbol<F: Copy>(&self, _name: &CStr) -> Option<F> {
        None
    }
}
