//! How `config.json` says that matrices are quantised, and the recipe of each.
//!
//! ```text
//! "quantization": { "group_size": 64, "bits": 4, "mode": "affine", "model.layers.0.mlp.down_proj": { "group_size": 32, "bits": 8 } }
//! "quantization_config": { "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true }
//! "quantization_config": { "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm" }
//! "quantization_config": { "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] }
//! "quantization_config": { "quant_method": "modelopt", "quant_algo": "FP8" }
//! "quantization_config": { "quant_method": "mxfp4" }
//! "quantization_config": { "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": { .. } }
//! ```
//! A matrix that is left as it was has its tensor of numbers, which goes before the settings.

use crate::keys::{Keys, clipped};
use formats::{Error, Integers, Quantised, Result, Scheme, Source, Tensor, Tensors};
use std::collections::HashMap;

/// How matrices are quantised.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Settings {
    /// MLX's groups, for all matrices and apart for single ones.
    Mlx { whole: Group, single: HashMap<String, Group> },
    /// By one scheme.
    All(Scheme),
}

/// MLX's groups.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Group {
    bits: usize,
    group: usize,
    /// Four-bit floats instead of affine codes.
    floats: bool,
}

/// The expected encodings, for errors.
const EXPECTED: &str = "weights of the type F32, F16 or BF16, MLX's affine groups or mxfp4, gptq, awq, fp8, mxfp4 or \
    compressed-tensors";
/// The hint of those errors.
const HINT: &str = "a GGUF file of this model has quantised weights that run here";

impl Settings {
    /// Reads them; `None` where weights are numbers.
    ///
    /// # Errors
    /// A kind of quantisation that is not known, by key.
    pub(crate) fn read(keys: &Keys<'_>) -> Result<Option<Settings>> {
        let mut read = None;
        for key in ["quantization_config", "quantization"] {
            let Some(settings) = keys.object(key)? else { continue };
            // What they say is checked against the tensors.
            let all = keys.get(key).and_then(|all| all.as_object()).into_iter().flatten();
            all.clone().for_each(|(name, _)| settings.note(name));
            read = Some(match settings.text("quant_method")? {
                Some("gptq") => Settings::All(gptq(&settings)?),
                Some("awq") => Settings::All(awq(&settings)?),
                Some("fp8") => Settings::All(fp8(&settings)?),
                Some("fbgemm_fp8") => Settings::All(Scheme::Fp8 { block: None }),
                Some("mxfp4") => Settings::All(Scheme::Mxfp4),
                Some("compressed-tensors") => Settings::All(compressed(&settings)?),
                Some("modelopt") => match settings.text("quant_algo")? {
                    Some("FP8") => Settings::All(Scheme::Fp8 { block: None }),
                    other => {
                        let found = clipped(other.unwrap_or("nothing"));
                        return Err(settings.wrong("quant_algo", "FP8", found).hint(HINT));
                    }
                },
                Some(method) => {
                    return Err(settings
                        .wrong("quant_method", EXPECTED, clipped(method))
                        .hint(HINT));
                }
                None if settings.get("bits").is_none() => {
                    let value = keys.get(key).map_or(String::new(), |value| value.to_string());
                    return Err(keys.wrong(key, EXPECTED, clipped(&value)).hint(HINT));
                }
                None => {
                    let single = all.filter(|(_, value)| value.is_object());
                    let single: Result<HashMap<String, Group>> = single
                        .map(|(name, value)| {
                            let place = format!("{}: {key}.{name}", keys.file);
                            let asked = Default::default();
                            let group = Group::read(&Keys::json(&place, value, &asked))?;
                            Ok((name.clone(), group))
                        })
                        .collect();
                    Settings::Mlx { whole: Group::read(&settings)?, single: single? }
                }
            });
        }
        Ok(read)
    }

