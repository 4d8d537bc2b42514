//! `uniqueItems` of items of any kind, as notes for [`crate::distinct`].

use std::cell::Cell;
use std::collections::HashSet;

use serde_json::Value;

use super::disjoint::written;
use super::negation::possible;
use super::{MOST_LISTED, NAMED, Object, Rewriter, parts, patterns, whole};
use crate::distinct::Places;
use crate::language::Automaton;

/// Arrays within arrays that are told apart.
const DEEPEST: usize = 8;
/// Schemas that are looked into to count the values of one.
const MOST_PARTS: usize = 256;

impl Rewriter<'_> {
    /// A bound on how many different values a schema allows, if one is told by few of its parts.
    pub(super) fn most_values(&self, schema: &Value) -> Option<u64> {
        self.most_within(schema, &Cell::new(MOST_PARTS))
    }

    /// The same, with `left` parts that may be looked into.
    fn most_within(&self, schema: &Value, left: &Cell<usize>) -> Option<u64> {
        let Value::Object(fields) = self.followed(schema) else {
            return (schema == &Value::Bool(false)).then_some(0);
        };
        left.set(left.get().checked_sub(1)?);
        let mut bounds: Vec<u64> =
            possible(fields).map(|values| values.len() as u64).into_iter().collect();
        let branches = |key: &str| fields.get(key).and_then(Value::as_array).into_iter().flatten();
        let of = |part: &Value| self.most_within(part, left);
        bounds.extend(branches("allOf").filter_map(of));
        for key in ["anyOf", "oneOf"].into_iter().filter(|key| fields.contains_key(*key)) {
            bounds.extend(sum(branches(key).map(of)));
        }
        match fields.get("type") {
            Some(Value::String(kind)) => bounds.extend(self.most_of(kind, fields, left)),
            Some(Value::Array(kinds)) => {
                let of = |kind: &Value| self.most_of(kind.as_str()?, fields, left);
                bounds.extend(sum(kinds.iter().map(of)));
            }
            _ => {}
        }
        bounds.into_iter().min()
    }

    /// The same for values of one type.
    fn most_of(&self, kind: &str, fields: &Object, left: &Cell<usize>) -> Option<u64> {
        let is_empty = |key: &str| fields.get(key).is_some_and(|most| whole(most) == 0);
        match kind {
            "null" => Some(1),
            "boolean" => Some(2),
            "integer" | "number" => integers(fields, kind == "integer"),
            "string" => self.texts_of(fields, |texts, least, most| texts.count(least, most)),
            "array" if is_empty("maxItems") => Some(1),
            "array" => {
                let most = whole(fields.get("maxItems")?).as_u64().filter(|most| *most <= 16)?;
                let item = self.most_within(fields.get("items")?, left)?;
                let longer = |count: u64, _| count.saturating_mul(item).saturating_add(1);
                (!fields.contains_key("prefixItems")).then(|| (0..most).fold(1, longer))
            }
            "object" if fields.get("additionalProperties") == Some(&Value::Bool(false)) => {
                let named = |key: &str| fields.get(key).and_then(Value::as_object);
                if named("patternProperties").is_some_and(|patterns| !patterns.is_empty()) {
                    return None;
                }
                let required = fields.get("required").and_then(Value::as_array);
                let of = |(name, part): (&String, &Value)| {
                    let must = required.is_some_and(|names| names.contains(&name.as_str().into()));
                    let most = self.most_within(part, left)?;
                    Some(most.saturating_add(u64::from(!must)))
                };
                let mut each = named("properties").into_iter().flatten().map(of);
                each.try_fold(1, |all: u64, one| Some(all.saturating_mul(one?)))
            }
            _ => None,
        }
    }
}

