"""Words cut by the width that they take, never inside of what is read as one character."""

import unicodedata
from collections.abc import Callable

_JOINER = "\u200d"


def characters(text: str) -> list[str]:
    """The text in what is read as one character each.

    A letter stays with its marks, an emoji with its modifiers and with those that it is joined to, and the
    two letters of a flag stay together; most of what Unicode's annex 29 calls extended grapheme clusters.
    """
    found: list[str] = []
    for character in text:
        if found and (
            _extends(character) or found[-1].endswith(_JOINER) or _closes_flag(found[-1], character)
        ):
            found[-1] += character
        else:
            found.append(character)
    return found


def _extends(character: str) -> bool:
    """Marks, joiners, variation selectors, tags, skin tones, and vowels and finals of Hangul."""
    return (
        unicodedata.category(character) in ("Mn", "Mc", "Me")
        or character in ("\u200c", _JOINER)
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e007f"
        or "\u1160" <= character <= "\u11ff"
    )


def _closes_flag(before: str, character: str) -> bool:
    return len(before) == len(character) == 1 and all(
        "\U0001f1e6" <= letter <= "\U0001f1ff" for letter in before + character
    )


def columns(text: str) -> int:
    """How many columns of a terminal the text takes: wide characters two, marks alone none."""
    return sum(map(_columns_of, characters(text)))


def _columns_of(character: str) -> int:
    if (
        "\ufe0f" in character
        or _closes_flag(character[:1], character[1:])
        or any(unicodedata.east_asian_width(part) in "WF" for part in character)
    ):
        return 2
    return 0 if _extends(character[0]) or unicodedata.category(character[0]) in ("Cc", "Cf") else 1


def cut(text: str, width: float, measure: Callable[[str], float] = columns) -> str:
    """The text, or as much of its beginning as fits into ``width`` with an ellipsis."""
    if measure(text) <= width:
        return text
    parts = characters(text)
    low, high = 0, len(parts)  # how many fit lies between them
    while low < high:
        middle = (low + high + 1) // 2
        if measure("".join(parts[:middle]) + "…") <= width:
            low = middle
        else:
            high = middle - 1
    return "".join(parts[:low]) + "…"
