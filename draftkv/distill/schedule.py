"""What each optimiser step sees: rows, views and learning rate, as pure functions of (seed, step).

Nothing here has state, so resuming is starting at another step, and any number of processes sees the same rows in the
same order under the same views.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftkv.cache.policy import Policy
from draftkv.recipe import Recipe, Train, View


@dataclass(frozen=True)
class Item:
    """One row of a step and the views it is trained under."""

    row: dict[str, Any]
    views: tuple[Policy, ...]
    weights: tuple[float, ...]  # factor on the loss of each view's rows

    @property
    def supervised(self) -> int:
        """Rows with a loss. The first response token comes from the target's prefill: no draft, no loss."""
        return len(self.views) * (len(self.row["response_ids"]) - 1)

    @property
    def weight(self) -> float:
        """Supervised rows, each counted with its view's factor: what the loss is normalised by."""
        return sum(self.weights) * (len(self.row["response_ids"]) - 1)

    @property
    def fed(self) -> int:
        """Tokens that the drafter is fed when the views share the prompt's pass."""
        return len(self.row["prompt_ids"]) + self.supervised


def learning_rate(train: Train, step: int) -> float:
    """Linear warm-up, then a cosine to `min_lr_ratio` of the peak at the last step. `step` counts from 0."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    span = max(1, train.steps - 1 - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def draw_views(
    views: Sequence[View], count: int, seed: int, step: int, row: str
) -> tuple[tuple[Policy, ...], tuple[float, ...]]:
    """`count` policies for one row and their loss weights: weighted draws without replacement, from all views again
    when none is left. As many draws as views give every view once; weights decide when there are fewer."""
    rng = random.Random(f"views/{seed}/{step}/{row}")
    drawn: list[Policy] = []
    weights: list[float] = []
    left: list[View] = []
    for _ in range(count):
        left = left or list(views)
        view = left.pop(rng.choices(range(len(left)), [v.weight for v in left])[0])
        drawn.append(view.draw(rng))
        weights.append(view.loss_weight)
    return tuple(drawn), tuple(weights)


class Schedule:
    """Rows and views of every step: epochs are seeded permutations, laid end to end.

    Rows that share a forward pass are padded to the longest, so with more than one row a pass (`train.micro_rows`) rows
    of similar length are put side by side: within windows of `train.bucket_steps` steps, whose groups are shuffled
    again. The order depends on the recipe and the rows alone, not on the number of processes.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], recipe: Recipe):
        self.rows, self.recipe = rows, recipe
        self._orders: dict[int, list[int]] = {}

    def items(self, step: int) -> list[Item]:
        """All rows of a step, the longest first (so that rows of a forward pass have similar lengths)."""
        train, total = self.recipe.train, len(self.rows)
        places = range(step * train.rows, (step + 1) * train.rows)
        chosen = [self._epoch(place // total)[place % total] for place in places]
        items = [
            Item(self.rows[index], *self._views(step, f"{place}/{self.rows[index]['row_id']}"))
            for place, index in enumerate(chosen)
        ]
        return sorted(items, key=lambda item: -item.fed)

    def _views(self, step: int, row: str) -> tuple[tuple[Policy, ...], tuple[float, ...]]:
        return draw_views(self.recipe.views, self.recipe.train.views_per_row, self.recipe.seed, step, row)

    def _epoch(self, epoch: int) -> list[int]:
        """Row indices in the order of an epoch; the last two epochs asked for are kept."""
        if epoch not in self._orders:
            rng, order = random.Random(f"rows/{self.recipe.seed}/{epoch}"), list(range(len(self.rows)))
            rng.shuffle(order)
            kept = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1}
            self._orders = {**kept, epoch: self._bucketed(order, rng)}
        return self._orders[epoch]

    def _bucketed(self, order: list[int], rng: random.Random) -> list[int]:
        train, result = self.recipe.train, []
        size, width = train.micro_rows, train.rows * train.bucket_steps
        if 1 in (size, train.bucket_steps):  # a step is sorted anyway
            return order
        for start in range(0, len(order), width):
            window = sorted(order[start : start + width], key=self._length)
            groups = [window[i : i + size] for i in range(0, len(window), size)]
            rest = groups.pop() if len(groups[-1]) < size else []  # last, or it would shift all that follow
            rng.shuffle(groups)
            result += [index for group in (*groups, rest) for index in group]
        return result

    def _length(self, index: int) -> int:
        row = self.rows[index]
        return len(row["prompt_ids"]) + self.recipe.train.views_per_row * (len(row["response_ids"]) - 1)

    def micro_batches(self, items: Sequence[Item], rank: int, processes: int) -> list[list[Item]]:
        """This process's share of a step, in forward passes of at most `micro_rows`. Every process gets the same number
        of passes (some may be empty), so that collectives match, and in each one rows as long as the others': the
        sorted items are cut into passes, which are dealt in turn."""
        passes = math.ceil(math.ceil(len(items) / processes) / self.recipe.train.micro_rows)
        bounds = [len(items) * i // (passes * processes) for i in range(passes * processes + 1)]
        return [list(items[bounds[i] : bounds[i + 1]]) for i in range(rank, passes * processes, processes)]

    def padding(self, items: Sequence[Item], processes: int) -> float:
        """Share of padding in what all processes feed in a step."""
        micros = [m for rank in range(processes) for m in self.micro_batches(items, rank, processes) if m]
        return 1 - sum(item.fed for item in items) / sum(len(m) * max(item.fed for item in m) for m in micros)
