"""Sessions that need environments of their own: ``nox -l`` lists them."""

from __future__ import annotations

import nox

PYTHONS = ["3.11", "3.12", "3.13"]
SITE = ("-E", "-W", "--keep-going", "-n", "-b", "html", "docs", "docs/_build/html")
EXTRAS = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]

nox.options.sessions = ["lint", "types", "docs", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the quick tests on each installed Python; further arguments go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format and style."""
    session.install(*(each for each in EXTRAS["test"] if each.startswith("ruff")))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types."""
    session.install("-e", ".[test]")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site; warnings are errors."""
    session.install(*EXTRAS["docs"])
    session.run("python", "-m", "sphinx", *SITE)
