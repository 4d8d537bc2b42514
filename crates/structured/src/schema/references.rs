//! References to parts of a schema by anchors, by names of their own (`$id`), or by pointers that
//! need decoding, as plain pointers to definitions.

use std::collections::{BTreeMap, HashMap, HashSet};

use formats::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use super::parts;

/// Where the parts of a schema are, by JSON pointers.
#[derive(Default)]
struct Index {
    /// Schemas with names of their own.
    names: HashMap<String, String>,
    /// Anchors, each within a schema of such a name.
    anchors: HashMap<(String, String), String>,
    /// Anchors that are looked for from without first: where they are, and whether that is in no
    /// schema of another name than the whole one's.
    dynamic: HashMap<String, Vec<(String, bool)>>,
    /// Schemas of names of their own that are looked for from without first, as 2019-09 has it
    /// (`$recursiveAnchor`), and whether that is the whole one.
    recursive: Vec<(String, bool)>,
    /// Whether there are such anchors, on or off.
    marked: bool,
    /// The whole schema's name.
    root: String,
    /// Whether what stands beside a reference counts for nothing, as up to draft 7.
    alone: bool,
    /// The places of all schemas, those first that are part of others.
    reached: HashSet<String>,
    /// The schemas that refer to others: where, by which keyword, from within which name, and to
    /// what.
    references: Vec<(String, &'static str, String, String)>,
}

/// A schema whose references are plain pointers: the same one where they are already.
///
/// # Errors
/// References to what is not part of it.
pub(super) fn resolved(schema: &Value) -> Result<Value> {
    let draft = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
    let alone = ["draft-03", "draft-04", "draft-06", "draft-07"].iter().any(|d| draft.contains(d));
    let mut index = Index { alone, ..Index::default() };
    index.names.insert(String::new(), String::new());
    index.walk(schema, String::new(), String::new());
    let parts = index.reached.clone();
    index.walk_targets(schema);
    let named = index.names.len() > 1 || !index.anchors.is_empty() || !index.dynamic.is_empty();
    let named = named || index.marked;
    let is_plain = |(_, key, _, to): &(String, &str, String, String)| {
        let pointer = to.strip_prefix('#');
        let odd = to.contains(['%', '~']) || *key != "$ref";
        !odd && pointer.is_some_and(|pointer| parts.contains(pointer))
    };
    if !named && index.references.iter().all(is_plain) {
        return Ok(schema.clone());
    }
    let mut plain = schema.clone();
    let taken = schema.get("$defs").and_then(Value::as_object);
    let mut targets: BTreeMap<String, String> = BTreeMap::new();
    for (at, key, base, to) in &index.references {
        let Some(target) = index.target(schema, key, base, to)? else { continue };
        let mut free = (targets.len()..).map(|n| format!("part{n}"));
        let mut fresh = || free.find(|name| taken.is_none_or(|taken| !taken.contains_key(name)));
        let pointer = if target.is_empty() {
            "#".to_string()
        } else {
            let name = match targets.get(&target) {
                Some(name) => name.clone(),
                None => fresh().unwrap_or_default(),
            };
            targets.insert(target, name.clone());
            format!("#/$defs/{name}")
        };
        if let Some(Value::Object(fields)) = plain.pointer_mut(at) {
            fields.remove(*key);
            fields.insert("$ref".to_string(), pointer.into());
        }
    }
    anonymous(&mut plain);
    let moved: Vec<(String, Value)> = targets
        .into_iter()
        .filter_map(|(target, name)| Some((name, plain.pointer(&target)?.clone())))
        .collect();
    if let Value::Object(fields) = &mut plain {
        let all = fields.entry("$defs").or_insert_with(|| json!({}));
        if let Value::Object(all) = all {
            all.extend(moved);
        }
    }
    Ok(plain)
}

impl Index {
    fn walk(&mut self, schema: &Value, at: String, base: String) {
        if !self.reached.insert(at.clone()) {
            return;
        }
        let text = |key: &str| schema.get(key).and_then(Value::as_str);
        let id = text("$id").or(text("id"));
        let base = match id.filter(|_| !self.alone || text("$ref").is_none()) {
            Some(id) => {
                let (name, anchor) = id.split_once('#').unwrap_or((id, ""));
                let name = joined(&base, name);
                if !anchor.is_empty() {
                    // As anchors were written up to draft 7.
                    self.anchors.insert((name.clone(), anchor.to_string()), at.clone());
                }
                self.names.entry(name.clone()).or_insert_with(|| at.clone());
                name
            }
            None => base,
        };
        if at.is_empty() {
            self.root.clone_from(&base);
        }
        if let Some(anchor) = text("$anchor") {
            self.anchors.insert((base.clone(), anchor.to_string()), at.clone());
        }
        if let Some(anchor) = text("$dynamicAnchor") {
            self.anchors.insert((base.clone(), anchor.to_string()), at.clone());
            let outermost = base == self.root;
            self.dynamic.entry(anchor.to_string()).or_default().push((at.clone(), outermost));
        }
        if let Some(anchor) = schema.get("$recursiveAnchor") {
            self.marked = true;
            if *anchor == Value::Bool(true) && self.names.get(&base) == Some(&at) {
                self.recursive.push((at.clone(), base == self.root));
            }
        }
        for key in ["$ref", "$dynamicRef", "$recursiveRef"] {
            if let Some(to) = text(key) {
                self.references.push((at.clone(), key, base.clone(), to.to_string()));
            }
        }
        for part in parts(schema) {
            if let Some(inner) = schema.pointer(&part) {
                self.walk(inner, format!("{at}{part}"), base.clone());
            }
        }
    }

