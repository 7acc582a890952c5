"""The contrast of every text that can be seen, as the web's guidelines (WCAG 2) define it.

What is under a text is read from a screenshot in which all letters are transparent, so that
pictures, stripes and opacities count as they are seen. The letters have the colour that the browser
computed, thinned by the opacity of all that they are in. A text is as bad as it is over the worst
colour that makes up a good part of its box.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from playwright.sync_api import Page

LEAST = 4.5
_SHARE = 0.12  # of a text's box: what covers less is an edge
_LINE = 2.5  # pixels of its width: neither is a line what a digit stands on
_UNSEEN = 0.02  # opacity
_MOST_LOOKS = 20
_HIDE = """
* { color: transparent !important; -webkit-text-fill-color: transparent !important;
    caret-color: transparent !important; text-shadow: none !important;
    text-decoration-color: transparent !important; }
svg text, svg tspan { fill: transparent !important; stroke: transparent !important; }
*, *::before, *::after { transition: none !important; animation: none !important; }
"""
# Boxes of texts, clipped by what scrolls, with the colour and the opacity of their letters.
_TEXTS = """(unseen) => {
  const found = [];
  const clipped = (node, box) => {
    for (let each = node; each && each !== document.documentElement; each = each.parentElement) {
      const { overflowX, overflowY } = getComputedStyle(each);
      if (overflowX === "visible" && overflowY === "visible") continue;
      if (each === document.body) continue;
      const frame = each.getBoundingClientRect();
      box = {
        left: Math.max(box.left, frame.left), right: Math.min(box.right, frame.right),
        top: Math.max(box.top, frame.top), bottom: Math.min(box.bottom, frame.bottom),
      };
    }
    return box;
  };
  const add = (node, text, boxes) => {
    const style = getComputedStyle(node);
    if (style.visibility !== "visible") return;
    let opacity = 1;
    for (let each = node; each; each = each.parentElement)
      opacity *= Number(getComputedStyle(each).opacity);
    const drawn = node.closest("svg") && style.fill !== "none";
    if (drawn) opacity *= Number(style.fillOpacity);
    if (opacity < unseen) return;
    for (const one of boxes) {
      const { left, right, top, bottom } = clipped(node, one);
      const [wide, high] = [right - left, bottom - top];
      if (wide < 2 || high < 2) continue;
      const cut = Math.min(0.2 * high, 4);
      const box = [left + scrollX, top + scrollY + cut, wide, high - 2 * cut];
      const place = node.closest("[id], [class]");
      const where = place?.id || place?.getAttribute("class") || node.tagName;
      const colour = drawn ? style.fill : style.color;
      found.push({ text: text.trim().slice(0, 60), where, colour, opacity, box });
    }
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const skipped = "script, style, option, noscript, title, defs, .skip";
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest(skipped)) continue;
    if (!parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    add(parent, node.textContent, range.getClientRects());
  }
  for (const node of document.querySelectorAll("select"))
    if (node.checkVisibility()) add(node, node.value, [node.getBoundingClientRect()]);
  return found;
}"""
_READ = """async ([png, texts, share, line]) => {
  const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const sheet = new OffscreenCanvas(image.width, image.height).getContext("2d");
  sheet.drawImage(image, 0, 0);
  const dot = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const parsed = (colour) => {
    dot.clearRect(0, 0, 1, 1);
    dot.fillStyle = colour;
    dot.fillRect(0, 0, 1, 1);
    return [...dot.getImageData(0, 0, 1, 1).data];
  };
  const linear = (byte) => {
    const level = byte / 255;
    return level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4;
  };
  const weights = [0.2126, 0.7152, 0.0722];
  const light = (colour) => weights.reduce((sum, weight, i) => sum + weight * linear(colour[i]), 0);
  const ratio = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  return texts.map(({ colour, opacity, box }) => {
    const [x, y, wide, high] = box.map(Math.round);
    const { data } = sheet.getImageData(x, y, Math.max(1, wide), Math.max(1, high));
    const counts = new Map();
    for (let i = 0; i < data.length; i += 4) {
      const under = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
      counts.set(under, (counts.get(under) ?? 0) + 1);
    }
    const [red, green, blue, alpha] = parsed(colour);
    const thin = (opacity * alpha) / 255;
    let least = 21;
    const most = Math.max(...counts.values());
    for (const [under, count] of counts) {
      if (count < Math.max(share, line / wide) * (data.length / 4) && count < most) continue;
      const back = [under >> 16, (under >> 8) & 255, under & 255];
      const ink = [red, green, blue].map((level, i) => thin * level + (1 - thin) * back[i]);
      least = Math.min(least, ratio(ink, back));
    }
    return least;
  });
}"""


class Contrast(NamedTuple):
    """A text on the page, where it is, and its contrast with what is under it, from 1 to 21."""

    ratio: float
    text: str
    where: str


def _still(page: Page) -> tuple[list[Any], str]:
    """Texts and what is under them; again, where an answer has moved them meanwhile."""
    for _ in range(_MOST_LOOKS):
        texts = page.evaluate(_TEXTS, _UNSEEN)
        style = page.add_style_tag(content=_HIDE)
        shot = base64.b64encode(page.screenshot(full_page=True)).decode()
        style.evaluate("node => node.remove()")
        if page.evaluate(_TEXTS, _UNSEEN) == texts:
            return texts, shot
    raise AssertionError(f"the page moved in each of {_MOST_LOOKS} looks")


def contrasts(page: Page, reader: Page) -> list[Contrast]:
    """Every visible text; `reader` is an empty page, whose browser decodes the screenshot."""
    page.evaluate("scrollTo(0, 0)")
    texts, shot = _still(page)
    found = reader.evaluate(_READ, [shot, texts, _SHARE, _LINE])
    return [
        Contrast(round(ratio, 2), one["text"], one["where"])
        for one, ratio in zip(texts, found, strict=True)
    ]


def faint(page: Page, reader: Page) -> list[Contrast]:
    """Texts below the least contrast, the worst first."""
    return sorted(one for one in contrasts(page, reader) if one.ratio < LEAST)
