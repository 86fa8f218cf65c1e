"""Summary: a table of the results of all tests, and the results that the committed list does not explain."""

from collections import Counter
from typing import Any

from tests.trainer_suite.refused import reason_of

Result = dict[str, Any]
Results = dict[str, dict[int, Result]]  # by test, by number of stages
KINDS = {
    "passed": "passed",
    "refused": "refused with one of pipeshard's errors",
    "different": "an assertion fails",
    "raw": "another error",
    "died": "a rank died",
    "hang": "hung",
    "skipped": "skipped",
}


def counts(of_test: dict[int, Result]) -> bool:
    """Whether a test counts: it constructs a Trainer and passes plainly here."""
    plain = of_test.get(0)
    return plain is not None and plain["kind"] == "passed" and plain["trainers"] > 0


def unexplained(results: Results) -> list[str]:
    """Counted tests that fail without being listed, or that are listed and pass."""
    found = []
    for name, of_test in results.items():
        for stages, result in of_test.items():
            if stages == 0 or not counts(of_test):
                continue
            is_listed, passes = reason_of(name, stages) is not None, result["kind"] == "passed"
            if is_listed == passes:
                what = "is listed, but passes" if passes else f"{result['kind']}: {result['why'][:200]}"
                found.append(f"p={stages} {name}: {what}")
    return found


def table(results: Results) -> str:
    """The counts of each kind at each number of stages, and the list of reasons, in Markdown."""
    counted = {name: of_test for name, of_test in results.items() if counts(of_test)}
    stages = sorted({number for of_test in counted.values() for number in of_test} - {0})
    lines = [
        f"Tests that construct a Trainer and pass plainly: {len(counted)}.",
        "",
        "| result | " + " | ".join(f"pp_size={number}" for number in stages) + " |",
        "|---|" + "---|" * len(stages),
    ]
    by_kind = {number: Counter(of[number]["kind"] for of in counted.values() if number in of) for number in stages}
    for kind, words in KINDS.items():
        if any(by_kind[number][kind] for number in stages):
            lines.append(f"| {words} | " + " | ".join(str(by_kind[number][kind]) for number in stages) + " |")
    listed = {reason: number for number in stages for name in counted if (reason := reason_of(name, number))}
    lines += ["", "| from pp_size | why | what to do instead |", "|---|---|---|"]
    lines += [f"| {reason.stages} | {reason.why} | {reason.instead} |" for reason in sorted(listed)]
    if open_ones := unexplained(results):
        lines += ["", "Not explained by the list:", "", *(f"- `{line.replace('`', '')}`" for line in open_ones)]
    return "\n".join(line.replace("\n", " ") for line in lines)
