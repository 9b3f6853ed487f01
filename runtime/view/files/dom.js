// Elements, and the order in which they stay where they are. Text is set as text, nowhere as markup:
// what a worker or a model calls itself is shown, and never run.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  set(element, attributes);
  element.append(...children.filter((each) => each !== null && each !== undefined));
  return element;
}

// Set attributes that have changed; null removes one. What has not changed keeps its animation.
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
  }
  return element;
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

// The children of an element by key: one that stays is the same element, so that focus, selection and
// animation stay, too.
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.known = new Map();
  }

  show(items, keyOf, update) {
    const before = this.known;
    this.known = new Map();
    // First what goes: an element that is moved, as behind one that goes later, loses the focus.
    const staying = new Set(items.map(keyOf));
    for (const [key, element] of before) if (!staying.has(key)) this.drop(element);
    let place = null;
    for (const item of items) {
      const key = keyOf(item);
      if (this.known.has(key)) continue;
      const element = before.get(key) ?? this.make(item);
      this.known.set(key, element);
      const next = place === null ? this.parent.firstChild : place.nextSibling;
      if (next !== element) this.parent.insertBefore(element, next);
      place = element;
      update(element, item);
    }
  }

  // Whoever stands on what goes stays in its table, and is not sent to the top of the page.
  drop(element) {
    const place = element.contains(document.activeElement) ? this.parent.closest("[tabindex]") : null;
    element.remove();
    place?.focus();
  }
}

// A table body: `columns` make the text of a cell, or fill the cell that they are given.
export class Rows {
  constructor(body, columns, classes = []) {
    this.columns = columns;
    this.keyed = new Keyed(body, () =>
      el("tr", {}, ...columns.map((_, n) => el("td", classes[n] ? { class: classes[n] } : {}))));
  }

  show(items, keyOf, rowClass = () => null) {
    this.keyed.show(items, keyOf, (row, item) => {
      set(row, { class: rowClass(item) });
      this.columns.forEach((column, n) => {
        const told = column(item, row.cells[n]);
        if (typeof told === "string") write(row.cells[n], told);
      });
    });
  }
}

// --- numbers and times ---

export function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 0 : 1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)} k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 10 ? 0 : 1);
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let n = 0;
  while (value >= 1000 && n < units.length - 1) { value /= 1000; n += 1; }
  return `${value >= 100 || n === 0 ? Math.round(value) : value.toFixed(1)} ${units[n]}`;
}

export function percent(part) {
  if (part === null || part === undefined) return "–";
  return part > 0 && part < 0.005 ? "<1 %" : `${Math.round(part * 100)} %`;
}

export function lasting(seconds) {
  const s = Math.max(0, seconds);
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 119.5) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${Math.round(s / 3600)} h`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

// --- states: a shape and a word, the colour only beside them ---

const GLYPHS = { good: "●", warn: "◐", bad: "✕", off: "○" };

export function kindOf(state) {
  if (["ready", "live"].includes(state)) return "good";
  if (["draining", "registered", "unregistered", "inhibited", "starting", "degraded", "waiting"].includes(state)) return "warn";
  return state === "" ? "off" : "bad";
}

export function glyph(kind) {
  return GLYPHS[kind];
}

export function showState(cell, state, title = "") {
  const kind = kindOf(state);
  if (!cell.firstElementChild) {
    cell.append(el("span", { "aria-hidden": "true" }), " ", el("span"));
  }
  const [mark, word] = cell.children;
  set(mark, { class: `glyph ${kind}` });
  write(mark, glyph(kind));
  write(word, state || "–");
  set(cell, { title: title || null });
}
