//! Models on simulated GPUs against the CPU, which has PyTorch's gradients: `models.rs`.

use super::models::{Case, distance, zeros};
use delft_train::{Hardware, Model, Precision, Preference};

fn hardware(place: &str, precision: Precision) -> Hardware {
    Hardware { place: place.parse().unwrap(), threads: Some(1), precision }
}

/// Losses and gradients on a device are those of the CPU within so much.
fn agrees(name: &str, place: &str, precision: Precision, bound: f64) {
    let case = Case::open(name);
    let batch = case.batch();
    let mut cpu = case.lora(Some(1));
    let mut want = zeros(&cpu);
    let loss = cpu.gradients(&batch, &mut want).unwrap();
    let mut gpu = case.lora(hardware(place, precision));
    let mut found = zeros(&gpu);
    let own = gpu.gradients(&batch, &mut found).unwrap();
    let off = (own.sum / loss.sum - 1.0).abs();
    assert!(off < bound && own.weight == loss.weight, "{name}, {place}: losses {off:e}");
    assert_eq!(gpu.loss(&batch).unwrap(), own);
    for ((parameter, found), want) in gpu.parameters().iter().zip(&found).zip(&want) {
        let off = distance(found, want);
        assert!(off < bound, "{name}, {place}: {}: {off:e}", parameter.name);
    }
    // The same bits again.
    let mut again = zeros(&gpu);
    assert_eq!(gpu.gradients(&batch, &mut again).unwrap(), own);
    assert!(again == found, "{name}, {place}");
}

macro_rules! cases {
    ($($test:ident $name:literal $place:literal $precision:ident $bound:literal,)*) => {$(
        #[test]
        fn $test() {
            agrees($name, $place, Precision::$precision, $bound);
        }
    )*};
}

cases! {
    gemma2 "gemma2" "sim" F32 1e-4,
    gemma3 "gemma3" "sim" F32 1e-4,
    granite "granite" "sim" F32 1e-4,
    llama3 "llama3" "sim" F32 1e-4,
    llama3_dora "llama3-dora" "sim" F32 1e-4,
    llama3_rounded "llama3" "sim" BF16 0.2,
    mistral "mistral" "sim" F32 1e-4,
    olmo2 "olmo2" "sim" F32 1e-4,
    qwen2 "qwen2" "sim" F32 1e-4,
    qwen2_rounded "qwen2" "sim" BF16 0.2,
    qwen3 "qwen3" "sim" F32 1e-4,
}

/// Weights below zero, and the model without its adapter.
#[test]
fn preferences() {
    let case = Case::open("llama3-dpo");
    let batch = case.batch();
    let find = |hardware: Hardware| {
        let mut model = Preference::new(case.lora(hardware), 0.3).unwrap();
        let mut gradients = zeros(&model);
        let loss = model.gradients(&batch, &mut gradients).unwrap();
        (loss, gradients)
    };
    let (loss, want) = find(Some(1).into());
    let (own, found) = find(hardware("sim", Precision::F32));
    assert!((own.sum / loss.sum - 1.0).abs() < 1e-4, "{own:?} {loss:?}");
    for (found, want) in found.iter().zip(&want) {
        assert!(distance(found, want) < 1e-4);
    }
}

#[test]
fn what_is_computed_again_has_the_same_bits_in_less_memory() {
    let case = Case::open("llama3");
    let mut model = case.lora(hardware("sim", Precision::F32));
    let [mut once, mut again] = [zeros(&model), zeros(&model)];
    let whole = model.activation_bytes(1024, 512);
    let loss = model.gradients(&case.batch(), &mut once).unwrap();
    model.recompute().unwrap();
    assert!(model.activation_bytes(1024, 512) < whole);
    assert_eq!(model.gradients(&case.batch(), &mut again).unwrap(), loss);
    assert!(once == again);
}

#[test]
fn memory_is_what_was_planned() {
    let case = Case::open("qwen3");
    let mut model = case.lora(hardware("sim", Precision::F32));
    let batch = case.batch();
    let before = model.memory().unwrap().active;
    let outputs = batch.weights.iter().filter(|weight| **weight > 0.0).count();
    let planned = model.activation_bytes(batch.tokens.len(), outputs);
    model.gradients(&batch, &mut zeros(&model)).unwrap();
    let taken = model.memory().unwrap().peak - before;
    // What stood in for arrays that were not there yet is gone.
    assert!(taken.abs_diff(planned) < 1024, "{taken} of {planned}");
}

/// The same on the device that `DELFT_TEST_DEVICE` names, such as `cuda`: nothing runs without it.
#[test]
fn the_named_device() {
    let Ok(place) = std::env::var("DELFT_TEST_DEVICE") else {
        return testing::skipped("DELFT_TEST_DEVICE is not set");
    };
    for name in [
        "gemma2",
        "gemma3",
        "granite",
        "llama3",
        "llama3-dora",
        "mistral",
        "olmo2",
        "qwen2",
        "qwen3",
    ] {
        agrees(name, &place, Precision::F32, 1e-4);
        agrees(name, &place, Precision::BF16, 0.2);
    }
}
