"""Clients: each wants one request answered, on whatever gateway is there, and keeps the history of what it was told."""

from __future__ import annotations

from simulation.nodes import Cluster, GatewayNode
from simulation.oracle import Spec

from kvern.block_hash import hash_prompt, join_hashes
from kvern.errors import KvernError
from kvern.rpc.packing import pack_i32
from kvern.v1 import error_pb2, session_pb2
from kvern_gateway.generation import Choice, Generation

RETRYABLE = (error_pb2.ERROR_CODE_UNAVAILABLE, error_pb2.ERROR_CODE_OVERLOADED)


class Caller:
    """The client of one request. It lives outside of all faults, as clients do: after a gateway's death it asks
    another one for the same request id, and takes up where it was (``Stream`` from an index)."""

    def __init__(self, cluster: Cluster, spec: Spec, cancel_after: float = -1.0, stop_at: int = -1) -> None:
        self.cluster, self.world, self.oracle = cluster, cluster.world, cluster.oracle
        self.spec = spec
        self.stop_at = stop_at
        """Choice 0 ends itself when it has this many tokens, as a stop string does; -1: never."""
        self.history: list[list[int]] = [[] for _ in range(spec.n)]
        self.finishes: list[session_pb2.Finished | None] = [None] * spec.n
        self.done = False
        self.num_calls = 0
        self.was_admitted = False
        self.gateway: GatewayNode | None = None
        self._call: Call | None = None
        self._cancel_after = cancel_after

    def begin(self) -> None:
        self._try()
        if self._cancel_after >= 0:
            self.world.after(self._cancel_after, self._cancel)

    def _try(self) -> None:
        """Asks a gateway that has a session, soon."""
        if self.done:
            return
        ready = [g for g in self.cluster.gateways if g.ready and not g.process.frozen]
        if not ready:
            self.world.after(0.02 + 0.05 * self.world.random.random(), self._try)
            return
        self.gateway = ready[int(self.world.random.random() * len(ready))]
        self.num_calls += 1
        self._call = Call(self, self.gateway)
        if self.spec.resumable:
            self.world.after(0.5, self._lose_patience, self._call)

    def _lose_patience(self, call: Call) -> None:
        """A frozen gateway says nothing: its client goes to another one, though it will be back."""
        if self.done or call is not self._call:
            return
        if call.process.frozen and self.world.random.random() < 0.4:
            self.world.note("client", f"{self.spec.request_id} gives {call.gateway.name} up")
            self.again(call)
        else:
            self.world.after(0.3, self._lose_patience, call)

    def again(self, call: Call) -> None:
        """That call has ended without an answer."""
        if call is self._call and not self.done:
            self._call = None
            if not self.spec.resumable:
                self.done = True  # it does not know more than that its connection broke
                return
            self.world.after(0.02 + 0.2 * self.world.random.random(), self._try)

    def _cancel(self) -> None:
        """The client has had enough. What it was told by now must be right; what becomes of the rest is open."""
        if not self.done:
            self.done = True
            if self._call is not None:
                self._call.cancel()

    def take(
        self, call: Call, choice: int, first: int, tokens: list[int], finish: session_pb2.Finished | None
    ) -> None:
        if call is not self._call or self.done:
            return
        name, history = f"{self.spec.request_id}.{choice}", self.history[choice]
        known = len(history) - first
        if known < 0:
            self.oracle.violated(f"{name}: token {first} came where {len(history)} was due")
            return
        if tokens[:known] != history[first : first + len(tokens)][: len(tokens[:known])]:
            self.oracle.violated(f"{name}: tokens from {first} on differ from those said before")
        history += tokens[known:]
        if history != self.spec.outputs[choice][: len(history)]:
            self.oracle.violated(f"{name}: the client was told {history}")
        self.world.note("client", f"{name} has {len(history)} tokens{'' if finish is None else ', the end'}")
        if finish is not None:
            self._finish(choice, finish)

    def _finish(self, choice: int, finish: session_pb2.Finished) -> None:
        name, known = f"{self.spec.request_id}.{choice}", self.finishes[choice]
        if (
            known is not None
            and known.reason
            and (known.reason, known.num_output_tokens)
            != (
                finish.reason,
                finish.num_output_tokens,
            )
        ):
            self.oracle.violated(f"{name}: two different ends")
        if finish.num_output_tokens != len(self.history[choice]):
            self.oracle.violated(
                f"{name}: ended after {finish.num_output_tokens} tokens, the client has {len(self.history[choice])}"
            )
        self.oracle.check_finish(self.spec, choice, finish, self.world.time())
        self.finishes[choice] = finish
        self.done = all(self.finishes)

    def failed(self, call: Call, error: KvernError) -> None:
        if call is not self._call or self.done:
            return
        if error.code in RETRYABLE and not (
            "lost with its scheduler" in error.message and self.spec.resumable
        ):
            self.again(call)
            return
        if self.oracle.forgets and "no such request" in error.message:
            self.done = True
            return
        self.oracle.violated(f"{self.spec.request_id}: failed with {error.message}")
        self.done = True


