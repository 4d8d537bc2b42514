//! Measures memory read bandwidth, the bound of decoding.

use super::matmul::{Parallel, share};
use super::{LINE, prefetch};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Bytes per second at which `count` workers read all of `parts` once; the median of `repeats`.
pub fn read_rate(workers: &impl Parallel, parts: &[&[u8]], repeats: usize) -> f64 {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    let sum = AtomicU64::new(0);
    let pass = || {
        let start = Instant::now();
        workers.run(&|index, count| {
            for part in parts {
                let lines = share(part.len() / 64, index, count);
                sum.fetch_xor(read(&part[lines.start * 64..lines.end * 64]), Relaxed);
            }
        });
        start.elapsed().as_secs_f64()
    };
    // The first pass faults in pages and raises clocks.
    pass();
    let mut seconds: Vec<f64> = (0..repeats.max(1)).map(|_| pass()).collect();
    black_box(sum);
    seconds.sort_by(f64::total_cmp);
    bytes as f64 / seconds[seconds.len() / 2].max(1e-9)
}

/// The exclusive or of all bytes, read as fast as one thread can: in four streams, which a core
/// needs to use its share of the memory bandwidth.
pub fn read(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: just asked.
        return unsafe { read_avx2(bytes) };
    }
    read_plain(bytes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(bytes: &[u8]) -> u64 {
    read_plain(bytes)
}

#[inline(always)]
fn read_plain(bytes: &[u8]) -> u64 {
    let quarter = bytes.len() / 4 / 128 * 128;
    let mut sums = [0u64; 16];
    let mut add = |chunk: &[u8]| {
        for (sum, word) in sums.iter_mut().zip(chunk.chunks(8)) {
            let mut whole = [0; 8];
            whole[..word.len()].copy_from_slice(word);
            *sum ^= u64::from_le_bytes(whole);
        }
    };
    for at in (0..quarter).step_by(128) {
        for stream in 0..4 {
            let chunk: &[u8; 128] =
                bytes[stream * quarter + at..][..128].try_into().unwrap_or(&[0; 128]);
            add(chunk);
            for line in [0, LINE] {
                prefetch(chunk.as_ptr().wrapping_add(4096 + line));
            }
        }
    }
    bytes[4 * quarter..].chunks(128).for_each(&mut add);
    sums.iter().fold(0, |a, b| a ^ b)
}
