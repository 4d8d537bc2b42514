// The page: conversations in this browser's storage, answers from this server's /v1/chat/completions.

import { $, askWith, button, copy, events, make, reason } from "./make.js";
import { show } from "./markdown.js";
import * as models from "./models.js";
import { showTokens } from "./tokens.js";

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
/** Tokens of answers of this visit: they are too many to keep. */
const written = new WeakMap();
/** Answers that are shown as tokens. */
const asTokens = new WeakSet();
/** Answers whose reasoning is open. */
const opened = new WeakSet();
/** How many of the likeliest tokens are asked for. */
const LIKELIEST = 5;
const STARTERS = ["Tell me a story about a lamp that cannot sleep", "Explain recursion in three sentences", "Write a table of five rivers and their lengths"];
/** The message whose answer has not begun. */
let waiting = null;
/** Stops the answer that is being written. */
let running = null;

const save = () => {
  conversations = conversations.filter((one) => one.messages.length);
  store("conversations", conversations);
};

// Another window of this browser has changed the conversations: the one that is being answered here stays as it is here.
addEventListener("storage", ({ key }) => {
  if (key !== "delft.conversations") return;
  const there = stored("conversations", []);
  conversations = there.map((one) => (one.id === current.id && running ? current : one));
  if (!running && current.messages.length) {
    current = conversations.find((one) => one.id === current.id) ?? { id: newId(), messages: [] };
    drawTalk();
  } else if (running && !conversations.includes(current)) conversations.unshift(current);
  drawList();
});

