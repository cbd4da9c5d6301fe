"""Gradients, planned once and computed often."""

from __future__ import annotations

from typing import Any, Sequence

from ._arrays import Array
from ._attention import Gradients, _shape as shape_of, backward_template, differentiate, lse_shape, out_spec, wanted_gradients
from ._forward import gather
from ._prepared import PreparedPlan, is_on_host, kept_features, spec_beside


class BackwardPlan(PreparedPlan):
    """A gradient that was validated, with its kernel and its exact workspace; made by `plan_backward`. Threads may share it.

    Attributes
    ----------
    workspace_bytes : int
        Bytes of workspace that a run takes.
    """

    _made_by = "plan_backward"

    def __init__(self, address: int, features: dict[str, Any], captured: tuple[str, ...], is_on_host: bool) -> None:
        super().__init__("fovea_plan_create_backward", address, is_on_host=is_on_host)
        self._features = features
        self._captured = captured

    def run(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *, dlse: Array | None = None, **changed: Any
    ) -> Gradients:
        """Gradients of tensors like those of the plan.

        Parameters
        ----------
        dout, q, k, v, out, lse, dlse
            As `attention_backward`'s; dlse where the plan was made with it.
        **changed
            Features whose arrays or numbers are others than those of the plan. All else is as it was planned.

        Returns
        -------
        Gradients

        Raises
        ------
        InvalidArgument
            The call does not fit the plan; nothing was written.
        """
        features = {**self._features, **changed}
        return differentiate("BackwardPlan.run", dout, q, k, v, out, lse, dlse, self._captured, features, self)


def plan_backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    dout: Array | None = None,
    has_dlse: bool = False,
    captured: Sequence[str] = (),
    **features: Any,
) -> BackwardPlan:
    """Validates a gradient and chooses its kernel once; `BackwardPlan.run` then decides nothing.

    Parameters
    ----------
    q, k, v : array or TensorSpec
        As `attention_backward`'s; no data is needed.
    dout : array or TensorSpec, optional
        As runs will have it; row-major in the shape of out and the dtype of q unless given.
    has_dlse : bool
        Whether runs have a gradient by lse.
    captured : sequence of str
        As `attention_backward`'s.
    **features
        As the forward call had them; `out` where it is not row-major, or of another dtype than q.

    Returns
    -------
    BackwardPlan

    Raises
    ------
    InvalidArgument, Unsupported, CompileError
        As `attention_backward`; a GPU kernel is compiled here, if need be.
    """
    function = "plan_backward"
    kept = kept_features(features)
    q_shape, layout = shape_of(q, "q", function), features.get("layout", "bshd")
    out = features.get("out")
    if out is None:
        out = out_spec(q, v, "v", function)
    lse = spec_beside(q, "q", lse_shape(q_shape, layout), "f32", function)
    arguments = gather(function, q, k, v, out, lse, **kept)

    def beside(array: Array) -> Array:
        return spec_beside(array, "an input", shape_of(array, "an input", function), None, function)

    wanted = wanted_gradients(function, arguments, kept, captured, beside)
    template = backward_template(arguments, tuple(wanted.plain), tuple(wanted.captured), has_dlse)
    seeds = (out if dout is None else dout, *((lse,) if has_dlse else ()))
    tensors = (*arguments.tensors, *seeds, *wanted.plain.values(), *wanted.captured.values())
    bound = template.bind(tensors, (*arguments.words, 0, 0))
    return BackwardPlan(bound.address, kept, tuple(captured), is_on_host(q))
