//! `delft verify`: compares a model's values with a reference, layer by layer, and names the first
//! layer that differs.
//!
//! A reference is a safetensors file: `input_ids` `[T]` i64, then `[rows, width]` f32 of the last
//! rows: `embeddings`, `hidden.N` behind layer N, `norm`, `logits`. `--make` writes one; any
//! program that has the values can.

use delft::formats::{Safetensors, TensorView, safetensors};
use delft::tokens::Special;
use delft::{DType, Engine, Error, Hint};
use serde_json::{Value, json};
use std::path::Path;

use crate::args::Verify;
use crate::load;
use crate::terminal::{Outcome, print, print_json, table};

/// The text whose values `--make` writes, unless tokens are given.
const TEXT: &str = "The quick brown fox jumps over the lazy dog. In 1969, people walked on the Moon; \
    2 + 2 = 4. \"Why?\" she asked, and nobody knew what to answer.";
/// Tokens that are computed at a time: as many as a step gives logits of.
const STEP: usize = 64;

/// Values of one place in the model, `[rows, width]`.
struct Stage {
    name: String,
    values: Vec<f32>,
}

pub(crate) fn run(args: &Verify) -> Outcome {
    let mut load = args.load.clone();
    load.trace = delft::Trace::Layers;
    let (engine, _) = load::engine(&load, false)?;
    match (&args.make, &args.against) {
        (Some(path), _) => make(&engine, args, path),
        (None, Some(path)) => verify(&engine, args, path),
        // The command line asks for one of them.
        (None, None) => Err(Error::new("verify", "--against or --make", "neither").into()),
    }
}

/// The model's stages for some tokens, the last `rows` rows of each.
fn stages(engine: &Engine, tokens: &[u32], rows: usize) -> Outcome<Vec<Stage>> {
    let mut session = load::session(engine)?;
    let names = engine.traces().iter().map(|name| stage_name(name)).chain(["logits".to_owned()]);
    let mut stages: Vec<Stage> = names.map(|name| Stage { name, values: Vec::new() }).collect();
    let traces = stages.len() - 1;
    for piece in tokens.chunks(STEP) {
        let mut logits = Vec::new();
        session.evaluate(piece, 0, &mut |_, row| logits.extend_from_slice(row))?;
        for (i, stage) in stages[..traces].iter_mut().enumerate() {
            stage.values.extend(session.traced(i)?);
        }
        stages[traces].values.extend(logits);
    }
    for stage in &mut stages {
        let width = stage.values.len() / tokens.len().max(1);
        stage.values.drain(..(tokens.len() - rows) * width);
    }
    Ok(stages)
}

/// The name of a traced value in a reference.
fn stage_name(trace: &str) -> String {
    match trace.strip_prefix("blocks.") {
        Some(layer) => format!("hidden.{layer}"),
        None if trace == "embed" => "embeddings".to_owned(),
        None => trace.to_owned(),
    }
}

fn make(engine: &Engine, args: &Verify, path: &Path) -> Outcome {
    let tokens = match (&args.tokens[..], engine.tokenizer()) {
        ([], Some(tokenizer)) => tokenizer.encode(TEXT, Special { add: true, parse: false })?,
        ([], None) => (0..STEP).map(|i| (i % engine.info().vocab) as u32).collect(),
        (tokens, _) => tokens.to_vec(),
    };
    let stages = stages(engine, &tokens, tokens.len())?;
    let ids: Vec<u8> = tokens.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = stages
        .iter()
        .map(|stage| {
            let shape = vec![tokens.len(), stage.values.len() / tokens.len().max(1)];
            let bytes = stage.values.iter().flat_map(|value| value.to_le_bytes()).collect();
            (stage.name.clone(), shape, bytes)
        })
        .collect();
    let shape = [tokens.len()];
    let all = data.iter().map(|(name, shape, bytes)| TensorView {
        name,
        dtype: DType::F32,
        shape,
        bytes,
    });
    let ids = TensorView { name: "input_ids", dtype: DType::I64, shape: &shape, bytes: &ids };
    safetensors::write(path, &[("model", &engine.info().name)], [ids].into_iter().chain(all))?;
    let count = stages.len();
    print(&format!("{}: {count} values of {} tokens\n", path.display(), tokens.len()))
}

/// How far the model is from the reference at one place.
struct Parted {
    name: String,
    /// Root mean square of the difference, divided by the root mean square of the reference.
    relative: f64,
    /// The largest difference.
    largest: f64,
}

