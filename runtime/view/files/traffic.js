// What all frontends together do: sums, rates over some seconds, the last minutes, and how long it takes.

const WINDOWS_S = [120, 300, 900];
const RATE_S = 5;
const LATENCY_S = 60;
const MINUTE = ["at", "requests", "failures", "tokens", "flight"];

export class Traffic {
  constructor() {
    this.points = [];
    this.took = [];
  }

  // Takes a snapshot, and gives it `traffic`.
  take(snapshot) {
    this.smooth(snapshot);
    const sum = (name) => snapshot.frontends.reduce((total, each) => total + each[name], 0);
    const blocks = (name) => snapshot.groups.reduce((total, each) => total + each[name], 0);
    const total = blocks("blocks_total");
    // The first look of a frontend has no rates yet.
    const now = { at: snapshot.at, flight: sum("in_flight"), blocks: total ? (blocks("blocks_used") / total) * 100 : null,
      requests: sum("requests_per_s"), failures: sum("failures_per_s"), tokens: sum("tokens_per_s") };
    if (this.points.length && this.points[this.points.length - 1].at > now.at) this.points = [];
    this.points = [...this.points.filter((each) => each.at > now.at - WINDOWS_S[2]), now];
    this.minutes = minutesOf(snapshot.frontends).filter((each) => each.at > now.at - WINDOWS_S[2]);
    const oldest = Math.min(now.at, this.points[0].at, ...this.minutes.filter((each) => each.requests).map((each) => each.at));
    this.windowS = WINDOWS_S.find((each) => now.at - oldest < each) ?? WINDOWS_S[2];
    this.within = Math.max(5, snapshot.interval_s * 3);
    const took = { at: now.at, first: added(snapshot.frontends, "first_token"), gaps: added(snapshot.frontends, "gaps") };
    this.took = [...this.took.filter((each) => each.at > now.at - LATENCY_S && each.at < now.at), took];
    snapshot.traffic = { in_flight: now.flight, waiting: sum("waiting"), requests_per_s: now.requests,
      failures_per_s: now.failures, tokens_per_s: now.tokens,
      first: this.latency("first"), gaps: this.latency("gaps") };
  }

  // A rate is of the last seconds: of one alone it is 0 as often as not where requests are few.
  smooth(snapshot) {
    const rates = ["requests_per_s", "failures_per_s", "tokens_per_s"];
    this.looks = [...(this.looks ?? []).filter((each) => each.at > snapshot.at - RATE_S && each.at < snapshot.at),
      { at: snapshot.at, by: new Map(snapshot.frontends.map((each) => [each.name, { ...each }])) }];
    for (const each of snapshot.frontends) {
      const told = this.looks.map((look) => look.by.get(each.name)).filter(Boolean);
      for (const name of rates) each[name] = told.reduce((all, one) => all + one[name], 0) / told.length;
    }
  }

  // One line: each minute before this page was opened, then each look.
  series(name, perMinute = 60) {
    const from = this.points[0]?.at ?? Infinity;
    const before = (this.minutes ?? []).filter((each) => each.at + 60 <= from && name in each)
      .map((each) => ({ at: each.at + 30, value: each[name] / perMinute, within: 95 }));
    const since = this.points.filter((each) => each[name] !== null).map((each) => ({ at: each.at, value: each[name], within: this.within }));
    if (since.length) since[0].within = 95;
    return [...before, ...since];
  }

  // The median and the 95th percentile of the last minute, or of all there was; null if there was nothing.
  latency(name) {
    const now = this.took[this.took.length - 1][name], before = this.took[0][name];
    const recent = new Map([...now].map(([bound, count]) => [bound, count - (before.get(bound) ?? 0)]));
    const isRecent = (recent.get(Infinity) ?? 0) > 0;
    const counts = isRecent ? recent : now;
    if (!(counts.get(Infinity) > 0)) return null;
    return { p50: quantile(counts, 0.5), p95: quantile(counts, 0.95), isRecent };
  }
}

function minutesOf(frontends) {
  const found = new Map();
  for (const { minutes } of frontends) {
    for (const row of minutes) {
      const all = found.get(row[0]) ?? { at: row[0], requests: 0, failures: 0, tokens: 0, flight: 0 };
      MINUTE.slice(1).forEach((name, n) => { all[name] += row[n + 1]; });
      found.set(row[0], all);
    }
  }
  return [...found.values()].sort((a, b) => a.at - b.at);
}

// How many took at most so long, over all frontends, by that bound in seconds.
function added(frontends, name) {
  const found = new Map();
  for (const each of frontends) {
    for (const [bound, count] of Object.entries(each[name])) {
      const key = bound === "+Inf" ? Infinity : Number(bound);
      found.set(key, (found.get(key) ?? 0) + count);
    }
  }
  return new Map([...found].sort((a, b) => a[0] - b[0]));
}

function quantile(counts, part) {
  const wanted = part * counts.get(Infinity);
  let low = 0, below = 0;
  for (const [bound, count] of counts) {
    if (count >= wanted) return bound === Infinity ? low : low + (bound - low) * (count > below ? (wanted - below) / (count - below) : 0);
    [low, below] = [bound, count];
  }
  return low;
}

// etcd and NATS, as the frontend that tells this sees them.
export function serversOf(snapshot) {
  const { control, broker, addresses } = snapshot, found = [];
  if (control) {
    found.push({ name: "etcd", addresses: addresses.etcd, is_connected: control.is_connected && !snapshot.is_last_known,
      text: control.is_connected ? `${control.watches} watches` : `silent for ${control.silence_s.toFixed(0)} s` });
  }
  if (broker) {
    const { waiting_messages: wait, dropped_outgoing: dropped } = broker;
    found.push({ name: "NATS", addresses: addresses.NATS, is_connected: broker.is_connected,
      text: wait || dropped ? `${wait} messages wait, ${dropped} were dropped` : "no message waits" });
  }
  return found;
}

// What is the client's to mend; everything else is ours.
export const CLIENTS = new Set(["model_not_found", "invalid_request", "path_not_found", "method_not_allowed", "invalid_api_key",
  "rate_limit_exceeded", "body_too_large", "body_timeout", "unsupported_media_type", "client_disconnect", "cancelled",
  "context_length_exceeded", "malformed_request", "host_not_allowed"]);

// Failures by outcome and model, our own first, then the most frequent.
export function grouped(failed) {
  const found = new Map();
  for (const each of failed) {
    const key = `${each.outcome} ${each.model}`;
    const group = found.get(key) ?? { key, last: each, count: 0, isOurs: !CLIENTS.has(each.outcome) };
    group.count += 1;
    if (each.start > group.last.start) group.last = each;
    found.set(key, group);
  }
  return [...found.values()].sort((a, b) => b.isOurs - a.isOurs || b.count - a.count);
}
