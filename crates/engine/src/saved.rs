//! A session's cache outside the device: written to a file and read back, and shown as numbers.
//!
//! A file begins with [`MAGIC`] and the length of a header; the header is JSON and says which model
//! and which form of cache it is of. Then come the tokens, 32 bits each, and for each cache group
//! the blocks that the next token can see, in order, each with all layers of its group as
//! `device::Executor::read_block` gives them. It ends with the SHA-256 of all before. All numbers
//! are little-endian.

use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;

use device::CacheType;
use formats::{Aside, DType, Error, ErrorKind, Result};
use half::f16;
use program::{BLOCK_TOKENS, CacheLayer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::load::{Engine, Shared};
use crate::pool::first_seen;
use crate::session::Session;

/// The first bytes of a file; the last of them is the version of the form.
const MAGIC: &[u8; 8] = b"delftkv\x01";

/// The longest header that is read.
const MOST_HEADER: usize = 1 << 20;

/// Keys and values of one layer, as attention reads them: keys are rotated and normed.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedLayer {
    /// The position of the first row; later than 0 where a window has dropped what was before.
    pub first: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// `[positions, heads, head_dim]`.
    pub keys: Vec<f32>,
    /// `[positions, heads, head_dim]`.
    pub values: Vec<f32>,
}

impl Engine {
    /// Saves a sequence for [`Engine::restore_cached`] or [`Session::restore`]: what requests left
    /// cached of it, and the rest, which is computed.
    ///
    /// # Errors
    /// As [`Session::save`], and tokens that the model cannot have read.
    pub fn save_cached(&self, tokens: &[u32], path: &Path) -> Result<()> {
        let mut session = self.session();
        self.0.check(tokens, 0)?;
        session.adopt(tokens);
        let rest = &tokens[session.tokens().len()..];
        session.evaluate(rest, rest.len(), &mut |_, _| {})?;
        session.save(path)
    }

    /// Reads what was saved of a sequence, for requests that begin with it. Returns its tokens.
    ///
    /// # Errors
    /// As [`Session::restore`].
    pub fn restore_cached(&self, path: &Path) -> Result<Vec<u32>> {
        let mut session = self.session();
        session.restore(path)?;
        session.share();
        Ok(session.tokens().to_vec())
    }
}

