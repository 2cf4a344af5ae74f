"""What compilers write down about a kernel, read into numbers.

libtpu dumps the final schedule of every kernel: VLIW bundles, one per cycle, with the loops they
stand in, and how much VMEM it takes. XLA's GPU compiler leaves the PTX and the launch dimensions;
`ptxas -v` on that PTX says registers and spills, and the size of the code section in its output
says how many machine instructions there are.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

_SASS_BYTES = 16  # one machine instruction, from compute capability 7.0 on
_PTXAS_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Loop:
    """Instructions by the loop they stand in; those of inner loops are in `inner`.

    Attributes:
      own: bundles or instructions of this loop's body that stand in no loop further inside.
      inner: the loops inside, in program order.
    """

    own: int = 0
    inner: tuple[Loop, ...] = ()

    @property
    def total(self) -> int:
        """Every instruction once."""
        return self.own + sum(loop.total for loop in self.inner)


@dataclasses.dataclass(frozen=True)
class KernelFigures:
    """One kernel of a compiled program. What a toolchain does not tell is None.

    Attributes:
      name: as the compiler calls it.
      code: scheduled bundles (TPU) or PTX instructions (CUDA), as a tree of loops.
      instructions: bundles, or machine instructions if `ptxas` was there, else PTX ones.
      units: of a TPU's bundles, the share that uses each unit: `{"MXU": 0.4, …}`.
      vmem_bytes: of VMEM, windows and scratch.
      shared_bytes: shared memory per block.
      registers: per thread.
      spilled_bytes: of registers, to memory.
      threads: per block.
      blocks: of the launch.
    """

    name: str
    code: Loop
    instructions: int
    units: dict[str, float] = dataclasses.field(default_factory=dict)
    vmem_bytes: int | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    threads: int | None = None
    blocks: int | None = None


def loop_from_plain(plain: dict[str, Any]) -> Loop:
    """What `dataclasses.asdict` made of a loop, back again."""
    return Loop(int(plain["own"]), tuple(map(loop_from_plain, plain["inner"])))


def loop_tree(count: int, ranges: Iterable[tuple[int, int]]) -> Loop:
    """A tree of `count` instructions from its loops: the first and the last one of each."""
    inside = sorted(set(ranges), key=lambda span: (span[0], -span[1]))

    def build(first: int, last: int, spans: Sequence[tuple[int, int]]) -> Loop:
        inner: list[Loop] = []
        taken = 0
        while spans:
            start, end = spans[0]
            within = [span for span in spans[1:] if span[1] <= end]
            inner.append(build(start, end, within))
            taken += end - start + 1
            spans = [span for span in spans[1:] if span[0] > end]
        return Loop(last - first + 1 - taken, tuple(inner))

    return build(0, count - 1, inside)


# --- TPU -----------------------------------------------------------------------------------------

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?\s*:\s(>*)", re.MULTILINE)
_NOT_KERNELS = ("TLP", "<late-")


def read_tpu_dump(folder: pathlib.Path) -> list[KernelFigures]:
    """The kernels of the one program whose dump is in a folder."""
    vmem = _vmem_by_kernel(folder)
    found = []
    for file in sorted(folder.glob("*-02-final_bundles.txt")):
        name = file.name.removesuffix("-02-final_bundles.txt").partition("-")[2]
        if name.startswith(_NOT_KERNELS):
            continue
        code = tpu_code(file.read_text(encoding="utf-8", errors="replace"))
        used = file.name.replace("02-final_bundles", "00-final_hlo-static-per-bundle-utilization")
        utilisation = file.with_name(used)
        units = unit_shares(utilisation.read_text()) if utilisation.exists() else {}
        size, spilled = vmem.get(name, (None, None))
        found.append(KernelFigures(name, code, code.total, units, size, spilled_bytes=spilled))
    return found


def tpu_code(text: str) -> Loop:
    """The bundles of a final schedule, by loop.

    `LB` marks the first bundle of a loop, and `>` how deep it is. Other bundles carry the depth of
    the instruction that stands in them first, which may come from further outside: a loop ends
    with the last bundle that is as deep as its first.
    """
    bundles = [(len(match[2]), match[1] == "LB") for match in _BUNDLE.finditer(text)]
    ends: dict[int, int] = {}
    for start, depth in ((i, depth) for i, (depth, begins) in enumerate(bundles) if begins):
        ends[start] = start
        for index, (other, begins) in enumerate(bundles[start + 1 :], start + 1):
            if begins and other <= depth:
                break
            if other >= depth:
                ends[start] = index
    return loop_tree(len(bundles), ends.items())


def unit_shares(text: str) -> dict[str, float]:
    """Of each unit's slots in all bundles, the share that is used."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line.startswith("MXU")), None)
    if start is None or len(lines) <= start + 1:
        return {}
    names = [name.strip() for name in lines[start].split(",")]
    capacity = [int(number) for number in lines[start + 1].split()]
    rows = [line.split() for line in lines[start + 2 :] if line[0].isdigit()]
    if not rows:
        return {}
    used = [sum(int(row[i]) for row in rows) for i in range(len(names))]
    return {
        name: round(use / (slots * len(rows)), 4)
        for name, use, slots in zip(names, used, capacity, strict=True)
    }


