"""The rewards of many completions by all functions, and their weighted sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_workload.rewards.trl_signature import Values

LARGEST = 3.4e38
"""A completion whose weighted sum of rewards is larger than this is left out of the loss: float32 cannot hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    """Rewards of N completions by F functions, in plain lists that can be gathered as an object."""

    names: list[str]
    values: list[Values]  # [F][N]
    # [N], weighted sum over the functions that did not return None; NaN if all did, or if float32 cannot hold it.
    totals: list[float]
    # [N], the function with the largest part in a sum that float32 cannot hold; None where it can.
    overflows: list[str | None]

    @staticmethod
    def concat(tables: Sequence[RewardTable]) -> RewardTable:
        """Join the tables of all ranks, in rank order; a rank without completions has a table with N = 0."""
        names = tables[0].names
        assert all(table.names == names for table in tables)
        values = [[value for table in tables for value in table.values[index]] for index in range(len(names))]
        return RewardTable(
            names=names,
            values=values,
            totals=[total for table in tables for total in table.totals],
            overflows=[name for table in tables for name in table.overflows],
        )


def tabulate(weights: Mapping[str, float], values: list[Values]) -> RewardTable:
    """Make the table of `values` [F][N]; `weights` are those of the F functions, in order."""
    summed = [_total(weights, row) for row in zip(*values, strict=True)]
    return RewardTable(
        names=list(weights),
        values=values,
        totals=[total for total, _ in summed],
        overflows=[name for _, name in summed],
    )


def _total(weights: Mapping[str, float], row: Sequence[float | None]) -> tuple[float, str | None]:
    """Return the weighted sum, and the function with the largest part if the sum is too large."""
    parts = {name: weights[name] * value for name, value in zip(weights, row, strict=True) if value is not None}
    # fsum does not depend on the order: with the same parts in other functions' columns the reward is equal.
    add = math.fsum if all(abs(part) <= LARGEST for part in parts.values()) else sum
    total = add(parts.values()) if parts else math.nan
    if not parts or abs(total) <= LARGEST:
        return total, None
    return math.nan, max(parts, key=lambda name: abs(parts[name]))
