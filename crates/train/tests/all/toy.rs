//! A model small enough to follow by hand: what comes next follows from a token alone.

use delft_train::{Batch, Example, Loss, Parameter, Trainable, data::Form};
use formats::Result;

/// Tokens that it knows.
pub(crate) const VOCABULARY: usize = 7;

/// `logits = table[token] + bias`.
pub(crate) struct Bigram {
    parameters: [Parameter; 2],
}

impl Bigram {
    pub(crate) fn new() -> Bigram {
        let parameter = |name: &str, shape: Vec<usize>, decays| Parameter {
            name: name.to_owned(),
            values: (0..shape.iter().product())
                .map(|i: usize| (i as f32 * 0.7).sin() * 0.1)
                .collect(),
            shape,
            decays,
        };
        let table = parameter("table", vec![VOCABULARY, VOCABULARY], true);
        Bigram { parameters: [table, parameter("bias", vec![VOCABULARY], false)] }
    }

    fn step(&self, batch: &Batch, mut gradients: Option<&mut [Vec<f32>]>) -> Loss {
        let mut loss = Loss::default();
        for (i, &token) in batch.tokens.iter().enumerate().filter(|(i, _)| batch.weights[*i] > 0.0)
        {
            let row = VOCABULARY * token as usize;
            let logit =
                |j: usize| self.parameters[0].values[row + j] + self.parameters[1].values[j];
            let sum: f32 = (0..VOCABULARY).map(|j| logit(j).exp()).sum();
            let target = batch.targets[i] as usize;
            loss += Loss { sum: f64::from(sum.ln() - logit(target)), weight: 1.0 };
            for j in 0..VOCABULARY {
                let slope = logit(j).exp() / sum - if j == target { 1.0 } else { 0.0 };
                if let Some([table, bias]) = gradients.as_deref_mut() {
                    table[row + j] += slope;
                    bias[j] += slope;
                }
            }
        }
        loss
    }
}

impl Trainable for Bigram {
    fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    fn loss(&mut self, batch: &Batch) -> Result<Loss> {
        Ok(self.step(batch, None))
    }

    fn gradients(&mut self, batch: &Batch, gradients: &mut [Vec<f32>]) -> Result<Loss> {
        Ok(self.step(batch, Some(gradients)))
    }

    fn export(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        let values = self.parameters.iter().flat_map(|p| &p.values);
        Ok(vec![(
            "adapter_model.safetensors".to_owned(),
            values.flat_map(|x| x.to_le_bytes()).collect(),
        )])
    }
}

/// Sequences in which each token is followed by the next one or the one after that.
pub(crate) fn examples(count: usize) -> Vec<Example> {
    let example = |i: usize| {
        let tokens: Vec<u32> =
            (0..4 + i % 5).map(|j| ((i * i + j * (1 + i % 2)) % VOCABULARY) as u32).collect();
        let count = tokens.len();
        Example::of(tokens, 1..count, Form::Text, i + 1)
    };
    (0..count).map(example).collect()
}
