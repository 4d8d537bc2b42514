//! MLX's affine quantisation as `config.json` states it: bits and group for the whole model, and apart for single matrices.
//!
//! ```text
//! "quantization": { "group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": { "group_size": 32, "bits": 8 } }
//! ```

use crate::keys::Keys;
use formats::{Result, Source};
use std::collections::HashMap;

/// How matrices of codes are quantised.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Settings {
    whole: Group,
    single: HashMap<String, Group>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Group {
    bits: usize,
    group: usize,
}

impl Settings {
    /// Reads them; `None` where weights are numbers.
    ///
    /// # Errors
    /// Another kind of quantisation than affine groups, by key.
    pub(crate) fn read(keys: &Keys<'_>) -> Result<Option<Settings>> {
        let mut read = None;
        for key in ["quantization_config", "quantization"] {
            let Some(settings) = keys.object(key)? else { continue };
            let expected = "weights of the type F32, F16 or BF16, or MLX's affine groups";
            let hint = "a GGUF file of this model has quantised weights that run here";
            if let Some(method) = settings.text("quant_method")? {
                let method = crate::keys::clipped(method);
                return Err(settings.wrong("quant_method", expected, method).hint(hint));
            }
            if settings.text("mode")?.is_some_and(|mode| mode != "affine")
                || settings.get("bits").is_none()
            {
                let value = keys.get(key).map_or(String::new(), |value| value.to_string());
                return Err(keys.wrong(key, expected, crate::keys::clipped(&value)).hint(hint));
            }
            let single = keys.get(key).and_then(|all| all.as_object()).into_iter().flatten();
            let single = single.inspect(|(name, _)| settings.note(name));
            let single = single.filter(|(_, value)| value.is_object());
            let single: Result<HashMap<String, Group>> = single
                .map(|(name, value)| {
                    let place = format!("{}: {key}.{name}", keys.file);
                    let asked = Default::default();
                    let group = Group::read(&Keys::json(&place, value, &asked))?;
                    Ok((name.clone(), group))
                })
                .collect();
            read = Some(Settings { whole: Group::read(&settings)?, single: single? });
        }
        Ok(read)
    }

    /// The recipe of the matrix whose codes are the tensor `codes`, `NAME.weight`.
    pub(crate) fn source(&self, codes: &str) -> Source {
        let stem = codes.strip_suffix(".weight").unwrap_or(codes);
        let Group { bits, group } = self.single.get(stem).copied().unwrap_or(self.whole);
        Source::Affine {
            codes: codes.to_owned(),
            scales: format!("{stem}.scales"),
            offsets: format!("{stem}.biases"),
            bits,
            group,
        }
    }
}

impl Group {
    fn read(keys: &Keys<'_>) -> Result<Group> {
        let (bits, group) = (keys.needed("bits")?, keys.needed("group_size")?);
        Ok(Group { bits: bits.within(2..=8)?, group: group.within(8..=1 << 16)? })
    }
}
