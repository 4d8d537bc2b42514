//! `uniqueItems` of items of any kind, as notes for [`crate::distinct`].

use std::collections::HashSet;

use serde_json::Value;

use super::{NAMED, parts};
use crate::distinct::Places;

/// Arrays within arrays that are told apart.
const DEEPEST: usize = 8;

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
