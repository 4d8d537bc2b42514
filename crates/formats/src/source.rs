//! Recipes: how a weight is made of a model's tensors.
//!
//! Rows stay as the file encodes them wherever a recipe keeps them whole: ranges of rows,
//! permutations of rows, one weight below another, stacks, and columns that are cut between blocks.
//! Nothing is decoded for those. What changes numbers goes through f32: [`Source::Plus`],
//! [`Source::Times`] and [`Source::NegExp`] give f32. A recipe that would have to decode a
//! quantised matrix is refused by name, since the weight would then take several times the memory
//! that its file promises: a transpose, a sum, a cut through blocks. [`Source::Decoded`] asks for
//! just that, of small matrices that files have the other way round.
//!
//! [`Source::describe`] says from headers alone what a recipe gives; [`Source::read`] gives just
//! that.

mod runs;

pub use runs::ElementRun;

use crate::{
    DType, Encoding, Error, Groups, Hint, Quantised, Result, Setting, TensorView, Tensors, shape,
};
use std::borrow::Cow;
use std::f64::consts::TAU;
use std::ops::Range;

/// How a weight is made.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Source {
    /// A tensor as it is stored.
    Tensor(String),
    /// Some of the rows: the `run` rows from `start` on, those from `start + stride` on and so on. A
    /// row is what one index of the outermost axis holds.
    Rows {
        /// Which weight has them.
        of: Box<Source>,
        /// The first.
        start: usize,
        /// How many in all: a multiple of `run`.
        count: usize,
        /// From the first row of a run to the first of the next.
        stride: usize,
        /// Rows of a run: one behind the other.
        run: usize,
    },
    /// Consecutive elements of the innermost axis.
    Columns {
        /// Which weight has them.
        of: Box<Source>,
        /// The first.
        start: usize,
        /// How many.
        count: usize,
    },
    /// The rows of all of these, one weight's after another's.
    Concat(Vec<Source>),
    /// Weights of one shape along a new outermost axis.
    Stack(Vec<Source>),
    /// Every element plus a number, such as the 1 that Gemma's norms leave out.
    Plus(Box<Source>, f32),
    /// Every element times a number.
    Times(Box<Source>, f32),
    /// Minus the exponential of every element: rates whose logarithms are stored.
    NegExp(Box<Source>),
    /// Every row divided by its length, in the encoding that is stored.
    UnitRows(Box<Source>),
    /// Every element in f32, whatever its encoding.
    Decoded(Box<Source>),
    /// Matrices `[b, a]` of matrices `[a, b]`, the two innermost axes.
    Transpose(Box<Source>),
    /// The same elements in the same order, of another shape: a stack of matrices as one. Of
    /// blocks, the innermost axis stays.
    Reshape(Box<Source>, Vec<usize>),
    /// The rows seen as `[a, b, c, d]`, in the order `[a, c, b, d]`: heads that are interleaved,
    /// pairs that rotate together.
    Permute(Box<Source>, [usize; 4]),
    /// Affine groups as MLX stores them: codes `[.., columns * bits / 32]` of u32 (a stream of
    /// bits, the first code lowest), scales and offsets `[.., columns / group]`.
    Affine {
        /// The tensor of codes.
        codes: String,
        /// The tensor of scales.
        scales: String,
        /// The tensor of offsets, which MLX calls biases.
        offsets: String,
        /// Bits per code, 2 to 8.
        bits: usize,
        /// Elements that share a scale.
        group: usize,
    },
    /// A matrix as another program quantised it.
    Quantised(Quantised),
    /// Zeros in f32.
    Zeros(Vec<usize>),
    /// Positions as sines (Vaswani et al. 2017) in f32, `[count, 2 * pairs]`: the sines of a
    /// position times each of the frequencies `10000^(-i / (pairs - 1))`, then their cosines.
    Sines {
        /// The position of the first row.
        start: usize,
        /// How many positions.
        count: usize,
        /// How many frequencies.
        pairs: usize,
    },
    /// Numbers in f32 from a normal distribution around 0: the same for the same seed.
    Normal {
        /// How many along each axis.
        shape: Vec<usize>,
        /// Standard deviation.
        deviation: f32,
        /// The seed.
        seed: u64,
    },
}

/// A recipe's result, as headers describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// How its elements are encoded.
    pub encoding: Encoding,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
    /// Bytes of files that are read for it.
    pub stored: u64,
}

