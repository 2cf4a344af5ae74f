"""`ejkernel check`: do the operations of a function compile for devices that are not here?"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from . import options
from .exits import Exit, Failure, in_one_line
from .loading import import_modules, load
from .output import State, table, working
from .programs import invocations_of, operations_of, skipped_of

if TYPE_CHECKING:
    from ..targets import CheckResult, Target


def _complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from ..targets import names

    return [name for name in names() if name.startswith(begun)]


@click.command(short_help="Compile for TPU and CUDA devices that are not here.")
@click.argument("name", metavar="[MODULE:FUNCTION]", required=False)
@click.option(
    "--target",
    "-t",
    "wanted",
    multiple=True,
    metavar="NAME",
    shell_complete=_complete,
    help="A device, such as tpu-v5e or cuda-sm90; may be repeated; 'all' are those usable here.",
)
@click.option("--lower-only", is_flag=True, help="Do not compile: needs nothing installed.")
@click.option("--ask", is_flag=True, help="Without a function: start the compilers and ask them.")
@click.option("--export", "file", metavar="FILE.json", help="Write ranked candidates as a bundle.")
@click.option("--best", type=int, default=5, show_default=True, help="How many, for --export.")
@click.option(
    "--seconds",
    type=float,
    default=120.0,
    show_default=True,
    help="Give up on a config after this.",
)
@click.option("--jobs", type=int, metavar="N", help="Compilers at the same time.")
@options.imports
@options.with_state
def check(
    state: State,
    name: str | None,
    wanted: tuple[str, ...],
    lower_only: bool,
    ask: bool,
    file: str | None,
    best: int,
    seconds: float,
    jobs: int | None,
    modules: tuple[str, ...],
) -> int:
    """Compile every config of a function's operations for TPU and CUDA devices, without them.

    Without MODULE:FUNCTION (see `ejkernel tune --help`): list the targets, and what they need. Ends
    with 1 if an operation has no config that compiles for a target.
    """
    if name is None:
        return _list(state, ask)
    if not wanted:
        raise click.UsageError(
            "say for which device: --target tpu-v5e; `ejkernel check` lists them"
        )
    if file is not None and lower_only:
        raise click.UsageError("--export ranks by what compilers say; leave out --lower-only")
    targets = _targets(wanted, lower_only)
    with working(f"loading {name}"):
        import_modules(modules)
        found = operations_of(load(name).lower(), name)
    from ..targets import TargetError, export
    from ..targets import check as check_call

    results: list[CheckResult] = []
    data: list[dict[str, Any]] = []
    shown: list[str] = []
    for target, inv in itertools.product(targets, invocations_of(found)):
        call = {"target": target.name, "op_id": inv.key.op_id, "signature": inv.signature}
        try:
            with working(f"{inv.full_op_id} for {target.name}"):
                result = check_call(
                    inv, target=target, compile=not lower_only, seconds=seconds, jobs=jobs
                )
        except TargetError as error:
            reason = in_one_line(error).removeprefix("TargetError: ")
            shown.append(f"{inv.full_op_id}({inv.signature}) for {target.name}: {reason}")
            data.append({**call, "error": reason, "configs": []})
            continue
        results.append(result)
        shown.append(str(result))
        data.append({**call, "configs": [entry.to_plain() for entry in result.entries]})
    shown += [f"{skip.label}: not checked: {skip.reason}" for skip in skipped_of(found)]
    feasible = [result for result in results if result.feasible]
    if file is not None and results:
        bundle = export(feasible, file, best=best)
        shown.append(f"{len(bundle)} calls with their {best} best candidates written to {file}")
    state.result({"checks": data, "export": file}, "\n\n".join(shown))
    return Exit.OK if len(feasible) == len(data) else Exit.NOT_WELL


def _targets(wanted: tuple[str, ...], lower_only: bool) -> list[Target]:
    from ..targets import TargetError, available, find, names
    from ..targets.compiler import missing

    if "all" in wanted:
        return [find(name) for name in names()] if lower_only else list(available().usable)
    try:
        targets = [find(name) for name in wanted]
    except TargetError as error:
        raise click.UsageError(f"--target: {error}") from error
    for target in targets:
        lacking = "" if lower_only else missing(target.platform)
        if lacking:
            raise Failure(
                f"target {target.name} cannot be compiled for here: {lacking}. With --lower-only "
                "nothing is needed",
                Exit.MISSING,
            )
    return targets


def _list(state: State, ask: bool) -> int:
    from ..targets import available

    found = available(ask=ask)
    data = [
        {
            "target": entry.target.name,
            "device": entry.target.device_name,
            "fingerprint": entry.target.device_fingerprint,
            "usable": entry.usable,
            "compiler": entry.compiler,
            "lacking": entry.lacking,
        }
        for entry in found
    ]
    shown = found._shown()
    state.result(data, table(shown.header, shown.rows), *shown.notes)
    return Exit.OK
