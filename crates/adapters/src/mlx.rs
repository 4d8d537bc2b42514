//! mlx-lm: `adapter_config.json` and `adapters.safetensors`.
//!
//! A matrix `M` has `M.lora_a` `[in, r]` and `M.lora_b` `[r, out]`, a table of embeddings
//! `[tokens, r]` and `[r, width]`. The change is `scale` of their product. DoRA adds `M.m` `[out]`.
//! A stack of experts has `[experts, r, in]` and `[experts, out, r]`.

use crate::settings::Settings;
use crate::{AdapterFormat, Base, Change, File, Parts, Stack, Stored, pairs};
use formats::{AsideFolder, Error, ErrorKind, Result, Safetensors, TensorView, safetensors};
use serde_json::json;
use std::path::Path;

const WEIGHTS: &str = "adapters.safetensors";

pub(crate) fn open(folder: &Path, settings: &Settings) -> Result<File> {
    let kind = settings.text("fine_tune_type").unwrap_or("lora");
    if !["lora", "dora"].contains(&kind) {
        return Err(settings.lacks("fine_tune_type", "lora or dora"));
    }
    let parameters = settings.object("lora_parameters")?;
    let parameters = parameters.ok_or_else(|| {
        settings.wrong("lora_parameters", "the settings of mlx-lm or PEFT", "nothing")
    })?;
    let missing = |key| parameters.wrong(key, "a number", "nothing");
    let scale = parameters.positive("scale")?.ok_or_else(|| missing("scale"))?;
    let rank = parameters.positive("rank")?.ok_or_else(|| missing("rank"))?;
    let file = folder.join(WEIGHTS);
    let tensors = Stored::Safetensors(Safetensors::open(&file)?);
    let parts = Parts { down: ".lora_a", up: ".lora_b", magnitude: &[".m"] };
    let (pairs, rest) = pairs(&file, &tensors.names(), &parts)?;
    let mut adapter = File {
        kind: AdapterFormat::Mlx,
        path: file,
        tensors,
        changes: vec![],
        renewed: vec![],
        made_for: None,
    };
    if let Some(name) = rest.first() {
        return Err(adapter.wrong(name, "factors of LoRA or DoRA", "another tensor"));
    }
    for pair in &pairs {
        let down = adapter.tensors.get(&pair.name(0));
        let stack = down.is_some_and(|tensor| tensor.shape.len() == 3).then_some(Stack::Each);
        let found = down.and_then(|tensor| match tensor.shape {
            [_, rank, _] | [_, rank] => Some(*rank),
            _ => None,
        });
        let found = found.unwrap_or(0);
        if found as f64 != rank {
            let expected = format!("rank {rank}, as lora_parameters say");
            return Err(adapter.wrong(&pair.name(0), expected, format!("rank {found}")));
        }
        if (kind == "dora") != pair.names[2].is_some() {
            let expected = format!("what fine_tune_type {kind} has");
            let found = if kind == "dora" { "no magnitudes" } else { "magnitudes" };
            return Err(adapter.wrong(&pair.stem, expected, found));
        }
        let change = Change {
            matrix: pair.stem.clone(),
            down: pair.name(0),
            up: pair.name(1),
            turned: stack.is_none(),
            stack,
            gathers: pair.stem.ends_with("embed_tokens"),
            magnitude: pair.names[2].clone(),
            bias: None,
            scale,
        };
        adapter.changes.push(change);
    }
    if adapter.changes.is_empty() {
        return Err(Error::new(adapter.path.display(), "factors of LoRA or DoRA", "none"));
    }
    Ok(adapter)
}