impl Rewriter<'_> {
    /// What a function finds of the texts that a schema's pattern allows, between its lengths.
    fn texts_of<T>(
        &self,
        fields: &Object,
        find: impl Fn(&Automaton, usize, Option<usize>) -> Option<T>,
    ) -> Option<T> {
        let number = |key: &str| fields.get(key).map(|number| whole(number).as_u64());
        let least = number("minLength").unwrap_or(Some(0))? as usize;
        let most = match number("maxLength") {
            Some(most) => Some(most? as usize),
            None => None,
        };
        let pattern = match fields.get("pattern") {
            Some(pattern) => pattern.as_str()?,
            None if most == Some(0) => "",
            None => return None,
        };
        find(&patterns::automaton(pattern, &self.budget)?, least, most)
    }

    /// All values that a schema allows, if they are few and it can be told.
    pub(super) fn listed(&self, schema: &Value) -> Option<Vec<Value>> {
        self.listed_within(schema, &Cell::new(MOST_PARTS))
    }

    fn listed_within(&self, schema: &Value, left: &Cell<usize>) -> Option<Vec<Value>> {
        left.set(left.get().checked_sub(1)?);
        let schema = self.followed(schema);
        let fields = match schema {
            Value::Bool(false) => return Some(Vec::new()),
            Value::Object(fields) => fields,
            _ => return None,
        };
        let branches = |key: &str| fields.get(key).and_then(Value::as_array).into_iter().flatten();
        let of = |part: &Value| self.listed_within(part, left);
        let all = |key: &str| {
            let parts = fields.get(key)?.as_array()?.iter().map(of);
            Some(parts.collect::<Option<Vec<_>>>()?.concat())
        };
        let kinds = || match fields.get("type")? {
            Value::Array(kinds) => {
                let kinds = kinds.iter().map(|kind| self.listed_of(kind.as_str()?, fields, left));
                Some(kinds.collect::<Option<Vec<_>>>()?.concat())
            }
            kind => self.listed_of(kind.as_str()?, fields, left),
        };
        let found = possible(fields)
            .or_else(|| all("anyOf"))
            .or_else(|| all("oneOf"))
            .or_else(kinds)
            .or_else(|| branches("allOf").find_map(of))?;
        let (mut kept, mut seen) = (Vec::new(), HashSet::new());
        for value in found {
            if self.meets(&value, schema, DEEPEST)? && seen.insert(written(&value)) {
                kept.push(value);
            }
        }
        (kept.len() as u64 <= MOST_LISTED).then_some(kept)
    }

    /// The same for values of one type.
    fn listed_of(&self, kind: &str, fields: &Object, left: &Cell<usize>) -> Option<Vec<Value>> {
        match kind {
            "null" => Some(vec![Value::Null]),
            "boolean" => Some(vec![false.into(), true.into()]),
            "integer" => {
                integers(fields, true).filter(|count| *count <= MOST_LISTED)?;
                let number = |key: &str| fields.get(key).and_then(Value::as_f64);
                let step = number("multipleOf").filter(|step| step.fract() == 0.0).unwrap_or(1.0);
                let least = number("minimum").or(number("exclusiveMinimum"))?;
                let first = (least / step).floor() as i64;
                let all = (first..).take(MOST_LISTED as usize + 2);
                Some(all.map(|times| Value::from(times * step as i64)).collect())
            }
            "number" => {
                integers(fields, false).filter(|count| *count <= MOST_LISTED)?;
                let number = |key: &str| fields.get(key).and_then(Value::as_f64);
                let least = number("minimum").or(number("exclusiveMinimum"))?;
                let Some(step) = number("multipleOf") else { return Some(vec![least.into()]) };
                let first = (least / step).floor();
                let all = (0..MOST_LISTED + 2).map(|times| (first + times as f64) * step);
                Some(all.map(Value::from).collect())
            }
            "string" => {
                let texts = |texts: &Automaton, least, most| texts.texts(least, most, MOST_LISTED);
                let texts = self.texts_of(fields, texts)?;
                Some(texts.into_iter().map(Value::from).collect())
            }
            "array" => {
                let most = whole(fields.get("maxItems")?).as_u64().filter(|most| *most <= 8)?;
                let items = match most {
                    0 => Vec::new(),
                    _ => self.listed_within(fields.get("items")?, left)?,
                };
                let (mut all, mut longest) = (vec![Vec::new()], vec![Vec::new()]);
                for _ in 0..most {
                    let longer = |array: &Vec<Value>| {
                        let with = |item: &Value| [&array[..], std::slice::from_ref(item)].concat();
                        items.iter().map(with).collect::<Vec<_>>()
                    };
                    longest = longest.iter().flat_map(longer).collect();
                    all.extend(longest.iter().cloned());
                    if all.len() as u64 > MOST_LISTED {
                        return None;
                    }
                }
                Some(all.into_iter().map(Value::from).collect())
            }
            "object" if fields.get("additionalProperties") == Some(&Value::Bool(false)) => {
                if fields.contains_key("patternProperties") {
                    return None;
                }
                let mut all = vec![Object::new()];
                for (name, part) in fields.get("properties")?.as_object()? {
                    let values = self.listed_within(part, left)?;
                    let with = |object: &Object| {
                        let mut longer = vec![object.clone()];
                        longer.extend(values.iter().map(|value| {
                            let mut object = object.clone();
                            object.insert(name.clone(), value.clone());
                            object
                        }));
                        longer
                    };
                    all = all.iter().flat_map(with).collect();
                    if all.len() as u64 > 4 * MOST_LISTED {
                        return None;
                    }
                }
                Some(all.into_iter().map(Value::from).collect())
            }
            _ => None,
        }
    }

    /// Whether a schema allows a value, as far as it can be told.
    fn meets(&self, value: &Value, schema: &Value, deep: usize) -> Option<bool> {
        let deep = deep.checked_sub(1)?;
        let fields = match self.followed(schema) {
            Value::Bool(all) => return Some(*all),
            Value::Object(fields) => fields,
            _ => return None,
        };
        for (key, wanted) in fields {
            if !self.holds(value, key, wanted, fields, deep)? {
                return Some(false);
            }
        }
        Some(true)
    }

    fn holds(
        &self,
        value: &Value,
        key: &str,
        wanted: &Value,
        fields: &Object,
        deep: usize,
    ) -> Option<bool> {
        let is = |kind: &Value| match kind.as_str() {
            Some("array") => value.is_array(),
            Some("boolean") => value.is_boolean(),
            Some("integer") => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            Some("null") => value.is_null(),
            Some("number") => value.is_number(),
            Some("object") => value.is_object(),
            Some("string") => value.is_string(),
            _ => false,
        };
        let same = |other: &Value| written(other) == written(value);
        let number = value.as_f64().zip(wanted.as_f64());
        let counted = |count: Option<usize>, fits: fn(usize, usize) -> bool| match count {
            Some(count) => Some(fits(count, whole(wanted).as_u64()? as usize)),
            None => Some(true),
        };
        let length = value.as_str().map(|text| text.chars().count());
        let items = value.as_array().map(Vec::len);
        let named = value.as_object().map(Object::len);
        let mut parts = wanted.as_array().into_iter().flatten();
        Some(match key {
            "type" if wanted.is_array() => parts.any(is),
            "type" => is(wanted),
            "enum" => parts.any(same),
            "const" => same(wanted),
            "minimum" => number.is_none_or(|(own, bound)| own >= bound),
            "maximum" => number.is_none_or(|(own, bound)| own <= bound),
            "exclusiveMinimum" if wanted.is_number() => {
                number.is_none_or(|(own, bound)| own > bound)
            }
            "exclusiveMaximum" if wanted.is_number() => {
                number.is_none_or(|(own, bound)| own < bound)
            }
            "multipleOf" => number.is_none_or(|(own, step)| (own / step).round() * step == own),
            "minLength" => counted(length, |own, bound| own >= bound)?,
            "maxLength" => counted(length, |own, bound| own <= bound)?,
            "minItems" => counted(items, |own, bound| own >= bound)?,
            "maxItems" => counted(items, |own, bound| own <= bound)?,
            "minProperties" => counted(named, |own, bound| own >= bound)?,
            "maxProperties" => counted(named, |own, bound| own <= bound)?,
            "pattern" => match value.as_str() {
                Some(text) => patterns::automaton(wanted.as_str()?, &self.budget)?.has(text),
                None => true,
            },
            "required" => {
                let has =
                    |name: &Value| name.as_str().is_some_and(|name| value.get(name).is_some());
                !value.is_object() || parts.all(has)
            }
            "properties" => {
                for (name, part) in wanted.as_object()? {
                    let own = value.as_object().and_then(|own| own.get(name));
                    if own.is_some_and(|own| self.meets(own, part, deep) != Some(true)) {
                        return self.meets(own?, part, deep);
                    }
                }
                true
            }
            "additionalProperties" if wanted == &Value::Bool(false) => {
                let listed = fields.get("properties").and_then(Value::as_object);
                let known = |name: &String| listed.is_some_and(|listed| listed.contains_key(name));
                value.as_object().is_none_or(|own| own.keys().all(known))
            }
            "items" if wanted.is_object() && !fields.contains_key("prefixItems") => {
                for item in value.as_array().into_iter().flatten() {
                    if !self.meets(item, wanted, deep)? {
                        return Some(false);
                    }
                }
                true
            }
            "uniqueItems" => {
                let all: Vec<String> =
                    value.as_array().into_iter().flatten().map(written).collect();
                wanted != &Value::Bool(true)
                    || all.iter().collect::<HashSet<_>>().len() == all.len()
            }
            "allOf" | "anyOf" | "oneOf" => {
                let met: Vec<bool> =
                    parts.map(|part| self.meets(value, part, deep)).collect::<Option<_>>()?;
                let count = met.iter().filter(|met| **met).count();
                match key {
                    "allOf" => count == met.len(),
                    "anyOf" => count > 0,
                    _ => count == 1,
                }
            }
            "not" => !self.meets(value, wanted, deep)?,
            key if super::NOTES.contains(&key) => true,
            // What is no keyword says nothing.
            key => {
                let lists: [&[&str]; 4] =
                    [&super::ONE, &super::LISTS, &super::NAMED, &super::OTHERS];
                !lists.iter().any(|list| list.contains(&key)) || return None
            }
        })
    }
}

