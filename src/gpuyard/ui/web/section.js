/** A panel with a heading, as the page of a job has them. */

import {el} from "./dom.js";

/** `beside` is on the line of the heading, `kind` a CSS class; `half` takes half of a wide window. */
export function makeSection(word, id, body, {beside = null, kind = ""} = {}) {
  const head = el("div", {class: "parthead"}, el("h3", {id, text: word}), beside);
  return el("section", {class: `panel ${kind}`, "aria-labelledby": id}, head, body);
}