class Call:
    """One attempt at one gateway. The generation lives in the gateway's process, and dies with it."""

    def __init__(self, caller: Caller, gateway: GatewayNode) -> None:
        self.caller, self.gateway, self.process = caller, gateway, gateway.process
        self.generation: Generation | None = None
        self._stopped = False
        self._finished: set[int] = set()
        self.process.at_death.append(lambda: caller.again(self))
        self.process.call(self._start)

    def _start(self) -> None:
        spec, client = self.caller.spec, self.gateway.client
        assert client is not None
        submit = session_pb2.Submit(
            request_id=spec.request_id,
            body_digest=spec.request_id.encode(),
            prompt_token_ids=pack_i32(spec.prompt),
            params=spec.params,
            n=spec.n,
            block_hashes=join_hashes(hash_prompt(spec.prompt, self.caller.cluster.sim.block_size)),
            priority=spec.priority,
            resumable=spec.resumable,
            resumes=any(self.caller.history),
            deadline_unix_ms=int(spec.deadline * 1000),
        )
        try:
            self.generation = client.submit(submit)
        except KvernError as error:
            self.caller.failed(self, error)
            return
        self.generation.attach_sink(self)

    def flush(self, choice: Choice) -> None:
        first, taken = choice.take()
        tokens = list(taken)
        caller = self.caller
        if choice.index in self._finished:
            caller.oracle.violated(f"{caller.spec.request_id}.{choice.index}: more after the end")
        if choice.finished is not None:
            self._finished.add(choice.index)
        self._check_logprobs(choice, first, tokens)
        caller.take(self, choice.index, first, tokens, choice.finished)
        if not self._stopped and choice.index == 0 and 0 <= caller.stop_at <= len(caller.history[0]):
            self._stopped = True
            if not choice.done and self.generation is not None:
                self.generation.stop(choice)
            caller.finishes[0] = caller.finishes[0] or session_pb2.Finished()  # by its own doing
            caller.done = all(caller.finishes)

    def _check_logprobs(self, choice: Choice, first: int, tokens: list[int]) -> None:
        """They come with their tokens; those of the prompt before the first token of choice 0."""
        params, violated = self.caller.spec.params, self.caller.oracle.violated
        name = f"{self.caller.spec.request_id}.{choice.index}"
        if params.HasField("logprobs"):
            for index, token in enumerate(tokens, first):
                entry = choice.logprobs.pop(index, None)
                if entry is None or entry.token_id != token or len(entry.top_token_ids) != params.logprobs:
                    violated(f"{name}: the log-probabilities of token {index} are wrong: {entry}")
        if params.HasField("prompt_logprobs") and choice.index == 0 and first == 0 and tokens:
            told = [(i, entry.token_id) for i, entry in sorted(choice.prompt_logprobs.items())]
            if told != list(enumerate(self.caller.spec.prompt))[1:]:
                violated(f"{name}: log-probabilities of the prompt, with its first token: {told}")

    def fail(self, error: KvernError) -> None:
        self.caller.failed(self, error)

    def cancel(self) -> None:
        if self.process.alive:
            self.process.call(lambda: self.generation and self.generation.cancel())
