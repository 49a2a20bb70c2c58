"""For all tests: what Hypothesis tries is the same in every run, and not timed, since a busy machine would fail tests by it.

`pytest tests/unit --hypothesis-profile=explore` tries other examples each time, and many more of them.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("same"), derandomize=False, max_examples=2000)
settings.load_profile("same")
