"""What may reach the explorer: host names that are this machine's, and addresses that fill in the form within limits.

Any web page can make a browser send a request to this machine, so a request only fills in the form: it runs no code,
starts no simulation, builds no huge cluster and is shown no file.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher
from tornado.web import RequestHandler

from ddlsim import plain
from ddlsim.errors import ConfigError, shown
from ddlsim.explore.setup import FIELDS, Setup

#: what an address may ask for: whole numbers, characters of a text and of a word in it
MOST = {"workers": 4096, "batch_size": 2**20, "accumulation": 1024, "steps": 1000}
MOST_TEXT, MOST_WORD = 2000, 250
REFUSAL = "This host name or origin is not accepted; open http://localhost, or start with --host NAME."
#: nodes and links of a cluster that the explorer builds, in about a second
MOST_NODES, MOST_LINKS = 20_000, 100_000


class Foreign(Matcher):
    """Matches requests that are not for this machine's names, or come from a page of another server.

    A name that anybody's DNS gives this machine's address (rebinding) is none of its names: `hosts` are those accepted
    besides localhost and loopback addresses.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = {host.lower() for host in hosts}

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Return {} for a request to be refused, else None."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        try:
            name, page = urlsplit(f"//{host}").hostname or "", urlsplit(origin or f"//{host}")
            own = page.netloc.lower() == host.lower() or page.hostname in self._hosts
            accepted = name in (*self._hosts, "localhost") or ipaddress.ip_address(name).is_loopback
        except ValueError:  # no address, or not even a name
            return {}
        return None if own and accepted else {}


class Refusal(RequestHandler):
    """Answers what is :class:`Foreign`."""

    def prepare(self) -> None:
        """Answer every method alike."""
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(REFUSAL)


def fill_in(setup: Setup, query: Mapping[str, object]) -> list[str]:
    """Put an address's settings into the form. Returns a line for each that is left out, with the reason."""
    left_out = []
    for name, value in query.items():
        if name in (*FIELDS, "screen"):
            try:
                _check(name, value)
                setup.param.update(**{name: str(value) if name in ("cluster", "model") else value})
            except ValueError as error:
                left_out.append(f"{name} of the address is ignored: {error}")
    return left_out


def _check(name: str, value: object) -> None:
    """Raise ConfigError for a value beyond the limits."""
    plain.checked(value, name)
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MOST_TEXT or (isinstance(value, str) and max(map(len, text.split()), default=0) > MOST_WORD):
        raise ConfigError(f"it has {len(text)} characters; an address may have {MOST_TEXT}, and words of {MOST_WORD}")
    if re.search(r"""(^|["'=\s])[\\/]{2}""", text):
        raise ConfigError("it names a folder of another computer; type it into the form")
    if name in MOST and isinstance(value, int | float) and value > MOST[name]:
        raise ConfigError(f"{shown(value)} is more than {MOST[name]}; type it into the form")
