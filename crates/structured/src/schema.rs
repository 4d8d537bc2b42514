//! JSON schemas in the keywords that llguidance follows. What others say is said in these, alike,
//! or where that cannot be, in a way that allows less:
//!
//! - `contains` is met by one of the first [`PLACES`] items;
//! - an array of which no more than some items may meet `contains` begins with those that do;
//! - what `unevaluatedProperties` and `unevaluatedItems` look at is what one branch of `anyOf`
//!   names, not what all that fit do;
//! - arrays of different items of the few values that a schema lists are short, or have them in
//!   the schema's order;
//! - what is no multiple of a number lies in one of the gaps between multiples next to zero;
//! - of the branches of `oneOf`, one that can be told apart from no other is left out;
//! - an object that must or may have some number of properties has those that are listed;
//! - formats of names and addresses in any script are those in ASCII;
//! - bounds that leave room for numbers beyond [`FURTHEST`] leave none.
//!
//! So whatever is written is valid by the schema as it was given. A format that is not JSON
//! Schema's own says nothing, as the standard has it. A keyword that can be put into no other
//! stays, and llguidance refuses it by its name.

mod counts;
mod different;
mod disjoint;
mod evaluated;
mod negation;
mod patterns;
mod references;
mod together;

use crate::distinct::Places;
use crate::language::{Automaton, Budget};
use formats::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

/// A schema that is no boolean.
type Object = Map<String, Value>;

/// Items of which one meets `contains`.
const PLACES: usize = 4;
/// Arrays that are listed in place of `uniqueItems`.
const MOST_ARRAYS: usize = 400;
/// Arrays that are made to find out which of them are listed.
const MOST_TRIED: usize = 16 * MOST_ARRAYS;
/// Values of items that must differ, if they are listed.
const MOST_LISTED: u64 = 1024;
/// Dependencies of one schema, each of which doubles its alternatives.
const MOST_DEPENDENCIES: usize = 6;
/// Branches of `oneOf` that are held against each other.
const MOST_BRANCHES: usize = 64;
/// Pairs of them that are told apart by what the other is not.
const MOST_PAIRS: usize = 16;
/// How far from zero numbers may be. llguidance reads them as f64, which tells integers apart up to
/// here, and beyond 64 bits its ranges do not end.
const FURTHEST: i64 = (1 << 53) - 1;
/// By how many times a schema may become longer.
const MOST_TIMES: usize = 8;
/// Bytes by which it may become longer beside that.
const MOST_MORE: usize = 16 << 10;

/// Keywords whose value is a schema, a list of schemas, and schemas by names.
const ONE: [&str; 12] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
const LISTS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
const NAMED: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];

/// Keywords that say nothing about what is valid.
const NOTES: [&str; 17] = [
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];

/// Keywords of JSON Schema, of any draft, that are in no other list.
const OTHERS: [&str; 29] = [
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "$ref",
    "$vocabulary",
    "const",
    "dependentRequired",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "id",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "pattern",
    "required",
    "type",
    "uniqueItems",
    "divisibleBy",
    "extends",
];

/// Formats that llguidance follows.
const FOLLOWED: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];
/// Formats that are not followed, and what is: another, which allows less, or a pattern.
const FORMATS: [(&str, &str); 5] = [
    ("idn-email", "email"),
    ("idn-hostname", "hostname"),
    ("iri", "uri"),
    ("iri-reference", "uri"),
    ("uri-reference", "uri"),
];
const PATTERNS: [(&str, &str); 7] = [
    ("base64", BASE64),
    ("byte", BASE64),
    ("json-pointer", "^(/([^~/]|~[01])*)*$"),
    ("relative-json-pointer", "^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$"),
    ("regex", "^[A-Za-z0-9 _-]*$"),
    ("uri-template", "^[A-Za-z0-9/_.-]*(\\{[A-Za-z0-9_]+\\}[A-Za-z0-9/_.-]*)*$"),
    ("uuid4", "^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"),
];
const BASE64: &str = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)?$";

