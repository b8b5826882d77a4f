"""Write the figures of the README and the docs from benchmarks/results: `python benchmarks/figures.py`.

Figures are an H200's. What was measured on another GPU alone names it.

A page has a place for each table, between `<!-- name -->` and `<!-- /name -->`. A test compares the pages with the results.

    results, in benchmarks/results/<gpu>                 made by
    <op>.json                                            onepass bench OP --json FILE, from a commit
    scripts/linear_cross_entropy.json                    a script of its commit, now onepass bench linear_cross_entropy
    scripts/linear_cross_entropy_2.json                  benchmarks/linear_cross_entropy.py, on two GPUs
    scripts/fuse.json                                    benchmarks/fuse.py
    scripts/gpt_1B.json, gpt_free_1B.json                benchmarks/gpt_steps.py, a file a model; free: with --no-deterministic
    scripts/gpt_fp8_1B.json                              the same, by onepass in eight bits and not
    scripts/fusions_1B.json                              benchmarks/fusions.py, a file a model
    scripts/gpt_losses.json, gpt_parallel_2.json         benchmarks/gpt_losses.py, benchmarks/gpt_parallel.py
    scripts/huggingface.json, hybrids_qwen3_5.json       onepass bench huggingface, a file a case of this year's layers
    scripts/lora.json, lora_peers.json                   onepass bench lora (lora_axolotl.json: an earlier run, with axolotl)
    scripts/rates.json                                   benchmarks/rates.py; benchmarks/planned.py sets plans beside steps
    scripts/two_gpus.json                                benchmarks/two_gpus.py
    scripts/graphed_trainer.json, graphed_trainer_step.json        benchmarks/graphed_trainer.py, in two runs

first_screen.py has the README's table and pictures, fusion_tables.py what each fusion brings to a step.

What has eight bits, in any of these files, is left out of their tables and has one of its own, for each GPU.
"""

import importlib
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("train/speed", "plan", "huggingface/speed", "lora", "figures")),
    *sorted((ROOT / "docs" / "figures").glob("*.md")),
    *sorted((ROOT / "docs" / "ops").glob("*.md")),
]
# the tables' names in the pages
PICTURE, HEADLINE, GAINS, OPS, LOSS, FUSION = "picture", "headline", "gains", "ops", "loss", "fusion"
LOSS_MEMORY, FUSIONS = "loss-memory", "fusions"
TRAINING, LOSSES, PARALLEL, HUGGINGFACE, FP8, LORA = "training", "losses", "parallel", "huggingface", "fp8", "lora"
HYBRIDS, TWO_GPUS, TRAINER = "hybrids", "two-gpus", "trainer"
PLAN, PLAN_PUBLISHED = "plan", "plan_published"


def beside(name):
    """Import a file of this folder, which is on the path only where this file is run as a script."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


first_screen, fusion_tables = beside("first_screen"), beside("fusion_tables")
short = first_screen.short


def fraction(value):
    return f"{value:.2f}".removeprefix("0")


def named(row):
    return f"{row['variant']} {' x '.join(str(n) for n in row['shape'])}"


def of(rows, name):
    """The row of one contender, or an empty dict."""
    return next((row for row in rows if row["contender"] == name), {})


def own(rows):
    return next(row for row in rows if row["ours"])


def peers_of(rows):
    others = [row for row in rows if not row["ours"] and row["contender"] != "copy" and row["status"] == "ok"]
    return [row for row in others if not row.get("floor") or row["contender"] == row["reference"]]


def by_case(rows):
    cases = {}
    for row in rows:
        cases.setdefault((row["op"], row["case"]), []).append(row)
    return list(cases.values())


def stored(folder, eight_bits=False):
    """Return the results of ops by name: their rows and CPU times in eight bits, or all others."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        for part in ("rows", "cpu_time"):
            results[part] = [row for row in results[part] if eight_bits == in_eight_bits(row)]
        if results["rows"]:
            found[path.stem] = results
    return found


def in_eight_bits(row):
    return row["op"] == "fp8_passes" or row["variant"].endswith(" fp8")


def line(cells):
    return f"| {' | '.join(cells)} |"


def header(first, *titles):
    return [f"| {first}".rstrip() + f" {line(titles)}", "|---" * (len(titles) + 1) + "|"]


# ---- ops that memory bounds: fractions of a copy's bandwidth ----


def best(rows, direction):
    if not rows:
        return ""
    peer = max(rows, key=lambda row: row[f"{direction}_of_copy"])
    return f"{fraction(peer[f'{direction}_of_copy'])} {peer['contender']}"


