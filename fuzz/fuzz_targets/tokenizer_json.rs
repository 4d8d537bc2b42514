//! Any bytes as a tokenizer.json: an error or a tokenizer that encodes, decodes and streams, never
//! a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tokens::{Special, Tokenizer};

fuzz_target!(|bytes: &[u8]| {
    let Ok(tokenizer) = Tokenizer::from_json(bytes) else { return };
    for special in [Special::default(), Special { add: true, parse: true }] {
        let Ok(ids) = tokenizer.encode("Hi <s> 12 \u{e9}\u{1f389}\n\u{65e5}</s>", special) else { continue };
        let whole = tokenizer.decode(&ids, false);
        let mut stream = tokenizer.stream_with(false);
        let mut streamed: String = ids.iter().filter_map(|id| stream.push(*id)).collect();
        streamed.extend(stream.flush());
        assert_eq!(whole, streamed);
    }
});
