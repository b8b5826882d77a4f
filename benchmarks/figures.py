"""Write the figures of README.md and docs/figures.md from the results of one GPU: `python benchmarks/figures.py`.

Results are made by `onepass bench OP --json benchmarks/results/<gpu>/<op>.json`, from a commit; those of the loss without logits
by `benchmarks/linear_cross_entropy.py --json benchmarks/results/<gpu>/scripts/linear_cross_entropy.json`, and over several GPUs
with their number at the name's end: `_2`. Those of `fuse` by `benchmarks/fusion.py`, likewise, and those of training by
`benchmarks/gpt.py`, a file a model (`gpt_1B.json`, and with --no-deterministic `gpt_free_1B.json`), `benchmarks/gpt_losses.py`
and `benchmarks/gpt_parallel.py`; those of Hugging Face's models by
`onepass bench huggingface --json benchmarks/results/<gpu>/scripts/huggingface.json`. A test holds the pages to them.
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PAGES = [ROOT / "README.md", ROOT / "docs" / "figures.md"]
# what stands in a page between <!-- name --> and <!-- /name -->
OPS, FIGURES, LOSS, FUSION = "ops", "figures", "loss", "fusion"
TRAINING, LOSSES, PARALLEL, HUGGINGFACE = "training", "losses", "parallel", "huggingface"


def fraction(value):
    return f"{value:.2f}".removeprefix("0")


def named(row):
    return f"{row['variant']} {' x '.join(str(n) for n in row['shape'])}"


def of(rows, name):
    """The row of one contender, and nothing where it isn't there."""
    return next((row for row in rows if row["contender"] == name), {})


def own(rows):
    return next(row for row in rows if row["ours"])


def peers_of(rows):
    return [row for row in rows if not row["ours"] and row["contender"] != "copy" and row["status"] == "ok"]


def line(cells):
    return f"| {' | '.join(cells)} |"


def header(first, *titles):
    return [f"| {first}".rstrip() + f" {line(titles)}", "|---" * (len(titles) + 1) + "|"]


# ---- what is bound by the memory: fractions of a copy ----


def best(rows, direction):
    if not rows:
        return ""
    peer = max(rows, key=lambda row: row[f"{direction}_of_copy"])
    return f"{fraction(peer[f'{direction}_of_copy'])} {peer['contender']}"


def copy_shares(rows, direction):
    """Ours, and the best peer's."""
    return f"**{fraction(own(rows)[f'{direction}_of_copy'])}**", best(peers_of(rows), direction)


def case_line(rows):
    cells = [named(own(rows))]
    for direction in ("forward", "backward"):
        cells += [*copy_shares(rows, direction), fraction(of(rows, "copy")[f"{direction}_of_copy"])]
    return line(cells)


def by_copy(cases):
    titles = header("rows x columns of y", *("forward", "best peer", "copy"), *("backward", "best peer", "copy"))
    return [*titles, *(case_line(rows) for rows in cases)]


# ---- what is bound by matrix products: time over that of a reference, and memory ----


def mib(row, name):
    return f"{row[name]:.0f}" if row.get(name) is not None else ""


def whole(row):
    return f"{row['both_of_reference']:.3f}"


def times_of_reference(rows):
    """Ours, and the best peer's but for the reference itself."""
    ours = own(rows)
    peers = [row for row in peers_of(rows) if row["contender"] != ours["reference"]]
    peer = min(peers, key=lambda row: row["both_of_reference"], default=None)
    return f"**{whole(ours)}**", f"{whole(peer)} {peer['contender']}" if peer else ""


def reference_line(rows):
    ours = own(rows)
    reference = of(rows, ours["reference"])
    cells = [named(ours), f"{ours['forward_ms']:.2f} / {ours['backward_ms']:.2f}", *times_of_reference(rows)]
    cells += [f"{mib(ours, name)} / {mib(reference, name)}" for name in ("kept_mib", "peak_mib")]
    return line(cells)


