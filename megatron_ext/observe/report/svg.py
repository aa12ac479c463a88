"""Figures as small inline SVG: no fonts, no addresses, no names that two of them could share."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# At this width a point of the figure is about a pixel of a phone, and 9 points can be read there.
WIDTH_INCHES = 4.4
_REFERENCE = re.compile(r"#([\w.-]+)")
_FONT_FAMILY = re.compile(r"font-family:[^;]*")


@contextmanager
def style(*, salt: str) -> Iterator[None]:
    """Settings of all figures, as long as the block lasts.

    Args:
        salt: makes the names inside a figure its own; the same figure gives the same text.
    """
    import matplotlib

    # Any: matplotlib types the keys as literals.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": salt,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e7eb",
        "axes.edgecolor": "#9aa5b1",
        "axes.titlesize": 9,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.4,
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        yield


def new_figure(*, height: float = 2.2) -> Figure:
    """An empty figure, by the object interface: pyplot would keep it in a global list."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height), layout="constrained")


def to_svg(figure: Figure, *, label: str) -> str:
    """The figure as an `<svg>` element for the inside of a page.

    Args:
        label: what a screen reader says.
    """
    buffer = io.BytesIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    root = ElementTree.fromstring(buffer.getvalue())
    used = set(_REFERENCE.findall(buffer.getvalue().decode()))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}style", "}metadata")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text = (element.text or "").strip() or None
        element.tail = None
        for name, value in list(element.attrib.items()):
            del element.attrib[name]
            if name == "style":
                value = _FONT_FAMILY.sub("font-family: sans-serif", value)
            if name.endswith("href"):
                value = "".join(value.split())
            if name != "id" or value in used:
                element.set(name.rpartition("}")[2], value)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")