def copy_shares(rows, direction):
    """Return the share of onepass and that of the best peer."""
    return f"**{fraction(own(rows)[f'{direction}_of_copy'])}**", best(peers_of(rows), direction)


def case_line(rows, directions):
    cells = [named(own(rows))]
    for direction in directions:
        cells += [*copy_shares(rows, direction), fraction(of(rows, "copy")[f"{direction}_of_copy"])]
    return line(cells)


def by_copy(cases, directions=("forward", "backward")):
    titles = header("rows x columns of y", *(title for direction in directions for title in (direction, "best peer", "copy")))
    return [*titles, *(case_line(rows, directions) for rows in cases)]


# ---- ops that matrix products bound: time over that of a reference, and memory ----


def mib(row, name):
    return f"{row[name]:.0f}" if row.get(name) is not None else ""


def whole(row):
    return f"{row['both_of_reference']:.3f}"


def times_of_reference(rows):
    """Return the time of onepass and that of the best peer other than the reference."""
    ours = own(rows)
    peers = [row for row in peers_of(rows) if row["contender"] != ours["reference"]]
    peer = min(peers, key=lambda row: row["both_of_reference"], default=None)
    return f"**{whole(ours)}**", f"{whole(peer)} {peer['contender']}" if peer else ""


def reference_line(rows):
    ours = own(rows)
    reference = of(rows, ours["reference"])
    times = " / ".join(f"{ours[f'{way}_ms']:.2f}" for way in ("forward", "backward") if ours[f"{way}_ms"] is not None)
    cells = [named(ours), times, *times_of_reference(rows)]
    cells += [f"{mib(ours, name)} / {mib(reference, name)}" for name in ("kept_mib", "peak_mib")]
    return line(cells)


SHAPES = {  # of other ops: tokens x in x out
    "attention": "sequences x tokens x heads x groups x width",
    "latent_attention": "sequences x tokens x heads x nope x rope x V",
    "linear_cross_entropy": "tokens x hidden x vocabulary",
    "linear_divergence": "tokens x student's hidden x teacher's hidden x vocabulary",
}
FLOORS = {
    "linear_cross_entropy": "*Three products*, of all rows by cuBLAS, are the least time of logits and gradients. *log_prob*: "
    "that and the entropy of each token, both differentiated; *half*: every second label is -100; *forward*: without gradients, "
    "over one product.",
    "linear_divergence": "*Four products* by cuBLAS are the least time of both heads' logits and the student's gradients.",
}
NOTES = {
    "cross_entropy": "Liger's forward makes the gradient too, and its backward hardly anything: both together take it longer.",
    "attention": "onepass and its peers are deterministic, but for the rows *any order*: there onepass has deterministic=False, "
    "and peers may add in any order.",
}


def replaced(op, names):
    """Say what an op's references are."""
    return FLOORS.get(op, f"*{'*, *'.join(names)}* are the onepass and PyTorch calls that the op replaces, one after another.")


def references(cases):
    return list(dict.fromkeys(ours["reference"] for ours in map(own, cases) if ours.get("reference")))


def by_reference(op, cases):
    """Return a table for each reference."""
    lines = []
    for name in references(cases):
        sides = [f"MiB {what}, onepass / {name}" for what in ("kept for backward", "at most")]
        titles = header(SHAPES.get(op, "tokens x in x out"), "ms, forward / backward", f"both, over {name}", "best peer", *sides)
        lines += ["", *titles, *(reference_line(rows) for rows in cases if own(rows)["reference"] == name)]
    return lines[1:]


# ---- small cases, and the CPU ----

GRAPH_TIME = "GPU time in a CUDA graph, us, forward / backward"
CPU_TIME = "CPU time of a tiny call, us, forward / both"


def graph_lines(cases):
    """Return a table of the cases whose GPU time was measured in a CUDA graph, if there are any."""
    small = [rows for rows in cases if any(row.get("forward_graph_us") is not None for row in rows)]
    if not small:
        return []
    names = list(dict.fromkeys(row["contender"] for rows in small for row in rows if row["contender"] != "copy"))
    lines = ["", *header(GRAPH_TIME, *names)]
    for rows in small:
        cells = [pair(of(rows, name), "forward_graph_us", "backward_graph_us", ".1f") for name in names]
        lines.append(line([named(rows[0]), *cells]))
    return lines


def pair(row, first, second, digits):
    return "" if row.get(first) is None else f"{row[first]:{digits}} / {row[second]:{digits}}"


