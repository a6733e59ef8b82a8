"""Every scorer against its formula written as loops, the selection rule, and recorded values of published code.

The references work on one KV head and one entry at a time, in Python floats and numpy float64, and share nothing with
`draftkv.cache.scorers` but the fields of a scorer.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from draftkv.cache.policy import Policy
from draftkv.cache.scene import Notes, Scene
from draftkv.cache.scorers import (
    ArkValeScorer,
    BaconScorer,
    ExactScorer,
    InfiniGenScorer,
    LowRankScorer,
    NoScorer,
    OracleScorer,
    QuestScorer,
    RandomScorer,
    Scorer,
    SnapKVScorer,
    prefix_basis,
    select,
)
from draftkv.errors import InputError

SCALING = 0.3
DIM = 8


@dataclass(frozen=True)
class Shape:
    """H query heads, G KV heads, S stored entries of which `prompt` are the prompt's; candidates are [start, end)."""

    heads: int = 4
    groups: int = 2
    stored: int = 50
    prompt: int = 44
    start: int = 0
    end: int = 40
    count: int = 8
    block: int = 1


SHAPES = {
    "plain": Shape(),
    "sinks": Shape(start=3, end=37, count=7),
    "blocks": Shape(start=4, end=42, count=12, block=4),
    "odd blocks": Shape(start=3, end=40, count=6, block=3),
    "no groups": Shape(heads=2, start=2),
    "one KV head": Shape(heads=6, groups=1, start=2),
    "short": Shape(stored=6, prompt=6, end=4, count=3),
    "short with sinks": Shape(stored=9, prompt=5, start=2, end=5, count=2),
    "page of all": Shape(stored=20, prompt=20, start=2, end=18, count=16, block=16),
    "everything": Shape(start=5, end=25, count=20),
}
TOKEN_SCORERS = [
    SnapKVScorer(observation=5, pool=3), SnapKVScorer(), SnapKVScorer(pooling="max"), SnapKVScorer(group="max"),
    RandomScorer(seed=3), ExactScorer(), OracleScorer(), BaconScorer(), BaconScorer(observation=7, pool=3),
    QuestScorer(block=1), ArkValeScorer(block=1), InfiniGenScorer(), InfiniGenScorer(partial=1.0),
]  # fmt: skip
MATRIX = [
    pytest.param(scorer.model_copy(update={"block": shape.block}), shape, id=f"{name}-{scorer.kind}{i}")
    for name, shape in SHAPES.items()
    for i, scorer in enumerate(TOKEN_SCORERS)
] + [
    pytest.param(scorer, shape, id=f"{name}-lowrank{i}")
    for name, shape in SHAPES.items()
    for i, scorer in enumerate([LowRankScorer(rank=3, candidates=2), LowRankScorer()])
    if shape.block == 1
]


def make_scene(shape: Shape, scorer, layer: int = 0, notes: Notes | None = None, seed: int = 0) -> Scene:
    """Random tensors of a shape at a selection, after the scorer has prepared the prompt."""
    draw = torch.Generator().manual_seed(seed + 100 * layer)
    query = torch.randn(shape.heads, shape.stored, DIM, generator=draw)
    key = torch.randn(shape.groups, shape.stored, DIM, generator=draw)
    notes = notes or Notes()
    remembered = notes.prompt.setdefault(layer, {})
    remembered["oracle"] = torch.rand(shape.groups, shape.prompt, generator=draw)
    prompt = Scene(query[:, : shape.prompt], key[:, : shape.prompt], SCALING, layer, notes)
    remembered[scorer] = scorer.prepare(prompt)
    return Scene(query, key, SCALING, layer, notes)


# --- references -------------------------------------------------------------------------------------------------------


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    return [x / sum(powers) for x in powers]


def attention(query: np.ndarray, key: np.ndarray, own: int) -> list[float]:
    """Weights of one query that sits at `own`: 0 for later keys."""
    seen = softmax([SCALING * sum(a * b for a, b in zip(query, key[j], strict=True)) for j in range(own + 1)])
    return seen + [0.0] * (len(key) - own - 1)


