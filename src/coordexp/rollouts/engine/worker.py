"""The worker extension: what CoordExp adds to each vLLM worker, for ``coordexp serve`` and ``swift rollout`` alike.

vLLM mixes :class:`WeightSyncExtension` into its worker class (``worker_extension_cls``); its methods are what
``collective_rpc`` calls by name. Importing this module makes CPU engines keep their weights loadable, because the
extension is resolved before the model is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from coordexp.errors import RolloutError
from coordexp.rollouts.engine import checksum
from coordexp.rollouts.engine.buckets import TensorInfo, pieces, read_infos, unpack
from coordexp.rollouts.engine.communicator import Communicator, GroupAddress, join
from coordexp.rollouts.engine.cpu import DIE_WITH_PARENT, keep_weights_loadable
from coordexp.rollouts.engine.guard_processor import guard_of_worker, guard_report
from coordexp.rollouts.engine.layout import WeightLayout
from coordexp.rollouts.engine.lifetime import die_with_owner

EXTENSION = "coordexp.rollouts.engine.worker.WeightSyncExtension"
TIMEOUT_VARIABLE = "COORDEXP_COMMUNICATOR_TIMEOUT_S"
ADAPTER_ID = 1
ADAPTER_NAME = "coordexp"
ADAPTER_PATH = "adapter-in-memory"  # vLLM wants one; it is never read

keep_weights_loadable()


@dataclass(slots=True)
class PushState:
    """The push under way, and what the last ones did."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    received_hashes: dict[str, int] = field(default_factory=dict)
    adapter_names: list[str] = field(default_factory=list)
    open: bool = False
    version: int = 0
    pushes: int = 0
    base_overwritten: bool = False  # full weights came at least once: an adapter for the checkpoint no longer fits
    checksum: str | None = None
    failure: str | None = None
    received_bytes: int = 0
    receive_s: float = 0.0
    load_s: float = 0.0