def cpu_names(cpu_time):
    """Return every contender of any variant, the op itself first, and one reference of PyTorch's."""
    return [*dict.fromkeys(name for times in cpu_time for name in times["contenders"]), "F.rms_norm(x)"]


def cpu_line(times, names):
    found = times["contenders"] | times["references"]
    return line([times["variant"], *(pair(found.get(name, {}), "forward_us", "both_us", ".0f") for name in names)])


def check(op, results):
    """Raise ValueError if results are no figures."""
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


def table(op, results):
    """Return the tables of an op on one GPU."""
    check(op, results)
    names = cpu_names(results["cpu_time"])
    versions, peers = results["versions"], results["versions"]["peers"]
    cases = by_case(results["rows"])
    packages = {name: versions[name] for name in ("torch", "triton")} | peers
    return "\n".join(
        [
            f"One {results['hardware']['name']}, {results['dtype']}, copy {results['ceilings']['copy_gbs'] / 1000:.2f} TB/s; "
            f"{', '.join(f'{name} {version}' for name, version in packages.items())}; commit {results['commit']}.",
            "",
            *(by_reference(op, cases) if references(cases) else by_copy(cases)),
            *graph_lines(cases),
            "",
            *header(CPU_TIME, *names),
            *(cpu_line(times, names) for times in results["cpu_time"]),
        ]
    )


def section(op, every):
    """Return an op's section: a table for each GPU."""
    names = list(dict.fromkeys(name for results in every for name in references(by_case(results["rows"]))))
    said = [*([NOTES[op]] if op in NOTES else []), *([replaced(op, names)] if names else [])]
    return "\n\n".join([f"## {op}", *said, *(table(op, results) for results in every)])


def tables(folder, others=()):
    """Return the sections of each page of docs/figures by its name, of each GPU, that of `folder` first."""
    found = {}
    for each in (folder, *others):
        for op, results in stored(each).items():
            found.setdefault(op, []).append(results)
    if not found:
        raise ValueError(f"{folder} holds no results")
    pages = {figures_of(op): [] for op in found}
    for op in (op for op in measured_ops() if op in found):
        pages[figures_of(op)].append(section(op, found[op]))
    return {page: "\n\n".join(sections) for page, sections in pages.items()}


def others_of(folder):
    """The results of other GPUs."""
    return sorted(other for other in folder.parent.iterdir() if other != folder)


# ---- linear_cross_entropy: time over that of its matrix products, and memory ----


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
    """Return the table of one GPU."""
    results = json.loads(path.read_text())
    titles = header("tokens x hidden x vocabulary", "floor, ms", "onepass", "with main_grad and grad_scale", *LOSS_PEERS)
    versions = results["versions"]
    packages = {"torch": versions["torch"], "triton": versions["triton"]} | versions["peers"]
    said = ", ".join(f"{name} {version}" for name, version in packages.items() if name != "Megatron-core")  # it was not measured
    measured = f"One {results['gpu']}, {said}; commit {results['commit']}."
    return "\n".join([measured, "", *titles, *(loss_line(case, result) for case, result in results["rows"].items())])


def shares_table(paths):
    """Return the table of several GPUs, which divide the vocabulary."""
    ways = ("tensor parallel", "and sequence parallel", "tensor parallel, main_grad and grad_scale")
    lines, measured = header("tokens x hidden x vocabulary", "GPUs", *ways), []
    for path in paths:
        results = json.loads(path.read_text())
        measured.append(f"{path.stem.rpartition('_')[2]} GPUs: torch {results['versions']['torch']}, commit {results['commit']}.")
        for case, result in results["rows"].items():
            found = result["ways"]
            shares = [f"**{found[name]['of_its_share']:.2f}** / {found[name]['peak_mib'] / 1024:.1f}" for name in ways]
            lines.append(line([case, str(result["ranks"]), *shares]))
    said = "Several GPUs divide the vocabulary. Time over one GPU's divided by their number, and the peak GiB of each."
    return "\n".join([f"{said} {' '.join(measured)}", "", *lines])


def loss_tables(folder):
    one, *several = sorted(folder.glob("linear_cross_entropy*.json"), key=lambda path: (len(path.stem), path.stem))
    return "\n\n".join([loss_table(one), *([shares_table(several)] if several else [])])


# ---- fuse: kernels, GPU time and wall time of a call ----

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

PLAIN, IN_BF16 = "plain", "plain, bf16 weights"  # of benchmarks/plain_gpt.py, compiled
SIZES = {"124M": "16 x 1024", "1B": "4 x 4096", "8B_four_layers": "1 x 8192", "124M_llama": "16 x 1024"}  # of gpt_steps.py


