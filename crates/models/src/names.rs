//! From canonical names of weights to the tensors of a file, by the tables of an architecture.

use crate::Architecture;
use crate::keys::Dialect;
use crate::quantisation::Settings;
use formats::{Error, Result, Source, Tensors};
use nn::{Stored, Weights};

/// Names of one weight without `.weight` or `.bias`: canonical, in Hugging Face's checkpoints, in
/// GGUF. The first `{}` is a block's number, the second an expert's; a name that ends in `!` is
/// whole; an empty one is none. Further rows of a canonical name are further spellings in folders.
pub(crate) type Row = (&'static str, &'static str, &'static str);

/// First words of names, of which files, and Transformers' own modules, may have another or none.
const PREFIXES: &[&str] = &["model", "transformer", "backbone"];

/// Finds the tensors of a file by canonical name.
pub(crate) struct Names<'a> {
    pub(crate) tensors: &'a Tensors,
    pub(crate) dialect: Dialect,
    /// The file or folder, as errors name it.
    pub(crate) file: &'a str,
    /// The architecture's tables.
    pub(crate) tables: &'static [&'static [Row]],
    /// How matrices are quantised, if the configuration says so.
    pub(crate) quantised: Option<Settings>,
    /// Whether a head that is not stored is a copy of the embedding, as readers of GGUF want it of
    /// some architectures.
    pub(crate) copied: bool,
}

impl Weights for Names<'_> {
    fn find(&self, canonical: &str) -> Result<Option<Stored>> {
        let found = self.stored(canonical)?;
        if found.is_some() || !self.copied || canonical != "head" {
            return Ok(found);
        }
        // A recipe of its own, since equal ones are one weight.
        let copy = |embed: Stored| Stored { source: Source::Concat(vec![embed.source]), ..embed };
        Ok(self.stored("embed")?.map(copy))
    }

    fn place(&self, canonical: &str) -> String {
        let candidates = candidates(canonical, self.dialect, self.tables);
        let held = candidates.iter().find(|name| self.tensors.get(name).is_some());
        let stored = held.or(candidates.first()).map_or(String::new(), |name| format!("{name} "));
        format!("{}: {stored}({canonical})", self.file)
    }
}

impl Names<'_> {
    /// A weight that the file has.
    fn stored(&self, canonical: &str) -> Result<Option<Stored>> {
        let candidates = candidates(canonical, self.dialect, self.tables);
        let quantised = |name: &String| {
            let settings = self.quantised.as_ref()?;
            settings.source(name, self.tensors.get(name), self.tensors)
        };
        let Some(source) = candidates.iter().find_map(quantised) else {
            let tensor = candidates.iter().find_map(|name| self.tensors.get(name));
            return Ok(tensor.map(|tensor| Stored {
                shape: tensor.shape.to_vec(),
                source: Source::Tensor(tensor.name.to_owned()),
            }));
        };
        let described = source.describe(self.tensors);
        let named = |e: Error| Error { place: format!("{}: {}", self.file, e.place), ..e };
        Ok(Some(Stored { shape: described.map_err(named)?.shape, source }))
    }
}

/// Weights some of which are made of others: `change` gives those that are, by canonical name, and
/// `None` for the rest.
pub(crate) struct Recipes<'a, F> {
    pub(crate) weights: &'a dyn Weights,
    pub(crate) change: F,
}

impl<F: Fn(&dyn Weights, &str) -> Result<Option<Stored>>> Weights for Recipes<'_, F> {
    fn find(&self, canonical: &str) -> Result<Option<Stored>> {
        match (self.change)(self.weights, canonical)? {
            Some(made) => Ok(Some(made)),
            None => self.weights.find(canonical),
        }
    }

    fn place(&self, canonical: &str) -> String {
        self.weights.place(canonical)
    }
}

