"""The report of a run: `report/report.html`, one self-contained page, and its Markdown twin with the same pictures.

Every number comes from the run's records, and so does every sentence that holds one. A change is called higher or
lower only when its paired 95 % interval leaves out 0; otherwise the report says "no clear change".
"""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from draftkv.acceptance import plots
from draftkv.acceptance.families import draw_curves, families
from draftkv.acceptance.page import Block, Bullets, Code, Heading, Paragraph, Picture, Table, write_page
from draftkv.acceptance.results import Run, Setting, read_run
from draftkv.acceptance.sweep_report import write_sweep_report
from draftkv.acceptance.wording import (
    NONE,
    al_text,
    change_text,
    how_to_read,
    number,
    refresh_texts,
    retention_text,
    verdict,
)  # fmt: skip

__all__ = ["write_report", "write_sweep_report"]


def write_report(run_dir: str | Path) -> Path:
    """Write the report of the run in `run_dir` from what is there; returns the path of the HTML page.

    Raises:
        InputError: no evaluation was recorded yet, or a file of the run is malformed.
    """
    run = read_run(run_dir)
    name = (run.recipe or {}).get("name") or run.folder.resolve().name
    blocks: list[Block] = [
        *_why(run), *_summary(run), *_headline(run), *_pictures(run), *_against(run), *_others(run), *_sizes(run),
        *how_to_read(), *_sources(run),
    ]
    return write_page(f"Acceptance length of {name}", blocks, run.folder / "report")


def _why(run: Run) -> list[Block]:
    why = ((run.recipe or {}).get("why") or "").strip()
    return [Paragraph(part.replace("\n", " ")) for part in why.split("\n\n") if part.strip()]


def _summary(run: Run) -> list[Block]:
    items = []
    for setting in run.settings:
        policies = run.policies_at(setting)
        record = run.get(setting, policies[0], run.first)
        where = f"{setting.label}, {record['prompts']} prompts" if record else setting.label
        shown = dict.fromkeys([policies[0], run.selected if run.selected in policies else policies[-1]])
        if run.after is None:
            values = "; ".join(f"{p}: {al_text(run.get(setting, p, run.first))}" for p in shown)
            items.append(f"{where}. Acceptance length at step {run.first}: {values}.")
            continue
        for policy in shown:
            before, after = (run.get(setting, policy, s) for s in (run.first, run.after))
            change = run.change(setting, policy, run.after)
            items.append(
                f"{where}. {policy}: acceptance length {number(before and before['al'])} before training, "
                f"{number(after and after['al'])} at step {run.after}; change {change_text(change)}: {verdict(change)}."
            )
        others = [verdict(run.change(setting, p, run.after)) for p in policies if not _is_full(run, p)]
        counts = "; ".join(f"{word}: {others.count(word)}" for word in dict.fromkeys(others))
        items.append(f"{where}. Of {len(others)} compressed policies, {counts}." if others else f"{where}. Full only.")
    if run.after is None:
        items.insert(0, f"Only step {run.first} was evaluated: these are figures of the drafter before training.")
    return [Bullets(items, summary=True)]


def _is_full(run: Run, policy: str) -> bool:
    return run.spec(policy).get("budget", 0) is None or policy == "full"


def _headline(run: Run) -> list[Block]:
    blocks: list[Block] = [Heading("Acceptance length by policy")]
    if len(run.steps) > 2:
        blocks.append(Paragraph(_which_step(run), note=True))
    for setting in run.settings:
        blocks += [Heading(setting.label, 3), _headline_table(run, setting)]
    blocks.append(_picture("al_by_policy", plots.al_by_policy(run), "Acceptance length by cache policy",
                           "Bars start at 0; whiskers are 95 % intervals over prompts. Pale: before training."))
    return blocks


def _which_step(run: Run) -> str:
    if (run.recipe or {}).get("export", {}).get("checkpoint", "best") == "last":
        return f"Step {run.after} is the last step, which the recipe exports; it was not picked on these prompts."
    trained = len(run.steps) - 1
    last = f" The last step, {run.last}, is shown beside it." if run.last != run.after else " It is also the last."
    return (f"Step {run.after} is the best of {trained} trained steps evaluated, by the acceptance length of "
            f"{run.selected} on these same prompts, so its figures lean high.{last}")


def _headline_table(run: Run, setting: Setting) -> Table:
    if run.after is None:
        head = ["policy", f"AL, step {run.first}", "retention"]
        rows = [[p, al_text(r), retention_text(r)]
                for p in run.policies_at(setting) for r in [run.get(setting, p, run.first)]]
        return Table(head, rows)
    extra = run.last not in (run.after, None)
    again = any("refresh_rate" in r for r in run.records)
    head = ["policy", f"AL before (step {run.first})", f"AL after (step {run.after})", "paired change", "reading",
            "retention before", "retention after"]
    head += ["refresh rate", "reads per step"] if again else []
    head += [f"AL last (step {run.last})", "last: change"] if extra else []
    rows = []
    for policy in run.policies_at(setting):
        before, after, last = (run.get(setting, policy, s) for s in (run.first, run.after, run.last))
        change = run.change(setting, policy, run.after)
        row = [policy, al_text(before), al_text(after), change_text(change), verdict(change),
               retention_text(before), retention_text(after)]
        row += refresh_texts(after) if again else []
        rows.append(row + ([al_text(last), change_text(run.change(setting, policy, run.last))] if extra else []))
    return Table(head, rows)