impl File {
    /// Writes an adapter of PEFT, `strength` times as strong, as a folder of mlx-lm that gives the
    /// same logits. `delft.json` comes along.
    ///
    /// # Errors
    /// An adapter that does not fit the base or is no PEFT folder; ranks or scales that differ from
    /// matrix to matrix, and a table of embeddings that is the head too, which mlx-lm has
    /// otherwise; a folder that is there, I/O.
    pub fn write_mlx(&self, base: &Base<'_>, strength: f64, to: &Path) -> Result<()> {
        let unsupported = |place: &str, expected: &str, found: String| {
            Err(self.wrong(place, expected, found).of(ErrorKind::Unsupported))
        };
        if self.kind != AdapterFormat::Peft {
            return unsupported("kind", "an adapter of PEFT", format!("{:?}", self.kind));
        }
        self.resolve(base, strength)?;
        let biased = self.changes.iter().filter_map(|change| change.bias.as_ref());
        let renewed = self.renewed.iter().filter(|own| own.trained).map(|own| &own.tensor);
        if let Some(tensor) = biased.chain(renewed).next() {
            return unsupported(tensor, "factors alone, which mlx-lm has", "weights".to_owned());
        }
        let sites = base.program.adaptable();
        let tied = sites
            .iter()
            .filter(|site| site.gathers)
            .any(|table| sites.iter().any(|site| !site.gathers && site.weight == table.weight));
        let (mut keys, mut stored) = (Vec::new(), Vec::new());
        let mut all: Option<(usize, f64)> = None;
        for change in &self.changes {
            if change.stack.is_some() {
                let (expected, found) =
                    ("factors of single matrices", "those of a stack of experts");
                return unsupported(&change.matrix, expected, found.to_owned());
            }
            if change.gathers && tied {
                let expected = "a table of embeddings that is not the head too";
                return unsupported(
                    &change.matrix,
                    expected,
                    "mlx-lm would change both".to_owned(),
                );
            }
            let get = |name: &str| {
                let found = self.tensors.get(name);
                found.ok_or_else(|| self.wrong(name, "a tensor", "none"))
            };
            let down = get(&change.down)?;
            let own = (down.shape.first().copied().unwrap_or(0), change.scale * strength);
            let (rank, scale) = *all.get_or_insert(own);
            if own != (rank, scale) {
                let expected = format!("rank {rank} and scale {scale}, as the matrices before it");
                let found = format!("rank {} and scale {}; mlx-lm has one of each", own.0, own.1);
                return unsupported(&change.matrix, &expected, found);
            }
            // Within a block, or of the whole model.
            let key =
                change.matrix.split_once(".layers.").and_then(|(_, rest)| rest.split_once('.'));
            let key = key.map_or(change.matrix.as_str(), |(_, key)| key);
            if !keys.contains(&key) {
                keys.push(key);
            }
            let module = module(base, &change.matrix);
            for (tensor, end) in [(down, "lora_a"), (get(&change.up)?, "lora_b")] {
                stored.push(exchanged(&tensor, format!("{module}.{end}")));
            }
            if let Some(magnitude) = &change.magnitude {
                let tensor = get(magnitude)?;
                let length = tensor.shape.iter().product();
                let name = format!("{module}.m");
                let bytes = tensor.bytes.to_vec();
                stored.push(Owned { name, dtype: tensor.dtype, shape: vec![length], bytes });
            }
        }
        let (rank, scale) = all.unwrap_or_default();
        let dora = self.changes.iter().any(|change| change.magnitude.is_some());
        let settings = json!({
            "fine_tune_type": if dora { "dora" } else { "lora" },
            "model": base.tensors.location().to_string(),
            // All of them.
            "num_layers": -1,
            "lora_parameters": { "rank": rank, "scale": scale, "dropout": 0.0, "keys": keys },
        });
        let mut text = serde_json::to_vec_pretty(&settings)
            .map_err(|e| Error::new("adapter_config.json", "settings", e))?;
        text.push(b'\n');
        let aside = AsideFolder::create(to)?;
        let tensors = stored.iter().map(Owned::tensor);
        safetensors::write(&aside.path().join(WEIGHTS), &[("format", "mlx")], tensors)?;
        let file = aside.path().join("adapter_config.json");
        std::fs::write(&file, text).map_err(|e| Error::io(file.display(), e))?;
        crate::provenance::copy(self.path.parent(), aside.path())?;
        aside.finish()
    }
}

/// The name of a module of Transformers' in mlx-lm.
fn module(base: &Base<'_>, matrix: &str) -> String {
    let towers = base.tensors.iter().any(|tensor| tensor.name.contains("language_model."));
    base.config.architecture.mlx_module(matrix, towers)
}

/// A tensor that is to be written.
struct Owned {
    name: String,
    dtype: formats::DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Owned {
    fn tensor(&self) -> TensorView<'_> {
        let Owned { name, dtype, shape, bytes } = self;
        TensorView { name, dtype: *dtype, shape, bytes }
    }
}

/// A matrix with its axes exchanged.
fn exchanged(of: &TensorView<'_>, name: String) -> Owned {
    let columns = of.shape.last().copied().unwrap_or(0);
    let element = of.dtype.block_bytes();
    let mut bytes = Vec::with_capacity(of.bytes.len());
    for column in 0..columns {
        for row in of.bytes.chunks_exact((columns * element).max(1)) {
            bytes.extend_from_slice(&row[column * element..][..element]);
        }
    }
    Owned { name, dtype: of.dtype, shape: of.shape.iter().rev().copied().collect(), bytes }
}