/// The names under which `canonical` may be stored, in order of preference.
pub(crate) fn candidates(canonical: &str, dialect: Dialect, tables: &[&[Row]]) -> Vec<String> {
    let (part, suffix) = match canonical.strip_suffix(".bias") {
        Some(part) => (part, "bias"),
        None => (canonical, "weight"),
    };
    let numbers: Vec<&str> = part.split('.').filter(|word| is_number(word)).collect();
    let words = part.split('.').map(|word| if is_number(word) { "{}" } else { word });
    let pattern = words.collect::<Vec<&str>>().join(".");
    let mut rows = tables.iter().flat_map(|table| table.iter()).filter(|row| row.0 == pattern);
    let named = |stem: &str| {
        let mut name = stem.to_owned();
        for number in &numbers {
            name = name.replacen("{}", number, 1);
        }
        match (name.strip_suffix('!'), suffix) {
            (Some(whole), "weight") => whole.to_owned(),
            // Hugging Face's stacks of experts have no parts, and their biases a name of their own.
            (Some(whole), suffix) => format!("{whole}_{suffix}"),
            (None, suffix) => format!("{name}.{suffix}"),
        }
    };
    if dialect == Dialect::Gguf {
        let stem = rows.next().map(|row| row.2).filter(|stem| !stem.is_empty());
        return stem.map(named).into_iter().collect();
    }
    let mut all = Vec::new();
    for name in rows.map(|row| row.1).filter(|stem| !stem.is_empty()).map(named) {
        // Multimodal checkpoints keep the decoder under a prefix; base-model exports drop the
        // leading `model.`, and mlx-lm puts it in the place of another.
        let bare = match name.split_once('.') {
            Some((word, bare)) if PREFIXES.contains(&word) => bare.to_owned(),
            _ => name.clone(),
        };
        let outer = (bare != name).then(|| format!("model.{bare}"));
        for next in [
            name.clone(),
            format!("language_model.{name}"),
            format!("model.language_model.{bare}"),
            format!("language_model.{bare}"),
            format!("model.text_model.{bare}"),
            format!("text_model.{name}"),
            format!("thinker.{name}"),
            format!("thinker.model.language_model.{bare}"),
            bare,
        ]
        .into_iter()
        .chain(outer)
        {
            if !all.contains(&next) {
                all.push(next);
            }
        }
    }
    all
}

fn is_number(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit())
}

/// The numbers that a name has in the places of a pattern's `{}`, behind whatever it begins with.
fn numbers(pattern: &str, stem: &str) -> Option<Vec<u32>> {
    let mut parts = pattern.split("{}");
    let front = parts.next()?;
    // A prefix may be another one, which `candidates` knows.
    let bare = front.split_once('.').filter(|(word, _)| PREFIXES.contains(word));
    let front = bare.map_or(front, |(_, bare)| bare);
    let (mut rest, mut all) = (stem, Vec::new());
    for (i, part) in parts.enumerate() {
        rest = if i == 0 { rest.split_once(front)?.1 } else { rest };
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, behind) = rest.split_at(digits);
        all.push(number.parse().ok()?);
        rest = behind.strip_prefix(part)?;
    }
    (all.is_empty() || rest.is_empty()).then_some(all)
}

impl Architecture {
    /// The canonical name of what a checkpoint calls `stem`, without `.weight`:
    /// `blocks.3.attention.q` for `model.layers.3.self_attn.q_proj`, or in GGUF for `blk.3.attn_q`.
    pub fn canonical(&self, stem: &str, gguf: bool) -> Option<String> {
        self.canonicals(stem, gguf).into_iter().next()
    }

