//! How close the matrix products come to the machine: decode against the bandwidth of plain reads,
//! prefill against the peak of the unit that multiplies, both measured in the same run.
//!
//! `cargo bench -p delft-cpu-kernels --bench matmul [-- [TYPE...] [ISA...] [decode] [prefill]
//! [pack]]`
//!
//! `.. -- blas [TYPE...]` instead compares the products of prompts with those of a BLAS, the
//! system's or the library that `DELFT_TEST_BLAS` names, for matrices and prompts of many sizes.

use delft_cpu_kernels::matmul::*;
use delft_cpu_kernels::roof::read;
use formats::DType;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::time::Instant;

/// Threads that meet at a barrier before and after each repetition.
struct Threads(usize);

impl Parallel for Threads {
    fn run(&self, f: &(dyn Fn(usize, usize) + Sync)) {
        std::thread::scope(|scope| {
            for index in 1..self.0 {
                scope.spawn(move || f(index, self.0));
            }
            f(0, self.0);
        });
    }
}

/// Median seconds of `repeats` runs of `f(index)` on all threads at once.
fn median(threads: usize, repeats: usize, f: &(dyn Fn(usize) + Sync)) -> f64 {
    let (arrived, times) = (AtomicUsize::new(0), std::sync::Mutex::new(vec![]));
    let meet = |round: usize| {
        arrived.fetch_add(1, AcqRel);
        while arrived.load(Acquire) < round * threads {
            std::hint::spin_loop();
        }
    };
    Threads(threads).run(&|index, _| {
        for repeat in 0..=repeats {
            meet(2 * repeat + 1);
            let start = Instant::now();
            f(index);
            meet(2 * repeat + 2);
            // The first round warms up.
            if index == 0 && repeat > 0 {
                times.lock().unwrap().push(start.elapsed().as_secs_f64());
            }
        }
    });
    let mut times = times.into_inner().unwrap();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// GB/s of summing a large buffer.
fn bandwidth(threads: usize, buffer: &Huge) -> f64 {
    let seconds = median(threads, 7, &|index| {
        let range = share(buffer.len() / 64, index, threads);
        black_box(read(&buffer[range.start * 64..range.end * 64]));
    });
    buffer.len() as f64 / seconds / 1e9
}

/// Source bytes whose scales are small f16 numbers.
fn source(dtype: DType, weights: usize) -> Vec<u8> {
    let row: Vec<f32> =
        (0..4096).map(|i| ((i * 2654435761usize) % 2001) as f32 / 1000.0 - 1.0).collect();
    let unit = formats::with_block!(dtype, B => {
        use formats::quant::BlockFormat;
        let mut bytes = vec![0; row.len() / B::ELEMENTS * B::BYTES];
        row.chunks(B::ELEMENTS).zip(bytes.chunks_mut(B::BYTES)).for_each(|(w, b)| B::encode(w, b));
        bytes
    }, else => match dtype {
        DType::F32 => row.iter().flat_map(|w| w.to_le_bytes()).collect(),
        DType::F16 => row.iter().flat_map(|&w| formats::quant::plain::f32_to_f16(w).to_le_bytes()).collect(),
        _ => row.iter().flat_map(|&w| formats::quant::plain::f32_to_bf16(w).to_le_bytes()).collect::<Vec<u8>>(),
    });
    unit.repeat(weights / row.len())
}

/// Rows of prompts times float matrices on one thread: by the best instruction set, and by a BLAS.
fn against_blas(types: &[DType]) {
    let named = std::env::var("DELFT_TEST_BLAS").ok();
    let path = named.map(|name| std::ffi::CString::new(name).unwrap());
    // SAFETY: the library is what its name says.
    let opened = path.map(|path| unsafe { Blas::open(&path, None) }.unwrap().from_weights(0));
    let opened: Option<&'static Blas> = opened.map(|blas| &*Box::leak(Box::new(blas)));
    let Some(blas) = opened.or(Blas::of_system()) else {
        return println!("no BLAS: the system has none of its own, and DELFT_TEST_BLAS names none");
    };
    let isa = *Isa::available().last().unwrap();
    let mut scratch = Scratch::new().unwrap();
    for &dtype in types {
        for side in [64, 128, 256, 512, 1024, 2048] {
            let bytes = source(dtype, (side * side).max(4096));
            let size = dtype.bytes_for((side * side) as u64).unwrap() as usize;
            let pack = || Matrix::pack(dtype, side, side, &bytes[..size], &Alone).unwrap();
            let matrices = [pack().multiplied_by(None), pack().multiplied_by(Some(blas))];
            if !matrices[1].has_blas() {
                println!("{:5} {side} x {side}: the BLAS is not used", dtype.name());
                continue;
            }
            for tokens in [1, 8, 32, 128, 512] {
                let x: Vec<f32> = (0..tokens * side)
                    .map(|i| ((i * 40503) % 2003) as f32 / 1000.0 - 1.0)
                    .collect();
                let mut y = vec![0f32; tokens * side];
                let storage =
                    Huge::zeroed(Activations::bytes(Path::Expanded, tokens, side)).unwrap();
                // SAFETY: the rows and the storage outlive the activations.
                let x = unsafe {
                    Activations::new(
                        Path::Expanded,
                        x.as_ptr(),
                        side,
                        tokens,
                        side,
                        storage.as_ptr(),
                    )
                };
                // SAFETY: one thread.
                unsafe { x.quantise(isa, 0..x.blocks(), true) };
                let out = Output { start: y.as_mut_ptr(), stride: side };
                let [own, library] = [&matrices[0], &matrices[1]].map(|w| {
                    let rounds = ((1 << 28) / (side * side * tokens)).clamp(1, 1000);
                    let mut times: Vec<f64> = (0..7)
                        .map(|_| {
                            let start = Instant::now();
                            for _ in 0..rounds {
                                // SAFETY: `y` holds all tokens of all rows.
                                unsafe {
                                    multiply(
                                        isa,
                                        w,
                                        &x,
                                        0..tokens,
                                        0..w.panels(),
                                        out,
                                        Epilogue::default(),
                                        &mut scratch,
                                    )
                                }
                            }
                            start.elapsed().as_secs_f64() / rounds as f64
                        })
                        .collect();
                    times.sort_by(f64::total_cmp);
                    times[0]
                });
                println!(
                    "{:5} {side} x {side}, {tokens:3} rows: {:9.1} us by {isa}, {:9.1} by the BLAS: {:.2}",
                    dtype.name(),
                    own * 1e6,
                    library * 1e6,
                    own / library
                );
            }
        }
    }
}

fn main() {
    let words: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let wants = |kind: &dyn Fn(&str) -> bool, name: &str| {
        !words.iter().any(|word| kind(word)) || words.iter().any(|word| word == name)
    };
    let is_type = |word: &str| DType::from_name(word).is_some();
    let is_isa = |word: &str| {
        ["scalar", "neon", "neon-dotprod", "neon-i8mm", "avx2", "avxvnni", "avx512", "amx"]
            .contains(&word)
    };
    let is_part = |word: &str| ["decode", "batch", "prefill", "pack"].contains(&word);
    if words.iter().any(|word| word == "blas") {
        let floats = [DType::F32, DType::F16, DType::BF16];
        let chosen = floats.into_iter().filter(|dtype| wants(&is_type, dtype.name()));
        return against_blas(&chosen.collect::<Vec<_>>());
    }
    let threads: Vec<usize> = [1, 2, 4, 8, 16]
        .into_iter()
        .filter(|&n| n <= std::thread::available_parallelism().map_or(1, usize::from))
        .collect();

    let mut buffer = Huge::zeroed(640 << 20).unwrap();
    buffer.iter_mut().step_by(4096).for_each(|b| *b = 1);
    let types = [
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4K,
        DType::Q6K,
        DType::Q5K,
        DType::Q3K,
        DType::Q2K,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::F16,
        DType::BF16,
        DType::F32,
    ];
    for dtype in types.into_iter().filter(|dtype| wants(&is_type, dtype.name())) {
        // As many rows of 2048 as make 640 MB: no cache holds them.
        let cols = 2048;
        let row_bytes = dtype.bytes_for(cols as u64).unwrap() as usize;
        let rows = (640 << 20) / row_bytes / 32 * 32;
        let bytes = source(dtype, rows * cols);
        let start = Instant::now();
        let w = Matrix::pack(dtype, rows, cols, &bytes, &Alone).unwrap();
        if wants(&is_part, "pack") {
            let rate = bytes.len() as f64 / start.elapsed().as_secs_f64() / 1e9;
            println!(
                "{:5} pack: {rate:.2} GB/s of source on one thread, {:+.1}% size",
                dtype.name(),
                (w.resident_bytes() as f64 / bytes.len() as f64 - 1.0) * 100.0
            );
        }
        drop(bytes);
        // Measured again for every type: a machine with neighbours changes from minute to minute.
        let reads: Vec<f64> = threads.iter().map(|&n| bandwidth(n, &buffer)).collect();
        println!("{:5} beside reads of {reads:.1?} GB/s by {threads:?} threads", dtype.name());
        let tokens = 512;
        let x: Vec<f32> =
            (0..tokens * cols).map(|i| ((i * 40503) % 2003) as f32 / 1000.0 - 1.0).collect();
        let y = Huge::zeroed(tokens * rows.min(8192) * 4 + rows * 32).unwrap();
        for &isa in Isa::available().iter().filter(|isa| wants(&is_isa, isa.name())) {
            for (i, &n) in threads.iter().enumerate() {
                let scratch: Vec<_> =
                    (0..n).map(|_| std::sync::Mutex::new(Scratch::new().unwrap())).collect();
                let run = |path: Path, tokens: usize, panels: usize, repeats: usize| {
                    let storage = Huge::zeroed(Activations::bytes(path, tokens, cols)).unwrap();
                    // SAFETY: the rows and the storage outlive the activations.
                    let x = unsafe {
                        Activations::new(path, x.as_ptr(), cols, tokens, cols, storage.as_ptr())
                    };
                    // SAFETY: one thread.
                    unsafe { x.quantise(isa, 0..x.blocks(), !dtype.is_block()) };
                    let out = Output { start: y.as_ptr().cast(), stride: panels * ROWS };
                    median(n, repeats, &|index| {
                        let mut scratch = scratch[index].lock().unwrap();
                        // SAFETY: every thread writes its own panels, and `y` holds all of them.
                        unsafe {
                            multiply(
                                isa,
                                &w,
                                &x,
                                0..tokens,
                                share(panels, index, n),
                                out,
                                Epilogue::default(),
                                &mut scratch,
                            )
                        }
                    })
                };
                let slow = isa == Isa::Scalar;
                if wants(&is_part, "decode") {
                    let rate = w.resident_bytes() as f64
                        / run(Path::InPlace, 1, w.panels(), if slow { 1 } else { 9 })
                        / 1e9;
                    println!(
                        "{:5} {isa:6} x{n} decode: {rate:6.1} GB/s = {:.2} of reads",
                        dtype.name(),
                        rate / reads[i]
                    );
                }
                if wants(&is_part, "batch") && !slow {
                    for tokens in [2, 4, 8, 16, 32] {
                        let seconds = run(Path::InPlace, tokens, w.panels(), 5);
                        let rate = w.resident_bytes() as f64 / seconds / 1e9;
                        println!(
                            "{:5} {isa:6} x{n} decode of {tokens}: {rate:6.1} GB/s = {:.2} of reads",
                            dtype.name(),
                            rate / reads[i]
                        );
                    }
                }
                if wants(&is_part, "prefill") {
                    let panels = if slow { 8 } else { 192 };
                    let unit = w.unit(isa, Path::Expanded);
                    let peak = peak(&Threads(n), isa, unit, 9) / 1e9;
                    let rate = 2.0 * (panels * ROWS * cols * tokens) as f64
                        / run(Path::Expanded, tokens, panels, if slow { 1 } else { 9 })
                        / 1e9;
                    println!(
                        "{:5} {isa:6} x{n} prefill: {rate:6.0} Gop/s = {:.2} of {unit:?}'s {peak:.0}",
                        dtype.name(),
                        rate / peak
                    );
                }
            }
        }
    }
}
