//! Reads a regular expression with looks ahead and behind, and word boundaries, which Rust's syntax
//! has not. All else is as in Rust's: what stands for one character is read by `regex_syntax`.

use std::ops::Range;

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, HirKind};

/// Groups within groups.
const DEEPEST: usize = 64;
/// Most times that a part is repeated by numbers.
const MOST_TIMES: u32 = 1000;

/// A part of an expression.
#[derive(Debug, Clone)]
pub(super) enum Node {
    /// One character of the set of this number.
    Set(usize),
    Concat(Vec<Node>),
    Either(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
    Begin,
    End,
    /// A place that is a word's boundary, or that is none.
    Word(bool),
    /// A place from which this matches, or does not.
    Ahead(Box<Node>, bool),
    /// A place up to which this matches, or does not.
    Behind(Box<Node>, bool),
}

impl Node {
    fn parts(&self) -> &[Node] {
        match self {
            Node::Concat(parts) | Node::Either(parts) => parts,
            Node::Repeat(part, ..) | Node::Ahead(part, _) | Node::Behind(part, _) => {
                std::slice::from_ref(part)
            }
            _ => &[],
        }
    }

    /// Whether it looks ahead or behind, or at words.
    pub(super) fn looks(&self) -> bool {
        matches!(self, Node::Word(_) | Node::Ahead(..) | Node::Behind(..))
            || self.parts().iter().any(Node::looks)
    }

    /// Whether a text's begin or end is asked for elsewhere than at the outer ends of alternatives.
    fn anchors_within(&self, first: bool, last: bool) -> bool {
        match self {
            Node::Begin => !first,
            Node::End => !last,
            Node::Concat(parts) => {
                let end = parts.len().saturating_sub(1);
                parts
                    .iter()
                    .enumerate()
                    .any(|(i, part)| part.anchors_within(first && i == 0, last && i == end))
            }
            Node::Either(parts) => parts.iter().any(|part| part.anchors_within(first, last)),
            _ => self.parts().iter().any(|part| part.anchors_within(false, false)),
        }
    }
}

/// An expression that was read.
pub(super) struct Parsed {
    pub(super) node: Node,
    pub(super) sets: Vec<ClassUnicode>,
    /// The parts of the only alternative, with the text of each; none of several alternatives, and
    /// where flags hold from one part on.
    pub(super) parts: Vec<(Node, Range<usize>)>,
}

impl Parsed {
    /// Reads an expression. `ascii` says that `\d` and `\w` are those of ASCII.
    pub(super) fn of(text: &str, ascii: bool) -> Option<Parsed> {
        let (sets, flags) = (Vec::new(), String::new());
        let mut reader = Reader { text, at: 0, sets, flags, flagged: false, ascii, depth: 0 };
        let mut branches = reader.branches()?;
        if reader.at < text.len() {
            return None;
        }
        let apart = branches.len() == 1 && !reader.flagged;
        let parts = if apart { branches[0].clone() } else { Vec::new() };
        let joined = |parts: Vec<(Node, Range<usize>)>| {
            Node::Concat(parts.into_iter().map(|(node, _)| node).collect())
        };
        let node = match branches.len() {
            1 => joined(branches.remove(0)),
            _ => Node::Either(branches.into_iter().map(joined).collect()),
        };
        Some(Parsed { node, sets: reader.sets, parts })
    }

    /// Takes a text's end to be in front of a last line's end as well, where that lets it match more.
    pub(super) fn loosen(&mut self) {
        fn walk(node: &mut Node, line: usize) {
            match node {
                Node::End => {
                    let last = Node::Concat(vec![Node::Set(line), Node::End]);
                    let before = Node::Ahead(Box::new(last), true);
                    *node = Node::Either(vec![Node::End, before]);
                }
                Node::Concat(parts) | Node::Either(parts) => {
                    parts.iter_mut().for_each(|part| walk(part, line));
                }
                Node::Repeat(part, ..) | Node::Ahead(part, true) => walk(part, line),
                _ => {}
            }
        }
        self.sets.push(ClassUnicode::new([ClassUnicodeRange::new('\n', '\n')]));
        walk(&mut self.node, self.sets.len() - 1);
    }

