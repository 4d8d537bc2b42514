//! Patterns that one text must match all of. llguidance looks for a text that several regular
//! expressions allow among all combinations of their parts, in one step that no limit of its own
//! ends: twenty such as `a.{9}b` take seconds, thirty take hours. So their number is bounded.

use std::collections::HashMap;

use formats::{Error, ErrorKind, Result};
use serde_json::{Map, Value};

/// Most patterns that one text must match.
const MOST: usize = 12;
/// Most properties of one object.
const MOST_PROPERTIES: usize = 3000;
/// References within references that are followed.
const DEEPEST: usize = 8;
/// Schemas that are looked at.
const STEPS: usize = 50_000;

/// Refuses a schema in which more patterns than [`MOST`] meet.
///
/// # Errors
/// Such a schema, or one of which that cannot be told.
pub(super) fn check(whole: &Value) -> Result<()> {
    // Without so many they cannot meet.
    if whole.to_string().matches("\"pattern\":").count() <= MOST {
        return Ok(());
    }
    let mut counter = Counter { whole, steps: STEPS };
    let met = counter.count(whole, 0).map(|met| met.into_values().max().unwrap_or(0));
    if met.is_some_and(|met| met <= MOST) {
        return Ok(());
    }
    let found = met.map_or("a schema that combines too many".to_string(), |met| met.to_string());
    let expected = format!("at most {MOST} patterns for one text");
    Err(Error::new("schema", expected, found).of(ErrorKind::Unsupported))
}

/// Refuses a schema in which one object may have more properties than [`MOST_PROPERTIES`] by their
/// names.
///
/// # Errors
/// Such a schema, or one of which that cannot be told.
pub(super) fn check_properties(whole: &Value) -> Result<()> {
    let mut counter = Counter { whole, steps: 10 * STEPS };
    let mut open = vec![whole];
    let mut parts = Vec::new();
    while let Some(schema) = open.pop() {
        parts.push(schema);
        open.extend(super::parts(schema).iter().filter_map(|part| schema.pointer(part)));
    }
    let own =
        |schema: &Value| schema.get("properties").and_then(Value::as_object).map_or(0, Map::len);
    if parts.iter().map(|schema| own(schema)).sum::<usize>() <= MOST_PROPERTIES {
        return Ok(());
    }
    // A schema that is part of another's `allOf` is counted with it.
    let counts = parts.iter().map(|schema| counter.properties(schema, 0));
    let most = counts.collect::<Option<Vec<_>>>().and_then(|counts| counts.into_iter().max());
    if most.is_some_and(|most| most <= MOST_PROPERTIES) {
        return Ok(());
    }
    let found = most.map_or("a schema that combines too many".to_string(), |most| most.to_string());
    let expected = format!("at most {MOST_PROPERTIES} properties of one object");
    Err(Error::new("schema", expected, found).of(ErrorKind::Unsupported))
}

/// Patterns that meet, by the properties and items that lead to them.
type Met = HashMap<String, usize>;

struct Counter<'a> {
    whole: &'a Value,
    steps: usize,
}

impl Counter<'_> {
    /// The properties that one object may have by a schema; none if it takes too long to find out.
    fn properties(&mut self, schema: &Value, depth: usize) -> Option<usize> {
        self.steps = self.steps.checked_sub(1)?;
        let Value::Object(fields) = schema else { return Some(0) };
        let mut count = 0;
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("properties", Value::Object(named)) => count += named.len(),
                ("$ref", Value::String(name)) if depth < DEEPEST => {
                    let target = self.whole.pointer(name.strip_prefix('#').unwrap_or_default());
                    let target = target.filter(|_| name.len() > 1);
                    count += self.properties(target.unwrap_or(&Value::Null), depth + 1)?;
                }
                ("allOf", Value::Array(list)) => {
                    for part in list {
                        count += self.properties(part, depth)?;
                    }
                }
                ("anyOf" | "oneOf", Value::Array(list)) => {
                    let mut most = 0;
                    for part in list {
                        most = most.max(self.properties(part, depth)?);
                    }
                    count += most;
                }
                _ => {}
            }
        }
        Some(count)
    }

    /// The patterns that meet within a schema; none if it takes too long to find out.
    fn count(&mut self, schema: &Value, depth: usize) -> Option<Met> {
        self.steps = self.steps.checked_sub(1)?;
        let mut met = Met::new();
        let Value::Object(fields) = schema else { return Some(met) };
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("pattern", _) => *met.entry(String::new()).or_default() += 1,
                ("$ref", Value::String(name)) if depth < DEEPEST => {
                    let target = self.whole.pointer(name.strip_prefix('#').unwrap_or_default());
                    let target = target.filter(|_| name.len() > 1);
                    add(&mut met, "", self.count(target.unwrap_or(&Value::Null), depth + 1)?);
                }
                ("allOf", Value::Array(list)) => {
                    for part in list {
                        add(&mut met, "", self.count(part, depth)?);
                    }
                }
                ("anyOf" | "oneOf", Value::Array(list)) => {
                    // One of them counts at a time.
                    let mut most = Met::new();
                    for part in list {
                        for (place, count) in self.count(part, depth)? {
                            let own = most.entry(place).or_default();
                            *own = count.max(*own);
                        }
                    }
                    add(&mut met, "", most);
                }
                ("properties" | "patternProperties", Value::Object(named)) => {
                    for (name, part) in named {
                        add(&mut met, &format!("/{name}"), self.count(part, depth)?);
                    }
                }
                ("items" | "additionalItems", part @ Value::Object(_)) => {
                    add(&mut met, "/[]", self.count(part, depth)?);
                }
                ("additionalProperties", part) => add(&mut met, "/*", self.count(part, depth)?),
                ("prefixItems" | "items", Value::Array(list)) => {
                    for (i, part) in list.iter().enumerate() {
                        add(&mut met, &format!("/[{i}]"), self.count(part, depth)?);
                    }
                }
                _ => {}
            }
        }
        Some(met)
    }
}

/// Adds what meets at a place.
fn add(met: &mut Met, place: &str, more: Met) {
    for (below, count) in more {
        *met.entry(format!("{place}{below}")).or_default() += count;
    }
}
