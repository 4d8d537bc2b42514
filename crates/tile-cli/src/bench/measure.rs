//! The time of one benchmark: its kernel specialised and lowered as the engine runs it, on data
//! that no cache holds.

use device::cuda::{self, GraphWork};
use tile::Kernel;
use tile::case::{self, Bench, Fill};
use tile::passes::{self, Target};
use tile::types::Scalar;

/// Runs that are timed.
const SAMPLES: usize = 21;
/// The most copies of a benchmark's buffers, and the most bytes of them.
const COPIES: usize = 512;
const BYTES: usize = 6 << 30;
/// Elements of noise that are made here; longer buffers repeat them.
const NOISE: usize = 1 << 20;

/// The measurements of a benchmark.
pub(super) struct Measured<'a> {
    pub(super) bench: &'a Bench,
    /// Median time of one launch.
    pub(super) seconds: f64,
    /// The shortest.
    pub(super) least: f64,
    /// The vendor's library on the same shape, where it does the same thing.
    pub(super) vendor: Option<f64>,
    /// Whether each launch finds its data in memory only.
    pub(super) cold: bool,
    pub(super) registers: u32,
    pub(super) local: u32,
}

impl Measured<'_> {
    pub(super) fn bytes_per_second(&self) -> f64 {
        self.bench.bytes as f64 / self.seconds
    }

    pub(super) fn flops_per_second(&self) -> f64 {
        self.bench.flops as f64 / self.seconds
    }
}

/// Compiles what these benchmarks need on all cores.
pub(super) fn ahead(gpu: &cuda::Gpu, benches: &[Bench]) {
    // What cannot be lowered is reported when it is measured.
    let text = |b: &Bench| cuda::Gpu::source(&special(b).ok()?, &b.numbers).ok();
    gpu.compiler().ahead(benches, |bench| text(bench).into_iter().collect());
}

fn special(bench: &Bench) -> Result<Kernel, String> {
    let special = passes::specialise(&bench.kernel, &bench.numbers);
    passes::lower(&special, Target::Cuda).map_err(|e| e.to_string())
}

/// Times a benchmark.
pub(super) fn measure<'a>(gpu: &cuda::Gpu, bench: &'a Bench) -> Result<Measured<'a>, String> {
    let line = |e: formats::Error| e.to_string();
    let pipeline = gpu.load(&special(bench)?, &bench.numbers).map_err(line)?;
    let sets = Sets::make(gpu, &bench.buffers).map_err(line)?;
    let launches: Result<Vec<GraphWork>, _> = sets
        .sets
        .iter()
        .map(|set| Ok(GraphWork::Launch(pipeline.bind(&bench.numbers, set)?.overlapping())))
        .collect();
    let took = gpu.time(launches.map_err(line)?, SAMPLES).map_err(line)?;
    Ok(Measured {
        bench,
        seconds: took.median,
        least: took.least,
        vendor: vendor(gpu, bench, &sets)?,
        cold: sets.cold,
        registers: pipeline.registers(),
        local: pipeline.local(),
    })
}

/// Copies of a benchmark's buffers, used in turn, so that each launch's data has left the cache
/// since its last.
struct Sets {
    sets: Vec<Vec<cuda::CudaBuffer>>,
    cold: bool,
}

impl Sets {
    fn make(gpu: &cuda::Gpu, fills: &[Fill]) -> formats::Result<Sets> {
        let first: Vec<cuda::CudaBuffer> =
            fills.iter().enumerate().map(|(i, f)| filled(gpu, f, i)).collect::<Result<_, _>>()?;
        let bytes = first.iter().map(cuda::CudaBuffer::len).sum::<usize>().max(1);
        let wanted = (3 * gpu.facts().l2).div_ceil(bytes).max(2);
        let copies = wanted.min(COPIES).min((BYTES / bytes).max(1));
        // One allocation for all copies: thousands of small ones take longer than what is measured.
        let strides: Vec<usize> = first.iter().map(|b| b.len().next_multiple_of(256)).collect();
        let stride: usize = strides.iter().sum();
        let pool = gpu.buffer(stride * copies)?;
        let mut sets = Vec::with_capacity(copies);
        for copy in 0..copies {
            let mut at = copy * stride;
            let mut set = Vec::with_capacity(first.len());
            for (original, step) in first.iter().zip(&strides) {
                let part = pool.part(at..at + original.len())?;
                if !part.is_empty() {
                    part.copy_from(original)?;
                }
                set.push(part);
                at += step;
            }
            sets.push(set);
        }
        gpu.synchronize()?;
        Ok(Sets { sets, cold: copies * bytes >= 2 * gpu.facts().l2 })
    }
}

