// Numbers as a reader wants them: rounded, in words, and as bars. No verdicts: those are the service's.

export const h = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(2).filter((child) => child != null && child !== false));
  return node;
};
export const made = (id) => document.getElementById(id).content.cloneNode(true);
export const button = (attributes, ...children) => h("button", { type: "button", ...attributes }, ...children);

export const count = (n) => Math.round(n).toLocaleString("en");
export const figure = (v, digits = 3) => (v >= 1000 ? count(v) : String(Number(v.toPrecision(digits))));
export const megabytes = (bytes) => `${figure(bytes / 1e6)} MB`;
export const percent = (p) =>
  p > 0 && p < 0.005 ? "<1%" : p < 1 && p >= 0.995 ? ">99%" : `${(100 * p).toFixed(0)}%`;
export const about = (n) => (n > 0 && n < 0.05 ? "<0.1" : n < 10 ? String(Number(n.toFixed(1))) : count(n));
export const some = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
export const things = (gallery, n) => `${count(n)} ${count(n) === "1" ? gallery.slice(0, -1) : gallery}`;

const FILE = /\.\w{2,5}$/;
const linesOf = (text) => (text ?? "").split("\n").filter(Boolean);

// "2024-06-13T12:01:09" -> "13 June 2024"; a part of a date as it is.
export const day = (date) =>
  /^\d{4}-\d\d-\d\d/.test(date) ? new Date(`${date.slice(0, 10)}T00:00Z`).toLocaleDateString("en-GB", { day: "numeric", month: "long", year: "numeric", timeZone: "UTC" }) : date;

// What stands under an item: what was said about it, else its day, else the name of its file.
export const nameOf = ({ id, payload: { title, captions, label, text, date, name } }) =>
  title || linesOf(captions)[0] || label || text || (date && day(date)) || (!FILE.test(id) && name) || id.split("/").at(-1) || id;

const LITTLE = new Set("a an the and or with for from in into on onto of off at by to is are was there some his her its this that who".split(" "));
const wordsIn = (text) =>
  new Map((text.toLowerCase().match(/[\p{L}\d]+/gu) ?? []).filter((word) => !LITTLE.has(word)).map((word) => [word.replace(/(..)s$/, "$1"), word]));

// The line of an item that shares most words with a search, and these words; the one that the service names comes first.
export function closestLine(asked, payload, named) {
  const wanted = wordsIn(asked);
  let best = null;
  for (const [field, what] of [["captions", "caption"], ["title", "title"], ["tags", "tag"], ["label", "label"], ["text", "text"], ["name", "file and folder name"]])
    for (const line of linesOf(payload[field])) {
      const shared = [...wordsIn(line)].filter(([stem]) => wanted.has(stem)).map(([, word]) => word);
      if (shared.length && (line === named || (best?.line !== named && shared.length > (best?.shared.length ?? 0)))) best = { what, line, shared };
    }
  return best;
}

// A probability as a frequency: "about 4 of 10", "about 15 of 100".
export function odds(p) {
  if (p >= 0.995) return "more than 99 of 100";
  if (p < 0.005) return "fewer than 1 of 100";
  const hundredths = Math.round(100 * p);
  return hundredths % 10 ? `about ${hundredths} of 100` : `about ${hundredths / 10} of 10`;
}

export function bar(fraction, attributes = {}) {
  const part = h("i");
  part.style.width = `${100 * Math.min(1, fraction)}%`;
  return h("span", { ...attributes, class: `bar ${attributes.class ?? ""}` }, fraction > 0 && part);
}

// The whole gallery as a strip, with the part of it that should match.
export const strip = (expected, n) =>
  h("span", { class: "strip", role: "img", "aria-label": `${about(expected)} of ${count(n)}` }, bar(n ? expected / n : 0));

export const expectation = (expected, among) =>
  expected < 1.5
    ? [h("b", {}, expected < 0.5 ? "Probably no match" : "About one match or none"), ` among ${among}`]
    : [h("b", {}, `About ${count(expected)}`), ` of ${among} should match`];
