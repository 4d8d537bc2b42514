//! Model architectures, one file each, and the configuration and names under which files store
//! them.
//!
//! An architecture's file owns what it reads of a configuration, the names of its weights in both
//! dialects, and its forward. [`load`] reads the configuration, refuses keys that say something and
//! that no one reads, checks every weight's shape and builds the layers; [`Model::record`] runs
//! `forward` once to record a Program. Nothing here names a device, an element type or a
//! quantisation of weights, but for the recipe of those that are stored in several tensors.

mod afmoe;
mod alibi;
mod apertus;
mod arcee;
mod aria;
mod baichuan;
mod bailing_moe;
mod bamba;
mod biogpt;
mod bitnet;
mod bloom;
mod codeshell;
mod cohere;
mod cohere2_moe;
mod config;
mod cwm;
mod dbrx;
mod deci;
mod decoder;
mod deepseek;
mod deepseek_moe;
mod dots1;
mod emu3;
mod ernie4_5;
mod exaone;
mod exaone4;
mod exaone_moe;
mod experts;
mod export;
mod falcon;
mod falcon_h1;
mod files;
mod flex_olmo;
mod flint;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma3n;
mod gemma4;
mod glm4;
mod glm4_moe;
mod gpt2;
mod gpt_bigcode;
mod gpt_neo;
mod gpt_neox;
mod gpt_oss;
mod gptj;
mod granite;
mod granite4;
mod granite_swa;
mod granitemoe;
mod grok;
mod harmless;
mod head_norms;
mod helium;
mod hunyuan;
mod hy_v3;
mod hybrid;
mod hyperclovax;
mod indexed;
mod internlm2;
mod iquestcoder;
mod jais;
mod jais2;
mod jamba;
mod keys;
mod kimi_linear;
mod lacking;
mod laguna;
mod lara_mini;
mod latent;
mod lfm2;
mod lfm2_moe;
mod lfm3;
mod llama;
mod llama4;
mod maincoder;
mod mamba;
mod mamba1;
mod mamba2;
mod mellum;
mod mimo_v2;
mod minicpm;
mod minimax;
mod minimax_m2;
mod ministral;
mod ministral3;
mod mistral;
mod mixtral;
mod mllama;
mod modernbert_decoder;
mod mpt;
mod muse_glimmer;
mod names;
mod nanbeige;
mod nanochat;
mod nemotron;
mod nemotron_h;
mod nets;
mod olmo;
mod olmo2;
mod olmo_hybrid;
mod olmoe;
mod openai_gpt;
mod openelm;
mod opt;
mod orion;
mod pangu;
mod persimmon;
mod phi;
mod phi3;
mod phimoe;
mod plm;
mod quantisation;
mod qwen;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen_vl;
mod refact;
mod rope;
mod sarvam_moe;
mod scaling;
mod seed_oss;
mod smallthinker;
mod smollm3;
mod solar_open;
mod stablelm;
mod starcoder2;
mod stated;
mod step3p5;
mod unsaid;
mod unused;
mod windows;
mod xglm;
mod xverse;
mod zamba2;

use files::Files;
use formats::{Error, ErrorKind, Result, Tensors};
use keys::{Asked, Dialect, Keys};
use names::Names;
use nn::{ForwardPass, Stored, Tensor, Weights};
use program::Program;
use unsaid::Unsaid;

pub use config::Config;
pub use export::{Export, Exported, From, check as check_export, export};

/// A row of the registry.
#[derive(Debug)]
pub struct Architecture {
    /// The models that it is, as people call them.
    pub title: &'static str,
    /// Its `model_type` in config.json.
    pub name: &'static str,
    /// Its `general.architecture` in GGUF; empty where it runs from folders alone.
    pub gguf: &'static str,
    /// Its class among `architectures` in config.json.
    pub class: &'static str,
    /// The values that this class has for keys that config.json leaves out.
    unsaid: Unsaid,
    /// The names of its weights.
    names: &'static [&'static [names::Row]],
    /// Weights that tell it among those that old exports, which name none, may be: the one with
    /// most of them, all there, it is.
    signs: Option<&'static [&'static str]>,
    /// Whether its file reads what configurations say about experts.
    experts: bool,
    open: fn(&Files<'_>) -> Result<Opened>,
}

