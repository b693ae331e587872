// Photographs that are dropped or chosen: with the captions beside them, sorted from what is none, and sent in parts.
import { base64, json } from "./service.js";
import { count, megabytes, some } from "./words.js";

const PHOTOGRAPH = /\.(jpe?g|jfif|png|webp|gif|bmp|tiff?|heic|heif|avif|dng|cr[23]|nef|arw|raf|orf|rw2)$/i;
const HIDDEN = /(^|\/)(\.[^/]*|__MACOSX|Thumbs\.db|desktop\.ini)(\/|$)/i;
const PART = 2e6; // bytes of files in a request, but for a single larger one: the progress moves
const TRIES = 6;
const LONGEST = 2000; // characters of the captions

const plainly = (files) => files.map((file) => ({ file, path: file.webkitRelativePath || file.name }));

// The files of a drop or a choice, with their paths. What is dropped is gone after the event: this begins within it.
export function filesIn(data) {
  const entries = [...(data.items ?? [])].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return entries.length ? walked(entries) : Promise.resolve(plainly([...data.files]));
}

async function walked(entries) {
  const found = [];
  const one = (reader, name) => new Promise((resolve, reject) => reader[name](resolve, reject));
  while (entries.length) {
    const entry = entries.shift();
    const path = entry.fullPath.slice(1);
    try {
      if (entry.isFile) found.push({ path, file: await one(entry, "file") });
      else
        for (let reader = entry.createReader(), some; (some = await one(reader, "readEntries")).length; ) entries.push(...some);
    } catch {
      found.push({ path });
    }
  }
  return found;
}

// -> {photographs: [{id, file, beside}], left: [[path, reason]]}; beside: the text file of the same name.
export function sorted(files, { max_upload_bytes: most }) {
  const left = [];
  const stem = (path) => path.replace(/\.[^./]*$/, "").toLowerCase();
  const silent = files.flatMap(({ path }) => (/(^|\/)\.nomedia$/.test(path) ? path.slice(0, -8) : []));
  files = files.filter(({ path }) => !HIDDEN.test(path)).sort((one, other) => (one.path < other.path ? -1 : 1));
  const texts = new Map(files.filter(({ path, file }) => file && /\.txt$/i.test(path)).map((one) => [stem(one.path), one]));
  const photographs = [];
  const used = new Set();
  for (const { path, file } of files) {
    const beside = texts.get(stem(path));
    if (!file) left.push([path, "cannot be read"]);
    else if (beside?.path === path) continue;
    else if (silent.some((folder) => path.startsWith(folder))) left.push([path, "lies below a .nomedia"]);
    else if (!PHOTOGRAPH.test(path) && !file.type.startsWith("image/")) left.push([path, "is no photograph"]);
    else if (file.size > most) left.push([path, `has ${megabytes(file.size)}; this service takes ${megabytes(most)}`]);
    else photographs.push({ id: path, file, beside: beside?.file });
    if (beside) used.add(beside);
  }
  for (const one of texts.values()) if (!used.has(one)) left.push([one.path, "is a text without a photograph of its name"]);
  return { photographs, left };
}

export function summary({ photographs, left }) {
  if (!photographs.length && !left.length) return "";
  const n = photographs.length;
  const captions = photographs.filter(({ beside }) => beside).length;
  const bytes = photographs.reduce((total, { file }) => total + file.size, 0);
  const said = n ? `${some(n, "photograph")} (${megabytes(bytes)})` : "No photograph";
  return `${said}${captions ? `, ${count(captions)} with captions` : ""}${left.length ? `; ${some(left.length, "file")} left out` : ""}.`;
}

async function item({ id, file, beside }) {
  const lines = beside ? (await beside.text()).split(/\r?\n/).map((line) => line.trim()).filter(Boolean) : [];
  const folder = id.slice(0, Math.max(0, id.lastIndexOf("/")));
  const captions = lines.join("\n").replaceAll("\0", "").slice(0, LONGEST);
  return { id, image: await base64(file), payload: { ...(captions && { captions }), ...(folder && { folder }) } };
}

// Sends photographs a part at a time. tell(n done) after each; what the service refuses goes to `left` with its reason.
export async function send(photographs, left, { max_batch: most }, { signal, tell }) {
  const told = { stored: 0, created: 0, n: null };
  const waiting = [...photographs];
  let tries = 0;
  const refuse = ({ id }, reason) => left.push([id, reason]);
  while (waiting.length && !signal.aborted) {
    let [size, bytes] = [0, 0];
    while (size < Math.min(most, waiting.length) && (!size || bytes + waiting[size].file.size <= PART)) bytes += waiting[size++].file.size;
    await sendPart(waiting.splice(0, size));
    tell(photographs.length - waiting.length);
  }
  return told;

  async function sendPart(part) {
    try {
      const { stored, created, n } = await json("v1/items", { body: { gallery: "images", items: await Promise.all(part.map(item)) } });
      Object.assign(told, { stored: told.stored + stored, created: told.created + created, n });
      tries = 0;
    } catch (error) {
      const wrong = new Map((error.errors ?? []).map(({ where, message }) => [Number(/^body\.items\.(\d+)/.exec(where)?.[1] ?? NaN), message]));
      if (error.status === undefined) part.forEach((one) => refuse(one, "cannot be read"));
      else if (error.status === 422 && part.some((_, i) => wrong.has(i))) {
        part.forEach((one, i) => wrong.has(i) && refuse(one, wrong.get(i)));
        const rest = part.filter((_, i) => !wrong.has(i));
        if (rest.length) await sendPart(rest);
      } else if ([413, 422].includes(error.status)) {
        if (part.length === 1) return refuse(part[0], error.message);
        const half = part.length >> 1; // together they may be too large, or have too many pixels
        await sendPart(part.slice(0, half));
        await sendPart(part.slice(half));
      } else if ([503, 504].includes(error.status) && tries++ < TRIES && !signal.aborted) {
        await new Promise((resolve) => setTimeout(resolve, 500 * 2 ** tries));
        await sendPart(part);
      } else throw Object.assign(error, { told });
    }
  }
}
