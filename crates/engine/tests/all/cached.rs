//! The cache's contents against Transformers' own; see `tests/reference/cached.py`.

use crate::common::{Expected, error, load, root};
use delft_engine::{CacheType, LoadOptions, LogitRows};

#[test]
fn keys_and_values_are_those_of_transformers() {
    for case in ["llama3", "qwen3", "gemma3", "phi3", "glm4", "mistral"] {
        let path = root().join(case);
        let prompt = Expected::open(&path.join("expected.safetensors")).ids("input_ids");
        let expected = Expected::open(&root().join(format!("../cached/{case}.safetensors")));
        for device in ["cpu", "sim"] {
            let (cache_type, device) = (CacheType::F32, device.parse().unwrap());
            let options = LoadOptions { cache_type, device, ..LoadOptions::default() };
            let engine = load(&path, &options);
            let mut session = engine.session();
            session.logits(&prompt, LogitRows::Last(1)).unwrap();
            for layer in 0..engine.info().layers {
                let found = session.cached(layer).unwrap();
                assert_eq!(found.first, 0);
                for (name, found) in [("keys", found.keys), ("values", found.values)] {
                    let of = format!("{name}.{layer}");
                    let error = error(&found, &expected.floats(&of).unwrap());
                    assert!(error <= 1e-5, "{case} {device:?}: {of}: {error:e}");
                }
            }
        }
    }
}
