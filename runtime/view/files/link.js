// The stream of snapshots: kept while the page is seen, taken up again by itself.

const RETRY_MS = [500, 1000, 2000, 3000, 5000];
const SILENT_MS = 4500;
const LOOKS_MISSED = 3.5;
const HIDDEN_MS = 10000;

export class Link {
  // `onSnapshot` gets each snapshot, `onState` one of `live`, `away`, `silent` and `hidden`.
  constructor(url, onSnapshot, onState) {
    this.url = url;
    this.onSnapshot = onSnapshot;
    this.onState = onState;
    this.failures = 0;
    this.patienceMs = SILENT_MS;
    this.stream = null;
    this.timers = {};
    document.addEventListener("visibilitychange", () => this.look());
    window.addEventListener("online", () => this.open());
    this.open();
  }

  look() {
    // A browser opens six streams to one address: a page that nobody sees leaves its place to others.
    if (document.hidden) {
      this.after("hide", HIDDEN_MS, () => { this.close(); this.onState("hidden"); });
    } else {
      clearTimeout(this.timers.hide);
      if (!this.stream) this.open();
    }
  }

  open() {
    this.close();
    if (document.hidden && this.failures) return;
    this.stream = new EventSource(this.url);
    this.stream.addEventListener("snapshot", (event) => {
      this.failures = 0;
      const snapshot = JSON.parse(event.data);
      // Of a large cluster looks are rarer.
      this.patienceMs = Math.max(SILENT_MS, snapshot.interval_s * 1000 * LOOKS_MISSED);
      this.onState("live");
      this.listen();
      this.onSnapshot(snapshot);
    });
    // The browser's own way gives up for good at an answer that is no stream.
    this.stream.addEventListener("error", () => this.again());
    this.listen();
  }

  listen() {
    this.after("silence", this.patienceMs, () => { this.onState("silent"); this.again(); });
  }

  again() {
    this.close();
    this.onState("away");
    const wait = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
    this.failures += 1;
    this.after("retry", wait * (0.8 + 0.4 * Math.random()), () => this.open());
  }

  close() {
    clearTimeout(this.timers.silence);
    clearTimeout(this.timers.retry);
    this.stream?.close();
    this.stream = null;
  }

  after(name, ms, act) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(act, ms);
  }
}
