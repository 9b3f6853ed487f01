// The nurseries of one process and the tasks in them, as they are when somebody asks.

import { Keyed, el, lasting, write } from "./dom.js";

const ROWS_MAX = 1000;

export class Tasks {
  constructor(section) {
    this.note = section.querySelector(".note");
    this.select = section.querySelector("select");
    this.key = section.querySelector(".key");
    this.tree = section.querySelector(".tree");
    this.options = new Keyed(this.select, () => el("option"));
    section.querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); this.look(); });
    this.select.addEventListener("change", () => this.look());
  }

  // Whose tasks may be asked for: this frontend's, the workers', and other frontends'.
  offer(snapshot) {
    const found = new Map([["", "this frontend"]]);
    for (const each of snapshot.instances) if (each.addresses.length && each.role !== "upstream") found.set(each.id, each.name);
    for (const each of snapshot.frontends) if (!each.is_own) found.set(`${each.name} ${each.pid}`, each.name);
    this.options.show([...found], ([id]) => id, (option, [id, name]) => { option.value = id; write(option, name); });
  }

  async look() {
    const id = this.select.value, key = this.key.querySelector("input").value;
    write(this.note, "asking …");
    try {
      const answer = await fetch(id ? `tasks/${encodeURIComponent(id)}` : "tasks",
        { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
      const told = await answer.json();
      if ([401, 403].includes(answer.status)) this.key.hidden = false;
      if (!answer.ok) throw new Error(told.error.message);
      this.left = ROWS_MAX;
      this.tree.replaceChildren(this.row(told.root));
      const more = this.left ? "" : `; the first ${ROWS_MAX} rows are shown, \`trinamo tasks --json\` has all`;
      write(this.note, `${told.tasks} tasks of pid ${told.pid}${more}`);
    } catch (error) {
      this.tree.replaceChildren();
      write(this.note, `It does not tell: ${error.message}`);
    }
  }

  row(task) {
    this.left -= 1;
    const waits = task.waits_in ? `waits in ${task.waits_in}` : "runs";
    const since = task.since_s >= 1 ? ` for ${lasting(task.since_s)}` : "";
    const item = el("li", {}, el("b", {}, `${task.name}${task.count > 1 ? ` ×${task.count}` : ""}`), ` ${waits}${since} `,
      task.place ? el("code", {}, `${task.place} ${task.function}`) : null);
    for (const nursery of task.nurseries ?? []) {
      const below = el("ul", {}, nursery.is_cancelled ? el("li", {}, "cancelled:") : null);
      for (const each of nursery.tasks ?? []) if (this.left > 0) below.append(this.row(each));
      item.append(below);
    }
    return item;
  }
}
