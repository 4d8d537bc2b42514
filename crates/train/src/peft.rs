//! Factors as PEFT names, begins and stores them: `adapter_config.json` and
//! `adapter_model.safetensors`.

use crate::gradients::{Factors, Module};
use crate::{LoraOptions, Parameter};
use adapters::Base;
use formats::{DType, Error, ErrorKind, Result, Tensor, safetensors};
use ops::Op;
use program::Site;
use serde_json::json;

/// A matrix's module in Hugging Face's model, such as `model.layers.0.self_attn.q_proj`; some rows
/// of one where that model keeps several matrices in one.
fn module(base: &Base<'_>, site: &Site) -> Option<Module> {
    let architecture = base.config.architecture;
    let named = |canonical: &str| {
        let stored = architecture.stored(canonical, false).into_iter().next()?;
        stored.strip_suffix(".weight").map(str::to_owned)
    };
    if let Some(name) = named(&site.name) {
        return Some(Module { name, first_row: 0 });
    }
    let (tensor, rows) = adapters::fused(&base.program.weights[site.weight.0].source)?;
    let gguf = base.tensors.gguf().is_some();
    let canonical = architecture.canonical(tensor.strip_suffix(".weight")?, gguf)?;
    Some(Module { name: named(&canonical)?, first_row: rows.start })
}

