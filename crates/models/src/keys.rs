//! The keys of a configuration, in `config.json` or GGUF metadata: values with the file and the key
//! that state them, and a note of every key that was read. A key with a value that no code reads
//! may change what the model computes, so such a file is refused by that key.

use crate::harmless::{HARMLESS_VALUES, is_causality, is_harmless};
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use formats::gguf::{Metadata, MetadataValue as Typed};
use formats::{Error, ErrorKind, Hint, Result, Setting};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::fmt::Display;

/// Which family of names a file uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    HuggingFace,
    Gguf,
}

/// One setting's name in `config.json` and, below the architecture's prefix, in GGUF; empty where a
/// dialect has none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key(pub(crate) &'static str, pub(crate) &'static str);

impl From<&'static str> for Key {
    fn from(both: &'static str) -> Key {
        Key(both, both)
    }
}

/// Where the values are.
#[derive(Debug, Clone, Copy)]
enum Values<'a> {
    Json(&'a Value),
    Gguf(&'a Metadata),
}

/// The keys of a configuration that were read, and values under some of them.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// The keys, as the file spells them.
    keys: RefCell<HashSet<String>>,
    /// The values that `config.json` has under keys that GGUF has too, by their names there.
    stated: RefCell<Vec<(&'static str, Typed)>>,
}

impl Asked {
    /// The values that `config.json` has under keys that GGUF has too, by their names below the
    /// prefix there, each once.
    pub(crate) fn stated(&self) -> Vec<(&'static str, Typed)> {
        self.stated.borrow().clone()
    }

    fn state(&self, Key(_, gguf): Key, value: Option<Typed>) {
        let mut stated = self.stated.borrow_mut();
        if let Some(value) = value.filter(|_| !stated.iter().any(|(key, _)| *key == gguf)) {
            stated.push((gguf, value));
        }
    }
}

/// The keys of an object of `config.json`, or of GGUF metadata below a prefix. The methods that
/// give values refuse one of another type, by key; a value of null is none.
#[derive(Debug, Clone)]
pub(crate) struct Keys<'a> {
    /// The file.
    pub(crate) file: &'a str,
    prefix: String,
    values: Values<'a>,
    asked: &'a Asked,
    own: &'static [(&'static str, &'static str)],
    by_layer: &'static [&'static str],
    unsaid: Unsaid,
}

impl<'a> Keys<'a> {
    fn new(file: &'a str, prefix: String, values: Values<'a>, asked: &'a Asked) -> Keys<'a> {
        let unsaid = Unsaid::NOTHING;
        Keys { file, prefix, values, asked, own: &[], by_layer: &[], unsaid }
    }

    /// The keys of `config.json`.
    pub(crate) fn json(file: &'a str, value: &'a Value, asked: &'a Asked) -> Keys<'a> {
        let (prefix, values) = (String::new(), Values::Json(value));
        Keys::new(file, prefix, values, asked)
    }

    /// The keys of GGUF metadata below `prefix.`.
    pub(crate) fn gguf(
        file: &'a str,
        prefix: &str,
        metadata: &'a Metadata,
        asked: &'a Asked,
    ) -> Keys<'a> {
        let (prefix, values) = (format!("{prefix}."), Values::Gguf(metadata));
        Keys::new(file, prefix, values, asked)
    }

    /// The same keys where `config.json` may have names of its own for some of them: the usual
    /// name, and that one.
    pub(crate) fn with_names(self, own: &'static [(&'static str, &'static str)]) -> Keys<'a> {
        Keys { own, ..self }
    }

    /// The same keys where numbers, by their names in GGUF, are lists, since they differ between
    /// layers: read as one number, they are the first layer's; [`Keys::of_layers`] gives whole ones of
    /// all.
    pub(crate) fn with_lists(self, by_layer: &'static [&'static str]) -> Keys<'a> {
        Keys { by_layer, ..self }
    }