fn filled(gpu: &cuda::Gpu, fill: &Fill, seed: usize) -> formats::Result<cuda::CudaBuffer> {
    let (scalar, len) = match fill {
        Fill::These(buffer) => return gpu.upload(&buffer.bytes),
        Fill::Zeros(scalar, len) => {
            let buffer = gpu.buffer(len * scalar.bytes())?;
            buffer.fill(0)?;
            return Ok(buffer);
        }
        Fill::Noise(scalar, len) => (*scalar, *len),
    };
    let buffer = gpu.buffer(len * scalar.bytes())?;
    let noise = case::noise(seed as u64 + 1, len.min(NOISE));
    let bytes = if scalar.is_float() {
        case::Buffer::floats(scalar, &noise).bytes
    } else {
        // Any bits: those of the noise's fractions, which are uniform.
        let word = |x: &f32| (((x + 1.0) * 8_388_608.0) as u32).wrapping_mul(0x9E37_79B1);
        noise.iter().flat_map(|x| word(x).to_le_bytes().into_iter().take(scalar.bytes())).collect()
    };
    if !bytes.is_empty() {
        buffer.part(0..bytes.len())?.write(&bytes)?;
        buffer.repeat(bytes.len())?;
    }
    Ok(buffer)
}

/// The vendor's time for a dense product of one 16-bit matrix with some rows, recognised by its
/// numbers and its bytes.
fn vendor(gpu: &cuda::Gpu, bench: &Bench, sets: &Sets) -> Result<Option<f64>, String> {
    let Some([rows, out, width]) = dense(bench) else { return Ok(None) };
    let scalar = if bench.kernel.name.contains("bf16") { Scalar::BF16 } else { Scalar::F16 };
    let Ok(matmul) = gpu.matmul(scalar, rows, out, width) else { return Ok(None) };
    let bytes = |a: u32, b: u32| a as usize * b as usize * 2;
    let find =
        |set: &[cuda::CudaBuffer], size: usize| set.iter().find(|b| b.len() >= size).cloned();
    let (x_bytes, w_bytes, y_bytes) = (bytes(rows, width), bytes(out, width), bytes(rows, out));
    let line = |e: formats::Error| e.to_string();
    let mut first: Option<cuda::BoundProduct> = None;
    let mut work = Vec::new();
    for set in &sets.sets {
        let mut rest = set.clone();
        let Some(w) = find(&rest, w_bytes) else { return Ok(None) };
        rest.retain(|b| b.len() != w.len());
        let part = |b: Option<cuda::CudaBuffer>, size| match b {
            Some(b) => b.part(0..size),
            None => gpu.buffer(size),
        };
        let x = part(find(&rest, x_bytes), x_bytes).map_err(line)?;
        let y = gpu.buffer(y_bytes).map_err(line)?;
        // The algorithm is chosen once.
        let product = match &first {
            None => matmul.bind(&x, &w, &y).map_err(line)?,
            Some(one) => one.to(&x, &w, None, &y).map_err(line)?,
        };
        first.get_or_insert_with(|| product.clone());
        work.push(GraphWork::Product(product));
    }
    gpu.time(work, SAMPLES).map(|took| Some(took.median)).map_err(line)
}

/// Rows, outputs and width of a benchmark that is a product with one dense 16-bit matrix and
/// nothing else.
fn dense(bench: &Bench) -> Option<[u32; 3]> {
    let out = bench.numbers.get("out").filter(|n| *n > 0)?;
    let rows = bench.numbers.get("rows").unwrap_or(1).max(1);
    let per = 2 * u64::from(out) * u64::from(rows);
    let width = u32::try_from(bench.flops / per).ok().filter(|w| *w > 0)?;
    let weights = u64::from(out) * u64::from(width);
    let rest = u64::from(rows) * (u64::from(width) + u64::from(out));
    // An input, not the result, is the matrix: packed weights have no such buffer.
    let matrix = |fill: &Fill| {
        let (scalar, len) = match fill {
            Fill::Noise(scalar, len) => (*scalar, *len),
            Fill::These(buffer) => (buffer.scalar, buffer.bytes.len() / buffer.scalar.bytes()),
            Fill::Zeros(..) => return false,
        };
        matches!(scalar, Scalar::F16 | Scalar::BF16) && len as u64 == weights
    };
    let plain = per * u64::from(width) == bench.flops && bench.buffers.iter().any(matrix);
    // Rows and results are of two bytes or four.
    let bytes = 2 * weights + 2 * rest..=2 * weights + 4 * rest;
    (plain && bytes.contains(&bench.bytes)).then_some([rows, out, width])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmarks_lower_and_emit_and_dense_products_are_recognised() {
        let mut found = 0;
        for spec in ops::kernels::all() {
            for bench in (spec.benches)() {
                let kernel = special(&bench).unwrap_or_else(|e| panic!("{}: {e}", bench.label));
                let text = cuda::Gpu::source(&kernel, &bench.numbers);
                assert!(text.is_ok(), "{}: {:?}", bench.label, text.err());
                if let Some([rows, out, width]) = dense(&bench) {
                    found += 1;
                    let (flops, label) = (bench.flops, &bench.label);
                    let product = u64::from(rows) * u64::from(out) * u64::from(width);
                    assert_eq!(2 * product, flops, "{label}");
                    assert!(label.contains("16"), "{label} has 16-bit weights");
                }
            }
        }
        assert!(found >= 4, "gemv in f16 and bf16, two shapes each");
    }
}
