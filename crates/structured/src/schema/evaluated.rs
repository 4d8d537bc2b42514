//! `unevaluatedProperties` and `unevaluatedItems`: what no other keyword of a schema looked at.
//! Where it can be told what the others look at, that is written down beside them, and what is left
//! is `additionalProperties` or `items`.

use serde_json::{Map, Value, json};

use super::{NOTES, Object, Rewriter, also};

/// References that are followed.
const DEEPEST: usize = 16;
/// Ways in which a schema may be met.
const MOST_WAYS: usize = 32;

/// Keywords that are ways to meet a schema: once these are written down, the keywords say nothing
/// more.
const CHOICES: [&str; 7] =
    ["anyOf", "dependencies", "dependentSchemas", "else", "if", "oneOf", "then"];

/// The properties and items that a schema evaluates.
#[derive(Debug, Clone, Default)]
struct Seen {
    names: Vec<String>,
    patterns: Vec<String>,
    /// All properties there are.
    every_name: bool,
    /// Items from the first on.
    items: usize,
    every_item: bool,
    /// Items that meet one of these, wherever they are.
    kinds: Vec<Value>,
}

/// A way to meet a schema: what holds then beside its own keywords, and what the schema looks at.
#[derive(Debug, Clone, Default)]
struct Way {
    holds: Vec<Value>,
    seen: Seen,
}

impl Way {
    fn where_holds(holds: Vec<Value>) -> Way {
        Way { holds, seen: Seen::default() }
    }
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
            let Some(ways) = self.ways(&Value::Object(own), DEEPEST) else { continue };
            let with = |Way { mut holds, seen }: Way| {
                holds.extend(match key {
                    "unevaluatedItems" => seen.items(&left),
                    _ => seen.names(&left),
                });
                json!({ "allOf": holds })
            };
            let ways: Vec<Value> = ways.into_iter().map(with).collect();
            fields.remove(key);
            CHOICES.iter().for_each(|choice| drop(fields.remove(*choice)));
            also(fields, json!({ "anyOf": ways }));
        }
    }

    /// The ways in which a schema is met, as far as they can be told; `None` where that depends on
    /// how it was come by, or they are too many. A way may look at more than is said here, never at
    /// less.
    fn ways(&self, schema: &Value, deep: usize) -> Option<Vec<Way>> {
        let deep = deep.checked_sub(1)?;
        let Value::Object(fields) = schema else { return Some(vec![Way::default()]) };
        let mut ways = vec![Way { holds: Vec::new(), seen: Seen::always(fields) }];
        for (key, value) in fields.iter().filter(|(key, _)| !NOTES.contains(&key.as_str())) {
            match (key.as_str(), value) {
                ("$dynamicRef" | "$recursiveRef", _) => return None,
                ("$ref", Value::String(to)) => {
                    let found = self.whole.pointer(to.strip_prefix('#')?)?;
                    ways = each(&ways, &self.ways(found, deep)?)?;
                }
                ("allOf", Value::Array(all)) => {
                    for schema in all {
                        ways = each(&ways, &self.ways(schema, deep)?)?;
                    }
                }
                ("anyOf", Value::Array(any)) => {
                    ways = each(&ways, &self.branches(any, |_| Some(Vec::new()), deep)?)?;
                }
                ("oneOf", Value::Array(any)) => {
                    let others = |own: usize| {
                        let others = any.iter().enumerate().filter(|(i, _)| *i != own);
                        others.map(|(_, other)| self.negated(other, Some(schema))).collect()
                    };
                    ways = each(&ways, &self.branches(any, others, deep)?)?;
                }
                ("if", condition) => {
                    ways = each(&ways, &self.outcomes(condition, fields, deep)?)?;
                }
                ("dependencies" | "dependentSchemas", Value::Object(all)) => {
                    for (name, what) in all {
                        ways = each(&ways, &self.depending(name, what, deep)?)?;
                    }
                }
                _ => {}
            }
        }
        Some(ways)
    }

    /// The ways of branches, beside each of which more holds.
    fn branches(
        &self,
        branches: &[Value],
        more: impl Fn(usize) -> Option<Vec<Value>>,
        deep: usize,
    ) -> Option<Vec<Way>> {
        let mut all = Vec::new();
        for (i, branch) in branches.iter().enumerate() {
            let holds = [vec![branch.clone()], more(i)?].concat();
            all.extend(each(&[Way::where_holds(holds)], &self.ways(branch, deep)?)?);
        }
        Some(all)
    }

    /// The ways of `if` with its `then` and `else`: what it looks at counts where it is met.
    fn outcomes(&self, condition: &Value, fields: &Object, deep: usize) -> Option<Vec<Way>> {
        let outcome = |key: &str| fields.get(key).cloned().unwrap_or(Value::Bool(true));
        let met = json!({ "allOf": [condition, outcome("then")] });
        let otherwise = self.negated(condition, Some(&Value::Object(fields.clone())))?;
        let unmet = outcome("else");
        let mut ways = self.branches(&[met], |_| Some(Vec::new()), deep)?;
        ways.extend(self.branches(&[unmet], |_| Some(vec![otherwise.clone()]), deep)?);
        Some(ways)
    }

    /// The ways of what depends on a property: it is absent, or that holds.
    fn depending(&self, name: &str, what: &Value, deep: usize) -> Option<Vec<Way>> {
        let absent = Way::where_holds(vec![json!({ "properties": { name: false } })]);
        let present = json!({ "required": [name] });
        let what = match what {
            Value::Array(names) => json!({ "required": names }),
            schema => schema.clone(),
        };
        let mut ways = self.branches(&[what], |_| Some(vec![present.clone()]), deep)?;
        ways.push(absent);
        Some(ways)
    }
}

