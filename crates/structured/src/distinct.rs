//! Items that must differ from each other (`uniqueItems`), and names of properties where these are
//! counted, which no grammar says: a [`Reader`] follows the JSON that is written, and knows which
//! tokens would end an item or a name that is there already.

use engine::reasoning::Opening;
use llguidance::toktrie::{SimpleVob, TokTrie};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Where a schema asks for items that differ: by the property that holds an array, and by how many
/// arrays are around it within that property. Arrays of the same place elsewhere in the schema are
/// held to it as well, which allows less.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Places {
    /// Properties that the schema lists; the whole text's name is empty.
    named: BTreeSet<(String, usize)>,
    /// Properties of any name.
    any: BTreeSet<usize>,
    /// Whether of the items of some there may be few.
    narrow: bool,
    /// Whether the names of each object's properties must differ.
    names: bool,
}

impl Places {
    pub(crate) fn is_empty(&self) -> bool {
        self.named.is_empty() && self.any.is_empty() && !self.names
    }

    /// Has the names of every object's properties differ: a name that is there twice counts once.
    /// `narrow`: there may be few names.
    pub(crate) fn differ_in_names(&mut self, narrow: bool) {
        self.narrow |= narrow;
        self.names = true;
    }

    /// Adds arrays of this depth within a property; of any, without a name. Of `narrow` ones there
    /// may be few different items.
    pub(crate) fn add(&mut self, name: Option<&str>, depth: usize, narrow: bool) {
        self.narrow |= narrow;
        match name {
            Some(name) => drop(self.named.insert((name.to_string(), depth))),
            None => drop(self.any.insert(depth)),
        }
    }

    fn holds(&self, name: &str, depth: usize) -> bool {
        self.any.contains(&depth) || self.named.contains(&(name.to_string(), depth))
    }
}

/// Where JSON begins in a text.
#[derive(Debug, Clone)]
enum Start {
    Here,
    /// Behind this.
    Behind(Vec<u8>),
    /// Here, or behind the second where the text begins with the first.
    Offered(Vec<u8>, Vec<u8>),
}

/// An array or an object that is open.
#[derive(Debug, Clone)]
enum Open {
    Object {
        /// The last name, once it was read.
        name: String,
        is_name: bool,
        /// The names so far as they are written, and as they are read, if they must differ.
        names: Option<Vec<(Vec<u8>, Value)>>,
    },
    Array {
        /// The state of its items, if they must differ.
        items: Option<Vec<(Vec<u8>, Value)>>,
        /// Where the present item begins.
        item: Option<usize>,
    },
}

/// Follows one text.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    places: Arc<Places>,
    start: Start,
    /// The text so far, of which JSON is what is behind `from`.
    text: Vec<u8>,
    open: Vec<Open>,
    /// Where the present string begins.
    string: Option<usize>,
    is_escaped: bool,
}

impl Reader {
    /// The reader of a text in which a schema's JSON stands behind what may open the text.
    pub(crate) fn new(places: Places, opening: Opening) -> Reader {
        let start = match opening {
            Opening::Answer => Start::Here,
            Opening::Opened { close } => Start::Behind(close.into()),
            Opening::Offered { open, close } => Start::Offered(open.into(), close.into()),
            Opening::Harmony => Start::Behind("<|channel|>final<|message|>".into()),
        };
        let (text, open) = (Vec::new(), Vec::new());
        Reader { places: Arc::new(places), start, text, open, string: None, is_escaped: false }
    }

