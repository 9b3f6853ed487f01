// Small lines of the last minutes, and bars of a share.

import { el, set, svg } from "./dom.js";

const WIDTH = 200;
const HEIGHT = 44;

export function spark(place, values, label) {
  let chart = place.firstElementChild;
  if (!chart) {
    chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("path", { class: "area" }), svg("path", { class: "line" }));
    place.append(chart);
  }
  set(chart, { "aria-label": label });
  const top = Math.max(1, ...values) * 1.12;
  const step = WIDTH / Math.max(59, values.length - 1);
  const from = WIDTH - step * (values.length - 1);
  const points = values.map((value, n) =>
    `${(from + n * step).toFixed(1)} ${(HEIGHT - 2 - (value / top) * (HEIGHT - 6)).toFixed(1)}`);
  const line = points.length ? `M${points.join("L")}` : "";
  set(chart.children[1], { d: line });
  set(chart.children[0], { d: line && `${line}L${WIDTH} ${HEIGHT}L${from.toFixed(1)} ${HEIGHT}Z` });
}

// A share as a bar with its words beside it; fills a cell.
export function bar(cell, used, total, words) {
  if (!cell.firstElementChild) {
    cell.append(svg("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "all", width: 100, height: 8, rx: 2 }), svg("rect", { class: "part", height: 8, rx: 2 })),
    el("span", { class: "words" }));
  }
  const part = total ? Math.min(1, used / total) : 0;
  const [chart, text] = cell.children;
  set(chart, { class: total ? "bar" : "bar none" });
  set(chart.children[1], {
    width: (part * 100).toFixed(1), class: part >= 0.95 ? "part full" : "part" });
  text.textContent = words;
}
