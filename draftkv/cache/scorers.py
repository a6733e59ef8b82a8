"""Scorers: which stored entries are worth keeping.

A scorer is a small frozen value with one method, `score`. To add one: write a class like `SnapKVScorer`, add it to the
`Scorer` union at the end of this file and a row to `PRESETS` in `policy.py`; every executor and the whole test matrix
then know it.

Shapes: H query heads, G KV heads, S stored entries, D head_dim; "the group" is the H / G query heads that share a KV
head. Positions are indices into the stored entries. All arithmetic is fp32.
"""

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from draftkv.cache.scene import Scene
from draftkv.errors import InputError


def _is_odd(width: int) -> int:
    if width % 2 == 0:
        raise ValueError(f"{width}: an even width would shift the scores by half an entry; use an odd one")
    return width


class _Scorer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    scans: ClassVar[bool] = True  # whether a selection reads every candidate key from the full store
    block: int = Field(1, ge=1, description="select contiguous blocks of this many entries by their mean score")

    @property
    def rows(self) -> int:
        """Most recent query rows that `score` reads."""
        return 1

    def prepare(self, scene: Scene) -> dict[str, Tensor] | None:
        """What to remember of the prompt, once, when decoding begins; `scene.query` holds all prompt queries."""
        return None

    def score(self, scene: Scene, end: int) -> Tensor:
        """[G, end] fp32 scores of the first `end` stored entries."""
        raise NotImplementedError

    def reads(self, candidates: int, count: int) -> int:
        """Key and value vectors read from the full store, per KV head, by one selection of `count` entries: the chosen
        values, and either all candidate keys or (of scorers that do not scan) the chosen keys."""
        return (candidates if self.scans else count) + count


class NoScorer(_Scorer):
    """Selects nothing: the whole budget is sinks and window."""

    kind: Literal["none"] = "none"

    def reads(self, candidates: int, count: int) -> int:
        return 0


class SnapKVScorer(_Scorer):
    """SnapKV (FasterDecoding/SnapKV, defaults of its `init_snapkv`): attention of the last queries.

    softmax over all keys, causal, in fp32; mean over the `observation` last queries and, under grouped-query
    attention, over the query heads that share a key head (after the softmax); average pooling over positions with
    zero padding. Pooling runs over the candidates only, i.e. without the window, as published. When a cache is scored
    again later (RIFT-dyn), the last queries are the most recent ones.
    """

    kind: Literal["snapkv"] = "snapkv"
    observation: int = Field(32, ge=1, description="number of last queries that vote")
    pool: int = Field(5, ge=1, description="width of the pooling over positions (odd)")
    _odd = field_validator("pool")(_is_odd)
    pooling: Literal["mean", "max"] = "mean"
    group: Literal["mean", "max"] = Field("mean", description="over the query heads that share a key head")

    @property
    def rows(self) -> int:
        return self.observation

    def score(self, scene: Scene, end: int) -> Tensor:
        weights = scene.weights(self.observation).mean(2)
        score = (weights.mean(1) if self.group == "mean" else weights.amax(1))[:, :end]
        return _pooled(score, self.pool, self.pooling)


class RandomScorer(_Scorer):
    """Uniform random numbers: the baseline that no scoring rule may lose to (Random Attention, arXiv 2609.03430).

    The number of an entry is a function of (seed, layer, KV head, stored entries, position) alone, drawn on the CPU, so
    that every executor, device and recomputation agrees.
    """

    scans: ClassVar[bool] = False
    kind: Literal["random"] = "random"
    seed: int = Field(0, ge=0, description="seed of the random numbers")

    def score(self, scene: Scene, end: int) -> Tensor:
        mixed = ((self.seed * 1_000_003 + scene.layer) * 1_000_003 + scene.stored) % 2**63
        numbers = torch.rand(scene.key.shape[:2], generator=torch.Generator().manual_seed(mixed))
        return numbers[:, :end].to(scene.key.device)


class ExactScorer(_Scorer):
    """Attention of the most recent query, mean over the group: with a refresh at every step, the exact per-step
    re-selection that RCR ("Drift Says When, Budget Says How Much") is compared with."""

    kind: Literal["exact"] = "exact"

    def score(self, scene: Scene, end: int) -> Tensor:
        return scene.weights(1)[:, :, 0].mean(1)[:, :end]


