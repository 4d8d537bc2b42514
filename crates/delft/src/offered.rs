//! Whether a model that a hub offers is one that could be run, before its weights come.

use formats::{Error, Result};
use hub::{Offer, Preview, PullProgress};

/// Why a model could not be run, by its configuration or the first keys of its file; nothing to say
/// of one that could, or that is here already.
///
/// # Errors
/// The network's.
pub fn objection(offer: &Offer<'_>, progress: &dyn PullProgress) -> Result<Option<Error>> {
    if offer.missing() == 0 {
        return Ok(None);
    }
    let file = offer.file().unwrap_or("config.json");
    let place = format!("{}: {file}", offer.id());
    let verdict = match offer.preview(progress)? {
        Some(Preview::Config(json)) => {
            let options = engine::models::ReadOptions::default();
            engine::models::check_json(&json, &place, &options)
        }
        Some(Preview::Gguf(keys)) => engine::models::check_gguf(&keys, &place),
        None => Ok(()),
    };
    Ok(verdict.err())
}
