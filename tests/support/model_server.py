"""A server on loopback behind which a tiny model answers: greedily, and with log-probs of prompts.

Completions take token ids, and repeat them with their log-probs in the shape of vLLM's answers.
"""

import threading
from contextlib import contextmanager

import torch
from transformers import AutoTokenizer

from align.schemas.config import ModelOptions
from align.stages.model.load import load_causal_lm
from support.chat_server import OF_CHAT, ChatServer


class ModelServer(ChatServer):
    """Serves a folder, with an adapter if one is named."""

    def __init__(self, folder, adapter="", **settings):
        super().__init__(None, **settings)
        options = ModelOptions(path=str(folder), adapter=str(adapter), device="cpu")
        self.network, self.gate = load_causal_lm(options), threading.Lock()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def reply(self, asked, fault):
        with self.gate, torch.inference_mode():
            return self._reply(asked)

    def _reply(self, asked):
        body = asked.body
        ids = body.get("prompt")
        if asked.path == OF_CHAT:
            how = {"add_generation_prompt": True, "return_dict": False}
            ids = self.tokenizer.apply_chat_template(body["messages"], **how)
        elif isinstance(ids, str):
            ids = self.tokenizer(ids)["input_ids"]
        limit = {"do_sample": False, "max_new_tokens": body["max_tokens"]}
        every = self.network.generate(torch.tensor([ids]), **limit)
        made = every[0, len(ids) :].tolist()
        text = self.tokenizer.decode(made, skip_special_tokens=True)
        has_stopped = made[-1] == self.tokenizer.eos_token_id
        choice = {"index": 0, "finish_reason": "stop" if has_stopped else "length", "text": text}
        if asked.path == OF_CHAT:
            choice["message"] = {"role": "assistant", "content": text}
        if body.get("echo"):
            logps = self.network(every).logits.log_softmax(-1)[0, :-1]
            own = logps.gather(1, every[0, 1:, None])[:, 0].tolist()
            choice["logprobs"] = {"token_logprobs": [None, *own]}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(made)}
        return {"model": self.model, "choices": [choice], "usage": usage}


@contextmanager
def model_server(folder, adapter="", **settings):
    """A ModelServer that listens."""
    stub = ModelServer(folder, adapter, **settings)
    stub.start()
    try:
        yield stub
    finally:
        stub.stop()
