//! How fast a processor packs matrices for a GPU, each type by itself: GB of the file's bytes per
//! second, with the look for damaged weights that loading takes first, beside a plain copy.
//!
//! `cargo bench -p delft-ops --bench pack [-- [TYPE...]]`

use delft_ops::packed::{Format, Layout, pack_into};
use formats::{DType, Encoding, Groups};
use std::hint::black_box;
use std::time::Instant;

/// Columns of the matrices: those of a model of 8 billion weights.
const COLUMNS: usize = 4096;
/// Rows that are packed at a time: what fits a core's cache, as a worker of a loading has it.
const ROWS: usize = 64;
/// Rows of the matrix, which no cache holds.
const ALL: usize = 8192;
/// Runs, of which the middle one counts.
const RUNS: usize = 5;

/// Median GB/s at which `f` goes through `bytes` bytes.
fn rate(bytes: usize, mut f: impl FnMut()) -> f64 {
    f();
    let mut times: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    bytes as f64 / times[RUNS / 2] / 1e9
}

/// One line for an encoding: packing alone, and after the look for what is not finite.
fn line(encoding: Encoding) {
    let Some(format) = Format::of(encoding) else { return };
    let Ok(layout) = Layout::new(format, ALL, COLUMNS) else { return };
    let Some(size) = encoding.bytes_for(ALL * COLUMNS) else { return };
    // Zeros in some bytes: no pattern below gives a scale that is not finite.
    let source: Vec<u8> = (0..size).map(|i| (i * 37 % 59) as u8).collect();
    let mut packed = vec![0; 4 * layout.row_words() * ROWS];
    let mut all = |looks: bool| {
        rate(size, || {
            for rows in source.chunks(size / ALL * ROWS) {
                let found = looks.then(|| encoding.not_finite(rows)).flatten();
                assert!(found.is_none(), "{encoding}: the benchmark's bytes are finite");
                pack_into(encoding, rows, &layout, &mut packed).expect("whole rows");
                black_box(&mut packed);
            }
        })
    };
    println!("{:<16} {:>7.2} {:>12.2}", encoding.to_string(), all(false), all(true));
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let groups = [(4, 64), (8, 64), (6, 64)];
    let groups = groups.into_iter().filter_map(|(b, g)| Groups::new(b, g, DType::BF16));
    let all = DType::ALL.into_iter().map(Encoding::Stored).chain(groups.map(Encoding::Groups));
    println!("{:<16} {:>7} {:>12}   GB/s on one thread", "type", "packs", "looks, packs");
    for encoding in all {
        let name = encoding.to_string();
        if wanted.is_empty() || wanted.iter().any(|want| name.contains(want.as_str())) {
            line(encoding);
        }
    }
}
