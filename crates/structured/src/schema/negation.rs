//! The negation of a schema, as a schema, where that can be said without `not`.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::disjoint::written;
use super::{FURTHEST, NOTES, Object, Rewriter, patterns, whole};
use crate::language::Automaton;

/// References that are followed.
const DEEPEST: usize = 16;
/// Gaps between multiples of a step, on either side of zero.
const GAPS: i64 = 32;
/// Texts of which the others are said by a pattern, and how many bytes they may have together.
const FEW: usize = 16;
const SHORT: usize = 256;

const TYPES: [&str; 6] = ["array", "boolean", "null", "number", "object", "string"];

impl Rewriter<'_> {
    /// A schema that is met only where `schema` is not, and by as much of that as can be said;
    /// `None` where that cannot be. `known` is met in any case.
    pub(super) fn negated(&self, schema: &Value, known: Option<&Value>) -> Option<Value> {
        self.without(schema, known, DEEPEST)
    }

    fn without(&self, schema: &Value, known: Option<&Value>, deep: usize) -> Option<Value> {
        let deep = deep.checked_sub(1)?;
        let fields = match schema {
            Value::Bool(all) => return Some(Value::Bool(!all)),
            Value::Object(fields) => fields,
            _ => return None,
        };
        // It is not met where any of its keywords is not, of which one that can be said is enough.
        let (mut ways, mut said) = (Vec::new(), true);
        for (key, value) in fields.iter().filter(|(key, _)| !NOTES.contains(&key.as_str())) {
            said &= self.way(key, value, known, deep, &mut ways).is_some();
        }
        if ways.is_empty() && !said {
            return None;
        }
        ways.retain(|way| *way != Value::Bool(false));
        Some(match ways.len() {
            0 => Value::Bool(false),
            1 => ways.remove(0),
            _ => json!({ "anyOf": ways }),
        })
    }

    /// Adds the ways in which a keyword is not met.
    fn way(
        &self,
        key: &str,
        value: &Value,
        known: Option<&Value>,
        deep: usize,
        ways: &mut Vec<Value>,
    ) -> Option<()> {
        match (key, value) {
            ("$ref", Value::String(to)) => {
                let found = self.whole.pointer(to.strip_prefix('#')?)?;
                ways.push(self.without(found, known, deep)?);
            }
            ("not", schema) => ways.push(schema.clone()),
            ("required", Value::Array(names)) => {
                for name in names {
                    let absent = json!({ name.as_str()?: false });
                    ways.push(json!({ "type": "object", "properties": absent }));
                }
            }
            ("properties", Value::Object(properties)) => {
                for (name, schema) in properties {
                    let known = known.and_then(|known| self.property(known, name));
                    let Some(other) = self.without(schema, known, deep) else { continue };
                    if other != Value::Bool(false) {
                        let properties = json!({ name: other });
                        ways.push(json!({ "type": "object", "required": [name], "properties": properties }));
                    }
                }
            }
            ("multipleOf", step) => ways.extend(between_multiples(step)?),
            ("const", value) => ways.push(self.others(std::slice::from_ref(value), known)),
            ("enum", Value::Array(values)) => ways.push(self.others(values, known)),
            ("type", names) => ways.push(other_types(names)?),
            ("allOf", Value::Array(all)) => {
                ways.extend(all.iter().filter_map(|schema| self.without(schema, known, deep)));
            }
            ("anyOf", Value::Array(any)) => {
                let none: Option<Vec<Value>> =
                    any.iter().map(|schema| self.without(schema, known, deep)).collect();
                ways.push(json!({ "allOf": none? }));
            }
            ("pattern", Value::String(pattern)) => {
                // Of several that a text must match, it is enough not to match one.
                let all = patterns::plain(pattern, &self.budget);
                let mut said = false;
                for one in &all {
                    let others = Automaton::others(one, &self.budget);
                    let others = others.and_then(|others| self.texts(&others));
                    said |= others.is_some();
                    ways.extend(others);
                }
                said.then_some(())?;
            }
            (key, number) => ways.push(beyond(key, number)?),
        }
        Some(())
    }

    /// The schema that `known` has for a property.
    fn property<'s>(&'s self, known: &'s Value, name: &str) -> Option<&'s Value> {
        self.followed(known).get("properties")?.get(name)
    }

    /// All values but these, of those that are known to be possible; where that is not known, most
    /// others.
    fn others(&self, values: &[Value], known: Option<&Value>) -> Value {
        let known = known.and_then(|known| self.followed(known).as_object());
        let Some(possible) = known.and_then(possible) else { return self.unlike(values) };
        let values: HashSet<String> = values.iter().map(written).collect();
        let rest: Vec<Value> =
            possible.into_iter().filter(|value| !values.contains(&written(value))).collect();
        if rest.is_empty() { Value::Bool(false) } else { json!({ "enum": rest }) }
    }

    /// The schema of these texts.
    pub(super) fn texts(&self, texts: &Automaton) -> Option<Value> {
        if texts.is_empty() {
            return Some(Value::Bool(false));
        }
        Some(json!({ "type": "string", "pattern": texts.written(&self.budget)? }))
    }

    /// Values that are none of these: of other types, numbers between them, other strings, and
    /// arrays and objects that are longer than all, as strings are where these are many.
    fn unlike(&self, values: &[Value]) -> Value {
        let longest = |of: fn(&Value) -> Option<usize>| values.iter().filter_map(of).max();
        let text = longest(|value| value.as_str().map(|text| text.chars().count()));
        let array = longest(|value| value.as_array().map(Vec::len));
        let object = longest(|value| value.as_object().map(Map::len));
        let truths = values.iter().any(Value::is_boolean);
        let mut numbers: Vec<f64> = values.iter().filter_map(Value::as_f64).collect();
        numbers.sort_by(f64::total_cmp);
        let mut ways = Vec::new();
        let others = text.and_then(|_| self.other_texts(values));
        let taken = [
            ("array", array.is_some()),
            ("boolean", truths),
            ("null", values.contains(&Value::Null)),
            ("number", !numbers.is_empty()),
            ("object", object.is_some()),
            ("string", text.is_some()),
        ];
        let free: Vec<&str> =
            taken.iter().filter(|(_, taken)| !taken).map(|(kind, _)| *kind).collect();
        if !free.is_empty() {
            ways.push(json!({ "type": free }));
        }
        let longer = [
            ("array", "minItems", array),
            ("object", "minProperties", object),
            ("string", "minLength", text),
        ];
        for (kind, key, longest) in longer {
            match (kind, &others) {
                ("string", Some(others)) => ways.push(others.clone()),
                _ => {
                    ways.extend(longest.map(|longest| json!({ "type": kind, key: longest + 1 })));
                }
            }
        }
        if truths {
            let rest =
                [false, true].map(Value::from).into_iter().filter(|value| !values.contains(value));
            ways.extend(rest.map(|value| json!({ "const": value })));
        }
        if let (Some(first), Some(last)) = (numbers.first(), numbers.last()) {
            ways.push(json!({ "type": "number", "exclusiveMaximum": first }));
            ways.push(json!({ "type": "number", "exclusiveMinimum": last }));
            let between = numbers.windows(2).filter(|pair| pair[0] < pair[1]);
            ways.extend(between.map(|pair| {
                json!({ "type": "number", "exclusiveMinimum": pair[0], "exclusiveMaximum": pair[1] })
            }));
        }
        json!({ "anyOf": ways })
    }

    /// Texts that are none of these, if those are few.
    fn other_texts(&self, values: &[Value]) -> Option<Value> {
        let texts: Vec<&str> = values.iter().filter_map(Value::as_str).collect();
        if texts.len() > FEW || texts.iter().map(|text| text.len()).sum::<usize>() > SHORT {
            return None;
        }
        let signs = |text: &str| -> String {
            text.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect()
        };
        let texts: Vec<String> = texts.into_iter().map(signs).collect();
        let own = Automaton::of(&format!("^(?:{})$", texts.join("|")), &self.budget)?;
        self.texts(&own.complement())
    }
}

