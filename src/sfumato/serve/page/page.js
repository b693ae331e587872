// The page of `sfumato serve`: it calls the API at its own origin and shows the answers. The URL holds the search, so that
// it can be shared and Back works. An image is kept while the page is open.
import { Refused, forgetPictures, json, key, onKeyNeeded, pictureURL, setKey } from "./service.js";
import { about, bar, button, count, expectation, figure, h, megabytes, nameOf, odds, percent, strip, things } from "./words.js";

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector) => document.querySelectorAll(selector);

const SLOTS = [0, 1];
const TONES = new Map(Object.entries({ clear: "sure", few: "sure", many: "calm", unsure: "unsure", abstained: "none", unfamiliar: "none" }));
const SIGNS = { sure: "✓", calm: "●●●", unsure: "?", none: "–" }; // beside the colour, which not everyone sees
const HITS = 24;
const LONGEST = 2000; // characters of a text that the service takes
const THUMBNAIL = 96; // pixels, on the start page
const files = new Map(); // key -> picture that was asked with
const known = new Map(); // id -> item: name and picture of what was seen
const answers = new Map(); // request -> answer
const shown = [null, null]; // slot -> {query, answer}
const running = [null, null]; // slot -> AbortController
let wanted = HITS;
let info;
let state;
let begin;
const begun = new Promise((resolve) => (begin = resolve));

// Actions wait until the collection is known.
const on = (node, type, act) => node.addEventListener(type, (event) => (info ? act(event) : begun.then(() => act(event))));

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
  if (file.size > most) throw new Refused(413, { detail: `The file has ${megabytes(file.size)}; the limit of the service is ${megabytes(most)}.` });
}

const here = () => info.galleries[state.gallery];
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
  hint("");
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
  const options = { gallery, max_results: Math.min(wanted, info.limits.max_results), ...(query.kind === native() && { abstain, coverage }) };
  const key = JSON.stringify([options, query]);
  if (!answers.has(key)) {
    const value = query.kind === "image" ? await base64(files.get(query.value).file) : query.value;
    const body = { ...options, queries: [{ [query.kind]: value }] };
    const found = (await json("v1/search", { method: "POST", body, signal })).answers[0];
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
    panel(slot, result(slot, query, answer));
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

// Both in one, as a second announcement may cut the first short.
const tell = () => running.some(Boolean) || ($("#status").textContent = shown.filter(Boolean).map(({ query, answer }) => `${titleOf(query)}: ${wordsOf(answer)}. ${answer.hits.length} results.`).join(" "));

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
  return h("section", { class: `card ${toneOf(answer)}`, "aria-label": `Answer to ${title.slice(0, 100)}` },
    h("header", {}, thumbnailOf(query), h("div", {}, h("h2", { title: title.length > 80 && title }, title), verdictOf(answer))),
    answer.verdict?.kind === "unfamiliar" ? h("p", { class: "guess" }, "So the probabilities below say little. Check the spelling, or use other words.")
      : answer.calibrated ? facts(answer, n, gallery) : plain(gallery),
    set && h("p", { class: "count" }, set.complete ? `The framed set of ${things(gallery, set.hits.length)}: for queries like those of the calibration it holds a match with a probability of ${percent(set.coverage)}.` : `The framed set was cut at ${things(gallery, set.hits.length)}, so its coverage of ${percent(set.coverage)} is not guaranteed.`),
    h("p", { class: "count", "data-count": "" }),
    h("ul", { class: `grid ${gallery}` }, answer.hits.map((hit) => card(slot, hit, inSet.has(hit.id))), wanted < Math.min(n, info.limits.max_results) && answer.hits.length >= wanted
      && h("li", { class: "after", "data-probability": answer.hits.at(-1).match_probability ?? 1 }, button({ onclick: () => { wanted *= 2; search(slot, { more: true }); } }, "More results"))));
}

