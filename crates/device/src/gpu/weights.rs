//! Weights on the device: matrices in planes, vectors in f32.
//!
//! Loading is a pipeline. Some rows of a matrix at a time are checked for numbers that are not
//! finite and packed by all cores, from the mapped file to a [`StagingBuffer`]; while that is
//! copied to the device, the next rows are packed to another. So the host needs no memory but the
//! staging buffers, unless a weight's recipe makes a copy of it.

mod packer;

use std::sync::{Arc, Mutex, PoisonError};

use formats::{Encoded, Encoding, Error, Hint, NotFinite, Result, Setting, Tensors};
use ops::packed::{Format, Layout};
use program::{Program, WeightId};

use super::{Backend, StagingBuffer};
use crate::finite;
use packer::Packer;

/// Bytes of a stage, unless a row or all weights need another size: enough that a copy takes longer
/// than to begin one.
const PORTION: usize = 32 << 20;

/// Columns of matrices come in multiples of this: in f32, which is packed by fours, products of
/// many rows take them by eights.
const COLUMNS: usize = 8;

/// A weight on the device.
pub(super) struct Weight<B> {
    pub(super) buffer: B,
    pub(super) bytes: usize,
    /// The file's encoding, if it is a matrix.
    pub(super) encoding: Option<Encoding>,
    /// The whole buffer, on the first matrix of a joined group.
    pub(super) joined: Option<B>,
    /// Keeps the allocation in the device's store: on the first weight of each allocation.
    stored: Option<Arc<Mutex<B>>>,
}

/// How an allocation of weights lies on the device.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Form {
    format: Option<Format>,
    /// The matrices joined behind the first.
    joined: Vec<(program::Weight, Option<Format>)>,
}

/// The weights of all Programs on the device: one entry for each allocation, named by its first
/// weight.
pub(super) type Store<B> = crate::store::Store<Form, Mutex<<B as Backend>::Buffer>>;

/// The view that one Program has of a [`Store`].
pub(super) type Stored<'a, B> = crate::store::Wanted<'a, Form, Mutex<<B as Backend>::Buffer>>;

/// Weights that share a buffer: the groups that are joined, and each other weight alone; in the
/// order of their first weights.
fn allocations(program: &Program, joined: &[Vec<WeightId>]) -> Vec<Vec<WeightId>> {
    let of = |id| match joined.iter().find(|group| group.contains(&id)) {
        None => Some(vec![id]),
        Some(group) => (group.iter().min_by_key(|own| own.0) == Some(&id)).then(|| group.clone()),
    };
    (0..program.weights.len()).filter_map(|id| of(WeightId(id))).collect()
}

/// The form of an allocation.
fn form(program: &Program, formats: &[Option<Format>], group: &[WeightId]) -> Form {
    let behind = group[1..].iter().map(|id| (program.weights[id.0].clone(), formats[id.0]));
    Form { format: formats[group[0].0], joined: behind.collect() }
}

/// Bytes of the weights that are not on the device yet.
pub(super) fn missing<B: Backend>(
    program: &Program,
    formats: &[Option<Format>],
    joined: &[Vec<WeightId>],
    stored: &Stored<'_, B>,
) -> usize {
    let absent = |group: &Vec<WeightId>| {
        stored.find(&program.weights[group[0].0], &form(program, formats, group)).is_none()
    };
    let missing = allocations(program, joined).into_iter().filter(absent).flatten();
    missing.map(|id| size(&program.weights[id.0], formats[id.0])).sum()
}

/// How each matrix will be packed, in rows: as its recipe encodes it; none for those that are
/// `trained`.
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
        let refused = |e: Error| weight.named(e).hint(Hint::set(Setting::Place, "cpu"));
        Layout::new(format, rows, cols).map_err(refused)?;
        if !cols.is_multiple_of(COLUMNS) {
            let place = format!("packed {} [{rows}, {cols}]", format.name());
            let expected = format!("columns in multiples of {COLUMNS}");
            return Err(refused(Error::new(place, expected, cols)));
        }
        Ok(Some(format))
    };
    program.weights.iter().enumerate().map(one).collect()
}

