"""The seams leave every process alone that does not need them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run_python(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_torch_loads_nothing_of_torchtitan_or_of_this_packages_features():
    code = (
        "import sys, torch\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torchtitan', 'torchtitan_qwen3_trn', 'pluggy')))"
    )
    assert run_python(code) == "['torchtitan_qwen3_trn', 'torchtitan_qwen3_trn.autoload']"


SEAMS = (
    "import torchtitan.config, torchtitan.tools.utils as utils\n"
    "print(torchtitan.config.ConfigManager.__module__.split('.')[0], utils.device_type)"
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "torchtitan_qwen3_trn cpu"),
        ({"TORCHTITAN_QWEN3_TRN_SEAMS": "0"}, "torchtitan cuda"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "torchtitan cuda"),
    ],
)
def test_one_variable_turns_both_seams_off(environment, expected):
    assert run_python(SEAMS, **environment) == expected


@pytest.mark.parametrize("first", ["torchtitan.tools.utils", "torchtitan_qwen3_trn.plugins"])
def test_device_is_the_cpus_too_when_torchtitan_is_what_imports_torch(first):
    code = (
        f"import {first}, torchtitan.trainer\n"
        "from torchtitan.components import metrics\n"
        "from torchtitan.tools import utils\n"
        "print(utils.device_type, metrics.device_module is utils.device_module)"
    )
    assert run_python(code, PYTHONWARNINGS="error::RuntimeWarning") == "cpu True"


def test_failing_seam_warns_and_leaves_stock_in_place():
    code = (
        "import sys\n"
        "sys.modules['torchtitan_qwen3_trn.config_manager'] = None\n"
        "sys.modules['torchtitan_qwen3_trn.device.cpu'] = None\n"
        "import warnings; warnings.simplefilter('always')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import torchtitan.config, torchtitan.tools.utils as utils\n"
        "print(torchtitan.config.ConfigManager.__module__, utils.device_type,"
        " sum('stepped aside' in str(w.message) for w in caught))"
    )
    assert run_python(code) == "torchtitan.config.manager cuda 2"


def test_import_torch_survives_a_broken_post_import_library():
    code = "import sys; sys.modules['wrapt.importer'] = None\nimport torch; print(torch.ones(1).item())"
    assert run_python(code) == "1.0"
    assert run_python(code, PYTHONWARNINGS="error::RuntimeWarning") == "1.0"


def test_stock_manager_output_is_the_same_with_and_without_this_package():
    command = [sys.executable, "-m", "torchtitan.config.manager", "--module", "qwen3", "--config", "qwen3_debugmodel"]
    outputs = []
    for autoload in ("1", "0"):
        env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        outputs.append(_without_addresses(done.stdout + done.stderr))
    assert "qwen3" in outputs[0]
    assert outputs[0] == outputs[1]


def test_stock_flags_go_through_the_substituted_manager_unchanged(parse):
    from torchtitan.config.manager import ConfigManager as Stock

    args = ["--module", "qwen3", "--config", "qwen3_debugmodel", "--training.steps", "7"]
    ours, stock = parse(*args).config, Stock().parse_args(args)
    assert type(ours) is type(stock)
    assert _without_addresses(repr(ours)) == _without_addresses(repr(stock))
    for wrong in ([], ["--module", "qwen3"], ["--module", "qwen3", "--config", "nothing"]):
        with pytest.raises(ValueError, match=r"--module|--config|not found") as from_stock:
            Stock().parse_args(wrong)
        with pytest.raises(ValueError, match=r"--module|--config|not found") as from_ours:
            parse(*wrong)
        assert str(from_stock.value) == str(from_ours.value)


def test_import_failure_of_our_own_modules_keeps_its_cause():
    code = (
        "import sys, torch\n"
        "sys.modules['torchtitan_qwen3_trn.job.job_file'] = None\n"
        "from torchtitan.config.manager import ConfigManager\n"
        "try: ConfigManager().parse_args(['--module', 'torchtitan_qwen3_trn', '--config', 'qwen3_moe'])\n"
        "except ImportError as error: print('torchtitan_qwen3_trn.job.job_file' in str(error))"
    )
    assert run_python(code) == "True"


def _without_addresses(text: str) -> str:
    import re

    return re.sub(r"0x[0-9a-f]+", "0x", text)
