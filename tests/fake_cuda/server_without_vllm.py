"""In place of ``coordexp serve``: a server that takes weights as vLLM's worker does, and always gives the same answer;
and in place of NCCL, which needs GPUs: a transfer within this process. Real are the trainer's side of both, HTTP, the
group's rendezvous, and the receiver."""

from __future__ import annotations

import queue
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from engine_without_vllm import WRITTEN, ModelWithoutVLLM

from coordexp.coords import serialize_objects
from coordexp.engine.wire.protocol import ENVELOPE, InferRequest, PromptBuilder, envelope_of
from coordexp.modeling.load import load_processor, load_vocab
from coordexp.weight_sync import WeightVersion
from coordexp.weight_sync.receiver import WeightReceiver
from support.fake_servers import FakePushServer
from support.tiny_run import tiny_checkpoint

TRANSFER_S = 60.0


class ServerWithoutVLLM(FakePushServer):
    """``device``: of its weights; the trainer's own, whose GPU a real server would not share. ``guarded``: whether it
    says that its repeat guard is active."""

    guarded = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(dtype="bfloat16")
        self.device, checkpoint = device, tiny_checkpoint()
        self.model = ModelWithoutVLLM(checkpoint, torch.bfloat16, device)
        self.receiver = WeightReceiver(self.model, device, sharded=False)
        self.processor, vocab = load_processor(checkpoint), load_vocab(checkpoint)
        self.answer = [*vocab.encode_answer(serialize_objects(WRITTEN)), vocab.eos_id]

    @property
    def pushes(self) -> int:
        return self.asked.count("/process_weights_after_loading/")

    def _status(self) -> dict[str, Any]:
        return {**super()._status(), "device": str(self.device)}

    def _act(self, path: str, body: Any) -> Any:
        return [self._infer(one) for one in body["infer_requests"]] if path == "/infer/" else super()._act(path, body)

    def _infer(self, body: Any) -> dict[str, Any]:
        request, report = InferRequest.model_validate(body), self.receiver.report()
        prompt = PromptBuilder(self.processor).build(request)
        ids = self.processor(text=[prompt["prompt"]], images=prompt["multi_modal_data"]["image"])["input_ids"][0]
        choice = {"finish_reason": "stop", "token_ids": self.answer}
        weights = WeightVersion(report["weight_version"], report["trainer_id"])
        return {
            "response": {"choices": [choice], "prompt_token_ids": [int(token) for token in ids]},
            ENVELOPE: envelope_of(weights, guarded=self.guarded, triggered=False, uuid=request.uuid),
        }


class NcclWithoutGPUs:
    """The methods of vLLM's ``PyNcclCommunicator`` that a weight group calls. Members are threads of this process."""

    parts: ClassVar = defaultdict[bytes, queue.Queue[torch.Tensor]](queue.Queue)  # on their way, by group

    def __init__(self, unique_id: bytes, rank: int) -> None:
        self._parts, self._rank = self.parts[unique_id], rank

    @classmethod
    def from_unique_id_bytes(cls, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Any:
        assert world_size == 2 and device.type == "cuda", "one worker and the trainer"
        return cls(unique_id, rank)

    def broadcast(self, part: torch.Tensor, source: int, stream: Any) -> None:
        assert part.device.type == "cuda", "NCCL carries memory of GPUs"
        if self._rank == source:
            self._parts.put(part.clone())
        else:
            part.copy_(self._parts.get(timeout=TRANSFER_S))

    def destroy(self) -> None: ...


class UniqueIds:
    """The method of vLLM's ``NCCLLibrary`` that a weight group calls."""

    made = 0

    def ncclGetUniqueId(self) -> Any:
        UniqueIds.made += 1
        return SimpleNamespace(internal=UniqueIds.made.to_bytes(16, "big"))


@contextmanager
def servers_without_vllm(count: int, device: torch.device) -> Iterator[list[ServerWithoutVLLM]]:
    """``count`` servers, as long as the context is open."""
    binding = "vllm.distributed.device_communicators"
    modules: dict[str, Any] = {
        f"{binding}.pynccl": SimpleNamespace(PyNcclCommunicator=NcclWithoutGPUs),
        f"{binding}.pynccl_wrapper": SimpleNamespace(NCCLLibrary=UniqueIds),
    }
    with patch.dict(sys.modules, modules), ExitStack() as open_ones:
        servers = [ServerWithoutVLLM(device) for _ in range(count)]
        for one in servers:
            open_ones.callback(one.close)
        yield servers
