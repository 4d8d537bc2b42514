//! Importance matrices: how much each input of a model's products matters, by what a text put
//! there.
//!
//! The importance of column `c` of a matrix is the mean of `x_c^2` over the rows `x` that it
//! multiplied: rounding an element of that column by `e` changes a result's mean square by `e^2`
//! times that. A mixture has numbers for each expert.
//!
//! Two forms are read: the GGUF file that llama.cpp's `llama-imatrix` writes (`NAME.in_sum2`
//! `[matrices, columns]`, sums of squares, and `NAME.counts` `[matrices, 1]`, rows), which
//! [`Importance::write`] gives too; and its older `.dat`, without counts.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::clipped;
use crate::gguf::{MetadataArray, MetadataValue, TensorSpec, Writer};
use crate::map::Map;
use crate::{DType, Error, Gguf, Result};

/// The inputs of one tensor's products over a text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inputs {
    /// Sums of squares, `[matrices, columns]`.
    pub squares: Vec<f64>,
    /// Rows that each matrix multiplied.
    pub rows: Vec<u64>,
}

/// The importance of a model's weights, by the names that tensors have in GGUF.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Importance {
    /// By tensor.
    pub tensors: BTreeMap<String, Inputs>,
    /// Names of the texts.
    pub texts: Vec<String>,
    /// Windows of text.
    pub chunks: u32,
    /// Tokens of each.
    pub chunk: u32,
}

/// The least importance of a column, by the mean of its row: what a text never used may be used by
/// another.
const LEAST: f64 = 1e-4;

impl Inputs {
    /// Adds a row that matrix `matrix` of `matrices` multiplied.
    pub fn add(&mut self, matrix: usize, matrices: usize, row: &[f32]) {
        if self.rows.is_empty() {
            self.rows = vec![0; matrices];
            self.squares = vec![0.0; matrices * row.len()];
        }
        self.rows[matrix] += 1;
        let squares = &mut self.squares[matrix * row.len()..][..row.len()];
        squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
    }

    /// The importance of each element of matrices of `columns` columns, one matrix after the other,
    /// 1 on average in each; `None` for matrices of other sizes. All columns of a matrix that
    /// multiplied nothing are equally important.
    pub fn columns(&self, matrices: usize, columns: usize) -> Option<Vec<f32>> {
        if columns == 0 || matrices.checked_mul(columns) != Some(self.squares.len()) {
            return None;
        }
        // The older form has one number of rows for all.
        let rows = |matrix: usize| self.rows.get(matrix).or(self.rows.first()).copied();
        let of = |(matrix, squares): (usize, &[f64])| {
            let mean = squares.iter().sum::<f64>() / columns as f64;
            let some = rows(matrix).is_some_and(|rows| rows > 0) && mean > 0.0;
            let one = move |sum: &f64| (sum / mean).max(LEAST) as f32;
            squares.iter().map(|sum| if some { one(sum) } else { 1.0 }).collect::<Vec<f32>>()
        };
        Some(self.squares.chunks_exact(columns).enumerate().flat_map(of).collect())
    }
}

impl Importance {
    /// Reads a file of either form.
    ///
    /// # Errors
    /// A file that is neither, sums without counts, and sizes that do not agree.
    pub fn open(path: &Path) -> Result<Importance> {
        let map = Map::open(path)?;
        let found = match map.bytes().starts_with(b"GGUF") {
            true => of_gguf(&Gguf::open(path)?, path)?,
            false => of_dat(map.bytes(), &path.display().to_string())?,
        };
        map.whole()?;
        if found.tensors.is_empty() {
            return Err(Error::new(path.display(), "an importance matrix", "no sums of squares"));
        }
        Ok(found)
    }

    /// Writes a GGUF file as `llama-imatrix` does; it takes its name when it is whole.
    ///
    /// # Errors
    /// I/O.
    pub fn write(&self, path: &Path) -> Result<()> {
        let metadata = [
            ("general.type".to_owned(), MetadataValue::String("imatrix".to_owned())),
            (
                "imatrix.datasets".to_owned(),
                MetadataValue::Array(MetadataArray::String(self.texts.clone())),
            ),
            ("imatrix.chunk_count".to_owned(), MetadataValue::U32(self.chunks)),
            ("imatrix.chunk_size".to_owned(), MetadataValue::U32(self.chunk)),
        ];
        let spec = |name: String, shape: [usize; 2]| TensorSpec {
            name,
            dtype: DType::F32,
            shape: shape.to_vec(),
        };
        let specs: Vec<TensorSpec> = self
            .tensors
            .iter()
            .flat_map(|(name, inputs)| {
                let matrices = inputs.rows.len();
                let columns = inputs.squares.len() / matrices.max(1);
                let sums = spec(format!("{name}.in_sum2"), [matrices, columns]);
                [sums, spec(format!("{name}.counts"), [matrices, 1])]
            })
            .collect();
        let mut writer = Writer::create(path, &metadata, &specs)?;
        for inputs in self.tensors.values() {
            let sums = inputs.squares.iter().map(|sum| *sum as f32);
            let rows = inputs.rows.iter().map(|rows| *rows as f32);
            for value in sums.chain(rows) {
                writer.write(&value.to_le_bytes())?;
            }
        }
        writer.finish()
    }
}

