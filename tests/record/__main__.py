"""Compare what ddlsim computes with the record.

python -m tests.record --compare                     prints what differs; exit status 1 if anything does
python -m tests.record --compare -k faults -j 2      the rows with "faults" in their name, on two processes
python -m tests.record --changes "REASON" [NAME...]  lists rows that differ as changed, with their new values
python -m tests.record --list                        prints the names of the rows
python -m tests.record --write                       makes the record; refuses if there is one

The record is never made again: rows that change on purpose, and new rows, are listed in changes.jsonl with a reason. A
listed row that is as recorded again is an error; --changes takes it from the list. After a merge of two lists, run
--changes for the rows of both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("", ".."))

import record_measure as rm
from record_rows import ROWS


def each(do: Callable[[str], Any], names: Sequence[str], processes: int) -> Iterator[tuple[str, Any]]:
    """Yield every name with what `do` returns for it."""
    if processes == 1:
        yield from ((name, do(name)) for name in names)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from zip(names, pool.map(do, names, chunksize=8), strict=True)


def write(processes: int) -> int:
    if rm.RECORD.exists():
        print(f"{rm.RECORD} exists, and is never made again; list what changed with --changes", file=sys.stderr)
        return 2
    rows = dict(each(rm.measure, list(ROWS), processes))
    with rm.RECORD.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps([name, row], separators=(',', ':'))}\n" for name, row in rows.items())
    refused = Counter(name.partition("/")[0] for name, row in rows.items() if "refused" in row)
    kinds = Counter(name.partition("/")[0] for name in rows)
    print(f"{len(rows)} rows, {rm.RECORD.stat().st_size / 1e6:.2f} MB")
    for kind, n in kinds.items():
        print(f"{kind:24} {n:4} rows, {refused[kind]:3} refused")
    return 0


def compare(names: Sequence[str], processes: int) -> int:
    began = time.time()
    record, changes = rm.files()
    wrong, fields = 0, Counter[str]()
    known = [name for name in names if name in record or name in changes]
    for name, lines in each(rm.compared, known, processes):
        if lines:
            wrong += 1
            fields.update(line.partition(":")[0].rpartition(" ")[2] for line in lines)
            print(name, *lines, sep="\n    ", flush=True)
    missing = [name for name in names if name not in known] + [name for name in record if name not in ROWS]
    for name in missing:
        print(f"{name}: is not both in the record and among the rows")
    print(f"{len(known)} rows compared in {time.time() - began:.0f} s, {wrong} differ")
    if fields:
        print("fields that differ: " + ", ".join(f"{field} {n}" for field, n in fields.most_common()))
    return int(bool(wrong or missing))


def list_changes(reason: str, names: Sequence[str], processes: int) -> int:
    record, changes = rm.read_record(), rm.read_changes()
    for name, row in each(rm.measure, names, processes):
        fields = {field: row.get(field) for field in rm.different(record.get(name, {}), row)}
        before = changes.pop(name, None)
        if not fields:
            if before is not None:
                print(f"{name}: is as recorded again; taken from the list")
            continue
        if "refused" in fields and (message := row.get("message")) != record.get(name, {}).get("message"):
            fields["message"] = message
        reasons = [] if before is None else [before["reason"]]
        if before is None or rm.different(before["fields"], fields):
            reasons += [] if reason in reasons else [reason]
            print(f"{name}: {', '.join(fields)}")
        changes[name] = {"reason": "; ".join(reasons), "fields": fields}
    rm.write_changes(changes)
    print(f"{len(changes)} rows are listed as changed in {rm.CHANGES}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compare", action="store_true", help="print what differs")
    what.add_argument("--changes", metavar="REASON", help="list the rows that differ as changed")
    what.add_argument("--list", action="store_true", help="print the names of the rows")
    what.add_argument("--write", action="store_true", help="make the record; refused if there is one")
    parser.add_argument("-k", metavar="NAME", action="append", default=[], help="part of a name, or a pattern")
    parser.add_argument("-j", "--processes", type=int, default=1, help="processes (default 1)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="as -k")
    args = parser.parse_args()
    names = rm.chosen([*args.k, *args.names])
    if not names:
        parser.error("no row has such a name; see --list")
    if args.list:
        print(*names, sep="\n")
        return 0
    if args.write:
        return write(args.processes)
    if args.compare:
        return compare(names, args.processes)
    return list_changes(args.changes, names, args.processes)


if __name__ == "__main__":
    raise SystemExit(main())
