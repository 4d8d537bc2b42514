//! `delft logits`: the model's raw output for given tokens, for comparing with other
//! implementations.

use std::io::{self, Write};

use delft::{
    Engine, Finish, GenerateOptions, LogitRows, Logits as Found, Prompt, SamplingOptions,
    check_logits,
};

use crate::args::Logits;
use crate::generate::generate;
use crate::interrupt::LastWords;
use crate::load;
use crate::terminal::{Outcome, Stop, aside, harmless, print, table};

pub(crate) fn run(args: &Logits) -> Outcome {
    let (engine, _) = load::engine(&args.load, false)?;
    let mut session = load::session(&engine)?;
    let rows =
        if args.all { LogitRows::All } else { LogitRows::Last(args.last.unwrap_or(1) as usize) };
    let (json, tokens) = (args.json, args.tokens.clone());
    let vocab = engine.info().vocab;
    let words = LastWords::prepare(move || {
        let none = Found { vocab, data: Vec::new() };
        if json { write_json(&tokens, &none, &[], true) } else { Ok(()) }
    });
    let logits = session.logits(&args.tokens, rows)?;
    drop(words);
    let first = args.tokens.len().saturating_sub(logits.rows().count());
    let numbers = logits.rows().zip(first..).try_for_each(|(row, at)| check_logits(row, at));
    let (mut generated, mut interrupted) = (Vec::new(), false);
    if args.generate > 0 && numbers.is_ok() {
        // A comparison wants as many tokens as it asked for, whatever the model thinks of ending.
        let options = GenerateOptions {
            sampling: SamplingOptions::greedy(),
            max_tokens: Some(usize::try_from(args.generate).unwrap_or(usize::MAX)),
            ignore_end: true,
            ..GenerateOptions::default()
        };
        let prompt = Prompt::Tokens(args.tokens.clone());
        let answer = generate(&mut session, prompt, &options, &mut |_| Ok(()))?;
        interrupted = answer.finish == Finish::Cancelled;
        generated = answer.tokens;
    }
    if args.json {
        write_json(&args.tokens, &logits, &generated, interrupted)?;
    } else {
        show(&engine, &args.tokens, &logits, &generated)?;
    }
    // What there is, is shown all the same: whoever compares wants to see where it begins.
    numbers?;
    if interrupted {
        aside(format_args!("interrupted: {} of {} tokens", generated.len(), args.generate));
        return Err(Stop::Interrupted);
    }
    Ok(())
}

/// Row by row, each number in as few digits as tell it from every other f32; what is not finite
/// becomes null.
fn write_json(tokens: &[u32], logits: &Found, generated: &[u32], interrupted: bool) -> Outcome {
    let mut out = io::BufWriter::new(io::stdout().lock());
    write!(out, "{{\"tokens\":")?;
    serde_json::to_writer(&mut out, tokens)?;
    write!(out, ",\"logits\":[")?;
    for (i, row) in logits.rows().enumerate() {
        out.write_all(if i == 0 { b"" } else { b"," })?;
        serde_json::to_writer(&mut out, row)?;
    }
    write!(out, "],\"generated\":")?;
    serde_json::to_writer(&mut out, generated)?;
    writeln!(out, "{}}}", if interrupted { ",\"interrupted\":true" } else { "" })?;
    Ok(out.flush()?)
}

fn show(engine: &Engine, tokens: &[u32], logits: &Found, generated: &[u32]) -> Outcome {
    const SHOWN: usize = 10;
    let text = |id: u32| engine.tokenizer().map_or(String::new(), |t| harmless(&t.token_text(id)));
    let first = tokens.len().saturating_sub(logits.rows().count());
    let mut page = String::new();
    for (i, row) in logits.rows().enumerate() {
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
        let likeliest: Vec<Vec<String>> = order
            .iter()
            .take(SHOWN)
            .map(|&id| vec![id.to_string(), format!("{:.5}", row[id as usize]), text(id)])
            .collect();
        page += &format!("position {} (token {})\n", first + i, tokens[first + i]);
        page += &table(&["ID", "LOGIT", "TEXT"], &[true, true, false], &likeliest);
    }
    if !generated.is_empty() {
        let ids: Vec<String> = generated.iter().map(u32::to_string).collect();
        page += &format!("generated: {}\n", ids.join(" "));
    }
    print(&page)
}
