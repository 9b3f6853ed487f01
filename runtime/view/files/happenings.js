// What has happened: one lane for each process that something happened to, and the last of it in words.

import { Keyed, clock, el, lasting, set, svg, write } from "./dom.js";

const LANES_MAX = 7;
const EVENTS_SHOWN = 7;
const WINDOWS = [60, 120, 300, 900, 3600, 6 * 3600];
const MARKS = { joined: "▲", left: "▼", outage: "✕", interruption: "◆" };

export class Happenings {
  constructor(section) {
    this.place = section.querySelector(".drawing");
    this.chart = svg("svg", { role: "img" });
    this.place.append(this.chart);
    this.ticks = new Keyed(this.chart.appendChild(svg("g")), () => svg("g", {}, svg("line"), svg("text")));
    this.lanes = new Keyed(this.chart.appendChild(svg("g")), () => svg("g", {}, svg("line"), svg("text")));
    this.bars = new Keyed(this.chart.appendChild(svg("g")), () => svg("rect", { rx: 3 }, svg("title")));
    this.marks = new Keyed(this.chart.appendChild(svg("g")), () => svg("text", {}, svg("title"), svg("tspan")));
    this.list = new Keyed(section.querySelector(".events"), () =>
      el("li", {}, el("time"), el("span", { "aria-hidden": "true" }), el("span", { class: "text" })));
    this.note = section.querySelector(".note");
    // The section, for the drawing has no width while it is hidden.
    new ResizeObserver(() => this.last && this.show(...this.last)).observe(section);
  }

  show(events, now) {
    this.last = [events, now];
    this.place.hidden = events.length === 0;
    this.note.hidden = events.length > 0;
    write(this.note, "Nothing, as far as this frontend has seen: nobody came, left or failed to answer.");
    if (!events.length) { this.list.show([], () => ""); return; }
    const width = Math.max(260, this.place.clientWidth);
    const newest = [...events].reverse();
    const who = [...new Set(newest.map((each) => each.who))].slice(0, LANES_MAX);
    const oldest = Math.min(now, ...newest.filter((each) => who.includes(each.who)).slice(0, 40).map((each) => each.at));
    const long = WINDOWS.find((each) => now - oldest < each * 0.95) ?? WINDOWS[WINDOWS.length - 1];
    const room = Math.min(width < 480 ? 15 : 24, Math.max(9, ...who.map((each) => each.length)));
    const left = room * 6.6 + 12, row = 24, top = 20;
    const high = top + Math.max(1, who.length) * row + 4;
    const x = (at) => left + (width - left - 12) * Math.min(1, Math.max(0, 1 - (now - at) / long));
    set(this.chart, { viewBox: `0 0 ${width} ${high}`, width, height: high,
      "aria-label": `Time line of the last ${lasting(long)}; the same is in the list below` });
    this.drawTicks(now, long, x, high, width);
    this.lanes.show(who, (each) => each, (group, each) => {
      const y = top + who.indexOf(each) * row + row / 2;
      set(group.children[0], { x1: left, x2: width - 12, y1: y, y2: y, class: "lane" });
      set(group.children[1], { x: 0, y: y + 4, class: "who" });
      write(group.children[1], each.length > room ? `${each.slice(0, room - 1)}…` : each);
    });
    const shown = events.filter((each) => who.includes(each.who) && (each.until ?? now) >= now - long);
    const y = (each) => top + who.indexOf(each.who) * row + row / 2;
    this.bars.show(shown.filter((each) => each.kind === "outage"), (each) => each.number, (rect, each) => {
      const from = x(each.at), to = x(each.until ?? now);
      set(rect, { x: from.toFixed(1), y: y(each) - 6, width: Math.max(4, to - from).toFixed(1), height: 12,
        class: each.until === null ? "outage lasting" : "outage" });
      write(rect.firstChild, sentence(each, now));
    });
    const points = shown.filter((each) => each.at >= now - long);
    this.marks.show(points, (each) => each.number, (text, each) => {
      set(text, { x: x(each.at).toFixed(1), y: y(each) + 5, class: `event ${each.kind}` });
      write(text.children[0], sentence(each, now));
      write(text.children[1], MARKS[each.kind]);
    });
    this.list.show(newest.slice(0, EVENTS_SHOWN), (each) => each.number, (item, each) => {
      write(item.children[0], clock(each.at));
      set(item.children[1], { class: `glyph ${each.kind}` });
      write(item.children[1], MARKS[each.kind]);
      write(item.children[2], sentence(each, now));
    });
  }

  drawTicks(now, long, x, high, width) {
    const count = width < 480 ? 3 : 5;
    const ticks = Array.from({ length: count }, (_, n) => n / (count - 1));
    this.ticks.show(ticks, (each) => each, (group, each) => {
      const at = x(now - long * (1 - each));
      set(group.children[0], { x1: at, x2: at, y1: 16, y2: high, class: "tick" });
      set(group.children[1], { x: at, y: 10, class: "tick", "text-anchor": each === 1 ? "end" : each === 0 ? "start" : "middle" });
      write(group.children[1], each === 1 ? "now" : `${lasting(long * (1 - each))} ago`);
    });
  }
}

function sentence(event, now) {
  const lasts = event.kind !== "outage" ? "" : event.until === null
    ? `, ${now - event.at < 1 ? "just" : `for ${lasting(now - event.at)}`} now` : `, for ${lasting(event.until - event.at)}`;
  // `decode worker decode-1` says everything twice.
  const who = event.about.split(" ").some((word) => event.who.startsWith(word)) ? event.who : `${event.about} ${event.who}`;
  return `${who}: ${event.text}${lasts}`;
}
