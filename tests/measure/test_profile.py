"""Profiles (lmsys/measure/profile.py) of functions whose kernels, parts and allocations are known.

A part is a range of code that the library marks with `part("name")`; a profile gives the time of its kernels, forward
and backward. NAMES has names of kernels, by the kind that `kind_of` must find for them.

Every kernel that the library launches has its kind, and is not "other". The kernels are found in the source: functions
with @triton.jit or @gluon.jit, and __global__ functions in .cu files. A new kernel is expected to have the kind of its
folder; to expect another, add its file or its name to KINDS_OF_FILES or KINDS_OF_KERNELS.
"""

import ast
import dataclasses
import importlib
import json
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lmsys.attention import ATTENTION
from lmsys.measure import profile
from lmsys.measure.profile import (
    KINDS,
    NUM_CALLS,
    call_in_ranges,
    kind_of,
    largest_allocations,
    merged,
    part,
    parts_on,
    profile_call,
    read_overlap,
    read_trace,
    register_kernels,
)
from lmsys.measure.step import Step
from lmsys.parallel import STRATEGIES
from lmsys.registry import Traits
from tests.support.harness import Telling, cases_of, records

NAMES = {  # as traces have them
    "matmul": [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_ke",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>(cutlass_80_tensorop_s1688ge",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>()",
        "triton_tem_fused_mm_0",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bf",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128,",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>:",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainlo",
        "triton_tem_fused_flex_attention_0",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*,",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFuncto",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >()",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>,",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, normal_an",
        "triton_poi_fused__to_copy_mul_silu_3",
        "triton_poi_fused__scaled_dot_product_flash_attention_mul_1",
        "aten::mul",
        "aten::add_",
        "aten::silu_backward",
        "aten::_foreach_addcdiv_",
        "aten::_fused_adamw_",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>()",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<8, float, float, float, SoftMaxForwardE",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, false, false>(float*, float",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>(int, float)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<",
        "triton_red_fused__softmax_div_2",
        "triton_per_fused_add_mean_mul_pow_rsqrt_5",
        "aten::sum",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::_log_softmax",
        "aten::_foreach_norm",
    ],
    "copy": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorItera",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<OpaqueType<2u>, unsigned in",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "aten::copy_",
        "aten::cat",
        "aten::index_select",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "Memcpy PtoP (Device -> Device)",
        "nccl:_all_gather_base",
        "gloo:all_reduce",
        "c10d::allreduce_",
        "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
    ],
    "other": ["aten::view", "aten::t", "aten::empty_strided", "aten::as_strided", "MulBackward0", "my_kernel"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_kernels_are_told_by_their_names(kind: str, name: str) -> None:
    assert kind_of(name) == kind and tuple(NAMES) == KINDS


LIBRARY = Path(__file__).parents[2] / "lmsys"
KINDS_OF_FOLDERS = {"attention": "attention", "parallel": "communication", "training": "elementwise"}
KINDS_OF_KERNELS = {"_whole_squares_kernel": "reduction"}
KINDS_OF_FILES = {
    "model/fused_triton.py": "elementwise",
    "model/loss_triton.py": "reduction",
    "training/muon_triton.py": "matmul",
}


def is_jit(decorator: ast.expr) -> bool:
    """triton.jit or gluon.jit, with arguments or without."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (
        isinstance(called, ast.Attribute) and called.attr == "jit" and ast.unparse(called.value) in ("triton", "gluon")
    )


@cache
def jitted() -> dict[str, list[ast.FunctionDef]]:
    """The functions that Triton or Gluon compiles, by file, relative to lmsys/."""
    by_file = {}
    for file in sorted(LIBRARY.rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        by_file[file.relative_to(LIBRARY).as_posix()] = [f for f in functions if any(map(is_jit, f.decorator_list))]
    return {file: functions for file, functions in by_file.items() if functions}


def launched() -> Iterator[tuple[str, str]]:
    """(file, kernel) of each kernel: the compiled functions that no other one calls, and the kernels in CUDA C++.

    A function whose name ends in "_kernel" counts as a kernel, even if another one calls it, too.
    """
    inside = [node for functions in jitted().values() for function in functions for node in ast.walk(function)]
    used = {node.id for node in inside if isinstance(node, ast.Name)}
    for file, functions in jitted().items():
        yield from ((file, f.name) for f in functions if f.name not in used or f.name.endswith("_kernel"))
    for path in sorted(LIBRARY.rglob("*.cu")):
        for name in re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", path.read_text()):
            yield path.relative_to(LIBRARY).as_posix(), f"{name}(Problem)"  # as a trace has it


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of all rows are registered, and, by an import, those of the files that register their own."""
    for file in jitted():
        if file.startswith(("model/", "training/")):
            pytest.importorskip("triton")
            importlib.import_module(f"lmsys.{file.removesuffix('.py').replace('/', '.')}")
    monkeypatch.setattr(profile, "_registered", dict(profile._registered))
    for table, kind in ((ATTENTION, "attention"), (STRATEGIES, "communication")):
        for row in table.values():
            register_kernels(Traits.of(row).kernels, kind)
    yield
    kind_of.cache_clear()


def test_kernels_are_found_in_the_source() -> None:
    files = {file for file, _ in launched()}
    assert {"attention/flash_cuda.cu", "attention/flash_triton_kernels.py", "parallel/mean_triton.py"} <= files
    assert {name for file, name in launched() if "flash_gluon" in file} == {
        "forward_kernel", "preprocess_kernel", "backward_kernel", "postprocess_kernel",
    }  # fmt: skip
    assert sum(file.endswith(".cu") for file, _ in launched()) == 3
    assert all(name.partition("(")[0].endswith("_kernel") for _, name in launched())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("file", "name"), [*launched()])
def test_every_kernel_of_the_library_has_its_kind(file: str, name: str) -> None:
    expected_kind = KINDS_OF_FILES.get(file, KINDS_OF_FOLDERS.get(file.partition("/")[0]))
    assert kind_of(name) == KINDS_OF_KERNELS.get(name, expected_kind)


def test_a_profile_knows_no_kernel_of_a_row_until_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_registered", {})
    kind_of.cache_clear()
    of_rows = [name for file, name in launched() if file.startswith(("attention/", "parallel/"))]
    assert {kind_of(name) for name in of_rows} == {"other"}


def test_registered_kernels_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_registered", {})
    assert (kind_of("my_gemm_kernel"), kind_of("my_own")) == ("matmul", "other")
    register_kernels("^my_", "attention")
    register_kernels("", "copy")  # a row without kernels of its own
    assert (kind_of("my_gemm_kernel"), kind_of("my_own"), kind_of("own")) == ("attention", "attention", "other")
    kind_of.cache_clear()
    with pytest.raises(ValueError, match=f"kind='convolution' must be one of {KINDS[0]}"):
        register_kernels("^my_", "convolution")


def model(x: Tensor, w: Tensor) -> Tensor:
    with part("layer"):
        with part("scores"):
            x = x @ w
        with part("softmax"):
            x = x.softmax(-1)
    return x


def test_a_profile_has_times_of_kernels_and_parts(tmp_path: Path, device: str) -> None:
    x = torch.randn(256, 256, device=device)
    w = torch.randn(256, 256, device=device, requires_grad=True)
    calls = []

    def call() -> None:
        calls.append(None)
        with part("forward"):
            loss = model(x, w).square().sum()
        with part("backward"):
            loss.backward()

    path = tmp_path / "new" / "trace.json"
    profiled = profile_call(call, device, steps=2, trace=path)
    assert len(calls) == 1 + 1 + 2
    assert json.loads(json.dumps(dataclasses.asdict(profiled))) == dataclasses.asdict(profiled)
    assert 0 < profiled.kernel_s <= profiled.profiled_s
    assert profiled.shares.keys() == set(KINDS) and sum(profiled.shares.values()) == pytest.approx(1)
    assert profiled.shares["matmul"] > 0 and profiled.shares["reduction"] > 0 and profiled.shares["communication"] == 0
    assert sum(k.total_s for k in profiled.kernels) == pytest.approx(profiled.kernel_s)
    assert [k.total_s for k in profiled.kernels] == sorted((k.total_s for k in profiled.kernels), reverse=True)
    assert sum(k.count for k in profiled.kernels if k.kind == "matmul") >= 2  # one forward, one backward
    parts = {p.name: p for p in profiled.parts}
    assert parts.keys() == {"forward", "backward", "layer", "scores", "softmax"}
    assert {p.count for p in profiled.parts} == {1}
    assert max(parts["scores"].kinds, key=parts["scores"].kinds.__getitem__) == "matmul"
    assert "matmul" not in parts["softmax"].kinds and parts["softmax"].backward_s > 0
    inner = parts["scores"], parts["softmax"]
    assert parts["layer"].total_s == pytest.approx(sum(p.total_s for p in inner))
    assert parts["layer"].backward_s == pytest.approx(sum(p.backward_s for p in inner))
    assert parts["layer"].backward_s <= parts["forward"].backward_s <= parts["backward"].total_s
    assert sum(parts["forward"].kinds.values()) == pytest.approx(parts["forward"].total_s)
    assert parts["forward"].total_s + parts["backward"].total_s <= profiled.kernel_s * 1.0001
    assert {"traceEvents", "displayTimeUnit"} <= json.loads(path.read_text()).keys()


def test_calls_that_warm_up_do_not_count() -> None:
    slow = iter([0.1, 0.1, 0.01, 0.01, 0.01])
    profiled = profile_call(lambda: time.sleep(next(slow)), "cpu")
    assert profiled.profiled_s >= 0.01 and next(slow, None) is None
    assert profiled.kernels == [] and profiled.kernel_s == 0


def test_kernels_too_short_for_the_clock_have_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 0, "tid": 1}]
    monkeypatch.setattr(profile, "_events_of", lambda *_: events)
    profiled = profile_call(lambda: None, "cpu")
    assert len(profiled.kernels) == 1 and profiled.kernel_s == 0 and set(profiled.shares.values()) == {0.0}