SHAPES = {"attention": "sequences x tokens x heads x groups x width"}  # others': tokens x in x out
NOTES = {
    "attention": "Peers run deterministically, as ours does; in any order ours has deterministic=False, and peers are free."
}


def by_reference(op, cases):
    name = own(cases[0])["reference"]
    both = f"both, over {name}"
    sides = [f"MiB {what}, onepass / {name}" for what in ("kept for backward", "at most")]
    titles = header(SHAPES.get(op, "tokens x in x out"), "ms, forward / backward", both, "best peer", *sides)
    said = f"{name} is what the op replaces, one onepass or PyTorch call after the other. {NOTES.get(op, '')}".rstrip()
    return [said, "", *titles, *(reference_line(rows) for rows in cases)]


# ---- small cases, and the CPU ----


def graph_lines(cases):
    """GPU time where a launch takes longer than the work: measured in a CUDA graph. Nothing where nobody was."""
    small = [rows for rows in cases if any(row.get("forward_graph_us") is not None for row in rows)]
    if not small:
        return []
    names = list(dict.fromkeys(row["contender"] for rows in small for row in rows if row["contender"] != "copy"))
    lines = ["", "GPU time in a CUDA graph, microseconds, forward / backward:", "", *header("", *names)]
    for rows in small:
        cells = [pair(of(rows, name), "forward_graph_us", "backward_graph_us", ".1f") for name in names]
        lines.append(line([named(rows[0]), *cells]))
    return lines


def pair(row, first, second, digits):
    return "" if row.get(first) is None else f"{row[first]:{digits}} / {row[second]:{digits}}"


def cpu_names(cpu_time):
    """Everybody who is timed in any variant, the op itself first, and one reference of PyTorch's."""
    return [*dict.fromkeys(name for times in cpu_time for name in times["contenders"]), "F.rms_norm(x)"]


def cpu_line(times, names):
    found = times["contenders"] | times["references"]
    return line([times["variant"], *(pair(found.get(name, {}), "forward_us", "both_us", ".0f") for name in names)])


def table(op, results):
    if not results["commit"]:
        raise ValueError(
            f"{op}.json has no commit, and a figure without one can't be repeated: "
            "run onepass bench in a checkout, or say which commit it is in ONEPASS_COMMIT"
        )
    wrong = [row["case"] for row in results["rows"] if row["ours"] and row["status"] != "ok"]
    if wrong:
        raise ValueError(f"{op}.json: ours is wrong, or raised, in {', '.join(wrong)}")
    alone = [row["case"] for row in results["rows"] if row["ours"] and row.get("reference") and not row["both_of_reference"]]
    if alone:
        raise ValueError(f"{op}.json: what ours is set against is missing in {', '.join(alone)}")
    names = cpu_names(results["cpu_time"])
    versions, peers = results["versions"], results["versions"]["peers"]
    by_case = {}
    for row in results["rows"]:
        by_case.setdefault(row["case"], []).append(row)
    cases = list(by_case.values())
    bound_by_memory = own(cases[0]).get("reference") is None
    measured = f"torch {versions['torch']}, triton {versions['triton']}, " + ", ".join(f"{n} {v}" for n, v in peers.items())
    return "\n".join(
        [
            f"### {op}",
            "",
            f"One {results['hardware']['name']}, {results['dtype']}, copy {results['ceilings']['copy_gbs'] / 1000:.2f} TB/s; "
            f"{measured}; commit {results['commit']}.",
            "",
            *(by_copy(cases) if bound_by_memory else by_reference(op, cases)),
            *graph_lines(cases),
            "",
            "What a tiny call costs the CPU, microseconds, forward / forward and backward:",
            "",
            *header("", *names),
            *(cpu_line(times, names) for times in results["cpu_time"]),
        ]
    )


