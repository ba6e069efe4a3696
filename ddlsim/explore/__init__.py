"""The explorer: clusters, runs and comparisons in a browser, without programming.

Optional: ``pip install 'ddlsim[explore]'``. :func:`explore` serves it on this machine; :func:`page` returns it for
display in a notebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ddlsim.arguments import checked, integer
from ddlsim.extras import check_installed

if TYPE_CHECKING:
    from panel.viewable import Viewable

#: a port of this machine; 0: any free port
Port = Annotated[int, integer(0, 65535)]


@checked
def explore(
    cluster: str | None = None,
    model: str | None = None,
    *,
    port: Port = 0,
    browser: bool = True,
    hosts: Sequence[str] = (),
) -> None:
    """Start the explorer, a local web application, and open it in a browser. Press Ctrl-C to stop it.

    cluster, model  initial cluster and model: names or paths, as in :class:`~ddlsim.Experiment`; None: the defaults
    port            port to serve on; 0: any free port
    browser         whether to open a browser
    hosts           host names other than localhost under which the explorer can be reached, such as the name of a proxy

    Only this machine can connect to the explorer. Raises ConfigError if Panel is not installed, a cluster or model
    cannot be loaded, or the port is in use.
    """
    check_installed("panel")
    from ddlsim.explore.app import serve

    serve(cluster, model, port, browser, hosts)


@checked
def page(cluster: str | None = None, model: str | None = None) -> Viewable:
    """Return the explorer for display in a notebook. Call ``panel.extension()`` first.

    The arguments and errors are the same as for :func:`explore`.
    """
    check_installed("panel")
    from ddlsim.explore.app import in_notebook

    return in_notebook(cluster, model)