const facts = (answer, n, gallery) => [
  h("div", { class: "facts" },
    h("div", {}, h("p", {}, expectation(answer.expected_matches, n, gallery)), strip(answer.expected_matches, n)),
    answer.hits.length > 0 && h("div", {}, h("p", {}, "First result: right in ", h("b", {}, odds(number(answer))), " such searches"),
      h("span", { class: "strip", role: "img", "aria-label": `probability ${percent(number(answer))}` }, bar(number(answer))))),
  answer.queries_differ && h("p", { class: "guess" }, "Recent searches differ from those that the probabilities were fitted on: they may be off."),
  h("details", {}, h("summary", {}, "What do these numbers mean?"),
    h("p", {}, h("b", {}, "A match "), "is a pair like those that the data list, such as a photograph and its caption. A result is right if it is a match of your search in this sense. More results may fit your words than the numbers say: a list names few of the pairs that fit."),
    h("p", {}, h("b", {}, "How many match. "), `Each of the ${things(gallery, n)} has a probability that it matches. It comes from its distance to your search, and from the distances of the closest results: one clear result is more probable than the same distance among many. The probabilities add up to ${about(answer.expected_matches)}: that many matches are to be expected; for a vague search the true number can be much smaller or larger. The strip is the whole gallery.`),
    h("p", {}, h("b", {}, "The first result. "), `Its probability is ${percent(number(answer))}. Among many searches with such a first result, that part has a right one, which is a match.`),
    h("p", {}, h("b", {}, "For those who know the method. "), `Distance ${answer.distance}; total variance of the search ${figure(answer.total_variance)}.`)),
];

const plain = (gallery) =>
  h("p", { class: "guess" }, h("b", {}, "No probabilities here. "), here().calibrated
    ? `They are not calibrated for this search: the calibration was fitted on ${native()}s against ${gallery}, and this search compares two ${gallery}. `
    : "They are not calibrated: the model has no calibration. ",
  "The results are in the order of their distance; how many of them match is not known.");

const pick = (slot, item, { size, children } = {}) =>
  button({ class: "pick", title: "More like this", onclick: () => like(slot, item.id) },
    item.picture ? image(item.picture, "", size) : here().pictures && h("i", { class: "blank" }), h("span", { class: "name" }, nameOf(item)), children);

function card(slot, hit, inSet) {
  const name = nameOf(hit);
  const p = hit.match_probability;
  const figures = p !== null && [bar(p), h("span", { class: "figures" }, h("span", { class: "quiet" }, "match probability "), h("b", {}, percent(p)))];
  return h("li", { class: inSet ? "hit in-set" : "hit", "data-probability": p ?? 1 },
    pick(slot, hit, { children: figures }),
    button({ class: "more", "aria-label": `Details of ${name}`, onclick: () => details(slot, hit) }, "⋯"));
}

// Hides results below the probability of the slider, without a request.
function filter() {
  for (const slot of SLOTS) {
    if (!shown[slot]) continue;
    const { answer } = shown[slot];
    const section = $(`#answers [data-slot="${slot}"]`);
    for (const item of section.querySelectorAll("[data-probability]")) item.hidden = Number(item.dataset.probability) < state.least;
    $("[data-count]", section).textContent = counted(answer);
  }
}

// What the shown results are part of. Fewer than one match is not said: an image matches or not.
function counted({ hits, calibrated, verdict, expected_matches: expected }) {
  const { n } = here();
  if (!hits.length) return "";
  const closest = hits.length < n ? `the ${hits.length} closest of ${things(state.gallery, n)}` : `all ${things(state.gallery, n)}`;
  const sum = (some) => some.reduce((total, hit) => total + hit.match_probability, 0);
  if (!calibrated || verdict.kind === "unfamiliar") return `These are ${closest}.`;
  if (!state.least) {
    const rest = hits.length < n ? Math.round(expected) - Math.round(sum(hits)) : 0;
    const others = rest > 0 ? `, and about ${count(rest)} of the others` : "";
    return `These are ${closest}.` + (sum(hits) < 1 ? "" : ` About ${count(sum(hits))} of these should match${others}.`);
  }
  const left = hits.filter((hit) => hit.match_probability >= state.least);
  const which = `a probability of at least ${percent(state.least)}`;
  return left.length ? `Of ${closest}, ${left.length} ${left.length === 1 ? "has" : "have"} ${which}${sum(left) < 1 ? "" : `: about ${count(sum(left))} of these should match`}.` : `Of ${closest}, none has ${which}.`;
}