def pooled(values: list[float], width: int, kind: str = "mean") -> list[float]:
    half, out = width // 2, []
    for i in range(len(values)):
        near = [values[j] for j in range(i - half, i + half + 1) if 0 <= j < len(values)]
        out.append(sum(near) / width if kind == "mean" else max(near))
    return out


def votes(scene: Scene, group: int, rows: int, reduce: str = "mean") -> list[float]:
    """Attention of the last `rows` queries, mean over them, reduced over the group."""
    query, key = scene.query.double().numpy(), scene.key[group].double().numpy()
    stored, share = len(key), len(query) // scene.key.shape[0]
    heads = []
    for head in range(group * share, (group + 1) * share):
        rows_seen = range(max(0, stored - rows), stored)
        weights = [attention(query[head, i], key, i) for i in rows_seen]
        heads.append([sum(w[j] for w in weights) / len(weights) for j in range(stored)])
    return [sum(h[j] for h in heads) / share if reduce == "mean" else max(h[j] for h in heads) for j in range(stored)]


def queries(scene: Scene, group: int) -> list[np.ndarray]:
    share = scene.query.shape[0] // scene.key.shape[0]
    return [scene.query[h, -1].double().numpy() for h in range(group * share, (group + 1) * share)]


def snapkv(scorer, scene: Scene, group: int, shape: Shape) -> list[float]:
    return pooled(votes(scene, group, scorer.observation, scorer.group)[: shape.end], scorer.pool, scorer.pooling)


def exact(scorer, scene: Scene, group: int, shape: Shape) -> list[float]:
    return votes(scene, group, 1)[: shape.end]


def oracle(scorer, scene: Scene, group: int, shape: Shape) -> list[float]:
    return scene.notes.prompt[scene.layer]["oracle"][group, : shape.end].tolist()


def bacon(scorer, scene: Scene, group: int, shape: Shape, residue: dict | None = None) -> list[float]:
    """`residue`: (layer, group) -> E of layers scored so far; this layer's is added."""
    residue = {} if residue is None else residue
    end = shape.end
    base = pooled(votes(scene, group, scorer.observation)[:end], scorer.pool)
    last = pooled(votes(scene, group, 1)[:end], scorer.pool)
    excess = [max(0.0, q - b) for q, b in zip(last, base, strict=True)]
    local = pooled(excess, scorer.pool)
    before = sorted((i for i, g in residue if g == group and i < scene.layer), reverse=True)[: scorer.layers]
    evidence = []
    for j in range(end):
        seen = [residue[i, group][j] if j < len(residue[i, group]) else 0.0 for i in before]
        evidence.append(excess[j] + local[j] + (sum(seen) / len(seen) if seen else 0.0))
    residue[scene.layer, group] = excess
    best = sorted(base[shape.start :], reverse=True)[: 2 * shape.count]
    found = sorted(evidence[shape.start :], reverse=True)[: 2 * shape.count]
    spread = np.std(found)
    gate = min(1.0, max(0.0, np.mean(found) / np.mean(best)))
    factor = scorer.strength * gate * np.std(best) / spread if spread > 0 else 0.0
    return [b + factor * v for b, v in zip(base, evidence, strict=True)]


def page_reference(scorer, scene: Scene, group: int, shape: Shape) -> list[float]:
    key, score = scene.key[group].double().numpy(), [-math.inf] * shape.start
    for first in range(shape.start, shape.end, scorer.block):
        page = key[first : min(first + scorer.block, shape.end)]
        low, high = [min(k[d] for k in page) for d in range(DIM)], [max(k[d] for k in page) for d in range(DIM)]
        if scorer.kind == "arkvale":
            centre = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
            radius = [sum(abs(centre[d] - k[d]) for k in page) / len(page) for d in range(DIM)]
            low, high = ([c + s * r for c, r in zip(centre, radius, strict=True)] for s in (-1, 1))
        bounds = [sum(max(q[d] * low[d], q[d] * high[d]) for d in range(DIM)) for q in queries(scene, group)]
        score += [sum(bounds) / len(bounds)] * len(page)
    return score