class WeightReceiver:
    """One worker's end of weight pushes; knows the model, not vLLM.

    A bucket is loaded in the background while the next one arrives, so an error of loading shows at the next call.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, *, sharded: bool) -> None:
        self.layout = WeightLayout.of(model)
        self.state = PushState()
        self._model = model
        self._device = device
        self._sharded = sharded  # tensor parallel: no worker holds a whole tensor to read back
        self._group: Communicator | None = None
        self._source = -1
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-weights")
        self._loading: Future[None] | None = None

    def open(self, address: GroupAddress) -> None:
        """Join a weight group whose last rank sends. A group that is still open belongs to a learner of the past: it is
        torn down, not waited for."""
        self.close()
        self._group = join(address, self._device)
        self._source = address.world_size - 1

    def close(self) -> None:
        """Leave the group; a push that was under way is lost, and its weights stay half-loaded."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._loading = None
        if self.state.open:
            self.record_failure("the learner left in the middle of a push")
        self.state.open = False

    def receive(self, payload: Sequence[Mapping[str, Any]]) -> None:
        """Receive one bucket of full weights and start to load it."""
        with _recorded(self.record_failure):
            infos = read_infos(payload)
            self._expect([(info.name, info.shape) for info in infos])
            self._load_behind(self.receive_tensors(infos))

    def take(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load full weights that are in this process already. They must not change before :meth:`commit` returns."""
        with _recorded(self.record_failure):
            self._expect([(name, tuple(tensor.shape)) for name, tensor in named])
            self._load_behind(named)

    def receive_adapter(self, payload: Sequence[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
        """Receive the tensors of an adapter."""
        with _recorded(self.record_failure):
            infos = read_infos(payload)
            self.begin()
            return self.receive_tensors(infos)

    def receive_tensors(self, infos: Sequence[TensorInfo]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of one bucket, from the group's source."""
        if self._group is None:
            raise RolloutError("no weight group is open; call /init_communicator/ first")
        started = time.perf_counter()
        bytes_N = torch.empty(infos[-1].end_idx, dtype=torch.uint8, device=self._device)
        for piece in pieces(infos):
            self._group.broadcast(bytes_N[infos[piece[0]].start_idx : infos[piece[-1]].end_idx], self._source)
        self.state.receive_s += time.perf_counter() - started
        self.state.received_bytes += infos[-1].end_idx
        return unpack(bytes_N, infos)

    def commit(self, version: int | None, wants_checksum: bool, finish: Callable[[], None]) -> dict[str, Any]:
        """End a push: everything loaded, everything covered; ``finish`` lets vLLM lay the weights out anew.

        Args:
            version: what these weights are called from now on; None counts on.
            wants_checksum: read the parameters back and sum them.

        Raises:
            RolloutError: nothing was pushed, loading failed, or weights are missing. The old version is gone too.
        """
        state = self.state
        with _recorded(self.record_failure):
            if not state.open:
                raise RolloutError(state.failure or "no push is under way")
            self._finish_loading()
            if not state.adapter_names:
                self.layout.check_complete(state.shapes)
            finish()
            state.checksum = self._checksum() if wants_checksum else None
            state.version = state.version + 1 if version is None else version
            state.pushes += 1
            state.base_overwritten |= not state.adapter_names
            state.open = False
            state.failure = None
            return self.report()

    def report(self) -> dict[str, Any]:
        """What a learner checks; JSON-able."""
        state = self.state
        return {
            "weight_version": state.version,
            "pushes": state.pushes,
            "base_overwritten": state.base_overwritten,
            "push_open": state.open,
            "failure": state.failure,
            "checksum": state.checksum,
            "checksum_of": "received" if self._sharded else "parameters",
            "num_tensors": len(state.shapes),
            "received_bytes": state.received_bytes,
            "receive_s": state.receive_s,
            "load_s": state.load_s,
            "communicator_open": self._group is not None,
        }

    def _expect(self, named_shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Note what a bucket holds, and refuse it before a byte of it is loaded."""
        self.begin()
        for name, shape in named_shapes:
            self.layout.place(name)
            if name in self.state.shapes:
                raise RolloutError(f"the learner sent {name!r} twice in one push")
            self.state.shapes[name] = shape

    def _load_behind(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._finish_loading()
        self._loading = self._loader.submit(self._load, tensors)

    def begin(self) -> None:
        """Open a push, if none is open."""
        if self.state.open:
            return
        last = self.state
        self.state = PushState(
            open=True,
            version=last.version,
            pushes=last.pushes,
            base_overwritten=last.base_overwritten,
            failure=last.failure,
        )

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        started = time.perf_counter()
        if self._sharded:
            self.state.received_hashes |= {name: checksum.tensor_hash(tensor) for name, tensor in tensors}
        with torch.no_grad():
            self._model.load_weights(list(tensors))  # pyright: ignore[reportCallIssue]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.state.load_s += time.perf_counter() - started

    def _finish_loading(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()

    def _checksum(self) -> str:
        if self.state.adapter_names and not self.state.shapes:
            return checksum.combined({})
        if self._sharded:
            return checksum.combined(self.state.received_hashes)
        read = self.layout.read_back(self.state.shapes)
        return checksum.combined({name: checksum.tensor_hash(tensor) for name, tensor in read})

    def record_failure(self, why: str) -> None:
        self.state.failure = why


@contextmanager
def _recorded(keep: Callable[[str], None]) -> Iterator[None]:
    """Keep the text of an error that leaves the block: ``swift rollout`` answers 200 whatever happens here."""
    try:
        yield
    except Exception as error:
        keep(f"{type(error).__name__}: {error}")
        raise


class WeightSyncExtension:
    """Methods that ``collective_rpc`` finds on every worker; arguments and results are plain JSON values."""

    # Of vLLM's worker, which this class is mixed into.
    model_runner: Any
    device: torch.device
    vllm_config: Any
    _weight_receiver: WeightReceiver | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> WeightSyncExtension:
        if os.environ.get(DIE_WITH_PARENT) == "1":
            die_with_parent()
        die_with_owner()
        return super().__new__(cls)

    @property
    def receiver(self) -> WeightReceiver:
        if self._weight_receiver is None:
            sharded = self.vllm_config.parallel_config.world_size > 1
            self._weight_receiver = WeightReceiver(self.model_runner.model, torch.device(self.device), sharded=sharded)
        return self._weight_receiver

    def init_communicator(
        self, host: str, port: int, world_size: int, first_rank: int | None = None, timeout_s: float | None = None
    ) -> None:
        """Join the weight group at ``host:port`` of ``world_size`` members, the learner being the last.

        Args:
            first_rank: rank of this engine's first worker; without it, ms-swift's variables tell.
            timeout_s: deadline of every wait in the group; without it, ``COORDEXP_COMMUNICATOR_TIMEOUT_S`` or 120.
        """
        from vllm.distributed.parallel_state import get_world_group

        if first_rank is None:
            first_rank = self._first_rank_of_swift()
        if timeout_s is None:
            timeout_s = float(os.environ.get(TIMEOUT_VARIABLE, "120"))
        rank = first_rank + get_world_group().rank
        self.receiver.open(GroupAddress(host, port, rank, world_size, timeout_s))

    def close_communicator(self) -> None:
        self.receiver.close()

    def update_flattened_params(self, metadatas: list[dict[str, Any]]) -> None:
        """Receive one bucket of full weights, under the names of the plain checkpoint."""
        self.receiver.receive(metadatas)

    def update_named_param(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Receive one tensor."""
        size = torch.Size(shape).numel() * getattr(torch, dtype.removeprefix("torch.")).itemsize
        bucket = {"name": name, "shape": list(shape), "dtype": dtype, "start_idx": 0, "end_idx": size, "numel": size}
        self.receiver.receive([bucket])

    def update_adapter_flattened_param(self, peft_config: dict[str, Any], metadatas: list[dict[str, Any]]) -> None:
        """Receive a LoRA adapter under PEFT's names; it takes the place of the one before."""
        self.take_adapter(peft_config, self.receiver.receive_adapter(metadatas))

    def take_adapter(self, peft_config: Mapping[str, Any], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Put a LoRA adapter that is in this process already in the place of the one before."""
        with _recorded(self.receiver.record_failure):
            self.receiver.begin()
            self.receiver.state.adapter_names += [name for name, _ in tensors]
            self._put_adapter(peft_config, tensors)

    def process_weights_after_loading(
        self, weight_version: int | None = None, wants_checksum: bool = False
    ) -> dict[str, Any]:
        """Commit the push; see :meth:`WeightReceiver.commit`."""
        return self.receiver.commit(weight_version, wants_checksum, self._finish_layouts)

    def get_state_keys(self) -> list[str]:
        """The engine's own parameter names."""
        return list(self.receiver.layout.parameters)

    def coordexp_status(self) -> dict[str, Any]:
        """This worker's state, for ``/status/``."""
        runner = type(self.model_runner)
        dtype = str(self.model_runner.model_config.dtype).removeprefix("torch.")
        return {
            **self.receiver.report(),
            "pid": os.getpid(),
            "device": str(self.device),
            "dtype": dtype,
            "model_runner": f"{runner.__module__}.{runner.__name__}",
            "repeat_terminate": guard_report(self),
        }

    def coordexp_pop_triggers(self, request_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Those of ``request_ids`` that the repeat guard ended, with its rule and step; each is reported once."""
        guard = guard_of_worker(self)
        found = {} if guard is None else guard.pop_triggers(request_ids)
        return {name: {"rule": one.rule.value, "num_new_tokens": one.num_new_tokens} for name, one in found.items()}

    def _finish_layouts(self) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        if self.receiver.state.shapes:
            process_weights_after_loading(self.model_runner.model, self.model_runner.model_config, self.device)
        if not self.receiver.state.adapter_names and self._has_adapter():
            self.model_runner.remove_lora(ADAPTER_ID)  # merged weights are whole without it

    def _has_adapter(self) -> bool:
        return self.vllm_config.lora_config is not None and ADAPTER_ID in self.model_runner.list_loras()

    def _put_adapter(self, peft_config: Mapping[str, Any], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        if self.vllm_config.lora_config is None:
            raise RolloutError(
                "this engine was started without adapters; set rollout_matching.vllm.enable_lora: true and restart the "
                "server, or push with sync.mode: full"
            )
        helper = PEFTHelper.from_dict(dict(peft_config))
        helper.validate_legal(self.vllm_config.lora_config)
        mapper = getattr(self.model_runner.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            dict(tensors),
            helper,
            device="cpu",
            dtype=self.vllm_config.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager = self.model_runner.lora_manager
        self._refuse_ignored_modules(adapter.loras, manager._adapter_manager.modules)
        manager._load_adapter = lambda _request: adapter  # vLLM itself reads adapters from disk only
        try:
            self.model_runner.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_PATH, load_inplace=True))
        finally:
            del manager._load_adapter

    def _refuse_ignored_modules(self, sent: Mapping[str, Any], adaptable: Mapping[str, Any]) -> None:
        """vLLM ignores adapters of modules that it did not wrap, the vision tower's above all."""
        fused = self.receiver.layout._fused
        for module in sent:
            parent, _, last = module.rpartition(".")
            whole = f"{parent}.{fused[last][0]}" if last in fused else module
            if whole not in adaptable:
                raise RolloutError(
                    f"the adapter changes {module}, which this engine cannot adapt: it would be ignored silently. "
                    "Push with sync.mode: full"
                )

    def _first_rank_of_swift(self) -> int:
        parallel = self.vllm_config.parallel_config
        replica = int(parallel.data_parallel_index) or int(os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0"))
        return replica * int(parallel.tensor_parallel_size)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)
