"""What compilers write is read right: schedules, PTX, `ptxas -v`, ELF; and what follows from it."""

from __future__ import annotations

import json
import struct

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from target_kernels import Matmul, Tile

from ejkernel import targets
from ejkernel.targets import figures, ranking
from ejkernel.targets.figures import Loop
from ejkernel.targets.lowering import Launch, Program, Trips, lower
from ejkernel.targets.worker import reason_of

BUNDLES = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %7 = vsyncpa [#allocation3], 0 }
   0x1   :  { %s9 = smov 0 }
   0x2 LB: > { %s545_s13 = sadd.s32 4294967295, %s505_s12 }
   0x3   : > { %s549_s15 = sadd.s32 1 }
   0x4 LB: >> { %4576 = vst [vmem:[#allocation21_spill] sm:$0xff] }
   0x5   : >> { %4577 = vst }
   0x6 LB: >> { %4578 = vst }
   0x7   : > { %p85_p3 = scmp.ne.s32 }
   0x8   :  {}
"""

PTX = """\
.version 9.0
.target sm_90a
.visible .entry mm(
	.param .u64 .ptr .align 16 mm_param_0
)
.reqntid 128, 1, 1
{
	.reg .b32 	%r<794>;

	ld.param.b64 	%rd73, [mm_param_0];
	mov.u32 	%r641, %ctaid.x;
$L__BB0_1:
	add.s32 	%r1, %r1, 1;
$L__BB0_2:
	mul.lo.s32 	%r2, %r1, 3;
	setp.lt.s32 	%p1, %r2, 5;
	@%p1 bra 	$L__BB0_2;
	@%p5 bra 	$L__BB0_1;
	@%p6 bra 	$L__BB0_3;
	st.global.b32 	[%rd1], %r2;
$L__BB0_3:
	ret;
}
"""

PTXAS = """\
ptxas info    : Compiling entry function 'mm' for 'sm_90a'
ptxas info    : Function properties for mm
    8 bytes stack frame, 744 bytes spill stores, 800 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem
"""


def test_tpu_bundles_by_loop():
    code = figures.tpu_code(BUNDLES)
    assert code == Loop(3, (Loop(3, (Loop(2), Loop(1))),))
    assert code.total == 9


def test_bundles_that_carry_an_outer_instruction_are_still_in_the_loop():
    marked = BUNDLES.replace("0x5   : >>", "0x5   : >", 1)  # between two bundles of the loop
    marked = marked.replace("0x6 LB: >>", "0x6   : >>", 1)
    assert figures.tpu_code(marked) == Loop(3, (Loop(3, (Loop(3),)),))


def test_tpu_dump_of_a_kernel(tmp_path):
    (tmp_path / "17-mm.1-02-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17-TLP-02-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17-mm.1-00-final_hlo-static-per-bundle-utilization.txt").write_text(
        "== CAPACTIY:\nMXU, XLU, VALU\n  4  2  1\n== UTILIZATION:\n4 0 1\n0 1 1\n"
    )
    data = {
        "hlo_breakdowns": {
            "mm.1": {
                "total_size": 1000,
                "blocks": [
                    {"allocations": [{"size": 900, "tag": "x"}, {"size": 100, "tag": "SPILL"}]}
                ],
            }
        }
    }
    (tmp_path / "17-TLP-03-vmem_report.html").write_text(f"<script>const DATA ={json.dumps(data)};")
    (kernel,) = figures.read_tpu_dump(tmp_path)
    assert (kernel.name, kernel.instructions) == ("mm.1", 9)
    assert (kernel.vmem_bytes, kernel.spilled_bytes) == (1000, 100)
    assert kernel.units == {"MXU": 0.5, "XLU": 0.25, "VALU": 1.0}


def test_an_unknown_vmem_report_costs_only_its_figure(tmp_path):
    (tmp_path / "17-mm.1-02-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17-TLP-03-vmem_report.html").write_text("const DATA = {nonsense")
    (kernel,) = figures.read_tpu_dump(tmp_path)
    assert kernel.vmem_bytes is None
    assert kernel.instructions == 9


def test_ptx_by_loop(tmp_path):
    (entry,) = figures._ENTRY.finditer(PTX)
    code = figures.ptx_code(entry[2])
    assert code.inner == (Loop(2, (Loop(3),)),)
    assert code.total == 10


def test_cuda_dump_without_ptxas(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "find_ptxas", lambda: None)
    (tmp_path / "module_1.jit.1.ptx").write_text(PTX)
    (tmp_path / "module_1.jit.2.ptx").write_text("\n")
    (tmp_path / "module_1.jit.thunk_sequence.txt").write_text(
        "001: kCustomKernel [source | sink] mm grid: [32, 2, 1] threads: [128, 1, 1]  "
        "shared_memory: 98304 bytes\n"
    )
    (kernel,) = figures.read_cuda_dump(tmp_path)
    assert (kernel.blocks, kernel.threads, kernel.shared_bytes) == (64, 128, 98304)
    assert (kernel.registers, kernel.instructions) == (None, 10)


def test_what_ptxas_says():
    assert figures.ptxas_figures(PTXAS) == {
        "mm": {"registers": 255, "spilled": 744, "static_shared": 16}
    }


@pytest.mark.skipif(figures.find_ptxas() is None, reason="there is no ptxas")
def test_machine_instructions_are_counted(tmp_path):
    file = tmp_path / "a.ptx"
    file.write_text(
        ".version 8.0\n.target sm_80\n.address_size 64\n"
        ".visible .entry add(.param .u64 p)\n{\n.reg .b64 %rd<3>;\n.reg .f32 %f<3>;\n"
        "ld.param.u64 %rd1, [p];\ncvta.to.global.u64 %rd2, %rd1;\nld.global.f32 %f1, [%rd2];\n"
        "add.f32 %f2, %f1, %f1;\nst.global.f32 [%rd2], %f2;\nret;\n}\n"
    )
    found = figures.assemble(file, file.read_text())["add"]
    assert 5 <= found["instructions"] <= 64
    assert 1 <= found["registers"] <= 32


def test_an_elf_that_is_none_has_no_code():
    assert figures.code_sections(b"nonsense" * 20) == {}
    assert figures.code_sections(b"\x7fELF\x01" + struct.pack("<60B", *[0] * 60)) == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "JaxRuntimeError: RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested "
            "393216, available: 232448, context: []",
            "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 393216, available: "
            "232448, context: []",
        ),
        (
            "JaxRuntimeError: RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of "
            "memory in memory space vmem while allocating on stack for %mm.1 = f32[4096,4096]{1,0:"
            "T(8,128)} custom-call(%x.1), frontend_attributes={kernel_metadata={}}, "
            'metadata={op_name="jit(f)/mm/pallas_call" '
            "stack_frame_id=2}. Scoped allocation with size 64.00M and limit 16.00M exceeded "
            "scoped vmem limit by 48.00M. It should not be possible.\nSee https://openxla.org",
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack "
            "for the kernel. Scoped allocation with size 64.00M and limit 16.00M exceeded scoped "
            "vmem limit by 48.00M. It should not be possible.",
        ),
        ("ValueError: the block shape must be even\nmore", "the block shape must be even"),
        ("", ""),
    ],
)
def test_a_compilers_message_in_reason_of(text, line):
    assert reason_of(text) == line


# --- from figures to an estimate -----------------------------------------------------------------


def _program(**launch):
    given = {"name": "mm", "steps": 10, "times": 1, "loops": (), **launch}
    return Program(b"", {}, (Launch(**given),), flops=1, bytes=1, touched=1)


def _kernel(code, **more):
    import dataclasses

    return dataclasses.asdict(figures.KernelFigures("mm.1", code, code.total, **more))


def test_tpu_cycles_are_bundles_times_steps_times_trips():
    target = targets.find("tpu-v5e")
    code = figures.tpu_code(BUNDLES)  # 3 once, 3 per step, loops of 2 and of 1
    program = _program(loops=(Trips(4), Trips(5)))
    found = ranking.estimate(target, program, {"kernels": [_kernel(code)]})
    assert found.cycles == 3 + 10 * (3 + 4 * 2 + 5 * 1)
    assert found.seconds == pytest.approx(found.cycles / 1.5e9)
    assert (found.bound, found.notes) == ("schedule", ())


def test_loops_that_cannot_be_counted_are_said():
    target = targets.find("tpu-v5e")
    code = figures.tpu_code(BUNDLES)
    unknown = _program(loops=(Trips(0), Trips(5)))
    found = ranking.estimate(target, unknown, {"kernels": [_kernel(code)]})
    assert found.cycles == 3 + 10 * (3 + 2 + 5)
    assert "unknown number of times" in found.notes[0]
    other = ranking.estimate(target, _program(), {"kernels": [_kernel(code)]})
    assert other.cycles == 3 + 10 * 6
    assert "not those of the source" in other.notes[0]


def test_memory_binds_when_it_takes_longer():
    target = targets.find("tpu-v5e")
    program = _program(moved=10**9, loops=(Trips(1), Trips(1)))
    found = ranking.estimate(target, program, {"kernels": [_kernel(figures.tpu_code(BUNDLES))]})
    assert found.bound == "memory"
    assert found.seconds == pytest.approx(1e9 / target.bandwidth)


def test_a_gpu_reads_again_from_its_cache():
    target = targets.find("cuda-sm90")
    kernel = _kernel(Loop(1), threads=32, blocks=1, registers=32, shared_bytes=0)
    cached = ranking.estimate(target, _program(unique=10**6, loaded=10**9), {"kernels": [kernel]})
    assert cached.seconds == pytest.approx(1e9 / (2.5 * target.bandwidth))
    once = ranking.estimate(target, _program(unique=10**9, loaded=10**9), {"kernels": [kernel]})
    assert once.seconds == pytest.approx(1e9 / target.bandwidth)
    assert (cached.bound, once.bound) == ("memory", "memory")


def test_a_kernel_without_figures_has_no_estimate():
    assert ranking.estimate(targets.find("tpu-v4"), _program(), {"kernels": []}) is None


def test_cuda_cycles_follow_occupancy():
    target = targets.find("cuda-sm90")
    code = Loop(100)
    small = _kernel(code, threads=128, blocks=132 * 8, registers=32, shared_bytes=16 << 10)
    large = _kernel(code, threads=128, blocks=132 * 8, registers=32, shared_bytes=200 << 10)
    few = ranking.estimate(target, _program(), {"kernels": [large]})
    many = ranking.estimate(target, _program(), {"kernels": [small]})
    assert (many.occupancy, few.occupancy) == (13 * 128 / 2048, 128 / 2048)
    assert few.cycles == 8 * 100 * 8  # one block at a time, eight waves
    assert many.cycles == 1 * 100 * 8  # all eight at once
    assert many.seconds < few.seconds


def test_resident_blocks():
    gpu = targets.find("cuda-sm90").gpu
    assert ranking.resident_blocks(gpu, 128, 255, 0) == 2
    assert ranking.resident_blocks(gpu, 1024, None, None) == 2
    assert ranking.resident_blocks(gpu, 128, 32, 100 << 10) == 2
    assert ranking.resident_blocks(gpu, 128, 32, 300 << 10) == 1


# --- what the jaxpr says -------------------------------------------------------------------------


def test_a_lowered_program_knows_its_launch():
    kernel = Matmul("lowered_matmul")
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    y = jax.ShapeDtypeStruct((256, 384), jnp.float32)
    inv = kernel.bind(x, y)
    program = lower(kernel, inv, Tile(128, 128, 64), targets.find("tpu-v5e"))
    (launch,) = program.launches
    assert (launch.name, launch.steps, launch.times, launch.loops) == (
        "matmul_tpu",
        12,
        1,
        (Trips(2),),
    )
    assert program.flops == 2 * 512 * 256 * 384 + 2 * 512 * 384  # and each part is added
    tile = 128 * 256 * 4
    # x's block changes four times, y's at each of the twelve steps, and so does the output's.
    assert launch.moved == 4 * tile + 12 * tile + 12 * 128 * 128 * 4
    assert launch.loaded == 12 * (tile + tile + 128 * 128 * 4)
    assert launch.unique == 4 * (512 * 256 + 256 * 384 + 512 * 384)

    program = lower(kernel, inv, Tile(128, 128, 64), targets.find("cuda-sm90"))
    (launch,) = program.launches
    assert (launch.name, launch.loops) == ("matmul_gpu", (Trips(4),))


def test_launches_inside_loops_are_counted():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2.0

    def once(x):
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))(x)

    class Repeated(Matmul):
        def run_pallas(self, x, *, cfg):
            return jax.lax.scan(lambda c, _: (once(c), None), x, length=7)[0]

    kernel = Repeated("repeated")
    inv = kernel.bind(jax.ShapeDtypeStruct((8, 128), jnp.float32))
    program = lower(kernel, inv, Tile(), targets.find("tpu-v4"))
    assert [(launch.steps, launch.times) for launch in program.launches] == [(1, 7)]
    assert program.flops == 7 * 8 * 128
    assert not program.dynamic
