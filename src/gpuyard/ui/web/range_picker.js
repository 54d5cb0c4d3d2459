/** A row of buttons that selects a time range. */

import {el, set} from "./dom.js";

export function makeSpans(parent, spans, chosen, choose) {
  const press = (span) => {
    for (const button of parent.children) set(button, "aria-pressed", String(button.textContent === span));
  };
  parent.append(
    ...spans.map((span) =>
      el("button", {
        type: "button",
        text: span,
        onclick: () => {
          press(span);
          choose(span);
        },
      }),
    ),
  );
  press(chosen);
}