/// Every architecture that Delft runs.
pub const ARCHITECTURES: &[&Architecture] = &[
    &afmoe::ARCHITECTURE,
    &apertus::ARCHITECTURE,
    &arcee::ARCHITECTURE,
    &aria::ARCHITECTURE,
    &deepseek::AXK1,
    &baichuan::ARCHITECTURE,
    &bamba::ARCHITECTURE,
    &biogpt::ARCHITECTURE,
    &bitnet::ARCHITECTURE,
    &bloom::ARCHITECTURE,
    &codeshell::ARCHITECTURE,
    &cohere::ARCHITECTURE,
    &cohere::COHERE2,
    &cohere2_moe::ARCHITECTURE,
    &cwm::ARCHITECTURE,
    &dbrx::ARCHITECTURE,
    &deci::ARCHITECTURE,
    &deepseek_moe::ARCHITECTURE,
    &deepseek::V2,
    &deepseek::V3,
    &indexed::DEEPSEEK,
    &dots1::ARCHITECTURE,
    &emu3::ARCHITECTURE,
    &emu3::AUTHORS,
    &ernie4_5::ARCHITECTURE,
    &ernie4_5::MIXTURE,
    &ernie4_5::VISION,
    &ernie4_5::PADDLE,
    &exaone::ARCHITECTURE,
    &exaone4::ARCHITECTURE,
    &exaone_moe::ARCHITECTURE,
    &falcon::ARCHITECTURE,
    &falcon_h1::ARCHITECTURE,
    &mamba1::FALCON,
    &flex_olmo::ARCHITECTURE,
    &flint::ARCHITECTURE,
    &gemma::ARCHITECTURE,
    &gemma2::ARCHITECTURE,
    &gemma2::VAULT,
    &gemma3::ARCHITECTURE,
    &gemma3n::ARCHITECTURE,
    &gemma4::ARCHITECTURE,
    &gemma4::UNIFIED,
    &glm4::CHATGLM,
    &glm4::GLM,
    &glm4::ARCHITECTURE,
    &glm4::VISION,
    &glm4::OCR,
    &solar_open::ARCHITECTURE,
    &glm4_moe::ARCHITECTURE,
    &glm4_moe::VISION,
    &deepseek::GLM,
    &indexed::GLM,
    &openai_gpt::ARCHITECTURE,
    &gpt2::ARCHITECTURE,
    &gptj::ARCHITECTURE,
    &gptj::CODEGEN,
    &gpt_neo::ARCHITECTURE,
    &gpt_neox::ARCHITECTURE,
    &gpt_neox::JAPANESE,
    &gpt_oss::ARCHITECTURE,
    &granite::ARCHITECTURE,
    &granitemoe::ARCHITECTURE,
    &granitemoe::SHARED,
    &granite4::ARCHITECTURE,
    &granite_swa::ARCHITECTURE,
    &granite_swa::MIXTURE,
    &grok::ARCHITECTURE,
    &helium::ARCHITECTURE,
    &hunyuan::ARCHITECTURE,
    &hunyuan::MIXTURE,
    &hunyuan::VISION,
    &hy_v3::ARCHITECTURE,
    &hyperclovax::ARCHITECTURE,
    &internlm2::FIRST,
    &internlm2::ARCHITECTURE,
    &internlm2::INTERNLM3,
    &iquestcoder::ARCHITECTURE,
    &jais::ARCHITECTURE,
    &jais2::ARCHITECTURE,
    &jamba::ARCHITECTURE,
    &kimi_linear::ARCHITECTURE,
    &laguna::ARCHITECTURE,
    &lara_mini::ARCHITECTURE,
    &lfm2::ARCHITECTURE,
    &lfm2_moe::ARCHITECTURE,
    &lfm3::ARCHITECTURE,
    &llama::ARCHITECTURE,
    &bailing_moe::ARCHITECTURE,
    &bailing_moe::SECOND,
    &kimi_linear::LING3,
    &llama4::ARCHITECTURE,
    &maincoder::ARCHITECTURE,
    &mamba1::ARCHITECTURE,
    &mamba2::ARCHITECTURE,
    &mellum::ARCHITECTURE,
    &minicpm::ARCHITECTURE,
    &minicpm::THIRD,
    &mimo_v2::ARCHITECTURE,
    &minimax::ARCHITECTURE,
    &minimax::AUTHORS,
    &minimax::M1,
    &minimax_m2::ARCHITECTURE,
    &ministral::ARCHITECTURE,
    &ministral3::ARCHITECTURE,
    &mistral::ARCHITECTURE,
    &deepseek::MISTRAL4,
    &mixtral::ARCHITECTURE,
    &mllama::ARCHITECTURE,
    &modernbert_decoder::ARCHITECTURE,
    &mpt::ARCHITECTURE,
    &muse_glimmer::ARCHITECTURE,
    &nanbeige::ARCHITECTURE,
    &nanbeige::OURO,
    &nanochat::ARCHITECTURE,
    &nemotron::ARCHITECTURE,
    &nemotron_h::ARCHITECTURE,
    &nemotron_h::MIXTURE,
    &olmo::ARCHITECTURE,
    &olmo2::ARCHITECTURE,
    &olmo2::OLMO3,
    &olmo_hybrid::ARCHITECTURE,
    &olmoe::ARCHITECTURE,
    &openelm::ARCHITECTURE,
    &opt::ARCHITECTURE,
    &orion::ARCHITECTURE,
    &pangu::ARCHITECTURE,
    &persimmon::ARCHITECTURE,
    &phi::ARCHITECTURE,
    &phi3::ARCHITECTURE,
    &phi3::MULTIMODAL,
    &phi3::AUTHORS,
    &phimoe::ARCHITECTURE,
    &plm::ARCHITECTURE,
    &qwen::ARCHITECTURE,
    &qwen2::ARCHITECTURE,
    &qwen_vl::OMNI2_5,
    &qwen_vl::OMNI3,
    &qwen_vl::QWEN2,
    &qwen_vl::QWEN2_5,
    &qwen2_moe::ARCHITECTURE,
    &qwen3::ARCHITECTURE,
    &qwen_vl::QWEN3,
    &qwen_vl::QWEN3_MOE,
    &qwen3_5::ARCHITECTURE,
    &qwen3_5_moe::ARCHITECTURE,
    &qwen3_moe::ARCHITECTURE,
    &qwen3_next::ARCHITECTURE,
    &refact::ARCHITECTURE,
    &sarvam_moe::ARCHITECTURE,
    &deepseek::SARVAM,
    &seed_oss::ARCHITECTURE,
    &smallthinker::ARCHITECTURE,
    &smollm3::ARCHITECTURE,
    &stablelm::ARCHITECTURE,
    &gpt_bigcode::ARCHITECTURE,
    &starcoder2::ARCHITECTURE,
    &step3p5::ARCHITECTURE,
    &xglm::ARCHITECTURE,
    &xverse::ARCHITECTURE,
    &deepseek::YOUTU,
    &zamba2::ARCHITECTURE,
];

