//! The filters and operators that make values, each with the budget it takes them from.
//!
//! No filter of MiniJinja's stays in an environment as it is: those whose result is about as long
//! as what they are given have it counted afterwards, those that can make much of little are our
//! own or are checked before they begin.

use std::sync::Arc;

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters};

use super::budget::{Budget, ENTRY, LONGEST, fits, invalid};
use super::instrument::{
    COMPARED, DEFINE, EACH, MADE, PLUS, PUT, SCANNED, SLICE, SPREAD, TILDE, TIMES,
};
use super::json::tojson;
use super::methods::{method, pieces, slice};
use super::python::text;

/// Widest field of a format, in characters.
const WIDEST: usize = 9999;

/// Puts all of it into an environment, whose values are then taken from this budget.
pub(crate) fn install(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    operators(environment, budget);
    linear(environment, budget);
    growing(environment, budget);
    let own = Arc::clone(budget);
    environment.set_unknown_method_callback(move |state, value, name, arguments| {
        method(&own, state, value, name, arguments)
    });
    environment.remove_global("debug");
    let own = Arc::clone(budget);
    let dict = Value::from_function(minijinja::functions::dict);
    environment.add_function(
        "dict",
        move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            own.made(dict.call(state, &arguments.into_values())?)
        },
    );
    let own = Arc::clone(budget);
    let namespace = Value::from_function(minijinja::functions::namespace);
    environment.add_function(
        "namespace",
        move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let arguments = arguments.into_values();
            for argument in &arguments {
                own.take(own.bytes(argument)?)?;
            }
            namespace.call(state, &arguments)
        },
    );
}

