//! Templates that would fill any memory, operation by operation: an error of one line, before they
//! take much.
//!
//! One test, as it counts what the process allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use delft_tokens::{ChatTemplate, TemplateInput};
use serde_json::json;

/// The system's allocator, with what is allocated now and the most there was.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came; the counters touch no memory of
// its.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a rendering may take: the budget of its values, and as much again for what is on its way.
const MOST: usize = 1 << 30;

fn render(source: &str) -> Result<String, String> {
    let messages = [json!({"role": "user", "content": "Hi", "n": [1, 2, {"a": "b"}]})];
    let request =
        TemplateInput { messages: &messages, bos_token: Some("<s>"), ..TemplateInput::default() };
    ChatTemplate::from_source(source)
        .and_then(|template| template.render(&request))
        .map_err(|e| e.to_string())
}

/// A template that does something again and again to a variable, `ns.x`, which begins as given.
fn again(start: &str, step: &str) -> String {
    format!(
        "{{% set ns = namespace(x={start}, y=[]) %}}{{% for i in range(99999) %}}{step}{{% endfor %}}"
    )
}

#[test]
fn no_template_fills_the_memory() {
    let set = |start: &str, value: &str| again(start, &format!("{{% set ns.x = {value} %}}"));
    let text = |value: &str| set("'x'", value);
    // A text of a few megabytes, then one operation that would make a thousand times as much of it.
    let big = |use_it: &str| format!("{{% set s = 'x\\n' * 4000000 %}}{{{{ ({use_it})|length }}}}");
    // Lists of lists: little memory, and no end to walking through them.
    let nest = |value: &str, use_it: &str| {
        format!(
            "{{% set ns = namespace(x='x') %}}{{% for i in range(60) %}}{{% set ns.x = {value} %}}{{% endfor %}}{use_it}"
        )
    };
    let mut cases = vec![
        text("ns.x ~ ns.x"),
        text("ns.x + ns.x"),
        text("ns.x * 2"),
        text("2 * ns.x"),
        text("[ns.x, ns.x]|join"),
        text("[ns.x, ns.x]|join(ns.x)"),
        text("ns.x.join([ns.x, ns.x])"),
        text("ns.x.join(['', '', '', ''])"),
        text("ns.x|replace('x', 'xx')"),
        text("ns.x.replace('x', 'xx')"),
        text("ns.x.replace('', 'x')"),
        text("ns.x|replace('', 'x')"),
        text("('x\\n' ~ ns.x)|indent(ns.x|length)"),
        text("('x\\n' ~ ns.x)|indent(ns.x, true, true)"),
        text("'%s%s'|format(ns.x, ns.x)"),
        text("'{0}{0}'.format(ns.x)"),
        text("'{}{}'.format(ns.x, ns.x)"),
        text("ns.x|upper ~ ns.x|title"),
        text("[ns.x, ns.x]|sum(start='')"),
        text("[ns.x, ns.x]|tojson"),
        text("[ns.x, ns.x]|string"),
        text("[ns.x, ns.x]|pprint"),
        text("[ns.x, ns.x]|upper"),
        text("ns.x|escape ~ '<<<<'|e ~ ns.x"),
        text("(ns.x ~ ns.x)[::-1]"),
        text("(ns.x ~ ns.x)|reverse"),
        text("ns.x.ljust(65536, ns.x)"),
        text("ns.x.center(60000, ns.x ~ 'x')"),
        text("{'a': ns.x, 'b': ns.x}|tojson(separators=(', ', ': '))"),
        text("strftime_now(ns.x ~ '%A%A') ~ ns.x"),
        set("['x']", "ns.x + ns.x"),
        set("['x']", "ns.x * 2"),
        set("['x']", "2 * ns.x"),
        set("('x',)", "ns.x + ns.x"),
        set("('x',)", "ns.x * 2"),
        set("['x']", "[ns.x, ns.x]|sum(start=[])"),
        set("['x']", "ns.x|chain(ns.x)|list"),
        set("['x']", "ns.x|chain(ns.x)"),
        set("['x']", "ns.x|batch(1, 'x')"),
        set("['x']", "ns.x|batch(ns.x|length * 2 + 2, 'x')|first"),
        set("['x']", "ns.x|slice(ns.x|length * 2 + 2)"),
        set("['x']", "ns.x|zip(ns.x)"),
        set("['x']", "[ns.x]"),
        set("['x']", "(ns.x,)"),
        set("['x']", "{'a': ns.x}"),
        set("['x']", "dict(a=ns.x)"),
        set("['x']", "[ns.x]|map('list')"),
        set("['x']", "[ns.x]|map('default')|list"),
        set("{'a': 1}", "{'a': ns.x, 'b': ns.x}"),
        set("{'a': 1}", "ns.x.items()|list ~ ns.x|items"),
        set("{'a': 1}", "dict(ns.x, b=ns.x)"),
        set("['x']", "ns.x[:] + ns.x[::-1]"),
        // A text from what is printed.
        again("'x'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        again("'x'", "{% set ns.x | upper %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        again("'x'", "{% macro m() %}{{ ns.x }}{{ ns.x }}{% endmacro %}{% set ns.x = m() %}"),
        again(
            "'x'",
            "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set ns.x %}{% call m() %}{{ ns.x }}{% endcall %}{% endset %}",
        ),
        again(
            "'x'",
            "{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}",
        ),
        "{% set a %}{% for i in range(99999) %}{% for j in range(99999) %}".to_string()
            + &"plain text ".repeat(2000)
            + "{% endfor %}{% endfor %}{% endset %}",
        "{% macro m(n) %}{% for i in range(n) %}".to_string()
            + &"plain text ".repeat(2000)
            + "{{ m(n) }}{% endfor %}{% endmacro %}{% set a = m(9) %}",
        "{% set a %}{% block b %}".to_string()
            + &"plain text ".repeat(2000)
            + "{% endblock %}{% for i in range(99999) %}{{ self.b() }}{% endfor %}{% endset %}",
        "{% set a %}{% for x in [1] recursive %}{{ loop([1, 1]) }}{{ loop([1]) }}{% endfor %}{% endset %}".to_string(),
        // Many long ones, none of them too long by itself.
        again("'x' * 8000000", "{% set ns.y = ns.y + [ns.x ~ i] %}"),
        again("'x' * 8000000", "{% do namespace(z=ns.x ~ i) %}"),
        again("['x'] * 200000", "{% set ns.x = ns.x[:] %}"),
        again("['x'] * 200000", "{% set ns.y = [ns.y, ns.x + []] %}"),
        again("{'a': 'x' * 1000000}", "{% set ns.y = [ns.y, dict(ns.x)|tojson] %}"),
        again("'a'", "{% for j in range(99999) %}{% macro m() %}{{ ns.x }}{{ i }}{{ messages }}{{ bos_token }}{% endmacro %}{% endfor %}"),
        // Constants, which compiling folds.
        "{{ ('a' * 99999999) ~ ('b' * 99999999) }}".repeat(40),
        "{{ [('a' * 99999999), ('b' * 99999999)] }}".repeat(40),
        "{% if 'a' * 99999999 == 'b' * 99999999 %}{% endif %}".repeat(400),
        "{% set x = 'a' * 60000000 %}".repeat(400),
        // Namespaces and loops that hold themselves.
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns|upper }}".to_string(),
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns == ns }}".to_string(),
        "{% set ns = namespace() %}{% set ns.x = {'a': (1, ns)} %}{{ ns }}".to_string(),
        "{% set ns = namespace() %}{% set m = namespace(x=ns) %}{% set ns.x = m %}".to_string(),
        "{% set ns = namespace() %}{% set ns.x = [1]|map('default', ns)|list %}{% set ns.x = [none]|batch(2, ns) %}".to_string(),
        "{% set ns = namespace() %}{% for x in [1, 2] %}{% set ns.x = loop %}{% endfor %}".to_string(),
        "{% for x in [1, 2] %}{{ [loop]|string }}{% endfor %}".to_string(),
    ];
    for use_it in [
        "s.split('x')|map('split', '')|list",
        "s * 1000",
        "s|replace('x', s)",
        "s.replace('x', s)",
        "s|list|join(s)",
        "s|join(s)",
        "s.join(s)",
        "s|indent(1000000)",
        "s|indent(s)",
        "s.ljust(65536, s)",
        "[s, s, s]|tojson(indent=s)",
        "[s, s, s]|tojson(separators=(s, s))",
        "s|list|tojson(indent=64)",
        "'%1000000000d'|format(1)",
        "'%.1000000000f'|format(1.5)",
        "'%*d'|format(1000000000, 1)",
        "('%s' * 1000)|format(s)",
        "'{:1000000000}'.format(1)",
        "'{:{}}'.format(1, 1000000000)",
        "'{0:{1}}'.format(1, 1000000000)",
        "('{0}' * 1000).format(s)",
        "('{0!r}' * 1000).format(s)",
        "[1]|batch(1000000000, 1)",
        "[1]|slice(1000000000)",
        "[1]|slice(1000000000, 1)",
        "[1] * 1000000000",
        "(1,) * 1000000000",
        "range(100000)|list * 1000",
        "[] * 1000000000 ~ 'x' * 1000000000",
        "s|list|batch(1)|list",
        "s|list|groupby('a')|list ~ s|list|zip(s|list)|list",
        "dict(*s)",
        "namespace(*s)",
    ] {
        cases.push(big(use_it));
    }
    for value in ["[ns.x, ns.x]", "(ns.x, ns.x)", "{'a': ns.x, 'b': ns.x}", "[[ns.x] + [ns.x]]"] {
        for use_it in [
            "{{ ns.x }}",
            "{{ ns.x|tojson }}",
            "{{ ns.x|upper }}",
            "{{ ns.x ~ '' }}",
            "{{ ns.x|string }}",
            "{{ ns.x == [ns.x] }}",
            "{{ ns.x in [ns.x] }}",
            "{{ [ns.x]|join }}",
            "{{ [ns.x]|unique|list }}",
            "{{ [ns.x]|sort }}",
            "{{ '%s'|format(ns.x) }}",
            "{{ raise_exception(ns.x) }}",
        ] {
            cases.push(nest(value, use_it));
        }
    }
    let start = LIVE.load(Ordering::Relaxed);
    let mut worst = (0, String::new());
    for source in &cases {
        let shown: String = source.chars().take(200).collect();
        PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
        let begun = Instant::now();
        let error = render(source).expect_err(&shown);
        let took = begun.elapsed();
        let peak = PEAK.load(Ordering::Relaxed).saturating_sub(start);
        println!("{:4} MiB {took:.1?} {shown}: {error}", peak >> 20);
        assert!(!error.contains('\n'), "{shown}: {error}");
        assert!(peak < MOST, "{shown}: {peak} bytes");
        if peak > worst.0 {
            worst = (peak, shown);
        }
    }
    println!("{} templates, at most {} MiB: {}", cases.len(), worst.0 >> 20, worst.1);
}
