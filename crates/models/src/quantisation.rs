//! How `config.json` says that matrices are quantised, and the recipe of each.
//!
//! ```text
//! "quantization": { "group_size": 64, "bits": 4, "mode": "affine", "model.layers.0.mlp.down_proj": { "group_size": 32, "bits": 8 } }
//! "quantization_config": { "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true }
//! "quantization_config": { "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": true, "packing_format": "auto_round:auto_gptq" }
//! "quantization_config": { "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm" }
//! "quantization_config": { "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] }
//! "quantization_config": { "quant_method": "modelopt", "quant_algo": "FP8" }
//! "quantization_config": { "quant_method": "mxfp4" }
//! "quantization_config": { "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline" }
//! "quantization_config": { "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": { .. } }
//! ```
//! A matrix that is left as it was has its tensor of numbers, which goes before the settings. Where
//! settings differ between matrices (GPTQ's `dynamic`, AutoRound's `extra_config`, several groups
//! of compressed-tensors), names and patterns say which matrix has which; its tensors' shapes and
//! types say the same, and are what counts here.

use crate::files::Files;
use crate::keys::{Keys, clipped};
use formats::{Error, ErrorKind, Integers, Quantised, Result, Scheme, Source, TensorView, Tensors};
use std::collections::HashMap;

/// How matrices are quantised.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Settings {
    /// MLX's groups, for all matrices and apart for single ones.
    Mlx { whole: Group, single: HashMap<String, Group> },
    /// By the first of these schemes that has the tensors of a matrix.
    Schemes(Vec<Scheme>),
}

/// MLX's groups.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Group {
    bits: usize,
    group: usize,
    mode: Mode,
}

/// The kind of codes in MLX's groups.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    /// Whole numbers, with a scale and an offset for each group.
    Affine,
    /// Floats of four bits.
    Mxfp4,
    /// Floats of eight bits.
    Mxfp8,
}

impl Mode {
    /// Its name in `config.json`, and the bits and the group that MLX takes where none are stated.
    const ALL: [(&str, Mode, usize, usize); 3] = [
        ("affine", Mode::Affine, 4, 64),
        ("mxfp4", Mode::Mxfp4, 4, 32),
        ("mxfp8", Mode::Mxfp8, 8, 32),
    ];
}

/// The expected encodings, for errors.
const EXPECTED: &str = "weights of the type F32, F16 or BF16, MLX's affine groups, mxfp4 or mxfp8, gptq, auto-round, awq, fp8, \
    mxfp4 or compressed-tensors";
/// The hint of those errors.
const HINT: &str = "a GGUF file of this model has quantised weights that run here";

impl Settings {
    /// Reads them; `None` where weights are numbers. What they say of anything else than weights
    /// becomes lines of `warnings`.
    ///
    /// # Errors
    /// A kind of quantisation that is not known, by key.
    pub(crate) fn read(keys: &Keys<'_>, warnings: &mut Vec<String>) -> Result<Option<Settings>> {
        // MLX's own key goes before a copy of it, or of what its weights were made of; the last is
        // what compressed-tensors had before there was a common one.
        let mut read = None;
        for key in ["quantization", "quantization_config", "compression_config"] {
            if read.is_some() {
                keys.note(key);
                continue;
            }
            let Some(settings) = keys.object(key)? else { continue };
            // What they say is checked against the tensors.
            let all = keys.get(key).and_then(|all| all.as_object()).into_iter().flatten();
            all.clone().for_each(|(name, _)| settings.note(name));
            for cache in ["kv_cache_scheme", "kv_cache_quant_algo"] {
                if settings.get(cache).is_some() {
                    let line = "not used: the cache has the type that it is loaded with";
                    warnings.push(format!("{}: {line}", settings.place(cache)));
                }
            }
            let eight = Scheme::Fp8 { block: None };
            let schemes = match settings.text("quant_method")? {
                Some("gptq") => gptq(&settings)?,
                Some("auto-round" | "intel/auto-round") => auto_round(&settings)?,
                Some("awq") => vec![awq(&settings)?],
                Some("fp8") => vec![fp8(&settings)?],
                Some("fbgemm_fp8") => vec![eight],
                Some("mxfp4") => vec![Scheme::Mxfp4],
                Some("bitnet") => vec![bitnet(&settings)?],
                Some("compressed-tensors") => compressed(&settings)?,
                Some("modelopt") => vec![modelopt(&settings)?],
                Some(method) => {
                    return Err(settings
                        .wrong("quant_method", EXPECTED, clipped(method))
                        .hint(HINT));
                }
                None if key == "compression_config" => compressed(&settings)?,
                None if ["bits", "mode"].iter().all(|key| settings.get(*key).is_none()) => {
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
                    let (whole, single) = (Group::read(&settings)?, single?);
                    read = Some(Settings::Mlx { whole, single });
                    continue;
                }
            };
            read = (!schemes.is_empty()).then_some(Settings::Schemes(schemes));
        }
        Ok(read)
    }

