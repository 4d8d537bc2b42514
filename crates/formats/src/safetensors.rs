//! Safetensors: a JSON header, then raw tensors with nothing between them.
//!
//! ```text
//! 0..8      header length n: u64
//! 8..8+n    {"NAME": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, .., "__metadata__": {..}}
//! 8+n..     data; offsets count from here; the tensors cover it without holes or overlaps
//! ```

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use crate::aside::Aside;
use crate::error::clipped;
use crate::gguf::TensorSpec;
use crate::map::Map;
use crate::tensors::{TensorInfo, TensorView, sorted_unique};
use crate::{DType, Error, Result};

/// The longest header the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// The part of a safetensors file before its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The `__metadata__` strings, in file order.
    pub metadata: Vec<(String, String)>,
    /// Tensors with distinct names, ordered by their data, which covers the file to its end.
    pub tensors: Vec<TensorInfo>,
    /// Where the data begins, in bytes from the start of the file.
    pub data_start: u64,
}

/// One value of the JSON header.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The JSON header with its order, and its duplicates, kept.
struct Entries {
    tensors: Vec<(String, Entry)>,
    metadata: Option<Pairs>,
}

/// A JSON object of strings with its order, and its duplicates, kept.
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Table;
        impl<'de> Visitor<'de> for Table {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<M: MapAccess<'de>>(
                self,
                mut map: M,
            ) -> std::result::Result<Entries, M::Error> {
                let mut entries = Entries { tensors: Vec::new(), metadata: None };
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        if entries.metadata.is_some() {
                            return Err(serde::de::Error::custom("__metadata__ twice"));
                        }
                        // MLX writes null where there is none.
                        let pairs: Option<Pairs> = map.next_value()?;
                        entries.metadata = Some(pairs.unwrap_or(Pairs(Vec::new())));
                    } else {
                        entries.tensors.push((key, map.next_value()?));
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Table)
    }
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Table;
        impl<'de> Visitor<'de> for Table {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<M: MapAccess<'de>>(
                self,
                mut map: M,
            ) -> std::result::Result<Pairs, M::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Table)
    }
}

/// Reads the header of a whole safetensors file; `place` names the file in errors.
///
/// Everything the result says has been checked against `bytes`: sizes equal shape times type, the
/// tensors cover the data without holes or overlaps, names are distinct.
///
/// # Errors
/// Bytes of which any of that is not true, or whose header is cut, too long, or no JSON object.
pub fn parse(bytes: &[u8], place: &str) -> Result<Header> {
    let cut = "the file is damaged or cut short; download it again";
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(Error::new(
            place,
            "a header length of 8 bytes",
            format!("{} bytes", bytes.len()),
        )
        .hint(cut));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        let expected = format!("a safetensors header of at most {MAX_HEADER} bytes");
        let hint = crate::pointer_hint(bytes).unwrap_or("this may not be a safetensors file");
        return Err(Error::new(place, expected, length).hint(hint));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(Error::new(
            place,
            format!("a header of {length} bytes"),
            format!("{} bytes", rest.len()),
        )
        .hint(cut));
    };
    if header.first() != Some(&b'{') {
        return Err(Error::new(place, "a JSON header that begins with {", "another byte"));
    }
    let entries: Entries = serde_json::from_slice(header)
        .map_err(|e| Error::new(place, "a safetensors header in JSON", clipped(&e.to_string())))?;

    let data_start = 8 + length;
    let mut tensors = Vec::with_capacity(entries.tensors.len());
    for (name, entry) in entries.tensors {
        tensors.push(check_tensor(name, entry, data_start, data.len() as u64, place)?);
    }
    sorted_unique::<usize>((0..tensors.len()).collect(), |i| tensors[i].name.as_str(), place)?;
    // Empty tensors may share a place with their neighbour: by start, then by end, they come first.
    tensors.sort_by_key(|tensor| (tensor.start, tensor.len));
    let mut end = data_start;
    for tensor in &tensors {
        if tensor.start != end {
            let at = format!("{place}: tensor {}", clipped(&tensor.name));
            let expected = format!(
                "data that begins at offset {}, where the one before ends",
                end - data_start
            );
            return Err(Error::new(at, expected, tensor.start - data_start));
        }
        end = tensor.start + tensor.len;
    }
    if end != bytes.len() as u64 {
        return Err(Error::new(
            place,
            format!("a file of {end} bytes"),
            format!("{} bytes", bytes.len()),
        )
        .hint(cut));
    }
    let metadata = entries.metadata.map(|pairs| pairs.0).unwrap_or_default();
    sorted_unique(metadata.iter().collect(), |pair: &(String, String)| pair.0.as_str(), place)?;
    Ok(Header { metadata, tensors, data_start })
}

