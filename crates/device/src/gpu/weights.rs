//! Weights on the device: matrices in planes, vectors in f32.
//!
//! Loading is a pipeline. Some rows of a matrix at a time are looked through for what is not finite
//! and packed by all cores, from the mapped file to a [`Stage`]; that is copied to the device while
//! the next rows are packed to another. So the host has no more memory for it than the stages, but
//! for weights whose recipe makes a copy of them.

mod packer;

use formats::{Encoded, Encoding, Error, NotFinite, Result, Tensors};
use ops::packed::{Format, Layout};
use program::{Program, WeightId};

use super::{Backend, Stage};
use crate::finite;
use packer::Packer;

/// Bytes of a stage, unless a row or all weights need another size: enough that a copy takes longer
/// than to begin one.
const PORTION: usize = 32 << 20;

/// A weight on the device.
pub(super) struct Weight<B> {
    pub(super) buffer: B,
    pub(super) bytes: usize,
    /// Of the file, if it is a matrix.
    pub(super) encoding: Option<Encoding>,
    /// Of the first of those that are joined: all of them.
    pub(super) joined: Option<B>,
}

/// How each matrix will be packed: as its recipe encodes it; none for those that are `trained`.
///
/// # Errors
/// If a weight is missing, or is a matrix of an encoding or shape that cannot be packed.
pub(super) fn formats(
    program: &Program,
    tensors: &Tensors,
    trained: &[WeightId],
) -> Result<Vec<Option<Format>>> {
    let one = |(id, weight): (usize, &program::Weight)| {
        if trained.contains(&WeightId(id)) {
            return Ok(None);
        }
        let encoding = weight.describe(tensors)?.encoding;
        let &[rows, cols] = weight.shape.as_slice() else { return Ok(None) };
        let unknown = || Error::new(&weight.name, "a type of matrices", encoding);
        let format = Format::of(encoding).ok_or_else(unknown)?;
        Layout::new(format, rows, cols).map_err(|e| weight.named(e))?;
        Ok(Some(format))
    };
    program.weights.iter().enumerate().map(one).collect()
}

/// How a weight lies on the device, if it is a matrix.
fn layout(weight: &program::Weight, format: Option<Format>) -> Option<Layout> {
    let &[rows, cols] = weight.shape.as_slice() else { return None };
    Layout::new(format?, rows, cols).ok()
}

/// Bytes of a weight on the device.
fn size(weight: &program::Weight, format: Option<Format>) -> usize {
    let numbers = || 4 * weight.shape.iter().product::<usize>();
    layout(weight, format).map_or_else(numbers, |layout| layout.bytes())
}

/// Bytes of all weights on the device.
pub(super) fn bytes(program: &Program, formats: &[Option<Format>]) -> usize {
    program.weights.iter().zip(formats).map(|(weight, format)| size(weight, *format)).sum()
}

/// Bytes of a stage for the weights that are read: each row, and each vector, fits.
fn portion(program: &Program, formats: &[Option<Format>], trained: &[WeightId]) -> usize {
    let all = || {
        let each = program.weights.iter().zip(formats).enumerate();
        each.filter(|(id, _)| !trained.contains(&WeightId(*id))).map(|(_, own)| own)
    };
    let whole = all().map(|(weight, format)| size(weight, *format)).max().unwrap_or(0);
    let least = all().map(|(weight, format)| match layout(weight, *format) {
        Some(layout) => 4 * layout.row_words(),
        None => size(weight, *format),
    });
    PORTION.min(whole).max(least.max().unwrap_or(0))
}

/// What of a Program's weights is loaded, and how.
pub(super) struct Wanted<'a> {
    /// How each matrix is packed.
    pub(super) formats: &'a [Option<Format>],
    /// Those that are not read: their buffers are for the caller to put in place.
    pub(super) trained: &'a [WeightId],
    /// Matrices that lie one behind the other.
    pub(super) joined: &'a [Vec<WeightId>],
    /// Whether they may be NaN or infinite.
    pub(super) allow_nan: bool,
}

