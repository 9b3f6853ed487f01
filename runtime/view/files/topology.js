// Who is connected to whom: clients, frontends, workers by role, and the servers that all share.
// From left to right where there is room, from top to bottom on a phone.

import { byGroup, isMany } from "./groups.js";
import { Keyed, bytes, figure, glyph, kindOf, percent, set, svg, write } from "./dom.js";

const NARROW = 620;
const MANY = 28;
const PAIRS_MAX = 256;

export class Topology {
  constructor(place) {
    this.place = place;
    this.chart = svg("svg", { role: "group", "aria-label": "Topology" });
    this.buses = svg("g", { class: "buses" });
    this.edges = svg("g", { class: "edges" });
    this.labels = svg("g", { class: "labels" });
    this.nodes = svg("g", { class: "nodes" });
    this.titles = svg("g", { class: "titles" });
    this.chart.append(this.buses, this.edges, this.titles, this.nodes, this.labels);
    place.append(this.chart);
    this.keyedNodes = new Keyed(this.nodes, makeNode);
    this.keyedEdges = new Keyed(this.edges, () => svg("path", {}));
    this.keyedLabels = new Keyed(this.labels, () => svg("text", {}));
    this.keyedTitles = new Keyed(this.titles, () => svg("text", {}));
    this.keyedBuses = new Keyed(this.buses, () => svg("path", {}));
    new ResizeObserver(() => this.last && this.show(this.last)).observe(place);
  }

  show(whole) {
    this.last = whole;
    const snapshot = isMany(whole) ? byGroup(whole) : whole;
    const width = Math.max(280, this.place.clientWidth);
    const isNarrow = width < NARROW;
    const layers = layersOf(snapshot);
    const place = isNarrow ? stacked : sideBySide;
    const plan = place(layers, width, snapshot.servers.length > 0);
    const servers = placeServers(snapshot.servers, plan, width, isNarrow);
    const nodes = [...plan.nodes, ...servers];
    const at = new Map(nodes.map((node) => [node.key, node]));
    const edges = edgesOf(snapshot, at);
    set(this.chart, { viewBox: `0 0 ${width} ${plan.height}`, width, height: plan.height });
    this.keyedNodes.show(nodes, (node) => node.key, drawNode);
    this.keyedEdges.show(edges, (edge) => edge.key, (path, edge) => drawEdge(path, edge, isNarrow));
    // On a phone workers stand in rows, and their lines behind each other: there their boxes tell it alone.
    const isTold = (edge) => edge.label && (!isNarrow || edge.key.startsWith("clients"));
    this.keyedLabels.show(edges.filter(isTold), (edge) => edge.key,
      (text, edge) => drawLabel(text, edge, isNarrow));
    this.keyedTitles.show(plan.titles, (title) => title.text, (text, title) => {
      set(text, { x: title.x, y: title.y, class: "layer" });
      write(text, title.text);
    });
    this.keyedBuses.show(plan.bus ? [plan.bus] : [], () => "bus", (path, d) => set(path, { d }));
  }
}

function layersOf(snapshot) {
  const traffic = snapshot.traffic;
  const clients = [{ key: "clients", kind: "client", name: "clients", state: "",
    lines: [`${figure(traffic.requests_per_s)} requests/s`, `${figure(traffic.in_flight)} under way`],
    words: `clients: ${figure(traffic.requests_per_s)} requests a second` }];
  const frontends = snapshot.frontends.map((each) => ({
    key: `frontend ${each.name} ${each.pid}`, kind: "frontend", name: each.name, state: each.status,
    lines: [`${figure(each.in_flight)} under way${each.waiting ? `, ${figure(each.waiting)} wait` : ""}`,
      `${figure(each.tokens_per_s)} tok/s`],
    words: `${each.name}${each.host ? ` on ${each.host}` : ""}, ${each.url}, ${each.status}, ${each.in_flight} requests under way, ${each.waiting} wait, ${figure(each.tokens_per_s)} tokens a second`,
    data: each,
  }));
  const workers = snapshot.instances.map((each) => ({
    key: `worker ${each.id} ${each.endpoint}`, kind: "worker", name: each.name, state: each.state,
    lines: linesOf(each), share: shareOf(each), data: each,
    words: `${each.role || "worker"} ${each.name}${each.host ? ` on ${each.host}` : ""}, ${each.state}, model ${each.model}, ${linesOf(each).join(", ")}, ` +
      `KV blocks in use ${percent(shareOf(each))}`,
  }));
  const prefill = workers.filter((each) => each.data.role === "prefill");
  const others = workers.filter((each) => each.data.role !== "prefill");
  const isSplit = prefill.length > 0 || others.some((each) => each.data.role === "decode");
  const isHop = others.length > 0 && others.every((each) => each.data.role === "upstream");
  return [
    { title: "", nodes: clients },
    { title: frontends.length > 1 ? "frontends" : "frontend", nodes: frontends },
    { title: isSplit ? "decode workers" : isHop ? "upstreams" : "workers", nodes: others },
    ...(prefill.length ? [{ title: "prefill workers", nodes: prefill }] : []),
  ];
}

