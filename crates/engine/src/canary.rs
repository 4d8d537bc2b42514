//! The logits of a few tokens, compared with the last good load of the same model in the same
//! place: a file, a driver or a build that makes something else of a model is noticed before
//! anybody relies on it.

use std::fs;
use std::path::{Path, PathBuf};

use formats::{Aside, Error, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::load::Engine;
use crate::session::LogitRows;

/// Tokens that are computed.
const TOKENS: u32 = 8;
/// Logits of each that are kept, evenly spread over the vocabulary.
const KEPT: usize = 32;
/// By how much of their range logits may differ.
const TOLERANCE: f32 = 1e-3;
/// Longest file of a last good load, in bytes; it has some thousands.
const LONGEST: u64 = 1 << 20;

/// A load of a model: what identifies it, and logits that it computed.
#[derive(Debug, Clone, PartialEq)]
struct Load {
    fingerprint: String,
    driver: String,
    build: String,
    logits: Vec<f32>,
}

impl Load {
    fn from_json(value: &Value) -> Option<Load> {
        let text = |key: &str| value.get(key)?.as_str().map(str::to_string);
        let logits = value.get("logits")?.as_array()?.iter();
        let logits = logits.map(|logit| logit.as_f64().map(|logit| logit as f32));
        Some(Load {
            fingerprint: text("fingerprint")?,
            driver: text("driver")?,
            build: text("build")?,
            logits: logits.collect::<Option<_>>()?,
        })
    }

    fn to_json(&self) -> Value {
        json!({
            "fingerprint": self.fingerprint,
            "driver": self.driver,
            "build": self.build,
            "logits": self.logits,
        })
    }

    /// The greatest difference of two loads' logits, as a part of the range of the first's.
    fn distance(&self, other: &Load) -> f32 {
        if self.logits.len() != other.logits.len() {
            return f32::INFINITY;
        }
        let ends = |(least, most): (f32, f32), &logit: &f32| (logit.min(least), logit.max(most));
        let (least, most) = self.logits.iter().fold((f32::INFINITY, f32::NEG_INFINITY), ends);
        let pairs = self.logits.iter().zip(&other.logits);
        let greatest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        greatest / (most - least).max(f32::MIN_POSITIVE)
    }

    /// Names what has changed since this load, which may be why `now` computes something else.
    fn changed(&self, now: &Load) -> String {
        if self.fingerprint != now.fingerprint {
            return "the model's file has changed".to_string();
        }
        let changes = [("driver", &self.driver, &now.driver), ("build", &self.build, &now.build)];
        let changed = changes.into_iter().filter(|(_, was, is)| was != is);
        let changed: Vec<String> = changed
            .map(|(what, was, is)| format!("the {what} has changed ({was}, now {is})"))
            .collect();
        if changed.is_empty() {
            return "neither its file nor the driver nor the build has changed".to_string();
        }
        changed.join(" and ")
    }
}

impl Engine {
    /// Computes a few tokens, and compares their logits with the last good load of this model on
    /// the same device, which `folder` keeps: a line if they differ by more than 1e-3 of their
    /// range. A load that differs is a good one from then on if the model's file has changed, else
    /// not. `build` is what tells this program from others.
    ///
    /// # Errors
    /// If the device fails. A folder that cannot be read or written has no last good load.
    pub fn canary(&self, folder: &Path, build: &str) -> Result<Option<String>> {
        let now = self.load_now(build)?;
        let path = self.canary_file(folder);
        let Some(last) = read(&path) else {
            // A load that cannot be kept is compared with none the next time.
            drop(write(&path, &now));
            return Ok(None);
        };
        let distance = last.distance(&now);
        if distance <= TOLERANCE {
            if last != now {
                drop(write(&path, &now));
            }
            return Ok(None);
        }
        let why = last.changed(&now);
        let accept = if last.fingerprint == now.fingerprint {
            format!(" (hint: remove {} to take this load for a good one)", path.display())
        } else {
            drop(write(&path, &now));
            String::new()
        };
        Ok(Some(format!(
            "its logits differ from those of the last good load by {distance:.1e} of their range: {why}{accept}"
        )))
    }

    fn load_now(&self, build: &str) -> Result<Load> {
        let vocab = self.info().vocab.max(1) as u32;
        let tokens: Vec<u32> = (1..=TOKENS).map(|i| (vocab / (TOKENS + 1) * i) % vocab).collect();
        let logits = self.session().logits(&tokens, LogitRows::All)?;
        let step = logits.vocab.div_ceil(KEPT).max(1);
        let kept: Vec<f32> =
            logits.rows().flat_map(|row| row.iter().step_by(step)).copied().collect();
        if let Some(bad) = kept.iter().find(|logit| !logit.is_finite()) {
            return Err(Error::new("logits of a few tokens", "finite numbers", bad));
        }
        Ok(Load {
            fingerprint: self.fingerprint().to_string(),
            driver: self.info().device.driver.clone(),
            build: build.to_string(),
            logits: kept,
        })
    }

    /// The file that keeps the last good load. Its name follows from the model's path and from
    /// everything that the logits depend on, except the model's file, the driver and the build.
    fn canary_file(&self, folder: &Path) -> PathBuf {
        let (device, options) = (&self.info().device, &self.0.options);
        let place = format!(
            "{}\n{} {} {:?} {} {:?}",
            self.location(),
            device.name,
            device.isa,
            options.cache_type,
            options.batched,
            options.ending
        );
        let digest = Sha256::digest(place.as_bytes());
        let name: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        folder.join("loads").join(format!("{name}.json"))
    }
}

/// The load that a file tells of; a file that tells of none is as good as absent.
fn read(path: &Path) -> Option<Load> {
    if fs::metadata(path).ok()?.len() > LONGEST {
        return None;
    }
    Load::from_json(&serde_json::from_slice(&fs::read(path).ok()?).ok()?)
}

fn write(path: &Path, load: &Load) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|error| Error::io(folder.display(), error))?;
    Aside::whole(path, load.to_json().to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(logits: &[f32]) -> Load {
        let text = |text: &str| text.to_string();
        let (fingerprint, driver, build) = (text("ab"), text("13.0"), text("0.1.0"));
        Load { fingerprint, driver, build, logits: logits.to_vec() }
    }

    #[test]
    fn what_has_changed_is_named() {
        let was = load(&[0.0, 1.0]);
        let driver = Load { driver: "13.1".to_string(), ..was.clone() };
        assert_eq!(was.changed(&driver), "the driver has changed (13.0, now 13.1)");
        let both = Load { build: "0.2.0".to_string(), ..driver };
        let told =
            "the driver has changed (13.0, now 13.1) and the build has changed (0.1.0, now 0.2.0)";
        assert_eq!(was.changed(&both), told);
        let file = Load { fingerprint: "cd".to_string(), ..both };
        assert_eq!(was.changed(&file), "the model's file has changed");
        assert!(was.changed(&was).starts_with("neither"));
    }

    #[test]
    fn distances_are_parts_of_the_range() {
        let was = load(&[-5.0, 0.0, 15.0]);
        assert!((was.distance(&load(&[-5.0, 0.2, 15.0])) - 0.01).abs() < 1e-6);
        assert_eq!(was.distance(&load(&[-5.0, 0.0])), f32::INFINITY);
        assert_eq!(Load::from_json(&was.to_json()), Some(was));
        assert_eq!(Load::from_json(&json!({ "logits": [1, "x"] })), None);
    }
}
