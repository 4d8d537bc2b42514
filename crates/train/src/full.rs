//! All weights of a model as parameters, and back to the files that they came from.

use crate::Parameter;
use formats::{
    DType, ElementRun, Error, ErrorKind, Result, Source, TensorView, Tensors, safetensors,
};
use half::{bf16, f16};
use program::{Program, WeightId};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// How a weight is made of the numbers of the files, which are trained.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Made {
    /// It is they.
    AsStored,
    /// They plus a number, such as the 1 that Gemma's norms leave out.
    Plus(f32),
    /// Minus their exponentials: rates whose logarithms are stored.
    NegExp,
    /// Their exponentials.
    Exp,
    /// Each times a number of its own, such as those of Falcon-H1's channels, or all times one.
    Times(Vec<f32>),
    /// Rows of so many, each divided by its length.
    UnitRows(usize),
}

/// A weight, and how it is made of the numbers of a parameter.
pub(crate) struct MadeWeight {
    pub(crate) weight: WeightId,
    pub(crate) made: Made,
    pub(crate) places: Option<Places>,
}

/// For each element of a weight that has some numbers of the files more than once, the number of
/// the parameter that it is made of: rates of heads for each element of their keys, gates of heads
/// for each element of these.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Places(Vec<u32>);

impl Places {
    /// The places of runs of elements, and how many numbers they are of: in the order in which
    /// these come first.
    fn of(runs: &[ElementRun<'_>], tensors: &Tensors) -> (Places, usize) {
        let mut known: BTreeMap<&str, Vec<Option<u32>>> = BTreeMap::new();
        let (mut places, mut count) = (Vec::new(), 0);
        for run in runs {
            for i in 0..run.count {
                let mut new = || {
                    count += 1;
                    count - 1
                };
                let Some(name) = run.tensor else {
                    places.push(new());
                    continue;
                };
                let elements = || tensors.get(name).map_or(0, |t| t.shape.iter().product());
                let of = known.entry(name).or_insert_with(|| vec![None; elements()]);
                places.push(*of[run.start + i * run.step].get_or_insert_with(new));
            }
        }
        (Places(places), count as usize)
    }

    /// The first element of each number.
    fn first(&self, values: &[f32]) -> Vec<f32> {
        let mut found = Vec::new();
        for (place, value) in self.0.iter().zip(values) {
            if *place as usize == found.len() {
                found.push(*value);
            }
        }
        found
    }

    /// The number that each element is made of.
    pub(crate) fn spread(&self, values: &[f32]) -> Vec<f32> {
        self.0.iter().map(|place| values[*place as usize]).collect()
    }

    /// The gradients of `count` numbers, from those of the elements that are made of them.
    pub(crate) fn added(&self, gradients: &[f32], count: usize) -> Vec<f32> {
        let mut sums = vec![0f64; count];
        for (place, gradient) in self.0.iter().zip(gradients) {
            sums[*place as usize] += f64::from(*gradient);
        }
        sums.into_iter().map(|sum| sum as f32).collect()
    }
}

impl Made {
    /// The weight's elements, of the files' numbers.
    pub(crate) fn apply(&self, values: &mut [f32]) {
        match self {
            Made::AsStored => {}
            Made::Plus(plus) => values.iter_mut().for_each(|value| *value += plus),
            Made::NegExp => values.iter_mut().for_each(|value| *value = -value.exp()),
            Made::Exp => values.iter_mut().for_each(|value| *value = value.exp()),
            Made::Times(by) => {
                values.iter_mut().zip(by.iter().cycle()).for_each(|(value, by)| *value *= by);
            }
            Made::UnitRows(columns) => {
                for row in values.chunks_exact_mut(*columns) {
                    let length = length(row);
                    row.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
                }
            }
        }
    }

