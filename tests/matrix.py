"""What the parity tests share: every preset and architecture at tiny size, and ways to run them."""

import torch
from transformers import AttentionInterface

from draftkv.cache.attention import ATTENTION
from draftkv.cache.evicted import EvictedCache
from draftkv.cache.offloaded import OffloadedCache, cache_for
from draftkv.cache.oracle import oracle_notes
from draftkv.cache.parallel import single
from draftkv.cache.policy import PRESETS, Policy
from draftkv.rehearsal import tiny_model

ARCHITECTURES = ["llama", "qwen3", "qwen3_5", "gemma3", "gpt_oss", "nemotron_h"]
HYBRIDS = ["qwen3_5", "nemotron_h"]
PROMPT, RESPONSE = 40, 24
TOLERANCE = 1e-5
ONE_SHOT = [name for name, (parts, _) in PRESETS.items() if "trigger" not in parts and name != "oracle"]
LATER = [name for name, (parts, _) in PRESETS.items() if "trigger" in parts]

# Parts of each kind of trigger that make it fire within a few tokens.
_TRIGGERS = {
    "every": {"delta": 5}, "adaptive": {"check": 3, "a_min": 3, "a_max": 7, "drift_above": 0.05},
    "similarity": {"stride": 3, "threshold": 0.9}, "rate_controlled": {"tau": 0.2, "gain": 0.3, "rank": 4},
    "fixed_threshold": {"tau": 0.4, "rank": 4}, "always": {}, "never": {},
}  # fmt: skip
_SCORERS = {
    "snapkv": {"observation": 8}, "bacon": {"observation": 8}, "quest": {"block": 4}, "arkvale": {"block": 4},
    "lowrank": {"rank": 4, "candidates": 2},
}  # fmt: skip

_MODELS: dict = {}


def fresh(name: str) -> torch.nn.Module:
    """A tiny model with weights half the rehearsal's: at larger ones fp32 itself rounds by more than the tolerance
    (transformers' chunked and step-wise forms of Qwen3.5's recurrence then differ by 9e-5 without any cache)."""
    return tiny_model(name, initializer_range=0.05 if name in HYBRIDS else 0.1)


def model(name: str) -> torch.nn.Module:
    if name not in _MODELS:
        _MODELS[name] = fresh(name)
        _MODELS[name].set_attn_implementation(ATTENTION)
    return _MODELS[name]


def policy(name: str, budget: int, **parts) -> Policy:
    """A preset with its published sizes scaled down to prompts of a few dozen tokens."""
    if name == "full":
        return Policy(policy="full")
    preset = PRESETS[name][0]
    spec = {"policy": name, "budget": budget, **parts}
    for part in ("scorer", "initial"):
        if part in preset:
            usual = preset[part]
            spec[part] = {**usual, **_SCORERS.get(usual["kind"], {})}
            if usual.get("observation"):  # RefreshKV's own window of one query
                spec[part]["observation"] = usual["observation"]
            if name == "rift_stat_block":
                spec[part]["block"] = 4
    if "trigger" in preset:
        spec["trigger"] = {**preset["trigger"], **_TRIGGERS[preset["trigger"]["kind"]], **parts.get("trigger", {})}
    if preset.get("window"):
        spec["window"] = min(4, budget - 1)
    if preset.get("sinks", 0) > 4:
        spec["sinks"] = min(4, budget - 1)
    if "dense_layers" in preset:
        spec["dense_layers"] = 1
    return Policy.model_validate({**spec, **{k: v for k, v in parts.items() if k != "trigger"}})


