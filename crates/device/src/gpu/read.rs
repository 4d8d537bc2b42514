//! Measures a GPU's memory read bandwidth with a kernel that only reads.

use std::sync::Arc;
use std::time::Instant;

use formats::{Error, Result};
use tile::dsl::*;
use tile::ir::LoadHint;
use tile::launch::{Mode, Numbers, Requirement};
use tile::passes;
use tile::types::Scalar;

use super::Backend;

/// Every thread xors `turns` times `ahead` vectors of 16 bytes, `ahead` of them in flight, and
/// stores the result.
#[kernel]
pub(crate) fn read_roof(x: In<u32>, y: Out<u32>, turns: Arg<u32>, ahead: u32, group: u32) {
    launch(Mode::Element, [dim("groups"), fixed(1), fixed(1)], group);
    require(Requirement::Length("x".into(), dim("groups") * (group * ahead * 4) * dim("turns")));
    require(Requirement::Length("y".into(), dim("groups") * group));
    require(Requirement::Aligned("x".into(), 16));
    let me = group_id() * group + thread_id();
    let all = groups(0) * group;
    let folded = Var::new(0u32);
    range(0, turns).each(|turn| {
        let first = turn * all * ahead + me;
        let vectors: Vec<Vec<Val<u32>>> =
            (0..ahead).map(|a| x.get_vec((first + all * a) * 4, 4, LoadHint::Stream)).collect();
        for value in vectors.into_iter().flatten() {
            folded.set(folded.get() ^ value);
        }
    });
    y[me] = folded.get();
}

/// Measured bytes per second of reading `bytes` bytes, for devices timed by the host's clock: the
/// best of several grids.
///
/// # Errors
/// Too little memory, or a kernel that fails.
#[cfg_attr(
    not(any(feature = "sim", target_vendor = "apple")),
    allow(dead_code, reason = "NVIDIA's GPUs have clocks")
)]
pub(crate) fn rate<B: Backend>(backend: &B, bytes: usize) -> Result<f64> {
    const TIMES: usize = 4;
    let facts = backend.facts();
    let data = backend.buffer(bytes)?;
    let noise = tile::case::Buffer::floats(Scalar::F32, &tile::case::noise(7, 1 << 18)).bytes;
    for start in (0..bytes).step_by(noise.len()) {
        let piece = noise.len().min(bytes - start);
        backend.write(&backend.part(&data, start..start + piece)?, &noise[..piece])?;
    }
    let mut best = 0.0_f64;
    for (group, ahead) in [(1024, 4), (512, 8), (256, 16)] {
        let kernel = passes::lower(&read_roof(ahead, group).record(), facts.target)
            .map_err(|e| Error::new("read_roof", "", e))?;
        let pipeline = backend.load(&Arc::new(kernel))?;
        for each in [1, 4, 8] {
            let groups = facts.processors * each;
            let turn = groups as usize * group as usize * ahead as usize * 16;
            let turns = bytes / turn;
            if turns == 0 {
                continue;
            }
            let out = backend.buffer(groups as usize * group as usize * 4)?;
            let numbers = Numbers::new().with("groups", groups).with("turns", turns as u32);
            let bind = |_| backend.bind(&pipeline, &numbers, &[data.clone(), out.clone()]);
            let launches = (0..TIMES).map(bind).collect::<Result<Vec<_>>>()?;
            let run = || -> Result<f64> {
                let start = Instant::now();
                backend.submit(&launches)?;
                backend.read(&out, &mut [0; 4])?;
                Ok(start.elapsed().as_secs_f64())
            };
            run()?;
            best = best.max((TIMES * turns * turn) as f64 / run()?);
        }
    }
    Ok(best)
}