    /// The recipe of the matrix that a checkpoint calls `name`, `STEM.weight`, if it is quantised;
    /// `tensor` is what the file has under that name.
    pub(crate) fn source(
        &self,
        name: &str,
        tensor: Option<Tensor<'_>>,
        tensors: &Tensors,
    ) -> Option<Source> {
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let held = |parts: &[String]| tensors.get(parts.first()?).map(|_| parts.to_vec());
        let named = |suffixes: &[&str]| {
            held(&suffixes.iter().map(|suffix| format!("{stem}{suffix}")).collect::<Vec<_>>())
        };
        match self {
            Settings::Mlx { whole, single } => {
                let tensor = tensor.filter(Tensor::holds_codes)?;
                let stem = tensor.name.strip_suffix(".weight").unwrap_or(tensor.name);
                Some(single.get(stem).unwrap_or(whole).source(tensor.name, stem))
            }
            Settings::All(scheme) => {
                let mut scheme = *scheme;
                // Some files state no order and have one.
                if let Scheme::Gptq { integers, .. } = &mut scheme {
                    let order = tensors.get(&format!("{stem}.g_idx"));
                    integers.ordered |= order.is_some_and(|t| !in_order(t, integers.group));
                }
                let tensors = match scheme {
                    Scheme::Mxfp4 => named(&["_blocks", "_scales"])
                        .or_else(|| named(&[".weight_blocks", ".weight_scales"]))
                        .or_else(|| named(&[".weight_packed", ".weight_scale"]))?,
                    Scheme::Gptq { integers, .. } => match integers.ordered {
                        true => named(&[".qweight", ".qzeros", ".scales", ".g_idx"])?,
                        false => named(&[".qweight", ".qzeros", ".scales"])?,
                    },
                    Scheme::Awq { .. } => named(&[".qweight", ".qzeros", ".scales"])?,
                    Scheme::Fp8 { .. } => {
                        let tensor = tensor.filter(Tensor::holds_eight_bit_floats)?;
                        // The last is Mistral's own.
                        let named = ["weight_scale_inv", "weight_scale", "qscale_weight"]
                            .map(|part| format!("{stem}.{part}"));
                        let [_, usual, _] = &named;
                        let held = named.iter().find(|name| tensors.get(name).is_some());
                        let scale = held.unwrap_or(usual).clone();
                        vec![tensor.name.to_owned(), scale]
                    }
                    Scheme::Packed(integers) => {
                        let mut parts = vec![".weight_packed", ".weight_scale"];
                        parts.extend((!integers.symmetric).then_some(".weight_zero_point"));
                        parts.extend(integers.ordered.then_some(".weight_g_idx"));
                        named(&parts)?
                    }
                    Scheme::Bytes => {
                        let tensor = tensor.filter(Tensor::holds_signed_bytes)?;
                        vec![tensor.name.to_owned(), format!("{stem}.weight_scale")]
                    }
                };
                Some(Source::Quantised(Quantised { scheme, tensors }))
            }
        }
    }
}

/// Whether the groups of inputs are in the order of the inputs.
fn in_order(groups: Tensor<'_>, group: Option<usize>) -> bool {
    let (all, _) = groups.bytes.as_chunks::<4>();
    let plain = |i: usize| group.map_or(0, |group| i / group) as i64;
    // Words that are no floats: numbers of groups.
    let words = groups.bytes.len() == 4 * groups.elements();
    words
        && groups.check_numbers(String::new).is_err()
        && all.iter().enumerate().all(|(i, n)| i64::from(i32::from_le_bytes(*n)) == plain(i))
}

impl Group {
    fn read(keys: &Keys<'_>) -> Result<Group> {
        let (bits, group) = (keys.needed("bits")?, keys.needed("group_size")?);
        let floats = match keys.text("mode")? {
            None | Some("affine") => false,
            Some("mxfp4") => true,
            Some(mode) => {
                let expected = "affine groups or mxfp4";
                return Err(keys.wrong("mode", expected, clipped(mode)).hint(HINT));
            }
        };
        let (bits, group) = (bits.within(2..=8)?, group.within(8..=1 << 16)?);
        if floats && (bits, group) != (4, 32) {
            let found = format!("{bits} bits in groups of {group}");
            return Err(keys.wrong("mode", "4 bits in groups of 32 for mxfp4", found));
        }
        Ok(Group { bits, group, floats })
    }

    /// The recipe of a matrix whose codes are the tensor `codes`.
    fn source(&self, codes: &str, stem: &str) -> Source {
        let (codes, scales) = (codes.to_owned(), format!("{stem}.scales"));
        if self.floats {
            let tensors = vec![codes, scales];
            return Source::Quantised(Quantised { scheme: Scheme::Mxfp4, tensors });
        }
        let (offsets, Group { bits, group, .. }) = (format!("{stem}.biases"), *self);
        Source::Affine { codes, scales, offsets, bits, group }
    }
}

/// `group_size`: -1 for all inputs.
fn group(keys: &Keys<'_>) -> Result<Option<usize>> {
    if keys.get("group_size").and_then(|n| n.as_i64()) == Some(-1) {
        return Ok(None);
    }
    keys.size("group_size")?.map(|group| group.within(8..=1 << 16)).transpose()
}

