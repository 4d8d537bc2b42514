//! Folders as MLX has them: matrices as affine groups or four-bit floats, all else as the folder
//! had it.
//!
//! ```text
//! NAME.weight   codes, u32 [rows, columns * bits / 32]: a stream of bits, the first code lowest
//! NAME.scales   [rows, columns / group]: bf16 or f16; of four-bit floats the exponents of powers of two, in bytes
//! NAME.biases   [rows, columns / group]: what a code of zero stands for; affine groups alone
//! config.json   "quantization": {"group_size": 64, "bits": 4}
//! ```
//! Tensors keep the names that the folder has. Which of them are matrices follows from the Program:
//! those whose rows its products multiply with, but for routers, whose few numbers decide much.

use std::collections::HashSet;
use std::path::Path;

use formats::gguf::TensorSpec;
use formats::safetensors::Writer;
use formats::{
    AsideFolder, DType, Encoding, Error, ErrorKind, Groups, Result, Source, TensorView, Tensors,
};
use serde_json::{Value, json};

use super::{ConvertSummary, Written, by_type, damaged, portions, threads};
use crate::CancelToken;

/// The quantisation of a folder's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlxForm {
    /// Affine groups.
    Affine {
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: usize,
        /// Elements that share a scale: 32, 64 or 128.
        group: usize,
    },
    /// Four-bit floats in groups of 32 that share a power of two.
    Mxfp4,
}

impl MlxForm {
    /// The form of a name such as `mlx4` or `mlx-mxfp4`, with `group` elements to a group; `None`
    /// for a name that is not MLX's.
    ///
    /// # Errors
    /// A number of bits, or of elements, that MLX does not support.
    pub fn named(name: &str, group: Option<usize>) -> Result<Option<MlxForm>> {
        let name = name.to_ascii_lowercase();
        let Some(kind) = name.strip_prefix("mlx") else { return Ok(None) };
        if kind == "-mxfp4" {
            let other = group.filter(|group| *group != 32);
            return match other {
                None => Ok(Some(MlxForm::Mxfp4)),
                Some(other) => Err(Error::new("group size", "32 for mlx-mxfp4", other)),
            };
        }
        let group = group.unwrap_or(64);
        let bits = kind.parse::<usize>().ok().filter(|bits| [2, 3, 4, 5, 6, 8].contains(bits));
        let bits = bits.ok_or_else(|| {
            Error::new("type", "one of mlx2 mlx3 mlx4 mlx5 mlx6 mlx8 mlx-mxfp4", &name)
        })?;
        if ![32, 64, 128].contains(&group) {
            return Err(Error::new("group size", "32, 64 or 128", group));
        }
        Ok(Some(MlxForm::Affine { bits, group }))
    }

    /// Elements that share a scale.
    fn group(self) -> usize {
        match self {
            MlxForm::Affine { group, .. } => group,
            MlxForm::Mxfp4 => 32,
        }
    }

    fn bits(self) -> usize {
        match self {
            MlxForm::Affine { bits, .. } => bits,
            MlxForm::Mxfp4 => 4,
        }
    }

    /// The encoding of a matrix whose numbers have type `dtype`: scales keep the type, or are bf16
    /// if it is wider.
    fn encoding(self, dtype: DType) -> Option<Encoding> {
        let scale = if dtype == DType::F16 { DType::F16 } else { DType::BF16 };
        match self {
            MlxForm::Affine { bits, group } => {
                Groups::new(bits, group, scale).map(Encoding::Groups)
            }
            MlxForm::Mxfp4 => Some(DType::Mxfp4.into()),
        }
    }

    /// As `config.json` states it.
    fn stated(self) -> Value {
        match self {
            MlxForm::Affine { bits, group } => json!({ "group_size": group, "bits": bits }),
            MlxForm::Mxfp4 => json!({ "group_size": 32, "bits": 4, "mode": "mxfp4" }),
        }
    }
}

/// Bytes of a file of weights, after which the next begins; a tensor is never cut.
const SHARD: u64 = 5 << 30;

/// A tensor of the folder, and what it becomes.
struct Job<'a> {
    tensor: TensorView<'a>,
    /// The parts that are stored, in order.
    specs: Vec<TensorSpec>,
    /// Its encoding; `None` if it is stored as it is.
    encoding: Option<Encoding>,
}

impl Job<'_> {
    fn bytes(&self) -> u64 {
        let bytes = |spec: &TensorSpec| {
            spec.dtype.bytes_for(spec.shape.iter().map(|dim| *dim as u64).product())
        };
        self.specs.iter().filter_map(bytes).sum()
    }
}

