"""`make trainer-suite TRANSFORMERS=<checkout>`: runs transformers' own tests/trainer plainly, and at one and two stages.

No test of transformers is part of this repository. A test counts if it constructs a Trainer and passes plainly here.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.trainer_suite.fleet import Fleet, Result

Results = dict[str, dict[int, Result]]  # by test, by number of stages


def main() -> int:
    given = arguments()
    if not (given.transformers / "tests" / "trainer").is_dir():
        print("trainer-suite: pass TRANSFORMERS=<folder>, a checkout of huggingface/transformers with its tests/trainer")
        return 2
    results: Results = json.loads(given.results.read_text(), object_hook=by_number) if given.resume else {}
    names = list(results)
    for stages in given.stages:
        fleet = Fleet(given.transformers.resolve(), stages)
        hello = fleet.start()
        if stages == 0:
            names = hello["tests"]
            for module, why in hello["broken"].items():
                print(f"{module} cannot be imported: {why}")
        chosen = [name for name in names if given.only in name and counts(results.get(name, {}), stages)]
        for name in chosen:
            if given.again and results.get(name, {}).get(stages, {}).get("kind") == "passed":
                continue
            began = time.monotonic()
            result = fleet.run(name)
            results.setdefault(name, {})[stages] = result
            seconds = time.monotonic() - began
            if stages or result["kind"] != "passed":
                print(f"p={stages} {result['kind']:9} {seconds:5.1f} s {name}  {result['why'][:300]!r}", flush=True)
            given.results.write_text(json.dumps(results))
        fleet.stop()
    return 0


def counts(of_test: dict[int, Result], stages: int) -> bool:
    """Whether a test is run at this number of stages."""
    plain = of_test.get(0)
    return stages == 0 or (plain is not None and plain["kind"] == "passed" and plain["trainers"] > 0)


def by_number(entry: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in entry.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make trainer-suite", description=__doc__)
    parser.add_argument("transformers", type=Path)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="")
    parser.add_argument("--results", type=Path, default=Path("build/trainer-suite.json"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--again", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
