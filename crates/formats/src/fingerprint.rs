//! A model's fingerprint, by which its files are told from another model's.

use sha2::{Digest, Sha256};

use crate::Tensors;

/// Bytes of each tensor, from its beginning and from its end, that count.
const SAMPLED: usize = 256;

/// SHA-256 of every tensor's name, type, shape and a few of its bytes, in hexadecimal. Two files of
/// one model in one quantisation have the same; so has a model that was moved or renamed.
pub fn fingerprint(tensors: &Tensors) -> String {
    let mut all: Vec<_> = tensors.iter().collect();
    all.sort_by_key(|tensor| tensor.name);
    let mut digest = Sha256::new();
    for tensor in all {
        digest.update(format!("{}\n{} {:?}\n", tensor.name, tensor.dtype, tensor.shape));
        let sampled = tensor.bytes.len().min(SAMPLED);
        digest.update(&tensor.bytes[..sampled]);
        digest.update(&tensor.bytes[tensor.bytes.len() - sampled..]);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