def test_a_trace_of_cuda_kernels_is_read() -> None:
    """Host thread 1 launches the forward, autograd's thread 2 the backward; kernels run long after their launch.

    A kernel's `correlation` leads to its launch, and by the launch's time and thread to its part. A "fwdbwd" pair, s to
    f, leads from a backward operator to the forward operator, in whose part the backward then counts. Two steps were
    recorded, so that times and counts are halved.
    """

    def complete(cat: str, name: str, tid: int, ts: float, dur: float, **args: int) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}

    gemm, softmax = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "triton_red_fused__softmax_0"
    events = [
        complete("user_annotation", "part: forward", 1, 0, 50),
        complete("user_annotation", "part: scores", 1, 0, 20),
        complete("user_annotation", "Optimizer.step#AdamW.step", 1, 0, 20),
        complete("cpu_op", "aten::mm", 1, 2, 10),
        complete("cuda_runtime", "cudaLaunchKernel", 1, 5, 2, correlation=1),
        complete("cuda_runtime", "cudaDeviceSynchronize", 1, 300, 2),
        complete("cuda_driver", "cuLaunchKernelEx", 1, 30, 2, correlation=2),
        complete("user_annotation", "part: backward", 1, 60, 100),
        complete("cpu_op", "MmBackward0", 2, 70, 20),
        complete("cuda_runtime", "cudaLaunchKernel", 2, 75, 2, correlation=3),
        complete("cuda_runtime", "cudaMemsetAsync", 2, 95, 2, correlation=4),
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 9, "pid": 0, "tid": 1, "ts": 2},
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": 9, "pid": 0, "tid": 2, "ts": 70, "bp": "e"},
        complete("kernel", gemm, 7, 200, 40, correlation=1),
        complete("kernel", softmax, 7, 240, 20, correlation=2),
        complete("kernel", gemm, 7, 260, 80, correlation=3),
        complete("gpu_memset", "Memset (Device)", 7, 340, 4, correlation=4),
        complete("kernel", "of_a_graph", 7, 350, 2),
        complete("gpu_user_annotation", "part: scores", 7, 200, 40),
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    kernels, parts = read_trace(events, "cuda", 2)
    assert [(k.name, k.kind, round(k.total_s * 1e6, 6), k.count) for k in kernels] == [
        (gemm, "matmul", 60, 1),
        (softmax, "reduction", 10, 0.5),
        ("Memset (Device)", "copy", 2, 0.5),
        ("of_a_graph", "other", 1, 0.5),
    ]
    times = {p.name: (round(p.total_s * 1e6, 6), round(p.backward_s * 1e6, 6), p.count) for p in parts}
    assert times == {"forward": (30, 40, 0.5), "scores": (20, 40, 0.5), "backward": (42, 0, 0.5)}
    assert {p.name: set(p.kinds) for p in parts}["backward"] == {"matmul", "copy"}


