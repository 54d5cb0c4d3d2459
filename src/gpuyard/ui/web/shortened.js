/**
 * Text that is shortened in its middle where it does not fit: names and commands often differ only at their end. The end
 * is an element that does not shrink.
 */

import {el, say, set} from "./dom.js";

/** The characters at the end of a name and of a command that are always shown. */
export const NAME_END = 10;
export const COMMAND_END = 22;

export const makeShortened = (name, attributes = {}) =>
  el(name, {...attributes, class: "shortened"}, el("span"), el("span"));

/** `least` is the number of characters at the end that are always shown. */
export function sayShortened(node, text, least) {
  const line = String(text ?? "").replace(/\s+/g, " ");
  const cut = line.length > 2 * least ? line.length - least : line.length;
  say(node.firstChild, line.slice(0, cut));
  say(node.lastChild, line.slice(cut));
  set(node, "title", line || null);
  // Without a label, a screen reader would read two words.
  if (node.localName === "a") set(node, "aria-label", line);
}