fn gptq(keys: &Keys<'_>) -> Result<Scheme> {
    keys.only("checkpoint_format", &["gptq", "gptq_v2"])?;
    // Rules that begin with `-:` name matrices that are left as they were.
    let left = |rules: &serde_json::Value| {
        rules.as_object().is_some_and(|rules| rules.keys().all(|rule| rule.starts_with("-:")))
    };
    if let Some(rules) = keys.get("dynamic").filter(|rules| !left(rules)) {
        return Err(keys.odd("dynamic", "the same settings for all matrices", rules).hint(HINT));
    }
    let plus = if keys.text("checkpoint_format")? == Some("gptq_v2") { 0 } else { 1 };
    let integers = Integers {
        bits: keys.needed("bits")?.within(2..=8)?,
        group: group(keys)?,
        symmetric: keys.flag("sym")?.unwrap_or(true),
        ordered: keys.flag("desc_act")?.unwrap_or(false),
    };
    Ok(Scheme::Gptq { integers, plus })
}

fn awq(keys: &Keys<'_>) -> Result<Scheme> {
    keys.only("version", &["gemm", "GEMM"])?;
    let bits = keys.size("bits")?.or(keys.size("w_bit")?);
    if let Some(bits) = bits.filter(|bits| bits.value != 4) {
        return Err(bits.wrong("4 bits", bits.value));
    }
    if keys.flag("zero_point")? == Some(false) {
        return Err(keys
            .wrong("zero_point", "zeros, which AWQ's matrix form has", false)
            .hint(HINT));
    }
    let group = match group(keys)? {
        Some(group) => Some(group),
        None => keys.size("q_group_size")?.map(|group| group.within(8..=1 << 16)).transpose()?,
    };
    Ok(Scheme::Awq { group })
}

fn fp8(keys: &Keys<'_>) -> Result<Scheme> {
    keys.only("fmt", &["e4m3", "float8_e4m3fn"])?;
    let Some(block) = keys.numbers("weight_block_size")? else {
        return Ok(Scheme::Fp8 { block: None });
    };
    match block[..] {
        [rows, cols] if rows >= 1.0 && cols >= 1.0 => {
            Ok(Scheme::Fp8 { block: Some([rows as usize, cols as usize]) })
        }
        _ => Err(keys.wrong(
            "weight_block_size",
            "rows and columns of a block",
            format!("{block:?}"),
        )),
    }
}

