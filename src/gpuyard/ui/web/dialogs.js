/** Dialogs, notes and tooltips. */

import {byId, el, say} from "./dom.js";

const NOTE_MS = 6000;
const KEYS = [
  ["/", "search the queue"],
  ["j  k", "next and previous job (or ↓ ↑)"],
  ["Enter", "open the job"],
  ["x", "select the job"],
  ["n", "submit a job"],
  ["Esc", "close, go back"],
  ["?", "show these keys"],
];

/** Show a dialog; resolves to the value of the button that closed it, "" for Escape. */
function ask(title, body, buttons) {
  const dialog = el("dialog", {"aria-labelledby": "dialog-title"});
  const form = el(
    "form",
    {method: "dialog"},
    el("h2", {id: "dialog-title", text: title}),
    body,
    el("div", {class: "row end"}, buttons)
  );
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

const button = (word, value, kind = "") => el("button", {type: "submit", value, class: kind, text: word});

export async function confirm(title, text, word, kind = "primary") {
  const buttons = [button("Keep as it is", "", "quiet"), button(word, "yes", kind)];
  return (await ask(title, el("p", {text}), buttons)) === "yes";
}

/** A whole number, or null. */
export async function askPriority(before) {
  const input =
    el("input", {type: "number", step: "1", min: "-1000000", max: "1000000", value: before, required: true});
  const body = el("label", {class: "field"}, el("span", {text: "Priority"}), input, el("small", {
                    text: "Higher starts earlier. Default: 0."
                  }));
  const answer = await ask("Change the priority", body, [
    el("button", {type: "submit", value: "", class: "quiet", formnovalidate: true, text: "Keep as it is"}),
    button("Change", "yes", "primary"),
  ]);
  return answer === "yes" ? Number(input.value) : null;
}

export function showKeys() {
  const rows = KEYS.map(
    ([key, what]) =>
      el("div", {}, el("dt", {}, key.split("  ").map((each) => el("kbd", {text: each}))), el("dd", {text: what}))
  );
  return ask("Keys", el("dl", {class: "keys"}, rows), [button("Close", "", "quiet")]);
}

/** A short note that disappears after a while; an error stays until it is closed. */
export function note(text, hint = "", isError = false) {
  const node = el(
    "div",
    {class: "toast", "data-tone": isError ? "bad" : "good"},
    el("p", {}, el("span", {text}), hint && el("small", {text: hint}))
  );
  node.append(el(
    "button",
    {type: "button", class: "quiet icon", "aria-label": "Close this note", text: "×", onclick: () => node.remove()}
  ));
  const before =
    [...byId("toasts").children].find((other) => other.firstChild.textContent === node.firstChild.textContent);
  before?.remove();
  byId("toasts").append(node);
  if (!isError) setTimeout(() => node.remove(), NOTE_MS);
}

export const noteRefusal = (error) => note(error.message, error.hint ?? "", true);

const tip = () => byId("tip");

/** A tooltip beside the element that is hovered or focused. */
export function showTip(target, lines) {
  const node = tip();
  node.replaceChildren(...lines.map((line, place) => el(place ? "div" : "strong", {text: line})));
  node.hidden = false;
  const box = target.getBoundingClientRect();
  const own = node.getBoundingClientRect();
  const left = Math.min(
    Math.max(8, box.left + box.width / 2 - own.width / 2), document.documentElement.clientWidth - own.width - 8
  );
  const above = box.top - own.height - 8;
  node.style.left = `${left}px`;
  node.style.top = `${above < 8 ? box.bottom + 8 : above}px`;
}

export const hideTip = () => {
  tip().hidden = true;
};

/** Announce a text to screen readers. */
export const announce = (text) => say(byId("announcement"), text);
