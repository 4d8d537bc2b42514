// The page: conversations in this browser's storage, answers from this server's /v1/chat/completions.

import { show } from "./markdown.js";

const $ = (id) => document.getElementById(id);

/** The sampling settings: name in requests, label, explanation, and the input's bounds. */
const SETTINGS = [
  ["temperature", "Temperature", "higher is bolder; 0 always takes the likeliest token", { min: 0, max: 5, step: 0.05 }],
  ["top_p", "Top-p", "keeps the likeliest tokens that together have this probability", { min: 0, max: 1, step: 0.01 }],
  ["min_p", "Min-p", "keeps tokens at least this likely beside the likeliest", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top-k", "keeps this many tokens; 0 keeps all", { min: 0, step: 1 }],
  ["repetition_penalty", "Repetition penalty", "above 1, recent tokens are repeated less", { min: 0.5, max: 2, step: 0.01 }],
  ["max_tokens", "Longest answer", "in tokens; empty: until the model stops", { min: 1, step: 1 }],
  ["seed", "Seed", "the same seed gives the same answer; empty: another each time", { min: 0, step: 1 }],
];

// Storage may be full or forbidden: the page works without it, until it is closed.
const stored = (name, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem(`delft.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
};
const store = (name, value) => {
  try {
    localStorage.setItem(`delft.${name}`, JSON.stringify(value));
  } catch {
    note("The browser's storage is full: delete conversations to keep new ones.");
  }
};

let conversations = stored("conversations", []);
let settings = stored("settings", {});
let current = null;
let models = [];
/** Stops the answer that is being written. */
let running = null;

const save = () => {
  conversations = conversations.filter((one) => one.messages.length);
  store("conversations", conversations);
};

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

const button = (label, action) => make("button", { className: "quiet", type: "button", textContent: label, onclick: action });

function note(text) {
  $("talk").append(make("p", { className: "error", textContent: text }));
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("delft.key");
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401) return response;
  await askForKey();
  return ask(path, options);
}

function askForKey() {
  return new Promise((done) => {
    $("ask").onclose = () => {
      sessionStorage.setItem("delft.key", $("key").value.trim());
      $("key").value = "";
      done();
    };
    $("ask").showModal();
  });
}

function drawList() {
  $("list").replaceChildren(...conversations.map((one) => {
    const title = one.messages.find((message) => message.role === "user")?.content ?? "New conversation";
    const open = make("button", { type: "button", textContent: title.slice(0, 60), title: title.slice(0, 200), onclick: () => select(one) });
    const remove = make("button", { type: "button", textContent: "\u00d7", ariaLabel: "Delete this conversation", onclick: () => {
      conversations = conversations.filter((other) => other !== one);
      save();
      if (one === current) select(null);
      else drawList();
    } });
    return make("div", { className: one === current ? "current" : "" }, open, remove);
  }));
}

function select(one) {
  running?.abort();
  current = one ?? { id: crypto.randomUUID?.() ?? String(Date.now()), messages: [] };
  $("sidebar").classList.remove("open");
  drawList();
  drawTalk();
  $("text").focus();
}

function drawTalk() {
  const talk = $("talk");
  talk.replaceChildren(...current.messages.map(drawMessage));
  if (!current.messages.length) talk.append(make("p", { className: "empty", textContent: "Ask something, or begin a story." }));
  talk.scrollTop = talk.scrollHeight;
}

function drawMessage(message, index) {
  const article = make("article", { className: message.role });
  if (message.reasoning) {
    article.append(make("details", {}, make("summary", { textContent: "Reasoning" }), message.reasoning));
  }
  const body = make("div", { className: "body" });
  if (message.role === "user") body.textContent = message.content;
  else show(message.content, body);
  article.append(body);
  if (message.error) article.append(make("p", { className: "error", textContent: message.error }));
  const tools = make("div", { className: "tools" }, button("Copy", () => navigator.clipboard?.writeText(message.content)));
  if (message.role === "user") tools.append(button("Edit", () => edit(article, message, index)));
  else {
    tools.append(button("Again", () => again(index)));
    if (message.told) tools.append(make("small", { textContent: message.told }));
  }
  article.append(tools);
  return article;
}

/** Puts a message's text where it can be changed; what follows is answered anew. */
function edit(article, message, index) {
  const text = make("textarea", { value: message.content, rows: 4, className: "wide" });
  const send = button("Send", () => {
    if (!text.value.trim()) return;
    current.messages.length = index;
    submit(text.value);
  });
  article.replaceChildren(text, make("div", { className: "tools" }, send, button("Cancel", drawTalk)));
  text.focus();
}

function again(index) {
  if (running) return;
  current.messages.length = index;
  answer();
}

function submit(text) {
  if (running || !text.trim()) return;
  if (!conversations.includes(current)) conversations.unshift(current);
  current.messages.push({ role: "user", content: text });
  save();
  drawList();
  answer();
}

async function answer() {
  const conversation = current;
  const message = { role: "assistant", content: "", reasoning: "" };
  const history = conversation.messages.map(({ role, content }) => ({ role, content }));
  const system = settings.system?.trim();
  if (system) history.unshift({ role: "system", content: system });
  conversation.messages.push(message);
  drawTalk();
  const body = { model: $("model").value, messages: history, stream: true, stream_options: { include_usage: true } };
  for (const [name] of SETTINGS) {
    if (Number.isFinite(settings[name])) body[name] = settings[name];
  }
  running = new AbortController();
  const own = running;
  $("send").textContent = "Stop";
  const began = performance.now();
  let first = null;
  let waiting = false;
  const draw = () => {
    if (waiting || conversation !== current) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (conversation !== current) return;
      const talk = $("talk");
      const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
      const index = conversation.messages.indexOf(message);
      if (index >= 0) talk.children[index]?.replaceWith(drawMessage(message, index));
      if (atEnd) talk.scrollTop = talk.scrollHeight;
    });
  };
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: own.signal,
    });
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `status ${response.status}`);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta;
      if (delta?.content || delta?.reasoning_content) first ??= performance.now();
      message.content += delta?.content ?? "";
      message.reasoning += delta?.reasoning_content ?? "";
      if (event.choices?.[0]?.finish_reason === "length") message.error = "The answer was cut: a limit of tokens was reached.";
      if (event.usage && first) message.told = told(event.usage.completion_tokens, first - began, performance.now() - first);
      draw();
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = `${error.message}`;
    else if (!message.content && !message.reasoning) message.error = "Stopped.";
  }
  if (running === own) {
    running = null;
    $("send").textContent = "Send";
  }
  save();
  if (conversation === current) drawTalk();
}

/** Speed, and the time to the first token. */
function told(tokens, wait, time) {
  const rate = tokens > 1 && time > 0 ? `${(((tokens - 1) * 1000) / time).toFixed(1)} tokens/s, ` : "";
  return `${tokens} tokens, ${rate}first after ${(wait / 1000).toFixed(2)} s`;
}

/** The objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function drawSettings() {
  $("system").value = settings.system ?? "";
  const own = models.find((model) => model.model === $("model").value)?.sampling ?? {};
  $("sampling").replaceChildren(...SETTINGS.map(([name, label, meaning, bounds]) => {
    const input = make("input", { type: "number", id: `set-${name}`, ...bounds, value: settings[name] ?? "", placeholder: own[name] ?? "" });
    input.oninput = () => {
      if (input.value === "" || !input.checkValidity()) delete settings[name];
      else settings[name] = Number(input.value);
      store("settings", settings);
    };
    return make("div", {}, make("label", { htmlFor: input.id, textContent: label }), input, make("small", { textContent: meaning }));
  }));
}

function grow() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  store("theme", theme);
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = $("text").value;
  $("text").value = "";
  grow();
  submit(text);
};
$("text").oninput = grow;
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    running?.abort();
    $("sidebar").classList.remove("open");
  }
});
$("new").onclick = () => select(null);
$("menu").onclick = () => $("sidebar").classList.toggle("open");
$("tune").onclick = () => {
  $("settings").hidden = !$("settings").hidden;
  $("tune").ariaExpanded = String(!$("settings").hidden);
};
$("theme").onclick = () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
};
$("system").oninput = () => {
  settings.system = $("system").value;
  store("settings", settings);
};
$("defaults").onclick = () => {
  settings = {};
  store("settings", settings);
  drawSettings();
};
$("model").onchange = drawSettings;

setTheme(stored("theme", null));
select(conversations[0] ?? null);
try {
  models = (await (await ask("/props")).json()).models.filter((model) => !model.embeds);
  $("model").replaceChildren(...models.map((model) => make("option", { value: model.model, textContent: model.model })));
} catch {
  note("The server does not answer.");
}
drawSettings();