def infinigen(scorer, scene: Scene, group: int, shape: Shape) -> list[float]:
    share = scene.query.shape[0] // scene.key.shape[0]
    rows = scene.query[group * share : (group + 1) * share, : shape.prompt].double().numpy().reshape(-1, DIM)
    axes = np.linalg.svd(rows, full_matrices=True)[2]
    weight = [sum(abs(float(row @ axis)) for row in rows) for axis in axes]
    kept = sorted(range(DIM), key=lambda d: -weight[d])[: math.ceil(scorer.partial * DIM)]
    key, score = scene.key[group].double().numpy(), []
    for j in range(shape.end):
        logits = [sum(float(q @ axes[d]) * float(key[j] @ axes[d]) for d in kept) for q in queries(scene, group)]
        score.append(SCALING * sum(logits) / len(logits))
    return score


def lowrank(scorer, scene: Scene, group: int, shape: Shape) -> list[float]:
    key = scene.key[group].double().numpy()
    axes = np.linalg.svd(key[: shape.prompt], full_matrices=True)[2][: scorer.rank]
    mine, asked = range(shape.start, shape.end), queries(scene, group)
    rough = [softmax([SCALING * sum(float(q @ a) * float(key[j] @ a) for a in axes) for j in mine]) for q in asked]
    guess = {j: sum(weights[j - shape.start] for weights in rough) / len(asked) for j in mine}
    proposed = sorted(mine, key=lambda j: -guess[j])[: scorer.candidates * shape.count]
    fine = [softmax([SCALING * float(q @ key[j]) for j in proposed]) for q in asked]
    score = [-math.inf] * shape.end
    for i, j in enumerate(proposed):
        score[j] = sum(weights[i] for weights in fine) / len(asked)
    return score


REFERENCES = {
    "snapkv": snapkv, "exact": exact, "oracle": oracle, "bacon": bacon, "quest": page_reference,
    "arkvale": page_reference, "infinigen": infinigen, "lowrank": lowrank,
}  # fmt: skip


