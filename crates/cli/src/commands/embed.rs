//! `delft embed`: an embedding of each text.

use delft::{EmbedOptions, EmbeddingForm, Pooling, Prompt};

use crate::args::{Embed, PoolingArg};
use crate::load::{self, Embeds};
use crate::prompt;
use crate::terminal::{Outcome, print};

/// Texts between which results are printed.
const TOGETHER: usize = 64;

pub(crate) fn run(args: &Embed) -> Outcome {
    let texts = prompt::several(&args.texts, args.file.as_deref())?;
    let form = args.pooling.map(|pooling| EmbeddingForm {
        pooling: match pooling {
            PoolingArg::First => Pooling::First,
            PoolingArg::Mean => Pooling::Mean,
            PoolingArg::Last => Pooling::Last,
        },
        normalised: !args.raw,
    });
    let context = args.load.ctx.map(|n| n as usize);
    let (engine, _) = load::engine_with(&args.load, context, None, Embeds::Always(form), false)?;
    let dimensions = args.dimensions.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let options = EmbedOptions { dimensions, adapter: engine.adapters().first().cloned() };
    let encode = |text: &String| engine.encode(&Prompt::from(text.as_str()));
    for (part, texts) in texts.chunks(TOGETHER).enumerate() {
        let tokens = texts.iter().map(encode).collect::<delft::Result<Vec<_>>>()?;
        let found = engine.embed(&tokens, &options)?;
        for (i, (tokens, embedding)) in tokens.iter().zip(&found).enumerate() {
            let (index, tokens) = (part * TOGETHER + i, tokens.len());
            // As many digits as tell one f32 from another.
            let numbers: Vec<String> = embedding.iter().map(f32::to_string).collect();
            let numbers = numbers.join(",");
            print(&format!(
                "{{\"index\":{index},\"tokens\":{tokens},\"embedding\":[{numbers}]}}\n"
            ))?;
        }
    }
    Ok(())
}