impl Session {
    /// Writes the tokens and what is cached of them to a file, aside first, for
    /// [`Session::restore`].
    ///
    /// # Errors
    /// A file that cannot be written; a device that does not give its cache out; a session that
    /// computes with an adapter.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.plain()?;
        let shared = self.shared();
        let tokens = self.tokens();
        let mut file = Out { file: Aside::create(path)?, digest: Sha256::new() };
        let header = header(shared, tokens.len()).to_string();
        file.write(MAGIC)?;
        file.write(&(header.len() as u32).to_le_bytes())?;
        file.write(header.as_bytes())?;
        for token in tokens {
            file.write(&token.to_le_bytes())?;
        }
        let mut bytes = Vec::new();
        for (group, kind) in shared.groups.iter().enumerate() {
            for b in seen(kind.window, tokens.len()) {
                for (layer, _) in of_group(shared, group) {
                    bytes.clear();
                    self.read(layer, group, b, &mut bytes)?;
                    file.write(&bytes)?;
                }
            }
        }
        let Out { mut file, digest } = file;
        file.write(&digest.finalize())?;
        file.finish()
    }

    /// Makes this session what [`Session::save`] wrote, in place of what it was. The next token is
    /// computed from the same keys and values, so it is the same where the device is.
    ///
    /// # Errors
    /// Another model's or another cache type's file, or a damaged one: this session is empty then.
    pub fn restore(&mut self, path: &Path) -> Result<()> {
        self.clear();
        let restored = self.restore_from(path);
        if restored.is_err() {
            self.clear();
        }
        restored
    }

    /// A file says which model computed what it holds, and of no adapter.
    fn plain(&self) -> Result<()> {
        if self.adapter().is_none() {
            return Ok(());
        }
        let error = Error::new("cache", "a session without an adapter", "one with an adapter");
        Err(error.of(ErrorKind::Unsupported))
    }

    fn restore_from(&mut self, path: &Path) -> Result<()> {
        self.plain()?;
        let place = || path.display().to_string();
        let io = |why| Error::io(path.display(), why);
        let file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut file = In { file: BufReader::new(file), digest: Sha256::new(), path };
        let mut begin = [0; 12];
        file.read(&mut begin)?;
        let (magic, rest) = begin.split_at(MAGIC.len());
        if magic != MAGIC {
            let found = String::from_utf8_lossy(magic).into_owned();
            return Err(Error::new(place(), "a cache that a session saved", format!("{found:?}")));
        }
        let said = rest.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte));
        if said > MOST_HEADER {
            let expected = format!("a header of at most {MOST_HEADER} bytes");
            return Err(Error::new(place(), expected, said));
        }
        let mut header = vec![0; said];
        file.read(&mut header)?;
        let found: Value = serde_json::from_slice(&header)
            .map_err(|why| Error::new(place(), "a header in JSON", why))?;
        let shared = self.shared().clone();
        let count = agree(&shared, &found).map_err(|why| Error { place: place(), ..why })?;
        if count > shared.room(0) {
            let expected = format!("at most {} tokens, the context", shared.room(0));
            return Err(Error::new(place(), expected, count));
        }
        let expected = (begin.len() + header.len() + 4 * count + 32 + bytes(&shared, count)) as u64;
        if length != expected {
            return Err(Error::new(place(), format!("{expected} bytes"), length));
        }
        let mut words = vec![0; 4 * count];
        file.read(&mut words)?;
        let words = words
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        let tokens: Vec<u32> = words.collect();
        shared.check(&tokens, 0).map_err(|why| Error { place: place(), ..why })?;
        self.claim(tokens)?;
        let mut block = Vec::new();
        for (group, kind) in shared.groups.iter().enumerate() {
            for b in seen(kind.window, count) {
                for (layer, of) in of_group(&shared, group) {
                    block.resize(block_bytes(&shared, of), 0);
                    file.read(&mut block)?;
                    self.write(layer, group, b, &block)?;
                }
            }
        }
        let In { file: mut rest, digest, .. } = file;
        let mut told = [0; 32];
        rest.read_exact(&mut told).map_err(io)?;
        if digest.finalize()[..] != told {
            return Err(Error::new(place(), "the checksum of what it holds", "another"));
        }
        Ok(())
    }

    /// The keys and values of a cache layer that are there for this session's tokens.
    ///
    /// # Errors
    /// A layer that there is not, or that carries a state; a device that does not give its cache
    /// out.
    pub fn cached(&self, layer: usize) -> Result<SavedLayer> {
        let shared = self.shared();
        let Some(of) = shared.layers.get(layer) else {
            let expected = format!("a layer below {}", shared.layers.len());
            return Err(Error::new("cache", expected, layer));
        };
        if of.state > 0 {
            let found = format!("a state of {} elements", of.state);
            return Err(Error::new(format!("cache layer {layer}"), "keys and values", found));
        }
        let count = self.tokens().len();
        let group = group_of(shared, of);
        let blocks = seen(of.window, count);
        let first = blocks.start * BLOCK_TOKENS;
        let width = of.kv_heads * of.head_dim;
        let mut cached = SavedLayer {
            first,
            heads: of.kv_heads,
            head_dim: of.head_dim,
            keys: Vec::with_capacity((count - first) * width),
            values: Vec::with_capacity((count - first) * width),
        };
        let mut bytes = Vec::new();
        for b in blocks {
            bytes.clear();
            self.read(layer, group, b, &mut bytes)?;
            let rows = (count - b * BLOCK_TOKENS).min(BLOCK_TOKENS);
            let (keys, values) = match of.keys_only {
                true => (&bytes[..], &bytes[..]),
                false => bytes.split_at(bytes.len() / 2),
            };
            for (bytes, out) in [(keys, &mut cached.keys), (values, &mut cached.values)] {
                decode(shared.options.cache_type, bytes, rows * width, out)?;
            }
        }
        Ok(cached)
    }
}