def best_blocks(score: list[float], shape: Shape) -> list[int]:
    """The selection rule in words: whole blocks from `start`, best mean first, the lower position on a tie."""
    firsts = range(shape.start, shape.end - shape.block + 1, shape.block)
    mean = {first: sum(score[first : first + shape.block]) / shape.block for first in firsts}
    best = sorted(sorted(firsts, key=lambda first: (-mean[first], first))[: shape.count // shape.block])
    return [position for first in best for position in range(first, first + shape.block)]


# --- scores and selections --------------------------------------------------------------------------------------------


# Random numbers have no formula: see test_random_numbers.
@pytest.mark.parametrize(("scorer", "shape"), [case for case in MATRIX if case.values[0].kind != "random"])
def test_scores_and_selection_are_those_of_the_formula(scorer, shape):
    scene = make_scene(shape, scorer)
    given = Scene(scene.query, scene.key, SCALING, 0, scene.notes, count=shape.count, start=shape.start)
    got = scorer.score(given, shape.end)
    want = [REFERENCES[scorer.kind](scorer, scene, group, shape) for group in range(shape.groups)]
    assert got.dtype == torch.float32 and got.shape == (shape.groups, shape.end)
    torch.testing.assert_close(
        got[:, shape.start :].double(), torch.tensor(want, dtype=torch.double)[:, shape.start :], atol=2e-5, rtol=1e-4
    )
    picked = select(scorer, scene, shape.start, shape.count, shape.end)
    if scorer.kind != "snapkv" or scorer.pooling == "mean":  # neighbours under max pooling tie, up to rounding
        assert picked.tolist() == [best_blocks(row, shape) for row in want]


@pytest.mark.parametrize(("scorer", "shape"), MATRIX)
def test_selection_is_complete_and_repeatable(scorer, shape):
    scene = make_scene(shape, scorer)
    picked = select(scorer, scene, shape.start, shape.count, shape.end)
    assert picked.shape == (shape.groups, shape.count) and picked.dtype == torch.long
    for row in picked.tolist():
        assert row == sorted(set(row)) and shape.start <= row[0] and row[-1] < shape.end
    assert torch.equal(picked, select(scorer, scene, shape.start, shape.count, shape.end))
    assert torch.equal(picked, select(scorer, make_scene(shape, scorer), shape.start, shape.count, shape.end))
    assert select(scorer, scene, shape.start, 0, shape.end).shape == (shape.groups, 0)


@pytest.mark.parametrize("scorer", [case.values[0] for case in MATRIX if case.values[1] is SHAPES["sinks"]])
def test_selection_does_not_depend_on_the_training_context(scorer):
    """Autocast and gradients, under which a drafter is trained, change nothing and nothing is tracked."""
    shape = SHAPES["sinks"]
    plain = select(scorer, make_scene(shape, scorer), shape.start, shape.count, shape.end)
    scene = make_scene(shape, scorer)
    scene.key.requires_grad_(), scene.query.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        remembered = scorer.prepare(Scene(scene.query[:, : shape.prompt], scene.key[:, : shape.prompt], SCALING)) or {}
        assert not any(value.requires_grad for value in remembered.values())
        scene.notes.prompt[0][scorer] = remembered
        assert torch.equal(select(scorer, scene, shape.start, shape.count, shape.end), plain)
    assert not any(value.requires_grad for value in scene.notes.residue.values())


@pytest.mark.parametrize("scorer", [QuestScorer(), ArkValeScorer(), QuestScorer(block=3), ArkValeScorer(block=7)])
@pytest.mark.parametrize(("start", "end"), [(0, 40), (3, 40), (16, 48), (0, 5), (2, 9)])
def test_partial_pages_have_their_own_digest(scorer, start, end):
    shape = Shape(start=start, end=end, block=scorer.block)
    scene = make_scene(shape, scorer)
    got = scorer.score(Scene(scene.query, scene.key, SCALING, start=start), end)
    want = [page_reference(scorer, scene, group, shape) for group in range(2)]
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.double), atol=2e-5, rtol=1e-4)


def test_quest_bounds_every_logit_of_its_page():
    scene = make_scene(Shape(heads=2), QuestScorer())
    logits = (scene.query[:, -1:] @ scene.key.transpose(1, 2))[:, 0, :40]
    assert (QuestScorer().score(scene, 40) >= logits - 1e-5).all()


def test_bacon_traces_the_previous_scored_layers():
    """Layers of a hybrid; the fifth-last layer no longer counts, and another selection's maps never do."""
    scorer, notes, residue = BaconScorer(observation=9), Notes(), {}
    for layer in (1, 3, 4, 7, 8, 12):
        shape = Shape(start=2, end=40)
        scene = make_scene(shape, scorer, layer, notes)
        given = Scene(scene.query, scene.key, SCALING, layer, notes, count=shape.count, start=shape.start)
        for _ in range(2):  # scoring a layer again reads nothing that the first time wrote
            got = scorer.score(given, shape.end)
        want = [bacon(scorer, scene, group, shape, residue) for group in range(2)]
        torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.double), atol=1e-6, rtol=1e-4)
    for other in (Notes(), Notes(residue={(scene.stored + 1, i): got for i in range(12)})):
        alone = Scene(scene.query, scene.key, SCALING, 12, other, count=shape.count, start=shape.start)
        assert (got - scorer.score(alone, shape.end)).abs().max() > 1e-4


def test_bacon_without_excess_is_its_backbone():
    """One query is both the window and the last query: E = V = 0, no spread, lambda = 0."""
    scorer = BaconScorer(observation=1)
    scene = make_scene(Shape(), scorer)
    assert torch.equal(scorer.score(scene, 40), SnapKVScorer(observation=1).score(scene, 40))


