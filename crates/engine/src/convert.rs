//! Models written as GGUF files: a folder in the terms of GGUF, or a GGUF file with other types.
//! Folders as MLX has them: [`mlx`].
//!
//! Tensors are read, changed and written some rows at a time, on several threads; what is held in
//! memory is bounded by the largest tensor. The same input gives the same bytes, however many
//! threads there are.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use formats::gguf::{MetadataValue, TensorSpec, Writer};
use formats::{
    DType, Encoded, Encoding, Error, Hint, Importance, NotFinite, Result, Source, Tensors,
};
use models::{Export, Exported, From};

use crate::CancelToken;

pub mod mlx;

/// The target types of tensors.
#[derive(Debug, Clone, Default)]
pub struct Types {
    /// The type of most matrices; none: the stored one, or bf16 where GGUF lacks it.
    pub whole: Option<QuantMix>,
    /// The types of tensors whose names contain a text; the last that fits counts.
    pub roles: Vec<(String, DType)>,
    /// An importance matrix, by which errors of blocks' weights count, and the name of its file.
    pub importance: Option<(String, Importance)>,
    /// Threads; 0: as many as the machine has.
    pub threads: usize,
}

/// A type for most matrices, and which matrices get a better one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantMix {
    /// Its name, such as `q4_k_m`.
    pub name: &'static str,
    /// The type of most matrices.
    pub base: DType,
    /// The type of the head (the embedding, where that is the head).
    pub head: DType,
    /// The type of values and of feed-forwards' last matrices in the layers that need it most.
    pub better: Option<DType>,
    /// `general.file_type`.
    file_type: u32,
}

/// Every mix by name, as llama.cpp names them.
pub const QUANT_MIXES: &[QuantMix] = &[
    plain("f32", DType::F32, 0),
    plain("f16", DType::F16, 1),
    plain("bf16", DType::BF16, 32),
    plain("q8_0", DType::Q8_0, 7),
    mixed("q4_0", DType::Q4_0, None, 2),
    mixed("q4_1", DType::Q4_1, None, 3),
    mixed("q5_0", DType::Q5_0, None, 8),
    mixed("q5_1", DType::Q5_1, None, 9),
    mixed("q2_k", DType::Q2K, Some(DType::Q4K), 10),
    mixed("q3_k_s", DType::Q3K, None, 11),
    mixed("q3_k_m", DType::Q3K, Some(DType::Q5K), 12),
    mixed("q4_k_s", DType::Q4K, None, 14),
    mixed("q4_k_m", DType::Q4K, Some(DType::Q6K), 15),
    mixed("q5_k_s", DType::Q5K, None, 16),
    mixed("q5_k_m", DType::Q5K, Some(DType::Q6K), 17),
    plain("q6_k", DType::Q6K, 18),
    mixed("iq4_nl", DType::Iq4Nl, None, 25),
    mixed("iq4_xs", DType::Iq4Xs, None, 30),
    mixed("tq1_0", DType::Tq1_0, None, 36),
    mixed("tq2_0", DType::Tq2_0, None, 37),
    QuantMix { name: "mxfp4", base: DType::Mxfp4, head: DType::Q8_0, better: None, file_type: 38 },
];

const fn plain(name: &'static str, base: DType, file_type: u32) -> QuantMix {
    QuantMix { name, base, head: base, better: None, file_type }
}

const fn mixed(name: &'static str, base: DType, better: Option<DType>, file_type: u32) -> QuantMix {
    QuantMix { name, base, head: DType::Q6K, better, file_type }
}

impl QuantMix {
    /// The mix of that name, in either case; `q4_k` and the like are the M of their kind.
    pub fn named(name: &str) -> Option<QuantMix> {
        let found = |name: &str| QUANT_MIXES.iter().find(|mix| mix.name.eq_ignore_ascii_case(name));
        found(name).or_else(|| found(&format!("{name}_m"))).copied()
    }
}

/// How far a file is.
#[derive(Debug, Clone, Copy)]
pub struct Written<'a> {
    /// The tensor under way.
    pub tensor: &'a str,
    /// Elements done.
    pub done: u64,
    /// Elements of all tensors.
    pub total: u64,
}

/// The result of a conversion.
#[derive(Debug, Clone)]
pub struct ConvertSummary {
    /// Bytes of tensors in the source, and in the file.
    pub bytes: [u64; 2],
    /// Tensors and elements by type, most elements first.
    pub types: Vec<(Encoding, usize, u64)>,
    /// Assumptions, and departures from what was asked, one line each.
    pub warnings: Vec<String>,
}

