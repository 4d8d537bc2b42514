//! Damaged files: ten thousand deterministic variants of each small valid file must parse or fail,
//! without a panic, in bounded time, and in memory bounded by the file's size.

mod build;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use delft_formats::{gguf, safetensors};

/// Counts the bytes that this thread has live, and the most it ever had.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    // Threads that are ending have no counters left, and nothing to count.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes live at once during `run`, beyond those before it.
fn peak_of(run: impl FnOnce()) -> usize {
    let before = LIVE.get();
    PEAK.set(before);
    run();
    (PEAK.get() - before) as usize
}

/// A deterministic stream of numbers (splitmix64).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

const EXTREMES: [u64; 14] = [
    0,
    1,
    7,
    31,
    255,
    0xFFFF,
    0x7FFF_FFFF,
    0xFFFF_FFFF,
    1 << 32,
    1 << 40,
    1 << 61,
    u64::MAX / 2,
    u64::MAX - 31,
    u64::MAX,
];

/// One damage of one of five kinds.
fn damage(bytes: &mut Vec<u8>, noise: &mut Noise) {
    let len = bytes.len();
    if len < 24 {
        return;
    }
    match noise.below(5) {
        0 => {
            let at = noise.below(len);
            bytes[at] ^= 1 << noise.below(8);
        }
        1 => bytes.truncate(noise.below(len)),
        2 => {
            // A number of 4 or 8 bytes overwritten: most lengths and counts sit at multiples of 1
            // anywhere.
            let value = EXTREMES[noise.below(EXTREMES.len())].to_le_bytes();
            let width = if noise.below(2) == 0 { 4 } else { 8 };
            let at = noise.below(len - width);
            bytes[at..at + width].copy_from_slice(&value[..width]);
        }
        3 => {
            let width = 1 + noise.below(16);
            let (a, b) = (noise.below(len - width), noise.below(len - width));
            for i in 0..width {
                bytes.swap(a + i, b + i);
            }
        }
        _ => {
            // A slice repeated: keys and tensors come twice, offsets move.
            let from = noise.below(len);
            let slice = bytes[from..(from + 1 + noise.below(64)).min(len)].to_vec();
            let at = noise.below(len);
            bytes.splice(at..at, slice);
        }
    }
}

/// Parses `variants` damaged forms of `valid` and returns how many still parsed.
fn survive(valid: &[u8], seed: u64, variants: usize, parse: impl Fn(&[u8]) -> bool) -> usize {
    let mut noise = Noise(seed);
    let mut accepted = 0;
    for variant in 0..variants {
        let mut bytes = valid.to_vec();
        for _ in 0..=noise.below(3) {
            damage(&mut bytes, &mut noise);
        }
        let start = Instant::now();
        let peak = peak_of(|| accepted += usize::from(parse(&bytes)));
        let limit = 64 * bytes.len() + (1 << 20);
        assert!(
            peak <= limit,
            "seed {seed} variant {variant}: {peak} bytes allocated for {}",
            bytes.len()
        );
        let took = start.elapsed();
        assert!(took.as_secs() < 2, "seed {seed} variant {variant}: {took:?}");
    }
    accepted
}

fn gguf_survives(bytes: &[u8]) -> bool {
    let Ok(header) = gguf::parse(bytes, "m") else { return false };
    // What is accepted keeps its promises.
    for tensor in &header.tensors {
        assert!(
            tensor.start >= header.data_start && tensor.start + tensor.len <= bytes.len() as u64
        );
        let elements: usize = tensor.shape.iter().product();
        assert_eq!(tensor.dtype.bytes_for(elements as u64), Some(tensor.len));
    }
    true
}

fn safetensors_survives(bytes: &[u8]) -> bool {
    let ours = safetensors::parse(bytes, "m");
    let theirs = ::safetensors::SafeTensors::deserialize(bytes);
    if let Ok(header) = &ours {
        assert!(theirs.is_ok(), "the reference refuses: {theirs:?}");
        let total: u64 = header.tensors.iter().map(|t| t.len).sum();
        assert_eq!(header.data_start + total, bytes.len() as u64);
    }
    ours.is_ok()
}

#[test]
fn damaged_gguf() {
    for (seed, version) in [(1, 1), (2, 2), (3, 3)] {
        let valid = build::small_gguf(version);
        assert!(gguf_survives(&valid));
        let accepted = survive(&valid, seed, 10_000, gguf_survives);
        println!("version {version}: {accepted} of 10000 still parse");
        // Damage in names and data is invisible; damage anywhere else is not.
        assert!((100..9000).contains(&accepted), "{accepted}");
    }
}

#[test]
fn damaged_gguf_of_the_gguf_package() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gguf/sample.gguf");
    let valid = std::fs::read(path).unwrap();
    assert!(gguf_survives(&valid));
    survive(&valid, 4, 10_000, gguf_survives);
}

#[test]
fn damaged_safetensors() {
    let valid = build::small_safetensors();
    assert!(safetensors_survives(&valid));
    let accepted = survive(&valid, 5, 10_000, safetensors_survives);
    println!("{accepted} of 10000 still parse");
    assert!((10..9000).contains(&accepted), "{accepted}");
}

#[test]
fn the_densest_files_stay_within_bounds() {
    // The most entries per byte that each format allows.
    let b = build::GgufBytes::new(1);
    let empty = [9u32.to_le_bytes().to_vec(), b.length(100_000)].concat();
    let arrays: Vec<u8> = [empty, [0u8; 8].repeat(100_000)].concat();
    let strings = [8u32.to_le_bytes().to_vec(), b.length(100_000), vec![0; 400_000]].concat();
    let files = [
        b.clone().key(b"k", 9, &arrays).build(),
        b.clone().key(b"k", 9, &strings).build(),
        (0..20_000u32)
            .fold(b, |b, i| b.key(&i.to_le_bytes().map(|b| b % 64 + 33), 0, &[0]))
            .build(),
    ];
    for bytes in files {
        let peak = peak_of(|| drop(gguf::parse(&bytes, "m")));
        println!("gguf: {} bytes, {peak} allocated", bytes.len());
        assert!(peak <= 64 * bytes.len() + (1 << 20));
    }
    let zeros = vec!["0"; 200_000].join(",");
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{zeros}],"data_offsets":[0,0]}}}}"#);
    let bytes = build::safetensors(&header, 0);
    let peak = peak_of(|| drop(safetensors::parse(&bytes, "m")));
    println!("safetensors: {} bytes, {peak} allocated", bytes.len());
    assert!(peak <= 64 * bytes.len() + (1 << 20));
}