/// A schema in the keywords that llguidance follows. Where there are `places` to note them, arrays
/// whose items must differ are noted there, and items may be of any kind.
///
/// # Errors
/// References to what is not part of it; one that would become too long, or that asks for a number
/// too far from zero.
pub(crate) fn plain(schema: &Value, places: Option<&mut Places>) -> Result<Value> {
    let mut plain = references::resolved(schema)?;
    let whole = plain.clone();
    let mut rewriter = Rewriter { whole: &whole, budget: Budget::new(), refused: None };
    rewriter.schema(&mut plain);
    if let Some(refused) = rewriter.refused {
        return Err(refused);
    }
    near(&mut plain)?;
    patterns::quoted(&mut plain);
    if let Some(places) = places {
        different::noted(&mut plain, places);
    }
    let (long, most) = (plain.to_string().len(), schema.to_string().len() * MOST_TIMES + MOST_MORE);
    if long > most {
        let expected = format!("conditions that take at most {most} bytes as alternatives");
        return Err(Error::new("schema", expected, long).of(ErrorKind::Unsupported));
    }
    together::check(&plain)?;
    together::check_properties(&plain)?;
    Ok(plain)
}

/// The parts of a schema that are schemas, as JSON pointers from it.
fn parts(schema: &Value) -> Vec<String> {
    let Value::Object(fields) = schema else { return Vec::new() };
    let mut all = Vec::new();
    for (key, value) in fields {
        let key: &str = key;
        match value {
            Value::Array(list) if LISTS.contains(&key) => {
                all.extend((0..list.len()).map(|i| format!("/{key}/{i}")));
            }
            Value::Object(named) if NAMED.contains(&key) => {
                let schemas = named.iter().filter(|(_, value)| is_schema(value));
                all.extend(
                    schemas.map(|(name, _)| format!("/{key}/{}", references::segment(name))),
                );
            }
            value if ONE.contains(&key) && is_schema(value) => all.push(format!("/{key}")),
            _ => {}
        }
    }
    all
}

fn is_schema(value: &Value) -> bool {
    value.is_object() || value.is_boolean()
}

/// Adds a schema that has to be met as well.
fn also(schema: &mut Object, more: Value) {
    let all = schema.entry("allOf").or_insert_with(|| json!([]));
    if let Value::Array(all) = all {
        all.push(more);
    }
}

struct Rewriter<'a> {
    /// The schema that references are into.
    whole: &'a Value,
    /// What automata of its patterns may still take.
    budget: Budget,
    /// Why the schema cannot be followed, if that was found out.
    refused: Option<Error>,
}

