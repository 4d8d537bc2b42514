//! `--schema` and `--grammar`: what an answer must be.

use std::cell::OnceCell;
use std::path::PathBuf;

use clap::Args;
use delft::reasoning::Opening;
use delft::structured::{Grammar, Grammars};
use delft::tokens::ChatTemplate;
use delft::{ConstraintSource, Engine, Error};

use crate::terminal::{Outcome, Stop, read_file};

/// The constraint on answers.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Form")]
pub(crate) struct GrammarArgs {
    /// A file with a JSON schema that the answer follows
    #[arg(long, alias = "json-schema-file", value_name = "FILE")]
    pub(crate) schema: Option<PathBuf>,
    /// A file with a grammar that the answer follows, in llama.cpp's syntax (GBNF) or Lark's
    #[arg(long, alias = "grammar-file", value_name = "FILE", conflicts_with = "schema")]
    pub(crate) grammar: Option<PathBuf>,
}

impl GrammarArgs {
    /// The grammar that is asked for.
    pub(crate) fn read(&self) -> Outcome<Option<Grammar>> {
        if let Some(path) = &self.schema {
            let text = read_file(path)?;
            let schema = serde_json::from_str(&text)
                .map_err(|e| Stop::from(Error::new(path.display(), "a JSON schema", e)))?;
            return Ok(Some(Grammar::Schema(schema)));
        }
        let text = self.grammar.as_deref().map(read_file).transpose()?;
        Ok(text.map(|text| Grammar::of_text(&text)))
    }
}

/// Makes constraints of grammars for a model.
pub(crate) struct Maker<'a> {
    engine: &'a Engine,
    template: Option<&'a ChatTemplate>,
    grammars: OnceCell<Result<Grammars, Error>>,
}

impl<'a> Maker<'a> {
    /// For a model with this chat template.
    pub(crate) fn new(engine: &'a Engine, template: Option<&'a ChatTemplate>) -> Maker<'a> {
        Maker { engine, template, grammars: OnceCell::new() }
    }

    /// The constraint of the answer to a prompt; one that a chat template rendered may be reasoned
    /// about first.
    ///
    /// # Errors
    /// A grammar that cannot be followed.
    pub(crate) fn make(
        &self,
        grammar: &Grammar,
        prompt: &[u32],
        rendered: bool,
    ) -> Result<ConstraintSource, Error> {
        let name = || Error::new(self.engine.location(), "a tokenizer beside the weights", "none");
        let tokenizer = self.engine.shared_tokenizer().ok_or_else(name)?;
        let made = self.grammars.get_or_init(|| {
            let (vocabulary, ends) = (self.engine.info().vocab, self.engine.end_tokens());
            Grammars::new(tokenizer, vocabulary, ends)
        });
        let opening = match rendered {
            true => Opening::after_tokens(tokenizer, self.template, prompt),
            false => Opening::Answer,
        };
        made.as_ref().map_err(Clone::clone)?.compile(grammar, opening)
    }
}
