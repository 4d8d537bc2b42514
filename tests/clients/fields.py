"""Fields of requests as the official Python clients know them: the lists that Delft's tables are held against.

    target/clients/bin/python tests/clients/fields.py > crates/serve/tests/fields.json
"""

import importlib.metadata
import json

import ollama._types as ollama
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.responses import response_create_params
from openai.types.chat import completion_create_params as chat_create_params

def typed(module, base, *streaming):
    """The fields of a TypedDict and of its streaming variants; TypedDicts keep those of their bases."""
    names = set(getattr(module, base).__annotations__)
    for name in streaming:
        names |= set(getattr(module, name).__annotations__)
    return sorted(names)

def model(kind):
    return sorted(kind.model_fields)

print(json.dumps({
    "clients": {name: importlib.metadata.version(name) for name in ("openai", "anthropic", "ollama")},
    "openai_chat": typed(chat_create_params, "CompletionCreateParamsBase", "CompletionCreateParamsStreaming"),
    "openai_responses": typed(response_create_params, "ResponseCreateParamsBase", "ResponseCreateParamsStreaming"),
    "openai_completions": typed(completion_create_params, "CompletionCreateParamsBase", "CompletionCreateParamsStreaming"),
    "anthropic_messages": typed(message_create_params, "MessageCreateParamsBase", "MessageCreateParamsStreaming"),
    "anthropic_count_tokens": typed(message_count_tokens_params, "MessageCountTokensParams"),
    "ollama_chat": model(ollama.ChatRequest),
    "ollama_generate": model(ollama.GenerateRequest),
    "ollama_options": model(ollama.Options),
    "openai_embeddings": typed(embedding_create_params, "EmbeddingCreateParams"),
    "ollama_embed": model(ollama.EmbedRequest),
    "ollama_embeddings": model(ollama.EmbeddingsRequest),
}, indent=1))
