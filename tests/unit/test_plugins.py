"""Finding, choosing and loading plugins, with throw-away distributions."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from conftest import TINY_MODEL

from torchtitan_qwen3_trn import hooks, routes
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.plugins import PluginError, choose, hook_names, installed_plugins, load

HELLO = """
from dataclasses import dataclass
from torchtitan_qwen3_trn.hooks import hookimpl

@dataclass(kw_only=True)
class Options:
    greeting: str = "hello"
    times: int = 1

@hookimpl
def adjust_config(config, options):
    config.job.description = options.greeting * options.times
"""


def test_own_plugins_come_from_the_same_group_as_anyones():
    names = installed_plugins()
    assert {"qwen3", "sdpa", "gather-free-rope"} <= set(names)
    assert all(plugin.distribution == "torchtitan-qwen3-trn" for plugin in names["sdpa"])


def test_third_party_plugin_runs_with_its_options_when_enabled(parse_job, install_plugin):
    install_plugin("hello", HELLO)
    outcome = parse_job('[plugins]\nenable = ["hello"]\n[plugins.hello]\ntimes = 2\n')
    assert outcome.status is None, outcome.message
    assert outcome.config.job.description == "hellohello"


def test_plugin_is_enabled_by_flag_and_configured_by_flag(parse_job, install_plugin):
    install_plugin("hello", HELLO)
    outcome = parse_job("", "--plugins.enable", "hello", "--plugins.hello.greeting", "hi")
    assert outcome.status is None, outcome.message
    assert outcome.config.job.description == "hi"


def test_plugin_that_is_not_enabled_is_never_imported(parse_job, install_plugin):
    install_plugin("bomb", "raise RuntimeError('imported')", module="bomb_module")
    assert parse_job("[plugins.bomb]\nanything = 1\n").status is None
    assert "bomb_module" not in sys.modules


def test_options_of_a_plugin_that_is_not_enabled_are_mentioned_in_the_log(parse_job):
    text = '[plugins]\ndisable = ["gather-free-rope"]\n[plugins.gather-free-rope]\nfqns = ["layers.0"]\n'
    assert "[plugins.gather-free-rope] has no effect" in parse_job(text).log


def test_disabled_route_plugin_leaves_its_nodes_alone(parse_job):
    outcome = parse_job("", "--plugins.disable", "gather-free-rope")
    assert outcome.status is None, outcome.message
    assert outcome.job.overrides == {"sdpa": 2}


IMPORT = "from torchtitan_qwen3_trn.hooks import hookimpl\n"

BROKEN = [
    ("raise ValueError('kaput')", ["cannot be loaded", "kaput"]),
    ("import no_such_package", ["cannot be loaded", "no_such_package"]),
    ("x = 1", ["implements no hook"]),
    (IMPORT + "@hookimpl\ndef adjust_confg(config): ...", ["does not exist", "adjust_config"]),
    (IMPORT + "@hookimpl\ndef adjust_config(konfig): ...", ["takes arguments that do not exist: konfig", "options"]),
    (HELLO.replace("@dataclass(kw_only=True)\n", ""), ["Options is not a dataclass"]),
    (HELLO.replace("times: int = 1", "times: int"), ["give every field a default"]),
    ("raise SystemExit(3)", ["cannot be loaded", "SystemExit"]),
    ("def f(:", ["cannot be loaded", "SyntaxError", "line 1"]),
    (HELLO.replace("times: int", "times: 'Integer'"), ["its Options cannot be resolved", "Integer"]),
    (IMPORT + "@hookimpl\ndef model_spec(config): return 5", ["must return a ModelSpec of torchtitan or None, got 5"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "words"), BROKEN)
def test_broken_plugin_is_named_with_its_distribution(parse_job, install_plugin, source, words):
    install_plugin("broken", source, module=f"broken_{abs(hash(source))}")
    outcome = parse_job('[plugins]\nenable = ["broken"]\n')
    assert outcome.status == 2
    assert "broken-dist 1.2.3" in outcome.message or "'broken'" in outcome.message
    for word in words:
        assert word in outcome.message


def test_two_distributions_with_one_plugin_name_are_refused(parse_job, install_plugin):
    install_plugin("twin", HELLO, distribution="first-dist", module="twin_one")
    install_plugin("twin", HELLO, distribution="second-dist", module="twin_two")
    outcome = parse_job('[plugins]\nenable = ["twin"]\n')
    assert outcome.status == 2
    assert "first-dist 1.2.3" in outcome.message
    assert "second-dist 1.2.3" in outcome.message


RIVAL = """
from torchtitan.models.common.attention import FlexAttention
from torchtitan_qwen3_trn.hooks import NodeOverride, hookimpl

