"""`make trainer-suite TRANSFORMERS=<checkout>`: runs transformers' own tests/trainer, with plain Trainer and on stages.

This repository contains no test of transformers. A test counts if it constructs a Trainer and passes here
with plain Trainer.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.trainer_suite.fleet import Fleet
from tests.trainer_suite.summary import Results, counts, table, unexplained

MARKS = "<!-- suite -->", "<!-- end of suite -->"


def main() -> int:
    given = arguments()
    if not given.transformers or not (Path(given.transformers) / "tests" / "trainer").is_dir():
        print(
            "trainer-suite: pass TRANSFORMERS=<folder>, a checkout of huggingface/transformers with its tests/trainer"
        )
        return 2
    given.results.parent.mkdir(parents=True, exist_ok=True)
    results: Results = json.loads(given.results.read_text(), object_hook=by_number) if given.resume else {}
    names = list(results)
    for stages in given.stages:
        fleet = Fleet(Path(given.transformers).resolve(), stages)
        hello = fleet.start()
        if stages == 0:
            names = hello["tests"]
            for module, why in hello["broken"].items():
                print(f"{module} cannot be imported: {why}")
        chosen = [name for name in names if given.only in name and (stages == 0 or counts(results.get(name, {})))]
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
    print(table(results))
    if given.write:
        write(given.write, table(results))
    return 1 if unexplained(results) else 0


def write(page: Path, text: str) -> None:
    """Put the table between the page's two marks."""
    before, rest = page.read_text().split(MARKS[0])
    _, after = rest.split(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def by_number(entry: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in entry.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make trainer-suite", description=__doc__)
    parser.add_argument("transformers")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="")
    parser.add_argument("--results", type=Path, default=Path("build/trainer-suite.json"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--again", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