/// How a model is read.
#[derive(Debug, Clone, Default)]
pub struct ReadOptions {
    /// Keys of the configuration that are passed over though no one reads them.
    pub ignore_keys: Vec<String>,
    /// Positions that sessions are going to have, if known: some rotations follow it. `None`: as
    /// many as the model was trained for.
    pub context: Option<usize>,
    /// The kind of result that the model's Program ends with.
    pub ending: Ending,
    /// The longest row that attention by latents may cache for all heads together; `None`: each
    /// head's keys and values are cached.
    pub latents: Option<usize>,
}

/// The first result of a model's Program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Ending {
    /// Logits `[outputs, vocab]`: what generates.
    #[default]
    Logits,
    /// Hidden states `[outputs, hidden]` behind the last norm: what embeddings are made of. The
    /// head is not read then, and need not be there.
    Hidden,
}

/// A model's configuration, and how its layers are built from its weights.
struct Opened {
    config: Config,
    build: Build,
}

type Build = Box<dyn Fn(&dyn Weights, Ending) -> Result<Layers>>;

/// A model's layers.
struct Layers {
    /// A Program of all its weights and cache layers, with nothing recorded yet.
    blank: Program,
    /// Records one pass, and gives its hidden states `[outputs, hidden]` behind the last norm.
    hidden: Box<dyn Fn(&ForwardPass) -> Tensor>,
    /// Their logits `[outputs, vocab]`, if the model ends in them.
    head: Option<decoder::Layer>,
}

