"use strict";
// Draws the run held in #data. Texts of the run reach the page as text nodes and attributes only.
(() => {
  const byId = (id) => document.getElementById(id);
  const D = JSON.parse(byId("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  // Okabe and Ito's palette, told apart with any colour vision; a dash pattern doubles each colour.
  const COLORS = [0, 1, 2, 3, 4, 5, 6].map((n) => `var(--request-${n})`);
  const DASHES = ["", "6 3", "2 2", "9 3 2 3"];
  const HEAD = 46, FOOT = 10, MARGIN = 20, LEFT = 74, DRAWN_MAX = 1500, LISTED_MAX = 300, KINDS_MAX = 120, LABELS_MAX = 600, LED_MAX = 60;
  const color = (r) => (r < 0 ? "var(--mark)" : COLORS[r % COLORS.length]);
  const dash = (r) => (r < 0 ? "" : DASHES[Math.floor(r / COLORS.length) % DASHES.length]);
  const seconds = (t) => `${t.toFixed(6)} s`;
  const make = (parent, name, attributes = {}, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const html = (parent, name, text, className) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    parent.appendChild(node);
    return node;
  };

  // --- the run ---------------------------------------------------------------------------------
  const messages = D.messages.map(([sent, land, source, target, kind, text, request, fate, label, step]) => ({
    step, sent, land, source, target, kind: D.kinds[kind], text, request, fate, label, time: sent, isMessage: true }));
  const notes = D.notes.map(([time, host, kind, text, request, count, last, step]) => ({
    step, time, host, kind: D.kinds[kind], text, request, count, last }));
  const isFault = (n) => n.kind === "fault" || n.kind === "kill" || n.kind === "power_off";
  const events = [...messages, ...notes].sort((a, b) => a.time - b.time);
  const matches = (e) => state.request < 0 || e.request === state.request;
  const names = (e) => (e.isMessage ? [D.hosts[e.source], D.hosts[e.target]] : [D.hosts[e.host]]);
  const isOn = (e, host) => (e.isMessage ? e.source === host || e.target === host : e.host === host);
  const found = (e) => !state.hidden.has(e.kind) && (state.host < 0 || isOn(e, state.host)) &&
    (!state.find || [e.kind, e.text, e.label ?? "", ...names(e)].some((t) => t.toLowerCase().includes(state.find)));
  const steps = D.lineage.map(([time, host, task, cause, how]) => ({ time, host, task, cause, how }));
  const decisions = D.decisions.map(([time, host, label, value, n, struck]) => ({ time, host: D.hosts.indexOf(host.replace(/\.\d+$/, "")), name: host, label, value, n, struck }));
  const lineage = (e) => { // the steps that led to an event, the latest first
    const path = [];
    for (let step = e ? e.step : -1; step >= 0 && path.length < LED_MAX; step = steps[step].cause) path.push(steps[step]);
    return path;
  };
  const counts = new Map();
  for (const e of events) counts.set(e.kind, (counts.get(e.kind) ?? 0) + 1);
  const outcomes = new Map();
  for (const n of notes) if (n.kind === "request.end") {
    const word = /(?:^| )outcome=(.*?)(?: tokens=|$)/.exec(n.text);
    if (!outcomes.has(n.request)) outcomes.set(n.request, word ? word[1] : "ended");
  }
  const state = { request: -1, host: -1, hidden: new Set(), find: "", at: 0, low: 0, high: 1, shown: [], y: null };

  // --- time to height: idle time may be shortened, so that what matters is not lost in it ---------
  const instants = [...new Set(events.flatMap((e) => (e.land === null || e.land === undefined ? [e.time] : [e.time, e.land]))
    .concat(D.bands.flatMap((b) => [b[1], b[2]]), decisions.map((d) => d.time), [0, D.end, D.at || D.end]))].sort((a, b) => a - b);
  let heights = [], skips = [];
  const layOut = () => {
    const deltas = instants.slice(1).map((t, i) => t - instants[i]).filter((d) => d > 0).sort((a, b) => a - b);
    const usual = deltas.length ? deltas[Math.floor(deltas.length * 0.75)] : 1;
    heights = [0]; skips = [];
    for (let i = 1; i < instants.length; i++) {
      const delta = instants[i] - instants[i - 1];
      const short = byId("gaps").checked ? Math.min(Math.max(delta / usual, 0.25), 3 + Math.log10(1 + delta / usual)) : delta;
      heights.push(heights[i - 1] + short);
      if (byId("gaps").checked && delta > usual * 20 && delta > 0.01) skips.push([instants[i - 1], instants[i]]);
    }
    if (!heights[heights.length - 1]) heights = heights.map((_, i) => i);
  };
  const search = (list, value) => { // the last index whose entry is at most value
    let low = 0, high = list.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (list[mid] <= value) low = mid; else high = mid - 1; }
    return low;
  };
  const between = (from, to, value) => {
    const i = search(from, value), next = Math.min(i + 1, from.length - 1);
    const span = from[next] - from[i];
    return to[i] + (span ? Math.min(Math.max((value - from[i]) / span, 0), 1) * (to[next] - to[i]) : 0);
  };
  const heightOf = (t) => between(instants, heights, t) / (heights[heights.length - 1] || 1);
  const timeOf = (h) => between(heights, instants, h * (heights[heights.length - 1] || 1));

  // --- drawing ---------------------------------------------------------------------------------
  const svg = byId("diagram"), map = byId("map");
  const size = () => ({ width: Math.max(svg.clientWidth, 300), height: Math.max(svg.clientHeight, 240) });
  const column = (host, width) => LEFT + (host + 0.35) * ((width - LEFT - 10) / Math.max(D.hosts.length, 1));
  const hatch = (defs, id, angle, gap, stroke) => {
    const pattern = make(defs, "pattern", { id, width: gap, height: gap, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})` });
    make(pattern, "rect", { width: gap, height: gap, fill: stroke, opacity: 0.14 });
    make(pattern, "path", { d: `M0 0V${gap}`, stroke, "stroke-width": 2.4 });
  };
  const arrow = (group, x1, y1, x2, y2, r, lost) => {
    const line = make(group, "path", { d: `M${x1} ${y1}L${x2} ${y2}`, class: lost ? "message lost" : "message" });
    line.style.stroke = color(r);
    if (!lost && dash(r)) line.style.strokeDasharray = dash(r);
    const angle = Math.atan2(y2 - y1, x2 - x1), c = Math.cos(angle), s = Math.sin(angle);
    if (lost) make(group, "path", { d: `M${x2 - 4} ${y2 - 4}l8 8m0-8l-8 8`, class: "cross" });
    else make(group, "path", { class: "head", d: `M${x2} ${y2}L${x2 - 7 * c + 3.2 * s} ${y2 - 7 * s - 3.2 * c}L${x2 - 7 * c - 3.2 * s} ${y2 - 7 * s + 3.2 * c}z` }).style.fill = color(r);
  };
  const ticks = (group, y, width, height) => {
    let last = -99;
    const step = Math.max(34, height / 18);
    for (let place = HEAD + MARGIN; place < height - FOOT; place += step) {
      const t = timeOf(state.low + ((place - HEAD - MARGIN) / (height - HEAD - FOOT - 2 * MARGIN)) * (state.high - state.low));
      if (place - last < 24) continue;
      make(group, "path", { class: "grid", d: `M${LEFT} ${place}H${width}` });
      make(group, "text", { class: "tick", x: LEFT - 8, y: place + 4, "text-anchor": "end" }, t.toFixed(state.high - state.low < 0.05 ? 5 : 3));
      last = place;
    }
  };
  const draw = () => {
    svg.replaceChildren();
    const { width, height } = size();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    // Room above the first event and below the last, which else were under the head and the edge.
    const inner = height - HEAD - FOOT - 2 * MARGIN;
    const y = (t) => HEAD + MARGIN + ((heightOf(t) - state.low) / (state.high - state.low)) * inner;
    state.y = y;
    const defs = make(svg, "defs");
    hatch(defs, "hatch-cut", 45, 7, "#b36b00"); hatch(defs, "hatch-paused", -45, 7, "#5b7c93"); hatch(defs, "hatch-down", 90, 6, "#555");
    make(make(defs, "clipPath", { id: "inside" }), "rect", { x: 0, y: HEAD, width, height: height - HEAD });
    const group = make(svg, "g", { "clip-path": "url(#inside)" });
    ticks(group, y, width, height);
    for (const [from, to] of skips) {
      const top = y(from), bottom = y(to);
      if (bottom < HEAD || top > height || bottom - top < 9) continue;
      make(group, "rect", { class: "skip", x: LEFT, y: top + 1, width: width - LEFT, height: bottom - top - 2 });
      if (bottom - top > 13) make(group, "text", { class: "small", x: width - 8, y: (top + bottom) / 2 + 4, "text-anchor": "end" }, `idle ${(to - from).toPrecision(3)} s`);
    }
    lifelines(group, y, width, height);
    // Below what is drawn of the events: the one that breaks the rule is at its time.
    violation(group, y, width);
    led(group, y, width);
    const drawn = items(group, y, width, height);
    cursor(group, y, width);
    heads(width, drawn);
    svg.setAttribute("aria-label", `Space-time diagram from ${seconds(timeOf(state.low))} to ${seconds(timeOf(state.high))}: ${D.hosts.length} hosts, ${drawn} events shown`);
    list(y, height);
    drawMap();
  };
  const lifelines = (group, y, width, height) => {
    for (const [host, from, to] of D.lives) make(group, "path", { class: "life", d: `M${column(host, width)} ${Math.max(y(from), HEAD)}V${Math.min(y(to), height)}` });
    const lived = new Set(D.lives.map((l) => l[0]));
    D.hosts.forEach((_, host) => { if (!lived.has(host)) make(group, "path", { class: "life", "stroke-dasharray": "2 4", d: `M${column(host, width)} ${HEAD}V${height}` }); });
    for (const [host, from, to, kind, text] of D.bands) {
      const top = Math.max(y(from), HEAD - 2), bottom = Math.min(y(to), height);
      if (bottom <= HEAD || top >= height) continue;
      // A single lost partner is a stripe beside the lifeline; what stops or isolates a host covers it.
      // An operation of a client is a bar on the other side, with its name.
      const operation = kind === "operation", stripe = kind === "cut" || operation;
      const box = make(group, "rect", { class: `band ${kind}`, x: column(host, width) + (operation ? 6 : stripe ? -13 : -11), y: top, width: stripe ? 7 : 22, height: Math.max(bottom - top, 2) });
      make(box, "title", {}, `${D.hosts[host]}: ${text}, ${seconds(from)} to ${seconds(to)}`);
      const room = (width - LEFT) / Math.max(D.hosts.length, 1);
      if (operation) { if (room > 70) make(group, "text", { class: "small halo", x: column(host, width) + 17, y: (Math.max(top, HEAD) + bottom) / 2 + 4 }, text.slice(0, Math.max(8, Math.floor((room - 20) / 6.5)))); }
      else if (bottom - top > 140 && room > 40) make(group, "text", { class: "small halo", transform: `translate(${column(host, width) + (stripe ? -24 : -22)} ${top + 6}) rotate(90)` }, text);
    }
  };
  const items = (group, y, width, height) => {
    const isIn = (from, to) => y(to) >= HEAD && y(from) <= height;
    let shown = events.filter((e) => (e.isMessage ? byId("messages").checked : byId("notes").checked || isFault(e)) &&
      isIn(e.time, e.isMessage ? e.land ?? e.time : e.time) && (found(e) || isFault(e)));
    const wanted = shown.filter(matches);
    // Where there is no room, a request's own events come first, the others are thinned evenly.
    const others = shown.filter((e) => !matches(e)), room = Math.max(DRAWN_MAX - wanted.length, 0);
    const thin = (many, most) => (many.length <= most ? many : many.filter((_, i) => Math.floor((i * most) / many.length) !== Math.floor(((i - 1) * most) / many.length)));
    shown = [...thin(others, room), ...thin(wanted, DRAWN_MAX)].sort((a, b) => a.time - b.time);
    state.shown = shown; state.thinned = others.length + wanted.length - shown.length;
    const labelled = [];
    const place = (x, at, text, request, className) => {
      const end = x + text.length * 6.2;
      if (labelled.length > LABELS_MAX || labelled.some(([top, from, to]) => Math.abs(at - top) < 12 && x < to && end > from)) return;
      labelled.push([at, x, end]);
      const label = make(group, "text", { class: `halo ${className}`, x, y: at + 4 }, text);
      if (request >= 0) label.style.fill = color(request);
    };
    const room_px = (width - LEFT) / Math.max(D.hosts.length, 1);
    const told = (e) => `${e.kind} ${e.text}`.slice(0, Math.max(e.kind.length, Math.floor((room_px - 14) / 6.2))).trim();
    const labels = []; // rare kinds first: a note that many others stand round is not hidden by them
    for (const e of shown.filter((s) => s.isMessage)) {
      const g = make(group, "g", matches(e) ? {} : { class: "dim" });
      const x1 = column(e.source, width), x2 = column(e.target, width), y1 = y(e.sent);
      const lost = e.land === null;
      const reach = lost ? 0.55 : 1, y2 = lost ? y1 + 12 : y(e.land);
      if (e.source === e.target) make(g, "path", { class: "message", d: `M${x1} ${y1}q22 ${(y2 - y1) / 2} 0 ${Math.max(y2 - y1, 4)}` });
      else arrow(g, x1, y1, x1 + (x2 - x1) * reach, y2, e.request, lost);
      make(g, "title", {}, `${e.kind} ${D.hosts[e.source]} to ${D.hosts[e.target]}, ${seconds(e.sent)} to ${lost ? "nowhere" : seconds(e.land)}\n${e.text}${e.fate ? `\n${e.fate}` : ""}${e.request >= 0 ? `\nrequest ${D.requests[e.request]}` : ""}`);
      if (e.label && room_px > 70 && (matches(e) || state.request < 0)) {
        const letters = Math.max(8, Math.floor(room_px / 7)), text = e.label.length > letters ? `${e.label.slice(0, letters - 1)}…` : e.label;
        const at = lost ? 0.2 : 0.35, left = x1 + (x2 - x1) * at - text.length * 2.9; // in its middle
        labels.push([counts.get(e.kind), left, y1 + (y2 - y1) * at, text, e.request, "small"]);
      }
    }
    for (const e of shown.filter((s) => !s.isMessage)) {
      const x = column(e.host, width), at = y(e.time);
      const g = make(group, "g", matches(e) || isFault(e) ? {} : { class: "dim" });
      if (isFault(e)) {
        const what = e.kind === "fault" ? faultText(e) : e.kind;
        make(g, "path", { class: "fault", d: `M${x} ${at - 7}l7 7-7 7-7-7z` });
        if (e.kind === "fault") place(x + 10, at, what, -1, "fault-text");
      } else {
        const dot = make(g, "circle", { class: "dot", cx: x, cy: at, r: e.count > 1 ? 4.5 : 3.4 });
        dot.style.fill = color(e.request);
        if (e.count > 1) { const bar = make(g, "path", { d: `M${x} ${at}V${y(e.last)}`, "stroke-width": 5, opacity: 0.45 }); bar.style.stroke = color(e.request); }
        if (room_px > 70 && (matches(e) || state.request < 0)) labels.push([counts.get(e.kind), x + 9, at, e.count > 1 ? `${e.kind} ×${e.count}` : told(e), e.request, "small"]);
      }
      make(g, "title", {}, `${e.kind}${e.count > 1 ? ` ×${e.count}` : ""} on ${D.hosts[e.host]}, ${seconds(e.time)}\n${e.text}`);
    }
    for (const [, ...label] of labels.sort((a, b) => a[0] - b[0])) place(...label);
    return shown.length;
  };
  const faultText = (e) => e.text.replace(/\bdo=|\bon=|\bto=/g, "").trim();
  const violation = (group, y, width) => {
    if (!D.invariant) return;
    make(group, "path", { class: "violation", d: `M${LEFT} ${y(D.at)}H${width}` });
    make(group, "text", { class: "halo fault-text", x: width - 8, y: y(D.at) + 14, "text-anchor": "end" }, `${D.invariant} found broken`);
  };
  // The steps behind the chosen event, as one line from host to host, and the decisions that were not dull.
  const led = (group, y, width) => {
    const path = lineage(events[state.at]).filter((s) => s.host >= 0);
    if (path.length > 1) make(group, "path", { class: "led", d: `M${path.map((s) => `${column(s.host, width)} ${y(s.time)}`).join("L")}` });
    for (const d of decisions) {
      const x = d.host < 0 ? LEFT - 4 : column(d.host, width) - 11, at = y(d.time);
      const sign = make(group, "path", { class: "decision", d: `M${x} ${at - 5}l5 9h-10z` });
      make(sign, "title", {}, `${d.label} = ${d.value} of ${d.n}${d.struck ? `\n${d.struck}` : ""}`);
    }
  };
  const cursor = (group, y, width) => {
    const e = events[state.at];
    if (!e) return;
    make(group, "path", { class: "cursor", d: `M${LEFT - 4} ${y(e.time)}H${width}` });
    const label = make(svg, "text", { class: "tick halo cursor-label", x: LEFT - 8, y: y(e.time) + 4, "text-anchor": "end" }, e.time.toFixed(5));
    if (y(e.time) < HEAD || y(e.time) > size().height) label.remove();
  };
  const heads = (width) => {
    const narrow = (width - LEFT) / Math.max(D.hosts.length, 1) < 74;
    D.hosts.forEach((name, host) => {
      const x = column(host, width), now = hostNow(host, events[state.at]?.time ?? 0);
      const text = make(svg, "text", narrow ? { class: "host", transform: `translate(${x} ${HEAD - 6}) rotate(-32)` } : { class: "host", x, y: 20, "text-anchor": "middle" }, name);
      make(text, "title", {}, name);
      const word = now.state.split(",")[0].replace(/^up$/, now.isWrong ? "cut off" : "up");
      if (!narrow) make(svg, "text", { class: now.isWrong ? "small fault-text" : "small", x, y: 36, "text-anchor": "middle" }, word);
    });
  };
  const drawMap = () => {
    map.replaceChildren();
    const width = 44, height = Math.max(map.clientHeight, 200);
    map.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const rows = new Array(Math.ceil(height / 3)).fill(0);
    for (const e of events) if (matches(e) && found(e)) rows[Math.min(Math.floor((heightOf(e.time) * height) / 3), rows.length - 1)]++;
    const most = Math.max(...rows, 1);
    rows.forEach((count, i) => { if (count) make(map, "rect", { class: "density", x: 2, y: i * 3, width: 4 + (34 * count) / most, height: 2.4 }); });
    for (const n of notes) if (isFault(n)) { const at = heightOf(n.time) * height; make(map, "path", { class: "fault", d: `M34 ${at - 4}l4 4-4 4-4-4z` }); }
    if (D.invariant) make(map, "path", { class: "violation", d: `M0 ${heightOf(D.at) * height}H${width}` });
    make(map, "rect", { class: "window", x: 1, y: state.low * height, width: width - 2, height: Math.max((state.high - state.low) * height, 3) });
    if (events[state.at]) make(map, "path", { class: "cursor", d: `M0 ${heightOf(events[state.at].time) * height}H${width}` });
  };

  // --- the state of each host at a time ------------------------------------------------------------
  const hostNow = (host, t) => {
    const life = D.lives.filter((l) => l[0] === host && l[1] <= t).sort((a, b) => a[1] - b[1]).pop();
    const wrong = D.bands.filter((b) => b[0] === host && b[1] <= t && t < b[2]);
    let word = "no process";
    if (life) word = t < life[2] || !life[4] ? `up, life ${life[3]}` : life[4];
    else if (!D.lives.some((l) => l[0] === host)) word = "";
    for (const b of wrong) if (b[3] !== "down") word = b[3] === "paused" ? "paused" : b[3] === "isolated" ? `${word}, isolated` : `${word}, ${b[4]}`;
    return { state: word, isWrong: wrong.length > 0, since: life ? life[1] : 0 };
  };
  const begins = new Set(["request.begin", "engine.begin"]), ends = new Set(["request.end", "engine.end"]);
  const showStates = () => {
    const t = events[state.at]?.time ?? 0;
    const open = D.hosts.map(() => new Map()), last = D.hosts.map(() => null), moved = D.hosts.map(() => [0, 0]);
    for (const e of events) {
      if (e.time > t) break;
      if (e.isMessage) { moved[e.source][0]++; if (e.land !== null && e.land <= t) moved[e.target][1]++; continue; }
      last[e.host] = e;
      const work = open[e.host];
      if (["boot", "kill", "power_off", "exit"].includes(e.kind)) work.clear();
      if (begins.has(e.kind)) work.set(e.request, 0);
      else if (ends.has(e.kind)) work.delete(e.request);
      else if (work.has(e.request) && e.kind.endsWith(".token")) work.set(e.request, work.get(e.request) + (e.last <= t ? e.count : Math.max(1, Math.round((e.count * (t - e.time)) / (e.last - e.time || 1)))));
    }
    const body = byId("states");
    body.replaceChildren();
    D.hosts.forEach((name, host) => {
      const now = hostNow(host, t), row = html(body, "tr");
      if (now.isWrong) row.className = "wrong";
      html(row, "td", name); html(row, "td", now.state);
      const work = [...open[host]].map(([r, n]) => `${D.requests[r] ?? "?"}${n ? ` (${n} tokens)` : ""}`);
      const cell = html(row, "td", work.slice(0, 4).join(", ") + (work.length > 4 ? `, ${work.length - 4} more` : "") || "–");
      cell.title = `${moved[host][0]} messages sent, ${moved[host][1]} received so far`;
      html(row, "td", last[host] ? `${last[host].kind}, ${(t - last[host].time).toPrecision(2)} s ago` : "–");
    });
  };
  const showLineage = () => {
    const path = lineage(events[state.at]), body = byId("why");
    byId("causes").hidden = path.length === 0;
    body.replaceChildren();
    path.forEach((s) => {
      const button = html(html(body, "li"), "button", `${D.hosts[s.host] ?? "–"}: ${s.task} `);
      button.type = "button";
      html(button, "span", `${seconds(s.time)}${s.how ? `, ${s.how}` : ""}`, "of");
      button.addEventListener("click", () => go(at(s.time)));
    });
  };
  const numbers = D.values.map(([host, name, series]) => {
    const row = html(byId("values"), "tr"), all = series.map((v) => v[1]);
    const low = Math.min(...all), span = Math.max(...all) - low || 1, end = D.end || 1;
    html(row, "td", D.hosts[host]); html(row, "td", name);
    const now = html(row, "td"), svg = make(html(row, "td"), "svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": `from ${low} to ${low + span}` });
    const x = (t) => heightOf(t) * 100, y = (v) => 18 - (16 * (v - low)) / span;
    const line = make(svg, "path", { class: "spark" }), mark = make(svg, "path", { class: "cursor", "vector-effect": "non-scaling-stroke" });
    return (t) => {
      const before = series.filter((v) => v[0] <= t);
      now.textContent = before.length ? String(before[before.length - 1][1]) : "–";
      line.setAttribute("d", `M${x(series[0][0])} ${y(series[0][1])}${series.slice(1).map(([s, v]) => `H${x(s)}V${y(v)}`).join("")}H${x(end)}`);
      mark.setAttribute("d", `M${x(t)} 0V20`);
    };
  });
  byId("numbers").hidden = numbers.length === 0;
  const describe = (e) => {
    if (!e) return "Nothing was recorded.";
    const who = e.isMessage ? `${e.kind} from ${D.hosts[e.source]} to ${D.hosts[e.target]}, ${e.land === null ? "never landed" : `landed ${seconds(e.land)}`}` : `${e.kind}${e.count > 1 ? ` ×${e.count} until ${seconds(e.last)}` : ""} on ${D.hosts[e.host]}`;
    return `${who}${e.text ? `: ${e.text}` : ""}${e.fate ? ` (${e.fate})` : ""}${e.request >= 0 ? `; request ${D.requests[e.request]}` : ""}`;
  };
  const list = (y, height) => {
    if (!byId("listing").open) return;
    const body = byId("list"), inside = state.shown.filter((e) => matches(e) && y(e.time) >= HEAD && y(e.time) <= height);
    body.replaceChildren();
    for (const e of inside.slice(0, LISTED_MAX)) {
      const row = html(body, "tr");
      for (const text of [e.time.toFixed(6), names(e).join(" → "), e.count > 1 ? `${e.kind} ×${e.count}` : e.kind, D.requests[e.request] ?? "", e.label && e.label !== e.text ? `${e.label}: ${e.text}` : e.text]) html(row, "td", text);
    }
    byId("more").textContent = inside.length > LISTED_MAX ? `${inside.length - LISTED_MAX} more; zoom in to see them.` : "";
  };

  // --- moving ------------------------------------------------------------------------------------
  let pending = 0;
  const later = () => { if (!pending) pending = requestAnimationFrame(() => { pending = 0; draw(); }); };
  const look = (low, high) => {
    const span = Math.min(Math.max(high - low, 0.0005), 1);
    state.low = Math.min(Math.max(low, 0), 1 - span); state.high = state.low + span;
    later();
  };
  const zoom = (factor, around = heightOf(events[state.at]?.time ?? 0)) => {
    const pivot = around >= state.low && around <= state.high ? around : (state.low + state.high) / 2;
    look(pivot - (pivot - state.low) * factor, pivot + (state.high - pivot) * factor);
  };
  const go = (index) => {
    state.at = Math.min(Math.max(index, 0), Math.max(events.length - 1, 0));
    const e = events[state.at];
    byId("time").value = state.at;
    const text = e ? seconds(e.time) : "–";
    byId("now").textContent = `${text}, event ${state.at + 1} of ${events.length}`;
    byId("time").setAttribute("aria-valuetext", text);
    byId("moment").textContent = `At ${text}`;
    byId("event").textContent = describe(e);
    if (e) { const h = heightOf(e.time), span = state.high - state.low; if (h < state.low || h > state.high) look(h - span / 2, h + span / 2); }
    for (const show of numbers) show(e ? e.time : 0);
    showStates(); showLineage(); later();
  };
  const at = (t) => { let i = events.length - 1; while (i > 0 && events[i].time > t) i--; return i; };
  const step = (count) => { // over events of the chosen request only
    let index = state.at;
    for (let left = Math.abs(count); left > 0; left--) {
      let next = index + Math.sign(count);
      while (events[next] && !(matches(events[next]) && found(events[next]))) next += Math.sign(count);
      if (!events[next]) break;
      index = next;
    }
    go(index);
  };
  const keys = {
    ArrowRight: () => step(1), ArrowDown: () => step(1), ArrowLeft: () => step(-1), ArrowUp: () => step(-1),
    PageDown: () => step(10), PageUp: () => step(-10), Home: () => go(0), End: () => go(events.length - 1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => look(0, 1),
  };
  const onKey = (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); act();
  };
  const choose = (request) => {
    state.request = request;
    byId("request").value = request < 0 ? "" : String(request);
    for (const button of byId("legend").querySelectorAll("button")) button.setAttribute("aria-pressed", String(Number(button.dataset.request) === request));
    const own = events.filter(matches);
    if (request >= 0 && own.length) {
      const from = heightOf(own[0].time), to = heightOf(Math.max(...own.map((e) => e.last ?? e.land ?? e.time)));
      const margin = Math.max((to - from) * 0.06, 0.002);
      look(from - margin, to + margin);
      go(events.indexOf(own[0]));
    }
    later();
  };
  const nearest = (height) => {
    const t = timeOf(height);
    let best = 0;
    events.forEach((e, i) => { if (matches(e) && found(e) && Math.abs(e.time - t) < Math.abs(events[best].time - t)) best = i; });
    return best;
  };
  const fraction = (event, box, top, bottom) => (event.clientY - box.top - top) / (box.height - top - bottom);

  // --- the page ------------------------------------------------------------------------------------
  byId("title").textContent = D.title;
  byId("verdict").textContent = D.invariant ? `${D.invariant} broken at ${D.at.toFixed(3)} s: ${D.text.split("\n")[0]}` : "No rule was broken.";
  byId("verdict").classList.toggle("broken", Boolean(D.invariant));
  if (D.invariant && D.text.includes("\n")) { byId("evidence").hidden = false; byId("text").textContent = D.text; }
  byId("facts").textContent = [...D.facts.map(([n, v]) => `${n} ${v}`), `${D.messages.length} messages, ${D.notes.length} notes, ${D.steps} task steps not drawn`,
    "requests of messages inferred from their connections"].join(" · ");
  if (D.omitted) { byId("omitted").hidden = false; byId("omitted").textContent = D.omitted; }
  byId("time").max = Math.max(events.length - 1, 0);
  D.requests.forEach((name, r) => {
    const option = html(byId("request"), "option", name);
    option.value = r;
    const item = html(byId("legend"), "li"), button = html(item, "button");
    button.type = "button"; button.dataset.request = r; button.setAttribute("aria-pressed", "false");
    const swatch = make(button, "svg", { viewBox: "0 0 40 14", "aria-hidden": "true" });
    const line = make(swatch, "path", { d: "M2 7H38", "stroke-width": 3 });
    line.style.stroke = color(r); line.style.strokeDasharray = dash(r);
    html(button, "span", name); html(button, "span", outcomes.get(r) ?? "no end", "outcome");
    button.addEventListener("click", () => choose(state.request === r ? -1 : r));
  });
  byId("choices").hidden = decisions.length === 0;
  for (const d of decisions) {
    const button = html(html(byId("decisions"), "li"), "button", `${d.label} = ${d.value} of ${d.n} `);
    button.type = "button";
    html(button, "span", `on ${d.name}, ${seconds(d.time)}${d.struck ? `, ${d.struck}` : ""}`, "of");
    button.addEventListener("click", () => {
      const sent = events.findIndex((e) => e.isMessage && d.struck.startsWith(`${D.hosts[e.source]} → ${D.hosts[e.target]}`) && Math.abs(e.time - d.time) < 1e-7);
      go(sent >= 0 ? sent : at(d.time));
      for (const each of byId("decisions").querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === button));
    });
  }
  D.hosts.forEach((name, host) => { html(byId("host"), "option", name).value = host; });
  byId("host").addEventListener("change", (e) => { state.host = e.target.value === "" ? -1 : Number(e.target.value); later(); });
  const byCount = [...counts].sort((a, b) => b[1] - a[1]), boxes = [];
  const showKinds = () => {
    for (const box of boxes) box.checked = !state.hidden.has(box.value);
    byId("kindcount").textContent = state.hidden.size ? `${counts.size - state.hidden.size} of ${counts.size}` : `all ${counts.size}`;
    later();
  };
  for (const [kind, count] of byCount.slice(0, KINDS_MAX)) {
    const label = html(html(byId("kindlist"), "li"), "label"), box = html(label, "input");
    box.type = "checkbox"; box.value = kind;
    label.append(` ${kind} (${count})`);
    box.addEventListener("change", () => { if (box.checked) state.hidden.delete(kind); else state.hidden.add(kind); showKinds(); });
    boxes.push(box);
  }
  if (byCount.length > KINDS_MAX) byId("otherkinds").textContent = `${byCount.length - KINDS_MAX} rarer kinds follow these two buttons only.`;
  byId("allkinds").addEventListener("click", () => { state.hidden.clear(); showKinds(); });
  byId("nokinds").addEventListener("click", () => { for (const kind of counts.keys()) state.hidden.add(kind); showKinds(); });
  byId("request").addEventListener("change", (e) => choose(e.target.value === "" ? -1 : Number(e.target.value)));
  byId("find").addEventListener("input", (e) => { state.find = e.target.value.trim().toLowerCase(); later(); });
  for (const id of ["messages", "notes"]) byId(id).addEventListener("change", later);
  byId("gaps").addEventListener("change", () => {
    const low = timeOf(state.low), high = timeOf(state.high);
    layOut(); look(heightOf(low), heightOf(high));
  });
  byId("in").addEventListener("click", () => zoom(0.6)); byId("out").addEventListener("click", () => zoom(1 / 0.6));
  byId("all").addEventListener("click", () => look(0, 1));
  byId("end").addEventListener("click", () => go(at(D.at || D.end)));
  byId("time").addEventListener("input", (e) => go(Number(e.target.value)));
  byId("time").addEventListener("keydown", onKey); svg.addEventListener("keydown", onKey);
  byId("tools").addEventListener("submit", (e) => e.preventDefault());
  byId("listing").addEventListener("toggle", later);
  svg.addEventListener("wheel", (e) => {
    e.preventDefault();
    const span = state.high - state.low, h = state.low + fraction(e, svg.getBoundingClientRect(), HEAD + MARGIN, FOOT + MARGIN) * span;
    if (e.ctrlKey) zoom(e.deltaY > 0 ? 1.25 : 0.8, h); else look(state.low + (e.deltaY / 700) * span, state.high + (e.deltaY / 700) * span);
  }, { passive: false });
  svg.addEventListener("click", (e) => go(nearest(state.low + fraction(e, svg.getBoundingClientRect(), HEAD + MARGIN, FOOT + MARGIN) * (state.high - state.low))));
  map.addEventListener("click", (e) => {
    const h = fraction(e, map.getBoundingClientRect(), 0, 0), span = state.high - state.low;
    look(h - span / 2, h + span / 2); go(nearest(h));
  });
  // The picture ends where the window does, so that the failure's line at its end is on screen.
  const fit = () => {
    const main = document.querySelector("main"), top = main.getBoundingClientRect().top + scrollY;
    main.style.height = `${Math.max(innerHeight - top - 40, 460)}px`;
    later();
  };
  addEventListener("resize", fit);
  addEventListener("beforeprint", draw);
  layOut();
  fit();
  showKinds();
  // Begin where something is to be seen: at the fault if there is one, with room for about 150 events.
  const first = notes.findIndex((n) => n.kind === "fault");
  const start = D.start !== null ? at(D.start) : first < 0 ? events.findIndex((e) => e.request >= 0) : events.indexOf(notes[first]);
  const span = Math.min(1, Math.max(160 / Math.max(events.length, 1), 0.002));
  const h = heightOf(events[Math.max(start, 0)]?.time ?? 0);
  look(h - span * 0.25, h + span * 0.75);
  go(Math.max(start, 0));
})();