    /// Walks over what references lead to and is no part of a schema, such as definitions in
    /// groups.
    fn walk_targets(&mut self, schema: &Value) {
        let mut done = 0;
        while let Some((_, _, base, to)) = self.references.get(done).cloned() {
            done += 1;
            let pointer = to.strip_prefix('#').map(decoded).filter(|to| to.starts_with('/'));
            if let Some(pointer) = pointer
                && let Some(target) = schema.pointer(&pointer)
            {
                self.walk(target, pointer, base);
            }
        }
    }

    /// Where a reference leads; `None` where that depends on how it was come by.
    fn target(&self, schema: &Value, key: &str, base: &str, to: &str) -> Result<Option<String>> {
        let (name, fragment) = to.split_once('#').unwrap_or((to, ""));
        let name = if name.is_empty() { base.to_string() } else { joined(base, name) };
        let unknown = || {
            let error = Error::new("schema", "references to parts of itself", to);
            error.of(ErrorKind::Unsupported)
        };
        let root = self.names.get(&name).ok_or_else(unknown)?;
        let fragment = decoded(fragment);
        let target = match fragment.strip_prefix('/') {
            Some(_) => format!("{root}{fragment}"),
            None if fragment.is_empty() => root.clone(),
            None => self.anchors.get(&(name, fragment.clone())).ok_or_else(unknown)?.clone(),
        };
        schema.pointer(&target).ok_or_else(unknown)?;
        let same = match key {
            "$dynamicRef" => self.dynamic.get(&fragment),
            "$recursiveRef" => Some(&self.recursive),
            _ => None,
        };
        let Some(same) = same.filter(|same| same.iter().any(|(at, _)| *at == target)) else {
            return Ok(Some(target));
        };
        // The outermost of the schemas that led here decides, and the whole one leads everywhere.
        let outermost = same.iter().find(|(_, outermost)| *outermost || same.len() == 1);
        Ok(outermost.map(|(at, _)| at.clone()))
    }
}

/// Takes names and anchors away, which nothing refers to any more.
fn anonymous(schema: &mut Value) {
    if let Value::Object(fields) = schema {
        for key in ["$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"] {
            fields.remove(key);
        }
    }
    for part in parts(schema) {
        if let Some(part) = schema.pointer_mut(&part) {
            anonymous(part);
        }
    }
}

/// A name relative to another, as RFC 3986 (5.2) joins them.
fn joined(base: &str, name: &str) -> String {
    let has_scheme = name.split_once(':').is_some_and(|(scheme, _)| {
        let mut letters = scheme.chars();
        let plain = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
        letters.next().is_some_and(|c| c.is_ascii_alphabetic()) && letters.all(plain)
    });
    if has_scheme || base.is_empty() {
        return name.to_string();
    }
    if name.is_empty() {
        return base.to_string();
    }
    let authority = base.find("://").map(|at| at + 3);
    let path = match authority {
        Some(from) => base[from..].find('/').map_or(base.len(), |at| from + at),
        None => 0,
    };
    if name.starts_with("//") {
        return format!("{}{name}", &base[..authority.unwrap_or(0).saturating_sub(2)]);
    }
    let folder = match name.starts_with('/') {
        true => path,
        false => base[path..].rfind('/').map_or(path, |at| path + at + 1),
    };
    let mut segments: Vec<&str> = Vec::new();
    // An authority without a path has the root's.
    let root = if path == base.len() && !name.starts_with('/') { "/" } else { "" };
    let whole = format!("{root}{}{name}", &base[path..folder]);
    for segment in whole.split('/') {
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    format!("{}{}", &base[..path], segments.join("/"))
}

/// A fragment without its percent signs; one that is not UTF-8 stays.
fn decoded(fragment: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), fragment.as_bytes());
    while let [first, tail @ ..] = rest {
        let code = match (first, tail) {
            (b'%', [a, b, ..]) => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                digit(*a).zip(digit(*b)).map(|(a, b)| (16 * a + b) as u8)
            }
            _ => None,
        };
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| fragment.to_string())
}

/// A key as a JSON pointer has it.
pub(super) fn segment(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_joined_as_addresses_are() {
        for (base, name, whole) in [
            ("http://a.b/c/d.json", "e.json", "http://a.b/c/e.json"),
            ("http://a.b/c/d.json", "/e.json", "http://a.b/e.json"),
            ("http://a.b/c/d/", "../e", "http://a.b/c/e"),
            ("http://a.b", "e", "http://a.b/e"),
            ("http://a.b/c", "urn:x:y", "urn:x:y"),
            ("http://a.b/c", "//d/e", "http://d/e"),
            ("", "tree", "tree"),
            ("tree", "node", "node"),
            ("http://a.b/c.json", "", "http://a.b/c.json"),
        ] {
            assert_eq!(joined(base, name), whole, "{base} {name}");
        }
        assert_eq!(decoded("/a%25b%zz%"), "/a%b%zz%");
    }
}
