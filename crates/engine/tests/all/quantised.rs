//! Folders that another program quantised, loaded as they are, beside the same numbers unquantised.

use crate::common::{error, load};
use delft_engine::{CacheType, LoadOptions, LogitRows};
use formats::{DType, TensorView, Tensors, safetensors};
use serde_json::{Value, json};
use std::path::Path;

/// A tensor to be written.
type Stored = (String, DType, Vec<usize>, Vec<u8>);

/// The Qwen3 fixture in `to`, each matrix of a block as `change` makes it, and these settings.
fn write(
    to: &Path,
    settings: Option<Value>,
    change: impl Fn(&str, &[usize], &[f32]) -> Vec<Stored>,
) {
    let from = testing::models().join("qwen3");
    let tensors = Tensors::open(from.as_path()).unwrap();
    let mut config = tensors.folder().unwrap().config().clone();
    if let Some(settings) = settings {
        config["quantization_config"] = settings;
    }
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    let mut all: Vec<Stored> = Vec::new();
    for tensor in tensors.iter() {
        match tensor.shape.len() == 2 && tensor.name.contains("layers.") {
            true => all.extend(change(tensor.name, tensor.shape, &tensor.to_f32().unwrap())),
            false => all.push((
                tensor.name.to_owned(),
                tensor.dtype,
                tensor.shape.to_vec(),
                tensor.bytes.to_vec(),
            )),
        }
    }
    let tensors = all.iter().map(|(name, dtype, shape, bytes)| TensorView {
        name,
        dtype: *dtype,
        shape,
        bytes,
    });
    safetensors::write(&to.join("model.safetensors"), &[], tensors).unwrap();
}

/// A row's scale, a power of two, and its codes from -127 to 127.
fn codes(row: &[f32]) -> (f32, Vec<i8>) {
    let largest = row.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scale = (largest / 127.0).log2().ceil().exp2();
    (scale, row.iter().map(|x| (x / scale).round() as i8).collect())
}

