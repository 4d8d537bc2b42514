//! `delft serve`: models over HTTP, until a signal ends it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use delft::Error;
use delft::hub::{Hub, Model, Source};
use serve::{Access, Config, Keep, Library, Limits, Named, Served, Server};

use crate::args::{ModelArg, Serve};
use crate::load::{self, Embeds};
use crate::terminal::{Outcome, Stop, aside, harmless, note, read_file};

/// The bundled model's name in requests.
const BUNDLED: &str = "delft-stories";

pub(crate) fn run(args: &Serve) -> Outcome {
    // Threads of requests come and go: a thousand connections left 156 to 175 MiB, with shared heaps 95 to 100.
    delft::share_heaps();
    survive_panics();
    if !args.load.adapter.is_empty() && args.models.len() > 1 {
        let found = format!("{} models", args.models.len());
        return Err(Error::new("--adapter", "one model, which the adapter is for", found).into());
    }
    let config = Config {
        address: (args.host, args.port).into(),
        access: Access {
            keys: keys(args)?,
            admin_keys: keys_of(&args.admin_key_file)?,
            origins: args.cors.clone(),
            hosts: args.allow_host.clone(),
        },
        insecure: args.insecure_public,
        limits: Limits {
            parallel: args.parallel as usize,
            queue: args.queue as usize,
            time: Duration::from_secs(args.timeout),
        },
        drain: Duration::from_secs(args.drain),
        library: Library::default(),
        record: args.record.clone(),
    };
    let keys = "a key (--api-key-file, DELFT_API_KEY), or --insecure-public for everyone";
    config.check().map_err(|error| error.hint(keys))?;
    let (config, served) = (Config { library: library(args)?, ..config }, Vec::new());
    let served = load_named(args, &config.library, served)?;
    let shown: Vec<String> =
        config.library.named.iter().flat_map(Named::names).map(|name| harmless(name)).collect();
    let server = Server::bind(config, served)?;
    let line = format!("serving {} at http://{}", shown.join(", "), server.address()?);
    Ok(server.run(|| note(line))?)
}

/// The models that may be loaded: those that the command line names, else the bundled one and the store.
fn library(args: &Serve) -> Outcome<Library> {
    let (context, sessions) = (args.load.ctx.map(|n| n as usize), Some(args.parallel as usize));
    let adapters = |model: &str| -> Vec<_> {
        let of = |arg| (load::adapter_name(arg), load::adapter(arg));
        let first = args.models.first().is_none_or(|first| *first == model);
        args.load.adapter.iter().filter(|_| first).map(of).collect()
    };
    let mut named = Vec::new();
    for word in &args.models {
        let (name, model) = alias(word);
        let found =
            load::find(&ModelArg { model: Some(model.clone()), ..args.load.model.clone() })?;
        let own = || match found.source {
            // As it was asked for: clients ask for the same.
            Source::Hub { .. } => model.clone(),
            Source::Local | Source::Bundled => found.name(),
        };
        let name = name.unwrap_or_else(own);
        named.push(Named { name, model: found, adapters: adapters(word) });
    }
    let hub = if args.models.is_empty() { Hub::from_env().ok() } else { None };
    if args.models.is_empty()
        && let Ok(model) = Model::bundled()
    {
        named.push(Named { name: BUNDLED.to_string(), model, adapters: adapters("") });
    }
    Ok(Library {
        named,
        hub,
        options: load::options(&args.load, context, sessions),
        embeddings: args.embeddings,
        templates: args.template.as_deref().map(template).transpose()?,
        memory: args.memory,
        keep_named: args.keep_alive.unwrap_or(Keep::Always),
        keep: args.keep_alive.unwrap_or(Keep::USUAL),
    })
}

/// Loads the models that the command line names, the later ones as far as there is memory beside the first.
fn load_named(args: &Serve, library: &Library, mut served: Vec<Served>) -> Outcome<Vec<Served>> {
    let (context, sessions) = (args.load.ctx.map(|n| n as usize), Some(args.parallel as usize));
    let embeds = if args.embeddings { Embeds::Always(None) } else { Embeds::IfStated };
    for (named, word) in library.named.iter().zip(&args.models) {
        let engines: Vec<_> = served.iter().map(|served| served.engine.clone()).collect();
        let later = !engines.is_empty() && !library.has_room(named, &engines)?;
        if later {
            let name = harmless(&named.name);
            aside(format_args!(
                "{name}: loaded when a request names it, for which others give way"
            ));
            continue;
        }
        let mut load = args.load.clone();
        load.model.model = Some(alias(word).1);
        if named.adapters.is_empty() {
            load.adapter.clear();
        }
        let (engine, _) = load::engine_with(&load, context, sessions, embeds, args.verbose)?;
        let adapters = named.adapters.iter().zip(engine.adapters());
        let adapters = adapters.map(|((name, _), adapter)| (name.clone(), adapter.clone()));
        let (name, templates) = (named.name.clone(), library.templates.clone());
        served.push(Served { name, adapters: adapters.collect(), templates, engine });
    }
    Ok(served)
}

/// `NAME=MODEL`, or a model alone. What is a file is no alias, whatever it is called.
fn alias(word: &str) -> (Option<String>, String) {
    match word.split_once('=') {
        Some((name, model))
            if !name.is_empty() && !name.contains('/') && !Path::new(word).exists() =>
        {
            (Some(name.to_string()), model.to_string())
        }
        _ => (None, word.to_string()),
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
