"""Independent iterations: `map` stacks their outputs, `sum` and `mean` add them up and never hold the stack."""

from __future__ import annotations

from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._eager import eager
from pure_loopgrad._reduce import Body, Options, Weights, prepare
from pure_loopgrad._run import Run
from pure_loopgrad._throughput import resolved
from pure_loopgrad._tree import PyTree


@eager
def map(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    grad_weights: Weights = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
) -> PyTree:
    """Stacks `body(params, x)` over the leading axis of `xs`; the plain loop, in the memory of one chunk.

    Denotes::

        torch.stack([body(params, xs[i]) for i in range(n)])  # for each leaf of the output

    Args:
        body: a pure function `body(params, x) -> y`. It may return any pytree of tensors and numbers, of the same
            structure, shapes and dtypes in every iteration. Tensors that need a gradient stand in params or xs.
        params: any pytree: what all iterations share. Leaves of any dtype, and leaves that are no tensor.
        xs: a pytree whose tensors have a leading axis of length n; one entry an iteration. Other leaves are shared.
        grad_weights: n numbers or bools that scale each iteration's contribution to any derivative, and nothing in the
            values. Where one is zero (and, with chunks, all of the chunk), no derivative is computed.
        chunk_size: how many iterations run at once, under `torch.vmap`; None for all, `"auto"` for the fastest that
            fits the memory (see `plg.plan`), measured on the first iterations in the first call with these shapes.
            The last chunk is smaller.
        batched: the body takes a whole chunk (every x with a leading axis) and returns ys with that axis.
        randomness: of random numbers in vmapped chunks, as in `torch.func.vmap`.
        run: options of the computation; see `Run`.

    Returns:
        The structure of the body's output; every leaf has a new leading axis of length n.

    Raises:
        CapturedTensorError: the body reads a tensor that needs a gradient and was not given to it.
        ImpureBodyError: an iteration, or its recomputation, returns another structure, shape or dtype.
        LoopValueError: leading axes that disagree, or a chunk size below 1.
        LoopTypeError: an output that is no tensor and no number.
        ShapeInferenceError: n = 0 and the body cannot run on fake tensors.

    Memory: inputs, outputs, two copies of params, and one chunk; independent of n otherwise, but where the body draws
    random numbers, the state of their generator for each chunk (5 KB on the CPU). Time: n F forward, and n (F + B) more
    for the backward, k (F + B) where only k iterations have a derivative. The same laws hold for derivatives of any
    order.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> body = lambda w, x: torch.sin(w * x)
        >>> loss = lambda w: plg.map(body, w, torch.arange(3.0)).square().sum()
        >>> torch.func.grad(loss)(torch.tensor(0.5))
        tensor(2.6601)
    """
    return _reduced(body, params, xs, Options("stack", None, grad_weights, chunk_size, batched, randomness, run))


@eager
def sum(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    grad_weights: Weights = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
) -> PyTree:
    """Adds up `body(params, x)` over the leading axis of `xs`, without ever holding the stack.

    Args:
        body: see `map`.
        params: see `map`.
        xs: see `map`.
        grad_weights: see `map`.
        chunk_size: see `map`; the sum over a chunk is taken inside it.
        batched: see `map`; the body still returns one y an iteration, with a leading axis.
        randomness: see `map`.
        run: see `map`.

    Returns:
        The structure and shapes of one output. float16 and bfloat16 are added in float32 and rounded once; bools are
        counted. With n = 0, zeros.

    Raises:
        LoopGradError: see `map`.

    Memory: inputs, one output, two copies of params, and one chunk; independent of n. Time: as `map`.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> plg.sum(lambda w, x: w * x**2, torch.tensor(2.0), torch.arange(4.0))
        tensor(28.)
    """
    return _reduced(body, params, xs, Options("sum", None, grad_weights, chunk_size, batched, randomness, run))


@eager
def mean(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    weights: Weights = None,
    grad_weights: Weights = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
) -> PyTree:
    """Averages `body(params, x)` over the leading axis of `xs`, without ever holding the stack.

    Args:
        body: see `map`.
        params: see `map`.
        xs: see `map`.
        weights: n numbers, a sequence or a tensor of shape (n,): sum_i w_i y_i / sum_i w_i. Weights may themselves be
            differentiated. An iteration of weight zero adds exactly nothing, also where its output is not finite;
            unless the weights are differentiated or batched, it is not run at all.
        grad_weights: see `map`; beside `weights`, as a further factor in derivatives.
        chunk_size: see `map`.
        batched: see `sum`.
        randomness: see `map`.
        run: see `map`.

    Returns:
        The structure and shapes of one output; integers and bools are averaged as floats. Divided once, at the end.

    Raises:
        LoopValueError: n = 0, weights of another length than n, or weights that add up to zero or not to a number.
        LoopGradError: see `map`.

    Memory: as `sum`; where some of the weights are zero, a copy of the xs that are left as well. Time: as `map`.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> plg.mean(lambda w, x: w * x, torch.tensor(2.0), torch.tensor([1.0, 4.0]), weights=[3, 1])
        tensor(3.5000)
    """
    return _reduced(body, params, xs, Options("mean", weights, grad_weights, chunk_size, batched, randomness, run))


def _reduced(body: Body, params: PyTree, xs: PyTree, options: Options) -> PyTree:
    prepared = prepare(body, params, xs, resolved(body, params, xs, options))
    return prepared.finish(prepared.run_live())
