"""Worker processes that stay alive: :func:`run_in_workers` gives them one job after another.

They are forked from the test process, which has already imported everything. So the first job of a session waits for a
tenth of a second, and not for the imports of four processes. A job with two workers uses the first two. Each job
opens a process group and closes it. A worker that dies or hangs ends the pool, and the next job starts a new one.

:func:`start_workers` is for workers that must die, or that a test observes while they run.
"""

import contextlib
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.multiprocessing as mp

from rapidformer_templates.switches.zero.compiled_parts import ask_processor_once
from rapidformer_templates.system.launch import reserved_port
from rapidformer_templates.system.workers import Workers, join
from tests.support import stand_in

GRACE = 5.0
"""Seconds that the other workers of a job get after one has failed. They may wait for it in a collective."""

LIMIT = 240.0
"""Longest time of a job in seconds."""

LARGEST = 1.0e9
"""Bytes by which a worker may grow. Compiled graphs and pinned memory stay until it ends."""

MOST_THREADS = 40
"""Threads that an idle worker may have. torch and DeepSpeed keep the groups of earlier jobs, and a thread of each group
wakes up 100 times per second."""

PRELOADED = (
    "datasets", "deepspeed", "deepspeed.module_inject", "deepspeed.module_inject.auto_ep_layer", "deepspeed.moe.utils",
    "deepspeed.runtime.superoffload.superoffload_stage3", "fairscale.nn.data_parallel", "networkx", "onnxruntime",
    "onnxscript", "peft", "peft.utils.transformers_weight_conversion", "rich.console",
    "torch._dynamo.backends.debugging", "torch._dynamo.backends.inductor", "torch._inductor.compile_fx",
    "torch.distributed.fsdp", "torch.distributed.tensor.experimental", "torch.export._trace",
    "torch.fx.experimental.validator", "torch.onnx._internal.exporter._core", "torch.onnx._internal.fx.passes",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "rapidformer_templates.run.fit",
    "rapidformer_templates.switches.checkpoint_activations.transform",
    "rapidformer_templates.switches.flash_attention.kernels", "rapidformer_templates.switches.fsdp.engine",
    "rapidformer_templates.switches.fused_loss.transform", "rapidformer_templates.switches.layout.context_attention",
    "rapidformer_templates.switches.layout.pipeline_engine", "rapidformer_templates.switches.layout.tensor",
    "rapidformer_templates.switches.lora.transform", "rapidformer_templates.switches.onnx_runtime.transform",
    "rapidformer_templates.switches.oss.engine", "rapidformer_templates.switches.zero.engine",
    "tests.support.combinations", "tests.support.parallel_jobs",
)  # fmt: skip
"""Modules that take seconds to import. Packages that are not installed are skipped."""

PRELOADED_FOR_DEVICES = (
    "pytest", "fairscale.nn.data_parallel", "torch.distributed.fsdp", "torch.distributed.tensor",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "rapidformer_templates.run.fit",
    "rapidformer_templates.switches.oss.engine", "rapidformer_templates.switches.fsdp.engine",
    "rapidformer_templates.switches.layout.pipeline_engine", "tests.support.stand_in.runs",
)  # fmt: skip
"""Modules that workers on accelerators need and that take seconds to import."""

FSYNC = os.fsync
"""The real ``os.fsync``."""

FAST_RUNS = mock.patch.multiple("os", fsync=lambda descriptor: None)
"""Replaces ``os.fsync``, because short runs are slow if they wait for the disk."""

WITHOUT_RETRIES = mock.patch("rapidformer_templates.system.files.RETRY_SECONDS", ())
"""Lets saves fail at once. Tests of retries have their own pauses."""

WITHOUT_PICTURES = mock.patch("rapidformer_templates.run.console.draw_curves")
"""Turns off drawing, which takes half of the time of a test's short run. Commands in other processes still draw."""


@dataclass
class Failure:
    """How a worker's job ended if it did not return.

    Attributes:
        kind: class name of the exception.
        text: message of the exception.
        trace: its stack trace.
    """

    kind: str
    text: str
    trace: str = ""


class WorkerError(Exception):
    """A worker of :func:`run_in_workers` raised an exception, died or hung."""