def fp8_way(way):
    return "fp8" in way or "torchao" in way


def step_lines(results):
    """Yield a line for each way of a model, beside the plain one."""
    for title, ways in ((title, ways) for title, ways in results["rows"].items() if PLAIN in ways):
        plain = ways[PLAIN]
        for way, found in ways.items():
            if "error" in found or fp8_way(way):
                continue
            faster, less = plain["ms"] / found["ms"], found["peak_gib"] / plain["peak_gib"]
            figures = [f"{faster:.2f} x", f"{less:.2f}"] if found is not plain else ["", ""]
            figures = [f"**{figure}**" if way.startswith("onepass") else figure for figure in figures]
            speed = f"{found['ms']:.1f}", f"{found['tokens_per_s']:,.0f}", figures[0], f"{found['of_peak']:.2f}"
            model = f"{title}, {SIZES[title]}, {short(results['gpu'])}"
            yield line([model, way, *speed, f"{found['peak_gib']:.1f}", figures[1]])


DETERMINISTIC = (
    "Both are deterministic (`torch.use_deterministic_algorithms`), which is the default of `onepass train`. It slows down the "
    "backward of PyTorch's attention by half or more, so the gap is wider than in the next table. onepass releases the memory of "
    "1B's gradients between steps (`--release-main-grads`), except with CUDA graphs."
)
FREE = (
    "Sums may have any order (`--no-deterministic`). PyTorch then takes cuDNN's attention; so does onepass where it is faster. "
    "Compare within a table: a step differs by 3 to 4 % from one GPU to another."
)


def training_tables(*folders):
    lines = []
    for said, kind in ((DETERMINISTIC, ""), (FREE, "free_")):
        results = [json.loads(path.read_text()) for folder in folders for path in sorted(folder.glob(f"gpt_{kind}[0-9]*.json"))]
        results = [each for each in results if any(PLAIN in ways for ways in each["rows"].values())]
        if not results:
            continue
        runs = dict.fromkeys(f"one {each['gpu']}, torch {each['versions']['torch']}, commit {each['commit']}" for each in results)
        measured = f"Measured on {'; '.join(runs)}."
        speed = "ms a step", "tokens/s", f"speed over {PLAIN}", "of cuBLAS's best"
        lines += [*([""] if lines else []), f"{said} {measured}", ""]
        lines += header("tokens", "", *speed, "peak GiB", f"of {PLAIN}'s")
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


def two_gpus_table(path):
    results = json.loads(path.read_text())
    of = f"{results['ranks']} {results['gpu']}, torch {results['versions']['torch']}"
    lines = [f"{of}, by `benchmarks/two_gpus.py`; commit {results['commit']}.", ""]
    lines += header("", "layers, sequences x length a GPU", "way", "ms alone", "ms together", "tokens/s", "scaling", "peak GiB")
    for name, row in results["rows"].items():
        layers, sequences, length = results["sizes"][name]
        alone = ", ".join(f"{each['ms']:.1f}" for each in row["alone"])
        for way, ranks in row["together"].items():
            slowest = max(ranks, key=lambda each: each["ms"])
            speed, scaling = len(ranks) * slowest["tokens_s"], row["scaling"].get(way)
            figures = f"{slowest['ms']:.1f}", f"{speed:,.0f}", f"{scaling:.1%}" if scaling else "", f"{slowest['peak_gib']:.1f}"
            lines.append(line([name, f"{layers}, {sequences} x {length}", way, alone, *figures]))
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

OURS_FP8 = "onepass fp8"


def plan_rows():
    """What `onepass plan --gpus` says of steps, beside what they take."""
    planned = beside("planned")
    return planned.measured_rows(), planned.published_rows()


def plan_table(rows):
    lines = header("", "ms measured", "planned", "error", "GiB measured", "planned")
    for row in rows:
        name = f"{row.name} ({row.gpu.upper()})" + ("; the CPU decides" if row.cpu_decides else "")
        kept = row.layout.gpus > 1 or row.options.release_main_grads is False  # one GPU's may be released: `--gpu` counts that
        memory = (f"{row.gib:.1f}", f"{row.planned_gib:.1f}") if kept else ("", "")
        lines.append(line([name, f"{row.ms:.1f}", f"{row.planned_ms:.1f}", f"{row.error:+.1%}", *memory]))
    return "\n".join(lines)