function note(text) {
  $("talk").append(make("p", { className: "error", textContent: text }));
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

const newId = () => crypto.randomUUID?.() ?? String(Date.now());

function select(one) {
  running?.abort();
  current = one ?? { id: newId(), messages: [] };
  slide(false);
  drawList();
  drawTalk();
  $("text").focus();
}

/** Slides the list of conversations in or out, where there is no room for it. */
function slide(open) {
  $("sidebar").classList.toggle("open", open);
  $("menu").ariaExpanded = String(open);
  if (open) $("new").focus();
}

function drawTalk() {
  const talk = $("talk");
  talk.replaceChildren(...current.messages.map(drawMessage));
  if (!current.messages.length) {
    const starters = STARTERS.map((text) => button(text, () => submit(text), { className: "plain" }));
    talk.append(make("div", { className: "empty" }, make("h2", { textContent: "What shall it be?" }), make("p", { textContent: "Ask something, or begin with one of these." }), ...starters));
  }
  talk.scrollTop = talk.scrollHeight;
}

function drawMessage(message, index) {
  const article = make("article", { className: message.role });
  if (message.reasoning) {
    // The answer is drawn anew as it comes: what the reader opened stays open.
    const details = make("details", { open: opened.has(message) }, make("summary", { textContent: "Reasoning" }), message.reasoning);
    details.ontoggle = () => (details.open ? opened.add(message) : opened.delete(message));
    article.append(details);
  }
  const body = make("div", { className: "body" });
  article.ariaLabel = message.role === "user" ? "You" : "The model";
  const tokens = written.get(message);
  if (message.role === "user") body.textContent = message.content;
  else if (tokens && asTokens.has(message)) showTokens(tokens, body);
  else show(message.content, body);
  if (message === waiting) body.append(make("p", { className: "waiting", textContent: words() }));
  article.append(body);
  if (message.error) article.append(make("p", { className: "error", textContent: message.error }));
  const tools = make("div", { className: "tools" }, button("Copy", (event) => copy(message.content, event.currentTarget)));
  if (message.role === "user") tools.append(button("Edit", () => edit(article, message, index)));
  else {
    tools.append(button("Again", () => again(index)));
    if (tokens?.length) {
      tools.append(button("Tokens", () => {
        if (!asTokens.delete(message)) asTokens.add(message);
        const fresh = drawMessage(message, index);
        article.replaceWith(fresh);
        fresh.querySelector("[aria-pressed]").focus();
      }, { ariaPressed: String(asTokens.has(message)) }));
    }
    if (message.told) tools.append(make("small", { textContent: message.told }));
  }
  article.append(tools);
  return article;
}

/** What is waited for before an answer begins. */
function words() {
  const model = models.known.find((one) => one.name === $("model").value);
  return model?.state === "loading" ? `Loading ${model.name}\u2026` : "Reading\u2026";
}

/** Puts a message's text where it can be changed; what follows is answered anew. */
function edit(article, message, index) {
  const text = make("textarea", { value: message.content, rows: 4, className: "wide", ariaLabel: "Your message" });
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
  const name = $("model").value;
  models.wanted(name);
  waiting = message;
  drawTalk();
  $("talk").ariaBusy = "true";
  const body = { model: $("model").value, messages: history, stream: true, stream_options: { include_usage: true } };
  for (const [name] of SETTINGS) {
    if (Number.isFinite(settings[name])) body[name] = settings[name];
  }
  if (settings.likely ?? true) Object.assign(body, { logprobs: true, top_logprobs: LIKELIEST });
  const tokens = [];
  written.set(message, tokens);
  running = new AbortController();
  const own = running;
  $("send").textContent = "Stop";
  const began = performance.now();
  let first = null;
  let drawn = true;
  const draw = () => {
    if (!drawn || conversation !== current) return;
    drawn = false;
    requestAnimationFrame(() => {
      drawn = true;
      if (conversation !== current) return;
      const talk = $("talk");
      const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
      const index = conversation.messages.indexOf(message);
      if (index >= 0) talk.children[index]?.replaceWith(drawMessage(message, index));
      if (atEnd) talk.scrollTop = talk.scrollHeight;
    });
  };
  try {
    const response = await askWith("/v1/chat/completions", body, own.signal);
    if (!response.ok) throw new Error(await reason(response));
    let usage = null;
    let cache = null;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      const delta = choice?.delta;
      if (delta?.content || delta?.reasoning_content) {
        first ??= performance.now();
        if (waiting === message) waiting = null;
      }
      message.content += delta?.content ?? "";
      message.reasoning += delta?.reasoning_content ?? "";
      tokens.push(...(choice?.logprobs?.content ?? []));
      if (choice?.finish_reason === "length") message.error = "The answer was cut: a limit of tokens was reached.";
      usage = event.usage ?? usage;
      cache = event.delft ?? cache;
      if (usage && first) message.told = told(usage, cache, first - began, performance.now() - first);
      draw();
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = `${error.message}`;
    else if (!message.content && !message.reasoning) message.error = "Stopped.";
  }
  if (waiting === message) waiting = null;
  models.settled(name);
  if (running === own) {
    running = null;
    $("send").textContent = "Send";
    $("talk").ariaBusy = "false";
    $("live").textContent = message.error ?? "The answer is whole.";
  }
  save();
  if (conversation === current) drawTalk();
}

/** Speed, the time to the first token, and what was found computed of the prompt. */
function told(usage, cache, wait, time) {
  const tokens = usage.completion_tokens;
  const rate = tokens > 1 && time > 0 ? `${(((tokens - 1) * 1000) / time).toFixed(1)} tokens/s, ` : "";
  const cached = cache?.cached_tokens ?? usage.prompt_tokens_details?.cached_tokens;
  const of = cached === undefined ? "" : `; ${cached} of ${usage.prompt_tokens} prompt tokens cached${cache?.cache ? ` (${cache.cache})` : ""}`;
  return `${tokens} tokens, ${rate}first after ${(wait / 1000).toFixed(2)} s${of}`;
}

function drawSettings() {
  $("system").value = settings.system ?? "";
  $("likely").checked = settings.likely ?? true;
  const own = models.known.find((model) => model.name === $("model").value)?.sampling ?? {};
  $("sampling").replaceChildren(...SETTINGS.map(([name, label, meaning, bounds]) => {
    const input = make("input", { type: "number", id: `set-${name}`, ...bounds, value: settings[name] ?? "", placeholder: own[name] ?? "" });
    input.oninput = () => {
      // Steps are for the arrows: whatever lies between them is as good, but for whole numbers.
      const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = input.validity;
      const wrong = badInput || rangeUnderflow || rangeOverflow || (stepMismatch && bounds.step === 1);
      input.ariaInvalid = String(wrong);
      if (input.value === "" || wrong) delete settings[name];
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
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowUp" || $("text").value || running) return;
  const edits = [...document.querySelectorAll(".user .tools button")].filter((one) => one.textContent === "Edit");
  if (edits.length) {
    event.preventDefault();
    edits.at(-1).click();
  }
});
const KEYS = { KeyN: () => select(null), KeyM: () => $("shelf").click(), KeyS: () => $("tune").click(), KeyL: () => $("theme").click() };
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    running?.abort();
    if ($("sidebar").classList.contains("open")) {
      slide(false);
      $("menu").focus();
    }
  }
  if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code]) {
    event.preventDefault();
    KEYS[event.code]();
  }
  if (event.target.closest?.("input, textarea, select") || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "/" || event.key === "?") {
    event.preventDefault();
    if (event.key === "/") $("text").focus();
    else $("help").click();
  }
});
for (const close of document.querySelectorAll("dialog .close")) close.onclick = () => close.closest("dialog").close();
$("help").onclick = () => $("keys").showModal();
$("new").onclick = () => select(null);
$("menu").onclick = () => slide(!$("sidebar").classList.contains("open"));
$("tune").onclick = () => {
  $("settings").hidden = !$("settings").hidden;
  $("tune").ariaExpanded = String(!$("settings").hidden);
  if (!$("settings").hidden) $("system").focus();
};
$("likely").onchange = () => {
  settings.likely = $("likely").checked;
  store("settings", settings);
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
$("model").onchange = () => {
  store("model", $("model").value);
  drawSettings();
};

/** Shows the models to choose from: those that are loaded first. */
function drawModels() {
  const chosen = $("model").value || stored("model", "");
  const option = ({ name }) => make("option", { value: name, textContent: name });
  const group = (label, states) => {
    const found = models.known.filter((model) => states.includes(model.state));
    return found.length ? [make("optgroup", { label }, ...found.map(option))] : [];
  };
  $("model").replaceChildren(...group("Loaded", ["loaded"]), ...group("Loading", ["loading"]), ...group("Available", ["available"]));
  if (models.known.some((model) => model.name === chosen)) $("model").value = chosen;
}

setTheme(stored("theme", null));
models.start(drawModels, (name) => {
  $("model").value = name;
  $("model").onchange();
  $("text").focus();
});
select(conversations[0] ?? null);
try {
  await models.refresh();
} catch {
  note("The server does not answer.");
}
drawSettings();
// What others ask of the server shows here, too.
setInterval(() => document.hidden || running || models.refresh().catch(() => {}), 10000);
