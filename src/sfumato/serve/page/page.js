// The page of `sfumato serve`: it calls the API at its own origin. The URL holds the search, so that it can be shared
// and Back works. An image is kept while the page is open.
import { filesIn, send, sorted, summary } from "./add.js";
import { judging } from "./judge.js";
import { Refused, base64, forgetPictures, json, key, onKeyNeeded, pictureURL, setKey } from "./service.js";
import { about, bar, button, closestLine, count, day, expectation, figure, h, made, megabytes, nameOf, odds, percent, some, strip, things } from "./words.js";

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => root.querySelectorAll(selector);

const SLOTS = [0, 1];
const TONES = new Map(Object.entries({ clear: "sure", few: "sure", many: "calm", unsure: "unsure", nothing: "none", abstained: "none", unfamiliar: "none" }));
const SIGNS = { sure: "✓", calm: "●●●", unsure: "?", none: "–" }; // beside the colour, which not everyone sees
const HITS = 24;
const LONGEST = 2000; // characters of a text that the service takes
const THUMBNAIL = 96; // pixels, on the start page
const LARGE = 1600;
const FILTERS = ["from", "to", "folder"];
const files = new Map(); // key -> picture that was asked with
const known = new Map(); // id -> item: name and picture of what was seen
const answers = new Map(); // request -> answer
const shown = [null, null]; // slot -> {query, answer}
const running = [null, null]; // slot -> AbortController
const folders = new Map(); // gallery -> promise of its folders, with the number of items in each and below it
let viewed; // what the dialog shows: its items, and the place among them
let adding; // what was chosen to be added, and the AbortController of its upload
let wanted = HITS;
let info;
let state;
let begin;
const begun = new Promise((resolve) => (begin = resolve));

// Actions wait until the collection is known.
const on = (node, type, act) => node.addEventListener(type, (event) => (info ? act(event) : begun.then(() => act(event))));

const image = (path, alt = "", size = 320) => {
  const node = h("img", { alt, decoding: "async" });
  pictureURL(path, size).then((url) => (node.src = url), () => {});
  return node;
};

function checkPicture(file) {
  const { max_upload_bytes: most } = info.limits;
  if (file.type && !file.type.startsWith("image/")) throw new Refused(422, { title: "This is not an image", detail: `${file.name} is a ${file.type}.` });
  if (file.size > most) throw new Refused(413, { detail: `The file has ${megabytes(file.size)}; the limit of the service is ${megabytes(most)}.` });
}

const here = () => info.galleries[state.gallery];
const filtered = () => FILTERS.some((name) => state[name]);
const among = (n = here().n) => (filtered() ? `the ${state.gallery} that pass the filter` : things(state.gallery, n));
const native = () => (state.gallery === "images" ? "text" : "image"); // what promises are made for

const hint = (text) => ($("#hint").textContent = text);

const hintBlank = () => hint(`There is nothing to search by yet: write ${info.query_kinds.text ? "what you look for" : "the id of an item"}, or choose one of the examples.`);

// A text that the service can take; what was cut is said.
function cut(text) {
  text = text.trim();
  if (text.length <= LONGEST) return text;
  hint(`The text was cut after its first ${count(LONGEST)} characters, the most that the service takes.`);
  return text.slice(0, LONGEST);
}

// ---- what is asked: the URL, and the pictures of this page

function read() {
  const get = new URLSearchParams(location.search);
  const gallery = Object.hasOwn(info.galleries, get.get("in")) ? get.get("in") : Object.keys(info.galleries)[0];
  const queries = SLOTS.map((slot) => {
    const suffix = slot ? "2" : "";
    const key = history.state?.pictures?.[slot];
    if (files.has(key)) return { kind: "image", value: key };
    for (const [kind, name] of [...(info.query_kinds.text ? [["text", "q"]] : []), ["id", "id"]])
      if (get.get(name + suffix)?.trim()) return { kind, value: cut(get.get(name + suffix)) };
    return null;
  });
  return {
    gallery,
    queries,
    compare: get.has("compare") || Boolean(queries[1]),
    ...Object.fromEntries(FILTERS.map((name) => [name, (info.galleries[gallery].fields.includes(name === "folder" ? name : "date") && get.get(name)) || null])),
    least: Math.min(0.99, Math.max(0, Number(get.get("least")) || 0)),
    ...Object.fromEntries(["abstain", "coverage"].map((name) => [name, offers(name, gallery).find((v) => v === Number(get.get(name))) ?? null])),
  };
}

const offers = (name, gallery) => info.galleries[gallery][name === "abstain" ? "risks" : "coverages"];

function remember(how) {
  const url = new URLSearchParams();
  const set = (name, value) => value && url.set(name, value);
  if (state.gallery !== Object.keys(info.galleries)[0]) set("in", state.gallery);
  state.queries.forEach((query, slot) => query && query.kind !== "image" && set((query.kind === "id" ? "id" : "q") + (slot ? "2" : ""), query.value));
  if (state.compare && !state.queries[1]) set("compare", "1");
  for (const name of [...FILTERS, "least", "abstain", "coverage"]) set(name, state[name]);
  const pictures = state.queries.map((query) => (query?.kind === "image" ? query.value : null));
  history[how]({ pictures }, "", `?${url}`.replace(/^\?$/, location.pathname));
}