impl Rewriter<'_> {
    /// The schema itself, or the one that it refers to and nothing else.
    fn followed<'s>(&'s self, schema: &'s Value) -> &'s Value {
        let mut at = schema;
        // A reference that leads to itself leads nowhere.
        for _ in 0..16 {
            let Some(to) = at.get("$ref").and_then(Value::as_str) else { return at };
            let more = |fields: &Object| {
                fields.keys().any(|key| key != "$ref" && !NOTES.contains(&key.as_str()))
            };
            match to.strip_prefix('#').and_then(|pointer| self.whole.pointer(pointer)) {
                Some(found) if !at.as_object().is_some_and(more) => at = found,
                _ => return at,
            }
        }
        schema
    }

    /// Rewrites a schema and all of its parts.
    fn schema(&mut self, schema: &mut Value) {
        if let Value::Object(fields) = schema {
            unknown(fields);
            self.evaluated(fields);
            // What is said about what is not met comes before anything is said in a way that allows
            // less.
            self.conditions(fields);
            self.exclusions(fields);
            dependencies(fields);
            self.contained(fields);
            self.unique(fields);
            self.names(fields);
            counts::listed(fields);
            patterns::translated(fields, &self.budget);
            patterns::apart(fields, &self.budget);
            details(fields);
        }
        for part in parts(schema) {
            if let Some(part) = schema.pointer_mut(&part) {
                self.schema(part);
            }
        }
    }

    /// `if`, `then` and `else` as alternatives.
    fn conditions(&self, fields: &mut Object) {
        let Some(condition) = fields.get("if") else {
            fields.remove("then");
            fields.remove("else");
            return;
        };
        if !fields.contains_key("then") && !fields.contains_key("else") {
            fields.remove("if");
            return;
        }
        let known = Value::Object(fields.clone());
        let Some(otherwise) = self.negated(condition, Some(&known)) else { return };
        let condition = condition.clone();
        let mut outcome = |key: &str| fields.remove(key).unwrap_or(Value::Bool(true));
        let (then, other) = (outcome("then"), outcome("else"));
        fields.remove("if");
        also(
            fields,
            json!({ "anyOf": [{ "allOf": [condition, then] }, { "allOf": [otherwise, other] }] }),
        );
    }

    /// `not`, and `oneOf` whose branches say what they are not.
    fn exclusions(&self, fields: &mut Object) {
        if !fields.contains_key("not") && !fields.contains_key("oneOf") {
            return;
        }
        let known = Value::Object(fields.clone());
        if let Some(excluded) = fields.get("not")
            && let Some(rest) = self.negated(excluded, Some(&known))
        {
            fields.remove("not");
            also(fields, rest);
        }
        let Some(Value::Array(branches)) = fields.get("oneOf") else { return };
        if !(2..=MOST_BRANCHES).contains(&branches.len()) {
            return;
        }
        let kinds = disjoint::types(fields);
        let meets =
            |i: usize, j: usize| i != j && !self.disjoint(&branches[i], &branches[j], kinds);
        // Those that each branch may be met together with.
        let met: Vec<Vec<usize>> = (0..branches.len())
            .map(|i| (0..branches.len()).filter(|j| meets(i, *j)).collect())
            .collect();
        if met.iter().map(Vec::len).sum::<usize>() > 2 * MOST_PAIRS {
            return;
        }
        let alone = |(branch, others): (&Value, &Vec<usize>)| {
            let mut all = vec![branch.clone()];
            for other in others.iter().map(|j| self.negated(&branches[*j], Some(&known))) {
                // The rest of the others' complement may have none of this branch's values.
                all.push(other.filter(|other| !self.disjoint(branch, other, kinds))?);
            }
            Some(if all.len() == 1 { branch.clone() } else { json!({ "allOf": all }) })
        };
        let alternatives: Vec<Value> = branches.iter().zip(&met).filter_map(alone).collect();
        if alternatives.is_empty() {
            return;
        }
        fields.remove("oneOf");
        also(fields, json!({ "anyOf": alternatives }));
    }

    /// `contains` as alternatives of items.
    fn contained(&self, fields: &mut Object) {
        let Some(wanted) = fields.get("contains").cloned() else {
            fields.remove("minContains");
            fields.remove("maxContains");
            return;
        };
        let count = |key: &str| fields.get(key).map(|number| whole(number).as_u64());
        let least = match count("minContains").unwrap_or(Some(1)) {
            Some(least @ 0..=64) => least as usize,
            _ => return,
        };
        let alternatives: Vec<Value> = match count("maxContains") {
            None if least == 0 => vec![Value::Bool(true)],
            None => {
                let with = |before: usize| {
                    let items = [vec![Value::Bool(true); before], vec![wanted.clone(); least]];
                    json!({ "minItems": before + least, "prefixItems": items.concat() })
                };
                (0..if least == 1 { PLACES } else { 1 }).map(with).collect()
            }
            Some(None) => return,
            Some(Some(most)) => {
                let item = fields.get("items").unwrap_or(&Value::Bool(true));
                let Some(others) = self.negated(&wanted, Some(item)) else { return };
                let most = (most as usize).min(least + PLACES);
                let with = |some: usize| {
                    let first = vec![wanted.clone(); some];
                    json!({ "minItems": some, "prefixItems": first, "items": others })
                };
                let mut all: Vec<Value> = (least..=most).map(with).collect();
                all.push(json!({ "type": ["boolean", "null", "number", "object", "string"] }));
                all
            }
        };
        for key in ["contains", "maxContains", "minContains"] {
            fields.remove(key);
        }
        also(fields, json!({ "anyOf": alternatives }));
    }

    /// `propertyNames` as patterns of properties.
    fn names(&self, fields: &mut Object) {
        let Some(names) = fields.get("propertyNames") else { return };
        let rule = match self.followed(names) {
            Value::Bool(true) => None,
            Value::Bool(false) => {
                fields.remove("propertyNames");
                also(fields, json!({ "maxProperties": 0 }));
                return;
            }
            names => match Names::of(names) {
                Some(rule) => Some(rule),
                None => match self.named(names, MOST_BRANCHES) {
                    Some(names) if names.is_empty() => {
                        fields.remove("propertyNames");
                        also(fields, json!({ "maxProperties": 0 }));
                        return;
                    }
                    Some(names) => match names.written(&self.budget) {
                        Some(pattern) => Some(Names::Pattern(pattern)),
                        None => return,
                    },
                    None => return,
                },
            },
        };
        if let Some(rule) = rule {
            if fields.contains_key("patternProperties") {
                return;
            }
            let listed = fields.get("properties").and_then(Value::as_object);
            let listed: Vec<String> = listed.into_iter().flat_map(Object::keys).cloned().collect();
            let fits: Option<Vec<bool>> =
                listed.iter().map(|name| rule.fits(name, &self.budget)).collect();
            let Some(fits) = fits else { return };
            let Some(rule) = self.unlisted(rule, &listed) else { return };
            if let Some(Value::Object(properties)) = fields.get_mut("properties") {
                for (name, _) in listed.iter().zip(&fits).filter(|(_, fits)| !**fits) {
                    properties.insert(name.clone(), Value::Bool(false));
                }
            }
            let others = fields.remove("additionalProperties").unwrap_or(Value::Bool(true));
            let rule = rule.beside(fields, &listed, &others);
            if let Some(rule) = rule.filter(|_| others != Value::Bool(false)) {
                fields.insert("patternProperties".to_string(), json!({ rule.pattern(): others }));
            }
            fields.insert("additionalProperties".to_string(), Value::Bool(false));
        }
        fields.remove("propertyNames");
    }

    /// A condition on names that no listed property meets, whose schemas are their own.
    fn unlisted(&self, rule: Names, listed: &[String]) -> Option<Names> {
        if listed.is_empty() || matches!(rule, Names::These(_)) {
            return Some(rule);
        }
        let own = Names::These(listed.to_vec()).pattern();
        let others = Automaton::of(&own, &self.budget)?.complement();
        let names = patterns::automaton(&rule.pattern(), &self.budget)?;
        let names = names.and(&others, &self.budget)?;
        Some(match names.is_empty() {
            true => Names::These(Vec::new()),
            false => Names::Pattern(names.written(&self.budget)?),
        })
    }

    /// Ends arrays that begin with items of their own where the items before one may be all that it
    /// may be; refuses a schema whose arrays must be longer.
    fn differing(&mut self, fields: &mut Object, least: u64, most: u64) {
        let first = fields.get("prefixItems").and_then(Value::as_array);
        let first: Vec<&Value> = first.into_iter().flatten().collect();
        let any = Value::Bool(true);
        let rest = fields.get("items").unwrap_or(&any);
        let bounds = first.iter().copied().chain([rest]).map(|item| self.most_values(item));
        let bounds: Vec<Option<u64>> = bounds.collect();
        let open = |at: &u64| {
            let bound = bounds[(*at as usize).min(first.len())];
            bound.is_none_or(|bound| bound > *at)
        };
        let beyond = bounds[first.len()].unwrap_or(0).max(first.len() as u64);
        let longest = (0..=beyond.min(MOST_LISTED)).take_while(open).count() as u64;
        if longest > beyond.min(MOST_LISTED) || longest >= most {
            return;
        }
        if longest < least {
            let expected = "items of which each has more values than there are items before it";
            let error = Error::new("schema: uniqueItems", expected, format!("item {longest}"));
            self.refused = Some(error.of(ErrorKind::Unsupported));
            return;
        }
        fields.insert("maxItems".to_string(), longest.into());
    }

    /// The texts that a schema allows, as far as it is one of texts.
    fn named(&self, schema: &Value, deep: usize) -> Option<Automaton> {
        let deep = deep.checked_sub(1)?;
        let budget = &self.budget;
        let all = || Automaton::of("", budget);
        let fields = match self.followed(schema) {
            Value::Bool(true) => return all(),
            Value::Bool(false) => return Some(all()?.complement()),
            Value::Object(fields) => fields,
            _ => return None,
        };
        let number = |key: &str| fields.get(key).map(|number| whole(number).as_u64());
        let mut texts = all()?;
        for (key, value) in fields.iter().filter(|(key, _)| !NOTES.contains(&key.as_str())) {
            let parts = value.as_array().into_iter().flatten();
            let more = match (key.as_str(), value) {
                ("type", _) if disjoint::types(fields) & disjoint::STRING == 0 => {
                    all()?.complement()
                }
                ("type", _) => continue,
                ("pattern", Value::String(pattern)) => patterns::automaton(pattern, budget)?,
                ("minLength" | "maxLength", _) => {
                    let least = number("minLength").unwrap_or(Some(0))?;
                    let most = number("maxLength")
                        .map_or(Some(String::new()), |most| most.map(|most| most.to_string()))?;
                    Automaton::of(&format!("^(?s:.){{{least},{most}}}$"), budget)?
                }
                ("enum", Value::Array(_)) | ("const", _) => {
                    let values = negation::possible(fields)?;
                    let names = values.iter().filter_map(Value::as_str).map(str::to_string);
                    let names: Vec<String> = names.collect();
                    match names.is_empty() {
                        true => all()?.complement(),
                        false => Automaton::of(&Names::These(names).pattern(), budget)?,
                    }
                }
                ("not", part) => self.named(part, deep)?.complement(),
                ("allOf", _) => {
                    let mut both = all()?;
                    for part in parts {
                        both = both.and(&self.named(part, deep)?, budget)?;
                    }
                    both
                }
                ("anyOf", _) => {
                    // What is in none of them is not.
                    let mut none = all()?;
                    for part in parts {
                        none = none.and(&self.named(part, deep)?.complement(), budget)?;
                    }
                    none.complement()
                }
                _ => return None,
            };
            texts = texts.and(&more, budget)?;
        }
        Some(texts)
    }

    /// `uniqueItems`, where there are few values that an item may have.
    fn unique(&mut self, fields: &mut Object) {
        if fields.get("uniqueItems") == Some(&Value::Bool(false)) {
            fields.remove("uniqueItems");
        }
        let whole = |key: &str| fields.get(key).map(whole).and_then(|number| number.as_u64());
        let (least, most) = (whole("minItems").unwrap_or(0), whole("maxItems").unwrap_or(u64::MAX));
        if fields.get("uniqueItems") != Some(&Value::Bool(true)) || most <= 1 {
            fields.remove("uniqueItems");
            return;
        }
        let others = json!({ "type": ["boolean", "null", "number", "object", "string"] });
        let room = fields.get("items").filter(|_| !fields.contains_key("prefixItems"));
        if let Some((items, bound)) = room.and_then(|items| Some((items, self.most_values(items)?)))
        {
            let listed = self.listed(items);
            let room = listed.as_ref().map_or(bound, |values| values.len() as u64);
            if room < least {
                // No array has so many.
                also(fields, others);
                return;
            }
            match listed {
                None if bound < MOST_LISTED => {
                    let expected = "items whose values can be listed, or a thousand of them";
                    let error = Error::new("schema: uniqueItems", expected, items);
                    self.refused = Some(error.of(ErrorKind::Unsupported));
                    return;
                }
                None => {}
                Some(values) => {
                    if values.iter().any(|value| value.is_f64()) {
                        // Each in one way, which is not enough for a fraction to differ.
                        fields.insert("items".to_string(), json!({ "enum": values }));
                    }
                    // Behind the last of them none may follow.
                    fields.insert("maxItems".to_string(), room.min(most).into());
                }
            }
        }
        let has_first = fields.contains_key("prefixItems");
        let values = |schema: &Value| {
            let few = self.followed(schema).as_object().and_then(negation::possible);
            few.or_else(|| if has_first { self.listed(schema) } else { None })
        };
        let first = fields.get("prefixItems").and_then(Value::as_array);
        let first = first.into_iter().flatten().map(values).collect::<Option<Vec<_>>>();
        let Some(first) = first else {
            self.differing(fields, least, most);
            return;
        };
        let rest = match fields.get("items").map(values) {
            Some(Some(rest)) => rest,
            // Those behind may be anything, or nothing: they are left out.
            _ if !first.is_empty() => Vec::new(),
            _ => return,
        };
        // All arrays of different values, by length: in every order, as long as they are few, and
        // then in the schema's.
        let (mut all, mut longest): (Vec<Vec<Value>>, Vec<Vec<Value>>) =
            (Vec::new(), vec![Vec::new()]);
        let mut in_order = false;
        for length in 0.. {
            if length >= least {
                all.extend(longest.iter().cloned());
            }
            let next = first.get(length as usize).unwrap_or(&rest);
            if longest.len() * next.len() > MOST_TRIED {
                if all.iter().all(Vec::is_empty) {
                    return;
                }
                break;
            }
            let longer = |array: &Vec<Value>, in_order: bool| {
                let last = array.last().filter(|_| in_order);
                let from = last.and_then(|last| next.iter().position(|value| value == last));
                let new = next[from.map_or(0, |from| from + 1)..].iter();
                let new = new.filter(|value| !array.contains(value));
                new.map(|value| [array, std::slice::from_ref(value)].concat()).collect::<Vec<_>>()
            };
            let more = |in_order: bool, from: &[Vec<Value>]| -> Vec<Vec<Value>> {
                from.iter().flat_map(|array| longer(array, in_order)).collect()
            };
            let mut found = more(in_order, &longest);
            if all.len() + found.len() > MOST_ARRAYS && !in_order && first.is_empty() {
                in_order = true;
                let position = |value: &Value| next.iter().position(|other| other == value);
                longest.retain(|array| array.iter().map(position).is_sorted());
                found = more(in_order, &longest);
            }
            longest = found;
            if longest.is_empty() || length >= most {
                break;
            }
            if all.len() + longest.len() > MOST_ARRAYS {
                // Longer ones are left out, unless none with items is short enough.
                if all.iter().all(Vec::is_empty) {
                    return;
                }
                break;
            }
        }
        for key in ["items", "maxItems", "minItems", "prefixItems", "uniqueItems"] {
            fields.remove(key);
        }
        also(fields, json!({ "anyOf": [{ "enum": all }, others] }));
    }
}

