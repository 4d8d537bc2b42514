//! Tokens a second of losses with gradients: `speed MODEL [lora|full] [TOKENS] [THREADS|DEVICE] [LENGTH]`, in sequences of 256
//! unless a length is given; on a GPU in bf16.

use delft_train::{Batch, Hardware, LoraOptions, Model, Place, Precision, Tuned};
use formats::{Error, Result};
use std::time::Instant;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let expected = "MODEL [lora|full] [TOKENS] [THREADS|DEVICE] [LENGTH]";
    let usage = || Error::new("speed", expected, "others");
    let model = arguments.first().ok_or_else(usage)?;
    let number = |i: usize, or: usize| {
        arguments.get(i).map_or(Ok(or), |text| text.parse::<usize>().map_err(|_| usage()))
    };
    let (tokens, length) = (number(2, 512)?, number(4, 256)?.max(1));
    let hardware = match arguments.get(3).map(|text| (text.parse::<usize>(), text)) {
        None | Some((Ok(0), _)) => Hardware::default(),
        Some((Ok(threads), _)) => Hardware::from(Some(threads)),
        Some((Err(_), name)) => {
            Hardware { place: name.parse::<Place>()?, threads: None, precision: Precision::BF16 }
        }
    };
    let lora = LoraOptions { rank: 16, ..LoraOptions::default() };
    let began = Instant::now();
    let mut tuned = match arguments.get(1).map_or("lora", String::as_str) {
        "lora" => Tuned::lora(model, &lora, hardware)?,
        "full" => Tuned::full(model, hardware)?,
        _ => return Err(usage()),
    };
    println!("loaded in {:.2} s", began.elapsed().as_secs_f64());
    let vocab = tuned.config().vocab;
    let token = |i: usize| ((i * 7919) % vocab) as u32;
    let sequences: Vec<_> =
        (0..tokens).step_by(length).map(|start| start..tokens.min(start + length)).collect();
    let mut weights = vec![1.0; tokens];
    sequences.iter().for_each(|sequence| weights[sequence.end - 1] = 0.0);
    let batch = Batch {
        tokens: (0..tokens).map(token).collect(),
        targets: (1..=tokens).map(token).collect(),
        weights,
        sequences,
    };
    let mut gradients: Vec<Vec<f32>> =
        tuned.parameters().iter().map(|p| vec![0.0; p.values.len()]).collect();
    println!("activations {} MiB", tuned.activation_bytes(tokens, tokens) >> 20);
    for _ in 0..4 {
        let began = Instant::now();
        let loss = tuned.loss(&batch)?;
        let forward = began.elapsed().as_secs_f64();
        let began = Instant::now();
        tuned.gradients(&batch, &mut gradients)?;
        let both = began.elapsed().as_secs_f64();
        println!(
            "loss {:.4}: {:.0} tokens/s forward, {:.0} tokens/s with gradients",
            loss.mean(),
            tokens as f64 / forward,
            tokens as f64 / both
        );
    }
    for (name, seconds) in tuned.time()?.into_iter().flatten() {
        println!("{:8.3} ms {name}", 1e3 * seconds);
    }
    if let Some(usage) = tuned.memory() {
        println!("the device's memory: {} MiB at its peak", usage.peak >> 20);
    }
    Ok(())
}
