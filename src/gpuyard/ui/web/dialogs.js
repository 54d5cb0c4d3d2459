/** Dialogs, notes and tooltips. */

import {openModal} from "./modal.js";
import {button, byId, el, say, set} from "./dom.js";

const NOTE_MS = 6000;
const KEYS = [
  ["/", "search the queue"],
  ["j  k", "next and previous job (or ↓ ↑)"],
  ["Enter", "open the job"],
  ["x", "select the job"],
  ["g", "open or close all GPUs"],
  ["t", "open or close the timeline"],
  ["n", "submit a job"],
  ["Esc", "close, go back (Back closes a dialog too)"],
  ["?", "show these keys"],
];

/** Show a dialog; resolves to the value of the button that closed it, "" for Escape. */
function ask(title, body, buttons) {
  const row = el("div", {class: "row end"}, buttons);
  const form = el("form", {method: "dialog"}, el("h2", {id: "dialog-title", text: title}), body, row);
  return openModal(el("dialog", {"aria-labelledby": "dialog-title"}, form));
}

/** A button that closes the dialog. */
const closer = (word, value, kind) =>
  el("button", {type: "submit", value, class: kind, formnovalidate: value === "", text: word});

/** Ask for a decision; `body` says more about it. */
export const decide = async (title, body, word, kind) =>
  (await ask(title, body, [closer("Keep as it is", "", "quiet"), closer(word, "yes", kind)])) === "yes";

/** A whole number, or null. */
export async function askPriority(before) {
  const input =
    el("input", {type: "number", step: "1", min: "-1000000", max: "1000000", value: before, required: true});
  const hint = el("small", {text: "Higher starts earlier. Default: 0."});
  const body = el("label", {class: "field"}, el("span", {text: "Priority"}), input, hint);
  return (await decide("Change the priority", body, "Change", "primary")) ? Number(input.value) : null;
}

export function showKeys() {
  const rows = KEYS.map(
    ([key, what]) =>
      el("div", {}, el("dt", {}, key.split("  ").map((each) => el("kbd", {text: each}))), el("dd", {text: what}))
  );
  return ask("Keys", el("dl", {class: "keys"}, rows), [closer("Close", "", "quiet")]);
}

/** A short note that disappears after a while; an error stays until it is closed. */
export function note(text, hint = "", isError = false) {
  const close = button("×", () => node.remove(), "quiet icon");
  set(close, "aria-label", "Close this note");
  const words = el("p", {}, el("span", {message: text}), hint && el("small", {message: hint}));
  const node = el("div", {class: "toast", "data-tone": isError ? "bad" : "good"}, words, close);
  [...byId("toasts").children].find((other) => other.firstChild.textContent === words.textContent)?.remove();
  byId("toasts").append(node);
  if (!isError) setTimeout(() => node.remove(), NOTE_MS);
}

export const noteRefusal = (error) => note(error.message, error.hint ?? "", true);

/** A tooltip beside the element that is hovered or focused. */
export function showTip(target, lines) {
  const node = byId("tip");
  node.replaceChildren(...lines.map((line, place) => el(place ? "div" : "strong", {text: line})));
  node.hidden = false;
  const [box, own] = [target.getBoundingClientRect(), node.getBoundingClientRect()];
  const middle = Math.max(8, box.left + box.width / 2 - own.width / 2);
  const above = box.top - own.height - 8;
  node.style.left = `${Math.min(middle, document.documentElement.clientWidth - own.width - 8)}px`;
  node.style.top = `${above < 8 ? box.bottom + 8 : above}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}

/** Announce a text to screen readers. */
export const announce = (text) => say(byId("announcement"), text);
