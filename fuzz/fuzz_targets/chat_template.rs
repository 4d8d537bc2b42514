//! Any text as a chat template over one conversation: an error or a prompt, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use tokens::template::Now;
use tokens::{ChatTemplate, TemplateInput};

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::from_source(source) else { return };
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": [{"type": "text", "text": "2 < 3?"}]}),
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "function": {"name": "less", "arguments": {"a": 2, "b": [3.5, true, null, "\u{e9}"]}}}
        ]}),
        json!({"role": "tool", "name": "less", "content": "yes"}),
    ];
    let tools = json!([{"type": "function", "function": {"name": "less", "parameters": {"type": "object", "properties": {}}}}]);
    for tools in [None, Some(&tools)] {
        let request = TemplateInput {
            messages: &messages,
            tools,
            add_generation_prompt: true,
            bos_token: Some("<s>"),
            eos_token: Some("</s>"),
            now: Some(Now(0)),
            ..TemplateInput::default()
        };
        let first = template.render(&request);
        assert_eq!(first, template.render(&request));
    }
});
