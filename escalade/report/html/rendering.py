"""The generated Markdown of the docs as HTML: links become text, tables can be sorted, long parts are folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_LEFT_OUT = ("link_open", "link_close", "image")
"""What leads to other files."""
_RATIO = re.compile(r"([\d.]+)×")
_RATIOS = ("vs ", "ratio", "times as fast")
"""How headings begin below which more than 1× is better."""


def page(text: str, folded: int = 0) -> Markup:
    """A page of the docs without its title and its first paragraph, which says how the page is made."""
    tokens = _MARKDOWN.parse(text)
    ends = [n for n, token in enumerate(tokens) if token.type in ("heading_close", "paragraph_close")]
    return _rendered(tokens[ends[1] + 1 :], folded)


def block(text: str, folded: int = 0) -> Markup:
    """A part of a page. Headings of the level `folded` open what is below them."""
    return _rendered(_MARKDOWN.parse(text), folded)


def _rendered(tokens: Sequence[Token], folded: int) -> Markup:
    made = list(_folded(tokens, folded) if folded else tokens)
    for token in made:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{_level(token) + 1}"
        token.children = [child for child in token.children or () if child.type not in _LEFT_OUT]
    _judge(made)
    text = _MARKDOWN.renderer.render(list(_framed(made)), _MARKDOWN.options, {})
    return Markup(text)  # text of records has been escaped: `html` is off


def _level(heading: Token) -> int:
    return len(heading.markup)


def _judge(tokens: Sequence[Token]) -> None:
    """Marks the cells that say that we are faster, that we are slower, and why neither is known."""
    header: list[str] = []
    column = 0
    for token, content in pairwise(tokens):
        if token.type == "table_open":
            header = []
        elif token.type == "th_open":
            header.append(content.content)
        elif token.type == "tr_open":
            column = 0
        elif token.type == "td_open":
            ratio = _RATIO.fullmatch(content.content)
            if header[column].startswith(_RATIOS) and content.content:
                faster = ratio and float(ratio[1]) >= 1
                token.attrJoin("class", "faster" if faster else "slower" if ratio else "absent")
            column += 1


def _framed(tokens: Sequence[Token]) -> Iterator[Token]:
    """Tables in boxes of their own, that scroll where a page is narrow."""
    for token in tokens:
        if token.type == "table_open":
            yield _html('<div class="wide">')
        yield token
        if token.type == "table_close":
            yield _html("</div>\n")


def _folded(tokens: Sequence[Token], level: int) -> Iterator[Token]:
    is_open = False
    for token in tokens:
        if token.type == "heading_open" and _level(token) <= level:
            if is_open:
                yield _html("</details>\n")
            is_open = _level(token) == level
            if is_open:
                yield _html("<details><summary>")
        yield token
        if token.type == "heading_close" and _level(token) == level:
            yield _html("</summary>\n")
    if is_open:
        yield _html("</details>\n")


def _html(text: str) -> Token:
    return Token("html_block", "", 0, content=text)
