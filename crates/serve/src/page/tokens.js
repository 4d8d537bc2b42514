// The tokens of an answer with their probabilities: a list to point at, to tap, or to walk with the arrow keys.

import { make } from "./make.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100%" : share >= 10 ? `${share.toFixed(0)}%` : share >= 0.1 ? `${share.toFixed(1)}%` : "<0.1%";
};

/** White space made visible. */
const visible = (text) => text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll(" ", "\u00b7") || "(nothing)";

/** How likely, in five steps. */
const level = (logprob) => [0.9, 0.5, 0.2, 0.05].filter((bound) => Math.exp(logprob) < bound).length;

let lists = 0;

/** Shows tokens, each `{ token, logprob, top_logprobs }`, in `parent`. */
export function showTokens(tokens, parent) {
  const number = (lists += 1);
  const about = make("div", { className: "about", hidden: true });
  const spans = tokens.map(({ token, logprob }, index) => {
    const span = make("span", { id: `token-${number}-${index}`, role: "option", textContent: token.replaceAll("\n", "\u21b5\n") });
    span.dataset.level = level(logprob);
    span.ariaLabel = `${visible(token)} ${percent(logprob)}`;
    span.ariaSelected = "false";
    return span;
  });
  const list = make("div", { className: "tokens", role: "listbox", tabIndex: 0, ariaLabel: "Tokens of the answer" }, ...spans);
  let current = -1;
  const show = (index) => {
    spans[current]?.setAttribute("aria-selected", "false");
    current = index;
    const span = spans[index];
    about.hidden = !span;
    if (!span) {
      list.removeAttribute("aria-activedescendant");
      return;
    }
    span.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", span.id);
    const { token, logprob, top_logprobs: top } = tokens[index];
    const rows = (top ?? []).map((other) => make("tr", { className: other.token === token ? "chosen" : "" },
      make("td", {}, make("code", { textContent: visible(other.token) })),
      make("td", {}, make("meter", { value: Math.exp(other.logprob), ariaLabel: percent(other.logprob) })),
      make("td", { textContent: percent(other.logprob) })));
    about.replaceChildren(
      make("p", {}, make("code", { textContent: visible(token) }), ` ${percent(logprob)}, log-probability ${logprob.toFixed(3)}`),
      make("table", {}, make("tbody", {}, ...rows)));
    const room = parent.clientWidth - about.offsetWidth;
    about.style.left = `${Math.max(0, Math.min(span.offsetLeft, room))}px`;
    about.style.top = `${span.offsetTop + span.offsetHeight + 4}px`;
  };
  const at = (event) => spans.indexOf(event.target.closest("[role=option]"));
  // Where nothing but the page has moved under it, the pointer points at nothing new.
  let pointed = "";
  list.onpointerover = (event) => {
    const place = `${event.screenX},${event.screenY}`;
    if (place !== pointed) show(at(event));
    pointed = place;
  };
  list.onpointerleave = () => document.activeElement !== list && show(-1);
  list.onclick = (event) => show(at(event));
  list.onfocus = () => current < 0 && show(0);
  list.onblur = () => show(-1);
  list.onkeydown = (event) => {
    const to = { ArrowRight: current + 1, ArrowDown: current + 1, ArrowLeft: current - 1, ArrowUp: current - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(to, spans.length - 1)));
    spans[current].scrollIntoView({ block: "nearest" });
  };
  parent.classList.add("with-tokens");
  parent.replaceChildren(list, about);
}
