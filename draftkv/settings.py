"""What every file of settings shares: sections that refuse unknown keys, and mistakes explained in one line that names
the key's path, what was given, what is allowed and, for a misspelt key, the nearest valid one.
"""

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from draftkv.errors import InputError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def validate(plain: dict[str, Any], schema: type[Section], where: str) -> Any:
    """Validate a plain mapping against `schema`; the first problem becomes one line.

    Raises:
        InputError: see above; one line.
    """
    _refuse_truth_values(plain, [schema], where)
    try:
        return schema.model_validate(plain)
    except ValidationError as error:
        raise InputError(f"{where}: {_explain(error, schema)}") from None


def _refuse_truth_values(plain: Any, models: list[type[BaseModel]], where: str, path: str = "") -> None:
    """pydantic takes true for the number 1, which hides a slip such as `steps: yes`."""
    if isinstance(plain, list):
        for index, item in enumerate(plain):
            _refuse_truth_values(item, models, where, f"{path}.{index}")
    elif isinstance(plain, dict):
        for key, value in plain.items():
            annotations = [m.model_fields[key].annotation for m in models if key in m.model_fields]
            kinds = {kind for annotation in annotations for kind in _flat(annotation)}
            here = f"{path}.{key}".lstrip(".")
            if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
                raise InputError(f"{where}: {here}: expected a number (given: {value})")
            _refuse_truth_values(value, [m for a in annotations for m in _models(a)], where, here)


def _explain(error: ValidationError, schema: type[BaseModel]) -> str:
    errors = error.errors(include_url=False)
    first = errors[0]
    keys, inside = _walk(schema, first["loc"])
    path = ".".join(keys) or "recipe"
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        known = sorted({name for model in inside for name in model.model_fields} - {"parts"})
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"{'.'.join([*keys, key])}: unknown key; {hint}"
    if first["type"] == "missing":
        return f"{path}: this key is required"
    # A value that fits no member of a union has one error for each.
    texts = dict.fromkeys(_text(e) for e in errors if _walk(schema, e["loc"])[0] == keys)
    message = " or ".join(text.removeprefix("Value error, " if not i else "Input should be ")
                          for i, text in enumerate(texts))  # fmt: skip
    given = first["input"]
    shown = "" if isinstance(given, dict | list) or first["type"] == "value_error" else f" (given: {given!r:.80})"
    return f"{path}: {message}{shown}"


def _text(error: Any) -> str:
    """pydantic's message, without its parser's reasons and the names of our classes."""
    if error["type"] in ("model_type", "dict_type"):
        return "expected a section of keys"
    return error["msg"].split(", unable to parse")[0]


def _walk(schema: type[BaseModel], loc: tuple) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow an error's location: the keys that a user wrote, and the models that the last of them leads to.

    pydantic adds the member of a union that it tried (`budget.list[int]`, `scorer.snapkv`); no user wrote that.
    """
    keys, here = [], [schema]
    for key in loc:
        found = [m.model_fields[key].annotation for m in here if key in m.model_fields]
        if found:
            here = [m for annotation in found for m in _models(annotation)]
        elif not isinstance(key, int):
            here = [m for m in here if "kind" in m.model_fields and m.model_fields["kind"].default == key] or here
            continue
        keys.append(str(key))
    return keys, here


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [m for kind in _flat(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
            for m in (kind, *getattr(kind, "also_holds", ()))]  # fmt: skip


def _flat(annotation: Any) -> list[Any]:
    """The types in an annotation: `list[int] | None` -> [int, NoneType]."""
    inner = get_args(annotation)
    return [kind for arg in inner for kind in _flat(arg)] if inner else [annotation]