    /// Whether layers round the rows that they multiply to 8 bits, as BitNet's do.
    fn rounds_rows(&self) -> bool {
        let rounds = |scheme: &Scheme| matches!(scheme, Scheme::Ternary | Scheme::Rounded);
        matches!(self, Settings::Schemes(schemes) if schemes.iter().any(rounds))
    }

    /// The recipe of the matrix that a checkpoint calls `name`, `STEM.weight`, if it is quantised;
    /// `tensor` is what the file has under that name.
    pub(crate) fn source(
        &self,
        name: &str,
        tensor: Option<TensorView<'_>>,
        tensors: &Tensors,
    ) -> Option<Source> {
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        match self {
            Settings::Mlx { whole, single } => {
                let tensor = tensor.filter(TensorView::holds_codes)?;
                let stem = tensor.name.strip_suffix(".weight").unwrap_or(tensor.name);
                Some(single.get(stem).unwrap_or(whole).source(tensor.name, stem))
            }
            Settings::Schemes(schemes) => {
                let sources = schemes.iter().filter_map(|s| quantised(*s, stem, tensor, tensors));
                let mut all: Vec<Quantised> = sources.collect();
                let fits = |source: &Quantised| fits(source, stem, tensors);
                // Where none fits, the first one's errors tell.
                let at = if all.len() > 1 { all.iter().position(fits).unwrap_or(0) } else { 0 };
                (at < all.len()).then(|| Source::Quantised(all.swap_remove(at)))
            }
        }
    }
}

/// Whether the configuration says that layers round the rows that they multiply.
///
/// # Errors
/// As [`Settings::read`].
pub(crate) fn rounds_rows(files: &Files<'_>) -> Result<bool> {
    for keys in [&files.outer, &files.keys] {
        if let Some(settings) = Settings::read(keys, &mut Vec::new())? {
            return Ok(settings.rounds_rows());
        }
    }
    Ok(false)
}

/// BitNet's layers, which round their inputs, too ([`Settings::rounds_rows`]).
fn bitnet(settings: &Keys<'_>) -> Result<Scheme> {
    let class = settings.text("linear_class")?.unwrap_or("bitlinear");
    if class != "autobitlinear" {
        return Err(settings.wrong("linear_class", "autobitlinear", clipped(class)).hint(HINT));
    }
    if settings.flag("use_rms_norm")? == Some(true) {
        let error = settings.wrong("use_rms_norm", "false: norms are the model's own", true);
        return Err(error.of(ErrorKind::Unsupported));
    }
    if let Some(list) = settings
        .get("modules_to_not_convert")
        .filter(|list| list.as_array().is_none_or(|list| list.iter().any(|name| name != "lm_head")))
    {
        return Err(settings.odd("modules_to_not_convert", "the head alone", list));
    }
    match settings.text("quantization_mode")?.unwrap_or("offline") {
        "offline" => Ok(Scheme::Ternary),
        "online" => Ok(Scheme::Rounded),
        mode => Err(settings.wrong("quantization_mode", "offline or online", clipped(mode))),
    }
}

/// Refuses parts of quantised matrices where `place`, the configuration, says nothing of them.
///
/// # Errors
/// The first part.
pub(crate) fn check_numbers(tensors: &Tensors, place: &str) -> Result<()> {
    let part = |tensor: &TensorView<'_>| {
        let codes =
            tensor.holds_codes() || tensor.holds_eight_bit_floats() || tensor.holds_signed_bytes();
        let named = [".qweight", ".weight_packed", "_blocks"];
        named.iter().any(|end| tensor.name.ends_with(end))
            || codes && tensor.name.ends_with(".weight")
    };
    match tensors.iter().find(part) {
        Some(tensor) => {
            let found =
                format!("nothing, beside {} of {}", clipped(tensor.name), tensor.element_type());
            let place = format!("{place}: quantization_config");
            Err(Error::new(place, "how weights are quantised", found)
                .hint("the program that quantised them states it in a file beside the weights"))
        }
        None => Ok(()),
    }
}