    /// The same keys where `config.json` leaves out sizes that the architecture's class
    /// has: those alone that it does not mention, not even as null.
    pub(crate) fn of_class(self, unsaid: Unsaid) -> Keys<'a> {
        Keys { unsaid, ..self }
    }

    pub(crate) fn dialect(&self) -> Dialect {
        match self.values {
            Values::Json(_) => Dialect::HuggingFace,
            Values::Gguf(_) => Dialect::Gguf,
        }
    }

    /// A key as this file spells it; none where its dialect has none.
    fn spelled(&self, key: impl Into<Key>) -> Option<String> {
        let Key(json, gguf) = key.into();
        let name = match self.values {
            Values::Gguf(_) => gguf,
            Values::Json(object) => self.named(object, json),
        };
        (!name.is_empty()).then(|| format!("{}{name}", self.prefix))
    }

    /// The name that an object has for a key: that of the architecture, unless the usual one alone
    /// is there.
    fn named(&self, object: &Value, usual: &'static str) -> &'static str {
        let own = || self.own.iter().filter(|(key, _)| *key == usual).map(|(_, own)| *own);
        let says = |name: &&str| object.get(name).is_some_and(|value| !value.is_null());
        let first = if object.get(usual).is_some() { None } else { own().next() };
        own().find(says).or(first).unwrap_or(usual)
    }

    /// Notes that a key was asked for, and gives it.
    fn ask(&self, key: impl Into<Key>) -> Option<String> {
        let spelled = self.spelled(key)?;
        self.asked.keys.borrow_mut().insert(spelled.clone());
        Some(spelled)
    }

    /// A value of `config.json`.
    pub(crate) fn get(&self, key: impl Into<Key>) -> Option<&'a Value> {
        let spelled = self.ask(key)?;
        let Values::Json(object) = self.values else { return None };
        object.get(&spelled[self.prefix.len()..]).filter(|value| !value.is_null())
    }

    /// An object of `config.json`, in which it notes each key by itself. The rotation is that of the
    /// class where nothing is said of it.
    ///
    /// # Errors
    /// Something else than an object.
    pub(crate) fn object(&self, key: &'static str) -> Result<Option<Keys<'a>>> {
        let Some(value) = self.get(key).or_else(|| self.rotation(key)) else { return Ok(None) };
        if !value.is_object() {
            return Err(self.odd(key, "an object", value));
        }
        let prefix = format!("{}{key}.", self.prefix);
        Ok(Some(Keys {
            prefix,
            values: Values::Json(value),
            unsaid: Unsaid::NOTHING,
            ..self.clone()
        }))
    }

    /// The rotation of the class, where `config.json` has none.
    fn rotation(&self, key: &str) -> Option<&'a Value> {
        let Values::Json(object) = self.values else { return None };
        let empty = |value: &Value| value.as_object().is_some_and(|object| object.is_empty());
        // Null is said there: mlx-lm writes it where nothing is stretched.
        let silent = key == "rope_parameters" && object.get("rope_scaling").is_none_or(empty);
        self.unsaid.rotation.filter(|_| silent).map(|rotation| rotation())
    }

    fn read<T>(
        &self,
        key: impl Into<Key>,
        kind: &str,
        json: impl FnOnce(&'a Value) -> Option<T>,
        gguf: impl FnOnce(&'a Metadata, &str) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let key = key.into();
        match self.values {
            Values::Json(_) => {
                let Some(value) = self.get(key) else { return Ok(None) };
                json(value).map(Some).ok_or_else(|| self.odd(key, kind, value))
            }
            Values::Gguf(metadata) => {
                let Some(spelled) = self.ask(key) else { return Ok(None) };
                gguf(metadata, &spelled)
            }
        }
    }

    /// Notes what a key says that GGUF has too, by a name of its own.
    pub(crate) fn state(&self, key: Key, value: Option<Typed>) {
        const SAME: &[&str] = &[
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "interleave_moe_layer_step",
            "logit_scale",
            "num_loops",
            "skip_loop_final_norm",
            "use_parallel_residual",
        ];
        let named = !key.1.is_empty() && (key.0 != key.1 || SAME.contains(&key.1));
        if self.dialect() == Dialect::HuggingFace && named {
            self.asked.state(key, value);
        }
    }

    fn whole(&self, key: impl Into<Key>) -> Result<Option<usize>> {
        // 1e6 is how some write a million.
        let whole = |n: f64| (n.fract() == 0.0 && (0.0..9e15).contains(&n)).then_some(n as u64);
        let key = key.into();
        let listed = self.by_layer.contains(&key.1);
        let json = |value: &Value| {
            let first = value.as_array().filter(|_| listed).and_then(|list| list.first());
            let value = first.unwrap_or(value);
            let number = value.as_u64().or_else(|| value.as_f64().and_then(whole));
            number.and_then(|n| usize::try_from(n).ok())
        };
        let gguf = |metadata: &Metadata, key: &str| match metadata.get(key) {
            Some(Typed::Array(_)) if listed => {
                Ok(metadata.u32s(key)?.and_then(|list| list.first().map(|n| *n as usize)))
            }
            Some(Typed::Array(_)) => one_for_all(metadata, key),
            _ => Ok(metadata.u32(key)?.map(|n| n as usize)),
        };
        self.read(key, "a whole number", json, gguf)
    }

    /// A text; none where the key is absent.
    pub(crate) fn text(&self, key: impl Into<Key>) -> Result<Option<&'a str>> {
        let key = key.into();
        let found = self.read(key, "text", Value::as_str, Metadata::str)?;
        self.state(key, found.map(|text| Typed::String(text.to_owned())));
        Ok(found)
    }

    /// True or false; none where the key is absent.
    pub(crate) fn flag(&self, key: impl Into<Key>) -> Result<Option<bool>> {
        let key = key.into();
        let found = self.read(key, "true or false", Value::as_bool, Metadata::bool)?;
        self.state(key, found.map(Typed::Bool));
        Ok(found)
    }

    /// A list of numbers of `config.json`; none where the key is absent.
    pub(crate) fn numbers(&self, key: &'static str) -> Result<Option<Vec<f32>>> {
        let all = |list: &Vec<Value>| list.iter().map(|n| Some(n.as_f64()? as f32)).collect();
        self.read(key, "a list of numbers", |value| value.as_array().and_then(all), |_, _| Ok(None))
    }

    /// A list of GGUF's of true and false; none where it has none, or one value, under the key, and
    /// in `config.json`.
    pub(crate) fn gguf_flags(&self, key: Key) -> Result<Option<Vec<bool>>> {
        let (Values::Gguf(metadata), Some(spelled)) = (self.values, self.ask(key)) else {
            return Ok(None);
        };
        match metadata.get(&spelled) {
            Some(Typed::Array(_)) => metadata.bools(&spelled),
            _ => Ok(None),
        }
    }

    /// Numbers that GGUF lists; none where it has none under the key, and in `config.json`.
    pub(crate) fn gguf_numbers(&self, key: Key) -> Result<Option<Vec<f32>>> {
        let (Values::Gguf(metadata), Some(spelled)) = (self.values, self.ask(key)) else {
            return Ok(None);
        };
        metadata.f32s(&spelled)
    }

    /// Whether `config.json` has a key, be it null.
    pub(crate) fn mentions(&self, key: Key) -> bool {
        let Values::Json(object) = self.values else { return false };
        object.get(key.0).is_some()
    }

    /// Whether `config.json` says that a key has no value.
    pub(crate) fn is_null(&self, key: &'static str) -> bool {
        let Values::Json(object) = self.values else { return false };
        object.get(self.named(object, key)).is_some_and(Value::is_null)
    }

    /// A list with a number for each of `layers` layers; none where there is none, or one number,
    /// under the key.
    ///
    /// # Errors
    /// A list of another length, or of something else.
    pub(crate) fn of_layers(&self, key: Key, layers: usize) -> Result<Option<Vec<usize>>> {
        let Some(spelled) = self.ask(key) else { return Ok(None) };
        let list = match self.values {
            Values::Gguf(metadata) => match metadata.get(&spelled) {
                Some(Typed::Array(_)) => metadata.u32s(&spelled)?.unwrap_or_default(),
                _ => return Ok(None),
            },
            Values::Json(_) => {
                let Some(value) = self.get(key).filter(|value| value.is_array()) else {
                    return Ok(None);
                };
                let number = |n: &Value| n.as_u64().and_then(|n| u32::try_from(n).ok());
                let all = value.as_array().map(|list| list.iter().map(number).collect());
                let all: Option<Vec<u32>> = all.flatten();
                all.ok_or_else(|| self.odd(key, "a list of whole numbers", value))?
            }
        };
        if list.len() != layers {
            return Err(self.wrong(
                key,
                format!("{layers} entries, one for each layer"),
                list.len(),
            ));
        }
        Ok(Some(list.into_iter().map(|n| n as usize).collect()))
    }

    /// A value that stands under `key`, or would.
    pub(crate) fn stated<T>(&self, key: impl Into<Key>, value: T) -> Stated<T> {
        let key = self.spelled(key).unwrap_or_default();
        Stated { value, file: self.file.to_owned(), key }
    }

    /// A value that something else in the file than a key below the prefix states.
    pub(crate) fn at<T>(&self, key: &str, value: T) -> Stated<T> {
        Stated { value, file: self.file.to_owned(), key: key.to_owned() }
    }

    /// Notes that a key of any name was asked for.
    pub(crate) fn note(&self, name: &str) {
        self.asked.keys.borrow_mut().insert(format!("{}{name}", self.prefix));
    }

    /// Notes all keys of an object of `config.json` as asked for.
    pub(crate) fn note_all(&self) {
        if let Values::Json(Value::Object(object)) = self.values {
            object.keys().for_each(|name| self.note(name));
        }
    }

    /// Where a key is, as errors say it.
    pub(crate) fn place(&self, key: impl Into<Key>) -> String {
        format!("{}: {}", self.file, self.spelled(key).unwrap_or_default())
    }

    /// An error about a key.
    pub(crate) fn wrong(
        &self,
        key: impl Into<Key>,
        expected: impl Display,
        found: impl Display,
    ) -> Error {
        self.stated(key, ()).wrong(expected, found)
    }

    /// An error about a value, of which it shows the beginning.
    pub(crate) fn odd(&self, key: impl Into<Key>, expected: &str, found: &Value) -> Error {
        self.wrong(key, expected, clipped(&found.to_string()))
    }

    /// A whole number with its place; none where the key is absent.
    pub(crate) fn size(&self, key: impl Into<Key>) -> Result<Option<Stated<usize>>> {
        let key = key.into();
        let usual = || {
            let Values::Json(object) = self.values else { return None };
            let null = object.get(self.named(object, key.0)).is_some();
            self.unsaid.size(key.0, !self.prefix.is_empty(), null)
        };
        let found = self.whole(key)?.or_else(usual);
        self.state(key, found.and_then(|n| Some(Typed::U32(u32::try_from(n).ok()?))));
        Ok(found.map(|value| self.stated(key, value)))
    }

    /// A whole number without which there is no model.
    pub(crate) fn needed(&self, key: impl Into<Key>) -> Result<Stated<usize>> {
        let key = key.into();
        self.size(key)?.ok_or_else(|| self.wrong(key, "a whole number", "nothing"))
    }

    /// A number with its place; none where the key is absent.
    pub(crate) fn number(&self, key: impl Into<Key>) -> Result<Option<Stated<f64>>> {
        let key = key.into();
        let listed = self.by_layer.contains(&key.1);
        let json = |value: &Value| {
            let first = value.as_array().filter(|_| listed).and_then(|list| list.first());
            first.unwrap_or(value).as_f64()
        };
        let number = self.read(key, "a number", json, Metadata::f64)?;
        self.state(key, number.map(|number| Typed::F32(number as f32)));
        Ok(number.map(|value| self.stated(key, value)))
    }

    /// A number, or the one that is usual where nothing is said.
    pub(crate) fn number_or(&self, key: impl Into<Key>, usual: f64) -> Result<Stated<f64>> {
        let key = key.into();
        let number = self.number(key)?.unwrap_or_else(|| self.stated(key, usual));
        self.state(key, Some(Typed::F32(number.value as f32)));
        Ok(number)
    }

    /// A number without which there is no model.
    pub(crate) fn needed_number(&self, key: impl Into<Key>) -> Result<Stated<f64>> {
        let key = key.into();
        self.number(key)?.ok_or_else(|| self.wrong(key, "a number", "nothing"))
    }

    /// Refuses layer norms of q and k, which have a mean and weights of each head.
    ///
    /// # Errors
    /// A flag that asks for them.
    pub(crate) fn without_head_norms(&self, key: &'static str) -> Result<()> {
        if self.flag(Key(key, ""))? != Some(true) {
            return Ok(());
        }
        let expected = "false: layer norms of q and k are not supported";
        Err(self.wrong(key, expected, true).of(ErrorKind::Unsupported))
    }

    /// Refuses a setting that is there and not the only one that the architecture has.
    ///
    /// # Errors
    /// Another setting.
    pub(crate) fn only(&self, key: impl Into<Key>, known: &[&str]) -> Result<()> {
        let key = key.into();
        match self.text(key)?.filter(|found| !known.contains(found)) {
            Some(found) => Err(self.wrong(key, known.join(" or "), clipped(found))),
            None => Ok(()),
        }
    }

    /// Refuses the first key with a value that no code reads, unless it is one of `ignored`;
    /// returns the positions of the ignored ones.
    ///
    /// # Errors
    /// Such a key.
    pub(crate) fn refuse_unread(&self, ignored: &[String]) -> Result<BTreeSet<usize>> {
        let mut passed = BTreeSet::new();
        let mut passes = |name: &str| {
            let spelled = format!("{}{name}", self.prefix);
            let known = is_harmless(name) || self.asked.keys.borrow().contains(&spelled);
            let at = ignored.iter().position(|key| *key == spelled || key == name);
            passed.extend(at.filter(|_| !known));
            known || at.is_some()
        };
        let mut below_it = BTreeSet::new();
        match self.values {
            Values::Json(Value::Object(object)) => {
                for (name, value) in object {
                    let spelled = format!("{}{name}", self.prefix);
                    let below = format!("{spelled}.");
                    let within =
                        self.asked.keys.borrow().iter().any(|asked| asked.starts_with(&below));
                    if within && value.is_object() {
                        let values = Values::Json(value);
                        let keys = Keys { prefix: below, values, ..self.clone() };
                        below_it.extend(keys.refuse_unread(ignored)?);
                    } else if !passes(name)
                        && !value.is_null()
                        && (*value != Value::Bool(false) || is_causality(name))
                        && (name != "pruned_heads" || *value != serde_json::json!({}))
                        && !HARMLESS_VALUES.iter().any(|(key, n)| key == name && value == n)
                    {
                        return Err(self.unread(&spelled, &value.to_string()));
                    }
                }
            }
            Values::Json(_) => {}
            Values::Gguf(metadata) => {
                for (key, value) in metadata.iter() {
                    let Some(name) = key.strip_prefix(&self.prefix) else { continue };
                    let says = *value != Typed::Bool(false) || is_causality(name);
                    if !passes(name) && says {
                        return Err(self.unread(key, &format!("{value:?}")));
                    }
                }
            }
        }
        passed.extend(below_it);
        Ok(passed)
    }

    /// Whether a key was asked for that is spelled so, or so below the prefix.
    pub(crate) fn was_asked(&self, key: &str) -> bool {
        let asked = self.asked.keys.borrow();
        asked.contains(key) || asked.contains(&format!("{}{key}", self.prefix))
    }

    fn unread(&self, key: &str, value: &str) -> Error {
        let key: String = key.chars().take(80).collect();
        let place = format!("{}: {key}", self.file);
        let hint = Hint::text("it may change what the model computes; ")
            .with_value(Setting::IgnoreKey, &key)
            .and(" loads the model as if it were not there");
        let error = Error::new(place, "settings that this architecture has", clipped(value));
        error.of(ErrorKind::Unsupported).hint(hint)
    }
}