fn by_name(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().copied().find(|a| a.name == name)
}

/// The architecture of a GGUF file; of those that share its name there, the one that has it
/// everywhere.
fn by_gguf(name: &str) -> Option<&'static Architecture> {
    let all = ARCHITECTURES.iter().copied().filter(|a| a.gguf == name && !name.is_empty());
    all.max_by_key(|a| a.name == name)
}

/// The error for an architecture that is not in the registry; `place` is the key that names it. It
/// names those that are spelled alike, since all would not fit a line.
fn unknown(place: String, name: &str, dialect: Dialect) -> Error {
    let spelled = |a: &&Architecture| if dialect == Dialect::Gguf { a.gguf } else { a.name };
    let mut known: Vec<&str> =
        ARCHITECTURES.iter().map(spelled).filter(|name| !name.is_empty()).collect();
    known.sort_unstable();
    known.dedup();
    let count = known.len();
    let begin = |a: &str, b: &str| a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    known.retain(|known| begin(known, name) >= 3);
    let alike = if known.is_empty() { String::new() } else { format!(" ({})", known.join(", ")) };
    let hint = match lacking::what(name) {
        Some(what) => format!("this architecture is not supported: it needs {what}"),
        None => "this architecture is not supported yet".to_owned(),
    };
    let expected = format!("one of {count} architectures{alike}");
    Error::new(place, expected, keys::clipped(name)).of(ErrorKind::Unsupported).hint(hint)
}

/// A model's layers, ready to record.
pub struct Model {
    config: Config,
    layers: Layers,
}

/// Reads the configuration of the file or folder behind `tensors`, without looking at the weights'
/// data.
///
/// # Errors
/// A key that is missing, of another type, or out of range, by file and key; a key that no one
/// reads; a file that holds no model of a known architecture.
pub fn config(tensors: &Tensors, options: &ReadOptions) -> Result<Config> {
    let file = tensors.path().display().to_string();
    open(tensors, &file, options, &Asked::default(), false).map(|(opened, _)| opened.config)
}

/// Reads a configuration; `asked` notes which of its keys, and what they say. `apart`:
/// [`Files::apart`].
fn open<'a>(
    tensors: &'a Tensors,
    file: &'a str,
    options: &ReadOptions,
    asked: &Asked,
    apart: bool,
) -> Result<(Opened, Names<'a>)> {
    let ReadOptions { context, latents, .. } = *options;
    if let Some(gguf) = tensors.gguf() {
        const KEY: &str = "general.architecture";
        let metadata = gguf.metadata();
        metadata.check_model()?;
        let name = metadata.str(KEY)?.ok_or_else(|| metadata.missing(KEY))?;
        let architecture =
            by_gguf(name).ok_or_else(|| unknown(metadata.at(KEY), name, Dialect::Gguf))?;
        let (dialect, tables) = (Dialect::Gguf, architecture.names);
        let names = Names { tensors, dialect, file, tables, quantised: None, copied: false };
        let keys = Keys::gguf(file, architecture.gguf, metadata, asked);
        let (tensors, outer) = (Some(tensors), keys.clone());
        let files =
            Files { architecture, keys, outer, names: &names, tensors, context, latents, apart };
        let opened = read(&files, options)?;
        return Ok((opened, names));
    }
    let folder = tensors
        .folder()
        .ok_or_else(|| Error::new(file, "a GGUF file or a model folder", "neither"))?;
    let place = folder.stated_in().display().to_string();
    let (keys, outer) = files::of_json(folder.config(), &place, asked)?;
    let mut said = Vec::new();
    let quantised = match quantisation::Settings::read(&outer, &mut said)? {
        Some(settings) => Some(settings),
        None => quantisation::Settings::read(&keys, &mut said)?,
    };
    if quantised.is_none() {
        quantisation::check_numbers(tensors, &place)?;
    }
    let names = |architecture: &Architecture| {
        let (dialect, tables) = (Dialect::HuggingFace, architecture.names);
        Names { tensors, dialect, file, tables, quantised: quantised.clone(), copied: false }
    };
    let (architecture, remark) = match stated(&keys, &outer)? {
        Some(architecture) => (architecture, None),
        None => guessed(&place, |architecture| names(architecture))?,
    };
    let mut names = names(architecture);
    names.copied = apart && export::copies_head(architecture, &keys, &outer)?;
    let tensors = Some(tensors);
    let files =
        Files { architecture, keys, outer, names: &names, tensors, context, latents, apart };
    let mut opened = read(&files, options)?;
    opened.config.warnings.splice(0..0, remark.into_iter().chain(said));
    opened.config.warnings.extend(folder.remarks());
    Ok((opened, names))
}

