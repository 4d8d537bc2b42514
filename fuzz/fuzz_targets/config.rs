//! Any bytes as a `config.json`: a configuration that is known, or an error of one line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use models::ReadOptions;

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = serde_json::from_slice(bytes) else { return };
    let judge = |context| {
        let options = ReadOptions { context, ..ReadOptions::default() };
        models::check_json(&json, "fuzz", &options)
    };
    for context in [None, Some(1), Some(1 << 20), Some(usize::MAX)] {
        if let Err(error) = judge(context) {
            assert!(!error.to_string().contains('\n'));
            // A key that is passed over is not what the model is refused for.
            let ignored = error.place.strip_prefix("fuzz: ").unwrap_or_default().to_owned();
            let ignore_keys = vec![ignored.clone()];
            let options = ReadOptions { ignore_keys, context, ..ReadOptions::default() };
            if error.to_string().contains("settings that this architecture has") {
                let next = models::check_json(&json, "fuzz", &options);
                assert!(next.is_ok() || next.is_err_and(|next| next.place != error.place));
            }
        }
    }
});
