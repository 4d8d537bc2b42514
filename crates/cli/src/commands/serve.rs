//! `delft serve`: models over HTTP, until a signal ends it.

mod tuned;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use delft::hub::BUNDLED;
use delft::hub::{Hub, LocalModel, ModelSource};
use delft::{DeviceSpec, Engine, Error};
use serve::{AccessRules, GenerationLimits, Keep, Library, Named, Served, Server, ServerConfig};

use crate::args::{LoadArgs, ModelArg, Serve};
use crate::load::{self, Embeds};
use crate::terminal::{Outcome, Stop, aside, harmless, note, read_file};

pub(crate) fn run(args: &Serve) -> Outcome {
    // Threads of requests come and go: a thousand connections left 156 to 175 MiB, with shared
    // heaps 95 to 100.
    delft::share_heaps();
    survive_panics();
    if !args.load.adapter.is_empty() && args.models.len() > 1 {
        let found = format!("{} models", args.models.len());
        return Err(Error::new("--adapter", "one model, which the adapter is for", found).into());
    }
    let config = ServerConfig {
        address: (args.host, args.port).into(),
        access: AccessRules {
            keys: keys(args)?,
            admin_keys: keys_of(&args.admin_key_file)?,
            origins: args.cors.clone(),
            hosts: args.allow_host.clone(),
        },
        insecure: args.insecure_public,
        limits: GenerationLimits {
            parallel: args.parallel as usize,
            queue: args.queue as usize,
            time: Duration::from_secs(args.timeout),
            tokens: args.max_tokens.map(|n| n as usize),
        },
        drain: Duration::from_secs(args.drain),
        library: Library::default(),
        record: args.record.clone(),
        sessions: args.sessions.clone(),
    };
    let keys = "a key (--api-key-file, DELFT_API_KEY), or --insecure-public for everyone";
    config.check().map_err(|error| error.hint(keys))?;
    config.check_address()?;
    if args.models.is_empty() {
        load::have_effect_later(&args.load)?;
    }
    let tuning = tuned::Tuning::of(args)?;
    let mut library = library(args)?;
    library.check()?;
    if let Some(tuning) = &tuning {
        tuning.room(&mut library.options.adapters);
    }
    let config = ServerConfig { library, ..config };
    let served = load_named(args, &config.library, tuning.is_some(), Vec::new())?;
    let mut shown: Vec<String> =
        config.library.named.iter().flat_map(Named::names).map(|name| harmless(name)).collect();
    shown.extend(tuning.as_ref().map(|tuning| harmless(&tuning.name())));
    let first = served.first().map(|first| (first.engines.clone(), first.name.clone()));
    let server = Server::bind(config, served)?;
    let line = format!("serving {} at http://{}", shown.join(", "), server.address()?);
    let begun = tuning
        .zip(first)
        .map(|(tuning, (engines, of))| tuning.begin(engines, server.adapted(), of));
    let outcome = server.run(|| note(line));
    if let Some(begun) = begun {
        begun.end();
    }
    Ok(outcome?)
}

/// The models that may be loaded: those that the command line names, else the bundled one and the
/// store.
fn library(args: &Serve) -> Outcome<Library> {
    let (context, sessions) = (args.load.ctx.map(|n| n as usize), Some(args.parallel as usize));
    let adapters = |model: &str| -> Vec<_> {
        let of = |arg| (load::adapter_name(arg), load::adapter(arg, args.load.any_base));
        let first = args.models.first().is_none_or(|first| *first == model);
        args.load.adapter.iter().filter(|_| first).map(of).collect()
    };
    let mut named: Vec<Named> = Vec::new();
    for word in &args.models {
        let Word { name, model, device } = Word::of(word);
        let found =
            load::find(&ModelArg { model: Some(model.clone()), ..args.load.model.clone() })?;
        let own = || match found.source {
            // As it was asked for: clients ask for the same.
            ModelSource::Hub { .. } => model.clone(),
            ModelSource::Local => found.name(),
            ModelSource::Bundled => BUNDLED.to_string(),
        };
        let name = name.unwrap_or_else(own);
        let again = named
            .iter_mut()
            .find(|named| named.name == name && named.model == found && !named.devices.is_empty());
        match (again, device) {
            (Some(named), Some(device)) => named.devices.push(device),
            _ => named.push(Named {
                name,
                model: found,
                devices: device.into_iter().collect(),
                adapters: adapters(word),
            }),
        }
    }
    let hub = if args.models.is_empty() { Hub::from_env().ok() } else { None };
    if args.models.is_empty()
        && let Ok(model) = LocalModel::bundled()
    {
        let (name, devices) = (BUNDLED.to_string(), Vec::new());
        named.push(Named { name, model, devices, adapters: adapters("") });
    }
    Ok(Library {
        named,
        hub,
        options: load::options(&args.load, context, sessions),
        embeddings: args.embeddings,
        templates: args.template.as_deref().map(template).transpose()?,
        memory: args.memory,
        canary: delft::folder_of_user(),
        keep_named: args.keep_alive.unwrap_or(Keep::Always),
        keep: args.keep_alive.unwrap_or(Keep::USUAL),
    })
}

