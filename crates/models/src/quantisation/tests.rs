//! Settings as programs write them, the schemes that they become, and what is refused.

use super::*;
use formats::DType;
use serde_json::{Value, json};

fn read(config: Value) -> Result<Option<Settings>> {
    let asked = Default::default();
    Settings::read(&Keys::json("config.json", &config, &asked), &mut Vec::new())
}

fn integers(bits: usize, group: Option<usize>, symmetric: bool, ordered: bool) -> Integers {
    Integers { bits, group, symmetric, ordered }
}

/// The schemes of a `quantization_config`.
fn schemes(settings: Value) -> Vec<Scheme> {
    match read(json!({ "quantization_config": settings })).unwrap() {
        Some(Settings::Schemes(schemes)) => schemes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_method_has_its_scheme() {
    let gptq = |integers, plus| Scheme::Gptq { integers, plus };
    let compressed = |format: &str, weights: Value| {
        json!({ "quant_method": "compressed-tensors", "format": format,
            "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } } })
    };
    let weights =
        json!({ "num_bits": 4, "group_size": 128, "symmetric": false, "actorder": "group" });
    let twice = json!({ "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": { "group_0": { "weights": weights }, "group_1": { "weights": weights },
            "attention": { "targets": ["LlamaAttention"], "weights": null } } });
    let eight = Scheme::Fp8 { block: None };
    let cases = [
        (
            json!({ "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": false }),
            gptq(integers(4, Some(128), false, true), 1),
        ),
        (
            json!({ "quant_method": "gptq", "bits": 4, "group_size": 128,
                "dynamic": { "-:.*shared_expert.*": {}, "-:.*mtp.*": {} } }),
            gptq(integers(4, Some(128), true, false), 1),
        ),
        (
            json!({ "quant_method": "gptq", "bits": 3, "group_size": -1, "checkpoint_format": "gptq_v2" }),
            gptq(integers(3, None, true, false), 0),
        ),
        (
            json!({ "quant_method": "gptq", "method": "gptq", "bits": 4, "group_size": 128,
                "format": "gptq_v2", "checkpoint_format": "gptq_v2", "pack_dtype": "int32" }),
            gptq(integers(4, Some(128), true, false), 0),
        ),
        (
            json!({ "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": true,
                "data_type": "int", "packing_format": "auto_round:auto_gptq" }),
            gptq(integers(4, Some(128), true, false), 1),
        ),
        (
            json!({ "quant_method": "auto-round", "bits": 2, "group_size": 64, "sym": false,
                "packing_format": "auto_round:gptqmodel" }),
            gptq(integers(2, Some(64), false, false), 0),
        ),
        (
            json!({ "quant_method": "intel/auto-round", "bits": 4, "group_size": 128,
                "sym": true, "backend": "auto_round:gptq:exllamav2" }),
            gptq(integers(4, Some(128), true, false), 1),
        ),
        (
            json!({ "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": false,
                "packing_format": "auto_round:auto_awq" }),
            Scheme::Awq { group: Some(128) },
        ),
        (
            json!({ "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": true }),
            Scheme::Awq { group: Some(64) },
        ),
        (
            json!({ "quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM" }),
            Scheme::Awq { group: Some(128) },
        ),
        (
            json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64],
                "modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0" }),
            Scheme::Fp8 { block: Some([128, 64]) },
        ),
        (json!({ "quant_method": "fp8", "weight_block_size": null }), eight),
        (json!({ "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"] }), eight),
        (
            json!({ "quant_method": "modelopt", "quant_algo": "MXFP8" }),
            Scheme::Fp8 { block: Some([1, 32]) },
        ),
        (json!({ "quant_method": "mxfp4" }), Scheme::Mxfp4),
        (
            json!({ "quant_method": "bitnet", "linear_class": "autobitlinear",
                "quantization_mode": "offline", "modules_to_not_convert": null }),
            Scheme::Ternary,
        ),
        (
            json!({ "quant_method": "bitnet", "linear_class": "autobitlinear",
                "quantization_mode": "online", "modules_to_not_convert": ["lm_head"] }),
            Scheme::Rounded,
        ),
        (
            compressed(
                "naive-quantized",
                json!({ "num_bits": 8, "type": "float", "strategy": "tensor" }),
            ),
            eight,
        ),
        (
            compressed(
                "float-quantized",
                json!({ "num_bits": 8, "type": "float",
                "strategy": "block", "block_structure": "128x64" }),
            ),
            Scheme::Fp8 { block: Some([128, 64]) },
        ),
        (
            compressed(
                "float-quantized",
                json!({ "num_bits": 8, "type": "float",
                "strategy": "group", "group_size": 64 }),
            ),
            Scheme::Fp8 { block: Some([1, 64]) },
        ),
        (
            compressed(
                "mxfp8-quantized",
                json!({ "num_bits": 8, "type": "float",
                "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8" }),
            ),
            Scheme::Fp8 { block: Some([1, 32]) },
        ),
        (twice, Scheme::Packed(integers(4, Some(128), false, true))),
        (
            compressed(
                "int-quantized",
                json!({ "num_bits": 8, "type": "int", "symmetric": false }),
            ),
            Scheme::Bytes(integers(8, None, false, false)),
        ),
        (
            compressed(
                "naive-quantized",
                json!({ "num_bits": 4, "type": "int",
                "group_size": 32, "actorder": "weight" }),
            ),
            Scheme::Bytes(integers(4, Some(32), true, false)),
        ),
        (
            compressed(
                "mxfp4-pack-quantized",
                json!({ "num_bits": 4, "group_size": 32, "type": "float" }),
            ),
            Scheme::Mxfp4,
        ),
    ];
    for (settings, scheme) in cases {
        assert_eq!(schemes(settings.clone()), [scheme], "{settings}");
    }
    assert_eq!(read(json!({})).unwrap(), None);
    // Numbers that were only rounded, a cache alone, and the key that compressed-tensors had first.
    let config = compressed("dense", json!({ "num_bits": 8 }));
    assert_eq!(read(json!({ "quantization_config": config })).unwrap(), None);
    let config = json!({ "quant_method": "compressed-tensors", "config_groups": {},
        "kv_cache_scheme": { "num_bits": 8, "type": "float" } });
    assert_eq!(read(json!({ "quantization_config": config })).unwrap(), None);
    let config = compressed("int-quantized", json!({ "num_bits": 8, "type": "int" }));
    assert!(read(json!({ "compression_config": config })).unwrap().is_some());
}