/// A weight as its recipe gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded<'a> {
    /// How its elements are encoded.
    pub encoding: Encoding,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
    /// Its elements, row after row.
    pub bytes: Cow<'a, [u8]>,
}

impl Encoded<'_> {
    /// All elements as f32.
    ///
    /// # Errors
    /// Integers.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.shape.iter().product()];
        self.encoding.decode(&self.bytes, &mut values)?;
        Ok(values)
    }
}

/// Where an element of a weight comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The name of the tensor in the file.
    pub tensor: String,
    /// The shape that the tensor has, counted in weights.
    pub shape: Vec<usize>,
    /// The element of the tensor.
    pub element: usize,
}

impl Described {
    fn new(encoding: impl Into<Encoding>, shape: Vec<usize>, stored: u64) -> Described {
        Described { encoding: encoding.into(), shape, stored }
    }

    /// Elements of a row.
    fn row(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Bytes of this many elements, which are whole blocks.
    fn bytes_for(&self, elements: usize, place: &str) -> Result<usize> {
        self.encoding.bytes_for(elements).ok_or_else(|| {
            let block = self.encoding.block_elements();
            Error::new(place, format!("rows of whole blocks of {block}"), self)
        })
    }
}

impl std::fmt::Display for Described {
    /// `[4096, 1024] of q4_k`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {}", shape(&self.shape), self.encoding)
    }
}

/// The share of `stored` bytes that one part has.
fn share(stored: u64, part: usize, of: usize) -> u64 {
    (u128::from(stored) * part as u128 / of.max(1) as u128) as u64
}

/// The number of elements of a shape that no file bounds.
fn checked(dims: &[usize], place: &str) -> Result<usize> {
    let elements = dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
    elements
        .filter(|n| *n <= 1 << 40)
        .ok_or_else(|| Error::new(place, "at most 2^40 elements", shape(dims)))
}

impl Source {
    /// Some consecutive rows of this.
    pub fn rows(self, start: usize, count: usize) -> Source {
        Source::Rows { of: Box::new(self), start, count, stride: count, run: count }
    }

    /// Every `stride`-th row of this, `count` of them.
    pub fn every(self, stride: usize, start: usize, count: usize) -> Source {
        Source::Rows { of: Box::new(self), start, count, stride, run: 1 }
    }

    /// Some consecutive rows of each of `groups` groups of `rows` rows: a part of each of several
    /// matrices that lie below one another.
    pub fn rows_of_each(self, groups: usize, rows: usize, part: Range<usize>) -> Source {
        let (start, run) = (part.start, part.len());
        Source::Rows { of: Box::new(self), start, count: groups * run, stride: rows, run }
    }

    /// Some consecutive columns of this.
    pub fn columns(self, start: usize, count: usize) -> Source {
        Source::Columns { of: Box::new(self), start, count }
    }

    /// The sources that it is made of.
    fn parts(&self) -> &[Source] {
        match self {
            Source::Rows { of, .. } | Source::Columns { of, .. } => std::slice::from_ref(of),
            Source::Plus(of, _)
            | Source::Times(of, _)
            | Source::NegExp(of)
            | Source::UnitRows(of)
            | Source::Decoded(of)
            | Source::Transpose(of)
            | Source::Permute(of, _)
            | Source::Reshape(of, _) => std::slice::from_ref(of),
            Source::Concat(all) | Source::Stack(all) => all,
            Source::Affine { .. } | Source::Quantised(_) => &[],
            Source::Tensor(_) | Source::Zeros(_) => &[],
            Source::Sines { .. } | Source::Normal { .. } => &[],
        }
    }

    fn parts_mut(&mut self) -> &mut [Source] {
        match self {
            Source::Rows { of, .. } | Source::Columns { of, .. } => std::slice::from_mut(of),
            Source::Plus(of, _)
            | Source::Times(of, _)
            | Source::NegExp(of)
            | Source::UnitRows(of)
            | Source::Decoded(of)
            | Source::Transpose(of)
            | Source::Permute(of, _)
            | Source::Reshape(of, _) => std::slice::from_mut(of),
            Source::Concat(all) | Source::Stack(all) => all,
            Source::Affine { .. } | Source::Quantised(_) => &mut [],
            Source::Tensor(_) | Source::Zeros(_) => &mut [],
            Source::Sines { .. } | Source::Normal { .. } => &mut [],
        }
    }