/// The model as its architecture's file reads it, if it reads every key.
fn read(files: &Files<'_>, options: &ReadOptions) -> Result<Opened> {
    let files = &files.of_class();
    if !files.architecture.experts {
        experts::check(&files.outer)?;
        experts::check(&files.keys)?;
    }
    if files.architecture.name != bitnet::ARCHITECTURE.name && quantisation::rounds_rows(files)? {
        let expected = format!("a quantisation that {} has", files.architecture.name);
        let error = files.outer.wrong("quantization_config", expected, "rows rounded to 8 bits");
        return Err(error.of(ErrorKind::Unsupported));
    }
    let mut opened = (files.architecture.open)(files)?;
    let passed = files.keys.refuse_unread(&options.ignore_keys)?;
    for (i, key) in options.ignore_keys.iter().enumerate().filter(|(i, _)| !passed.contains(i)) {
        let known = files.keys.was_asked(key) || options.ignore_keys[..i].contains(key);
        let why = if known { "is a setting that is used" } else { "is no setting of this model" };
        opened.config.warnings.push(format!("{}: {why}, and not passed over", keys::clipped(key)));
    }
    Ok(opened)
}

/// The architecture that a `config.json` names; none if it names none.
fn stated(keys: &Keys<'_>, outer: &Keys<'_>) -> Result<Option<&'static Architecture>> {
    for keys in [keys, outer] {
        let class = keys.get("architectures").and_then(|a| a.get(0)).and_then(|a| a.as_str());
        let known = keys
            .text("model_type")?
            .and_then(|t| by_name(t).or_else(|| by_name(t.trim_end_matches("_text"))));
        // Both versions' folders state the first one's type.
        let second = known.is_some_and(|known| known.name == bailing_moe::ARCHITECTURE.name)
            && class == Some(bailing_moe::SECOND.class);
        let known = if second { Some(&bailing_moe::SECOND) } else { known };
        if known.is_some() {
            return Ok(known);
        }
        let known = ARCHITECTURES.iter().copied().find(|a| Some(a.class) == class);
        if known.is_some() {
            return Ok(known);
        }
    }
    match outer.text("model_type")? {
        Some(name) => Err(unknown(outer.place("model_type"), name, Dialect::HuggingFace)),
        None => Ok(None),
    }
}

