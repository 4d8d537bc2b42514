//! Factors as PEFT names, begins and stores them: `adapter_config.json` and
//! `adapter_model.safetensors`.

use crate::experts::{self, ExpertModule};
use crate::gradients::{Module, ModuleFactors};
use crate::tables::WholeTable;
use crate::{LoraOptions, Parameter};
use adapters::Base;
use formats::{DType, Error, ErrorKind, Result, TensorView, safetensors};
use ops::Op;
use ops::low_rank::Delta;
use program::{AdapterFactors, Site};
use serde_json::json;

/// The whole name of a module that Hugging Face's class for texts alone calls `name`.
pub(crate) fn placed(base: &Base<'_>, name: String) -> String {
    let names = base.tensors.iter().map(|tensor| tensor.name);
    let module = base.config.architecture.decoder_module(names);
    match name.strip_prefix("model.") {
        Some(rest) => format!("{module}.{rest}"),
        None => name,
    }
}

/// A matrix's module in Hugging Face's model, such as `model.layers.0.self_attn.q_proj`; some rows
/// of one where that model keeps several matrices in one. None where the matrix has rows of a
/// module more than once, whose factors would be no longer those of one row.
fn module(base: &Base<'_>, site: &Site) -> Option<Module> {
    let gguf = base.tensors.gguf().is_some();
    if gguf && base.reorders(site) {
        return None;
    }
    let architecture = base.config.architecture;
    let named = |canonical: &str| {
        let stored = architecture.stored(canonical, false).into_iter().next()?;
        Some(placed(base, architecture.class_module(stored.strip_suffix(".weight")?)))
    };
    let source = &base.program.weights[site.weight.0].source;
    let fused = adapters::fused(source, site.output);
    if fused.as_ref().is_some_and(|(_, rows)| adapters::repeats(rows)) {
        return None;
    }
    let fused = fused.and_then(|(tensor, rows)| {
        let canonical = architecture.canonical(tensor.strip_suffix(".weight")?, gguf)?;
        Some(Module { name: named(&canonical)?, rows })
    });
    fused.or_else(|| Some(Module { name: named(&site.name)?, rows: (0..site.output).collect() }))
}

/// The whole name of a matrix's module in Hugging Face's model, if it is one by itself.
pub(crate) fn module_name(base: &Base<'_>, site: &Site) -> Option<String> {
    let architecture = base.config.architecture;
    let stored = architecture.stored(&site.name, false).into_iter().next()?;
    Some(placed(base, architecture.class_module(stored.strip_suffix(".weight")?)))
}

/// Whether a name among sites selects experts: all of them, or a stack by its canonical name.
pub(crate) fn is_experts(name: &str) -> bool {
    name == experts::SITE || name.contains(".experts.")
}

/// Which experts' matrices of a mixture, given by the names of its stacks, have factors: gates and
/// ups, and second matrices.
pub(crate) fn expert_sites(
    options: &LoraOptions,
    layers: usize,
    stacks: &[String; 3],
) -> [bool; 2] {
    let first = layers - options.layers.unwrap_or(layers).min(layers);
    if block(&stacks[0]).is_none_or(|block| block < first) {
        return [false; 2];
    }
    let wanted = |name: &String| options.sites.iter().any(|s| s == experts::SITE || s == name);
    [stacks[..2].iter().any(wanted), wanted(&stacks[2])]
}

