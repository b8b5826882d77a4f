"""The torch.compile backend of `fuse`. Dynamo traces, AOTAutograd adds backward, `rewrite` fuses, inductor compiles.

With inductor, `rewrite` is one of inductor's own passes, over the joint graph of forward and backward. All passes before and
after it are PyTorch's. So a graph without groups to fuse compiles as under torch.compile.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from onepass.fusion.cost import machine_of
from onepass.fusion.foreach_cat import lower_marked
from onepass.fusion.graph_inputs import with_stable_addresses
from onepass.fusion.outputs import before_gradients, lanes_of_saved, read_by_backward, with_own_outputs, with_shared_versions
from onepass.fusion.report import FusionReport, GraphReport
from onepass.fusion.rewrite import WHOLE, parameters_of, rewrite, take_apart
from onepass.fusion.side_by_side import PackedParameters, backward_with, forward_with, put_back, take_out
from onepass.fusion.trial import FusionTrial, InputSpec

_log = logging.getLogger("onepass.fusion")

# Dynamo's guards check sizes before each call. A second check takes a microsecond for each of hundreds of parameters.
_DEFAULTS = {"size_asserts": False}
COMPILERS = ("auto", "inductor", "none")


class FusionBackend:
    """A backend that torch.compile calls with each graph. One object serves one fused function and keeps its report."""

    def __init__(self, compiler: str = "auto", cuda_graph: bool = False, options: dict[str, Any] | None = None) -> None:
        if compiler not in COMPILERS:
            raise ValueError(f"compiler must be one of {', '.join(COMPILERS)}, but is {compiler!r}")
        if cuda_graph and compiler == "none":
            raise ValueError("cuda_graph=True needs the compiler 'inductor', but compiler is 'none'")
        self._check(compiler, options or {})
        self.compiler = compiler
        self.cuda_graph = cuda_graph
        self.options = dict(options or {})
        self.report = FusionReport()
        self._trials: list[tuple[GraphReport, FusionTrial]] = []

    @staticmethod
    def _check(compiler: str, options: dict[str, Any]) -> None:
        if options and compiler == "none":
            raise ValueError(f"options are inductor's, but compiler is 'none': {', '.join(options)}")
        if "joint_custom_pre_pass" in options:
            raise ValueError("options must leave out joint_custom_pre_pass: it is where fuse does its work")
        unknown = set(options) - set(torch._inductor.list_options()) if options else set()
        if unknown:
            raise ValueError(
                f"options must be inductor's (torch._inductor.list_options()), but {', '.join(sorted(unknown))} is none"
            )

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        devices = {x.device for x in inputs if isinstance(x, torch.Tensor)}
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        if self.cuda_graph and device.type == "cpu":
            raise ValueError("cuda_graph=True needs a GPU, but the function's tensors are on the CPU")
        compiler = self.compiler if self.compiler != "auto" else "inductor" if has_inductor(device) else "none"
        if self.cuda_graph and compiler == "none":
            raise ValueError("cuda_graph=True needs the compiler 'inductor', which can't compile here: is Triton installed?")
        job = _Job(self, device, inputs)
        written = copy.deepcopy(module)  # inductor keeps the module and changes it
        compiled = (job.with_inductor if compiler == "inductor" else job.without_compiler)(module, inputs)
        self._trials.extend((report, FusionTrial(written, compiled, job.inputs, device)) for report in job.reports)
        return compiled

    def reported(self, measure: bool = False) -> FusionReport:
        """Return what was fused so far, what was not, and why. `measure`: also time each graph, as written and as fused."""
        if measure:
            for report, trial in self._trials:
                report.times = report.times or trial.times()
        return self.report


class _Job:
    """The compilation of one dynamo graph."""

    def __init__(self, backend: FusionBackend, device: torch.device, inputs: Sequence[Any]) -> None:
        self.backend = backend
        self.machine = machine_of(device)
        self.inputs = [InputSpec.like(x) for x in inputs]
        self.reports: list[GraphReport] = []
        self.read: list[bool] = []  # for each of the function's outputs: whether backward reads it. Forward's others are saved

    def rewrite(self, graph: Graph, compiled: bool) -> None:
        parameters = parameters_of(graph, [x.is_parameter for x in self.inputs])
        found = rewrite(graph, parameters, self.machine, compiled)
        self.reports.append(found)
        self.backend.report.graphs.append(found)

    def _kept(self, wholes: Sequence[tuple[PackedParameters, Node]]) -> list[PackedParameters]:
        self.reports[-1].wholes.extend(whole for whole, _ in wholes)
        return [whole for whole, _ in wholes]

    # ---- inductor ----

    def with_inductor(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.custom_graph_pass import CustomGraphPass
        from torch._inductor.decomposition import select_decomp_table

        everything = dict(select_decomp_table())
        table = {target: how for target, how in everything.items() if target not in WHOLE}
        job = self

        class Pass(CustomGraphPass):
            def __call__(self, graph: Graph) -> None:
                job.read = read_by_backward(graph, before_gradients(graph))
                job.rewrite(graph, compiled=True)
                take_apart(graph, everything)

            def uuid(self) -> None:
                return None

        patches = {**_DEFAULTS, **self.backend.options, "joint_custom_pre_pass": Pass()}
        if self.backend.cuda_graph:
            patches["triton.cudagraphs"] = True
        with _no_cache():
            compiled: Any = compile_fx(module, inputs, inner_compile=self._inner, config_patches=patches, decompositions=table)
        return compiled  # type: ignore[no-any-return]

    def _inner(self, module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        moving: list[int] = []
        if self.backend.cuda_graph:
            still = set(options.get("static_input_idxs") or ())
            moving = [i for i, given in enumerate(inputs) if isinstance(given, torch.Tensor) and i not in still]
            options["static_input_idxs"] = [*still, *moving]
        back = put_back(module.graph) if options.get("is_backward") else []
        wholes = [] if options.get("is_backward") else take_out(module.graph)
        lower_marked(module.graph)
        lanes = [] if options.get("is_backward") else lanes_of_saved(module.graph, self.read)
        compiled: Any = compile_fx_inner(*_longer(module, inputs, options, len(back) + len(wholes)), **options)
        if moving:
            written = compiled.mutated_input_idxs
            compiled.current_callable = with_stable_addresses(compiled.current_callable, moving, written)
        if lanes:
            compiled.current_callable = with_shared_versions(compiled.current_callable, lanes)
        if back:
            compiled.current_callable = backward_with(compiled.current_callable, back)
        if wholes:
            compiled.current_callable = forward_with(compiled.current_callable, self._kept(wholes))
        return compiled

    # ---- no compiler: fewer calls of PyTorch's operators ----

    def without_compiler(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
        from torch._functorch.aot_autograd import aot_module_simplified
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        def partition(joint: GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
            self.read = read_by_backward(joint.graph, options["num_fwd_outputs"])
            self.rewrite(joint.graph, compiled=False)
            joint.recompile()
            return min_cut_rematerialization_partition(joint, joint_inputs, **options)

        def forward(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            wholes = take_out(gm.graph)
            gm.recompile()
            return forward_with(with_own_outputs(make_boxed_func(gm.forward), gm.graph, self.read), self._kept(wholes))

        def backward(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            back = put_back(gm.graph)
            gm.recompile()
            return backward_with(with_own_outputs(make_boxed_func(gm.forward), gm.graph), back)

        def inference(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            self.rewrite(gm.graph, compiled=False)
            return forward(gm, example_inputs)

        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
        )


def _longer(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any], added: int) -> tuple[GraphModule, list[Any]]:
    """Append the `added` new placeholders to the inputs. They are static inputs, as parameters are."""
    if added:
        module.recompile()
        new: list[Node] = module.graph.find_nodes(op="placeholder")[-added:]
        options["static_input_idxs"] = [*(options.get("static_input_idxs") or []), *range(len(inputs), len(inputs) + added)]
        inputs = [*inputs, *(node.meta["val"] for node in new)]
    return module, list(inputs)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Disable AOTAutograd's cache: its look-up precedes the rewrite, and its entries know no parameters packed side by side."""
    import torch._functorch.config as config

    with config.patch(enable_autograd_cache=False):
        yield


def onepass_backend(
    module: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph for torch.compile(..., backend="onepass"). It is `fuse`, but the report goes to the log.

    `mode` and `options` are inductor's. `options` may also name the `compiler`.
    """
    options = {**(torch._inductor.list_mode_options(mode) if mode is not None else {}), **(options or {})}
    backend = FusionBackend(options.pop("compiler", "auto"), options=options)
    compiled = backend(module, inputs)
    _log.info("%s", backend.report)
    return compiled


def has_inductor(device: torch.device) -> bool:
    """Whether inductor can compile for the device here. It needs Triton for a GPU, and a C++ compiler for a CPU."""
    if device.type == "cpu":
        return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    from torch.utils._triton import has_triton

    return bool(has_triton())
