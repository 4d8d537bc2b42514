//! A row's bits among any others: where a GPU is loaded for many sequences, what a row becomes
//! follows from its tokens and its cache, however many rows a step has.

use std::path::Path;

use device::{CacheType, Device, DeviceSpec, ExecutorOptions};
use formats::Tensors;
use program::{Sequence, Step, StepKind, Table};

use crate::common::{error, root};

/// Files of each kind of product, and for how many sequences they are loaded: for a few, for as
/// many as have our own kernel of many rows, and for as many as may have the vendor's.
const LOADED: [(&str, usize); 7] = [
    ("qwen3/model.bf16.gguf", 256),
    ("qwen3/model.bf16.gguf", 40),
    ("qwen3/model.bf16.gguf", 4),
    ("qwen3/model.q8_0.gguf", 7),
    ("qwen3/model.q8_0.gguf", 256),
    ("llama-k-quants/model.q4_k_m.gguf", 256),
    ("llama3", 256),
];

/// The logits of a sequence's next token in steps of each of these numbers of sequences.
fn logits(
    device: &dyn Device,
    path: &Path,
    sequences: usize,
    numbers: &[usize],
) -> Vec<(usize, Vec<u32>)> {
    let tensors = Tensors::open(path).unwrap();
    let model = models::load(&tensors, &models::ReadOptions::default()).unwrap();
    let program = program::fuse(&model.record(false).unwrap());
    let groups = program.groups().len();
    let options = ExecutorOptions {
        cache_type: CacheType::F16,
        rows: (2 * sequences.max(32), sequences),
        sequences,
        blocks: vec![sequences + 1; groups],
        context: vec![1; groups],
        batched: true,
        ..ExecutorOptions::default()
    };
    let mut executor = device.load(program, &tensors, options, &mut |_, _| {}).unwrap();
    let mut step = |kind, rows: usize, own: usize, start: usize, tokens: &[u32]| {
        // The sequence that is looked at has the first block wherever it stands.
        let block = |row: usize| if row == own { 0 } else { row as u32 + 1 };
        let blocks: Vec<[u32; 1]> = (0..rows).map(|row| [block(row)]).collect();
        let tables: Vec<Vec<Table<'_>>> =
            blocks.iter().map(|b| vec![Table { blocks: b, oldest: 0 }; groups]).collect();
        let each = tokens.len() / rows;
        let sequence = |(row, tables): (usize, &'_ Vec<Table<'_>>)| {
            let start = if row == own { start } else { row % 3 };
            (row, start, tables.len())
        };
        let places: Vec<_> = tables.iter().enumerate().map(sequence).collect();
        let sequences: Vec<Sequence<'_>> = places
            .iter()
            .map(|&(row, start, _)| Sequence {
                slot: block(row),
                ..Sequence::new(each, start, &tables[row])
            })
            .collect();
        let outputs: Vec<u32> = (1..=rows as u32).map(|row| row * each as u32 - 1).collect();
        let (sequences, outputs) = (&sequences[..], &outputs[..]);
        let ticket =
            executor.submit(&Step { kind, tokens, sequences, outputs, input: &[] }).unwrap();
        let all = executor.read(ticket, 0).unwrap();
        let vocab = all.len() / rows;
        all[own * vocab..][..vocab].iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
    };
    step(StepKind::Prompt, 1, 0, 0, &[5, 9, 2, 14, 3, 8, 1]);
    let of = |&rows: &usize| {
        let own = rows * 2 / 3;
        let tokens: Vec<u32> =
            (0..rows).map(|row| if row == own { 6 } else { 1 + (row * 7 % 50) as u32 }).collect();
        (rows, step(StepKind::Decode, rows, own, 7, &tokens))
    };
    numbers.iter().map(of).collect()
}

/// Loaded for no more than `most`.
fn alike(device: &dyn Device, most: usize, numbers: impl Fn(usize) -> Vec<usize>) {
    let mut before: Option<(&str, Vec<f32>)> = None;
    for (file, sequences) in LOADED {
        let sequences = sequences.min(most);
        let found = logits(device, &root().join(file), sequences, &numbers(sequences));
        for (rows, bits) in &found {
            assert!(*bits == found[0].1, "{file}, loaded for {sequences}: {rows} rows");
        }
        println!("{file}, loaded for {sequences}: {} numbers of rows", found.len());
        // Whichever kernels these are, they compute the same but for what is rounded.
        let values: Vec<f32> = found[0].1.iter().map(|bits| f32::from_bits(*bits)).collect();
        if let Some((_, other)) = before.filter(|(other, _)| *other == file) {
            let worst = error(&values, &other);
            assert!(worst <= 0.02, "{file}, loaded for {sequences}: {worst:e} from others");
        }
        before = Some((file, values));
    }
}

#[test]
fn a_row_has_its_bits_among_others() {
    let numbers = [1, 3, 9, 33, 50];
    let place: DeviceSpec = "sim".parse().unwrap();
    let device = place.open(None).unwrap();
    alike(&*device, 50, |most| numbers.into_iter().filter(|rows| *rows <= most).collect());
}

/// Every number of rows, on the device that `DELFT_TEST_DEVICE` names, such as `cuda`: nothing runs
/// without it.
#[test]
fn the_named_device_gives_a_row_its_bits_among_any_others() {
    let Ok(device) = std::env::var("DELFT_TEST_DEVICE") else {
        return testing::skipped("DELFT_TEST_DEVICE is not set");
    };
    let place: DeviceSpec = device.parse().unwrap();
    alike(&*place.open(None).unwrap(), usize::MAX, |most| (1..=most).collect());
}
