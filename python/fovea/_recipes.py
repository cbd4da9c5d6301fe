"""Recipes of eight-bit attention as callers give them: texts, files of ``fovea calibrate``, accuracies."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from .errors import InvalidArgument

_FORMAT = "fovea recipe 1"


class Recipe(NamedTuple):
    """What ``fovea calibrate`` measured and chose: `load_recipe` gives it, ``quant=`` takes it.

    Attributes
    ----------
    quant : str
        The recipe, "none" where none was good enough.
    error : float
        Of the worst head with it, ``norm(out - exact) / norm(exact)``.
    accuracy : float
        What was allowed.
    heads : tuple of dict
        Of each head: "q_head", what it alone could take as "quant" and "error", and the "errors" of every recipe. A call has one
        recipe for all heads.
    """

    quant: str
    error: float
    accuracy: float
    heads: tuple[dict[str, Any], ...]


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Reads a file that ``fovea calibrate --out`` wrote.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    Recipe

    Raises
    ------
    InvalidArgument
        It is another file. One that is not there is an OSError.

    Examples
    --------
    >>> recipe = fovea.load_recipe("layer3.json")
    >>> out = fovea.attention(q, k, v, quant=recipe)
    """
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError:
            found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("quant"), str):
        raise InvalidArgument(f'load_recipe: {os.fspath(path)} is no recipe; expected what fovea calibrate --out writes, "format": "{_FORMAT}" and "quant"')
    return Recipe(found["quant"], float(found.get("error", 0)), float(found.get("accuracy", 0)), tuple(found.get("heads", ())))


def recipe_text(quant: Any, accuracy: Any, function: str) -> Any:
    """What the library takes: the text of a recipe, or of the accuracy in its place. Other values are refused behind it, by name."""
    if accuracy is not None:
        if quant is not None:
            raise InvalidArgument(f"{function}: accuracy is {accuracy!r} beside quant {quant!r}; expected one of them: it chooses a recipe")
        if isinstance(accuracy, bool) or not isinstance(accuracy, (int, float)) or not accuracy > 0:
            raise InvalidArgument(f"{function}: accuracy is {accuracy!r}; expected a relative error above 0, as 0.02")
        return f"accuracy={float(accuracy)!r}"
    if isinstance(quant, Recipe):
        return quant.quant
    if isinstance(quant, os.PathLike) or (isinstance(quant, str) and quant.endswith(".json")):
        return load_recipe(quant).quant
    return quant
