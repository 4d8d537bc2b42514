//! Any bytes as a safetensors header: a header whose tensors tile the data, or an error of one
//! line.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match formats::safetensors::parse(bytes, "fuzz") {
        Ok(header) => {
            let total: u64 = header.tensors.iter().map(|tensor| tensor.len).sum();
            assert_eq!(header.data_start + total, bytes.len() as u64);
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
});