fn compressed(keys: &Keys<'_>) -> Result<Scheme> {
    let place = || keys.place("config_groups");
    let groups = keys.get("config_groups").and_then(|groups| groups.as_object());
    let mut weights = groups.into_iter().flat_map(|groups| groups.values()).map(|g| &g["weights"]);
    let Some(first) = weights.next() else {
        return Err(Error::new(place(), "how weights are quantised", "nothing").hint(HINT));
    };
    if let Some(other) = weights.find(|other| *other != first) {
        let found = clipped(&other.to_string());
        return Err(Error::new(place(), "the same settings for all weights", found).hint(HINT));
    }
    if let Some(found) =
        keys.get("transform_config").filter(|t| t.as_object().is_none_or(|t| !t.is_empty()))
    {
        return Err(keys.odd("transform_config", "no transforms", found).hint(HINT));
    }
    let asked = Default::default();
    let place = format!("{}.weights", place());
    let weights = Keys::json(&place, first, &asked);
    let integers = || -> Result<Integers> {
        let order = weights.get("actorder");
        Ok(Integers {
            bits: weights.needed("num_bits")?.within(2..=8)?,
            group: group(&weights)?,
            symmetric: weights.flag("symmetric")?.unwrap_or(true),
            ordered: order
                .is_some_and(|o| o.as_str() == Some("group") || o.as_bool() == Some(true)),
        })
    };
    let floats = weights.text("type")? == Some("float");
    let format = match keys.text("format")? {
        // The name of both before they had their own.
        Some("naive-quantized") if floats => Some("float-quantized"),
        Some("naive-quantized") => Some("int-quantized"),
        format => format,
    };
    match format {
        Some("pack-quantized") => Ok(Scheme::Packed(integers()?)),
        Some("mxfp4-pack-quantized") => {
            let found = (weights.needed("num_bits")?.value, group(&weights)?.unwrap_or(32));
            match found {
                (4, 32) => Ok(Scheme::Mxfp4),
                (bits, group) => {
                    let found = format!("{bits} bits in groups of {group}");
                    Err(weights.wrong("num_bits", "4 bits in groups of 32", found).hint(HINT))
                }
            }
        }
        Some("int-quantized") if integers()?.symmetric && integers()?.bits == 8 => {
            Ok(Scheme::Bytes)
        }
        Some("float-quantized") if weights.needed("num_bits")?.value == 8 => {
            let block = weights.numbers("block_structure")?;
            Ok(Scheme::Fp8 {
                block: match block.as_deref() {
                    Some([rows, cols]) if *rows >= 1.0 && *cols >= 1.0 => {
                        Some([*rows as usize, *cols as usize])
                    }
                    _ => None,
                },
            })
        }
        format => {
            let expected = "pack-quantized, mxfp4-pack-quantized, float-quantized of 8 bits, or \
                symmetric int-quantized of 8";
            let found = clipped(format.unwrap_or("nothing"));
            Err(keys.wrong("format", expected, found).hint(HINT))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(config: Value) -> Result<Option<Settings>> {
        let asked = Default::default();
        Settings::read(&Keys::json("config.json", &config, &asked))
    }

    #[test]
    fn each_method_has_its_scheme() {
        let integers =
            |bits, group, symmetric, ordered| Integers { bits, group, symmetric, ordered };
        let weights =
            json!({ "num_bits": 4, "group_size": 128, "symmetric": false, "actorder": "group" });
        let groups =
            json!({ "group_0": { "weights": weights }, "group_1": { "weights": weights } });
        let cases = [
            (
                json!({ "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": false }),
                Scheme::Gptq { integers: integers(4, Some(128), false, true), plus: 1 },
            ),
            (
                json!({ "quant_method": "gptq", "bits": 4, "group_size": 128,
                    "dynamic": { "-:.*shared_expert.*": {}, "-:.*mtp.*": {} } }),
                Scheme::Gptq { integers: integers(4, Some(128), true, false), plus: 1 },
            ),
            (
                json!({ "quant_method": "gptq", "bits": 3, "group_size": -1, "checkpoint_format": "gptq_v2" }),
                Scheme::Gptq { integers: integers(3, None, true, false), plus: 0 },
            ),
            (
                json!({ "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": true }),
                Scheme::Awq { group: Some(64) },
            ),
            (
                json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64] }),
                Scheme::Fp8 { block: Some([128, 64]) },
            ),
            (
                json!({ "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"] }),
                Scheme::Fp8 { block: None },
            ),
            (json!({ "quant_method": "mxfp4" }), Scheme::Mxfp4),
            (
                json!({ "quant_method": "compressed-tensors", "format": "naive-quantized",
                    "config_groups": { "group_0": { "weights": { "num_bits": 8, "type": "float", "strategy": "tensor" } } } }),
                Scheme::Fp8 { block: None },
            ),
            (
                json!({ "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups }),
                Scheme::Packed(integers(4, Some(128), false, true)),
            ),
            (
                json!({ "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                    "config_groups": { "group_0": { "weights": { "num_bits": 4, "group_size": 32, "type": "float" } } } }),
                Scheme::Mxfp4,
            ),
        ];
        for (settings, scheme) in cases {
            let found = read(json!({ "quantization_config": settings })).unwrap();
            assert_eq!(found, Some(Settings::All(scheme)));
        }
        assert_eq!(read(json!({})).unwrap(), None);
    }

    #[test]
    fn what_is_not_known_is_refused_by_key() {
        let four = json!({ "weights": { "num_bits": 4 } });
        let eight = json!({ "weights": { "num_bits": 8 } });
        for (settings, expected) in [
            (
                json!({ "quant_method": "bitsandbytes" }),
                "quantization_config.quant_method: expected",
            ),
            (
                json!({ "quant_method": "gptq", "bits": 4, "dynamic": { "+:.*down_proj": { "bits": 8 } } }),
                "dynamic: expected the same settings for all matrices",
            ),
            (json!({ "quant_method": "gptq", "bits": 9 }), "bits: expected 2 to 8, found 9"),
            (
                json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin" }),
                "found marlin",
            ),
            (json!({ "quant_method": "awq", "version": "gemv" }), "found gemv"),
            (json!({ "quant_method": "fp8", "fmt": "e5m2" }), "found e5m2"),
            (
                json!({ "quant_method": "fp8", "weight_block_size": [0, 1] }),
                "rows and columns of a block",
            ),
            (
                json!({ "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                "config_groups": { "a": four } }),
                "found nvfp4-pack-quantized",
            ),
            (
                json!({ "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                "config_groups": { "a": eight } }),
                "expected 4 bits in groups of 32, found 8 bits",
            ),
            (
                json!({ "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": { "a": four, "b": eight } }),
                "the same settings for all weights",
            ),
            (json!({ "bits": 4, "group_size": 16, "mode": "nvfp4" }), "found nvfp4"),
            (json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" }), "found NVFP4"),
        ] {
            let why = read(json!({ "quantization_config": settings })).unwrap_err().to_string();
            assert!(why.starts_with("config.json: ") && why.contains(expected), "{why}");
        }
    }
}