def tables(folder):
    """One an op, by its name."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} holds no results")
    return "\n\n".join(table(path.stem, json.loads(path.read_text())) for path in paths)


# ---- the loss without logits: time over the products', and memory ----


def over_floor(row):
    return "" if not row or "error" in row else " / ".join(time_and_gib(row))


def time_and_gib(row):
    return f"{row['over_floor']:.2f}", f"{row['peak_mib'] / 1024:.1f}"


def loss_line(case, result):
    ours = ("onepass", "onepass, main_grad and grad_scale")
    ways = result["ways"]
    cells = [case, f"{result['floors_ms']['three']:.1f}"]
    cells += [f"**{over_floor(ways.get(name))}**" for name in ours]
    return line([*cells, *(over_floor(ways.get(name)) for name in LOSS_PEERS)])


LOSS_PEERS = ("torch.compile", "Liger", "Liger, fp32 sums", "CCE")


def loss_table(path):
    """Of one GPU."""
    results = json.loads(path.read_text())
    titles = header("tokens x hidden x vocabulary", "floor, ms", "onepass", "with main_grad and grad_scale", *LOSS_PEERS)
    versions = results["versions"]
    packages = {"torch": versions["torch"], "triton": versions["triton"]} | versions["peers"]
    said = ", ".join(f"{name} {version}" for name, version in packages.items() if name != "Megatron-core")  # it was not measured
    measured = f"One {results['gpu']}, {said}; commit {results['commit']}."
    return "\n".join([measured, "", *titles, *(loss_line(case, result) for case, result in results["rows"].items())])


def shares_table(paths):
    """Of several: the vocabulary divided."""
    ways = ("tensor parallel", "and sequence parallel", "tensor parallel, main_grad and grad_scale")
    lines, measured = header("tokens x hidden x vocabulary", "GPUs", *ways), []
    for path in paths:
        results = json.loads(path.read_text())
        measured.append(f"{path.stem.rpartition('_')[2]} GPUs: torch {results['versions']['torch']}, commit {results['commit']}.")
        for case, result in results["rows"].items():
            found = result["ways"]
            shares = [f"**{found[name]['of_its_share']:.2f}** / {found[name]['peak_mib'] / 1024:.1f}" for name in ways]
            lines.append(line([case, str(result["ranks"]), *shares]))
    said = "The vocabulary divided over several, set against one GPU's time over their number, and each GPU's GiB at most."
    return "\n".join([f"{said} {' '.join(measured)}", "", *lines])


def loss_tables(folder):
    one, *several = sorted(folder.glob("linear_cross_entropy*.json"), key=lambda path: (len(path.stem), path.stem))
    return "\n\n".join([loss_table(one), *([shares_table(several)] if several else [])])


# ---- fusion of a user's own code: kernels, GPU time and wall time of a call ----

FUSION_WAYS = ("as written", "compiled", "combined, compiled", "fused", "fused, graph")


def fusion_cell(found, way):
    row = found.get(way)
    if row is None:
        return ""
    cell = f"{row['kernels']:.0f} / {row['gpu_us']:.0f} / {row['wall_us']:.0f}"
    return f"**{cell}**" if way.startswith("fused") else cell


def fusion_table(path):
    results = json.loads(path.read_text())
    versions = results["versions"]
    measured = f"One {results['gpu']}, torch {versions['torch']}, triton {versions['triton']}; commit {results['commit']}."
    names = "as written", "torch.compile", "combined by hand, compiled", "fused", "fused, graph"
    lines = header("kernels / GPU us / wall us of a call", *names)
    for row in results["rows"].values():
        lines.append(line([row["title"], *(fusion_cell(row["ways"], way) for way in FUSION_WAYS)]))
    return "\n".join([measured, "", *lines])


# ---- training a whole model ----

COMPILED = "plain, compiled"
SIZES = {"124M": "16 x 1024", "1B": "4 x 4096"}  # of benchmarks/gpt.py


def step_lines(results):
    """A model's ways, each against the plain one under torch.compile."""
    for title, ways in ((title, ways) for title, ways in results["rows"].items() if COMPILED in ways):
        plain = ways[COMPILED]
        for way, found in ways.items():
            if "error" in found:
                continue
            faster, less = plain["ms"] / found["ms"], found["peak_gib"] / plain["peak_gib"]
            figures = [f"{faster:.2f} x", f"{less:.2f}"] if found is not plain else ["", ""]
            figures = [f"**{figure}**" if way.startswith("onepass") else figure for figure in figures]
            speed = f"{found['ms']:.1f}", f"{found['tokens_per_s']:,.0f}", figures[0], f"{found['of_peak']:.2f}"
            yield line([f"{title}, {SIZES[title]}", way, *speed, f"{found['peak_gib']:.1f}", figures[1]])