def rival(config):
    return config

@hookimpl
def node_overrides(config):
    return [NodeOverride(target=FlexAttention.Config, factory=rival, fqns=["layers.1"])]
"""


def test_two_plugins_that_claim_one_node_are_both_named(parse_job, install_plugin):
    install_plugin("rival", RIVAL)
    outcome = parse_job('[plugins]\nenable = ["rival"]\n')
    assert outcome.status == 2
    assert "plugin sdpa (torchtitan-qwen3-trn" in outcome.message
    assert "plugin rival (rival-dist 1.2.3)" in outcome.message
    assert "layers.1.attention.inner_attention" in outcome.message


def test_one_plugin_that_claims_a_node_twice_is_refused(parse_job, install_plugin):
    twice = RIVAL.replace('fqns=["layers.1"])]', 'fqns=["layers.1"])] * 2')
    install_plugin("twice", twice, module="twice_module")
    outcome = parse_job('[plugins]\nenable = ["twice"]\ndisable = ["sdpa"]\n')
    assert outcome.status == 2
    assert "plugin twice" in outcome.message


def test_plugin_may_not_take_the_name_of_a_key(parse_job, install_plugin):
    install_plugin("enable", HELLO, module="enable_module")
    outcome = parse_job('[plugins]\nenable = ["enable"]\n')
    assert outcome.status == 2
    assert "its name is taken" in outcome.message


@pytest.mark.parametrize("hook", ["adjust_config", "model_spec", "node_overrides", "check_job"])
def test_failure_inside_a_hook_names_plugin_hook_and_line(parse_job, install_plugin, hook):
    module = f"faulty_{hook}"
    site = install_plugin("faulty", IMPORT + f"@hookimpl\ndef {hook}(config):\n    1 / 0\n", module=module)
    outcome = parse_job('[plugins]\nenable = ["faulty"]\n')
    assert outcome.status == 2
    assert f"plugin faulty (faulty-dist 1.2.3): failed in its hook {hook}: ZeroDivisionError" in outcome.message
    assert f"({site / module}.py, line 4)" in outcome.message
    assert "Traceback" not in outcome.message


def test_failure_inside_a_hook_while_training_keeps_its_cause(install_plugin):
    install_plugin("late", IMPORT + "@hookimpl\ndef after_step(step):\n    1 / 0\n", module="late_module")
    active, _ = load(installed_plugins()["late"])
    with pytest.raises(PluginError, match=r"plugin late \(late-dist 1\.2\.3\) failed in its hook after_step") as raised:
        active.call("after_step", JobConfig(), trainer=None, step=1)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_failure_in_a_module_of_a_plugin_package_names_the_plugin(install_plugin):
    site = install_plugin("parcel", "", module="parcel_module_stub")
    (site / "parcel_module").mkdir()
    (site / "parcel_module/__init__.py").write_text("from parcel_module.inner import after_step\n")
    info = next(site.glob("*.dist-info"))
    (info / "entry_points.txt").write_text("[torchtitan.plugins]\nparcel = parcel_module\n")
    (site / "parcel_module/inner.py").write_text(IMPORT + "@hookimpl\ndef after_step(step):\n    1 / 0\n")
    active, _ = load(installed_plugins()["parcel"])
    with pytest.raises(PluginError, match="plugin parcel"):
        active.call("after_step", JobConfig(), trainer=None, step=1)


def test_plugin_that_cannot_be_used_does_not_hide_what_is_wrong_with_the_job(parse_job, install_plugin):
    install_plugin("broken", "raise ValueError('kaput')", module="broken_beside_others")
    outcome = parse_job(
        '[plugins]\nenable = ["broken", "sdqa"]\n', base=TINY_MODEL.replace('"debugmodel"', '"72B"'), world_size=3
    )
    assert outcome.status == 2
    for word in ("kaput", "'sdqa'", '"72B" is not a Qwen3 flavor'):
        assert word in outcome.message


def test_plugin_that_fails_does_not_silence_the_others(parse_job, install_plugin):
    install_plugin("first", IMPORT + "@hookimpl\ndef check_job(config): 1 / 0\n", module="first_checks")
    raising = "from torchtitan_qwen3_trn.errors import JobError, Problem\n" + IMPORT
    raising += "@hookimpl\ndef check_job(config): raise JobError([Problem('second', 'wrong')])\n"
    install_plugin("second", raising, module="second_checks")
    install_plugin("third", IMPORT + "@hookimpl\ndef node_overrides(config): return 5\n", module="third_overrides")
    outcome = parse_job('[plugins]\nenable = ["first", "second", "third"]\n', "--training.seq_len", "8192")
    assert outcome.status == 2
    for word in (
        "ZeroDivisionError",
        "second: wrong",
        "node_overrides must return a list of",
        "training.seq_len: 8192",
    ):
        assert word in outcome.message


def test_plugin_that_is_left_out_is_not_asked(parse_job, install_plugin):
    source = IMPORT + "@hookimpl\ndef adjust_config(config): raise SystemExit(9)\nclass Options: ...\n"
    install_plugin("unfit", source, module="unfit_module")
    outcome = parse_job('[plugins]\nenable = ["unfit"]\n')
    assert outcome.status == 2
    assert "Options is not a dataclass" in outcome.message


def test_hook_that_returns_no_list_is_reported(parse_job, install_plugin):
    source = """
        from torchtitan_qwen3_trn.hooks import hookimpl

        @hookimpl
        def node_overrides(config):
            return 5
    """
    install_plugin("five", source)
    outcome = parse_job('[plugins]\nenable = ["five"]\n')
    assert outcome.status == 2
    assert "plugin five (five-dist 1.2.3): its hook node_overrides must return a list of" in outcome.message


OVERRIDE = (
    IMPORT
    + """
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan_qwen3_trn.hooks import NodeOverride