/// The architecture that the weights tell, and a line that says so.
fn guessed<'a>(
    place: &str,
    names: impl Fn(&Architecture) -> Names<'a>,
) -> Result<(&'static Architecture, Option<String>)> {
    let mut best: Option<(&'static Architecture, usize)> = None;
    for architecture in ARCHITECTURES {
        let Some(signs) = architecture.signs else { continue };
        let names = names(architecture);
        let mut all = true;
        for sign in signs {
            all &= names.find(sign)?.is_some();
        }
        if all && best.is_none_or(|(_, most)| signs.len() > most) {
            best = Some((architecture, signs.len()));
        }
    }
    let Some((architecture, _)) = best else {
        return Err(unknown(format!("{place}: model_type"), "nothing", Dialect::HuggingFace));
    };
    let name = architecture.name;
    let remark = format!("model_type is missing: taken for {name} by the names of its weights");
    Ok((architecture, Some(remark)))
}

/// Whether Delft knows the architecture that a GGUF file's first keys name; nothing named is no
/// error here.
///
/// # Errors
/// An architecture that is not in the registry.
pub fn check_gguf(metadata: &formats::gguf::Metadata, place: &str) -> Result<()> {
    match metadata.str("general.architecture")? {
        Some(name) if by_gguf(name).is_none() => {
            Err(unknown(format!("{place}: general.architecture"), name, Dialect::Gguf))
        }
        _ => Ok(()),
    }
}

/// Whether Delft knows the architecture and all settings of a `config.json`, before there are
/// weights; one that names no architecture is judged when the weights are there.
///
/// # Errors
/// As [`config()`].
pub fn check_json(json: &serde_json::Value, place: &str, options: &ReadOptions) -> Result<()> {
    struct None;
    impl Weights for None {
        fn find(&self, _: &str) -> Result<Option<Stored>> {
            Ok(Option::None)
        }
    }
    let asked = Asked::default();
    let (keys, outer) = files::of_json(json, place, &asked)?;
    for keys in [&outer, &keys] {
        quantisation::Settings::read(keys, &mut Vec::new())?;
    }
    let Some(architecture) = stated(&keys, &outer)? else { return Ok(()) };
    let ReadOptions { context, latents, .. } = *options;
    let (names, tensors, apart) = (&None, Option::None, false);
    let files = Files { architecture, keys, outer, names, tensors, context, latents, apart };
    read(&files, options).map(|_| ())
}

/// Builds the model behind `tensors`: every weight found, every shape and type checked.
///
/// # Errors
/// Those of [`config()`]; a weight that is missing, of another shape, or of a type that holds no
/// weights, by file and name; in a GGUF file, tensors that the architecture has no use for.
pub fn load(tensors: &Tensors, options: &ReadOptions) -> Result<Model> {
    load_asking(tensors, options, &Asked::default(), false)
}

/// As [`load`]; `asked` notes what the configuration says. `apart`: [`Files::apart`].
fn load_asking(
    tensors: &Tensors,
    options: &ReadOptions,
    asked: &Asked,
    apart: bool,
) -> Result<Model> {
    let file = tensors.path().display().to_string();
    let (Opened { mut config, build }, names) = open(tensors, &file, options, asked, apart)?;
    let layers = build(&names, options.ending)?;
    for weight in &layers.blank.weights {
        let named = |e: Error| match e.place.starts_with(&file) {
            true => e,
            false => Error { place: format!("{file}: {}", e.place), ..e },
        };
        let found = weight.describe(tensors).map_err(named)?;
        if !found.encoding.is_float() {
            let expected = "a tensor of floats or quantised blocks";
            return Err(Error::new(names.place(&weight.name), expected, found.encoding));
        }
    }
    let unused = unused::check(&layers.blank, tensors, &names, options.ending, &config.spare)?;
    config.warnings.extend(unused);
    let quantised = |weight: &program::Weight| weight.source.is_quantised();
    if names.quantised.is_some() && !layers.blank.weights.iter().any(quantised) {
        config.warnings.push(
            "config.json: states a quantisation that no tensor has: weights are read as they are"
                .to_owned(),
        );
    }
    Ok(Model { config, layers })
}

impl Model {
    /// Its hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Records one forward pass. With `tracing`, the embeddings and every block's output are
    /// results too.
    ///
    /// # Errors
    /// Layers that do not fit together, which is a fault of the architecture, not of a file.
    pub fn record(&self, tracing: bool) -> Result<Program> {
        let step = ForwardPass::new(self.layers.blank.clone(), tracing);
        let hidden = (self.layers.hidden)(&step);
        let head = self.layers.head.as_ref();
        step.finish(head.map_or_else(|| hidden.clone(), |head| head(&hidden)))
    }
}
