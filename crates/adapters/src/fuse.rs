//! A model with an adapter merged into its matrices: `gain (W + scale up down)`, in the types that
//! the base's files have.

use crate::{Base, fused};
use formats::safetensors::{self, Safetensors};
use formats::{AsideFolder, DType, ElementRun, Error, ErrorKind, Result, Source, TensorView, json};
use ops::low_rank::Delta;
use program::{AdapterFactors, Site};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// No configuration or index is longer.
const MOST: u64 = 64 << 20;

/// A part of a stored tensor that changes.
struct Part<'a> {
    places: Places<'a>,
    site: &'a Site,
    delta: &'a Delta,
    /// The change of a tensor that is the site's bias; none where it is the site's matrix.
    bias: Option<Vec<f32>>,
}

/// Where rows of a site lie in a tensor.
enum Places<'a> {
    /// Those from row `first` on: which of the tensor's rows each is; of its columns, if the tensor
    /// is stored `[in, out]`.
    Rows { first: usize, rows: Vec<usize>, turned: bool },
    /// Those of some experts of a stack, from row `first` on, element by element.
    Runs { first: usize, runs: Vec<ElementRun<'a>> },
}

impl Places<'_> {
    /// The number of each element, row by row, in a tensor whose rows have `width` elements.
    fn all(&self, columns: usize, width: usize) -> Vec<usize> {
        match self {
            Places::Rows { rows, turned, .. } => {
                let at = |row: usize, column: usize| match turned {
                    true => column * width + row,
                    false => row * width + column,
                };
                rows.iter()
                    .flat_map(|row| (0..columns).map(move |c| (*row, c)))
                    .map(|(r, c)| at(r, c))
                    .collect()
            }
            Places::Runs { runs, .. } => {
                let each = |run: &ElementRun<'_>| {
                    let (start, step) = (run.start, run.step);
                    (0..run.count).map(move |i| start + i * step)
                };
                runs.iter().flat_map(each).collect()
            }
        }
    }

    /// The first of the site's rows that is here.
    fn first(&self) -> usize {
        match self {
            Places::Rows { first, .. } | Places::Runs { first, .. } => *first,
        }
    }
}

/// A head that was the table of embeddings, and is another matrix now.
struct Untied<'a> {
    /// The table's tensor.
    table: &'a str,
    /// The name of the head's.
    name: String,
    /// The head's change; none if the table alone changes.
    part: Option<Part<'a>>,
}

/// Writes a folder like the base's, with what the adapter changes merged in. The folder is new, and
/// there only once it is whole. A head that was the table of embeddings, of which the adapter makes
/// something else than of the table, becomes a matrix of its own, and `config.json` says so.
///
/// # Errors
/// A base that is no folder of floats, a folder that is there, I/O.
pub fn fuse(base: &Base<'_>, adapter: &AdapterFactors, to: &Path) -> Result<()> {
    let folder = base.tensors.folder().ok_or_else(|| {
        let error =
            Error::new(base.tensors.path().display(), "a folder of safetensors", "another file");
        error
            .of(ErrorKind::Unsupported)
            .hint("fuse into the model's folder on the hub, then convert")
    })?;
    let sites = base.program.adaptable();
    let parts = parts(base, &sites, adapter)?;
    let untied = untied(base, &sites, adapter)?;
    let aside = AsideFolder::create(to)?;
    let mut files: Vec<PathBuf> = base
        .tensors
        .iter()
        .filter_map(|tensor| base.tensors.file(&tensor).map(Path::to_owned))
        .collect();
    files.sort();
    files.dedup();
    for file in &files {
        let Some(name) = file.file_name() else { continue };
        write(file, &parts, untied.as_ref(), &aside.path().join(name))?;
    }
    aside.copy_all_but_weights(folder.path())?;
    if let Some(untied) = &untied {
        untie(aside.path(), untied)?;
    }
    base.tensors.whole()?;
    aside.finish()
}