/// Reads, packs and uploads the weights of a Program.
///
/// # Errors
/// Weights that cannot be read, or are not finite where they must be; what the device refuses.
pub(super) fn load<B: Backend>(
    backend: &B,
    program: &Program,
    tensors: &Tensors,
    &Wanted { formats, trained, joined, allow_nan }: &Wanted<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Weight<B::Buffer>>> {
    let total = program.stored_bytes(tensors)?;
    let mut loader = Loader {
        backend,
        stages: backend.stages(portion(program, formats, trained).max(4))?,
        packer: Packer::new(bytes(program, formats), !allow_nan)?,
    };
    let mut done = 0;
    let mut weights = Vec::with_capacity(program.weights.len());
    // The buffer of each group of which one has come.
    let mut groups: Vec<Option<B::Buffer>> = vec![None; joined.len()];
    let of = |id: &WeightId| size(&program.weights[id.0], formats[id.0]);
    let absent = if trained.is_empty() { None } else { Some(backend.buffer(4)?) };
    for (id, (weight, format)) in program.weights.iter().zip(formats).enumerate() {
        if let Some(absent) = absent.as_ref().filter(|_| trained.contains(&WeightId(id))) {
            let bytes = size(weight, None);
            let buffer = absent.clone();
            weights.push(Weight { buffer, bytes, encoding: None, joined: None });
            continue;
        }
        let read = weight.read(tensors)?;
        let place = joined.iter().zip(&mut groups).find_map(|(group, whole)| {
            Some((group, group.iter().position(|other| other.0 == id)?, whole))
        });
        let (buffer, all) = match place {
            None => (backend.buffer(size(weight, *format))?, None),
            Some((group, at, whole)) => {
                let all = match whole {
                    Some(all) => all.clone(),
                    None => {
                        let all = backend.buffer(group.iter().map(of).sum())?;
                        whole.insert(all).clone()
                    }
                };
                let start = group[..at].iter().map(of).sum();
                let part = backend.part(&all, start..start + size(weight, *format))?;
                (part, (at == 0).then_some(all))
            }
        };
        let found = match layout(weight, *format) {
            Some(layout) => loader.matrix(&read, &layout, &buffer),
            None if weight.shape.len() == 1 => loader.vector(&read, &buffer),
            None => {
                let shape = format!("{:?}", weight.shape);
                return Err(Error::new(&weight.name, "rank 1 or 2", shape));
            }
        };
        if let Some(found) = found.map_err(|e| weight.named(e))? {
            return Err(finite::refusal(weight, tensors, found));
        }
        let (bytes, encoding) = (size(weight, *format), format.map(|_| read.encoding));
        weights.push(Weight { buffer, bytes, encoding, joined: all });
        weight.source.release(tensors);
        done += weight.stored_bytes(tensors)?;
        progress(done, total);
    }
    Ok(weights)
}

/// What takes weights to a device.
struct Loader<'a, B: Backend> {
    backend: &'a B,
    /// They take turns.
    stages: Vec<Box<dyn Stage<B::Buffer> + 'a>>,
    packer: Packer,
}

impl<B: Backend> Loader<'_, B> {
    /// Packs a matrix to a buffer. The first of its weights that is not finite ends it, if they
    /// must be.
    fn matrix(
        &mut self,
        from: &Encoded<'_>,
        layout: &Layout,
        to: &B::Buffer,
    ) -> Result<Option<NotFinite>> {
        let (per_row, source) = (4 * layout.row_words(), from.bytes.len() / layout.rows.max(1));
        let mut first = 0;
        while first < layout.rows {
            let stage = turn(&mut self.stages)?;
            let bytes = stage.bytes()?;
            let count = (bytes.len() / per_row).clamp(1, layout.rows - first);
            let missing = || Error::new("load", "rows of the matrix", from.bytes.len());
            let rows = from.bytes.get(first * source..(first + count) * source);
            let (rows, packed) = rows.zip(bytes.get_mut(..count * per_row)).ok_or_else(missing)?;
            if let Some(found) = self.packer.pack(from.encoding, rows, layout, packed)? {
                let before = first * layout.cols;
                return Ok(Some(NotFinite { element: before + found.element, ..found }));
            }
            let part = first * per_row..(first + count) * per_row;
            stage.send(part.len(), &self.backend.part(to, part)?)?;
            first += count;
        }
        Ok(None)
    }

    /// Writes a vector to a buffer, in f32.
    fn vector(&mut self, from: &Encoded<'_>, to: &B::Buffer) -> Result<Option<NotFinite>> {
        let values = from.to_f32()?;
        let found = NotFinite::among(&values).filter(|_| self.packer.looks);
        if found.is_none() {
            let stage = turn(&mut self.stages)?;
            let words = stage.bytes()?.as_chunks_mut().0;
            let missing = || Error::new("load", "room for a vector", values.len());
            let words = words.get_mut(..values.len()).ok_or_else(missing)?;
            words.iter_mut().zip(&values).for_each(|(word, value)| *word = value.to_le_bytes());
            stage.send(4 * values.len(), to)?;
        }
        Ok(found)
    }
}

