// The page: one snapshot in, everything drawn.

import { Keyed, Rows, bytes, clock, el, figure, glyph, kindOf, lasting, percent, set, showState, write } from "./dom.js";
import { bar, spark } from "./charts.js";
import { Groups } from "./groups.js";
import { Happenings } from "./happenings.js";
import { Legs, requestButton } from "./legs.js";
import { Link } from "./link.js";
import { Tasks } from "./tasks.js";
import { Topology } from "./topology.js";
import { Traffic, grouped, serversOf } from "./traffic.js";

const $ = (selector) => document.querySelector(selector);
const UNDER_WAY_SHOWN = 14;

const traffic = new Traffic();
const topology = new Topology($("#topology .drawing"));
const happenings = new Happenings($("#happened"));
const legs = new Legs($("#legs"));
const tasks = new Tasks($("#tasks"));
const away = new Keyed($("#away ul"), () => el("li"));
const groups = new Groups(() => showInstances(last));
let last = null;

const openLegs = (id) => legs.open(id);
const nameOf = (id) => last.instances.find((each) => each.id === id)?.name ?? id.slice(0, 8);

const instances = new Rows($("#instances tbody"), [
  (row, cell) => { if (row.told) return groups.button(cell, row); write(cell, row.name); set(cell, { title: `instance ${row.id} of ${row.endpoint}, pid ${row.pid}${row.host ? ` on ${row.host}` : ""}` }); },
  (row, cell) => { showState(cell, row.state, row.problem); if (row.told) write(cell.children[1], row.told); },
  (row) => row.model || "–",
  (row) => (row.engine_facts ? String(row.engine_facts.running) : String(row.active ?? row.in_flight)) +
    (row.engine_facts?.paused ? ` (${row.engine_facts.paused} paused)` : ""),
  (row) => (row.engine_facts ? String(row.engine_facts.waiting) : "–"),
  (row) => figure(row.engine_facts ? row.tokens_per_s : null),
  (row) => figure(row.engine_facts ? row.prompt_tokens_per_s : null),
  (row, cell) => (row.blocks_total || row.kv_used === null
    ? bar(cell, row.blocks_used, row.blocks_total,
      row.blocks_total ? `${percent(row.blocks_used / row.blocks_total)} of ${figure(row.blocks_total)}` : "–")
    : bar(cell, row.kv_used, 1, percent(row.kv_used))),
  (row) => percent(row.hit_rate),
  (row) => (row.engine_facts ? String(row.engine_facts.preemptions) : "–"),
  (row) => row.addresses.join(", "),
], ["name", "state", "", "n", "n", "n", "n", "share", "n", "n", "address"]);

const models = new Rows($("#models tbody"), [
  (row) => row.name + (row.aliases.length ? ` (${row.aliases.join(", ")})` : ""),
  (row) => row.engine,
  (row, cell) => {
    showState(cell, row.instances >= row.registered ? "ready" : row.instances ? "registered" : "away", row.endpoint);
    write(cell.children[1], `${row.instances} of ${row.registered}${row.refused ? `, ${row.refused} refused` : ""}`);
  },
  (row) => (row.context_tokens_max ? figure(row.context_tokens_max) : "–"),
], ["name", "", "", "n"]);

const transfers = new Rows($("#transfers tbody"), [
  (row) => row.what, (row) => row.state, (row) => row.now, (row) => row.done, (row) => row.rate,
], ["name", "", "n", "n", "n"]);

const underway = new Rows($("#underway tbody"), [
  (row, cell) => requestButton(cell, row.id, openLegs),
  (row) => (row.instance ? nameOf(row.instance) : "–"),
  (row) => (row.attempts > 1 ? `${row.leg.replace(/^attempt$/, "")}, attempt ${row.attempts}`.replace(/^, /, "") : row.leg),
  (row) => lasting(last.at - row.start),
], ["", "", "", "n"]);

const failed = new Rows($("#failed tbody"), [
  (row) => row.last.outcome.replaceAll("_", " "),
  (row) => row.last.model || "–",
  (row) => figure(row.count),
  (row, cell) => requestButton(cell, row.last.id, openLegs),
  (row) => (row.last.instance ? nameOf(row.last.instance) : "–"),
  (row) => lasting(last.at - row.last.end),
], ["outcome", "model", "n", "", "", "n"]);

function show(snapshot) {
  last = snapshot;
  traffic.take(snapshot);
  snapshot.servers = serversOf(snapshot);
  snapshot.instances.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  showHealth(snapshot);
  showFigures(snapshot);
  topology.show(snapshot);
  happenings.show(snapshot.events, snapshot.at);
  showInstances(snapshot);
  models.show(snapshot.models, (row) => row.name);
  note("#models", [...snapshot.refused.map((each) => `refused: ${each}`), snapshot.models.length ? "" : "No model is served."].filter(Boolean).join("; "));
  const moved = transferRows(snapshot);
  transfers.show(moved, (row) => row.key);
  note("#transfers", moved.length ? "" : "No worker has KV memory to move, and no queue is open.");
  underway.show(snapshot.under_way.slice(0, UNDER_WAY_SHOWN), (row) => `${row.id} ${row.process}`);
  const more = Math.max(0, snapshot.under_way.length - UNDER_WAY_SHOWN) + snapshot.under_way_left_out;
  note("#underway", !snapshot.requests_max ? "No requests are kept (traces.requests_max is 0)." :
    more ? `${more} more` : snapshot.under_way.length ? "" : "None.");
  failed.show(grouped(snapshot.failed).slice(0, UNDER_WAY_SHOWN), (row) => row.key, (row) => (row.isOurs ? "wrong" : null));
  note("#failed", snapshot.failed.length ? "" : "None of the requests that are kept.");
  tasks.offer(snapshot);
  const own = snapshot.frontends.find((each) => each.is_own);
  write($("#about"), [snapshot.cluster, snapshot.etcd_text.split(";")[0], `seen by ${own?.name}${own?.host ? ` on ${own.host}` : ""}`,
    `${clock(snapshot.at)}`].filter(Boolean).join(" · "));
}

