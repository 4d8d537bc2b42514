//! Methods of Python's types.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, State, Value};

use super::budget::{Budget, ENTRY, fits, invalid};
use super::filters::{format_grows, join, replace, searches};

/// Widest text that padding makes, in characters.
const WIDEST: usize = 1 << 16;

/// `value.name(arguments)`, where MiniJinja's own collection lacks the method or takes it
/// differently, and where what it makes may be much longer than what it is given.
pub(crate) fn method(
    budget: &Budget,
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    budget.scan(value)?;
    if let Some(string) = value.as_str()
        && let Some(result) = string_method(budget, string, name, arguments)?
    {
        return budget.made(result);
    }
    match (value.kind(), name) {
        (ValueKind::Map | ValueKind::Seq, "copy") if arguments.is_empty() => {
            return Ok(value.clone());
        }
        (ValueKind::Seq, "count") => budget.compare(value)?,
        (ValueKind::Seq, "index") => {
            budget.compare(value)?;
            let (wanted,): (&Value,) = from_args(arguments)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            return at.map(Value::from).ok_or_else(|| invalid("the value is not in the list"));
        }
        // A value that is there already, or one of the arguments.
        (ValueKind::Map, "get") => {
            return minijinja_contrib::pycompat::unknown_method_callback(
                state, value, name, arguments,
            );
        }
        _ => {}
    }
    let made = minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)?;
    budget.made(made)
}

/// `value[start:stop:step]`.
pub(crate) fn slice(
    budget: &Budget,
    value: &Value,
    (start, stop, step): (Option<i64>, Option<i64>, Option<i64>),
) -> Result<Value, Error> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(invalid("a slice's step must not be zero"));
    }
    if let Some(string) = value.as_str() {
        budget.take(string.len().saturating_mul(size_of::<char>()))?;
        let characters: Vec<char> = string.chars().collect();
        let places = places(characters.len(), start, stop, step);
        return budget.text(places.map(|at| characters[at]).collect());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            budget.take(value.len().unwrap_or(0).saturating_mul(size_of::<&Value>()))?;
            let items = value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>()?;
            let places = places(items.len(), start, stop, step);
            budget.list(places.map(|at| items[at].clone()).collect())
        }
        kind => Err(invalid(format!("a {kind} cannot be sliced"))),
    }
}

/// The indices that a slice selects from a sequence of this length, in its order.
fn places(
    length: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    // Python's rule: a negative place counts from the end; then it is clamped to what the direction
    // can reach.
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |at: i64| if at < 0 { at.saturating_add(length) } else { at }.clamp(low, high);
    let start = start.map_or(if step > 0 { low } else { high }, place);
    let stop = stop.map_or(if step > 0 { high } else { low }, place);
    std::iter::successors(Some(start), move |at| at.checked_add(step))
        .take_while(move |at| if step > 0 { *at < stop } else { *at > stop })
        .filter_map(|at| usize::try_from(at).ok())
}

