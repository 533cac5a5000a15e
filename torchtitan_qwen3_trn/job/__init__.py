"""From a job file to a job that is ready to train.

In the order in which a job goes through them: ``command_line`` takes the flags, ``job_file`` and ``legacy`` read the
file in the keys of torchtitan 0.3, ``sections`` and ``values`` lay it over the configuration that ``configuration``
builds, ``prepare`` plans model and overrides (``override_plan``) and asks the questions of ``checks``.
"""
