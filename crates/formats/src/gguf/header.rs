//! The GGUF header: a pure function from bytes to metadata and tensor places.
//!
//! ```text
//! "GGUF", version: u32, tensors: n, keys: n
//! keys    x (key: string, type: u32, value)
//! tensors x (name: string, rank: u32, dims: n each, innermost first, type: u32, offset: u64)
//! padding to general.alignment (32), then the data that offsets count from
//! ```
//! `n` and string lengths are u32 in version 1 and u64 since; versions 2 and 3 differ only in
//! allowing big-endian files.

use super::cursor::Cursor;
use super::metadata::Metadata;
use super::value::MetadataValue;
use crate::error::{clipped, shape as shape_text};
use crate::{DType, Error, Result, TensorInfo};

/// The part of a GGUF file before its data.
#[derive(Debug, Clone)]
pub struct Header {
    /// Format version: 1, 2 or 3.
    pub version: u32,
    /// Tensor data starts at multiples of this many bytes; a power of two.
    pub alignment: u64,
    /// Keys and values.
    pub metadata: Metadata,
    /// Tensors in file order, with distinct names and disjoint data inside the file. No dimension
    /// is 0.
    pub tensors: Vec<TensorInfo>,
    /// Where the data begins, in bytes from the start of the file.
    pub data_start: u64,
}

/// ggml's own limit on dimensions.
pub(super) const MAX_RANK: usize = 4;
/// Alignment of files that do not state one.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;

/// Reads the header of a whole GGUF file; `place` names the file in errors.
///
/// Everything the result says has been checked against `bytes`: counts, names, shapes, alignment,
/// and that tensors lie inside the file one behind the other, with no more between them than
/// padding. Keys and tensor names must be UTF-8; string values that are not have the bad bytes
/// replaced. Memory use is bounded by a small multiple of the header's size in the file.
///
/// # Errors
/// Bytes of which any of that is not true, another kind of file, another version or byte order, and
/// tensor types that are not supported.
pub fn parse(bytes: &[u8], place: &str) -> Result<Header> {
    let mut cursor = Cursor::new(bytes, place);
    let version = read_version(&mut cursor, place)?;
    let width = if cursor.wide { 8 } else { 4 };
    // The least a tensor can take: an empty name, a rank, one dimension, a type and an offset; then
    // the same for a key.
    let tensor_count = cursor.count("a tensor count", width + 4 + width + 4 + 8)?;
    let key_count = cursor.count("a metadata count", width + 4 + 1)?;

    let mut entries = Vec::with_capacity(key_count);
    for _ in 0..key_count {
        entries.push(read_entry(&mut cursor, place)?);
    }
    let metadata = Metadata::new(place, entries)?;
    let alignment = alignment(&metadata, place)?;

    let mut tensors = Vec::with_capacity(tensor_count);
    for _ in 0..tensor_count {
        tensors.push(read_tensor(&mut cursor, place, alignment)?);
    }
    let end = cursor.position() as u64;
    let data_start = end.checked_next_multiple_of(alignment).ok_or_else(|| {
        Error::new(
            format!("{place}: general.alignment"),
            "an alignment inside the file's size",
            alignment,
        )
    })?;
    for tensor in &mut tensors {
        place_tensor(tensor, data_start, bytes.len() as u64, place)?;
    }
    check_distinct(&tensors, place)?;
    check_layout(&tensors, data_start, alignment, place)?;
    check_alignment(&tensors, bytes, (end, data_start), alignment, place)?;
    Ok(Header { version, alignment, metadata, tensors, data_start })
}

/// Reads the keys and values at the beginning of a GGUF file, of which `bytes` hold the first part:
/// those that fit in it. `place` names the file in errors.
///
/// The architecture comes before the vocabulary, so some hundred kibibytes tell it.
///
/// # Errors
/// Another kind of file, another version or byte order, bytes that end before the first key, or a
/// key that comes twice.
pub fn first_keys(bytes: &[u8], place: &str) -> Result<Metadata> {
    let mut cursor = Cursor::new(bytes, place);
    read_version(&mut cursor, place)?;
    cursor.length("a tensor count")?;
    let key_count = cursor.length("a metadata count")?;
    let mut entries = Vec::new();
    for _ in 0..key_count {
        // Where the bytes end, and where they are damaged: the whole header is read when the file
        // is opened.
        let Ok(entry) = read_entry(&mut cursor, place) else { break };
        entries.push(entry);
    }
    Metadata::new(place, entries)
}

