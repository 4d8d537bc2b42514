// The models: which are loaded, loading and available, the memory that they hold, and downloads.

import { $, ask, askWith, button, bytes, lines, make, reason } from "./make.js";

/** What the server said last: `{ name, state, ..}` of each model that writes texts. */
export let known = [];
/** Names of models that a request of this page waits for. */
const loading = new Set();
let changed = () => {};
let chosen = () => {};
/** What the list shows. */
let shown = "";

/** Asks the server what there is. */
export async function refresh() {
  const [props, tags] = await Promise.all(["/props", "/api/tags"].map(async (path) => {
    const response = await ask(path);
    return response.ok ? (await response.json()).models : [];
  }));
  const sizes = new Map(tags.map((model) => [model.name.replace(/:latest$/, ""), model.size]));
  known = props.filter((model) => model.generates !== false).map((model) => {
    const name = model.model;
    if (model.loaded) loading.delete(name);
    const state = model.loaded ? "loaded" : loading.has(name) ? "loading" : "available";
    return { ...model, name, state, size: sizes.get(name) };
  });
  draw();
  changed();
}

/** Notes that a request waits for a model, which is loaded if it is not. */
export function wanted(name) {
  if (known.some((model) => model.name === name && model.state === "available")) loading.add(name);
  for (const model of known) if (loading.has(model.name)) model.state = "loading";
  draw();
  changed();
}

/** Notes that no request waits for a model any more. */
export function settled(name) {
  loading.delete(name);
  refresh().catch(() => {});
}

/** Memory and requests of all loaded models, in a few words. */
function summary() {
  const residents = known.filter((model) => model.loaded);
  const sum = (read) => residents.reduce((all, one) => all + (read(one) ?? 0), 0);
  const [held, planned] = [sum((one) => one.held_bytes), sum((one) => one.planned_bytes)];
  const [running, waiting] = [sum((one) => one.running), sum((one) => one.waiting)];
  return { loaded: residents.length, held, planned, running, waiting };
}

const STATES = { loaded: "loaded", loading: "loading\u2026", available: "available" };

function draw() {
  const { loaded, held, planned, running, waiting } = summary();
  const of = planned ? ` of ${bytes(planned)} planned` : "";
  const requests = `${running} ${running === 1 ? "request" : "requests"} running${waiting ? `, ${waiting} waiting` : ""}`;
  $("memory").textContent = loaded ? `${bytes(held)}${of} held; ${requests}` : "No model is loaded. The first message loads the one that is chosen.";
  const more = loaded && held ? ` \u00b7 ${bytes(held)}${running ? ` \u00b7 ${running} running` : ""}` : "";
  $("shelf").replaceChildren("Models", make("span", { className: "more", textContent: more }));
  // What has not changed keeps its place, and who is at one of its buttons stays there.
  const told = JSON.stringify(known.map(({ chat_template, ...model }) => model));
  if (told === shown) return;
  shown = told;
  const uses = () => [...$("stock").querySelectorAll("button")];
  const at = uses().indexOf(document.activeElement);
  $("stock").replaceChildren(...known.map((model) => {
    const { name, state, loaded } = model;
    const facts = [model.architecture, model.device, model.context && `${model.context.toLocaleString("en")} tokens of context`,
      !loaded && model.size && bytes(model.size)].filter(Boolean).join(" \u00b7 ");
    const item = make("li", {}, make("div", { className: "bar" },
      make("strong", { textContent: name }), make("span", { className: `state ${state}`, textContent: STATES[state] }),
      make("span", { className: "space" }), button("Use", () => chosen(name), { className: "plain", ariaLabel: `Use ${name}` })));
    if (facts) item.append(make("small", { textContent: facts }));
    if (loaded) {
      const { held_bytes: has, planned_bytes: plan } = model;
      if (plan) item.append(make("meter", { min: 0, max: Math.max(plan, has), value: has, ariaLabel: `Memory of ${name}` }));
      item.append(make("small", { textContent: `${bytes(has)}${plan ? ` of ${bytes(plan)} planned` : " held"}, ${model.running} running${model.waiting ? `, ${model.waiting} waiting` : ""}` }));
    }
    return item;
  }));
  uses()[at]?.focus();
}

/** Downloads a model, showing how far it is. */
async function pull(name) {
  const bar = make("progress", { ariaLabel: `Download of ${name}` });
  const words = make("span", { textContent: `${name}: asking the hub` });
  $("coming").replaceChildren(words, bar);
  $("fetch").disabled = true;
  try {
    const response = await askWith("/api/pull", { model: name });
    if (!response.ok) throw new Error(await reason(response));
    for await (const line of lines(response)) {
      const { status, total, completed, error } = JSON.parse(line);
      if (error) throw new Error(error.message ?? error);
      words.textContent = total ? `${status}: ${bytes(completed ?? 0)} of ${bytes(total)}` : status;
      if (total) Object.assign(bar, { max: total, value: completed ?? 0 });
      else bar.removeAttribute("value");
    }
    words.textContent = `${name} is here.`;
    $("wanted").value = "";
    await refresh();
  } catch (error) {
    words.textContent = `${name}: ${error.message}`;
    words.className = "error";
  }
  bar.remove();
  $("fetch").disabled = false;
}

/** Sets up the dialog; `onchange` hears of news, `onchoose` of a model that is to be used. */
export function start(onchange, onchoose) {
  changed = onchange;
  chosen = (name) => {
    $("models").close();
    onchoose(name);
  };
  let timer;
  $("shelf").onclick = () => {
    $("models").showModal();
    refresh().catch(() => {});
    timer = setInterval(() => refresh().catch(() => {}), 2000);
  };
  $("models").addEventListener("close", () => clearInterval(timer));
  $("pull").onsubmit = (event) => {
    event.preventDefault();
    pull($("wanted").value.trim());
  };
}