def test_operators_count_their_own_time_only() -> None:
    def operator(name: str, tid: int, ts: float, dur: float) -> dict:
        return {"ph": "X", "cat": "cpu_op", "name": name, "tid": tid, "ts": ts, "dur": dur}

    events = [
        operator("aten::linear", 1, 0, 10),
        operator("aten::addmm", 1, 1, 6),
        operator("aten::copy_", 1, 2, 2),
        operator("aten::t", 1, 7, 1),  # begins as its neighbour ends
        operator("aten::mul", 2, 3, 5),
    ]
    own_times = {k.name: round(k.total_s * 1e6, 6) for k in read_trace(events, "cpu", 1)[0]}
    assert own_times == {"aten::linear": 3, "aten::addmm": 4, "aten::copy_": 2, "aten::t": 1, "aten::mul": 5}


def test_parts_are_off_until_asked_for() -> None:
    def ranges() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            model(torch.ones(2, 2), torch.ones(2, 2))
        return sum(event.name.startswith(profile.PART) for event in recorded.events())

    assert ranges() == 0
    with parts_on():
        with parts_on():
            pass
        assert ranges() == 3
    assert ranges() == 0


def test_a_part_may_be_inside_of_itself() -> None:
    def deep(depth: int) -> int:
        with part("deep"):
            return 1 + deep(depth - 1) if depth else 0

    assert deep(3) == 3
    (only_part,) = profile_call(lambda: deep(3), "cpu").parts
    assert (only_part.name, only_part.count) == ("deep", 4)