/// The parts of each tensor that change.
fn parts<'a>(
    base: &'a Base<'_>,
    sites: &'a [Site],
    adapter: &'a AdapterFactors,
) -> Result<BTreeMap<&'a str, Vec<Part<'a>>>> {
    adapter.check(sites)?;
    let mut parts: BTreeMap<&str, Vec<Part<'_>>> = BTreeMap::new();
    for site in sites {
        let Some(delta) = adapter.deltas.get(&site.name) else { continue };
        let other =
            sites.iter().find(|other| other.weight == site.weight && other.name != site.name);
        let shared = other.and_then(|other| adapter.deltas.get(&other.name));
        if shared.is_some_and(|other| is_turned(delta, other)) {
            // One change of both is made once.
            if !site.gathers {
                continue;
            }
        } else if other.is_some() && !site.gathers {
            // It becomes a matrix of its own: see `untied`.
            continue;
        }
        if let Some(change) = bias_change(base, site, delta)? {
            let (tensor, places) = bias_places(base, site)?;
            let bias = Some(change);
            parts.entry(tensor).or_default().push(Part { places, site, delta, bias });
        }
        let weight = &base.program.weights[site.weight.0];
        if site.experts.is_some() {
            for (tensor, places) in stack(base, site, &weight.source)? {
                parts.entry(tensor).or_default().push(Part { places, site, delta, bias: None });
            }
            continue;
        }
        let pieces = base.pieces(site.weight)?;
        for piece in &pieces {
            let Source::Tensor(tensor) = piece.source else { return Err(stored(&site.name)) };
            let (first, rows) = (piece.rows.start, (0..piece.rows.len()).collect());
            let places = Places::Rows { first, rows, turned: false };
            parts.entry(tensor).or_default().push(Part { places, site, delta, bias: None });
        }
        if !pieces.is_empty() {
            continue;
        }
        let rows = if site.gathers { site.input } else { site.output };
        let turned = weight.source.turns();
        let bare = match &weight.source {
            Source::Transpose(of) if matches!(**of, Source::Tensor(_)) => &**of,
            source => source,
        };
        let (tensor, rows) = match bare {
            Source::Tensor(name) => (name.as_str(), (0..rows).collect()),
            source => fused(source, rows).ok_or_else(|| stored(&site.name))?,
        };
        let places = Places::Rows { first: 0, rows, turned };
        parts.entry(tensor).or_default().push(Part { places, site, delta, bias: None });
    }
    Ok(parts)
}

/// The head that an adapter makes another matrix than the table of embeddings, if it was that
/// table.
fn untied<'a>(
    base: &'a Base<'_>,
    sites: &'a [Site],
    adapter: &'a AdapterFactors,
) -> Result<Option<Untied<'a>>> {
    let table = |head: &&Site| {
        !head.gathers && sites.iter().any(|other| other.gathers && other.weight == head.weight)
    };
    let Some(head) = sites.iter().find(table) else { return Ok(None) };
    let other = sites.iter().find(|other| other.gathers && other.weight == head.weight);
    let changes = [Some(head), other].map(|site| adapter.deltas.get(&site?.name));
    match changes {
        [None, None] => return Ok(None),
        [Some(head), Some(table)] if is_turned(head, table) => return Ok(None),
        _ => {}
    }
    let Source::Tensor(table) = &base.program.weights[head.weight.0].source else {
        return Err(stored(&head.name));
    };
    let names = base.config.architecture.stored("head", false);
    let name = names.into_iter().next().ok_or_else(|| {
        let expected = "a name for a head of its own";
        Error::new(&head.name, expected, "none").of(ErrorKind::Unsupported)
    })?;
    let places = Places::Rows { first: 0, rows: (0..head.output).collect(), turned: false };
    let part = changes[0].map(|delta| Part { places, site: head, delta, bias: None });
    Ok(Some(Untied { table, name, part }))
}

