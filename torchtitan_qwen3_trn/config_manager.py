"""The configuration manager behind ``python -m torchtitan.train``: stock's, plus ``--job.config_file``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from torchtitan.config.manager import ConfigManager

from torchtitan_qwen3_trn.config import TOP_LEVEL_HOMES
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.job.configuration import LoadedJob, flag_count, flag_value, is_rank_zero, load_job

logger = logging.getLogger(__name__)

JOB_FLAG = "job.config_file"
EXIT_STATUS = 2
# A launcher ends all ranks as soon as one has failed; rank 0 must have spoken by then.
_SILENT_RANK_DELAY_S = 2.0


class JobConfigManager(ConfigManager):
    """Stock's manager; with ``--job.config_file FILE`` the configuration comes from that file.

    Without that flag every call goes to stock's code unchanged.
    """

    def parse_args(self, args: list[str] | None = None) -> Any:
        """Parse ``args`` (default ``sys.argv[1:]``) into a configuration ready to build.

        A job that cannot run ends the process with exit status 2 and one message on rank 0.
        """
        args = sys.argv[1:] if args is None else args
        self._job: LoadedJob | None = None
        try:
            if flag_value(args, JOB_FLAG) is None and not _bare_job_flag(args):
                return self._prepared(super().parse_args(args))
            return self._parsed(args)
        except JobError as error:
            end_with(error)

    def _parsed(self, args: list[str]) -> Any:
        try:
            with _speaking_on_rank_zero_only():
                return super().parse_args(args)
        except AssertionError as error:
            # Some of stock's configurations assert where others raise the ValueError that tyro reports.
            raise JobError([Problem("command line", str(error) or "a value is not possible")]) from error

    def _load_config(self, args: list[str]) -> tuple[object, list[str]]:
        path = flag_value(args, JOB_FLAG)
        if path is None and not _bare_job_flag(args):
            return super()._load_config(args)
        _refuse_contradictions(path, args)
        self._job = load_job(str(path), args)
        return self._job.config, [_stock_spelling(arg) for arg in _without_job_flag(args)]

    def _validate_config(self) -> None:
        if self._job is None:
            super()._validate_config()
            return
        from torchtitan_qwen3_trn.job.prepare import prepare

        self._job.log()
        problems = [*self._job.problems, *_launch_problems()]
        prepare(self.config, earlier=problems, source=str(self._job.config.job.config_file))

    def _prepared(self, config: Any) -> Any:
        """Check a configuration of ours that came through ``--module``, before anything is written."""
        from torchtitan_qwen3_trn.trainer import PluginTrainer

        if isinstance(config, PluginTrainer.Config):
            from torchtitan_qwen3_trn.job.prepare import prepare

            prepare(config)
        return config


def end_with(error: JobError) -> NoReturn:
    """End the process with status 2 after rank 0 has printed ``error`` on standard error."""
    if is_rank_zero():
        print(error.report(), file=sys.stderr, flush=True)  # noqa: T201
    else:
        time.sleep(_SILENT_RANK_DELAY_S)
    raise SystemExit(EXIT_STATUS) from None


@contextlib.contextmanager
def message_on_command_line() -> Iterator[None]:
    """Let a `JobError` end ``python -m torchtitan.train``, whose user wants a message; others get the exception."""
    try:
        yield
    except JobError as error:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name == "torchtitan.train":
            end_with(error)
        raise


def _refuse_contradictions(path: str | None, args: list[str]) -> None:
    problems = []
    if not path:
        problems.append(Problem("--job.config_file", "needs a file", "for instance examples/qwen3_moe.toml"))
    elif flag_count(args, JOB_FLAG) > 1:
        problems.append(Problem("--job.config_file", "is given more than once", "a run has one job file"))
    problems += [
        Problem(f"--{flag}", "cannot be combined with --job.config_file", "use one or the other")
        for flag in ("module", "config")
        if flag_value(args, flag) is not None
    ]
    if problems:
        raise JobError(problems, "command line")


def _launch_problems() -> list[Problem]:
    if "LOCAL_RANK" in os.environ:
        return []
    what = "LOCAL_RANK is not set: no launcher started this process"
    return [Problem("launch", what, "start it with torchrun -m torchtitan.train ...")]


def _bare_job_flag(args: list[str]) -> bool:
    return any(arg.replace("-", "_") == f"__{JOB_FLAG}" for arg in args)


def _stock_spelling(arg: str) -> str:
    """Flags named like the job file's keys, for the two keys that are top-level fields in stock."""
    name, equals, value = arg.partition("=")
    moved = {f"__{section}.{key}": key for key, section in TOP_LEVEL_HOMES.items()}
    key = moved.get(name.replace("-", "_"))
    return f"--{key}{equals}{value}" if key else arg


def _without_job_flag(args: list[str]) -> list[str]:
    rest: list[str] = []
    skip = False
    for arg in args:
        if skip:
            skip = False
            continue
        name, equals, _ = arg.partition("=")
        if name.replace("-", "_") == f"__{JOB_FLAG}":
            skip = not equals
            continue
        rest.append(arg)
    return rest


@contextlib.contextmanager
def _speaking_on_rank_zero_only() -> Iterator[None]:
    """Silence usage errors and help of other ranks; logging goes on, its handlers hold their streams already."""
    if is_rank_zero():
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            yield
        except SystemExit:
            time.sleep(_SILENT_RANK_DELAY_S)
            raise
