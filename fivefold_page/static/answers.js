// @ts-check
// Answers that were given, so that the way back is short.

import { ask, key } from "fivefold/ask.js";

const MOST = 64;

export class Answers {
  /** @param {string} question */
  constructor(question) {
    this.question = question;
    /** @type {Map<string, Promise<any>>} */
    this.known = new Map();
  }

  /** The answer, asked for unless it is known or under way.
   * @param {Record<string, string>} params @param {AbortSignal} [signal] @returns {Promise<any>} */
  to(params, signal) {
    const name = key(this.question, params);
    const known = this.known.get(name);
    if (known) return known;
    const asked = ask(this.question, params, { signal });
    this.known.set(name, asked);
    asked.catch(() => this.known.delete(name));
    if (this.known.size > MOST) this.known.delete(/** @type {string} */ (this.known.keys().next().value));
    return asked;
  }
}