/// Each way of the one with each of the other; `None` of too many.
fn each(ways: &[Way], others: &[Way]) -> Option<Vec<Way>> {
    let both = |way: &Way, other: &Way| {
        let mut both = way.clone();
        both.holds.extend(other.holds.iter().cloned());
        both.seen.add(other.seen.clone());
        both
    };
    let pairs = ways.iter().flat_map(|way| others.iter().map(move |other| both(way, other)));
    (ways.len() * others.len() <= MOST_WAYS).then(|| pairs.collect())
}

impl Seen {
    /// The properties and items that a schema's own keywords evaluate, without its subschemas,
    /// however it is met.
    fn always(fields: &Object) -> Seen {
        let mut seen = Seen::default();
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("properties", Value::Object(all)) => seen.names.extend(all.keys().cloned()),
                ("patternProperties", Value::Object(all)) => {
                    seen.patterns.extend(all.keys().cloned());
                }
                ("additionalProperties" | "unevaluatedProperties", _) => seen.every_name = true,
                ("prefixItems", Value::Array(items)) => seen.items = items.len(),
                ("items" | "additionalItems" | "unevaluatedItems", _) => seen.every_item = true,
                ("contains", kind) => seen.kinds.push(kind.clone()),
                _ => {}
            }
        }
        seen
    }

    fn add(&mut self, other: Seen) {
        self.names.extend(other.names);
        self.patterns.extend(other.patterns);
        self.every_name |= other.every_name;
        self.items = self.items.max(other.items);
        self.every_item |= other.every_item;
        self.kinds.extend(other.kinds);
    }

    /// The schema of the other properties; `None` where there are none.
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

    /// The schema of the other items; `None` where there are none.
    fn items(&self, left: &Value) -> Option<Value> {
        let first = vec![true; self.items];
        let any = [&self.kinds[..], std::slice::from_ref(left)].concat();
        let rest = if self.kinds.is_empty() { left.clone() } else { json!({ "anyOf": any }) };
        (!self.every_item).then(|| json!({ "prefixItems": first, "items": rest }))
    }
}