/// The matrix `stem` by a scheme, if it has the first of the tensors; `tensor` is
/// what the file has as `STEM.weight`.
fn quantised(
    mut scheme: Scheme,
    stem: &str,
    tensor: Option<TensorView<'_>>,
    tensors: &Tensors,
) -> Option<Quantised> {
    let named = |suffixes: &[&str]| {
        let parts: Vec<String> = suffixes.iter().map(|suffix| format!("{stem}{suffix}")).collect();
        tensors.get(parts.first()?).map(|_| parts)
    };
    // Some files state no order and have one.
    let order = match &mut scheme {
        Scheme::Gptq { integers, .. } => Some((integers, ".g_idx")),
        Scheme::Packed(integers) | Scheme::Bytes(integers) => Some((integers, ".weight_g_idx")),
        Scheme::Mxfp4 | Scheme::Awq { .. } | Scheme::Fp8 { .. } => None,
        Scheme::Ternary | Scheme::Rounded => None,
    };
    if let Some((integers, suffix)) = order {
        let order = tensors.get(&format!("{stem}{suffix}"));
        integers.ordered |= order.is_some_and(|t| !in_order(t, integers.group));
    }
    // Codes and what belongs to them, as compressed-tensors has it.
    let parts = |codes: &'static str, integers: Integers| {
        let mut parts = vec![codes, ".weight_scale"];
        parts.extend((!integers.symmetric).then_some(".weight_zero_point"));
        parts.extend(integers.ordered.then_some(".weight_g_idx"));
        parts
    };
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
            let tensor = tensor.filter(TensorView::holds_eight_bit_floats)?;
            // The last is Mistral's own.
            let named = ["weight_scale_inv", "weight_scale", "qscale_weight"]
                .map(|part| format!("{stem}.{part}"));
            let [_, usual, _] = &named;
            let held = named.iter().find(|name| tensors.get(name).is_some());
            let scale = held.unwrap_or(usual).clone();
            vec![tensor.name.to_owned(), scale]
        }
        Scheme::Ternary => {
            tensors.get(&format!("{stem}.weight_scale"))?;
            named(&[".weight", ".weight_scale"])?
        }
        Scheme::Rounded => {
            let matrix = tensor.filter(|tensor| tensor.shape.len() == 2)?;
            let whole = ["embed_tokens", "lm_head"].iter().any(|name| stem.ends_with(name));
            (!whole).then(|| vec![matrix.name.to_owned()])?
        }
        Scheme::Packed(integers) => named(&parts(".weight_packed", integers))?,
        Scheme::Bytes(integers) => {
            let tensor = tensor.filter(TensorView::holds_signed_bytes)?;
            let stem = tensor.name.strip_suffix(".weight").unwrap_or(tensor.name);
            let parts = parts(".weight", integers).into_iter();
            parts.map(|suffix| format!("{stem}{suffix}")).collect()
        }
    };
    Some(Quantised { scheme, tensors })
}

/// Whether a matrix has the tensors of a scheme and no others.
fn fits(source: &Quantised, stem: &str, tensors: &Tensors) -> bool {
    let Ok(described) = source.describe(tensors) else { return false };
    let stated = tensors.get(&format!("{stem}.weight_shape")).and_then(|t| t.whole_numbers());
    let zeros = tensors.get(&format!("{stem}.weight_zero_point")).is_some();
    let symmetric = match source.scheme {
        Scheme::Packed(integers) | Scheme::Bytes(integers) => integers.symmetric != zeros,
        _ => true,
    };
    symmetric && stated.is_none_or(|stated| stated == described.shape)
}