/// Loads the models that the command line names, the later ones as far as there is memory beside
/// the first, which must fit `--memory`.
fn load_named(
    args: &Serve,
    library: &Library,
    tuned: bool,
    mut served: Vec<Served>,
) -> Outcome<Vec<Served>> {
    let (context, sessions) = (args.load.ctx.map(|n| n as usize), Some(args.parallel as usize));
    let embeds = if args.embeddings { Embeds::Always(None) } else { Embeds::IfStated };
    if let Some(named) = library.named.first().filter(|_| tuned) {
        let load = |&device: &DeviceSpec| {
            library.within(named, device)?;
            Engine::load(named.model.location.clone(), &library.options_of(named, device)?)
        };
        let engines = library.devices_of(named).iter().map(load).collect::<delft::Result<_>>()?;
        return Ok(vec![library.served(named, engines)]);
    }
    let mut others: Vec<Engine> = Vec::new();
    for named in library.named.iter().filter(|_| !args.models.is_empty()) {
        let mut engines = Vec::new();
        for &device in library.devices_of(named) {
            let first = others.is_empty() && engines.is_empty();
            if first {
                library.within(named, device)?;
            }
            let loaded: Vec<_> = others.iter().chain(&engines).cloned().collect();
            if !first && !library.has_room(named, device, &loaded)? {
                let name = harmless(&named.name);
                aside(format_args!(
                    "{name}: loaded when a request names it, for which others give way"
                ));
                engines.clear();
                break;
            }
            let mut load = LoadArgs { device, ..args.load.clone() };
            if named.adapters.is_empty() {
                load.adapter.clear();
            }
            let model = named.model.clone();
            engines.push(load::found(&load, model, context, sessions, embeds, args.verbose)?);
        }
        if !engines.is_empty() {
            others.extend_from_slice(&engines);
            served.push(library.served(named, engines));
        }
    }
    Ok(served)
}

/// A model on the command line: `[NAME=]MODEL[@DEVICE]`.
struct Word {
    name: Option<String>,
    model: String,
    device: Option<DeviceSpec>,
}

impl Word {
    /// A name that is a file is neither an alias nor a device's.
    fn of(word: &str) -> Word {
        let is_file = |word: &str| Path::new(word).exists();
        let (name, rest) = match word.split_once('=') {
            Some((name, rest)) if !name.is_empty() && !name.contains('/') && !is_file(word) => {
                (Some(name.to_string()), rest)
            }
            _ => (None, word),
        };
        let (model, device) = match rest.rsplit_once('@') {
            Some((model, place)) if !is_file(rest) => match place.parse() {
                Ok(device) => (model, Some(device)),
                // A revision of a repository.
                Err(_) => (rest, None),
            },
            _ => (rest, None),
        };
        Word { name, model: model.to_string(), device }
    }
}

/// The keys of flags, files and the environment.
fn keys(args: &Serve) -> Outcome<Vec<String>> {
    let mut keys = args.api_key.clone();
    keys.extend(keys_of(&args.api_key_file)?);
    keys.extend(std::env::var("DELFT_API_KEY").ok().filter(|key| !key.is_empty()));
    check_keys(keys)
}

/// The keys of some files, one on each line.
fn keys_of(files: &[PathBuf]) -> Outcome<Vec<String>> {
    let mut keys = Vec::new();
    for path in files {
        let text = read_file(path)?;
        let lines = text.lines().map(str::trim);
        let own = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let before = keys.len();
        keys.extend(own.map(String::from));
        if keys.len() == before {
            return Err(Error::new(path.display(), "a key on a line", "none").into());
        }
    }
    check_keys(keys)
}

/// Refuses keys that no header can hold.
fn check_keys(keys: Vec<String>) -> Outcome<Vec<String>> {
    let odd = |key: &String| key.is_empty() || !key.chars().all(|c| c.is_ascii_graphic());
    // Its value is a secret, and stays out of the message.
    if keys.iter().any(odd) {
        let found = "an empty one, or one with other characters";
        return Err(Stop::Usage(
            Error::new("--api-key", "visible ASCII characters without blanks", found).to_string(),
        ));
    }
    Ok(keys)
}

/// A chat template from a file.
fn template(path: &Path) -> Outcome<BTreeMap<String, String>> {
    Ok(BTreeMap::from([("default".to_string(), read_file(path)?)]))
}

/// A panic is told in one line and ends the request that met it; the others go on.
fn survive_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let words = harmless(delft::formats::words_of(panic.payload()));
        note(format_args!("delft: internal error: {words} (hint: please report this)"));
    }));
}