fn of_gguf(file: &Gguf, path: &Path) -> Result<Importance> {
    let place = path.display();
    let mut found = Importance {
        chunks: file.metadata().u32("imatrix.chunk_count")?.unwrap_or(0),
        chunk: file.metadata().u32("imatrix.chunk_size")?.unwrap_or(0),
        ..Importance::default()
    };
    if let Some(texts) = file.metadata().strings("imatrix.datasets")? {
        found.texts = texts.to_vec();
    }
    let floats = |tensor: crate::TensorView<'_>| -> Result<Vec<f32>> {
        let mut values = vec![0.0; tensor.shape.iter().product()];
        match tensor.dtype {
            DType::F32 => tensor.dtype.decode(tensor.bytes, &mut values).map(|()| values),
            other => Err(Error::new(format!("{place}: {}", clipped(tensor.name)), "f32", other)),
        }
    };
    for tensor in file.iter() {
        let Some(name) = tensor.name.strip_suffix(".in_sum2") else { continue };
        let wrong = |expected: &str, found: String| {
            Error::new(format!("{place}: {}", clipped(name)), expected, found)
        };
        let counts = file.get(&format!("{name}.counts"));
        let counts = counts.ok_or_else(|| wrong("counts beside sums of squares", "none".into()))?;
        let (squares, counts) = (floats(tensor)?, floats(counts)?);
        if !squares.len().is_multiple_of(counts.len()) {
            let both = format!("{} and {}", squares.len(), counts.len());
            return Err(wrong("as many sums for each count", both));
        }
        if let Some(odd) = squares.iter().chain(&counts).find(|n| !(n.is_finite() && **n >= 0.0)) {
            return Err(wrong("sums of squares, and counts", odd.to_string()));
        }
        let squares = squares.into_iter().map(f64::from).collect();
        let rows = counts.into_iter().map(|count| count.round() as u64).collect();
        found.tensors.insert(name.to_owned(), Inputs { squares, rows });
    }
    Ok(found)
}

/// The older form: entries of a name, a number of calls and values, all in 32 bits; then the number
/// of calls, and the text's name.
fn of_dat(bytes: &[u8], place: &str) -> Result<Importance> {
    let mut rest = bytes;
    let wrong = || {
        Error::new(place, "an importance matrix of llama-imatrix, GGUF or .dat", "something else")
    };
    let mut take = |len: usize| -> Result<&[u8]> {
        let (taken, left) = rest.split_at_checked(len).ok_or_else(wrong)?;
        rest = left;
        Ok(taken)
    };
    let number = |bytes: &[u8]| {
        let bytes = bytes.try_into().map_err(|_| wrong())?;
        usize::try_from(i32::from_le_bytes(bytes)).map_err(|_| wrong())
    };
    let mut found = Importance::default();
    for _ in 0..number(take(4)?)? {
        let length = number(take(4)?)?;
        let name = std::str::from_utf8(take(length)?).map_err(|_| wrong())?.to_owned();
        let calls = number(take(4)?)?;
        let bytes = number(take(4)?)?.checked_mul(4).ok_or_else(wrong)?;
        let values = take(bytes)?;
        let mut squares = vec![0.0; values.len() / 4];
        DType::F32.decode(values, &mut squares)?;
        if calls == 0 || squares.is_empty() || squares.iter().any(|x| !(x.is_finite() && *x >= 0.0))
        {
            return Err(wrong());
        }
        let squares = squares.into_iter().map(f64::from).collect();
        found.tensors.insert(name, Inputs { squares, rows: vec![calls as u64] });
    }
    // What follows is not everywhere.
    if let Ok(chunks) = take(4).and_then(number) {
        found.chunks = u32::try_from(chunks).unwrap_or(u32::MAX);
        let length = take(4).and_then(number);
        let text = length.and_then(&mut take);
        found.texts.extend(text.ok().map(|text| String::from_utf8_lossy(text).into_owned()));
    }
    Ok(found)
}