/// Whether the groups of inputs are in the order of the inputs.
fn in_order(groups: TensorView<'_>, group: Option<usize>) -> bool {
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
        let stated = keys.text("mode")?.unwrap_or("affine");
        let Some(&(name, mode, bits, group)) = Mode::ALL.iter().find(|row| row.0 == stated) else {
            let expected = Mode::ALL.map(|row| row.0).join(", ");
            return Err(keys.wrong("mode", expected, clipped(stated)).hint(HINT));
        };
        let usual = [bits, group];
        let or = |key: &'static str, usual| {
            Ok(keys.size(key)?.unwrap_or_else(|| keys.stated(key, usual)))
        };
        let bits = or("bits", bits)?.within(2..=8)?;
        let group = or("group_size", group)?.within(8..=1 << 16)?;
        if mode != Mode::Affine && [bits, group] != usual {
            let found = format!("{bits} bits in groups of {group}");
            let expected = format!("{} bits in groups of {} for {name}", usual[0], usual[1]);
            return Err(keys.wrong("mode", expected, found));
        }
        Ok(Group { bits, group, mode })
    }

    /// The recipe of a matrix whose codes are the tensor `codes`.
    fn source(&self, codes: &str, stem: &str) -> Source {
        let (codes, scales) = (codes.to_owned(), format!("{stem}.scales"));
        let Group { bits, group, mode } = *self;
        let scheme = match mode {
            Mode::Affine => {
                let offsets = format!("{stem}.biases");
                return Source::Affine { codes, scales, offsets, bits, group };
            }
            Mode::Mxfp4 => Scheme::Mxfp4,
            Mode::Mxfp8 => Scheme::Fp8 { block: Some([1, group]) },
        };
        Source::Quantised(Quantised { scheme, tensors: vec![codes, scales] })
    }
}

/// `group_size`: -1 for all inputs.
fn group(keys: &Keys<'_>) -> Result<Option<usize>> {
    if keys.get("group_size").and_then(|n| n.as_i64()) == Some(-1) {
        return Ok(None);
    }
    keys.size("group_size")?.map(|group| group.within(8..=1 << 16)).transpose()
}

/// The settings of GPTQ's codes.
fn codes(keys: &Keys<'_>) -> Result<Integers> {
    Ok(Integers {
        bits: keys.needed("bits")?.within(2..=8)?,
        group: group(keys)?,
        symmetric: keys.flag("sym")?.unwrap_or(true),
        ordered: keys.flag("desc_act")?.unwrap_or(false),
    })
}

/// The codes `whole`, and the codes of each object of `key`, which states how some matrices differ.
/// Shapes do not tell symmetric ones from others, which are the general case.
fn codes_of_all(keys: &Keys<'_>, whole: Integers, key: &'static str) -> Result<Vec<Integers>> {
    let mut all = vec![whole];
    for (rule, value) in keys.get(key).and_then(|rules| rules.as_object()).into_iter().flatten() {
        // Matrices that are left as they were.
        let left =
            rule.starts_with("-:") || value.get("bits").is_some_and(|n| n.as_u64() > Some(8));
        if left || value.as_bool() == Some(false) {
            continue;
        }
        let (place, asked) = (format!("{}.{}", keys.place(key), clipped(rule)), Default::default());
        let own = Keys::json(&place, value, &asked);
        let bits = own.size("bits")?.map(|bits| bits.within(2..=8)).transpose()?;
        let codes = Integers {
            bits: bits.unwrap_or(whole.bits),
            group: if own.get("group_size").is_some() { group(&own)? } else { whole.group },
            symmetric: own.flag("sym")?.unwrap_or(whole.symmetric),
            ordered: own.flag("desc_act")?.unwrap_or(whole.ordered),
        };
        if !all.contains(&codes) {
            all.push(codes);
        }
    }
    let symmetric = all.iter().all(|codes| codes.symmetric);
    all.iter_mut().for_each(|codes| codes.symmetric = symmetric);
    Ok(all)
}

/// Refuses keys of GPTQModel and AutoGPTQ that say that codes are packed in another way.
fn packed_by_columns(keys: &Keys<'_>) -> Result<()> {
    keys.only("pack_dtype", &["int32"])?;
    if let Some(rotation) = keys.get("rotation") {
        return Err(keys.odd("rotation", "none: rotations are not supported", rotation).hint(HINT));
    }
    match keys.flag("is_marlin_format")? {
        Some(true) => Err(keys.wrong("is_marlin_format", false, true).hint(HINT)),
        _ => Ok(()),
    }
}