/// The number that a list of GGUF's has for every layer; layers with 0 have no such part, as their
/// weights say again.
fn one_for_all(metadata: &Metadata, key: &str) -> Result<Option<usize>> {
    let list = metadata.u32s(key)?.unwrap_or_default();
    let one = list.iter().copied().find(|n| *n > 0);
    match list.iter().find(|n| **n > 0 && Some(**n) != one) {
        Some(other) => {
            let expected = "the same number for all layers: others are not supported";
            let found = format!("{} and {other}", one.unwrap_or(0));
            Err(Error::new(metadata.at(key), expected, found).of(ErrorKind::Unsupported))
        }
        None => Ok(one.map(|n| n as usize)),
    }
}

/// The beginning of a text, for errors.
pub(crate) fn clipped(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_key_that_nobody_asked_for_is_refused() {
        let refused = |value: Value, ignored: &[&str]| {
            let asked = Asked::default();
            let keys = Keys::json("config.json", &value, &asked);
            keys.needed(Key("hidden_size", "")).unwrap();
            let rope = keys.object("rope").unwrap();
            rope.iter().for_each(|rope| assert!(rope.number("theta").unwrap().is_some()));
            let ignored: Vec<String> = ignored.iter().map(|key| (*key).to_owned()).collect();
            keys.refuse_unread(&ignored).err().map(|error| error.to_string())
        };
        let fine = json!({ "hidden_size": 8, "use_cache": true, "off": false, "none": null,
            "rope": { "theta": 1.0 } });
        assert_eq!(refused(fine, &[]), None);
        assert_eq!(refused(json!({ "hidden_size": 8, "full_attn_mod": 1 }), &[]), None);
        assert!(refused(json!({ "hidden_size": 8, "full_attn_mod": 2 }), &[]).is_some());
        assert!(refused(json!({ "hidden_size": 8, "is_causal": false }), &[]).is_some());
        let odd = json!({ "hidden_size": 8, "soft_cap": 30.0 });
        let why = refused(odd.clone(), &[]).unwrap();
        assert!(why.starts_with("config.json: soft_cap: expected settings that"), "{why}");
        assert!(why.contains("found 30.0") && why.contains("ignored key soft_cap"), "{why}");
        assert_eq!(refused(odd, &["soft_cap"]), None);
        let within = json!({ "hidden_size": 8, "rope": { "theta": 1.0, "stretch": [2] } });
        let why = refused(within.clone(), &["stretch_not"]).unwrap();
        assert!(why.starts_with("config.json: rope.stretch: "), "{why}");
        assert_eq!(refused(within.clone(), &["rope.stretch"]), None);
        let asked = Asked::default();
        let keys = Keys::json("config.json", &within, &asked);
        keys.needed(Key("hidden_size", "")).unwrap();
        keys.object("rope").unwrap().unwrap().number("theta").unwrap();
        let ignored = ["nothing", "stretch", "hidden_size"].map(str::to_owned);
        let passed = keys.refuse_unread(&ignored).unwrap();
        assert_eq!(passed.into_iter().collect::<Vec<_>>(), [1]);
        assert!(keys.was_asked("hidden_size") && !keys.was_asked("nothing"));
    }

    #[test]
    fn a_missing_key_has_the_name_that_its_architecture_gives_it() {
        const OWN: &[(&str, &str)] = &[("mamba_d_state", "state_size")];
        for (value, name) in [
            (json!({}), "state_size"),
            (json!({ "state_size": null }), "state_size"),
            (json!({ "mamba_d_state": null }), "mamba_d_state"),
        ] {
            let asked = Asked::default();
            let keys = Keys::json("c", &value, &asked).with_names(OWN);
            let why = keys.needed("mamba_d_state").unwrap_err().to_string();
            assert!(why.starts_with(&format!("c: {name}: expected a whole number")), "{why}");
        }
    }

    #[test]
    fn values_of_another_type_are_refused_by_key() {
        let asked = Asked::default();
        let value = json!({ "n": "eight", "o": 3, "list": [1, "x"] });
        let keys = Keys::json("c", &value, &asked);
        for (error, expected) in [
            (keys.needed("n").unwrap_err(), "c: n: expected a whole number, found \"eight\""),
            (keys.needed("m").unwrap_err(), "c: m: expected a whole number, found nothing"),
            (keys.object("o").unwrap_err(), "c: o: expected an object, found 3"),
            (keys.numbers("list").unwrap_err(), "c: list: expected a list of numbers"),
            (keys.only("n", &["silu"]).unwrap_err(), "c: n: expected silu, found eight"),
        ] {
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    }
}
