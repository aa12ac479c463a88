#!/usr/bin/env python
"""Write the sample corpus: three sources of small documents, a function of this file alone.

    python data/sample/make_sample.py [--output DIR]

``raw/*.jsonl`` are the documents (prose, Python code, tables), ``prose/ code/ tables/`` the folders
prepared from them with byte tokens. Written for this project and given to the public domain (CC0,
see LICENSE.md). The three differ in alphabet, layout and redundancy, so that a blend has parts that
can be told apart, by a loss a source and by the experts of a mixture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ext.data.prepare import PrepareOptions, prepare

BYTES_A_SOURCE = 110_000


class Dice:
    """Choices from ``random.random``, a stream that Python guarantees (unlike ``choice``)."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(int.from_bytes(hashlib.blake2b(seed.encode()).digest()[:8]))

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]

    def several(self, items: Sequence[str], count: int) -> list[str]:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


# ---------------------------------------------------------------------------------------- prose
PLACES = {
    "harbour": words("pier, lighthouse, fish market, dry dock, customs house, breakwater, tavern"),
    "garden": words("orchard, greenhouse, gravel path, pond, south wall, tool shed, rose bed"),
    "workshop": words("bench, forge, lumber rack, back door, paint room, tall window, loft"),
    "library": words(
        "reading room, map cabinet, cellar, gallery, catalogue, front desk, stairwell"
    ),
    "mountain": words("pass, hut, upper meadow, glacier, ridge, cold spring, stone bridge"),
    "railway": words(
        "signal box, platform, tunnel, engine shed, level crossing, goods yard, viaduct"
    ),
    "kitchen": words("stove, pantry, long table, oven, cold cellar, window sill, copper sink"),
    "observatory": words("dome, meridian room, clock vault, terrace, archive, lens shop, stair"),
}
THINGS = {
    "harbour": words("rope, net, anchor, ledger, barrel, sail, tide table, crate, oar, lantern"),
    "garden": words("seedling, spade, pear tree, hedge, bean row, watering can, graft, bulb, vine"),
    "workshop": words(
        "chisel, plane, clamp, drawing, oak board, hinge, rivet, glue pot, saw, vice"
    ),
    "library": words("atlas, manuscript, index card, binding, letter, almanac, folio, shelf mark"),
    "mountain": words("rope, ice axe, cairn, map, pack, compass, snow bridge, goat track, stove"),
    "railway": words(
        "lamp, timetable, coupling, points lever, ticket, whistle, sleeper, brake van"
    ),
    "kitchen": words("loaf, kettle, knife, recipe, flour sack, onion, jar, ladle, pie dish, scale"),
    "observatory": words("star chart, lens, pendulum, logbook, mirror, micrometer, plate, sextant"),
}
PEOPLE = words(
    "Ada, Bruno, Celia, Dmitri, Elif, Farid, Greta, Hamid, Ines, Jonas, Kaya, Lionel, Mirela, "
    "Noor, Otis, Petra, Quentin, Rosa, Silas, Tomiko, Ursula, Viktor, Wanda, Yusuf, Zelda"
)
ROLES = words("apprentice, keeper, carpenter, clerk, neighbour, guide, cook, surveyor, visitor")
ACTS = words(
    "repaired, measured, carried, described, painted, forgot, counted, borrowed, cleaned, found, "
    "examined, sold, hid, weighed, polished, returned, sketched, moved, labelled, tested"
)
QUALITIES = words(
    "old, heavy, narrow, careful, broken, quiet, bright, useful, cold, plain, early, patient, rough"
)
TIMES = words(
    "before dawn, at noon, in late autumn, during the first frost, after the rain, on market day, "
    "that winter, towards evening, in the third week, every spring, on the longest day, at low tide"
)
REASONS = words(
    "because nobody else had the time, since the wood was still wet, although the light was poor, "
    "so that the work could go on, while the others were asleep, as the custom demanded, "
    "until the bell rang twice, if only to see whether it would hold, though it cost a week's pay"
)
MORALS = words(
    "Small errors add up faster than large ones, Whoever measures twice seldom cuts in anger, "
    "A good tool teaches the hand that holds it, Nothing is lost that has been written down, "
    "The shortest road is not always the quickest, What is mended with care lasts longer than new"
)