def run_in_workers(count: int, function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """Run ``function(workers, *arguments)`` in ``count`` workers and return their results by rank.

    Args:
        count: at most four.
        device: the kind of device that they compute on. Each worker has its own device.

    Raises:
        WorkerError: with the stack trace of the first worker that failed.
    """
    results = outcomes_in_workers(count, function, *arguments, device=device)
    failures = [result for result in results if isinstance(result, Failure)]
    if failures:
        failure = next((f for f in failures if f.trace), failures[0])
        raise WorkerError(f"{failure.kind}: {failure.text}\n{failure.trace}")
    return results


def outcomes_in_workers(count: int, function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """Do the same as :func:`run_in_workers`, but return a :class:`Failure` for each worker that failed."""
    global _pool
    if _pool.device != device:
        _pool.end()
        _pool = WorkerPool(device)
    return _pool.run(count, function, *arguments)


def end_pool() -> None:
    """End the pool before other workers start, to have few processes at a time. The next job starts a new pool."""
    _pool.end()


def end_fork_server() -> None:
    """End the server process that forks workers on accelerators, and these workers.

    Python has one such server per process. It imports only what its first user asks for, so without this the pool
    would fork from the server of another test, and each worker would import everything again.
    """
    if _pool.device != "cpu":
        _pool.end()
    server: Any = importlib.import_module("multiprocessing.forkserver")
    server._forkserver._stop()


@dataclass
class WorkerPool:
    """Up to four workers. Use the functions of this module, which share one pool."""

    device: str
    _processes: list[Any] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    """Memory of each worker when it started. It shares most of this memory with this process."""

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result or the :class:`Failure` of each rank."""
        self._start(count)
        with reserved_port() as port:
            job = (count, port, dict(os.environ), function, arguments)
            for pipe in self._pipes[:count]:
                pipe.send(job)
            results: list[Any] = [Failure("TimeoutError", "the worker did not come back")] * count
            waiting, deadline = dict(zip(self._pipes[:count], range(count), strict=True)), time.monotonic() + LIMIT
            while waiting and time.monotonic() < deadline:
                for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                    rank = waiting.pop(pipe)  # type: ignore[arg-type]
                    try:
                        results[rank] = self._pipes[rank].recv()
                    except EOFError:
                        results[rank] = Failure("EOFError", "the worker has died")
                    if isinstance(results[rank], Failure):
                        deadline = min(deadline, time.monotonic() + GRACE)
        self._show_stacks(waiting.values())
        # Workers that all returned the same error are in step. Otherwise one may wait in a collective. A failure on an
        # accelerator may have left work on its streams.
        kinds = {result.kind if isinstance(result, Failure) else "" for result in results}
        in_doubt = self.device != "cpu" and kinds != {""}
        if len(kinds) > 1 or kinds & {"EOFError", "TimeoutError"} or in_doubt or self._is_worn():
            self.end()
        return results

    def _show_stacks(self, ranks: Collection[int]) -> None:
        """Let workers that have not come back write on standard error what they are doing."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.5 if ranks else 0)

    def _start(self, count: int) -> None:
        """Start workers until there are at least ``count``."""
        if len(self._processes) >= count:
            return
        forks = self.device == "cpu"
        if forks:
            _preload()
            _prepare_fork()
        context = multiprocessing.get_context("fork") if forks else _starter(self.device)
        for rank in range(len(self._processes), count):
            here, there = context.Pipe()
            inherited = [*self._pipes, here] if forks else []
            process = context.Process(target=_serve, args=(rank, self.device, there, inherited), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
            self._sizes.append(_memory_of(process))

    def _is_worn(self) -> bool:
        """Whether a worker has grown by more than :data:`LARGEST`, or has more than :data:`MOST_THREADS`."""
        return any(
            _memory_of(process) - size > LARGEST or psutil.Process(process.pid).num_threads() > MOST_THREADS
            for process, size in zip(self._processes, self._sizes, strict=True)
        )

    def end(self) -> None:
        """End the workers. An idle one ends when its pipe closes. Any other gets SIGKILL."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=2.0)
            process.kill()
            process.join()
        self._processes, self._pipes, self._sizes = [], [], []


def _memory_of(process: Any) -> int:
    """Return the bytes that belong to no file. An exact count of private bytes would have to walk over all pages."""
    memory = psutil.Process(process.pid).memory_info()
    return int(memory.rss - memory.shared)


_pool = WorkerPool("cpu")


def _starter(device: str) -> Any:
    """Return a context that starts workers on accelerators.

    Accelerators do not work in a fork of a process that has looked for one, or that has run a backward without one,
    because torch counts the devices only once. So workers on the stand-in are forked from a server process that has
    imported what they need. These imports look for a GPU, so workers on GPUs import everything themselves.
    """
    if device != stand_in.NAME:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED_FOR_DEVICES))
    return context


@cache
def _preload() -> None:
    """Import what workers need, query the processor, and hide all of it from the garbage collector.

    Otherwise each full collection in a worker would write to pages that all processes share.
    """
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ask_processor_once()
    with contextlib.suppress(ImportError):
        cpuinfo: Any = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info()
    gc.collect()
    gc.freeze()


def _prepare_fork() -> None:
    """Free the process groups of this process.

    Their threads do not exist in a fork. A fork that freed one, even as garbage of a reference cycle, would wait for
    these threads forever or crash.
    """
    leave_group()
    _forget_meshes()
    gc.collect()


def leave_group() -> None:
    """Close a process group that this process has opened."""
    if torch.distributed.is_initialized():
        # DeepSpeed keeps copies of the group. It forgets them only if it closes the group itself.
        deepspeed: Any = sys.modules.get("deepspeed.comm.comm")
        (deepspeed if deepspeed and deepspeed.cdb is not None else torch.distributed).destroy_process_group()


def _serve(rank: int, device: str, pipe: Connection, of_others: list[Connection]) -> None:
    """Run one job after another until the test process closes the pipe."""
    for other in of_others:
        other.close()
    faulthandler.register(signal.SIGUSR2, file=2)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # runs start loaders
    if device == stand_in.NAME:
        stand_in.load()
    is_first = True
    with FAST_RUNS, WITHOUT_PICTURES, WITHOUT_RETRIES:
        while True:
            try:
                count, port, environment, function, arguments = pipe.recv()
            except EOFError:
                return
            become_worker(rank, count, port, environment)
            if device == "cuda" and count > torch.cuda.device_count():
                os.environ.update(_on_one_gpu(rank))
            _number_anew()
            if not is_first:
                _forget_meshes()
            is_first = False
            result = outcome(_in_group, device, function, *arguments)
            try:
                pipe.send(result)
            except BaseException as error:  # the result cannot be pickled
                pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))


def _on_one_gpu(rank: int) -> dict[str, str]:
    """Return the environment in which NCCL lets several ranks share the first GPU.

    It refuses two ranks of one host on a device, and a host is what ``NCCL_HOSTID`` says. The ranks then exchange
    over sockets, so this shows what is right, and not how fast it is.
    """
    hosts = {"LOCAL_RANK": "0", "NCCL_HOSTID": f"one-gpu-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "2"}
    return hosts | {f"NCCL_{name}_DISABLE": "1" for name in ("P2P", "SHM", "IB")} | {"NCCL_NVLS_ENABLE": "0"}


def _number_anew() -> None:
    """Make DeepSpeed number modules and parameters from 0 again.

    Its workers compare these numbers, and some workers have done more jobs than others.
    """
    parameters: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    modules: Any = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if parameters and modules:
        parameters.Init.param_id = 0
        (count,) = inspect.unwrap(modules.DeepSpeedZeRoOffload._register_deepspeed_module).__defaults__
        count[0] = 0


def _forget_meshes() -> None:
    """Empty the caches of DTensor. They confuse a mesh of this job with an equal one of an earlier, closed job."""
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()


def _in_group(device: str, function: Callable[..., Any], *arguments: Any) -> Any:
    # These workers already form a group, so the launcher must not handle their errors.
    with join(device) as workers, mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        return function(workers, *arguments)


def alone() -> Workers:
    """Return the only worker of a run without a process group."""
    return Workers(0, 0, 1, torch.device("cpu"))


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and return its result, or a :class:`Failure` if it raised."""
    try:
        return function(*arguments)
    except BaseException as error:
        return Failure(type(error).__name__, str(error), traceback.format_exc())


def become_worker(rank: int, count: int, port: int, environment: Mapping[str, str]) -> None:
    """Make a process one of ``count`` workers that meet at ``port``.

    Args:
        environment: the test process's current environment. A worker of the pool has an older one.
    """
    os.environ.clear()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({**environment, **{name: str(value) for name, value in (ranks | meeting).items()}})
    torch.set_num_threads(1)


def new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a process that runs a function when it is started. It is forked from this one, so it has its imports."""
    end_pool()
    _prepare_fork()
    return multiprocessing.get_context("fork").Process(target=_on_one_thread, args=(function, *arguments))


def _on_one_thread(function: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)  # the threads of this process do not exist in a fork
    with WITHOUT_PICTURES:
        function(*arguments)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with reserved_port() as port:
        return port


def start_workers(
    count: int, folder: str, function: Callable[..., Any], *arguments: Any, method: str = "fork"
) -> mp.ProcessContext:
    """Start ``count`` new workers and return without waiting. Each writes its result to ``folder/RANK.pickle``.

    Args:
        method: start method. Workers of ``spawn`` share no memory with this process and need seconds for their imports.
    """
    end_pool()
    if method == "fork":
        _preload()
        _prepare_fork()
    details = (count, free_port(), folder, dict(os.environ), function, arguments)
    return mp.start_processes(_work_once, details, nprocs=count, join=False, start_method=method)


def _work_once(
    rank: int,
    count: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    become_worker(rank, count, port, environment)
    with WITHOUT_PICTURES, join("cpu") as workers:
        result = function(workers, *arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))
