"""The name under which `triforce_tools.evaluation` finds `answer_runs`."""

from triforce_tools.demo_training.recall import answer_runs

__all__ = ["answer_runs"]
