"""What tests ask a server for, and what an undisturbed server would have said."""

from itertools import chain

from align.schemas.round_options import ServerOptions
from align.schemas.samples import Prompt, Refused, SampleRequest
from align.stages.server.server_sampler import ServerSampler
from support.chat_server import Reply


def echo(asked):
    """An answer that follows from all that a sample should follow from; one in three is cut."""
    finish = "length" if asked.seed % 3 == 0 else "stop"
    return Reply(f"to {asked.last} {asked.seed} {asked.body['temperature']}", finish)


def options_of(stub, **more):
    usual = {"url": stub.url, "model": stub.model, "revision": "one", "timeout": 20.0}
    return ServerOptions(**(usual | more))


def sampler_of_stub(stub, count_tokens=None, **more):
    return ServerSampler(options_of(stub, **more), count_tokens)


def chat(text):
    return Prompt(({"role": "system", "content": "be brief"}, {"role": "user", "content": text}))


def wanted_of(prompts, n):
    return [SampleRequest(prompt, tuple(range(n))) for prompt in prompts]


def collected(groups):
    """Samples by prompt and number, and what was refused; none may come twice."""
    samples, refused = {}, []
    for one in chain.from_iterable(groups):
        if isinstance(one, Refused):
            refused.append(one)
        else:
            assert (one.prompt, one.number) not in samples
            samples[one.prompt, one.number] = one
    return samples, refused
