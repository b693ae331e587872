// A search of sfumato in the browser, without a server. Distances are computed from the vectors in data.js, and
// probabilities by the formulas of calibration/fits.py with their constants; no answer is stored. Only the embeddings of
// the listed queries are here, as embedding another text needs the model. scripts/demo_page.py puts words.js before this.
import { bar, button, count, h, percent, things } from "./words.js";

const { columns, constants, fits, items, logit, queries, ...data } = window.DATA;
const $ = (selector) => document.querySelector(selector);
const SHOWN = 24;
const EXAMPLES = [["animal", "A vague search"], ["volcano", "A precise search"], ["spreadsheet", "Not among the emoji"]];
const SOME = ["a happy face", "musical instrument", "ball game", "alarm clock", "fruit", "police car", "fairy tale creatures", "hot beverage", "black cat", "money", "cat sleeping on a sofa", "quantum physics"];
const TONES = { clear: "sure", few: "sure", many: "calm", unsure: "unsure", nothing: "none" };
const SIGNS = { sure: "✓", calm: "●●●", unsure: "?", none: "–" }; // beside the colour, which not everyone sees

// ---- vectors in half precision

const HALVES = new Float64Array(65536); // by their 16 bits; infinity and NaN do not occur
for (let bits = 0; bits < HALVES.length; bits++) {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  HALVES[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

function decode(text, n) { // -> n vectors
  const bytes = atob(text);
  const all = new Float64Array(bytes.length / 2);
  for (let i = 0; i < all.length; i++) all[i] = HALVES[bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8)];
  const d = all.length / n;
  return Array.from({ length: n }, (_, i) => all.subarray(d * i, d * (i + 1)));
}

const vectors = Object.fromEntries(["items", "texts", "queries", "sentences"].map((name) => [name, decode(data.vectors[name], (["items", "texts"].includes(name) ? items : queries).length)]));

function squaredDistance(x, y) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += (x[i] - y[i]) ** 2;
  return sum;
}

function dot(x, y) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] * y[i];
  return sum;
}

// ---- words as evidence: search/texts.py

const own = data.own.map((stems) => new Set(stems));
const numbers = new Set(constants.numbers);
const intersects = (set, some) => some.some((one) => set.has(one));

// A stem of a query: the stems that say it, the items that have one of these, and its weight.
function word(stem) {
  const saying = new Set(data.saying[stem]);
  const says = own.map((stems) => intersects(stems, data.saying[stem]));
  const n = says.filter(Boolean).length;
  return { saying, says, number: numbers.has(stem) && data.stems.indexOf(stem), weight: Math.min(constants.rarest, Math.log((items.length + 1) / (n + 0.5))) };
}

function isClose(words, line) {
  const says = (part) => words.every(({ saying }) => intersects(saying, part));
  if (!says(line)) return false;
  const width = words.length + constants.close;
  const counted = words.slice(0, -1).map((one, i) => [one.number, words[i + 1].saying]).filter(([number]) => number !== false);
  for (let i = 0; i < Math.max(1, line.length - width + 1); i++) {
    const part = line.slice(i, i + width);
    if (says(part) && counted.every(([number, saying]) => intersects(saying, part.slice(part.indexOf(number) + 1)))) return true;
  }
  return false;
}

// By item: the fraction of the words that its texts say, whether they say all close together, and the rarest missing one.
function wordEvidence(stems) {
  const words = stems.map(word);
  const total = words.reduce((sum, { weight }) => sum + weight, 0) || 1;
  return items.map((_, j) => ({
    words: words.reduce((sum, { says, weight }) => sum + (says[j] ? weight / total : 0), 0),
    missing: words.reduce((most, { says, weight }) => (says[j] ? most : Math.max(most, weight)), 0),
    together: words.length > 0 && words.every(({ says }) => says[j]) && (words.length === 1 || words.every(({ saying }) => intersects(saying, data.labels[j])) || data.lines[j].some((line) => isClose(words, line))) ? 1 : 0,
  }));
}

// ---- probabilities: calibration/fits.py

const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const sum = (values) => values.reduce((total, value) => total + value, 0);

const linear = ({ slope, intercept, weights, low, high }, x, features) =>
  slope * x + intercept + sum(features.map((value, i) => weights[i] * Math.min(high[i], Math.max(low[i], value))));