    /// The recipe with another one in the place of each part for which there is one: of what it is
    /// made of, the outermost.
    pub fn replaced(&self, other: &dyn Fn(&Source) -> Option<Source>) -> Source {
        other(self).unwrap_or_else(|| {
            let mut new = self.clone();
            new.parts_mut().iter_mut().for_each(|part| *part = part.replaced(other));
            new
        })
    }

    /// The recipe without the numbers by which parts of it are multiplied; and the number by which
    /// each element is.
    ///
    /// # Errors
    /// As [`Source::describe`].
    pub fn factors(&self, tensors: &Tensors) -> Result<(Source, Vec<f32>)> {
        fn bare(source: &Source) -> Source {
            source.replaced(&|part| match part {
                Source::Times(of, _) => Some(bare(of)),
                _ => None,
            })
        }
        let shapes: Vec<(String, Vec<usize>)> = self
            .tensors()
            .into_iter()
            .map(|name| Ok((name.to_owned(), tensor(tensors, name)?.shape.to_vec())))
            .collect::<Result<_>>()?;
        let ones = self.replaced(&|part| {
            let Source::Tensor(name) = part else { return None };
            let (_, shape) = shapes.iter().find(|(own, _)| own == name)?;
            Some(Source::Plus(Box::new(Source::Zeros(shape.clone())), 1.0))
        });
        Ok((bare(self), ones.read(tensors)?.to_f32()?))
    }

    /// Whether what is stored is transposed.
    pub fn turns(&self) -> bool {
        matches!(self, Source::Transpose(_)) || self.parts().iter().any(Source::turns)
    }

    /// The names of all tensors that it reads.
    pub fn tensors(&self) -> Vec<&str> {
        match self {
            Source::Tensor(name) => vec![name],
            Source::Affine { codes, scales, offsets, .. } => vec![codes, scales, offsets],
            Source::Quantised(of) => of.tensors.iter().map(String::as_str).collect(),
            _ => self.parts().iter().flat_map(Source::tensors).collect(),
        }
    }

    /// Whether a part of it is stored as another program quantised it.
    pub fn is_quantised(&self) -> bool {
        matches!(self, Source::Affine { .. } | Source::Quantised(_))
            || self.parts().iter().any(Source::is_quantised)
    }

    /// Whether a part of it is stored as blocks and decoded, so that the weight and what is stored
    /// are not of one encoding.
    pub fn is_decoded(&self) -> bool {
        matches!(self, Source::Decoded(_)) || self.parts().iter().any(Source::is_decoded)
    }

    /// Whether a part of it is multiplied, so that it is in f32 whatever is stored.
    pub fn is_multiplied(&self) -> bool {
        matches!(self, Source::Times(..)) || self.parts().iter().any(Source::is_multiplied)
    }

