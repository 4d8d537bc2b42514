//! Model folders as Hugging Face lays them out: `config.json`, tokenizer files, and weights in
//! safetensors.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use crate::error::clipped;
use crate::json;
use crate::map::Map;
use crate::mistral;
use crate::safetensors::Safetensors;
use crate::tensors::{TensorView, sorted_unique};
use crate::{Error, Result};

/// The configuration.
const CONFIG: &str = "config.json";
/// The weights of a model in one file.
const SINGLE: &str = "model.safetensors";
/// The index of a sharded model, and Mistral's name for it.
const INDEX: &str = "model.safetensors.index.json";
const MISTRALS_INDEX: &str = "consolidated.safetensors.index.json";
/// JSON files of a folder are read whole: longer ones are not what they claim.
const MAX_JSON: u64 = 256 << 20;

/// An open model folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// The file that states `config`.
    stated_in: PathBuf,
    config: Value,
    /// The file beside it that states how weights are quantised, where the configuration does not.
    beside: Option<&'static str>,
    generation_config: Option<Value>,
    files: Vec<Safetensors>,
    /// (file, tensor in it), ordered by tensor name.
    by_name: Vec<(usize, usize)>,
    /// An index that is passed over, see [`Folder::open`], and the first file that it lacks.
    stale: Option<(PathBuf, String)>,
}

