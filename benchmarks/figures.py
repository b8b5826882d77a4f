"""Write the README's figures, a table an op, from the results of one GPU: `python benchmarks/figures.py`.

Results are made by `onepass bench OP --json benchmarks/results/<gpu>/<op>.json`, from a commit. A test holds the README to them.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
START, END = "<!-- figures -->", "<!-- /figures -->"


def fraction(value):
    return f"{value:.2f}".removeprefix("0")


def best(rows, direction):
    if not rows:
        return ""
    peer = max(rows, key=lambda row: row[f"{direction}_of_copy"])
    return f"{fraction(peer[f'{direction}_of_copy'])} {peer['contender']}"


def case_line(rows):
    ours = next(row for row in rows if row["ours"])
    copy = next(row for row in rows if row["contender"] == "copy")
    peers = [row for row in rows if not row["ours"] and row["contender"] != "copy" and row["status"] == "ok"]
    cells = [ours["case"].replace("x", " x ")]
    for direction in ("forward", "backward"):
        of_copy = f"{direction}_of_copy"
        cells += [f"**{fraction(ours[of_copy])}**", best(peers, direction), fraction(copy[of_copy])]
    return "| " + " | ".join(cells) + " |"


def cpu_names(cpu_time):
    """Everybody who is timed in any variant, the op itself first, and one reference of PyTorch's."""
    return [*dict.fromkeys(name for times in cpu_time for name in times["contenders"]), "F.rms_norm(x)"]


def cpu_line(times, names):
    found = times["contenders"] | times["references"]
    cells = [f"{found[name]['forward_us']:.0f} / {found[name]['both_us']:.0f}" if name in found else "" for name in names]
    return f"| {times['variant']} | " + " | ".join(cells) + " |"


def table(op, results):
    if not results["commit"]:
        raise ValueError(
            f"{op}.json has no commit, and a figure without one can't be repeated: "
            "run onepass bench in a checkout, or say which commit it is in ONEPASS_COMMIT"
        )
    wrong = [row["case"] for row in results["rows"] if row["ours"] and row["status"] != "ok"]
    if wrong:
        raise ValueError(f"{op}.json: ours is wrong, or raised, in {', '.join(wrong)}")
    names = cpu_names(results["cpu_time"])
    versions, peers = results["versions"], results["versions"]["peers"]
    cases = dict.fromkeys(row["case"] for row in results["rows"])
    measured = f"torch {versions['torch']}, triton {versions['triton']}, " + ", ".join(f"{n} {v}" for n, v in peers.items())
    return "\n".join(
        [
            f"### {op}",
            "",
            f"One {results['hardware']['name']}, {results['dtype']}, copy {results['ceilings']['copy_gbs'] / 1000:.2f} TB/s; "
            f"{measured}; commit {results['commit']}.",
            "",
            "| rows x columns of y | forward | best peer | copy | backward | best peer | copy |",
            "|---|---|---|---|---|---|---|",
            *(case_line([row for row in results["rows"] if row["case"] == case]) for case in cases),
            "",
            "What a tiny call costs the CPU, microseconds, forward / forward and backward:",
            "",
            f"| | {' | '.join(names)} |",
            "|---" * (len(names) + 1) + "|",
            *(cpu_line(times, names) for times in results["cpu_time"]),
        ]
    )


def tables(folder):
    """One an op, by its name."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} holds no results")
    return "\n\n".join(table(path.stem, json.loads(path.read_text())) for path in paths)


def with_figures(readme, folder=RESULTS):
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables(folder)}\n{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    try:
        path.write_text(with_figures(path.read_text()))
    except ValueError as error:
        sys.exit(f"figures.py: {error}")
