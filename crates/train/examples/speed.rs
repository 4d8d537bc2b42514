//! Tokens a second of losses with gradients: `speed MODEL [lora|full] [TOKENS] [THREADS]`, in sequences of 256.

use delft_train::{Batch, LoraOptions, Model, Tuned};
use formats::{Error, Result};
use std::time::Instant;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = || Error::new("speed", "MODEL [lora|full] [TOKENS] [THREADS]", "others");
    let model = arguments.first().ok_or_else(usage)?;
    let number = |i: usize, or: usize| {
        arguments.get(i).map_or(Ok(or), |text| text.parse::<usize>().map_err(|_| usage()))
    };
    let (tokens, threads) = (number(2, 512)?, number(3, 0)?);
    let threads = (threads > 0).then_some(threads);
    let began = Instant::now();
    let mut tuned = match arguments.get(1).map_or("lora", String::as_str) {
        "lora" => Tuned::lora(model, &LoraOptions::default(), threads)?,
        "full" => Tuned::full(model, threads)?,
        _ => return Err(usage()),
    };
    println!("loaded in {:.2} s", began.elapsed().as_secs_f64());
    let vocab = tuned.config().vocab;
    let token = |i: usize| ((i * 7919) % vocab) as u32;
    let sequences: Vec<_> =
        (0..tokens).step_by(256).map(|start| start..tokens.min(start + 256)).collect();
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
    for _ in 0..3 {
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
    Ok(())
}
