//! One table of tensors over GGUF files and safetensors folders: names, shapes and bytes in place,
//! nothing copied.

use std::path::Path;

use crate::error::clipped;
use crate::folder::Folder;
use crate::gguf::Gguf;
use crate::map::{Map, Stamp};
use crate::{DType, Error, Location, Result};

/// Where one tensor's data lies in a file, and what it is, as the file's header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// How its elements are stored.
    pub dtype: DType,
    /// Row-major, outermost first (GGUF's own order reversed); empty for a scalar.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl TensorInfo {
    /// The view of the tensor in its file, if its bytes are there.
    pub(crate) fn view<'a>(&'a self, file: &'a [u8]) -> Option<TensorView<'a>> {
        let start = usize::try_from(self.start).ok()?;
        let end = start.checked_add(usize::try_from(self.len).ok()?)?;
        let bytes = file.get(start..end)?;
        Some(TensorView { name: &self.name, dtype: self.dtype, shape: &self.shape, bytes })
    }
}

/// A view of one tensor in a mapped file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorView<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// How its elements are stored.
    pub dtype: DType,
    /// Row-major, outermost first; empty for a scalar.
    pub shape: &'a [usize],
    /// The stored bytes: rows one after another. They may begin at any address.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// The type of its elements, as errors name it.
    pub fn element_type(&self) -> impl std::fmt::Display {
        self.dtype
    }

    /// Its elements, if they are whole numbers of 32 or 64 bits and none is below zero.
    pub fn whole_numbers(&self) -> Option<Vec<usize>> {
        let size = match self.dtype {
            DType::I32 | DType::U32 => 4,
            DType::I64 | DType::U64 => 8,
            _ => return None,
        };
        let signed = matches!(self.dtype, DType::I32 | DType::I64);
        let number = |bytes: &[u8]| {
            let mut whole = [0; 8];
            whole[..size].copy_from_slice(bytes);
            let below = signed && bytes[size - 1] >= 0x80;
            if below { None } else { usize::try_from(u64::from_le_bytes(whole)).ok() }
        };
        self.bytes.chunks_exact(size).map(number).collect()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether its elements are not numbers but words of packed codes, as affine quantisation
    /// stores them.
    pub fn holds_codes(&self) -> bool {
        self.dtype == DType::U32
    }

    /// Whether its elements are eight-bit floats, which mean something with their scales alone.
    pub fn holds_eight_bit_floats(&self) -> bool {
        self.dtype == DType::F8E4M3
    }

    /// Whether its elements are signed bytes, as integer quantisation stores them.
    pub fn holds_signed_bytes(&self) -> bool {
        self.dtype == DType::I8
    }

    /// Whether [`TensorView::to_f32`] can read it: weights are floats or quantised blocks. `place`
    /// begins the error.
    ///
    /// # Errors
    /// Another type.
    pub fn check_numbers(&self, place: impl FnOnce() -> String) -> Result<()> {
        if self.dtype.is_float() {
            return Ok(());
        }
        Err(Error::new(place(), "a tensor of floats or quantised blocks", self.dtype))
    }

    /// All elements as f32, row after row.
    ///
    /// # Errors
    /// An integer type.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.elements()];
        self.dtype
            .decode(self.bytes, &mut values)
            .map_err(|e| Error { place: self.name.to_string(), ..e })?;
        Ok(values)
    }
}

/// The tensors of a model, wherever they are stored.
#[derive(Debug)]
pub struct Tensors {
    source: Source,
}

/// Identity of a model's files at the time of the call: equal identities mean equal bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity(Vec<Stamp>);

/// Where tensors come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Container {
    /// A GGUF file or split set.
    Gguf,
    /// A folder with `config.json` and safetensors.
    Folder,
}

#[derive(Debug)]
enum Source {
    Gguf(Gguf),
    Folder(Box<Folder>),
}

impl Tensors {
    /// Opens a `.gguf` file (any one of a split set), a model folder, the folder of a
    /// `.safetensors` file, or a file that is part of the program.
    ///
    /// Files stay mapped while this lives: they may be replaced by renaming, not rewritten in
    /// place. See [`Tensors::whole`] for those that are cut.
    ///
    /// # Errors
    /// As [`Gguf::open`] and [`Folder::open`].
    pub fn open(location: impl Into<Location>) -> Result<Tensors> {
        match location.into() {
            Location::Path(path) => Tensors::open_path(&path),
            Location::Program { name, bytes } => {
                Ok(Tensors { source: Source::Gguf(Gguf::program(name, bytes)?) })
            }
        }
    }

