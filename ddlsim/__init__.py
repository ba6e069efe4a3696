"""ddlsim: simulate distributed SGD before renting the cluster.

>>> import ddlsim
>>> result = ddlsim.simulate("cloud-25g-16x8-v100", model="resnet50", batch_size=64, workers=128)
>>> print(result)

Names are loaded when first used, so that importing ddlsim is cheap.
"""

import importlib
import importlib.util
import sys

import lazy_loader

from ddlsim.garbage import promote_objects, postponed

__version__ = "0.1.0"

_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Load a public name, or a package such as ``ddlsim.planner``, on first use."""
    n_modules = len(sys.modules)
    with postponed():
        value = _loaded(name)
        if len(sys.modules) > n_modules:
            promote_objects()
    return value


def _loaded(name: str) -> object:
    if name not in __all__ and not name.startswith("_") and importlib.util.find_spec(f"ddlsim.{name}"):
        return importlib.import_module(f"ddlsim.{name}")
    if name not in __all__ and not name.startswith("_"):
        from ddlsim.errors import no_attribute

        raise no_attribute("module 'ddlsim'", name, [*__all__, "reliability"])
    return _load(name)


def __dir__() -> list[str]:
    return __all__
