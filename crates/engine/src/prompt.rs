//! Prompts: text, tokens or chat messages that generation starts from.

use formats::{Error, Result};
use serde_json::Value;
use tokens::template::fold_system;
use tokens::{ChatTemplate, Special, TemplateInput, Tokenizer};

/// A prompt in one of three forms.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Text to continue; special tokens in it are plain text.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<u32>),
    /// Messages (`role`, `content`, ..) for the model's chat template, which is told to open the
    /// reply.
    Chat {
        /// The conversation so far.
        messages: Vec<Value>,
        /// Further variables for the template, such as `enable_thinking` or `tools`.
        extra: serde_json::Map<String, Value>,
    },
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Prompt::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Prompt::Tokens(tokens)
    }
}

impl Prompt {
    /// The tokens that the model reads: text takes a tokenizer, a chat a template besides.
    ///
    /// # Errors
    /// One of them that is missing; what the template raised.
    pub fn encode(
        &self,
        tokenizer: Option<&Tokenizer>,
        template: Option<&ChatTemplate>,
    ) -> Result<Vec<u32>> {
        self.encode_checked(tokenizer, template, |_| Ok(()))
    }

    /// The same, with a check of the text before it is made into tokens.
    pub(crate) fn encode_checked(
        &self,
        tokenizer: Option<&Tokenizer>,
        template: Option<&ChatTemplate>,
        check: impl FnOnce(&str) -> Result<()>,
    ) -> Result<Vec<u32>> {
        match self {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => {
                check(text)?;
                needed(tokenizer)?.encode(text, Special { add: true, parse: false })
            }
            Prompt::Chat { .. } => {
                let text = self.render(tokenizer, template)?;
                check(&text)?;
                needed(tokenizer)?.encode_chat(&text)
            }
        }
    }

    /// The text that the model reads: of a chat what the template makes of it, of tokens what they
    /// say.
    ///
    /// # Errors
    /// As [`Prompt::encode`].
    pub fn render(
        &self,
        tokenizer: Option<&Tokenizer>,
        template: Option<&ChatTemplate>,
    ) -> Result<String> {
        let (messages, extra) = match self {
            Prompt::Text(text) => return Ok(text.clone()),
            Prompt::Tokens(tokens) => return Ok(needed(tokenizer)?.decode(tokens, false)),
            Prompt::Chat { messages, extra } => (messages, extra),
        };
        let template = template.ok_or_else(|| {
            Error::new("chat", "a model with a chat template", "none")
                .hint("this is a base model: give it text to continue")
        })?;
        let tokenizer = needed(tokenizer)?;
        let text = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos_token()));
        let request = TemplateInput {
            bos_token: bos.as_deref(),
            eos_token: eos.as_deref(),
            ..request(extra)
        };
        let folded;
        let messages = if folds(messages, template, &request) {
            folded = fold_system(messages);
            &folded[..]
        } else {
            messages
        };
        template.render(&TemplateInput { messages, ..request })
    }

    /// One line on how the prompt is changed to suit a template; `None` if it is not changed.
    pub fn remark(&self, template: Option<&ChatTemplate>) -> Option<&'static str> {
        let Prompt::Chat { messages, extra } = self else { return None };
        folds(messages, template?, &request(extra)).then_some(
            "the chat template takes no system message: it is put in front of the user's",
        )
    }
}

fn needed(tokenizer: Option<&Tokenizer>) -> Result<&Tokenizer> {
    tokenizer.ok_or_else(|| {
        Error::new("prompt", "a model with a tokenizer", "none beside the weights")
            .hint("give token ids instead")
    })
}

/// The template's input that is the same for every chat.
fn request(extra: &serde_json::Map<String, Value>) -> TemplateInput<'_> {
    TemplateInput {
        tools: extra.get("tools"),
        documents: extra.get("documents"),
        add_generation_prompt: true,
        extra: extra.clone(),
        bos_token: Some(""),
        eos_token: Some(""),
        ..TemplateInput::default()
    }
}

/// Whether the messages have a system message for a template that takes none.
fn folds(messages: &[Value], template: &ChatTemplate, request: &TemplateInput<'_>) -> bool {
    messages.iter().any(|message| message["role"] == "system") && !template.takes_system(request)
}