def _vmem_by_kernel(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Bytes of VMEM of each kernel, and of those the spilled ones."""
    found: dict[str, tuple[int, int]] = {}
    for file in folder.glob("*-vmem_report.html"):
        match = re.search(r"const DATA\s*=\s*", text := file.read_text(errors="replace"))
        if match is None:
            continue
        try:
            data, _ = json.JSONDecoder().raw_decode(text, match.end())
            for name, used in data["hlo_breakdowns"].items():
                allocations = [a for block in used["blocks"] for a in block.get("allocations", ())]
                spilled = sum(a["size"] for a in allocations if "SPILL" in a.get("tag", "").upper())
                found[name] = (int(used["total_size"]), int(spilled))
        except (ValueError, KeyError, TypeError):
            continue  # another libtpu, another report: the figure is missing, nothing else is
    return found


# --- CUDA ----------------------------------------------------------------------------------------

_LAUNCH = re.compile(
    r"k(?:Custom)?Kernel\b.*?\] (?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] "
    r"threads: \[(?P<threads>[\d, ]+)\]\s+shared_memory: (?P<shared>\d+)"
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)^\}", re.MULTILINE | re.DOTALL)
_LABEL = re.compile(r"^(\$?[\w$]+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$?[\w$]+);")


def read_cuda_dump(folder: pathlib.Path) -> list[KernelFigures]:
    """The kernels of the one program whose dump is in a folder."""
    texts = (file.read_text() for file in folder.glob("*.thunk_sequence.txt"))
    launches = [match for text in texts for match in _LAUNCH.finditer(text)]
    codes: dict[str, Loop] = {}
    assembled: dict[str, dict[str, int]] = {}
    for file in sorted(folder.glob("*.ptx")):
        text = file.read_text()
        entries = {match[1]: ptx_code(match[2]) for match in _ENTRY.finditer(text)}
        if entries:
            codes.update(entries)
            assembled.update(assemble(file, text))
    return [
        _cuda_kernel(launch, codes[launch["name"]], assembled.get(launch["name"], {}))
        for launch in launches
        if launch["name"] in codes
    ]


def _cuda_kernel(launch: re.Match[str], code: Loop, figures: dict[str, int]) -> KernelFigures:
    return KernelFigures(
        launch["name"],
        code,
        figures.get("instructions", code.total),
        shared_bytes=int(launch["shared"]) + figures.get("static_shared", 0),
        registers=figures.get("registers"),
        spilled_bytes=figures.get("spilled"),
        threads=math.prod(map(int, launch["threads"].split(","))),
        blocks=math.prod(map(int, launch["grid"].split(","))),
    )


def ptx_code(text: str) -> Loop:
    """The instructions of a PTX function, by loop: a branch back to a label closes one."""
    labels: dict[str, int] = {}  # label -> number of the instruction after it
    loops: dict[int, int] = {}  # first instruction -> last instruction
    count = 0
    for line in map(str.strip, text.splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = count
        if line.endswith(";") and not line.startswith("."):
            if (branch := _BRANCH.search(line)) and branch[1] in labels:
                loops[labels[branch[1]]] = count
            count += 1
    return loop_tree(count, loops.items())


def assemble(file: pathlib.Path, text: str) -> dict[str, dict[str, int]]:
    """What `ptxas` says about each kernel of a PTX file; nothing if it is not there."""
    ptxas = find_ptxas()
    architecture = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    if ptxas is None or architecture is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        binary = pathlib.Path(folder) / "kernel.cubin"
        command = [ptxas, "-v", f"-arch={architecture[1]}", str(file), "-o", str(binary)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PTXAS_SECONDS, check=False
        )
        if done.returncode != 0:
            return {}
        figures = ptxas_figures(done.stderr + done.stdout)
        for name, size in code_sections(binary.read_bytes()).items():
            figures.setdefault(name, {})["instructions"] = size // _SASS_BYTES
    return figures


def find_ptxas() -> str | None:
    """Where `ptxas` is: in the package nvidia-cuda-nvcc, else on the PATH.

    The package comes first: it is as new as the plugin, whose PTX an older `ptxas` cannot read.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = pathlib.Path(folder) / "cu13" / "bin" / "ptxas"
        if file.is_file():
            return str(file)
    return shutil.which("ptxas")


_PTXAS_FIGURES = {
    "registers": r"Used (\d+) registers",
    "spilled": r"(\d+) bytes spill stores",
    "static_shared": r"(\d+) bytes smem",
}


def ptxas_figures(text: str) -> dict[str, dict[str, int]]:
    """Registers, spilled bytes and static shared memory by kernel, from `ptxas -v`."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in text.splitlines():
        if compiling := re.search(r"Compiling entry function '([^']+)'", line):
            name = compiling[1]
            found[name] = {}
        for field, pattern in _PTXAS_FIGURES.items():
            if name and (match := re.search(pattern, line)):
                found[name][field] = int(match[1])
    return found


def code_sections(elf: bytes) -> dict[str, int]:
    """The sizes of the code sections of a 64-bit ELF file: `.text.<kernel>`."""
    if elf[:5] != b"\x7fELF\x02":
        return {}
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    names = [elf[names_at + header[0] :].split(b"\0", 1)[0] for header in headers]
    return {
        name.removeprefix(b".text.").decode(errors="replace"): header[5]
        for name, header in zip(names, headers, strict=True)
        if name.startswith(b".text.")
    }
