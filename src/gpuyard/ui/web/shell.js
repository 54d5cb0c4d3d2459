/** Splits a typed command line into arguments; a line with shell syntax becomes `/bin/sh -c LINE`. */

// Characters that a shell interprets, and an assignment before the command; not placeholders such as {lr}.
const SHELL_SYNTAX = /[|&;<>()$`\\*?[\]#~!\n]|^\s*\w+=|\{(?!\w+\})/;
const WORD = /"([^"]*)"|'([^']*)'|([^\s"']+)/gy;

export const needsShell = (line) => SHELL_SYNTAX.test(withoutQuotes(line));

/** Drop quoted parts; a shell interprets $, ` and \ in double quotes too, so such a part becomes `$`. */
const withoutQuotes = (line) =>
  line.replace(/'[^']*'|"([^"]*)"/g, (_, inner = "") => (/[$`\\]/.test(inner) ? "$" : ""));

/** The arguments; null if a quote is not closed. */
export function asWords(line) {
  if (needsShell(line)) return ["/bin/sh", "-c", line];
  const words = [];
  let isInWord = false;
  for (let place = 0; place < line.length;) {
    if (/\s/.test(line[place])) {
      isInWord = false;
      place += 1;
      continue;
    }
    WORD.lastIndex = place;
    const match = WORD.exec(line);
    if (match === null) return null;
    const part = match[1] ?? match[2] ?? match[3];
    if (isInWord)
      words[words.length - 1] += part;
    else
      words.push(part);
    isInWord = true;
    place = WORD.lastIndex;
  }
  return words;
}
