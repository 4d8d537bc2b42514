"""Requests of other programs, recorded: what LangChain and Continue ask of a server, against a stub that notes it.

    python others.py FILE FOLDER          runs the clients and writes their requests, a JSON object a line
    python others.py FILE ADDRESS MODEL   sends the requests in FILE to a server: none may be refused

Packages: langchain-openai, langchain-anthropic and langchain-ollama of PyPI; in FOLDER's node_modules @continuedev/cli of npm. The
fixture is crates/serve/tests/others.jsonl, which the tests of `serve` send as well; long texts and lists in it are cut. Open WebUI is not among
them: its package of PyPI brings PyTorch and several databases, gigabytes for a request's few fields.
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
        status, answer = send(address, request["path"], body)
        # An embedding is asked of a model that makes none.
        fits = status == 200 or (request["path"] in ("/v1/embeddings", "/api/embed") and "embeddings" in answer)
        if not fits:
            refused.append(f"{request['client']}: {request['path']}: {status} {answer[:300]}")
    print("\n".join(refused) or "every request was answered")
    sys.exit(bool(refused))


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
    file.write_text("\n".join(json.dumps(one) for one in Stub.noted) + "\n")
    print(f"{len(Stub.noted)} requests in {file}")


if len(sys.argv) == 3:
    record(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
else:
    replay(pathlib.Path(sys.argv[1]), sys.argv[2].rstrip("/"), sys.argv[3])