def factory(config):
    return config

@hookimpl
def node_overrides(config):
    return [NodeOverride(target=RMSNorm.Config, factory=factory, fqns=["norm"])]
"""
)

BROKEN_OVERRIDES = [
    ("return config", "raise KeyError('x')", ["its factory factory raised KeyError: 'x'", ", line 7)", "given norm"]),
    ("return config", "return None", ["its factory factory returned None, given norm"]),
    ("fqns=", "kwargs={'eps': 1}, fqns=", ["raised TypeError", "'eps'"]),
    ("factory=factory", "factory=lambda config: config", ["must be a function at the top level of a module"]),
    ("target=RMSNorm.Config", "target=RMSNorm", ["must be a Config class of torchtitan"]),
    ("target=RMSNorm.Config", "target='RMSNorm'", ["must be a Config class of torchtitan, got 'RMSNorm'"]),
    ('fqns=["norm"]', 'fqns="norm"', ["fqns must be a list of strings, got 'norm'"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), BROKEN_OVERRIDES, ids=[new for _, new, _ in BROKEN_OVERRIDES])
def test_override_that_cannot_work_is_reported_with_its_plugin(parse_job, install_plugin, old, new, words):
    install_plugin("user", OVERRIDE.replace(old, new), module=f"override_{abs(hash(new))}")
    outcome = parse_job('[plugins]\nenable = ["user"]\n')
    assert outcome.status == 2
    assert "1 problem\n  plugin user (user-dist 1.2.3): " in outcome.message
    for word in words:
        assert word in outcome.message


@pytest.mark.parametrize("value", ["{module}:P", "{module}:nothing", "not a module!"])
def test_entry_point_that_names_no_module_is_reported(parse_job, install_plugin, value):
    module = f"entry_{abs(hash(value))}"
    site = install_plugin("entry", IMPORT + "class P:\n    @hookimpl\n    def after_step(self): ...\n", module=module)
    text = f"[torchtitan.plugins]\nentry = {value.format(module=module)}\n"
    next(site.glob("*.dist-info/entry_points.txt")).write_text(text)
    outcome = parse_job('[plugins]\nenable = ["entry"]\n')
    assert outcome.status == 2
    assert "plugin entry (entry-dist 1.2.3): " in outcome.message
    assert value.format(module=module) in outcome.message


def test_problem_that_is_a_string_is_reported(parse_job, install_plugin):
    install_plugin("terse", IMPORT + "@hookimpl\ndef check_job(config): return ['too long']\n", module="terse_module")
    outcome = parse_job('[plugins]\nenable = ["terse"]\n')
    assert outcome.status == 2
    assert "must return a list of Problem, got a list with ['too long']" in outcome.message


def test_problems_of_check_job_end_the_job(parse_job, install_plugin):
    install_plugin(
        "strict",
        """
        from torchtitan_qwen3_trn.errors import Problem
        from torchtitan_qwen3_trn.hooks import hookimpl

        @hookimpl
        def check_job(config, machine):
            return [Problem("training.seq_len", f"too long for {machine.device_type}", "halve it")]
        """,
    )
    outcome = parse_job('[plugins]\nenable = ["strict"]\n')
    assert outcome.status == 2
    assert "training.seq_len: too long for cpu; halve it" in outcome.message


def test_route_needs_plugins_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(routes, "NATIVE", (*routes.NATIVE, "absent-plugin"))
    _, problems = choose("native", [], [])
    assert "absent-plugin" in str(problems[0])


ROUTE = """
from dataclasses import dataclass
from torchtitan_qwen3_trn.hooks import hookimpl
from torchtitan_qwen3_trn.models.qwen3 import native_spec

