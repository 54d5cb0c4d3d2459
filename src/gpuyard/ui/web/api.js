/** Requests to the daemon, and its event streams. One stream carries all that a view shows; the page never polls. */

const API = "/v1";
const SHORTEST_REST_MS = 1000;
const LONGEST_REST_MS = 15000;
const DATA = "data: ";
const TOKEN = "token";
const ASKED = "which token?";
const TABS_ANSWER_WITHIN_MS = 300;

/**
 * The token, from the address that `gpuyard web` prints. It stays in this tab, and another tab of this page gets it when
 * it is opened. Both are by origin: unlike a cookie, no server on another port of this host gets it.
 */
const tabs = new BroadcastChannel("gpuyard");
const token = takeToken() ?? askTabs();
tabs.addEventListener("message", ({data}) => {
  const known = sessionStorage.getItem(TOKEN);
  if (data === ASKED && known) tabs.postMessage({token: known});
});

function takeToken() {
  const address = new URL(window.location.href);
  const given = address.searchParams.get(TOKEN);
  if (given !== null) {
    sessionStorage.setItem(TOKEN, given);
    window.history.replaceState(null, "", address.pathname + address.hash);
  }
  return sessionStorage.getItem(TOKEN);
}

function askTabs() {
  return new Promise((resolve) => {
    setTimeout(() => resolve(""), TABS_ANSWER_WITHIN_MS);
    tabs.addEventListener("message", ({data}) => {
      if (!data.token) return;
      sessionStorage.setItem(TOKEN, data.token);
      resolve(data.token);
    });
    tabs.postMessage(ASKED);
  });
}

async function authorization() {
  const known = await token;
  return known ? {Authorization: `Bearer ${known}`} : {};
}

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
    response = await fetch(API + path, {...options, headers: {...options.headers, ...(await authorization())}});
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

/** A stream that is closed while the page is hidden, and that reconnects: later after each refusal. */
export class Stream {
  constructor(path, {onEvent, onOpen, onBreak}) {
    Object.assign(this, {path, onEvent, onOpen, onBreak, reading: null, timer: 0, rest: SHORTEST_REST_MS});
    this.onVisibility = () => (document.hidden ? this.stop() : this.open());
    document.addEventListener("visibilitychange", this.onVisibility);
    if (!document.hidden) this.open();
  }

  async open() {
    this.stop();
    const {signal} = (this.reading = new AbortController());
    let isRefused = false;
    try {
      const response = await fetch(API + this.path, {headers: await authorization(), signal});
      isRefused = !response.ok;
      if (response.ok) await this.read(response.body.pipeThrough(new TextDecoderStream()).getReader(), signal);
    } catch {
      // The connection broke, or this was stopped.
    }
    if (signal.aborted) return;
    this.onBreak();
    this.timer = setTimeout(() => this.open(), this.rest);
    this.rest = isRefused ? Math.min(2 * this.rest, LONGEST_REST_MS) : SHORTEST_REST_MS;
  }

  async read(reader, signal) {
    this.rest = SHORTEST_REST_MS;
    this.onOpen();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done || signal.aborted) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events)
        if (event.startsWith(DATA)) queueMicrotask(() => signal.aborted || this.onEvent(JSON.parse(event.slice(DATA.length))));
    }
  }

  stop() {
    clearTimeout(this.timer);
    this.reading?.abort();
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