fn check_tensor(
    name: String,
    entry: Entry,
    data_start: u64,
    data: u64,
    place: &str,
) -> Result<TensorInfo> {
    let at = || format!("{place}: tensor {}", clipped(&name));
    let dtype = dtype_named(&entry.dtype).ok_or_else(|| {
        let found = format!("{}, which is not supported", clipped(&entry.dtype));
        Error::new(at(), "a supported safetensors type", found)
            .hint("supported: F64 F32 F16 BF16 F8_E4M3 F8_E8M0 I64 I32 I16 I8 U64 U32 U16 U8 BOOL")
    })?;
    let (begin, end) = entry.data_offsets;
    if begin > end || end > data {
        let expected = format!("data offsets in order inside the file's {data} bytes of data");
        return Err(Error::new(at(), expected, format!("[{begin}, {end}]"))
            .hint("the file is damaged or cut short; download it again"));
    }
    let elements = entry.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
    let expected = elements.and_then(|n| dtype.bytes_for(n));
    if expected != Some(end - begin) {
        let dims: Vec<String> = entry.shape.iter().take(8).map(u64::to_string).collect();
        let shape = format!("{} [{}]", entry.dtype, dims.join(", "));
        let expected = match expected {
            Some(bytes) => format!("{bytes} bytes for {shape}"),
            None => format!("a size that fits 64 bits for {shape}"),
        };
        return Err(Error::new(at(), expected, format!("{} bytes", end - begin)));
    }
    let shape =
        entry.shape.iter().map(|&dim| usize::try_from(dim)).collect::<std::result::Result<_, _>>();
    let shape = shape.map_err(|_| Error::new(at(), "dimensions that fit memory", "larger ones"))?;
    Ok(TensorInfo { dtype, shape, start: data_start + begin, len: end - begin, name })
}

/// The type of a safetensors name: upper case, plain types only.
fn dtype_named(name: &str) -> Option<DType> {
    DType::ALL
        .into_iter()
        .find(|dtype| !dtype.is_block() && dtype.name().to_ascii_uppercase() == name)
}

/// An open safetensors file.
#[derive(Debug)]
pub struct Safetensors {
    map: Map,
    header: Header,
    /// Indices of tensors, ordered by name.
    by_name: Vec<usize>,
}

impl Safetensors {
    /// Maps and checks a file. It stays mapped while this lives: it may be replaced by renaming,
    /// not rewritten in place.
    ///
    /// # Errors
    /// What [`parse`] refuses, I/O.
    pub fn open(path: &Path) -> Result<Safetensors> {
        let map = Map::open(path)?;
        let place = path.display().to_string();
        let header = parse(map.bytes(), &place);
        // First: what a file that shrinks has lost reads as nonsense.
        map.whole()?;
        let header = header?;
        let indices = (0..header.tensors.len()).collect();
        let by_name = sorted_unique(indices, |i| header.tensors[i].name.as_str(), &place)?;
        Ok(Safetensors { map, header, by_name })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// The file's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// All tensors, in the order of their data.
    pub fn iter(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.header.tensors.iter().filter_map(|info| info.view(self.map.bytes()))
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let tensors = &self.header.tensors;
        let found = self.by_name.binary_search_by(|&i| tensors[i].name.as_str().cmp(name)).ok()?;
        tensors[self.by_name[found]].view(self.map.bytes())
    }

    pub(crate) fn map(&self) -> &Map {
        &self.map
    }
}

/// Writes a file, aside first and then renamed into place. Tensors are stored in the order given,
/// after a header padded so that the data begins at a multiple of 8.
///
/// # Errors
/// Names that come twice, a type that safetensors does not have, bytes that do not match the shape,
/// I/O.
pub fn write<'a>(
    path: &Path,
    metadata: &[(&str, &str)],
    tensors: impl IntoIterator<Item = TensorView<'a>>,
) -> Result<()> {
    let tensors: Vec<TensorView<'a>> = tensors.into_iter().collect();
    let specs = specs(&path.display().to_string(), &tensors)?;
    let mut writer = Writer::create(path, metadata, &specs)?;
    tensors.iter().try_for_each(|tensor| writer.write(tensor.bytes))?;
    writer.finish()
}

