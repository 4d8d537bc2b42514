//! Templates and tokenizers that mean harm or are broken: an error or a result in good time, never
//! a panic.

use std::time::{Duration, Instant};

use delft_tokens::{ChatTemplate, Special, TemplateInput, Tokenizer};
use serde_json::json;

fn render(source: &str) -> Result<String, String> {
    let messages =
        [json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": null})];
    let request =
        TemplateInput { messages: &messages, bos_token: Some("<s>"), ..TemplateInput::default() };
    ChatTemplate::from_source(source)
        .and_then(|template| template.render(&request))
        .map_err(|e| e.to_string())
}

#[test]
fn hostile_templates_end() {
    let nested =
        |open: &str, close: &str| format!("{{{{ {}1{} }}}}", open.repeat(5000), close.repeat(5000));
    let cases = [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
                .to_string(),
            "fuel",
        ),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}".to_string(), "recursion"),
        ("{% for a in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}".to_string(), "bytes"),
        ("{{ 'a' * 1000000000000 }}".to_string(), "bytes"),
        ("{{ range(1000000000000) | list | length }}".to_string(), ""),
        (nested("(", ")"), ""),
        (nested("[", "]"), ""),
        ("{% if 1 %}".repeat(5000), ""),
        ("{{ raise_exception('no\nway') }}".to_string(), "no\\nway"),
        ("{{ messages[1].content.text.more }}".to_string(), ""),
        ("{{ undefined_function() }}".to_string(), "undefined_function"),
        ("{% block b %}{{ self.b() }}{% endblock %}".to_string(), "recursion"),
        ("{% block b %}{% set x = self.b() %}{% endblock %}".to_string(), "recursion"),
        ("{% macro f(x) %}{{ caller() }}{% call f(x) %}{% endcall %}{% endmacro %}{% call f(1) %}{% endcall %}".to_string(), "recursion"),
        (format!("{{{{ {}1 }}}}", "1 + ".repeat(100_000)), "operators"),
        (format!("{{{{ {}1 }}}}", "not ".repeat(100_000)), "operators"),
        (format!("{{{{ {}1 }}}}", "1 if 1 else ".repeat(100_000)), "operators"),
        (format!("{{{{ x{} }}}}", "|upper".repeat(100_000)), "operators"),
        (format!("{{{{ x{} }}}}", ".y".repeat(100_000)), "operators"),
        (format!("{{% if 1 %}}{}", "{% elif 1 %}".repeat(100_000)), "elif"),
        ("{{ raise_exception('x' * 16000000) }}".to_string(), "xxx"),
        // None of these is long by itself; all of them together are.
        (
            "{% set a = ['x'] * 200000 %}{% set b = ['x'] * 200000 %}{% for i in range(99999) %}{{ a == b }}{% endfor %}".to_string(),
            "bytes",
        ),
        (
            "{% set a = ['x'] * 200000 %}{% for i in range(99999) %}{{ a|select('in', a)|first }}{% endfor %}".to_string(),
            "bytes",
        ),
        (
            "{% set s = 'x' * 16000000 %}{% for i in range(99999) %}{{ s[i] }}{{ 'y' in s }}{{ s is lower }}{% endfor %}".to_string(),
            "bytes",
        ),
        (
            "{% set s = 'x' * 16000000 %}{{ s|trim(s ~ 'y') }}{{ s.strip(s) }}".to_string(),
            "bytes",
        ),
        ("{% include 'default' %}".to_string(), "non-existing"),
        ("{% include '/etc/passwd' %}".to_string(), ""),
        ("{{ [] | tojson(separators=(1,)) }}".to_string(), ""),
        ("{{ 'x'[::0] }}".to_string(), "zero"),
        ("{{ messages | tojson(indent=-9223372036854775808) ~ {}.x.y }}".to_string(), ""),
        ("{% for x in none %}{% endfor %}".to_string(), "none"),
        ("{% set".to_string(), "line 1"),
    ];
    for (source, part) in &cases {
        let start = Instant::now();
        let error = render(source).unwrap_err();
        let name: String = source.chars().take(60).collect();
        assert!(error.contains(part) && !error.contains('\n'), "{name}: {error}");
        assert!(start.elapsed() < Duration::from_secs(60), "{name}");
    }
    // What looks for trouble and finds none.
    for (source, expected) in [
        ("{{ [][::-1] }}{{ ''[::-1] }}{{ messages[5:1:-2] }}", "[][]"),
        ("{{ 'ab'[9223372036854775807:-9223372036854775808:-1] }}", "ba"),
        ("{{ 'ab'[::9223372036854775807] }}", "a"),
        ("{{ 'x'.center(99999999999) | length }}", "65536"),
        // Chains as long as they may be, at the bottom of nested brackets.
        (&format!("{{{{ {}1{}{} }}}}", "(".repeat(60), " + 1".repeat(180), ")".repeat(60)), "181"),
        (&format!("{{% if 0 %}}{}2{{% endif %}}", "{% elif 0 %}1".repeat(240)), ""),
        ("{{ 1e999 | int }}{{ 'nan' | float | int }}", "00"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
    }
}

/// Changes a text here and there: cuts, doubles or swaps pieces of it.
fn mutate(text: &str, seed: u64) -> String {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut roll = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    let mut characters: Vec<char> = text.chars().collect();
    for _ in 0..=roll(4) {
        let at = roll(characters.len());
        let length = roll(12).min(characters.len() - at);
        let piece: Vec<char> = characters[at..at + length].to_vec();
        match roll(4) {
            0 => drop(characters.drain(at..at + length)),
            1 => drop(characters.splice(at..at, piece)),
            2 => characters.insert(
                at,
                ['{', '}', '%', '[', ']', ':', '-', '(', '"', '\'', '|', '0', 'é'][roll(13)],
            ),
            _ => {
                let other = roll(characters.len() - length + 1).min(at);
                drop(characters.splice(other..other, piece));
            }
        }
    }
    characters.into_iter().collect()
}

#[test]
fn broken_templates_and_tokenizers_do_not_panic() {
    let sources = [
        include_str!("../data/templates/own/turns.jinja"),
        include_str!("../data/templates/own/brackets.jinja"),
        include_str!("../data/templates/own/python.jinja"),
    ];
    let mut rendered = 0;
    for seed in 0..3000 {
        rendered += usize::from(render(&mutate(sources[seed % 3], seed as u64)).is_ok());
    }
    assert!(rendered > 100, "{rendered}");
    let tokenizers = [
        include_str!("../data/bytes/tokenizer.json"),
        include_str!("../data/pieces/tokenizer.json"),
        include_str!("../data/unigram/tokenizer.json"),
    ];
    let mut read = 0;
    for seed in 0..450 {
        let Ok(tokenizer) =
            Tokenizer::from_json(mutate(tokenizers[seed % 3], seed as u64).as_bytes())
        else {
            continue;
        };
        read += 1;
        if let Ok(ids) =
            tokenizer.encode("Hi <s> 12 é🎉\n日</s>", Special { add: true, parse: true })
        {
            tokenizer.decode(&ids, true);
        }
    }
    assert!(read > 20, "{read}");
}
