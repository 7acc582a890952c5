// @ts-check
// Questions that take seconds: asked for a job when it has stood still for a moment, given up when
// it changes, with a bar meanwhile. Sliders never wait for them.

import { clear, el } from "fivefold/dom.js";
import { ask } from "fivefold/ask.js";

/** Keys that a search depends on; all others leave its answer as it is. */
const JOB = ["model", "config", "machine", "gpus", "seq", "batch", "precision", "also"];
const STILL_MS = 300;

/**
 * Ask for every new job, and hand on what is answered.
 * @param {string} name of the question
 * @param {string} words what the bar waits for
 * @param {(answer: any) => void} onAnswer
 * @returns {{root: HTMLElement, want: (state: Record<string, string>) => void}}
 */
export function slow(name, words, onAnswer) {
  const bar = /** @type {HTMLProgressElement} */ (el("progress", { max: 1, value: 0, "aria-label": words }));
  const waits = el("p", { class: "waits", role: "status", hidden: true }, `${words} `, bar);
  const problem = el("p", { class: "problem", role: "status" });
  let asked = "";
  let aborter = new AbortController();
  let timer = 0;

  /** @param {Record<string, string>} job */
  async function go(job) {
    const { signal } = (aborter = new AbortController());
    try {
      const onProgress = (/** @type {number} */ share) => void (bar.value = share);
      const answer = await ask(name, job, { signal, onProgress });
      if (signal.aborted) return;
      waits.hidden = true;
      onAnswer(answer);
    } catch (error) {
      if (signal.aborted) return;
      waits.hidden = true;
      clear(problem, /** @type {Error} */ (error).message);
    }
  }

  return {
    root: el("div", {}, waits, problem),
    want(state) {
      const job = Object.fromEntries(JOB.filter((key) => key in state).map((key) => [key, state[key]]));
      const next = JSON.stringify(job);
      if (next === asked) return;
      asked = next;
      aborter.abort();
      clearTimeout(timer);
      clear(problem);
      bar.value = 0;
      waits.hidden = false;
      timer = setTimeout(() => void go(job), STILL_MS);
    },
  };
}