fn sum(mut bounds: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    bounds.try_fold(0, |all: u64, one| Some(all.saturating_add(one?)))
}

/// How many integers, or multiples of a step, there are between a schema's bounds, if it has both.
fn integers(fields: &Object, whole: bool) -> Option<u64> {
    let number = |key: &str| fields.get(key).and_then(Value::as_f64);
    let bound = |key: &str, beside: &str| [number(key), number(beside)].into_iter().flatten();
    let least = bound("minimum", "exclusiveMinimum").reduce(f64::max)?;
    let most = bound("maximum", "exclusiveMaximum").reduce(f64::min)?;
    if least >= most {
        return Some(u64::from(least == most));
    }
    let step = number("multipleOf").filter(|step| *step > 0.0);
    let step = if whole { step.filter(|step| *step >= 1.0).unwrap_or(1.0) } else { step? };
    let (mut first, mut last) = ((least / step).ceil(), (most / step).floor());
    first += f64::from(number("exclusiveMinimum") == Some(first * step));
    last -= f64::from(number("exclusiveMaximum") == Some(last * step));
    Some((last - first + 1.0).max(0.0) as u64)
}

/// Notes where a schema asks for items that differ, and takes the keyword away, and whether it
/// counts properties by names that are not listed.
pub(super) fn noted(schema: &mut Value, places: &mut Places) {
    if counts_names(schema) {
        let text = schema.to_string();
        let narrow = ["\"patternProperties\"", "\"propertyNames\""];
        places.differ_in_names(narrow.iter().any(|key| text.contains(key)));
    }
    if !has(schema) {
        return;
    }
    let whole = schema.clone();
    Walker { whole: &whole, places, seen: HashSet::new() }.walk(&whole, Some(""), 0);
    strip(schema);
}

