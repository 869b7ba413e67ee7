"""The full-graph gradient of a PyTorch loop in the memory of one iteration."""

from __future__ import annotations

from pure_loopgrad import errors as errors
from pure_loopgrad import folds as folds
from pure_loopgrad._checkpoint import checkpoint as checkpoint
from pure_loopgrad._grad import value_and_grad as value_and_grad
from pure_loopgrad._map import map as map  # the names of jax.lax, always used as plg.map
from pure_loopgrad._map import mean as mean
from pure_loopgrad._map import sum as sum
from pure_loopgrad._module import from_module as from_module
from pure_loopgrad._module import from_stateful_module as from_stateful_module
from pure_loopgrad._run import Report as Report
from pure_loopgrad._run import Run as Run
from pure_loopgrad._run import debug_nonfinite as debug_nonfinite
from pure_loopgrad._run import run as run
from pure_loopgrad._scan import scan as scan
from pure_loopgrad._version import __version__ as __version__
from pure_loopgrad._vjp import vjp as vjp
from pure_loopgrad._while import fori_loop as fori_loop
from pure_loopgrad._while import while_loop as while_loop
from pure_loopgrad.averaging import ema as ema
from pure_loopgrad.averaging import recompute_statistics as recompute_statistics
from pure_loopgrad.averaging import swa as swa
from pure_loopgrad.ensembles import average_members as average_members
from pure_loopgrad.ensembles import stack_params as stack_params
from pure_loopgrad.ensembles import unstack_params as unstack_params
from pure_loopgrad.errors import LoopGradError as LoopGradError
from pure_loopgrad.experiments import fold_grads as fold_grads
from pure_loopgrad.experiments import grad_stats as grad_stats
from pure_loopgrad.experiments import per_iteration_grads as per_iteration_grads
from pure_loopgrad.planning import plan as plan
from pure_loopgrad.sampling import subsample as subsample
