"""What a loop will cost before it is run, by each way to its gradient, and the chunk size for a memory budget."""

from __future__ import annotations

from dataclasses import dataclass

from pure_loopgrad import _tree
from pure_loopgrad._grad import ONE_PASS_LIMIT
from pure_loopgrad._measure import Subject, chunk_size_for, default_budget
from pure_loopgrad._reduce import Body, Options, Reduce
from pure_loopgrad._tree import PyTree

MIB = 2**20


@dataclass(frozen=True)
class Choice:
    """One way to the gradient.

    Attributes:
        name: `"full graph"`, `"two passes"` or `"one pass"`.
        peak: bytes beyond inputs.
        time: relative to the full graph.
        fits: whether the peak is within the budget.
    """

    name: str
    peak: int
    time: float
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What a loop will cost; `print(plan)` shows it as a table.

    Attributes:
        n: iterations.
        memory_budget: bytes.
        residuals: bytes that autograd would keep of one iteration.
        outputs: bytes of one iteration's outputs.
        gradients: bytes of the gradient.
        chunk_size: the largest that fits the budget and still pays.
        rule: the name of the fastest choice that fits, or of the smallest if none does.
        choices: each way to the gradient.
    """

    n: int
    memory_budget: int
    residuals: int
    outputs: int
    gradients: int
    chunk_size: int
    rule: str
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        head = (
            f"n = {self.n}, chunk_size = {self.chunk_size}, budget {self.memory_budget / MIB:,.1f} MiB: {self.rule}\n"
            f"one iteration: residuals {self.residuals / MIB:,.3f} MiB, outputs {self.outputs / MIB:,.3f} MiB; "
            f"gradients {self.gradients / MIB:,.3f} MiB\n"
        )
        rows = [f"{c.name:<12}{c.peak / MIB:>14,.1f}{c.time:>8.2f}  {'yes' if c.fits else 'no'}" for c in self.choices]
        return head + "\n".join([f"{'':<12}{'peak (MiB)':>14}{'time':>8}  fits", *rows])


def plan(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    memory_budget: int | None = None,
    reduce: Reduce = "stack",
    batched: bool = False,
) -> Plan:
    """Predicts memory and relative time of a loop's gradient, on tensors without data: nothing is run or allocated.

    Args:
        body: see `plg.map`.
        params: see `plg.map`.
        xs: see `plg.map`.
        memory_budget: bytes beyond inputs; by default half of the memory that is free now.
        reduce: `"stack"`, `"sum"` or `"mean"`, as in `plg.value_and_grad`.
        batched: see `plg.map`.

    Returns:
        A `Plan`, whose `chunk_size` is the largest that `chunk_size="auto"` would try: a power of two that fits, and
        no larger than what keeps the device busy.

    Raises:
        ShapeInferenceError: the body needs data.
        LoopGradError: see `plg.map`.

    Memory: none. Time: the body is traced some ten times, on fake tensors; for a loop that runs often, plan once.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> p = plg.plan(lambda w, x: torch.tanh(w @ x), torch.ones(64, 64), torch.ones(1000, 64), memory_budget=2**20)
        >>> p.rule, p.chunk_size, p.outputs
        ('full graph', 1000, 256)
    """
    tensors, skeleton = _tree.split(xs)
    n, device = _tree.leading_axis(tensors, skeleton), tensors[0].device
    budget = default_budget(device) if memory_budget is None else memory_budget
    subject = Subject(body, params, xs, Options(reduce, chunk_size=1, batched=batched))
    chunk_size = chunk_size_for(subject, n, budget, device)
    streaming = subject.peak(n, chunk_size)
    forward, both = subject.flops()
    ratio = (both - forward) / forward if forward else 2.0  # of backward to forward
    choices = [("full graph", subject.full_graph(n), 1.0), ("two passes", streaming, (2 + ratio) / (1 + ratio))]
    outputs, numbers = _outputs(subject)
    gradients = sum(t.nbytes for t in _tree.split(params)[0] if _tree.is_differentiable(t))
    if reduce != "stack" and 0 < numbers <= ONE_PASS_LIMIT:
        more = (numbers - 1) * 2 * gradients
        choices.append(("one pass", streaming + more, (1 + numbers * ratio) / (1 + ratio)))
    found = tuple(Choice(name, peak, time, peak <= budget) for name, peak, time in choices)
    fitting = [c for c in found if c.fits]
    best = min(fitting, key=lambda c: c.time) if fitting else min(found, key=lambda c: c.peak)
    return Plan(n, budget, subject.residuals(), outputs, gradients, chunk_size, best.name, found)


def _outputs(subject: Subject) -> tuple[int, int]:
    """Bytes of one iteration's outputs, and how many differentiable numbers they hold."""
    ys = subject.outputs
    floats = [y for y in ys if _tree.is_differentiable(y)]
    return sum(y.nbytes for y in ys), sum(y.numel() for y in floats)