/// Checks the magic and the version, and sets the cursor's width by it.
fn read_version(cursor: &mut Cursor<'_>, place: &str) -> Result<u32> {
    let magic: [u8; 4] = cursor.array("the magic \"GGUF\"")?;
    if &magic != b"GGUF" {
        let found = match &magic {
            // A file of another kind is told by its first bytes.
            b"PK\x03\x04" => "a ZIP archive, as PyTorch writes".to_string(),
            b"ggml" | b"ggjt" | b"ggmf" | b"lmgg" | b"tjgg" | b"fmgg" => {
                "a GGML file, GGUF's predecessor".to_string()
            }
            b"vers" => "\"vers\", as Git LFS's pointers to files begin".to_string(),
            other => format!("{:?}", String::from_utf8_lossy(other)),
        };
        return Err(Error::new(place, "a GGUF file, which begins with \"GGUF\"", found));
    }
    let version = cursor.u32("the version")?;
    match version {
        1..=3 => {}
        swapped if (1..=3).contains(&swapped.swap_bytes()) => {
            return Err(Error::new(place, "a little-endian GGUF file", "a big-endian one")
                .hint("convert it with gguf-py's gguf_convert_endian script"));
        }
        other => {
            return Err(Error::new(place, "GGUF version 1, 2 or 3", format!("version {other}")));
        }
    }
    cursor.wide = version > 1;
    Ok(version)
}

/// One key and its value.
fn read_entry(cursor: &mut Cursor<'_>, place: &str) -> Result<(String, MetadataValue)> {
    let key = cursor.name("a metadata key")?;
    let place = format!("{place}: {}", clipped(&key));
    let id = cursor.u32("a metadata type")?;
    let value = MetadataValue::read(cursor, id, &place).map_err(|e| Error { place, ..e })?;
    Ok((key, value))
}

/// `general.alignment`, or 32.
pub(super) fn alignment(metadata: &Metadata, place: &str) -> Result<u64> {
    match metadata.u64("general.alignment")? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(alignment) if alignment.is_power_of_two() => Ok(alignment),
        Some(other) => {
            Err(Error::new(format!("{place}: general.alignment"), "a power of two", other))
        }
    }
}

/// One tensor's entry; `start` is still the offset into the data.
fn read_tensor(cursor: &mut Cursor<'_>, place: &str, alignment: u64) -> Result<TensorInfo> {
    let name = cursor.name("a tensor name")?;
    let at = || format!("{place}: tensor {}", clipped(&name));
    let rank = cursor.u32("a tensor's rank")? as usize;
    if !(1..=MAX_RANK).contains(&rank) {
        return Err(Error::new(at(), "1 to 4 dimensions", rank));
    }
    let mut shape = Vec::with_capacity(rank);
    for _ in 0..rank {
        let dim = cursor.length("a dimension")?;
        let dim = usize::try_from(dim).ok().filter(|&dim| dim > 0);
        shape.push(dim.ok_or_else(|| {
            Error::new(at(), "dimensions of at least 1 that fit memory", "another")
        })?);
    }
    shape.reverse();
    let dtype = DType::from_ggml_id(cursor.u32("a tensor's type")?, at())?;
    let len = byte_len(dtype, &shape, at)?;
    let start = cursor.u64("a tensor's offset")?;
    if !start.is_multiple_of(alignment) {
        return Err(Error::new(at(), format!("an offset aligned to {alignment} bytes"), start));
    }
    Ok(TensorInfo { name, dtype, shape, start, len })
}

