"""The whole fuzz: python tests/fuzz [--seed N] [--only TEXT] ...; prints what went wrong, and counts."""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import fuzz_commands
from fuzz_archives import store
from fuzz_attempt import Report
from fuzz_files import fuzz
from fuzz_targets import targets


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, help="of each document (default: all)")
    parser.add_argument("--damages", type=int, default=500, help="of each document")
    parser.add_argument("--only", default="", help="targets with this in their title")
    parser.add_argument("--commands", type=int, default=1000, help="lines of commands (0: none)")
    options = parser.parse_args()
    total, n_failures = Counter(), 0
    for target in targets():
        if options.only not in target.title:
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            report = fuzz(
                target, Path(folder), seed=options.seed, n_mutations=options.mutations, n_damages=options.damages
            )
        total += report.counts
        n_failures += len(report.failures)
        print(f"{target.title}: {report} ({time.perf_counter() - start:.1f} s)", flush=True)
    if options.commands:
        report = commands(options)
        total += report.counts
        n_failures += len(report.failures)
        print(f"commands: {report}")
    print(f"{total.total()} ended well ({dict(total)}), {n_failures} did not")
    return 1 if n_failures else 0


def commands(options):
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        fuzz_commands.prepare(Path(folder), store())
        lines = [line for line in fuzz_commands.lines(Path(folder)) if options.only in f"command {line[0]}"]
        for name, words in random.Random(options.seed).sample(lines, min(len(lines), options.commands)):
            start = time.perf_counter()
            fuzz_commands.attempt(report, name, words, folder)
            if time.perf_counter() - start > 10:
                print(f"slow ({time.perf_counter() - start:.0f} s): {' '.join(words)[:200]}", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
