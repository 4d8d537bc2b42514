// Elements, requests and streams: what all parts of the page use.

export const $ = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

export const button = (label, action, properties = {}) =>
  make("button", { className: "quiet", type: "button", textContent: label, onclick: action, ...properties });

/** Puts a text on the clipboard, which browsers keep from pages that came without encryption from another machine: there by selecting
 * it. The button that asked for it says what came of it. */
export async function copy(text, from) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const field = make("textarea", { value: text, className: "hidden" });
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
  }
  const label = from.textContent;
  $("live").textContent = from.textContent = done ? "Copied" : "The browser forbids it";
  setTimeout(() => (from.textContent = label), 1500);
}

/** Asks the server; with a key, for which it asks the user where the server wants one. */
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem("delft.key");
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401) return response;
  await askForKey();
  return ask(path, options);
}

export const askWith = (path, body, signal) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });

let asking = null;

function askForKey() {
  asking ??= new Promise((done) => {
    $("ask").onclose = () => {
      sessionStorage.setItem("delft.key", $("key").value.trim());
      $("key").value = "";
      asking = null;
      done();
    };
    $("ask").showModal();
  });
  return asking;
}

/** Why a request was refused. */
export async function reason(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? body?.error ?? `status ${response.status}`;
}

/** The lines of a stream. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      if (held) yield held;
      return;
    }
    held += value;
    const whole = held.split("\n");
    held = whole.pop();
    yield* whole;
  }
}

/** The objects of a stream of server-sent events. */
export async function* events(response) {
  for await (const line of lines(response)) {
    if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

const UNITS = ["B", "KB", "MB", "GB", "TB"];

export function bytes(count) {
  const unit = Math.min(Math.floor(Math.log10(Math.max(count, 1)) / 3), UNITS.length - 1);
  const value = count / 1000 ** unit;
  return `${value.toFixed(unit > 1 && value < 100 ? 1 : 0)} ${UNITS[unit]}`;
}
