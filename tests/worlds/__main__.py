"""Make many random worlds: ``python -m tests.worlds --worlds 1000 --seed 0``; ``--jobs`` for worlds of several jobs,
``--folding`` for tensor groups, of which one rank may stand for all."""

import argparse
import sys
import traceback
from pathlib import Path

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("", ".."))
from worlds_folding import check_folding
from worlds_generator import jobs_world, world
from worlds_invariants import check_jobs, check_world


def main() -> int:
    """Make the worlds of the seeds `seed`, `seed` + 1, ...; the exit status is 1 if any of them does not add up."""
    parser = argparse.ArgumentParser(prog="python -m tests.worlds", description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default 0)")
    parser.add_argument("--jobs", action="store_true", help="several jobs on one cluster in each")
    parser.add_argument("--folding", action="store_true", help="tensor groups, executed once and as all their ranks")
    args = parser.parse_args()
    refused, folded, failed = 0, 0, list[int]()
    for seed in range(args.seed, args.seed + args.worlds):
        try:
            if args.folding:
                folded += check_folding(seed, spans=seed % 10 == 0)
                continue
            refused += (check_jobs(jobs_world(seed)) if args.jobs else check_world(world(seed))) is None
        except Exception:  # whatever it is, the others shall be made as well
            failed.append(seed)
            print(f"world {seed}:", flush=True)
            traceback.print_exc(limit=-3)
    if args.folding:
        print(f"{args.worlds} worlds: in {folded} one rank stands for each group, in the others all ranks are executed")
    print(f"{args.worlds} worlds: {args.worlds - refused - len(failed)} add up, {refused} are refused by ddlsim, "
          f"{len(failed)} fail{': ' + ', '.join(map(str, failed)) if failed else ''}")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