DETERMINISTIC = (
    "All deterministic (`torch.use_deterministic_algorithms`), as `onepass train` is unless told otherwise: that makes the "
    "backward of PyTorch's attention slower by half and more, so that the gap is wider than in the table after this one. 1B "
    "releases its gradients' memory between steps (`--release-main-grads`), but not with CUDA graphs, nor in the next table."
)
FREE = (
    "Where sums may have any order (`--no-deterministic`). PyTorch's attention is cuDNN's then, and so is ours where that is "
    "faster. Compare within a table: from one H200 to another a step differs by 3 to 4 %."
)


def training_tables(folder):
    models, free = (sorted(folder.glob(f"gpt_{kind}[0-9]*.json")) for kind in ("", "free_"))
    lines = []
    for said, paths in ((DETERMINISTIC, models), (FREE, free)):
        results = [json.loads(path.read_text()) for path in paths]
        if not results:
            continue
        commits = ", ".join({each["commit"]: 0 for each in results})
        measured = f"One {results[0]['gpu']}, torch {results[0]['versions']['torch']}, commit {commits}."
        speed = "ms a step", "tokens/s", f"speed over {COMPILED}", "of cuBLAS's best"
        lines += [*([""] if lines else []), f"{said} {measured}", ""]
        lines += header("tokens", "", *speed, "peak GiB", f"of {COMPILED}'s")
        lines += [each for result in results for each in step_lines(result)]
    return "\n".join(lines)


def losses_table(path):
    results = json.loads(path.read_text())
    tokens, steps, model = f"{results['tokens']:,}", results["steps"], results["preset"]
    lines = [f"{steps} steps of {tokens} tokens, {model}, by `benchmarks/gpt_losses.py`; commit {results['commit']}.", ""]
    lines += header("", "set beside", "mean distance", "largest")
    for row in results["rows"]:
        name = f"**{row['run']}**" if row["run"].startswith("onepass") else row["run"]
        lines.append(line([name, row["beside"], f"{row['mean']:.1e}", f"{row['most']:.1e}"]))
    return "\n".join(lines)


