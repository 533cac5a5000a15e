"""The contract every plugin writes against.

A plugin is a module named by an entry point of the group ``torchtitan.plugins``. It defines any of the functions
below, marked with ``@hookimpl``, and may define a dataclass called ``Options`` whose fields are what a job file can
set under ``[plugins.<name>]``. An implementation is a function of what it is given, by name: it takes the arguments it
needs and leaves out the others. Every hook can take ``config``, the job's
:class:`~torchtitan_qwen3_trn.config.JobConfig`, and ``options``, the plugin's own ``Options`` with the job's values
(``None`` for a plugin without ``Options``).

A route is a value of ``model.backend``: an entry point of the group ``torchtitan.routes``, whose object is the sequence
of the names of the plugins it enables. Reading a route imports the module of that object and no plugin, so put it in a
module that imports nothing.

An implementation that raises before training starts ends the job with one message that names plugin, hook, exception
and line; in training the exception comes with its traceback. Raise :class:`~torchtitan_qwen3_trn.errors.JobError` for
what the user has to correct.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pluggy

from torchtitan_qwen3_trn.launch import Machine

if TYPE_CHECKING:
    import torch
    from torchtitan.config import Configurable
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    from torchtitan_qwen3_trn.config import JobConfig
    from torchtitan_qwen3_trn.errors import Problem

__all__ = ["Machine", "NodeOverride", "StepLog", "hookimpl"]

PROJECT = "torchtitan"
MODEL_PREFIX = "model_spec.model."
"""Where the model lies in the configuration tree; module names of users leave it out."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeOverride:
    """A request to replace nodes of the configuration tree, handed to ``torchtitan.config.override``.

    Attributes:
        target: config class to replace; its subclasses match too.
        factory: module-level function ``factory(config, **kwargs) -> replacement config``. Use
            ``torchtitan.config.override.derive`` so that sharding and initialisation survive.
        fqns: module names, with ``*`` as wildcard, such as ``layers.0.*``. ``None`` takes every node.
        kwargs: passed to ``factory``.
    """

    target: type[Configurable.Config]
    factory: Callable[..., Configurable.Config]
    fqns: list[str] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def patterns(self) -> list[str] | None:
        """``fqns`` as patterns over the whole configuration tree."""
        if self.fqns is None:
            return None
        return [MODEL_PREFIX + fqn + suffix for fqn in self.fqns for suffix in ("", ".*")]

    def nodes(self, config: Configurable.Config) -> Iterator[str]:
        """Fully qualified names of the nodes of ``config`` that this request replaces."""
        patterns = self.patterns
        for fqn, _, _, _ in config.traverse(self.target):
            if patterns is None or any(fnmatchcase(fqn, pattern) for pattern in patterns):
                yield fqn


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """Takes a plugin's metrics after a step: ``log({"name": value})``.

    They go to the console as one line, and to TensorBoard and Weights & Biases where the job uses them.

    Attributes:
        step: the step just taken.
        due: whether torchtitan logs this step (``metrics.log_freq``). Metrics of other steps are dropped, so look here
            before computing an expensive one. The same on every rank.
        write: writes metrics to the job's metric loggers.
    """

    step: int
    due: bool
    write: Callable[[dict[str, Any], int], None]

    def __call__(self, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Write ``metrics``, scalars by name, if this step is due."""
        if not self.due:
            return
        values = {name: float(value) for name, value in metrics.items()}
        self.write(values, self.step)
        logger.info("step: %2d  %s", self.step, "  ".join(f"{name}: {value:8.5f}" for name, value in values.items()))


@hookspec
def adjust_config(config: JobConfig, options: Any, machine: Machine) -> None:
    """Change the job's configuration before anything reads it.

    Called once on every rank, first of all hooks, after job file, profile and command line are merged. ``config``
    may be mutated, except ``config.plugins``. Log what you change. The same result must come out on every rank.
    """


@hookspec
def model_spec(config: JobConfig, options: Any, machine: Machine) -> ModelSpec | None:
    """Give the model of this job, or ``None`` to leave it to another plugin.

    Called on every rank after ``adjust_config``, on the plugin enabled last first, so that yours can take the place of
    a route's; the first result that is not ``None`` wins and becomes ``config.model_spec``. Build configurations only,
    no tensors. ``config`` must not be changed. Raise :class:`~torchtitan_qwen3_trn.errors.JobError` for what the user
    has to correct.
    """


@hookspec
def node_overrides(config: JobConfig, options: Any, machine: Machine) -> list[NodeOverride]:
    """Name the nodes of the configuration tree to replace, and with what.

    Called once on every rank after ``model_spec``; ``config.model_spec`` is set, its sharding is not. Nothing may be
    mutated: torchtitan applies the replacements when the trainer is built and logs one ``[Override]`` line per node.
    Two plugins that claim one node, and a pattern in ``fqns`` that matches none, end the job with a message.
    """


@hookspec
def check_job(config: JobConfig, options: Any, machine: Machine) -> list[Problem]:
    """Report everything that would make the job fail or give wrong numbers on this machine.

    Called once on every rank after ``node_overrides``, before a process group, a folder or a tensor exists. Nothing
    may be mutated. All problems of all plugins are shown together and end the job with exit status 2.
    """


@hookspec
def model_inputs(config: JobConfig, options: Any, inputs: torch.Tensor, extra_kwargs: dict[str, Any]) -> None:
    """Add keyword arguments to the model's forward call.

    Called for every microbatch, in training and validation, on every rank, after the batch is on the device and
    before the forward pass. ``inputs`` are token ids ``[B, L]``, int64; ``extra_kwargs`` may be mutated and holds
    ``positions`` ``[B, L]``, int64, which restart at 0 with each packed document. Under pipeline parallelism the
    arguments reach every stage. Must not synchronise with the host.
    """


@hookspec
def after_step(
    config: JobConfig, options: Any, trainer: Trainer, step: int, local_loss: torch.Tensor, log: StepLog
) -> None:
    """Look at the trainer after an optimizer step.

    Called on every rank after each step, before a checkpoint is taken. ``step`` counts from 1. ``local_loss`` is a
    scalar, this rank's part of the step's loss per token: its sum over the ``loss`` mesh is the loss. Under pipeline
    parallelism only the last stage has one; the others hold -1 per microbatch. ``log`` takes the plugin's own metrics.
    Collectives are allowed if every rank calls them; parameters must not be changed.
    """


@hookspec
def checkpoint_saved(config: JobConfig, options: Any, trainer: Trainer, step: int) -> None:
    """Act on a checkpoint of ``step``.

    Called on every rank after ``CheckpointManager`` wrote it, or with ``checkpoint.async_mode`` after it was staged.
    The trainer must not be changed.
    """


@hookspec
def training_ended(config: JobConfig, options: Any, trainer: Trainer) -> None:
    """Finish: export, verify, report.

    Called once on every rank after the last step and its checkpoint, while the process group still exists. Not
    called when training raised. An exception fails the job.
    """
