// Of many instances, those of one model and role are one row and one box, until somebody opens it.

import { el, figure, kindOf, set, write } from "./dom.js";

export function isMany(snapshot) {
  return snapshot.instances.length + snapshot.instances_left_out > snapshot.singly_max;
}

// The same snapshot with such rows in place of the instances.
export function byGroup(snapshot) {
  const moves = new Map(snapshot.groups.map((each) => [each.key, {}]));
  const keys = new Map(snapshot.instances.map((each) => [each.id, each.group]));
  for (const each of snapshot.instances) {
    for (const [peer, rate] of Object.entries(each.moves)) {
      const own = moves.get(each.group), other = keys.get(peer);
      if (own && other && other !== each.group) own[other] = (own[other] ?? 0) + rate;
    }
  }
  return { ...snapshot, instances: snapshot.groups.map((each) => rowOf(each, moves.get(each.key))),
    frontends: snapshot.frontends.map((each) => ({ ...each, streams: each.streams_by_group })) };
}

function rowOf(group, moves) {
  const states = Object.entries(group.states);
  const well = states.filter(([state]) => kindOf(state) === "good").length;
  return { ...group, id: group.key, endpoint: "", moves, kv_used: null, hit_rate: null, problem: "", backends: [], addresses: [],
    name: `${figure(group.instances)} × ${group.model || "no model"}${group.role ? `, ${group.role}` : ""}`,
    state: well === states.length ? "ready" : well ? "degraded" : states[0][0],
    told: states.map(([state, count]) => `${figure(count)} ${state}`).join(", "),
    engine_facts: { running: group.running, waiting: group.waiting, paused: 0, preemptions: "–" } };
}

// Which groups are open, and the rows of the table with their instances, those first that are not well.
export class Groups {
  constructor(changed) {
    this.open = new Set();
    this.changed = changed;
  }

  rows(snapshot) {
    if (!isMany(snapshot)) return snapshot.instances;
    const order = (each) => (kindOf(each.state) === "good" ? 1 : 0);
    const ofGroup = (key) => snapshot.instances.filter((each) => each.group === key).sort((a, b) => order(a) - order(b));
    return byGroup(snapshot).instances.flatMap((each) => [each, ...(this.open.has(each.key) ? ofGroup(each.key) : [])]);
  }

  // The name of a group is what opens it.
  button(cell, row) {
    let button = cell.firstElementChild;
    if (!button) {
      button = el("button", { type: "button", class: "group" });
      button.addEventListener("click", () => {
        if (!this.open.delete(row.key)) this.open.add(row.key);
        this.changed();
      });
      cell.append(button);
    }
    const isOpen = this.open.has(row.key);
    set(button, { "aria-expanded": String(isOpen) });
    write(button, `${isOpen ? "▾" : "▸"} ${row.name}`);
  }
}