/// A tensor to be written.
struct Job {
    spec: TensorSpec,
    from: From,
}

/// Writes the model behind `tensors` to the GGUF file `out`, which takes its name when it is whole.
///
/// # Errors
/// A model that does not load, or has no form in GGUF; weights that are no numbers; I/O; a
/// cancelled conversion.
pub fn convert(
    tensors: &Tensors,
    out: &Path,
    types: &Types,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(Written<'_>),
) -> Result<ConvertSummary> {
    let same = |path: PathBuf| std::fs::canonicalize(path).ok();
    if same(out.to_path_buf()).is_some_and(|out| Some(out) == same(tensors.path().to_path_buf())) {
        return Err(Error::new(out.display(), "another file than the model's own", "the same"));
    }
    let (mut metadata, mut jobs, mut warnings) = match tensors.gguf() {
        Some(_) => of_gguf(tensors)?,
        None => of_folder(tensors)?,
    };
    for (part, _) in &types.roles {
        if !jobs.iter().any(|job| job.spec.name.contains(part.as_str())) {
            let known = jobs.iter().find(|job| job.spec.name.starts_with("blk."));
            let known = known.map_or("token_embd.weight", |job| job.spec.name.as_str());
            let error = Error::new(format!("role {part}"), "a part of a tensor's name", "none");
            return Err(error.hint(format!("names are like {known}")));
        }
    }
    let before = jobs.iter().map(|job| stored(job, tensors)).sum::<Result<u64>>()?;
    for job in &mut jobs {
        let Err(asked) = assign(job, types, &metadata, tensors)? else { continue };
        let TensorSpec { name, dtype, .. } = &job.spec;
        warnings.push(format!("{name}: its rows are no whole blocks of {asked}: {dtype}"));
    }
    if warnings.len() > 4 {
        let more = warnings.len() - 3;
        warnings.truncate(3);
        warnings.push(format!("and {more} more tensors"));
    }
    let mut set = |key: &str, value: MetadataValue| {
        metadata.retain(|(known, _)| known != key);
        metadata.push((key.to_owned(), value));
    };
    if let Some(mix) = types.whole {
        set("general.file_type", MetadataValue::U32(mix.file_type));
    }
    set("general.quantization_version", MetadataValue::U32(2));
    if let Some((file, importance)) = &types.importance {
        warnings.extend(check_importance(&jobs, file, importance)?);
        // As llama.cpp's llama-quantize states it.
        set("quantize.imatrix.file", MetadataValue::String(file.clone()));
        set("quantize.imatrix.dataset", MetadataValue::String(importance.texts.join(", ")));
        let entries = u32::try_from(importance.tensors.len()).unwrap_or(u32::MAX);
        set("quantize.imatrix.entries_count", MetadataValue::U32(entries));
        set("quantize.imatrix.chunks_count", MetadataValue::U32(importance.chunks));
    }
    let specs: Vec<TensorSpec> = jobs.iter().map(|job| job.spec.clone()).collect();
    let mut writer = Writer::create(out, &metadata, &specs)?;
    let total: u64 = jobs.iter().map(elements).sum();
    let mut done = 0;
    let threads = threads(types.threads);
    let mut checked = tensors.gguf().is_some();
    for job in &jobs {
        // What is made of the configuration comes first; then the file says all that it says of it.
        if !checked && matches!(job.from, From::Source(_)) {
            models::check_export(tensors, &Tensors::open(writer.outline()?)?)?;
            checked = true;
        }
        let mut told = |more: u64| {
            progress(Written { tensor: &job.spec.name, done: done + more, total });
            match cancel.is_cancelled() {
                true => Err(Error::new(out.display(), "a whole file", "an interruption")),
                false => Ok(()),
            }
        };
        let importance = types.importance.as_ref().map(|(_, importance)| importance);
        write(job, tensors, importance, threads, &mut writer, &mut told)?;
        done += elements(job);
        // What was beyond a file's end would have been read as zeros.
        tensors.whole()?;
    }
    writer.finish()?;
    let types = by_type(jobs.iter().map(|job| (job.spec.dtype.into(), elements(job))));
    let after = jobs.iter().filter_map(|j| j.spec.dtype.bytes_for(elements(j))).sum();
    Ok(ConvertSummary { bytes: [before, after], types, warnings })
}

/// Tensors and elements by type, most elements first.
fn by_type(tensors: impl Iterator<Item = (Encoding, u64)>) -> Vec<(Encoding, usize, u64)> {
    let mut by_type: HashMap<Encoding, (usize, u64)> = HashMap::new();
    for (encoding, elements) in tensors {
        let entry = by_type.entry(encoding).or_default();
        *entry = (entry.0 + 1, entry.1 + elements);
    }
    let mut all: Vec<_> = by_type.into_iter().map(|(kind, (n, all))| (kind, n, all)).collect();
    all.sort_by_key(|(kind, _, all)| (std::cmp::Reverse(*all), kind.to_string()));
    all
}

/// The number of threads asked for, or with 0 as many as the machine has.
fn threads(asked: usize) -> usize {
    match asked {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    }
}

fn elements(job: &Job) -> u64 {
    job.spec.shape.iter().map(|dim| *dim as u64).product()
}

fn stored(job: &Job, tensors: &Tensors) -> Result<u64> {
    match &job.from {
        From::Source(source) => Ok(source.describe(tensors)?.stored),
        From::Values(values) => Ok(4 * values.len() as u64),
    }
}

type Read = (Vec<(String, MetadataValue)>, Vec<Job>, Vec<String>);

/// A GGUF file's own metadata and tensors.
fn of_gguf(tensors: &Tensors) -> Result<Read> {
    let place = tensors.path().display().to_string();
    let gguf = tensors.gguf().ok_or_else(|| Error::new(place, "a GGUF file", "another"))?;
    // One file is written, whatever was split.
    let kept = gguf.metadata().iter().filter(|(key, _)| !key.starts_with("split."));
    let metadata = kept.map(|(key, value)| (key.to_owned(), value.clone())).collect();
    let job = |tensor: formats::TensorView<'_>| Job {
        spec: TensorSpec {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
        },
        from: From::Source(Source::Tensor(tensor.name.to_owned())),
    };
    Ok((metadata, tensors.iter().map(job).collect(), Vec::new()))
}

