"""What Hugging Face Transformers makes of chat templates: expectations for crates/tokens/tests/all/templates.rs.

    python templates.py DATA OUT

Renders every template of DATA/suites/llama.cpp-templates over the conversations below with Transformers' own
environment (packages transformers and jinja2; no torch), and writes OUT/conversations.json (the requests) and
OUT/expected.json: for each template and request the first 16 hex digits of the SHA-256 of the prompt, or null where
Python raises. Templates of our own, in OUT/own/*.jinja, are listed with their whole prompts in OUT/own.json.
The clock stands still at 2024-02-29 15:04:05.
"""

import datetime
import hashlib
import json
import pathlib
import sys

from transformers.utils import chat_template_utils

NOW = datetime.datetime(2024, 2, 29, 15, 4, 5)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = Clock

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a <place> & at a time; it's \"live\".",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city, such as Köln or 東京"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "Days from today"},
                "exact": {"type": "boolean"},
            },
            "required": ["city"],
        },
        "return": {"type": "object", "description": "Temperature and sky"},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "First"},
                "b": {"type": ["number", "null"], "description": "Second"},
                "options": {"type": "object", "properties": {"round": {"type": "boolean"}}, "required": []},
            },
            "required": ["a", "b"],
        },
    },
}
EMPTY = {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, number):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


SINGLE = [{"role": "user", "content": "Hello, who are you?"}]
SYSTEM = [{"role": "system", "content": "  Be brief.\nBe kind. "}, {"role": "user", "content": "Why is the sky blue?\n"}]
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": "2 < 3 & \"quoted\" 'text' – naïve 日本 🎉"},
    {"role": "assistant", "content": "Yes.\n\nIndeed."},
    {"role": "user", "content": "Another\tquestion"},
]
SYSTEM_TURNS = [{"role": "system", "content": "You are a helpful assistant"}, *TURNS]
ENDS_WITH_ASSISTANT = [*TURNS, {"role": "assistant", "content": "The last word"}]
THOUGHT_TEXT = [
    {"role": "user", "content": "Think"},
    {"role": "assistant", "content": "<think>\nHmm, let me see.\n</think>\n\nDone."},
    {"role": "user", "content": "Again"},
]
THOUGHT_FIELD = [
    {"role": "user", "content": "Think"},
    {"role": "assistant", "content": "Done.", "reasoning_content": "Hmm, let me see."},
    {"role": "user", "content": "Again"},
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "You see."}]},
    {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Three"}]},
    {"role": "user", "content": [{"type": "text", "text": "Four"}]},
]
IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]


def calls(arguments, content, extra=None):
    return [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": content, "tool_calls": [call("get_weather", arguments, 1)], **(extra or {})},
        {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"sky": "grey", "celsius": 7.5}'},
        {"role": "assistant", "content": "Grey, 7.5 °C."},
        {"role": "user", "content": "Thanks"},
    ]


ARGUMENTS = {"city": "Köln", "days": [0, 1], "exact": True, "limit": None, "scale": 1.0, "nested": {"it's": "<b>"}}
TWO_CALLS = [
    {"role": "user", "content": "Two things"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("add", {"a": 1, "b": -2.5e-7}, 1), call("add", {"a": 1e21, "b": 3}, 2)],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "0.99999975"},
    {"role": "tool", "tool_call_id": "call00002", "name": "add", "content": "1e+21"},
]

