/** Lines that open: a button with the title before the line, and a click anywhere on the line, show or hide more. */

import {button, el, say, set} from "./dom.js";

/** Adds the button to `line`; `more` is the part that opens. Calls `onToggle(isOpen)` when the user opens or closes it. */
export function makeFold({line, more, isOpen, onToggle}) {
  const title = button("", () => toggle(), "fold");
  const fold = {isOpen, title, setTitle: (text) => say(title, text), setOpen};
  const toggle = () => {
    setOpen(!fold.isOpen);
    onToggle(fold.isOpen);
  };
  function setOpen(opens) {
    fold.isOpen = opens;
    more.hidden = !opens;
    set(title, "aria-expanded", String(opens));
    set(line, "data-open", opens);
  }
  set(title, "aria-controls", more.id);
  line.prepend(el("h3", {}, title));
  line.addEventListener("click", (event) => !event.target.closest("a, button") && toggle());
  setOpen(isOpen);
  return fold;
}
