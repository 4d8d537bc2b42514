//! Updates against PyTorch's AdamW, `clip_grad_norm_` and Transformers' schedules:
//! `tests/reference/adamw.py`.

use delft_train::{AdamW, Moments, Parameter, RateSchedule};
use formats::Safetensors;
use std::path::Path;

const STEPS: u64 = 100;
const WARMUP: u64 = 7;

fn worst<'a>(found: impl Iterator<Item = &'a f32>, wanted: &[f32]) -> f32 {
    let relative = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs().max(1.0);
    found.zip(wanted).map(relative).fold(0.0, f32::max)
}

#[test]
fn a_hundred_updates_are_pytorchs() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/adamw.safetensors");
    let file = Safetensors::open(&path).unwrap();
    let numbers = |name: &str| file.get(name).unwrap().to_f32().unwrap();
    let doubles = |name: &str| -> Vec<f64> {
        let bytes = file.get(name).unwrap().bytes.chunks_exact(8);
        bytes.map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let options = AdamW { betas: [0.9, 0.99], decay: 0.1, ..AdamW::default() };
    for (name, schedule) in [
        ("constant_with_warmup", RateSchedule::Constant),
        ("linear", RateSchedule::Linear),
        ("cosine", RateSchedule::Cosine),
        ("cosine_with_min_lr", RateSchedule::Cosine),
    ] {
        let own = ["a", "b", "norm"].map(|of| {
            let tensor = file.get(&format!("{name}.{of}.0")).unwrap();
            let (shape, values) = (tensor.shape.to_vec(), tensor.to_f32().unwrap());
            Parameter { name: of.to_owned(), shape, values, decays: of != "norm" }
        });
        let mut parameters = own.to_vec();
        let all = ["a", "b", "norm"].map(|of| numbers(&format!("{name}.{of}.gradients")));
        let (rates, norms) = (doubles(&format!("{name}.rates")), doubles(&format!("{name}.norms")));
        let mut moments = Moments::zeros(&parameters);
        let mut clipped = 0;
        for step in 0..STEPS as usize {
            // Gradients of a sum over four tokens.
            let of = |(all, p): (&Vec<f32>, &Parameter)| {
                let size = p.values.len();
                all[step * size..][..size].iter().map(|g| 4.0 * g).collect()
            };
            let gradients: Vec<Vec<f32>> = all.iter().zip(&parameters).map(of).collect();
            let least = if name == "cosine_with_min_lr" { 0.002 } else { 0.0 };
            let rate = schedule.rate([0.01, least], step as u64, STEPS, WARMUP);
            assert!((rate - rates[step]).abs() <= 1e-12, "{name}, {step}: {rate} {}", rates[step]);
            let norm = moments.update(&mut parameters, &gradients, &options, rate, 4.0).unwrap();
            assert!((norm / norms[step] - 1.0).abs() < 1e-5, "{name}, {step}: {norm}");
            clipped += usize::from(norm > 1.0);
            if [1, 10, 100].contains(&(step + 1)) {
                for parameter in &parameters {
                    let wanted = numbers(&format!("{name}.{}.{}", parameter.name, step + 1));
                    let worst = worst(parameter.values.iter(), &wanted);
                    assert!(worst < 1e-6, "{name}, {}, {}: {worst:e}", parameter.name, step + 1);
                }
            }
        }
        assert!((10..90).contains(&clipped), "{clipped}");
    }
}

#[test]
fn threads_change_no_bit_and_what_is_not_finite_is_refused() {
    // Long enough to be shared out.
    let size = (1 << 20) + 77;
    let values: Vec<f32> = (0..size).map(|i| (i as f32).sin()).collect();
    let gradient: Vec<f32> = (0..size).map(|i| (i as f32).cos()).collect();
    let parameter = |values: &[f32]| Parameter {
        name: "w".to_owned(),
        shape: vec![values.len()],
        values: values.to_vec(),
        decays: true,
    };
    // No clipping, whose factor follows from all gradients.
    let options = AdamW { decay: 0.1, clip: None, ..AdamW::default() };
    let mut whole = [parameter(&values)];
    Moments::zeros(&whole)
        .update(&mut whole, std::slice::from_ref(&gradient), &options, 0.1, 2.0)
        .unwrap();
    for (part, gradient) in
        [0..1000, size - 1000..size].map(|range| (range.clone(), &gradient[range]))
    {
        let mut own = [parameter(&values[part.clone()])];
        Moments::zeros(&own).update(&mut own, &[gradient.to_vec()], &options, 0.1, 2.0).unwrap();
        assert!(own[0].values == whole[0].values[part]);
    }
    let mut own = [parameter(&values[..3])];
    let mut moments = Moments::zeros(&own);
    let error = moments.update(&mut own, &[vec![1.0, f32::NAN, 0.0]], &options, 0.1, 1.0);
    assert!(error.unwrap_err().to_string().starts_with("the gradient of w: expected finite"));
    assert_eq!((&own[0].values[..], moments.updates), (&values[..3], 0));
}
