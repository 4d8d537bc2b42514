// Markdown as elements. A model's text is a stranger's: it only ever becomes text nodes in elements that are made here, links go to
// web and mail addresses alone, and nothing is loaded by being shown.

import { copy as put } from "./make.js";

/** Shows `text` in `parent`, in place of what is there. */
export function show(text, parent) {
  parent.replaceChildren(...blocks(text.split("\n")));
}

function make(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const DIVIDER = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;
/** Deeper quotes and lists are shown as text. */
const DEEPEST = 12;

function blocks(lines, depth = 0) {
  const found = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) found.push(make("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    let match;
    if ((match = FENCE.exec(line))) {
      flush();
      const [, indent, fence] = match;
      const code = [];
      for (i++; i < lines.length && !lines[i].trim().startsWith(fence); i++) {
        code.push(lines[i].startsWith(indent) ? lines[i].slice(indent.length) : lines[i]);
      }
      found.push(codeBlock(code.join("\n")));
    } else if (!line.trim()) {
      flush();
    } else if ((match = HEADING.exec(line))) {
      flush();
      found.push(make(`h${match[1].length}`, ...inline(match[2])));
    } else if (RULE.test(line)) {
      flush();
      found.push(make("hr"));
    } else if (depth < DEEPEST && /^\s{0,3}>/.test(line)) {
      flush();
      const quoted = [];
      for (; i < lines.length && /^\s{0,3}>/.test(lines[i]); i++) quoted.push(lines[i].replace(/^\s{0,3}> ?/, ""));
      i--;
      found.push(make("blockquote", ...blocks(quoted, depth + 1)));
    } else if (depth < DEEPEST && ITEM.test(line)) {
      flush();
      const [list, next] = listAt(lines, i, depth);
      found.push(list);
      i = next - 1;
    } else if (ROW.test(line) && DIVIDER.test(lines[i + 1] ?? "")) {
      flush();
      const table = make("table", row(line, "th"));
      for (i += 2; i < lines.length && ROW.test(lines[i]); i++) table.append(row(lines[i], "td"));
      i--;
      found.push(table);
    } else {
      paragraph.push(line);
    }
  }
  flush();
  return found;
}

function codeBlock(text) {
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => put(text, copy));
  return make("pre", make("code", text), copy);
}

/** The list that begins in a line, and the line behind it. */
function listAt(lines, from, depth) {
  const [, indent, mark] = ITEM.exec(lines[from]);
  const ordered = /\d/.test(mark);
  const list = make(ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(mark, 10);
  let i = from;
  while (i < lines.length) {
    const match = ITEM.exec(lines[i]);
    if (!match || match[1].length !== indent.length || /\d/.test(match[2]) !== ordered) break;
    const inner = [match[3]];
    for (i++; i < lines.length; i++) {
      const blank = !lines[i].trim();
      const space = /^\s*/.exec(lines[i])[0].length;
      if (!blank && space <= indent.length) break;
      if (blank && !/^\s/.test(lines[i + 1] ?? "")) {
        if (ITEM.test(lines[i + 1] ?? "")) i++;
        break;
      }
      inner.push(lines[i].slice(Math.min(space, indent.length + 2)));
    }
    const content = blocks(inner, depth + 1);
    // An item of one paragraph stands close to its neighbours.
    list.append(make("li", ...(content.length === 1 && content[0].tagName === "P" ? content[0].childNodes : content)));
  }
  return [list, i];
}

function row(line, cell) {
  const cells = line.trim().slice(1, -1).split("|");
  return make("tr", ...cells.map((text) => make(cell, ...inline(text.trim()))));
}

const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|__(?=\S)(.+?)__|~~(?=\S)(.+?)~~|\*(?=\S)(.+?)\*|(?<!\w)_(?=\S)(.+?)_(?!\w)|\[([^\]\n]*)\]\(([^()\s]*)\)/s;

function inline(text, depth = 0) {
  const found = [];
  let match;
  while (depth < DEEPEST && (match = INLINE.exec(text))) {
    found.push(text.slice(0, match.index));
    const [all, , code, strong, strong2, struck, emphasis, emphasis2, label, address] = match;
    const inner = (name, words) => make(name, ...inline(words, depth + 1));
    if (code !== undefined) found.push(make("code", code.trim() || code));
    else if (strong ?? strong2) found.push(inner("strong", strong ?? strong2));
    else if (struck) found.push(inner("s", struck));
    else if (emphasis ?? emphasis2) found.push(inner("em", emphasis ?? emphasis2));
    else found.push(link(label, address) ?? all);
    text = text.slice(match.index + all.length);
  }
  found.push(text);
  return found.filter((part) => part !== "");
}

/** A link to a web or mail address; whatever else stands there stays text. */
function link(label, address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return undefined;
  const element = make("a", label || address);
  element.href = address;
  element.rel = "noopener noreferrer";
  element.target = "_blank";
  element.title = address;
  return element;
}
