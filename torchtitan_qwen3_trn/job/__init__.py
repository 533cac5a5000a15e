"""Job files: from TOML to a checked trainer configuration.

``manager`` is where ``torchtitan.train`` enters; ``reader`` and ``legacy`` give a table in today's keys, ``sections``
and ``schema`` lay it over the configuration, ``prepare`` and ``checks`` decide whether it can run.
"""