    /// All canonical names of what a checkpoint calls `stem`: models of one architecture may have
    /// one name for parts that are not the same, such as Granite 4's feed-forwards alone and beside
    /// a mixture.
    pub fn canonicals(&self, stem: &str, gguf: bool) -> Vec<String> {
        let rows = self.names.iter().flat_map(|table| table.iter());
        let all = rows.filter_map(|&(canonical, hugging_face, in_gguf)| {
            let pattern = if gguf { in_gguf } else { hugging_face };
            let numbers = numbers(pattern, stem)?;
            let name = numbers.iter().fold(canonical.to_owned(), |name, number| {
                name.replacen("{}", &number.to_string(), 1)
            });
            let stored = format!("{stem}.weight");
            self.stored(&name, gguf).contains(&stored).then_some(name)
        });
        all.collect()
    }

    /// The names under which checkpoints may store the weight of a canonical name, in order of
    /// preference.
    pub fn stored(&self, canonical: &str, gguf: bool) -> Vec<String> {
        let dialect = if gguf { Dialect::Gguf } else { Dialect::HuggingFace };
        candidates(canonical, dialect, self.names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_name_gives_the_canonical_one_back() {
        let of = |stem: &str, gguf| crate::llama::ARCHITECTURE.canonical(stem, gguf);
        let q = Some("blocks.12.attention.q".to_owned());
        assert_eq!(of("model.layers.12.self_attn.q_proj", false), q);
        assert_eq!(of("language_model.model.layers.12.self_attn.q_proj", false), q);
        assert_eq!(of("blk.12.attn_q", true), q);
        assert_eq!(of("lm_head", false), Some("head".to_owned()));
        let one = crate::mixtral::ARCHITECTURE
            .canonical("model.layers.3.block_sparse_moe.experts.12.w2", false);
        assert_eq!(one, Some("blocks.3.mlp.experts.12.down".to_owned()));
        // Modules have other names in Transformers 5 than in files, and adapters those of modules.
        let of = |architecture: &Architecture, stem| architecture.canonicals(stem, false);
        let (granite, output) =
            (&crate::granite4::ARCHITECTURE, "model.layers.1.shared_mlp.output_linear");
        assert_eq!(of(granite, output), ["blocks.1.mlp.down", "blocks.1.mlp.shared.down"]);
        let nemotron = of(&crate::nemotron_h::ARCHITECTURE, "model.layers.1.mixer.o_proj");
        assert_eq!(
            nemotron,
            of(&crate::nemotron_h::ARCHITECTURE, "backbone.layers.1.mixer.o_proj")
        );
        assert_eq!(nemotron, ["blocks.1.attention.o"]);
        let gate = of(&crate::minimax_m2::ARCHITECTURE, "model.layers.1.mlp.gate");
        assert_eq!(gate, ["blocks.1.mlp.router"]);
        let of = |stem: &str, gguf| crate::llama::ARCHITECTURE.canonical(stem, gguf);
        for odd in ["model.layers.x.self_attn.q_proj", "model.layers.1.self_attn.z_proj", "", "q"] {
            assert_eq!(of(odd, false), None, "{odd}");
        }
        assert_eq!(of("model.layers.1.self_attn.q_proj", true), None);
    }

    #[test]
    fn both_dialects_meet_in_one_name() {
        let of = |name: &str, dialect| candidates(name, dialect, &[crate::llama::NAMES]);
        let hf = of("blocks.12.attention.q.bias", Dialect::HuggingFace);
        assert_eq!(hf[0], "model.layers.12.self_attn.q_proj.bias");
        assert_eq!(hf[1], "language_model.model.layers.12.self_attn.q_proj.bias");
        assert_eq!(of("blocks.12.attention.q.bias", Dialect::Gguf), ["blk.12.attn_q.bias"]);
        assert_eq!(
            of("head", Dialect::HuggingFace),
            [
                "lm_head.weight",
                "language_model.lm_head.weight",
                "model.language_model.lm_head.weight",
                "model.text_model.lm_head.weight",
                "text_model.lm_head.weight",
                "thinker.lm_head.weight",
                "thinker.model.language_model.lm_head.weight"
            ]
        );
        assert!(of("blocks.1.nonsense", Dialect::Gguf).is_empty());
    }
}
