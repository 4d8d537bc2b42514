//! What a run writes: adapters and models with the values that were trained.

use super::*;

/// The files of a model in training, in a folder.
fn exported(tuned: &mut Tuned) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in tuned.export().unwrap() {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

#[test]
fn an_export_is_the_adapter_that_was_trained() {
    for (name, twin) in [
        ("llama3", None),
        ("llama3", Some("model.f32.gguf")),
        ("llama3-dora", None),
        ("llama3-dora", Some("model.f32.gguf")),
        ("phi3", None),
        ("phi3-dora", Some("model.f32.gguf")),
        ("glm4", Some("model.f32.gguf")),
        ("gpt2", None),
    ] {
        let case = Case::open(name);
        let model = twin.map_or(case.model.clone(), |twin| case.model.join(twin));
        let mut tuned = Tuned::lora(&model, &case.options, Some(1)).unwrap();
        for parameter in tuned.parameters_mut() {
            parameter.values = case.values("initial", parameter);
        }
        let aside = exported(&mut tuned);
        let tensors = formats::Tensors::open(&model).unwrap();
        let loaded = models::load(&tensors, &models::ReadOptions::default()).unwrap();
        let program = loaded.record(false).unwrap();
        let base = adapters::Base { config: loaded.config(), program: &program, tensors: &tensors };
        let file = adapters::File::open(aside.path()).unwrap();
        let adapter = file.resolve(&base, 1.0).unwrap();
        let matrix =
            |site: &program::Site| site.name.starts_with("blocks.") && site.experts.is_none();
        let mut sites = program.adaptable().into_iter().filter(matrix);
        let each = if case.options.dora { 3 } else { 2 };
        for own in tuned.parameters().chunks(each) {
            let mut row = 0;
            while row < own[1].shape[0] {
                let site = sites.next().unwrap();
                let (delta, rows) = (&adapter.deltas[&site.name], row..row + site.output);
                assert_eq!(delta.down, own[0].values, "{name}: {}", site.name);
                assert_eq!(delta.up, own[1].values[rows.start * 3..rows.end * 3], "{}", site.name);
                assert_eq!((delta.scale, delta.gain.is_some()), (2.0, case.options.dora));
                if let (Some(gain), [_, _, magnitude]) = (&delta.gain, own) {
                    let matrix = program.weights[site.weight.0].read(&tensors).unwrap();
                    let factors = [&delta.down[..], &delta.up];
                    let matrix = matrix.to_f32().unwrap();
                    let lengths = adapters::lengths(&matrix, site.input, delta.scale, factors);
                    let magnitudes = &magnitude.values[rows.clone()];
                    for ((gain, length), magnitude) in gain.gain.iter().zip(lengths).zip(magnitudes)
                    {
                        let off = f64::from(*gain) * length - f64::from(*magnitude);
                        assert!(off.abs() < 1e-6 * f64::from(*magnitude), "{}", site.name);
                    }
                }
                row = rows.end;
            }
        }
        assert!(sites.next().is_none());
    }
}

/// Rows of matrices that Hugging Face's model has by turns in one are in its order in the file,
/// from which another run goes on.
#[test]
fn an_export_has_the_order_of_pefts() {
    let others = ["lfm2", "qwen3.5-shared", "qwen3.5-shared-dora", "qwen3-next", "olmo_hybrid"];
    for name in ["phi3"].into_iter().chain(others) {
        let case = Case::open(name);
        let mut tuned = case.lora(Some(1));
        let aside = exported(&mut tuned);
        let file = Safetensors::open(&aside.path().join("adapter_model.safetensors")).unwrap();
        for parameter in tuned.parameters() {
            let found = file.get(&parameter.name).unwrap().to_f32().unwrap();
            let want = case.floats(&format!("initial.{}", parameter.name));
            assert!(found == want, "{name}: {}", parameter.name);
        }
        let path = aside.path().to_owned();
        let from = engine::AdapterFile { path, scale: 1.0, any_base: true };
        let again = Tuned::adapter(case.model.clone(), &from, Some(1)).unwrap();
        assert_eq!(tuned.parameters().len(), again.parameters().len());
        for (one, other) in tuned.parameters().iter().zip(again.parameters()) {
            assert_eq!(one.name, other.name);
            // Magnitudes are made of gains and lengths again.
            let off = distance(&other.values, &one.values);
            assert!(off < 1e-6, "{name}: {}: {off:e}", one.name);
        }
    }
}

#[test]
fn an_export_of_all_weights_is_the_model() {
    for name in ["llama-linear", "gemma2"] {
        let model = testing::models().join(name);
        let mut tuned = Tuned::full(&model, Some(1)).unwrap();
        let (before, same) = (formats::Tensors::open(&model).unwrap(), exported(&mut tuned));
        let after = formats::Tensors::open(same.path()).unwrap();
        for tensor in before.iter() {
            assert_eq!(after.get(tensor.name).unwrap().bytes, tensor.bytes, "{}", tensor.name);
        }
        tuned.parameters_mut()[2].values[0] += 0.5;
        let changed = exported(&mut tuned);
        let again = Tuned::full(changed.path(), Some(1)).unwrap();
        assert_ne!(tuned.parameters()[2], Tuned::full(&model, Some(1)).unwrap().parameters()[2]);
        for (one, other) in tuned.parameters().iter().zip(again.parameters()) {
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= a.abs() / 128.0;
            assert!(one.values.iter().zip(&other.values).all(near), "{}", one.name);
        }
    }
}

/// All weights go back to where the files have them: whole, as rows of one, turned, or without what
/// norms add.
#[test]
fn an_export_of_all_weights_is_what_was_trained() {
    for name in [
        "apertus",
        "bailing_hybrid",
        "falcon-h1",
        "kimi_linear",
        "jamba",
        "laguna",
        "lfm3",
        "mamba",
        "mamba2",
        "olmo_hybrid",
        "gpt2",
        "gpt2-scaled",
        "gemma2",
        "gemma3n",
        "phi3",
        "starcoder2",
        "gpt-neox",
        "internlm2",
        "lfm2",
        "qwen3.5",
        "youtu",
        "deepseek3",
        "ernie4_5-moe",
        "gemma4-moe",
        "glm4-moe",
        "gpt-oss",
        "granitemoe",
        "llama4",
        "mixtral",
        "phimoe",
        "qwen3-moe",
        "qwen3.5-moe",
    ] {
        let case = Case::without_file(name);
        let mut tuned = case.full(Some(1));
        let aside = exported(&mut tuned);
        let file = |folder: &std::path::Path| {
            Safetensors::open(&folder.join("model.safetensors")).unwrap()
        };
        let (before, after) = (file(&case.model), file(aside.path()));
        for tensor in before.iter() {
            assert!(after.get(tensor.name).unwrap().bytes == tensor.bytes, "{}", tensor.name);
        }
        // Zeros behind columns are in no file.
        let trained = |value: f32| name != "gemma3n" || value != 0.0;
        for (p, parameter) in tuned.parameters_mut().iter_mut().enumerate() {
            for (i, value) in parameter.values.iter_mut().enumerate() {
                if trained(*value) {
                    *value = ((i * 31 + p * 17) % 23) as f32 / 16.0 - 0.5;
                }
            }
        }
        let aside = exported(&mut tuned);
        let again = Tuned::full(aside.path().to_path_buf(), Some(1)).unwrap();
        assert!(again.parameters() == tuned.parameters(), "{name}");
    }
}
