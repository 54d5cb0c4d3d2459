/** Requests to the daemon, and its event streams. One stream carries all that a view shows; the page never polls. */

const API = "/v1";
const LONGEST_REST_MS = 15000;

/** An error answer of the daemon, with its hint. */
export class Refusal extends Error {
  constructor(status, answer) {
    super(answer.error || `the daemon answered with ${status}`);
    this.status = status;
    this.hint = answer.hint || "";
  }
}

export const get = (path) => ask(path, {});

export const post = (path, body = {}) =>
  ask(path, {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)});

async function ask(path, options) {
  let response;
  try {
    response = await fetch(API + path, options);
  } catch (error) {
    throw new Refusal(
      0, {error: "the daemon does not answer", hint: `is it running? \`gpuyard daemon start\` (${error.message})`}
    );
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refusal(response.status, answer);
  return answer;
}

export const queryOf = (values) =>
  new URLSearchParams(
    Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined)
  ).toString();

/**
 * A stream that is closed while the page is hidden, and that reconnects: the browser does so after a broken connection,
 * this class after a refusal.
 */
export class Stream {
  constructor(path, {onEvent, onOpen, onBreak}) {
    Object.assign(this, {path, onEvent, onOpen, onBreak, source: null, timer: 0, rest: 1000});
    this.onVisibility = () => (document.hidden ? this.stop() : this.open());
    document.addEventListener("visibilitychange", this.onVisibility);
    if (!document.hidden) this.open();
  }

  open() {
    this.stop();
    this.source = new EventSource(API + this.path);
    this.source.onopen = () => {
      this.rest = 1000;
      this.onOpen();
    };
    this.source.onmessage = (event) => this.onEvent(JSON.parse(event.data));
    this.source.onerror = () => this.onBroken();
  }

  onBroken() {
    this.onBreak();
    if (this.source.readyState !== EventSource.CLOSED) return;
    this.timer = setTimeout(() => this.open(), this.rest);
    this.rest = Math.min(2 * this.rest, LONGEST_REST_MS);
  }

  stop() {
    clearTimeout(this.timer);
    this.source?.close();
  }

  close() {
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.stop();
  }
}

/** The current subscriptions: targets and their listeners. */
export class Live {
  constructor(onConnection) {
    this.onConnection = onConnection;
  }

  watch(handlers) {
    const path = `/events?watch=${encodeURIComponent([...handlers.keys()].join(" "))}`;
    this.handlers = handlers;
    if (this.stream?.path === path) return;
    this.stream?.close();
    this.stream = new Stream(path, {
      onEvent: ({watch: target, answer}) => this.handlers.get(target)?.(answer),
      onOpen: () => this.onConnection("live"),
      onBreak: () => this.onConnection("reconnecting"),
    });
  }
}