class OracleScorer(_Scorer):
    """Prefill oracle of the RCR paper: prompt entries by the attention that the uncompressed answer pays them.

    The scores come from outside, as `notes.prompt[layer]["oracle"]`, [G, >= end]; nothing is scanned.
    """

    scans: ClassVar[bool] = False
    kind: Literal["oracle"] = "oracle"

    def score(self, scene: Scene, end: int) -> Tensor:
        given = scene.notes.prompt.get(scene.layer, {}).get("oracle")
        if given is None or given.shape[1] < end:
            what = "none was given" if given is None else f"only {given.shape[1]} of {end} entries were given"
            raise InputError(
                f"scorer 'oracle' needs the uncompressed answer: its attention to the prompt in layer {scene.layer} "
                f"is missing ({what}); decode the answer under policy 'full' first, or choose another scorer"
            )
        return given[:, :end].to(scene.key.device, torch.float32)


class BaconScorer(_Scorer):
    """BACON (arXiv 2606.14782, base variant): SnapKV's scores plus what only the last query sees.

    B = SnapKV scores of the last `observation` queries (mean over the group, mean pooling); Q = the same of the last
    query only; E = relu(Q - B); V = E + meanpool(E) + mean of E over the `layers` previous layers; score =
    B + lambda * V, lambda = strength * gate * std(B_top) / std(V_top), gate = clamp(mean(V_top) / mean(B_top), 0, 1).

    Readings: B_top and V_top are each map's own 2 * count largest values per KV head, among the candidates (so without
    sinks), fewer when there are fewer; std is the population's; lambda is 0 when V_top has no spread. "Previous layers"
    are the nearest full-attention layers below that were scored for the same selection. One width serves both
    poolings. When a cache is scored again, "last" is most recent.
    """

    kind: Literal["bacon"] = "bacon"
    observation: int = Field(64, ge=1, description="number of last queries that vote")
    pool: int = Field(5, ge=1, description="width of both poolings over positions (odd)")
    _odd = field_validator("pool")(_is_odd)
    strength: float = Field(0.5, ge=0, description="weight c of the last query's excess, in spreads of B")
    layers: int = Field(4, ge=1, description="previous scored layers whose excess is averaged in")

    @property
    def rows(self) -> int:
        return self.observation

    def score(self, scene: Scene, end: int) -> Tensor:
        weights = scene.weights(self.observation).mean(1)[:, :, :end]
        base = _pooled(weights.mean(1), self.pool)
        excess = (_pooled(weights[:, -1], self.pool) - base).relu()
        residue = scene.notes.residue
        residue[scene.stored, scene.layer] = excess
        evidence = excess + _pooled(excess, self.pool)
        before = sorted(i for stored, i in residue if stored == scene.stored and i < scene.layer)[-self.layers :]
        if before:
            evidence += torch.stack([residue[scene.stored, i] for i in before]).mean(0)
        top = max(1, min(2 * scene.count, end - scene.start))
        best = base[:, scene.start :].topk(top).values
        found = evidence[:, scene.start :].topk(top).values
        gate = (found.mean(-1) / best.mean(-1)).clamp(0, 1)
        spread = found.std(-1, unbiased=False)
        share = self.strength * gate * best.std(-1, unbiased=False) / spread
        return base + torch.where(spread > 0, share, 0.0)[:, None] * evidence