@dataclass(kw_only=True)
class Options:
    greeting: str = "hello"

@hookimpl
def adjust_config(config, options):
    config.job.description = options.greeting

@hookimpl
def model_spec(config):
    return native_spec.model_spec_for(config)
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; sys.exit(5)", "failed in its hook check_job: SystemExit: 5"),
        (
            "from torchtitan_qwen3_trn.errors import JobError; raise JobError('use another')",
            "TypeError: JobError takes",
        ),
    ],
)
def test_a_hook_that_ends_the_process_or_misuses_its_error_is_named(parse_job, install_plugin, body, words):
    module = f"ending_{abs(hash(body))}"
    install_plugin("ending", IMPORT + f"@hookimpl\ndef check_job():\n    {body}\n", module=module)
    outcome = parse_job('[plugins]\nenable = ["ending"]\n')
    assert outcome.status == 2
    assert "1 problem\n  plugin ending (ending-dist 1.2.3): " in outcome.message
    assert words in outcome.message


def test_a_route_of_another_distribution_is_accepted_and_brings_its_plugins(parse_job, install_plugin):
    install_plugin("other-model", ROUTE, routes={"other": ("other-model", "sdpa")})
    outcome = parse_job('[plugins.other-model]\ngreeting = "hi"\n', "--model.backend", "other")
    assert outcome.status is None, outcome.message
    assert outcome.job.plugins.names == ["other-model", "sdpa"]
    assert outcome.config.job.description == "hi"


def test_an_unknown_route_is_reported_with_those_installed(parse_job, install_plugin):
    install_plugin("other-model", ROUTE, routes={"other": ("other-model", "sdpa")}, module="unused_other_model")
    outcome = parse_job("", "--model.backend", "natvie")
    assert outcome.status == 2
    assert "model.backend: no route is called 'natvie'; did you mean 'native'? installed are [" in outcome.message
    assert "'huggingface_v5', 'native', 'nki_moe', 'other'" in outcome.message
    assert "unused_other_model" not in sys.modules