/// A condition on the names of properties.
enum Names {
    These(Vec<String>),
    Long(u64, Option<u64>),
    Pattern(String),
}

impl Names {
    /// The condition that a schema puts on names, if it is a single one.
    fn of(schema: &Value) -> Option<Names> {
        let fields = schema.as_object()?;
        let says = |key: &&String| !NOTES.contains(&key.as_str()) && *key != "type";
        if fields.get("type").is_some_and(|kind| kind != "string") {
            return None;
        }
        let keys: Vec<&str> = fields.keys().filter(says).map(String::as_str).collect();
        let number = |key: &str| fields.get(key).map(|number| whole(number).as_u64());
        match keys[..] {
            [] => Some(Names::Long(0, None)),
            ["enum"] => {
                let names = fields["enum"].as_array()?.iter().filter_map(Value::as_str);
                Some(Names::These(names.map(str::to_string).collect()))
            }
            ["const"] => Some(Names::These(vec![fields["const"].as_str()?.to_string()])),
            ["anyOf" | "oneOf"] => {
                let mut all = Vec::new();
                for part in fields[keys[0]].as_array()? {
                    let Names::These(names) = Names::of(part)? else { return None };
                    all.extend(names);
                }
                // Of `oneOf`, a name in two parts is none.
                let once = |name: &String| all.iter().filter(|other| *other == name).count() == 1;
                let single = keys[0] == "anyOf" || all.iter().all(once);
                single.then_some(Names::These(all))
            }
            ["pattern"] => Some(Names::Pattern(fields["pattern"].as_str()?.to_string())),
            _ if keys.iter().all(|key| ["minLength", "maxLength"].contains(key)) => {
                let least = number("minLength").unwrap_or(Some(0))?;
                let most = match number("maxLength") {
                    Some(most) => Some(most?),
                    None => None,
                };
                Some(Names::Long(least, most))
            }
            _ => None,
        }
    }

