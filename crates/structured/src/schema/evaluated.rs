//! `unevaluatedProperties` and `unevaluatedItems`: what no other keyword of a schema looked at. Where it can be told what the others
//! look at, that is written down beside them, and what is left is `additionalProperties` or `items`.

use serde_json::{Map, Value, json};

use super::{NOTES, Object, Rewriter, also};

/// References that are followed.
const DEEPEST: usize = 16;

/// Keywords by which a schema looks at an instance through other schemas, and not always through the same.
const CHOICES: [&str; 7] =
    ["$dynamicRef", "dependencies", "dependentSchemas", "else", "if", "oneOf", "then"];

/// What a schema looks at in any case.
#[derive(Debug, Clone, Default)]
struct Seen {
    names: Vec<String>,
    patterns: Vec<String>,
    /// All properties there are.
    every_name: bool,
    /// Items from the first on.
    items: usize,
    every_item: bool,
}

impl Rewriter<'_> {
    /// Says what is left over in other keywords, if a schema has it.
    pub(super) fn evaluated(&self, fields: &mut Object) {
        for key in ["unevaluatedProperties", "unevaluatedItems"] {
            let Some(left) = fields.get(key).cloned() else { continue };
            if left == Value::Bool(true) {
                fields.remove(key);
                continue;
            }
            let mut own = fields.clone();
            own.remove(key);
            let any = own.remove("anyOf");
            let Some(seen) = self.seen(&Value::Object(own), DEEPEST) else { continue };
            let rest = |seen: &Seen| {
                if key == "unevaluatedItems" { seen.items(&left) } else { seen.names(&left) }
            };
            let Some(Value::Array(branches)) = any else {
                fields.remove(key);
                rest(&seen).into_iter().for_each(|rest| also(fields, rest));
                continue;
            };
            let with = |branch: &Value| {
                let mut all = seen.clone();
                all.add(self.seen(branch, DEEPEST)?);
                let rest = rest(&all).unwrap_or(Value::Bool(true));
                Some(json!({ "allOf": [branch, rest] }))
            };
            if let Some(branches) = branches.iter().map(with).collect::<Option<Vec<_>>>() {
                fields.remove(key);
                fields.insert("anyOf".to_string(), branches.into());
            }
        }
    }

    /// What a schema looks at; `None` where that depends on the instance.
    fn seen(&self, schema: &Value, deep: usize) -> Option<Seen> {
        let deep = deep.checked_sub(1)?;
        let mut seen = Seen::default();
        let Value::Object(fields) = schema else { return Some(seen) };
        if CHOICES.iter().any(|key| fields.contains_key(*key)) {
            return None;
        }
        for (key, value) in fields.iter().filter(|(key, _)| !NOTES.contains(&key.as_str())) {
            match (key.as_str(), value) {
                ("properties", Value::Object(all)) => seen.names.extend(all.keys().cloned()),
                ("patternProperties", Value::Object(all)) => {
                    seen.patterns.extend(all.keys().cloned());
                }
                ("additionalProperties" | "unevaluatedProperties", _) => seen.every_name = true,
                ("prefixItems", Value::Array(items)) => seen.items = seen.items.max(items.len()),
                ("items" | "additionalItems" | "unevaluatedItems", _) => seen.every_item = true,
                // It looks at items here and there.
                ("contains", _) => return None,
                ("allOf", Value::Array(all)) => {
                    for schema in all {
                        seen.add(self.seen(schema, deep)?);
                    }
                }
                ("anyOf", Value::Array(any)) => {
                    // What all of them look at would do; that none looks at anything is what there is.
                    for schema in any {
                        let own = self.seen(schema, deep)?;
                        if !own.is_nothing() {
                            return None;
                        }
                    }
                }
                ("$ref", Value::String(to)) => {
                    let found = self.whole.pointer(to.strip_prefix('#')?)?;
                    seen.add(self.seen(found, deep)?);
                }
                _ => {}
            }
        }
        Some(seen)
    }
}

impl Seen {
    fn add(&mut self, other: Seen) {
        self.names.extend(other.names);
        self.patterns.extend(other.patterns);
        self.every_name |= other.every_name;
        self.items = self.items.max(other.items);
        self.every_item |= other.every_item;
    }

    fn is_nothing(&self) -> bool {
        let some = self.every_name || self.every_item || self.items > 0;
        !some && self.names.is_empty() && self.patterns.is_empty()
    }

    /// What holds for the other properties; nothing where there are none.
    fn names(&self, left: &Value) -> Option<Value> {
        let named = |names: &[String]| -> Map<String, Value> {
            names.iter().map(|name| (name.clone(), Value::Bool(true))).collect()
        };
        (!self.every_name).then(|| {
            json!({
                "properties": named(&self.names),
                "patternProperties": named(&self.patterns),
                "additionalProperties": left,
            })
        })
    }

    /// What holds for the other items; nothing where there are none.
    fn items(&self, left: &Value) -> Option<Value> {
        let first = vec![true; self.items];
        (!self.every_item).then(|| json!({ "prefixItems": first, "items": left }))
    }
}
