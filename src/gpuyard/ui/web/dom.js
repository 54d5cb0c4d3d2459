/**
 * Creating and updating elements. Data from the daemon is set as text or as the value of an attribute, never as markup.
 * Characters that are not printed as themselves are shown as escapes.
 * Styles are set through the DOM: the page's security policy allows neither inline scripts nor inline styles.
 */

const SVG = "http://www.w3.org/2000/svg";
const kept = new WeakMap();
// Control characters, marks that change the direction of writing, line separators, and halves of characters.
const UNPRINTABLE = /[\p{Cc}\p{Bidi_Control}\p{Zl}\p{Zp}\p{Cs}]/gu;

export const byId = (id) => document.getElementById(id);

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

export const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

/** Attributes and children that are null, undefined or false are left out. */
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text")
      say(node, value);
    else if (key === "message")
      sayMessage(node, value);
    else if (typeof value === "function")
      node.addEventListener(key.slice(2), value);
    else
      set(node, key, value);
  }
  node.append(...children.flat().filter((child) => isGiven(child)));
  return node;
}

const isGiven = (value) => value !== null && value !== undefined && value !== false;

export const button = (text, onclick, kind = null) => el("button", {type: "button", class: kind, text, onclick});

export const number = () => el("span", {class: "number"});

/** The text with escapes such as `\x1b`. A command may have several lines: their ends stay. */
export const printable = (text) => text.replace(UNPRINTABLE, (letter) => {
  if (letter === "\n" || letter === "\t") return letter;
  const code = letter.charCodeAt(0).toString(16);
  return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
});

/**
 * Set the text only if it changed, so that selections and the position of a screen reader stay. A field for editing gets
 * the text as it is.
 */
export function say(node, text) {
  const shown = node.localName === "textarea" ? String(text ?? "") : printable(String(text ?? ""));
  if (node.textContent !== shown) node.textContent = shown;
}

/** Set a text that may name commands in backticks, as reasons and hints do: these are shown as code. */
export function sayMessage(node, text) {
  const parts = printable(String(text ?? "")).split(/`([^`]+)`/);
  if (node.textContent !== parts.join(""))
    node.replaceChildren(...parts.map((part, place) => (place % 2 ? el("code", {text: part}) : part)));
}

/** Attributes that people read or hear. */
const READ = new Set(["title", "aria-label", "placeholder", "alt"]);

/** Set or remove an attribute; what people read or hear of it is made printable, as text is. */
export function set(node, name, value) {
  const before = node.getAttribute(name);
  const after = value === true ? "" : READ.has(name) ? printable(String(value)) : value;
  if (!isGiven(value))
    node.removeAttribute(name);
  else if (before !== String(after))
    node.setAttribute(name, after);
}

export function setAll(node, values) {
  for (const [name, value] of Object.entries(values)) set(node, name, value);
}

/** A row of buttons that selects a time range, which is stored in the browser. Returns the current one. */
export function makeSpans(name, spans, otherwise, choose) {
  const parent = byId(`${name}-spans`);
  const press = (span) => {
    for (const each of parent.children) set(each, "aria-pressed", String(each.textContent === span));
  };
  const onPress = (span) => {
    press(span);
    remember(name, span);
    choose(span);
  };
  parent.append(...spans.map((span) => button(span, () => onPress(span))));
  const chosen = remembered(name, otherwise);
  press(chosen);
  return chosen;
}

/** Make the children of a node match the items, in order; existing children are updated, not replaced. */
export function keep(parent, items, keyOf, make, update) {
  if (!kept.has(parent)) kept.set(parent, new Map());
  const known = kept.get(parent);
  const focused = document.activeElement;
  const gone = new Set(known.keys());
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    gone.delete(key);
    if (!known.has(key)) known.set(key, make(item));
    const node = known.get(key);
    update?.(node, item);
    if (node === place)
      place = place.nextSibling;
    else
      parent.insertBefore(node, place);
  }
  for (const key of gone) {
    known.get(key).remove();
    known.delete(key);
  }
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({preventScroll: true});
}

let stored = null;

/** A choice stored in the browser; without storage, the default. */
export const remembered = (key, otherwise) => storage()?.getItem(`gpuyard-${key}`) ?? otherwise;

export const remember = (key, value) => storage()?.setItem(`gpuyard-${key}`, value);

function storage() {
  try {
    stored ??= window.localStorage;
  } catch (error) {
    console.info("gpuyard: this browser stores no settings", error);
  }
  return stored;
}