def test_random_numbers():
    """A function of seed, layer, KV head, stored entries and position; not of the data or of `end`."""
    scorer = RandomScorer(seed=5)
    scene, other = make_scene(Shape(), scorer), make_scene(Shape(), scorer, seed=1)
    score = scorer.score(scene, 40)
    assert torch.equal(score, scorer.score(other, 40)) and torch.equal(score[:, :30], scorer.score(scene, 30))
    assert not torch.equal(score[0], score[1])
    changed = [
        RandomScorer(seed=6).score(scene, 40),
        scorer.score(make_scene(Shape(), scorer, layer=1), 40),
        scorer.score(make_scene(Shape(stored=51), scorer), 40),
    ]
    assert all(not torch.equal(score, one) for one in changed)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    scorer.score(scene, 40)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is not touched"


def test_oracle_asks_for_the_uncompressed_answer():
    scorer, shape = OracleScorer(), Shape()
    scene = make_scene(shape, scorer)
    with pytest.raises(InputError, match="scorer 'oracle' needs the uncompressed answer: .*none was given"):
        select(scorer, Scene(scene.query, scene.key, SCALING), 0, 8, 40)
    with pytest.raises(InputError, match="only 44 of 48 entries"):
        select(scorer, scene, 0, 8, 48)


@pytest.mark.parametrize(("entries", "rank"), [(40, 3), (3, 5), (1, 8), (40, 8), (40, 20)])
def test_prefix_basis(entries, rank):
    """Orthonormal, always min(rank, D) wide, and the best subspace: what it misses are the other singular values."""
    key = torch.randn(2, entries, DIM, generator=torch.Generator().manual_seed(1))
    basis = prefix_basis(key, rank)
    width = min(rank, DIM)
    assert basis.shape == (2, DIM, width) and basis.dtype == torch.float32
    assert torch.allclose(basis.transpose(1, 2) @ basis, torch.eye(width).expand(2, -1, -1), atol=1e-5)
    for group in range(2):
        values = np.linalg.svd(key[group].double().numpy(), compute_uv=False)
        missed = key[group] - key[group] @ basis[group] @ basis[group].T
        assert float(missed.norm()) == pytest.approx(math.sqrt(sum(values[width:] ** 2)), abs=1e-4)
    assert torch.equal(prefix_basis(key.bfloat16(), rank), prefix_basis(key.bfloat16().float(), rank))


# --- fields -----------------------------------------------------------------------------------------------------------


def test_union_has_every_scorer_and_its_published_defaults():
    adapter = TypeAdapter(Scorer)
    want = {
        "none": {"block": 1},
        "snapkv": {"block": 1, "observation": 32, "pool": 5, "pooling": "mean", "group": "mean"},
        "random": {"block": 1, "seed": 0},
        "exact": {"block": 1},
        "oracle": {"block": 1},
        "bacon": {"block": 1, "observation": 64, "pool": 5, "strength": 0.5, "layers": 4},
        "quest": {"block": 16},
        "arkvale": {"block": 32},
        "infinigen": {"block": 1, "partial": 0.3},
        "lowrank": {"block": 1, "rank": 8, "candidates": 4},
    }
    for kind, fields in want.items():
        scorer = adapter.validate_python({"kind": kind})
        assert scorer.model_dump() == {"kind": kind, **fields}
        assert hash(scorer) == hash(adapter.validate_python(scorer.model_dump()))
        assert scorer.rows == fields.get("observation", 1)
    with pytest.raises(ValidationError, match="lowrank.block"):
        adapter.validate_python({"kind": "lowrank", "block": 2})


def test_reads():
    """Vectors read per KV head for 32 of 1000 candidates; RCR's 160 is 4 * 32 keys and 32 values."""
    scan, fetch = 1032, 64
    want = {
        NoScorer(): 0, SnapKVScorer(): scan, ExactScorer(): scan, BaconScorer(): scan, RandomScorer(): fetch,
        OracleScorer(): fetch, QuestScorer(): fetch, ArkValeScorer(): fetch, InfiniGenScorer(): fetch,
        LowRankScorer(): 160,
    }  # fmt: skip
    for scorer, reads in want.items():
        assert scorer.reads(1000, 32) == reads, scorer
    assert LowRankScorer().reads(100, 32) == 132


