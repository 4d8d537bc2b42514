//! GGUF files: versions 1 to 3, little-endian, one file or a split set, mapped and read in place.

mod cursor;
mod header;
mod metadata;
mod value;
mod write;

use std::path::{Path, PathBuf};

pub use header::{Header, first_keys, parse};
pub use metadata::Metadata;
pub use value::{MetadataArray, MetadataValue};
pub use write::{TensorSpec, Writer};

use crate::map::Map;
use crate::tensors::{TensorView, sorted_unique};
use crate::{Error, Location, Result};

/// An open GGUF file, or all files of a split set.
#[derive(Debug)]
pub struct Gguf {
    shards: Vec<Shard>,
    /// (shard, tensor in it), ordered by tensor name.
    by_name: Vec<(usize, usize)>,
}

#[derive(Debug)]
struct Shard {
    map: Map,
    header: Header,
}

impl Shard {
    fn open(path: &Path) -> Result<Shard> {
        Shard::of(Map::open(path)?)
    }

    fn of(map: Map) -> Result<Shard> {
        let header = parse(map.bytes(), &map.path().display().to_string());
        // First: what a file that shrinks has lost reads as nonsense.
        map.whole()?;
        Ok(Shard { map, header: header? })
    }
}

impl Gguf {
    /// Opens a file; for any file of a split set (`NAME-00001-of-0000N.gguf`), the whole set.
    ///
    /// Files stay mapped while this lives: they may be replaced by renaming, not rewritten in
    /// place.
    ///
    /// # Errors
    /// What [`parse`] refuses, a file of the set that is missing or not what its number says, I/O.
    pub fn open(path: &Path) -> Result<Gguf> {
        let shard = Shard::open(path)?;
        let count = shard.header.metadata.u32("split.count")?.unwrap_or(1);
        let shards = if count > 1 { open_set(path, count)? } else { vec![shard] };
        Gguf::of(shards)
    }

    /// Opens a file that is part of the program; `name` stands for its path in messages.
    ///
    /// # Errors
    /// What [`parse`] refuses, a file of a split set.
    pub fn program(name: &'static str, bytes: &'static [u8]) -> Result<Gguf> {
        let shard = Shard::of(Map::program(name, bytes))?;
        match shard.header.metadata.u32("split.count")? {
            Some(count) if count > 1 => {
                Err(Error::new(name, "one whole file", format!("one of {count} of a split set")))
            }
            _ => Gguf::of(vec![shard]),
        }
    }

    /// The table of tensors over all shards.
    fn of(shards: Vec<Shard>) -> Result<Gguf> {
        let places: Vec<(usize, usize)> = shards
            .iter()
            .enumerate()
            .flat_map(|(s, shard)| (0..shard.header.tensors.len()).map(move |t| (s, t)))
            .collect();
        let name = |(s, t): (usize, usize)| shards[s].header.tensors[t].name.as_str();
        let place = shards[0].map.path().display().to_string();
        let by_name = sorted_unique(places, name, &place)?;
        Ok(Gguf { shards, by_name })
    }

    /// The (first) file's path.
    pub fn path(&self) -> &Path {
        self.shards[0].map.path()
    }

    /// Where the (first) file lies.
    pub fn location(&self) -> Location {
        self.shards[0].map.location()
    }

    /// The paths of all files of the set, in order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.map.path())
    }

    /// The (first) file's header; its `tensors` are the tensors of that file alone.
    pub fn header(&self) -> &Header {
        &self.shards[0].header
    }

    /// The (first) file's metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.header().metadata
    }

    /// Drops the (first) file's metadata, most of which is the vocabulary: megabytes that a loaded
    /// model has elsewhere.
    pub fn forget_metadata(&mut self) {
        self.shards[0].header.metadata = Metadata::default();
    }

    /// Number of tensors in the set.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether there are no tensors (a vocabulary alone).
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// All tensors, in file order.
    pub fn iter(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.shards.iter().flat_map(|shard| {
            shard.header.tensors.iter().filter_map(|info| info.view(shard.map.bytes()))
        })
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let info = |&(s, t): &(usize, usize)| &self.shards[s].header.tensors[t];
        let found =
            self.by_name.binary_search_by(|place| info(place).name.as_str().cmp(name)).ok()?;
        let place = &self.by_name[found];
        info(place).view(self.shards[place.0].map.bytes())
    }

    pub(crate) fn maps(&self) -> impl Iterator<Item = &Map> {
        self.shards.iter().map(|shard| &shard.map)
    }
}

/// Opens every file of a split set of `count`, given any of them.
fn open_set(path: &Path, count: u32) -> Result<Vec<Shard>> {
    let prefix = split_prefix(path, count).ok_or_else(|| {
        let expected = format!(
            "a file name that ends in -00001-of-{count:05}.gguf, as split.count = {count} asks"
        );
        Error::new(path.display(), expected, "another")
            .hint("give split files back their original names")
    })?;
    let mut shards = Vec::new();
    for no in 0..count {
        let path = split_path(path, &prefix, no, count);
        let place = path.display().to_string();
        let shard = Shard::open(&path).map_err(|e| {
            e.hint(format!("a split model needs all {count} files; this is number {}", no + 1))
        })?;
        let metadata = &shard.header.metadata;
        for (key, expected) in [("split.no", no), ("split.count", count)] {
            let found = metadata.u32(key)?.ok_or_else(|| metadata.missing(key))?;
            if found != expected {
                return Err(Error::new(format!("{place}: {key}"), expected, found));
            }
        }
        shards.push(shard);
    }
    let found: u64 = shards.iter().map(|shard| shard.header.tensors.len() as u64).sum();
    let metadata = &shards[0].header.metadata;
    match metadata.u64("split.tensors.count")? {
        Some(expected) if expected != found => {
            let place = format!("{}: split.tensors.count", path.display());
            Err(Error::new(place, format!("{expected} tensors in {count} files"), found))
        }
        _ => Ok(shards),
    }
}

/// `NAME` of `NAME-00001-of-0000N.gguf`.
fn split_prefix(path: &Path, count: u32) -> Option<String> {
    let stem = path.file_name()?.to_str()?.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (prefix, no) = stem.rsplit_once('-')?;
    let no: u32 = no.parse().ok().filter(|_| no.len() >= 5)?;
    (1..=count).contains(&no).then(|| prefix.to_string())
}

fn split_path(beside: &Path, prefix: &str, no: u32, count: u32) -> PathBuf {
    beside.with_file_name(format!("{prefix}-{:05}-of-{count:05}.gguf", no + 1))
}