/// The result of a string's method; charged to the budget only where it may be much longer than the
/// string.
fn string_method(
    budget: &Budget,
    string: &str,
    name: &str,
    arguments: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "replace" => {
            let (from, to, most): (&str, &str, Option<i64>) = from_args(arguments)?;
            let most = most.and_then(|most| usize::try_from(most).ok());
            Value::from(replace(string, from, to, most)?)
        }
        "join" => {
            let (items,): (&Value,) = from_args(arguments)?;
            Value::from(join(items, string, None)?)
        }
        "format" => {
            format_grows(budget, string, '{', arguments)?;
            return Ok(None);
        }
        "strip" | "lstrip" | "rstrip" => {
            let characters = arguments.first().and_then(Value::as_str);
            budget.take(searches(string, characters))?;
            return Ok(None);
        }
        "splitlines" => {
            budget.take(pieces(string.len(), string.matches('\n').count()))?;
            return Ok(None);
        }
        "split" | "rsplit" => {
            let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) =
                from_args(arguments)?;
            let separator = match separator {
                Some(separator) => Some(separator),
                None => options.get::<Option<Value>>("sep")?,
            };
            let most = match most {
                Some(most) => Some(most),
                None => options.get::<Option<i64>>("maxsplit")?,
            };
            options.assert_all_used()?;
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            let separator = separator.filter(|separator| !separator.is_none());
            let cuts = match separator.as_ref().and_then(Value::as_str) {
                Some(separator) => string.matches(separator).count(),
                None => string.split_whitespace().count(),
            };
            budget.take(pieces(string.len(), cuts.min(most)))?;
            match &separator {
                None => strings(split_space(string, most, name == "rsplit")),
                Some(separator) => {
                    let separator = separator.as_str().filter(|separator| !separator.is_empty());
                    let separator = separator
                        .ok_or_else(|| invalid("a separator must be a string that is not empty"))?;
                    let parts = most.saturating_add(1);
                    strings(match name {
                        "split" => string.splitn(parts, separator).collect::<Vec<&str>>(),
                        _ => {
                            let mut parts: Vec<&str> = string.rsplitn(parts, separator).collect();
                            parts.reverse();
                            parts
                        }
                    })
                }
            }
        }
        "removeprefix" | "removesuffix" => {
            let (part,): (&str,) = from_args(arguments)?;
            let rest = if name == "removeprefix" {
                string.strip_prefix(part)
            } else {
                string.strip_suffix(part)
            };
            Value::from(rest.unwrap_or(string))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let first = name == "partition";
            let found =
                if first { string.split_once(separator) } else { string.rsplit_once(separator) };
            let parts = match found {
                Some((left, right)) => [left, separator, right],
                None if first => [string, "", ""],
                None => ["", "", string],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "index" | "rindex" => {
            let (wanted,): (&str,) = from_args(arguments)?;
            let at = if name == "index" { string.find(wanted) } else { string.rfind(wanted) };
            let at = at.ok_or_else(|| invalid("substring not found"))?;
            Value::from(string[..at].chars().count())
        }
        "zfill" | "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(arguments)?;
            let (width, fill) = (width.min(WIDEST), fill.unwrap_or(" "));
            fits(string.len().saturating_add(width.saturating_mul(fill.len())))?;
            Value::from(pad(string, name, width, fill))
        }
        "casefold" => Value::from(string.to_lowercase()),
        _ => return Ok(None),
    }))
}

/// The bytes that a text takes in pieces.
pub(crate) fn pieces(length: usize, cuts: usize) -> usize {
    length.saturating_add(cuts.saturating_add(1).saturating_mul(2 * ENTRY))
}

fn strings(parts: Vec<&str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

/// `split` at runs of white space, at most `most` times, from the right if asked.
fn split_space(string: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let trim = |text| if from_right { str::trim_end(text) } else { str::trim_start(text) };
    let mut rest = trim(string);
    while !rest.is_empty() {
        let at = if from_right {
            rest.rfind(char::is_whitespace)
        } else {
            rest.find(char::is_whitespace)
        };
        let Some(at) = at.filter(|_| parts.len() < most) else {
            parts.push(rest);
            break;
        };
        let (left, right) = rest.split_at(at);
        parts.push(if from_right { right.trim_start() } else { left });
        rest = trim(if from_right { left } else { right });
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn pad(string: &str, name: &str, width: usize, fill: &str) -> String {
    let missing = width.saturating_sub(string.chars().count());
    let zeros = "0".repeat(missing);
    match name {
        "zfill" => match string.strip_prefix(['-', '+']) {
            Some(digits) => format!("{}{zeros}{digits}", &string[..1]),
            None => zeros + string,
        },
        "ljust" => string.to_string() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + string,
        // Python puts the odd one on the left where the width is odd.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            fill.repeat(left) + string + &fill.repeat(missing - left)
        }
    }
}