def sentence(dice: Dice, topic: str, cast: list[str]) -> str:
    who, other = dice.several(cast, 2)
    place, second = dice.several(PLACES[topic], 2)
    thing, more = dice.several(THINGS[topic], 2)
    act, again = dice.several(ACTS, 2)
    quality, role = dice.pick(QUALITIES), dice.pick(ROLES)
    when, why = dice.pick(TIMES), dice.pick(REASONS)
    return dice.pick(
        [
            f"{who} {act} the {quality} {thing} near the {place} {when}.",
            f"{when.capitalize()}, the {role} {act} the {thing} and {again} the {more}, {why}.",
            f"The {thing} by the {place} was {quality}, but {other} {act} it all the same.",
            f'"The {more} is too {quality}," said {who}, "and the {place} is no place for it."',
            f"Between the {place} and the {second}, {other} {act} a {quality} {more} {when}.",
            f"It took {who} {dice.between(2, 19)} days, {why}.",
            f"Nobody in the {topic} knew who had {act} the {thing}, {why}.",
            f"{other} asked whether the {thing} could be {again} {when}; {who} did not answer.",
            f"Of the {dice.between(3, 40)} {more}s in the {place}, only {dice.between(2, 5)} were "
            f"{quality} enough to be {again}.",
            f"So the {role} went back to the {second}, {why}, and {act} the {more}.",
        ]
    )


def prose(dice: Dice, number: int) -> str:
    topic = dice.pick(list(PLACES))
    cast = dice.several(PEOPLE, 3)
    title = f"{dice.pick(['Notes from', 'A day at', 'The ledger of', 'Letters about'])} the {topic}"
    parts = [f"{title}, {number}"]
    for _ in range(dice.between(2, 5)):
        parts.append(" ".join(sentence(dice, topic, cast) for _ in range(dice.between(3, 6))))
    parts.append(f"{dice.pick(MORALS)}.")
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------- code
NOUNS = words(
    "order, parcel, sensor, ticket, account, route, sample, frame, record, packet, invoice, cell"
)
FIELDS = words("weight, price, count, offset, length, score, age, width, delay, level, rate, depth")


def functions(dice: Dice, noun: str, fields: Sequence[str], count: int) -> list[str]:
    """``count`` different functions over the fields of a class."""
    first, second = dice.several(fields, 2)
    limit, step = dice.between(2, 500), dice.between(2, 9)
    return dice.several(
        [
            f'def total_{first}({noun}s):\n    """Sum of the {first} of all {noun}s."""\n'
            f"    total = 0\n    for {noun} in {noun}s:\n        total += {noun}.{first}\n"
            f"    return total\n",
            f"def largest_{first}({noun}s, default=None):\n    best = default\n"
            f"    for {noun} in {noun}s:\n"
            f"        if best is None or {noun}.{first} > best.{first}:\n"
            f"            best = {noun}\n    return best\n",
            f"def filter_by_{first}({noun}s, limit={limit}):\n"
            f"    return [{noun} for {noun} in {noun}s if {noun}.{first} <= limit]\n",
            f"def group_by_{first}({noun}s):\n    groups = {{}}\n    for {noun} in {noun}s:\n"
            f"        groups.setdefault({noun}.{first} // {step}, []).append({noun})\n"
            f"    return groups\n",
            f"def mean_{first}({noun}s):\n    if not {noun}s:\n"
            f'        raise ValueError("no {noun}s given")\n'
            f"    return sum({noun}.{first} for {noun} in {noun}s) / len({noun}s)\n",
            f"def {first}_per_{second}({noun}):\n    # avoid dividing by zero\n"
            f"    return {noun}.{first} / max({noun}.{second}, 1)\n",
            f"def sorted_by_{first}({noun}s, reverse={dice.pick(['True', 'False'])}):\n"
            f"    key = lambda {noun}: ({noun}.{first}, {noun}.{second})\n"
            f"    return sorted({noun}s, key=key, reverse=reverse)\n",
        ],
        count,
    )


