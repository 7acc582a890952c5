"""Whether pictures have ink: a screenshot of the whole page, read by a browser.

The marks of a chart have hues, while its letters, axes and grid are grey: a chart without its
marks counts as blank. Drawings of the page's own may be grey, but are more than paper.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from playwright.sync_api import Page

_HUED = 30  # between the strongest and the weakest of red, green and blue
_SWATCH = 30  # pixels; what is less high belongs to a legend
# What scrolls inside of its panel is looked at as far as it is seen.
_PLACES = """(swatch) => {
  const named = (node) => {
    const panel = node.closest(".panel")?.id ?? "no panel";
    return `${panel}: ${node.getAttribute("aria-label") ?? node.tagName}`.slice(0, 90);
  };
  const outermost = (node) =>
    node.matches(".chart") || !(node.closest(".chart") || node.parentElement.closest("svg"));
  return [...document.querySelectorAll("main .chart, main svg")].filter(outermost).map((node) => {
    const { left, right, top, bottom } = node.getBoundingClientRect();
    const frame = node.closest(".body").getBoundingClientRect();
    const [from, to] = [Math.max(left, frame.left), Math.min(right, frame.right)];
    const box = [from + scrollX, top + scrollY, to - from, bottom - top];
    return { name: named(node), chart: node.matches(".chart"), box };
  }).filter(({ box: [, , wide, high] }) => wide >= 1 && high >= swatch);
}"""
_READ = """async ([png, boxes, hued]) => {
  const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
  context.drawImage(image, 0, 0);
  return boxes.map((box) => {
    const { data } = context.getImageData(...box.map(Math.round));
    const colours = new Map();
    let marks = 0;
    for (let i = 0; i < data.length; i += 4) {
      const [red, green, blue] = [data[i], data[i + 1], data[i + 2]];
      const colour = (red << 16) | (green << 8) | blue;
      colours.set(colour, (colours.get(colour) ?? 0) + 1);
      marks += Math.max(red, green, blue) - Math.min(red, green, blue) > hued;
    }
    const pixels = data.length / 4;
    return [colours.size, 1 - Math.max(...colours.values()) / pixels, marks / pixels];
  });
}"""


class Ink(NamedTuple):
    """What a picture shows: its colours, and the shares that are no paper, and that have a hue."""

    name: str
    is_chart: bool
    colours: int
    drawn: float
    hued: float

    @property
    def is_blank(self) -> bool:
        return self.colours < 8 or self.drawn < 0.01 or (self.is_chart and self.hued < 0.001)


def ink(page: Page, reader: Page) -> list[Ink]:
    """Every picture on show; `reader` is an empty page, whose browser decodes the screenshot."""
    shot = base64.b64encode(page.screenshot(full_page=True)).decode()
    places = page.evaluate(_PLACES, _SWATCH)
    read = reader.evaluate(_READ, [shot, [each["box"] for each in places], _HUED])
    return [
        Ink(each["name"], each["chart"], *found) for each, found in zip(places, read, strict=True)
    ]