pub(crate) fn ends(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

/// The first of the last `layers` of a model's blocks, of which there are `all`; the first of all if
/// none are named.
///
/// # Errors
/// None, or more than there are.
pub(crate) fn first_block(layers: Option<usize>, all: usize) -> Result<usize> {
    match layers {
        Some(layers) if layers == 0 || layers > all => {
            Err(Error::new("layers", format!("1 to {all}, the blocks of the model"), layers))
        }
        layers => Ok(all - layers.unwrap_or(all)),
    }
}

/// Whether a name is of a block that is no earlier than `first`.
pub(crate) fn is_from(name: &str, first: usize) -> bool {
    block(name).is_some_and(|block| block >= first)
}

/// The block of a name such as `blocks.3.mlp.up`.
fn block(name: &str) -> Option<usize> {
    name.strip_prefix("blocks.")?.split('.').next()?.parse().ok()
}

/// The matrices whose names end like one of the `sites` that are wanted, by their own name or their
/// module's, with all others of their modules; if none are named, the matrices of the blocks, or in
/// models with experts those that are not of feed-forwards, as far as Hugging Face's model has
/// modules for them. Routers are excluded, since PEFT adapts linear layers alone, and so are the
/// last matrices of state spaces, those that make steps of narrow rows, those that predict and
/// correct streams, and gates of which PEFT has no factors. Where the last blocks alone are wanted, all others have none.
///
/// # Errors
/// A name that no matrix has, listing the names of the blocks; the head; one of a matrix that
/// Hugging Face's model has no module for; more blocks than there are; blocks that have none of the
/// names.
pub(crate) fn modules(base: &Base<'_>, options: &LoraOptions) -> Result<Vec<(Site, Module)>> {
    let mixed = base.program.nodes.iter().any(|node| matches!(node.op, Op::Experts(_)));
    let stack = |name: &String| mixed && is_experts(name);
    let wanted: Vec<String> = options.sites.iter().filter(|name| !stack(name)).cloned().collect();
    if wanted.is_empty() && !options.sites.is_empty() {
        return Ok(Vec::new());
    }
    let wanted = &wanted[..];
    let first = first_block(options.layers, base.config.layers)?;
    let late = |site: &Site| options.layers.is_none() || is_from(&site.name, first);
    let sites = base.program.adaptable().into_iter();
    let matrix = |site: &Site| !site.gathers && site.experts.is_none();
    // Transformers' kernels read the last matrix of a state space past its module, so that PEFT
    // refuses factors beside it. Those of streams have zeros behind the module's columns.
    let mut without = vec![".router", ".mamba.o", ".streams.predict", ".streams.correct"];
    without.extend(base.config.architecture.hides_gates().then_some(".attention.gate"));
    let adapted = |site: &Site| !without.iter().any(|end| site.name.ends_with(end));
    let sites = sites.filter(|site| matrix(site) && adapted(site));
    // Nor is that called which makes the steps of the first Mamba's, but its weight read.
    let called = |(_, module): &(Site, Option<Module>)| {
        !module.as_ref().is_some_and(|module| ends(&module.name, "dt_proj"))
    };
    let sites = sites.map(|site| (site.clone(), module(base, &site))).filter(called);
    let sites: Vec<(Site, Option<Module>)> = sites.collect();
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
        known.extend(mixed.then_some(experts::SITE));
        return Err(Error::new("sites", format!("some of {}", known.join(", ")), odd));
    }
    if let Some((head, _)) = sites.iter().find(|site| {
        !site.0.name.starts_with("blocks.") && wanted.iter().any(|end| named(site, end))
    }) {
        let expected = "matrices of the blocks; the head is trained whole";
        let error = Error::new("sites", expected, &head.name);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let chosen = |site: &(Site, Option<Module>)| match wanted {
        _ if !late(&site.0) => false,
        [] if site.1.is_none() => false,
        [] if mixed => site.0.name.starts_with("blocks.") && !site.0.name.contains(".mlp."),
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
    if names.is_empty() {
        let named = if wanted.is_empty() { "any".to_owned() } else { wanted.join(", ") };
        let place = if options.layers.is_some() { "layers" } else { "sites" };
        return Err(Error::new(place, format!("blocks with matrices: {named}"), "none of them"));
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
    factors: &[ModuleFactors],
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

/// The options by which an adapter was made that has one rank, one scale and one kind.
///
/// # Errors
/// One that has several, by the matrix that differs from the first.
pub(crate) fn options(adapter: &AdapterFactors) -> Result<LoraOptions> {
    let mut each = adapter.deltas.iter();
    let (_, first) = each.next().ok_or_else(|| Error::new("factors", "some", "none"))?;
    let of = |delta: &Delta| (delta.rank, delta.scale, delta.gain.is_some());
    if let Some((name, odd)) = each.find(|(_, delta)| of(delta) != of(first)) {
        let told = |delta: &Delta| {
            let kind = if delta.gain.is_some() { "DoRA" } else { "LoRA" };
            format!("{kind} of rank {} and scale {}", delta.rank, delta.scale)
        };
        let expected = format!("{}, as elsewhere", told(first));
        return Err(Error::new(name, expected, told(odd)).of(ErrorKind::Unsupported));
    }
    Ok(LoraOptions {
        rank: first.rank,
        alpha: first.scale * first.rank as f32,
        dora: first.gain.is_some(),
        sites: adapter.deltas.keys().cloned().collect(),
        ..LoraOptions::default()
    })
}

/// Has the parameters begin as an adapter's.
///
/// # Errors
/// Matrices of one module of which one is not changed, or by another `down`; with DoRA, matrices
/// that cannot be read.
pub(crate) fn begin(
    base: &Base<'_>,
    sites: &[Site],
    factors: &[ModuleFactors],
    parameters: &mut [Parameter],
    adapter: &AdapterFactors,
) -> Result<()> {
    let each = parameters.len() / factors.len().max(1);
    for (factors, own) in factors.iter().zip(parameters.chunks_exact_mut(each)) {
        for (i, part) in factors.parts.iter().enumerate() {
            let site = sites.iter().find(|site| site.weight == part.matrix);
            let delta = site.and_then(|site| adapter.deltas.get(&site.name));
            let same = |delta: &&Delta| i == 0 || delta.down == own[0].values;
            let delta = delta.filter(same).ok_or_else(|| {
                let expected = "one adapter of all that the module holds";
                Error::new(&factors.module, expected, "other factors for some of it")
                    .of(ErrorKind::Unsupported)
            })?;
            let end = part.first_row + part.rows.len();
            let rows = |width: usize| part.first_row * width..end * width;
            own[0].values.copy_from_slice(&delta.down);
            own[1].values[rows(delta.rank)].copy_from_slice(&delta.up);
            let Some(gain) = &delta.gain else { continue };
            let matrix = base.program.weights[part.matrix.0].read(base.tensors)?.to_f32()?;
            let lengths =
                adapters::lengths(&matrix, factors.input, delta.scale, [&delta.down, &delta.up]);
            let magnitudes = gain.gain.iter().zip(lengths);
            let magnitudes = magnitudes.map(|(gain, length)| (f64::from(*gain) * length) as f32);
            own[2].values[rows(1)].iter_mut().zip(magnitudes).for_each(|(to, own)| *to = own);
        }
    }
    Ok(())
}

/// Numbers from -1 to 1, by SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) struct Draws(u64);

impl Draws {
    /// A sequence of its own for each index.
    pub(crate) fn new(seed: u64, index: u64) -> Draws {
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

    pub(crate) fn next(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// The files of an adapter.
///
/// # Errors
/// A header that is too large.
pub(crate) fn export(
    base: &Base<'_>,
    (sites, factors, mixtures, tables): (&[Site], &[ModuleFactors], &[ExpertModule], &[WholeTable]),
    parameters: &[Parameter],
    options: &LoraOptions,
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut stored: Vec<(&Parameter, Vec<u8>)> = Vec::new();
    for (factors, own) in factors.iter().zip(parameters.chunks_exact(count(options))) {
        let mut down = own[0].values.clone();
        let first = factors.parts.first().map(|part| part.matrix);
        let site = sites.iter().find(|site| Some(site.weight) == first);
        if let Some(order) = site.and_then(|site| base.column_order(site)) {
            down.chunks_exact_mut(order.len()).for_each(|row| unorder(row, 1, Some(order.clone())));
        }
        stored.push((&own[0], bytes(&down)));
        // What has a row for each of the matrix's.
        for (parameter, width) in own[1..].iter().zip([options.rank, 1]) {
            let mut values = vec![0.0; parameter.values.len()];
            for part in &factors.parts {
                let site = sites.iter().find(|site| site.weight == part.matrix);
                let end = part.first_row + part.rows.len();
                let mut own = parameter.values[part.first_row * width..end * width].to_vec();
                unorder(&mut own, width, site.and_then(|site| base.order(site)));
                for (own, row) in own.chunks_exact(width).zip(&part.rows) {
                    values[row * width..][..width].copy_from_slice(own);
                }
            }
            stored.push((parameter, bytes(&values)));
        }
    }
    let mut stacked = Vec::new();
    let mut first = factors.len() * count(options);
    for mixture in mixtures {
        stacked.extend(mixture.export(base, &parameters[first..first + mixture.count()]));
        first += mixture.count();
    }
    for (_, parameter) in tables.iter().zip(&parameters[first..]) {
        stored.push((parameter, bytes(&parameter.values)));
    }
    let tensors = stored.iter().map(|(parameter, bytes)| TensorView {
        name: &parameter.name,
        dtype: DType::F32,
        shape: &parameter.shape,
        bytes,
    });
    let tensors = tensors.chain(stacked.iter().map(|(name, shape, bytes)| TensorView {
        name,
        dtype: DType::F32,
        shape,
        bytes,
    }));
    let name = "adapter_model.safetensors";
    let weights = safetensors::encode(name, &[("format", "pt")], tensors)?;
    let stacks: Vec<String> = mixtures.iter().flat_map(ExpertModule::targets).collect();
    let mut settings = json!({
        "base_model_name_or_path": base.tensors.location().to_string(),
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "peft_type": "LORA",
        "r": options.rank,
        "target_modules": targets(base, factors),
        "task_type": "CAUSAL_LM",
        "use_dora": options.dora,
        "use_rslora": options.stabilised,
    });
    if !tables.is_empty() {
        settings["modules_to_save"] = json!(saved(base, tables));
    }
    if !stacks.is_empty() {
        settings["target_parameters"] = json!(stacks);
        // The version from which on stacks have their factors as they have them here.
        settings["peft_version"] = json!("0.19.0");
    }
    let mut text = serde_json::to_vec_pretty(&settings)
        .map_err(|e| Error::new("adapter_config.json", "settings", e))?;
    text.push(b'\n');
    Ok(vec![("adapter_config.json".to_owned(), text), (name.to_owned(), weights)])
}

/// The names by which PEFT finds the modules that are saved whole.
fn saved<'a>(base: &Base<'_>, tables: &'a [WholeTable]) -> Vec<&'a str> {
    let beside_towers = placed(base, "model.".to_owned()) != "model.";
    let last = |name: &'a str| name.rsplit('.').next().unwrap_or(name);
    let name = |table: &'a WholeTable| match beside_towers {
        true => table.module.as_str(),
        false => last(&table.module),
    };
    tables.iter().map(name).collect()
}

/// The names by which PEFT finds the modules that have factors: the last parts of their names, or
/// whole names where other modules that have none end so, as those of towers do.
fn targets<'a>(base: &Base<'_>, factors: &'a [ModuleFactors]) -> Vec<&'a str> {
    let last = |name: &'a str| name.rsplit('.').next().unwrap_or(name);
    let mut sites = base.program.adaptable();
    sites.retain(|site| site.experts.is_none());
    let all: Vec<String> = sites.iter().filter_map(|site| Some(module(base, site)?.name)).collect();
    let own = |name: &str| factors.iter().any(|factors| factors.module == name);
    let beside_towers = placed(base, "model.".to_owned()) != "model.";
    let mut found: Vec<&str> = Vec::new();
    for factors in factors {
        let end = last(&factors.module);
        let others = beside_towers || all.iter().any(|name| ends(name, end) && !own(name));
        let name = if others { factors.module.as_str() } else { end };
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
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

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