    /// The names that are left beside listed properties and beside those that must be there, which
    /// are listed as well; none if no name is left. A pattern of listed names alone is one that
    /// llguidance finds nothing in.
    fn beside(self, fields: &mut Object, listed: &[String], others: &Value) -> Option<Names> {
        let Names::These(mut names) = self else { return Some(self) };
        names.retain(|name| !listed.contains(name));
        let required: Vec<String> = match fields.get("required") {
            Some(Value::Array(all)) => {
                all.iter().filter_map(Value::as_str).map(str::to_string).collect()
            }
            _ => Vec::new(),
        };
        let (needed, left): (Vec<String>, Vec<String>) =
            names.into_iter().partition(|name| required.contains(name));
        if !needed.is_empty() {
            let properties =
                fields.entry("properties").or_insert_with(|| Value::Object(Object::new()));
            if let Value::Object(properties) = properties {
                properties.extend(needed.into_iter().map(|name| (name, others.clone())));
            }
        }
        (!left.is_empty()).then_some(Names::These(left))
    }

    fn pattern(&self) -> String {
        match self {
            Names::These(names) => {
                let escape = |c: char| match c {
                    c if c.is_alphanumeric() || c == '_' => c.to_string(),
                    c => format!("\\u{{{:x}}}", u32::from(c)),
                };
                let names = names.iter().map(|name| name.chars().map(escape).collect::<String>());
                format!("^({})$", names.collect::<Vec<_>>().join("|"))
            }
            Names::Long(least, most) => {
                let most = most.map_or(String::new(), |most| most.to_string());
                format!("^(?s:.){{{least},{most}}}$")
            }
            Names::Pattern(pattern) => pattern.clone(),
        }
    }

