//! Metadata values: the thirteen types of GGUF, and arrays of them.

use super::cursor::Cursor;
use crate::{Error, Result};

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum MetadataValue {
    /// Type id 0.
    U8(u8),
    /// Type id 1.
    I8(i8),
    /// Type id 2.
    U16(u16),
    /// Type id 3.
    I16(i16),
    /// Type id 4.
    U32(u32),
    /// Type id 5.
    I32(i32),
    /// Type id 6.
    F32(f32),
    /// Type id 7.
    Bool(bool),
    /// Type id 8. Bytes that are not UTF-8 were replaced by U+FFFD when it was read.
    String(String),
    /// Type id 9.
    Array(MetadataArray),
    /// Type id 10.
    U64(u64),
    /// Type id 11.
    I64(i64),
    /// Type id 12.
    F64(f64),
}

/// An array of metadata values of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum MetadataArray {
    /// Type id 0.
    U8(Vec<u8>),
    /// Type id 1.
    I8(Vec<i8>),
    /// Type id 2.
    U16(Vec<u16>),
    /// Type id 3.
    I16(Vec<i16>),
    /// Type id 4.
    U32(Vec<u32>),
    /// Type id 5.
    I32(Vec<i32>),
    /// Type id 6.
    F32(Vec<f32>),
    /// Type id 7.
    Bool(Vec<bool>),
    /// Type id 8, with the same care for bytes that are not UTF-8.
    String(Vec<String>),
    /// Type id 9.
    Array(Vec<MetadataArray>),
    /// Type id 10.
    U64(Vec<u64>),
    /// Type id 11.
    I64(Vec<i64>),
    /// Type id 12.
    F64(Vec<f64>),
}

/// Arrays may hold arrays this deep. No known file nests more than once.
const DEPTH: usize = 4;

/// The names of the types, by id.
const NAMES: [&str; 13] =
    ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"];

impl MetadataValue {
    /// Its type id in GGUF.
    pub fn id(&self) -> u32 {
        match self {
            MetadataValue::U8(_) => 0,
            MetadataValue::I8(_) => 1,
            MetadataValue::U16(_) => 2,
            MetadataValue::I16(_) => 3,
            MetadataValue::U32(_) => 4,
            MetadataValue::I32(_) => 5,
            MetadataValue::F32(_) => 6,
            MetadataValue::Bool(_) => 7,
            MetadataValue::String(_) => 8,
            MetadataValue::Array(_) => 9,
            MetadataValue::U64(_) => 10,
            MetadataValue::I64(_) => 11,
            MetadataValue::F64(_) => 12,
        }
    }

    /// Its type in words: `u32`, `array of 3 string`.
    pub fn kind(&self) -> String {
        match self {
            MetadataValue::Array(array) => {
                format!("array of {} {}", array.len(), NAMES[array.id() as usize])
            }
            scalar => NAMES[scalar.id() as usize].to_string(),
        }
    }

    /// The value of any integer type.
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            MetadataValue::U8(v) => v.into(),
            MetadataValue::I8(v) => v.into(),
            MetadataValue::U16(v) => v.into(),
            MetadataValue::I16(v) => v.into(),
            MetadataValue::U32(v) => v.into(),
            MetadataValue::I32(v) => v.into(),
            MetadataValue::U64(v) => v.into(),
            MetadataValue::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value of any float or integer type.
    pub fn number(&self) -> Option<f64> {
        match *self {
            MetadataValue::F32(v) => Some(v.into()),
            MetadataValue::F64(v) => Some(v),
            _ => self.integer().map(|v| v as f64),
        }
    }

    /// Reads the value of type `id`.
    pub(super) fn read(cursor: &mut Cursor<'_>, id: u32, place: &str) -> Result<MetadataValue> {
        const WHAT: &str = "a value";
        Ok(match id {
            0 => MetadataValue::U8(u8::from_le_bytes(cursor.array(WHAT)?)),
            1 => MetadataValue::I8(i8::from_le_bytes(cursor.array(WHAT)?)),
            2 => MetadataValue::U16(u16::from_le_bytes(cursor.array(WHAT)?)),
            3 => MetadataValue::I16(i16::from_le_bytes(cursor.array(WHAT)?)),
            4 => MetadataValue::U32(u32::from_le_bytes(cursor.array(WHAT)?)),
            5 => MetadataValue::I32(i32::from_le_bytes(cursor.array(WHAT)?)),
            6 => MetadataValue::F32(f32::from_le_bytes(cursor.array(WHAT)?)),
            7 => MetadataValue::Bool(boolean(cursor.array::<1>(WHAT)?[0], place)?),
            8 => MetadataValue::String(lossy(cursor.string_bytes("a string")?)),
            9 => MetadataValue::Array(MetadataArray::read(cursor, place, 1)?),
            10 => MetadataValue::U64(u64::from_le_bytes(cursor.array(WHAT)?)),
            11 => MetadataValue::I64(i64::from_le_bytes(cursor.array(WHAT)?)),
            12 => MetadataValue::F64(f64::from_le_bytes(cursor.array(WHAT)?)),
            _ => return Err(unknown(id, place)),
        })
    }

