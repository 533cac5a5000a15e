"""The configuration manager that takes the place of stock's: the same, plus ``--job.config_file``."""

from __future__ import annotations

import sys
from typing import Any

from torchtitan.config.manager import ConfigManager


class JobConfigManager(ConfigManager):
    """Stock's manager; with ``--job.config_file FILE`` the configuration comes from that file.

    Without that flag every call goes to stock's code unchanged.
    """

    _loaded: tuple[object, list[str]] | None = None

    def parse_args(self, args: list[str] | None = None) -> Any:
        """Parse ``args`` (default ``sys.argv[1:]``) into a configuration ready to build.

        A job that cannot run ends the process with exit status 2 and one message on rank 0.
        """
        # Imported now, because this module is imported while torchtitan.config is still incomplete.
        from torchtitan_qwen3_trn.launcher import parse

        return parse(sys.argv[1:] if args is None else args, self._parse_like_stock)

    def _parse_like_stock(self, args: list[str], defaults: object | None = None) -> Any:
        """Stock's parsing, over ``defaults`` where they are given instead of ``--module`` and ``--config``."""
        if defaults is not None and not args:
            return defaults  # tyro takes half a second to find that there is nothing to parse
        self._loaded = None if defaults is None else (defaults, args)
        return super().parse_args(args)

    def _load_config(self, args: list[str]) -> tuple[object, list[str]]:
        return self._loaded or super()._load_config(args)

    def _validate_config(self) -> None:
        # Stock looks at the tokenizer's folder here; for a job it is checked together with everything else.
        if self._loaded is None:
            super()._validate_config()