class _PageScorer(_Scorer):
    """Scores whole pages of `block` entries by a digest: a lower and an upper corner per page.

    A page's score is the sum over dimensions d of max(q_d * upper_d, q_d * lower_d), which a positive factor does not
    reorder, so the logits' scaling is left out; mean over the group (published: per query head). Pages begin at
    `scene.start`, as the blocks of `select` do, every entry has its page's score, and the partial last page has a
    digest of the entries it holds. Digests stay on the device, so that a selection reads only what it chose.
    """

    scans: ClassVar[bool] = False

    def digest(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """[G, N, entries, D] keys of N pages -> lower and upper corner, [G, N, D] each."""
        raise NotImplementedError

    def score(self, scene: Scene, end: int) -> Tensor:
        key = scene.key[:, scene.start : end].float()
        groups, entries, dim = key.shape
        whole = entries // self.block * self.block
        pages = [key[:, :whole].reshape(groups, -1, self.block, dim)] if whole else []
        pages += [key[:, None, whole:]] if whole < entries else []
        lower, upper = (torch.cat(corner, 1) for corner in zip(*map(self.digest, pages), strict=True))
        query = scene.grouped(1)[:, :, 0]
        # upper >= lower, so the larger product is upper's where q_d > 0; both sums are linear in their part of q.
        up, down = query.clamp(min=0).mean(1)[:, :, None], query.clamp(max=0).mean(1)[:, :, None]
        score = (upper @ up + lower @ down)[:, :, 0].repeat_interleave(self.block, 1)[:, :entries]
        return F.pad(score, (scene.start, 0), value=float("-inf"))


class QuestScorer(_PageScorer):
    """Quest (mit-han-lab/Quest): the digest is the elementwise minimum and maximum of the page's keys, and the score an
    upper bound of q . k over the page. Published: at every step, layers 0 and 1 dense, at least 3 pages."""

    kind: Literal["quest"] = "quest"
    block: int = Field(16, ge=1, description="entries of a page")

    def digest(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        return pages.amin(2), pages.amax(2)


class ArkValeScorer(_PageScorer):
    """ArkVale (NeurIPS 2024, pku-liang/ArkVale), digest "cuboid-mean": a box around the centre c = (min + max) / 2 of
    the page's keys whose half-widths are the mean of |c - k| over the page. Published: layers 0 and 1 dense."""

    kind: Literal["arkvale"] = "arkvale"
    block: int = Field(32, ge=1, description="entries of a page")

    def digest(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        centre = (pages.amin(2) + pages.amax(2)) / 2
        radius = (centre[:, :, None] - pages).abs().mean(2)
        return centre - radius, centre + radius


class InfiniGenScorer(_Scorer):
    """InfiniGen (OSDI 2024, snu-comparch/InfiniGen): logits in a few of the query's own principal columns.

    A = right singular vectors of the KV head's prompt queries (rows of the whole group); the `partial` share of columns
    with the largest sum of |q A| over the prompt is kept; score = mean over the group of (q A') . (k A') * scaling.

    Left out of the published system: its prefetch speculates layer l + 1's query from layer l's input, which hides
    latency and costs accuracy, while here the layer's own query is used; and the published number of entries,
    #(score > max - alpha) averaged over heads and at most 20 % of the length, is here the policy's budget. A is made of
    the prompt at hand (published: of calibration text, and folded into the weights).
    """

    scans: ClassVar[bool] = False
    kind: Literal["infinigen"] = "infinigen"
    partial: float = Field(0.3, gt=0, le=1, description="share of the columns that is scored, rounded up")

    @torch.no_grad()
    def prepare(self, scene: Scene) -> dict[str, Tensor]:
        query = scene.grouped(scene.query.shape[1]).flatten(1, 2)
        axes = _directions(query)
        columns = math.ceil(round(self.partial * axes.shape[-1], 6))
        with torch.autocast(query.device.type, enabled=False):
            best = (query @ axes).abs().sum(1).topk(columns).indices
        return {"columns": axes.gather(2, best[:, None].expand(-1, axes.shape[1], -1))}

    def score(self, scene: Scene, end: int) -> Tensor:
        columns = scene.notes.prompt[scene.layer][self]["columns"]
        query = scene.grouped(1)[:, :, 0].mean(1, keepdim=True) @ columns
        return (query @ (scene.key[:, :end].float() @ columns).transpose(1, 2))[:, 0] * scene.scaling


class LowRankScorer(_Scorer):
    """RCR's re-selection: a low-rank detector proposes `candidates` * count entries, exact attention picks among them.

    Detector: logits in the span of the first `rank` right singular vectors of the prompt's keys (`prefix_basis`).
    Readings: both stages use the most recent query, a softmax per query head (over all candidates, then over the
    proposed ones) and the mean over the group. Entries that were not proposed score -inf.
    """

    kind: Literal["lowrank"] = "lowrank"
    block: Literal[1] = Field(1, description="the detector proposes entries, not blocks")
    rank: int = Field(8, ge=1, description="singular vectors of the detector")
    candidates: int = Field(4, ge=1, description="entries scored exactly, in multiples of the selected ones")

    def prepare(self, scene: Scene) -> dict[str, Tensor]:
        return {"basis": prefix_basis(scene.key, self.rank)}

    def score(self, scene: Scene, end: int) -> Tensor:
        basis, query = scene.notes.prompt[scene.layer][self]["basis"], scene.grouped(1)[:, :, 0]
        key = scene.key[:, scene.start : end]
        rough = query @ basis @ (key.float() @ basis).transpose(1, 2) * scene.scaling
        order = rough.softmax(-1).mean(1).sort(dim=-1, descending=True, stable=True).indices
        proposed = order[:, : self.candidates * scene.count]
        near = key.gather(1, proposed[:, :, None].expand(-1, -1, key.shape[2])).float()
        exact = (query @ near.transpose(1, 2) * scene.scaling).softmax(-1).mean(1)
        score = exact.new_full((key.shape[0], end), float("-inf"))
        return score.scatter(1, proposed + scene.start, exact)

    def reads(self, candidates: int, count: int) -> int:
        return min(self.candidates * count, candidates) + count


def _pooled(score: Tensor, width: int, kind: str = "mean") -> Tensor:
    """[G, N] pooled over positions with stride 1; mean counts the zero padding, as the published code does."""
    pool = F.avg_pool1d if kind == "mean" else F.max_pool1d
    return pool(score[:, None], width, stride=1, padding=width // 2)[:, 0, : score.shape[1]]


@torch.no_grad()
def prefix_basis(key: Tensor, rank: int) -> Tensor:
    """First right singular vectors of each KV head's key matrix: [G, P, D] -> [G, D, min(rank, D)], orthonormal.

    They are the eigenvectors of K^T K, which exist in full even when P < rank (the rest then spans what K does not).
    Signs are arbitrary; no use of the basis depends on them.
    """
    return _directions(key.float())[:, :, :rank]


def _directions(rows: Tensor) -> Tensor:
    """[G, N, D] -> [G, D, D]: all right singular vectors in columns, largest singular value first."""
    with torch.autocast(rows.device.type, enabled=False):
        return torch.linalg.eigh(rows.transpose(1, 2) @ rows).eigenvectors.flip(-1)


@torch.no_grad()
def select(scorer: _Scorer, scene: Scene, sinks: int, count: int, end: int) -> Tensor:
    """Positions of the `count` best stored entries in [sinks, end), ascending, per KV head.

    Ties are broken by position (lower wins), so that two runs of one step agree, as activation checkpointing needs.
    Blocks start at `sinks`, which the policy rounds up to whole blocks; the partial last block is never a candidate
    (the sliding part of the budget takes the entries that whole blocks leave over).

    Returns:
        [G, count] int64 positions.
    """
    key = scene.key
    if count == 0:
        return torch.empty(key.shape[0], 0, dtype=torch.long, device=key.device)
    with torch.autocast(key.device.type, enabled=False):
        score = scorer.score(replace(scene, count=count, start=sinks), end)[:, sinks:]
    block = scorer.block
    blocks = score.shape[1] // block
    score = score[:, : blocks * block].view(score.shape[0], blocks, block).mean(-1)
    best = score.sort(dim=-1, descending=True, stable=True).indices[:, : count // block].sort(-1).values
    picked = best[:, :, None] * block + torch.arange(block, device=key.device)
    if picked[0].numel() != count:
        raise ValueError(f"{count} entries in blocks of {block} from {blocks} blocks")
    return picked.flatten(1) + sinks


Scorer = Annotated[
    NoScorer | SnapKVScorer | RandomScorer | ExactScorer | OracleScorer | BaconScorer | QuestScorer | ArkValeScorer
    | InfiniGenScorer | LowRankScorer,
    Field(discriminator="kind"),
]  # fmt: skip
