//! Any bytes as a GGUF header: a header whose promises hold, or an error of one line.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match formats::gguf::parse(bytes, "fuzz") {
        Ok(header) => {
            for tensor in &header.tensors {
                let end = tensor.start.checked_add(tensor.len).unwrap();
                assert!(tensor.start >= header.data_start && end <= bytes.len() as u64);
                assert!(!tensor.shape.is_empty() && tensor.shape.len() <= 4);
            }
            for (key, value) in header.metadata.iter() {
                assert_eq!(header.metadata.get(key).unwrap().id(), value.id());
            }
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
});