/// How many columns of a matrix stay together where ranks share it: whole blocks of its encoding, in
/// multiples of what kernels load at a time.
///
/// # Errors
/// A weight that cannot be described.
pub(crate) fn column_block(weight: &program::Weight, tensors: &Tensors) -> Result<usize> {
    let encoding = weight.describe(tensors)?.encoding;
    let step = Format::of(encoding).map_or(1, Format::step) as usize;
    let sides = [encoding.block_elements(), step];
    Ok(sides.into_iter().fold(COLUMNS, |all, side| {
        let multiples = (1..=side.max(1)).map(|times| times * all);
        multiples.into_iter().find(|all| all.is_multiple_of(side.max(1))).unwrap_or(all)
    }))
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

/// Bytes of a stage for the weights that are read: each row, or rows that lie together, and each
/// vector fits.
fn portion(program: &Program, formats: &[Option<Format>], trained: &[WeightId]) -> usize {
    let all = || {
        let each = program.weights.iter().zip(formats).enumerate();
        each.filter(|(id, _)| !trained.contains(&WeightId(*id))).map(|(_, own)| own)
    };
    let whole = all().map(|(weight, format)| size(weight, *format)).max().unwrap_or(0);
    let least = all().map(|(weight, format)| match layout(weight, *format) {
        Some(layout) => 4 * layout.row_words() * layout.format.together(),
        None => size(weight, *format),
    });
    PORTION.min(whole).max(least.max().unwrap_or(0))
}

/// The weights of a Program that are loaded, and their forms.
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
    stored: &Stored<'_, B>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Weight<B::Buffer>>> {
    stored.prune();
    let total = program.stored_bytes(tensors)?;
    let mut loader = Loader {
        backend,
        stages: backend.stages(portion(program, formats, trained).max(4))?,
        packer: Packer::new(bytes(program, formats), !allow_nan)?,
    };
    let mut done = 0;
    let mut weights = Vec::with_capacity(program.weights.len());
    let size = |id: WeightId| size(&program.weights[id.0], formats[id.0]);
    let absent = if trained.is_empty() { None } else { Some(backend.buffer(4)?) };
    for group in allocations(program, joined) {
        let first = group[0];
        if let Some(absent) = absent.as_ref().filter(|_| trained.contains(&first)) {
            let (buffer, bytes) = (absent.clone(), size(first));
            weights.push((
                first,
                Weight { buffer, bytes, encoding: None, joined: None, stored: None },
            ));
            continue;
        }
        let form = form(program, formats, &group);
        let held = stored.find(&program.weights[first.0], &form);
        let whole = match &held {
            Some(held) => held.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            None => backend.buffer(group.iter().map(|id| size(*id)).sum())?,
        };
        let (mut start, at) = (0, weights.len());
        for &id in &group {
            let (weight, bytes) = (&program.weights[id.0], size(id));
            let buffer = match group.len() {
                1 => whole.clone(),
                _ => backend.part(&whole, start..start + bytes)?,
            };
            start += bytes;
            let encoding = match held {
                Some(_) => weight.describe(tensors)?.encoding,
                None => loader.weight(weight, formats[id.0], tensors, &buffer)?,
            };
            let encoding = formats[id.0].map(|_| encoding);
            weights.push((id, Weight { buffer, bytes, encoding, joined: None, stored: None }));
            done += weight.stored_bytes(tensors)?;
            progress(done, total);
        }
        let held = held.unwrap_or_else(|| {
            let held = Arc::new(Mutex::new(whole.clone()));
            stored.keep(&program.weights[first.0], form, start, &held);
            held
        });
        let first = &mut weights[at].1;
        (first.stored, first.joined) = (Some(held), (group.len() > 1).then_some(whole));
    }
    weights.sort_by_key(|(id, _)| id.0);
    Ok(weights.into_iter().map(|(_, weight)| weight).collect())
}

/// The upload of weights to a device.
struct Loader<'a, B: Backend> {
    backend: &'a B,
    /// They take turns.
    stages: Vec<Box<dyn StagingBuffer<B::Buffer> + 'a>>,
    packer: Packer,
}