impl Parted {
    /// Whether it is further from the reference than so much; what is no number is.
    fn parts(&self, tolerance: f64) -> bool {
        self.relative.is_nan() || self.relative > tolerance
    }
}

fn verify(engine: &Engine, args: &Verify, path: &Path) -> Outcome {
    let file = Safetensors::open(path)?;
    let place = path.display();
    let tokens = ids(&file, path)?;
    let rows = file.get("logits").or(file.get("norm")).or(file.get("hidden.0"));
    let rows = rows.and_then(|tensor| tensor.shape.first().copied());
    let Some(rows) = rows.filter(|rows| (1..=tokens.len()).contains(rows)) else {
        let expected = "values of some of its tokens under the names of stages";
        return Err(Error::new(place, expected, "none").into());
    };
    let mut found = Vec::new();
    for stage in stages(engine, &tokens, rows)? {
        let Some(tensor) = file.get(&stage.name) else { continue };
        let named = |e: Error| Error { place: format!("{place}: {}", e.place), ..e };
        let expected = tensor.to_f32().map_err(named)?;
        if expected.len() != stage.values.len() {
            let place = format!("{place}: {}", stage.name);
            let found = format!("{} values", expected.len());
            return Err(Error::new(place, format!("{}", stage.values.len()), found)
                .hint("the reference is another model's")
                .into());
        }
        found.push(parted(stage.name, &stage.values, &expected));
    }
    if found.is_empty() {
        return Err(Error::new(place, "stages such as hidden.0 or logits", "none").into());
    }
    let first = found.iter().find(|stage| stage.parts(args.tolerance));
    report(&found, first, args)?;
    match first {
        None => Ok(()),
        Some(Parted { name, relative, .. }) => {
            let expected = format!("values within {} of the reference", args.tolerance);
            let error = Error::new(name, expected, format!("{relative:.2e} from it"));
            let hint = "--cache-type f32 and unquantised weights round least";
            Err(error.hint(Hint::text(hint)).into())
        }
    }
}

fn ids(file: &Safetensors, path: &Path) -> Outcome<Vec<u32>> {
    let place = || format!("{}: input_ids", path.display());
    let ids = file.get("input_ids").filter(|ids| ids.dtype == DType::I64 && ids.shape.len() == 1);
    let ids = ids.ok_or_else(|| Error::new(place(), "token ids in i64", "none"))?;
    let one = |b: &[u8; 8]| u32::try_from(i64::from_le_bytes(*b)).ok();
    let ids: Option<Vec<u32>> = ids.bytes.as_chunks::<8>().0.iter().map(one).collect();
    let ids = ids.filter(|ids| !ids.is_empty());
    Ok(ids.ok_or_else(|| Error::new(place(), "one token id or more", "something else"))?)
}

fn parted(name: String, values: &[f32], expected: &[f32]) -> Parted {
    let (mut squares, mut size, mut largest) = (0.0f64, 0.0f64, 0.0f64);
    for (&value, &expected) in values.iter().zip(expected) {
        let difference = (f64::from(value) - f64::from(expected)).abs();
        squares += difference * difference;
        size += f64::from(expected).powi(2);
        largest = if difference > largest || difference.is_nan() { difference } else { largest };
    }
    let relative = if squares == 0.0 { 0.0 } else { (squares / size).sqrt() };
    Parted { name, relative, largest }
}

fn report(found: &[Parted], first: Option<&Parted>, args: &Verify) -> Outcome {
    if args.json {
        let one = |stage: &Parted| json!({ "name": stage.name, "relative": stage.relative, "largest": stage.largest });
        let stages: Vec<Value> = found.iter().map(one).collect();
        let first = first.map(|stage| stage.name.clone());
        return print_json(
            &json!({ "stages": stages, "tolerance": args.tolerance, "parts_at": first }),
        );
    }
    let row = |stage: &Parted| {
        let mark = if stage.parts(args.tolerance) { "parts" } else { "" };
        let (relative, largest) =
            (format!("{:.2e}", stage.relative), format!("{:.2e}", stage.largest));
        vec![stage.name.clone(), relative, largest, mark.to_owned()]
    };
    let rows: Vec<Vec<String>> = found.iter().map(row).collect();
    print(&table(&["VALUE", "RELATIVE", "LARGEST", ""], &[false, true, true, false], &rows))
}
