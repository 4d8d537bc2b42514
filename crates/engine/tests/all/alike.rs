//! A row's bits among any others: where a GPU is loaded for many sequences, what a row becomes
//! follows from its tokens and its cache, however many rows a step has.

use std::path::{Path, PathBuf};

use device::{CacheType, Device, DeviceSpec, ExecutorOptions};
use formats::gguf::{MetadataValue, TensorSpec, Writer};
use formats::{DType, Gguf, Tensors};
use program::{Sequence, Step, StepKind, Table};

use crate::common::{error, root};

/// Files of each kind of product, and for how many sequences they are loaded: for a few, for as
/// many as have our own kernel of many rows, or that of warpgroups, and for as many as may have the
/// vendor's.
const LOADED: [(&str, usize); 10] = [
    ("qwen3/model.bf16.gguf", 256),
    ("qwen3/model.bf16.gguf", 64),
    ("qwen3/model.bf16.gguf", 40),
    ("qwen3/model.bf16.gguf", 4),
    ("qwen3/model.q8_0.gguf", 7),
    ("qwen3/model.q8_0.gguf", 256),
    ("llama-k-quants/model.q4_k_m.gguf", 256),
    ("llama3", 256),
    // Latents in the cache.
    ("deepseek2-lite", 256),
    ("deepseek2-lite", 4),
];

/// The logits of a sequence's next token in steps of each of these numbers of sequences.
fn logits(
    device: &dyn Device,
    path: &Path,
    sequences: usize,
    numbers: &[usize],
) -> Vec<(usize, Vec<u32>)> {
    let tensors = Tensors::open(path).unwrap();
    let latents = Some(device::LONGEST_HEAD);
    let read = models::ReadOptions { latents, ..models::ReadOptions::default() };
    let model = models::load(&tensors, &read).unwrap();
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

/// A fixture whose feed-forward is made so wide that threadgroups share its sums, with matrices of
/// this type.
fn wide(folder: &Path, dtype: DType) -> PathBuf {
    const WIDTH: usize = 1536;
    let source = Gguf::open(&root().join("qwen3/model.bf16.gguf")).unwrap();
    let metadata = |(key, value): (&str, &MetadataValue)| match key {
        "qwen3.feed_forward_length" => (key.to_string(), MetadataValue::U32(WIDTH as u32)),
        _ => (key.to_string(), value.clone()),
    };
    let metadata: Vec<_> = source.metadata().iter().map(metadata).collect();
    let (mut specs, mut data) = (vec![], vec![]);
    for tensor in source.iter() {
        let (mut shape, mut values) = (tensor.shape.to_vec(), vec![]);
        match tensor.name.split('.').nth(2) {
            Some("ffn_gate" | "ffn_up") => shape[0] = WIDTH,
            Some("ffn_down") => shape[1] = WIDTH,
            _ => {
                values = vec![0.0; shape.iter().product()];
                tensor.dtype.decode(tensor.bytes, &mut values).unwrap();
            }
        }
        let count: usize = shape.iter().product();
        let more = values.len()..count;
        values.extend(more.map(|i| (i as f32 * 0.37 + i as f32 / 91.0).sin() * 0.05));
        let dtype = if shape.len() == 2 { dtype } else { DType::F32 };
        let mut bytes = vec![0; dtype.bytes_for(count as u64).unwrap() as usize];
        dtype.encode(&values, &mut bytes).unwrap();
        specs.push(TensorSpec { name: tensor.name.to_string(), dtype, shape });
        data.push(bytes);
    }
    let path = folder.join(format!("wide.{dtype}.gguf"));
    let mut file = Writer::create(&path, &metadata, &specs).unwrap();
    data.iter().for_each(|bytes| file.write(bytes).unwrap());
    file.finish().unwrap();
    path
}

/// Loaded for no more than `most`.
fn alike(device: &dyn Device, most: usize, numbers: impl Fn(usize) -> Vec<usize>) {
    let folder = tempfile::tempdir().unwrap();
    let mut files: Vec<(PathBuf, usize)> =
        LOADED.iter().map(|(file, sequences)| (root().join(file), *sequences)).collect();
    for dtype in [DType::BF16, DType::Q8_0] {
        let file = wide(folder.path(), dtype);
        files.extend([4, 64].map(|sequences| (file.clone(), sequences)));
    }
    let mut before: Option<(PathBuf, Vec<f32>)> = None;
    for (path, sequences) in files {
        let (file, sequences) = (path.display(), sequences.min(most));
        let found = logits(device, &path, sequences, &numbers(sequences));
        for (rows, bits) in &found {
            assert!(*bits == found[0].1, "{file}, loaded for {sequences}: {rows} rows");
        }
        println!("{file}, loaded for {sequences}: {} numbers of rows", found.len());
        // Whichever kernels these are, they compute the same but for what is rounded.
        let values: Vec<f32> = found[0].1.iter().map(|bits| f32::from_bits(*bits)).collect();
        if let Some((_, other)) = before.filter(|(other, _)| *other == path) {
            let worst = error(&values, &other);
            assert!(worst <= 0.02, "{file}, loaded for {sequences}: {worst:e} from others");
        }
        before = Some((path, values));
    }
}

#[test]
fn a_row_has_its_bits_among_others() {
    let numbers = [1, 3, 9, 33, 50];
    let place: DeviceSpec = "sim".parse().unwrap();
    let device = place.open(None).unwrap();
    alike(&*device, 100, |most| numbers.into_iter().filter(|rows| *rows <= most).collect());
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