function linesOf(instance) {
  const facts = instance.engine_facts;
  if (instance.problem) return ["does not answer", ""];
  if (!facts) return [`${instance.active ?? instance.in_flight} active`, ""];
  const waiting = facts.waiting ? `, ${facts.waiting} waiting` : "";
  const speed = instance.role === "prefill"
    ? `${figure(instance.prompt_tokens_per_s)} prompt tok/s` : `${figure(instance.tokens_per_s)} tok/s`;
  if (instance.told) return [instance.told, `${figure(instance.active)} active, ${speed}`];
  return [`${facts.running} running${waiting}`, speed];
}

function shareOf(instance) {
  return instance.blocks_total ? instance.blocks_used / instance.blocks_total : instance.kv_used;
}

// --- places ---

function sideBySide(layers, width, hasServers) {
  const gap = 14, top = 30;
  const isMany = Math.max(...layers.map((layer) => layer.nodes.length)) > MANY;
  const high = isMany ? 40 : 66;
  const columns = layers.map((layer) => Math.max(1, Math.ceil(layer.nodes.length / (isMany ? 14 : 7))));
  const total = columns.reduce((sum, n) => sum + n, 0);
  const between = Math.max(48, Math.min(150, (width - total * 170) / Math.max(1, layers.length - 1)));
  // What moves between decode and prefill workers is told in a longer word than what comes before.
  const gaps = layers.map((_, n) => (n === 0 ? 0 : n === 3 ? Math.max(between, 92) : between));
  const allGaps = gaps.reduce((sum, each) => sum + each, 0);
  const wide = Math.min(190, (width - allGaps - gap * (total - layers.length)) / total);
  const rows = layers.map((layer, n) => Math.ceil(layer.nodes.length / columns[n]));
  const tall = Math.max(1, ...rows);
  const body = tall * (high + gap) - gap;
  const nodes = [], titles = [];
  const used = total * wide + (total - layers.length) * gap + allGaps;
  let x = Math.max(0, (width - used) / 2);
  layers.forEach((layer, n) => {
    x += gaps[n];
    const here = Math.max(1, rows[n]);
    const start = top + (body - (here * (high + gap) - gap)) / 2;
    layer.nodes.forEach((node, index) => {
      const column = Math.floor(index / here), row = index % here;
      nodes.push({ ...node, x: x + column * (wide + gap), y: start + row * (high + gap), wide, high, isSmall: isMany });
    });
    if (layer.title) titles.push({ text: layer.title, x: x + 2, y: start - 10 });
    x += columns[n] * wide + (columns[n] - 1) * gap;
  });
  const busY = top + body + 26;
  return { nodes, titles, busY, height: hasServers ? busY + 62 : busY - 16, left: Math.max(0, (width - used) / 2), right: (width + used) / 2,
    bus: hasServers && `M${Math.max(6, (width - used) / 2)} ${busY}H${(width + used) / 2}` };
}