function go(change, how = "pushState") {
  state = { ...state, ...change };
  remember(how);
  render();
}

function ask(slot, query) {
  hint("");
  wanted = HITS;
  const queries = [...state.queries];
  queries[slot] = query;
  go({ queries }, history.state?.viewing ? "replaceState" : "pushState");
  scrollTo(0, 0);
}

const like = (slot, id) => ask(slot, { kind: "id", value: id });

function askPicture(slot, file) {
  try {
    checkPicture(file);
  } catch (error) {
    return fail(slot, error);
  }
  const key = `${Date.now()} ${file.name}`;
  files.set(key, { file, url: URL.createObjectURL(file) });
  ask(slot, { kind: "image", value: key });
}

// ---- searching

// In the first items: 20 requests at most.
async function foldersIn(gallery) {
  const found = new Map();
  for (let page = 0, cursor = ""; page < 20 && cursor !== null; page++) {
    const { items, next_cursor } = await json(`v1/items?gallery=${gallery}&limit=1000${cursor && `&cursor=${cursor}`}`);
    for (const { payload: { folder } } of items) {
      const parts = folder?.split("/") ?? [];
      for (let i = 1; i <= parts.length; i++) found.set(parts.slice(0, i).join("/"), (found.get(parts.slice(0, i).join("/")) ?? 0) + 1);
    }
    cursor = next_cursor;
  }
  return found;
}

async function foldersOf(gallery) {
  if (!folders.has(gallery)) folders.set(gallery, foldersIn(gallery).catch(() => new Map()));
  return folders.get(gallery);
}

// Of a day to the end of another, and of a folder. A range: at least, below.
function filterOf({ from, to, folder }) {
  if (!from && !to && !folder) return null;
  const next = to && new Date(Date.parse(`${to}T00:00Z`) + 864e5).toISOString().slice(0, 10);
  return { ...(folder && { where: { folder: [folder] } }), ...((from || to) && { ranges: { date: [from ?? "", next ?? ""] } }) };
}

async function answerOf(query, signal) {
  const { gallery, abstain, coverage } = state;
  const filter = filterOf(state);
  const options = { gallery, duplicates: "fold", max_results: Math.min(wanted, info.limits.max_results), ...(filter ? { filter } : query.kind === native() && { abstain, coverage }) };
  const key = JSON.stringify([options, query]);
  if (!answers.has(key)) {
    const value = query.kind === "image" ? await base64(files.get(query.value).file) : query.value;
    const body = { ...options, queries: [{ [query.kind]: value }] };
    const found = (await json("v1/search", { body, signal })).answers[0];
    if (answers.size > 30) answers.delete(answers.keys().next().value);
    answers.set(key, found);
  }
  return answers.get(key);
}

async function search(slot, { more = false } = {}) {
  const query = state.queries[slot];
  running[slot]?.abort();
  const before = more ? shown[slot].answer.hits.length : 0;
  shown[slot] = running[slot] = null;
  if (!query) return;
  const controller = (running[slot] = new AbortController());
  const waiting = more || setTimeout(() => panel(slot, skeleton(query)), 80); // an answer at once needs no skeleton
  try {
    const answer = await answerOf(query, controller.signal);
    if (controller.signal.aborted) return;
    shown[slot] = { query, answer };
    for (const hit of answer.hits) known.set(hit.id, hit);
    const section = result(slot, query, answer);
    if (info.judgements && answer.target === "fits") judging(section, answer, (text) => changed(here().n, text));
    panel(slot, section);
    filter();
    if (query.kind === "id") syncAsk(slot); // its name may have become known
    if (more) $(`#answers [data-slot="${slot}"] .hit:nth-child(n + ${before + 1}):not([hidden]) .pick`)?.focus();
    if (document.activeElement === document.body) $("#answers").focus({ preventScroll: true }); // what was clicked has gone
  } catch (error) {
    if (!controller.signal.aborted) fail(slot, error);
  } finally {
    clearTimeout(waiting);
    if (running[slot] === controller) (running[slot] = null), tell();
  }
}

// In one: a second may cut the first short.
const tell = () => running.some(Boolean) || ($("#status").textContent = shown.filter(Boolean).map(({ query, answer }) => `${titleOf(query)}: ${wordsOf(answer)}. ${some(answer.hits.length, "result")}.`).join(" "));

// ---- the answers

const wordsOf = ({ verdict }) => verdict?.text ?? "Closest results first";
const toneOf = ({ verdict, hits }) =>
  verdict?.kind === "few" && hits?.[0]?.match_probability < 0.5 ? "unsure" : (TONES.get(verdict?.kind) ?? "plain");

const titleOf = ({ kind, value }) =>
  kind === "text" ? `“${value}”` : kind === "image" ? files.get(value).file.name || "an image" : `More like ${known.has(value) ? nameOf(known.get(value)) : value}`;

const thumbnailOf = ({ kind, value }) =>
  kind === "image" ? h("img", { src: files.get(value).url, alt: "" }) : kind === "id" && known.get(value)?.picture ? image(known.get(value).picture) : null;

