//! Peak compute throughput of a GPU, measured with the host's clock.

use std::sync::Arc;
use std::time::Instant;

use formats::{Error, Result};
use ops::linear::gemm::{self, gemm};
use ops::packed::Format;
use tile::dsl::*;
use tile::ir::ParamKind;
use tile::launch::{Mode, Numbers, Requirement};
use tile::passes;
use tile::types::Scalar;

use super::kernels::Kernels;
use super::{Backend, ProductShape, alike};

/// Seconds from which a launch's overhead is negligible.
const ENOUGH: f64 = 2e-3;

/// Independent accumulators of a thread, and multiply-adds to each per turn.
const CHAINS: u32 = 8;
const REPEATS: u32 = 8;
/// Threads of a threadgroup.
const GROUP: u32 = 256;

/// Every thread multiply-adds in `chains` registers, `turns` times [`REPEATS`], and stores their
/// sum.
#[kernel]
pub(crate) fn fma_roof(y: Out<f32>, turns: Arg<u32>, chains: u32, group: u32) {
    launch(Mode::Element, [dim("groups"), fixed(1), fixed(1)], group);
    require(Requirement::Length("y".into(), dim("groups") * group));
    let me = group_id() * group + thread_id();
    let sums: Vec<Var<f32>> = (0..chains).map(|i| Var::new(i as f32)).collect();
    range(0, turns).each(|_| {
        for sum in (0..REPEATS).flat_map(|_| &sums) {
            sum.set(sum.get().fma(0.999f32.val(), 0.001f32.val()));
        }
    });
    y[me] = sums.iter().fold(0f32.val(), |all, sum| all + sum.get());
}

/// Seconds of a launch, measured after a warm-up.
fn clock<B: Backend>(backend: &B, launch: B::Launch, out: &B::Buffer) -> Result<f64> {
    let launch = [launch];
    let run = || -> Result<f64> {
        let start = Instant::now();
        backend.submit(&launch)?;
        backend.read(out, &mut [0; 4])?;
        Ok(start.elapsed().as_secs_f64())
    };
    run()?;
    run()
}

/// Operations per second in f32; a multiply-add counts as two.
///
/// # Errors
/// Too little memory, or a kernel that fails.
pub(super) fn floats<B: Backend>(backend: &B) -> Result<f64> {
    const MOST: u32 = 1 << 16;
    let facts = backend.facts();
    let kernel = passes::lower(&fma_roof(CHAINS, GROUP).record(), facts.target)
        .map_err(|e| Error::new("fma_roof", "", e))?;
    let pipeline = backend.load(&Arc::new(kernel))?;
    let groups = facts.processors * 8;
    let out = backend.buffer(4 * (groups * GROUP) as usize)?;
    let (mut best, mut turns) = (0.0_f64, 1);
    loop {
        let numbers = Numbers::new().with("groups", groups).with("turns", turns);
        let launch = backend.bind(&pipeline, &numbers, std::slice::from_ref(&out))?;
        let seconds = clock(backend, launch, &out)?;
        let each = 2.0 * f64::from(CHAINS * REPEATS) * f64::from(turns);
        best = best.max(each * f64::from(groups * GROUP) / seconds);
        if seconds > ENOUGH || turns >= MOST {
            return Ok(best);
        }
        turns *= 4;
    }
}

/// Operations per second in products of 16-bit matrices, by the vendor's library if there is one.
///
/// # Errors
/// Too little memory, or a kernel that fails.
pub(super) fn products<B: Backend>(backend: &B, operand: Scalar) -> Result<f64> {
    let mut best = 0.0_f64;
    for edge in [128, 256, 512, 1024, 2048, 4096, 8192] {
        let (launch, y) = product(backend, operand, edge)?;
        let seconds = clock(backend, launch, &y)?;
        best = best.max(2.0 * f64::from(edge).powi(3) / seconds);
        if seconds > ENOUGH {
            break;
        }
    }
    Ok(best)
}

/// A product of two square matrices, and its output.
fn product<B: Backend>(backend: &B, operand: Scalar, edge: u32) -> Result<(B::Launch, B::Buffer)> {
    let (facts, count) = (backend.facts(), edge as usize * edge as usize);
    let noise = alike::noise(operand, count);
    let (x, w) = (backend.upload(&noise)?, backend.upload(&noise)?);
    let y = backend.buffer(operand.bytes() * count)?;
    if facts.products.is_some() {
        let (rows, out, width) = (edge, edge, edge);
        let result = operand;
        let shape = ProductShape::plain([rows, out, width], operand, result);
        return Ok((backend.product(&shape, &x, &w, None, &y)?, y));
    }
    let format = Format::Dense(operand);
    let schedule = gemm::GemmSchedule::pick((edge, edge), operand, format, facts.machine());
    let numbers = Numbers::new().with("rows", edge).with("width", edge).with("out", edge);
    let types = gemm::GemmTypes { x: operand, operand, y: operand };
    let mut kernels = Kernels::default();
    let (kernel, source) = kernels.get(gemm(types, format, false, schedule), &numbers, facts)?;
    let buffers = source.params.iter().filter(|p| matches!(p.kind, ParamKind::Buffer { .. }));
    let buffers: Vec<B::Buffer> = buffers
        .map(|p| match p.name.as_str() {
            "x" => x.clone(),
            "y" => y.clone(),
            _ => w.clone(),
        })
        .collect();
    let pipeline = backend.load(&kernels.all[kernel])?;
    Ok((backend.bind(&pipeline, &numbers, &buffers)?, y))
}
