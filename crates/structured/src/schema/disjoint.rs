//! Whether no value meets two schemas, as far as that can be told.

use std::collections::HashSet;

use serde_json::Value;

use super::{Object, Rewriter, negation};

/// Schemas within schemas that are looked at.
const DEEPEST: usize = 6;

/// Sets of types, a bit for each.
pub(super) const ARRAY: u8 = 1;
const BOOLEAN: u8 = 2;
const NULL: u8 = 4;
const NUMBER: u8 = 8;
const OBJECT: u8 = 16;
pub(super) const STRING: u8 = 32;
const ALL: u8 = 63;

/// The types that a schema's own keywords allow.
pub(super) fn types(fields: &Object) -> u8 {
    let named = |name: &Value| match name.as_str() {
        Some("array") => ARRAY,
        Some("boolean") => BOOLEAN,
        Some("null") => NULL,
        Some("integer" | "number") => NUMBER,
        Some("object") => OBJECT,
        Some("string") => STRING,
        _ => ALL,
    };
    let stated = match fields.get("type") {
        Some(Value::Array(names)) => names.iter().fold(0, |types, name| types | named(name)),
        Some(name) => named(name),
        None => ALL,
    };
    let listed = match (fields.get("enum"), fields.get("const")) {
        (Some(Value::Array(values)), _) => {
            values.iter().fold(0, |types, value| types | kind(value))
        }
        (_, Some(value)) => kind(value),
        _ => ALL,
    };
    stated & listed
}

fn kind(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(_) => NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

impl Rewriter<'_> {
    /// Whether no value of these types meets both schemas; `false` where that cannot be told.
    pub(super) fn disjoint(&self, a: &Value, b: &Value, types: u8) -> bool {
        self.apart(a, b, types, DEEPEST)
    }

    fn apart(&self, a: &Value, b: &Value, kinds: u8, deep: usize) -> bool {
        let Some(deep) = deep.checked_sub(1) else { return false };
        let (a, b) = (self.followed(a), self.followed(b));
        if *a == Value::Bool(false) || *b == Value::Bool(false) {
            return true;
        }
        let (Some(one), Some(other)) = (a.as_object(), b.as_object()) else { return false };
        let kinds = kinds & types(one) & types(other);
        if kinds == 0 {
            return true;
        }
        for (fields, other) in [(one, b), (other, a)] {
            let list = |key: &str| fields.get(key).and_then(Value::as_array);
            let apart = |part: &Value| self.apart(part, other, kinds, deep);
            if ["anyOf", "oneOf"]
                .iter()
                .filter_map(|key| list(key))
                .any(|all| all.iter().all(apart))
                || list("allOf").is_some_and(|all| all.iter().any(apart))
                || fields.get("$ref").is_some_and(|to| self.target(to).is_some_and(apart))
            {
                return true;
            }
        }
        match (negation::possible(one), negation::possible(other)) {
            (Some(some), Some(others))
                if kinds & !BOOLEAN & !NULL == 0 || listed(one) && listed(other) =>
            {
                let others: HashSet<String> = others.iter().map(written).collect();
                if !some.iter().any(|value| others.contains(&written(value))) {
                    return true;
                }
            }
            _ => {}
        }
        match kinds {
            OBJECT => {
                let required = |fields: &Object| -> Vec<String> {
                    let names = fields.get("required").and_then(Value::as_array);
                    let names = names.into_iter().flatten().filter_map(Value::as_str);
                    names.map(str::to_string).collect()
                };
                [required(one), required(other)]
                    .concat()
                    .iter()
                    .any(|name| self.apart(&property(one, name), &property(other, name), ALL, deep))
            }
            NUMBER => {
                let bound = |fields: &Object, key: &str| fields.get(key).and_then(Value::as_f64);
                [(one, other), (other, one)].iter().any(|(low, high)| {
                    let below = bound(low, "maximum").zip(bound(high, "minimum"));
                    below.is_some_and(|(most, least)| most < least)
                })
            }
            _ => false,
        }
    }

    fn target(&self, to: &Value) -> Option<&Value> {
        self.whole.pointer(to.as_str()?.strip_prefix('#')?)
    }
}

/// A value as text that is the same for equal ones, however a number is written.
pub(super) fn written(value: &Value) -> String {
    match value.as_f64() {
        Some(number) => number.to_string(),
        None => value.to_string(),
    }
}

fn listed(fields: &Object) -> bool {
    fields.contains_key("enum") || fields.contains_key("const")
}

/// The schema of a property, by the keywords that name it.
fn property(fields: &Object, name: &str) -> Value {
    if let Some(own) = fields.get("properties").and_then(|all| all.get(name)) {
        return own.clone();
    }
    let closed = fields.get("additionalProperties") == Some(&Value::Bool(false));
    Value::Bool(!closed || fields.contains_key("patternProperties"))
}
