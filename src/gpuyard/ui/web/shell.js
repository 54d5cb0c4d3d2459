/** A command line as it is typed, made into words; one that needs a shell gets one. */

// What a shell would not take as it stands, but for placeholders such as {lr}.
const FOR_A_SHELL = /[|&;<>()$`\\*?[\]#~!\n]|^\s*\w+=|\{(?!\w+\})/;
const WORD = /"([^"]*)"|'([^']*)'|([^\s"']+)/gy;

export const needsShell = (line) => FOR_A_SHELL.test(withoutQuotes(line));

/** What is quoted stands for itself, but for what a shell looks for between double quotes as well. */
const withoutQuotes = (line) =>
  line.replace(/'[^']*'|"([^"]*)"/g, (_, inner = "") => (/[$`\\]/.test(inner) ? "$" : ""));

/** The words; null where a quote is left open. */
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