/// Writes the folder behind `tensors` to the folder `out`, which is there only once it is whole.
/// The largest tensor bounds the memory in use, and the same input gives the same bytes.
///
/// # Errors
/// A GGUF file, a folder that does not load or is quantised already, weights that are no numbers, a
/// folder that is there; I/O; a cancelled conversion.
pub fn write(
    tensors: &Tensors,
    out: &Path,
    form: MlxForm,
    asked: usize,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(Written<'_>),
) -> Result<ConvertSummary> {
    let folder = tensors.folder().ok_or_else(|| {
        let error = Error::new(tensors.path().display(), "a model folder", "a GGUF file");
        error.of(ErrorKind::Unsupported).hint("MLX's folders are made of Hugging Face's")
    })?;
    if folder.is_mistrals() {
        let place = folder.path().display();
        let error = Error::new(place, "weights by Hugging Face's names", "Mistral's own names");
        return Err(error
            .of(ErrorKind::Unsupported)
            .hint("take Hugging Face's files of the model"));
    }
    let quantised = ["quantization", "quantization_config"].map(|key| folder.config().get(key));
    if quantised.iter().flatten().any(|settings| !settings.is_null()) {
        let place = folder.path().join("config.json").display().to_string();
        let error = Error::new(place, "weights that are numbers", "weights that are quantised");
        return Err(error.of(ErrorKind::Unsupported).hint("take the model that they were made of"));
    }
    let (matrices, mut warnings) = matrices(tensors)?;
    let jobs: Vec<Job<'_>> = tensors.iter().map(|tensor| job(tensor, form, &matrices)).collect();
    let narrow = |job: &&Job<'_>| job.encoding.is_none() && matrices.contains(job.tensor.name);
    if let Some(first) = jobs.iter().find(narrow) {
        let (name, group) = (first.tensor.name, form.group());
        let count = jobs.iter().filter(narrow).count();
        let said = format!("its rows are no whole groups of {group}, and stay as they are");
        warnings.push(format!("{name}: {said} ({count} tensors in all)"));
    }
    let shards = shards(&jobs);
    let aside = AsideFolder::create(out)?;
    let total: u64 = jobs.iter().map(|job| job.tensor.elements() as u64).sum();
    let mut done = 0;
    let mut names = serde_json::Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        let specs: Vec<TensorSpec> = shard.iter().flat_map(|job| job.specs.clone()).collect();
        names.extend(specs.iter().map(|spec| (spec.name.clone(), json!(file))));
        let mut writer = Writer::create(&aside.path().join(&file), &[("format", "mlx")], &specs)?;
        for job in *shard {
            let mut told = |more: usize| {
                let done = done + more as u64;
                progress(Written { tensor: job.tensor.name, done, total });
                match cancel.is_cancelled() {
                    true => Err(Error::new(out.display(), "a whole folder", "an interruption")),
                    false => Ok(()),
                }
            };
            write_tensor(job, tensors, threads(asked), &mut writer, &mut told)?;
            done += job.tensor.elements() as u64;
            // Bytes beyond the end of a file that shrank meanwhile were read as zeros.
            tensors.whole()?;
        }
        writer.finish()?;
    }
    let text = |value: &Value| -> Result<String> {
        let text = serde_json::to_string_pretty(value);
        text.map_err(|e| Error::new(out.display(), "JSON", e)).map(|text| text + "\n")
    };
    let put = |name: &str, value: &Value| -> Result<()> {
        let path = aside.path().join(name);
        std::fs::write(&path, text(value)?).map_err(|e| Error::io(path.display(), e))
    };
    aside.copy_all_but_weights(folder.path())?;
    let mut config = folder.config().clone();
    config["quantization"] = form.stated();
    // Transformers' name for it, which mlx-lm writes too.
    config["quantization_config"] = form.stated();
    put("config.json", &config)?;
    let after: u64 = jobs.iter().map(Job::bytes).sum();
    let index = json!({ "metadata": { "total_size": after }, "weight_map": names });
    put("model.safetensors.index.json", &index)?;
    aside.finish()?;
    let types = by_type(jobs.iter().map(|job| {
        let kept = job.tensor.dtype.into();
        (job.encoding.unwrap_or(kept), job.tensor.elements() as u64)
    }));
    let before = jobs.iter().map(|job| job.tensor.bytes.len() as u64).sum();
    Ok(ConvertSummary { bytes: [before, after], types, warnings })
}

/// The tensors whose rows products multiply with, or that hold rows of embeddings; and a warning
/// where some would have to be turned.
fn matrices(tensors: &Tensors) -> Result<(HashSet<String>, Vec<String>)> {
    let program = models::load(tensors, &models::ReadOptions::default())?.record(false)?;
    let (mut found, mut turned) = (HashSet::new(), None);
    for weight in program.weights.iter().filter(|weight| weight.shape.len() == 2) {
        if weight.name.ends_with(".router") {
            continue;
        }
        match is_turned(&weight.source) {
            true => turned = turned.or(Some(weight.name.clone())),
            false => found.extend(weight.source.tensors().into_iter().map(str::to_owned)),
        }
    }
    let said = |name: String| format!("{name}: it lies on its side, as others may: left as it is");
    Ok((found, turned.map(said).into_iter().collect()))
}

