//! Factors as PEFT names, begins and stores them: `adapter_config.json` and `adapter_model.safetensors`.

use crate::gradients::Factors;
use crate::{LoraOptions, Parameter};
use adapters::Base;
use formats::{DType, Error, ErrorKind, Result, Tensor, safetensors};
use models::Architecture;
use program::Site;
use serde_json::json;

/// The name of a matrix's module in Hugging Face's model, such as `model.layers.0.self_attn.q_proj`.
fn module(architecture: &Architecture, site: &str) -> Option<String> {
    let stored = architecture.stored(site, false).into_iter().next()?;
    stored.strip_suffix(".weight").map(str::to_owned)
}

fn ends(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

/// Whether a matrix is one of those wanted: of those of the blocks where none are named.
pub(crate) fn names(architecture: &Architecture, site: &str, wanted: &[String]) -> bool {
    if wanted.is_empty() {
        return site.starts_with("blocks.");
    }
    let module = module(architecture, site);
    wanted.iter().any(|end| ends(site, end) || module.as_deref().is_some_and(|m| ends(m, end)))
}

/// Whether a model has matrices of all names that are wanted.
///
/// # Errors
/// A name that it has not, with those of its blocks.
pub(crate) fn check_sites(
    architecture: &Architecture,
    sites: &[Site],
    wanted: &[String],
) -> Result<()> {
    let there = |end: &&String| {
        sites.iter().any(|site| names(architecture, &site.name, std::slice::from_ref(*end)))
    };
    let Some(odd) = wanted.iter().find(|end| !there(end)) else { return Ok(()) };
    let mut known: Vec<String> = Vec::new();
    for site in sites.iter().filter(|site| site.name.starts_with("blocks.")) {
        let name = module(architecture, &site.name).unwrap_or_else(|| site.name.clone());
        let last = name.rsplit('.').next().unwrap_or(&name).to_owned();
        if !known.contains(&last) {
            known.push(last);
        }
    }
    Err(Error::new("sites", format!("some of {}", known.join(", ")), odd))
}

/// The factors at their beginning, under PEFT's names: `down` of each matrix, then `up`.
///
/// # Errors
/// A matrix that Hugging Face's models do not have by itself.
pub(crate) fn parameters(
    architecture: &Architecture,
    factors: &[Factors],
    options: &LoraOptions,
) -> Result<Vec<Parameter>> {
    let mut all = Vec::new();
    for (index, factors) in factors.iter().enumerate() {
        let module = module(architecture, &factors.site).ok_or_else(|| {
            let expected = "a matrix that checkpoints of this architecture have by itself";
            Error::new(&factors.site, expected, "part of another").of(ErrorKind::Unsupported)
        })?;
        let ([input, output], rank) = (factors.widths, options.rank);
        let mut draws = Draws::new(options.seed, index as u64);
        let bound = 1.0 / (input as f32).sqrt();
        let mut push = |part: &str, shape: [usize; 2], values: Vec<f32>| {
            let name = format!("base_model.model.{module}.lora_{part}.weight");
            all.push(Parameter { name, shape: shape.to_vec(), values, decays: true });
        };
        let down = (0..rank * input).map(|_| draws.next() * bound).collect();
        push("A", [rank, input], down);
        push("B", [output, rank], vec![0.0; output * rank]);
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
    let mut modules: Vec<String> = Vec::new();
    let mut stored: Vec<(&Parameter, Vec<u8>)> = Vec::new();
    for (factors, both) in factors.iter().zip(parameters.chunks_exact(2)) {
        let module = module(base.config.architecture, &factors.site).unwrap_or_default();
        let last = module.rsplit('.').next().unwrap_or_default().to_owned();
        if !modules.contains(&last) {
            modules.push(last);
        }
        let site = sites.iter().find(|site| site.name == factors.site);
        let order = site.and_then(|site| base.order(site));
        stored.push((&both[0], bytes(&both[0].values)));
        stored.push((&both[1], bytes(&unordered(&both[1].values, options.rank, order))));
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
        "use_dora": false,
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

/// Rows of `[out, rank]` in the order of Hugging Face's form: row `i` of the base's is its row `order[i]`.
fn unordered(up: &[f32], rank: usize, order: Option<Vec<usize>>) -> Vec<f32> {
    let Some(order) = order else { return up.to_vec() };
    let mut turned = vec![0.0; up.len()];
    for (row, to) in up.chunks_exact(rank).zip(order) {
        turned[to * rank..][..rank].copy_from_slice(row);
    }
    turned
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