impl<B: Backend> Loader<'_, B> {
    /// Reads a weight and puts it into a buffer. Returns its encoding in the file.
    fn weight(
        &mut self,
        weight: &program::Weight,
        format: Option<Format>,
        tensors: &Tensors,
        to: &B::Buffer,
    ) -> Result<Encoding> {
        let read = weight.read(tensors)?;
        let found = match layout(weight, format) {
            Some(layout) => self.matrix(&read, &layout, to),
            None if weight.shape.len() == 1 => self.vector(&read, to),
            None => {
                let shape = format!("{:?}", weight.shape);
                return Err(Error::new(&weight.name, "rank 1 or 2", shape));
            }
        };
        if let Some(found) = found.map_err(|e| weight.named(e))? {
            return Err(finite::refusal(weight, tensors, found));
        }
        weight.source.release(tensors);
        Ok(read.encoding)
    }

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
            let together = layout.format.together();
            let count = bytes.len() / per_row / together * together;
            let count = count.clamp(together, layout.rows - first);
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
    stages: &'s mut [Box<dyn StagingBuffer<B> + 'a>],
) -> Result<&'s mut (dyn StagingBuffer<B> + 'a)> {
    stages.rotate_left(1.min(stages.len()));
    stages.last_mut().map(Box::as_mut).ok_or_else(|| Error::new("load", "a stage", "none"))
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::borrow::Cow;

    use formats::DType;
    use ops::packed::pack_as;
    use tile::types::Scalar;

    use super::super::lower::Lowering;
    use super::super::sim::{KernelRunner, Sim};
    use super::super::stage::Heap;
    use super::*;
    use crate::{CacheType, ExecutorOptions};

    const COLS: usize = 512;

    /// Loads a matrix through staging buffers of these sizes in bytes, and reads it back from the
    /// device.
    fn load(
        (format, dtype): (Format, DType),
        bytes: &[u8],
        rows: usize,
        stages: &[usize],
    ) -> Result<(Option<NotFinite>, Vec<u8>)> {
        let sim = Sim::new(KernelRunner::Interpreter);
        let heap =
            |bytes: &usize| Ok(Box::new(Heap::new(&sim, *bytes)?) as Box<dyn StagingBuffer<_>>);
        let mut loader = Loader {
            backend: &sim,
            stages: stages.iter().map(heap).collect::<Result<_>>()?,
            packer: Packer::new(1, true)?,
        };
        let layout = Layout::new(format, rows, COLS)?;
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
        let of = |dtype| Format::of(dtype).unwrap();
        let in_rows = [DType::Q4K, DType::Q8_0, DType::BF16, DType::F32].map(|d| (of(d), d));
        let in_tiles = [DType::Q4K, DType::Q8_0].map(|d| (of(d).tiled().unwrap(), d));
        for (format, dtype) in in_rows.into_iter().chain(in_tiles) {
            let together = format.together();
            let rows = 37usize.next_multiple_of(together);
            let size = formats::Encoding::Stored(dtype).bytes_for(rows * COLS).unwrap();
            let bytes: Vec<u8> = (0..size).map(|i| (i * 37 % 59) as u8).collect();
            let want = pack_as(format, dtype.into(), &bytes, rows, COLS).unwrap();
            let row = 4 * want.layout.row_words() * together;
            for stages in [&[row][..], &[3 * row + 5, row], &[37 * row, 37 * row], &[1 << 20]] {
                let (found, packed) = load((format, dtype), &bytes, rows, stages).unwrap();
                let name = format.name();
                assert!(found.is_none() && packed == want.bytes, "{name} by {stages:?}");
            }
        }
    }

    #[test]
    fn a_weight_that_is_not_finite_is_counted_from_the_matrix_on() {
        let rows = 20;
        let f16 = (Format::Dense(Scalar::F16), DType::F16);
        let mut bytes = vec![0; 2 * rows * COLS];
        for at in [COLS * 17 + 3, COLS * 11 + 500] {
            bytes[2 * at..][..2].copy_from_slice(&[0, 0x7c]);
            let (found, _) = load(f16, &bytes, rows, &[4 * 2 * COLS; 2]).unwrap();
            let expected = NotFinite { element: at, shared: 1, value: f32::INFINITY };
            assert_eq!(found, Some(expected));
        }
    }

    #[test]
    fn a_stage_too_small_for_a_row_is_refused() {
        let bytes = vec![0; 4 * COLS];
        let f32 = (Format::Dense(Scalar::F32), DType::F32);
        let why = load(f32, &bytes, 1, &[4 * COLS - 1]).unwrap_err().to_string();
        assert!(why.contains("rows of the matrix") && !why.contains('\n'), "{why}");
        assert!(load(f32, &bytes, 1, &[]).is_err());
    }

    /// Quantised matrices of products are packed in tiles when a model is loaded for many sequences,
    /// and in rows otherwise.
    #[test]
    fn loads_for_many_sequences_have_blocks_in_tiles() {
        for (sequences, batched) in [(48, true), (2, true), (48, false)] {
            let (program, tensors) = crate::tests::recorded("llama-k-quants/model.q4_k_m.gguf");
            let in_rows = formats(&program, &tensors, &[]).unwrap();
            let options = ExecutorOptions {
                cache_type: CacheType::BF16,
                rows: (48, 48),
                blocks: vec![48],
                context: vec![1],
                sequences,
                batched,
                ..ExecutorOptions::default()
            };
            let facts = Sim::new(KernelRunner::Interpreter).facts();
            let lowering = Lowering::new(program, facts, &options, in_rows.clone()).unwrap();
            let many = batched && sequences == 48;
            let of_products = lowering.program.nodes.iter().flat_map(|node| {
                let product = node.op.product(node.weights.len()).into_iter();
                product.flat_map(|p| p.projections).map(|p| node.weights[p.weight].0)
            });
            let mut found = 0;
            for id in of_products {
                let (format, rows) = (lowering.formats[id].unwrap(), in_rows[id].unwrap());
                let expected = rows.tiled().filter(|_| many).unwrap_or(rows);
                assert_eq!(
                    format, expected,
                    "{} of {sequences}",
                    lowering.program.weights[id].name
                );
                found += usize::from(format != rows);
            }
            assert_eq!(found > 0, many);
            let same = lowering.formats.iter().zip(&in_rows);
            same.for_each(|(format, rows)| assert_eq!(format.map(Format::in_rows), *rows));
        }
    }

    #[test]
    fn joined_matrices_are_one_allocation_that_a_second_program_shares() {
        let (program, tensors) = crate::tests::recorded("qwen3-untied");
        let sim = Sim::new(KernelRunner::Interpreter);
        let formats = formats(&program, &tensors, &[]).unwrap();
        let options = ExecutorOptions {
            cache_type: CacheType::BF16,
            rows: (96, 96),
            blocks: vec![96],
            context: vec![1],
            sequences: 96,
            batched: true,
            ..ExecutorOptions::default()
        };
        let lowering = Lowering::new(program, sim.facts(), &options, formats).unwrap();
        let store = Store::<Sim>::default();
        let stored = store.of(&tensors, false);
        let (program, formats) = (&lowering.program, &lowering.formats[..]);
        let load = |joined| {
            let wanted = Wanted { formats, trained: &[], joined, allow_nan: false };
            super::load(&sim, program, &tensors, &wanted, &stored, &mut |_, _| {}).unwrap()
        };
        let active = || sim.usage().unwrap().active;
        let read = |buffer: &_, bytes| {
            let mut found = vec![0; bytes];
            sim.read(buffer, &mut found).unwrap();
            found
        };
        let all = bytes(program, formats);
        let joined = &lowering.joined[..];
        assert!(joined.len() >= program.layers.len(), "{joined:?}");
        let first = load(joined);
        let held = active();
        assert_eq!((store.shared(), missing::<Sim>(program, formats, joined, &stored)), (0, 0));
        let second = load(joined);
        assert_eq!((store.shared(), active()), (all, held));
        for group in joined {
            let parts = || group.iter().map(|id| &second[id.0]);
            let whole = second[group[0].0].joined.as_ref().unwrap();
            let parts_read: Vec<u8> = parts().flat_map(|w| read(&w.buffer, w.bytes)).collect();
            assert_eq!(read(whole, parts().map(|w| w.bytes).sum()), parts_read);
        }
        // Matrices that are apart are others, and hold what the joined ones hold.
        let joined_bytes: usize = joined.iter().flatten().map(|id| first[id.0].bytes).sum();
        assert_eq!(missing::<Sim>(program, formats, &[], &stored), joined_bytes);
        let apart = load(&[]);
        for (a, b) in apart.iter().zip(&first) {
            assert_eq!(read(&a.buffer, a.bytes), read(&b.buffer, b.bytes));
        }
        drop((first, second));
        assert_eq!(missing::<Sim>(program, formats, joined, &stored), joined_bytes);
        drop(apart);
        assert_eq!((store.shared(), active()), (0, 0));
    }
}