def published_table(rows):
    sources = list(dict.fromkeys(row.source for row in rows))
    lines = header("", "GPUs", "tp, pp x stages, dp, cp", "micro", "sequences", "s a step, published", "planned", "error")
    for row in rows:
        own = row.layout
        stages = f" x {own.stages}" if own.stages > 1 else ""
        layout = f"{own.tensor}, {own.pipeline}{stages}, {own.data}{' FSDP' if own.shard == 'fsdp' else ''}, {own.context}"
        name = f"{row.name} [{sources.index(row.source) + 1}]"
        times = f"{row.seconds:.3f}", f"{row.planned:.3f}", f"{row.error:+.1%}"
        lines.append(line([name, f"{own.gpus:,}", layout, str(own.micro), f"{own.batch:,}", *times]))
    return "\n".join([*lines, "", *(f"{number}. {source}" for number, source in enumerate(sources, 1))])


def huggingface_line(row, eager):
    """`eager`: its row, or None where it was not measured."""
    tokens = row.get("tokens", row["shape"][0] * row["shape"][1]) / row["ms"] * 1e3  # padding is no token
    beside = ["", ""] if eager is None else [f"{row[name] / eager[name]:.2f}" for name in ("ms", "peak_gib")]
    faster, less = (f"**{figure}**" if figure and row["contender"].startswith("onepass") else figure for figure in beside)
    apart = ("", "") if eager is None else (f"{row['loss_apart']:.1e}", f"{row['error_of_eager']:.2f}")
    cells = f"{row['ms']:.1f}", f"{tokens:,.0f}", faster, f"{row['peak_gib']:.1f}", less, *apart
    return line([row["case"], row["contender"], *cells])


HUGGINGFACE_PACKAGES = ("torch", "transformers", "Liger", "Unsloth", "axolotl", "FLA", "FlashQLA", "causal-conv1d")


def huggingface_table(path, but=OURS_FP8):
    """but: the contender that is left out."""
    results = json.loads(path.read_text())
    has = results["versions"]
    packages = has | has["peers"]
    said = ", ".join(f"{name} {packages[name]}" for name in HUGGINGFACE_PACKAGES if name in packages)
    lines = [f"One {results['device']}, bf16, {said}; commit {results['commit']}.", ""]
    titles = "ms a step", "tokens/s", "of eager's ms", "GiB", "of eager's GiB", "losses apart", "gradients' error, of eager's"
    lines += header("", "", *titles)
    rows = [row for row in results["rows"] if row["status"] == "ok" and row["contender"] != but]
    eager = {row["case"]: row for row in rows if row["contender"] == "eager"}
    lines += [huggingface_line(row, eager.get(row["case"])) for row in rows]
    return "\n".join(lines)


# ---- eight bits: time over that of bf16 and of peers, and shares of a copy's bandwidth ----

BF16 = "onepass bf16"
BESIDE = (BF16, "torchao tensorwise", "torchao rowwise", "Transformer Engine", "Liger")
FP8_PACKAGES = ("torch", "triton", "torchao", "Transformer Engine", "Liger")


def fp8_steps(results):
    """Yield a title, (ms, memory) in eight bits, and (ms, memory) by name of what it is set beside; likewise below."""
    for model, ways in results["rows"].items():
        found = {way: (row["ms"], row["peak_gib"]) for way, row in ways.items() if "error" not in row}
        others = {BF16 if way == "onepass" else way.rpartition(", ")[2]: row for way, row in found.items()}
        order = "deterministic" if results["deterministic"] else "any order"
        for way in (way for way in found if way.startswith("onepass, fp8")):
            recipe = way.partition("fp8 ")[2] or "delayed"
            yield f"step of {model.replace('_', ' ')}, {SIZES[model]}, {order}, {recipe}", found[way], others


NO_WAITS = 'logging_nan_inf_filter=False, accelerator_config={"non_blocking": True}'
TRAINER_WAYS = {
    "eager": "eager",
    "liger": "Liger",
    "compile": "`torch_compile=True`",
    "compile, CUDA graphs": '`torch_compile=True, torch_compile_mode="reduce-overhead"`',
    "compile, no waits": f"`torch_compile=True, {NO_WAITS}`",
    "onepass": "onepass",
    "onepass graph": "onepass, `graph=True`",
    "onepass graph, no waits": f"onepass, `graph=True`, `{NO_WAITS}`",
    "onepass graph, main_grad": "the same with `main_grad=True` and `applied.optimizer`: fp32 gradients and masters",
}