    /// Appends the value as version 3 stores it, without its type id.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            MetadataValue::U8(v) => out.push(*v),
            MetadataValue::I8(v) => out.extend(v.to_le_bytes()),
            MetadataValue::U16(v) => out.extend(v.to_le_bytes()),
            MetadataValue::I16(v) => out.extend(v.to_le_bytes()),
            MetadataValue::U32(v) => out.extend(v.to_le_bytes()),
            MetadataValue::I32(v) => out.extend(v.to_le_bytes()),
            MetadataValue::F32(v) => out.extend(v.to_le_bytes()),
            MetadataValue::Bool(v) => out.push((*v).into()),
            MetadataValue::String(v) => write_string(v, out),
            MetadataValue::Array(v) => v.write(out),
            MetadataValue::U64(v) => out.extend(v.to_le_bytes()),
            MetadataValue::I64(v) => out.extend(v.to_le_bytes()),
            MetadataValue::F64(v) => out.extend(v.to_le_bytes()),
        }
    }
}

impl MetadataArray {
    /// The type id of its elements.
    pub fn id(&self) -> u32 {
        match self {
            MetadataArray::U8(_) => 0,
            MetadataArray::I8(_) => 1,
            MetadataArray::U16(_) => 2,
            MetadataArray::I16(_) => 3,
            MetadataArray::U32(_) => 4,
            MetadataArray::I32(_) => 5,
            MetadataArray::F32(_) => 6,
            MetadataArray::Bool(_) => 7,
            MetadataArray::String(_) => 8,
            MetadataArray::Array(_) => 9,
            MetadataArray::U64(_) => 10,
            MetadataArray::I64(_) => 11,
            MetadataArray::F64(_) => 12,
        }
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        match self {
            MetadataArray::U8(v) => v.len(),
            MetadataArray::I8(v) => v.len(),
            MetadataArray::U16(v) => v.len(),
            MetadataArray::I16(v) => v.len(),
            MetadataArray::U32(v) => v.len(),
            MetadataArray::I32(v) => v.len(),
            MetadataArray::F32(v) => v.len(),
            MetadataArray::Bool(v) => v.len(),
            MetadataArray::String(v) => v.len(),
            MetadataArray::Array(v) => v.len(),
            MetadataArray::U64(v) => v.len(),
            MetadataArray::I64(v) => v.len(),
            MetadataArray::F64(v) => v.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of an array of any integer type; an empty array of any type has none.
    pub fn integers(&self) -> Option<Vec<i128>> {
        Some(match self {
            MetadataArray::U8(v) => v.iter().map(|&v| v.into()).collect(),
            MetadataArray::I8(v) => v.iter().map(|&v| v.into()).collect(),
            MetadataArray::U16(v) => v.iter().map(|&v| v.into()).collect(),
            MetadataArray::I16(v) => v.iter().map(|&v| v.into()).collect(),
            MetadataArray::U32(v) => v.iter().map(|&v| v.into()).collect(),
            MetadataArray::I32(v) => v.iter().map(|&v| v.into()).collect(),
            MetadataArray::U64(v) => v.iter().map(|&v| v.into()).collect(),
            MetadataArray::I64(v) => v.iter().map(|&v| v.into()).collect(),
            other if other.is_empty() => Vec::new(),
            _ => return None,
        })
    }

    fn read(cursor: &mut Cursor<'_>, place: &str, depth: usize) -> Result<MetadataArray> {
        let id = cursor.u32("an array's type")?;
        Ok(match id {
            0 => MetadataArray::U8(numbers(cursor, u8::from_le_bytes)?),
            1 => MetadataArray::I8(numbers(cursor, i8::from_le_bytes)?),
            2 => MetadataArray::U16(numbers(cursor, u16::from_le_bytes)?),
            3 => MetadataArray::I16(numbers(cursor, i16::from_le_bytes)?),
            4 => MetadataArray::U32(numbers(cursor, u32::from_le_bytes)?),
            5 => MetadataArray::I32(numbers(cursor, i32::from_le_bytes)?),
            6 => MetadataArray::F32(numbers(cursor, f32::from_le_bytes)?),
            7 => {
                let count = cursor.count("an array", 1)?;
                let bytes = cursor.take(count as u64, "an array")?;
                MetadataArray::Bool(
                    bytes.iter().map(|&b| boolean(b, place)).collect::<Result<_>>()?,
                )
            }
            8 => {
                let count = cursor.count("an array of strings", if cursor.wide { 8 } else { 4 })?;
                let mut strings = Vec::with_capacity(count);
                for _ in 0..count {
                    strings.push(lossy(cursor.string_bytes("a string in an array")?));
                }
                MetadataArray::String(strings)
            }
            9 if depth >= DEPTH => {
                return Err(Error::new(
                    place,
                    format!("arrays at most {DEPTH} deep"),
                    "deeper ones",
                ));
            }
            9 => {
                // An inner array takes at least its type and its length.
                let count = cursor.count("an array of arrays", if cursor.wide { 12 } else { 8 })?;
                let mut arrays = Vec::with_capacity(count);
                for _ in 0..count {
                    arrays.push(MetadataArray::read(cursor, place, depth + 1)?);
                }
                MetadataArray::Array(arrays)
            }
            10 => MetadataArray::U64(numbers(cursor, u64::from_le_bytes)?),
            11 => MetadataArray::I64(numbers(cursor, i64::from_le_bytes)?),
            12 => MetadataArray::F64(numbers(cursor, f64::from_le_bytes)?),
            _ => return Err(unknown(id, place)),
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.id().to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        match self {
            MetadataArray::U8(v) => out.extend(v),
            MetadataArray::I8(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::U16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::I16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::U32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::I32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::F32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::Bool(v) => out.extend(v.iter().map(|&v| u8::from(v))),
            MetadataArray::String(v) => v.iter().for_each(|v| write_string(v, out)),
            MetadataArray::Array(v) => v.iter().for_each(|v| v.write(out)),
            MetadataArray::U64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::I64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            MetadataArray::F64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        }
    }
}

/// An array of numbers of `N` bytes each.
fn numbers<T, const N: usize>(cursor: &mut Cursor<'_>, from: fn([u8; N]) -> T) -> Result<Vec<T>> {
    let count = cursor.count("an array", N)?;
    let bytes = cursor.take((count * N) as u64, "an array")?;
    Ok(bytes.as_chunks::<N>().0.iter().map(|&chunk| from(chunk)).collect())
}

fn boolean(byte: u8, place: &str) -> Result<bool> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::new(place, "a bool of 0 or 1", other)),
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn unknown(id: u32, place: &str) -> Error {
    Error::new(place, "a metadata type of 0 to 12", id)
}

/// Appends a string as version 3 stores it: its length in 8 bytes, then its bytes.
pub(super) fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

macro_rules! from {
    ($($from:ty => |$v:ident| $value:expr),* $(,)?) => {
        $(impl From<$from> for MetadataValue {
            fn from($v: $from) -> MetadataValue {
                $value
            }
        })*
    };
}

from! {
    u8 => |v| MetadataValue::U8(v),
    i8 => |v| MetadataValue::I8(v),
    u16 => |v| MetadataValue::U16(v),
    i16 => |v| MetadataValue::I16(v),
    u32 => |v| MetadataValue::U32(v),
    i32 => |v| MetadataValue::I32(v),
    u64 => |v| MetadataValue::U64(v),
    i64 => |v| MetadataValue::I64(v),
    f32 => |v| MetadataValue::F32(v),
    f64 => |v| MetadataValue::F64(v),
    bool => |v| MetadataValue::Bool(v),
    &str => |v| MetadataValue::String(v.to_string()),
    String => |v| MetadataValue::String(v),
    MetadataArray => |v| MetadataValue::Array(v),
    Vec<String> => |v| MetadataValue::Array(MetadataArray::String(v)),
    Vec<u32> => |v| MetadataValue::Array(MetadataArray::U32(v)),
    Vec<i32> => |v| MetadataValue::Array(MetadataArray::I32(v)),
    Vec<f32> => |v| MetadataValue::Array(MetadataArray::F32(v)),
}
