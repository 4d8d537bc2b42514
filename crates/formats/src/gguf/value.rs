//! Metadata values: the thirteen types of GGUF, and arrays of them.

use super::cursor::Cursor;
use crate::{Error, Result};

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
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
    Array(Array),
    /// Type id 10.
    U64(u64),
    /// Type id 11.
    I64(i64),
    /// Type id 12.
    F64(f64),
}

/// An array of metadata values of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
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
    Array(Vec<Array>),
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

impl Value {
    /// Its type id in GGUF.
    pub fn id(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::String(_) => 8,
            Value::Array(_) => 9,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }

    /// Its type in words: `u32`, `array of 3 string`.
    pub fn kind(&self) -> String {
        match self {
            Value::Array(array) => {
                format!("array of {} {}", array.len(), NAMES[array.id() as usize])
            }
            scalar => NAMES[scalar.id() as usize].to_string(),
        }
    }

    /// The value of any integer type.
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value of any float or integer type.
    pub fn number(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => self.integer().map(|v| v as f64),
        }
    }

    /// Reads the value of type `id`.
    pub(super) fn read(cursor: &mut Cursor<'_>, id: u32, place: &str) -> Result<Value> {
        const WHAT: &str = "a value";
        Ok(match id {
            0 => Value::U8(u8::from_le_bytes(cursor.array(WHAT)?)),
            1 => Value::I8(i8::from_le_bytes(cursor.array(WHAT)?)),
            2 => Value::U16(u16::from_le_bytes(cursor.array(WHAT)?)),
            3 => Value::I16(i16::from_le_bytes(cursor.array(WHAT)?)),
            4 => Value::U32(u32::from_le_bytes(cursor.array(WHAT)?)),
            5 => Value::I32(i32::from_le_bytes(cursor.array(WHAT)?)),
            6 => Value::F32(f32::from_le_bytes(cursor.array(WHAT)?)),
            7 => Value::Bool(boolean(cursor.array::<1>(WHAT)?[0], place)?),
            8 => Value::String(lossy(cursor.string_bytes("a string")?)),
            9 => Value::Array(Array::read(cursor, place, 1)?),
            10 => Value::U64(u64::from_le_bytes(cursor.array(WHAT)?)),
            11 => Value::I64(i64::from_le_bytes(cursor.array(WHAT)?)),
            12 => Value::F64(f64::from_le_bytes(cursor.array(WHAT)?)),
            _ => return Err(unknown(id, place)),
        })
    }

    /// Appends the value as version 3 stores it, without its type id.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Value::U8(v) => out.push(*v),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push((*v).into()),
            Value::String(v) => write_string(v, out),
            Value::Array(v) => v.write(out),
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
        }
    }
}

impl Array {
    /// The type id of its elements.
    pub fn id(&self) -> u32 {
        match self {
            Array::U8(_) => 0,
            Array::I8(_) => 1,
            Array::U16(_) => 2,
            Array::I16(_) => 3,
            Array::U32(_) => 4,
            Array::I32(_) => 5,
            Array::F32(_) => 6,
            Array::Bool(_) => 7,
            Array::String(_) => 8,
            Array::Array(_) => 9,
            Array::U64(_) => 10,
            Array::I64(_) => 11,
            Array::F64(_) => 12,
        }
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of an array of any integer type; an empty array of any type has none.
    pub fn integers(&self) -> Option<Vec<i128>> {
        Some(match self {
            Array::U8(v) => v.iter().map(|&v| v.into()).collect(),
            Array::I8(v) => v.iter().map(|&v| v.into()).collect(),
            Array::U16(v) => v.iter().map(|&v| v.into()).collect(),
            Array::I16(v) => v.iter().map(|&v| v.into()).collect(),
            Array::U32(v) => v.iter().map(|&v| v.into()).collect(),
            Array::I32(v) => v.iter().map(|&v| v.into()).collect(),
            Array::U64(v) => v.iter().map(|&v| v.into()).collect(),
            Array::I64(v) => v.iter().map(|&v| v.into()).collect(),
            other if other.is_empty() => Vec::new(),
            _ => return None,
        })
    }

    fn read(cursor: &mut Cursor<'_>, place: &str, depth: usize) -> Result<Array> {
        let id = cursor.u32("an array's type")?;
        Ok(match id {
            0 => Array::U8(numbers(cursor, u8::from_le_bytes)?),
            1 => Array::I8(numbers(cursor, i8::from_le_bytes)?),
            2 => Array::U16(numbers(cursor, u16::from_le_bytes)?),
            3 => Array::I16(numbers(cursor, i16::from_le_bytes)?),
            4 => Array::U32(numbers(cursor, u32::from_le_bytes)?),
            5 => Array::I32(numbers(cursor, i32::from_le_bytes)?),
            6 => Array::F32(numbers(cursor, f32::from_le_bytes)?),
            7 => {
                let count = cursor.count("an array", 1)?;
                let bytes = cursor.take(count as u64, "an array")?;
                Array::Bool(bytes.iter().map(|&b| boolean(b, place)).collect::<Result<_>>()?)
            }
            8 => {
                let count = cursor.count("an array of strings", if cursor.wide { 8 } else { 4 })?;
                let mut strings = Vec::with_capacity(count);
                for _ in 0..count {
                    strings.push(lossy(cursor.string_bytes("a string in an array")?));
                }
                Array::String(strings)
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
                    arrays.push(Array::read(cursor, place, depth + 1)?);
                }
                Array::Array(arrays)
            }
            10 => Array::U64(numbers(cursor, u64::from_le_bytes)?),
            11 => Array::I64(numbers(cursor, i64::from_le_bytes)?),
            12 => Array::F64(numbers(cursor, f64::from_le_bytes)?),
            _ => return Err(unknown(id, place)),
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.id().to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        match self {
            Array::U8(v) => out.extend(v),
            Array::I8(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::U16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::I16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::U32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::I32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::F32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::Bool(v) => out.extend(v.iter().map(|&v| u8::from(v))),
            Array::String(v) => v.iter().for_each(|v| write_string(v, out)),
            Array::Array(v) => v.iter().for_each(|v| v.write(out)),
            Array::U64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::I64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
            Array::F64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
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
        $(impl From<$from> for Value {
            fn from($v: $from) -> Value {
                $value
            }
        })*
    };
}

from! {
    u8 => |v| Value::U8(v),
    i8 => |v| Value::I8(v),
    u16 => |v| Value::U16(v),
    i16 => |v| Value::I16(v),
    u32 => |v| Value::U32(v),
    i32 => |v| Value::I32(v),
    u64 => |v| Value::U64(v),
    i64 => |v| Value::I64(v),
    f32 => |v| Value::F32(v),
    f64 => |v| Value::F64(v),
    bool => |v| Value::Bool(v),
    &str => |v| Value::String(v.to_string()),
    String => |v| Value::String(v),
    Array => |v| Value::Array(v),
    Vec<String> => |v| Value::Array(Array::String(v)),
    Vec<u32> => |v| Value::Array(Array::U32(v)),
    Vec<i32> => |v| Value::Array(Array::I32(v)),
    Vec<f32> => |v| Value::Array(Array::F32(v)),
}