    /// Whether llguidance's regular expressions have no form for it.
    pub(super) fn is_beyond(&self) -> bool {
        self.node.looks() || self.node.anchors_within(true, true)
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    sets: Vec<ClassUnicode>,
    /// Flags of Rust's that hold here, of `i` and `s`.
    flags: String,
    /// Whether flags hold from somewhere to the end of a group.
    flagged: bool,
    ascii: bool,
    depth: usize,
}

/// The parts of an alternative, each with where it stands.
type Parts = Vec<(Node, Range<usize>)>;

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn eats(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        self.at += if found { text.len() } else { 0 };
        found
    }

    /// The alternatives up to the end of a group.
    fn branches(&mut self) -> Option<Vec<Parts>> {
        let flags = self.flags.clone();
        let mut all = vec![Vec::new()];
        while let Some(c) = self.rest().chars().next() {
            match c {
                ')' => break,
                '|' => {
                    self.at += 1;
                    all.push(Vec::new());
                }
                _ => {
                    let begin = self.at;
                    if let Some(node) = self.repeated()? {
                        let range = begin..self.at;
                        all.last_mut()?.push((node, range));
                    }
                }
            }
        }
        self.flags = flags;
        Some(all)
    }

    /// A part and how often it comes; none of flags, which are no part.
    fn repeated(&mut self) -> Option<Option<Node>> {
        let Some(mut node) = self.single()? else { return Some(None) };
        loop {
            let (least, most) = match self.rest().chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    let (inside, _) = self.rest()[1..].split_once('}')?;
                    let (least, most) = inside.split_once(',').unwrap_or((inside, inside));
                    let most = match most.trim() {
                        "" => None,
                        most => Some(most.parse().ok()?),
                    };
                    self.at += inside.len() + 1;
                    (least.trim().parse().ok()?, most)
                }
                _ => return Some(Some(node)),
            };
            self.at += 1;
            // How much is taken first is no question of what matches.
            self.eats("?");
            if least > MOST_TIMES || most.is_some_and(|most| most > MOST_TIMES || most < least) {
                return None;
            }
            node = Node::Repeat(Box::new(node), least, most);
        }
    }

    fn single(&mut self) -> Option<Option<Node>> {
        let node = match self.rest().chars().next()? {
            '(' => return self.group(),
            '^' => Node::Begin,
            '$' => Node::End,
            '*' | '+' | '?' => return None,
            '[' => return self.set(class_length(self.rest())?).map(Some),
            '\\' => match self.rest()[1..].chars().next()? {
                'b' if !self.rest().starts_with("\\b{") => {
                    self.at += 1;
                    Node::Word(true)
                }
                'B' => {
                    self.at += 1;
                    Node::Word(false)
                }
                'A' => {
                    self.at += 1;
                    Node::Begin
                }
                'z' => {
                    self.at += 1;
                    Node::End
                }
                _ => return self.set(escape_length(self.rest())?).map(Some),
            },
            c => return self.set(c.len_utf8()).map(Some),
        };
        self.at += 1;
        Some(Some(node))
    }

    fn group(&mut self) -> Option<Option<Node>> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return None;
        }
        let around = self.flags.clone();
        self.at += 1;
        let mut look = None;
        if self.eats("?") {
            let looks =
                [("=", true, true), ("!", true, false), ("<=", false, true), ("<!", false, false)];
            look = looks.into_iter().find(|(sign, ..)| self.eats(sign));
            if look.is_none() && (self.eats("P<") || self.eats("<")) {
                let (name, _) = self.rest().split_once('>')?;
                // llguidance has this name for what lies ahead.
                if name == "stop" {
                    return None;
                }
                self.at += name.len() + 1;
            } else if look.is_none() {
                let length = self.rest().find([':', ')'])?;
                let flags = self.rest()[..length].to_string();
                let (on, off) = flags.split_once('-').unwrap_or((&flags, ""));
                if !on.chars().chain(off.chars()).all(|flag| "is".contains(flag)) {
                    return None;
                }
                self.flags.push_str(on);
                self.flags.retain(|flag| !off.contains(flag));
                self.at += length + 1;
                if self.text[..self.at].ends_with(')') {
                    // They hold to the end of the group around.
                    self.depth -= 1;
                    self.flagged = true;
                    return Some(None);
                }
            }
        }
        let branches = self.branches()?;
        if !self.eats(")") {
            return None;
        }
        self.depth -= 1;
        self.flags = around;
        let joined = |parts: Parts| Node::Concat(parts.into_iter().map(|(node, _)| node).collect());
        let inner = Node::Either(branches.into_iter().map(joined).collect());
        Some(Some(match look {
            Some((_, true, wanted)) => Node::Ahead(Box::new(inner), wanted),
            Some((_, false, wanted)) => Node::Behind(Box::new(inner), wanted),
            None => inner,
        }))
    }

    /// The set of what so many bytes stand for.
    fn set(&mut self, length: usize) -> Option<Node> {
        let written = self.text.get(self.at..self.at + length)?;
        if let &[byte] = written.as_bytes()
            && byte.is_ascii_alphanumeric()
            && self.flags.is_empty()
        {
            self.at += 1;
            let c = char::from(byte);
            return Some(self.number(ClassUnicode::new([ClassUnicodeRange::new(c, c)])));
        }
        let written = match self.ascii {
            true => llguidance::regex_to_lark(written, "dw"),
            false => written.to_string(),
        };
        let flags = match self.flags.is_empty() {
            true => String::new(),
            false => format!("(?{})", self.flags),
        };
        let parsed = regex_syntax::parse(&format!("{flags}{written}")).ok()?;
        let set = match parsed.kind() {
            HirKind::Class(Class::Unicode(set)) => set.clone(),
            HirKind::Class(Class::Bytes(set)) => set.to_unicode_class()?,
            HirKind::Literal(bytes) => {
                let mut chars = std::str::from_utf8(&bytes.0).ok()?.chars();
                let c = chars.next()?;
                if chars.next().is_some() {
                    return None;
                }
                ClassUnicode::new([ClassUnicodeRange::new(c, c)])
            }
            _ => return None,
        };
        self.at += length;
        Some(self.number(set))
    }

    fn number(&mut self, set: ClassUnicode) -> Node {
        let found = self.sets.iter().position(|other| *other == set);
        Node::Set(found.unwrap_or_else(|| {
            self.sets.push(set);
            self.sets.len() - 1
        }))
    }
}

/// How long a class in brackets is, which may have others within.
pub(crate) fn class_length(text: &str) -> Option<usize> {
    let (mut depth, mut escape, mut fresh) = (0, false, false);
    for (at, c) in text.char_indices() {
        // A bracket right behind the first one is a character.
        let first = std::mem::take(&mut fresh);
        match c {
            _ if escape => escape = false,
            '\\' => escape = true,
            '[' => (depth, fresh) = (depth + 1, true),
            '^' => fresh = first,
            ']' if !first => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at + 1);
        }
    }
    None
}

/// How long an escape is.
pub(crate) fn escape_length(text: &str) -> Option<usize> {
    let rest = &text[1..];
    let first = rest.chars().next()?;
    let braces = || rest.find('}').map(|end| end + 2);
    match first {
        'x' | 'u' | 'U' | 'p' | 'P' if rest[1..].starts_with('{') => braces(),
        'x' => Some(4),
        'u' => Some(6),
        'U' => Some(10),
        'p' | 'P' => Some(2 + rest[1..].chars().next()?.len_utf8()),
        // What was matched before is another matter.
        '0'..='9' | 'k' => None,
        c => Some(1 + c.len_utf8()),
    }
}