def _against(run: Run) -> list[Block]:
    """Retention against budget, rho and delta, where the evaluated policies differ in one of them alone."""
    found = families({p: run.spec(p) for p in run.policies})
    blocks: list[Block] = [Heading("Against budget, ratio and refresh interval")] if found else []
    for place, family in enumerate(found, start=1):
        for setting in run.settings:
            curves = {f"step {step}": [(v, r) for v, p in family.members.items() if (r := run.get(setting, p, step))]
                      for step in dict.fromkeys([run.first, run.after]) if step is not None}
            look = {label: {"color": colour, "marker": marker}
                    for label, colour, marker in zip(curves, ("#000000", "#0072B2"), "xo", strict=False)}
            blocks.append(_picture(f"{family.key}_{place}_{setting.slug}",
                                   draw_curves(curves, look, family.key, setting),
                                   f"AL and retention against {family.key}, {setting.label}",
                                   f"{family.name}. Whiskers are 95 % intervals over prompts, moved apart."))
    return blocks


def _picture(name: str, png: bytes | None, alt: str, caption: str) -> Block:
    return Picture(name, png, alt, caption) if png else Paragraph(f"{alt}: nothing recorded to draw.", note=True)


def _pictures(run: Run) -> list[Block]:
    blocks: list[Block] = [Heading("Against the training step")]
    if run.last is None:
        blocks.append(Paragraph(f"Only step {run.first} was evaluated, so there is no course to draw.", note=True))
    else:
        blocks.append(_picture("al_by_step", plots.al_by_step(run), "Acceptance length against the training step",
                               "Left: the values, axis from 0. Right: the change on the same prompts, which is what "
                               "training did. Bands are 95 % intervals over prompts."))
    if run.metrics:
        blocks.append(_picture("training", plots.training_curve(run), "Loss and learning rate",
                               "Dots are single steps; the line is a moving average."))
    blocks.append(Heading("Along the generation"))
    for setting in run.settings:
        blocks.append(_picture(f"along_{setting.slug}", plots.al_along(run, setting),
                               f"Acceptance length along the response, {setting.label}",
                               "Blocks by the response position they start at. A response that leaves its prompt "
                               "behind, or a window that slides off it, shows here."))
    blocks.append(Heading("By draft position"))
    for setting in run.settings:
        blocks.append(_picture(f"draft_position_{setting.slug}", plots.by_draft_position(run, setting),
                               f"Acceptance by draft position, {setting.label}",
                               "Left: the drafter's accuracy at each position. Right: how far drafts survive; "
                               "1 + the sum of this curve is the acceptance length, but for blocks cut short by EOS."))
    return blocks


def _others(run: Run) -> list[Block]:
    if not run.others:
        return []
    rows = [[str(r.get("checkpoint") or NONE), r["policy"], f"{r.get('temperature')}", al_text(r), retention_text(r)]
            for r in run.others]
    return [Heading("Other checkpoints"), Table(["checkpoint", "policy", "temperature", "AL", "retention"], rows, 2)]


def _sizes(run: Run) -> list[Block]:
    head = ["setting", "policy", "step", "prompts", "unusable", "blocks", "tokens", "AL macro", "acceptance rate",
            "tie rate", "wall s"]
    rows = []
    for setting in run.settings:
        for policy in run.policies_at(setting):
            for step in dict.fromkeys(s for s in (run.first, run.after, run.last) if s is not None):
                r = run.get(setting, policy, step)
                if r is not None:
                    rows.append([setting.label, policy, str(step), str(r.get("prompts", NONE)),
                                 str(r.get("unusable", NONE)), number(r.get("blocks"), 0), number(r.get("tokens"), 0),
                                 number(r.get("al_macro")), number(r.get("alpha"), 3), number(r.get("tie_rate"), 4),
                                 number(r.get("wall_s"), 1)])
    return [Heading("How much data is behind this"), *_training_size(run), Table(head, rows, 2)]


def _training_size(run: Run) -> list[Block]:
    train = (run.recipe or {}).get("train") or {}
    done = max((m["step"] for m in run.metrics if isinstance(m.get("step"), int)), default=run.steps[-1])
    text = f"Training: {done} of {train['steps']} planned steps" if "steps" in train else f"Training: {done} steps"
    if "rows" in train:
        text += f", {train['rows']} rows (prompt and response) a step, {done * train['rows']} rows drawn in all"
    lost = max((r.get("unusable") or 0 for r in run.records), default=0)
    rest = f" Up to {lost} evaluation rows hold no complete block and cannot be used." if lost else ""
    return [Paragraph(f"{text}.{rest}")]


def _sources(run: Run) -> list[Block]:
    blocks: list[Block] = [Heading("Where this comes from")]
    if run.provenance is not None:
        rows = [[key, value] for key, value in _flat(run.provenance)]
        blocks += [Heading("Provenance", 3), Table(["what", "value"], rows, 2)]
    else:
        blocks.append(Paragraph("The run recorded no provenance.", note=True))
    if run.recipe is not None:
        text = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True, width=110)
        blocks.append(Code(text, "The recipe, with every default", "yaml"))
    else:
        blocks.append(Paragraph("The run recorded no recipe.", note=True))
    return blocks


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Leaves of a nested mapping as (dotted key, text); lists stay whole."""
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _flat(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, float) and not math.isfinite(value) or value is None:
        return [(path, NONE)]
    return [(path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))]
