//! `delft serve`: models over HTTP, until a signal ends it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use delft::Error;
use serve::{Access, Config, Limits, Served, Server};

use crate::args::Serve;
use crate::load::{self, Embeds};
use crate::terminal::{Outcome, Stop, harmless, note, read_file};

/// The bundled model's name in requests.
const BUNDLED: &str = "delft-stories";

pub(crate) fn run(args: &Serve) -> Outcome {
    survive_panics();
    if !args.load.adapter.is_empty() && args.models.len() > 1 {
        let found = format!("{} models", args.models.len());
        return Err(Error::new("--adapter", "one model, which the adapter is for", found).into());
    }
    let config = Config {
        address: (args.host, args.port).into(),
        access: Access {
            keys: keys(args)?,
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
    };
    let keys = "a key (--api-key-file, DELFT_API_KEY), or --insecure-public for everyone";
    config.check().map_err(|error| error.hint(keys))?;
    let templates = args.template.as_deref().map(template).transpose()?;
    let embeds = if args.embeddings { Embeds::Always(None) } else { Embeds::IfStated };
    let mut models = Vec::new();
    for named in names(&args.models) {
        let (name, model) = match named {
            Some(word) => {
                let (name, model) = alias(&word);
                (name, Some(model))
            }
            None => (None, None),
        };
        let mut load = args.load.clone();
        load.model.model = model;
        let (context, sessions) = (load.ctx.map(|n| n as usize), Some(args.parallel as usize));
        let (engine, found) = load::engine_with(&load, context, sessions, embeds, args.verbose)?;
        let own = || if load.model.model.is_none() { BUNDLED.to_string() } else { found.name() };
        let name = name.unwrap_or_else(own);
        let adapters = args.load.adapter.iter().zip(engine.adapters());
        let adapters = adapters.map(|(arg, adapter)| (load::adapter_name(arg), adapter.clone()));
        let (adapters, templates) = (adapters.collect(), templates.clone());
        models.push(Served { name, engine, templates, adapters });
    }
    let adapted = |model: &Served| model.adapters.iter().map(|(name, _)| name.clone()).collect();
    let names = models.iter().flat_map(|model| {
        let adapted: Vec<String> = adapted(model);
        std::iter::once(model.name.clone()).chain(adapted).map(|name| harmless(&name))
    });
    let names: Vec<String> = names.collect();
    let server = Server::bind(config, models)?;
    note(format_args!("serving {} at http://{}", names.join(", "), server.address()?));
    Ok(server.run()?)
}

/// The models that the command line names; one that is not named is the bundled one.
fn names(models: &[String]) -> Vec<Option<String>> {
    if models.is_empty() {
        return vec![None];
    }
    models.iter().cloned().map(Some).collect()
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
    for path in &args.api_key_file {
        let text = read_file(path)?;
        let lines = text.lines().map(str::trim);
        keys.extend(
            lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from),
        );
        if keys.is_empty() {
            return Err(Error::new(path.display(), "a key on a line", "none").into());
        }
    }
    keys.extend(std::env::var("DELFT_API_KEY").ok().filter(|key| !key.is_empty()));
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
