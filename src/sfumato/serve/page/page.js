// The page of `sfumato serve`: it calls the API at its own origin and shows the answers. The URL holds the search, so that
// it can be shared and Back works. An image is kept while the page is open.
import { CollectionMap } from "./map.js";

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector) => document.querySelectorAll(selector);

const h = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(2).filter((child) => child != null && child !== false));
  return node;
};
const button = (attributes, ...children) => h("button", { type: "button", ...attributes }, ...children);

const SLOTS = [0, 1];
const TONES = { clear: "sure", few: "sure", many: "vague", unsure: "none", abstained: "none", unfamiliar: "none" };
const HITS = 24;
const files = new Map(); // key -> picture that was asked with
const blobs = new Map(); // path -> promise of a URL of a picture of the collection
const known = new Map(); // id -> item: name and picture of what was seen
const answers = new Map(); // request -> answer
const maps = new Map(); // gallery -> promise of its map
const shown = [null, null]; // slot -> {query, answer}
const running = [null, null]; // slot -> AbortController
let wanted = HITS;
let info;
let state;
let begin;
const begun = new Promise((resolve) => (begin = resolve));

// Actions wait until the collection is known.
const on = (node, type, act) => node.addEventListener(type, (event) => (info ? act(event) : begun.then(() => act(event))));

let map;

// ---- the service

const TITLES = { 401: "This service needs a key", 404: "Not found", 413: "Too large", 422: "The service cannot use this request", 503: "The service is busy" };

class Refused extends Error {
  // From a problem document, without locations in a request that the reader never saw.
  constructor(status, { title, detail = "No reason was given" } = {}) {
    super(detail.replaceAll(/body\.(queries|items)\.0\.(\w+): /g, "").replace(/[.?]?$/, (end) => end || "."));
    Object.assign(this, { status, title: title ?? `The service answered ${status}` });
  }
}

const headers = () => {
  const key = sessionStorage.getItem("sfumato-key");
  return key ? { Authorization: `Bearer ${key}` } : {};
};

async function call(path, { method = "GET", body, signal } = {}) {
  const extra = body ? { "Content-Type": "application/json" } : {};
  let response;
  try {
    response = await fetch(path, { method, signal, headers: { ...headers(), ...extra }, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { title: "The service does not answer", detail: "Is it still running, and are you connected to it?" });
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401) askKey();
  throw new Refused(response.status, { ...problem, title: TITLES[response.status] ?? problem.title });
}

const json = async (path, options) => (await call(path, options)).json();

// The URL of an image; with a key it is fetched, since an <img> sends none.
async function pictureURL(picture, size) {
  const path = `${picture}?size=${size}`;
  if (!sessionStorage.getItem("sfumato-key")) return path;
  if (!blobs.has(path)) blobs.set(path, call(path).then((response) => response.blob()).then((blob) => URL.createObjectURL(blob)));
  return blobs.get(path);
}

const image = (path, alt = "", size = 224) => {
  const node = h("img", { alt, decoding: "async" });
  pictureURL(path, size).then((url) => (node.src = url), () => {});
  return node;
};

const base64 = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.split(",")[1] ?? "");
  reader.onerror = () => reject(new Refused(422, { title: "This image cannot be read", detail: file.name }));
  reader.readAsDataURL(file);
});

function checkPicture(file) {
  const { max_upload_bytes: most } = info.limits;
  if (file.type && !file.type.startsWith("image/")) throw new Refused(422, { title: "This is not an image", detail: `${file.name} is a ${file.type}.` });
  if (file.size > most) throw new Refused(413, { title: TITLES[413], detail: `The file has ${megabytes(file.size)}; the limit of the service is ${megabytes(most)}.` });
}

// ---- figures in words

const megabytes = (bytes) => `${figure(bytes / 1e6)} MB`;
const percent = (p) => (p > 0 && p < 0.0005 ? "<0.1%" : p < 1 && p >= 0.995 ? ">99%" : `${Number((100 * p).toFixed(p < 0.1 ? 1 : 0))}%`); // as in verdicts
const figure = (v, digits = 3) => (v >= 1000 ? count(v) : String(Number(v.toPrecision(digits))));
const count = (n) => Math.round(n).toLocaleString("en");
const about = (n) => (n > 0 && n < 0.05 ? "<0.1" : n < 10 ? String(Number(n.toFixed(1))) : count(n));
const nameOf = ({ id, payload }) => payload.label || payload.text || payload.name || id;
const things = (gallery, n) => `${count(n)} ${gallery === "texts" ? (n === 1 ? "text" : "texts") : n === 1 ? "image" : "images"}`;