/// Bytes of a tensor with that (row-major) shape; rows must be whole blocks.
pub(super) fn byte_len(dtype: DType, shape: &[usize], at: impl Fn() -> String) -> Result<u64> {
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(dtype.block_elements()) {
        let expected = format!("rows in whole {dtype} blocks of {}", dtype.block_elements());
        return Err(Error::new(at(), expected, format!("rows of {row}")));
    }
    let elements = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim as u64));
    elements.and_then(|n| dtype.bytes_for(n)).ok_or_else(|| {
        Error::new(at(), "a size that fits 64 bits", format!("{dtype} {}", shape_text(shape)))
    })
}

/// Turns the offset into a place in the file, and checks that the data is there.
fn place_tensor(tensor: &mut TensorInfo, data_start: u64, file: u64, place: &str) -> Result<()> {
    let end = data_start.checked_add(tensor.start).and_then(|start| start.checked_add(tensor.len));
    match end {
        Some(end) if end <= file => {
            tensor.start += data_start;
            Ok(())
        }
        _ => {
            let at = format!("{place}: tensor {}", clipped(&tensor.name));
            let expected = format!("{} bytes at data offset {}", tensor.len, tensor.start);
            Err(Error::new(
                at,
                expected,
                format!("a file of {file} bytes, whose data begins at {data_start}"),
            )
            .hint("the file is damaged or cut short; download it again"))
        }
    }
}

fn check_distinct(tensors: &[TensorInfo], place: &str) -> Result<()> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = order.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::new(
            place,
            "distinct tensor names",
            format!("{} twice", clipped(&pair[0].name)),
        ));
    }
    order.sort_unstable_by_key(|tensor| tensor.start);
    if let Some(pair) = order.windows(2).find(|pair| pair[0].start + pair[0].len > pair[1].start) {
        let found = format!("{} inside {}", clipped(&pair[1].name), clipped(&pair[0].name));
        return Err(Error::new(place, "tensors that do not overlap", found));
    }
    Ok(())
}

/// Writers pad every tensor to the alignment and leave no other gap. A file whose tensors lie
/// otherwise was written with another alignment than it states, or its offsets are damaged: in both
/// cases the data would be taken for other weights.
fn check_layout(tensors: &[TensorInfo], start: u64, alignment: u64, place: &str) -> Result<()> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.start);
    let mut next = Some(start);
    for tensor in order {
        if next != Some(tensor.start) {
            let at = format!("{place}: tensor {}", clipped(&tensor.name));
            let expected = match next {
                Some(next) => {
                    format!("data offset {}, where the tensor before it ends", next - start)
                }
                None => "an offset that fits 64 bits".to_string(),
            };
            let hint =
                format!("general.alignment = {alignment} may not be how the file was written");
            return Err(Error::new(at, expected, tensor.start - start).hint(hint));
        }
        next = tensor
            .start
            .checked_add(tensor.len)
            .and_then(|end| end.checked_next_multiple_of(alignment));
    }
    Ok(())
}

/// The largest alignment that [`check_alignment`] looks for.
const LARGEST_ALIGNMENT: u64 = 1 << 16;

/// Refuses a file that was written with a larger alignment than it states where every tensor fits
/// both, so that only the beginning of the data tells: all of it would be read some bytes too
/// early. Such a file is longer than it should be by just those bytes, which are zeros.
fn check_alignment(
    tensors: &[TensorInfo],
    bytes: &[u8],
    (header, start): (u64, u64),
    stated: u64,
    place: &str,
) -> Result<()> {
    let Some(data) = tensors.iter().map(|t| t.start + t.len - start).max() else { return Ok(()) };
    let Some(extra) = (bytes.len() as u64).checked_sub(start + data) else { return Ok(()) };
    let mut alignment = stated;
    while alignment < LARGEST_ALIGNMENT {
        alignment *= 2;
        let shift = header.next_multiple_of(alignment) - start;
        let padding = data.next_multiple_of(alignment) - data;
        let fits = tensors.iter().all(|t| (t.start - start).is_multiple_of(alignment));
        let longer = extra == shift || extra == shift + padding;
        let zeros = || bytes.iter().skip(start as usize).take(shift as usize).all(|&b| b == 0);
        if shift > 0 && fits && longer && zeros() {
            let expected = format!("{alignment}, by which the data is aligned");
            return Err(Error::new(format!("{place}: general.alignment"), expected, stated));
        }
    }
    Ok(())
}
