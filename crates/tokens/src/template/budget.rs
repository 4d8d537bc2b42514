//! The budget of a template: the bytes of a whole rendering, and the size and depth of each value.
//!
//! MiniJinja counts steps, but one step may double a text or a list, so that sixty of them fill any
//! memory. Here each operation that makes a value says what it takes before or as it makes it
//! (`instrument.rs` sees to it that none is forgotten), and the sum only grows: what is no longer
//! used is not given back, since strings do not tell.
//!
//! The size of a value is what it holds if it were printed, every part counted as often as it is
//! reached: a list of one list twice, sixty times over, takes little memory and ends no loop that
//! walks it. Neither can a value hold itself: namespaces and loops, the two that change, are no
//! part of another value.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Bytes that all values of a rendering may take together. A template that appends each of a
/// thousand messages to one string, which comes to a megabyte, takes about all of it.
pub(crate) const MOST: usize = 512 << 20;
/// Longest text, and largest size of a value, in bytes: some four million tokens.
pub(crate) const LONGEST: usize = 16 << 20;
/// The overhead of an entry of a list or map beside its own content, in bytes.
pub(crate) const ENTRY: usize = 32;
/// Bytes for which looking at a value once is taken: time is limited with memory.
const LOOK: usize = 8;
/// Bytes of a text that are read in the time of one that is made.
const READ: usize = 8;
/// Deepest nesting of lists and maps; freeing them recurses.
const DEEPEST: usize = 200;

/// The rest of [`MOST`].
#[derive(Debug)]
pub(crate) struct Budget {
    left: AtomicUsize,
}

/// A value's extent.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    bytes: usize,
    depth: usize,
}

/// A list with its size. MiniJinja's lists are converted to these; lazy ones are computed.
#[derive(Debug)]
struct Held {
    items: Vec<Value>,
    repr: ObjectRepr,
    size: Size,
}

impl Object for Held {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.repr
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }
}

impl Budget {
    /// Enough for [`MOST`] bytes.
    pub(crate) fn new() -> Arc<Budget> {
        Arc::new(Budget { left: AtomicUsize::new(MOST) })
    }

    /// Takes bytes from what is left.
    pub(crate) fn take(&self, bytes: usize) -> Result<(), Error> {
        // One thread renders; the number is atomic only because filters must be `Sync`.
        let left = self.left.load(Ordering::Relaxed);
        let rest = left.checked_sub(bytes).ok_or_else(|| {
            invalid(format!("the template's values take more than {MOST} bytes in all"))
        })?;
        self.left.store(rest, Ordering::Relaxed);
        Ok(())
    }

    /// A new text.
    pub(crate) fn text(&self, text: String) -> Result<Value, Error> {
        fits(text.len())?;
        self.take(text.len())?;
        Ok(Value::from(text))
    }

    /// A new list.
    pub(crate) fn list(&self, items: Vec<Value>) -> Result<Value, Error> {
        self.hold(items, ObjectRepr::Seq)
    }

    /// A value that was made elsewhere. What is lazy is computed now, as its size must be known.
    pub(crate) fn made(&self, value: Value) -> Result<Value, Error> {
        match value.kind() {
            ValueKind::String => {
                let length = value.as_str().map_or(0, str::len);
                fits(length)?;
                self.take(length)?;
                Ok(value)
            }
            kind @ (ValueKind::Seq | ValueKind::Iterable) if !value.is_tuple() => {
                if held(&value).is_some() {
                    return Ok(value);
                }
                let mut items = Vec::new();
                for item in value.try_iter()?.checked() {
                    self.take(ENTRY)?;
                    items.push(item?);
                }
                let list = kind == ValueKind::Seq;
                self.hold(items, if list { ObjectRepr::Seq } else { ObjectRepr::Iterable })
            }
            ValueKind::Seq | ValueKind::Map => {
                self.take(value.len().unwrap_or(0).saturating_mul(ENTRY))?;
                self.size(&value, 0)?;
                Ok(value)
            }
            _ => Ok(value),
        }
    }

