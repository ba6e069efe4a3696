"""ddlsim: simulate distributed SGD before renting the cluster.

>>> import ddlsim
>>> result = ddlsim.simulate("cloud-25g-16x8-v100", model="resnet50", batch_size=64, workers=128)
>>> print(result)

Names are loaded when first used, so that importing ddlsim is cheap.
"""

import os

import lazy_loader

__version__ = "0.1.0"


def _let_kernels_be_cached() -> None:
    """Give numba a folder where it may write neither beside the package nor in the home folder.

    Without one it refuses to compile. The folder is this process's own: a shared one could be filled by others.
    """
    home = os.path.expanduser("~")
    places = (os.path.dirname(__file__), os.path.join(home, ".cache"), home)
    if "NUMBA_CACHE_DIR" not in os.environ and not any(os.access(place, os.W_OK) for place in places):
        import tempfile

        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="ddlsim-")


_let_kernels_be_cached()

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*__all__, "__version__"]


def __dir__() -> list[str]:
    return __all__