// ---- the start

const KINDS = { vague: "A vague search", precise: "A precise search", nonsense: "No words at all" };

function welcome() {
  const { n } = here();
  const { text, image: pictures } = info.query_kinds;
  const { gallery } = state;
  const waiting = n > 0 && Array.from({ length: 3 }, () => h("li", { class: "tile waiting", "aria-hidden": "true" }, h("i", { class: "blank" })));
  const tiles = h("ul", { class: "tiles" }, waiting);
  const node = h("section", { class: "card empty" },
    h("h2", {}, text ? `Search ${things(gallery, n)}` : `Search ${things(gallery, n)} by item`),
    h("p", {}, ...(!n ? ["This collection is still empty."] : [
      text ? "Write what you look for" : "Write the id of an item", pictures && ", or drop or paste an image",
      here().calibrated && info.query_kinds[native()] ? ". Every answer says how many results should match, and how likely the first one is right." : ". The closest items come first.",
    ]).filter(Boolean)), tiles);
  if (n) json(`v1/examples?gallery=${gallery}`).then(({ queries, items }) => {
    for (const item of items) known.set(item.id, item);
    tiles.replaceChildren(...queries.map(example));
    if (queries.length) $("p", node).append(" Try the difference:");
    if (items.length) tiles.append(h("li", { class: "tile wide" }, h("h3", {}, here().pictures ? "An image: what looks like it?" : "An item: what is like it?"),
      h("ul", { class: `grid ${gallery}` }, items.map((item) => h("li", { class: "hit" }, pick(0, item, { size: THUMBNAIL }))))));
  }, () => tiles.replaceChildren()); // Without examples one can search all the same.
  return node;
}

const example = ({ kind, answer }) =>
  h("li", { class: `tile ${toneOf(answer)} ${kind}` },
    h("h3", {}, KINDS[kind]),
    button({ class: "try", onclick: () => ask(0, { kind: "text", value: answer.query }) },
      h("span", { class: "query" }, `“${answer.query}”`),
      h("span", { class: "thumbs" }, answer.hits.map((hit) => (hit.picture ? image(hit.picture, "", THUMBNAIL) : h("span", { class: "name" }, nameOf(hit))))),
      kind !== "nonsense" && strip(answer.expected_matches, here().n), verdictOf(answer)));

// ---- details of a hit, deleting, adding

function details(slot, hit) {
  const dialog = $("#item");
  const row = (label, value) => [h("dt", {}, label), h("dd", {}, value)];
  $("h2", dialog).textContent = nameOf(hit);
  $(".problem", dialog).hidden = true;
  $(".about", dialog).replaceChildren(...(hit.picture ? [image(hit.picture, nameOf(hit), 1024)] : []),
    h("dl", {}, hit.match_probability !== null ? row("Match probability", percent(hit.match_probability)) : [], row("Rank", hit.rank), row("Distance", figure(hit.distance)), row("Total variance", figure(hit.total_variance)), row("Id", hit.id),
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
  forgetPictures();
  go({ queries: state.queries.map((query) => (query?.kind === "id" && query.value === gone ? null : query)) }, "replaceState");
  $("#status").textContent = said;
}

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
  input.placeholder = !text ? input.ariaLabel : !chip.hidden ? "or describe it" : slot ? "and something else to compare with" : image && matchMedia("(hover: hover)").matches ? "Describe it, or drop an image here" : "Describe it";
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
  $("#about").textContent = things(state.gallery, gallery.n);
  $("#model").textContent = `sfumato ${info.version} · model ${info.model} · distance ${info.distance}`;
  $(`[name=gallery][value=${state.gallery}]`).checked = true;
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
  SLOTS.forEach(search);
}

const sayLeast = () => ($("#least").ariaValueText = $("#least-value").textContent = percent(state.least));

function askKey() {
  const dialog = $("#key");
  const line = $(".problem", dialog);
  line.hidden = !key();
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
$("#options").open = /[?&](least|abstain|coverage)=/.test(location.search); // folded, unless they are in use
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