function search(query) { // number of a listed query -> its hits, how many items fit, and whether none does
  const stems = data.asked[query];
  const sentence = vectors.sentences[query];
  const length = Math.max(1, stems.length);
  const own = fits.lengths[Math.min(length, fits.lengths.length) - 1];
  const asked = [1 / length, dot(sentence, fits.prior.slice(0, -1)) + fits.prior.at(-1)];
  const evidence = wordEvidence(stems);
  const distances = vectors.items.map((item) => squaredDistance(vectors.queries[query], item));
  const pairs = evidence.map(({ words, together, missing }, j) =>
    linear(own.pair_with, logit.bias - logit.scale * distances[j], [dot(sentence, vectors.texts[j]) * data.lengths[j], words, together, missing, missing * data.few[j], ...asked]));
  const near = [...pairs].sort((a, b) => b - a).slice(0, constants.near);
  const listed = [Math.min(constants.maxGap, near[0] - near[1]), Math.log(sum(near.map(sigmoid))), ...asked];
  const hits = pairs.map((pair, j) => ({ j, id: items[j][0], distance: distances[j], logit: linear(own.hit_with, pair, [near[0], ...listed]) }));
  hits.sort((a, b) => b.logit - a.logit || (a.id < b.id ? -1 : 1));
  for (const hit of hits) hit.probability = sigmoid(hit.logit);
  return { hits: hits.slice(0, SHOWN), expected: sum(hits.map(({ probability }) => probability)), nothing: Math.min(sigmoid(linear(own.nothing, -near[0], listed)), 1 - hits[0].probability) };
}

// As fits_verdict of search/answer.py, without what that says if items lack texts ("Nothing sure", "Not sure", "Likely
// matches: both results", "have no captions"): all items here have some. The first result is always the most probable.
function verdictOf({ hits, expected, nothing }) {
  const { clear, few, line, many, unsure } = constants;
  const above = hits.map(({ probability }) => probability).filter((p) => p >= line);
  const best = hits[0].probability;
  const found = `the first result is right with a probability of ${inWords(best)}`;
  if (!above.length) return nothing >= line && best < unsure ? ["nothing", "Nothing here shows this"] : ["unsure", `No likely match: ${found}`];
  if (expected < few && above.length === 1) return best >= clear ? ["clear", "One clear match"] : ["few", `A likely match: ${found}`];
  const [right, n] = [Math.round(sum(above)), above.length];
  const of = right === n ? `all ${n}` : `${right} of the ${n}`;
  const rest = n > 2 ? `; ${of} results above ${100 * line}% should be right` : "";
  return [expected >= many ? "many" : "few", `${expected >= many ? "Many" : "A few"} matches: about ${Math.max(Math.round(expected), right)}${rest}`];
}

const inWords = (p) => (p < 0.005 ? "less than 1%" : p >= 0.995 ? "more than 99%" : `${(100 * p).toFixed(0)}%`);

// ---- the page

function drawing(j, name = "") {
  const node = h("span", { class: "emoji", ...(name ? { role: "img", "aria-label": name } : { "aria-hidden": "true" }) });
  const rows = Math.ceil(items.length / columns);
  node.style.backgroundSize = `${100 * columns}% ${100 * rows}%`;
  node.style.backgroundPosition = `${(100 * (j % columns)) / (columns - 1)}% ${(100 * Math.floor(j / columns)) / (rows - 1)}%`;
  return node;
}

function answerTo(query) {
  const answer = search(query);
  const [kind, text] = verdictOf(answer);
  const tone = kind === "few" && answer.hits[0].probability < 0.5 ? "unsure" : TONES[kind];
  return { ...answer, kind, tone, text, verdict: h("p", { class: "verdict" }, h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[tone]), text) };
}

function card({ j, id, distance, probability }) {
  const [, title, tags] = items[j];
  return h("li", { class: "hit", "data-id": id, "data-probability": probability, title: tags },
    h("div", { class: "pick" }, drawing(j), h("span", { class: "name" }, title), bar(probability),
      h("span", { class: "figures" }, h("span", { class: "quiet" }, "match probability "), h("b", {}, percent(probability)), h("span", { class: "expert" }, ` at ${distance.toFixed(3)}`))));
}

