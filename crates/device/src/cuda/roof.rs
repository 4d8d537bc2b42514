//! Measures the peak rates of a GPU, with which kernels are compared instead of a data sheet.

use formats::{Error, Result};
use tile::launch::Numbers;
use tile::passes::{self, Target};
use tile::types::Scalar;

use super::{CudaBuffer, Gpu, GraphWork};
use crate::gpu::read::read_roof;

/// The measured peak rates of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Roofs {
    /// Bytes per second read from device memory.
    pub read: f64,
    /// Bytes per second of the driver's device-to-device copy, reads and writes both counted.
    pub copy: f64,
    /// Operations per second of cuBLASLt's bf16 matrix product, by edge of the square matrices; a
    /// multiply-add counts as two. Empty without cuBLASLt.
    pub matmul: Vec<(u32, f64)>,
}

impl Roofs {
    /// The faster of the matrix products.
    pub fn matrix(&self) -> Option<f64> {
        self.matmul.iter().map(|(_, flops)| *flops).reduce(f64::max)
    }
}

/// Measures a GPU's peak rates on data far larger than its caches.
///
/// # Errors
/// A kernel that fails, or too little memory.
pub fn measure(gpu: &Gpu) -> Result<Roofs> {
    let data = gpu.buffer((gpu.facts().memory / 16).clamp(64 << 20, 4 << 30) & !0xFFFF)?;
    scatter(gpu, &data)?;
    let read = read(gpu, &data)?;
    let copy = copy(gpu, &data)?;
    let products = |e: u32| Ok((e, matmul(gpu, &data, e)?));
    let matmul = match super::library::cublaslt() {
        Ok(()) => [4096, 8192].into_iter().map(products).collect::<Result<_>>()?,
        Err(_) => vec![],
    };
    Ok(Roofs { read, copy, matmul })
}

/// Bytes per second read from device memory.
///
/// # Errors
/// As [`measure`].
pub fn read_rate(gpu: &Gpu) -> Result<f64> {
    let data = gpu.buffer((gpu.facts().memory / 64).clamp(64 << 20, 1 << 30) & !0xFFFF)?;
    scatter(gpu, &data)?;
    read(gpu, &data)
}

/// The best of several grids, since the best one differs between GPUs.
fn read(gpu: &Gpu, data: &CudaBuffer) -> Result<f64> {
    let mut best = 0.0_f64;
    for (group, ahead) in [(1024, 4), (1024, 8), (512, 8), (256, 16)] {
        let kernel = passes::lower(&read_roof(ahead, group).record(), Target::Cuda)
            .map_err(|e| Error::new("read_roof", "", e))?;
        let pipeline = gpu.load(&kernel, &Numbers::new())?;
        for per_multiprocessor in [1, 2, 4, 8] {
            let groups = gpu.facts().multiprocessors * per_multiprocessor;
            let turn = groups as usize * group as usize * ahead as usize * 16;
            let turns = data.len() / turn;
            let out = gpu.buffer(groups as usize * group as usize * 4)?;
            let numbers = Numbers::new().with("groups", groups).with("turns", turns as u32);
            let launch = pipeline.bind(&numbers, &[data.clone(), out])?;
            let took = gpu.time(vec![GraphWork::Launch(launch)], 5)?;
            best = best.max((turns * turn) as f64 / took.median);
        }
    }
    Ok(best)
}

fn copy(gpu: &Gpu, data: &CudaBuffer) -> Result<f64> {
    let half = data.len() / 2;
    let (from, to) = (data.part(0..half)?, data.part(half..2 * half)?);
    let took = gpu.time(vec![GraphWork::Copy { to, from }], 5)?;
    Ok(2.0 * half as f64 / took.median)
}

fn matmul(gpu: &Gpu, data: &CudaBuffer, edge: u32) -> Result<f64> {
    let bytes = edge as usize * edge as usize * 2;
    let part = |i: usize| data.part(i * bytes..(i + 1) * bytes);
    let y = gpu.buffer(bytes)?;
    let product = gpu.matmul(Scalar::BF16, edge, edge, edge)?.bind(&part(0)?, &part(1)?, &y)?;
    let took = gpu.time(vec![GraphWork::Product(product)], 20)?;
    Ok(2.0 * f64::from(edge).powi(3) / took.median)
}

/// Fills a buffer with noise that is finite in bf16: products of zeros or infinities draw less
/// power and run faster.
fn scatter(gpu: &Gpu, buffer: &CudaBuffer) -> Result<()> {
    let seed = tile::case::Buffer::floats(Scalar::BF16, &tile::case::noise(7, 1 << 20)).bytes;
    let seed = &seed[..seed.len().min(buffer.len())];
    buffer.part(0..seed.len())?.write(seed)?;
    buffer.repeat(seed.len())?;
    gpu.synchronize()
}
