"""Write the README's table of figures from the results in benchmarks/results: `python benchmarks/figures.py`.

Results are made by `onepass bench --json benchmarks/results/<gpu>/<op>.json`. A test holds the README to them.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "bias_activation.json"
START, END = "<!-- figures -->", "<!-- /figures -->"


def fraction(value):
    return f"{value:.2f}".removeprefix("0")


def best(rows, direction):
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


def cpu_line(times):
    ours, by_name = times["contenders"]["onepass"], times["contenders"] | times["references"]
    cells = [f"{ours['forward_us']:.0f} / {ours['both_us']:.0f}"]
    for name in ("eager", "torch.compile", "Megatron-core", "Liger", "F.rms_norm(x)"):
        other = by_name.get(name)
        cells.append(f"{other['forward_us']:.0f} / {other['both_us']:.0f}" if other else "")
    return f"| {times['variant']} | " + " | ".join(cells) + " |"


def table(results):
    versions, peers = results["versions"], results["versions"]["peers"]
    cases = dict.fromkeys(row["case"] for row in results["rows"])
    measured = f"torch {versions['torch']}, triton {versions['triton']}, " + ", ".join(f"{n} {v}" for n, v in peers.items())
    return "\n".join(
        [
            f"One {results['hardware']['name']}, {results['dtype']}, copy {results['ceilings']['copy_gbs'] / 1000:.2f} TB/s; "
            f"{measured}; commit {results['commit']}.",
            "",
            "| rows x columns of y | forward | best peer | copy | backward | best peer | copy |",
            "|---|---|---|---|---|---|---|",
            *(case_line([row for row in results["rows"] if row["case"] == case]) for case in cases),
            "",
            "What a call costs the CPU, microseconds, forward / forward and backward (64 x 1024):",
            "",
            "| | onepass | eager | torch.compile | Megatron-core | Liger | F.rms_norm |",
            "|---|---|---|---|---|---|---|",
            *(cpu_line(times) for times in results["cpu_time"]),
        ]
    )


def with_figures(readme):
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table(json.loads(RESULTS.read_text()))}\n{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_figures(path.read_text()))
