//! All weights of a model as parameters, and back to the files that they came from.

use crate::Parameter;
use formats::{DType, Error, ErrorKind, Result, Source, Tensor, Tensors, safetensors};
use half::{bf16, f16};
use program::{Program, WeightId};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Where a weight's elements are in a tensor of the files: that of a row and a column is number
/// `start + row * strides[0] + column * strides[1]`.
struct Place<'a> {
    tensor: &'a str,
    start: usize,
    strides: [usize; 2],
}

/// The place of a weight whose recipe can be undone; none for others.
fn place<'a>(source: &'a Source, tensors: &Tensors) -> Option<Place<'a>> {
    match source {
        Source::Tensor(tensor) => {
            let width = tensors.get(tensor)?.shape.iter().skip(1).product();
            Some(Place { tensor, start: 0, strides: [width, 1] })
        }
        Source::Rows { of, start, stride: 1, .. } => {
            let of = place(of, tensors)?;
            Some(Place { start: of.start + start * of.strides[0], ..of })
        }
        Source::Transpose(of) => match &**of {
            Source::Tensor(tensor) if tensors.get(tensor)?.shape.len() == 2 => {
                let of = place(of, tensors)?;
                let [row, column] = of.strides;
                Some(Place { strides: [column, row], ..of })
            }
            _ => None,
        },
        _ => None,
    }
}

/// The number that a recipe adds to the numbers of the files, such as the 1 that Gemma's norms
/// leave out.
pub(crate) fn added(source: &Source) -> f32 {
    match source {
        Source::Plus(of, plus) => added(of) + plus,
        _ => 0.0,
    }
}

/// The recipe of the files' own numbers.
fn bare(source: &Source) -> &Source {
    match source {
        Source::Plus(of, _) => bare(of),
        source => source,
    }
}

/// Every weight that a Program reads, in order, as the files have it.
///
/// # Errors
/// A GGUF file, quantised weights, or weights that are made of several tensors, by name.
pub(crate) fn parameters(
    program: &Program,
    tensors: &Tensors,
) -> Result<(Vec<WeightId>, Vec<Parameter>)> {
    if tensors.folder().is_none() {
        let found = tensors.path().display().to_string();
        return Err(Error::new("full tuning", "a model folder", found)
            .of(ErrorKind::Unsupported)
            .hint("a GGUF file can be tuned with LoRA"));
    }
    let mut used: Vec<WeightId> = program.nodes.iter().flat_map(|n| n.weights.clone()).collect();
    used.sort_unstable();
    used.dedup();
    let mut all = Vec::new();
    for id in &used {
        let weight = &program.weights[id.0];
        let encoded = bare(&weight.source).read(tensors).map_err(|e| weight.named(e))?;
        if encoded.encoding.is_quantised() {
            let expected = "weights of 16 or 32 bits, as they are trained";
            return Err(Error::new(&weight.name, expected, encoded.encoding)
                .of(ErrorKind::Unsupported)
                .hint("quantised models can be tuned with LoRA"));
        }
        if place(bare(&weight.source), tensors).is_none() {
            let expected = "a matrix or a vector that the files have as it is";
            return Err(Error::new(&weight.name, expected, "one that is made of theirs")
                .of(ErrorKind::Unsupported)
                .hint("such models can be tuned with LoRA"));
        }
        let (name, shape) = (weight.name.clone(), weight.shape.clone());
        let decays = shape.len() > 1;
        all.push(Parameter { name, shape, values: encoded.to_f32()?, decays });
    }
    Ok((used, all))
}

/// The model's folder with these parameters in the place of its weights: one file of weights, each
/// in the type that it had, the configuration and the tokenizer.
///
/// # Errors
/// A file that cannot be read, or a temporary one that cannot be written.
pub(crate) fn export(
    program: &Program,
    tensors: &Tensors,
    trained: &[WeightId],
    parameters: &[Parameter],
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut changed: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
    for (id, parameter) in trained.iter().zip(parameters) {
        let Some(place) = place(bare(&program.weights[id.0].source), tensors) else { continue };
        let Some(tensor) = tensors.get(place.tensor) else { continue };
        let values = match changed.entry(place.tensor) {
            Entry::Occupied(before) => before.into_mut(),
            Entry::Vacant(none) => none.insert(tensor.to_f32()?),
        };
        let width = parameter.shape.iter().skip(1).product::<usize>().max(1);
        for (at, value) in parameter.values.iter().enumerate() {
            let (row, column) = (at / width, at % width);
            values[place.start + row * place.strides[0] + column * place.strides[1]] = *value;
        }
    }
    let stored: Vec<(Tensor<'_>, Option<Vec<u8>>)> = tensors
        .iter()
        .map(|tensor| (tensor, changed.get(tensor.name).map(|v| encoded(v, tensor.dtype))))
        .collect();
    let all = stored.iter().map(|(tensor, own)| match own {
        Some(bytes) => Tensor { bytes, ..*tensor },
        None => *tensor,
    });
    let aside = tempfile::tempdir().map_err(|e| Error::io("a temporary folder", e))?;
    let file = aside.path().join("model.safetensors");
    safetensors::write(&file, &[("format", "pt")], all)?;
    let read = |path: std::path::PathBuf| -> Result<(String, Vec<u8>)> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, std::fs::read(&path).map_err(|e| Error::io(path.display(), e))?))
    };
    let mut files = vec![read(file)?];
    if let Some(folder) = tensors.folder() {
        let settings = ["config.json", "params.json", "generation_config.json"];
        let settings = settings.iter().filter_map(|name| folder.file(name));
        for path in settings.chain(folder.tokenizer_files()) {
            files.push(read(path)?);
        }
    }
    Ok(files)
}

/// Numbers in a type of files, rounded to nearest.
fn encoded(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}
