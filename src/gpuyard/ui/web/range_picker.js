/** A choice of how much time is shown: one of a few, as buttons of which one is pressed. */

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
