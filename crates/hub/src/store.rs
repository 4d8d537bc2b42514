//! The models that a cache holds whole, under the names by which they are asked for: what a server
//! offers to strangers, who may name models of the cache and never paths.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use formats::{Error, Result};

use crate::names::Names;
use crate::{Container, Found, Hub, HubName, LocalModel, cache, choose, spec};

/// A model of the cache that could be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredModel {
    /// A short name that leads to it, or its hub id with what tells it from others of the
    /// repository.
    pub name: String,
    /// Where it lies.
    pub model: LocalModel,
    /// Bytes of its files.
    pub bytes: u64,
    /// When it was fetched.
    pub modified: Option<SystemTime>,
    /// The commit that it is of; empty for a path of the user's own file of names.
    pub commit: String,
}

impl Hub {
    /// The models that are here whole, by name: each once under a short name if one leads to it,
    /// else under its hub id, and once more under each further name that the user gave it.
    ///
    /// # Errors
    /// A cache or a file of names that cannot be read.
    pub fn stored(&self) -> Result<Vec<StoredModel>> {
        let names = self.names()?;
        let mut short: BTreeMap<PathBuf, Vec<(bool, String)>> = BTreeMap::new();
        let built_in = Names::built_in()?;
        for name in names.all() {
            let own = names.expand(&name) != built_in.expand(&name);
            if let Some(path) = self.by_short_name(&names, &name) {
                short.entry(path).or_default().push((own, name));
            }
        }
        let mut all = Vec::new();
        for model in self.of_cache()? {
            let names = model.model.path().and_then(|path| short.remove(path)).unwrap_or_default();
            all.extend(named(model, names));
        }
        // What is left is of the user's own paths.
        for (path, names) in short {
            let Ok(model) = crate::local(&path) else { continue };
            let files = fs::metadata(&path).ok();
            let bytes = files.as_ref().map_or(0, fs::Metadata::len);
            let modified = files.and_then(|files| files.modified().ok());
            let of = |(_, name)| StoredModel {
                name,
                model: model.clone(),
                bytes,
                modified,
                commit: String::new(),
            };
            all.extend(names.into_iter().map(of));
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The model of the cache, or of the user's own file of names, that a stranger's word names: a
    /// short name or a hub id, never a path.
    ///
    /// # Errors
    /// A cache or a file of names that cannot be read, and an id that leaves open which file is
    /// meant.
    pub fn find_stored(&self, name: &str) -> Result<Option<LocalModel>> {
        let target = self.names()?.expand(name);
        let of_user = target.as_deref().is_some_and(spec::is_surely_path);
        if let (true, Some(path)) = (of_user, &target) {
            return crate::local(&self.own_path(path)).map(Some);
        }
        let text = target.unwrap_or_else(|| name.to_string());
        let parsed = if spec::is_surely_path(&text) { None } else { HubName::parse(&text).ok() };
        let Some(spec) = parsed else { return Ok(None) };
        match cache::find(self, &spec, name)? {
            Found::Here(model) => Ok(Some(model)),
            Found::Absent(_) => Ok(None),
        }
    }

    /// Gives a model of the cache a further name, in the user's file of names, which is made if
    /// there is none.
    ///
    /// # Errors
    /// A model that is not here, a name that is taken or is no short name, and a file that cannot
    /// be written.
    pub fn add_name(&mut self, name: &str, model: &str) -> Result<()> {
        let found = self.find_stored(model)?;
        let known = self.stored()?;
        let stored = known.iter().find(|stored| Some(&stored.model) == found.as_ref());
        let stored = stored.ok_or_else(|| {
            Error::new(model, "a model in the cache", "none").hint("see delft list")
        })?;
        let names = self.names()?;
        if names.expand(name).is_some() || name.contains('/') {
            let expected = "a name that is not taken, of letters, digits, -, _ and .";
            return Err(Error::new(name, expected, "another"));
        }
        let target = names.expand(&stored.name).unwrap_or_else(|| stored.name.clone());
        let (file, text) = self.file_of_names()?;
        // Keys that belong to no table stand before all tables.
        let text = format!("{}{text}", line_of(name, &target));
        check_names(name, &text, &file)?;
        write(&file, &text)?;
        self.models = Some(file);
        Ok(())
    }

    /// Takes a name out of the user's file of names that [`Hub::add_name`] put there; false if it
    /// is not one of these.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn remove_name(&self, name: &str) -> Result<bool> {
        let Some(target) = self.names()?.expand(name) else { return Ok(false) };
        let (file, text) = self.file_of_names()?;
        let line = line_of(name, &target);
        let Some(rest) = text.find(&line).map(|at| {
            let (before, after) = text.split_at(at);
            format!("{before}{}", &after[line.len()..])
        }) else {
            return Ok(false);
        };
        write(&file, &rest)?;
        Ok(true)
    }

    /// The user's file of names and its text, which is empty where there is no file yet.
    fn file_of_names(&self) -> Result<(PathBuf, String)> {
        let usual = || cache::names_file(&|name| std::env::var(name).ok());
        let file = self.models.clone().or_else(usual).ok_or_else(|| {
            Error::new("names", "a file for names of models", "none").hint("set DELFT_MODELS")
        })?;
        match fs::read_to_string(&file) {
            Ok(text) => Ok((file, text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok((file, String::new())),
            Err(error) => Err(Error::io(file.display(), error)),
        }
    }

    /// Where a short name leads to, if that is here.
    fn by_short_name(&self, names: &Names, name: &str) -> Option<PathBuf> {
        let target = names.expand(name)?;
        if spec::is_surely_path(&target) {
            let path = self.own_path(&target);
            return crate::likeness::holds_model(&path).then_some(path);
        }
        let spec = HubName::parse(&target).ok().filter(|spec| self.has(spec))?;
        match cache::find(self, &spec, name) {
            Ok(Found::Here(model)) => model.path().map(Path::to_path_buf),
            _ => None,
        }
    }

    /// The whole models of the cache, under their hub ids.
    fn of_cache(&self) -> Result<Vec<StoredModel>> {
        let mut all = Vec::new();
        for cached in cache::list(self)? {
            let Some(kind) = cached.kind else { continue };
            let revision = match cached.refs.first() {
                _ if cached.refs.iter().any(|name| name == "main") => String::new(),
                Some(name) => format!("@{name}"),
                None => format!("@{}", cached.commit),
            };
            let files: Vec<String> = cached.files.iter().map(|file| file.name.clone()).collect();
            let size = |name: &str| {
                cached.files.iter().find(|file| file.name == name).map_or(0, |file| file.size)
            };
            let sets = match kind {
                Container::Folder => vec![(cached.id.clone(), cached.bytes)],
                Container::Gguf => choose::sets(&files)
                    .iter()
                    .map(|set| {
                        let bytes = set.iter().map(|name| size(name)).sum();
                        (format!("{}:{}", cached.id, choose::told_by(set, &files)), bytes)
                    })
                    .collect(),
            };
            for (name, bytes) in sets {
                let name = name + &revision;
                let found = HubName::parse(&name).and_then(|spec| cache::find(self, &spec, &name));
                if let Ok(Found::Here(model)) = found {
                    let (modified, commit) = (cached.modified, cached.commit.clone());
                    all.push(StoredModel { name, model, bytes, modified, commit });
                }
            }
        }
        Ok(all)
    }
}

/// A model under its short names: the first of the program's own, and all that the user gave it.
fn named(model: StoredModel, names: Vec<(bool, String)>) -> Vec<StoredModel> {
    let (own, built_in): (Vec<_>, Vec<_>) = names.into_iter().partition(|(own, _)| *own);
    // A family with its tag says more than the family alone.
    let plain = built_in.iter().find(|(_, name)| name.contains(':')).or(built_in.first());
    let plain = plain.map_or(model.name.clone(), |(_, name)| name.clone());
    let under = |name: String| StoredModel { name, ..model.clone() };
    let own = own.into_iter().map(|(_, name)| name).filter(|name| *name != plain);
    std::iter::once(plain.clone()).chain(own).map(under).collect()
}

/// The line of a file of names that gives a model a name.
fn line_of(name: &str, target: &str) -> String {
    let quoted = |text: &str| format!("{text:?}");
    let key = match name.split_once(':') {
        Some((family, tag)) => format!("{}.{}", quoted(family), quoted(tag)),
        None => quoted(name),
    };
    format!("{key} = {}\n", quoted(target))
}

/// Checks that a file's text would be read, and has the name.
fn check_names(name: &str, text: &str, file: &Path) -> Result<()> {
    let names = Names::of_text(text, &file.display().to_string())?;
    match names.expand(name) {
        Some(_) => Ok(()),
        None => Err(Error::new(name, "a name of letters, digits, -, _ and .", "another")),
    }
}

/// Replaces a file's text in one step.
fn write(file: &Path, text: &str) -> Result<()> {
    let fail = |error| Error::io(file.display(), error);
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(fail)?;
    }
    let aside = file.with_extension(format!("{}.new", std::process::id()));
    fs::write(&aside, text).map_err(fail)?;
    fs::rename(&aside, file).map_err(fail)
}