impl Folder {
    /// Opens a folder: its configuration, and the weights listed in `model.safetensors.index.json`,
    /// or else `model.safetensors`, or else every `*.safetensors`. A folder of Mistral's own files
    /// has `params.json` and `consolidated*.safetensors` in their place. An index whose files are
    /// not all there is passed over where `model.safetensors` is: it is left from another form of
    /// the same weights. Where `config.json` does not say how weights are quantised, the file that
    /// AutoGPTQ, AutoAWQ or NVIDIA's modelopt left beside it does.
    ///
    /// # Errors
    /// No configuration or weights, a shard that is missing or that the index places outside the
    /// folder, a tensor that the index lists and its shard lacks, a name in two files, or any file
    /// that does not parse.
    pub fn open(path: &Path) -> Result<Folder> {
        let (stated_in, mut config) = configuration(path)?;
        let beside = quantisation_beside(path, &mut config)?;
        let generation_config = read_json(&path.join("generation_config.json"))?;
        let mut indices = [INDEX, MISTRALS_INDEX].iter().map(|name| path.join(name));
        let read = |index: PathBuf| Some(read_json(&index).transpose()?.map(|json| (index, json)));
        let index = indices.find_map(read).transpose()?;
        let single = path.join(SINGLE).is_file();
        let lacks = |json| missing_shard(path, json).filter(|_| single);
        let (mut stale, mut opened) = (None, None);
        if let Some((index, json)) = index {
            match lacks(&json) {
                Some(shard) => stale = Some((index, shard)),
                None => opened = Some(open_indexed(path, &index, &json)?),
            }
        }
        let (files, places) = opened.map_or_else(|| open_all(path), Ok)?;
        let name = |(f, t): (usize, usize)| files[f].header().tensors[t].name.as_str();
        let by_name = sorted_unique(places, name, &path.display().to_string())?;
        Ok(Folder {
            path: path.to_path_buf(),
            stated_in,
            config,
            beside,
            generation_config,
            files,
            by_name,
            stale,
        })
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`, an object; or what `params.json` says in its terms.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The file that states the configuration.
    pub fn stated_in(&self) -> &Path {
        &self.stated_in
    }

    /// Whether its weights have the names that Mistral gives them, under which rows of queries and
    /// keys have the elements that rotate together side by side.
    pub fn is_mistrals(&self) -> bool {
        self.get(mistral::SIGN).is_some()
    }

    /// `generation_config.json`, where there is one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// The path of a file in the folder, where it exists.
    pub fn file(&self, name: &str) -> Option<PathBuf> {
        let path = self.path.join(name);
        path.is_file().then_some(path)
    }

    /// The tokenizer's files that exist: `tokenizer.json`, `tokenizer_config.json`,
    /// `tokenizer.model`, `tekken.json`, `vocab.json`, `merges.txt`, `special_tokens_map.json`,
    /// `added_tokens.json`, `chat_template.jinja`, `chat_template.json`.
    pub fn tokenizer_files(&self) -> Vec<PathBuf> {
        const NAMES: [&str; 10] = [
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "tekken.json",
            "vocab.json",
            "merges.txt",
            "special_tokens_map.json",
            "added_tokens.json",
            "chat_template.jinja",
            "chat_template.json",
        ];
        NAMES.iter().filter_map(|name| self.file(name)).collect()
    }

    /// The weight files.
    pub fn weights(&self) -> &[Safetensors] {
        &self.files
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// All tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.by_name.iter().filter_map(|place| self.files[place.0].get(self.name(place)))
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let found = self.by_name.binary_search_by(|place| self.name(place).cmp(name)).ok()?;
        self.files[self.by_name[found].0].get(name)
    }

    /// Files of the folder that are not read, a line each.
    pub fn remarks(&self) -> Vec<String> {
        let adapter = self
            .file(ADAPTER_WEIGHTS)
            .map(|_| format!("{ADAPTER_WEIGHTS}: the adapter beside the weights is not applied"));
        let stale = self.stale.as_ref().map(|(index, shard)| {
            let index = name_of(index);
            format!("{index}: passed over for {SINGLE}, since it lists {shard}, which is not there")
        });
        let beside = self
            .beside
            .map(|name| format!("{name}: read as quantization_config, which {CONFIG} lacks"));
        adapter.into_iter().chain(stale).chain(beside).collect()
    }

    pub(crate) fn maps(&self) -> impl Iterator<Item = &Map> {
        self.files.iter().map(Safetensors::map)
    }

    fn name(&self, place: &(usize, usize)) -> &str {
        &self.files[place.0].header().tensors[place.1].name
    }
}

/// A JSON object from a file; none where the file does not exist.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let json = json::find(path, MAX_JSON)?;
    match json.as_ref().is_none_or(Value::is_object) {
        true => Ok(json),
        false => Err(Error::new(path.display(), "a JSON object", "another value")),
    }
}

/// A folder's configuration, and the file that states it.
fn configuration(folder: &Path) -> Result<(PathBuf, Value)> {
    let path = folder.join(CONFIG);
    if let Some(config) = read_json(&path)? {
        return Ok((path, config));
    }
    let path = folder.join(mistral::PARAMS);
    match read_json(&path)? {
        Some(params) => {
            let config = mistral::config(&path.display().to_string(), &params)?;
            Ok((path, config))
        }
        None => Err(no_config(folder)),
    }
}

/// Files in which programs say how they quantised a folder, and the method that each means.
const BESIDE: [(&str, &str); 3] = [
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
    ("hf_quant_config.json", "modelopt"),
];

/// Adds what one of those files says to a configuration that says nothing of it; gives the file's
/// name.
fn quantisation_beside(folder: &Path, config: &mut Value) -> Result<Option<&'static str>> {
    const KEYS: [&str; 3] = ["quantization_config", "quantization", "compression_config"];
    let Some(config) = config.as_object_mut() else { return Ok(None) };
    let stated = |of: Option<&Value>| {
        KEYS.iter().any(|key| of.and_then(|of| of.get(*key)).is_some_and(|v| !v.is_null()))
    };
    let whole = KEYS.iter().any(|key| config.get(*key).is_some_and(|v| !v.is_null()));
    if whole || stated(config.get("text_config")) {
        return Ok(None);
    }
    for (name, method) in BESIDE {
        let Some(mut json) = read_json(&folder.join(name))? else { continue };
        // NVIDIA's has it a level below.
        if let Some(settings) = json.get_mut("quantization").map(Value::take) {
            json = settings;
        }
        let Some(settings) = json.as_object_mut() else { continue };
        settings.entry("quant_method").or_insert(method.into());
        config.insert(KEYS[0].to_owned(), json);
        return Ok(Some(name));
    }
    Ok(None)
}

fn no_config(path: &Path) -> Error {
    if let Some(error) = adapter_alone(path) {
        return error;
    }
    let first = |extension: &str| files_ending(path, extension).ok()?.into_iter().next();
    let place = path.join(CONFIG);
    let error = |expected: &str| Error::new(place.display(), expected, "no such file");
    match (first("safetensors"), first("gguf")) {
        (Some(weights), _) => {
            error(&format!("the configuration of the weights in {}", clipped(&name_of(&weights))))
                .hint("fetch the whole model, its config.json among it")
        }
        (None, Some(gguf)) => error("a model's configuration")
            .hint(format!("the folder holds a GGUF file: open {}", gguf.display())),
        (None, None) => error("a model's configuration"),
    }
}

/// The settings of an adapter (LoRA and the like), as PEFT writes them.
const ADAPTER: &str = "adapter_config.json";
/// Its weights.
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// The error for a folder that holds an adapter and no model: it names the model that belongs to
/// it.
fn adapter_alone(folder: &Path) -> Option<Error> {
    let path = folder.join(ADAPTER);
    let settings = read_json(&path).ok()??;
    let error = Error::new(path.display(), "a model", "an adapter, which works on top of a model");
    let base = settings.get("base_model_name_or_path").and_then(Value::as_str);
    Some(match base {
        Some(base) => error.hint(format!("its model is {}", clipped(base))),
        None => error,
    })
}

/// The folder's files with an extension, in the order of their names.
fn files_ending(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let io = |e| Error::io(folder.display(), e);
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension() == Some(OsStr::new(extension)) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The first of the folder's weights by name that is a link to nothing.
fn broken_link(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let weights = |path: &PathBuf| path.extension() == Some(OsStr::new("safetensors"));
    entries.filter(weights).filter(|path| path.is_symlink() && !path.exists()).min()
}

/// Files and (file, tensor) places.
type Opened = (Vec<Safetensors>, Vec<(usize, usize)>);

/// The weights of a folder without an index.
fn open_all(folder: &Path) -> Result<Opened> {
    let single = folder.join(SINGLE);
    let mut paths =
        if single.is_file() { vec![single] } else { files_ending(folder, "safetensors")? };
    paths.retain(|path| path.file_name() != Some(OsStr::new(ADAPTER_WEIGHTS)));
    if paths.is_empty() {
        if let Some(error) = adapter_alone(folder) {
            return Err(error);
        }
        if let Some(link) = broken_link(folder) {
            let error = Error::new(link.display(), "weights", "a link to a file that is not there");
            return Err(error.hint("fetch the model again"));
        }
        let error = Error::new(folder.display(), "weights in *.safetensors", "none");
        let pickled = ["bin", "pt", "pth"]
            .iter()
            .any(|e| files_ending(folder, e).is_ok_and(|files| !files.is_empty()));
        return Err(if pickled {
            error.hint("convert the PyTorch checkpoint to safetensors")
        } else {
            error
        });
    }
    let files = paths.iter().map(|path| Safetensors::open(path)).collect::<Result<Vec<_>>>()?;
    let places = files
        .iter()
        .enumerate()
        .flat_map(|(f, file)| (0..file.header().tensors.len()).map(move |t| (f, t)))
        .collect();
    Ok((files, places))
}

/// The first file in an index's order that the index lists within the folder and that is not there.
fn missing_shard(folder: &Path, index: &Value) -> Option<String> {
    let shards = index.get("weight_map")?.as_object()?.values().filter_map(Value::as_str);
    let missing =
        |shard: &&str| check_shard_name(shard, folder).is_ok() && !folder.join(shard).exists();
    shards.into_iter().find(missing).map(clipped)
}

/// The weights that an index lists. Tensors of a shard that the index does not list are left out.
fn open_indexed(folder: &Path, index: &Path, json: &Value) -> Result<Opened> {
    let place = index.display();
    let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
        return Err(Error::new(format!("{place}: weight_map"), "an object", "none"));
    };
    if map.is_empty() {
        return Err(Error::new(format!("{place}: weight_map"), "tensors and their files", "none"));
    }
    let mut files: Vec<Safetensors> = Vec::new();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    let mut wanted = Vec::with_capacity(map.len());
    for (tensor, shard) in map {
        let Some(shard) = shard.as_str() else {
            let place = format!("{place}: weight_map: {}", clipped(tensor));
            return Err(Error::new(place, "the name of a file", "another value"));
        };
        let number = match numbers.get(shard) {
            Some(&number) => number,
            None => {
                check_shard_name(shard, index)?;
                let path = folder.join(shard);
                files.push(
                    Safetensors::open(&path)
                        .map_err(|e| e.hint(format!("{} lists this file", name_of(index))))?,
                );
                numbers.insert(shard, files.len() - 1);
                files.len() - 1
            }
        };
        wanted.push((number, tensor.as_str()));
    }
    let tables: Vec<HashMap<&str, usize>> = files
        .iter()
        .map(|file| {
            file.header()
                .tensors
                .iter()
                .enumerate()
                .map(|(t, info)| (info.name.as_str(), t))
                .collect()
        })
        .collect();
    let mut places = Vec::with_capacity(wanted.len());
    for (number, tensor) in wanted {
        match tables[number].get(tensor) {
            Some(&t) => places.push((number, t)),
            None => {
                let index = name_of(index);
                let expected = format!("tensor {}, which {index} places here", clipped(tensor));
                return Err(Error::new(files[number].path().display(), expected, "no such tensor"));
            }
        }
    }
    Ok((files, places))
}

/// A file's name.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A shard must be a plain file name: an index must not reach outside its folder.
fn check_shard_name(shard: &str, index: &Path) -> Result<()> {
    let mut components = Path::new(shard).components();
    let plain =
        matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    if plain && !shard.contains(['/', '\\', ':', '\0']) && shard.ends_with(".safetensors") {
        return Ok(());
    }
    Err(Error::new(
        format!("{}: weight_map", index.display()),
        "shards named NAME.safetensors inside the folder",
        clipped(shard),
    ))
}