/// The bytes that [`write()`] would write to a file of this name.
///
/// # Errors
/// As [`write()`], but for I/O.
pub fn encode<'a>(
    name: &str,
    metadata: &[(&str, &str)],
    tensors: impl IntoIterator<Item = TensorView<'a>>,
) -> Result<Vec<u8>> {
    let tensors: Vec<TensorView<'a>> = tensors.into_iter().collect();
    let (header, data) = header(name, metadata, &specs(name, &tensors)?)?;
    let mut bytes = Vec::with_capacity(8 + header.len() + data as usize);
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend(header);
    tensors.iter().for_each(|tensor| bytes.extend_from_slice(tensor.bytes));
    Ok(bytes)
}

/// The header entries of tensors, whose bytes must match their shapes.
fn specs(place: &str, tensors: &[TensorView<'_>]) -> Result<Vec<TensorSpec>> {
    let spec = |tensor: &TensorView<'_>| {
        let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
        let spec = TensorSpec { name, dtype: tensor.dtype, shape };
        if byte_len(&spec) != Some(tensor.bytes.len() as u64) {
            let place = format!("{place}: tensor {}", clipped(tensor.name));
            let expected = format!("the bytes of {} {}", tensor.dtype, crate::shape(tensor.shape));
            return Err(Error::new(place, expected, format!("{} bytes", tensor.bytes.len())));
        }
        Ok(spec)
    };
    tensors.iter().map(spec).collect()
}

/// The header of a file of these tensors, padded, and the bytes of data behind it.
fn header(
    place: &str,
    metadata: &[(&str, &str)],
    tensors: &[TensorSpec],
) -> Result<(Vec<u8>, u64)> {
    sorted_unique(tensors.iter().collect(), |tensor: &TensorSpec| tensor.name.as_str(), place)?;
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        let pairs: serde_json::Map<_, _> =
            metadata.iter().map(|&(k, v)| (k.to_string(), v.into())).collect();
        header.insert("__metadata__".to_string(), pairs.into());
    }
    let mut end = 0u64;
    for tensor in tensors {
        let at = || format!("{place}: tensor {}", clipped(&tensor.name));
        if tensor.dtype.is_block() || tensor.name == "__metadata__" {
            let expected = "a name and a type that safetensors has";
            return Err(Error::new(at(), expected, tensor.dtype));
        }
        let begin = end;
        let after = byte_len(tensor).and_then(|len| begin.checked_add(len));
        end = after.ok_or_else(|| Error::new(at(), "a size that fits 64 bits", "a larger one"))?;
        let dtype = tensor.dtype.name().to_ascii_uppercase();
        let entry = serde_json::json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end] });
        header.insert(tensor.name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() as u64 > MAX_HEADER {
        let expected = format!("a header of at most {MAX_HEADER} bytes");
        return Err(Error::new(place, expected, header.len()));
    }
    Ok((header, end))
}

/// Bytes of a tensor; none if they do not fit 64 bits, or are no whole blocks.
fn byte_len(spec: &TensorSpec) -> Option<u64> {
    let elements = spec.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim as u64));
    elements.and_then(|n| spec.dtype.bytes_for(n))
}

/// A file under way. It is written aside and takes its name in [`Writer::finish`]; dropped before
/// that, it leaves nothing behind.
pub struct Writer {
    out: Aside,
    place: String,
    /// Bytes of data that are still to come.
    left: u64,
}

impl Writer {
    /// Writes the header. The tensors' data then follow through [`Writer::write`], in their order.
    ///
    /// # Errors
    /// Names that come twice, a type that safetensors does not have, a header that is too large,
    /// I/O.
    pub fn create(
        path: &Path,
        metadata: &[(&str, &str)],
        tensors: &[TensorSpec],
    ) -> Result<Writer> {
        let place = path.display().to_string();
        let (header, end) = header(&place, metadata, tensors)?;
        let mut out = Aside::create(path)?;
        out.write(&(header.len() as u64).to_le_bytes())?;
        out.write(&header)?;
        Ok(Writer { out, place, left: end })
    }

    /// Appends data, in pieces of any size.
    ///
    /// # Errors
    /// More data than the tensors hold, I/O.
    pub fn write(&mut self, data: &[u8]) -> Result<()> {
        let left = self.left.checked_sub(data.len() as u64);
        self.left = left.ok_or_else(|| {
            let found = format!("{} bytes", data.len());
            Error::new(&self.place, format!("at most {} bytes more", self.left), found)
        })?;
        self.out.write(data)
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// Data that did not all come, I/O.
    pub fn finish(self) -> Result<()> {
        if self.left > 0 {
            return Err(Error::new(&self.place, "all data", format!("{} bytes less", self.left)));
        }
        self.out.finish()
    }
}