/// Has the configuration of a folder say that the head is a matrix of its own, and its index where
/// that lies.
fn untie(folder: &Path, untied: &Untied<'_>) -> Result<()> {
    const KEY: &str = "tie_word_embeddings";
    let change = |name: &str, change: &dyn Fn(&mut Map<String, Value>)| -> Result<()> {
        let file = folder.join(name);
        let Some(Value::Object(mut object)) = json::find(&file, MOST)? else { return Ok(()) };
        change(&mut object);
        let text = format!("{:#}\n", Value::Object(object));
        std::fs::write(&file, text).map_err(|e| Error::io(file.display(), e))
    };
    change("config.json", &|config| {
        // A decoder beside towers has its settings in an object of their own.
        if let Some(Value::Object(text)) = config.get_mut("text_config") {
            text.insert(KEY.to_owned(), false.into());
        }
        config.insert(KEY.to_owned(), false.into());
    })?;
    change("model.safetensors.index.json", &|index| {
        if let Some(Value::Object(files)) = index.get_mut("weight_map")
            && let Some(file) = files.get(untied.table).cloned()
        {
            files.insert(untied.name.clone(), file);
        }
    })
}

/// Whether two changes, one of a table of embeddings and one of the head, are the same change of one
/// matrix.
fn is_turned(one: &Delta, other: &Delta) -> bool {
    let turned = |down: &[f32], up: &[f32]| {
        let rows = down.len() / one.rank;
        let at = |i: usize| up[i % rows * one.rank + i / rows];
        down.len() == up.len() && down.iter().enumerate().all(|(i, v)| *v == at(i))
    };
    let alike = one.rank == other.rank && one.scale == other.scale;
    // A table's `down` has tokens as rows, as a head's `up` has.
    let same = |table: &Delta, head: &Delta| table.down == head.up && turned(&head.down, &table.up);
    alike && one.gain.is_none() && other.gain.is_none() && (same(one, other) || same(other, one))
}

/// The change of a site's bias, besides what DoRA takes back of it.
fn bias_change(base: &Base<'_>, site: &Site, delta: &Delta) -> Result<Option<Vec<f32>>> {
    let Some(gain) = &delta.gain else { return Ok(None) };
    let bias = match site.bias {
        Some(bias) => base.program.weights[bias.0].read(base.tensors)?.to_f32()?,
        None => vec![0.0; site.output],
    };
    let each = gain.offset.iter().zip(gain.gain.iter().zip(&bias));
    let change: Vec<f32> =
        each.map(|(offset, (gain, bias))| offset - (1.0 - gain) * bias).collect();
    Ok(change.iter().any(|change| *change != 0.0).then_some(change))
}

/// Where the elements of a site's bias lie.
fn bias_places<'a>(base: &'a Base<'_>, site: &Site) -> Result<(&'a str, Places<'a>)> {
    let missing = |found: &str| {
        let error = Error::new(&site.name, "a bias of its own to merge into", found);
        error.of(ErrorKind::Unsupported)
    };
    let bias = site.bias.ok_or_else(|| missing("none"))?;
    let source = &base.program.weights[bias.0].source;
    let (tensor, rows) = match source {
        Source::Tensor(name) => (name.as_str(), (0..site.output).collect()),
        source => {
            fused(source, site.output).ok_or_else(|| missing("one that is made of others"))?
        }
    };
    Ok((tensor, Places::Rows { first: 0, rows, turned: false }))
}