function result(query) {
  const { hits, kind, text, tone, verdict } = answerTo(query);
  const below = hits.find(({ probability }) => probability < constants.line);
  $("#status").textContent = `${queries[query]}: ${text}. ${hits.length} results.`;
  return h("section", { class: `card ${tone}`, "aria-label": `Answer to ${queries[query]}` },
    h("header", {}, h("div", {}, h("h2", {}, `“${queries[query]}”`), verdict)),
    kind === "nothing" && h("p", { class: "guess" }, "Some of these fit after all? Where no name or tag has all words of a search, this page often says “nothing” wrongly: its constants were fitted on photographs with captions, not on drawings with tags."),
    h("p", { class: "count" }, `These are the ${hits.length} most likely of ${things("emoji", items.length)}.`),
    h("ul", { class: "grid" }, hits.map((hit) => [hit === below && h("li", { class: "half" }, `Below ${100 * constants.line}%`), card(hit)])));
}

const pairsOf = (text) => new Set(Array.from({ length: text.length - 1 }, (_, i) => text.slice(i, i + 2)).filter((pair) => !pair.includes(" ")));

// The listed queries that are spelt most like a text.
function nearest(text, n = 6) {
  const mine = pairsOf(text);
  const like = (other) => {
    const pairs = pairsOf(other);
    return [...pairs].filter((pair) => mine.has(pair)).length / (pairs.size + mine.size || 1);
  };
  return [...queries].map((query) => [like(query), query]).sort((a, b) => b[0] - a[0]).slice(0, n).filter(([score]) => score > 0.15).map(([, query]) => query);
}

const links = (some) => h("p", { class: "links" }, some.map((text) => h("a", { href: `#q=${encodeURIComponent(text)}` }, text)));

function unknown(text) {
  const near = nearest(text);
  $("#status").textContent = `${text} is not among the searches of this page.`;
  return h("section", { class: "card none" },
    h("header", {}, h("div", {}, h("h2", {}, `“${text}”`), h("p", { class: "verdict" }, "This page does not know this search"))),
    h("p", { class: "after" }, `Only its ${count(queries.length)} listed searches can be answered here: a new text needs the model, which this page does not have. After `, h("code", {}, "sfumato index"), ", ", h("code", {}, "sfumato search"), " answers any text."),
    near.length > 0 && h("p", { class: "after" }, "The listed ones that are spelt most like it:"), near.length > 0 && links(near));
}

const welcome = () =>
  h("section", { class: "card empty" },
    h("h2", {}, `Search ${things("emoji", items.length)}`),
    h("p", {}, "Every answer says how many results should match, and how likely each one is right. Try the difference:"),
    h("ul", { class: "tiles" }, EXAMPLES.map(example)),
    h("h3", { class: "after" }, "More searches"), links(SOME.filter((text) => queries.includes(text))),
    h("details", {}, h("summary", {}, `All ${count(queries.length)} searches of this page`), links(queries)));

function example([text, kind]) {
  const { hits, tone, verdict } = answerTo(queries.indexOf(text));
  return h("li", { class: `tile ${tone}` }, h("h3", {}, kind),
    button({ class: "try", onclick: () => ask(text) }, h("span", { class: "query" }, `“${text}”`), h("span", { class: "thumbs" }, hits.slice(0, 5).map(({ j }) => drawing(j))), verdict));
}

// ---- what is asked: #q=... in the URL, so that it can be shared and Back works

const plain = (text) => text.trim().toLowerCase().replaceAll(/\s+/g, " ");
let shown = null;

function ask(text) {
  location.hash = plain(text) && `q=${encodeURIComponent(plain(text))}`;
  show(plain(text));
}

function show(text) {
  if (shown === text) return;
  const first = shown === null;
  shown = text;
  const query = queries.indexOf(text);
  $("#q").value = text;
  document.title = [text, "sfumato in the browser"].filter(Boolean).join(" · ");
  $("#answers").replaceChildren(query >= 0 ? result(query) : text ? unknown(text) : welcome());
  if (first) return;
  scrollTo(0, 0);
  if (document.activeElement === document.body) $("#answers").focus({ preventScroll: true }); // what was clicked has gone
}

const asked = () => plain(new URLSearchParams(location.hash.slice(1)).get("q") ?? "");

$("#about").textContent = things("emoji", items.length);
$("#listed").append(...queries.map((value) => h("option", { value })));
$("#search").addEventListener("submit", (event) => {
  event.preventDefault();
  ask($("#q").value);
});
$("#q").addEventListener("change", () => queries.includes(plain($("#q").value)) && ask($("#q").value)); // one of the list was chosen
$("#experts").addEventListener("change", ({ target }) => document.body.classList.toggle("experts", target.checked));
addEventListener("hashchange", () => location.hash !== "#answers" && show(asked())); // but for the link to skip to them
window.answerTo = (text) => answerTo(queries.indexOf(text)); // for the console, and for the test that compares it
show(asked());
