//! `uniqueItems` of items of any kind, as notes for [`crate::distinct`].

use std::cell::Cell;
use std::collections::HashSet;

use serde_json::Value;

use super::negation::possible;
use super::{NAMED, Object, Rewriter, parts, whole};
use crate::distinct::Places;

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
            "integer" => integers(fields),
            "string" if is_empty("maxLength") => Some(1),
            "array" if is_empty("maxItems") => Some(1),
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

fn sum(mut bounds: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    bounds.try_fold(0, |all: u64, one| Some(all.saturating_add(one?)))
}

/// How many integers there are between a schema's bounds, if it has both.
fn integers(fields: &Object) -> Option<u64> {
    let number = |key: &str| fields.get(key).and_then(Value::as_f64);
    let least =
        [number("minimum").map(f64::ceil), number("exclusiveMinimum").map(|x| x.floor() + 1.0)];
    let most =
        [number("maximum").map(f64::floor), number("exclusiveMaximum").map(|x| x.ceil() - 1.0)];
    let least = least.into_iter().flatten().reduce(f64::max)?;
    let most = most.into_iter().flatten().reduce(f64::min)?;
    let step = number("multipleOf").filter(|step| *step >= 1.0).unwrap_or(1.0);
    let count = (most / step).floor() - (least / step).ceil() + 1.0;
    Some(count.max(0.0) as u64)
}

/// Notes where a schema asks for items that differ, and takes the keyword away.
pub(super) fn noted(schema: &mut Value, places: &mut Places) {
    if !has(schema) {
        return;
    }
    let whole = schema.clone();
    Walker { whole: &whole, places, seen: HashSet::new() }.walk(&whole, Some(""), 0);
    strip(schema);
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
    /// Looks through the schema of what is within this many arrays of a property; of any property,
    /// without a name.
    fn walk(&mut self, schema: &Value, name: Option<&str>, depth: usize) {
        let Value::Object(fields) = schema else { return };
        let depth = depth.min(DEEPEST);
        if fields.get("uniqueItems") == Some(&Value::Bool(true)) {
            self.places.add(name, depth);
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