    /// Describes the recipe's result, reading only headers.
    ///
    /// # Errors
    /// Tensors that are missing or do not fit the recipe, by name; quantised matrices that it would
    /// have to decode.
    pub fn describe(&self, tensors: &Tensors) -> Result<Described> {
        let place = || self.tensors().first().map_or("a weight", |name| *name).to_owned();
        match self {
            Source::Tensor(name) => {
                let tensor = tensor(tensors, name)?;
                let stored = tensor.bytes.len() as u64;
                Ok(Described::new(tensor.dtype, tensor.shape.to_vec(), stored))
            }
            Source::Rows { of, start, count, stride, run } => {
                let mut all = of.describe(tensors)?;
                let runs = count.checked_div(*run).filter(|runs| runs * run == *count);
                let runs = runs.filter(|_| stride >= run);
                let last = runs.and_then(|runs| runs.checked_sub(1)?.checked_mul(*stride));
                let end = last.and_then(|last| last.checked_add(*start)?.checked_add(*run));
                let rows = all.rows();
                if end.is_none_or(|end| end > rows) {
                    let expected = match count == run {
                        true => format!("{count} rows from row {start} on"),
                        false => format!("{count} rows from row {start} on, {run} of {stride}"),
                    };
                    return Err(Error::new(place(), expected, &all));
                }
                all.bytes_for(all.row(), &place())?;
                all.stored = share(all.stored, *count, rows);
                all.shape[0] = *count;
                Ok(all)
            }
            Source::Columns { of, start, count } => {
                let mut all = of.describe(tensors)?;
                let columns = all.columns();
                let end = start.checked_add(*count).filter(|end| *end <= columns && *count > 0);
                let Some(end) = end.filter(|_| all.shape.len() > 1) else {
                    let expected = format!("columns {start} and {count} in all");
                    return Err(Error::new(place(), expected, &all));
                };
                let block = all.encoding.block_elements();
                if !start.is_multiple_of(block) || !end.is_multiple_of(block) {
                    let expected = format!("columns in parts of whole blocks of {block}");
                    let found = format!("{all}, of which columns {start} to {}", end - 1);
                    return Err(Error::new(place(), expected, found).hint(
                        Hint::text("fewer GPUs, ")
                            .with_value(Setting::SplitMode, "layer")
                            .and(", or a model of another type"),
                    ));
                }
                all.stored = share(all.stored, *count, columns);
                all.shape.last_mut().into_iter().for_each(|columns| *columns = *count);
                Ok(all)
            }
            Source::Concat(all) => {
                let parts = described(all, tensors)?;
                let first = parts.first().filter(|first| !first.shape.is_empty());
                let first = first.ok_or_else(|| Error::new("a weight", "parts to join", "none"))?;
                if let Some(odd) = parts.iter().find(|p| p.shape[1..] != first.shape[1..]) {
                    return Err(Error::new(place(), format!("rows as of {first}"), odd));
                }
                let encoding = joined(&parts, &place())?;
                let rows = parts.iter().try_fold(0usize, |n, part| n.checked_add(part.rows()));
                let rows = rows.ok_or_else(|| Error::new(place(), "fewer rows", "too many"))?;
                let shape = [&[rows][..], &first.shape[1..]].concat();
                Ok(Described::new(encoding, shape, parts.iter().map(|part| part.stored).sum()))
            }
            Source::Stack(all) => {
                let parts = described(all, tensors)?;
                let first =
                    parts.first().ok_or_else(|| Error::new("a weight", "a stack", "none"))?;
                if let Some(odd) = parts.iter().find(|p| p.shape != first.shape) {
                    return Err(Error::new(place(), format!("a stack of {first}"), odd));
                }
                let encoding = joined(&parts, &place())?;
                let shape = [&[parts.len()][..], &first.shape].concat();
                Ok(Described::new(encoding, shape, parts.iter().map(|part| part.stored).sum()))
            }
            Source::Plus(of, _) | Source::Times(of, _) | Source::NegExp(of) => {
                let all = of.describe(tensors)?;
                if !all.encoding.is_float() || (all.encoding.is_quantised() && all.shape.len() > 1)
                {
                    return Err(Error::new(place(), "floats, to be computed with", all));
                }
                Ok(Described { encoding: DType::F32.into(), ..all })
            }
            Source::UnitRows(of) => {
                let all = of.describe(tensors)?;
                let floats = all.encoding.is_float() && !all.encoding.is_quantised();
                match floats && all.shape.len() > 1 {
                    true => Ok(all),
                    false => Err(Error::new(place(), "rows of floats, to be divided", all)),
                }
            }
            Source::Decoded(of) => {
                let all = of.describe(tensors)?;
                match all.encoding.is_float() {
                    true => Ok(Described { encoding: DType::F32.into(), ..all }),
                    false => Err(Error::new(place(), "floats or quantised blocks", all)),
                }
            }
            Source::Transpose(of) => {
                let mut all = of.describe(tensors)?;
                if all.shape.len() < 2 || all.encoding.is_quantised() {
                    return Err(Error::new(place(), "a matrix of numbers, to be transposed", all)
                        .hint("a GGUF file of this model has its matrices the right way round"));
                }
                let rank = all.shape.len();
                all.shape.swap(rank - 2, rank - 1);
                Ok(all)
            }
            Source::Reshape(of, dims) => {
                let all = of.describe(tensors)?;
                let elements = |dims: &[usize]| checked(dims, &place());
                let kept = all.shape.last() == dims.last() || !all.encoding.is_quantised();
                if !kept || dims.is_empty() || elements(dims)? != elements(&all.shape)? {
                    return Err(Error::new(place(), format!("elements of {}", shape(dims)), all));
                }
                Ok(Described { shape: dims.clone(), ..all })
            }
            Source::Permute(of, axes) => {
                let all = of.describe(tensors)?;
                let rows = axes.iter().try_fold(1usize, |n, axis| n.checked_mul(*axis));
                if rows != Some(all.rows()) || all.shape.is_empty() {
                    return Err(Error::new(place(), format!("rows as {}", shape(axes)), all));
                }
                all.bytes_for(all.row(), &place())?;
                Ok(all)
            }
            Source::Affine { .. } => Ok(self.affine(tensors)?.0),
            Source::Quantised(of) => of.describe(tensors),
            Source::Zeros(dims) | Source::Normal { shape: dims, .. } => {
                checked(dims, "a weight without a tensor")?;
                Ok(Described::new(DType::F32, dims.clone(), 0))
            }
            Source::Sines { count, pairs, .. } => {
                let shape = vec![*count, pairs.saturating_mul(2)];
                checked(&shape, "positions as sines")?;
                Ok(Described::new(DType::F32, shape, 0))
            }
        }
    }

