"""Reads a piece of HTML as a browser would: its text, tags and attributes; and a text that would like to be markup."""

import re
from html.parser import HTMLParser

HOSTILE = "<script>alert(\"x\")</script><img src=x onerror='y'>&\"'"
VOID = {"img", "br", "hr", "meta", "input", "line"}


class Reader(HTMLParser):
    """Tags, attributes and visible text of a piece of HTML, and whether every tag is closed in order."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


class Columns(HTMLParser):
    """Texts of neighbouring cells, lines and blocks between which nothing is left once the tags are taken out."""

    PARTS = frozenset(("td", "th", "tr", "caption", "div", "summary", "details", "table", "li", "p"))

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.joined, self._before, self._crossed, self._style = [], "", False, False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._crossed |= tag in self.PARTS
        self._style = tag == "style"

    def handle_endtag(self, tag):
        self._crossed |= tag in self.PARTS
        self._style = False

    def handle_data(self, data):
        if self._style:
            return
        if self._crossed and self._before[-1:].strip() and data[:1].strip():
            self.joined.append((self._before[-20:], data[:20]))
        self._before, self._crossed = data, False


def stripped(html):
    """A piece of HTML on a page that takes styles out."""
    looks = r" (?:class|style)=(?:\"[^\"]*\"|'[^']*'|[^\s>]+)"
    return re.sub(rf"<style>.*?</style>|{looks}", "", html, flags=re.DOTALL)


def read(html):
    reader = Reader(html)
    assert not reader.open, f"never closed: {reader.open}"
    return reader


def words(text):
    """What a reader reads, whatever the layout."""
    return re.sub(r"\s+", "", text)


def both(card):
    """The card as text, once it is sure that its HTML is well-formed and says the same."""
    assert words(read(card.html()).text) == words(card.text())
    assert all(
        form.startswith(own) for form, own in zip(card.bundle().values(), (card.html(), card.text()), strict=True)
    )
    return re.sub(r"[ ]+", " ", card.text())


def inert(reader):
    """Nothing in it runs."""
    assert not {"script", "img"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]


class Typeset(HTMLParser):
    """Text that MathJax would look for formulas in: outside of what it is told to leave alone, and of code."""

    LEFT_ALONE = frozenset(("code", "pre", "style", "script", "textarea"))

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.text, self._open = "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            classes = (dict(attrs).get("class") or "").split()
            self._open.append(tag in self.LEFT_ALONE or {"mathjax_ignore", "tex2jax_ignore"} <= set(classes))

    def handle_endtag(self, tag):
        if tag not in VOID:
            self._open.pop()

    def handle_data(self, data):
        if not any(self._open):
            self.text += data.strip()
