//! Tokens a second of losses, and of updates: `speed MODEL [lora|full] [TOKENS] [THREADS|DEVICE]
//! [LENGTH]`, in sequences of 256 unless a length is given, in the precision that suits the model.
//! An update is of one batch, from its tokens to changed parameters.

use delft_train::{
    AdamW, Batch, DeviceSpec, Hardware, LoraOptions, Moments, Trainable, Tuned, usual_precision,
};
use formats::{Error, Result, Tensors};
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
            Hardware { place: name.parse::<DeviceSpec>()?, ..Hardware::default() }
        }
    };
    let precision = usual_precision(&Tensors::open(model.as_str())?);
    let hardware = Hardware { precision, ..hardware };
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
        ..Batch::default()
    };
    let mut gradients: Vec<Vec<f32>> =
        tuned.parameters().iter().map(|p| vec![0.0; p.values.len()]).collect();
    let mut moments = Moments::zeros(tuned.parameters());
    println!("activations {} MiB", tuned.activation_bytes(tokens, tokens) >> 20);
    println!("moments and sums of gradients on the device {} MiB", tuned.update_bytes() >> 20);
    for _ in 0..6 {
        let began = Instant::now();
        tuned.loss(&batch)?;
        let forward = began.elapsed().as_secs_f64();
        let began = Instant::now();
        let loss = tuned.accumulate(&batch, true, &mut gradients)?;
        let both = began.elapsed().as_secs_f64();
        let by = [1e-4, loss.weight];
        let norm = tuned.update(&AdamW::default(), by, &gradients, &mut moments)?;
        let all = began.elapsed().as_secs_f64();
        println!(
            "loss {:.4}, norm {norm:.4}: tokens/s: {:.0} forward, {:.0} with gradients, {:.0} updates",
            loss.mean(),
            tokens as f64 / forward,
            tokens as f64 / both,
            tokens as f64 / all
        );
    }
    let began = Instant::now();
    for _ in 0..8 {
        let loss = tuned.accumulate(&batch, true, &mut gradients)?;
        let by = [1e-4, loss.weight];
        tuned.update(&AdamW::default(), by, &gradients, &mut moments)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("eight updates: {:.0} tokens/s", 8.0 * tokens as f64 / seconds);
    for (name, seconds) in tuned.time()?.into_iter().flatten() {
        println!("{:8.3} ms {name}", 1e3 * seconds);
    }
    if let Some(usage) = tuned.memory() {
        println!("the device's memory: {} MiB at its peak", usage.peak >> 20);
    }
    Ok(())
}
