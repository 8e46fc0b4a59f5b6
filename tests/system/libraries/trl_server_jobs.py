"""TRL's GRPO with vLLM in its server mode, unmodified, on ranks; HTTP, the communicator and vLLM are stand-ins.

The server generates by itself with the weights that it was sent. What of vLLM TRL imports is made up by `install`.
"""

from __future__ import annotations

import importlib
import queue
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from models import full_weights, llama, section
from ranks import attempt
from trainer_jobs import _arguments, _characters

WAIT = 60  # seconds, of one end of the communicator for the other


class Server:
    """vLLM behind its HTTP routes, on rank 0.

    Attributes:
        model: which generates; syncs: how many have ended; how: what goes wrong next: "refuses", "breaks" after a few
            tensors, or "sleeps".
    """

    def __init__(self):
        self.model, self.wire, self.syncs, self.how = llama(vocab=128, seed=7), queue.Queue(), 0, None
        self._sampling = torch.Generator().manual_seed(0)

    def request(self, route, json=None):
        if self.how == "refuses":
            raise ConnectionError("connection refused")
        names = {"/v1/models": {"data": [{"id": "model"}]}, "/reset_prefix_cache": {"success": True}}
        names["/server_info"] = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
        if route == "/update_weights":
            self._take(**json["update_info"])
        if route == "/finish_weight_update":
            self.syncs += 1
        if route == "/v1/completions":
            return {"choices": [self._completed(ids, json) for ids in json["prompt"] for _ in range(json["n"])]}
        return names.get(route, {})

    def broadcast(self, number, tensor):
        """The trainer's end of the communicator."""
        if self.how == "breaks" and number == 5:
            raise ConnectionError("the communicator is gone")
        self.wire.put(tensor.clone())

    def _take(self, names, dtype_names, shapes):
        if self.how == "sleeps":
            time.sleep(1.0)
        if self.how == "breaks":
            raise ConnectionError("the communicator is gone")
        held = self.model.state_dict()
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            came = self.wire.get(timeout=WAIT)
            assert (str(came.dtype), list(came.shape)) == (f"torch.{dtype}", shape)
            held[name].copy_(came)

    @torch.no_grad()
    def _completed(self, prompt, asked):
        ids, chosen = list(prompt), []
        for _ in range(asked["max_tokens"]):
            logprobs = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._sampling))
            chosen.append((token, float(logprobs[token])))
            ids.append(token)
        names = [f"token_id:{token}" for token, _ in chosen]
        of_tokens = {"tokens": names, "token_logprobs": [p for _, p in chosen], "top_logprobs": [{}] * len(chosen)}
        return {"prompt_token_ids": list(prompt), "token_ids": [token for token, _ in chosen], "logprobs": of_tokens}


def install(server):
    """Make what TRL imports of vLLM, import TRL anew, and let its client reach the server."""

    def module(name, **names):
        made = sys.modules[name] = ModuleType(name)
        made.__path__, made.__spec__ = [], ModuleSpec(name, None)
        vars(made).update(names)

    def broadcast_all(iterator, group, src, post_iter_func):
        for number, item in enumerate(iterator):
            group.broadcast(number, post_iter_func(item))

    module("vllm", __version__="0.31.0", LLM=None, RequestOutput=None, SamplingParams=None)
    for name in ("utils", "distributed", "distributed.weight_transfer"):
        module(f"vllm.{name}")
    module("vllm.sampling_params", StructuredOutputsParams=None)
    module("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1")
    module("vllm.distributed.weight_transfer.nccl_common", trainer_init=lambda init_info: server)
    module("vllm.distributed.weight_transfer.packed_tensor", packed_nccl_broadcast_producer=broadcast_all)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]
    client = importlib.import_module("trl.generation.vllm_client")

    def asked(url, json=None, **_):
        body = server.request("/" + url.split("/", 3)[3], json)
        return SimpleNamespace(status_code=200, headers={}, text="", json=lambda: body)

    session = SimpleNamespace(get=asked, post=asked, mount=lambda *_: None)
    client.requests = SimpleNamespace(Session=lambda: session, get=asked, exceptions=client.requests.exceptions)
    client.VLLMClient.init_communicator = lambda self, device: vars(self).update(communicator=server)  # needs CUDA
    client.VLLMClient.close_communicator = lambda self: None


def colocated():
    """vLLM in this process, which on rank 0 fails before it takes weights."""

    def wake_up(tags):
        if dist.get_rank() == 0:
            raise ConnectionError("no memory to wake up in")

    model = SimpleNamespace(load_weights=lambda named: None)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    return SimpleNamespace(llm_engine=engine, wake_up=wake_up, reset_prefix_cache=lambda: None)


def train_with_a_server(folder, recipe):
    """Of three steps: whether the server had the trainer's bits each time it generated; losses; and of syncs that fail.

    {how it goes wrong: (what is said, what the next one says, equal then)}
    """
    server = Server()
    install(server)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    same = []

    def equal():
        weights = full_weights(trainer.accelerator.unwrap_model(trainer.model))
        held = server.model.state_dict()
        return dist.get_rank() > 0 or all(torch.equal(held[name], weight) for name, weight in weights.items())

    def reward(completions, **columns):
        same.append((server.syncs, equal()))
        return [float(completion.count("7")) + len(completion) / 10 for completion in completions]

    arguments = _arguments(section(recipe), folder, steps=3)
    trainer = GRPOTrainer(
        model=llama(vocab=128),
        reward_funcs=reward,
        args=GRPOConfig(
            bf16=False,
            learning_rate=1e-2,
            beta=0.0,
            num_generations=2,
            max_completion_length=6,
            use_vllm=True,
            vllm_mode="server",
            **arguments,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n} is "} for n in range(1, 65)]),
        processing_class=_characters(),
    )
    trainer.train()
    losses = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    sync, found = trainer.vllm_generation.sync_weights, {}
    for how in ("refuses", "breaks", "sleeps"):
        server.how = how
        said = attempt(sync)
        server.how, server.wire = None, queue.Queue()
        server.model = llama(vocab=128, seed=8)  # started again
        found[how] = said, attempt(sync), equal()
    generation = trainer.vllm_generation
    generation.mode, generation.enable_sleep_mode, generation.llm = "colocate", True, colocated()
    found["early"] = attempt(sync)
    return same, losses, found
