"""Fields of requests as the official Python clients know them: the lists that Delft's tables are held against.

    target/clients/bin/python tests/clients/fields.py > crates/serve/tests/fields.json
"""

import importlib.metadata
import json
import typing

import ollama._types as ollama
import typing_extensions
from anthropic import types as anthropic
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import chat, completion_create_params, embedding_create_params, responses, shared_params
from openai.types.responses import input_token_count_params, response_create_params
from openai.types.chat import completion_create_params as chat_create_params

def typed(module, base, *streaming):
    """The fields of a TypedDict and of its streaming variants; TypedDicts keep those of their bases."""
    names = set(getattr(module, base).__annotations__)
    for name in streaming:
        names |= set(getattr(module, name).__annotations__)
    return sorted(names)

def model(kind):
    return sorted(kind.model_fields)

def dicts(kind):
    """The TypedDicts that a type may be, through unions and lists."""
    if typing.get_origin(kind) is not None:
        return [one for inner in typing.get_args(kind) for one in dicts(inner)]
    return [kind] if typing_extensions.is_typeddict(kind) else []

def hints(kind):
    return typing_extensions.get_type_hints(kind)

def literals(kind):
    if typing.get_origin(kind) is typing.Literal:
        return [value for value in typing.get_args(kind) if isinstance(value, str)]
    return [value for inner in typing.get_args(kind) for value in literals(inner)]

def variants(*kinds, usual=None):
    """The fields of each TypedDict that some types may be, by the value of its `type`."""
    found = {}
    for kind in (one for kind in kinds for one in dicts(kind)):
        fields = hints(kind)
        for name in literals(fields.get("type")) or [usual]:
            found.setdefault(name, set()).update(fields)
    return {name: sorted(fields) for name, fields in sorted(found.items())}

def all_of(*kinds):
    """The fields of all TypedDicts that some types may be."""
    return sorted({field for kind in kinds for one in dicts(kind) for field in hints(one)})

def of(kind, field):
    """What a field may be in the TypedDicts that a type may be."""
    return typing.Union[tuple(hints(one)[field] for one in dicts(kind) if field in hints(one))]

message = {role: getattr(chat, f"ChatCompletion{role.capitalize()}MessageParam")
           for role in ("system", "developer", "user", "assistant", "tool")}
call = chat.ChatCompletionMessageFunctionToolCallParam
custom = chat.ChatCompletionCustomToolParam
custom_format = of(of(custom, "custom"), "format")
request = chat_create_params.CompletionCreateParamsBase
response = response_create_params.ResponseCreateParamsBase
messages = message_create_params.MessageCreateParamsBase
input_items = of(response, "input")
output = responses.ResponseOutputMessageParam
nested = {
    **{f"openai_chat {role}": all_of(kind) for role, kind in message.items()},
    "openai_chat parts": variants(*(of(kind, "content") for kind in message.values())),
    "openai_chat calls": variants(of(message["assistant"], "tool_calls")),
    "openai_chat called": all_of(of(call, "function")),
    "openai_chat tools": variants(of(request, "tools")),
    "openai_chat function": all_of(shared_params.FunctionDefinition),
    "openai_chat custom": all_of(of(custom, "custom")),
    "openai_chat custom called": all_of(of(chat.ChatCompletionMessageCustomToolCallParam, "custom")),
    "openai_chat custom formats": variants(custom_format),
    "openai_chat custom grammar": all_of(of(custom_format, "grammar")),
    "openai_chat choices": variants(of(request, "tool_choice")),
    "openai_chat allowed": all_of(of(chat.ChatCompletionAllowedToolChoiceParam, "allowed_tools")),
    "openai_chat response_format": all_of(of(request, "response_format")),
    "openai_chat json_schema": all_of(of(shared_params.ResponseFormatJSONSchema, "json_schema")),
    "openai_chat stream_options": all_of(of(request, "stream_options")),
    "openai_responses items": variants(input_items, usual="message"),
    "openai_responses parts": variants(
        responses.ResponseInputContentParam, of(output, "content"), of(responses.ResponseReasoningItemParam, "content"),
        *(of(kind, "output") for kind in dicts(input_items) if "function_call_output" in literals(hints(kind).get("type")))),
    "openai_responses tools": variants(of(response, "tools")),
    "openai_responses custom formats": variants(shared_params.CustomToolInputFormat),
    "openai_responses choices": variants(of(response, "tool_choice")),
    "openai_responses reasoning": all_of(of(response, "reasoning")),
    "openai_responses text": all_of(of(response, "text")),
    "openai_responses format": all_of(of(responses.ResponseTextConfigParam, "format")),
    "anthropic message": all_of(anthropic.MessageParam),
    "anthropic blocks": variants(of(anthropic.MessageParam, "content")),
    "anthropic system": variants(of(messages, "system")),
    "anthropic results": variants(of(anthropic.ToolResultBlockParam, "content")),
    "anthropic tools": variants(of(messages, "tools"), usual="custom"),
    "anthropic tool_choice": all_of(of(messages, "tool_choice")),
    "anthropic thinking": all_of(of(messages, "thinking")),
    "anthropic output_config": all_of(of(messages, "output_config")),
    "ollama message": model(ollama.Message),
    "ollama called": model(ollama.Message.ToolCall.Function),
    "ollama tools": {"function": model(ollama.Tool)},
    "ollama function": model(ollama.Tool.Function),
}

print(json.dumps({
    "clients": {name: importlib.metadata.version(name) for name in ("openai", "anthropic", "ollama")},
    "openai_chat": typed(chat_create_params, "CompletionCreateParamsBase", "CompletionCreateParamsStreaming"),
    "openai_responses": typed(response_create_params, "ResponseCreateParamsBase", "ResponseCreateParamsStreaming"),
    "openai_responses_input_tokens": typed(input_token_count_params, "InputTokenCountParams"),
    "openai_completions": typed(completion_create_params, "CompletionCreateParamsBase", "CompletionCreateParamsStreaming"),
    "anthropic_messages": typed(message_create_params, "MessageCreateParamsBase", "MessageCreateParamsStreaming"),
    "anthropic_beta_messages": typed(beta_create_params, "MessageCreateParamsBase", "MessageCreateParamsStreaming"),
    "anthropic_count_tokens": typed(message_count_tokens_params, "MessageCountTokensParams"),
    "ollama_chat": model(ollama.ChatRequest),
    "ollama_generate": model(ollama.GenerateRequest),
    "ollama_options": model(ollama.Options),
    "openai_embeddings": typed(embedding_create_params, "EmbeddingCreateParams"),
    "ollama_embed": model(ollama.EmbedRequest),
    "ollama_embeddings": model(ollama.EmbeddingsRequest),
    "nested": nested,
}, indent=1))
