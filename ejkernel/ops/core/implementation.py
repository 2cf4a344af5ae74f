"""One way to compute an operation: what it can do, its configs, its two passes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic

from ..utils.fingerprint import device_kind
from .requirements import Limits, Supports, declared_limits
from .types import Cfg, Out

if TYPE_CHECKING:
    from .invocation import Invocation


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Implementation(Generic[Cfg, Out]):
    """One way to compute an operation; a kernel has a list of them, the preferred one first::

        class Scale(Kernel[Any, jax.Array]):
            implementations = (
                Implementation(name="pallas", devices=("tpu",), config=Blocks, forward=tpu.scale),
                Implementation(name="xla", config=Chunks, forward=xla.scale),
            )

    A call goes to the first that runs on the device and supports the call.

    What belongs to its configs may stand in their class, which reads as one piece::

        @dataclasses.dataclass(frozen=True)
        class Blocks:
            block: Annotated[int, Limit(multiple_of=128)] = 256

            @classmethod
            def heuristic(cls, inv: Invocation) -> Blocks: ...

            @classmethod
            def space(cls, inv: Invocation) -> list[Blocks]: ...

            def unfit(self, inv: Invocation) -> str | None: ...  # why this one does not fit a call

    Args:
      name: what `implementation=` and messages call it.
      forward: `forward(*args, cfg, **kwargs)` gives the output.
      config: the class of its configs. Where implementations have classes of their own, a config
        says by its class which one it is for.
      devices: kinds of devices that it runs on; None: all.
      heuristic: a good config for an `Invocation`, without measuring; None: what the class's own
        `heuristic` says, or else its defaults.
      space: configs worth trying for an `Invocation`, as a list or a `Space`; None: what the
        class's own `space` says, or else only the heuristic one.
      supports: which calls it can handle.
      limits: what the fields of its configs may be, in addition to what their annotations say.
      forward_with_residuals: gives the output and what `backward` needs more than the arguments.
      backward: `backward(residuals, out, dout, *args, cfg, **kwargs)` gives one gradient for each
        positional argument, None where there is none, and then one dict for keywords if any has
        one. Without the two, JAX differentiates `forward`.
      reads_out: whether `backward` looks at `out`; if not, it is not kept for it.
      build: makes what it needs beside this package, such as a library in C++: called before a
        program that it serves is traced. If that fails, `supports` has to say so from then on.
    """

    name: str
    forward: Callable[..., Out]
    config: Any = None
    devices: tuple[str, ...] | None = None
    heuristic: Callable[[Invocation[Any, Any]], Cfg] | None = None
    space: Callable[[Invocation[Any, Any]], Iterable[Cfg]] | None = None
    supports: Supports = dataclasses.field(default_factory=Supports)
    limits: Limits = dataclasses.field(default_factory=Limits)
    forward_with_residuals: Callable[..., tuple[Out, Any]] | None = None
    backward: Callable[..., Any] | None = None
    reads_out: bool = True
    build: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"an implementation needs a name, got name={self.name!r}")
        for field in ("forward", "heuristic", "space", "forward_with_residuals", "backward"):
            value = getattr(self, field)
            if not callable(value) and (value is not None or field == "forward"):
                raise TypeError(
                    f"implementation {self.name!r}: {field} must be a function, got {value!r}"
                )
        if self.devices is not None and not isinstance(self.devices, tuple):
            raise TypeError(
                f"implementation {self.name!r}: devices must be a tuple of kinds, such as "
                f"('cpu',), or None for all; got {self.devices!r}"
            )
        if (self.forward_with_residuals is None) != (self.backward is None):
            have, lack = "forward_with_residuals", "backward"
            if self.backward is not None:
                have, lack = lack, have
            raise TypeError(
                f"implementation {self.name!r} has {have} without {lack}; a gradient needs both"
            )
        if not isinstance(self.config, type) or not dataclasses.is_dataclass(self.config):
            return
        if unknown := self.limits.unknown_fields(self.config):
            raise TypeError(
                f"implementation {self.name!r}: its limits name {', '.join(unknown)}, which "
                f"{class_name(self.config)} does not have"
            )
        object.__setattr__(self, "limits", declared_limits(self.config) | self.limits)
        for field in ("heuristic", "space"):
            if getattr(self, field) is None and _is_classmethod(self.config, field):
                object.__setattr__(self, field, getattr(self.config, field))

    def runs_on(self, kind: str) -> bool:
        """Whether it runs on this kind of device."""
        return self.devices is None or kind in self.devices

    def unsupported(self, inv: Invocation[Any, Any]) -> list[str]:
        """Why it cannot handle a call on the current device, in sentences; empty if it can."""
        kind = device_kind()
        if not self.runs_on(kind):
            kinds = " and ".join(self.devices or ())
            return [f"it runs on {kinds} devices, and this is a {kind}"]
        return self.supports.reasons_against(inv)

    def takes(self, cfg: Any) -> bool:
        """Whether a config is of its class."""
        return not isinstance(self.config, type) or isinstance(cfg, self.config)

    def heuristic_config(self, inv: Invocation[Any, Any]) -> Any:
        """The heuristic config of a call, not checked."""
        if self.heuristic is not None:
            return self.heuristic(inv)
        if is_constructible(self.config):
            return self.config()
        raise NotImplementedError(
            f"{inv.full_op_id}: {self.name} has no heuristic, and not all fields of its config "
            f"{class_name(self.config)} have defaults"
        )


def _is_classmethod(cls: type, name: str) -> bool:
    """Whether a config class has this method; a field of the same name is something else."""
    return isinstance(inspect.getattr_static(cls, name, None), classmethod)


def class_name(cls: Any) -> str:
    """A class as messages call it."""
    return str(getattr(cls, "__name__", cls))


def is_constructible(cls: Any) -> bool:
    """Whether all fields of a config class have defaults."""
    return dataclasses.is_dataclass(cls) and all(
        field.default is not dataclasses.MISSING
        or field.default_factory is not dataclasses.MISSING
        or not field.init
        for field in dataclasses.fields(cls)
    )