def trainer_table(path, of_a_step):
    """Return a small model's steps under Trainer. `of_a_step`: another run's results, with graphed_step."""
    results, other = (json.loads(each.read_text()) for each in (path, of_a_step))
    versions, rows = results["versions"], results["rows"]
    step, graph, free = (other["rows"][way]["ms"] for way in ("graphed_step", "onepass graph", "onepass graph, no waits"))
    lines = [
        f"One {results['gpu']}, torch {versions['torch']}; commit {results['commit']}. A loop of one's own with `graphed_step` "
        f"takes {step:.1f} ms, in a run where `graph=True` takes {graph:.1f}, and {free:.1f} with the two arguments "
        f"(commit {other['commit']}).",
        "",
        *header("", "ms a step", "of eager's ms", "peak GiB"),
    ]
    for way, words in TRAINER_WAYS.items():
        share = f"{rows[way]['ms'] / rows['eager']['ms']:.2f}"
        share = f"**{share}**" if way.startswith("onepass") else share
        lines.append(line([words, f"{rows[way]['ms']:.1f}", share, f"{rows[way]['peak_gib']:.1f}"]))
    return "\n".join(lines)


def fp8_huggingface(results):
    for rows in by_case(row for row in results["rows"] if row["status"] == "ok"):
        found = {BF16 if row["contender"] == "onepass" else row["contender"]: (row["ms"], row["peak_gib"]) for row in rows}
        if OURS_FP8 in found:
            yield f"step of Hugging Face's {rows[0]['case']}", found[OURS_FP8], found


def fp8_products(results):
    for rows in by_case(results["rows"]):
        ours = own(rows)
        if ours["reference"]:
            timed = (row for row in rows if row["both_of_reference"])
            found = {row["contender"]: (row["forward_ms"] + row["backward_ms"], row["peak_mib"]) for row in timed}
            yield f"{ours['op']} {named(ours).replace(' fp8', '')}", found["onepass"], found


def over(ours, other):
    return f"{ours / other:.2f}" if ours and other else ""


def fp8_line(title, ours, others, names):
    times = [over(ours[0], others[name][0]) if name in others else "" for name in names]
    memory = over(ours[1], others[BF16][1]) if BF16 in others else ""
    return line([title, f"{ours[0]:.2f}", *(f"**{time}**" if time else "" for time in times), memory])


def fp8_measured(files):
    """Return the GPU, and the versions and commits of all files."""
    gpu = next(each.get("gpu") or each.get("device") or each["hardware"]["name"] for each in files)
    versions = [each["versions"] | each["versions"].get("peers", {}) for each in files]
    packages = {name: dict.fromkeys(each[name] for each in versions if name in each) for name in FP8_PACKAGES}
    said = ", ".join(f"{name} {', '.join(found)}" for name, found in packages.items() if found)
    return f"One {gpu}, {said}; commit {', '.join(dict.fromkeys(each['commit'] for each in files))}."


def fp8_table(folder):
    """Return what one GPU has, or an empty text."""
    ops, scripts = stored(folder, eight_bits=True), folder / "scripts"
    for op, results in ops.items():
        check(op, results)
    kinds = ((fp8_steps, "gpt_[0-9f]*.json"), (fp8_huggingface, "huggingface*.json"))  # f: free, fp8
    found = [(read, json.loads(path.read_text())) for read, names in kinds for path in sorted(scripts.glob(names))]
    found += [(fp8_products, results) for results in ops.values()]
    rows_of = [(results, list(read(results))) for read, results in found]
    files = [results for results, rows in rows_of if rows or results in ops.values()]
    if not files:
        return ""
    rows = [row for _, rows in rows_of for row in rows]
    names = [name for name in BESIDE if any(name in others for *_, others in rows)]
    lines = [fp8_measured(files)]
    if rows:
        lines += ["", *header("", "ms, forward and backward", *(f"over {name}" for name in names), f"memory, over {BF16}")]
        lines += [fp8_line(*row, names) for row in rows]
    passes = [rows for results in ops.values() for rows in by_case(results["rows"]) if not own(rows)["reference"]]
    if passes:
        lines += ["", *by_copy(passes, ("forward",))]
    return "\n".join(lines)


def fp8_tables(folder):
    made = [fp8_table(gpu) for gpu in sorted(folder.iterdir())]
    return "\n\n".join(filter(None, made)) or "Not measured yet."


# ---- all ops at a glance ----