function stacked(layers, width, hasServers) {
  const gap = 10, high = 66, between = 40;
  const nodes = [], titles = [];
  let y = 4;
  for (const layer of layers) {
    if (!layer.nodes.length) continue;
    if (layer.title) { titles.push({ text: layer.title, x: 2, y: y + 11 }); y += 18; }
    const columns = layer.nodes.length === 1 ? 1 : 2;
    const wide = columns === 1 ? Math.min(width - 2, 220) : (width - 2 - gap) / 2;
    layer.nodes.forEach((node, index) => {
      const x = columns === 1 ? (width - wide) / 2 : 1 + (index % 2) * (wide + gap);
      nodes.push({ ...node, x, y: y + Math.floor(index / columns) * (high + gap), wide, high });
    });
    y += Math.ceil(layer.nodes.length / columns) * (high + gap) - gap + between;
  }
  const busY = y - between + 18;
  return { nodes, titles, busY, height: hasServers ? busY + 60 : busY - 10, left: 2, right: width - 2,
    bus: hasServers && `M2 ${busY}H${width - 2}` };
}

function placeServers(servers, plan, width, isNarrow) {
  const gap = 14, high = 44;
  const wide = isNarrow ? (width - 2 - gap) / 2 : 210;
  const used = servers.length * (wide + gap) - gap;
  let x = isNarrow ? 1 : (plan.left + plan.right - used) / 2;
  return servers.map((each) => {
    const node = {
      key: `server ${each.name}`, kind: "server", name: each.name, state: each.is_connected ? "ready" : "away",
      lines: [each.is_connected ? each.text : `away: ${each.text || "does not answer"}`],
      words: `${each.name}, ${each.is_connected ? "connected" : "away"}, ${each.addresses.join(", ")}`,
      title: each.addresses.join("\n"), x, y: plan.busY + 14, wide, high, stem: plan.busY,
    };
    x += wide + gap;
    return node;
  });
}

// --- nodes ---

function makeNode() {
  return svg("g", { role: "img" }, svg("title"), svg("path", { class: "stem" }), svg("rect", { class: "box", rx: 9 }),
    svg("text", { class: "mark" }), svg("text", { class: "name" }), svg("text", { class: "line" }),
    svg("text", { class: "line" }), svg("rect", { class: "all", rx: 1.5, height: 3 }),
    svg("rect", { class: "part", rx: 1.5, height: 3 }));
}

function drawNode(group, node) {
  const [title, stem, box, mark, name, first, second, all, part] = group.children;
  const kind = node.kind === "client" ? "off" : kindOf(node.state);
  set(group, { class: `node ${node.kind} ${kind}`, transform: `translate(${node.x.toFixed(1)} ${node.y.toFixed(1)})`,
    "aria-label": node.words });
  write(title, node.title || node.words);
  set(stem, { d: node.stem === undefined ? null : `M${(node.wide / 2).toFixed(1)} 0V${(node.stem - node.y).toFixed(1)}` });
  set(box, { width: node.wide.toFixed(1), height: node.high });
  set(mark, { x: 12, y: node.isSmall ? 17 : 22 });
  write(mark, node.kind === "client" ? "" : glyph(kind));
  set(name, { x: node.kind === "client" ? 12 : 28, y: node.isSmall ? 17 : 22 });
  const room = (node.wide - 38) / 7.4;
  const word = kind === "good" || kind === "off" || node.kind === "server" ? "" : ` · ${node.state}`;
  // The shape and the line below say it, too.
  write(name, node.name.length + word.length <= room ? node.name + word : clip(node.name, room));
  set(first, { x: 12, y: node.isSmall ? 32 : 38 });
  write(first, clip(node.isSmall ? node.lines.filter(Boolean).join(" · ") : node.lines[0] ?? "", (node.wide - 18) / 6.1));
  set(second, { x: 12, y: 53 });
  write(second, node.isSmall ? "" : clip(node.lines[1] ?? "", (node.wide - 18) / 6.1));
  const long = node.wide - 24, has = node.share !== null && node.share !== undefined && !node.isSmall;
  set(all, { x: 12, y: node.high - 7, width: has ? long.toFixed(1) : 0 });
  set(part, { x: 12, y: node.high - 7, width: has ? (long * Math.min(1, node.share)).toFixed(1) : 0,
    class: node.share >= 0.95 ? "part full" : "part" });
}

function clip(text, room) {
  return text.length <= room ? text : `${text.slice(0, Math.max(1, Math.floor(room) - 1))}…`;
}

// --- edges ---