fn ends(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

/// The matrices whose names end like one of those `wanted`, by their own name or their module's,
/// with all others of their modules; if none are named, the matrices of the blocks, or in models
/// with experts of attention. Routers are excluded: PEFT adapts linear layers alone.
///
/// # Errors
/// A name that no matrix has, with those of the blocks; a matrix that Hugging Face's models have no
/// module for.
pub(crate) fn modules(base: &Base<'_>, wanted: &[String]) -> Result<Vec<(Site, Module)>> {
    let mixed = base.program.nodes.iter().any(|node| matches!(node.op, Op::Experts(_)));
    let sites = base.program.adaptable().into_iter();
    let sites = sites.filter(|site| !site.gathers && !site.name.ends_with(".router"));
    let sites: Vec<(Site, Option<Module>)> = sites.map(|s| (s.clone(), module(base, &s))).collect();
    let named = |(site, module): &(Site, Option<Module>), end: &str| {
        ends(&site.name, end) || module.as_ref().is_some_and(|module| ends(&module.name, end))
    };
    if let Some(odd) = wanted.iter().find(|end| !sites.iter().any(|site| named(site, end))) {
        let mut known: Vec<&str> = Vec::new();
        for (site, module) in sites.iter().filter(|(site, _)| site.name.starts_with("blocks.")) {
            let name = module.as_ref().map_or(&site.name, |module| &module.name);
            let last = name.rsplit('.').next().unwrap_or(name);
            if !known.contains(&last) {
                known.push(last);
            }
        }
        return Err(Error::new("sites", format!("some of {}", known.join(", ")), odd));
    }
    let chosen = |site: &(Site, Option<Module>)| match wanted {
        [] if mixed => site.0.name.contains(".attention."),
        [] => site.0.name.starts_with("blocks."),
        ends => ends.iter().any(|end| named(site, end)),
    };
    let mut names: Vec<String> = Vec::new();
    for (site, module) in sites.iter().filter(|site| chosen(site)) {
        let module = module.as_ref().ok_or_else(|| {
            let expected = "a matrix that Hugging Face's model has a module for";
            Error::new(&site.name, expected, "none").of(ErrorKind::Unsupported)
        })?;
        names.push(module.name.clone());
    }
    let kept = |(site, module): (Site, Option<Module>)| Some((site, module?));
    Ok(sites.into_iter().filter_map(kept).filter(|(_, m)| names.contains(&m.name)).collect())
}

/// Parameters of each module: its factors `down` and `up`, with DoRA then its magnitudes.
pub(crate) fn count(options: &LoraOptions) -> usize {
    if options.dora { 3 } else { 2 }
}

/// The parameters at their beginning, under PEFT's names, in the order of modules. A magnitude is
/// the length of the base's row.
///
/// # Errors
/// With DoRA, matrices that cannot be read.
pub(crate) fn parameters(
    base: &Base<'_>,
    factors: &[Factors],
    options: &LoraOptions,
) -> Result<Vec<Parameter>> {
    let mut all = Vec::new();
    for (index, factors) in factors.iter().enumerate() {
        let (input, output, rank) = (factors.input, factors.output(), options.rank);
        let mut draws = Draws::new(options.seed, index as u64);
        let bound = 1.0 / (input as f32).sqrt();
        let mut push = |part: &str, shape: &[usize], values: Vec<f32>| {
            let name = format!("base_model.model.{}.lora_{part}", factors.module);
            let (shape, decays) = (shape.to_vec(), shape.len() > 1);
            all.push(Parameter { name, shape, values, decays });
        };
        let down = (0..rank * input).map(|_| draws.next() * bound).collect();
        push("A.weight", &[rank, input], down);
        push("B.weight", &[output, rank], vec![0.0; output * rank]);
        if options.dora {
            let mut magnitudes = Vec::with_capacity(output);
            for part in &factors.parts {
                let rows = base.program.weights[part.matrix.0].read(base.tensors)?.to_f32()?;
                let lengths = adapters::lengths(&rows, input, 0.0, [&[], &[]]);
                magnitudes.extend(lengths.into_iter().map(|length| length as f32));
            }
            push("magnitude_vector", &[output], magnitudes);
        }
    }
    Ok(all)
}

/// Numbers from -1 to 1, by SplitMix64 (Steele, Lea and Flood 2014).
struct Draws(u64);

impl Draws {
    /// A sequence of its own for each index.
    fn new(seed: u64, index: u64) -> Draws {
        let mut draws = Draws(seed);
        let start = draws.word() ^ index.wrapping_mul(0xD1B5_4A32_D192_ED03);
        Draws(start)
    }

    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn next(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// The files of an adapter.
///
/// # Errors
/// A temporary file that cannot be written.
pub(crate) fn export(
    base: &Base<'_>,
    sites: &[Site],
    factors: &[Factors],
    parameters: &[Parameter],
    options: &LoraOptions,
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut modules: Vec<&str> = Vec::new();
    let mut stored: Vec<(&Parameter, Vec<u8>)> = Vec::new();
    for (factors, own) in factors.iter().zip(parameters.chunks_exact(count(options))) {
        let last = factors.module.rsplit('.').next().unwrap_or_default();
        if !modules.contains(&last) {
            modules.push(last);
        }
        stored.push((&own[0], bytes(&own[0].values)));
        // What has a row for each of the matrix's.
        for (parameter, width) in own[1..].iter().zip([options.rank, 1]) {
            let mut values = parameter.values.clone();
            for part in &factors.parts {
                let site = sites.iter().find(|site| site.weight == part.matrix);
                let rows = part.first_row * width..(part.first_row + part.rows) * width;
                unorder(&mut values[rows], width, site.and_then(|site| base.order(site)));
            }
            stored.push((parameter, bytes(&values)));
        }
    }
    let tensors = stored.iter().map(|(parameter, bytes)| Tensor {
        name: &parameter.name,
        dtype: DType::F32,
        shape: &parameter.shape,
        bytes,
    });
    let io = |e| Error::io("a temporary folder", e);
    let folder = tempfile::tempdir().map_err(io)?;
    let file = folder.path().join("adapter_model.safetensors");
    safetensors::write(&file, &[("format", "pt")], tensors)?;
    let weights = std::fs::read(&file).map_err(|e| Error::io(file.display(), e))?;
    let settings = json!({
        "base_model_name_or_path": base.tensors.location().to_string(),
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": options.rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": options.dora,
        "use_rslora": options.stabilised,
    });
    let mut text = serde_json::to_vec_pretty(&settings)
        .map_err(|e| Error::new("adapter_config.json", "settings", e))?;
    text.push(b'\n');
    Ok(vec![
        ("adapter_config.json".to_owned(), text),
        ("adapter_model.safetensors".to_owned(), weights),
    ])
}

/// Puts rows of `width` elements into the order of Hugging Face's form: row `i` of the base's is
/// its row `order[i]`.
fn unorder(rows: &mut [f32], width: usize, order: Option<Vec<usize>>) {
    let Some(order) = order else { return };
    let own = rows.to_vec();
    for (row, to) in own.chunks_exact(width).zip(order) {
        rows[to * width..][..width].copy_from_slice(row);
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