def test_parts_end_where_a_part_fails() -> None:
    with parts_on(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        with pytest.raises(KeyError), part("fails"):
            raise KeyError
        with part("next"):
            pass
    first, second = (event.time_range for event in recorded.events() if event.name.startswith("part: "))
    assert first.end <= second.start


def test_parts_compile_away() -> None:
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = torch.randn(4, 4)
    assert torch.equal(compiled(x, x), model(x, x))
    with parts_on():
        compiled(x, x)
    assert (counter.frame_count, counter.op_count) == (1, 2)


def allocate(device: str) -> Tensor:
    x = torch.zeros(2**20, device=device)
    y = x + x
    del x
    return y * 2


def test_the_largest_allocations_name_their_lines(device: str) -> None:
    first = allocate.__code__.co_firstlineno
    allocations = largest_allocations(lambda: [allocate(device), torch.ones(2**19, device=device)], device, top=4)
    lines = {int(allocation.where.rpartition(":")[2]): allocation for allocation in allocations}
    assert [allocation.bytes for allocation in allocations] == [2**22] * 3 + [2**21]
    assert lines.keys() >= {first + 1, first + 2, first + 4}
    assert [lines[first + 1].at_peak, lines[first + 2].at_peak, lines[first + 4].at_peak] == [0, 1, 1]
    assert {allocation.function for allocation in allocations} == {"allocate", allocations[-1].function}
    assert all(a.where.startswith("tests/measure/test_profile.py:") and a.count == 1 for a in allocations), allocations


def test_allocations_of_one_line_are_counted_together(device: str) -> None:
    allocations = largest_allocations(lambda: [torch.zeros(2**18, device=device) for _ in range(3)], device)
    assert [(allocation.bytes, allocation.count, allocation.at_peak) for allocation in allocations] == [(2**20, 3, 3)]


def test_allocations_are_found_around_compiled_code() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, fullgraph=True, backend="aot_eager")
    x = torch.ones(2**18)
    compiled(x)
    assert largest_allocations(lambda: compiled(x), "cpu")[0].bytes == 2**20


def test_allocations_of_a_backward_name_its_node(device: str) -> None:
    x = torch.randn(2**18, device=device, requires_grad=True)
    allocations = largest_allocations(lambda: x.sin().sum().backward(), device, top=5)
    assert any("SinBackward" in allocation.function and allocation.bytes == 2**20 for allocation in allocations), (
        allocations
    )


