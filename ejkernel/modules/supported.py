"""Which implementation supports which call: the table behind `supported`."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from ejkernel.ops import Kernel, device_kind
from ejkernel.ops.core.methods import DEVICE_KINDS
from ejkernel.ops.core.requirements import REFERENCE
from ejkernel.ops.utils.display import Displayed, Shown, as_text, show


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation of one operation.

    `reasons` says why it does not run here, or why not the call that was asked about; it is
    empty if it does.
    """

    operation: str
    implementation: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...] | None
    without: tuple[str, ...]
    rules: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SupportTable(Displayed):
    """The rows of `support_table`; printed, it is a table."""

    rows: tuple[Row, ...]
    call: str | None = None

    def _shown(self) -> Shown:
        if self.call is not None:
            shown = [(row.implementation, "; ".join(row.reasons) or "yes") for row in self.rows]
            title = f"{self.call} on this {device_kind()}"
            return Shown(title, ("implementation", "supports it"), shown)
        return Shown(
            "",
            ("operation", "implementation", "devices", "dtypes", "not supported", "needs"),
            [
                (
                    row.operation,
                    row.implementation,
                    ", ".join(row.devices),
                    ", ".join(row.dtypes or ("any",)),
                    ", ".join(row.without) or "-",
                    "; ".join(row.rules) or "-",
                )
                for row in self.rows
            ],
            details=3,
        )

    def __str__(self) -> str:
        return as_text(self._shown())


def support_table(operation: str | None = None, *args: Any, **options: Any) -> SupportTable:
    """What `supported` prints, as data."""
    from . import OPERATIONS

    if operation is None:
        if args or options:
            raise TypeError("supported: name the operation that these arguments are for")
        return SupportTable(tuple(row for name in OPERATIONS for row in _rows(name)))
    if operation not in OPERATIONS:
        raise ValueError(f"supported: {operation!r} is none of {', '.join(OPERATIONS)}")
    if not args and not options:
        return SupportTable(tuple(_rows(operation)))
    kernel = kernel_of(operation)
    call = kernel.bind(*args, **options)
    rows = tuple(
        dataclasses.replace(
            row, reasons=tuple(kernel.implementation(row.implementation).unsupported(call))
        )
        for row in _rows(operation)
    )
    return SupportTable(rows, f"{operation}({call.signature})")


def supported(operation: str | None = None, *args: Any, **options: Any) -> None:
    """Print which implementations there are and what each supports: a table in a notebook.

    With an operation and arguments (arrays or `jax.ShapeDtypeStruct`), print for each of its
    implementations whether it supports that call here, and every reason if not.

    >>> from ejkernel.modules import supported
    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.float32)
    >>> supported("flash_attention", x, x, x, causal=True)  # doctest: +ELLIPSIS
    flash_attention(float32[1,64,2,32], ...) on this cpu
    implementation  supports it
    ...
    """
    show(support_table(operation, *args, **options))


def kernel_of(operation: str) -> Kernel[Any, Any]:
    """The kernel behind a function of `ejkernel.modules`."""
    kernel: Kernel[Any, Any] = importlib.import_module(f"ejkernel.modules.{operation}")._kernel
    return kernel


def _rows(operation: str) -> list[Row]:
    kernel = kernel_of(operation)
    return [
        Row(
            operation,
            item.name,
            tuple(kind for kind in sorted(DEVICE_KINDS) if item.runs_on(kind)),
            item.supports.dtypes,
            item.supports.without,
            tuple(_said(rule) for rule in item.supports.rules),
            (),
        )
        for item in [*kernel.all_implementations(), kernel.implementation(REFERENCE)]
    ]


def _said(rule: Any) -> str:
    """A rule in words: the first line of its docstring, else its name."""
    text = (rule.__doc__ or rule.__name__.replace("_", " ")).strip()
    return str(text.splitlines()[0].rstrip("."))