# A row of the table: the op, its page in docs/, what it does, and the result that measures it, if any. The page of
# docs/figures that has the name of the op's page has the result.
OPS_ROWS = [
    (
        "`bias_activation`",
        "ops/activations",
        "bias and activation, gated (of one tensor or two) or not; dropout, token weights and the bias gradient in the same pass",
        "bias_activation",
    ),
    (
        "`layer_norm`, `rms_norm`",
        "ops/norms",
        "a norm, alone or after adding a residual, of any width; one kernel forward, one backward",
        "norm",
    ),
    (
        "`gated_rms_norm`",
        "ops/norms#gated-norms",
        "RMSNorm and a SiLU or sigmoid gate in one kernel, in either order, of heads, rows or groups; saves its two inputs only",
        "gated_norm",
    ),
    (
        "`gated_norm_linear`",
        "ops/norms#gated-norms",
        "the same and the linear layer after it; saves the norm's two inputs only",
        "gated_norm_linear",
    ),
    (
        "`causal_conv1d`",
        "ops/hybrids#causal-convolutions",
        "a depthwise causal convolution, SiLU, the split into q, k and v and norms of heads, of documents too; saves only x",
        "causal_conv1d",
    ),
    (
        "`delta_gates`",
        "ops/hybrids#delta-rules",
        "the gates of a gated delta rule from their projections, read where they lie; saves its inputs only",
        "delta_gates",
    ),
    (
        "`gated_delta_rule`",
        "ops/hybrids#delta-rules",
        "the delta rule by FlashQLA's or FLA's kernels, or a formula; documents, states, compiled, on DTensors",
        "gated_delta_rule",
    ),
    (
        "`mamba_chunk_scan`",
        "ops/hybrids#mamba-2s-scan",
        "the scan of Mamba 2 by mamba-ssm's or FLA's kernels, or a formula; documents, states, compiled, on DTensors",
        "mamba_chunk_scan",
    ),
    (
        "`norm_linear`",
        "ops/norms#a-norm-and-the-linear-layer-after-it",
        "a norm and the linear layer after it; saves only the norm's input",
        "norm_linear",
    ),
    (
        "`linear`",
        "ops/linear",
        "the product adds the weight's gradient to fp32 `main_grad`; tensor and sequence parallel",
        "linear",
    ),
    (
        "`lora_linear`",
        "ops/lora",
        "a linear layer and its LoRA; no gradient of a frozen weight, and no product in fp32 of adapters in fp32",
        "lora_linear",
    ),
    (
        "`activation_linear`",
        "ops/linear",
        "an activation and the linear layer after it; saves only the activation's input",
        "activation_linear",
    ),
    (
        "`linear_cross_entropy`",
        "ops/losses",
        "the loss of a head without its logits; label smoothing, z-loss, softcap, token weights, vocabularies divided over ranks",
        "linear_cross_entropy",
    ),
    (
        "`cross_entropy`",
        "ops/losses",
        "the same loss of logits that are there, which its gradient may overwrite (Liger's forward makes the gradient too)",
        "cross_entropy",
    ),
    (
        "`linear_divergence`",
        "ops/losses#distillation",
        "KL or Jensen-Shannon divergence of a student's head from a teacher's, without either's logits",
        "linear_divergence",
    ),
    (
        "`attention`",
        "ops/attention#attention",
        "rotary positions and causal attention of a fused projection; deterministic by default",
        "attention",
    ),
    (
        "`latent_attention`",
        "ops/attention#latent-attention",
        "DeepSeek's attention from its up-projections on; documents; deterministic by default",
        "latent_attention",
    ),
    ("`rope`", "ops/attention", "rotary positions of q and k in one launch; saves only the tables", "rope"),
    (
        "`embedding`",
        "ops/embedding",
        "rows of a table by their ids; the gradient goes to the rows of `main_grad` that were looked up, in a fixed order",
        "embedding",
    ),
    (
        "`route`",
        "ops/experts",
        "a router's choice of experts, weights, counts and losses in one kernel each way; groups, expert bias and capacity",
        "route",
    ),
    (
        "`experts`",
        "ops/experts#experts",
        "a mixture's experts: rows sorted, grouped products, biases, LoRA, gradients in `main_grad`; nothing waits for the GPU",
        "experts",
    ),
    ("`softmax`", "ops/softmax", "scaled, masked or causal softmax of attention scores", "softmax"),
    (
        "`dropout_add`",
        "ops/dropout",
        "residual plus dropout of x and its bias; saves no mask; drops the same elements on every layout",
        "dropout_add",
    ),
    ("`fuse`", "fusion", "runs equal, independent operators of your own code as one, forward and backward", None),
    ("`profile`", "profile", "shows where a step's time goes, and which ops here apply", None),
]


def measured_ops():
    """Return the page of each result of an op, in the order of the rows above."""
    return {result: Path(page.partition("#")[0]).name for _, page, _, result in OPS_ROWS if result}


def figures_of(op):
    """Return the page of docs/figures that has an op's results."""
    if op not in measured_ops():
        raise ValueError(f"OPS_ROWS of figures.py has no row for {op}")
    return measured_ops()[op]