    /// The description of affine groups, and the tensors of codes, scales and offsets.
    fn affine<'a>(&self, tensors: &'a Tensors) -> Result<(Described, Groups, [TensorView<'a>; 3])> {
        let Source::Affine { codes, scales, offsets, bits, group } = self else {
            return Err(Error::new("a weight", "affine groups", "another recipe"));
        };
        let (codes, scales) = (tensor(tensors, codes)?, tensor(tensors, scales)?);
        let offsets = tensor(tensors, offsets)?;
        let groups = Groups::new(*bits, *group, scales.dtype).ok_or_else(|| {
            let expected = "2 to 8 bits, groups of whole bytes, scales in f16 or bf16";
            let found = format!("{bits} bits in groups of {group}, scales in {}", scales.dtype);
            Error::new(codes.name, expected, found)
        })?;
        let wrong = |expected: String, found: &TensorView<'_>| {
            let found = format!("{} of {}", shape(found.shape), found.dtype);
            Err(Error::new(codes.name, expected, found))
        };
        let (Some((words, outer)), DType::U32) = (codes.shape.split_last(), codes.dtype) else {
            return wrong("codes in u32".to_owned(), &codes);
        };
        let columns = words.checked_mul(32).filter(|all| all.is_multiple_of(*bits));
        let columns = columns.map(|all| all / bits).filter(|all| all.is_multiple_of(*group));
        let Some(columns) = columns.filter(|_| !outer.is_empty()) else {
            return wrong(format!("rows of codes of {bits} bits in groups of {group}"), &codes);
        };
        let expected = [outer, &[columns / group]].concat();
        for found in [&scales, &offsets] {
            if found.shape != expected || found.dtype != scales.dtype {
                let expected = format!("scales and offsets {}, of one type", shape(&expected));
                return wrong(expected, found);
            }
        }
        let all = [codes, scales, offsets];
        let stored = all.iter().map(|tensor| tensor.bytes.len() as u64).sum();
        let shape = [outer, &[columns]].concat();
        Ok((Described::new(Encoding::Groups(groups), shape, stored), groups, all))
    }

    /// The weight. What stays as it is stored is borrowed; anything else takes memory for the
    /// weight and, at most, for one that it is made of.
    ///
    /// # Errors
    /// As [`Source::describe`].
    pub fn read<'a>(&self, tensors: &'a Tensors) -> Result<Encoded<'a>> {
        let Described { encoding, shape, .. } = self.describe(tensors)?;
        let bytes = self.bytes(tensors, encoding)?;
        Ok(Encoded { encoding, shape, bytes })
    }

    fn bytes<'a>(&self, tensors: &'a Tensors, encoding: Encoding) -> Result<Cow<'a, [u8]>> {
        match self {
            Source::Tensor(name) => Ok(Cow::Borrowed(tensor(tensors, name)?.bytes)),
            Source::Rows { of, start, count, stride, run } => {
                let row = |all: &Described| all.bytes_for(all.row(), "a row");
                let row = row(&of.describe(tensors)?)?;
                let runs = (0..count / run).map(|i| (start + i * stride) * row);
                let mut runs = runs.map(|at| at..at + run * row);
                if count == run && !of.is_joined() {
                    let range = runs.next().unwrap_or_default();
                    return Ok(match of.bytes(tensors, encoding)? {
                        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[range]),
                        Cow::Owned(bytes) => Cow::Owned(bytes[range].to_vec()),
                    });
                }
                let mut own = Vec::with_capacity(count * row);
                let (mut begin, mut next) = (0, runs.next());
                of.pieces(tensors, encoding, &mut |piece| {
                    let end = begin + piece.len();
                    while let Some(range) = next.clone().filter(|range| range.start < end) {
                        let here = range.start.max(begin)..range.end.min(end);
                        own.extend_from_slice(&piece[here.start - begin..here.end - begin]);
                        // The rest of the run lies in the next piece.
                        next = if here.end < range.end {
                            Some(here.end..range.end)
                        } else {
                            runs.next()
                        };
                    }
                    begin = end;
                })?;
                Ok(Cow::Owned(own))
            }
            Source::Columns { of, start, count } => {
                let all = of.describe(tensors)?;
                let place = "a part of a row";
                let row = all.bytes_for(all.columns(), place)?;
                let (from, part) = (all.bytes_for(*start, place)?, all.bytes_for(*count, place)?);
                let rows = all.shape[..all.shape.len() - 1].iter().product::<usize>();
                let mut own = Vec::with_capacity(rows * part);
                // A piece has whole rows.
                of.pieces(tensors, encoding, &mut |piece| {
                    let rows = piece.chunks_exact(row.max(1));
                    rows.for_each(|row| own.extend_from_slice(&row[from..from + part]));
                })?;
                Ok(Cow::Owned(own))
            }
            Source::Concat(_) | Source::Stack(_) => {
                let mut joined = Vec::new();
                self.pieces(tensors, encoding, &mut |piece| joined.extend_from_slice(piece))?;
                Ok(Cow::Owned(joined))
            }
            Source::Plus(of, add) => {
                let mut values = of.read(tensors)?.to_f32()?;
                values.iter_mut().for_each(|value| *value += add);
                Ok(Cow::Owned(f32_bytes(&values)))
            }
            Source::Times(of, by) => {
                let mut values = of.read(tensors)?.to_f32()?;
                values.iter_mut().for_each(|value| *value *= by);
                Ok(Cow::Owned(f32_bytes(&values)))
            }
            Source::NegExp(of) => {
                let mut values = of.read(tensors)?.to_f32()?;
                values.iter_mut().for_each(|value| *value = -f64::from(*value).exp() as f32);
                Ok(Cow::Owned(f32_bytes(&values)))
            }
            Source::UnitRows(of) => {
                let all = of.read(tensors)?;
                let row = all.bytes.len() / all.shape[0].max(1);
                let mut bytes = vec![0; all.bytes.len()];
                let mut values = vec![0.0; all.shape.iter().skip(1).product()];
                let rows = all.bytes.chunks_exact(row.max(1));
                for (stored, unit) in rows.zip(bytes.chunks_exact_mut(row.max(1))) {
                    encoding.decode(stored, &mut values)?;
                    let square = |value: &f32| f64::from(*value).powi(2);
                    // Least as in PyTorch: rows of zeros stay so.
                    let length = values.iter().map(square).sum::<f64>().sqrt().max(1e-12);
                    let divide = |value: &mut f32| *value = (f64::from(*value) / length) as f32;
                    values.iter_mut().for_each(divide);
                    encoding.encode(&values, unit)?;
                }
                Ok(Cow::Owned(bytes))
            }
            Source::Decoded(of) => Ok(Cow::Owned(f32_bytes(&of.read(tensors)?.to_f32()?))),
            Source::Transpose(of) => {
                let all = of.read(tensors)?;
                let size = all.encoding.block_bytes();
                let [.., rows, columns] = all.shape[..] else { return Ok(all.bytes) };
                let matrices = all.shape[..all.shape.len() - 2].iter().product::<usize>();
                let mut turned = Vec::with_capacity(all.bytes.len());
                for first in (0..matrices).map(|matrix| matrix * rows * columns) {
                    for at in
                        (0..columns).flat_map(|c| (0..rows).map(move |r| first + r * columns + c))
                    {
                        turned.extend_from_slice(&all.bytes[at * size..(at + 1) * size]);
                    }
                }
                Ok(Cow::Owned(turned))
            }
            Source::Reshape(of, _) => of.bytes(tensors, encoding),
            Source::Permute(of, [a, b, c, d]) => {
                let all = of.read(tensors)?;
                let row = all.bytes.len() / all.shape[0].max(1);
                let mut permuted = Vec::with_capacity(all.bytes.len());
                for at in 0..a * b * c * d {
                    let from = permuted_from(at, [*a, *b, *c, *d]);
                    permuted.extend_from_slice(&all.bytes[from * row..(from + 1) * row]);
                }
                Ok(Cow::Owned(permuted))
            }
            Source::Affine { .. } => {
                let (_, groups, [codes, scales, offsets]) = self.affine(tensors)?;
                let codes = codes.bytes.chunks_exact(groups.code_bytes());
                let halves = scales.bytes.chunks_exact(2).zip(offsets.bytes.chunks_exact(2));
                let mut bytes = Vec::with_capacity(codes.len() * groups.bytes());
                for (codes, (scale, offset)) in codes.zip(halves) {
                    [codes, scale, offset].into_iter().for_each(|p| bytes.extend_from_slice(p));
                }
                Ok(Cow::Owned(bytes))
            }
            Source::Quantised(of) => Ok(Cow::Owned(of.read(tensors)?)),
            Source::Zeros(dims) => Ok(Cow::Owned(vec![0; 4 * checked(dims, "zeros")?])),
            Source::Sines { start, count, pairs } => {
                let last = pairs.saturating_sub(1).max(1) as f64;
                let turns: Vec<f64> =
                    (0..*pairs).map(|i| 10_000f64.powf(-(i as f64) / last)).collect();
                let row = |at: usize| {
                    let angles = turns.iter().map(move |turn| at as f64 * turn);
                    angles.clone().map(f64::sin).chain(angles.map(f64::cos))
                };
                let values = (*start..start + count).flat_map(row);
                Ok(values.flat_map(|value| (value as f32).to_le_bytes()).collect())
            }
            Source::Normal { shape, deviation, seed } => {
                let values = (0..checked(shape, "random weights")? as u64)
                    .map(|i| (normal(*seed, i) * f64::from(*deviation)) as f32);
                Ok(values.flat_map(f32::to_le_bytes).collect())
            }
        }
    }

    /// Whether it is several weights one behind the other.
    fn is_joined(&self) -> bool {
        match self {
            Source::Concat(_) | Source::Stack(_) => true,
            Source::Reshape(of, _) => of.is_joined(),
            _ => false,
        }
    }

    /// Gives its bytes to `f` in order, in pieces of whole rows. Joined weights come one by one, so
    /// that memory for one is enough.
    fn pieces(
        &self,
        tensors: &Tensors,
        encoding: Encoding,
        f: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        match self {
            Source::Concat(all) | Source::Stack(all) => {
                for part in all {
                    let part = part.read(tensors)?;
                    match part.encoding == encoding {
                        true => f(&part.bytes),
                        false => f(&f32_bytes(&part.to_f32()?)),
                    }
                }
            }
            Source::Reshape(of, _) if self.is_joined() => of.pieces(tensors, encoding, f)?,
            _ => f(&self.bytes(tensors, encoding)?),
        }
        Ok(())
    }

    /// Gives back the memory of the pages that reading it took; see [`Tensors::release`].
    pub fn release(&self, tensors: &Tensors) {
        if let Source::Rows { of, start, count, run, .. } = self
            && count == run
            && let Source::Tensor(name) = of.as_ref()
            && let Some(tensor) = tensors.get(name)
        {
            // Its neighbours in a fused matrix are read next.
            let row = tensor.bytes.len() / tensor.shape.first().copied().unwrap_or(1).max(1);
            let rows = tensor.bytes.get(start * row..(start + count) * row);
            rows.into_iter().for_each(|bytes| tensors.release(&TensorView { bytes, ..tensor }));
            return;
        }
        let all = self.tensors().into_iter().filter_map(|name| tensors.get(name));
        all.for_each(|tensor| tensors.release(&tensor));
    }

    /// The tensor whose rows, or columns of a transpose, are this weight's, and which of them `row`
    /// is; none where rows are made of more than that.
    pub fn stored_row(&self, row: usize) -> Option<(&str, usize)> {
        match self {
            Source::Tensor(name) | Source::Affine { codes: name, .. } => Some((name, row)),
            Source::Transpose(of) => match &**of {
                Source::Tensor(name) => Some((name, row)),
                _ => None,
            },
            Source::Rows { of, start, stride, run, .. } => {
                of.stored_row(start + row / run * stride + row % run)
            }
            Source::Permute(of, axes) => of.stored_row(permuted_from(row, *axes)),
            Source::Concat(parts) => {
                let mut left = row;
                for part in parts {
                    let Source::Rows { count, .. } = part else { return None };
                    match left.checked_sub(*count) {
                        Some(rest) => left = rest,
                        None => return part.stored_row(left),
                    }
                }
                None
            }
            _ => None,
        }
    }

    /// Where element `element` of the weight comes from; none for one that no tensor holds.
    ///
    /// # Errors
    /// As [`Source::describe`].
    pub fn origin(&self, tensors: &Tensors, element: usize) -> Result<Option<Origin>> {
        let Described { shape, .. } = self.describe(tensors)?;
        let row: usize = shape.iter().skip(1).product::<usize>().max(1);
        let (at, within) = (element / row, element % row);
        match self {
            Source::Tensor(name) => Ok(Some(Origin { tensor: name.clone(), shape, element })),
            Source::Affine { codes, .. } => {
                Ok(Some(Origin { tensor: codes.clone(), shape, element }))
            }
            Source::Quantised(of) => {
                let tensor = of.tensors.first().cloned().unwrap_or_default();
                Ok(Some(Origin { tensor, shape, element }))
            }
            Source::Rows { of, start, stride, run, .. } => {
                of.origin(tensors, (start + at / run * stride + at % run) * row + within)
            }
            Source::Columns { of, start, count } => {
                let columns = of.describe(tensors)?.columns();
                of.origin(tensors, element / count * columns + start + element % count)
            }
            Source::Concat(all) | Source::Stack(all) => {
                let mut left = element;
                for part in all {
                    let elements: usize = part.describe(tensors)?.shape.iter().product();
                    if left < elements {
                        return part.origin(tensors, left);
                    }
                    left -= elements;
                }
                Ok(None)
            }
            Source::Plus(of, _)
            | Source::Times(of, _)
            | Source::NegExp(of)
            | Source::UnitRows(of)
            | Source::Decoded(of) => of.origin(tensors, element),
            Source::Transpose(of) => {
                let [.., columns, rows] = shape[..] else { return of.origin(tensors, element) };
                let (matrix, within) = (element / (rows * columns), element % (rows * columns));
                let (c, r) = (within / rows, within % rows);
                of.origin(tensors, matrix * rows * columns + r * columns + c)
            }
            Source::Reshape(of, _) => of.origin(tensors, element),
            Source::Permute(of, axes) => {
                of.origin(tensors, permuted_from(at, *axes) * row + within)
            }
            Source::Zeros(_) | Source::Sines { .. } | Source::Normal { .. } => Ok(None),
        }
    }
}

