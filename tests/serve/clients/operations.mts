// Every operation of the service by the generated TypeScript client; arguments as in operations.py.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import createClient from "openapi-fetch";
import type { components, paths } from "./sfumato.js";

const [url, key, vectors, file] = process.argv.slice(2) as [string, string, string, string];
const client = createClient<paths>({ baseUrl: url, headers: { "X-API-Key": key } });
const stranger = createClient<paths>({ baseUrl: url });
const byVectors = createClient<paths>({ baseUrl: vectors });
const png = readFileSync(file);
const base64 = png.toString("base64");
type Problem = components["schemas"]["Problem"];

/** The answer of a request that succeeds. */
async function of<T>(request: Promise<{ data?: T; error?: Problem }>): Promise<T> {
  const { data, error } = await request;
  if (error) throw new Error(`${error.code}: ${error.detail}`);
  assert(data !== undefined);
  return data;
}

assert.equal((await of(stranger.GET("/healthz"))).status, "alive");
assert.equal((await of(stranger.GET("/readyz"))).status, "ready");
const info = await of(client.GET("/v1/info"));
assert(info.rights === "write" && info.judgements && info.galleries["images"]?.n === 24);
assert((await of(client.GET("/metrics", { parseAs: "text" }))).includes("sfumato_requests_total"));

const query = { q: "a red square", max_results: 3, where: ["captions>=a"] };
const [text] = (await of(client.GET("/v1/search", { params: { query } }))).answers;
assert(text?.kind === "text" && text.target === "fits" && text.calibrated && text.hits.length === 3);
const [hit] = text.hits;
assert(hit?.rank === 1 && hit.match_probability !== null && hit.duplicates.length === 0 && text.hidden === 0);
const filter = { where: { captions: ["a plain red square"] }, ranges: { captions: ["a", "b"] as [string, string] } };
const queries = [{ text: "a red square", without: ["blue"] }, { id: hit.id }, { image: base64 }];
const some = (await of(client.POST("/v1/search", { body: { queries, filter } }))).answers;
assert.deepEqual(some.map((one) => one.kind), ["text", "id", "image"]);
const vector = { queries: [{ vector: [0.5, 0.5, 0.5, 0.5, 0.5] }], max_results: 4 };
assert.equal((await of(byVectors.POST("/v1/search", { body: vector }))).answers[0]?.hits.length, 4);

const id = "a/b c.png";
const items = [{ id, image: base64, payload: { place: "wood" } }];
const statuses = [];
for (let i = 0; i < 2; i++) statuses.push((await client.POST("/v1/items", { body: { items } })).response.status);
assert.deepEqual(statuses, [201, 200]);
const added = { items: [{ id: "c.png", image: base64, payload: { place: "zoo" } }] };
assert.equal((await of(client.POST("/v1/items", { body: added }))).created, 1);
const path = { params: { path: { id } } };
assert.deepEqual((await of(client.GET("/v1/items/{id}", path))).payload, { place: "wood" });
const size = { params: { path: { id }, query: { size: 16 } } };
const shown = await of(client.GET("/v1/pictures/{id}", { ...size, parseAs: "blob" }));
assert(shown.type === "image/png" && shown.size > 0);
const found: string[] = [];
for (let cursor: string | null | undefined; cursor !== null; ) {
  const page: components["schemas"]["ItemList"] = await of(
    client.GET("/v1/items", { params: { query: { limit: 10, ...(cursor ? { cursor } : {}) } } }),
  );
  found.push(...page.items.map((item) => item.id));
  cursor = page.next_cursor;
}
assert.equal(found.length, 26);
const ids = [id, "c.png", "never.png"];
assert.equal((await of(client.POST("/v1/items/delete", { body: { ids } }))).deleted, 2);

const judgements = ["red", "blue", "pink", "green", "black"].map((colour) => {
  return { query: `a ${colour} square`, id: "00.png", yes: colour === "red", probability: 0.5 };
});
assert.equal((await of(client.POST("/v1/judgements", { body: { judge: "bob", judgements } }))).kept, 5);
const judged = { params: { query: { query: "a red square", judge: "bob" } } };
assert.equal((await of(client.GET("/v1/judgements", judged))).given["00.png"], true);
assert.equal((await of(client.POST("/v1/judgements", { body: { use: true } }))).used?.n, 5);
const back = { judge: "bob", judgements: [{ query: "a red square", id: "00.png", yes: null }] };
assert.equal((await of(client.POST("/v1/judgements", { body: back }))).removed, 1);

const refused: [string, number, { error?: Problem; response: Response }][] = [
  ["no-key", 401, await stranger.GET("/v1/info")],
  ["not-found", 404, await client.GET("/v1/items/{id}", { params: { path: { id: "never" } } })],
  ["invalid", 422, await client.POST("/v1/search", { body: { queries: [] } })],
  ["index", 409, await byVectors.POST("/v1/items/delete", { body: { ids: ["photo-1"] } })],
];
for (const [code, status, { error, response }] of refused) {
  assert(error?.code === code && error.status === status && response.status === status && error.detail);
}