const here = () => info.galleries[state.gallery];
const native = () => (state.gallery === "images" ? "text" : "image"); // what promises are made for

// ---- what is asked: the URL, and the pictures of this page

function read() {
  const get = new URLSearchParams(location.search);
  const gallery = info.galleries[get.get("in")] ? get.get("in") : Object.keys(info.galleries)[0];
  const queries = SLOTS.map((slot) => {
    const suffix = slot ? "2" : "";
    const key = history.state?.pictures?.[slot];
    if (files.has(key)) return { kind: "image", value: key };
    for (const [kind, name] of [...(info.query_kinds.text ? [["text", "q"]] : []), ["id", "id"]])
      if (get.get(name + suffix)?.trim()) return { kind, value: get.get(name + suffix).trim() };
    return null;
  });
  return {
    gallery,
    queries,
    compare: get.has("compare") || Boolean(queries[1]),
    view: get.get("view") === "map" ? "map" : "hits",
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
  if (state.view === "map") set("view", "map");
  for (const name of ["least", "abstain", "coverage"]) set(name, state[name]);
  const pictures = state.queries.map((query) => (query?.kind === "image" ? query.value : null));
  history[how]({ pictures }, "", `?${url}`.replace(/^\?$/, location.pathname));
}

function go(change, how = "pushState") {
  state = { ...state, ...change };
  remember(how);
  render();
}

function ask(slot, query) {
  wanted = HITS;
  const queries = [...state.queries];
  queries[slot] = query;
  go({ queries });
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

async function answerOf(query, signal) {
  const { gallery, abstain, coverage } = state;
  const options = { gallery, max_results: Math.min(wanted, info.limits.max_results), position: true, ...(query.kind === native() && { abstain, coverage }) };
  const key = JSON.stringify([options, query]);
  if (!answers.has(key)) {
    const value = query.kind === "image" ? await base64(files.get(query.value).file) : query.value;
    const body = { ...options, queries: [{ [query.kind]: value }] };
    const found = (await json("v1/search", { method: "POST", body, signal })).answers[0];
    const drawn = await maps.get(gallery)?.catch(() => null);
    if (drawn && drawn.version !== found.position?.version) {
      maps.delete(gallery); // the map has been drawn anew; so what was answered before lies in another plane
      answers.clear();
    }
    if (answers.size > 30) answers.delete(answers.keys().next().value);
    answers.set(key, found);
  }
  return answers.get(key);
}

async function search(slot) {
  const query = state.queries[slot];
  running[slot]?.abort();
  shown[slot] = running[slot] = null;
  if (!query) return;
  const controller = (running[slot] = new AbortController());
  const waiting = setTimeout(() => panel(slot, skeleton(query)), 80); // an answer at once needs no skeleton
  try {
    const answer = await answerOf(query, controller.signal);
    if (controller.signal.aborted) return;
    shown[slot] = { query, answer };
    for (const hit of answer.hits) known.set(hit.id, hit);
    panel(slot, result(slot, query, answer));
    filter();
    if (query.kind === "id") syncAsk(slot); // its name may have become known
    if (document.activeElement === document.body) $("#answers").focus({ preventScroll: true }); // what was clicked has gone
  } catch (error) {
    if (!controller.signal.aborted) fail(slot, error);
  } finally {
    clearTimeout(waiting);
    if (running[slot] === controller) (running[slot] = null), tell();
  }
}

// Both in one, as a second announcement may cut the first short.
const tell = () => running.some(Boolean) || ($("#status").textContent = shown.filter(Boolean).map(({ query, answer }) => `${titleOf(query)}: ${wordsOf(answer)}. ${answer.hits.length} results.`).join(" "));

// ---- the answers

const wordsOf = ({ verdict }) => verdict?.text ?? "Closest results first";

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

function result(slot, query, answer) {
  const { gallery } = state;
  const { n, calibrated } = info.galleries[gallery];
  const best = answer.hits[0]?.match_probability ?? 0;
  const fact = (value, label) => h("div", {}, h("b", {}, value), h("span", {}, label));
  const set = answer.conformal_set;
  const inSet = new Set(set?.hits.map(({ id }) => id));
  return h("section", { class: `card ${TONES[answer.verdict?.kind ?? "unsure"]}`, "aria-label": `Answer to ${titleOf(query)}` },
    h("header", {}, thumbnailOf(query), h("div", {}, h("h2", {}, titleOf(query)), h("p", { class: "verdict" }, wordsOf(answer)))),
    answer.calibrated && h("div", { class: "facts" }, fact(about(answer.expected_matches), "matches expected"), fact(percent(best), "first result is right")),
    !answer.calibrated && h("p", { class: "guess" }, calibrated
      ? `There are no probabilities, as they are not calibrated: the calibration was fitted on ${native()}s against ${gallery}, and this search compares two ${gallery}.`
      : "There are no probabilities, as they are not calibrated: the model has no calibration."),
    answer.calibrated && h("details", {}, h("summary", {}, "What do these numbers mean?"),
      h("p", {}, h("b", {}, "Matches expected. "), `Each of the ${things(gallery, n)} has a match probability, computed from its distance (${answer.distance}) to your query and from the distances of the closest results: one clear result is more probable than the same distance among many. The probabilities add up to ${about(answer.expected_matches)}: that many true matches are expected.`),
      h("p", {}, h("b", {}, "First result is right. "), "The match probability of the closest result.")),
    set && h("p", { class: "count" }, set.complete ? `The framed set of ${things(gallery, set.hits.length)}: for queries like those of the calibration it holds a match with a probability of ${percent(set.coverage)}.` : `The framed set was cut at ${things(gallery, set.hits.length)}, so its coverage of ${percent(set.coverage)} is not guaranteed.`),
    h("p", { class: "count", "data-count": "" }),
    h("ul", { class: `grid ${state.gallery}` }, answer.hits.map((hit) => card(slot, hit, inSet.has(hit.id)))),
    wanted < Math.min(n, info.limits.max_results) && answer.hits.length >= wanted && h("p", { class: "after", "data-probability": answer.hits.at(-1).match_probability ?? 1 }, button({ onclick: () => { wanted *= 2; search(slot); } }, "More results")));
}

const pick = (slot, item, ...children) =>
  button({ class: "pick", title: "More like this", onclick: () => like(slot, item.id) },
    item.picture ? image(item.picture) : here().pictures && h("i", { class: "blank" }), h("span", { class: "name" }, nameOf(item)), children);

function card(slot, hit, inSet) {
  const name = nameOf(hit);
  const bar = h("i");
  const p = hit.match_probability;
  bar.style.width = `${100 * p}%`;
  return h("li", { class: inSet ? "hit in-set" : "hit", "data-probability": p ?? 1 },
    pick(slot, hit,
      p !== null && h("span", { class: "bar" }, bar),
      h("span", { class: "figures" }, p !== null && [h("span", { class: "quiet" }, "match probability "), h("b", {}, percent(p))], h("span", { class: "soft", title: "total variance of this item" }, `σ² ${figure(hit.uncertainty, 2).replace(/^0\./, ".")}`))),
    button({ class: "more", "aria-label": `Details of ${name}`, onclick: () => details(slot, hit) }, "⋯"));
}

// Hides results below the probability of the slider, without a request.
function filter() {
  for (const slot of SLOTS) {
    if (!shown[slot]) continue;
    const { hits, calibrated } = shown[slot].answer;
    const left = hits.filter((hit) => !calibrated || hit.match_probability >= state.least);
    const sum = left.reduce((total, hit) => total + hit.match_probability, 0);
    const section = $(`#answers [data-slot="${slot}"]`);
    for (const item of section.querySelectorAll("[data-probability]")) item.hidden = Number(item.dataset.probability) < state.least;
    const which = state.least ? `${left.length} of the ${hits.length} closest have a probability of at least ${percent(state.least)}` : `The ${hits.length} closest`;
    $("[data-count]", section).textContent = !hits.length ? "This collection is empty." : !left.length ? `None of the ${hits.length} closest has a probability of at least ${percent(state.least)}.`
      : calibrated ? `${which}: about ${about(sum)} of these should match.` : `The ${hits.length} closest.`;
  }
  if (state.view === "map") mark();
}

const welcome = () => {
  const { n } = here();
  const { text, image } = info.query_kinds;
  const some = h("ul", { class: `grid ${state.gallery}` });
  if (n) mapOf(state.gallery).then(({ points }) => {
    const step = Math.max(1, Math.floor(points.length / 12));
    some.append(...points.filter((_, i) => i % step === 0).slice(0, 12).map((point) => h("li", { class: "hit" }, pick(0, point))));
  }, () => {});
  return h("section", { class: "card empty" }, h("h2", {}, text ? "Search for anything" : "Search by item"),
    h("p", {}, "Every result has a probability that it matches. Every answer says how many matches to expect: many for a vague query, one for a precise one. ", text ? "Write a text" : "Write the id of an item", image && ", or drop or paste an image",
      n ? ", or start from one of these." : ". This collection is still empty."), some);
};

// ---- details of a hit, deleting, adding

function details(slot, hit) {
  const dialog = $("#item");
  const row = (label, value) => [h("dt", {}, label), h("dd", {}, value)];
  $("h2", dialog).textContent = nameOf(hit);
  $(".problem", dialog).hidden = true;
  $(".about", dialog).replaceChildren(...(hit.picture ? [image(hit.picture, nameOf(hit), 1024)] : []),
    h("dl", {}, hit.match_probability !== null ? row("Match probability", percent(hit.match_probability)) : [], row("Rank", hit.rank), row("Distance", figure(hit.distance)), row("Total variance", figure(hit.uncertainty)), row("Id", hit.id),
      Object.entries(hit.payload).map(([name, value]) => row(name, value))));
  $(".main", dialog).onclick = () => (dialog.close(), like(slot, hit.id));
  const remove = $(".delete", dialog);
  remove.hidden = !here().writable;
  remove.textContent = "Delete…";
  remove.onclick = async () => {
    if (remove.textContent === "Delete…") return void (remove.textContent = "Delete permanently");
    try {
      const { n } = await json("v1/items/delete", { method: "POST", body: { gallery: state.gallery, ids: [hit.id] } });
      dialog.close();
      changed(n, `${nameOf(hit)} was deleted.`, hit.id);
    } catch (error) {
      complain(dialog, error);
    }
  };
  dialog.showModal();
}

function complain(dialog, { title, message }) {
  const line = $(".problem", dialog);
  line.textContent = `${title}. ${message}`;
  line.hidden = false;
}

async function add(event) {
  event.preventDefault();
  const dialog = $("#add");
  const { file, text, id: { value: id } } = event.target.elements;
  const { gallery } = state;
  try {
    if (gallery === "images") checkPicture(file.files[0]);
    const content = gallery === "images" ? { image: await base64(file.files[0]) } : { text: text.value };
    const { n } = await json("v1/items", { method: "POST", body: { gallery, items: [{ id, ...content }] } });
    dialog.close();
    event.target.reset();
    changed(n, `${id} was added.`);
  } catch (error) {
    complain(dialog, error);
  }
}

function changed(n, said, gone) {
  here().n = n;
  answers.clear();
  blobs.clear();
  maps.delete(state.gallery);
  go({ queries: state.queries.map((query) => (query?.kind === "id" && query.value === gone ? null : query)) }, "replaceState");
  $("#status").textContent = said;
}

// ---- the map

function mapOf(gallery) {
  if (!maps.has(gallery)) {
    const promise = json(`v1/map?n=2000&gallery=${gallery}`);
    promise.then(({ points }) => points.forEach((point) => known.has(point.id) || known.set(point.id, point)), () => maps.delete(gallery));
    maps.set(gallery, promise);
  }
  return maps.get(gallery);
}

async function mark() {
  const { gallery, least } = state;
  let found;
  try {
    found = await mapOf(gallery);
  } catch (error) {
    $("#legend").textContent = `The map cannot be shown: ${error.message}`;
    return;
  }
  if (gallery !== state.gallery || state.view !== "map") return;
  const marks = SLOTS.filter((slot) => shown[slot]).map((slot) => {
    const { query, answer } = shown[slot];
    const hits = answer.hits.filter((hit) => (hit.match_probability ?? 1) >= least);
    return { label: titleOf(query), tone: TONES[answer.verdict?.kind ?? "unsure"], dashed: slot === 1, ellipse: answer.position?.version === found.version ? answer.position : null, hits: new Map(hits.map((hit) => [hit.id, hit.match_probability ?? 1])) };
  });
  map.show(found.points, marks);
  const ids = new Set(found.points.map(({ id }) => id));
  const outside = new Set(marks.flatMap(({ hits }) => [...hits.keys()]).filter((id) => !ids.has(id))).size;
  $("#legend").textContent = [
    `${found.points.length < found.n ? `A sample of ${count(found.points.length)} of ` : ""}${things(gallery, found.n)}, each drawn as an ellipse of one standard deviation. The two axes show ${percent(found.explained[0])} and ${percent(found.explained[1])} of the variance of the means: items far apart on the map are far apart, items close on it may not be close.`,
    marks.length && `Coloured: your query and its results${outside ? ` (${outside} of them are not in the sample)` : ""}.`,
    "Drag to move, scroll or pinch to zoom; select an item to find similar ones.",
  ].filter(Boolean).join(" ");
  list(found.points, marks);
}

// What the canvas shows, in words: the queries, and all items, hits first.
function list(points, marks) {
  const details = $("#list");
  const fill = () => {
    if (!details.open) return;
    const hit = (point) => marks.some(({ hits }) => hits.has(point.id));
    const at = ({ x, y }) => `at ${x.toFixed(2)}, ${y.toFixed(2)}`;
    $("ul", details).replaceChildren(
      ...marks.filter(({ ellipse }) => ellipse).map(({ label, ellipse }) => h("li", {}, h("b", {}, label), ` ${at(ellipse)}, ± ${figure(ellipse.a)} by ${figure(ellipse.b)}`)),
      ...[...points].sort((one, other) => hit(other) - hit(one)).map((point) => h("li", {},
        button({ onclick: () => like(0, point.id) }, nameOf(point)), ` ${hit(point) ? "(result) " : ""}${at(point)}, total variance ${figure(point.uncertainty)}`)));
  };
  details.ontoggle = fill;
  fill();
}

const tip = (point) => {
  const probability = SLOTS.map((slot) => shown[slot]?.answer.hits.find(({ id }) => id === point.id)).filter(Boolean);
  return [point.picture && image(point.picture), h("div", {}, h("b", {}, nameOf(point)), ...probability.filter((hit) => hit.match_probability !== null).map((hit) => h("div", {}, `match probability ${percent(hit.match_probability)}`)), h("div", { class: "soft" }, `total variance ${figure(point.uncertainty)}`))].filter(Boolean);
};

// ---- the page around them

function box(slot) {
  const node = $("#ask").content.cloneNode(true).firstElementChild;
  const [text, file] = node.querySelectorAll("input");
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
  input.placeholder = !text ? input.ariaLabel : !chip.hidden ? "or describe it" : slot ? "and something else to compare with" : image ? "Describe it, or drop an image here" : "Describe it";
  if (!chip.hidden)
    chip.replaceChildren(...[thumbnailOf(query), h("span", {}, titleOf(query)), button({ "aria-label": "Remove it", onclick: () => (ask(slot, null), input.focus()) }, "×")].filter(Boolean));
}

function choices(name, none) {
  const select = $(`#${name}`);
  const values = offers(name, state.gallery);
  select.disabled = !values.length;
  select.parentNode.hidden = !info.query_kinds[native()];
  select.replaceChildren(h("option", { value: "" }, values.length ? none : "not available"), ...values.map((value) => h("option", { value }, name === "abstain" ? `at most ${percent(value)}` : `with ${percent(value)}`)));
  select.value = state[name] ?? "";
}

function render() {
  const gallery = here();
  $("#about").textContent = `${things(state.gallery, gallery.n)} · model ${info.model} · ${info.distance}`;
  $(`[name=gallery][value=${state.gallery}]`).checked = true;
  $(`[name=view][value=${state.view}]`).checked = true;
  $("#compare").checked = state.compare;
  $("#asks").classList.toggle("two", state.compare);
  $("#answers").classList.toggle("two", state.compare);
  $("#least").value = Math.round(100 * state.least);
  sayLeast();
  $("#add-open").hidden = !(gallery.writable && info.query_kinds[state.gallery.slice(0, -1)]);
  $("#words").hidden = info.query_kinds.text;
  choices("abstain", "any number");
  choices("coverage", "do not show");
  const missing = [!gallery.risks.length && "limit wrong answers", !gallery.coverages.length && "guarantee a match"].filter(Boolean);
  $("#promises").hidden = !missing.length || !info.query_kinds[native()];
  $("#promises").textContent = gallery.calibrated ? `The calibration of this model cannot guarantee any usual value of: ${missing.join(", ")}.` : "Limits and sets need a model that was calibrated on held-out pairs (sfumato calibrate).";
  document.title = [...state.queries.filter(Boolean).map(titleOf), "sfumato"].join(" · ");
  SLOTS.forEach(syncAsk);
  $("#notice").replaceChildren();
  $("#answers").replaceChildren(...(state.queries.some(Boolean) ? [] : [welcome()]));
  $("#answers").classList.toggle("brief", state.view === "map");
  $("#map").hidden = state.view !== "map";
  SLOTS.forEach(search);
  if (state.view === "map") mark();
}

const sayLeast = () => ($("#least").ariaValueText = $("#least-value").textContent = percent(state.least));

function askKey() {
  const dialog = $("#key");
  const line = $(".problem", dialog);
  line.hidden = !sessionStorage.getItem("sfumato-key");
  line.textContent = "The service does not accept this key.";
  if (!dialog.open) dialog.showModal();
}

// A dropped or pasted image goes to the search under the pointer, else to the first.
function receive(event, data) {
  const file = [...(data?.files ?? [])][0];
  if (!file) return;
  event.preventDefault();
  if ($("#add").open) {
    const input = $("#add [name=file]");
    input.files = data.files;
    name(input);
  } else if (!$("dialog[open]")) {
    const aim = event.target.closest?.("[data-ask], [data-slot]")?.dataset ?? document.activeElement.closest("[data-ask]")?.dataset ?? {};
    begun.then(() => info.query_kinds.image && askPicture(Number(aim.ask ?? aim.slot ?? 0), file));
  }
}

const name = ({ form, files: [file] }) => (form.elements.id.value ||= file?.name ?? "");

function listen() {
  $("#search").addEventListener("submit", (event) => event.preventDefault());
  on($("#search"), "submit", () => {
    const queries = state.queries.map((query, slot) => {
      const value = $(`#q${slot}`).value.trim();
      if (slot === 1 && !state.compare) return null;
      return value ? { kind: typed(), value } : query?.kind === typed() ? null : query;
    });
    wanted = HITS;
    go({ queries });
  });
  for (const input of $$("[name=gallery]"))
    on(input, "change", () => go({ gallery: input.value, abstain: null, coverage: null, queries: state.queries.map((query) => (query?.kind === "id" ? null : query)) }));
  for (const input of $$("[name=view]")) on(input, "change", () => go({ view: input.value }));
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
  on($("#add-open"), "click", () => {
    const dialog = $("#add");
    $(".problem", dialog).hidden = true;
    for (const kind of ["images", "texts"]) {
      const label = $(`.of-${kind}`, dialog);
      label.hidden = kind !== state.gallery;
      $("input, textarea", label).required = kind === state.gallery;
    }
    dialog.showModal();
  });
  on($("#add [name=file]"), "change", ({ target }) => name(target));
  on($("#add form"), "submit", add);
  for (const button of $$("dialog .close")) button.addEventListener("click", () => button.closest("dialog").close());
  for (const button of $$(".zoom button")) on(button, "click", () => map.zoom(Number(button.dataset.zoom)));
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", ({ relatedTarget }) => relatedTarget ?? document.body.classList.remove("dragging"));
  addEventListener("drop", (event) => {
    document.body.classList.remove("dragging");
    receive(event, event.dataTransfer);
  });
  addEventListener("paste", (event) => receive(event, event.clipboardData));
  on(window, "popstate", () => {
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
  map = new CollectionMap($("canvas"), $("#tip"), { picture: pictureURL, describe: tip, pick: ({ id }) => like(0, id) });
  begin();
  render();
  if (!state.queries[0]) $("#q0").focus({ preventScroll: true });
}

$("#asks").append(...SLOTS.map(box));
const narrow = matchMedia("(max-width: 520px)"); // folds the options, unless they are in use
(narrow.onchange = () => ($("#options").open = !narrow.matches || /least|abstain|coverage/.test(location.search)))();
$("[data-ask='1']").hidden = true;
listen();
$("#key form").addEventListener("submit", ({ target }) => {
  sessionStorage.setItem("sfumato-key", target.elements.key.value);
  target.reset();
  if (!info) start();
  else render();
});
start();