/// Which row of `[a, b, c, d]` is row `at` of `[a, c, b, d]`.
fn permuted_from(at: usize, [_, b, c, d]: [usize; 4]) -> usize {
    let (outer, second, first, inner) = (at / (b * c * d), at / (b * d) % c, at / d % b, at % d);
    ((outer * b + first) * c + second) * d + inner
}

fn tensor<'a>(tensors: &'a Tensors, name: &str) -> Result<TensorView<'a>> {
    tensors.get(name).ok_or_else(|| Error::new(name, "a tensor", "none in the file"))
}

fn described(all: &[Source], tensors: &Tensors) -> Result<Vec<Described>> {
    all.iter().map(|part| part.describe(tensors)).collect()
}

/// The encoding of parts that are joined: theirs, or f32 for floats of several types.
fn joined(parts: &[Described], place: &str) -> Result<Encoding> {
    let first = parts.first().map_or(DType::F32.into(), |part| part.encoding);
    if parts.iter().all(|part| part.encoding == first) {
        return Ok(first);
    }
    match parts.iter().find(|p| p.encoding.is_quantised() || !p.encoding.is_float()) {
        Some(odd) => Err(Error::new(place, "parts of one encoding", odd)),
        None => Ok(DType::F32.into()),
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Number `i` of a seed, from the standard normal distribution (Box and Muller 1958), by two
/// uniform numbers of SplitMix64 (Steele et al. 2014).
fn normal(seed: u64, i: u64) -> f64 {
    let uniform = |k: u64| {
        let mut z = seed.wrapping_add((2 * i + k + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 11) as f64 * (0.5f64).powi(53)
    };
    (-2.0 * (1.0 - uniform(0)).ln()).sqrt() * (TAU * uniform(1)).cos()
}