fn f32s(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn logits(path: &Path) -> Vec<f32> {
    let options = LoadOptions { cache_type: CacheType::F32, ..LoadOptions::default() };
    let tokens: Vec<u32> = (1..40).collect();
    load(path, &options).session().logits(&tokens, LogitRows::All).unwrap().data
}

#[test]
fn quantised_folders_compute_with_the_numbers_that_they_store() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = |name: &str| {
        let path = scratch.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let plain = folder("plain");
    write(&plain, None, |name, shape, values| {
        let rows = values.chunks(shape[1]).flat_map(|row| {
            let (scale, codes) = codes(row);
            codes.into_iter().map(move |code| scale * f32::from(code)).collect::<Vec<_>>()
        });
        vec![(name.to_owned(), DType::F32, shape.to_vec(), f32s(rows))]
    });
    let want = logits(&plain);

    // Signed bytes and a scale for each row, as compressed-tensors has them.
    let bytes = folder("bytes");
    let weights = json!({ "num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel" });
    let settings = json!({ "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": { "group_0": { "weights": weights, "targets": ["Linear"] } } });
    write(&bytes, Some(settings), |name, shape, values| {
        let rows: Vec<_> = values.chunks(shape[1]).map(codes).collect();
        let scales =
            rows.iter().flat_map(|row| (row.0.to_bits() as u64 >> 16).to_le_bytes()[..2].to_vec());
        let codes = rows.iter().flat_map(|row| row.1.iter().map(|code| *code as u8)).collect();
        vec![
            (name.to_owned(), DType::I8, shape.to_vec(), codes),
            (format!("{name}_scale"), DType::BF16, vec![shape[0], 1], scales.collect()),
        ]
    });
    let apart = error(&logits(&bytes), &want);
    assert!(apart < 3e-2, "bytes: {apart}");

    // GPTQ of 8 bits: columns of words, symmetric zeros of the second version.
    let gptq = folder("gptq");
    let settings = json!({ "quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 8,
        "group_size": -1, "desc_act": false, "sym": true });
    write(&gptq, Some(settings), |name, shape, values| {
        let (out, cols) = (shape[0], shape[1]);
        let rows: Vec<_> = values.chunks(cols).map(codes).collect();
        let word = |i: usize, r: usize| {
            (0..4).fold(0u32, |word, k| {
                word | u32::from(rows[r].1[4 * i + k] as u8 ^ 0x80) << (8 * k)
            })
        };
        let words = (0..cols / 4).flat_map(|i| (0..out).flat_map(move |r| [(i, r)]));
        let words = words.flat_map(|(i, r)| word(i, r).to_le_bytes()).collect();
        let halves: Vec<u8> = rows
            .iter()
            .flat_map(|row| {
                let mut half = [0; 2];
                DType::F16.encode(&[row.0], &mut half).unwrap();
                half
            })
            .collect();
        let stem = name.strip_suffix(".weight").unwrap();
        vec![
            (format!("{stem}.qweight"), DType::I32, vec![cols / 4, out], words),
            (format!("{stem}.qzeros"), DType::I32, vec![1, out / 4], vec![0x80; out]),
            (format!("{stem}.scales"), DType::F16, vec![1, out], halves),
        ]
    });
    let apart = error(&logits(&gptq), &want);
    assert!(apart < 3e-2, "gptq: {apart}");

    // Matrices whose tensors are missing are missed by name.
    let odd = folder("odd");
    let settings = json!({ "quant_method": "gptq", "bits": 4, "group_size": 32 });
    write(&odd, Some(settings), |name, _, _| {
        vec![(name.replace(".weight", ".scales"), DType::F16, vec![0], Vec::new())]
    });
    let why = delft_engine::Engine::load(odd.as_path(), &LoadOptions::default()).err().unwrap();
    assert!(why.to_string().contains("self_attn.q_proj.weight"), "{why}");
}

/// Groups of inputs that are not in the inputs' order count whether the settings say so or not;
/// those that are in it need no word.
#[test]
fn an_order_of_inputs_is_read_where_there_is_one() {
    const GROUP: usize = 32;
    let scratch = tempfile::tempdir().unwrap();
    let folder = |name: &str, stated: bool, order: Option<fn(usize, usize) -> usize>| {
        let path = scratch.path().join(name);
        std::fs::create_dir(&path).unwrap();
        let settings = json!({ "quant_method": "gptq", "bits": 8, "group_size": GROUP,
            "desc_act": stated, "sym": true });
        write(&path, Some(settings), |name, shape, values| {
            let (out, cols) = (shape[0], shape[1]);
            let groups = cols / GROUP;
            let rows: Vec<_> = values.chunks(cols).map(codes).collect();
            let word = |i: usize, r: usize| {
                (0..4).fold(0u32, |word, k| {
                    word | u32::from(rows[r].1[4 * i + k] as u8 ^ 0x80) << (8 * k)
                })
            };
            let words = (0..cols / 4).flat_map(|i| (0..out).map(move |r| (i, r)));
            let words = words.flat_map(|(i, r)| word(i, r).to_le_bytes()).collect();
            // Each group has a scale of its own.
            let scales = (0..groups).flat_map(|g| rows.iter().map(move |row| (g, row.0)));
            let scales = scales.flat_map(|(g, scale)| {
                let mut half = [0; 2];
                DType::F16.encode(&[scale * (1 + g % 2) as f32], &mut half).unwrap();
                half
            });
            let stem = name.strip_suffix(".weight").unwrap();
            let tensor = |part: &str, dtype, shape: &[usize], bytes| {
                (format!("{stem}.{part}"), dtype, shape.to_vec(), bytes)
            };
            let mut all = vec![
                tensor("qweight", DType::I32, &[cols / 4, out], words),
                tensor("qzeros", DType::I32, &[groups, out / 4], vec![0x7f; groups * out]),
                tensor("scales", DType::F16, &[groups, out], scales.collect()),
            ];
            all.extend(order.map(|order| {
                let order = (0..cols).flat_map(|i| (order(i, cols) as i32).to_le_bytes());
                tensor("g_idx", DType::I32, &[cols], order.collect())
            }));
            all
        });
        assert!(load(&path, &LoadOptions::default()).warnings().is_empty(), "{name}");
        logits(&path)
    };
    let plain = folder("plain", false, None);
    assert_eq!(folder("in order", false, Some(|i, _| i / GROUP)), plain);
    let backwards = |i: usize, cols: usize| (cols - 1 - i) / GROUP;
    let stated = folder("stated", true, Some(backwards));
    assert_eq!(folder("not stated", false, Some(backwards)), stated);
    assert!(error(&stated, &plain) > 0.05);
}
