"""Numbers as a person reads them."""

from __future__ import annotations

UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def human(value: float, *, unit: str = "", digits: int = 4) -> str:
    """Some digits and a unit of a thousand: 443.7 M, 2.78 T. FLOPs take G for a billion."""
    for size, letter in UNITS:
        if value >= size:
            letter = "G" if unit and letter == "B" else letter
            return f"{value / size:.{digits}g} {letter}{unit}"
    return f"{value:.{digits}g} {unit}".rstrip()
