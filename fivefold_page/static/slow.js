// @ts-check
// Questions that take seconds: asked for a job when it has stood still for a moment, given up when
// it changes, with a bar meanwhile. Sliders never wait for them. What was answered for one job is
// never shown for another.

import { clear, el } from "fivefold/dom.js";
import { ask, key } from "fivefold/ask.js";

/** @typedef {Record<string, string>} Params */
/** Keys that a search depends on; all others leave its answer as it is. */
export const JOB = ["model", "config", "machine", "gpus", "seq", "batch", "precision", "also", "derived"];
const STILL_MS = 300;
const MOST = 32;
/** Answers by question. @type {Map<string, any>} */
const known = new Map();

/** The keys of a state that a search depends on; empty ones are left out. @param {Params} state */
export const jobOf = (state) =>
  Object.fromEntries(JOB.filter((name) => state[name]).map((name) => [name, state[name]]));

/** The answer to a search, which may be known.
 * @param {string} name @param {Params} job
 * @param {{onProgress?: (share: number) => void, signal?: AbortSignal}} how @returns {Promise<any>} */
export async function search(name, job, how) {
  const found = known.get(key(name, job)) ?? (await ask(name, job, how));
  keep(name, job, found);
  if (found.job) keep(name, jobOf(found.job), found); // as the state will spell it
  return found;
}

/** @param {string} name @param {Params} job @param {any} found */
function keep(name, job, found) {
  known.set(key(name, job), found);
  if (known.size > MOST) known.delete(known.keys().next().value ?? "");
}

/**
 * Ask for every new job, and hand on what is answered; null while there is no answer for this job.
 * @param {string} name of the question
 * @param {string} words what the bar waits for
 * @param {(answer: any) => void} onAnswer
 * @returns {{root: HTMLElement, want: (state: Params) => void, drop: () => void}}
 */
export function slow(name, words, onAnswer) {
  const bar = /** @type {HTMLProgressElement} */ (el("progress", { max: 1, value: 0, "aria-label": words }));
  const waits = el("p", { class: "waits", role: "status", hidden: true }, `${words} `, bar);
  const problem = el("p", { class: "problem", role: "status" });
  let asked = "";
  let aborter = new AbortController();
  let timer = 0;

  /** @param {Params} job */
  async function go(job) {
    const { signal } = (aborter = new AbortController());
    try {
      const onProgress = (/** @type {number} */ share) => void (bar.value = share);
      const answer = await search(name, job, { signal, onProgress });
      if (signal.aborted) return;
      waits.hidden = true;
      onAnswer(answer);
    } catch (error) {
      if (signal.aborted) return;
      waits.hidden = true;
      clear(problem, /** @type {Error} */ (error).message);
    }
  }

  function drop() {
    asked = "";
    aborter.abort();
    clearTimeout(timer);
    clear(problem);
    bar.value = 0;
    waits.hidden = true;
    onAnswer(null);
  }

  return {
    root: el("div", {}, waits, problem),
    drop,
    want(state) {
      const job = jobOf(state);
      const next = JSON.stringify(job);
      if (next === asked) return;
      drop();
      asked = next;
      waits.hidden = false;
      const isKnown = known.has(key(name, job));
      timer = window.setTimeout(() => void go(job), isKnown ? 0 : STILL_MS);
    },
  };
}
