// One request over all processes: its legs on one axis, and the same as a table.

import { Rows, el, lasting, set, svg, write } from "./dom.js";
import { CLIENTS } from "./traffic.js";

const KINDS = ["http", "attempt", "worker", "engine", "queue", "prefill", "transfer", "reservation"];
const GOOD = ["success", "adopted"];

export class Legs {
  constructor(dialog) {
    this.dialog = dialog;
    this.title = dialog.querySelector("h2");
    this.note = dialog.querySelector(".note");
    this.place = dialog.querySelector(".drawing");
    this.rows = new Rows(dialog.querySelector("tbody"), [
      (row) => row.process, (row) => row.name, (row) => row.start.toFixed(2), (row) => row.took.toFixed(2),
      (row) => row.facts], ["", "", "n", "n", "facts"]);
    // The row of a request that has ended is gone by the time its dialog is closed.
    dialog.addEventListener("close", () => {
      const at = document.activeElement;
      if (at === document.body || dialog.contains(at)) this.opener?.focus();
    });
  }

  async open(id) {
    this.opener = document.activeElement.closest("[tabindex]");
    write(this.title, `Request ${id}`);
    write(this.note, "asking the processes …");
    this.place.replaceChildren();
    this.rows.show([], () => "");
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const answer = await fetch(`dashboard/requests/${encodeURIComponent(id)}`);
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      this.draw(await answer.json());
    } catch (error) {
      write(this.note, `The frontend does not tell: ${error.message}`);
    }
  }

  draw(view) {
    write(this.title, `Request ${view.request_id}`);
    const away = view.away.length ? `; ${view.away.join("; ")}` : "";
    if (!view.legs.length) {
      write(this.note, `None of ${view.asked} processes has kept it: the newest requests take the place of the oldest${away}.`);
      return;
    }
    const began = Math.min(...view.legs.map((each) => each.leg.start));
    const ended = Math.max(...view.legs.map((each) => each.leg.end ?? Math.min(view.now, began + 3600)));
    const rows = view.legs.map((each, n) => rowOf(each, n, began, ended));
    const took = ended - began;
    write(this.note, `${rows.length} legs in ${lasting(took)}, of ${view.asked} processes asked${away}`);
    this.place.append(picture(rows, Math.max(took * 1000, 0.001), Math.max(300, this.place.clientWidth)));
    this.rows.show(rows, (row) => row.key, (row) => (row.isBad ? "wrong" : null));
  }
}

function rowOf({ process, leg }, n, began, ended) {
  const start = (leg.start - began) * 1000, end = ((leg.end ?? ended) - began) * 1000;
  const outcome = leg.facts.outcome ?? "";
  const isGood = outcome === "" || GOOD.includes(outcome);
  const isBad = !isGood && !CLIENTS.has(outcome);
  const told = [isGood ? "" : outcome, leg.end === null ? "under way" : "",
    ...leg.marks.map(([name, at]) => `${name} +${((at - leg.start) * 1000).toFixed(2)}`),
    ...Object.entries(leg.facts).filter(([name, value]) => name !== "outcome" && value !== "")
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`)];
  return { key: String(n), process, name: leg.name, start, took: end - start, isBad, isOpen: leg.end === null,
    marks: leg.marks.map(([, at]) => (at - began) * 1000), facts: told.filter(Boolean).join(", ") };
}

function picture(rows, total, width) {
  const isNarrow = width < 520;
  const left = isNarrow ? 0 : 190, row = isNarrow ? 34 : 24, top = 22;
  const x = (ms) => left + ((width - left - 8) * ms) / total;
  const chart = svg("svg", { viewBox: `0 0 ${width} ${top + rows.length * row + 6}`, width,
    height: top + rows.length * row + 6, role: "img", "aria-label": "legs on a time line; the table has the same" });
  for (const part of isNarrow ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
    const at = x(total * part);
    chart.append(svg("line", { x1: at, x2: at, y1: 16, y2: top + rows.length * row, class: "tick" }));
    const text = svg("text", { x: at, y: 11, class: "tick", "text-anchor": part === 1 ? "end" : part === 0 ? "start" : "middle" });
    text.textContent = lasting((total * part) / 1000);
    chart.append(text);
  }
  rows.forEach((each, n) => {
    const y = top + n * row, bar = isNarrow ? y + 16 : y + 4;
    const label = svg("text", { x: 0, y: isNarrow ? y + 12 : y + 16, class: "who" });
    label.textContent = `${each.process} · ${each.name}`.slice(0, isNarrow ? 60 : 27);
    const kind = KINDS.indexOf(each.name);
    const title = svg("title");
    title.textContent = `${each.name}: ${each.facts}`;
    chart.append(label, svg("rect", { x: x(each.start).toFixed(1), y: bar, rx: 3, height: isNarrow ? 12 : 15,
      width: Math.max(2, x(each.start + each.took) - x(each.start)).toFixed(1),
      class: `leg kind-${kind}${each.isBad ? " wrong" : ""}${each.isOpen ? " open" : ""}` }, title));
    for (const at of each.marks) {
      chart.append(svg("line", { x1: x(at), x2: x(at), y1: bar - 2, y2: bar + (isNarrow ? 14 : 17), class: "reached" }));
    }
  });
  return chart;
}

// A button that opens the legs of a request; fills a cell.
export function requestButton(cell, id, open) {
  let button = cell.firstElementChild;
  if (!button) {
    button = el("button", { type: "button", class: "id" });
    button.addEventListener("click", () => open(button.dataset.id));
    cell.append(button);
  }
  button.dataset.id = id;
  write(button, id.length > 20 ? `…${id.slice(-12)}` : id);
  set(button, { title: id, "aria-label": `Legs of request ${id}` });
}