    /// The gradients of the numbers `values`, from those of the weight's elements, in their place.
    pub(crate) fn back(&self, values: &[f32], gradients: &mut [f32]) {
        let each = gradients.iter_mut().zip(values);
        match self {
            Made::AsStored | Made::Plus(_) => {}
            Made::NegExp => each.for_each(|(slope, value)| *slope *= -value.exp()),
            Made::Exp => each.for_each(|(slope, value)| *slope *= value.exp()),
            Made::Times(by) => {
                each.zip(by.iter().cycle()).for_each(|((slope, _), by)| *slope *= by);
            }
            Made::UnitRows(columns) => {
                let rows = gradients.chunks_exact_mut(*columns);
                for (slopes, row) in rows.zip(values.chunks_exact(*columns)) {
                    let length = length(row);
                    let unit = |value: f32| f64::from(value) / length;
                    // What would change the length alone is left out.
                    let terms = slopes.iter().zip(row);
                    let along: f64 = terms.map(|(slope, v)| f64::from(*slope) * unit(*v)).sum();
                    for (slope, value) in slopes.iter_mut().zip(row) {
                        let across = f64::from(*slope) - along * unit(*value);
                        *slope = (across / length) as f32;
                    }
                }
            }
        }
    }
}

/// The length of a row, as [`Source::UnitRows`] has it.
fn length(row: &[f32]) -> f64 {
    row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt().max(1e-12)
}

/// How a recipe makes its weight, and the recipe of the files' own numbers.
///
/// # Errors
/// Tensors that are missing.
fn made<'a>(source: &'a Source, tensors: &Tensors) -> Result<(Made, Cow<'a, Source>)> {
    let found = elementwise(source);
    if found.0 != Made::AsStored {
        return Ok(found);
    }
    Ok(match source {
        Source::UnitRows(of) => {
            let columns = of.describe(tensors)?.shape.iter().skip(1).product();
            (Made::UnitRows(columns), Cow::Borrowed(of.as_ref()))
        }
        source if source.is_multiplied() => {
            let (bare, mut factors) = source.factors(tensors)?;
            if factors.windows(2).all(|pair| pair[0] == pair[1]) {
                factors.truncate(1);
            }
            (Made::Times(factors), Cow::Owned(bare))
        }
        _ => found,
    })
}

/// [`made`] for what is done to each element alike; [`Made::AsStored`] where more is done.
fn elementwise(source: &Source) -> (Made, Cow<'_, Source>) {
    let as_it_is = || (Made::AsStored, Cow::Borrowed(source));
    // A source that only moves numbers is made as the source within it is.
    let moved = |of: &Source, outside: &dyn Fn(Source) -> Source| match elementwise(of) {
        (Made::AsStored, _) => as_it_is(),
        (made, of) => (made, Cow::Owned(outside(of.into_owned()))),
    };
    match source {
        Source::Plus(of, plus) => match elementwise(of) {
            (Made::AsStored, of) => (Made::Plus(*plus), of),
            (Made::Plus(more), of) => (Made::Plus(plus + more), of),
            _ => as_it_is(),
        },
        Source::NegExp(of) => (Made::NegExp, Cow::Borrowed(of.as_ref())),
        Source::Times(of, by) if *by == -1.0 => match elementwise(of) {
            (Made::NegExp, of) => (Made::Exp, of),
            _ => as_it_is(),
        },
        Source::Reshape(of, shape) => moved(of, &|of| Source::Reshape(Box::new(of), shape.clone())),
        Source::Transpose(of) => moved(of, &|of| Source::Transpose(Box::new(of))),
        Source::Stack(all) if all.windows(2).all(|pair| pair[0] == pair[1]) => match all.first() {
            Some(of) => moved(of, &|of| Source::Stack(vec![of; all.len()])),
            None => as_it_is(),
        },
        _ => as_it_is(),
    }
}

