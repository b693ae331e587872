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
export const button = (attributes, ...children) => h("button", { type: "button", ...attributes }, ...children);

export const count = (n) => Math.round(n).toLocaleString("en");
export const figure = (v, digits = 3) => (v >= 1000 ? count(v) : String(Number(v.toPrecision(digits))));
export const megabytes = (bytes) => `${figure(bytes / 1e6)} MB`;
// As in the verdicts of the service.
export const percent = (p) =>
  p > 0 && p < 0.0005 ? "<0.1%" : p < 1 && p >= 0.995 ? ">99%" : `${Number((100 * p).toFixed(p < 0.1 ? 1 : 0))}%`;
export const about = (n) => (n > 0 && n < 0.05 ? "<0.1" : n < 10 ? String(Number(n.toFixed(1))) : count(n));
export const things = (gallery, n) => `${count(n)} ${count(n) === "1" ? gallery.slice(0, -1) : gallery}`;
export const nameOf = ({ id, payload }) => payload.label || payload.text || payload.name || id;

// A probability as a frequency: "about 4 of 10", "about 15 of 100".
export function odds(p) {
  if (p >= 0.995) return "more than 99 of 100";
  if (p < 0.005) return "fewer than 1 of 100";
  const hundredths = Math.round(100 * p);
  return hundredths % 10 ? `about ${hundredths} of 100` : `about ${hundredths / 10} of 10`;
}

// A fraction as a bar; what is not nothing can be seen.
export function bar(fraction, attributes = {}) {
  const part = h("i");
  part.style.width = `${100 * Math.min(1, fraction)}%`;
  return h("span", { ...attributes, class: `bar ${attributes.class ?? ""}` }, fraction > 0 && part);
}

// The whole gallery as a strip, with the part of it that should match.
export const strip = (expected, n) =>
  h("span", { class: "strip", role: "img", "aria-label": `${about(expected)} of ${count(n)}` }, bar(n ? expected / n : 0));

// An expected number below a half is more likely none than any.
export const expectation = (expected, n, gallery) =>
  n && expected < 1.5
    ? [h("b", {}, expected < 0.5 ? "Probably no match" : "About one match or none"), ` among ${things(gallery, n)}`]
    : [h("b", {}, `About ${count(expected)}`), ` of ${things(gallery, n)} should match`];