#[test]
fn settings_of_single_matrices_are_further_schemes() {
    let gptq = |bits, group, ordered| Scheme::Gptq {
        integers: integers(bits, group, false, ordered),
        plus: 1,
    };
    let found = schemes(json!({ "quant_method": "gptq", "bits": 4, "group_size": 128,
        "dynamic": { "+:.*down_proj": { "bits": 8, "group_size": -1 }, "-:.*gate": {},
            ".*layers\\.0\\..*": { "sym": false, "desc_act": true }, "-:x": { "bits": 2 } } }));
    // Symmetric codes are not told from others by their shapes.
    let expected = [gptq(4, Some(128), false), gptq(8, None, false), gptq(4, Some(128), true)];
    assert_eq!(found, expected);
    let found = schemes(json!({ "quant_method": "auto-round", "bits": 2, "group_size": 128,
        "sym": false, "packing_format": "auto_round:auto_gptq",
        "extra_config": { "model.layers.0.mlp.gate_proj": { "bits": 4 }, "lm_head": { "bits": 16 } } }));
    assert_eq!(found, [gptq(2, Some(128), false), gptq(4, Some(128), false)]);
    let found = schemes(json!({ "quant_method": "compressed-tensors", "format": "mixed-precision",
        "config_groups": {
            "group_0": { "format": "pack-quantized", "targets": ["re:.*mlp.*"],
                "weights": { "num_bits": 4, "group_size": 128 } },
            "group_1": { "format": "float-quantized", "targets": ["re:.*self_attn.*"],
                "weights": { "num_bits": 8, "type": "float", "strategy": "channel" } } } }));
    let four = Scheme::Packed(integers(4, Some(128), true, false));
    assert_eq!(found, [four, Scheme::Fp8 { block: None }]);
}

#[test]
fn groups_of_mlx_have_its_usual_sizes() {
    let group = |bits, group, mode| Group { bits, group, mode };
    let found = read(json!({
        "quantization": { "mode": "mxfp8", "lm_head": false, "a.q": true,
            "a.k": { "group_size": 128, "bits": 6 }, "a.v": { "mode": "mxfp4" } },
        // A copy, or what the weights were made of.
        "quantization_config": { "quant_method": "bitsandbytes" } }));
    let Some(Settings::Mlx { whole, single }) = found.unwrap() else { panic!("no groups") };
    assert_eq!(whole, group(8, 32, Mode::Mxfp8));
    assert_eq!(single.len(), 2);
    assert_eq!(single["a.k"], group(6, 128, Mode::Affine));
    assert_eq!(single["a.v"], group(4, 32, Mode::Mxfp4));
}