/// Every weight of the files that a Program reads and that is `wanted` by its name, in order, as they
/// have it, and how it is made. Zeros beside the files' numbers are among a weight's values, and have
/// no gradient.
///
/// # Errors
/// A GGUF file, quantised weights, or weights that are not elements of the files, by name.
pub(crate) fn parameters(
    program: &Program,
    tensors: &Tensors,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<(Vec<MadeWeight>, Vec<Parameter>)> {
    if tensors.folder().is_none() {
        let found = tensors.path().display().to_string();
        return Err(Error::new("full tuning", "a model folder", found)
            .of(ErrorKind::Unsupported)
            .hint("a GGUF file can be tuned with LoRA"));
    }
    let mut used: Vec<WeightId> = program.nodes.iter().flat_map(|n| n.weights.clone()).collect();
    used.sort_unstable();
    used.dedup();
    let (mut trained, mut all) = (Vec::new(), Vec::new());
    for id in used {
        let weight = &program.weights[id.0];
        if weight.source.tensors().is_empty() || !wanted(&weight.name) {
            continue;
        }
        let (made, source) = made(&weight.source, tensors).map_err(|e| weight.named(e))?;
        let encoded = source.read(tensors).map_err(|e| weight.named(e))?;
        let runs = source.runs(tensors)?;
        let decoded = source.is_decoded() && runs.is_none();
        if encoded.encoding.is_quantised() || decoded || source.is_quantised() {
            let expected = "weights of 16 or 32 bits, as they are trained";
            return Err(Error::new(&weight.name, expected, encoded.encoding)
                .of(ErrorKind::Unsupported)
                .hint("quantised models can be tuned with LoRA"));
        }
        let padded = |runs: &[ElementRun<'_>]| runs.iter().any(|run| run.tensor.is_none());
        let found = match runs {
            // Zeros behind columns of a matrix multiply zeros; a bias is added as it is.
            Some(runs) if weight.shape.len() > 1 || !padded(&runs) => {
                Some(repeats(&runs).then(|| Places::of(&runs, tensors)))
            }
            _ => None,
        };
        // Numbers that come several times are multiplied alike.
        let apart =
            matches!(&made, Made::UnitRows(_)) || matches!(&made, Made::Times(by) if by.len() > 1);
        let found = found.filter(|repeated| !(apart && repeated.is_some()));
        let Some(found) = found else {
            let expected = "a matrix or a vector of the files' own numbers";
            return Err(Error::new(&weight.name, expected, "one that is made of them")
                .of(ErrorKind::Unsupported)
                .hint("such models can be tuned with LoRA"));
        };
        let (name, mut shape) = (weight.name.clone(), weight.shape.clone());
        let decays = shape.len() > 1;
        let mut values = encoded.to_f32()?;
        let places = found.map(|(places, count)| {
            values = places.first(&values);
            let row: usize = shape[1..].iter().product();
            shape = match count.is_multiple_of(row) {
                true => [&[count / row][..], &shape[1..]].concat(),
                false => vec![count],
            };
            places
        });
        trained.push(MadeWeight { weight: id, made, places });
        all.push(Parameter { name, shape, values, decays });
    }
    Ok((trained, all))
}

/// Whether a tensor's elements are in several runs of neighbours.
fn repeats(runs: &[ElementRun<'_>]) -> bool {
    let rows = runs.iter().filter(|run| run.tensor.is_some() && run.step == 1);
    let mut rows: Vec<&ElementRun<'_>> = rows.collect();
    rows.sort_unstable_by_key(|run| (run.tensor, run.start));
    rows.windows(2).any(|pair| {
        pair[0].tensor == pair[1].tensor && pair[0].start + pair[0].count > pair[1].start
    })
}

/// The model's folder with these parameters in the place of its weights: one file of weights, each
/// in the type that it had, the configuration and the tokenizer.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn export(
    program: &Program,
    tensors: &Tensors,
    trained: &[(WeightId, Option<&Places>)],
    parameters: &[Parameter],
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut changed: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for ((id, places), parameter) in trained.iter().zip(parameters) {
        let all = match places {
            Some(places) => Cow::Owned(places.spread(&parameter.values)),
            None => Cow::Borrowed(&parameter.values[..]),
        };
        let mut values = all.iter();
        let (_, source) = made(&program.weights[id.0].source, tensors)?;
        for run in source.runs(tensors)?.unwrap_or_default() {
            let own = values.by_ref().take(run.count);
            let Some(tensor) = run.tensor else {
                own.for_each(drop);
                continue;
            };
            let to = match changed.entry(tensor.to_owned()) {
                Entry::Occupied(before) => before.into_mut(),
                Entry::Vacant(none) => {
                    let stored = tensors.get(tensor);
                    none.insert(stored.map_or(Ok(Vec::new()), |stored| stored.to_f32())?)
                }
            };
            for (i, value) in own.enumerate() {
                to[run.start + i * run.step] = *value;
            }
        }
    }
    let stored: Vec<(TensorView<'_>, Option<Vec<u8>>)> = tensors
        .iter()
        .map(|tensor| (tensor, changed.get(tensor.name).map(|v| encoded(v, tensor.dtype))))
        .collect();
    let all = stored.iter().map(|(tensor, own)| match own {
        Some(bytes) => TensorView { bytes, ..*tensor },
        None => *tensor,
    });
    let name = "model.safetensors";
    let mut files = vec![(name.to_owned(), safetensors::encode(name, &[("format", "pt")], all)?)];
    let read = |path: std::path::PathBuf| -> Result<(String, Vec<u8>)> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, std::fs::read(&path).map_err(|e| Error::io(path.display(), e))?))
    };
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

#[cfg(test)]
mod tests {
    use super::Made;

    /// Gradients of what is stored are slopes of sums of what is made of it.
    #[test]
    fn gradients_go_back_through_what_weights_are_made_by() {
        let values = [0.4f32, -1.2, 0.7, 0.3, 0.9, -0.5];
        let along = [1.0f32, 0.5, -2.0, 0.25, 1.5, -1.0];
        for made in [
            Made::AsStored,
            Made::Plus(1.0),
            Made::NegExp,
            Made::Exp,
            Made::Times(vec![2.0]),
            Made::Times(vec![2.0, 0.5, -1.0, 3.0, 0.25, 1.0]),
            Made::UnitRows(3),
        ] {
            let mut found = along;
            made.back(&values, &mut found);
            for i in 0..values.len() {
                let sum = |by: f32| {
                    let mut moved = values;
                    moved[i] += by;
                    made.apply(&mut moved);
                    let terms = moved.iter().zip(along);
                    terms.map(|(v, along)| f64::from(*v) * f64::from(along)).sum::<f64>()
                };
                let slope = (sum(1e-2) - sum(-1e-2)) / 2e-2;
                let off = (slope - f64::from(found[i])).abs();
                assert!(off < 1e-3 * slope.abs().max(1.0), "{made:?}: {i}: {slope} {}", found[i]);
            }
        }
    }
}
