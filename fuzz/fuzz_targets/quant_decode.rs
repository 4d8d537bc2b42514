//! Any bytes as quantised blocks: decode and split agree, and what was decoded encodes again.
#![no_main]

use formats::quant::{BlockFormat, Parts};
use formats::{DType, with_block};
use libfuzzer_sys::fuzz_target;

fn check<B: BlockFormat>(bytes: &[u8]) {
    let (mut weights, mut applied) = ([0.0; 256], [0.0; 256]);
    let (weights, applied) = (&mut weights[..B::ELEMENTS], &mut applied[..B::ELEMENTS]);
    let mut block = [0; 256];
    for bytes in bytes.chunks_exact(B::BYTES) {
        B::decode(bytes, weights);
        let mut parts = Parts::default();
        B::split(bytes, &mut parts);
        B::AFFINE.apply(&parts, applied);
        assert!(weights.iter().zip(&*applied).all(|(w, a)| w == a || w.is_nan() && a.is_nan()));
        B::encode(weights, &mut block[..B::BYTES]);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, bytes)) = bytes.split_first() else { return };
    let dtype = DType::ALL[usize::from(kind) % DType::ALL.len()];
    with_block!(dtype, B => check::<B>(bytes), else => {
        let whole = bytes.len() / dtype.block_bytes();
        let mut values = vec![0.0; whole];
        let decoded = dtype.decode(&bytes[..whole * dtype.block_bytes()], &mut values);
        assert_eq!(decoded.is_ok(), dtype.is_float());
    });
});
