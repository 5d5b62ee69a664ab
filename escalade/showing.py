"""Texts from elsewhere (names of files, labels, messages) as a terminal may be given them."""

from __future__ import annotations


def shown(text: object, keep: str = "") -> str:
    r"""Every character that moves the cursor, changes colours or order, or cannot be seen, as its escape: `\x1b`.

    `keep` is left as it is: line feeds and tabs, where a text has lines of its own.
    """
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
