//! Packing rows of a matrix on all cores.

use std::sync::{Mutex, PoisonError};

use cpu_kernels::team::Team;
use formats::{Encoding, NotFinite, Result};
use ops::packed::{self, Layout};

/// Bytes of the file that a worker takes at a time: what was looked through is in its cache when it
/// is packed.
const PIECE: usize = 256 << 10;

/// Bytes to be packed that one more thread is worth.
const SHARE: usize = 4 << 20;

/// Threads that pack.
pub(super) struct Packer {
    team: Team,
    /// Whether weights must be finite.
    pub(super) looks: bool,
}

/// Rows of a file, and where they go.
type Piece<'a> = Mutex<(&'a [u8], &'a mut [u8])>;

/// The piece in which something ended the packing, and what.
type Ended = (usize, Result<NotFinite>);

impl Packer {
    /// A packer of up to this many bytes of weights, which checks that they are finite if asked to.
    ///
    /// # Errors
    /// When the operating system gives no threads.
    pub(super) fn new(bytes: usize, looks: bool) -> Result<Packer> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Packer { team: Team::new(cores.min(bytes.div_ceil(SHARE)))?, looks })
    }

    /// Packs whole rows: `bytes` as the file has them to `packed`, which has room for just these.
    /// Returns the first weight that is not finite, counted from the first row's first;
    /// `packed` then holds nothing.
    ///
    /// # Errors
    /// As [`packed::pack_into`].
    pub(super) fn pack(
        &self,
        encoding: Encoding,
        bytes: &[u8],
        layout: &Layout,
        packed: &mut [u8],
    ) -> Result<Option<NotFinite>> {
        let per_row = 4 * layout.row_words();
        let source = bytes.len() / (packed.len() / per_row).max(1);
        let rows = (PIECE / source.max(1)).max(1).next_multiple_of(layout.format.together());
        let parts = bytes.chunks((rows * source).max(1)).zip(packed.chunks_mut(rows * per_row));
        let pieces: Vec<Piece<'_>> = parts.map(Mutex::new).collect();
        let ended: Mutex<Option<Ended>> = Mutex::new(None);
        let end = |piece: usize, why: Result<NotFinite>| {
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            // Pieces are claimed in order, so that those before the first to end are all packed.
            if ended.as_ref().is_none_or(|(first, _)| piece < *first) {
                *ended = Some((piece, why));
            }
        };
        self.team.run(&|worker| {
            while let Some(range) = worker.claim(pieces.len(), 1) {
                for (i, piece) in range.clone().zip(&pieces[range]) {
                    let mut piece = piece.lock().unwrap_or_else(PoisonError::into_inner);
                    let (bytes, packed) = &mut *piece;
                    if let Some(found) = self.look(encoding, bytes) {
                        end(i, Ok(found));
                    } else if let Err(why) = packed::pack_into(encoding, bytes, layout, packed) {
                        end(i, Err(why));
                    }
                }
            }
        });
        match ended.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(None),
            Some((piece, found)) => {
                let before = piece * rows * layout.cols;
                found.map(|found| Some(NotFinite { element: before + found.element, ..found }))
            }
        }
    }

    fn look(&self, encoding: Encoding, bytes: &[u8]) -> Option<NotFinite> {
        self.looks.then(|| encoding.not_finite(bytes)).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use formats::DType;
    use ops::packed::Format;
    use tile::types::Scalar;

    /// Rows of several pieces.
    const ROWS: usize = 400;
    const COLS: usize = 4096;

    /// A matrix whose halves are finite.
    fn matrix(format: Format, dtype: DType) -> (Layout, Vec<u8>) {
        let layout = Layout::new(format, ROWS, COLS).unwrap();
        let size = Encoding::Stored(dtype).bytes_for(ROWS * COLS).unwrap();
        (layout, (0..size).map(|i| (i * 37 % 59) as u8).collect())
    }

    #[test]
    fn all_pieces_together_are_the_matrix() {
        let all = [DType::Q4K, DType::Q6K, DType::Q8_0, DType::BF16];
        let both = |dtype| {
            let rows = Format::of(dtype).unwrap();
            [Some(rows), rows.tiled()].into_iter().flatten().map(move |format| (format, dtype))
        };
        for (format, dtype) in all.into_iter().flat_map(both) {
            let (layout, bytes) = matrix(format, dtype);
            assert!(bytes.len() > 2 * PIECE);
            let want = packed::pack_as(format, dtype.into(), &bytes, ROWS, COLS).unwrap().bytes;
            for threads in [1, 3] {
                let packer = Packer { team: Team::new(threads).unwrap(), looks: true };
                let mut packed = vec![7; want.len()];
                let found = packer.pack(dtype.into(), &bytes, &layout, &mut packed).unwrap();
                let name = format.name();
                assert!(found.is_none() && packed == want, "{name}, {threads} threads");
            }
        }
    }

    #[test]
    fn the_first_weight_that_is_not_finite_is_found() {
        let (layout, mut bytes) = matrix(Format::Dense(Scalar::BF16), DType::BF16);
        for (row, column) in [(399, 4095), (250, 17), (30, 0)] {
            let at = row * COLS + column;
            bytes[2 * at..2 * at + 2].copy_from_slice(&[0x80, 0xff]);
            for (threads, looks) in [(1, true), (3, true), (3, false)] {
                let packer = Packer { team: Team::new(threads).unwrap(), looks };
                let mut packed = vec![0; layout.bytes()];
                let found = packer.pack(DType::BF16.into(), &bytes, &layout, &mut packed).unwrap();
                assert_eq!(found.map(|found| found.element), looks.then_some(at));
            }
        }
    }
}
