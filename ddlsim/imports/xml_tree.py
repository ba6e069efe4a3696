"""A small XML tree with line numbers. Parsing uses defusedxml: no DTD, no entities, nothing external."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesImpl

from ddlsim.errors import ConfigError
from ddlsim.imports.text import SourceText

#: a DOCTYPE that names an external file and defines nothing; it is removed, as no DTD is loaded here
_DOCTYPE = re.compile(r"""<!DOCTYPE\s+[\w:.-]+\s+SYSTEM\s+("[^"]*"|'[^']*')\s*>""")


@dataclass
class Element:
    """One element: tag, attributes, children, its own text, and its line in the file."""

    source: SourceText
    line: int
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def error(self, reason: str) -> ConfigError:
        """Return the error for `reason` in this element."""
        return self.source.error(self.line, f"<{self.tag}>: {reason}")

    def __getitem__(self, name: str) -> str:
        if name not in self.attributes:
            raise self.error(f"the attribute {name!r} is missing; add it")
        return self.attributes[name]

    def get(self, name: str, default: str) -> str:
        """Return an attribute, or `default` if it is missing."""
        return self.attributes.get(name, default)

    def find(self, *tags: str) -> Iterator[Element]:
        """Yield the children with one of these tags, in order."""
        return (child for child in self.children if child.tag in tags)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an attribute as an integer (decimal, or hexadecimal with 0x)."""
        if name not in self.attributes and default is not None:
            return default
        if not re.fullmatch(r"\s*-?(?:0[xX][0-9a-fA-F]{1,12}|[0-9]{1,12})\s*", self[name]):
            raise self.error(f"{name} = {self[name]!r} is not an integer")
        text = self[name].lower()
        return int(text, 16 if "x" in text else 10)


def walk(element: Element) -> Iterator[Element]:
    """Yield the element and all its descendants, in file order."""
    yield element
    for child in element.children:
        yield from walk(child)


class _Builder(ContentHandler):
    def __init__(self, source: SourceText) -> None:
        super().__init__()
        self.source = source
        self.root: Element | None = None
        self._open: list[Element] = []
        self._texts: list[list[str]] = []

    def startElement(self, name: str, attrs: AttributesImpl) -> None:  # noqa: N802 (the parser's name)
        line = int(self._locator.getLineNumber() or 0)  # type: ignore[attr-defined]
        element = Element(self.source, line, name, dict(attrs.items()))
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)
        self._texts.append([])
        if len(self._open) > 100:
            raise element.error("nested more than 100 levels deep; is it the right file?")

    def characters(self, content: str) -> None:
        if self._open:
            self._texts[-1].append(content)

    def endElement(self, name: str) -> None:  # noqa: N802
        self._open.pop().text = "".join(self._texts.pop())


def parse_xml(source: SourceText) -> Element:
    """Return the root element. Raises :class:`ConfigError` with the line for anything but plain XML."""
    from defusedxml import DefusedXmlException
    from defusedxml.sax import parseString

    text = _DOCTYPE.sub(lambda match: "\n" * match[0].count("\n"), source.text, count=1)
    text = re.sub(r"^\s*<\?xml[^>]*\?>", lambda match: "\n" * match[0].count("\n"), text)  # it is already decoded
    builder = _Builder(source)
    try:
        parseString(text.encode(), builder, forbid_dtd=True)
    except SAXParseException as error:
        what = f"not valid XML: {error.getMessage()}"
        raise source.error(error.getLineNumber(), f"{what}; is the file complete?") from None
    except DefusedXmlException as error:
        what = f"DTDs and entity declarations are not allowed ({type(error).__name__})"
        raise source.error(None, f"{what}; remove them") from None
    if builder.root is None:
        raise source.error(None, "is empty; is it the right file?")
    return builder.root