    /// Whether a name is such a one; `None` where that is not known here.
    fn fits(&self, name: &str, budget: &Budget) -> Option<bool> {
        let long = name.chars().count() as u64;
        match self {
            Names::These(names) => Some(names.iter().any(|own| own == name)),
            Names::Long(least, most) => {
                Some(long >= *least && most.is_none_or(|most| long <= most))
            }
            Names::Pattern(pattern) => Some(patterns::automaton(pattern, budget)?.has(name)),
        }
    }
}

/// `dependentRequired`, `dependentSchemas` and what `dependencies` said before them: each property
/// is absent, or what depends on it holds.
fn dependencies(fields: &mut Object) {
    for key in ["dependencies", "dependentRequired", "dependentSchemas"] {
        let Some(Value::Object(all)) = fields.get(key) else { continue };
        if all.len() > MOST_DEPENDENCIES {
            continue;
        }
        let either = |(name, what): (&String, &Value)| {
            let absent = json!({ "properties": { name: false } });
            let holds = match what {
                Value::Array(names) => {
                    let names: Vec<Value> = std::iter::once(name.as_str().into())
                        .chain(names.iter().cloned())
                        .collect();
                    json!({ "required": names })
                }
                schema => json!({ "allOf": [{ "required": [name] }, schema] }),
            };
            json!({ "anyOf": [absent, holds] })
        };
        let all: Vec<Value> = all.iter().map(either).collect();
        fields.remove(key);
        all.into_iter().for_each(|either| also(fields, either));
    }
}