def tokens(count: int, vocab: int = 512, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def parallel_logits(m, ids, prompt_len, pol, epochs=None, notes=None):
    positions = torch.arange(ids.shape[1])[None]
    view = single(prompt_len, ids.shape[1], pol, notes, epochs)
    return m(ids, position_ids=positions, cache_view=view, use_cache=False).logits[0].float()


def notes_for(m, ids, prompt_len, pol):
    if pol.scorer.kind != "oracle":
        return None
    everything = ids[0].tolist()
    return oracle_notes(m, everything[:prompt_len], [*everything[prompt_len:], 0])


class Recording(OffloadedCache):
    """Remembers what every row saw: seen[layer][position] = [G, S] bool, by position of the entry."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: dict[int, dict[int, torch.Tensor]] = {}
        self.refreshed_at: list[int] = []

    def _attend_new(self, slot, layer, query, key, value):
        out = super()._attend_new(slot, layer, query, key, value)
        if slot.compressed:
            size, chosen = len(slot.store), slot.selection
            for at in range(size - query.shape[1], size):
                seen = torch.zeros(chosen.positions.shape[0], size, dtype=torch.bool)
                seen.scatter_(1, chosen.positions, True)
                window = chosen.split.sliding
                low = chosen.split.tail_start if window is None else max(chosen.split.tail_start, at - window)
                assert not seen[:, low : at + 1].any(), "selected and window entries overlap"
                seen[:, low : at + 1] = True
                self.seen.setdefault(layer.index, {})[at] = seen
        return out


def cached_logits(m, ids, prompt_len, pol, block=3, wrong=2, cache=None):
    """Decode teacher-forced in blocks, each after `wrong` tokens that are rolled back, as speculative decoding does.

    Block triggers are asked at block starts. Checks after every block that the attended count is the documented one.
    Returns the logits and the cache.
    """
    if cache is None:
        cache = cache_for(m.config, pol, notes_for(m, ids, prompt_len, pol))
    out = [cache.forward(m, ids[:, :prompt_len])]
    at = prompt_len
    while at < ids.shape[1]:
        cache.commit()
        assert cache.length <= at
        if pol.trigger.level == "block" and cache.clock.at_check(at - prompt_len + 1):
            if cache.length < at:
                cache.forward(m, ids[:, cache.length : at])
                cache.commit()
            if cache.refresh(at - prompt_len + 1) and isinstance(cache, Recording):
                cache.refreshed_at.append(at - prompt_len)
        check_counts(cache, pol, prompt_len)
        if wrong:
            cache.forward(m, tokens(wrong, seed=at))
            cache.rollback(cache.committed)
        stop = min(at + block, ids.shape[1])
        out.append(cache.forward(m, ids[:, cache.length : stop])[at - stop :])
        at = stop
    return torch.cat(out), cache


def check_counts(cache: EvictedCache, pol: Policy, prompt_len: int) -> None:
    if pol.is_full:
        return
    budget = pol.entries(prompt_len)
    if pol.generated == "kept":
        assert set(cache.entries()) == {min(budget, prompt_len) + cache.length - prompt_len}
    else:
        assert set(cache.entries()) == {min(budget, cache.length)}, "kept count is the documented budget"


def related_drafter(arch: str) -> torch.nn.Module:
    """The target with noise on its weights: right often enough that blocks have every length."""
    key = (arch, "noisy")
    if key not in _MODELS:
        noisy = fresh(arch)
        noisy.set_attn_implementation(ATTENTION)
        generator = torch.Generator().manual_seed(3)
        scale = 0.8 if arch in HYBRIDS else 0.03  # its small weights leave the best token far ahead of the others
        with torch.no_grad():
            for p in noisy.parameters():
                p += scale * p.std() * torch.randn(p.shape, generator=generator) if p.numel() > 1 else 0
        _MODELS[key] = noisy
    return _MODELS[key]


_MASKS: dict[int, torch.Tensor] = {}


def _masked_attention(module, query, key, value, attention_mask, scaling, s_aux=None, sliding_window=None, **_):
    """Plain softmax attention, every head under its own [T, T] mask: slow, literal, and not the project's kernel."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = (query @ key.transpose(2, 3) * scaling).float()
    row, column = torch.arange(query.shape[2])[:, None], torch.arange(query.shape[2])[None]
    mask = column <= row
    if sliding_window is not None:
        mask = mask & (row - column < sliding_window)
    elif module.layer_idx in _MASKS:
        mask = _MASKS[module.layer_idx].repeat_interleave(groups, 0)
    logits = logits.masked_fill(~mask, float("-inf"))
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(-1, -1, logits.shape[2], 1)], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2), None


AttentionInterface.register("literal_masks", _masked_attention)


@torch.no_grad()
def literal_logits(name: str, ids: torch.Tensor, prompt_len: int, seen: dict[int, dict[int, torch.Tensor]]):
    """One forward of the whole sequence under explicit masks made of what every row was recorded to see."""
    key = (name, "literal")
    if key not in _MODELS:
        _MODELS[key] = fresh(name)
        _MODELS[key].set_attn_implementation("literal_masks")
    length = ids.shape[1]
    _MASKS.clear()
    for layer, rows in seen.items():
        groups = next(iter(rows.values())).shape[0]
        mask = torch.ones(groups, length, length).tril().bool()
        for at in range(prompt_len, length):
            mask[:, at] = False
            mask[:, at, : at + 1] = rows[at][:, : at + 1]
        _MASKS[layer] = mask
    return _MODELS[key](ids, position_ids=torch.arange(length)[None], use_cache=False).logits[0].float()