TOOLS = [WEATHER, ADD, EMPTY]
REQUESTS = [
    ("single", {"messages": SINGLE}),
    ("single, no generation prompt", {"messages": SINGLE, "add_generation_prompt": False}),
    ("single, thinking", {"messages": SINGLE, "extra": {"enable_thinking": True}}),
    ("single, no thinking", {"messages": SINGLE, "extra": {"enable_thinking": False}}),
    ("single, options", {"messages": SINGLE, "extra": {"thinking": True, "reasoning_effort": "high"}}),
    ("single, date", {"messages": SINGLE, "extra": {"date_string": "1 Jan 2025", "builtin_tools": ["browser"]}}),
    ("system", {"messages": SYSTEM}),
    ("turns", {"messages": TURNS}),
    ("turns with system", {"messages": SYSTEM_TURNS}),
    ("ends with assistant", {"messages": ENDS_WITH_ASSISTANT, "add_generation_prompt": False}),
    ("thought in text", {"messages": THOUGHT_TEXT}),
    ("thought in a field", {"messages": THOUGHT_FIELD}),
    ("parts", {"messages": PARTS}),
    ("image", {"messages": IMAGE}),
    ("tools", {"messages": SINGLE, "tools": TOOLS}),
    ("tools with system", {"messages": SYSTEM, "tools": TOOLS, "extra": {"enable_thinking": True}}),
    ("no tools", {"messages": SINGLE, "tools": []}),
    ("call, text first", {"messages": calls(ARGUMENTS, "I look."), "tools": TOOLS}),
    ("call, no text", {"messages": calls(ARGUMENTS, ""), "tools": TOOLS}),
    ("call, null text", {"messages": calls(ARGUMENTS, None), "tools": TOOLS}),
    ("call, arguments as text", {"messages": calls(json.dumps(ARGUMENTS), ""), "tools": TOOLS}),
    ("call after thought", {"messages": calls(ARGUMENTS, "", {"reasoning_content": "A tool."})[:4], "tools": TOOLS}),
    ("two calls", {"messages": TWO_CALLS, "tools": TOOLS}),
    ("calls without tools", {"messages": TWO_CALLS}),
    ("two users", {"messages": SINGLE * 2}),
    ("nothing", {"messages": []}),
    ("documents", {"messages": SINGLE, "documents": [{"title": "A title", "text": "Some text"}]}),
]


def render(source, request, bos_token="<s>", eos_token="</s>"):
    try:
        prompts, _ = chat_template_utils.render_jinja_template(
            conversations=[json.loads(json.dumps(request["messages"]))],
            tools=request.get("tools"),
            documents=request.get("documents"),
            chat_template=source,
            add_generation_prompt=request.get("add_generation_prompt", True),
            bos_token=bos_token,
            eos_token=eos_token,
            **request.get("extra", {}),
        )
        return prompts[0]
    except Exception as error:  # whatever Python raises is the expectation
        return error


def main():
    data, out = map(pathlib.Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    requests = [{"name": name, **request} for name, request in REQUESTS]
    (out / "conversations.json").write_text(json.dumps(requests, ensure_ascii=False, separators=(",", ":")) + "\n")
    expected = {}
    for path in sorted((data / "suites/llama.cpp-templates").glob("*.jinja")):
        source = path.read_text()
        prompts = [render(source, request) for request in requests]
        expected[path.name] = [
            hashlib.sha256(prompt.encode()).hexdigest()[:16] if isinstance(prompt, str) else None for prompt in prompts
        ]
    # The published cases have one conversation for all; tokens that a case does not name are empty.
    cases = json.loads((data / "suites/llama.cpp-templates/test-chat-template.cases.json").read_text())
    expected["test-chat-template.cases.json"] = []
    for case in cases["cases"]:
        request = {"messages": cases["conversation"], "add_generation_prompt": cases["add_generation_prompt"]}
        prompt = render(case["template"], request, case.get("bos_token", ""), case.get("eos_token", ""))
        digest = hashlib.sha256(prompt.encode()).hexdigest()[:16] if isinstance(prompt, str) else None
        expected["test-chat-template.cases.json"].append(digest)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(hashes)}" for name, hashes in expected.items())
    (out / "expected.json").write_text("{\n" + lines + "\n}\n")
    own = {}
    for path in sorted((out / "own").glob("*.jinja")):
        prompts = [render(path.read_text(), request) for request in requests]
        own[path.name] = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    (out / "own.json").write_text(json.dumps(own, ensure_ascii=False, indent=0) + "\n")
    raised = sum(hash is None for hashes in expected.values() for hash in hashes)
    print(f"{len(expected)} templates, {len(requests)} requests, {raised} raise")


main()
