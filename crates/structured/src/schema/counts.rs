//! `minProperties` and `maxProperties` beside listed properties, as alternatives of those.

use serde_json::{Value, json};

use super::{Object, also, whole};

/// Alternatives of one schema.
const MOST_WAYS: usize = 64;

/// Says how many properties an object has by those that it must and those that it must not have.
/// Names that are not listed are left out where they are counted.
pub(super) fn listed(fields: &mut Object) {
    let count = |key: &str| fields.get(key).map(|number| whole(number).as_u64());
    let (least, most) = match (count("minProperties"), count("maxProperties")) {
        (None, None) | (Some(None), _) | (_, Some(None)) => return,
        (least, most) => (least.flatten().unwrap_or(0), most.flatten()),
    };
    let Some(Value::Object(properties)) = fields.get("properties") else { return };
    let required = fields.get("required").and_then(Value::as_array);
    let required: Vec<&Value> = required.into_iter().flatten().collect();
    let is_required = |name: &&String| required.iter().any(|other| *other == name.as_str());
    let allowed = properties.iter().filter(|(_, schema)| **schema != Value::Bool(false));
    let optional: Vec<String> =
        allowed.map(|(name, _)| name).filter(|name| !is_required(name)).cloned().collect();
    // A name that is required and not listed is one of the others.
    let others =
        required.iter().any(|name| name.as_str().is_none_or(|name| !properties.contains_key(name)));
    if others && most.is_some() {
        return;
    }
    let must = required.len() as u64;
    let need = least.saturating_sub(must) as usize;
    let room = match most.map(|most| most.checked_sub(must)) {
        Some(None) => return,
        Some(Some(room)) => room as usize,
        None => usize::MAX,
    };
    if need > optional.len().min(room) || optional.is_empty() {
        return;
    }
    let ways: Vec<Value> = if room < optional.len() {
        let Some(kept) = chosen(&optional, room) else { return };
        kept.iter()
            .map(|kept| {
                let others = optional.iter().filter(|name| !kept.contains(name));
                let others = others.map(|name| (name.clone(), Value::Bool(false)));
                let must = &kept[..need];
                json!({ "properties": others.collect::<Object>(), "required": must })
            })
            .collect()
    } else if need > 0 {
        let must = chosen(&optional, need).unwrap_or_else(|| vec![optional[..need].to_vec()]);
        must.iter().map(|must| json!({ "required": must })).collect()
    } else {
        Vec::new()
    };
    if most.is_some() {
        fields.insert("additionalProperties".to_string(), Value::Bool(false));
        fields.remove("patternProperties");
    }
    fields.remove("minProperties");
    fields.remove("maxProperties");
    let mut ways = ways;
    if !ways.is_empty() {
        if fields.get("type") != Some(&Value::from("object")) {
            ways.push(json!({ "type": ["array", "boolean", "null", "number", "string"] }));
        }
        also(fields, json!({ "anyOf": ways }));
    }
}

/// All choices of `count` names, if they are few.
fn chosen(names: &[String], count: usize) -> Option<Vec<Vec<String>>> {
    let mut all: Vec<(Vec<String>, usize)> = vec![(Vec::new(), 0)];
    for _ in 0..count {
        let longer = |(chosen, from): &(Vec<String>, usize)| {
            let more = |at: usize| ([&chosen[..], &names[at..=at]].concat(), at + 1);
            (*from..names.len()).map(more).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
        if all.len() > 16 * MOST_WAYS {
            return None;
        }
    }
    (all.len() <= MOST_WAYS).then(|| all.into_iter().map(|(chosen, _)| chosen).collect())
}
