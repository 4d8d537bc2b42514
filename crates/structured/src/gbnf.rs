//! llama.cpp's grammars (GBNF) in Lark's syntax.
//!
//! Rules that refer to no rule that refers back become terminals, which are regular expressions;
//! the others become rules. Lark takes the longest terminal that matches, so a grammar whose
//! terminals run into each other may allow less than llama.cpp does.

use formats::{Error, Result};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Deepest nesting of parentheses.
const DEEPEST: usize = 64;

/// An expression of a rule.
enum Node {
    Text(String),
    /// A regular expression.
    Class(String),
    /// A rule, by its number.
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    /// A node and how often it comes, as Lark writes it.
    Repeat(Box<Node>, String),
}

/// The grammar in Lark's syntax.
///
/// # Errors
/// A syntax error, with its line; a rule that is not defined, `root` among them.
pub(crate) fn to_lark(text: &str) -> Result<String> {
    let mut parser = Parser { text, at: 0, names: HashMap::new(), rules: Vec::new() };
    parser.grammar()?;
    let Parser { names, rules, .. } = parser;
    let mut defined = Vec::with_capacity(rules.len());
    let mut by_number: Vec<(&str, usize)> = names.iter().map(|(name, i)| (*name, *i)).collect();
    by_number.sort_by_key(|(_, i)| *i);
    for ((name, _), rule) in by_number.iter().zip(rules) {
        let missing = || Error::new("grammar", format!("a rule {name}"), "none");
        defined.push(rule.ok_or_else(missing)?);
    }
    let root = *names.get("root").ok_or_else(|| Error::new("grammar", "a rule root", "none"))?;
    let terminal = terminals(&defined);
    let mut lark = String::new();
    let name = |i: usize| if terminal[i] { format!("R{i}") } else { format!("r{i}") };
    // Writing to a string cannot fail.
    let _ = writeln!(lark, "start: {}", name(root));
    for (i, rule) in defined.iter().enumerate() {
        let mut body = String::new();
        write_node(rule, &name, &mut body);
        let _ = writeln!(lark, "{}: {body}", name(i));
    }
    Ok(lark)
}

/// Which rules are terminals: those in which nothing but terminals stands.
fn terminals(rules: &[Node]) -> Vec<bool> {
    // For each rule, the rules that it stands in, and how many in it are not known to be terminals.
    let mut users = vec![Vec::new(); rules.len()];
    let mut open = vec![0; rules.len()];
    for (i, rule) in rules.iter().enumerate() {
        let mut parts = HashSet::new();
        rules_in(rule, &mut parts);
        open[i] = parts.len();
        parts.into_iter().for_each(|part| users[part].push(i));
    }
    let mut terminal = vec![false; rules.len()];
    let mut found: Vec<usize> = (0..rules.len()).filter(|i| open[*i] == 0).collect();
    while let Some(i) = found.pop() {
        terminal[i] = true;
        for user in &users[i] {
            open[*user] -= 1;
            if open[*user] == 0 {
                found.push(*user);
            }
        }
    }
    terminal
}

/// Adds the rules that stand in an expression.
fn rules_in(node: &Node, found: &mut HashSet<usize>) {
    match node {
        Node::Text(_) | Node::Class(_) => {}
        Node::Rule(i) => {
            found.insert(*i);
        }
        Node::Sequence(nodes) | Node::Choice(nodes) => {
            nodes.iter().for_each(|node| rules_in(node, found));
        }
        Node::Repeat(node, _) => rules_in(node, found),
    }
}

