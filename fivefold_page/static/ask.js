// @ts-check
// One question, one answer: from the server, or from the table inside of a self-contained page.

/** What the engine refused, in its own words. */
export class Problem extends Error {
  /** @param {{error: string, reasons?: string[], nearest?: any[]}} said */
  constructor(said) {
    super(said.error);
    this.reasons = said.reasons ?? [];
    this.nearest = said.nearest ?? [];
  }
}

/** What the page was made for, and its panels: `_site` of document.py. */
export const site = JSON.parse(document.getElementById("site")?.textContent ?? "{}");

const GONE = { error: "the server went away: start fivefold observe again" };

/**
 * Ask; a newer question may abort this one by its signal.
 * @param {string} name
 * @param {Record<string, string>} params
 * @param {{onProgress?: (share: number) => void, signal?: AbortSignal}} [how]
 * @returns {Promise<any>}
 */
export async function ask(name, params, { onProgress, signal } = {}) {
  const said = site.live ? await fetched(name, params, onProgress, signal) : await embedded(name, params);
  if (said.error !== undefined) throw new Problem(said);
  return said;
}

/** The name of an answer in a self-contained page; `answer_key` of document.py is its twin.
 * @param {string} name @param {Record<string, string>} params */
export function key(name, params) {
  const pairs = Object.entries(params).sort(([one], [other]) => (one < other ? -1 : 1));
  return name + JSON.stringify(pairs);
}

/** @param {string} name @param {Record<string, string>} params
 * @param {((share: number) => void) | undefined} onProgress @param {AbortSignal | undefined} signal */
async function fetched(name, params, onProgress, signal) {
  const how = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(params), signal };
  const response = await fetch(`/ask/${name}`, how).catch((error) => {
    if (signal?.aborted) throw error;
  });
  if (!response) return GONE;
  if (!response.headers.get("content-type")?.includes("ndjson")) return response.json();
  /** @type {any} */
  let last = GONE;
  for await (const said of lines(/** @type {ReadableStream} */ (response.body))) {
    if ("progress" in said) onProgress?.(said.progress);
    else last = said;
  }
  return last;
}

/** @param {ReadableStream<Uint8Array>} body */
async function* lines(body) {
  const decoder = /** @type {any} */ (new TextDecoderStream());
  const reader = body.pipeThrough(decoder).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop() ?? "";
    for (const line of parts) if (line) yield JSON.parse(line);
  }
}

/** @type {Promise<Record<string, any>> | undefined} */
let table;

/** @param {string} name @param {Record<string, string>} params */
async function embedded(name, params) {
  table ??= unpacked();
  const found = (await table)[key(name, params)];
  const way = `this file holds what was asked when it was made; for everything run: ${site.command}`;
  return found ?? { error: `not in this file: ${way}` };
}

/** The table lies in the page packed, as base64 of gzip. */
async function unpacked() {
  const text = document.getElementById("answers")?.textContent?.trim() ?? "";
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
