//! The models that are served, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use delft::tokens::{ChatTemplate, Tokenizer};
use delft::{Engine, Prompt};
use hyper::StatusCode;
use serde_json::{Map, Value};

use crate::fields::shown;
use crate::generation::{Generator, Limits};
use crate::problem::Problem;

/// A model to serve.
pub struct Served {
    /// The name that requests give.
    pub name: String,
    /// The model.
    pub engine: Engine,
    /// Sources of chat templates to use instead of the model's own, by name; see [`ChatTemplate::new`].
    pub templates: Option<BTreeMap<String, String>>,
}

/// A model that is served.
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) engine: Engine,
    pub(crate) generator: Arc<Generator>,
    template: Option<ChatTemplate>,
}

/// A conversation for a model's chat template.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conversation {
    /// As chat templates read them.
    pub(crate) messages: Vec<Value>,
    /// Further variables of the template.
    pub(crate) extra: Map<String, Value>,
    /// How the answer begins.
    pub(crate) prefill: String,
}

impl Model {
    pub(crate) fn new(served: Served, limits: Limits) -> delft::Result<Model> {
        let Served { name, engine, templates } = served;
        let template = templates.map(|sources| ChatTemplate::new("chat template", sources));
        let generator = Arc::new(Generator::new(engine.clone(), limits));
        Ok(Model { template: template.transpose()?, generator, name, engine })
    }

    /// Its chat template, if it has one.
    pub(crate) fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref().or(self.engine.chat_template())
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// A model without one, which takes token ids only.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, Problem> {
        self.engine.tokenizer().ok_or_else(|| {
            Problem::bad(format!("{}: the model has no tokenizer: give token ids", self.name))
        })
    }

    /// Positions that a session holds.
    pub(crate) fn context(&self) -> usize {
        self.engine.info().context
    }

    /// The text that the model reads for a conversation.
    pub(crate) fn render(&self, conversation: &Conversation) -> Result<String, Problem> {
        let (messages, extra) = (conversation.messages.clone(), conversation.extra.clone());
        let prompt = Prompt::Chat { messages, extra };
        let text = prompt.render(self.engine.tokenizer(), self.template())?;
        Ok(text + &conversation.prefill)
    }

    /// The tokens of a conversation.
    pub(crate) fn encode_chat(&self, conversation: &Conversation) -> Result<Vec<u32>, Problem> {
        Ok(self.tokenizer()?.encode_chat(&self.render(conversation)?)?)
    }

    /// The tokens of a text to continue; special tokens in it are plain text.
    pub(crate) fn encode_text(&self, text: &str) -> Result<Vec<u32>, Problem> {
        Ok(Prompt::from(text).encode(self.engine.tokenizer(), None)?)
    }

    /// Checks that a prompt leaves room for a token.
    ///
    /// # Errors
    /// A prompt that does not fit, or is empty, or has tokens that the model does not.
    pub(crate) fn check(&self, prompt: &[u32]) -> Result<(), Problem> {
        let (context, vocabulary) = (self.context(), self.engine.info().vocab);
        if prompt.is_empty() {
            return Err(Problem::bad("the prompt: expected at least one token, found none"));
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= vocabulary) {
            let message = format!("the prompt: expected tokens below {vocabulary}, found {token}");
            return Err(Problem::bad(message));
        }
        if prompt.len() >= context {
            let message = format!(
                "the prompt has {} tokens; the context of {} holds {context}, the answer included",
                prompt.len(),
                self.name
            );
            return Err(Problem { code: "context_length_exceeded", ..Problem::bad(message) });
        }
        Ok(())
    }
}

/// All of them; the first is the one that is meant where no name is given.
pub(crate) struct Models(pub(crate) Vec<Arc<Model>>);

impl Models {
    /// The model of a name; Ollama's tag `latest` adds nothing to it.
    ///
    /// # Errors
    /// 404 with the names that there are.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<&Arc<Model>, Problem> {
        let Some(name) = name else {
            return self.0.first().ok_or_else(|| Problem::failed("no model is served"));
        };
        let bare = name.strip_suffix(":latest").unwrap_or(name);
        let same = |model: &&Arc<Model>| {
            [name, bare].iter().any(|name| model.name.eq_ignore_ascii_case(name))
        };
        self.0.iter().find(same).ok_or_else(|| {
            let names: Vec<&str> = self.0.iter().map(|model| model.name.as_str()).collect();
            let message =
                format!("model: expected {}, found \"{}\"", names.join(" or "), shown(name));
            let problem = Problem::new(StatusCode::NOT_FOUND, "model_not_found", message);
            Problem { param: Some("model".to_string()), ..problem }
        })
    }
}