/// Whether a part of a schema wants more than one property beside those that it requires.
fn counts_names(schema: &Value) -> bool {
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let least = schema.get("minProperties").map(|least| super::whole(least).as_u64());
    least.is_some_and(|least| least.is_none_or(|least| least > required + 1))
        || parts(schema).iter().any(|part| schema.pointer(part).is_some_and(counts_names))
}

fn has(schema: &Value) -> bool {
    schema.get("uniqueItems").is_some()
        || parts(schema).iter().any(|part| schema.pointer(part).is_some_and(has))
}

fn strip(schema: &mut Value) {
    if let Value::Object(fields) = schema {
        fields.remove("uniqueItems");
    }
    for part in parts(schema) {
        // What is not met is another matter.
        if part != "/not"
            && let Some(part) = schema.pointer_mut(&part)
        {
            strip(part);
        }
    }
}

struct Walker<'a> {
    whole: &'a Value,
    places: &'a mut Places,
    /// References that were followed, with the place that they were come by in.
    seen: HashSet<(String, Option<String>, usize)>,
}

impl Walker<'_> {
    /// Whether the items of a schema's arrays have parts of which few values may come.
    fn is_narrow(&self, schema: &Object, deep: usize) -> bool {
        let Some(deep) = deep.checked_sub(1) else { return true };
        const NARROW: [&str; 8] = [
            "const",
            "enum",
            "exclusiveMaximum",
            "format",
            "maxItems",
            "maximum",
            "pattern",
            "multipleOf",
        ];
        let value = Value::Object(schema.clone());
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'));
        let target = target.and_then(|to| self.whole.pointer(to));
        let within = parts(&value);
        schema.keys().any(|key| NARROW.contains(&key.as_str()))
            || within
                .iter()
                .filter_map(|part| value.pointer(part))
                .chain(target)
                .any(|part| part.as_object().is_some_and(|part| self.is_narrow(part, deep)))
    }

    /// Looks through the schema of what is within this many arrays of a property; of any property,
    /// without a name.
    fn walk(&mut self, schema: &Value, name: Option<&str>, depth: usize) {
        let Value::Object(fields) = schema else { return };
        let depth = depth.min(DEEPEST);
        if fields.get("uniqueItems") == Some(&Value::Bool(true)) {
            self.places.add(name, depth, self.is_narrow(fields, DEEPEST));
        }
        if let Some(Value::String(to)) = fields.get("$ref")
            && self.seen.insert((to.clone(), name.map(str::to_string), depth))
            && let Some(found) = to.strip_prefix('#').and_then(|to| self.whole.pointer(to))
        {
            self.walk(found, name, depth);
        }
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("$defs" | "definitions" | "not" | "propertyNames", _) => {}
                ("properties", Value::Object(named)) => {
                    named.iter().for_each(|(name, part)| self.walk(part, Some(name), 0));
                }
                ("patternProperties", Value::Object(named)) => {
                    named.values().for_each(|part| self.walk(part, None, 0));
                }
                ("additionalProperties" | "unevaluatedProperties", part) => {
                    self.walk(part, None, 0);
                }
                ("prefixItems" | "items", Value::Array(list)) => {
                    list.iter().for_each(|part| self.walk(part, name, depth + 1));
                }
                ("items" | "additionalItems" | "contains" | "unevaluatedItems", part) => {
                    self.walk(part, name, depth + 1);
                }
                ("allOf" | "anyOf" | "oneOf", Value::Array(list)) => {
                    list.iter().for_each(|part| self.walk(part, name, depth));
                }
                (key, Value::Object(named)) if NAMED.contains(&key) => {
                    named.values().for_each(|part| self.walk(part, name, depth));
                }
                ("if" | "then" | "else", part) => self.walk(part, name, depth),
                _ => {}
            }
        }
    }
}