/// Whether a recipe transposes matrices, so that a row of the tensor is not a row of the weight.
fn is_turned(source: &Source) -> bool {
    match source {
        Source::Transpose(_) | Source::Columns { .. } => true,
        Source::Rows { of, .. } | Source::Plus(of, _) | Source::Reshape(of, _) => is_turned(of),
        Source::Times(of, _) => is_turned(of),
        Source::Permute(of, _) => is_turned(of),
        Source::Concat(all) | Source::Stack(all) => all.iter().any(is_turned),
        _ => false,
    }
}

fn job<'a>(tensor: TensorView<'a>, form: MlxForm, matrices: &HashSet<String>) -> Job<'a> {
    let spec = |name: &str, dtype: DType, shape: &[usize]| TensorSpec {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
    };
    let stem = tensor.name.strip_suffix(".weight");
    let whole = |rows: usize, columns: usize| {
        rows > 0 && columns > 0 && columns.is_multiple_of(form.group())
    };
    let (Some(stem), &[rows, columns]) = (stem, tensor.shape) else {
        let specs = vec![spec(tensor.name, tensor.dtype, tensor.shape)];
        return Job { tensor, specs, encoding: None };
    };
    let fits = matrices.contains(tensor.name) && tensor.dtype.is_float() && whole(rows, columns);
    let Some(encoding) = form.encoding(tensor.dtype).filter(|_| fits) else {
        let specs = vec![spec(tensor.name, tensor.dtype, tensor.shape)];
        return Job { tensor, specs, encoding: None };
    };
    let (words, groups) = (columns * form.bits() / 32, columns / form.group());
    let part = |name: &str, dtype: DType| spec(&format!("{stem}.{name}"), dtype, &[rows, groups]);
    let mut specs = vec![spec(tensor.name, DType::U32, &[rows, words])];
    match encoding {
        Encoding::Groups(Groups { scale, .. }) => {
            specs.extend([part("scales", scale), part("biases", scale)]);
        }
        Encoding::Stored(_) => specs.push(part("scales", DType::U8)),
    }
    Job { tensor, specs, encoding: Some(encoding) }
}

/// Tensors file by file.
fn shards<'a, 'b>(jobs: &'b [Job<'a>]) -> Vec<&'b [Job<'a>]> {
    let (mut all, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (i, job) in jobs.iter().enumerate() {
        if i > start && bytes + job.bytes() > SHARD {
            all.push(&jobs[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += job.bytes();
    }
    all.push(&jobs[start..]);
    all
}

/// Writes the parts of one tensor.
fn write_tensor(
    job: &Job<'_>,
    tensors: &Tensors,
    threads: usize,
    writer: &mut Writer,
    told: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<()> {
    let tensor = &job.tensor;
    let damaged = |found| damaged(tensors, tensor.name, found);
    let Some(encoding) = job.encoding else {
        if let Some(found) = tensor.dtype.not_finite(tensor.bytes) {
            return Err(damaged(found));
        }
        writer.write(tensor.bytes)?;
        tensors.release(tensor);
        return told(tensor.elements());
    };
    let source = Source::Tensor(tensor.name.to_owned());
    let read = source.read(tensors)?;
    if let Some(found) = read.encoding.not_finite(&read.bytes) {
        return Err(damaged(found));
    }
    let [mut codes, mut scales, mut offsets] = [const { Vec::new() }; 3];
    let mut done = 0;
    let encode = |_: usize, values: &[f32], bytes: &mut [u8]| encoding.encode(values, bytes);
    let mut take = |elements: usize, bytes: &[u8]| {
        for block in bytes.chunks_exact(encoding.block_bytes()) {
            match encoding {
                Encoding::Groups(groups) => {
                    let (own, halves) = block.split_at(groups.code_bytes());
                    codes.extend_from_slice(own);
                    scales.extend_from_slice(&halves[..2]);
                    offsets.extend_from_slice(&halves[2..]);
                }
                Encoding::Stored(_) => {
                    // A block's halves lie in the low and the high nibbles; MLX has neighbours in a
                    // byte.
                    scales.push(block[0]);
                    let code = |i: usize| block[1 + i % 16] >> (i / 16 * 4) & 15;
                    codes.extend((0..16).map(|i| code(2 * i) | code(2 * i + 1) << 4));
                }
            }
        }
        done += elements;
        told(done)
    };
    portions(&read, encoding, threads, &encode, &mut take)?;
    for part in [codes, scales, offsets] {
        writer.write(&part)?;
    }
    source.release(tensors);
    Ok(())
}