fn gptq(keys: &Keys<'_>) -> Result<Vec<Scheme>> {
    packed_by_columns(keys)?;
    let mut plus = 1;
    for key in ["checkpoint_format", "format"] {
        keys.only(key, &["gptq", "gptq_v2"])?;
        plus = if keys.text(key)? == Some("gptq_v2") { 0 } else { plus };
    }
    let all = codes_of_all(keys, codes(keys)?, "dynamic")?;
    Ok(all.into_iter().map(|integers| Scheme::Gptq { integers, plus }).collect())
}

/// AutoRound's, in the forms of others: what stands before the colon, and behind a second one,
/// names programs that multiply.
fn auto_round(keys: &Keys<'_>) -> Result<Vec<Scheme>> {
    packed_by_columns(keys)?;
    if let Some(other) = keys.text("data_type")?.filter(|data| !data.starts_with("int")) {
        return Err(keys.wrong("data_type", "int", clipped(other)).hint(HINT));
    }
    // Older files state it as the program that multiplies.
    let key = if keys.get("packing_format").is_some() { "packing_format" } else { "backend" };
    let form = keys.text(key)?.unwrap_or_default();
    let plus = match form {
        "auto_round:auto_awq" | "auto_round:awq" => {
            four_bits(keys)?;
            return Ok(vec![Scheme::Awq { group: group(keys)? }]);
        }
        "auto_round" | "auto_round:gptqmodel" => 0,
        _ if form.split(':').any(|part| part == "auto_gptq" || part == "gptq") => 1,
        _ => {
            let expected = "auto_round:auto_gptq, auto_round:gptqmodel or auto_round:auto_awq";
            let found = if form.is_empty() { "nothing".to_owned() } else { clipped(form) };
            return Err(keys.wrong(key, expected, found).hint(HINT));
        }
    };
    let all = codes_of_all(keys, codes(keys)?, "extra_config")?;
    Ok(all.into_iter().map(|integers| Scheme::Gptq { integers, plus }).collect())
}

/// Refuses AWQ codes that do not have four bits.
fn four_bits(keys: &Keys<'_>) -> Result<()> {
    match keys.size("bits")?.or(keys.size("w_bit")?).filter(|bits| bits.value != 4) {
        Some(bits) => Err(bits.wrong("4 bits", bits.value)),
        None => Ok(()),
    }
}

fn awq(keys: &Keys<'_>) -> Result<Scheme> {
    packed_by_columns(keys)?;
    for key in ["version", "checkpoint_format", "format"] {
        if let Some(other) = keys.text(key)?.filter(|form| !form.eq_ignore_ascii_case("gemm")) {
            let expected = "gemm, the form in which it stores columns";
            return Err(keys.wrong(key, expected, clipped(other)).hint(HINT));
        }
    }
    four_bits(keys)?;
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
    Ok(Scheme::Fp8 { block: block(keys, "weight_block_size")? })
}

/// NVIDIA's.
fn modelopt(keys: &Keys<'_>) -> Result<Scheme> {
    match keys.text("quant_algo")? {
        Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => Ok(Scheme::Fp8 { block: None }),
        Some("MXFP8") => Ok(Scheme::Fp8 { block: Some([1, 32]) }),
        other => {
            let found = clipped(other.unwrap_or("nothing"));
            let expected = "FP8, FP8_PER_CHANNEL_PER_TOKEN or MXFP8";
            Err(keys.wrong("quant_algo", expected, found).hint(HINT))
        }
    }
}

/// The schemes of compressed-tensors' groups, each once; none where weights are numbers that were
/// only rounded.
fn compressed(keys: &Keys<'_>) -> Result<Vec<Scheme>> {
    let place = keys.place("config_groups");
    let groups = keys.get("config_groups").and_then(|groups| groups.as_object());
    let Some(groups) = groups else {
        return Err(Error::new(place, "how weights are quantised", "nothing").hint(HINT));
    };
    if let Some(found) =
        keys.get("transform_config").filter(|t| t.as_object().is_none_or(|t| !t.is_empty()))
    {
        return Err(keys.odd("transform_config", "no transforms", found).hint(HINT));
    }
    if let Some(sparsity) = keys.object("sparsity_config")?
        && let Some(form) = sparsity.text("format")?.filter(|form| *form != "dense")
    {
        let expected = "dense: sparse weights are not supported";
        return Err(sparsity.wrong("format", expected, clipped(form)).hint(HINT));
    }
    let format = keys.text("format")?;
    let mut schemes = Vec::new();
    for (name, group) in groups {
        let (place, asked) = (format!("{place}.{}", clipped(name)), Default::default());
        let group = Keys::json(&place, group, &asked);
        let own = group.text("format")?;
        let Some(weights) = group.object("weights")? else { continue };
        let unknown = |expected: &str, found: &str| match own {
            Some(_) => group.wrong("format", expected, found).hint(HINT),
            None => keys.wrong("format", expected, found).hint(HINT),
        };
        let scheme = compressed_weights(&weights, own.or(format), &unknown)?;
        schemes.extend(scheme.filter(|scheme| !schemes.contains(scheme)));
    }
    Ok(schemes)
}