fn write_node(node: &Node, name: &impl Fn(usize) -> String, out: &mut String) {
    let mut list = |nodes: &[Node], between: &str| {
        out.push('(');
        for (i, node) in nodes.iter().enumerate() {
            if i > 0 {
                out.push_str(between);
            }
            write_node(node, name, out);
        }
        out.push(')');
    };
    match node {
        Node::Sequence(nodes) if nodes.is_empty() => out.push_str("\"\""),
        Node::Sequence(nodes) => list(nodes, " "),
        Node::Choice(nodes) => list(nodes, " | "),
        Node::Text(text) => out.push_str(&Value::from(text.as_str()).to_string()),
        Node::Class(class) => {
            let _ = write!(out, "/{class}/");
        }
        Node::Rule(i) => out.push_str(&name(*i)),
        Node::Repeat(node, times) => {
            out.push('(');
            write_node(node, name, out);
            let _ = write!(out, "){times}");
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    names: HashMap<&'a str, usize>,
    /// By number; none where a rule was named and not defined yet.
    rules: Vec<Option<Node>>,
}

impl<'a> Parser<'a> {
    fn wrong(&self, expected: &str) -> Error {
        let line = 1 + self.text[..self.at].matches('\n').count();
        let found: String = self.text[self.at..].chars().take(20).collect();
        let found = if found.is_empty() { "the end".to_string() } else { format!("{found:?}") };
        Error::new(format!("grammar, line {line}"), expected, found)
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn takes(&mut self, text: &str) -> bool {
        let found = self.text[self.at..].starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    /// Passes over blanks and comments, and over ends of lines where an expression may go on behind
    /// them.
    fn space(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if lines => self.at += 1,
                '#' => {
                    let rest = &self.text[self.at..];
                    self.at += rest.find('\n').unwrap_or(rest.len());
                }
                _ => return,
            }
        }
    }

    fn number(&mut self, name: &'a str) -> usize {
        let next = self.rules.len();
        let number = *self.names.entry(name).or_insert(next);
        if number == next {
            self.rules.push(None);
        }
        number
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = &self.text[self.at..];
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        self.at += length;
        (length > 0).then(|| &rest[..length])
    }

    fn grammar(&mut self) -> Result<()> {
        self.space(true);
        while self.at < self.text.len() {
            let Some(name) = self.name() else { return Err(self.wrong("a rule's name")) };
            let number = self.number(name);
            self.space(false);
            if !self.takes("::=") {
                return Err(self.wrong("::="));
            }
            self.space(true);
            let rule = self.choice(0)?;
            if self.rules[number].replace(rule).is_some() {
                return Err(Error::new("grammar", format!("one rule {name}"), "two"));
            }
            self.space(false);
            if !matches!(self.peek(), None | Some('\n' | '\r')) {
                return Err(self.wrong("the end of a rule"));
            }
            self.space(true);
        }
        Ok(())
    }

    fn choice(&mut self, depth: usize) -> Result<Node> {
        if depth > DEEPEST {
            return Err(self.wrong("parentheses that are less deep"));
        }
        let mut choices = vec![self.sequence(depth)?];
        loop {
            self.space(depth > 0);
            if !self.takes("|") {
                break;
            }
            self.space(true);
            choices.push(self.sequence(depth)?);
        }
        Ok(if choices.len() == 1 { choices.remove(0) } else { Node::Choice(choices) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node> {
        let mut nodes = Vec::new();
        loop {
            self.space(depth > 0);
            let node = match self.peek() {
                Some('"') => self.string()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Node::Class("(?s:.)".to_string())
                }
                Some('(') => {
                    self.at += 1;
                    self.space(true);
                    let inner = self.choice(depth + 1)?;
                    self.space(true);
                    if !self.takes(")") {
                        return Err(self.wrong(")"));
                    }
                    inner
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '_' || c == '-' => match self.name() {
                    Some(name) => Node::Rule(self.number(name)),
                    None => return Err(self.wrong("a rule's name")),
                },
                _ => break,
            };
            nodes.push(self.repeated(node)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    fn repeated(&mut self, node: Node) -> Result<Node> {
        let mut node = node;
        for _ in 0..DEEPEST {
            let times = match self.peek() {
                Some(c @ ('?' | '*' | '+')) => {
                    self.at += 1;
                    c.to_string()
                }
                Some('{') => {
                    let rest = &self.text[self.at..];
                    let end = rest.find('}').ok_or_else(|| self.wrong("{N}, {N,} or {N,M}"))?;
                    let inner: String = rest[1..end].chars().filter(|c| *c != ' ').collect();
                    let (least, most) = inner.split_once(',').unwrap_or((&inner, &inner));
                    let fits = |n: &str| n.parse::<u16>().is_ok();
                    if !fits(least) || !(fits(most) || most.is_empty()) {
                        return Err(self.wrong("{N}, {N,} or {N,M} of numbers below 65536"));
                    }
                    self.at += end + 1;
                    format!("{{{least},{most}}}")
                }
                _ => return Ok(node),
            };
            node = Node::Repeat(Box::new(node), times);
        }
        Err(self.wrong("fewer repetitions of a repetition"))
    }

    fn string(&mut self) -> Result<Node> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => {
                    self.at += 1;
                    return Ok(Node::Text(text));
                }
                Some('\n') | None => return Err(self.wrong("\"")),
                Some(_) => text.push(self.character()?),
            }
        }
    }

    fn class(&mut self) -> Result<Node> {
        self.at += 1;
        let mut class = "[".to_string();
        if self.takes("^") {
            class.push('^');
        }
        let empty = class.len();
        while self.peek() != Some(']') {
            if matches!(self.peek(), Some('\n') | None) {
                return Err(self.wrong("]"));
            }
            let first = self.character()?;
            // Writing to a string cannot fail.
            let _ = write!(class, "\\x{{{:X}}}", u32::from(first));
            let rest = &self.text[self.at..];
            if rest.starts_with('-') && !rest.starts_with("-]") {
                self.at += 1;
                let last = self.character()?;
                if last < first {
                    return Err(self.wrong("a range that goes up"));
                }
                let _ = write!(class, "-\\x{{{:X}}}", u32::from(last));
            }
        }
        if class.len() == empty {
            return Err(self.wrong("a character"));
        }
        self.at += 1;
        Ok(Node::Class(class + "]"))
    }

    /// A character of a string or a class, perhaps escaped.
    fn character(&mut self) -> Result<char> {
        let next = self.take().ok_or_else(|| self.wrong("a character"))?;
        if next != '\\' {
            return Ok(next);
        }
        let digits = match self.take() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.wrong("an escape such as \\n, \\\" or \\x41")),
        };
        let code = self.text.get(self.at..self.at + digits);
        let code = code.and_then(|code| u32::from_str_radix(code, 16).ok());
        let found = code.and_then(char::from_u32);
        let found = found.ok_or_else(|| self.wrong("the hexadecimal code of a character"))?;
        self.at += digits;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_rules_or_terminals() {
        let text = "# a list\nroot ::= \"[\" item (\",\" ws item)* \"]\"\nitem ::=\n  num | root\n\
                    num ::= [0-9]{1,3} | \"-\" num2 # ends\nnum2 ::= [^\\x41-Z\\]]+\nws ::= [ \\n]?";
        let lark = to_lark(text).unwrap();
        let expected = "start: r0\n\
            r0: (\"[\" r1 ((\",\" R2 r1))* \"]\")\n\
            r1: (R3 | r0)\n\
            R2: (/[\\x{20}\\x{A}]/)?\n\
            R3: ((/[\\x{30}-\\x{39}]/){1,3} | (\"-\" R4))\n\
            R4: (/[^\\x{41}-\\x{5A}\\x{5D}]/)+\n";
        assert_eq!(lark, expected);
    }

    #[test]
    fn what_is_wrong_is_told_by_its_line() {
        let cases = [
            ("", "a rule root"),
            ("root = \"a\"", "line 1: expected ::="),
            ("root ::= a", "expected a rule a"),
            ("root ::= \"a", "line 1: expected \""),
            ("root ::= (\"a\"\n", "expected )"),
            ("a ::= \"a\"\n\nroot ::= [b-a]", "line 3: expected a range"),
            ("root ::= \"a\"{3,x}", "numbers below 65536"),
            ("root ::= \"\\q\"", "an escape"),
            ("root ::= \"\\uD800\"", "the hexadecimal code"),
            ("root ::= \"a\" )", "the end of a rule"),
            ("root ::= \"a\"\nroot ::= \"b\"", "one rule root"),
        ];
        for (text, expected) in cases {
            let error = to_lark(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(1000), ")".repeat(1000));
        assert!(to_lark(&deep).unwrap_err().to_string().contains("less deep"));
        let starred = format!("root ::= \"a\"{}", "*".repeat(100_000));
        assert!(to_lark(&starred).unwrap_err().to_string().contains("fewer repetitions"));
    }
}