def test_intervals_are_united() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)]) == [(0.0, 2.0), (3.0, 4.0)]
    assert merged([(0.0, 1.0), (1.5, 2.0)], gap=0.6) == [(0.0, 2.0)]


@pytest.mark.parametrize(("device", "category"), [("cpu", "cpu_op"), ("cuda", "kernel")])
def test_time_of_communication_and_its_overlap_are_those_of_the_trace(device: str, category: str) -> None:
    """Each of three steps of 1 ms has a matmul from 0 to 600 us and transfers from 450 to 650 us and 550 to 750 us.

    So something communicates for 300 us of a step, and for half of this time something computes, too. Two events of the
    trace count as neither: the call on the host that issues an all-reduce, and an event of metadata.
    """
    sends = {"cpu": ("user_annotation", "gloo:all_reduce"), "cuda": ("kernel", "ncclDevKernel_AllReduce")}[device]
    of_a_step = [(category, "aten::mm", 0.0, 600.0), (*sends, 450.0, 200.0), (*sends, 550.0, 200.0)]
    events: list[dict[str, Any]] = [
        {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": 0.0, "dur": 1000.0},
        {"ph": "M", "name": "meta"},
        *(
            {"cat": cat, "name": name, "ts": 10.0 + 1000.0 * number + begin, "dur": duration}
            for number in range(3)
            for cat, name, begin, duration in of_a_step
        ),
    ]
    overlap = read_overlap(events, device, steps=3)
    assert overlap.time_s == pytest.approx(300e-6) and overlap.overlap_fraction == pytest.approx(0.5)
    assert {what for what, _, _ in overlap.timeline} == {"communication", "computation"}
    assert 0 < max(end for _, _, end in overlap.timeline) <= 1e-3


def test_a_step_that_sends_nothing_has_no_overlap() -> None:
    overlap = read_overlap([{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5.0}], "cpu", steps=1)
    assert (overlap.time_s, overlap.overlap_fraction) == (0.0, None)
    assert read_overlap([], "cpu", steps=1).timeline == []


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of what happens, in order: beginnings and ends of NVTX ranges, and whatever a test appends."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    return log


def test_a_range_holds_the_call_and_nothing_else(happened: list[str]) -> None:
    step = Step(
        run=lambda prepared: happened.append(f"run {prepared}"),
        prepare=lambda: happened.append("prepare") or 7,
        before=lambda: happened.append("before"),
        redraw=lambda draw: happened.append(f"redraw {draw}"),
        redraw_late=lambda draw: happened.append(f"late {draw}"),
        keep=lambda result, key: happened.append(f"keep {key}"),
    )
    call_in_ranges("one-{case}", step, "cpu")
    of_the_range = ["push one-{case}", "run 7", "pop", "keep None"]
    assert happened == [
        event for i in range(NUM_CALLS) for event in ("before", f"redraw {i}", "prepare", f"late {i}", *of_the_range)
    ]


def test_a_range_ends_where_the_call_fails(happened: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        call_in_ranges("one-case", Step(lambda _: 1 / 0), "cpu")
    assert happened == ["push one-case", "pop"]


def test_every_case_is_called_in_ranges_of_its_id_and_none_is_timed(happened: list[str]) -> None:
    cases = cases_of(Telling())
    by_row = records(Telling(), cases, nvtx=True, timed=False)
    assert happened == [event for case in cases for _ in range(NUM_CALLS) for event in (f"push {case.id}", "pop")]
    for record in by_row.values():
        assert record["outcome"] == "ok" and record["reason"] == "called in NVTX ranges, not timed (--nvtx)"
        assert "time_s" not in record


def test_without_the_option_nothing_is_pushed(happened: list[str]) -> None:
    by_row = records(Telling(), cases_of(Telling()))
    assert not happened and all(record["time_s"] for record in by_row.values())


@pytest.mark.gpu
def test_cuda_kernels_are_profiled() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    profiled = profile_call(lambda: model(x, x), "cuda", steps=3)
    assert profiled.shares["matmul"] > profiled.shares["reduction"] > 0 == profiled.shares["other"]
    assert all(kernel.count == 1 for kernel in profiled.kernels), profiled.kernels
    assert 0 < profiled.kernel_s < profiled.profiled_s