# --- recorded values of published implementations ---------------------------------------------------------------------


def integers(*shape: int, state: int) -> torch.Tensor:
    """Integers in [-3, 3] of a linear congruential generator: the same in any language and version."""
    numbers = []
    for _ in range(math.prod(shape)):
        state = (1103515245 * state + 12345) % 2**31
        numbers.append(state // 65536 % 7 - 3)
    return torch.tensor(numbers, dtype=torch.float32).reshape(shape)


PUBLISHED = {
    6: [[2, 3, 13, 15, 16, 17], [8, 14, 15, 16, 26, 28], [31, 32, 33, 34, 35, 36], [8, 20, 21, 22, 24, 25]],
    12: [
        [1, 2, 3, 9, 10, 13, 14, 15, 16, 17, 37, 38], [7, 8, 9, 14, 15, 16, 25, 26, 28, 30, 31, 32],
        [14, 21, 31, 32, 33, 34, 35, 36, 37, 42, 43, 45], [5, 7, 8, 9, 18, 19, 20, 21, 22, 23, 24, 25],
    ],
}  # fmt: skip
KVPRESS = {32: [[2, 3, 9, 10, 13, 16], [24, 25, 26, 27, 28, 29]], 64: [[2, 3, 5, 6, 9, 13], [7, 8, 12, 13, 14, 15]]}
KVPRESS_SCORES = {
    32: [[0.01060503, 0.01754488, 0.02581528, 0.02334205], [0.00569267, 0.00895934, 0.01177827, 0.00796805]],
    64: [[0.01534475, 0.0248594, 0.0369819, 0.03349525], [0.00952488, 0.0129589, 0.0164638, 0.0152159]],
}


@pytest.mark.parametrize("count", PUBLISHED)
def test_snapkv_selects_what_the_published_code_selects(count):
    """Positions that `SnapKVCluster.update_kv` of FasterDecoding/SnapKV (commit 395b54dc, window 32, avgpool 5,
    capacity 32 + count) kept of these inputs, besides its window, in float32 under torch 2.13; a numpy transcription of
    its rule (sum over the window, zero-padded mean) gives the same 6. It scores per query head, so each has its own
    keys here. The relative gap between the last kept and the first dropped score is at least 0.6 % for the 6.
    """
    scene = Scene(integers(4, 80, 8, state=1), integers(4, 80, 8, state=2), 8**-0.5)
    assert select(SnapKVScorer(), scene, 0, count, 80 - 32).tolist() == PUBLISHED[count]


@pytest.mark.parametrize("window", KVPRESS)
def test_snapkv_scores_as_kvpress_does(window):
    """Scores of the first 4 entries and the 6 kept ones besides the window, made with `SnapKVPress` of kvpress 0.5.4
    (4 query heads in 2 groups, kernel 5) on a stub module that hands it these queries, without rotation."""
    scene = Scene(integers(4, 80, 8, state=1), integers(2, 80, 8, state=2), 8**-0.5)
    scorer = SnapKVScorer(observation=window)
    assert select(scorer, scene, 0, 6, 80 - window).tolist() == KVPRESS[window]
    got = scorer.score(scene, 80 - window)[:, :4]
    torch.testing.assert_close(got, torch.tensor(KVPRESS_SCORES[window]), atol=1e-7, rtol=1e-5)


def test_streaming_keeps_what_kvpress_keeps():
    """`StreamingLLMPress` of kvpress 0.5.4 (4 sinks, compression 0.6) kept these 20 of 50 entries: ours, when decoding
    begins, are the sinks and the sliding part of the budget, and nothing is selected."""
    recorded = [0, 1, 2, 3, *range(34, 50)]
    split = Policy(policy="streaming", budget=20).split(50)
    assert [*range(split.sinks), *range(split.tail_start, 50)] == recorded
    assert split.selected == 0 and split.sliding == 16
