//! Rewrites a template's source so that MiniJinja may parse it.
//!
//! `{% generation %}` blocks, which mark what a model is trained on and say nothing in a prompt,
//! become `{% with %}` blocks, which are scopes just the same. And as the parser and all that walks
//! its tree recurse along chains, `a + b + c` or `elif` after `elif`, whose length the parser does
//! not limit, they are limited here.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// Most operators, brackets and dots in one tag. The longest of a hundred published templates has
/// 28.
const LONGEST_CHAIN: usize = 250;
/// Most `elif` in a template. Published ones have up to 20.
const MOST_ELIF: usize = 250;

/// The source in MiniJinja's terms; what is no token is left for the parser to complain about.
///
/// # Errors
/// The construct of which there is too much, and the line.
pub(crate) fn rewrite(source: &str, syntax: &SyntaxConfig) -> Result<String, String> {
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    let (mut chain, mut elif) = (0, 0);
    // Whether the last token opened a block, and where a word stands that so far is alone in its
    // block.
    let (mut opened, mut alone) = (false, None);
    for item in tokenize(source, false, syntax.clone()) {
        let Ok((token, span)) = item else { break };
        let before = std::mem::take(&mut opened);
        let word = std::mem::take(&mut alone);
        match token {
            Token::BlockStart => (opened, chain) = (true, 0),
            Token::VariableStart | Token::TemplateData(_) => chain = 0,
            Token::Ident("generation") if before => alone = Some(("with", span)),
            Token::Ident("endgeneration") if before => alone = Some(("endwith", span)),
            Token::BlockEnd => {
                if let Some((plain, span)) = word {
                    out.push_str(&source[copied..span.start_offset as usize]);
                    out.push_str(plain);
                    copied = span.end_offset as usize;
                }
            }
            Token::Ident("elif") if before => elif += 1,
            Token::Ident("and" | "or" | "not" | "if" | "else" | "is" | "in")
            | Token::Plus
            | Token::Minus
            | Token::Mul
            | Token::Div
            | Token::FloorDiv
            | Token::Pow
            | Token::Mod
            | Token::Tilde
            | Token::Dot
            | Token::Pipe
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::BracketOpen
            | Token::ParenOpen
            | Token::BraceOpen => chain += 1,
            _ => {}
        }
        if chain > LONGEST_CHAIN {
            let line = span.start_line;
            return Err(format!("a tag of more than {LONGEST_CHAIN} operators, in line {line}"));
        }
        if elif > MOST_ELIF {
            return Err(format!("more than {MOST_ELIF} times elif, in line {}", span.start_line));
        }
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation() {
        for (source, plain) in [
            ("a{%- generation -%}b{% endgeneration %}c", "a{%- with -%}b{% endwith %}c"),
            (
                "{%generation%}{% generations %}{% x generation %}",
                "{%with%}{% generations %}{% x generation %}",
            ),
            (
                "{# {% generation %} #}{{ '{% generation %}' }}",
                "{# {% generation %} #}{{ '{% generation %}' }}",
            ),
            (
                "{% raw %}{% generation %}[::-1]{% endraw %}{%generation%}",
                "{% raw %}{% generation %}[::-1]{% endraw %}{%with%}",
            ),
            ("{% unfinished '", "{% unfinished '"),
            ("{% generation", "{% generation"),
            ("{", "{"),
            ("\u{e9}{{\u{e9}", "\u{e9}{{\u{e9}"),
            ("\u{e9}{%+ generation +%}\u{e9}", "\u{e9}{%+ with +%}\u{e9}"),
        ] {
            assert_eq!(rewrite(source, &SyntaxConfig::default()).as_deref(), Ok(plain));
        }
    }

    #[test]
    fn chains() {
        let syntax = SyntaxConfig::default();
        for link in
            ["1+", "1~", "1*", "1 if 1 else ", "-", "not ", "x.", "x|y|", "(", "[", "1 <", "1 and "]
        {
            let chain = link.repeat(LONGEST_CHAIN + 1);
            let error = rewrite(&format!("\n{{{{ {chain}1 }}}}"), &syntax).unwrap_err();
            assert!(error.contains("in line 2"), "{error}");
            let block = rewrite(&format!("{{% if {chain}1 %}}"), &syntax);
            assert!(block.is_err(), "{link}");
        }
        let branches = "{% if x %}".to_string() + &"{% elif x %}".repeat(MOST_ELIF + 1);
        assert!(rewrite(&branches, &syntax).unwrap_err().contains("elif"));
        let apart = "{{ 1 + 1 }}{% if 1 + 1 %}".repeat(LONGEST_CHAIN);
        assert_eq!(rewrite(&apart, &syntax), Ok(apart));
    }
}
