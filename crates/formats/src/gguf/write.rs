//! Writes GGUF version 3: the header at once, then tensor data as it comes.

use std::path::Path;

use super::header::{MAX_RANK, alignment, byte_len};
use super::metadata::Metadata;
use super::value::{MetadataValue, write_string};
use crate::aside::Aside;
use crate::error::{clipped, shape};
use crate::{DType, Error, Result};

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub dtype: DType,
    /// Row-major, outermost first; rows must be whole blocks.
    pub shape: Vec<usize>,
}

/// A GGUF file under way. It is written aside and takes its name in [`Writer::finish`]; dropped
/// before that, it leaves nothing behind.
pub struct Writer {
    out: Aside,
    place: String,
    alignment: u64,
    /// Bytes of the whole file.
    total: u64,
    /// Name and bytes of each tensor.
    tensors: Vec<(String, u64)>,
    /// The tensor being written, and how many of its bytes are.
    current: usize,
    written: u64,
}

impl Writer {
    /// Writes the header. Tensor data then follows through [`Writer::write`], in the order of
    /// `tensors`.
    ///
    /// # Errors
    /// Keys or names that come twice, a bad `general.alignment`, a shape or type that GGUF cannot
    /// hold, I/O.
    pub fn create(
        path: &Path,
        metadata: &[(String, MetadataValue)],
        tensors: &[TensorSpec],
    ) -> Result<Writer> {
        let place = path.display().to_string();
        // Reading is as strict: what this accepts, `parse` accepts.
        let alignment = alignment(&Metadata::new(&place, metadata.to_vec())?, &place)?;
        let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::new(
                &place,
                "distinct tensor names",
                format!("{} twice", clipped(pair[0])),
            ));
        }

        let mut head = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((tensors.len() as u64).to_le_bytes());
        head.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            write_string(key, &mut head);
            head.extend(value.id().to_le_bytes());
            value.write(&mut head);
        }
        let mut offset = 0u64;
        let mut sizes = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let at = || format!("{place}: tensor {}", clipped(&tensor.name));
            let rank = tensor.shape.len();
            if !(1..=MAX_RANK).contains(&rank) || tensor.shape.contains(&0) {
                return Err(Error::new(
                    at(),
                    "1 to 4 dimensions, none of them 0",
                    shape(&tensor.shape),
                ));
            }
            let Some(id) = tensor.dtype.ggml_id() else {
                return Err(Error::new(at(), "a type that GGUF has", tensor.dtype));
            };
            let len = byte_len(tensor.dtype, &tensor.shape, at)?;
            write_string(&tensor.name, &mut head);
            head.extend((rank as u32).to_le_bytes());
            for &dim in tensor.shape.iter().rev() {
                head.extend((dim as u64).to_le_bytes());
            }
            head.extend(id.to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset = offset
                .checked_add(len)
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or_else(|| Error::new(at(), "a file size that fits 64 bits", "a larger one"))?;
            sizes.push((tensor.name.clone(), len));
        }
        let mut writer = Writer {
            out: Aside::create(path)?,
            place,
            alignment,
            total: (head.len() as u64).next_multiple_of(alignment).saturating_add(offset),
            tensors: sizes,
            current: 0,
            written: 0,
        };
        writer.out.write(&head)?;
        if !writer.tensors.is_empty() {
            writer.pad(head.len() as u64)?;
        }
        Ok(writer)
    }

    /// The file as it is under way, with its headers and its length, and zeros for data that is
    /// still to come: where it is until it takes its name.
    ///
    /// # Errors
    /// I/O.
    pub fn outline(&mut self) -> Result<&Path> {
        self.out.outline(self.total)
    }

    /// Appends tensor data. Pieces may be of any size and cross from one tensor into the next;
    /// padding between tensors is added here.
    ///
    /// # Errors
    /// More data than the tensors hold, I/O.
    pub fn write(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let Some(&(_, len)) = self.tensors.get(self.current) else {
                let found = format!("{} more bytes", data.len());
                return Err(Error::new(&self.place, "no data past the last tensor", found));
            };
            let left = usize::try_from(len - self.written).unwrap_or(usize::MAX);
            let (now, later) = data.split_at(left.min(data.len()));
            self.out.write(now)?;
            self.written += now.len() as u64;
            if self.written == len {
                self.pad(len)?;
                (self.current, self.written) = (self.current + 1, 0);
            }
            data = later;
        }
        Ok(())
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// A tensor whose data did not all come, I/O.
    pub fn finish(self) -> Result<()> {
        if let Some((name, len)) = self.tensors.get(self.current) {
            let place = format!("{}: tensor {}", self.place, clipped(name));
            return Err(Error::new(place, format!("{len} bytes written"), self.written));
        }
        self.out.finish()
    }

    /// Zeros from `end` to the next multiple of the alignment.
    fn pad(&mut self, end: u64) -> Result<()> {
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut left = end.next_multiple_of(self.alignment) - end;
        while left > 0 {
            let now = left.min(ZEROS.len() as u64);
            self.out.write(&ZEROS[..now as usize])?;
            left -= now;
        }
        Ok(())
    }
}