    /// Checks that a value may be part of another one, which namespaces and loops may not.
    pub(crate) fn part(&self, value: &Value) -> Result<(), Error> {
        self.size(value, 0).map(drop)
    }

    /// The bytes that a value has when printed, roughly.
    pub(crate) fn bytes(&self, value: &Value) -> Result<usize, Error> {
        Ok(self.size(value, 0)?.bytes)
    }

    /// A text or a list not yet computed, if it is one, is gone through once; other values are not
    /// looked into.
    pub(crate) fn scan(&self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.take(value.as_str().map_or(0, str::len) / READ),
            ValueKind::Iterable if held(value).is_none() => {
                self.take(value.len().unwrap_or(0).saturating_mul(LOOK))
            }
            _ => Ok(()),
        }
    }

    /// A value is compared with others, all of it.
    pub(crate) fn compare(&self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.scan(value),
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => match held(value) {
                Some(held) => self.take(held.size.bytes / ENTRY * LOOK),
                // Namespaces and loops hold values that have been looked at.
                None => match value.as_object().map(|object| object.type_name()) {
                    Some(name) if changes(name) => Ok(()),
                    _ => self.part(value),
                },
            },
            _ => Ok(()),
        }
    }

    fn hold(&self, items: Vec<Value>, repr: ObjectRepr) -> Result<Value, Error> {
        self.take(items.len().saturating_mul(ENTRY))?;
        let mut size = Size { bytes: ENTRY, depth: 1 };
        for item in &items {
            self.add(&mut size, item, 1)?;
        }
        Ok(Value::from_object(Held { items, repr, size }))
    }

    /// The size of a value at nesting depth `level`.
    fn size(&self, value: &Value, level: usize) -> Result<Size, Error> {
        self.take(LOOK)?;
        if let Some(held) = held(value) {
            return Ok(held.size);
        }
        let mut size = Size { bytes: ENTRY, depth: 0 };
        match value.kind() {
            ValueKind::String => size.bytes += value.as_str().map_or(0, str::len),
            ValueKind::Seq | ValueKind::Iterable => {
                size.depth = 1;
                for item in value.try_iter()?.checked() {
                    self.add(&mut size, &item?, level + 1)?;
                }
            }
            ValueKind::Map => {
                let Some(object) = value.as_object() else { return Ok(size) };
                if object.type_name().ends_with("::Macro") {
                    return Ok(size);
                }
                if changes(object.type_name()) {
                    return Err(invalid("a namespace or loop cannot be part of another value"));
                }
                size.depth = 1;
                for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                    self.add(&mut size, &key, level + 1)?;
                    self.add(&mut size, &item, level + 1)?;
                }
            }
            _ => {}
        }
        Ok(size)
    }

    /// Adds a part to the size of a value at such a level.
    fn add(&self, size: &mut Size, part: &Value, level: usize) -> Result<(), Error> {
        if level > DEEPEST {
            return Err(invalid(format!("a value is nested deeper than {DEEPEST} levels")));
        }
        let part = self.size(part, level)?;
        size.bytes = size.bytes.saturating_add(part.bytes);
        size.depth = size.depth.max(part.depth + 1);
        if size.depth > DEEPEST {
            return Err(invalid(format!("a value is nested deeper than {DEEPEST} levels")));
        }
        fits(size.bytes)
    }
}

/// Whether a MiniJinja type of this name is one whose content changes.
fn changes(type_name: &str) -> bool {
    ["::Namespace", "::Loop"].iter().any(|end| type_name.ends_with(end))
}

fn held(value: &Value) -> Option<&Held> {
    value.downcast_object_ref::<Held>()
}

/// Checks that a text or value of `bytes` bytes may be made.
pub(crate) fn fits(bytes: usize) -> Result<(), Error> {
    match bytes > LONGEST {
        true => Err(invalid(format!("the template makes a value of more than {LONGEST} bytes"))),
        false => Ok(()),
    }
}

/// An operation that cannot be done, and why.
pub(crate) fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}
