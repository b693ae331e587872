// Requests to the service that sent this page, with the key of this tab, and their errors in words.

const KEY = "sfumato-key"; // in the storage of this tab
const TITLES = new Map([
  [401, "This service needs a key"],
  [404, "Not found"],
  [413, "Too large"],
  [422, "The service cannot use this request"],
  [503, "The service is busy"],
]);
const blobs = new Map(); // path -> promise of a URL of a picture that was fetched with the key
let original; // URL of the last file

let askKey = () => {};
export const onKeyNeeded = (ask) => (askKey = ask);
export const key = () => sessionStorage.getItem(KEY);
export const setKey = (value) => sessionStorage.setItem(KEY, value);

export class Refused extends Error {
  // From a problem document, without locations in a request that the reader never saw.
  constructor(status, { title, detail = "No reason was given", errors = [] } = {}) {
    super(detail.replaceAll(/body\.(queries|items)\.0\.(\w+): /g, "").replace(/[.?]?$/, (end) => end || "."));
    Object.assign(this, { status, errors, title: title ?? TITLES.get(status) ?? `The service answered ${status}` });
  }
}

async function call(path, { body, signal } = {}) {
  const headers = { ...(key() && { Authorization: `Bearer ${key()}` }), ...(body && { "Content-Type": "application/json" }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", signal, headers, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { title: "The service does not answer", detail: "Is it still running, and are you connected to it?" });
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401) askKey();
  throw new Refused(response.status, { ...problem, title: TITLES.get(response.status) ?? problem.title });
}

export const json = async (path, options) => (await call(path, options)).json();

export const base64 = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.split(",")[1] ?? "");
  reader.onerror = () => reject(new Refused(undefined, { title: "This file cannot be read", detail: file.name }));
  reader.readAsDataURL(file);
});

// The URL of an image, or of its file; with a key it is fetched, since an <img> sends none.
export async function pictureURL(picture, size) {
  const path = `.${picture}?${size ? `size=${size}` : "original=true"}`; // below a proxy's path, too
  if (!key()) return path;
  const url = blobs.get(path) ?? call(path).then(async (response) => URL.createObjectURL(await response.blob()));
  if (size) blobs.set(path, url);
  else URL.revokeObjectURL(original), (original = await url); // one alone: a video is large
  return url;
}

export const forgetPictures = () => blobs.clear();