def code(dice: Dice, number: int) -> str:
    noun = dice.pick(NOUNS)
    fields = dice.several(FIELDS, dice.between(3, 5))
    name = noun.capitalize()
    lines = [f'"""Helpers for {noun}s (module {number})."""', "", "import math", "", ""]
    lines += [f"class {name}:", f'    """One {noun}."""', ""]
    lines += [f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    lines += ["", "    def __repr__(self):"]
    shown = ", ".join(f"{field}={{self.{field}}}" for field in fields[:2])
    lines += [f'        return f"{name}({shown})"', ""]
    if dice.below(2):
        terms = " + ".join(f"self.{field} ** 2" for field in fields[:2])
        lines += ["    def norm(self):", f"        return math.sqrt({terms})", ""]
    text = "\n".join(lines)
    for function in functions(dice, noun, fields, dice.between(2, 5)):
        text += "\n\n" + function
    if dice.below(2):
        values = ", ".join(str(dice.between(1, 99)) for _ in fields)
        text += f'\n\nif __name__ == "__main__":\n    print({name}({values}))\n'
    return text


# --------------------------------------------------------------------------------------- tables
ITEMS = words(
    "apples, bolts, candles, dowels, eggs, felt, glass, honey, ink, jute, kettles, linen, maps, "
    "nails, oil, paper, quills, rope, salt, tiles, urns, varnish, wax, yarn, zinc"
)
CITIES = words("Arlo, Brenn, Calder, Dunmore, Estal, Fennick, Gorse, Hallow, Irvan, Jarrow, Kell")


def sales(dice: Dice, number: int) -> str:
    """A table whose totals are right: columns predict each other."""
    items = dice.several(ITEMS, dice.between(6, 12))
    rows, grand = [], 0
    for item in items:
        count, price = dice.between(1, 60), dice.between(2, 99)
        grand += count * price
        rows.append(f"| {item:<10} | {count:>5} | {price:>5} | {count * price:>7} |")
    head = f"| {'item':<10} | {'count':>5} | {'price':>5} | {'total':>7} |"
    rule = f"|{'-' * 12}|{'-' * 7}|{'-' * 7}|{'-' * 9}|"
    foot = f"| {'sum':<10} | {'':>5} | {'':>5} | {grand:>7} |"
    return "\n".join([f"Stock list {number}, {dice.pick(CITIES)}", "", head, rule, *rows, foot, ""])


def readings(dice: Dice, number: int) -> str:
    """A csv file of a slow random walk."""
    level = dice.between(100, 900)
    lines = ["station,day,hour,level,change"]
    station = f"{dice.pick(CITIES).upper()}-{number:03d}"
    for step in range(dice.between(16, 40)):
        change = dice.between(-9, 9)
        level += change
        lines.append(f"{station},{1 + step // 8},{step % 8 * 3:02d}:00,{level},{change:+d}")
    return "\n".join(lines) + "\n"


def distances(dice: Dice, number: int) -> str:
    """A symmetric matrix."""
    names = dice.several(CITIES, dice.between(4, 7))
    spots = [(dice.below(100), dice.below(100)) for _ in names]
    lines = [f"Distances, sheet {number}", "\t".join(["", *names])]
    for name, (x, y) in zip(names, spots, strict=True):
        lines.append("\t".join([name, *(str(abs(x - u) + abs(y - v)) for u, v in spots)]))
    return "\n".join(lines) + "\n"


def tables(dice: Dice, number: int) -> str:
    return (sales, readings, distances)[dice.below(3)](dice, number)


SOURCES: dict[str, Callable[[Dice, int], str]] = {"prose": prose, "code": code, "tables": tables}


def write(output: Path) -> None:
    """Write ``raw/`` and the three prepared folders; what is there is replaced."""
    (output / "raw").mkdir(parents=True, exist_ok=True)
    for source, make in SOURCES.items():
        lines, size, number = [], 0, 0
        while size < BYTES_A_SOURCE:
            number += 1
            text = make(Dice(f"{source} {number}"), number)
            lines.append(json.dumps({"text": text}))
            size += len(text)
        raw = output / "raw" / f"{source}.jsonl"
        raw.write_text("\n".join(lines) + "\n", encoding="utf-8")
        shutil.rmtree(output / source, ignore_errors=True)
        manifest = prepare([raw], output=output / source, name=source, options=PrepareOptions())
        print(f"{source}: {manifest.documents} documents, {manifest.tokens} tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the sample corpus.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    write(parser.parse_args().output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