/// A folder in the terms of GGUF.
fn of_folder(tensors: &Tensors) -> Result<Read> {
    let Export { mut metadata, weights, warnings } = models::export(tensors)?;
    let path = tensors.path();
    let absolute = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if let Some(name) = absolute.file_name() {
        let name = MetadataValue::String(name.to_string_lossy().into_owned());
        metadata.insert(1, ("general.name".to_owned(), name));
    }
    let embedding = weights.iter().find(|weight| weight.name == "token_embd.weight");
    let rows = embedding.and_then(|weight| weight.shape.first().copied()).unwrap_or(0);
    let vocabulary = tokens::export(path, rows)?;
    if vocabulary.is_empty() {
        // llama.cpp loads no file that says nothing of one.
        let none = MetadataValue::String("no_vocab".to_owned());
        metadata.push(("tokenizer.ggml.model".to_owned(), none));
    }
    metadata.extend(vocabulary);
    let job = |Exported { name, shape, from }: Exported| Job {
        spec: TensorSpec { name, dtype: DType::F32, shape },
        from,
    };
    Ok((metadata, weights.into_iter().map(job).collect(), warnings))
}

/// Gives a tensor its type; `Ok(Err(asked))` where its rows are no whole blocks of what was asked
/// for, and it gets another.
fn assign(
    job: &mut Job,
    types: &Types,
    metadata: &[(String, MetadataValue)],
    tensors: &Tensors,
) -> Result<std::result::Result<(), DType>> {
    let now = match &job.from {
        From::Source(source) => source.describe(tensors)?.encoding,
        From::Values(_) => DType::F32.into(),
    };
    let TensorSpec { name, shape, .. } = &job.spec;
    // A weight that is multiplied keeps its stored type.
    let stored = |source: &Source| Some(tensors.get(source.tensors().first()?)?.dtype.into());
    let now = match &job.from {
        From::Source(source) if source.is_multiplied() => stored(source).unwrap_or(now),
        _ => now,
    };
    let kept = match now {
        Encoding::Stored(dtype) if dtype.ggml_id().is_some() => dtype,
        _ => DType::BF16,
    };
    if !now.is_float() {
        job.spec.dtype = kept;
        return Ok(Ok(()));
    }
    let role = types.roles.iter().rfind(|(part, _)| name.contains(part.as_str()));
    // Norms, biases, factors and taps are small, and everything depends on them. llama.cpp takes no
    // taps but of F32.
    let taps = ["ssm_conv1d.weight", "shortconv.conv.weight"].iter().any(|end| name.ends_with(end));
    let is_matrix =
        shape.len() > 1 && name.ends_with(".weight") && !name.contains("_norm") && !taps;
    let asked = match (role, types.whole) {
        (Some((_, dtype)), _) => *dtype,
        _ if !is_matrix => DType::F32,
        (None, None) => kept,
        (None, Some(mix)) => by_mix(mix, name, metadata),
    };
    let columns = shape.last().copied().unwrap_or(1);
    job.spec.dtype = fitting(asked, columns);
    Ok(if job.spec.dtype == asked { Ok(()) } else { Err(asked) })
}