/// Draws bounds to within [`FURTHEST`], in a schema and all of its parts, and refuses numbers that
/// are beyond.
fn near(schema: &mut Value) -> Result<()> {
    const LOWER: [&str; 2] = ["exclusiveMinimum", "minimum"];
    const UPPER: [&str; 2] = ["exclusiveMaximum", "maximum"];
    let far = |number: &Value| number.as_f64().map_or(0.0, |x| x / FURTHEST as f64);
    let refused = |key: &str, number: &Value| {
        let expected = format!("a number from -{FURTHEST} to {FURTHEST}");
        Err(Error::new(format!("schema: {key}"), expected, number).of(ErrorKind::Unsupported))
    };
    for (key, value) in schema.as_object_mut().into_iter().flatten() {
        let key: &str = key;
        match far(value) {
            x if x < -1.0 && LOWER.contains(&key) => *value = (-FURTHEST).into(),
            x if x > 1.0 && UPPER.contains(&key) => *value = FURTHEST.into(),
            x if x.abs() > 1.0 && [LOWER, UPPER].concat().contains(&key) => {
                return refused(key, value);
            }
            _ if ["const", "enum"].contains(&key) => {
                let mut values = vec![&*value];
                while let Some(value) = values.pop() {
                    match value {
                        Value::Array(items) => values.extend(items),
                        Value::Object(fields) => values.extend(fields.values()),
                        number if far(number).abs() > 1.0 => return refused(key, number),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if let Value::Object(fields) = schema {
        beside_whole(fields);
    }
    for part in parts(schema) {
        if let Some(part) = schema.pointer_mut(&part) {
            near(part)?;
        }
    }
    Ok(())
}

/// Draws a bound that is a whole number and not allowed itself nearer to the other one, if no whole
/// number lies between them: llguidance takes it for allowed there.
fn beside_whole(fields: &mut Object) {
    let number = |key: &str| fields.get(key).and_then(Value::as_f64);
    let (least, most) = (number("exclusiveMinimum"), number("exclusiveMaximum"));
    let lower = least.into_iter().chain(number("minimum")).reduce(f64::max);
    let upper = most.into_iter().chain(number("maximum")).reduce(f64::min);
    let (Some(lower), Some(upper)) = (lower, upper) else { return };
    if upper <= lower || upper - lower > 1.0 {
        return;
    }
    let part = (upper - lower) / 1024.0;
    if least == Some(lower) && lower.fract() == 0.0 && lower + part > lower {
        fields.remove("exclusiveMinimum");
        fields.insert("minimum".to_string(), (lower + part).into());
    }
    if most == Some(upper) && upper.fract() == 0.0 && upper - part < upper {
        fields.remove("exclusiveMaximum");
        fields.insert("maximum".to_string(), (upper - part).into());
    }
}

/// Takes away what is no keyword (`discriminator` and others of OpenAPI) and stands beside other
/// schemas, such as references: it says nothing, and llguidance would hold it for something to be
/// met besides, which a reference that leads back to itself cannot have.
fn unknown(fields: &mut Object) {
    const BESIDE: [&str; 4] = ["$ref", "allOf", "anyOf", "oneOf"];
    if BESIDE.iter().any(|key| fields.contains_key(*key)) {
        let lists: [&[&str]; 5] = [&ONE, &LISTS, &NAMED, &NOTES, &OTHERS];
        fields.retain(|key, _| lists.iter().any(|list| list.contains(&key.as_str())));
    }
}

/// Whole numbers that are written as fractions, and formats.
fn details(fields: &mut Object) {
    for key in ["Items", "Length", "Properties"]
        .iter()
        .flat_map(|of| [format!("min{of}"), format!("max{of}")])
    {
        if let Some(number) = fields.get_mut(&key) {
            *number = whole(number);
        }
    }
    let Some(format) = fields.get("format").and_then(Value::as_str) else { return };
    if let Some((_, other)) = FORMATS.iter().find(|(name, _)| *name == format) {
        fields.insert("format".to_string(), (*other).into());
    } else if let Some((_, pattern)) = PATTERNS.iter().find(|(name, _)| *name == format) {
        fields.remove("format");
        also(fields, json!({ "pattern": pattern }));
    } else if !FOLLOWED.contains(&format) {
        fields.remove("format");
    }
}

/// A number that may be written as a fraction of one, as a whole one.
fn whole(number: &Value) -> Value {
    match number.as_f64() {
        Some(value) if value.fract() == 0.0 && (0.0..=9e15).contains(&value) => {
            Value::from(value as u64)
        }
        _ => number.clone(),
    }
}