/// Where the rows of a stack of experts lie: in one tensor, or some in each of several.
fn stack<'a>(
    base: &Base<'_>,
    site: &Site,
    source: &'a Source,
) -> Result<Vec<(&'a str, Places<'a>)>> {
    let runs = if source.is_quantised() || source.is_decoded() {
        None
    } else {
        source.runs(base.tensors)?
    };
    let mut all: Vec<(&str, Places<'_>)> = Vec::new();
    let mut before = 0;
    for run in runs.ok_or_else(|| stored(&site.name))? {
        let tensor = run.tensor.ok_or_else(|| stored(&site.name))?;
        match all.last_mut() {
            Some((last, Places::Runs { runs, .. })) if *last == tensor => runs.push(run),
            _ if before % site.input != 0 => return Err(stored(&site.name)),
            _ => {
                let first = before / site.input;
                all.push((tensor, Places::Runs { first, runs: vec![run] }));
            }
        }
        before += run.count;
    }
    Ok(all)
}

fn stored(name: &str) -> Error {
    let error = Error::new(name, "a matrix of floats", "one that is quantised");
    error.of(ErrorKind::Unsupported).hint("merge into the model that it was quantised from")
}

/// Writes one file of weights.
fn write(
    from: &Path,
    parts: &BTreeMap<&str, Vec<Part<'_>>>,
    untied: Option<&Untied<'_>>,
    to: &Path,
) -> Result<()> {
    let file = Safetensors::open(from)?;
    let untied = untied.filter(|untied| file.get(untied.table).is_some());
    let merged = |tensor: TensorView<'_>| -> Result<Cow<'_, [u8]>> {
        Ok(match parts.get(tensor.name) {
            None => Cow::Borrowed(&[][..]),
            Some(parts) => Cow::Owned(merged(&tensor, parts)?),
        })
    };
    let bytes = file.iter().map(merged).collect::<Result<Vec<_>>>()?;
    let tensors = file.iter().zip(&bytes).map(|(tensor, merged)| match merged {
        Cow::Owned(bytes) => TensorView { bytes, ..tensor },
        Cow::Borrowed(_) => tensor,
    });
    let mut tensors: Vec<TensorView<'_>> = tensors.collect();
    let head = untied.zip(untied.and_then(|untied| file.get(untied.table)));
    let own = match head {
        Some((Untied { part: Some(part), .. }, table)) => {
            self::merged(&table, std::slice::from_ref(part))?
        }
        Some((_, table)) => table.bytes.to_vec(),
        None => Vec::new(),
    };
    if let Some((untied, table)) = head {
        tensors.retain(|tensor| tensor.name != untied.name);
        tensors.push(TensorView { name: &untied.name, bytes: &own, ..table });
    }
    safetensors::write(to, &[("format", "pt")], tensors)
}

/// A tensor's bytes with its parts changed.
fn merged(tensor: &TensorView<'_>, parts: &[Part<'_>]) -> Result<Vec<u8>> {
    if ![DType::F32, DType::F16, DType::BF16].contains(&tensor.dtype) {
        return Err(stored(tensor.name));
    }
    let mut values = tensor.to_f32()?;
    let width: usize = tensor.shape.iter().skip(1).product();
    for Part { places, site, delta, bias } in parts {
        if let Some(bias) = bias {
            let all = places.all(1, 1).into_iter().zip(bias);
            all.for_each(|(place, more)| values[place] += more);
            continue;
        }
        let columns = if site.gathers { site.output } else { site.input };
        let (all, first) = (places.all(columns, width), places.first());
        let mut own: Vec<f32> = all.iter().map(|place| values[*place]).collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let each = (all.len() / columns).div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, own) in own.chunks_mut(each * columns).enumerate() {
                scope.spawn(move || {
                    for (i, row) in own.chunks_exact_mut(columns).enumerate() {
                        add(site, delta, first + part * each + i, row);
                    }
                });
            }
        });
        all.into_iter().zip(own).for_each(|(place, own)| values[place] = own);
    }
    let mut bytes = vec![0; tensor.bytes.len()];
    tensor.dtype.encode(&values, &mut bytes)?;
    Ok(bytes)
}

/// Adds what changes of a row.
fn add(site: &Site, delta: &Delta, number: usize, row: &mut [f32]) {
    let (rank, scale) = (delta.rank, f64::from(delta.scale));
    let gain = delta.gain.as_ref().map_or(1.0, |gain| f64::from(gain.gain[number]));
    // The first rank of the row's expert.
    let expert = site.experts.map_or(0, |_| number / site.output * rank);
    for (column, value) in row.iter_mut().enumerate() {
        let term = |r: usize| {
            let (up, down) = match site.gathers {
                true => (delta.up[column * rank + r], delta.down[number * rank + r]),
                false => {
                    (delta.up[number * rank + r], delta.down[(expert + r) * site.input + column])
                }
            };
            f64::from(up) * f64::from(down)
        };
        let change: f64 = (0..rank).map(term).sum();
        *value = (gain * (f64::from(*value) + scale * change)) as f32;
    }
}