/// The type that a mix gives the matrix of that name.
fn by_mix(mix: QuantMix, name: &str, metadata: &[(String, MetadataValue)]) -> DType {
    let size = |key: &str| {
        let found = metadata.iter().find(|(known, _)| known.ends_with(key));
        match found.map(|(_, value)| value) {
            Some(MetadataValue::U32(n)) => *n as usize,
            _ => 0,
        }
    };
    if name == "output.weight" || name == "token_embd.weight" && mix.base.is_block() {
        // The embedding may be the head too, and costs nothing to read.
        return mix.head;
    }
    let layers = size(".block_count");
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
    let (Some(layer), Some(better)) = (layer, mix.better) else { return mix.base };
    let layer: usize = layer;
    // The first and the last eighth, and every third between them.
    let eighth = layers / 8;
    let needs = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
    let gains = name.contains("attn_v.") || name.contains("ffn_down.");
    if gains && needs { better } else { mix.base }
}

/// The type asked for, or the nearest one whose blocks divide rows of `columns` columns.
fn fitting(asked: DType, columns: usize) -> DType {
    let fits = |dtype: DType| columns.is_multiple_of(dtype.block_elements());
    let smaller = match asked {
        DType::Q2K | DType::Q3K | DType::Iq4Xs | DType::Tq1_0 | DType::Tq2_0 => DType::Iq4Nl,
        DType::Q4K => DType::Q5_0,
        DType::Q5K => DType::Q5_1,
        DType::Q6K => DType::Q8_0,
        _ => DType::F16,
    };
    [asked, smaller].into_iter().find(|dtype| fits(*dtype)).unwrap_or(DType::F16)
}

/// How much the columns of a tensor's matrices matter, one matrix behind the other, if anything is
/// known of them; the tensor's own name and shape where that is of other sizes.
fn columns_of(job: &Job, importance: &Importance) -> Result<Option<Vec<f32>>> {
    let TensorSpec { name, shape, dtype } = &job.spec;
    let known = importance.tensors.get(name).filter(|_| dtype.is_block());
    let Some(inputs) = known else { return Ok(None) };
    let [outer @ .., _, columns] = &shape[..] else { return Ok(None) };
    let found = inputs.columns(outer.iter().product(), *columns).ok_or_else(|| {
        let found = format!("{} numbers", inputs.squares.len());
        let expected = format!("importance for {}", formats::shape(shape));
        Error::new(name, expected, found).hint("take the importance matrix of this model")
    })?;
    Ok(Some(found))
}

/// Checks that an importance matrix is this model's; a warning where it knows nothing of some
/// matrices of blocks.
fn check_importance(jobs: &[Job], file: &str, importance: &Importance) -> Result<Option<String>> {
    if !jobs.iter().any(|job| job.spec.dtype.is_block()) {
        let error = Error::new(file, "a type whose errors it can weigh", "floats alone");
        return Err(error.hint("q4_k_m, for example"));
    }
    let (mut used, mut unknown) = (0, Vec::new());
    for job in jobs.iter().filter(|job| job.spec.dtype.is_block()) {
        match columns_of(job, importance)? {
            Some(_) => used += 1,
            None if job.spec.name.starts_with("blk.") => unknown.push(job.spec.name.as_str()),
            None => {}
        }
    }
    if used == 0 && !unknown.is_empty() {
        let known = importance.tensors.keys().next().map_or("nothing", String::as_str);
        let expected = format!("importance of {}, or of others like it", unknown[0]);
        return Err(Error::new(file, expected, format!("that of {known}")));
    }
    let count = unknown.len();
    let said = |name: &&str| format!("{file} says nothing of {count} matrices, {name} the first");
    Ok(unknown.first().map(said))
}

/// Elements that a thread takes at a time: small, so that all threads have some to the end.
const PORTION: usize = 1 << 16;

