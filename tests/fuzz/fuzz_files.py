"""Run the attempts on the readers of files."""

import random
import zlib
from functools import partial

from fuzz_archives import saved_mutations, stores
from fuzz_attempt import Report, attempt
from fuzz_mutations import damages, mutations

ARCHIVES = {"npz": saved_mutations, "sqlite": stores}


def sample(target, rng, n):
    """Return `n` of the mutations of a target's document (None: all)."""
    archive = ARCHIVES.get(target.language)
    found = list(archive(target.document) if archive else mutations(target.document, target.language))
    return found if n is None or n >= len(found) else rng.sample(found, n)


def fuzz(target, folder, *, seed, n_mutations, n_damages):
    """Return the report of so many mutations (None: all) and damages of a target's document."""
    report = Report()
    rng = random.Random(seed + zlib.crc32(target.title.encode()))
    path = folder / target.name
    data = target.document if isinstance(target.document, bytes) else target.document.encode()
    path.write_bytes(data)
    target.read(path)  # the document itself is well formed
    damaged = [(what, partial(bytes, after)) for what, after in damages(data, rng, n_damages)]
    for what, write in [*sample(target, rng, n_mutations), *damaged]:
        for left in folder.iterdir():  # a write-ahead log, say
            left.unlink()
        path.write_bytes(write())
        attempt(report, target.title, what, target.read, path)
    return report
