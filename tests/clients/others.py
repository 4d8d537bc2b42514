"""Requests of other programs, recorded: what LangChain, Continue and others ask of a server, against a stub that notes it.

    python others.py FILE FOLDER          runs the clients and writes their requests, a JSON object a line
    python others.py FILE ADDRESS MODEL   sends the requests in FILE to a server: none may be refused

Packages: langchain-openai, langchain-anthropic, langchain-ollama, litellm (by which aider asks), openai-agents, instructor, pydantic-ai-slim
(openai, anthropic), llama-index-llms-openai-like, llama-index-llms-ollama and smolagents of PyPI; in FOLDER's node_modules @continuedev/cli,
ai, @ai-sdk/openai-compatible and @ai-sdk/anthropic of npm. The fixture is crates/serve/tests/others.jsonl, which the tests of `serve` send as well; long texts and
lists in it are cut. Programs that cannot be run here, editors and what brings gigabytes of other things, are in WRITTEN: the fields that their
sources fill in.
"""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

ANSWERS = {
    "/v1/chat/completions": {
        "id": "1", "object": "chat.completion", "created": 1, "model": "stories",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "{\"name\": \"a\", \"age\": 1}"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    },
    "/v1/responses": {
        "id": "1", "object": "response", "created_at": 1, "model": "stories", "status": "completed", "error": None, "incomplete_details": None,
        "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1, "tool_choice": "auto", "tools": [], "top_p": 1,
        "output": [{"id": "2", "type": "message", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "a", "annotations": []}]}],
        "usage": {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 1, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2},
    },
    "/v1/completions": {
        "id": "1", "object": "text_completion", "created": 1, "model": "stories", "choices": [{"index": 0, "text": "a", "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    },
    "/v1/embeddings": {"object": "list", "model": "stories", "data": [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}], "usage": {"prompt_tokens": 1, "total_tokens": 1}},
    "/v1/messages": {
        "id": "1", "type": "message", "role": "assistant", "model": "stories", "content": [{"type": "text", "text": "a"}], "stop_reason": "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    "/v1/messages/count_tokens": {"input_tokens": 1},
    "/api/chat": {"model": "stories", "created_at": "2026-01-01T00:00:00Z", "message": {"role": "assistant", "content": "{\"name\": \"a\", \"age\": 1}"}, "done": True, "done_reason": "stop"},
    "/api/generate": {"model": "stories", "created_at": "2026-01-01T00:00:00Z", "response": "a", "done": True, "done_reason": "stop"},
    "/api/show": {"template": "", "parameters": "", "details": {}, "model_info": {}, "capabilities": ["completion", "tools"]},
    "/api/embed": {"model": "stories", "embeddings": [[0.0, 1.0]]},
}


def send(address, path, body):
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def replay(file, address, model):
    refused = []
    for line in file.read_text().splitlines():
        request = json.loads(line)
        body = {**request["body"], "model": model}
        if request["path"] == "/v1/chat/completions" and "max_completion_tokens" not in body:
            body.setdefault("max_tokens", 8)
        if request["path"] in ("/api/chat", "/api/generate"):
            options = body.get("options") or {}
            body["options"] = {**options, "num_predict": options.get("num_predict") or 8}
        status, answer = send(address, request["path"], body)
        # An embedding is asked of a model that makes none.
        fits = status == 200 or (request["path"] in ("/v1/embeddings", "/api/embed") and "embeddings" in answer)
        if not fits:
            refused.append(f"{request['client']}: {request['path']}: {status} {answer[:300]}")
    print("\n".join(refused) or "every request was answered")
    sys.exit(bool(refused))


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": CITY}}
TURNS = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "How is the weather in Rome?"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}}
GIVEN = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
WRITTEN = [
    # routers/openai.py and utils/payload.py, with what a user may set.
    ("open-webui: a chat", "/v1/chat/completions", {
        "stream": True, "model": "stories", "messages": TURNS, "stream_options": {"include_usage": True}, "temperature": 0.8, "top_p": 0.9,
        "max_tokens": 8, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 1, "stop": ["."], "logit_bias": {"5": 1}, "min_p": 0.05,
        "reasoning_effort": "low"}),
    ("open-webui: a title", "/v1/chat/completions", {
        "model": "stories", "messages": [{"role": "user", "content": "Give it a title."}], "stream": False, "max_completion_tokens": 8}),
    # routers/ollama.py: it adds the tag itself, and settings that a user may fill in.
    ("open-webui, ollama: a chat", "/api/chat", {
        "model": "stories:latest", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "keep_alive": "5m", "format": None,
        "options": {"temperature": 0.8, "top_p": 0.9, "seed": 1, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5, "num_ctx": 2048, "num_batch": 512,
                    "num_keep": 24, "repeat_last_n": 64, "tfs_z": 1, "top_k": 40, "min_p": 0, "use_mmap": True, "use_mlock": False, "num_thread": 2,
                    "num_gpu": 1, "num_predict": 8, "repeat_penalty": 1.1, "new_topic_penalty": 0.1}}),
    ("open-webui, ollama: embeddings", "/api/embed", {"model": "stories", "input": ["a", "b"], "truncate": True}),
    # crates/open_ai and crates/ollama.
    ("zed: tools", "/v1/chat/completions", {
        "model": "stories", "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 8, "temperature": 1.0,
        "tool_choice": "auto", "parallel_tool_calls": False, "tools": [WEATHER], "prompt_cache_key": "thread", "messages": [
            *TURNS, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "Sunny.", "tool_call_id": "call00001"},
            {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}]}]}),
    ("zed: no content", "/v1/chat/completions", {
        "model": "stories", "stream": True, "max_completion_tokens": 8, "reasoning_effort": "medium", "messages": [
            *TURNS, {"role": "assistant", "content": [], "tool_calls": [CALL], "reasoning_content": "Rome."},
            {"role": "tool", "content": [{"type": "text", "text": "Sunny."}], "tool_call_id": "call00001"}]}),
    ("zed, ollama: tools", "/api/chat", {
        "model": "stories:latest", "stream": False, "keep_alive": -1, "options": {"num_ctx": 4096, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None},
        "tools": [WEATHER], "think": None, "messages": [
            {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "", "tool_calls": [GIVEN], "thinking": None},
            {"role": "tool", "tool_name": "weather", "content": "Sunny."}]}),
    # src/core/api/providers.
    ("cline", "/v1/chat/completions", {
        "model": "stories", "messages": TURNS, "temperature": 0, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}, "tools": [WEATHER]}),
    ("cline, ollama", "/api/chat", {"model": "stories", "messages": TURNS, "stream": True, "options": {"num_ctx": 32768, "num_predict": 8}}),
    # core/llm/llms: chats, and a text that is continued.
    ("continue, ollama: a chat", "/api/chat", {
        "model": "stories", "messages": [{"role": "user", "content": "Hello"}], "keep_alive": 1800, "stream": True, "tools": [WEATHER],
        "options": {"num_predict": 8, "num_ctx": 8192, "stop": ["\n\n"], "temperature": 0.5}}),
    ("continue, ollama: a text", "/api/generate", {
        "model": "stories", "prompt": "Once", "raw": True, "keep_alive": 1800, "stream": True,
        "options": {"num_predict": 8, "num_ctx": 8192, "stop": ["\n\n"], "temperature": 0.01}}),
]

