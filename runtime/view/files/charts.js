// Small lines of the last minutes on an axis of time, and bars of a share.

import { el, set, svg, write } from "./dom.js";

const WIDTH = 200;
const HEIGHT = 44;

// `points` are `{at, value}` in seconds, the oldest first; a line is broken where nothing is known for long.
export function spark(place, points, now, windowS, label) {
  let chart = place.firstElementChild;
  if (!chart) {
    chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("path", { class: "area" }), svg("path", { class: "line" }));
    place.append(chart, el("p", { class: "axis", "aria-hidden": "true" }, el("span"), el("span")));
    write(place.lastChild.lastChild, "now");
  }
  write(place.lastChild.firstChild, `${Math.round(windowS / 60)} min ago`);
  set(chart, { "aria-label": label });
  const shown = points.filter((each) => each.at > now - windowS);
  const top = Math.max(1, ...shown.map((each) => each.value)) * 1.12;
  const x = (each) => (WIDTH * Math.min(1, 1 - (now - each.at) / windowS)).toFixed(1);
  const y = (each) => (HEIGHT - 2 - (each.value / top) * (HEIGHT - 6)).toFixed(1);
  let line = "", area = "", run = [];
  const end = () => {
    if (!run.length) return;
    // One alone is a dot: a line of no length is not drawn.
    const drawn = `M${run.map((each) => `${x(each)} ${y(each)}`).join("L")}${run.length > 1 ? "" : "h.8"}`;
    line += drawn;
    area += `${drawn}L${x(run[run.length - 1])} ${HEIGHT}L${x(run[0])} ${HEIGHT}Z`;
    run = [];
  };
  for (const each of shown) {
    if (run.length && each.at - run[run.length - 1].at > each.within) end();
    run.push(each);
  }
  end();
  set(chart.children[1], { d: line });
  set(chart.children[0], { d: area });
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