function panel(slot, node) {
  node.dataset.slot = slot;
  const old = $(`#answers [data-slot="${slot}"]`);
  if (old) old.replaceWith(node);
  else $("#answers")[slot ? "append" : "prepend"](node);
}

const skeleton = (query) =>
  h("section", { class: "card waiting", "aria-busy": "true", "aria-label": "Waiting for the answer" },
    h("header", {}, h("h2", {}, titleOf(query))),
    h("div", { class: `grid ${state.gallery}` }, Array.from({ length: 12 }, () => h("div", { class: "pick" }, here().pictures && h("i", { class: "blank" }), h("i", { class: "line" })))));

const refusal = ({ title, message, status }, again) =>
  h("section", { class: "card wrong", role: "alert" },
    h("h2", { class: "problem" }, title ?? "Error in this page"), h("p", {}, message),
    ![404, 413, 422].includes(status) && h("p", { class: "after" }, button({ onclick: again }, "Try again")));

const fail = (slot, error) => panel(slot, refusal(error, () => search(slot)));

const verdictOf = (answer) => {
  const sign = SIGNS[toneOf(answer)];
  return h("p", { class: "verdict" }, sign && h("span", { class: "sign", "aria-hidden": "true" }, sign), wordsOf(answer));
};

const number = (answer) => answer.hits[0]?.match_probability ?? 0; // of the first result

function result(slot, query, answer) {
  const { gallery } = state;
  const { n } = here();
  const set = answer.conformal_set;
  const inSet = new Set(set?.hits.map(({ id }) => id));
  const title = titleOf(query);
  const below = ({ match_probability: p }) => answer.target === "fits" && p !== null && p < 0.5;
  const first = answer.hits.find(below);
  const canAdd = query.kind === "image" && gallery === "images" && here().writable;
  return h("section", { class: `card ${toneOf(answer)}`, "aria-label": `Answer to ${title.slice(0, 100)}` },
    h("header", {}, thumbnailOf(query), h("div", {}, h("h2", { title: title.length > 80 && title }, title), verdictOf(answer), canAdd && h("p", {}, button({ onclick: () => openAdd([{ file: files.get(query.value).file, path: files.get(query.value).file.name }]) }, "Add it to the collection…")))),
    answer.suggestion && h("p", { class: "guess" }, "Did you mean ", button({ class: "link", onclick: () => ask(slot, { kind: "text", value: answer.suggestion }) }, answer.suggestion), "?"),
    [answer.warning, answer.calibrated && answer.note].filter(Boolean).map((text) => h("p", { class: "guess" }, text.replace(/[.?]?$/, "."))),
    answer.verdict?.kind === "unfamiliar" ? h("p", { class: "guess" }, "So the probabilities below say little. Check the spelling, or use other words.")
      : answer.calibrated ? facts(answer, n) : plain(gallery),
    set && h("p", { class: "count" }, set.complete ? `The framed set of ${things(gallery, set.hits.length)}: for searches like those that the probabilities were fitted on it holds a match with a probability of ${percent(set.coverage)}.` : `The framed set was cut at ${things(gallery, set.hits.length)}, so that it holds a match in ${percent(set.coverage)} is not guaranteed.`),
    h("p", { class: "count", "data-count": "" }),
    h("ul", { class: `grid ${gallery}` }, answer.hits.map((hit) => [hit === first && h("li", { class: "half", "data-probability": hit.match_probability }, "Below 50%"), card(slot, hit, inSet.has(hit.id), below(hit))]), wanted < Math.min(n, info.limits.max_results) && answer.hits.length >= wanted
      && h("li", { class: "after", "data-probability": answer.hits.at(-1).match_probability ?? 1 }, button({ onclick: () => { wanted *= 2; search(slot, { more: true }); } }, "More results"))));
}

