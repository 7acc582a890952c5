// @ts-check
// Step forward and back, or play.

import { clear, el } from "fivefold/dom.js";

const MILLISECONDS = 1200;

/**
 * @param {(place: number) => void} show called with the frame to draw
 * @returns {{root: HTMLElement, set: (total: number, place: number) => void}}
 */
export function stepper(show) {
  let total = 1;
  let place = 0;
  /** @type {number | undefined} */
  let timer;
  const where = el("output", { class: "where", "aria-live": "off" });
  const slide = /** @type {HTMLInputElement} */ (
    el("input", { type: "range", min: 0, step: 1, "aria-label": "Frame", oninput: () => go(Number(slide.value)) })
  );
  const back = button("◀", "Step back", () => go(place - 1));
  const on = button("▶", "Step forward", () => go(place + 1));
  const play = button("play", "Play or stop", () => (timer ? stop() : start()));
  const root = el("div", { class: "stepper", onkeydown: keys }, back, on, play, slide, where);

  /** @param {number} to */
  function go(to) {
    place = Math.max(0, Math.min(total - 1, to));
    slide.value = String(place);
    clear(where, `${place + 1} of ${total}`);
    back.toggleAttribute("disabled", place === 0);
    on.toggleAttribute("disabled", place === total - 1);
    show(place);
  }
  function start() {
    if (place === total - 1) go(0);
    timer = window.setInterval(() => (place < total - 1 && root.isConnected ? go(place + 1) : stop()), MILLISECONDS);
    clear(play, "stop");
  }
  function stop() {
    window.clearInterval(timer);
    timer = undefined;
    clear(play, "play");
  }
  /** @param {KeyboardEvent} event */
  function keys(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const step = steps[/** @type {keyof typeof steps} */ (event.key)];
    if (!step || event.target === slide) return;
    go(place + step);
    event.preventDefault();
  }
  return {
    root,
    set(frames, to) {
      stop();
      total = frames;
      slide.max = String(frames - 1);
      go(to);
    },
  };
}

/** @param {string} mark @param {string} label @param {() => void} onclick */
function button(mark, label, onclick) {
  return el("button", { type: "button", "aria-label": label, title: label, onclick }, mark);
}