/// Appends the first `elements` of a block's keys or values.
fn decode(kind: CacheType, bytes: &[u8], elements: usize, out: &mut Vec<f32>) -> Result<()> {
    let from = out.len();
    out.resize(from + elements, 0.0);
    let out = &mut out[from..];
    let plain = match kind {
        CacheType::F16 => DType::F16,
        CacheType::BF16 => DType::BF16,
        CacheType::F32 => DType::F32,
        CacheType::Q8_0 | CacheType::Turbo => {
            // The codes of all blocks of 32, then the scale of each.
            let each = kind.bytes(CacheType::BLOCK);
            let (codes, scales) = bytes.split_at(bytes.len() / each * (each - 2));
            let code = |i: usize| match kind {
                CacheType::Turbo => i16::from(codes[i / 2] >> (i % 2 * 4) & 15) - 8,
                _ => i16::from(codes[i].cast_signed()),
            };
            let blocks = out.chunks_exact_mut(CacheType::BLOCK).zip(scales.chunks_exact(2));
            for (b, (out, scale)) in blocks.enumerate() {
                let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32();
                for (i, out) in out.iter_mut().enumerate() {
                    *out = f32::from(code(b * CacheType::BLOCK + i)) * scale;
                }
            }
            if kind.rotates() {
                CacheType::rotate(out);
            }
            return Ok(());
        }
    };
    plain.decode(&bytes[..kind.bytes(elements)], out)
}

/// The blocks that the token after `count` can see.
fn seen(window: Option<usize>, count: usize) -> Range<usize> {
    first_seen(window, count).min(count) / BLOCK_TOKENS..count.div_ceil(BLOCK_TOKENS)
}

fn group_of(shared: &Shared, layer: &CacheLayer) -> usize {
    shared.groups.iter().position(|group| *group == layer.group()).unwrap_or(0)
}

/// The layers of a cache group.
fn of_group(shared: &Shared, group: usize) -> impl Iterator<Item = (usize, &CacheLayer)> {
    let own = move |(_, layer): &(usize, &CacheLayer)| group_of(shared, layer) == group;
    shared.layers.iter().enumerate().filter(own)
}

/// Bytes of a block of a layer.
fn block_bytes(shared: &Shared, layer: &CacheLayer) -> usize {
    match layer.state {
        0 => {
            let arrays = if layer.keys_only { 1 } else { 2 };
            let head = shared.options.cache_type.bytes(layer.head_dim);
            arrays * BLOCK_TOKENS * layer.kv_heads * head
        }
        elements => elements * size_of::<f32>(),
    }
}

/// Bytes of all blocks behind `count` tokens.
fn bytes(shared: &Shared, count: usize) -> usize {
    let of = |layer: &CacheLayer| seen(layer.window, count).len() * block_bytes(shared, layer);
    shared.layers.iter().map(of).sum()
}

/// A file's header: the model and the form of its cache, which must agree, and the number of
/// tokens.
fn header(shared: &Shared, tokens: usize) -> Value {
    let layer = |layer: &CacheLayer| match layer.state {
        0 if layer.keys_only => json!([layer.kv_heads, layer.head_dim, layer.window, "keys"]),
        0 => json!([layer.kv_heads, layer.head_dim, layer.window]),
        elements => json!(["state", elements]),
    };
    let layers: Vec<Value> = shared.layers.iter().map(layer).collect();
    json!({
        "model": shared.fingerprint,
        "cache": format!("{:?}", shared.options.cache_type).to_lowercase(),
        "layers": layers,
        "tokens": tokens,
    })
}

/// The number of tokens that a header states, if the rest of it agrees with this engine.
fn agree(shared: &Shared, found: &Value) -> Result<usize> {
    let own = header(shared, 0);
    for (key, what) in [
        ("model", "the cache of this model"),
        ("cache", "a cache of this type"),
        ("layers", "a cache of these layers"),
    ] {
        let (own, found) = (&own[key], &found[key]);
        if own != found {
            let said = |value: &Value| value.to_string().chars().take(60).collect::<String>();
            let expected = format!("{what}, {key} {}", said(own));
            return Err(Error::new("", expected, said(found)).of(ErrorKind::Unsupported));
        }
    }
    let tokens = found["tokens"].as_u64().and_then(|n| u32::try_from(n).ok());
    let tokens = tokens.ok_or_else(|| Error::new("", "a number of tokens", &found["tokens"]))?;
    Ok(tokens as usize)
}

/// A file that is written, and the digest of it.
struct Out {
    file: Aside,
    digest: Sha256,
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.digest.update(bytes);
        self.file.write(bytes)
    }
}

/// A file that is read, and the digest of it.
struct In<'a> {
    file: BufReader<File>,
    digest: Sha256,
    path: &'a Path,
}

impl In<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact(bytes).map_err(|why| match why.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                let expected = "a cache that a session saved";
                Error::new(self.path.display(), expected, "a file that ends within it")
            }
            _ => Error::io(self.path.display(), why),
        })?;
        self.digest.update(bytes);
        Ok(())
    }
}