const facts = (answer, n) => [
  answer.target === "listed" && h("div", { class: "facts" },
    h("div", {}, h("p", {}, expectation(answer.expected_matches, among())), !filtered() && strip(answer.expected_matches, n)),
    answer.hits.length > 0 && h("div", {}, h("p", {}, "First result: right in ", h("b", {}, odds(number(answer))), " such searches"),
      h("span", { class: "strip", role: "img", "aria-label": `probability ${percent(number(answer))}` }, bar(number(answer))))),
  meaning({ target: made(answer.target), among: filtered() ? among() : `the ${among()}`, sum: about(answer.expected_matches), first: percent(number(answer)), whole: filtered() || answer.target === "fits" ? "" : "The strip is the whole gallery." }),
  h("p", { class: "expert count" }, `Distance ${answer.distance}; total variance of the search ${figure(answer.total_variance)}.${answer.multiplicity === null ? "" : ` Among COCO's 123,287 photographs, people would find ${about(answer.multiplicity)} or more for such words.`}`),
];

function meaning(said) { // places of the template by what is said there
  const node = made("meaning");
  for (const place of $$("[data-said]", node)) place.replaceWith(said[place.dataset.said]);
  return node;
}

const plain = (gallery) =>
  h("p", { class: "guess" }, h("b", {}, "No probabilities here. "), here().calibrated
    ? `They are known for searches by ${native() === "text" ? "words" : "image"} alone, and this one compares two ${gallery}. `
    : "This collection has none. ",
  "The closest results come first; how many of them match is not known.", h("span", { class: "expert" }, here().calibrated ? ` The calibration was fitted on ${native()}s against ${gallery}.` : " Probabilities are not calibrated: the model has no calibration (sfumato calibrate)."));

function pick(slot, item, { size, children } = {}) {
  const node = button({ class: "pick", title: item.id, "aria-haspopup": "dialog", onclick: () => enlarge(slot, node) },
    item.picture ? image(item.picture, "", size) : here().pictures && h("i", { class: "blank" }), h("span", { class: "name" }, nameOf(item)), children);
  node.item = item;
  return node;
}

function card(slot, hit, inSet, little) {
  const { match_probability: p, duplicates = [] } = hit;
  const figures = p !== null && [bar(p), !little && h("span", { class: "figures" }, h("span", { class: "quiet" }, "match probability "), h("b", {}, percent(p)))];
  return h("li", { class: `hit${inSet ? " in-set" : ""}${little && hit.picture ? " little" : ""}`, "data-probability": p ?? 1 },
    pick(slot, hit, { children: figures }),
    duplicates.length > 0 && button({ class: "folded", "aria-haspopup": "dialog", "aria-label": `${duplicates.length} similar to ${nameOf(hit)}`, onclick: (event) => unfold(slot, hit, event.target) }, `+${duplicates.length} similar`));
}

// Hides results below the slider's probability, without a request.
function filter() {
  for (const slot of SLOTS) {
    if (!shown[slot]) continue;
    const { answer } = shown[slot];
    const section = $(`#answers [data-slot="${slot}"]`);
    for (const item of $$("[data-probability]", section)) item.hidden = Number(item.dataset.probability) < state.least;
    $("[data-count]", section).textContent = counted(answer);
  }
}

// What the results are part of; fewer than one match is not said.
function counted({ hits, calibrated, verdict, target, expected_matches: expected }) {
  if (!hits.length) return "";
  const size = ({ duplicates = [] }) => 1 + duplicates.length; // they are about as probable
  const total = (some) => some.reduce((n, hit) => n + size(hit), 0);
  const all = total(hits);
  const whole = filtered() ? hits.length < wanted : all >= here().n;
  const [one, alike] = [all === 1, all - hits.length];
  const closest = (whole ? (one ? "the only one" : `all ${things(state.gallery, all)}`) + (filtered() ? ` that pass${one ? "es" : ""} the filter` : "")
    : `the ${one ? "" : all + " "}${target === "fits" ? "most likely" : "closest"} of ${among()}`) + (alike ? `, ${alike} of them under “similar”` : "");
  const these = `${one ? "This is" : "These are"} ${closest}.`;
  const sum = (some) => some.reduce((sum, hit) => sum + size(hit) * hit.match_probability, 0);
  if (!calibrated || verdict.kind === "unfamiliar" || (target === "fits" && !state.least)) return these;
  if (!state.least) {
    const rest = !whole ? Math.round(expected) - Math.round(sum(hits)) : 0;
    const others = rest > 0 ? `, and about ${count(rest)} of the others` : "";
    return these + (sum(hits) < 1 ? "" : ` About ${count(sum(hits))} of these should match${others}.`);
  }
  const left = hits.filter((hit) => hit.match_probability >= state.least);
  const which = `a probability of at least ${percent(state.least)}`;
  const m = total(left);
  return `Of ${closest}, ${m || "none"} ${m > 1 ? "have" : "has"} ${which}${sum(left) < 1 ? "" : `: about ${count(sum(left))} of these should match`}.`;
}

// ---- the start

function welcome() {
  const { n } = here();
  const { text, image: pictures } = info.query_kinds;
  const { gallery } = state;
  const tiles = h("ul", { class: "tiles" }, n > 0 && h("li", { class: "tile wide waiting", "aria-hidden": "true" }, h("i", { class: "blank" })));
  const mayAdd = !$("#add-open").hidden;
  const node = h("section", { class: "card empty" },
    h("h2", {}, !n ? `No ${gallery} yet` : text ? `Search ${things(gallery, n)}` : `Search ${things(gallery, n)} by item`),
    h("p", {}, ...(!n ? ["This collection is empty. ", mayAdd ? `${gallery === "images" ? "Drop photographs or whole folders on this page, or add them here:" : "Add texts here:"}` : "Whoever runs the service can add to it, for example by the command sfumato index."] : [
      text ? "Write what you look for" : "Write the id of an item", pictures && ", or drop or paste an image",
      here().calibrated && info.query_kinds[native()] ? ". Every answer says how many results should match, and how likely the first one is right." : ". The closest items come first.",
    ]).filter(Boolean)), !n && mayAdd && h("p", {}, button({ class: "main", onclick: () => openAdd() }, "Add…")), tiles);
  if (n) json(`v1/items?gallery=${gallery}&limit=6`).then(({ items }) => {
    for (const item of items) known.set(item.id, item);
    tiles.replaceChildren(h("li", { class: "tile wide" }, h("h3", {}, here().pictures ? "Some of the images" : "Some of the items"),
      h("ul", { class: `grid ${gallery}` }, items.map((item) => h("li", { class: "hit" }, pick(0, item, { size: THUMBNAIL }))))));
  }, () => tiles.replaceChildren()); // Without them one can search all the same.
  return node;
}

// ---- an item enlarged, with its details

function enlarge(slot, node) {
  const nodes = [...$$(".hit:not([hidden]) .pick", node.closest("ul"))];
  view(slot, nodes.map(({ item }) => item), nodes.indexOf(node), (at) => nodes[at]);
}

// An item with those that were folded into it.
async function unfold(slot, hit, node) {
  const found = await Promise.all(hit.duplicates.map((id) => json(`v1/items/${id.split("/").map(encodeURIComponent).join("/")}?gallery=${state.gallery}`).catch(() => null)));
  view(slot, [hit, ...found.filter(Boolean)], found.some(Boolean) ? 1 : 0, () => node);
}

// backTo(place): the node that has the focus when the dialog closes.
function view(slot, items, at, backTo) {
  viewed = { slot, items, at, backTo };
  viewItem();
  history.pushState({ ...history.state, viewing: true }, ""); // Back closes it
  $("#item").showModal();
}

function step(by) {
  const at = viewed.at + by;
  if (at < 0 || at >= viewed.items.length) return;
  viewed.at = at;
  viewItem();
}

function viewItem() {
  const dialog = $("#item");
  const { items, at } = viewed;
  const item = items[at];
  $(".place", dialog).textContent = items.length > 1 ? `${at + 1} of ${items.length}` : "";
  for (const node of $$(".step", dialog)) {
    const { step: by } = node.dataset;
    node.hidden = items.length < 2;
    node.ariaDisabled = String(!items[at + Number(by)]); // a disabled one would lose the focus
  }
  $("h2", dialog).textContent = nameOf(item);
  for (const name of [".problem", ".sure-of"]) $(name, dialog).hidden = true;
  $(".stage", dialog).hidden = !item.picture && items.length < 2;
  $(".large", dialog).replaceChildren(...(item.picture ? [enlarged(item)] : []));
  $(".about", dialog).replaceChildren(...why(item), aboutItem(item));
  const remove = $(".delete", dialog);
  remove.hidden = !here().writable;
  remove.textContent = "Delete…";
  $(".open", dialog).hidden = !item.picture;
}

// A video, or its first frame if the browser cannot play it.
function enlarged(item, moving = !key() && /\.(mp4|m4v|mov|webm)$/i.test(item.id)) {
  if (moving) return h("video", { src: `.${item.picture}?original=true`, controls: "", onerror: ({ target }) => target.replaceWith(enlarged(item, false)) });
  const node = image(item.picture, nameOf(item));
  pictureURL(item.picture, LARGE).then((url) => h("img", { src: url }).decode().then(() => (node.src = url))).catch(() => {});
  return node;
}

// Why an item matched, as far as it can be said in words.
function why(item) {
  const query = state.queries[viewed.slot];
  if (!query || item.rank === undefined) return [];
  const p = item.match_probability;
  const { captions, tags, title, text, label } = item.payload;
  const best = query.kind === "text" && closestLine(query.value, item.payload, item.best_text);
  const words = query.kind !== "text" ? "It was found by its likeness to what you searched by."
    : best ? `Its ${best.what} “${best.line}” shares ${best.shared.map((word) => `“${word}”`).join(", ")} with your search.`
    : captions || tags || title || text || label ? "No word of your search is in its captions or tags." : "It has no captions or tags.";
  const parts = Object.entries(item.why ?? {}).filter(([, value]) => Math.abs(value) >= 0.05).map(([name, value]) => `${name} ${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(1)}`);
  return [h("h3", {}, "Why it matched"), h("p", {}, p !== null && ["Its probability is ", h("b", {}, percent(p)), `: ${odds(p)} such results are right. `], words), parts.length > 0 && h("p", { class: "expert" }, `Log odds: ${parts.join(", ")}.`)];
}

function aboutItem({ id, payload, ...item }) {
  const row = (label, value, attributes = {}) => ((value ?? "") === "" ? [] : [h("dt", attributes, label), h("dd", attributes, ...String(value).split("\n").map((line) => h("p", {}, line)))]);
  const { captions, title, tags, date, place, country, camera, ocr, folder, name, file, ...others } = payload;
  const expert = { class: "expert" };
  const time = /T(\d\d:\d\d)/.exec(date)?.[1];
  return h("dl", {},
    row("Title", title), row("Captions", captions), row("Tags", tags?.replaceAll("\n", ", ")), row("Date", date && day(date) + (time ? `, ${time}` : "")), row("Place", place), row("Camera", camera), row("Text in it", ocr),
    Object.entries(others).map(([label, value]) => row(label, value)), row(/[/.]/.test(id) ? "Path" : "Id", id),
    row("Rank", item.rank, expert), row("Distance", item.distance && figure(item.distance), expert), row("Total variance", figure(item.total_variance), expert));
}

async function remove() {
  const dialog = $("#item");
  const node = $(".delete", dialog);
  const item = viewed.items[viewed.at];
  if (node.textContent === "Delete…") {
    $(".sure-of", dialog).hidden = false;
    return void (node.textContent = "Delete from the collection");
  }
  try {
    const { n } = await json("v1/items/delete", { body: { gallery: state.gallery, ids: [item.id] } });
    dialog.close();
    await changed(n, `${nameOf(item)} was deleted from the collection. Its file stays.`, item.id);
  } catch (error) {
    complain(dialog, error);
  }
}

function complain(dialog, { title = "It failed", message }) {
  const line = $(".problem", dialog);
  line.textContent = `${title}. ${message}`;
  line.hidden = false;
}

// ---- adding

function openAdd(chosen = []) {
  const dialog = $("#add");
  if (dialog.open) return;
  $("[name=text]", dialog).required = state.gallery === "texts";
  $("form", dialog).reset();
  choose(chosen);
  dialog.showModal();
}

function choose(chosen) {
  const dialog = $("#add");
  adding = { ...sorted(chosen, info.limits) };
  const n = adding.photographs.length;
  const stage = state.gallery === "texts" ? "text" : ["none", "one"][n] ?? "many";
  dialog.dataset.stage = stage; // the style shows what belongs to it
  $(".problem", dialog).hidden = true;
  sayAdding(summary(adding));
  const id = $("[name=id]", dialog);
  id.required = ["text", "one"].includes(stage);
  id.value = stage === "one" ? adding.photographs[0].id : "";
  $(".main", dialog).textContent = stage === "many" ? `Add ${some(n, "photograph")}` : "Add";
  $(".close", dialog).textContent = "Cancel";
}

// A sentence, and what was left out: the reasons with their files.
function sayAdding(text) {
  const dialog = $("#add");
  const { left } = adding;
  $(".chosen", dialog).textContent = text;
  $(".left", dialog).hidden = !left.length;
  $(".left ul", dialog).replaceChildren(...left.slice(0, 100).map(([path, reason]) => h("li", {}, h("b", {}, path), ` ${reason}`)), ...(left.length > 100 ? [h("li", {}, `and ${count(left.length - 100)} more`)] : []));
}

async function add(event) {
  event.preventDefault();
  const dialog = $("#add");
  const { text, id: { value: id } } = event.target.elements;
  try {
    if (state.gallery === "images") return await addPhotographs(id);
    const { n } = await json("v1/items", { body: { gallery: state.gallery, items: [{ id, text: text.value }] } });
    dialog.close();
    await changed(n, `${id} was added.`);
  } catch (error) {
    complain(dialog, error);
  }
}

async function addPhotographs(id) {
  const dialog = $("#add");
  const { photographs, left } = adding;
  const [m, bar] = [photographs.length, $("progress", dialog)];
  if (m === 1) photographs[0].id = id;
  const stop = (adding.stop = new AbortController());
  bar.max = m;
  dialog.dataset.stage = "sending";
  $(".close", dialog).textContent = "Stop";
  const tell = (done) => {
    bar.value = done;
    $(".chosen", dialog).textContent = `${count(done)} of ${count(m)}`;
  };
  tell(0);
  let told;
  try {
    told = await send(photographs, left, info.limits, { signal: stop.signal, tell });
  } catch (error) {
    told = error.told;
    if (!told) throw error;
    complain(dialog, error);
  } finally {
    adding.stop = null;
    dialog.dataset.stage = "done";
    $(".close", dialog).textContent = "Close";
  }
  const replaced = told.stored - told.created;
  const said = m === 1 && told.stored ? `${id} was added` : `${stop.signal.aborted ? "Stopped: " : ""}${count(told.stored)} of ${some(m, "photograph")} added`;
  const whole = `${said}${replaced ? `; ${count(replaced)} of them replaced what had the same name` : ""}${left.length ? `; ${some(left.length, "file")} left out` : ""}.`;
  sayAdding(whole);
  if (dialog.open && !left.length && told.stored === m) dialog.close();
  if (told.stored) await changed(told.n, whole);
}

async function changed(n, said, gone) {
  answers.clear();
  folders.clear();
  forgetPictures();
  info = await json("v1/info").catch(() => info); // The fields may be others.
  here().n = n;
  go({ queries: state.queries.map((query) => (query?.kind === "id" && query.value === gone ? null : query)) }, "replaceState");
  $("#status").textContent = said;
  $("#notice").replaceChildren(h("p", { class: "card" }, said));
}

// ---- the page around them

function box(slot) {
  const node = made("ask").firstElementChild;
  const [text, file] = $$("input", node);
  node.dataset.ask = slot;
  text.id = `q${slot}`;
  text.ariaLabel = slot ? "Second search" : "Search";
  file.ariaLabel = slot ? "Second image to search by" : "Image to search by";
  on(file, "change", () => file.files[0] && (askPicture(slot, file.files[0]), (file.value = "")));
  return node;
}

const typed = () => (info.query_kinds.text ? "text" : "id"); // what the search box takes

function syncAsk(slot) {
  const { text, image } = info.query_kinds;
  const query = state.queries[slot];
  const node = $(`[data-ask="${slot}"]`);
  node.hidden = slot === 1 && !state.compare;
  const input = $("input[type=search]", node);
  const asked = JSON.stringify(query);
  if (asked !== (node.dataset.asked ?? "null")) input.value = query?.kind === typed() ? query.value : ""; // else keep what is being written
  node.dataset.asked = asked;
  const chip = $(".chip", node);
  chip.hidden = !query || query.kind === typed();
  $(".file", node).hidden = !image;
  if (!text) input.ariaLabel = slot ? "Id of a second item" : "Id of an item";
  input.placeholder = !text ? input.ariaLabel : !chip.hidden ? "or describe it" : slot ? "and something else to compare with" : image && matchMedia("(hover: hover)").matches ? "Describe it, or drop an image here" : "Describe it";
  if (!chip.hidden)
    chip.replaceChildren(...[thumbnailOf(query), h("span", {}, titleOf(query)), button({ "aria-label": "Remove it", onclick: () => (ask(slot, null), input.focus()) }, "×")].filter(Boolean));
}

function choices(name, none) {
  const select = $(`#${name}`);
  const values = filtered() ? [] : offers(name, state.gallery);
  select.disabled = !values.length;
  select.parentNode.hidden = !info.query_kinds[native()];
  select.replaceChildren(h("option", { value: "" }, values.length ? none : filtered() ? "not with a filter" : "not available"), ...values.map((value) => h("option", { value }, name === "abstain" ? `at most ${percent(value)}` : `with ${percent(value)}`)));
  select.value = state[name] ?? "";
}

function render() {
  const gallery = here();
  $("#about").textContent = things(state.gallery, gallery.n);
  $("#model").replaceChildren(`sfumato ${info.version} · model ${info.model}`, h("span", { class: "expert" }, ` · distance ${info.distance}`));
  $(`[name=gallery][value=${state.gallery}]`).checked = true;
  $("#compare").checked = state.compare;
  $("#asks").classList.toggle("two", state.compare);
  $("#answers").classList.toggle("two", state.compare);
  $("#least").value = Math.round(100 * state.least);
  sayLeast();
  $("#add-open").hidden = !(gallery.writable && info.query_kinds[state.gallery.slice(0, -1)]);
  $("#words").hidden = info.query_kinds.text;
  renderFilters(gallery);
  choices("abstain", "any number");
  choices("coverage", "do not show");
  const missing = [!gallery.risks.length && "limit wrong answers", !gallery.coverages.length && "guarantee a match"].filter(Boolean);
  $("#promises").hidden = !missing.length || !info.query_kinds[native()];
  $("#promises").textContent = gallery.calibrated ? `The calibration of this model cannot guarantee any usual value of: ${missing.join(", ")}.` : "Limits and sets need a model that was calibrated on held-out pairs (sfumato calibrate).";
  document.title = [...state.queries.filter(Boolean).map(titleOf), "sfumato"].join(" · ");
  SLOTS.forEach(syncAsk);
  $("#notice").replaceChildren();
  $("#answers").replaceChildren(...(state.queries.some(Boolean) ? [] : [welcome()]));
  SLOTS.forEach(search);
}

// Dates and folders, where the items have them.
function renderFilters({ fields }) {
  const has = (name) => fields.includes(name);
  $("#filters").hidden = !has("date") && !has("folder");
  for (const name of ["date", "folder"]) for (const node of $$(`.of-${name}`)) node.hidden = !has(name);
  for (const name of ["from", "to"]) $(`#${name}`).value = state[name] ?? "";
  $("#unfilter").hidden = !filtered();
  const said = [state.from && `from ${day(state.from)}`, state.to && `to ${day(state.to)}`, state.folder].filter(Boolean);
  $("#filters summary").textContent = said.length ? `Filter: ${said.join(", ")}` : "Filter";
  if (!has("folder")) return;
  const { gallery, folder } = state;
  foldersOf(gallery).then((found) => {
    if (state.gallery !== gallery || state.folder !== folder) return;
    const names = [...new Set([...found.keys(), ...(folder ? [folder] : [])])].sort();
    $("#folder").replaceChildren(h("option", { value: "" }, "all"), ...names.map((name) => h("option", { value: name, selected: name === folder }, `${name} (${count(found.get(name) ?? 0)})`)));
  });
}

const sayLeast = () => ($("#least").ariaValueText = $("#least-value").textContent = percent(state.least));

function askKey() {
  const dialog = $("#key");
  const line = $(".problem", dialog);
  line.hidden = !key();
  line.textContent = "The service does not accept this key.";
  if (!dialog.open) dialog.showModal();
}

// One image goes to the search under the pointer, else to the first; more are to be added.
function receive(event, data) {
  if (!data?.files.length) return;
  event.preventDefault();
  const aim = event.target.closest?.("[data-ask], [data-slot]")?.dataset ?? document.activeElement.closest("[data-ask]")?.dataset ?? {};
  const [reading, single] = [filesIn(data), data.files.length === 1 && data.files[0]];
  Promise.all([reading, begun]).then(([found]) => {
    const alone = found.length === 1 && !found[0].path.includes("/");
    if ($("#add").open) {
      if (state.gallery === "images" && !adding.stop) choose(found);
    } else if ($("dialog[open]")) return;
    else if (alone && single) {
      if (info.query_kinds.image) askPicture(Number(aim.ask ?? aim.slot ?? 0), single);
    } else if (state.gallery === "images" && !$("#add-open").hidden) openAdd(found);
    else hint("This page takes no new photographs: the collection can only be searched. Drop a single image to search by it.");
  });
}

function listen() {
  $("#search").addEventListener("submit", (event) => event.preventDefault());
  on($("#search"), "submit", () => {
    hint("");
    const queries = state.queries.map((query, slot) => {
      const value = cut($(`#q${slot}`).value);
      if (slot === 1 && !state.compare) return null;
      return value ? { kind: typed(), value } : query?.kind === typed() ? null : query;
    });
    if (!queries.some(Boolean)) hintBlank();
    wanted = HITS;
    go({ queries });
  });
  for (const input of $$("[name=gallery]"))
    on(input, "change", () => go({ gallery: input.value, abstain: null, coverage: null, queries: state.queries.map((query) => (query?.kind === "id" ? null : query)) }));
  for (const id of ["abstain", "coverage"]) on($(`#${id}`), "change", ({ target }) => go({ [id]: +target.value || null }));
  on($("#compare"), "change", ({ target }) => {
    go({ compare: target.checked, queries: target.checked ? state.queries : [state.queries[0], null] });
    if (target.checked) $("#q1").focus();
  });
  on($("#least"), "input", ({ target }) => {
    state.least = target.value / 100;
    sayLeast();
    filter();
  });
  on($("#least"), "change", () => remember("replaceState"));
  for (const id of FILTERS) on($(`#${id}`), "change", ({ target }) => go({ [id]: target.value || null, abstain: null, coverage: null }));
  on($("#unfilter"), "click", () => (go({ from: null, to: null, folder: null }), $("#filters summary").focus()));
  $("#experts summary").addEventListener("click", () => localStorage[$("#experts").open ? "removeItem" : "setItem"]("sfumato-experts", "1"));
  $("#experts").addEventListener("toggle", ({ target }) => document.body.classList.toggle("experts", target.open));
  on($("#add-open"), "click", () => openAdd());
  for (const input of $$("#add [type=file]")) on(input, "change", () => filesIn({ files: input.files }).then(choose));
  on($("#add form"), "submit", add);
  // While photographs are sent, the dialog stays until the part on its way has come.
  const leave = (event) => adding?.stop && (event.preventDefault(), event.stopImmediatePropagation(), adding.stop.abort());
  on($("#add"), "cancel", leave);
  on($("#add .close"), "click", leave);
  addEventListener("beforeunload", (event) => adding?.stop && event.preventDefault());
  for (const node of $$("#item .step")) on(node, "click", () => step(Number(node.dataset.step)));
  on($("#item"), "keydown", ({ key }) => ["ArrowLeft", "ArrowRight"].includes(key) && step(key === "ArrowLeft" ? -1 : 1));
  let closing = false;
  on($("#item"), "close", () => {
    viewed.backTo(viewed.at)?.focus();
    if (history.state?.viewing) (closing = true), history.back();
  });
  on($("#item .delete"), "click", remove);
  on($("#item .open"), "click", () => pictureURL(viewed.items[viewed.at].picture).then(open, (error) => complain($("#item"), error)));
  on($("#item .main"), "click", () => ($("#item").close(), like(viewed.slot, viewed.items[viewed.at].id)));
  for (const button of $$("dialog .close")) button.addEventListener("click", () => button.closest("dialog").close());
  const dragging = (is) => {
    document.body.classList.toggle("dragging", is);
    $("#dropping").hidden = !is || !info?.query_kinds.image || $("dialog[open]");
    $("#dropping span").hidden = $("#add-open").hidden || state?.gallery !== "images";
  };
  addEventListener("dragover", (event) => {
    event.preventDefault();
    dragging(true);
  });
  addEventListener("dragleave", ({ relatedTarget }) => relatedTarget ?? dragging(false));
  addEventListener("drop", (event) => {
    dragging(false);
    receive(event, event.dataTransfer);
  });
  addEventListener("paste", (event) => receive(event, event.clipboardData));
  on(window, "popstate", () => {
    if (closing) return void (closing = false);
    if ($("#item").open) return $("#item").close();
    hint("");
    state = read();
    render();
  });
}

async function start() {
  try {
    info = await json("v1/info");
  } catch (error) {
    return void $("#notice").replaceChildren(refusal(error, start));
  }
  $("#galleries").hidden = Object.keys(info.galleries).length < 2;
  state = read();
  state.compare ||= $("#compare").checked;
  if (!state.queries.some(Boolean) && /[?&](q|id)2?=/.test(location.search)) hintBlank();
  begin();
  render();
  if (!state.queries[0]) $("#q0").focus({ preventScroll: true });
}

$("#asks").append(...SLOTS.map(box));
$("#experts").open = localStorage.getItem("sfumato-experts") !== null || /[?&](least|abstain|coverage)=/.test(location.search);
const wide = matchMedia("(min-width: 761px)"); // where the filters are always there
wide.onchange = () => ($("#filters").open ||= wide.matches);
$("#filters").open = wide.matches || /[?&](from|to|folder)=/.test(location.search);
$("[data-ask='1']").hidden = true;
listen();
onKeyNeeded(askKey);
$("#key form").addEventListener("submit", ({ target }) => {
  setKey(target.elements.key.value);
  target.reset();
  if (!info) start();
  else render();
});
start();