function showInstances(snapshot) {
  instances.show(groups.rows(snapshot), (row) => `${row.id} ${row.endpoint}`, (row) => (kindOf(row.state) === "bad" ? "wrong" : null));
  note("#instances", snapshot.instances_left_out ?
    `${snapshot.instances_left_out} are counted above and not listed; \`trinamo status --instances\` lists all` :
    snapshot.instances.length ? "" : "None is registered: start one with `trinamo worker`.");
}

function note(section, text) {
  const place = $(`${section} .note`);
  write(place, text);
  place.hidden = !text;
}

function showHealth(snapshot) {
  away.show(snapshot.away, (each) => each, (item, each) => write(item, each));
  $("#away").hidden = snapshot.away.length === 0;
  const kind = snapshot.away.length ? "bad" : "good";
  const words = snapshot.away.length === 0 ? "all answer" :
    snapshot.away.length === 1 ? "one thing is wrong" : `${snapshot.away.length} things are wrong`;
  const place = $("#health");
  set(place, { class: kind });
  write(place.children[0], glyph(kind));
  write(place.children[1], words);
  document.title = `${glyph(kind)} trinamo${snapshot.away.length ? `: ${words}` : ""}`;
}

function showFigures(snapshot) {
  const now = snapshot.traffic;
  const used = snapshot.groups.reduce((sum, each) => sum + each.blocks_used, 0);
  const total = snapshot.groups.reduce((sum, each) => sum + each.blocks_total, 0);
  value("#tokens", figure(now.tokens_per_s), traffic.series("tokens"));
  value("#requests", figure(now.requests_per_s), traffic.series("requests"));
  value("#flight", figure(now.in_flight), traffic.series("flight", 1), now.waiting ? `${figure(now.waiting)} more wait for a place` : "");
  value("#blocks", total ? percent(used / total) : "–", total ? traffic.series("blocks") : [], total ? `${figure(used)} of ${figure(total)}` : "");
  value("#failures", figure(now.failures_per_s), traffic.series("failures"));
  set($("#failures"), { class: now.failures_per_s ? "figure failing" : "figure" });
  latency("#first", now.first);
  latency("#gaps", now.gaps);
}

function value(place, text, points, more = "") {
  const output = $(`${place} output`);
  write(output, text);
  set(output, { "data-more": more || null });
  const words = `the last ${traffic.windowS / 60} minutes; now ${text}${more ? `, ${more}` : ""}`;
  spark($(`${place} .spark`), points, last.at, traffic.windowS, points.length ? words : "nothing is known");
}

function latency(place, found) {
  const output = $(`${place} output`);
  write(output, found ? lasting(found.p50) : "–");
  set(output, { "data-more": found ? `median; 95 % within ${lasting(found.p95)}` : null });
  write($(`${place} .note`), !found ? "no answer yet" : found.isRecent ? "of the last minute" : "since the start");
}

function transferRows(snapshot) {
  const byBackend = new Map();
  for (const instance of snapshot.instances) {
    for (const each of instance.backends) {
      const row = byBackend.get(each.backend) ?? { name: each.backend, states: new Set(), now: 0, done: 0, rate: 0 };
      row.states.add(each.state);
      row.now += each.in_flight;
      row.done += each.done;
      row.rate += each.bytes_per_s;
      byBackend.set(each.backend, row);
    }
  }
  const fallbacks = snapshot.instances.reduce((sum, each) => sum + each.fallbacks, 0);
  const quarantined = snapshot.instances.reduce((sum, each) => sum + each.quarantined_blocks, 0);
  const rows = [...byBackend.values()].map((each) => ({ key: `transfer ${each.name}`, what: `blocks by ${each.name}`,
    state: [...each.states].join(", "), now: figure(each.now), done: figure(each.done), rate: `${bytes(each.rate)}/s` }));
  if (fallbacks || quarantined) {
    rows.push({ key: "trouble", what: "over another backend", state: quarantined ? `${quarantined} blocks in quarantine` : "",
      now: "", done: figure(fallbacks), rate: "" });
  }
  for (const { name, facts } of snapshot.queues) {
    rows.push({ key: `queue ${name}`, what: `queue ${name}`, rate: "", done: "",
      state: `${facts.leased} leased${facts.dead ? `, ${facts.dead} dead` : ""}` +
        (facts.ready ? `, oldest ${lasting(facts.oldest_age_s)}` : ""), now: `${facts.ready} wait` });
  }
  return rows;
}

function tellLink(state) {
  const told = {
    live: ["good", "●", "live"],
    away: ["bad", "✕", last ? `the frontend is away; this is ${clock(last.at)}. Asking again` : "the frontend does not answer. Asking again"],
    silent: ["bad", "✕", "no news; asking again"],
    hidden: ["off", "○", "paused while hidden"],
  }[state];
  document.body.dataset.state = state;
  const place = $("#link");
  set(place, { class: told[0] });
  write(place.children[0], told[1]);
  write(place.children[1], told[2]);
  if (state === "away" || state === "silent") document.title = "✕ trinamo: the frontend is away";
}

new Link("dashboard/events", show, tellLink);
