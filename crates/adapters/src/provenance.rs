//! `delft.json`, which `delft tune` writes beside an adapter: the base and data it was made with.
//! Adapters made by other programs have none.

use formats::{Error, Result, json};
use serde_json::Value;
use std::path::Path;

const NAME: &str = "delft.json";
/// No file of it is longer: it may have the number of every line that was held out.
const MOST: u64 = 64 << 20;

/// The model that an adapter was made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeFor {
    /// Its name then.
    pub name: String,
    /// Its fingerprint.
    pub fingerprint: String,
}

/// The content of the file in an adapter's folder, if there is one.
pub(crate) fn read(folder: &Path) -> Result<Option<MadeFor>> {
    let file = folder.join(NAME);
    let Some(json) = json::find(&file, MOST)? else { return Ok(None) };
    let said = |key: &str| json.get("made_of")?.get(key).and_then(Value::as_str);
    let wrong = |key: &str| {
        let place = format!("{}: made_of.{key}", file.display());
        Error::new(place, "the model that the adapter was made for", "none")
    };
    let fingerprint = said("model_fingerprint").ok_or_else(|| wrong("model_fingerprint"))?;
    let name = said("model").ok_or_else(|| wrong("model"))?;
    Ok(Some(MadeFor { name: name.to_owned(), fingerprint: fingerprint.to_owned() }))
}

/// Copies the file of an adapter's folder, if there is one, to another folder.
pub(crate) fn copy(from: Option<&Path>, to: &Path) -> Result<()> {
    let Some(file) = from.map(|folder| folder.join(NAME)).filter(|file| file.is_file()) else {
        return Ok(());
    };
    std::fs::copy(&file, to.join(NAME)).map_err(|e| Error::io(file.display(), e))?;
    Ok(())
}