function edgesOf(snapshot, at) {
  const edges = [];
  const clients = at.get("clients");
  for (const frontend of snapshot.frontends) {
    const from = at.get(`frontend ${frontend.name} ${frontend.pid}`);
    edges.push({ key: `clients ${from.key}`, from: clients, to: from, weight: frontend.in_flight,
      label: frontend.requests_per_s ? `${figure(frontend.requests_per_s)}/s` : "" });
    for (const instance of snapshot.instances) {
      if (instance.role === "prefill") continue;
      const to = at.get(`worker ${instance.id} ${instance.endpoint}`);
      const count = frontend.streams[instance.id] ?? 0;
      edges.push({ key: `${from.key} ${to.key}`, from, to, weight: count, isBroken: kindOf(instance.state) === "bad",
        label: count ? figure(count) : "" });
    }
  }
  return [...edges, ...transferEdges(snapshot, at)];
}

// Between the two that have moved blocks, whoever of them began; what moves now, at the decode worker.
function transferEdges(snapshot, at) {
  const byId = new Map(snapshot.instances.map((each) => [each.id, each]));
  const pairs = new Map(), rates = new Map();
  for (const one of snapshot.instances) {
    for (const [peer, rate] of Object.entries(one.moves)) {
      const other = byId.get(peer);
      if (!other || other === one) continue;
      const [from, to] = one.role === "prefill" || (other.role !== "prefill" && other.id < one.id) ? [other, one] : [one, other];
      const key = `${from.id} ${to.id}`;
      const pair = pairs.get(key) ?? { from, to, rate: 0 };
      pairs.set(key, { ...pair, rate: pair.rate + rate });
      rates.set(from.id, (rates.get(from.id) ?? 0) + rate);
    }
  }
  const told = new Set();
  return [...pairs.values()].slice(0, PAIRS_MAX).map(({ from, to, rate }) => {
    const total = rate && !told.has(from.id) ? rates.get(from.id) : 0;
    if (rate) told.add(from.id);
    return { key: `blocks ${from.id} ${to.id}`, from: at.get(`worker ${from.id} ${from.endpoint}`),
      to: at.get(`worker ${to.id} ${to.endpoint}`), weight: rate ? 1 : 0, isBlocks: true, isBack: true,
      label: total ? `${bytes(total)}/s` : "" };
  });
}

function ends(edge, isNarrow) {
  const { from, to } = edge;
  return isNarrow
    ? [from.x + from.wide / 2, from.y + from.high, to.x + to.wide / 2, to.y]
    // Two of one column have a line at their right.
    : [from.x + from.wide, from.y + from.high / 2, to.x + (from.x === to.x ? to.wide : 0), to.y + to.high / 2];
}

function drawEdge(path, edge, isNarrow) {
  const [x1, y1, x2, y2] = ends(edge, isNarrow).map((n) => Number(n.toFixed(1)));
  const d = isNarrow
    ? `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`
    : x1 === x2 ? `M${x1} ${y1}C${x1 + 34} ${y1} ${x1 + 34} ${y2} ${x2} ${y2}`
      : `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
  const kind = edge.isBroken ? "broken" : edge.weight ? "flowing" : "still";
  set(path, { d, class: `edge ${kind}${edge.isBlocks ? " blocks" : ""}${edge.isBack ? " back" : ""}`,
    "stroke-width": edge.weight ? Math.min(6, 1.4 + Math.log2(1 + edge.weight) * 0.7).toFixed(2) : 1 });
}

function drawLabel(text, edge, isNarrow) {
  const [x1, y1, x2, y2] = ends(edge, isNarrow);
  set(text, { class: edge.isBlocks ? "count blocks" : "count" });
  write(text, edge.label);
  if (edge.isBlocks) {
    set(text, { x: (x1 + 8).toFixed(1), y: (y1 - 9).toFixed(1) });
    return;
  }
  // Near the worker, where the lines of several frontends are apart.
  const part = edge.key.startsWith("clients") ? 0.5 : 0.72;
  const u = 1 - part;
  const mix = (a, b, c, d) => u * u * u * a + 3 * u * u * part * b + 3 * u * part * part * c + part ** 3 * d;
  const x = isNarrow ? mix(x1, x1, x2, x2) : mix(x1, (x1 + x2) / 2, (x1 + x2) / 2, x2);
  const y = isNarrow ? mix(y1, (y1 + y2) / 2, (y1 + y2) / 2, y2) : mix(y1, y1, y2, y2);
  set(text, { x: x.toFixed(1), y: (y - 5).toFixed(1) });
}