/// The stage whose turn it is: the one that was used longest ago.
fn turn<'s, 'a, B>(
    stages: &'s mut [Box<dyn Stage<B> + 'a>],
) -> Result<&'s mut (dyn Stage<B> + 'a)> {
    stages.rotate_left(1.min(stages.len()));
    stages.last_mut().map(Box::as_mut).ok_or_else(|| Error::new("load", "a stage", "none"))
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::borrow::Cow;

    use formats::DType;

    use super::super::sim::{Engine, Sim};
    use super::super::stage::Heap;
    use super::*;

    const COLS: usize = 512;

    /// Loads a matrix through stages of so many bytes, and reads back what is on the device.
    fn load(
        dtype: DType,
        bytes: &[u8],
        rows: usize,
        stages: &[usize],
    ) -> Result<(Option<NotFinite>, Vec<u8>)> {
        let sim = Sim::new(Engine::Interpreter);
        let heap = |bytes: &usize| Ok(Box::new(Heap::new(&sim, *bytes)?) as Box<dyn Stage<_>>);
        let mut loader = Loader {
            backend: &sim,
            stages: stages.iter().map(heap).collect::<Result<_>>()?,
            packer: Packer::new(1, true)?,
        };
        let layout = Layout::new(Format::of(dtype).unwrap(), rows, COLS)?;
        let buffer = sim.buffer(layout.bytes())?;
        let from = Encoded {
            encoding: dtype.into(),
            shape: vec![rows, COLS],
            bytes: Cow::Borrowed(bytes),
        };
        let found = loader.matrix(&from, &layout, &buffer)?;
        let mut packed = vec![0; layout.bytes()];
        sim.read(&buffer, &mut packed)?;
        Ok((found, packed))
    }

    #[test]
    fn portions_come_together_whatever_their_size() {
        for dtype in [DType::Q4K, DType::Q8_0, DType::BF16, DType::F32] {
            let rows = 37;
            let size = formats::Encoding::Stored(dtype).bytes_for(rows * COLS).unwrap();
            let bytes: Vec<u8> = (0..size).map(|i| (i * 37 % 59) as u8).collect();
            let want = ops::packed::pack(dtype, &bytes, rows, COLS).unwrap();
            let row = 4 * want.layout.row_words();
            for stages in [&[row][..], &[3 * row + 5, row], &[37 * row, 37 * row], &[1 << 20]] {
                let (found, packed) = load(dtype, &bytes, rows, stages).unwrap();
                assert!(found.is_none() && packed == want.bytes, "{dtype} by {stages:?}");
            }
        }
    }

    #[test]
    fn a_weight_that_is_not_finite_is_counted_from_the_matrix_on() {
        let rows = 20;
        let mut bytes = vec![0; 2 * rows * COLS];
        for at in [COLS * 17 + 3, COLS * 11 + 500] {
            bytes[2 * at..][..2].copy_from_slice(&[0, 0x7c]);
            let (found, _) = load(DType::F16, &bytes, rows, &[4 * 2 * COLS; 2]).unwrap();
            let expected = NotFinite { element: at, shared: 1, value: f32::INFINITY };
            assert_eq!(found, Some(expected));
        }
    }

    #[test]
    fn a_stage_too_small_for_a_row_is_refused() {
        let bytes = vec![0; 4 * COLS];
        let why = load(DType::F32, &bytes, 1, &[4 * COLS - 1]).unwrap_err().to_string();
        assert!(why.contains("rows of the matrix") && !why.contains('\n'), "{why}");
        assert!(load(DType::F32, &bytes, 1, &[]).is_err());
    }
}