/// Portions that a thread has room for.
const ROOM: usize = 16;

/// The error of a tensor with an element that is no number.
fn damaged(tensors: &Tensors, name: &str, found: NotFinite) -> Error {
    let place = format!("{}: {name}: element {}", tensors.path().display(), found.element);
    Error::new(place, "numbers", found).hint(Hint::text("the model is damaged"))
}

/// Writes one tensor; `told` hears how many of its elements are done.
fn write(
    job: &Job,
    tensors: &Tensors,
    importance: Option<&Importance>,
    threads: usize,
    writer: &mut Writer,
    told: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    let (source, dtype) = match &job.from {
        From::Values(values) => {
            let mut bytes =
                vec![0; job.spec.dtype.bytes_for(values.len() as u64).unwrap_or(0) as usize];
            job.spec.dtype.encode(values, &mut bytes)?;
            return writer.write(&bytes);
        }
        From::Source(source) => (source, job.spec.dtype),
    };
    let named = |e: Error| Error { place: format!("{}: {}", job.spec.name, e.place), ..e };
    let read = source.read(tensors).map_err(named)?;
    // Also of what stays as it is: it would not be loaded.
    if let Some(found) = read.encoding.not_finite(&read.bytes) {
        return Err(damaged(tensors, &job.spec.name, found));
    }
    if read.encoding == Encoding::Stored(dtype) {
        for bytes in read.bytes.chunks(PORTION) {
            writer.write(bytes)?;
            told(0)?;
        }
        source.release(tensors);
        return Ok(());
    }
    let importance = importance.map(|known| columns_of(job, known)).transpose()?.flatten();
    let columns = job.spec.shape.last().copied().unwrap_or(1);
    let matrix = columns * job.spec.shape.iter().rev().nth(1).copied().unwrap_or(1);
    // Elements of columns by their places in the tensor.
    let importance_at = |start: usize, count: usize| -> Option<Vec<f32>> {
        let importance = importance.as_ref()?;
        let of = |at: usize| importance[at / matrix * columns + at % columns];
        Some((start..start + count).map(of).collect())
    };
    let encode =
        |start: usize, values: &[f32], bytes: &mut [u8]| match importance_at(start, values.len()) {
            Some(importance) => dtype.encode_by(values, &importance, bytes),
            None => dtype.encode(values, bytes),
        };
    let mut done = 0;
    let mut take = |elements: usize, bytes: &[u8]| {
        writer.write(bytes)?;
        done += elements as u64;
        told(done)
    };
    portions(&read, dtype.into(), threads, &encode, &mut take).map_err(named)?;
    source.release(tensors);
    Ok(())
}

/// Encodes a portion, whose first element is of this number.
type Encode<'a> = dyn Fn(usize, &[f32], &mut [u8]) -> Result<()> + Sync + 'a;

/// Encodes a weight in portions, several at a time: `encode(start, values, bytes)` for each, whose
/// first element is number `start`; `take(elements, bytes)` is given them in order.
fn portions(
    read: &Encoded<'_>,
    to: Encoding,
    threads: usize,
    encode: &Encode<'_>,
    take: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    // Portions are whole blocks of both types.
    let block = read.encoding.block_elements().max(to.block_elements());
    let portion = PORTION.next_multiple_of(block);
    let size = |encoding: Encoding, elements| encoding.bytes_for(elements).unwrap_or(0).max(1);
    let (step, encoded_step) = (size(read.encoding, portion), size(to, portion));
    let mut done = 0;
    for round in read.bytes.chunks(step * threads * ROOM) {
        let elements = round.len() / read.encoding.block_bytes() * read.encoding.block_elements();
        let mut encoded = vec![0; to.bytes_for(elements).unwrap_or(0)];
        let pieces = round.chunks(step).zip(encoded.chunks_mut(encoded_step)).enumerate();
        let pieces = Mutex::new(pieces);
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || -> Result<()> {
            let mut values = vec![0.0; portion];
            while let Some((i, (from, to))) = next() {
                let blocks = from.len() / read.encoding.block_bytes();
                let values = &mut values[..blocks * read.encoding.block_elements()];
                read.encoding.decode(from, values)?;
                encode(done + i * portion, values, to)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let lost = || Error::new("quantise", "a portion", "a thread that ended early");
            all.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(lost())))
        })?;
        take(elements, &encoded)?;
        done += elements;
    }
    Ok(())
}