#[test]
fn what_is_said_of_the_cache_is_a_line() {
    let config = json!({ "quantization_config": { "quant_method": "fp8",
        "kv_cache_scheme": { "num_bits": 8, "type": "float" } } });
    let (asked, mut lines) = (Default::default(), Vec::new());
    Settings::read(&Keys::json("config.json", &config, &asked), &mut lines).unwrap();
    let expected = "config.json: quantization_config.kv_cache_scheme: not used";
    assert!(lines.len() == 1 && lines[0].starts_with(expected), "{lines:?}");
}

#[test]
fn what_is_not_known_is_refused_by_key() {
    let group = |format: &str, weights: Value| {
        json!({ "quant_method": "compressed-tensors", "format": format,
            "config_groups": { "a": { "weights": weights } } })
    };
    let four = json!({ "num_bits": 4 });
    let eight = json!({ "num_bits": 8 });
    for (settings, expected) in [
        (json!({ "quant_method": "bitsandbytes" }), "quantization_config.quant_method: expected"),
        (
            json!({ "quant_method": "gptq", "bits": 4, "dynamic": { "+:.*down_proj": { "bits": 1 } } }),
            "dynamic.+:.*down_proj: bits: expected 2 to 8, found 1",
        ),
        (json!({ "quant_method": "gptq", "bits": 9 }), "bits: expected 2 to 8, found 9"),
        (
            json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin" }),
            "found marlin",
        ),
        (
            json!({ "quant_method": "gptq", "bits": 4, "is_marlin_format": true }),
            "is_marlin_format: expected false, found true",
        ),
        (
            json!({ "quant_method": "gptq", "bits": 4, "pack_dtype": "int16" }),
            "pack_dtype: expected int32, found int16",
        ),
        (
            json!({ "quant_method": "gptq", "bits": 4, "rotation": "hadamard" }),
            "rotation: expected none",
        ),
        (
            json!({ "quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fp8_static" }),
            "packing_format: expected auto_round:auto_gptq, auto_round:gptqmodel or",
        ),
        (
            json!({ "quant_method": "auto-round", "bits": 4, "data_type": "mx_fp" }),
            "data_type: expected int, found mx_fp",
        ),
        (json!({ "quant_method": "bitnet" }), "expected autobitlinear, found bitlinear"),
        (
            json!({ "quant_method": "bitnet", "linear_class": "autobitlinear",
                "quantization_mode": "never" }),
            "expected offline or online, found never",
        ),
        (
            json!({ "quant_method": "bitnet", "linear_class": "autobitlinear",
                "use_rms_norm": true }),
            "use_rms_norm: expected false",
        ),
        (
            json!({ "quant_method": "bitnet", "linear_class": "autobitlinear",
                "modules_to_not_convert": ["q_proj"] }),
            "modules_to_not_convert: expected the head alone",
        ),
        (json!({ "quant_method": "awq", "version": "gemv" }), "found gemv"),
        (json!({ "quant_method": "awq", "checkpoint_format": "gemv_fast" }), "found gemv_fast"),
        (json!({ "quant_method": "awq", "bits": 8 }), "bits: expected 4 bits, found 8"),
        (json!({ "quant_method": "fp8", "fmt": "e5m2" }), "found e5m2"),
        (
            json!({ "quant_method": "fp8", "weight_block_size": [0, 1] }),
            "rows and columns of a block",
        ),
        (group("nvfp4-pack-quantized", four.clone()), "found nvfp4-pack-quantized"),
        (group("marlin-24", four.clone()), "found marlin-24"),
        (
            group("mxfp4-pack-quantized", eight),
            "config_groups.a: weights.num_bits: expected 4 bits in groups of 32, found 8 bits",
        ),
        (
            group("float-quantized", json!({ "num_bits": 4, "type": "float" })),
            "expected floats of 8 bits, found 4",
        ),
        (
            json!({ "quant_method": "compressed-tensors", "format": "mixed-precision",
            "config_groups": { "a": { "weights": four, "format": "nvfp4-pack-quantized" } } }),
            "config_groups.a: format: expected pack-quantized or int-quantized",
        ),
        (
            json!({ "quant_method": "compressed-tensors", "format": "pack-quantized",
            "sparsity_config": { "format": "sparse-24-bitmask" }, "config_groups": { "a": { "weights": four } } }),
            "sparsity_config.format: expected dense",
        ),
        (json!({ "bits": 4, "group_size": 16, "mode": "nvfp4" }), "found nvfp4"),
        (json!({ "bits": 4, "group_size": 64, "mode": "mxfp8" }), "8 bits in groups of 32"),
        (json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" }), "found NVFP4"),
    ] {
        let why = read(json!({ "quantization_config": settings })).unwrap_err().to_string();
        assert!(why.starts_with("config.json: ") && why.contains(expected), "{why}");
        assert!(!why.contains('\n'), "{why}");
    }
}

/// Matrices of a folder whose settings differ, each by its own.
#[test]
fn the_tensors_of_a_matrix_choose_its_scheme() {
    let folder = tempfile::tempdir().unwrap();
    let zeros = [0u8; 4096];
    let shapes = [64u64, 64].map(u64::to_le_bytes).concat();
    let tensor = |name, dtype: DType, shape: &'static [usize]| {
        let count = dtype.bytes_for(shape.iter().product::<usize>() as u64).unwrap();
        TensorView { name, dtype, shape, bytes: &zeros[..count as usize] }
    };
    let (i32, f16) = (DType::I32, DType::F16);
    let tensors = [
        // Rows of four bits in one group would be rows of eight, half as long.
        tensor("a.weight_packed", i32, &[64, 8]),
        tensor("a.weight_scale", f16, &[64, 1]),
        TensorView { bytes: &shapes, ..tensor("a.weight_shape", DType::I64, &[2]) },
        tensor("b.weight_packed", i32, &[64, 16]),
        tensor("b.weight_scale", f16, &[64, 1]),
        TensorView { bytes: &shapes, ..tensor("b.weight_shape", DType::I64, &[2]) },
        tensor("c.weight_packed", i32, &[64, 8]),
        tensor("c.weight_scale", f16, &[64, 1]),
        tensor("c.weight_zero_point", i32, &[8, 1]),
        tensor("d.weight", DType::I8, &[64, 64]),
        tensor("d.weight_scale", f16, &[64, 1]),
        tensor("e.weight", DType::F16, &[16, 64]),
        tensor("f.qweight", i32, &[8, 64]),
        tensor("f.qzeros", i32, &[2, 8]),
        tensor("f.scales", f16, &[2, 64]),
        tensor("g.qweight", i32, &[16, 64]),
        tensor("g.qzeros", i32, &[1, 16]),
        tensor("g.scales", f16, &[1, 64]),
    ];
    let path = folder.path().join("model.safetensors");
    formats::safetensors::write(&path, &[], tensors).unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let tensors = Tensors::open(folder.path()).unwrap();
    let four = |symmetric| Scheme::Packed(integers(4, None, symmetric, false));
    let eight = Scheme::Packed(integers(8, None, true, false));
    let bytes = Scheme::Bytes(integers(8, None, true, false));
    let compressed = Settings::Schemes(vec![eight, four(true), four(false), bytes]);
    let gptq = |bits, group| Scheme::Gptq { integers: integers(bits, group, true, false), plus: 1 };
    let dynamic = Settings::Schemes(vec![gptq(4, Some(128)), gptq(4, Some(32)), gptq(8, None)]);
    let cases = [
        (&compressed, "a", Some(four(true))),
        (&compressed, "b", Some(eight)),
        (&compressed, "c", Some(four(false))),
        (&compressed, "d", Some(bytes)),
        (&compressed, "e", None),
        (&dynamic, "e", None),
        (&dynamic, "f", Some(gptq(4, Some(32)))),
        (&dynamic, "g", Some(gptq(8, None))),
    ];
    for (settings, stem, scheme) in cases {
        let name = format!("{stem}.weight");
        let found = match settings.source(&name, tensors.get(&name), &tensors) {
            Some(Source::Quantised(quantised)) => Some(quantised.scheme),
            None => None,
            Some(other) => panic!("{stem}: {other:?}"),
        };
        assert_eq!(found, scheme, "{stem}");
    }
}