    fn open_path(path: &Path) -> Result<Tensors> {
        if path.is_dir() {
            return Ok(Tensors { source: Source::Folder(Box::new(Folder::open(path)?)) });
        }
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors")) && path.is_file()
        {
            let folder = match path.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent,
                _ => Path::new("."),
            };
            return Ok(Tensors { source: Source::Folder(Box::new(Folder::open(folder)?)) });
        }
        Ok(Tensors { source: Source::Gguf(Gguf::open(path)?) })
    }

    /// Where they come from.
    pub fn kind(&self) -> Container {
        match &self.source {
            Source::Gguf(_) => Container::Gguf,
            Source::Folder(_) => Container::Folder,
        }
    }

    /// The GGUF file, if that is what they come from.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.source {
            Source::Gguf(gguf) => Some(gguf),
            Source::Folder(_) => None,
        }
    }

    /// The folder, if that is what they come from.
    pub fn folder(&self) -> Option<&Folder> {
        match &self.source {
            Source::Gguf(_) => None,
            Source::Folder(folder) => Some(folder),
        }
    }

    /// Where they are: what [`Tensors::open`] takes.
    pub fn location(&self) -> Location {
        match &self.source {
            Source::Gguf(gguf) => gguf.location(),
            Source::Folder(folder) => Location::from(folder.path()),
        }
    }

    /// The file or folder; a name in its place where the model is part of the program.
    pub fn path(&self) -> &Path {
        match &self.source {
            Source::Gguf(gguf) => gguf.path(),
            Source::Folder(folder) => folder.path(),
        }
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        match &self.source {
            Source::Gguf(gguf) => gguf.len(),
            Source::Folder(folder) => folder.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All tensors: a GGUF's in file order, a folder's by name.
    pub fn iter(&self) -> Box<dyn Iterator<Item = TensorView<'_>> + '_> {
        match &self.source {
            Source::Gguf(gguf) => Box::new(gguf.iter()),
            Source::Folder(folder) => Box::new(folder.iter()),
        }
    }

    /// Their names, in the order of [`Tensors::iter`].
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.iter().map(|tensor| tensor.name)
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        match &self.source {
            Source::Gguf(gguf) => gguf.get(name),
            Source::Folder(folder) => folder.get(name),
        }
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.iter().map(|tensor| tensor.bytes.len() as u64).sum()
    }

    /// See [`Gguf::forget_metadata`].
    pub fn forget_metadata(&mut self) {
        if let Source::Gguf(gguf) = &mut self.source {
            gguf.forget_metadata();
        }
    }

    /// Tells the kernel that a tensor's pages are no longer needed, e.g. once it is repacked. Its
    /// bytes stay valid: reading them reads the file again. Pages shared with a neighbour stay.
    pub fn release(&self, tensor: &TensorView<'_>) {
        self.maps().any(|map| map.release(tensor.bytes));
    }

    /// The file that holds a tensor.
    pub fn file(&self, tensor: &TensorView<'_>) -> Option<&Path> {
        self.maps().find(|map| map.holds(tensor.bytes)).map(Map::path)
    }

    /// Checks that all that has been read so far was in the files; to be asked once everything that
    /// counts is read.
    ///
    /// # Errors
    /// If a file became shorter than what was read of it: what was beyond its end read as zeros.
    pub fn whole(&self) -> Result<()> {
        self.maps().try_for_each(Map::whole)
    }

    /// Reads `bytes`, a tensor's or a part of them, into memory ahead of use. Calls from several
    /// threads overlap.
    pub fn touch(&self, bytes: &[u8]) {
        self.maps().any(|map| map.touch(bytes));
    }

    /// Identity of these files, which differs from other files' and from their own after a change;
    /// `None` if the system does not provide one.
    pub fn identity(&self) -> Option<Identity> {
        self.maps().map(Map::stamp).collect::<Option<_>>().map(Identity)
    }

    fn maps(&self) -> Box<dyn Iterator<Item = &Map> + '_> {
        match &self.source {
            Source::Gguf(gguf) => Box::new(gguf.maps()),
            Source::Folder(folder) => Box::new(folder.maps()),
        }
    }
}

/// `items` ordered by name; an error at `place` when two share one.
pub(crate) fn sorted_unique<'a, T: Copy>(
    mut items: Vec<T>,
    name: impl Fn(T) -> &'a str,
    place: &str,
) -> Result<Vec<T>> {
    items.sort_by(|&a, &b| name(a).cmp(name(b)));
    if let Some(pair) = items.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
        return Err(Error::new(
            place,
            "distinct names",
            format!("{} twice", clipped(name(pair[0]))),
        ));
    }
    Ok(items)
}