@pytest.mark.parametrize(
    ("value", "words"),
    [("3", ["is 3", "must be a sequence of plugin names"]), ("no_such_name", ["cannot be read", "NameError"])],
)
def test_a_route_that_cannot_be_read_is_named_with_its_distribution(parse_job, install_plugin, value, words):
    site = install_plugin("odd", IMPORT, routes={"odd": ()}, module=f"odd_{value}")
    (site / f"odd_{value}_routes.py").write_text(f"odd = {value}\n")
    outcome = parse_job("", "--model.backend", "odd")
    assert outcome.status == 2
    for word in ("route odd (odd-dist 1.2.3)", *words):
        assert word in outcome.message


def test_two_distributions_with_one_route_name_are_refused(parse_job, install_plugin):
    for number in (1, 2):
        install_plugin("x", IMPORT, routes={"same": ("x",)}, distribution=f"dist{number}", module=f"same_{number}")
    outcome = parse_job("", "--model.backend", "same")
    assert outcome.status == 2
    assert "route same: is provided by" in outcome.message


RECORDER = """
from dataclasses import dataclass
from torchtitan_qwen3_trn.hooks import hookimpl

@dataclass(kw_only=True)
class Options:
    mark: str = "default"

seen = {}
"""


def recorder() -> str:
    """A plugin that implements every hook and remembers the arguments of each."""
    source = RECORDER
    for name in hook_names():
        arguments = ", ".join(inspect.signature(getattr(hooks, name)).parameters)
        result = "[]" if name in ("node_overrides", "check_job") else "None"
        source += f"\n@hookimpl\ndef {name}({arguments}):\n    seen['{name}'] = dict(locals())\n    return {result}\n"
    return source


def test_every_hook_is_called_on_a_plugin_of_another_distribution_with_its_options(parse_job, install_plugin):
    install_plugin("recorder", recorder(), module="recorder_module")
    outcome = parse_job('[plugins]\nenable = ["recorder"]\n[plugins.recorder]\nmark = "mine"\n')
    assert outcome.status is None, outcome.message
    alone, _ = load(installed_plugins()["recorder"])
    arguments = dict.fromkeys(("inputs", "extra_kwargs", "trainer", "step", "local_loss", "log"))
    for hook in ("model_inputs", "after_step", "checkpoint_saved", "training_ended"):
        alone.call(hook, outcome.config, **arguments)
    seen = sys.modules["recorder_module"].seen
    assert set(seen) == set(hook_names())
    for name, arguments in seen.items():
        assert arguments["options"].mark == "mine", name
        assert isinstance(arguments["config"], JobConfig), name


def test_an_implementation_may_take_no_argument_at_all(parse_job, install_plugin):
    source = IMPORT + "calls = []\n@hookimpl\ndef adjust_config(): calls.append(1)\n"
    install_plugin("terse", source, module="terse_hooks")
    assert parse_job('[plugins]\nenable = ["terse"]\n').status is None
    assert sys.modules["terse_hooks"].calls == [1]


def test_hook_wrappers_are_refused(parse_job, install_plugin):
    source = IMPORT + "@hookimpl(wrapper=True)\ndef check_job(config):\n    return (yield)\n"
    install_plugin("wrapping", source, module="wrapping_module")
    outcome = parse_job('[plugins]\nenable = ["wrapping"]\n')
    assert outcome.status == 2
    assert "plugin wrapping (wrapping-dist 1.2.3): hook wrappers are not supported" in outcome.message


def test_metrics_of_a_step_go_to_console_and_loggers_when_the_step_is_due(caplog):
    written = []
    write = lambda values, step: written.append((values, step))  # noqa: E731
    with caplog.at_level("INFO"):
        hooks.StepLog(step=4, due=True, write=write)({"balance": torch.tensor(0.25)})
        hooks.StepLog(step=5, due=False, write=write)({"balance": 1.0})
    assert written == [({"balance": 0.25}, 4)]
    assert [record.getMessage() for record in caplog.records] == ["step:  4  balance:  0.25000"]


def test_every_hook_documents_its_contract():
    assert hook_names()
    for name in hook_names():
        doc = getattr(hooks, name).__doc__
        assert "Called" in doc, name
        assert "every rank" in doc, name


def test_loaded_plugins_keep_their_order():
    chosen, problems = choose("native", [], [])
    active, load_problems = load(chosen)
    assert not problems + load_problems
    assert active.names == list(routes.NATIVE)
