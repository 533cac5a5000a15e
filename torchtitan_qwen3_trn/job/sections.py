"""Sections of a job file laid over a trainer configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import (
    HFDataSource,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)

from torchtitan_qwen3_trn.config import TOP_LEVEL_HOMES, JobConfig, OptimizerOptions, PluginsConfig
from torchtitan_qwen3_trn.errors import Problem, did_you_mean, join, show
from torchtitan_qwen3_trn.job.legacy import Table
from torchtitan_qwen3_trn.job.values import Problems, apply_table, check_value, refusal, unknown_key, visible_fields
from torchtitan_qwen3_trn.plugins import installed_plugins

_ACTIVATION_CHECKPOINT: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "full": FullAC.Config,
    "selective": SelectiveAC.Config,
    "memory_budget": MemoryBudgetAC.Config,
}


def apply_sections(config: JobConfig, table: Table, problems: Problems) -> JobConfig:
    """A copy of ``config`` with the sections of ``table``; mistakes go to ``problems``."""
    sections = visible_fields(type(config)).keys() - TOP_LEVEL_HOMES.keys()
    values: dict[str, Any] = {}
    for name, raw in table.items():
        if home := TOP_LEVEL_HOMES.get(name):
            problems.append(Problem(name, "unknown key", f"it belongs in [{home}]"))
        elif name not in sections:
            problems.append(unknown_key(name, name, sections))
        elif not isinstance(raw, dict):
            problems.append(Problem(name, f"expected a table, found {show(raw)}", f"write [{name}]"))
        else:
            section = _take_top_level(name, raw, values, problems)
            build = _SECTIONS.get(name, apply_table)
            values[name] = build(getattr(config, name), section, name, problems)
    if (objection := refusal(config, values)) is None:
        return replace(config, **values)
    guilty = [key for key, alone in _single_changes(config, values) if refusal(config, alone) == objection]
    problems.combinations.append(Problem(guilty[0] if len(guilty) == 1 else "job", objection))
    # What follows judges the rest of the job, so it gets every section but those that torchtitan refuses.
    for name, section in values.items():
        if refusal(config, {name: section}) is None:
            config = replace(config, **{name: section})
    return config


def _single_changes(config: JobConfig, values: Table) -> Iterator[tuple[str, Table]]:
    """Each key in which the sections ``values`` differ from those of ``config``, and that change alone."""
    for name, section in values.items():
        before: Any = getattr(config, name)
        if not is_dataclass(before) or type(before) is not type(section):
            yield name, {name: section}
            continue
        for key in (item.name for item in fields(before) if item.init):
            if getattr(before, key) != getattr(section, key) and refusal(before, {key: getattr(section, key)}) is None:
                yield f"{name}.{key}", {name: replace(before, **{key: getattr(section, key)})}  # type: ignore[type-var]


def _take_top_level(name: str, raw: Table, values: dict[str, Any], problems: Problems) -> Table:
    """Move ``job.dump_folder`` and ``model.hf_assets_path`` to the fields that stock has for them."""
    rest = dict(raw)
    for key, home in TOP_LEVEL_HOMES.items():
        if home == name and key in rest:
            before = len(problems)
            value = check_value(str, rest.pop(key), f"{name}.{key}", problems)
            if len(problems) == before:
                values[key] = value
    return rest


def _optimizer(current: Any, table: Table, where: str, problems: Problems) -> Any:
    if "param_groups" not in table:
        options = apply_table(OptimizerOptions(), _joined_betas(table, where, problems), where, problems)
        settings = {key: getattr(options, key) for key in ("lr", "betas", "eps", "weight_decay")}
        group = ParamGroupConfig(pattern=".*", optimizer_name=options.name, optimizer_kwargs=settings)
        return OptimizersContainer.Config(param_groups=[group], implementation=options.implementation)
    short_form = {item.name for item in fields(OptimizerOptions)} - {"implementation"}
    rest = {key: value for key, value in table.items() if key != "param_groups"}
    for key in short_form & rest.keys():
        del rest[key]
        problems.append(Problem(join(where, key), "has no effect with param_groups", "set it in each group"))
    group = partial(ParamGroupConfig, pattern=".*", optimizer_name="AdamW")
    groups = _list_of_tables(table["param_groups"], group, where, "param_groups", problems)
    return replace(apply_table(OptimizersContainer.Config(), rest, where, problems), param_groups=groups)


def _joined_betas(table: Table, where: str, problems: Problems) -> Table:
    """``table`` with the two keys of torchtitan 0.2.x joined; only now, because a profile may set one of them."""
    rest = {key: value for key, value in table.items() if key not in ("beta1", "beta2")}
    if len(rest) == len(table):
        return table
    if "betas" in table:
        problems.append(Problem(join(where, "betas"), "contradicts beta1 and beta2", "keep betas only"))
        return rest
    return {**rest, "betas": [table.get("beta1", 0.9), table.get("beta2", 0.95)]}


def _activation_checkpoint(current: Any, table: Table, where: str, problems: Problems) -> Any:
    mode = table.get("mode", "selective")
    if not isinstance(mode, str) or mode not in _ACTIVATION_CHECKPOINT:
        check_value(Literal["none", "full", "selective", "memory_budget"], mode, join(where, "mode"), problems)
        return current
    known = {item.name for make in _ACTIVATION_CHECKPOINT.values() if make() for item in fields(make())}
    problems += [unknown_key(join(where, key), key, {*known, "mode"}) for key in table.keys() - known - {"mode"}]
    policy = _ACTIVATION_CHECKPOINT[mode]()
    if policy is None:
        return None
    # A profile may switch the mode and leave options of the other mode behind: they do not apply.
    own = {item.name for item in fields(policy)}
    return apply_table(policy, {key: value for key, value in table.items() if key in own}, where, problems)


def _dataloader(current: Any, table: Table, where: str, problems: Problems) -> Any:
    if "sources" not in table:
        return apply_table(HuggingFaceTextDataLoader.Config(dataset="c4_test"), table, where, problems)
    rest = {key: value for key, value in table.items() if key != "sources"}
    sources = _list_of_tables(table["sources"], HFDataSource, where, "sources", problems)
    loader = InterleavedHuggingFaceTextDataLoader.Config(sources=sources or [HFDataSource()])
    return apply_table(loader, rest, where, problems)


def _plugins(current: PluginsConfig, table: Table, where: str, problems: Problems) -> PluginsConfig:
    """Lists, and options of enabled plugins; options of an installed plugin that is not enabled are left alone."""
    known = {item.name for item in fields(current)}
    installed = {plugin.replace("-", "_"): plugin for plugin in installed_plugins()}
    used = {key: value for key, value in table.items() if key in known}
    for key in table.keys() - known - installed.keys():
        fix = did_you_mean(key.replace("_", "-"), ["enable", "disable", *installed.values()])
        problems.append(Problem(join(where, key), "unknown key, and no plugin is called that", fix))
    return apply_table(current, used, where, problems)


def _list_of_tables(raw: Any, make: Callable[[], Any], where: str, key: str, problems: Problems) -> list[Any]:
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        problems.append(Problem(join(where, key), f"expected tables [[{where}.{key}]], found {show(raw)}"))
        return []
    return [apply_table(make(), item, f"{join(where, key)}[{index}]", problems) for index, item in enumerate(raw)]


_SECTIONS: dict[str, Callable[[Any, Table, str, Problems], Any]] = {
    "optimizer": _optimizer,
    "activation_checkpoint": _activation_checkpoint,
    "dataloader": _dataloader,
    "plugins": _plugins,
}
