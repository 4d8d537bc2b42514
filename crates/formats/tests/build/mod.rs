//! Byte by byte GGUF and safetensors files, right or wrong on purpose.
#![allow(dead_code, reason = "each test binary uses its own part")]

/// A GGUF header under construction. Numbers that a well-formed file derives can be overridden.
#[derive(Clone)]
pub(crate) struct GgufBytes {
    pub(crate) version: u32,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) key_count: Option<u64>,
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
    alignment: usize,
}

impl GgufBytes {
    pub(crate) fn new(version: u32) -> Self {
        GgufBytes {
            version,
            tensor_count: None,
            key_count: None,
            keys: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
            alignment: 32,
        }
    }

    /// A length as wide as the version says.
    pub(crate) fn length(&self, n: u64) -> Vec<u8> {
        if self.version == 1 { (n as u32).to_le_bytes().to_vec() } else { n.to_le_bytes().to_vec() }
    }

    pub(crate) fn string(&self, text: &[u8]) -> Vec<u8> {
        [self.length(text.len() as u64), text.to_vec()].concat()
    }

    /// A key with a type id and the raw bytes of its value.
    pub(crate) fn key(mut self, name: &[u8], id: u32, value: &[u8]) -> Self {
        self.keys.push([self.string(name), id.to_le_bytes().to_vec(), value.to_vec()].concat());
        self
    }

    pub(crate) fn string_key(self, name: &str, value: &str) -> Self {
        let value = self.string(value.as_bytes());
        self.key(name.as_bytes(), 8, &value)
    }

    pub(crate) fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.key(b"general.alignment", 4, &alignment.to_le_bytes())
    }

    /// A tensor entry; `dims` innermost first.
    pub(crate) fn tensor(mut self, name: &[u8], dims: &[u64], id: u32, offset: u64) -> Self {
        let dims: Vec<u8> = dims.iter().flat_map(|&d| self.length(d)).collect();
        let rank = dims.len() / self.length(0).len();
        let entry = [
            self.string(name),
            (rank as u32).to_le_bytes().to_vec(),
            dims,
            id.to_le_bytes().to_vec(),
        ];
        self.tensors.push([entry.concat(), offset.to_le_bytes().to_vec()].concat());
        self
    }

    pub(crate) fn data(mut self, bytes: usize) -> Self {
        self.data = (0..bytes).map(|i| i as u8).collect();
        self
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.length(self.tensor_count.unwrap_or(self.tensors.len() as u64)));
        out.extend(self.length(self.key_count.unwrap_or(self.keys.len() as u64)));
        out.extend(self.keys.concat());
        out.extend(self.tensors.concat());
        if !self.data.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&self.data);
        }
        out
    }
}

/// A small valid GGUF of any version: most metadata types, nested arrays, three tensors.
pub(crate) fn small_gguf(version: u32) -> Vec<u8> {
    let b = GgufBytes::new(version);
    let strings =
        [8u32.to_le_bytes().to_vec(), b.length(3), b.string(b"a"), b.string(b""), b.string(b"bcd")]
            .concat();
    let ints = [
        5u32.to_le_bytes().to_vec(),
        b.length(2),
        7i32.to_le_bytes().to_vec(),
        (-1i32).to_le_bytes().to_vec(),
    ];
    let nested = [9u32.to_le_bytes().to_vec(), b.length(2), ints.concat(), ints.concat()].concat();
    b.string_key("general.architecture", "llama")
        .alignment(32)
        .key(b"k.u8", 0, &[9])
        .key(b"k.f32", 6, &1.5f32.to_le_bytes())
        .key(b"k.bool", 7, &[1])
        .key(b"k.u64", 10, &7u64.to_le_bytes())
        .key(b"k.strings", 9, &strings)
        .key(b"k.ints", 9, &ints.concat())
        .key(b"k.nested", 9, &nested)
        .tensor(b"a.weight", &[4, 3], 0, 0)
        .tensor(b"b.weight", &[32, 2], 2, 64)
        .tensor(b"c.weight", &[5], 1, 128)
        .data(160)
        .build()
}

/// A safetensors file: header text and bytes of data.
pub(crate) fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend((0..data).map(|i| i as u8));
    out
}

/// A small valid safetensors file.
pub(crate) fn small_safetensors() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#.to_string()
        + r#""b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"U8","shape":[],"data_offsets":[32,33]}}"#;
    safetensors(&header, 33)
}