CHUNK = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "stories"}
STREAM = [
    {**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi."}, "finish_reason": None}]},
    {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]


def cut(value):
    """The same with short texts and lists: a client's own prompts and tools are many."""
    if isinstance(value, str):
        return value if len(value) <= 40 else value[:30] + " .."
    if isinstance(value, list):
        return [cut(one) for one in value[:4]]
    return {key: cut(one) for key, one in value.items()} if isinstance(value, dict) else value


class Stub(http.server.BaseHTTPRequestHandler):
    """Answers each path with as little as its client takes, and notes what was asked."""

    client, noted = "", []

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.noted.append({"client": Stub.client, "path": self.path, "body": cut(body)})
        answer = ANSWERS[self.path]
        streams = body.get("stream", self.path.startswith("/api/") and "embed" not in self.path)
        text = json.dumps(answer)
        kind = "application/json"
        if streams and self.path.startswith("/v1/"):
            # Enough for a client to come to its end; what it makes of it is its own affair.
            chunks = STREAM if self.path == "/v1/chat/completions" else []
            text, kind = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n", "text/event-stream"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write((text + "\n").encode())


# A text, a stream, an object and a tool, by two interfaces.
VERCEL = """
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createAnthropic } from "@ai-sdk/anthropic";
const address = `${process.argv[2]}/v1`;
const schema = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false });
const asked = { prompt: "How is the weather in Rome?", maxOutputTokens: 8, maxRetries: 0 };
const tools = { weather: tool({ description: "The weather of a city.", inputSchema: schema }) };
const models = [
  createOpenAICompatible({ name: "delft", baseURL: address, supportsStructuredOutputs: true, includeUsage: true })("stories"),
  createAnthropic({ baseURL: address, apiKey: "none" })("stories"),
];
for (const model of models) {
  // The stub's answer is none that every use takes.
  await generateText({ ...asked, model, temperature: 0.2, topP: 0.9, stopSequences: ["."] }).catch(() => {});
  await streamText({ ...asked, model, onError: () => {} }).consumeStream().catch(() => {});
  await generateObject({ ...asked, model, schema }).catch(() => {});
  await generateText({ ...asked, model, tools, toolChoice: "required" }).catch(() => {});
}
"""


def frameworks(address, person, weather):
    """What frameworks ask through the official clients, by their names."""
    import anthropic
    import instructor
    import openai
    import smolagents
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.ollama import Ollama
    from llama_index.llms.openai_like import OpenAILike
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    v1 = f"{address}/v1"
    asks = {}
    whole = dict(model="stories", messages=TURNS, response_model=person, max_retries=0)
    for mode in ("TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON"):
        client = instructor.from_openai(openai.OpenAI(base_url=v1, api_key="none", max_retries=0), mode=instructor.Mode[mode])
        asks[f"instructor: {mode}"] = lambda client=client: client.chat.completions.create(**whole, max_tokens=8)
    claude = instructor.from_anthropic(anthropic.Anthropic(base_url=address, api_key="none", max_retries=0))
    asks["instructor, anthropic"] = lambda: claude.messages.create(**whole, max_tokens=8)
    settings = dict(max_tokens=8, temperature=0.2)
    provider = OpenAIProvider(base_url=v1, api_key="none")
    for name, model in {
        "chats": OpenAIChatModel("stories", provider=provider),
        "responses": OpenAIResponsesModel("stories", provider=provider),
        "anthropic": AnthropicModel("stories", provider=AnthropicProvider(base_url=address, api_key="none")),
    }.items():
        agent = Agent(model, instructions="You are brief.", model_settings=settings, tools=[weather], retries=0)
        asks[f"pydantic-ai, {name}: tools"] = lambda agent=agent: agent.run_sync("How is the weather in Rome?")
        agent = Agent(model, output_type=person, model_settings=settings, retries=0)
        asks[f"pydantic-ai, {name}: a tool for the answer"] = lambda agent=agent: agent.run_sync("Who is Ada?")
        if name != "anthropic":
            agent = Agent(model, output_type=NativeOutput(person), model_settings=settings, retries=0)
            asks[f"pydantic-ai, {name}: a form"] = lambda agent=agent: agent.run_sync("Who is Ada?")
    like = OpenAILike(model="stories", api_base=v1, api_key="none", is_chat_model=True, is_function_calling_model=True, max_tokens=8, max_retries=0)
    llama = Ollama(model="stories", base_url=address, context_window=512, additional_kwargs={"num_predict": 8})
    hello = [ChatMessage(role="user", content="Hello")]
    asks["llama-index: a talk"] = lambda: like.chat(hello)
    asks["llama-index: a stream"] = lambda: list(like.stream_chat(hello))
    asks["llama-index: a form"] = lambda: like.as_structured_llm(person).complete("Who is Ada?")
    asks["llama-index, ollama: a talk"] = lambda: llama.chat(hello)
    asks["llama-index, ollama: a form"] = lambda: llama.as_structured_llm(person).complete("Who is Ada?")
    small = smolagents.OpenAIServerModel(model_id="stories", api_base=v1, api_key="none", max_tokens=8)
    said = [smolagents.ChatMessage(role="user", content=[{"type": "text", "text": "Hello"}])]
    asks["smolagents"] = lambda: small.generate(said, stop_sequences=["Observation:"])
    return asks


def record(file, npm):
    import langchain_anthropic
    import langchain_ollama
    import langchain_openai
    import pydantic
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool

    class Person(pydantic.BaseModel):
        """Somebody."""

        name: str = pydantic.Field(description="what they are called")
        age: int

    @tool
    def weather(city: str, days: int = 1) -> str:
        """The weather of a city."""
        return f"{city} {days}"

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    call = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "call00001"}])
    talk = [SystemMessage("You are brief."), HumanMessage("How is the weather in Rome?")]
    after = [*talk, call, ToolMessage("Sunny.", tool_call_id="call00001")]
    models = {
        "langchain-openai": langchain_openai.ChatOpenAI(
            model="stories", base_url=f"{address}/v1", api_key="none", max_retries=0, temperature=0.2, max_tokens=8, seed=1, top_p=0.9),
        "langchain-openai, responses": langchain_openai.ChatOpenAI(
            model="stories", base_url=f"{address}/v1", api_key="none", max_retries=0, use_responses_api=True, max_tokens=8),
        "langchain-anthropic": langchain_anthropic.ChatAnthropic(
            model="stories", base_url=address, api_key="none", max_retries=0, max_tokens=8, temperature=0.2),
        "langchain-ollama": langchain_ollama.ChatOllama(
            model="stories", base_url=address, temperature=0.2, num_predict=8, num_ctx=512, seed=1, keep_alive="5m"),
    }
    uses = {
        "a talk": lambda model: model.invoke(talk),
        "stop": lambda model: model.invoke(talk, stop=["."]),
        "a stream": lambda model: list(model.stream(talk)),
        "tools": lambda model: model.bind_tools([weather]).invoke(talk),
        "a tool that is named": lambda model: model.bind_tools([weather], tool_choice="weather").invoke(talk),
        "a tool's answer": lambda model: model.bind_tools([weather]).invoke(after),
        "structured": lambda model: model.with_structured_output(Person).invoke("Who is Ada?"),
        "structured, by a tool": lambda model: model.with_structured_output(Person, method="function_calling").invoke("Who is Ada?"),
    }
    for name, model in models.items():
        for use, run in uses.items():
            Stub.client = f"{name}: {use}"
            before = len(Stub.noted)
            try:
                run(model)
            except Exception as error:  # The stub's answer is none that every use takes.
                print(f"{Stub.client}: {type(error).__name__}: {str(error)[:90]}")
            assert len(Stub.noted) > before, f"{Stub.client}: nothing was asked"
    Stub.client = "langchain-openai: log-probabilities"
    models["langchain-openai"].bind(logprobs=True, top_logprobs=2).invoke(talk)
    Stub.client = "langchain-openai: text"
    langchain_openai.OpenAI(model="stories", base_url=f"{address}/v1", api_key="none", max_tokens=8).invoke("Once")
    Stub.client = "langchain-ollama: text"
    langchain_ollama.OllamaLLM(model="stories", base_url=address, num_predict=8).invoke("Once")
    Stub.client = "langchain-openai: embeddings"
    langchain_openai.OpenAIEmbeddings(model="stories", base_url=f"{address}/v1", api_key="none", check_embedding_ctx_length=False).embed_documents(["a", "b"])
    Stub.client = "langchain-ollama: embeddings"
    langchain_ollama.OllamaEmbeddings(model="stories", base_url=address).embed_documents(["a", "b"])
    # aider/models.py, send_completion.
    import litellm
    litellm.suppress_debug_info = True
    asked = {"messages": TURNS, "temperature": 0, "timeout": 60}
    function = {"name": "weather", "description": "The weather of a city.", "parameters": CITY}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    for name, base, more in [
        ("openai/stories", f"{address}/v1", {}), ("ollama_chat/stories", address, {"num_ctx": 8210}), ("anthropic/stories", address, {"max_tokens": 8}),
    ]:
        for use, extra in {"a talk": {"stream": False}, "a stream": {"stream": True}, "a function": {"stream": False, **tools}}.items():
            Stub.client = f"aider, {name.partition('/')[0]}: {use}"
            try:
                list(litellm.completion(model=name, api_base=base, api_key="none", **asked, **more, **extra))
            except Exception as error:  # As above.
                print(f"{Stub.client}: {type(error).__name__}: {str(error)[:90]}")
    # By responses, and by chats.
    import agents
    import openai
    client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def forecast(city: str) -> str:
        """The weather of a city."""
        return city

    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        Stub.client = f"openai-agents: {kind.__name__}"
        own = agents.Agent(name="Brief", instructions="You are brief.", model=kind("stories", client), tools=[forecast],
                           model_settings=agents.ModelSettings(temperature=0.2, max_tokens=8))
        try:
            agents.Runner.run_sync(own, "How is the weather in Rome?")
        except Exception as error:  # As above.
            print(f"{Stub.client}: {type(error).__name__}: {str(error)[:90]}")
    for client, ask in frameworks(address, Person, weather.func).items():
        Stub.client = client
        before = len(Stub.noted)
        try:
            ask()
        except Exception as error:  # As above.
            print(f"{client}: {type(error).__name__}: {str(error)[:90]}")
        # What the stub answers may be asked about again.
        assert len(Stub.noted) > before, f"{client}: nothing was asked"
        del Stub.noted[before + 1:]
    Stub.client = "ai (Vercel)"
    before = len(Stub.noted)
    with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=npm, delete=False) as script:
        script.write(VERCEL)
    try:
        subprocess.run(["node", script.name, address], timeout=120, check=True)
    finally:
        os.unlink(script.name)
    assert len(Stub.noted) > before, "ai asked nothing"
    Stub.client = "@continuedev/cli"
    config = {
        "name": "stories", "version": "0.0.1", "schema": "v1",
        "models": [{"name": "stories", "provider": "openai", "model": "stories", "apiBase": f"{address}/v1", "apiKey": "none", "roles": ["chat"]}],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))
        program = (npm / "node_modules/.bin/cn").resolve()
        subprocess.run(["node", program, "-p", "Say hi", "--config", path], cwd=folder, env={**os.environ, "HOME": folder},
                       stdin=subprocess.DEVNULL, timeout=120, check=True)
    assert Stub.noted[-1]["client"] == Stub.client, "Continue asked nothing"
    written = [{"client": client, "path": path, "body": body} for client, path, body in WRITTEN]
    file.write_text("\n".join(json.dumps(one) for one in [*Stub.noted, *written]) + "\n")
    print(f"{len(Stub.noted)} recorded and {len(written)} written requests in {file}")


if len(sys.argv) == 3:
    record(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
else:
    replay(pathlib.Path(sys.argv[1]), sys.argv[2].rstrip("/"), sys.argv[3])