/// The filters that `instrument` puts in place of operators, literals and other syntax.
fn operators(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    let own = Arc::clone(budget);
    environment.add_filter(PLUS, move |left: &Value, right: &Value| plus(&own, left, right));
    let own = Arc::clone(budget);
    environment.add_filter(TIMES, move |left: &Value, right: &Value| times(&own, left, right));
    let own = Arc::clone(budget);
    environment.add_filter(TILDE, move |left: &Value, right: &Value| -> Result<Value, Error> {
        own.text(text(left)? + &text(right)?)
    });
    let own = Arc::clone(budget);
    environment.add_filter(
        SLICE,
        move |value: &Value, start: Option<i64>, stop: Option<i64>, step: Option<i64>| {
            slice(&own, value, (start, stop, step))
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(EACH, move |value: Value| match value.is_none() {
        true => Err(invalid("none cannot be looped over")),
        false => own.scan(&value).map(|()| value),
    });
    let own = Arc::clone(budget);
    environment.add_filter(SCANNED, move |value: Value| own.scan(&value).map(|()| value));
    let own = Arc::clone(budget);
    environment.add_filter(COMPARED, move |value: Value| own.compare(&value).map(|()| value));
    let own = Arc::clone(budget);
    environment.add_filter(MADE, move |value: Value| own.made(value));
    let own = Arc::clone(budget);
    environment.add_filter(PUT, move |value: Value| own.part(&value).map(|()| value));
    let own = Arc::clone(budget);
    environment.add_filter(SPREAD, move |value: Value| -> Result<Value, Error> {
        own.take(length(&value).saturating_mul(2 * ENTRY))?;
        Ok(value)
    });
    let own = Arc::clone(budget);
    environment.add_filter(DEFINE, move |bytes: usize| own.take(bytes).map(|()| ""));
}

/// MiniJinja's filters whose result is as long as their arguments but for a factor.
fn linear(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    // Texts of texts, or parts of what they are given.
    let plain = [
        ("abs", Value::from_function(filters::abs)),
        ("attr", Value::from_function(filters::attr)),
        ("bool", Value::from_function(filters::bool)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("d", Value::from_function(filters::default)),
        ("default", Value::from_function(filters::default)),
        ("e", Value::from_function(filters::escape)),
        ("escape", Value::from_function(filters::escape)),
        ("first", Value::from_function(filters::first)),
        ("last", Value::from_function(filters::last)),
        ("lower", Value::from_function(filters::lower)),
        ("round", Value::from_function(filters::round)),
        ("safe", Value::from_function(filters::safe)),
        ("title", Value::from_function(filters::title)),
        ("upper", Value::from_function(filters::upper)),
    ];
    // Lists, of the characters of a text too.
    let lists = [
        ("chain", Value::from_function(filters::chain)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("groupby", Value::from_function(filters::groupby)),
        ("items", Value::from_function(filters::items)),
        ("lines", Value::from_function(filters::lines)),
        ("list", Value::from_function(filters::list)),
        ("map", Value::from_function(filters::map)),
        ("max", Value::from_function(filters::max)),
        ("min", Value::from_function(filters::min)),
        ("reject", Value::from_function(filters::reject)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("reverse", Value::from_function(filters::reverse)),
        ("select", Value::from_function(filters::select)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("sort", Value::from_function(filters::sort)),
        ("unique", Value::from_function(filters::unique)),
        ("zip", Value::from_function(filters::zip)),
    ];
    let plain = plain.into_iter().map(|(name, filter)| (name, filter, false));
    let lists = lists.into_iter().map(|(name, filter)| (name, filter, true));
    for (name, filter, listing) in plain.chain(lists) {
        counted(environment, budget, name, filter, listing, move |own, arguments| {
            for argument in arguments {
                let lazy = argument.kind() == ValueKind::Iterable;
                let entries = if listing || lazy { length(argument) } else { 0 };
                own.take(entries.saturating_mul(ENTRY))?;
            }
            // A test compares each of the values with its arguments.
            if name.starts_with("select") || name.starts_with("reject") {
                let values = arguments.first().map_or(0, length);
                for argument in arguments.iter().skip(1) {
                    own.take((own.bytes(argument)? / ENTRY).saturating_mul(values))?;
                }
            }
            Ok(())
        });
    }
}

/// One of MiniJinja's filters, before which `take` takes what it may need, and whose result is
/// counted: `listing` every result, else texts only, since what was there before is a list of the
/// caller's or has been counted.
fn counted(
    environment: &mut Environment<'_>,
    budget: &Arc<Budget>,
    name: &'static str,
    filter: Value,
    listing: bool,
    take: impl Fn(&Budget, &[Value]) -> Result<(), Error> + Send + Sync + 'static,
) {
    let own = Arc::clone(budget);
    environment.add_filter(
        name,
        move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let arguments = arguments.into_values();
            take(&own, &arguments)?;
            let made = filter.call(state, &arguments)?;
            if listing || made.kind() == ValueKind::String { own.made(made) } else { Ok(made) }
        },
    );
}

/// The characters, at most, or entries of a value.
fn length(value: &Value) -> usize {
    value.as_str().map(str::len).or_else(|| value.len()).unwrap_or(0)
}

/// Filters that can make much of little.
fn growing(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    let own = Arc::clone(budget);
    environment.add_filter(
        "tojson",
        move |value: &Value, arguments: Rest<Value>, options: Kwargs| -> Result<Value, Error> {
            own.text(tojson(value, arguments, options)?)
        },
    );
    for name in ["string", "pprint"] {
        let own = Arc::clone(budget);
        environment.add_filter(name, move |value: &Value| -> Result<Value, Error> {
            own.text(text(value)?)
        });
    }
    let own = Arc::clone(budget);
    environment.add_filter(
        "trim",
        move |value: &Value, characters: Option<&str>| -> Result<Value, Error> {
            let text = text(value)?;
            own.take(searches(&text, characters))?;
            own.text(match characters {
                None => text.trim().to_string(),
                Some(characters) => text.trim_matches(|c| characters.contains(c)).to_string(),
            })
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(
        "join",
        move |value: &Value, mark: Option<&str>, options: Kwargs| -> Result<Value, Error> {
            let attribute: Option<Value> = options.get("attribute")?;
            let mark = match mark {
                Some(mark) => mark.to_string(),
                None => options.get::<Option<String>>("d")?.unwrap_or_default(),
            };
            options.assert_all_used()?;
            own.text(join(value, &mark, attribute.as_ref())?)
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(
        "replace",
        move |value: &Value, from: &Value, to: &Value, most: Option<usize>| {
            own.text(replace(&text(value)?, &text(from)?, &text(to)?, most)?)
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(
        "split",
        move |state: &mut State<'_, '_>, value: &Value, arguments: Rest<ValueOrKwargs>| {
            let whole = Value::from(text(value)?);
            method(&own, state, &whole, "split", &arguments.into_values())
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(
        "sum",
        move |values: &Value, attribute: Option<&str>, start: Option<Value>, options: Kwargs| {
            sum(&own, values, attribute, start, &options)
        },
    );
    let own = Arc::clone(budget);
    environment.add_filter(
        "indent",
        move |value: &Value, arguments: Rest<Value>, options: Kwargs| -> Result<Value, Error> {
            own.text(indent(&text(value)?, &arguments, &options)?)
        },
    );
    for (name, filter, entry) in [
        ("batch", Value::from_function(filters::batch), ENTRY),
        // Even an empty slice is a list.
        ("slice", Value::from_function(filters::slice), 4 * ENTRY),
    ] {
        counted(environment, budget, name, filter, true, move |own, arguments| {
            let values = arguments.first().map_or(0, length);
            let count = arguments.get(1).and_then(Value::as_usize).unwrap_or(0);
            own.take(values.saturating_add(count).saturating_mul(entry))
        });
    }
    let format = Value::from_function(filters::format);
    counted(environment, budget, "format", format, true, |own, arguments| {
        match arguments.split_first() {
            Some((form, values)) => {
                format_grows(own, form.as_str().unwrap_or_default(), '%', values)
            }
            None => Ok(()),
        }
    });
}

fn impossible(operator: &str, left: &Value, right: &Value) -> Error {
    let (left, right) = (left.kind(), right.kind());
    invalid(format!("tried to use {operator} operator on unsupported types {left} and {right}"))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// The sum or product of two numbers, `True` being 1: exact where both are whole.
fn arithmetic(
    operator: &str,
    (left, right): (&Value, &Value),
    whole: fn(i128, i128) -> Option<i128>,
    float: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !number(left) || !number(right) {
        return Err(impossible(operator, left, right));
    }
    let exact = |value: &Value| {
        let fraction = value.kind() == ValueKind::Number && !value.is_integer();
        i128::try_from(value.clone()).ok().filter(|_| !fraction)
    };
    if let (Some(a), Some(b)) = (exact(left), exact(right)) {
        let result = whole(a, b)
            .ok_or_else(|| invalid(format!("unable to calculate {left} {operator} {right}")))?;
        return Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    let float_of = |value: &Value| match exact(value) {
        Some(exact) => Ok(exact as f64),
        None => f64::try_from(value.clone()),
    };
    Ok(Value::from(float(float_of(left)?, float_of(right)?)))
}

/// `left + right`: numbers, texts, lists or tuples.
fn plus(budget: &Budget, left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        fits(a.len().saturating_add(b.len()))?;
        return budget.text([a, b].concat());
    }
    if is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple() {
        let mut items = Vec::new();
        for item in left.try_iter()?.checked().chain(right.try_iter()?.checked()) {
            items.push(item?);
        }
        return match left.is_tuple() {
            true => budget.made(Value::from(Tuple::from(items))),
            false => budget.list(items),
        };
    }
    arithmetic("+", (left, right), i128::checked_add, |a, b| a + b)
}

/// `left * right`: numbers, or a text, list or tuple repeated; empty where the number is negative,
/// as in Python.
fn times(budget: &Budget, left: &Value, right: &Value) -> Result<Value, Error> {
    let repeats = |value: &Value| value.as_str().is_some() || is_list(value);
    let (value, count) = if repeats(left) { (left, right) } else { (right, left) };
    if !repeats(value) {
        return arithmetic("*", (left, right), i128::checked_mul, |a, b| a * b);
    }
    if !count.is_integer() && count.kind() != ValueKind::Bool {
        return Err(impossible("*", left, right));
    }
    let count = i128::try_from(count.clone())?.clamp(0, LONGEST as i128 + 1);
    let count = usize::try_from(count).unwrap_or(0);
    if let Some(text) = value.as_str() {
        fits(text.len().saturating_mul(count))?;
        return budget.text(text.repeat(count));
    }
    let items = value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>()?;
    fits(items.len().saturating_mul(count).saturating_mul(ENTRY))?;
    // Taken before it is made; an empty list has nothing to repeat.
    budget.take(items.len().saturating_mul(count).saturating_mul(ENTRY))?;
    let all = match items.is_empty() {
        true => Vec::new(),
        false => std::iter::repeat_n(&items, count).flatten().cloned().collect::<Vec<Value>>(),
    };
    match value.is_tuple() {
        true => budget.made(Value::from(Tuple::from(all))),
        false => budget.list(all),
    }
}

/// The cost of looking for each character of a text among others.
pub(crate) fn searches(text: &str, characters: Option<&str>) -> usize {
    text.len().saturating_mul(characters.map_or(1, str::len)) / 16
}

/// The texts of the items, or of an attribute of each, with a mark between them.
pub(crate) fn join(items: &Value, mark: &str, attribute: Option<&Value>) -> Result<String, Error> {
    let mut joined = String::new();
    for (at, item) in items.try_iter()?.checked().enumerate() {
        let item = item?;
        if at > 0 {
            joined.push_str(mark);
        }
        joined.push_str(&match attribute {
            Some(attribute) => text(&item.get_item(attribute)?)?,
            None => text(&item)?,
        });
        fits(joined.len())?;
    }
    Ok(joined)
}

/// A text in which one part is replaced by another, a limited number of times.
pub(crate) fn replace(
    text: &str,
    from: &str,
    to: &str,
    most: Option<usize>,
) -> Result<String, Error> {
    let count = text.matches(from).count().min(most.unwrap_or(usize::MAX));
    fits(text.len().saturating_add(count.saturating_mul(to.len())))?;
    Ok(text.replacen(from, to, count))
}

/// The sum of all values, or of one of their attributes, from `start` on; what is undefined is left
/// out.
fn sum(
    budget: &Budget,
    values: &Value,
    attribute: Option<&str>,
    start: Option<Value>,
    options: &Kwargs,
) -> Result<Value, Error> {
    let attribute = match attribute {
        Some(attribute) => Some(attribute),
        None => options.get::<Option<&str>>("attribute")?,
    };
    let start = match start {
        Some(start) => Some(start),
        None => options.get::<Option<Value>>("start")?,
    };
    options.assert_all_used()?;
    let mut total = start.unwrap_or_else(|| Value::from(0));
    for value in values.try_iter()?.checked() {
        let value = match attribute {
            Some(attribute) => value?.get_attr(attribute)?,
            None => value?,
        };
        if !value.is_undefined() {
            total = plus(budget, &total, &value)?;
        }
    }
    Ok(total)
}

/// `text | indent(width, first, blank)`: all lines but the first, and but empty ones, begin with
/// `width` spaces, or with `width` itself where that is a text.
fn indent(text: &str, arguments: &[Value], options: &Kwargs) -> Result<String, Error> {
    let option = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        Ok(match arguments.get(at) {
            Some(value) => Some(value.clone()),
            None => options.get::<Option<Value>>(name)?,
        }
        .filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let (width, first, blank) = (option(0, "width")?, option(1, "first")?, option(2, "blank")?);
    options.assert_all_used()?;
    let margin = match width {
        None => " ".repeat(4),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(margin), _) => margin.to_string(),
            (None, Some(width)) => fits(width).map(|()| " ".repeat(width))?,
            (None, None) => return Err(invalid("indent must be a number or a string")),
        },
    };
    let is_true = |flag: Option<Value>| flag.is_some_and(|flag| flag.is_true());
    let (first, blank) = (is_true(first), is_true(blank));
    let lines = text.matches('\n').count().saturating_add(1);
    fits(text.len().saturating_add(lines.saturating_mul(margin.len())))?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    let mut out = String::new();
    for (at, line) in text.split('\n').enumerate() {
        if at > 0 {
            out.push('\n');
        }
        let empty = line.is_empty() || line == "\r";
        if (at > 0 || first) && (blank || !empty) {
            out.push_str(&margin);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Takes what a format may write: its own text and, for each of its fields, the field's width and
/// the longest of the values. Fields begin with `%` or `{`. Widths stand in the format, not among
/// the values.
pub(crate) fn format_grows(
    budget: &Budget,
    format: &str,
    mark: char,
    values: &[Value],
) -> Result<(), Error> {
    let mut longest = 0;
    for value in values {
        longest = longest.max(budget.bytes(value)?);
    }
    // Escapes of a value's representation: up to six bytes for one.
    let longest = longest.saturating_mul(6);
    let mut bytes = format.len();
    for field in format.split(mark).skip(1) {
        let end = if mark == '{' { field.find('}') } else { field.find(char::is_alphabetic) };
        // Of `%(name)5d`, what follows the name.
        let end = match field.strip_prefix('(').and_then(|_| field.find(')')) {
            Some(close) => field[close..].find(char::is_alphabetic).map(|end| close + end),
            None => end,
        };
        let inner = &field[..end.unwrap_or(field.len())];
        // A field of `str.format` that is not closed before the next one begins holds that one.
        let nested = mark == '{' && end.is_none() && inner.contains([':', '!']);
        if nested || (mark == '%' && inner.contains('*')) {
            return Err(invalid("a format's widths must be written in it"));
        }
        for digits in inner.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty()) {
            let width = digits.parse::<usize>().ok().filter(|width| *width <= WIDEST);
            let width = width
                .ok_or_else(|| invalid(format!("a format's widths must be at most {WIDEST}")))?;
            bytes = bytes.saturating_add(width);
        }
        bytes = bytes.saturating_add(longest);
    }
    fits(bytes)?;
    budget.take(pieces(bytes, 0))
}