def parallel_line(row):
    beside = f"{row['scaling']:.1%} of {row['ranks']} x {row['beside']}" if row.get("scaling") else ""
    flush = row.get("pipeline")
    idle = f"{flush['flush_ms']:.1f}, idle {flush['flush_idle_ms']:.1f}" if flush else ""
    return line([row["name"], f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", beside, f"{row['peak_gib']:.1f}", idle])


def parallel_tables(paths):
    lines = []
    for path in paths:
        results = json.loads(path.read_text())
        ranks = path.stem.rpartition("_")[2]
        lines += [*([""] if lines else []), f"1B on {ranks} {results['gpu']}; commit {results['commit']}.", ""]
        lines += header("", "ms a step", "tokens/s", "scaling", "peak GiB", "flush, ms")
        lines += [parallel_line(row) for row in results["rows"].values()]
    return "\n".join(lines)


# ---- models of Hugging Face ----


def huggingface_line(row, eager):
    tokens = row["shape"][0] * row["shape"][1] / row["ms"] * 1e3
    beside = f"{row['ms'] / eager['ms']:.2f}", f"{row['peak_gib'] / eager['peak_gib']:.2f}"
    faster, less = (f"**{figure}**" if row["contender"].startswith("onepass") else figure for figure in beside)
    apart = f"{row['loss_apart']:.1e}", f"{row['error_of_eager']:.2f}"
    cells = f"{row['ms']:.1f}", f"{tokens:,.0f}", faster, f"{row['peak_gib']:.1f}", less, *apart
    return line([row["case"], row["contender"], *cells])


def huggingface_table(path):
    results = json.loads(path.read_text())
    has = results["versions"]
    said = f"torch {has['torch']}, transformers {has['transformers']}, Liger {has['peers']['Liger']}"
    lines = [f"One {results['device']}, bf16, {said}; commit {results['commit']}.", ""]
    titles = "ms a step", "tokens/s", "of eager's ms", "GiB", "of eager's GiB", "losses apart", "gradients' error, of eager's"
    lines += header("", "", *titles)
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    for row in rows:
        lines.append(huggingface_line(row, next(each for each in rows if each["case"] == row["case"])))
    return "\n".join(lines)


# ---- all ops at a glance ----


def at_a_glance(path):
    """An op by its largest case; what the op is first measured as, of several as large."""
    results = json.loads(path.read_text())
    largest = max(results["rows"], key=lambda row: math.prod(row["shape"]))["case"]
    rows = [row for row in results["rows"] if row["case"] == largest]
    ours = own(rows)
    op = f"[`{path.stem}`](docs/figures.md#{path.stem})"
    if ours.get("reference"):
        time, peer = times_of_reference(rows)
        return line([op, named(ours), f"{time} of {ours['reference']}'s time", peer])
    shares = zip(*(copy_shares(rows, way) for way in ("forward", "backward")), strict=True)
    return line([op, named(ours), *(" / ".join(each) for each in shares)])


def loss_at_a_glance(path):
    cases = json.loads(path.read_text())["rows"]
    largest = max(cases, key=lambda case: math.prod(map(int, case.split(" x "))))
    ways = cases[largest]["ways"]
    peers = [name for name in LOSS_PEERS if "over_floor" in ways.get(name, {})]
    best_peer = min(peers, key=lambda name: ways[name]["over_floor"])
    (time, gib), (peer_time, peer_gib) = (time_and_gib(ways[name]) for name in ("onepass", best_peer))
    op = f"[`{path.stem}`](docs/figures.md#the-loss-without-the-logits)"
    return line([op, largest, f"**{time}** of three products' time, {gib} GiB", f"{peer_time} {best_peer}, {peer_gib} GiB"])


def ops_table(folder):
    rows = {path.stem: at_a_glance(path) for path in folder.glob("*.json")}
    loss = folder / "scripts" / "linear_cross_entropy.json"
    rows[loss.stem] = loss_at_a_glance(loss)
    return "\n".join([*header("", "case", "onepass", "best peer"), *(rows[op] for op in sorted(rows))])


# ---- the pages ----


def between(text, name, made):
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{made}\n{end}{after}"


def all_figures(folder=RESULTS):
    """What stands in each place."""
    scripts = folder / "scripts"
    return {
        OPS: ops_table(folder),
        FIGURES: tables(folder),
        LOSS: loss_tables(scripts),
        FUSION: fusion_table(scripts / "fusion.json"),
        TRAINING: training_tables(scripts),
        LOSSES: losses_table(scripts / "gpt_losses.json"),
        PARALLEL: parallel_tables(sorted(scripts.glob("gpt_parallel_*.json"))),
        HUGGINGFACE: huggingface_table(scripts / "huggingface.json"),
    }


def with_figures(page, made):
    """The page with what it has places for."""
    for name, table_text in made.items():
        if f"<!-- {name} -->" in page:
            page = between(page, name, table_text)
    return page


if __name__ == "__main__":
    try:
        made = all_figures()
    except ValueError as error:
        sys.exit(f"figures.py: {error}")
    for path in PAGES:
        path.write_text(with_figures(path.read_text(), made))
