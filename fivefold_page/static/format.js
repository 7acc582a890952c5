// @ts-check
// Numbers as the rest of fivefold writes them: GiB with one decimal, times with a unit.

/** 16384 → "16,384". @param {number} number */
export const count = (number) => WHOLE.format(number);

/** Bytes → "61.3 GiB". @param {number} size */
export const gib = (size) => `${ONE.format(size / 2 ** 30)} GiB`;

/** 0.382 → "38.2%". @param {number} share */
export const percent = (share) => `${(100 * share).toFixed(1)}%`;

// Made once: a format is dear to make and cheap to use.
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const ONE = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const PLACES = [0, 1, 2, 3, 4].map((most) => new Intl.NumberFormat("en-US", { maximumFractionDigits: most }));
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes in the unit that fits. @param {number} size */
export function bytes(size) {
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit ? ONE.format(size) : count(size)} ${UNITS[unit]}`;
}

/** A time in the unit that fits: 0.412 → "412 ms". @param {number} time */
export function seconds(time) {
  const size = Math.abs(time);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(time * 1e6)} µs`;
  if (size < 1) return `${digits(time * 1e3)} ms`;
  return size < 600 ? `${digits(time)} s` : `${digits(time / 60)} min`;
}

/** Three digits that count. @param {number} number */
export function digits(number) {
  const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number) || 1)));
  return PLACES[Math.min(places, 4)].format(number);
}