    /// Reads a token; whether no item ends that is there already.
    pub(crate) fn read(&mut self, trie: &TokTrie, token: u32) -> bool {
        let bytes = trie.token(token);
        let bytes = bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]).unwrap_or(bytes);
        let is_end = trie.eos_tokens().contains(&token);
        is_end || bytes.iter().all(|byte| self.read_byte(*byte))
    }

    /// The longest part of a token in which no item ends that is there already.
    pub(crate) fn fit(&self, trie: &TokTrie, token: u32) -> Option<u32> {
        let differs = |token: &u32| self.clone().read(trie, *token);
        if !self.has_items() || differs(&token) {
            return Some(token);
        }
        let mut parts = trie.all_prefixes(trie.token(token));
        parts.sort_by_key(|part| trie.token_len(*part));
        parts.into_iter().rev().find(differs)
    }

    /// Whether an array is open whose items must differ, and has some.
    fn has_items(&self) -> bool {
        self.items() > 0
    }

    /// How many items the open arrays have whose items must differ.
    pub(crate) fn items(&self) -> usize {
        let items = |open: &Open| match open {
            Open::Array { items: Some(items), .. } => items.len(),
            Open::Object { names: Some(names), .. } => names.len(),
            _ => 0,
        };
        self.open.iter().map(items).sum()
    }

    /// Takes the tokens away that end an item which is there already.
    pub(crate) fn exclude(&self, trie: &TokTrie, mask: &mut SimpleVob) {
        if let Some(Open::Object { is_name, names: Some(names), .. }) = self.open.last() {
            let (written, before): (&[u8], &[u8]) = match (self.string, self.text.last()) {
                (Some(from), _) if *is_name => (&self.text[from..], b""),
                // The text of a value, behind which it may end and another name begin.
                (Some(_), _) => (b"", b"\", "),
                (None, Some(b' ' | b'{')) if *is_name => (b"", b""),
                (None, Some(b',')) if *is_name => (b"", b" "),
                (None, _) => (b"", b", "),
            };
            for rest in names.iter().filter_map(|(name, _)| name.strip_prefix(written)) {
                exclude(trie, &[before, rest].concat(), mask);
            }
        }
        for open in &self.open {
            let Open::Array { items: Some(items), item, .. } = open else { continue };
            // What is written of the present item, or what stands before the next one.
            let (written, before): (&[u8], &[u8]) = match item {
                Some(from) => (&self.text[*from..], b""),
                None => match self.text.last() {
                    Some(b' ' | b'[') => (b"", b""),
                    Some(b',') => (b"", b" "),
                    _ => (b"", b", "),
                },
            };
            let ends = |rest: &[u8], mask: &mut SimpleVob| {
                for end in [b',', b']'] {
                    exclude(trie, &[rest, &[end]].concat(), mask);
                }
            };
            let number = value(written).filter(Value::is_number);
            // What the item is if its last bracket comes now.
            let closed = [b']', b'}'].map(|end| (end, value(&[written, &[end]].concat())));
            for (earlier, other) in items {
                if number.as_ref() == Some(other) {
                    ends(b"", mask);
                }
                for (end, _) in closed.iter().filter(|(_, item)| item.as_ref() == Some(other)) {
                    exclude(trie, &[*end], mask);
                }
                let Some(rest) = earlier.strip_prefix(written) else { continue };
                let rest = [before, rest].concat();
                match earlier.last() {
                    Some(b'"' | b'}' | b']') => exclude(trie, &rest, mask),
                    // What is no text goes on until something follows.
                    _ => ends(&rest, mask),
                }
            }
        }
    }

    /// The tokens with which an item is one that is there already, and has only to end; where there
    /// are few, also those with which it may still become one: where nothing else may come behind
    /// them, they lead nowhere.
    pub(crate) fn repeating(&self, trie: &TokTrie) -> Vec<u32> {
        let mut found = Vec::new();
        for (rest, begins, ends) in self.left() {
            let mut add = |text: &[u8]| match self.places.narrow {
                true => found.extend(trie.all_prefixes(text)),
                false => found.extend(trie.token_id(text)),
            };
            let inner = &rest[..rest.len() - usize::from(ends)];
            if inner.is_empty() || !self.places.narrow && ends && !rest.ends_with(b"\"") {
                continue;
            }
            add(inner);
            if begins {
                // A blank in front is part of the token where an item begins.
                add(&[b" ", inner].concat());
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Whether the present item is, or may still become, one that is there already.
    pub(crate) fn may_repeat(&self) -> bool {
        self.places.narrow && self.left().next().is_some()
    }

    /// What is left to write of the items that the present one may still become, with whether it
    /// begins here, and whether its last byte says that it ends.
    fn left(&self) -> impl Iterator<Item = (&[u8], bool, bool)> {
        self.open.iter().flat_map(|open| {
            let (items, item) = match open {
                Open::Array { items: Some(items), item, .. } => (&items[..], *item),
                // A name that has begun: before that, its quotation mark comes.
                Open::Object { is_name: true, names: Some(names), .. } if self.string.is_some() => {
                    (&names[..], self.string)
                }
                _ => (&[][..], None),
            };
            let written = item.map_or(&b""[..], |from| &self.text[from..]);
            let rest = move |(earlier, _): &'_ (Vec<u8>, Value)| {
                earlier.strip_prefix(written).map(|rest| rest.len())
            };
            items.iter().filter_map(move |earlier| {
                let length = rest(earlier)?;
                let text = &earlier.0[earlier.0.len() - length..];
                let ends = matches!(earlier.0.last(), Some(b'"' | b'}' | b']'));
                (!text.is_empty()).then_some((text, item.is_none(), ends))
            })
        })
    }

    fn read_byte(&mut self, byte: u8) -> bool {
        match &self.start {
            Start::Here => return self.read_json(byte),
            Start::Behind(close) => {
                self.text.push(byte);
                if self.text.ends_with(close) {
                    (self.start, self.text) = (Start::Here, Vec::new());
                }
            }
            Start::Offered(open, close) => {
                self.text.push(byte);
                if self.text == *open {
                    self.start = Start::Behind(close.clone());
                } else if !open.starts_with(&self.text) {
                    self.start = Start::Here;
                    let text = std::mem::take(&mut self.text);
                    return text.into_iter().all(|byte| self.read_json(byte));
                }
            }
        }
        true
    }

    fn read_json(&mut self, byte: u8) -> bool {
        let at = self.text.len();
        self.text.push(byte);
        if let Some(from) = self.string {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => {
                    self.string = None;
                    if let Some(Open::Object { name, is_name: true, names }) = self.open.last_mut()
                    {
                        let written = &self.text[from..=at];
                        *name = serde_json::from_slice(written).unwrap_or_default();
                        let Some(names) = names else { return true };
                        let read = Value::from(name.as_str());
                        let differs = names.iter().all(|(_, other)| *other != read);
                        names.push((written.to_vec(), read));
                        return differs;
                    } else {
                        return self.end_item(at + 1);
                    }
                }
                _ => {}
            }
            return true;
        }
        if byte.is_ascii_whitespace() {
            return true;
        }
        if !matches!(byte, b',' | b']' | b'}' | b':')
            && let Some(Open::Array { item: item @ None, .. }) = self.open.last_mut()
        {
            *item = Some(at);
        }
        match byte {
            b'"' => self.string = Some(at),
            b'{' => {
                let names = self.places.names.then(Vec::new);
                self.open.push(Open::Object { name: String::new(), is_name: true, names });
            }
            b'[' => {
                let around = self.open.iter().rev();
                let depth = around.take_while(|open| matches!(open, Open::Array { .. })).count();
                let name = match self.open.iter().rev().nth(depth) {
                    Some(Open::Object { name, .. }) => name,
                    _ => "",
                };
                let items = self.places.holds(name, depth).then(Vec::new);
                self.open.push(Open::Array { items, item: None });
            }
            b':' => self.is_name(false),
            b',' => {
                let differs = self.end_item(at);
                self.is_name(true);
                return differs;
            }
            b']' | b'}' => {
                // A number may end here.
                let inner = self.end_item(at);
                self.open.pop();
                return self.end_item(at + 1) && inner;
            }
            _ => {}
        }
        true
    }

    /// Says whether a name comes next in the innermost object, where that is what is open.
    fn is_name(&mut self, next: bool) {
        if let Some(Open::Object { is_name, .. }) = self.open.last_mut() {
            *is_name = next;
        }
    }

    /// Ends the innermost array's present item; whether none is like it.
    fn end_item(&mut self, to: usize) -> bool {
        let Some(Open::Array { items, item, .. }) = self.open.last_mut() else { return true };
        let (Some(from), Some(items)) = (item.take(), items) else { return true };
        let written = self.text[from..to].to_vec();
        let value = value(&written).unwrap_or_default();
        let differs = items.iter().all(|(_, other)| *other != value);
        items.push((written, value));
        differs
    }
}

/// A JSON value. Numbers are equal however they are written, within arrays and objects too.
fn value(written: &[u8]) -> Option<Value> {
    let mut value = serde_json::from_slice(written).ok()?;
    as_floats(&mut value);
    Some(value)
}

/// Writes all numbers of a value as f64.
fn as_floats(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(float) = number.as_f64() {
                *value = float.into();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(as_floats),
        Value::Object(fields) => fields.values_mut().for_each(as_floats),
        _ => {}
    }
}

/// Takes the tokens away that begin with these bytes.
fn exclude(trie: &TokTrie, bytes: &[u8], mask: &mut SimpleVob) {
    let Some(node) = trie.child_at_bytes(trie.root(), bytes) else { return };
    let mut nodes = vec![node];
    while let Some(node) = nodes.pop() {
        if let Some(token) = node.token_id() {
            mask.disallow_token(token);
        }
        nodes.extend(trie.node_children(node));
    }
}