/// The scheme of weights that compressed-tensors stores in a format; none where they are numbers.
/// `unknown` is the error for another format: what was expected, and found.
fn compressed_weights(
    weights: &Keys<'_>,
    format: Option<&str>,
    unknown: &dyn Fn(&str, &str) -> Error,
) -> Result<Option<Scheme>> {
    let floats = weights.text("type")? == Some("float");
    let integers = || -> Result<Integers> {
        let order = weights.get("actorder");
        Ok(Integers {
            bits: weights.needed("num_bits")?.within(2..=8)?,
            group: group(weights)?,
            symmetric: weights.flag("symmetric")?.unwrap_or(true),
            ordered: order.is_some_and(|order| {
                ["group", "dynamic"].map(Some).contains(&order.as_str())
                    || order.as_bool() == Some(true)
            }),
        })
    };
    let only = |bits: usize, group_size: usize| -> Result<()> {
        let found = (weights.needed("num_bits")?.value, group(weights)?.unwrap_or(group_size));
        match found == (bits, group_size) {
            true => Ok(()),
            false => {
                let found = format!("{} bits in groups of {}", found.0, found.1);
                let expected = format!("{bits} bits in groups of {group_size}");
                Err(weights.wrong("num_bits", expected, found).hint(HINT))
            }
        }
    };
    Ok(match format {
        Some("dense") => None,
        Some("pack-quantized") if !floats => Some(Scheme::Packed(integers()?)),
        Some("int-quantized" | "naive-quantized") if !floats => Some(Scheme::Bytes(integers()?)),
        Some("float-quantized" | "naive-quantized") if floats => {
            if weights.needed("num_bits")?.value != 8 {
                let bits = weights.needed("num_bits")?;
                return Err(bits.wrong("floats of 8 bits", bits.value).hint(HINT));
            }
            let block = match group(weights)? {
                Some(group) => Some([1, group]),
                None => block(weights, "block_structure")?,
            };
            Some(Scheme::Fp8 { block })
        }
        Some("mxfp4-pack-quantized") => {
            only(4, 32)?;
            Some(Scheme::Mxfp4)
        }
        Some("mxfp8-quantized") => {
            only(8, 32)?;
            Some(Scheme::Fp8 { block: Some([1, 32]) })
        }
        format => {
            let expected = if floats {
                "float-quantized, mxfp4-pack-quantized or mxfp8-quantized, for floats"
            } else {
                "pack-quantized or int-quantized, for integers"
            };
            return Err(unknown(expected, &clipped(format.unwrap_or("nothing"))));
        }
    })
}

/// The rows and columns of a block: a list, or text such as `128x128`; none where nothing is
/// stated.
fn block(keys: &Keys<'_>, key: &'static str) -> Result<Option<[usize; 2]>> {
    let Some(stated) = keys.get(key) else { return Ok(None) };
    let sizes: Vec<u64> = match (stated.as_array(), stated.as_str()) {
        (Some(all), _) => all.iter().filter_map(|n| n.as_u64()).collect(),
        (_, Some(text)) => text.split('x').filter_map(|n| n.parse().ok()).collect(),
        _ => Vec::new(),
    };
    match sizes[..] {
        [rows @ 1..=0x1000_0000, cols @ 1..=0x1000_0000] => {
            Ok(Some([rows as usize, cols as usize]))
        }
        _ => Err(keys.odd(key, "rows and columns of a block", stated)),
    }
}

#[cfg(test)]
mod tests;