def at_a_glance(op, results):
    """Return the largest case of an op, its figures and the best peer's. Of several as large, the first."""
    rows = max(by_case(results["rows"]), key=lambda rows: math.prod(rows[0]["shape"]))
    ours = own(rows)
    case = f"[{named(ours)}](figures/{figures_of(op)}.md#{op})"
    if ours.get("reference"):
        time, peer = times_of_reference(rows)
        reference = "the separate calls" if ours["reference"] == "separate" else ours["reference"]
        return [case, f"{time} of the time of {reference}", peer]
    shares = zip(*(copy_shares(rows, way) for way in ("forward", "backward")), strict=True)
    return [case, *(" / ".join(each) for each in shares)]


def loss_at_a_glance(path):
    cases = json.loads(path.read_text())["rows"]
    largest = max(cases, key=lambda case: math.prod(map(int, case.split(" x "))))
    ways = cases[largest]["ways"]
    peers = [name for name in LOSS_PEERS if "over_floor" in ways.get(name, {})]
    best_peer = min(peers, key=lambda name: ways[name]["over_floor"])
    (time, gib), (peer_time, peer_gib) = (time_and_gib(ways[name]) for name in ("onepass", best_peer))
    case = f"[{largest}](figures/losses.md#the-loss-without-the-logits)"
    return [case, f"**{time}** of three products' time, {gib} GiB", f"{peer_time} {best_peer}, {peer_gib} GiB"]


def ops_table(folder, others=()):
    """Return one row an op. Figures are empty where nothing was measured."""
    found = {}
    for other in others:
        for op, results in stored(other).items():
            case, *rest = at_a_glance(op, results)
            found[op] = [f"{case} ({short(results['hardware']['name'])})", *rest]
    found |= {op: at_a_glance(op, results) for op, results in stored(folder).items()}
    loss = folder / "scripts" / "linear_cross_entropy.json"
    if loss.exists():
        found[loss.stem] = loss_at_a_glance(loss)
    lines = []
    for op, page, words, result in OPS_ROWS:
        name, *anchor = page.split("#")
        lines.append(line([f"[{op}]({'#'.join([f'{name}.md', *anchor])})", words, *found.get(result, ["", "", ""])]))
    return "\n".join([*header("op", "what it does", "largest case", "onepass", "best peer"), *lines])


# ---- the pages ----


def between(text, name, made):
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{made}\n{end}{after}"


def all_figures(folder=RESULTS):
    """Return the text of each table by its name."""
    scripts, others = folder / "scripts", others_of(folder)
    every = [each / "scripts" for each in (folder, *others)]
    planned, published = plan_rows()
    first = first_screen.rows_of([folder, *others])
    return {
        PICTURE: first_screen.picture_line(first.values()),
        HEADLINE: first_screen.table(first.values()),
        GAINS: first_screen.gains(first, [folder]),
        OPS: ops_table(folder, others),
        LOSS_MEMORY: first_screen.loss_memory([folder]),
        FUSIONS: fusion_tables.table(every),
        **fusion_tables.sentences(every, "../figures/training.md"),
        **{f"figures of {page}": made for page, made in tables(folder, others).items()},
        LOSS: loss_tables(scripts),
        FUSION: fusion_table(scripts / "fuse.json"),
        TRAINING: training_tables(*every),
        LOSSES: losses_table(scripts / "gpt_losses.json"),
        PARALLEL: parallel_tables(path for each in every for path in sorted(each.glob("gpt_parallel_*.json"))),
        TWO_GPUS: two_gpus_table(scripts / "two_gpus.json"),
        HUGGINGFACE: huggingface_table(scripts / "huggingface.json"),
        HYBRIDS: "\n\n".join(huggingface_table(path, but=None) for each in every for path in sorted(each.glob("hybrids_*.json"))),
        TRAINER: trainer_table(scripts / "graphed_trainer.json", scripts / "graphed_trainer_step.json"),
        FP8: fp8_tables(folder.parent),
        PLAN: plan_table(planned),
        PLAN_PUBLISHED: published_table(published),
        LORA: "\n\n".join(
            huggingface_table(each / name, but=None)
            for each in every
            for name in ("lora_peers.json", "lora.json")
            if (each / name).exists()
        ),
    }


def with_figures(page, made):
    """Return the page with the tables that it has places for."""
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
    for path, drawn in first_screen.pictures(first_screen.rows_of([RESULTS, *others_of(RESULTS)]).values()).items():
        path.write_text(drawn)
