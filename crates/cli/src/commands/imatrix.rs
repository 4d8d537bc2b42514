//! `delft imatrix`: how much each weight matters, by what a text puts into the products.

use delft::importance::{CHUNK, Collector};
use delft::tokens::Special;
use delft::{Error, Trace};
use serde_json::json;

use crate::args::Imatrix;
use crate::interrupt::Generating;
use crate::terminal::{Outcome, Stop, aside, print, print_json, stderr_is_terminal};
use crate::words::needed;
use crate::{load, prompt};

/// Tokens of a window unless said otherwise, as llama.cpp has it.
const CONTEXT: usize = 512;

pub(crate) fn run(args: &Imatrix) -> Outcome {
    let file = needed(&args.file, "imatrix", "a text file")?;
    let out = args.out.as_path();
    if out.exists() && !args.force {
        let error = Error::new(out.display(), "a file that is not there yet", "one that is");
        return Err(error.hint("--force replaces it").into());
    }
    load::never_full(&args.load, "imatrix")?;
    if let Some(chunk) = args.load.chunk.filter(|chunk| *chunk > CHUNK as u64) {
        return Err(Error::new("--chunk", format!("at most {CHUNK} for imatrix"), chunk).into());
    }
    let text = prompt::read(file)?;
    let context = args.load.ctx.map_or(CONTEXT, |n| n as usize);
    let mut loading = args.load.clone();
    loading.trace = Trace::Inputs;
    loading.chunk = Some(loading.chunk.unwrap_or(CHUNK as u64));
    let (engine, _) = load::engine_with(&loading, Some(context), None, load::Embeds::Never, false)?;
    let mut collector = Collector::new(&engine)?;
    let tokenizer = load::need_tokenizer(&engine)?;
    let tokens = tokenizer.encode(&text, Special { add: true, parse: false })?;
    let bos = if tokenizer.adds_bos() { tokenizer.bos() } else { None };
    let most = args.chunks.map_or(usize::MAX, |n| n as usize);
    let count = (tokens.len() / context).min(most);
    if count == 0 {
        let found = format!("{} tokens", tokens.len());
        return Err(Error::new(file.display(), format!("at least {context} tokens"), found)
            .hint("take a longer text or a smaller --ctx")
            .into());
    }
    let generating = Generating::begin();
    let mut session = load::session(&engine)?;
    for (i, window) in tokens.chunks_exact(context).take(count).enumerate() {
        if generating.0.is_cancelled() {
            return Err(Stop::Interrupted);
        }
        let mut window = window.to_vec();
        if let Some(bos) = bos {
            window[0] = bos;
        }
        collector.add(&mut session, &window)?;
        if stderr_is_terminal() {
            aside(format_args!("window {}/{count}", i + 1));
        }
    }
    let mut importance = collector.finish();
    let text = file.file_name().unwrap_or(file.as_os_str());
    importance.texts = vec![text.to_string_lossy().into_owned()];
    importance.chunks = u32::try_from(count).unwrap_or(u32::MAX);
    importance.chunk = u32::try_from(context).unwrap_or(u32::MAX);
    importance.write(out)?;
    let (name, tensors) = (out.display().to_string(), importance.tensors.len());
    // Experts that no token chose.
    let unused = importance.tensors.values().flat_map(|inputs| &inputs.rows);
    let unused = unused.filter(|rows| **rows == 0).count();
    if args.json {
        return print_json(&json!({ "file": name, "tensors": tensors, "windows": count,
            "tokens": count * context, "experts_unused": unused }));
    }
    let said =
        if unused > 0 { format!("; {unused} matrices of experts saw none") } else { String::new() };
    print(&format!(
        "{name}: {tensors} tensors, {} tokens in {count} windows{said}\n",
        count * context
    ))
}