/// The values that a schema allows, if they are few.
pub(super) fn possible(schema: &Object) -> Option<Vec<Value>> {
    match (schema.get("enum"), schema.get("const"), schema.get("type").and_then(Value::as_str)) {
        (Some(Value::Array(values)), _, _) => Some(values.clone()),
        (_, Some(value), _) => Some(vec![value.clone()]),
        (_, _, Some("boolean")) => Some(vec![false.into(), true.into()]),
        (_, _, Some("null")) => Some(vec![Value::Null]),
        _ => None,
    }
}

/// Values of other types. Numbers that are no integers are left out with the integers.
fn other_types(names: &Value) -> Option<Value> {
    let names: Vec<&str> = match names {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().map(Value::as_str).collect::<Option<_>>()?,
        _ => return None,
    };
    let is = |kind: &str| names.contains(&kind) || kind == "number" && names.contains(&"integer");
    let rest: Vec<&str> = TYPES.into_iter().filter(|kind| !is(kind)).collect();
    Some(if rest.is_empty() { Value::Bool(false) } else { json!({ "type": rest }) })
}

/// Numbers between two neighbouring multiples of a step, in the gaps nearest to zero.
fn between_multiples(step: &Value) -> Option<impl Iterator<Item = Value>> {
    // Multiples are counted in decimals, in which they are exact.
    let text = step.as_number()?.to_string();
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, "0"));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let units: i64 = format!("{whole}{fraction}").parse().ok().filter(|units| *units > 0)?;
    let exponent: i64 = exponent.parse().ok()?;
    let exponent = exponent.checked_sub(i64::try_from(fraction.len()).ok()?)?;
    units.checked_mul(GAPS)?;
    let multiple = move |times: i64| format!("{}e{exponent}", times * units).parse::<f64>().ok();
    multiple(GAPS).filter(|furthest| furthest.abs() < FURTHEST as f64)?;
    let gap = move |low: i64| {
        let (low, high) = (multiple(low)?, multiple(low + 1)?);
        (low < high)
            .then(|| json!({ "type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high }))
    };
    Some((-GAPS..GAPS).filter_map(gap))
}

/// Values beyond a bound.
fn beyond(key: &str, bound: &Value) -> Option<Value> {
    let number = |other: &str| Some(json!({ "type": "number", other: bound }));
    let counted = whole(bound).as_u64();
    let fewer = |kind: &str, of: &str| match counted? {
        0 => Some(Value::Bool(false)),
        least => Some(json!({ "type": kind, format!("max{of}"): least - 1 })),
    };
    let more = |kind: &str, of: &str| {
        Some(json!({ "type": kind, format!("min{of}"): counted?.checked_add(1)? }))
    };
    match key {
        "minimum" => number("exclusiveMaximum"),
        "maximum" => number("exclusiveMinimum"),
        "exclusiveMinimum" => number("maximum"),
        "exclusiveMaximum" => number("minimum"),
        "minLength" => fewer("string", "Length"),
        "maxLength" => more("string", "Length"),
        "minItems" => fewer("array", "Items"),
        "maxItems" => more("array", "Items"),
        "minProperties" => fewer("object", "Properties"),
        "maxProperties" => more("object", "Properties"),
        _ => None,
    }
}
