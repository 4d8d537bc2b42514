//! `delft convert` and `delft quantize`: a model as a GGUF file, or a folder as MLX has it, with
//! types of choice; an adapter as mlx-lm has it.

use std::cell::RefCell;
use std::path::Path;
use std::time::Instant;

use delft::convert::mlx::{self, MlxForm};
use delft::convert::{ConvertSummary, QUANT_MIXES, QuantMix, Types, Written, convert};
use delft::formats::Importance;
use delft::{CancelToken, DType, Error, Tensors};
use indicatif::ProgressBar;
use serde_json::json;

use crate::args::{Convert, ModelArg, Output, Quantize};
use crate::interrupt::Generating;
use crate::load;
use crate::progress::style;
use crate::terminal::{
    Outcome, Stop, aside, bytes, count, harmless, note, print, print_json, stderr_is_terminal,
    table,
};
use crate::words::needed;

pub(crate) fn convert_to_gguf(args: &Convert) -> Outcome {
    if let Some(adapter) = &args.adapter {
        let (model, out) = (load::find(&args.model)?, &args.output.out);
        delft::adapter_to_mlx(model.location, &load::adapter(adapter, args.any_base), out)?;
        let name = out.display().to_string();
        if args.output.json {
            return print_json(&json!({ "folder": name }));
        }
        aside(format_args!("wrote {}", harmless(&name)));
        return Ok(());
    }
    run(&args.model, args.kind.as_deref(), None, &args.output)
}

pub(crate) fn quantize(args: &Quantize) -> Outcome {
    let kind = needed(&args.kind, "quantize", "a type")?;
    run(&args.model, Some(kind), args.imatrix.as_deref(), &args.output)
}

/// A bar over all elements, where somebody watches.
struct Bar(Option<ProgressBar>);

impl Bar {
    fn at(&mut self, written: Written<'_>) {
        if !stderr_is_terminal() {
            return;
        }
        let bar = self.0.get_or_insert_with(|| {
            let bar = ProgressBar::new(written.total);
            bar.set_style(style("[{bar:30}] {percent}%, {eta} left  {msg}"));
            bar
        });
        bar.set_message(written.tensor.to_owned());
        bar.set_position(written.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.iter().for_each(ProgressBar::finish_and_clear);
    }
}

/// An importance matrix, and its file's name.
fn importance(path: &Path) -> Outcome<(String, Importance)> {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok((name, Importance::open(path)?))
}

fn run(model: &ModelArg, kind: Option<&str>, imatrix: Option<&Path>, output: &Output) -> Outcome {
    let group = output.group_size.map(|size| size as usize);
    if let Some(form) = kind.map(|kind| MlxForm::named(kind, group)).transpose()?.flatten() {
        return to_mlx(model, form, imatrix, output);
    }
    if let Some(group) = group {
        let error = Error::new("--group-size", "a type of MLX, whose groups have sizes", group);
        return Err(error.hint("mlx4, for example").into());
    }
    let types = Types {
        whole: kind.map(mix).transpose()?,
        roles: output.role.iter().map(|role| self::role(role)).collect::<Outcome<_>>()?,
        importance: imatrix.map(importance).transpose()?,
        threads: output.threads.unwrap_or(0) as usize,
    };
    let out = output.out.as_path();
    if out.exists() && !output.force {
        let error = Error::new(out.display(), "a file that is not there yet", "one that is");
        return Err(error.hint("--force replaces it").into());
    }
    write(model, output, |tensors, cancel, progress| {
        convert(tensors, out, &types, cancel, progress)
    })
}

/// Writes a folder as MLX has it.
fn to_mlx(model: &ModelArg, form: MlxForm, imatrix: Option<&Path>, output: &Output) -> Outcome {
    let given = [("--imatrix", imatrix.is_some()), ("--role", !output.role.is_empty())];
    if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) {
        return Err(Error::new(flag, "a GGUF file to be written", "a folder as MLX has it").into());
    }
    let threads = output.threads.unwrap_or(0) as usize;
    write(model, output, |tensors, cancel, progress| {
        mlx::write(tensors, &output.out, form, threads, cancel, progress)
    })
}

/// Opens the model, has it written, and tells of it.
fn write(
    model: &ModelArg,
    output: &Output,
    make: impl FnOnce(
        &Tensors,
        &CancelToken,
        &mut dyn FnMut(Written<'_>),
    ) -> delft::Result<ConvertSummary>,
) -> Outcome {
    let model = load::find(model)?;
    let tensors = Tensors::open(model.location.clone())?;
    let began = Instant::now();
    let generating = Generating::begin();
    let bar = RefCell::new(Bar(None));
    let made = make(&tensors, &generating.0, &mut |written| bar.borrow_mut().at(written));
    drop(bar);
    if made.is_err() && generating.0.is_cancelled() {
        return Err(Stop::Interrupted);
    }
    report(&output.out, &made?, began.elapsed().as_secs_f64(), output.json)
}

/// The mix of that name.
fn mix(name: &str) -> Outcome<QuantMix> {
    QuantMix::named(name).ok_or_else(|| {
        let known: Vec<&str> = QUANT_MIXES.iter().map(|mix| mix.name).collect();
        Error::new("TYPE", format!("one of {}", known.join(" ")), name).into()
    })
}

/// `NAME=TYPE`.
fn role(text: &str) -> Outcome<(String, DType)> {
    let parts = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let dtype = parts.and_then(|(_, dtype)| DType::from_name(dtype));
    match (parts, dtype.filter(|dtype| dtype.is_float() && dtype.ggml_id().is_some())) {
        (Some((name, _)), Some(dtype)) => Ok((name.to_owned(), dtype)),
        _ => Err(Error::new("--role", "a part of a tensor's name and a type: ffn_down=q6_k", text)
            .into()),
    }
}

fn report(out: &Path, made: &ConvertSummary, seconds: f64, as_json: bool) -> Outcome {
    let [before, after] = made.bytes;
    if as_json {
        let types: Vec<_> = made
            .types
            .iter()
            .map(|(encoding, tensors, elements)| {
                json!({ "type": encoding.to_string(), "tensors": tensors, "elements": elements })
            })
            .collect();
        return print_json(&json!({
            "file": out.display().to_string(),
            "bytes": { "before": before, "after": after },
            "types": types,
            "seconds": seconds,
            "warnings": made.warnings,
        }));
    }
    made.warnings.iter().for_each(note);
    let rows: Vec<Vec<String>> = made
        .types
        .iter()
        .map(|(encoding, tensors, elements)| {
            vec![encoding.to_string(), tensors.to_string(), count(*elements)]
        })
        .collect();
    print(&table(&["type", "tensors", "parameters"], &[false, true, true], &rows))?;
    let name = out.display();
    print(&format!("{name}: {} of {} in {seconds:.1} s\n", bytes(after), bytes(before)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_a_name_and_a_type() {
        assert_eq!(role("ffn_down=Q6_K").unwrap(), ("ffn_down".to_owned(), DType::Q6K));
        for wrong in ["q6_k", "=q6_k", "ffn_down=", "ffn_down=q9", "ffn_down=i32", "x=f8_e4m3"] {
            assert!(role(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn mixes_go_by_llama_cpps_names() {
        assert_eq!(mix("Q4_K_M").unwrap().better, Some(DType::Q6K));
        assert_eq!(mix("q4_k").unwrap().name, "q4_k_m");
        assert_eq!(mix("q8_0").unwrap().head, DType::Q8_0);
        assert!(mix("q9").is_err());
    }
}
