"""From a configuration and its plugins to a job that is ready to train: plan model and overrides, then check."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn import assets
from torchtitan_qwen3_trn.checks.checkpoints import check_loaded_model
from torchtitan_qwen3_trn.checks.data import TEXT_LOADERS
from torchtitan_qwen3_trn.checks.optimizer import check_groups_against_model
from torchtitan_qwen3_trn.checks.parallelism import data_parallel_degree
from torchtitan_qwen3_trn.checks.settings import check_settings, impossible_numbers
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hooks import NodeOverride
from torchtitan_qwen3_trn.job.override_plan import plan_overrides
from torchtitan_qwen3_trn.launch import Machine, is_rank_zero, this_machine
from torchtitan_qwen3_trn.plugins import PluginError, Plugins

logger = logging.getLogger(__name__)

# Test assets of torchtitan's repository, which its wheel does not carry; ours stand in for them.
STOCK_TOKENIZER = "tests/assets/tokenizer"
STOCK_TEXT = "tests/assets/c4_test"


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job that was planned and checked.

    Attributes:
        config: the complete configuration; ``config.model_spec`` is the model, ``config.override`` its overrides.
        plugins: the plugins of the job.
        overrides: nodes that each override replaces, by plugin name or import path.
    """

    config: JobConfig
    plugins: Plugins
    overrides: dict[str, int]


def prepare(
    config: JobConfig, plugins: Plugins, *, earlier: Iterable[Problem] = (), source: str = "job"
) -> PreparedJob:
    """Complete ``config`` in place (defaults, model, overrides) and check it.

    Args:
        config: the configuration to complete.
        plugins: the plugins that it enables.
        earlier: problems found before, which are reported together with what is found here.
        source: the heading of the report, such as the job file.

    Raises:
        JobError: with every problem found.
    """
    problems = list(earlier)
    if numbers := list(impossible_numbers(config)):
        raise JobError(dict.fromkeys([*problems, *numbers]), source)
    machine = this_machine(config)
    use_bundled_assets(config)
    _accumulate_gradients(config, machine)
    planned, plan_problems = _plan(config, plugins, machine, some_missing=any(map(_is_about_plugins, problems)))
    known = {problem.where for problem in problems}
    problems += [problem for problem in check_settings(config, machine) if problem.where not in known]
    problems += [*plan_problems, *_checked_by_plugins(config, plugins, machine)]
    if not problems:
        problems += [*check_groups_against_model(config), *check_loaded_model(config)]
    if problems:
        raise JobError(dict.fromkeys(problems), source)
    return PreparedJob(config=config, plugins=plugins, overrides=planned)


def use_bundled_assets(config: JobConfig) -> None:
    """Point stock's test tokenizer and ``c4_test`` text to the bundled ones where stock's paths do not exist."""
    assets_path = Path(config.hf_assets_path)
    if assets_path == Path(STOCK_TOKENIZER) and not assets_path.exists():
        config.hf_assets_path = str(assets.tokenizer_path())
        _log(f"{assets_path} does not exist here: using the bundled tokenizer in {config.hf_assets_path}")
    if Path(STOCK_TEXT).exists():
        return
    loaders = [each for each in (config.dataloader, config.validator.dataloader) if isinstance(each, TEXT_LOADERS)]
    sources = [source for loader in loaders for source in getattr(loader, "sources", None) or [loader]]
    without_path = [each for each in sources if each.dataset.lower() == "c4_test" and each.dataset_path is None]
    for source in without_path:
        source.dataset_path = str(assets.text_path())
    if without_path:
        _log(f"{STOCK_TEXT} does not exist here: using the bundled text in {assets.text_path()}")


def _accumulate_gradients(config: JobConfig, machine: Machine) -> None:
    steps, training = config.job.gradient_accumulation_steps, config.training
    if steps and training.global_batch_size == -1:
        training.global_batch_size = steps * training.local_batch_size * data_parallel_degree(config, machine)


def _is_about_plugins(problem: Problem) -> bool:
    return problem.where.startswith(("plugin", "route", "model.backend"))


def _plan(
    config: JobConfig, plugins: Plugins, machine: Machine, *, some_missing: bool
) -> tuple[dict[str, int], list[Problem]]:
    """Let the plugins complete ``config``; nodes replaced by each override, and what is wrong.

    ``some_missing``: plugins are missing for a reason already reported, so what follows from it is not reported.
    """
    try:
        plugins.call("adjust_config", config, machine=machine)
        if not _choose_model(config, plugins, machine):
            return {}, [] if some_missing else [_no_model(config, plugins)]
        requests, problems = plugins.collect("node_overrides", config, NodeOverride, machine=machine)
        if problems:
            return {}, problems
        counts, outcome = plan_overrides(requests, config)
    except JobError as error:
        return {}, error.problems
    except PluginError as error:
        return {}, [error.problem]
    return counts, [] if some_missing else list(_attention_without_backward(outcome, machine))


def _choose_model(config: JobConfig, plugins: Plugins, machine: Machine) -> bool:
    """Take the model of the plugin that has one for this job; whether there is any."""
    if config.model_spec is None:
        config.model_spec = plugins.first("model_spec", config, ModelSpec, machine=machine)
    if config.model_spec is None:
        return False
    cross_entropy = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    if isinstance(cross_entropy, CrossEntropyLoss.Config) and cross_entropy.global_vocab_size is None:
        cross_entropy.global_vocab_size = getattr(config.model_spec.model, "vocab_size", None)
    return True


def _no_model(config: JobConfig, plugins: Plugins) -> Problem:
    what = f"none of the enabled plugins {plugins.names} offers a model for it"
    return Problem(f"model.backend = {config.model.backend!r}", what, "enable one that does")


def _checked_by_plugins(config: JobConfig, plugins: Plugins, machine: Machine) -> list[Problem]:
    if config.model_spec is None:
        return []
    found, failures = plugins.collect("check_job", config, Problem, machine=machine)
    return [*failures, *(problem for _, problem in found)]


def _attention_without_backward(outcome: JobConfig, machine: Machine) -> Iterator[Problem]:
    left = [fqn for fqn, _, _, _ in outcome.traverse(FlexAttention.Config)]
    if machine.device_type == "cpu" and left:
        what = f"{len(left)} attention layers stay on FlexAttention, which has no backward pass on the CPU"
        yield Problem("plugins", what, "enable sdpa for all layers")


def _log(text: str) -> None:
    if is_rank_zero():
        logger.info(text)
